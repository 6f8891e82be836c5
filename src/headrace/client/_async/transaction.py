"""Transactions: messages for several topics, and positions of a group, that count together or not at all."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from headrace.client import forking
from headrace.client._async.catalogue import AsyncCatalogue
from headrace.client._async.concurrency import Outcome, now
from headrace.client._async.line import AsyncLine
from headrace.client._async.subscription import AsyncSubscription
from headrace.client.exchange import Bytes
from headrace.client.outgoing import GivenHeaders, Outgoing, Parcel, checked_key
from headrace.client.partitioning import divided
from headrace.client.portions import Checked, Given, Portion, portions
from headrace.client.serialising import to_bytes
from headrace.client.shapes import Shape, check_partition
from headrace.client.times import Moment, listed
from headrace.model.arguments import checked_timeout, shown
from headrace.model.batch import NO_PRODUCER, Batch
from headrace.model.describing import described, short, state_of
from headrace.model.errors import (
    Busy,
    Closed,
    ConnectionFailed,
    Draining,
    HeadraceError,
    InvalidArgument,
    MessageTooLarge,
    PartitionNotFound,
)
from headrace.model.partitioning import by_key
from headrace.model.requests import (
    Place,
    TransactionAbort,
    TransactionBegin,
    TransactionBegun,
    TransactionCommit,
    TransactionCommitted,
    TransactionStage,
)
from headrace.wire.native import Kind

logger = logging.getLogger("headrace.client")

_BATCH_BYTES = 100_000
_BATCH_COUNT = 1000
_UNDER_WAY_MAX = 32
_UNDER_WAY_BYTES_MAX = 16 << 20


class _Staging:
    """A batch on its way to the broker's keeping."""

    def __init__(self, head: TransactionStage, body: Bytes) -> None:
        self.head = head
        self.body = body
        self.outcome: Outcome[int] = Outcome()

    def told(self, answer: object, _body: Bytes) -> None:
        """The broker has it, or not."""
        if isinstance(answer, HeadraceError):
            self.outcome.fail(answer)
        else:
            self.outcome.settle(answer.stage)  # type: ignore[attr-defined]  # a TransactionStaged


class AsyncTransaction:
    """A transaction, to be used in `with`. Made by `bus.transaction(...)`.

    What is published in it is kept by the broker, and becomes visible at the end of the block, all at once; if the
    block ends with an exception, nothing of it ever is.

    Several processes can share one: each calls `join`, stages batches, and hands what `staged` returns to one of them,
    which calls `take_up` with all of it, and commits.
    """

    def __init__(
        self,
        line: AsyncLine,
        catalogue: AsyncCatalogue,
        name: str,
        sequence: int | None,
        timeout: float,
        bus: object = None,
    ) -> None:
        self.name = name
        self.outcome: TransactionCommitted | None = None
        """What the broker said to the commit: where the batches are."""
        self._bus = bus  # which must live as long
        self._line = line
        self._catalogue = catalogue
        self._sequence = sequence
        self._timeout = timeout
        self._begun: TransactionBegun | None = None
        self._ended = False
        self._forks = forking.count
        self._gathering: dict[tuple[str, int], Parcel] = {}
        self._under_way: deque[_Staging] = deque()
        self._under_way_bytes = 0
        self._stages: list[int] = []
        self._turn = 0
        self._subscription: AsyncSubscription | None = None
        self._positions: tuple[str, str, list[Place]] = ("", "", [])

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield short(self.name)
        yield "" if self.sequence is None else f"sequence={self.sequence}"
        yield state_of(
            forked=self._forks != forking.count,
            already_committed=self.already_committed,
            committed=self.outcome is not None,
            aborted=self._ended,
            closed=self._line.closed,
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
    ) -> None:
        """Publish a message with the commit; all as in `bus.publish`."""
        if self._nothing_to_do():
            return
        message = Outgoing(topic, value, checked_key(key), headers, timestamp, due, priority, expires, partition)
        deadline = now() + self._line.timeout
        shape = await self._catalogue.get(topic, deadline)
        try:
            number, parcel = self._put(message, to_bytes(value), shape)
        except (MessageTooLarge, PartitionNotFound) as refusal:
            shape = await self._catalogue.refreshed(topic, refusal, deadline)
            number, parcel = self._put(message, to_bytes(value), shape)
        if parcel.bytes >= _BATCH_BYTES or len(parcel.values) >= _BATCH_COUNT:
            await self._stage(topic, number, shape, deadline)

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
    ) -> None:
        """Publish messages with the commit; all as in `bus.publish_many`."""
        if self._nothing_to_do():
            return
        given = Given(
            values if isinstance(values, list | tuple) else listed(values, "values"),
            keys,
            headers,
            timestamps,
            dues,
            priorities,
            expires,
        )
        checked = given.checked(to_bytes)
        deadline = now() + self._line.timeout
        shape = await self._catalogue.get(topic, deadline)
        try:
            planned = self._planned(topic, checked, partition, shape)
        except (MessageTooLarge, PartitionNotFound) as refusal:
            shape = await self._catalogue.refreshed(topic, refusal, deadline)
            planned = self._planned(topic, checked, partition, shape)
        for number, portion in planned:
            await self._stage(topic, number, shape, deadline)  # what was published before goes before
            parcel = self._gathering[topic, number] = _parcel()
            parcel.fill(portion.columns, portion.size)
            deadline = now() + self._line.timeout  # each: there may be any number
            await self._stage(topic, number, shape, deadline)
        self._turn += 1

    def commit_positions(self, subscription: AsyncSubscription) -> None:
        """Commit, with the transaction, the positions behind all that the subscription has handed out so far.

        The subscription needs a group, and `commit="manual"`: it must not commit by itself.
        """
        if not hasattr(subscription, "_positions_handed"):
            raise InvalidArgument(f"positions are those of a subscription, not of {shown(subscription)}")
        if not self._nothing_to_do():
            self._positions = subscription._positions_handed()
            self._subscription = subscription

    async def begin(self) -> None:
        """Begin; `with` does it."""
        forking.check(self._forks, "a transaction")
        head = TransactionBegin(self.name, self._sequence, round(self._timeout * 1000))
        self._begun, _ = await self._line.request(Kind.TRANSACTION_BEGIN, head, late=self._begun_late)

    async def join(self) -> None:
        """Begin, or take part in what others have begun in this way; a restart of the broker does not end it."""
        forking.check(self._forks, "a transaction")
        head = TransactionBegin(self.name, self._sequence, round(self._timeout * 1000), join=True)
        self._begun, _ = await self._line.request(Kind.TRANSACTION_BEGIN, head)

    def take_up(self, epoch: int, stages: Sequence[int]) -> None:
        """Go on with what those who joined have staged."""
        self._begun = TransactionBegun(epoch, self._sequence or 0)
        self._stages += stages

    async def shape(self, topic: str) -> Shape:
        """What must be known to stage batches for a topic, which the broker may make now."""
        return await self._catalogue.get(topic)

    async def stage(self, topic: str, partition: int, batch: Batch) -> None:
        """Stage a batch, whose messages have been checked; returns before the broker has it."""
        if not isinstance(batch, Batch):
            raise InvalidArgument(f"only a Batch can be staged, not {shown(batch)}")
        if self._nothing_to_do():
            return
        deadline = now() + self._line.timeout
        shape = await self._catalogue.get(topic, deadline)
        try:
            check_partition(topic, partition, shape)
        except PartitionNotFound as refusal:
            shape = await self._catalogue.refreshed(topic, refusal, deadline)  # it may have more by now
            check_partition(topic, partition, shape)
        await self._stage(topic, partition, shape, deadline)  # what was published before goes before
        await self._send(topic, partition, batch.data, deadline)

    async def staged(self) -> list[int]:
        """The numbers of all batches that were staged here, once the broker has them."""
        return await self._staged(now() + self._line.timeout)

    async def _staged(self, deadline: float) -> list[int]:
        for topic, number in list(self._gathering):
            await self._stage(topic, number, await self._catalogue.get(topic, deadline), deadline)
        while self._under_way:
            await self._settle_oldest(deadline)
        return list(self._stages)

    async def commit(self, timeout: float | None = None) -> None:
        """Make all of it visible; leaving the `with` block does it. It may take so many seconds, or as the bus says."""
        wait_s = self._line.timeout if timeout is None else checked_timeout(timeout)
        if self._ended or self._nothing_to_do():
            return
        assert self._begun is not None
        deadline = now() + wait_s
        stages = await self._staged(deadline)
        group, member, places = self._positions
        head = TransactionCommit(self.name, self._begun.epoch, stages, group, member, places)
        self.outcome, _ = await self._line.request(Kind.TRANSACTION_COMMIT, head, timeout=deadline - now())
        self._ended = True
        if self._subscription is not None:
            self._subscription._positions_committed(places)

    async def abort(self) -> None:
        """Forget all of it; an exception in the `with` block does it."""
        await self._abort_by(now() + self._line.timeout)

    async def _abort_by(self, deadline: float) -> None:
        if self._ended or self._begun is None or self._begun.committed or self._forks != forking.count:
            return
        self._ended = True
        try:
            head = TransactionAbort(self.name, self._begun.epoch)
            await self._line.request(Kind.TRANSACTION_ABORT, head, timeout=deadline - now())
        except HeadraceError as error:
            logger.info("the transaction %s is left for the broker to abort: %s", self.name, error)

    async def __aenter__(self) -> "AsyncTransaction":
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            deadline = now() + self._line.timeout
            try:
                await self.commit()
            except HeadraceError:
                await self._abort_by(deadline)  # commit and abort share the time
                raise
            except BaseException:
                self._abort_nowait()  # whatever was interrupted; a commit that has arrived counts
                raise
        else:
            await self.abort()

    def _begun_late(self, answer: Any, _body: Bytes) -> None:
        """The broker has begun it when nobody waited any more."""
        if self._begun is None and not answer.committed:
            self._begun = answer
            self._abort_nowait()

    def _abort_nowait(self) -> None:
        """Abort it without waiting for the answer; if that gets lost, the broker does so in the end."""
        link = self._line.link
        if not self._ended and self._begun is not None and link is not None and self._forks == forking.count:
            self._ended = True
            head = TransactionAbort(self.name, self._begun.epoch)
            link.request_nowait(Kind.TRANSACTION_ABORT, head, b"", lambda _answer, _body: None)

    def _nothing_to_do(self) -> bool:
        """Whether it was committed before; raises if it is not open."""
        forking.check(self._forks, "a transaction")
        if self._begun is None:
            raise Closed("the transaction has not begun: use it in `with`")
        if self._ended:
            raise Closed("the transaction has ended")
        return self._begun.committed

    def _partition(self, shape: Shape, given: int | None, key: bytes | None) -> int:
        if given is not None:
            return given
        return self._turn % shape.partitions if key is None else by_key(key, shape.partitions)

    def _put(self, message: Outgoing, value: bytes | None, shape: Shape) -> tuple[int, Parcel]:
        """Put a message into the batch of its partition; returns both."""
        number = self._partition(shape, message.partition, message.key)
        check_partition(message.topic, number, shape)
        parcel = self._gathering.get((message.topic, number)) or _parcel()
        parcel.add(message, value, shape.message_bytes_max)
        self._gathering[message.topic, number] = parcel
        return number, parcel

    def _planned(self, topic: str, checked: Checked, partition: int | None, shape: Shape) -> list[tuple[int, Portion]]:
        """The messages as batches, each with its partition."""
        if partition is not None:
            check_partition(topic, partition, shape)
        keyless = self._partition(shape, partition, None)
        plan: dict[int, list[int] | None] = {keyless: None}
        if checked.columns.keys is not None and partition is None:
            plan = dict(divided(checked.columns.keys, shape.partitions, by_key, keyless))
        for number in plan:
            check_partition(topic, number, shape)
        terms = (_BATCH_BYTES, _BATCH_COUNT, shape.message_bytes_max, topic)
        return [(number, portion) for number, places in plan.items() for portion in portions(checked, places, *terms)]

    async def _stage(self, topic: str, number: int, shape: Shape, deadline: float) -> None:
        """Send what was gathered for a partition."""
        parcel = self._gathering.pop((topic, number), None)
        if parcel is None:
            return
        parcel.encode(time.time_ns() // 1000, shape.codec, NO_PRODUCER, None)
        assert parcel.batch is not None
        await self._send(topic, number, parcel.batch.data, deadline)

    async def _send(self, topic: str, number: int, batch: Bytes, deadline: float) -> None:
        assert self._begun is not None
        staging = _Staging(TransactionStage(self.name, self._begun.epoch, topic, number), batch)
        self._under_way.append(staging)
        self._under_way_bytes += len(staging.body)
        link = await self._line.get(deadline)
        link.request_nowait(Kind.TRANSACTION_STAGE, staging.head, staging.body, staging.told)
        while len(self._under_way) >= _UNDER_WAY_MAX or self._under_way_bytes >= _UNDER_WAY_BYTES_MAX:
            await self._settle_oldest(deadline)

    async def _settle_oldest(self, deadline: float) -> None:
        staging = self._under_way.popleft()
        self._under_way_bytes -= len(staging.body)
        try:
            stage = await staging.outcome.wait(max(deadline - now(), 0.001))
        except (ConnectionFailed, Busy, Draining):
            # If the first try did arrive after all it does no harm: the commit names those that count.
            left_s = deadline - now()
            answer, _ = await self._line.request(Kind.TRANSACTION_STAGE, staging.head, staging.body, timeout=left_s)
            stage = answer.stage
        self._stages.append(stage)


def _parcel() -> Parcel:
    outcome: Outcome[None] = Outcome()
    return Parcel(outcome, now())
