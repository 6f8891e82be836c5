"""Publishing: the part of a bus that sends messages, at once or for later."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Literal

from headrace.client._async.admin.subscriptions_schedules import AsyncSubscriptionScheduleAdmin
from headrace.client._async.concurrency import Timers
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.leasing.scheduled import AsyncScheduled
from headrace.client._async.producer.metadata_cache import AsyncMetadataCache
from headrace.client._async.producer.producer import AsyncProducer
from headrace.client._async.producer.transaction import AsyncTransaction
from headrace.client.connection.clock import Clock
from headrace.client.connection.weak_registry import WeakRegistry
from headrace.client.leasing.scheduled_times import MessageName, moment_of, parse_id
from headrace.client.producer.partitioning import Partitioner
from headrace.client.producer.pending_batch import AfterAck, BeforePublish, GivenHeaders
from headrace.client.producer.serializing import Serializer
from headrace.client.results import Receipt
from headrace.client.times import Moment, checked_seconds
from headrace.model.durability import Durability
from headrace.model.errors import Closed
from headrace.model.leasing import OWNER_HEADER


class AsyncPublishing(AsyncSubscriptionScheduleAdmin):
    """Publishes, and schedules."""

    def __init__(
        self,
        broker: AsyncReconnectingConnection,
        metadata_cache: AsyncMetadataCache,
        timers: Timers,
        clock: Clock,
        timeout: float,
    ) -> None:
        super().__init__(broker, metadata_cache)
        self._timers = timers
        """What calls things later, for all parts of the bus."""
        self.clock = clock
        """The broker's clock, as far as it is known here."""
        self._timeout = timeout
        self._closed = False
        self._producers: WeakRegistry[AsyncProducer] = WeakRegistry()
        self._own_producer: AsyncProducer | None = None

    # Publishing.

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        timestamp: Moment | None = None,
        due: Moment | None = None,
        priority: int | None = None,
        expires: Moment | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
        expected_offset: int | None = None,
    ) -> Receipt:
        """Publish a message, and wait for the broker's receipt.

        Parameters:
            topic: where to. The broker makes it if it is set up to.
            value: bytes; None marks the key as deleted. A producer with a serializer takes other values.
            key: messages with the same key go to the same partition, in order.
            headers: names to text or bytes.
            timestamp: the message's time, by default now; a datetime or microseconds since 1970.
            due: not to be delivered before this time (by subscriptions that heed it).
            priority: a whole number, for subscriptions that deliver by priority.
            expires: not to be delivered after this time.
            partition: where to, instead of by key.
            durability: what must be reached before the receipt: `memory`, `written` or `synced`; the topic's own if
                that is more.
            expected_offset: append only if the message gets this offset; else UnexpectedOffset is raised. Needs a
                partition, or a topic that has only one.

        Returns:
            Where the message is, and how safe.
        """
        return await self._shared_producer().publish(
            value,
            key,
            topic=topic,
            headers=headers,
            timestamp=timestamp,
            due=due,
            priority=priority,
            expires=expires,
            partition=partition,
            durability=durability,
            expected_offset=expected_offset,
        )

    async def publish_many(
        self,
        topic: str,
        values: Iterable[bytes],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        headers: Sequence[GivenHeaders | None] | None = None,
        timestamps: Sequence[Moment | None] | None = None,
        dues: Sequence[Moment | None] | None = None,
        priorities: Sequence[int | None] | None = None,
        expires: Sequence[Moment | None] | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
    ) -> list[Receipt]:
        """Publish messages in as few batches as can be, and wait for the receipts.

        Without keys all go to one partition, in order; the next call's go to the next partition.

        Parameters:
            topic: where to.
            values: the messages' values.
            keys: one for each value, or None where there is none; so are headers, timestamps, dues, priorities and
                expires.
            partition: where all of them go, instead of by key.
            durability: as for `publish`.

        Returns:
            A receipt for each partition that got messages; several for one where other producers' came between.
        """
        return await self._shared_producer().publish_many(
            values,
            keys,
            topic=topic,
            headers=headers,
            timestamps=timestamps,
            dues=dues,
            priorities=priorities,
            expires=expires,
            partition=partition,
            durability=durability,
        )

    def producer(
        self,
        topic: str | None = None,
        *,
        linger: float = 0.005,
        batch_bytes: int = 100_000,
        batch_count: int = 1000,
        compression: Literal["none", "lz4", "zstd"] | None = None,
        partitioner: Partitioner | None = None,
        serializer: str | Serializer | None = None,
        durability: Durability | str | None = None,
        buffer_bytes: int = 32 << 20,
        on_full: Literal["block", "raise"] = "block",
        before_publish: Sequence[BeforePublish] = (),
        after_ack: Sequence[AfterAck] = (),
        timeout: float | None = None,
    ) -> AsyncProducer:
        """A producer with settings of its own.

        Parameters:
            topic: where messages go that do not say.
            linger: how many seconds a sent message may wait for others of its batch.
            batch_bytes: a batch goes out when its messages have so many bytes.
            batch_count: a batch goes out when it has so many messages.
            compression: `none`, `lz4` or `zstd`; by default what the topic's settings say.
            partitioner: takes a key and the number of partitions, returns a partition; by default the crc32c of the
                key modulo the number of partitions. Messages without a key go to one partition for a batch, then to
                the next.
            serializer: what makes values into bytes: `bytes` (the default: they are), `str`, `json`, or a callable.
            durability: what must be reached before a receipt; by default what the topic's settings say.
            buffer_bytes: how much may wait for the broker's acknowledgement.
            on_full: what happens when it does: `block`, or `raise` Busy.
            before_publish: hooks that see each message (an Outgoing) before it is serialized, and return it, another
                one, or None to drop it.
            after_ack: hooks that see the receipt of each acknowledged batch; they must not block.
            timeout: how many seconds to try before a message is given up; by default the bus's.
        """
        self._check_open()
        producer = AsyncProducer(
            self._broker,
            self._metadata_cache,
            self._timers,
            topic=topic,
            linger=linger,
            batch_bytes=batch_bytes,
            batch_count=batch_count,
            compression=compression,
            partitioner=partitioner,
            serializer=serializer,
            durability=durability,
            buffer_bytes=buffer_bytes,
            on_full=on_full,
            before_publish=before_publish,
            after_ack=after_ack,
            timeout=self._timeout if timeout is None else timeout,
            on_close=self._producers.discard,
            bus=self,
        )
        self._producers.add(producer)
        return producer

    def transaction(self, name: str, *, sequence: int | None = None, timeout: float = 60.0) -> AsyncTransaction:
        """A transaction, for use in `with`: committed at the end of the block, aborted by an exception.

        Parameters:
            name: who does it. One that is open under this name, in whatever process, is aborted.
            sequence: which of this name's transactions it is. One that has been committed before is not done again:
                `already_committed` says so, and publishing in it does nothing. By default, the next.
            timeout: after so many seconds the broker aborts it.
        """
        self._check_open()
        checked_seconds(timeout, "timeout", 0.001)
        return AsyncTransaction(self._broker, self._metadata_cache, name, sequence, timeout, self)

    # Scheduling.

    async def schedule(
        self,
        topic: str,
        value: bytes | None,
        *,
        at: Moment | None = None,
        in_: float | timedelta | None = None,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        priority: int | None = None,
        expires: Moment | None = None,
        owner: str = "",
        partition: int | None = None,
    ) -> AsyncScheduled:
        """Publish a message that leased subscriptions hand out at a time, and that can be changed until then.

        Parameters:
            topic: where to.
            value: as for `publish`, like all that are not explained here.
            at: when: a datetime, or microseconds since 1970;
            in_: or in so many seconds.
            owner: the producer group it belongs to, in whose name alone it can be changed; by default nobody's.

        Returns:
            A handle with which the message can be moved, updated and cancelled.
        """
        due = moment_of(at, in_, self.clock.now_us())
        if owner:
            headers = {**(headers or {}), OWNER_HEADER: owner}
        receipt = await self.publish(
            topic,
            value,
            key=key,
            headers=headers,
            due=due,
            priority=priority,
            expires=expires,
            partition=partition,
        )
        name = MessageName(topic, receipt.partition, receipt.offset, receipt.topic_id)
        return AsyncScheduled(self._broker, self.clock, name, 1, owner, self)._knows(value, headers)

    def scheduled(self, id: str, *, version: int | None = None, owner: str = "") -> AsyncScheduled:
        """A handle for a message that was scheduled before; nothing is asked yet.

        Parameters:
            id: of the handle it had, such as `reminders/0/17@3`: topic, partition, offset and the topic's id. Without
                the last it is the message at this place of whichever topic has that name now.
            version: in which it was seen; by default it is changed whichever it has.
            owner: the producer group in whose name it is changed.
        """
        return AsyncScheduled(self._broker, self.clock, parse_id(id), version, owner, self)

    def _shared_producer(self) -> AsyncProducer:
        if self._own_producer is None:
            self._own_producer = self.producer(linger=0)
            self._own_producer._bus = None  # the bus has it, and not the other way round
        return self._own_producer

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the bus is closed")
