"""The bus: what a program has of a broker."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from headrace.client._async.administration import AsyncAdministration
from headrace.client._async.catalogue import AsyncCatalogue
from headrace.client._async.concurrency import Lock, Timers, run_blocking
from headrace.client._async.line import AsyncLine
from headrace.client._async.link import receive_memory
from headrace.client._async.producer import AsyncProducer
from headrace.client._async.subscription import AsyncSubscription
from headrace.client._async.transaction import AsyncTransaction
from headrace.client.addresses import DEFAULT_ADDRESS, Nearby, Target, parse_address
from headrace.client.outgoing import AfterAck, BeforePublish, GivenHeaders
from headrace.client.partitioning import Partitioner
from headrace.client.results import Receipt
from headrace.client.serialising import Deserializer, Serializer
from headrace.client.times import Moment, Start
from headrace.model.durability import Durability
from headrace.model.errors import Closed, HeadraceError
from headrace.wire.native import Hello


class AsyncBus(AsyncAdministration):
    """A program's way to a broker; made by `headrace.connect_async` or `headrace.open_async`. Close it, or use `with`.

    It keeps two connections: one for requests and producers, and one, made with the first subscription, on which
    messages are delivered, so that a flood of deliveries keeps no receipt waiting. Both are made again by
    themselves when they break; requests that can be repeated without harm are, for as long as `timeout`.
    """

    def __init__(self, target: Target, name: str, timeout: float, on_close: Callable[[], None] | None) -> None:
        self.timers = Timers()
        """What calls things later, for all parts of the bus."""
        self._target = target
        self._hello = Hello(client="headrace-python", name=name)
        self._memory = receive_memory()
        line = AsyncLine(target, self._hello, timeout, self.timers, self._memory)
        super().__init__(line, AsyncCatalogue(line))
        self._timeout = timeout
        self._on_close = on_close
        self._closed = False
        self._consuming: AsyncLine | None = None
        self._consuming_lock = Lock()
        self._producers: list[AsyncProducer] = []
        self._subscriptions: list[AsyncSubscription] = []
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
            self._line,
            self._catalogue,
            self.timers,
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
            on_close=self._producers.remove,
        )
        self._producers.append(producer)
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
        return AsyncTransaction(self._line, self._catalogue, name, sequence, timeout)

    # Receiving.

    def subscribe(
        self,
        *topics: str,
        group: str | None = None,
        pattern: str | Sequence[str] | None = None,
        start: Start | Mapping[int, int] = "earliest",
        partitions: Sequence[int] | None = None,
        commit: Literal["auto", "manual"] = "auto",
        commit_interval: float = 1.0,
        deserializer: str | Deserializer | None = None,
        on_error: Literal["raise", "skip"] | Callable[[Any], Any] = "raise",
        on_out_of_range: Literal["earliest", "latest", "raise"] = "earliest",
        timeout: float | None = None,
        session_timeout: float = 10.0,
        prefetch_bytes: int = 8 << 20,
    ) -> AsyncSubscription:
        """Receive messages; begins when it is iterated, or entered with `with`.

        With a group, its members share the partitions, and the group's positions are kept by the broker. Without
        one, this subscription reads by itself from `start`, and nothing is kept.

        Parameters:
            topics: what to receive.
            group: the group to take part in.
            pattern: topics by pattern, besides those named: `*` stands for any characters, `?` for one. New topics
                that match are found within seconds.
            start: where to begin: `earliest`, `latest`, a datetime, or an offset; or partitions to offsets. With a
                group, where a group begins that has no position yet (no offsets then).
            partitions: only these, without a group.
            commit: `auto`: a message counts as processed when the next one is asked for, and positions are committed
                every `commit_interval` seconds, when partitions go to other members, and at the end. `manual`: only
                `commit()` does.
            commit_interval: see there.
            deserializer: what makes bytes into values: `bytes` (the default: none), `str`, `json`, or a callable.
            on_error: what happens to a message that cannot be deserialized: `raise` CannotDeserialize, which has the
                message, and go on behind it when iterated again; `skip` it, with a warning logged; or a callable that
                gets the error and returns a value in its place.
            on_out_of_range: where to go on when messages to be read have been removed: `earliest` or `latest`, with a
                warning logged, or `raise` OffsetOutOfRange.
            timeout: iteration ends when no message has come for so many seconds; by default never.
            session_timeout: after so many seconds out of touch a member's partitions go to others.
            prefetch_bytes: how much is received ahead of what is being processed, for all partitions together, but
                64 KiB for each at least.
        """
        self._check_open()
        subscription = AsyncSubscription(
            self,
            topics,
            group=group,
            patterns=[pattern] if isinstance(pattern, str) else list(pattern or ()),
            start=start,
            partitions=partitions,
            commit=commit,
            commit_interval=commit_interval,
            deserializer=deserializer,
            on_error=on_error,
            on_out_of_range=on_out_of_range,
            timeout=timeout,
            session_timeout=session_timeout,
            prefetch_bytes=prefetch_bytes,
        )
        self._subscriptions.append(subscription)
        return subscription

    # The bus itself.

    async def connect(self, wait: float = 0.0) -> None:
        """Make the first connection; `headrace.connect_async` has done it."""
        try:
            await self._line.connect(wait)
        except BaseException:
            await self.close()
            raise

    async def consuming_line(self) -> AsyncLine:
        """The connection for deliveries, made now if there is none."""
        async with self._consuming_lock:
            self._check_open()
            if self._consuming is None:
                line = AsyncLine(self._target, self._hello, self._timeout, self.timers, self._memory)
                await line.connect(self._timeout)  # the broker may just be starting again
                self._consuming = line
            return self._consuming

    def forget(self, subscription: AsyncSubscription) -> None:
        """The subscription is closed."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def close(self) -> None:
        """Close producers and subscriptions, and end the connections.

        Producers deliver what they have first; if one cannot, the error is raised after all is closed.
        """
        if self._closed:
            return
        self._closed = True
        failed: HeadraceError | None = None
        parts: list[AsyncSubscription | AsyncProducer] = [*self._subscriptions, *self._producers]
        for part in parts:
            try:
                await part.close()
            except HeadraceError as error:
                failed = failed or error
        for line in (self._consuming, self._line):
            if line is not None:
                await line.close()
        self.timers.close()
        if self._on_close is not None:
            await run_blocking(self._on_close)
        if failed is not None:
            raise failed

    async def __aenter__(self) -> "AsyncBus":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _shared_producer(self) -> AsyncProducer:
        if self._own_producer is None:
            self._own_producer = self.producer(linger=0)
        return self._own_producer

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the bus is closed")


async def connect_async(
    address: str = DEFAULT_ADDRESS, *, name: str = "", timeout: float = 30.0, wait: float = 0.0
) -> AsyncBus:
    """Connect to a broker.

    Parameters:
        address: `headrace://host:port`, or `headrace+unix:///path/to/socket`.
        name: what this program calls itself in the broker's lists and logs.
        timeout: how many seconds a request may take, reconnecting and repeating included.
        wait: for how many seconds to keep trying if the broker cannot be reached yet.
    """
    bus = AsyncBus(parse_address(address), name, timeout, None)
    await bus.connect(wait)
    return bus


async def attach_async(broker: Nearby, close: Callable[[], None], *, name: str = "", timeout: float = 30.0) -> AsyncBus:
    """Connect to a broker in this process, which is closed with the bus."""
    bus = AsyncBus(broker, name, timeout, close)
    await bus.connect()
    return bus
