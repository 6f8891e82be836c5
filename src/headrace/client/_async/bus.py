"""The bus: what a program has of a broker."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Literal, Unpack

from headrace.client._async.admin.groups import AsyncGroupAdmin
from headrace.client._async.admin.schedules import AsyncScheduleAdmin
from headrace.client._async.admin.subscriptions import AsyncSubscriptionAdmin
from headrace.client._async.admin.topics import AsyncTopicAdmin
from headrace.client._async.concurrency import Lock, Timers, now, run_blocking, run_detached
from headrace.client._async.connection.connection import receive_memory
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.consumer.batch_fetch import fetch_batches
from headrace.client._async.consumer.subscription import AsyncSubscription
from headrace.client._async.leasing.acknowledger import AsyncAcknowledger
from headrace.client._async.leasing.jobs import AsyncJobs
from headrace.client._async.leasing.lease_requester import AsyncLeaseRequester
from headrace.client._async.leasing.leased_block import AsyncLeasedBlock
from headrace.client._async.leasing.queue import AsyncQueue
from headrace.client._async.leasing.scheduled import AsyncScheduled
from headrace.client._async.producer.accumulator import AsyncAccumulator
from headrace.client._async.producer.metadata_cache import AsyncMetadataCache
from headrace.client._async.producer.producer import AsyncProducer
from headrace.client._async.producer.transaction import AsyncTransaction
from headrace.client.connection import fork_guard
from headrace.client.connection.addresses import Nearby, Target, default_address, parse_address, place_of
from headrace.client.connection.clock import Clock
from headrace.client.connection.identity import checked_client_name, default_name
from headrace.client.connection.weak_registry import WeakRegistry
from headrace.client.consumer.partition_reader import OnCorrupt
from headrace.client.leasing.scheduled_times import MessageName, moment_of, parse_id
from headrace.client.producer.message_fields import GivenHeaders, MessageColumns, MessageFields, show_fields
from headrace.client.producer.partitioning import Partitioner
from headrace.client.producer.pending_batch import AfterAck, BeforePublish, checked_headers, checked_key
from headrace.client.producer.producer_settings import producer_settings
from headrace.client.producer.serializing import Deserializer, Serializer, to_bytes
from headrace.client.results import Receipt
from headrace.client.times import Moment, Start, When, check_name, checked_seconds, listed, optional_microseconds
from headrace.model.arguments import checked_timeout
from headrace.model.batch import Batch
from headrace.model.durability import Durability
from headrace.model.errors import Closed, HeadraceError
from headrace.model.leasing import OWNER_HEADER, SubscriptionInfo
from headrace.model.representation import described, short, state_of
from headrace.model.requests import BrokerInfo, GroupInfo, GroupSummary, Info, TopicInfo
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleInfo
from headrace.model.subscription import DEFAULT_SUBSCRIPTION
from headrace.wire.native import Hello


class AsyncBus:
    """A program's way to a broker; made by `headrace.connect_async` or `headrace.open_async`. Close it, or use `with`.

    It keeps two connections: one for requests and producers, and one, made with the first subscription or lease, on
    which messages are delivered, so that a flood of deliveries keeps no receipt waiting. Both are made again by
    themselves when they break; requests that can be repeated without harm are, for as long as `timeout`.
    """

    def __init__(self, target: Target, name: str, timeout: float, on_close: Callable[[], None] | None) -> None:
        self._closed = True  # until all is well
        timeout = checked_timeout(timeout, least=0.001)
        self._target = target
        self._given_name = checked_client_name(name)
        self._hello = Hello(client="headrace-python", name=self._given_name or default_name())
        self._memory = receive_memory()
        self._timeout = timeout
        self._timers = Timers()
        """Runs the timers of all parts of the bus."""
        self._clock = Clock()
        self._broker = AsyncReconnectingConnection(
            target, self._hello, timeout, self._timers, self._memory, self._clock
        )
        self._metadata_cache = AsyncMetadataCache(self._broker)
        self._topics = AsyncTopicAdmin(self._broker, self._metadata_cache)
        self._groups = AsyncGroupAdmin(self._broker)
        self._subscriptions = AsyncSubscriptionAdmin(self._broker)
        self._schedules = AsyncScheduleAdmin(self._broker)
        self._producers: WeakRegistry[AsyncAccumulator] = WeakRegistry()
        self._own_producer: AsyncProducer | None = None
        self._on_close = on_close
        self._consuming: AsyncReconnectingConnection | None = None
        self._consuming_lock = Lock()
        self._receiving: WeakRegistry[AsyncSubscription | AsyncJobs] = WeakRegistry()
        self._leasing: dict[tuple[str, str], tuple[AsyncAcknowledger, AsyncLeaseRequester]] = {}
        self._closed = False
        fork_guard.register(self)

    @property
    def clock(self) -> Clock:
        """The broker's clock, as far as it is known here."""
        return self._clock

    @property
    def name(self) -> str:
        """What the broker calls this client in its lists and logs; made of host and process if none was given."""
        return self._hello.name

    # Publishing.

    @show_fields
    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | str | None = None,
        durability: Durability | str | None = None,
        expected_offset: int | None = None,
        **fields: Unpack[MessageFields],
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
        producer = self._own_producer or self._begin_producer()
        return await producer.publish(
            value, key, topic=topic, durability=durability, expected_offset=expected_offset, **fields
        )

    @show_fields
    async def publish_many(
        self,
        topic: str,
        values: Iterable[bytes],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
        **columns: Unpack[MessageColumns],
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
        producer = self._own_producer or self._begin_producer()
        return await producer.publish_many(
            values, keys, topic=topic, partition=partition, durability=durability, **columns
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
        settings = producer_settings(
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
        )
        accumulator = AsyncAccumulator(
            self._broker, self._metadata_cache, self._timers, settings, self._producers.discard, self
        )
        self._producers.add(accumulator)
        return AsyncProducer(accumulator)

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
        due = moment_of(at, in_, self._clock.now_us())
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
        return AsyncScheduled(self._broker, self._clock, name, 1, owner, self)._knows(value, headers)

    def scheduled(self, id: str, *, version: int | None = None, owner: str = "") -> AsyncScheduled:
        """A handle for a message that was scheduled before; nothing is asked yet.

        Parameters:
            id: of the handle it had, such as `reminders/0/17@3`: topic, partition, offset and the topic's id. Without
                the last it is the message at this place of whichever topic has that name now.
            version: in which it was seen; by default it is changed whichever it has.
            owner: the producer group in whose name it is changed.
        """
        return AsyncScheduled(self._broker, self._clock, parse_id(id), version, owner, self)

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
        on_corrupt: OnCorrupt = "raise",
        timeout: float | None = None,
        session_timeout: float = 10.0,
        prefetch_bytes: int = 8 << 20,
        create: bool = False,
    ) -> AsyncSubscription:
        """Receive messages; begins when it is iterated, or entered with `with`.

        A topic that does not exist then raises TopicNotFound, which names those that may have been meant.

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
            on_corrupt: what happens when stored messages are damaged: `raise` CorruptBatch, which has their offsets,
                and go on behind them when iterated again; `skip` them, with a warning logged; or a callable that gets
                a DamagedRange, and skips them by returning.
            timeout: iteration ends when no message has come for so many seconds; by default never.
            session_timeout: after so many seconds out of touch a member's partitions go to others.
            prefetch_bytes: how much is received ahead of what is being processed, for all partitions together, but
                64 KiB for each at least.
            create: make topics that do not exist, if the broker may make topics by itself (`auto_create_topics`).
        """
        self._check_open()
        subscription = AsyncSubscription(
            self,
            topics,
            group=group,
            patterns=[pattern] if isinstance(pattern, str) else listed(pattern or (), "patterns"),
            start=start,
            partitions=None if partitions is None else listed(partitions, "partitions"),
            commit=commit,
            commit_interval=commit_interval,
            deserializer=deserializer,
            on_error=on_error,
            on_out_of_range=on_out_of_range,
            on_corrupt=on_corrupt,
            timeout=timeout,
            session_timeout=session_timeout,
            prefetch_bytes=prefetch_bytes,
            create=create,
        )
        self._keep(subscription)
        return subscription

    def queue(
        self,
        topic: str,
        subscription: str = DEFAULT_SUBSCRIPTION,
        *,
        deserializer: str | Deserializer | None = None,
        create: bool = False,
    ) -> AsyncQueue:
        """A leased subscription of a topic, from which messages are taken one by one; nothing is asked yet.

        Parameters:
            topic: whose messages. If it does not exist, what is asked of the queue raises TopicNotFound.
            subscription: which; made with the first lease if there is none of that name, with all messages.
            deserializer: what makes bytes into values: `bytes` (the default: none), `str`, `json`, or a callable.
            create: make the topic with the first lease if it does not exist and the broker may make topics by itself
                (`auto_create_topics`).
        """
        self._check_open()
        acknowledger, lease_requester = self._shared_leasing(topic, subscription)
        return AsyncQueue(self, self._broker, acknowledger, lease_requester, deserializer, create)

    def lease(
        self,
        topic: str,
        max: int = 10,
        *,
        subscription: str = DEFAULT_SUBSCRIPTION,
        lease: float | timedelta | None = None,
        wait: float | timedelta = 0.0,
        deserializer: str | Deserializer | None = None,
        create: bool = False,
    ) -> AsyncLeasedBlock:
        """Messages for the time of a block: `async with bus.lease("jobs", max=10) as jobs:`.

        At the end of the block they are acknowledged; after an exception they are given back with it as the reason.
        If the broker refuses an acknowledgement, because a lease could not be extended and another has the message, the
        block raises LeaseExpired, NotLeaseHolder or MessageGone. Messages about which something was said in the block,
        with a queue's methods, are left as that said.

        Parameters:
            topic: whose messages.
            max: how many at most.
            subscription: which.
            lease: for how many seconds; by default as the subscription's settings say. It is extended by itself.
            wait: how many seconds to wait when there is none.
            deserializer: as for `queue`.
            create: as for `queue`.
        """
        queue = self.queue(topic, subscription, deserializer=deserializer, create=create)
        return queue.leased(max, lease=lease, wait=wait)

    async def fetch(
        self, topic: str, partition: int, offset: int, *, bytes_max: int = 1 << 20, wait: float = 0.0
    ) -> list[Batch]:
        """Read batches of a partition by hand.

        Parameters:
            topic: which.
            partition: which.
            offset: of the first message that is wanted; the first batch may begin before it.
            bytes_max: how much to read at most, but one batch in any case.
            wait: how many seconds to wait for a message if there is none.
        """
        return await fetch_batches(self._broker, topic, partition, offset, bytes_max, wait)

    # Topics.

    async def create_topic(self, topic: str, *, exist_ok: bool = False, **settings: Any) -> TopicInfo:
        """Make a topic.

        Parameters:
            topic: its name; `tenant/topic` in another tenant than the default one.
            exist_ok: fine if there is one, whatever its settings are.
            settings: any of TopicSettings, such as `partitions=8`, `retain_seconds=86400` or `storage="memory"`.
        """
        return await self._topics.create(topic, settings, exist_ok)

    async def alter_topic(self, topic: str, **settings: Any) -> TopicInfo:
        """Change settings of a topic while it is in use.

        Parameters:
            topic: which.
            settings: those of TopicSettings that change; there can be more partitions, never less.
        """
        return await self._topics.alter(topic, settings)

    async def delete_topic(self, topic: str) -> None:
        """Remove a topic with all its messages."""
        await self._topics.delete(topic)

    async def topics(self, pattern: str = "*", *, tenant: str = "") -> list[TopicInfo]:
        """The topics whose names match, without their partitions.

        Parameters:
            pattern: `*` stands for any characters, `?` for one.
            tenant: whose; by default the default tenant's.
        """
        return await self._topics.list_matching(pattern, tenant)

    async def describe_topic(self, topic: str, *, create: bool = False) -> TopicInfo:
        """A topic as it is now: settings, partitions with their offsets, groups that read it.

        Parameters:
            topic: which.
            create: whether to make it, as publishing does, if there is none.
        """
        return await self._topics.describe(topic, create)

    async def trim_topic(
        self,
        topic: str,
        offsets: Mapping[int, int] | None = None,
        *,
        before: When | None = None,
        unread: bool = False,
        topic_id: int = 0,
    ) -> dict[int, int]:
        """Remove the oldest messages of a topic; returns the first offsets that there are now.

        Parameters:
            topic: which.
            offsets: partitions to the offsets before which messages go, such as `{0: 1000}`.
            before: instead, for all partitions: the messages before the first one of this time or later.
            unread: also messages that some group or leased subscription has still to read; without this they stay.
            topic_id: only if the topic has this id (`describe_topic` tells it), and was not made again since.
        """
        return await self._topics.trim(topic, offsets, before, unread, topic_id)

    async def offsets(
        self, topic: str, at: When = "latest", *, partitions: Sequence[int] | None = None
    ) -> dict[int, int]:
        """Which offsets partitions have at a time.

        Parameters:
            topic: which.
            at: `earliest`: of the first message there is; `latest`: behind the last; a datetime or microseconds since
                1970: of the first message of that time or later.
            partitions: only these.
        """
        return await self._topics.offsets(topic, at, partitions)

    # Groups.

    async def groups(self, *, tenant: str = "") -> list[GroupSummary]:
        """The groups there are, with members, topics and lag."""
        return await self._groups.list_all(tenant)

    async def describe_group(self, group: str) -> GroupInfo:
        """A group as it is now: its members, and how far it has come in each partition."""
        return await self._groups.describe(group)

    async def seek_group(
        self, group: str, topic: str, to: Start, *, partitions: Sequence[int] | None = None
    ) -> GroupInfo:
        """Move a group to another place in a topic; its members go on from there.

        Parameters:
            group: which.
            topic: in which topic.
            to: `earliest`, `latest`, a datetime, or an offset.
            partitions: only these.
        """
        return await self._groups.seek(group, topic, to, partitions)

    async def delete_group(self, group: str) -> None:
        """Forget a group and its positions; it must have no members."""
        await self._groups.delete(group)

    async def commit(self, group: str, positions: Mapping[tuple[str, int], int]) -> None:
        """Set positions of a group that has no members at work.

        Parameters:
            group: which.
            positions: topics and partitions to the offsets to go on with, such as `{("orders", 0): 1000}`.
        """
        await self._groups.commit(group, positions)

    # Leased subscriptions.

    async def create_subscription(
        self,
        topic: str,
        subscription: str = DEFAULT_SUBSCRIPTION,
        *,
        exist_ok: bool = False,
        start: Start = "earliest",
        create: bool = True,
        **settings: Any,
    ) -> SubscriptionInfo:
        """Make a leased subscription of a topic.

        Parameters:
            topic: whose messages.
            subscription: its name; a topic can have several.
            exist_ok: fine if there is one, whatever its settings are.
            start: which messages: all there are (`earliest`), those to come (`latest`), or those from a datetime or
                an offset on.
            create: make the topic as well if there is none and the broker may make topics by itself
                (`auto_create_topics`).
            settings: any of SubscriptionSettings, such as `discipline="priority"` or `deliveries_max=5`.
        """
        return await self._subscriptions.create(topic, subscription, settings, start, exist_ok, create)

    async def alter_subscription(
        self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION, **settings: Any
    ) -> SubscriptionInfo:
        """Change settings of a leased subscription while it is in use.

        Parameters:
            topic: of which topic.
            subscription: which.
            settings: those of SubscriptionSettings that change.
        """
        return await self._subscriptions.alter(topic, subscription, settings)

    async def reset_subscription(
        self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION, *, start: Start | None = None
    ) -> SubscriptionInfo:
        """Open a leased subscription anew: one that could not be opened, or one that is to begin elsewhere.

        All leases are over. What is settled stays so, and everything else is found anew in the log.

        Parameters:
            topic: of which topic.
            subscription: which.
            start: forget also what is settled, and begin as a new one does: see `create_subscription`.
        """
        return await self._subscriptions.reset(topic, subscription, start)

    async def delete_subscription(self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION) -> None:
        """Forget a leased subscription; the topic keeps its messages."""
        await self._subscriptions.delete(topic, subscription)

    async def subscriptions(self, topic: str | None = None, *, tenant: str = "") -> list[SubscriptionInfo]:
        """The leased subscriptions there are.

        Parameters:
            topic: of this topic; by default of all.
            tenant: whose; by default the default tenant's.
        """
        return await self._subscriptions.list_all(topic, tenant)

    async def describe_subscription(self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION) -> SubscriptionInfo:
        """A leased subscription as it is now: its settings, and how many messages it has in which state."""
        return await self._subscriptions.describe(topic, subscription)

    # Schedules.

    async def cron_add(
        self,
        name: str,
        topic: str,
        when: str,
        value: bytes = b"",
        *,
        zone: str = "UTC",
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        partition: int | None = None,
        start: Moment | None = None,
        end: Moment | None = None,
        runs_max: int | None = None,
        missed: str = "once",
        overlap: str = "allow",
        paused: bool = False,
        replace: bool = True,
    ) -> ScheduleInfo:
        """Publish a message again and again.

        Parameters:
            name: by which the schedule goes.
            topic: where to.
            when: a crontab expression of five or six fields (seconds first), such as `*/5 * * * *`, a nickname such as
                `@daily`, or an interval such as `every 90s`.
            value: of the message.
            zone: the time zone of the expression, such as `Europe/Berlin`.
            key: of the message.
            headers: of the message, besides `headrace-cron` with the name and `headrace-run` with the time.
            partition: where to, instead of by key.
            start: no run before this time.
            end: no run at this time or later.
            runs_max: no more runs than this.
            missed: what becomes of runs that were missed while the broker was down: `skip` them, `once` for all of
                them, or `all`.
            overlap: `allow`, or `skip`: no run while a leased subscription of the topic has not settled the last one.
            paused: make it, but let it rest until `cron_pause(name, False)`.
            replace: the one of that name, if there is one; else ScheduleExists is raised.
        """
        schedule = ScheduleDefinition(
            name,
            topic,
            when,
            to_bytes(value) or b"",
            checked_key(key),
            checked_headers(headers) or {},
            partition,
            zone,
            optional_microseconds(start),
            optional_microseconds(end),
            runs_max,
            missed,
            overlap,
            paused,
        )
        return await self._schedules.set(schedule, replace)

    async def crons(self, topic: str | None = None, *, tenant: str = "") -> list[ScheduleInfo]:
        """The schedules there are.

        Parameters:
            topic: for this topic; by default all.
            tenant: whose; by default the default tenant's.
        """
        return await self._schedules.list_all(topic, tenant)

    async def cron_remove(self, name: str) -> None:
        """Forget a schedule; messages it has published stay."""
        await self._schedules.remove(name)

    async def cron_pause(self, name: str, paused: bool = True) -> ScheduleInfo:
        """Let a schedule rest, or go on. Runs that fall into the pause are left out."""
        return await self._schedules.pause(name, paused)

    async def cron_run(self, name: str) -> ScheduleInfo:
        """Publish a schedule's message now, besides its regular runs."""
        return await self._schedules.run(name)

    async def cron_next(
        self,
        name: str | None = None,
        when: str | None = None,
        zone: str = "UTC",
        runs: int = 5,
        *,
        after: Moment | None = None,
    ) -> list[datetime]:
        """When the next runs are, of a schedule there is or of an expression that is to be tried out.

        Parameters:
            name: of a schedule;
            when: or an expression, as for `cron_add`,
            zone: in this time zone.
            runs: how many.
            after: after this time; by default now.
        """
        return await self._schedules.next_runs(name, when, zone, runs, after)

    # The bus itself.

    async def info(self) -> BrokerInfo:
        """What there is to know about the broker."""
        return await self._broker.request(Info())

    async def close(self) -> None:
        """Close producers and subscriptions, and end the connections.

        Producers deliver what they have first; if one cannot, the error is raised after all is closed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            failed = await self._close_parts(now())  # one deadline for all of them
        finally:  # also when it is interrupted: nothing may go on that nobody can end any more
            self._abandon_parts()
            await self._close_lines([broker for broker in (self._consuming, self._broker) if broker is not None])
        if failed is not None:
            raise failed

    def _begin_producer(self) -> AsyncProducer:
        """Make the producer with which the bus itself publishes: it sends at once."""
        self._own_producer = self.producer(linger=0)
        self._own_producer._accumulator.bus = None  # the bus keeps the producer alive, and not the other way round
        return self._own_producer

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the bus is closed")

    async def _connect(self, wait: float = 0.0) -> None:
        """Make the first connection; `headrace.connect_async` has done it."""
        try:
            await self._broker.connect(checked_timeout(wait, "wait"))
        except BaseException:
            await self.close()
            raise

    async def _consuming_line(self) -> AsyncReconnectingConnection:
        """The connection for deliveries, made now if there is none."""
        deadline = now() + self._timeout
        async with self._consuming_lock:
            self._check_open()
            self._broker.check_open()
            if self._consuming is None:
                broker = AsyncReconnectingConnection(
                    self._target, self._hello, self._timeout, self._timers, self._memory, self._clock
                )
                await broker.connect(deadline - now())  # the broker may just be starting again
                self._consuming = broker
            return self._consuming

    def _shared_leasing(self, topic: str, subscription: str) -> tuple[AsyncAcknowledger, AsyncLeaseRequester]:
        """What all users of a leased subscription share."""
        check_name(topic, "a topic")
        check_name(subscription, "a subscription")
        shared = self._leasing.get((topic, subscription))
        if shared is None:
            acknowledger = AsyncAcknowledger(self._broker, self._timers, self._clock, topic, subscription)
            shared = self._leasing.setdefault(
                (topic, subscription), (acknowledger, AsyncLeaseRequester(self, acknowledger))
            )
        return shared

    def _keep(self, part: AsyncSubscription | AsyncJobs) -> None:
        """Close this one with the bus."""
        self._receiving.add(part)

    def _forget(self, part: AsyncSubscription | AsyncJobs) -> None:
        """This one is closed."""
        self._receiving.discard(part)

    def _disown(self) -> None:
        """In a forked child: begin anew, and leave to the parent what is under way."""
        self._hello.name = self._given_name or default_name()
        self._timers.disown()
        self._clock.in_use = False
        self._broker.disown()
        self._metadata_cache.disown()
        if self._consuming is not None:
            self._consuming.disown()
        self._consuming, self._consuming_lock = None, Lock()
        for part in self._receiving.alive():
            part._disown()
        for accumulator in self._producers.alive():
            accumulator.disown()
        for acknowledger, lease_requester in self._leasing.values():
            acknowledger.disown()
            lease_requester.disown()

    async def _close_lines(self, lines: list[AsyncReconnectingConnection]) -> None:
        for broker in lines:  # all of them before anything is waited for
            broker.end()
        try:
            for broker in lines:
                await broker.close()
            self._timers.close()
        finally:
            if self._on_close is not None:
                await run_blocking(self._on_close)

    async def _close_parts(self, began: float) -> HeadraceError | None:
        """Let all parts finish, at the same time; returns what the first has failed with."""
        failed: HeadraceError | None = None
        for accumulator in self._producers.alive():
            accumulator.send_open_batches()
        for part in self._receiving.alive():
            try:
                await part._close_by(began + self._timeout)
            except HeadraceError as error:
                failed = failed or error
        for accumulator in self._producers.alive():
            try:
                await accumulator.close_since(began)
            except HeadraceError as error:
                failed = failed or error
        for acknowledger, _ in self._leasing.values():
            await acknowledger.answered(began + self._timeout - now())
        return failed

    def _abandon_parts(self) -> None:
        for part in self._receiving.alive():
            part._abandon()
        for accumulator in self._producers.alive():
            accumulator.abandon()
        for acknowledger, _ in self._leasing.values():
            acknowledger.close()

    def _abandon(self) -> None:
        """Close without waiting for the broker."""
        self._abandon_parts()
        for broker in (self._consuming, self._broker):
            if broker is not None:
                broker.end()
        self._timers.close()
        if self._on_close is not None:
            run_detached(self._on_close)

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield place_of(self._target)
        yield f"name={short(self._hello.name)}"
        yield state_of(closed=self._closed, connected=self._broker.connected, not_connected=True)

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True):
            self._closed = True
            self._timers.aside(self._abandon)
            warnings.warn(f"a bus was not closed: {self!r}", ResourceWarning, stacklevel=2, source=self)

    async def __aenter__(self) -> "AsyncBus":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def connect_async(
    address: str | None = None, *, name: str = "", timeout: float = 30.0, wait: float = 0.0
) -> AsyncBus:
    """Connect to a broker.

    Parameters:
        address: `headrace://host:port`, or `headrace+unix:///path/to/socket`; by default $HEADRACE_URL, or else
            `headrace://127.0.0.1:7390`.
        name: what this program calls itself in the broker's lists and logs; by default host, process and a number.
        timeout: how many seconds a request may take, reconnecting and repeating included.
        wait: for how many seconds to keep trying if the broker cannot be reached yet.
    """
    bus = AsyncBus(parse_address(default_address() if address is None else address), name, timeout, None)
    await bus._connect(wait)
    return bus


async def attach_async(broker: Nearby, close: Callable[[], None], *, name: str = "", timeout: float = 30.0) -> AsyncBus:
    """Connect to a broker in this process, which is closed with the bus."""
    bus = AsyncBus(broker, name, timeout, close)
    await bus._connect()
    return bus
