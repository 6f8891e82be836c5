"""The bus: what a program has of a broker."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Unpack, overload

from headrace.client._sync.admin.groups import GroupAdmin
from headrace.client._sync.admin.routes import Routes
from headrace.client._sync.admin.schedules import ScheduleAdmin
from headrace.client._sync.admin.service_registrations import ServiceRegistrations
from headrace.client._sync.admin.subscriptions import SubscriptionAdmin
from headrace.client._sync.admin.topics import TopicAdmin
from headrace.client._sync.bus_administration import BusAdministration
from headrace.client._sync.concurrency import Lock, Timers, now
from headrace.client._sync.connection.connection import receive_memory
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client._sync.consumer.batch_fetch import fetch_batches
from headrace.client._sync.consumer.key_history import read_history, versioned_message
from headrace.client._sync.consumer.subscription import Subscription
from headrace.client._sync.leasing.acknowledger import Acknowledger
from headrace.client._sync.leasing.jobs import Jobs
from headrace.client._sync.leasing.lease_requester import LeaseRequester
from headrace.client._sync.leasing.leased_block import LeasedBlock
from headrace.client._sync.leasing.queue import Queue
from headrace.client._sync.leasing.scheduled import Scheduled
from headrace.client._sync.producer.accumulator import Accumulator
from headrace.client._sync.producer.metadata_cache import MetadataCache
from headrace.client._sync.producer.producer import Producer
from headrace.client._sync.producer.transaction import Transaction
from headrace.client._sync.results.job_handle import JobHandle
from headrace.client._sync.results.job_publisher import JobPublisher
from headrace.client._sync.subjects.live_subscription import LiveSubscription
from headrace.client._sync.subjects.requester import Requester
from headrace.client._sync.subjects.subjects import Subjects
from headrace.client.connection import fork_guard
from headrace.client.connection.addresses import Target
from headrace.client.connection.clock import Clock
from headrace.client.connection.endpoints import Endpoints
from headrace.client.connection.identity import checked_client_name, default_name
from headrace.client.connection.token_source import NO_TOKEN, TokenSource
from headrace.client.connection.weak_registry import WeakRegistry
from headrace.client.consumer.partition_reader import OnCorrupt
from headrace.client.job_results import reply_headers
from headrace.client.leasing.scheduled_times import MessageName, moment_of, parse_id
from headrace.client.producer.message_fields import (
    MessageColumns,
    MessageFields,
    PublishOptions,
    TopicList,
    show_fields,
)
from headrace.client.producer.partitioning import Partitioner
from headrace.client.producer.pending_batch import AfterAck, BeforePublish
from headrace.client.producer.producer_settings import producer_settings
from headrace.client.producer.serializing import Deserializer, Serializer, serialized, serializer_of
from headrace.client.results import Receipt, Received
from headrace.client.subjects.messages import Reply
from headrace.client.subjects.reply_targets import ReplyFunction, reply_target
from headrace.client.times import Moment, Start, checked_seconds, listed
from headrace.model.arguments import checked_timeout
from headrace.model.batch import Batch
from headrace.model.durability import Durability
from headrace.model.headers import GivenHeaders, checked_headers, replaced_headers
from headrace.model.leasing import OWNER_HEADER
from headrace.model.requests import BrokerInfo, Info
from headrace.model.subscription import DEFAULT_SUBSCRIPTION
from headrace.model.system_topics import INGRESS_TOPIC
from headrace.model.topic import DEFAULT_TENANT
from headrace.wire.native import Hello


class Bus(BusAdministration):
    """A program's connection to a broker, made by `headrace.connect` or `open`. Close it, or use `with`.

    It keeps two connections: one for requests and producers, and one, opened with the first subscription or lease, for
    deliveries, so that a flood of deliveries delays no receipt. It reconnects both when they break, and repeats
    requests that are safe to repeat until `timeout` ends.

    Example:
        >>> receipt = bus.publish("orders", b"3 apples", key="ann")
        >>> receipt.partition, receipt.offset
        (0, 0)
        >>> with bus.subscribe("orders", group="billing", timeout=10) as orders:
        ...     message = next(iter(orders))
        >>> message.value
        b'3 apples'
    """

    def __init__(
        self,
        target: Target,
        name: str,
        timeout: float,
        on_close: Callable[[], None] | None,
        tenant: str = "",
        token: TokenSource = NO_TOKEN,
    ) -> None:
        self._closed = True  # until all is well
        timeout = checked_timeout(timeout, least=0.001)
        self._target = target
        self._given_name = checked_client_name(name)
        self._hello = Hello(client="headrace-python", name=self._given_name or default_name(), tenant=tenant)
        self._token = token
        self._memory = receive_memory()
        self._timeout = timeout
        self._timers = Timers()
        """Runs the timers of all parts of the bus."""
        self._clock = Clock()
        self._endpoints = Endpoints(target, has_token=bool(token))
        self._broker = ReconnectingConnection(
            self._endpoints, self._hello, timeout, self._timers, self._memory, self._clock, token
        )
        self._registrations = ServiceRegistrations(self._broker, self._timers)  # first: registers before others ask
        self._metadata_cache = MetadataCache(self._broker)
        self._topics = TopicAdmin(self._broker, self._metadata_cache)
        self._groups = GroupAdmin(self._broker)
        self._subscriptions = SubscriptionAdmin(self._broker)
        self._schedules = ScheduleAdmin(self._broker)
        self._requester = Requester(self._broker)
        self._jobs = JobPublisher(self._broker)
        self._producers: WeakRegistry[Accumulator] = WeakRegistry()
        self._own_producer: Producer | None = None
        self._on_close = on_close
        self._consuming: ReconnectingConnection | None = None
        self._consuming_lock = Lock()
        self._receiving: WeakRegistry[Subscription | Jobs | LiveSubscription] = WeakRegistry()
        self._leasing: dict[tuple[str, str], tuple[Acknowledger, LeaseRequester]] = {}
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

    @property
    def tenant(self) -> str:
        """The tenant whose topics, groups and schedules the bus's names mean."""
        return self._hello.tenant or DEFAULT_TENANT

    # Publishing.

    @overload
    def publish(
        self, topic: str | None, value: bytes | None, *, reply: Literal[True], **options: Unpack[PublishOptions]
    ) -> JobHandle: ...

    @overload
    def publish(
        self,
        topic: str | None,
        value: bytes | None,
        *,
        reply: Literal[False] = False,
        **options: Unpack[PublishOptions],
    ) -> Receipt: ...

    @overload
    def publish(
        self, topic: TopicList, value: bytes | None, *, reply: Literal[False] = False, **options: Unpack[PublishOptions]
    ) -> list[Receipt]: ...

    @show_fields
    def publish(
        self,
        topic: str | TopicList | None,
        value: bytes | None,
        *,
        key: bytes | str | None = None,
        durability: Durability | str | None = None,
        expected_offset: int | None = None,
        expected_version: int | None = None,
        reply: bool = False,
        **fields: Unpack[MessageFields],
    ) -> Receipt | list[Receipt] | JobHandle:
        """Publish a message, and wait for the broker's receipt.

        Parameters:
            topic: the topic; the broker creates it if it permits that (`auto_create_topics`). Or a list of topics,
                which get the message together or not at all. None: the ingress, from which routes carry the message
                on (`bus.routes`).
            value: bytes; None marks the key as deleted. A producer with a serializer takes other values.
            key: messages with the same key go to the same partition, in order.
            headers: names to text, bytes or None, as a mapping; or a list of such pairs, where a name repeats.
            timestamp: the message's time, by default now; a datetime or microseconds since 1970.
            due: leased subscriptions do not deliver the message before this time.
            priority: an integer, for subscriptions with the discipline `priority`; greater first.
            expires: the broker does not deliver the message after this time.
            partition: the partition, instead of by key.
            durability: what must be reached before the receipt: `memory`, `written`, `synced` or
                `replicated`; at least the topic's.
            expected_offset: append only if the message gets this offset. Needs a partition, or a topic with only one.
            expected_version: append only if the key has so many messages; 0: it must be new. Needs a key, and a topic
                with `key_versions`, which is not created.
            reply: the message is a job whose result is awaited: return a handle for it instead of the receipt.

        Returns:
            Where the message is stored, and the durability reached; for a list of topics a list, in their order; with
            `reply` a JobHandle, which has the receipt.

        Raises:
            InvalidArgument: if an argument is wrong, such as a value that is not bytes.
            MessageTooLarge: if the message is larger than the topic's `message_bytes_max`.
            TopicNotFound: if the topic does not exist and the broker does not create topics.
            PartitionNotFound: if the topic has no such partition.
            UnexpectedOffset: if the message would not get `expected_offset`; nothing was appended.
            UnexpectedVersion: if the key has not `expected_version` messages; nothing was appended.
            DiskFull: if the broker's disk is full; nothing was appended.
            LimitExceeded: if, for a list of topics, open transactions have staged `staged_bytes_max` bytes.
            SubscriptionFull: if a leased subscription of one of a list of topics is full; nothing was appended.
            Timeout: if no receipt arrives in time; the message may still be published.

        Example:
            >>> receipt = bus.publish("orders", b"3 apples", key="ann", headers={"source": "web"})
            >>> receipt.topic, receipt.partition, receipt.offset
            ('orders', 0, 0)
        """
        name = INGRESS_TOPIC if topic is None else topic
        if not isinstance(name, str):
            expects = reply or expected_offset is not None or expected_version is not None
            return self._publish_to_all(name, value, key, expects, fields)
        producer = self._own_producer or self._begin_producer()
        if reply:
            handle = self._jobs.new_handle(self)
            fields["headers"] = reply_headers(fields.get("headers"), handle.id)
        receipt = producer.publish(
            value,
            key,
            topic=name,
            durability=durability,
            expected_offset=expected_offset,
            expected_version=expected_version,
            **fields,
        )
        if not reply:
            return receipt
        handle.receipt = receipt
        return handle

    def job_result(self, id: str) -> JobHandle:
        """Create a handle for a job that was published with `reply=True` before; sends no request yet.

        Results are kept for a day, as the broker's setting `result_seconds` says.

        Parameters:
            id: the id of its first handle, also one of another process.

        Returns:
            The handle.

        Raises:
            InvalidArgument: if the id is not one of a job.

        Example:
            >>> handle = bus.publish("jobs", b"cat.jpg", reply=True)
            >>> bus.job_result(handle.id).done()
            False
        """
        return self._jobs.handle(id, self)

    @show_fields
    def publish_many(
        self,
        topic: str | None,
        values: Iterable[bytes],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        key: bytes | str | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
        expected_version: int | None = None,
        **columns: Unpack[MessageColumns],
    ) -> list[Receipt]:
        """Publish messages in as few batches as possible, and wait for the receipts.

        Without keys all go to one partition, in order; those of the next call go to the next partition.

        Parameters:
            topic: the topic; None: the ingress, as for `publish`.
            values: the messages' values.
            keys: one for each value, or None where there is none.
            key: one for all values, instead of `keys`.
            headers: one mapping or list of pairs for each value, or None.
            timestamps: one for each value, or None.
            dues: one for each value, or None.
            priorities: one for each value, or None.
            expires: one for each value, or None.
            partition: the partition for all of them, instead of by key.
            durability: as for `publish`.
            expected_version: append all of them, or nothing if the key has not so many messages. Needs `key`, and a
                topic with `key_versions`.

        Returns:
            A receipt for each partition that got messages; several for one if other producers' messages came between.

        Raises:
            InvalidArgument: if an argument is wrong; nothing was published.
            MessageTooLarge: if a message is larger than the topic's `message_bytes_max`; nothing was published.
            UnexpectedVersion: if the key has not `expected_version` messages; nothing was published.
            Timeout: if the receipts do not arrive in time; the messages may still be published.

        Example:
            >>> receipts = bus.publish_many("orders", [b"3 apples", b"5 pears"])
            >>> [(receipt.offset, receipt.count) for receipt in receipts]
            [(0, 2)]
        """
        topic = INGRESS_TOPIC if topic is None else topic
        producer = self._own_producer or self._begin_producer()
        return producer.publish_many(
            values,
            keys,
            key=key,
            topic=topic,
            partition=partition,
            durability=durability,
            expected_version=expected_version,
            **columns,
        )

    def history(self, topic: str, key: bytes | str, *, start_version: int = 0) -> Iterator[Received]:
        """Read the messages of one key in the order of their versions, without reading the topic.

        Parameters:
            topic: the topic, which has `key_versions`.
            key: the key, such as the id of an aggregate.
            start_version: the version of the first message to read.

        Returns:
            The messages that there are when they are read; `version` tells the version of each. Compaction may have
            removed some.

        Raises:
            TopicNotFound: when reading starts, if the topic does not exist.
            InvalidArgument: when reading starts, if the topic does not count versions.
            EventsMissing: if a message is damaged.

        Example:
            >>> info = bus.create_topic("accounts", key_versions=True)
            >>> receipts = bus.publish_many("accounts", [b"opened", b"paid in"], key="ann", expected_version=0)
            >>> [(event.version, event.value) for event in bus.history("accounts", "ann")]
            [(0, b'opened'), (1, b'paid in')]
        """
        self._check_open()
        for found in read_history(self._broker, topic, key, start_version):
            yield versioned_message(topic, *found)

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
    ) -> Producer:
        """Create a producer with its own settings.

        Parameters:
            topic: the default topic of its messages.
            linger: how many seconds a sent message may wait for others of its batch.
            batch_bytes: send a batch when its messages have so many bytes.
            batch_count: send a batch when it has so many messages.
            compression: `none`, `lz4` or `zstd`; by default the topic's setting.
            partitioner: takes a key and the number of partitions, returns a partition; by default the crc32c of the
                key modulo the number of partitions. Messages without a key go to one partition for a batch, then to
                the next.
            serializer: encodes values: `bytes` (the default: no encoding), `str`, `json`, or a callable.
            durability: what must be reached before a receipt; by default the topic's setting.
            buffer_bytes: how many bytes may wait for the broker's acknowledgement.
            on_full: when that buffer is full: `block`, or `raise` Busy.
            before_publish: hooks that get each message (an OutgoingMessage) before it is serialized, and return it,
                another one, or None to drop it.
            after_ack: hooks that get the receipt of each acknowledged batch; they must not block.
            timeout: how many seconds to retry a message; by default the time-out of the bus.

        Returns:
            The producer.

        Raises:
            InvalidArgument: if a setting is wrong.

        Example:
            >>> with bus.producer("orders", serializer="json") as producer:
            ...     sent = producer.send({"item": "plum"}, key="ann")
            >>> (sent.result()).offset
            0
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
        accumulator = Accumulator(
            self._broker, self._metadata_cache, self._timers, settings, self._producers.discard, self
        )
        self._producers.add(accumulator)
        return Producer(accumulator)

    def transaction(self, name: str, *, sequence: int | None = None, timeout: float = 60.0) -> Transaction:
        """Create a transaction, for use in `with`: committed at the end of the block, aborted if it raises.

        Parameters:
            name: identifies the program; without `/`. The broker aborts an open transaction of this name, in whatever
                process.
            sequence: the number of this transaction among those of the name. If it was committed before,
                `already_committed` is true, and publishing in it has no effect. By default, the next number.
            timeout: the broker aborts the transaction after so many seconds.

        Returns:
            The transaction, which has not begun yet.

        Raises:
            InvalidArgument: if a name or number is wrong.

        Example:
            >>> with bus.transaction("nightly-load") as transaction:
            ...     transaction.publish("orders", b"3 apples")
            ...     transaction.publish("invoices", b"for 3 apples")
            >>> bus.offsets("invoices")
            {0: 1}
        """
        self._check_open()
        checked_seconds(timeout, "timeout", 0.001)
        return Transaction(self._broker, self._metadata_cache, name, sequence, timeout, self)

    def schedule(
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
    ) -> Scheduled:
        """Publish a message that leased subscriptions deliver at a time, and that can be changed until then.

        Parameters:
            topic: the topic.
            value: as for `publish`.
            at: the due time: a datetime, or microseconds since 1970;
            in_: or in so many seconds.
            key: as for `publish`.
            headers: as for `publish`.
            priority: as for `publish`.
            expires: as for `publish`.
            owner: the producer group that may change the message; by default everybody may.
            partition: as for `publish`.

        Returns:
            A handle that moves, updates and cancels the message.

        Raises:
            InvalidArgument: if an argument is wrong, or neither or both of `at` and `in_` are given.
            Timeout: if no receipt arrives in time; the message may still be published.

        Example:
            >>> reminder = bus.schedule("reminders", b"call ann", in_=3600)
            >>> reminder.version
            1
            >>> reminder.cancel()
        """
        due = moment_of(at, in_, self._clock.now_us())
        if owner:
            headers = replaced_headers(checked_headers(headers), {OWNER_HEADER: owner.encode()})
        receipt = self.publish(
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
        return Scheduled(self._broker, self._clock, name, 1, owner, self)._knows(value, headers)

    def scheduled(self, id: str, *, version: int | None = None, owner: str = "") -> Scheduled:
        """Create a handle for a message that was scheduled before; sends no request yet.

        Parameters:
            id: the id of its first handle, such as `reminders/0/17@3`: topic, partition, offset and the topic's id.
                Without the topic's id it is the message at that offset of the topic that has the name now.
            version: the version that was read; by default changes apply to any version.
            owner: the producer group in whose name it is changed.

        Returns:
            The handle.

        Raises:
            InvalidArgument: if the id is not one of a message.

        Example:
            >>> reminder = bus.schedule("reminders", b"call ann", in_=3600)
            >>> bus.scheduled(reminder.id).cancel()
        """
        return Scheduled(self._broker, self._clock, parse_id(id), version, owner, self)

    # Subjects.

    @property
    def subjects(self) -> Subjects:
        """Publishing to subjects and subscribing to them: live, without topics."""
        return Subjects(self, self._broker)

    @property
    def routes(self) -> Routes:
        """Routes, which carry messages from topics to other topics: add, list, explain and remove them."""
        return Routes(self, self._broker)

    @overload
    def request(
        self,
        subject: str,
        value: Any = ...,
        *,
        headers: GivenHeaders | None = ...,
        timeout: float = ...,
        serializer: str | Serializer | None = ...,
        callback: None = ...,
    ) -> Reply: ...

    @overload
    def request(
        self,
        subject: str,
        value: Any = ...,
        *,
        headers: GivenHeaders | None = ...,
        timeout: float = ...,
        serializer: str | Serializer | None = ...,
        callback: ReplyFunction | str,
    ) -> None: ...

    def request(
        self,
        subject: str,
        value: Any = b"",
        *,
        headers: GivenHeaders | None = None,
        timeout: float = 5.0,
        serializer: str | Serializer | None = None,
        callback: ReplyFunction | str | None = None,
    ) -> Reply | None:
        """Ask one of those who serve a subject, and wait for the reply.

        With a callback it returns None as soon as the request is sent, and the reply, or the error, goes there: a
        function is called with the Reply or the error; to a topic, or to a URL, the reply is sent with its headers,
        and an error as its JSON object with the header `headrace-error`. It is the bus that does so: a reply that
        comes after the bus is closed is lost.

        Parameters:
            subject: the subject, such as `price.quote`.
            value: bytes, or what the serializer takes.
            headers: names to text, bytes or None, as a mapping; or a list of such pairs, where a name repeats.
            timeout: for how many seconds to wait for the reply.
            serializer: encodes the value: `bytes` (the default: no encoding), `str`, `json`, or a callable.
            callback: a function, the name of a topic, or a URL; by default the reply is returned.

        Returns:
            The reply; None with a callback.

        Raises:
            NoResponders: if nobody serves the subject; this is told at once.
            Timeout: if there is no reply in time; the request may still be handled.
            ServiceFailed: if the handler raised; it has the `error_code`, the text and the `error_details` of the
                handler's error.
            ResponderLost: if the responder's connection ended; it may have handled the request.
            Busy: if all responders were busy until the time was over, and too many requests wait.
            InvalidArgument: if an argument is wrong.

        Example:
            >>> bus.request("price.quote", b"plum")
            Traceback (most recent call last):
            ...
            headrace.model.errors.NoResponders: nobody serves price.quote: start a responder for it, or check the name
        """
        body = serialized(serializer_of(serializer), value) or b""
        told = checked_headers(headers)
        timeout = checked_timeout(timeout, least=0.001)
        if callback is None:
            return self._requester.request(subject, body, told, timeout)
        target = reply_target(callback)
        self._requester.request_later(self, subject, body, told, timeout, target)
        return None

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
    ) -> Subscription:
        """Receive messages; reading starts when the subscription is iterated, or entered with `with`.

        With a group, its members divide the partitions, and the broker stores the group's committed offsets. Without
        one, this subscription reads alone from `start`, and the broker stores nothing.

        Parameters:
            topics: the topics to read.
            group: the consumer group to join.
            pattern: topics by pattern, besides those named: `*` stands for any characters, `?` for one. New topics
                that match are found within seconds.
            start: where to start: `earliest`, `latest`, a datetime, or an offset; or a mapping of partitions to
                offsets. With a group, where a group without committed offsets starts (not an offset).
            partitions: read only these, without a group.
            commit: `auto`: a message counts as processed when the next one is requested, and offsets are committed
                every `commit_interval` seconds, when partitions move to other members, and at the end. `manual`: only
                `commit()` commits.
            commit_interval: seconds between automatic commits.
            deserializer: decodes values: `bytes` (the default: no decoding), `str`, `json`, or a callable.
            on_error: for a message that cannot be decoded: `raise` CannotDeserialize, which has the message, and
                continue after it when iterated again; `skip` it, with a warning logged; or a callable that gets the
                error and returns a value instead.
            on_out_of_range: where to continue when the next message was removed: `earliest` or `latest`, with a
                warning logged, or `raise` OffsetOutOfRange.
            on_corrupt: for damaged messages: `raise` CorruptBatch, which has their offsets, and continue after them
                when iterated again; `skip` them, with a warning logged; or a callable that gets a DamagedRange and
                skips them by returning.
            timeout: end the iteration after so many seconds without a message; by default never.
            session_timeout: after so many seconds without contact a member's partitions go to others.
            prefetch_bytes: how much to receive ahead of processing, for all partitions together, but at least
                64 KiB for each.
            create: create topics that do not exist, if the broker permits it (`auto_create_topics`).

        Returns:
            The subscription, which reads nothing yet.

        Raises:
            InvalidArgument: if the arguments are wrong or contradict each other.
            TopicNotFound: when reading starts, if a topic does not exist; it names similar topics.

        Example:
            >>> receipts = bus.publish_many("orders", [b"3 apples", b"5 pears"])
            >>> with bus.subscribe("orders", group="billing", timeout=1) as orders:
            ...     print([message.value for message in orders])
            [b'3 apples', b'5 pears']
        """
        self._check_open()
        subscription = Subscription(
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
    ) -> Queue:
        """Open a leased subscription of a topic, a work queue; sends no request yet.

        Parameters:
            topic: the topic. If it does not exist, the queue's methods raise TopicNotFound.
            subscription: the name of the leased subscription; the first lease creates it, with all messages of the
                topic.
            deserializer: decodes values: `bytes` (the default: no decoding), `str`, `json`, or a callable.
            create: let the first lease create the topic if it does not exist and the broker permits it
                (`auto_create_topics`).

        Returns:
            The queue.

        Raises:
            InvalidArgument: if a name is wrong.

        Example:
            >>> receipt = bus.publish("jobs", b"resize cat.jpg")
            >>> queue = bus.queue("jobs")
            >>> jobs = queue.lease(max=10)
            >>> queue.ack(jobs)
            []
        """
        self._check_open()
        acknowledger, lease_requester = self._shared_leasing(topic, subscription)
        return Queue(self, self._broker, acknowledger, lease_requester, deserializer, create)

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
    ) -> LeasedBlock:
        """Lease messages for a block: `with bus.lease("jobs", max=10) as jobs:`.

        At the end of the block the client acknowledges them; if the block raises, it releases them with the error as
        the reason. Messages that the block settled itself, with a queue's methods, are left alone. In the block leases
        are extended automatically.

        Parameters:
            topic: the topic.
            max: how many messages at most.
            subscription: the name of the leased subscription.
            lease: for how many seconds; by default the subscription's setting.
            wait: how many seconds to wait if no message is ready.
            deserializer: as for `queue`.
            create: as for `queue`.

        Returns:
            A context manager that yields the list of jobs.

        Raises:
            TopicNotFound: in `with`, if the topic does not exist and `create` is not set.
            LeaseExpired: at the end of the block, if a lease could not be extended and another worker has the message.
            NotLeaseHolder: at the end of the block, if the message is not leased by this token any more.
            MessageGone: at the end of the block, if the message was removed.

        Example:
            >>> receipt = bus.publish("jobs", b"resize cat.jpg")
            >>> with bus.lease("jobs", max=10) as jobs:
            ...     print([job.value for job in jobs])
            [b'resize cat.jpg']
        """
        queue = self.queue(topic, subscription, deserializer=deserializer, create=create)
        return queue.leased(max, lease=lease, wait=wait)

    def fetch(
        self, topic: str, partition: int, offset: int, *, bytes_max: int = 1 << 20, wait: float = 0.0
    ) -> list[Batch]:
        """Read batches of a partition by offset.

        Parameters:
            topic: the topic.
            partition: the partition.
            offset: the first wanted offset; the first batch may begin before it.
            bytes_max: how much to read at most, but at least one batch.
            wait: how many seconds to wait if there is no message.

        Returns:
            The batches; none if there is no message at or after the offset.

        Raises:
            TopicNotFound: if the topic does not exist.
            PartitionNotFound: if the topic has no such partition.
            OffsetOutOfRange: if messages at that offset were removed, or it is after the next one.
            CorruptBatch: if the messages are damaged; it has their offsets.

        Example:
            >>> receipts = bus.publish_many("orders", [b"3 apples", b"5 pears"])
            >>> batches = bus.fetch("orders", partition=0, offset=0)
            >>> batches[0].columns().values
            [b'3 apples', b'5 pears']
        """
        return fetch_batches(self._broker, topic, partition, offset, bytes_max, wait)

    # The bus itself.

    def info(self) -> BrokerInfo:
        """Describe the broker: version, addresses, counts and limits.

        Returns:
            The broker as it is now.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> (bus.info()).topics
            0
        """
        return self._broker.request(Info())

    def close(self) -> None:
        """Close all producers and subscriptions, and then the connections.

        Producers send their pending messages first.

        Raises:
            Undelivered: if a producer could not deliver messages; everything is closed all the same.

        Example:
            >>> bus.close()
        """
        if self._closed:
            return
        self._closed = True
        try:
            failed = self._close_parts(now())  # one deadline for all of them
        finally:  # also when it is interrupted: nothing may go on that nobody can end any more
            self._abandon_parts()
            self._close_lines([broker for broker in (self._consuming, self._broker) if broker is not None])
        if failed is not None:
            raise failed
