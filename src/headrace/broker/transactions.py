"""Transactions: batches wait in a staging log, and one fact in the journal makes all of them count."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from headrace.broker.facts import AnyFact, Committed, Moved, Settled
from headrace.broker.lane import Lane
from headrace.broker.later import Later
from headrace.broker.ledger import Ledger
from headrace.broker.membership import Membership
from headrace.broker.ports import Ports
from headrace.broker.settings import BrokerSettings
from headrace.broker.syncing import Syncing
from headrace.broker.topics import Topic, Topics
from headrace.engines.api import Partition, explained
from headrace.model.batch import Batch, check_messages
from headrace.model.errors import (
    Busy,
    CorruptBatch,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    OffsetOutOfRange,
    TransactionFenced,
    TransactionNotFound,
)
from headrace.model.requests import (
    Done,
    Place,
    TransactionAbort,
    TransactionBegin,
    TransactionBegun,
    TransactionCommit,
    TransactionCommitted,
    TransactionStage,
    TransactionStaged,
    Words,
)

logger = logging.getLogger("headrace.broker")

_NAME_CHARS_MAX = 200
_OPEN_MAX = 100_000
_SEQUENCE_MAX = (1 << 63) - 1
_STAGES_BITS = 20
_STAGES_MAX = 1 << _STAGES_BITS
_TRIM_BYTES = 16 << 20


@dataclass
class _Stage:
    topic_id: int
    partition: int
    next_offset: int


@dataclass
class _Open:
    """A transaction that is not committed yet."""

    epoch: int
    sequence: int
    timeout_us: int
    deadline_us: int
    stages: dict[int, _Stage] = field(default_factory=dict)
    bytes: int = 0
    committing: bool = False


@dataclass
class _Applying:
    """A committed transaction whose batches are on their way into their partitions."""

    fact: Committed
    done: Callable[[list[Place]], None]
    """To be told where the batches are, or, without that, that they have to wait; called once."""
    next: int = 0
    places: list[Place] = field(default_factory=list)
    lanes: dict[int, Lane] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    """What was staged a moment ago, and need not be looked for; empty when it has to."""


class Transactions:
    """All transactions. After a restart of the broker those that were not committed are gone."""

    def __init__(
        self,
        staging: Partition,
        topics: Topics,
        membership: Membership,
        ledger: Ledger,
        ports: Ports,
        settings: BrokerSettings,
        now_us: int,
    ) -> None:
        self._staging = staging
        self._topics = topics
        self._membership = membership
        self._ledger = ledger
        self._ports = ports
        self._settings = settings
        self._syncing = Syncing(staging, ports)
        self._open: dict[str, _Open] = {}
        self._epoch = ledger.state.session << 32
        self._applying = [_Applying(fact, _nothing) for _, fact in sorted(ledger.state.unsettled.items())]
        self._settled: deque[int] = deque()
        self._carried: set[int] = set()
        """Where batches of the broker's own are staged that are not committed yet."""
        self._apply(now_us)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def idle(self) -> bool:
        """Whether no commit is on its way."""
        return self._syncing.idle and not self._applying

    def begin(self, request: TransactionBegin, now_us: int) -> Words | Later[Words]:
        """Begin a transaction, or learn that it was committed before."""
        name = request.transaction
        if not 0 < len(name) <= _NAME_CHARS_MAX or not name.isprintable():
            raise InvalidArgument(f"a transaction's name has 1 to {_NAME_CHARS_MAX} printable characters")
        if not 0 < request.timeout_ms <= self._settings.transaction_seconds_max * 1000:
            raise InvalidArgument(f"timeout_ms is 1 to {self._settings.transaction_seconds_max * 1000:.0f}")
        last = self._ledger.state.transactions.get(name)
        sequence = request.sequence
        if sequence is not None and not 0 <= sequence <= _SEQUENCE_MAX:
            raise InvalidArgument(f"a sequence is 0 to {_SEQUENCE_MAX}, not {sequence}")
        if sequence is None:
            sequence = last.sequence + 1 if last is not None else 0
        if last is not None and sequence <= last.sequence:
            return self._ledger.durably(TransactionBegun(last.epoch, sequence, committed=True))
        before = self._open.get(name)
        if before is None and len(self._open) >= _OPEN_MAX:
            raise LimitExceeded(f"there are {_OPEN_MAX} transactions open, and no more are allowed")
        if before is not None and before.committing:
            raise Busy(f"the transaction {name} is being committed")
        self._epoch += 1
        timeout_us = request.timeout_ms * 1000
        self._open[name] = _Open(self._epoch, sequence, timeout_us, now_us + timeout_us)
        return TransactionBegun(self._epoch, sequence)

    def stage(self, request: TransactionStage, batch: Batch, now_us: int) -> Words:
        """Keep a batch until the commit."""
        opened = self._find(request.transaction, request.epoch, now_us)
        topic = self._topics.get_or_create(request.topic, now_us)
        lane = self._topics.lane(topic, request.partition)
        if batch.producer_id:
            raise InvalidArgument("a staged batch has no producer of its own")
        if batch.raw_bytes > lane.settings.message_bytes_max:
            check_messages(batch.columns(), lane.settings.message_bytes_max)
        if len(opened.stages) == _STAGES_MAX:
            raise LimitExceeded(f"a transaction has at most {_STAGES_MAX} batches")
        staged = sum(one.bytes for one in self._open.values())
        if staged + batch.length > self._settings.staged_bytes_max:
            raise LimitExceeded(f"open transactions have staged {staged} bytes, and no more fit (staged_bytes_max)")
        appended = self._staging.append(batch, now_us)
        opened.stages[appended.base_offset] = _Stage(topic.id, request.partition, appended.next_offset)
        opened.bytes += batch.length
        return TransactionStaged(appended.base_offset)

    def commit(self, request: TransactionCommit, now_us: int) -> Words | Later[Words]:
        """Make all of it count, or learn that it did before."""
        last = self._ledger.state.transactions.get(request.transaction)
        if last is not None and last.epoch == request.epoch and request.transaction:  # those without a name are ours
            return self._ledger.durably(TransactionCommitted(last.sequence, repeated=True))
        opened = self._find(request.transaction, request.epoch, now_us)
        if request.stages is not None and not set(request.stages) <= opened.stages.keys():
            raise InvalidArgument("the commit names stages that the transaction does not have")
        chosen = list(opened.stages) if request.stages is None else list(dict.fromkeys(request.stages))
        for stage in chosen:
            if opened.stages[stage].topic_id not in self._topics.by_id:
                raise InvalidArgument("a topic of the transaction was deleted; abort it")
        self._moved(request)
        opened.committing = True
        later: Later[Words] = Later()
        end = max((opened.stages[stage].next_offset for stage in chosen), default=0)

        def staged(error: HeadraceError | None) -> None:
            if error is not None:
                opened.committing = False
                later.settle(error)
            else:
                self._record(request, opened, chosen, now_us, later)

        if self._staging.in_files and self._staging.synced_offset < end:
            self._syncing.wait(end, staged)
        else:
            staged(None)
        return later

    def abort(self, request: TransactionAbort, now_us: int) -> Words:
        """Forget all of it."""
        self._find(request.transaction, request.epoch, now_us)
        del self._open[request.transaction]
        return Done()

    def carry(self, batches: list[tuple[Topic, int, Batch]], facts: list[AnyFact], now_us: int) -> Later[list[Place]]:
        """Publish batches of the broker's own together with facts: all of it counts, or nothing.

        Settles with where the batches stand, without those that have to wait for room, or with the error.
        """
        assert len(batches) <= _STAGES_MAX
        later: Later[list[Place]] = Later()
        stages: list[tuple[int, int, int]] = []
        end = 0
        try:
            for topic, number, batch in batches:
                appended = self._staging.append(batch, now_us)
                stages.append((appended.base_offset, topic.id, number))
                end = appended.next_offset
        except (HeadraceError, OSError) as error:
            later.settle(_told(error))
            return later
        places = {stage for stage, _, _ in stages}
        self._carried |= places

        def staged(error: HeadraceError | None) -> None:
            self._carried -= places
            if error is not None:
                later.settle(error)
            else:
                self._record_carried(stages, [batch for _, _, batch in batches], facts, now_us, later)

        if self._staging.in_files and self._staging.synced_offset < end:
            self._syncing.wait(end, staged)
        else:
            staged(None)
        return later

    def tick(self, now_us: int) -> None:
        """Abort what took too long; go on with what could not be done; make room."""
        for name, opened in list(self._open.items()):
            if opened.deadline_us <= now_us and not opened.committing:
                logger.info("the transaction %s was aborted: nothing was heard of it for so long", name)
                del self._open[name]
        self._apply(now_us)
        self._record_settled(now_us)
        self._trim()

    def close(self) -> None:
        """Sync and close the staging log."""
        self._staging.close()

    def _find(self, name: str, epoch: int, now_us: int) -> _Open:
        opened = self._open.get(name)
        if opened is None:
            raise TransactionNotFound(f"there is no open transaction {name}; it may have taken too long: begin again")
        if opened.epoch != epoch:
            raise TransactionFenced(f"the transaction {name} was begun anew by another process")
        if opened.committing:
            raise Busy(f"the transaction {name} is being committed")
        opened.deadline_us = now_us + opened.timeout_us
        return opened

    def _moved(self, request: TransactionCommit) -> Moved:
        """The positions that are committed with it, if they may be."""
        if request.group or request.places:
            return self._membership.checked_move(request.group, request.member, request.places)
        return Moved("", [])

    def _record(
        self, request: TransactionCommit, opened: _Open, chosen: list[int], now_us: int, later: Later[Words]
    ) -> None:
        """From here on it is committed, as soon as the fact is on the disk."""
        stages = [(stage, opened.stages[stage].topic_id, opened.stages[stage].partition) for stage in chosen]
        self._ledger.flush()  # which may lead to other commits: this one's number comes after theirs
        name, number = request.transaction, self._ledger.state.commits + 1
        try:
            moved = self._moved(request)  # once more: while the disk was busy the partitions may have gone to others
            fact = Committed(number, name, opened.epoch, opened.sequence, now_us, stages, moved.group, moved.places)
            self._ledger.record(now_us, fact)
        except HeadraceError as error:
            opened.committing = False
            later.settle(error)
            return
        del self._open[name]
        work = _Applying(fact, lambda places: later.settle(TransactionCommitted(fact.sequence, places=places)))
        self._follow(work, now_us, later)

    def _record_carried(
        self,
        stages: list[tuple[int, int, int]],
        batches: list[Batch],
        facts: list[AnyFact],
        now_us: int,
        later: Later[list[Place]],
    ) -> None:
        self._ledger.flush()  # as above
        # It has no name that anybody could begin it again with; the number is all that tells it from others.
        fact = Committed(self._ledger.state.commits + 1, "", 0, 0, now_us, stages, "", [])
        try:
            self._ledger.record(now_us, *([fact] if stages else []), *facts)
        except (HeadraceError, OSError) as error:
            later.settle(_told(error))
            return
        if stages:
            self._follow(_Applying(fact, later.settle, batches=batches), now_us, later)
        else:
            self._ledger.durably(Done()).then(
                lambda outcome: later.settle(outcome if isinstance(outcome, HeadraceError) else [])
            )

    def _follow(self, work: _Applying, now_us: int, later: Later[Words] | Later[list[Place]]) -> None:
        """Have the batches of a commit put into their partitions as soon as the fact is on the disk."""

        def durable(outcome: Words | HeadraceError) -> None:
            if isinstance(outcome, HeadraceError):
                later.settle(outcome)
            else:
                self._applying.append(work)
                self._apply(now_us)

        self._ledger.durably(Done()).then(durable)

    def _apply(self, now_us: int) -> None:
        """Append committed batches to their partitions, in each in the order of the commits; or try again later."""
        blocked: set[tuple[int, int]] = set()
        for work in list(self._applying):
            places = {(topic_id, number) for _, topic_id, number in work.fact.stages[work.next :]}
            if blocked.isdisjoint(places) and self._apply_all(work, now_us):
                self._applying.remove(work)
                self._settle(work, now_us)
            else:
                blocked |= places
                work.done([])  # it is committed, whenever it can be seen
                work.batches = []
            work.done = _nothing

    def _apply_all(self, work: _Applying, now_us: int) -> bool:
        try:
            while work.next < len(work.fact.stages):
                self._apply_stage(work, now_us)
                work.next += 1
        except (HeadraceError, OSError) as error:
            logger.warning("the committed transaction %s has to wait: %s", _name(work.fact), error)
            return False
        return True

    def _apply_stage(self, work: _Applying, now_us: int) -> None:
        stage, topic_id, number = work.fact.stages[work.next]
        topic = self._topics.by_id.get(topic_id)
        if topic is None:
            return  # deleted since, with all of its messages
        lane = self._topics.lane(topic, number)
        mark = work.fact.number << _STAGES_BITS | work.next
        work.lanes[id(lane)] = lane
        if lane.partition.has_committed(mark):
            return
        try:
            batch = (work.batches[work.next] if work.batches else self._staging.batch_at(stage)).copied()
        except (CorruptBatch, OffsetOutOfRange) as error:
            logger.error("a batch of the transaction %s for %s is lost: %s", _name(work.fact), topic, error)
            return
        appended = lane.committed(batch, mark, now_us)
        work.places.append(Place(str(topic), number, appended.base_offset))

    def _settle(self, work: _Applying, now_us: int) -> None:
        """Answer when all batches are on the disk in their partitions, and can be read; the staged ones may go then."""
        done, failed = work.done, False
        waiting = len(work.lanes) + 1

        def synced(error: HeadraceError | None) -> None:
            nonlocal waiting, failed
            waiting -= 1
            failed = failed or error is not None
            if not waiting:
                done(work.places)
            if not waiting and not failed:
                self._settled.append(work.fact.number)
                self._record_settled(now_us)

        for lane in work.lanes.values():
            lane.when_synced(synced)
        synced(None)

    def _record_settled(self, now_us: int) -> None:
        try:
            while self._settled:
                self._ledger.record(now_us, Settled(self._settled[0]))
                self._settled.popleft()
        except HeadraceError as error:
            logger.warning("the journal takes no notes, which are tried again later: %s", error)

    def _trim(self) -> None:
        if self._staging.size_bytes < _TRIM_BYTES:
            return
        needed = [*self._carried, *(stage for opened in self._open.values() for stage in opened.stages)]
        needed += [stage for fact in self._ledger.state.unsettled.values() for stage, _, _ in fact.stages]
        offset = min(needed, default=self._staging.next_offset)
        if offset > self._staging.first_offset:
            # Not before the journal says for certain that all of it is settled.
            self._ledger.durably(Done()).then(partial(self._truncate, offset))

    def _truncate(self, offset: int, outcome: object) -> None:
        if not isinstance(outcome, HeadraceError):
            self._ports.background(lambda: self._staging.truncate_before(offset))


def _name(fact: Committed) -> str:
    return fact.transaction or f"{fact.number} of the broker's own"


def _told(error: HeadraceError | OSError) -> HeadraceError:
    return error if isinstance(error, HeadraceError) else explained(error)


def _nothing(_: list[Place]) -> None:
    """Nobody waits for it."""
