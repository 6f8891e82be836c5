"""Transactions: messages for several topics, and positions of a group, that count together or not at all."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

from headrace.client._async.concurrency import Guard, ResultCell, now
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.consumer.subscription import AsyncSubscription
from headrace.client._async.producer.metadata_cache import AsyncMetadataCache
from headrace.client.connection import fork_guard
from headrace.client.connection.request_router import Bytes
from headrace.client.connection.retrying import REPEATED
from headrace.client.consumer.partition_reader import HandedPositions
from headrace.client.producer.batch_split import (
    BatchPlan,
    CheckedColumns,
    GivenMessages,
    given_messages,
    plan_batches,
    plan_one_batch,
)
from headrace.client.producer.message_fields import MessageColumns, MessageFields, show_fields
from headrace.client.producer.pending_batch import OutgoingMessage, PendingBatch, checked_key
from headrace.client.producer.serializing import to_bytes
from headrace.client.producer.topic_metadata import (
    TopicMetadata,
    check_partition,
    expected_batch,
    expected_place,
)
from headrace.model.arguments import checked_timeout, shown
from headrace.model.batch import NO_PRODUCER, Batch
from headrace.model.errors import (
    Closed,
    ConnectionFailed,
    HeadraceError,
    InvalidArgument,
    MemberFenced,
    MessageTooLarge,
    PartitionNotFound,
    Timeout,
    UnknownMember,
)
from headrace.model.partitioning import by_key
from headrace.model.representation import described, short, state_of
from headrace.model.requests import (
    TransactionAbort,
    TransactionBegin,
    TransactionBegun,
    TransactionCommit,
    TransactionCommitted,
    TransactionStage,
    TransactionStaged,
)

logger = logging.getLogger("headrace.client")

_BATCH_BYTES = 100_000
_BATCH_COUNT = 1000
_COMMITS_MAX = 3
"""Attempts to commit positions of a group, all but the first after the group was joined again."""
_UNDER_WAY_MAX = 32
_UNDER_WAY_BYTES_MAX = 16 << 20


class _Staging:
    """A batch on its way to the broker's keeping."""

    def __init__(self, head: TransactionStage, body: Bytes) -> None:
        self.head = head
        self.body = body
        self.outcome: ResultCell[int] = ResultCell()

    def answered(self, answer: TransactionStaged | HeadraceError, _body: Bytes) -> None:
        """Resolve the outcome with the broker's answer."""
        if isinstance(answer, HeadraceError):
            self.outcome.fail(answer)
        else:
            self.outcome.resolve(answer.stage)


class AsyncTransaction:
    """A transaction, to be used in `with`. Made by `bus.transaction(...)`.

    The broker stages what is published in it, and makes it visible at the end of the block, all at once; if the block
    raises, nothing of it ever becomes visible.

    Several processes can share one: each calls `join`, stages batches, and passes the result of `staged` to one of
    them, which calls `adopt_stages` with all of them, and commits.

    Example:
        >>> receipts = await bus.publish_many("orders", [b"3", b"5"])
        >>> async with bus.subscribe("orders", group="totals", commit="manual", timeout=1) as orders:
        ...     async for batch in orders.batches():
        ...         async with bus.transaction("totals") as transaction:
        ...             await transaction.publish("invoices", b"%d" % sum(map(int, batch.values)))
        ...             transaction.commit_positions(orders)
        >>> await bus.offsets("invoices")
        {0: 1}
    """

    def __init__(
        self,
        broker: AsyncReconnectingConnection,
        metadata_cache: AsyncMetadataCache,
        name: str,
        sequence: int | None,
        timeout: float,
        bus: object = None,
    ) -> None:
        self.name = name
        self.outcome: TransactionCommitted | None = None
        """What the broker said to the commit: where the batches are."""
        self._bus = bus  # which must live as long
        self._broker = broker
        self._metadata_cache = metadata_cache
        self._sequence = sequence
        self._timeout = timeout
        self._begun: TransactionBegun | None = None
        self._ended = False
        self._failure: HeadraceError | None = None  # why it can only be aborted
        self._guard = Guard()
        self._forks = fork_guard.count
        self._gathering: dict[tuple[str, int], PendingBatch] = {}
        self._under_way: deque[_Staging] = deque()
        self._under_way_bytes = 0
        self._stages: list[int] = []
        self._turn = 0
        self._subscription: AsyncSubscription | None = None
        self._positions = HandedPositions()

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield short(self.name)
        yield "" if self.sequence is None else f"sequence={self.sequence}"
        yield state_of(
            forked=self._forks != fork_guard.count,
            already_committed=self.already_committed,
            committed=self.outcome is not None,
            aborted=self._ended,
            closed=self._broker.closed,
            open=self._begun is not None,
            not_begun=True,
        )

    @property
    def already_committed(self) -> bool:
        """Whether a transaction of this name and sequence was committed before: there is nothing to do."""
        return self._begun is not None and self._begun.committed

    @property
    def sequence(self) -> int | None:
        """Which of the transactions of this name it is."""
        return self._sequence if self._begun is None else self._begun.sequence

    @property
    def epoch(self) -> int:
        """By which the broker tells it from others of its name."""
        return 0 if self._begun is None else self._begun.epoch

    @show_fields
    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | str | None = None,
        expected_version: int | None = None,
        **fields: Unpack[MessageFields],
    ) -> None:
        """Publish a message with the commit.

        Parameters:
            topic: as for `bus.publish`.
            value: as for `bus.publish`.
            key: as for `bus.publish`.
            headers: as for `bus.publish`.
            timestamp: as for `bus.publish`.
            due: as for `bus.publish`.
            priority: as for `bus.publish`.
            expires: as for `bus.publish`.
            partition: as for `bus.publish`.
            expected_version: commit only if the key has so many messages, with those that were published in the
                transaction before. Needs a topic with `key_versions`; the commit raises UnexpectedVersion.

        Raises:
            InvalidArgument: if an argument is wrong.
            TransactionFenced: if another process began a transaction of the same name.
            TransactionNotFound: if the broker has aborted the transaction, because it took too long.

        Example:
            >>> async with bus.transaction("load") as transaction:
            ...     await transaction.publish("orders", b"3 apples", key="ann")
        """
        if self._nothing_to_do():
            return
        message = OutgoingMessage(topic, value, checked_key(key), **fields)
        expected_place(None, expected_version, message.key)
        deadline = now() + self._broker.timeout
        metadata = await self._metadata_cache.get(topic, deadline, create=expected_version is None)
        if expected_version is not None:
            given = GivenMessages([value], *([each] for each in _given_fields(message)))
            await self._publish_expected(topic, given.checked(to_bytes), message.partition, metadata, expected_version)
            return
        try:
            number, pending_batch = self._put(message, to_bytes(value), metadata)
        except (MessageTooLarge, PartitionNotFound) as refusal:
            metadata = await self._metadata_cache.refreshed(topic, refusal, deadline)
            number, pending_batch = self._put(message, to_bytes(value), metadata)
        if pending_batch.bytes >= _BATCH_BYTES or len(pending_batch.values) >= _BATCH_COUNT:
            await self._stage(topic, number, metadata, deadline)

    @show_fields
    async def publish_many(
        self,
        topic: str,
        values: Iterable[bytes],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        key: bytes | str | None = None,
        partition: int | None = None,
        expected_version: int | None = None,
        **columns: Unpack[MessageColumns],
    ) -> None:
        """Publish messages with the commit.

        Parameters:
            topic: as for `bus.publish_many`.
            values: as for `bus.publish_many`.
            keys: as for `bus.publish_many`.
            key: as for `bus.publish_many`.
            headers: as for `bus.publish_many`.
            timestamps: as for `bus.publish_many`.
            dues: as for `bus.publish_many`.
            priorities: as for `bus.publish_many`.
            expires: as for `bus.publish_many`.
            partition: as for `bus.publish_many`.
            expected_version: as for `publish`; all messages have the same key.

        Raises:
            InvalidArgument: if an argument is wrong.
            TransactionFenced: if another process began a transaction of the same name.
            LimitExceeded: if open transactions have staged `staged_bytes_max` bytes.

        Example:
            >>> async with bus.transaction("load", sequence=1) as transaction:
            ...     if not transaction.already_committed:
            ...         await transaction.publish_many("orders", [b"3 apples", b"5 pears"])
        """
        if self._nothing_to_do():
            return
        checked = given_messages(values, keys, key, **columns).checked(to_bytes)
        expected_batch(expected_version)
        deadline = now() + self._broker.timeout
        metadata = await self._metadata_cache.get(topic, deadline, create=expected_version is None)
        if expected_version is not None:
            await self._publish_expected(topic, checked, partition, metadata, expected_version)
            return
        try:
            planned = self._planned(topic, checked, partition, metadata)
        except (MessageTooLarge, PartitionNotFound) as refusal:
            metadata = await self._metadata_cache.refreshed(topic, refusal, deadline)
            planned = self._planned(topic, checked, partition, metadata)
        try:
            for number, portion in planned:
                while (topic, number) in self._gathering:  # what was published before goes before
                    await self._stage(topic, number, metadata, deadline)
                pending_batch = self._gathering[topic, number] = _pending_batch()
                pending_batch.fill(portion.columns, portion.size)
                deadline = now() + self._broker.timeout  # each: there may be any number
                await self._stage(topic, number, metadata, deadline)
        except BaseException as error:
            self._fail(error)  # a part of the messages must not be committed without the others
            raise
        self._turn += 1

    async def _publish_expected(
        self, topic: str, checked: CheckedColumns, partition: int | None, metadata: TopicMetadata, version: int
    ) -> None:
        """Stage messages of one key in a batch of their own, with the version that it must get."""
        for number, portion in plan_one_batch(topic, checked, partition, 0, metadata, by_key):
            deadline = now() + self._broker.timeout
            await self._stage(topic, number, metadata, deadline)  # what was published before goes before
            pending_batch = _pending_batch()
            pending_batch.fill(portion.columns, portion.size)
            pending_batch.encode(time.time_ns() // 1000, metadata.codec, NO_PRODUCER, None)
            assert pending_batch.batch is not None
            await self._send(topic, number, pending_batch.batch.data, deadline, version)

    def commit_positions(self, subscription: AsyncSubscription) -> None:
        """Commit, with the transaction, the offsets after all messages that the subscription has delivered so far.

        Parameters:
            subscription: it needs a group, and `commit="manual"`.

        Raises:
            InvalidArgument: if the subscription has no group, or commits automatically.
            MemberFenced: at the commit, if a partition was assigned to another member; nothing was committed.

        Example:
            >>> receipt = await bus.publish("orders", b"3")
            >>> async with bus.subscribe("orders", group="totals", commit="manual", timeout=10) as orders:
            ...     message = await anext(aiter(orders))
            ...     async with bus.transaction("totals") as transaction:
            ...         await transaction.publish("invoices", b"total: " + message.value)
            ...         transaction.commit_positions(orders)
        """
        if not hasattr(subscription, "_positions_handed"):
            raise InvalidArgument(f"positions are those of a subscription, not of {shown(subscription)}")
        if not self._nothing_to_do():
            self._positions = subscription._positions_handed()
            self._subscription = subscription

    async def begin(self) -> None:
        """Begin the transaction; `with` does it.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> transaction = bus.transaction("load")
            >>> await transaction.begin()
            >>> await transaction.publish("orders", b"3 apples")
            >>> await transaction.commit()
        """
        fork_guard.check(self._forks, "a transaction")
        head = TransactionBegin(self.name, self._sequence, round(self._timeout * 1000))
        self._begun = await self._broker.request(head, late=self._begun_late)

    async def join(self) -> None:
        """Begin a shared transaction, or take part in one that others began with `join`.

        It survives a restart of the broker.

        Raises:
            TransactionFenced: if the name has gone on to a later sequence.

        Example:
            >>> transaction = bus.transaction("load", sequence=1)
            >>> await transaction.join()
            >>> await transaction.publish("orders", b"3 apples")
            >>> await transaction.commit()
        """
        fork_guard.check(self._forks, "a transaction")
        head = TransactionBegin(self.name, self._sequence, round(self._timeout * 1000), join=True)
        self._begun = await self._broker.request(head)

    def adopt_stages(self, epoch: int, stages: Sequence[int]) -> None:
        """Continue with the batches that processes which joined have staged.

        Parameters:
            epoch: the epoch of the shared transaction.
            stages: the numbers that their `staged` returned.

        Raises:
            InvalidArgument: if an argument is wrong.

        Example:
            >>> task = bus.transaction("load", sequence=1)
            >>> await task.join()
            >>> await task.publish("orders", b"3 apples")
            >>> driver = bus.transaction("load", sequence=1)
            >>> driver.adopt_stages(task.epoch, await task.staged())
            >>> await driver.commit()
            >>> await bus.offsets("orders")
            {0: 1}
        """
        self._begun = TransactionBegun(epoch, self._sequence or 0)
        self._stages += stages

    async def metadata(self, topic: str) -> TopicMetadata:
        """Return what must be known to stage batches for a topic; the broker may create the topic.

        Parameters:
            topic: the topic.

        Returns:
            Its partitions and limits.

        Raises:
            TopicNotFound: if the topic does not exist and the broker does not create topics.

        Example:
            >>> async with bus.transaction("load") as transaction:
            ...     (await transaction.metadata("orders")).partitions
            1
        """
        return await self._metadata_cache.get(topic)

    async def stage(self, topic: str, partition: int, batch: Batch) -> None:
        """Stage a batch, whose messages have been checked; returns before the broker has it.

        Parameters:
            topic: the topic.
            partition: the partition.
            batch: the batch.

        Raises:
            TransactionFenced: if another process began a transaction of the same name.
            LimitExceeded: if open transactions have staged `staged_bytes_max` bytes.

        Example:
            >>> from headrace.model.batch import encode
            >>> receipt = await bus.publish("orders", b"3 apples")
            >>> batches = await bus.fetch("orders", partition=0, offset=0)
            >>> async with bus.transaction("copy") as transaction:
            ...     await transaction.stage("copies", 0, encode(batches[0].columns(), time_us=0))
        """
        if not isinstance(batch, Batch):
            raise InvalidArgument(f"only a Batch can be staged, not {shown(batch)}")
        if self._nothing_to_do():
            return
        deadline = now() + self._broker.timeout
        metadata = await self._metadata_cache.get(topic, deadline)
        try:
            check_partition(topic, partition, metadata)
        except PartitionNotFound as refusal:
            metadata = await self._metadata_cache.refreshed(topic, refusal, deadline)  # it may have more by now
            check_partition(topic, partition, metadata)
        await self._stage(topic, partition, metadata, deadline)  # what was published before goes before
        await self._send(topic, partition, batch.data, deadline)

    async def staged(self) -> list[int]:
        """Return the numbers of all batches that were staged here, once the broker has them.

        Returns:
            The numbers, for `adopt_stages`.

        Raises:
            TransactionFenced: if another process began a transaction of the same name.

        Example:
            >>> task = bus.transaction("load", sequence=1)
            >>> await task.join()
            >>> await task.publish("orders", b"3 apples")
            >>> len(await task.staged())
            1
        """
        return await self._staged(now() + self._broker.timeout)

    async def _staged(self, deadline: float) -> list[int]:
        self._check_failure()
        for topic, number in list(self._gathering):
            await self._stage(topic, number, await self._metadata_cache.get(topic, deadline), deadline)
        while self._under_way:
            await self._settle_oldest(deadline)
        return list(self._stages)

    async def commit(self, timeout: float | None = None) -> None:
        """Make all of it visible; the end of the `with` block does it.

        Parameters:
            timeout: how many seconds it may take; by default the time-out of the bus.

        Raises:
            TransactionFenced: if another process began a transaction of the same name; nothing was committed.
            TransactionNotFound: if the broker has aborted the transaction; nothing was committed.
            MemberFenced: if a partition of committed positions was assigned to another member; nothing was committed.
            UnexpectedVersion: if a key has not as many messages as was expected; nothing was committed.
            SubscriptionFull: if a leased subscription is full; nothing was committed, and further commits raise it too.
            Timeout: if the broker does not answer in time; a commit with the same sequence tells whether it happened.

        Example:
            >>> transaction = bus.transaction("load")
            >>> await transaction.begin()
            >>> await transaction.publish("orders", b"3 apples")
            >>> await transaction.commit()
        """
        wait_s = self._broker.timeout if timeout is None else checked_timeout(timeout)
        self._check_failure()
        if self._ended or self._nothing_to_do():
            return
        assert self._begun is not None
        deadline = now() + wait_s
        stages = await self._staged(deadline)
        self.outcome = await self._commit_staged(self._begun.epoch, stages, deadline)
        self._ended = True
        if self._subscription is not None:
            self._subscription._positions_committed(self._positions)

    async def _commit_staged(self, epoch: int, stages: list[int], deadline: float) -> TransactionCommitted:
        """Commit; if the group does not know the member, as after a restart of the broker, again when it has joined."""
        attempts, positions = 1, self._positions
        while True:
            head = TransactionCommit(self.name, epoch, stages, positions.group, positions.member, positions.places)
            try:
                return await self._broker.request(head, timeout=deadline - now())
            except (MemberFenced, UnknownMember):
                if self._subscription is None or attempts == _COMMITS_MAX:
                    raise
            attempts += 1
            await self._subscription._join_again(deadline)

    async def abort(self) -> None:
        """Discard all of it; an exception in the `with` block does it.

        Raises:
            Timeout: if the broker does not answer in time; it aborts the transaction later.

        Example:
            >>> transaction = bus.transaction("load")
            >>> await transaction.begin()
            >>> await transaction.publish("orders", b"3 apples")
            >>> await transaction.abort()
        """
        await self._abort_by(now() + self._broker.timeout)

    async def _abort_by(self, deadline: float) -> None:
        if self._ended or self._begun is None or self._begun.committed or self._forks != fork_guard.count:
            return
        self._ended = True
        try:
            head = TransactionAbort(self.name, self._begun.epoch)
            await self._broker.request(head, timeout=deadline - now())
        except HeadraceError as error:
            logger.info("the transaction %s is left for the broker to abort: %s", self.name, error)

    async def __aenter__(self) -> "AsyncTransaction":
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            deadline = now() + self._broker.timeout
            try:
                await self.commit()
            except HeadraceError as error:
                self._fail(error)
                await self._abort_by(deadline)  # commit and abort share the time
                raise
            except BaseException as error:
                self._fail(error)
                self._abort_nowait()  # whatever was interrupted; a commit that has arrived counts
                raise
        else:
            await self.abort()

    def _begun_late(self, answer: TransactionBegun, _body: Bytes) -> None:
        """The broker has begun it when nobody waited any more."""
        if self._begun is None and not answer.committed:
            self._begun = answer
            self._abort_nowait()

    def _abort_nowait(self) -> None:
        """Abort it without waiting for the answer; if that gets lost, the broker does so in the end."""
        connection = self._broker.connection
        if not self._ended and self._begun is not None and connection is not None and self._forks == fork_guard.count:
            self._ended = True
            head = TransactionAbort(self.name, self._begun.epoch)
            connection.request_nowait(head, b"", lambda _answer, _body: None)

    def _nothing_to_do(self) -> bool:
        """Whether it was committed before; raises if it is not open."""
        fork_guard.check(self._forks, "a transaction")
        if self._begun is None:
            raise Closed("the transaction has not begun: use it in `with`")
        if self._ended:
            raise Closed("the transaction has ended")
        self._check_failure()
        return self._begun.committed

    def _fail(self, error: BaseException) -> None:
        """Let all further commits raise the first error."""
        if self._failure is None:
            interrupted = f"the transaction {self.name} was interrupted, and can only be aborted: begin another"
            self._failure = error if isinstance(error, HeadraceError) else Closed(interrupted)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _partition(self, metadata: TopicMetadata, given: int | None, key: bytes | None) -> int:
        if given is not None:
            return given
        return self._turn % metadata.partitions if key is None else by_key(key, metadata.partitions)

    def _put(self, message: OutgoingMessage, value: bytes | None, metadata: TopicMetadata) -> tuple[int, PendingBatch]:
        """Put a message into the batch of its partition; returns both."""
        number = self._partition(metadata, message.partition, message.key)
        check_partition(message.topic, number, metadata)
        pending_batch = self._gathering.get((message.topic, number)) or _pending_batch()
        pending_batch.add(message, value, metadata.message_bytes_max)
        self._gathering[message.topic, number] = pending_batch
        return number, pending_batch

    def _planned(
        self, topic: str, checked: CheckedColumns, partition: int | None, metadata: TopicMetadata
    ) -> BatchPlan:
        keyless = self._partition(metadata, None, None)
        return plan_batches(topic, checked, partition, keyless, metadata, by_key, _BATCH_BYTES, _BATCH_COUNT)

    async def _stage(self, topic: str, number: int, metadata: TopicMetadata, deadline: float) -> None:
        """Send what was gathered for a partition."""
        pending_batch = self._gathering.get((topic, number))
        if pending_batch is None:
            return
        pending_batch.encode(time.time_ns() // 1000, metadata.codec, NO_PRODUCER, None)
        assert pending_batch.batch is not None
        del self._gathering[topic, number]
        await self._send(topic, number, pending_batch.batch.data, deadline)

    async def _send(
        self, topic: str, number: int, batch: Bytes, deadline: float, expected_version: int | None = None
    ) -> None:
        assert self._begun is not None
        staging = _Staging(TransactionStage(self.name, self._begun.epoch, topic, number, expected_version), batch)
        self._under_way.append(staging)
        self._under_way_bytes += len(staging.body)
        try:
            connection = await self._broker.get(deadline)
            connection.request_nowait(staging.head, staging.body, staging.answered)
        except BaseException:
            staging.outcome.fail(ConnectionFailed("the batch was not sent"))  # so that a commit sends it
            raise
        while len(self._under_way) >= _UNDER_WAY_MAX or self._under_way_bytes >= _UNDER_WAY_BYTES_MAX:
            await self._settle_oldest(deadline)

    async def _settle_oldest(self, deadline: float) -> None:
        """Wait until the broker has the oldest batch, which stays under way until then, whatever interrupts this."""
        staging = self._under_way[0]
        try:
            stage = await self._stage_number(staging, deadline)
        except (Timeout, *REPEATED):
            raise
        except HeadraceError as error:
            self._fail(error)
            raise
        with self._guard:
            if self._under_way and self._under_way[0] is staging:  # others may have waited for it, too
                self._under_way.popleft()
                self._under_way_bytes -= len(staging.body)
                self._stages.append(stage)

    async def _stage_number(self, staging: _Staging, deadline: float) -> int:
        try:
            return await staging.outcome.wait(max(deadline - now(), 0.001))
        except REPEATED:
            # If the first try did arrive after all it does no harm: the commit names those that count.
            answer = await self._broker.request(staging.head, staging.body, timeout=deadline - now())
            return answer.stage


def _given_fields(message: OutgoingMessage) -> tuple[Any, ...]:
    """The fields of a message beside its value, in the order of the columns."""
    return message.key, message.headers, message.timestamp, message.due, message.priority, message.expires


def _pending_batch() -> PendingBatch:
    outcome: ResultCell[None] = ResultCell()
    return PendingBatch(outcome, now())
