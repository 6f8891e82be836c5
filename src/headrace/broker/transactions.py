"""Transactions: batches wait in a staging log, and one fact in the journal makes all of them count."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from headrace.broker.commit_applier import STAGES_BITS, CommitApplier
from headrace.broker.deadlines import Deadlines
from headrace.broker.facts import AnyFact, Committed, OffsetsCommitted, TransactionShared, TransactionUnshared
from headrace.broker.group_coordinator import GroupCoordinator
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.settings import BrokerSettings
from headrace.broker.staging import StagedBatch, StageHeader, StagingLog
from headrace.broker.topics import Topic, TopicRegistry
from headrace.engines.api import Partition, as_headrace_error
from headrace.model.batch import Batch, check_messages
from headrace.model.errors import (
    Busy,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    TransactionFenced,
    TransactionNotFound,
)
from headrace.model.limits import TENANT_NAME_CHARS_MAX
from headrace.model.request import Answer
from headrace.model.requests import (
    Done,
    PartitionOffset,
    TransactionAbort,
    TransactionBegin,
    TransactionBegun,
    TransactionCommit,
    TransactionCommitted,
    TransactionStage,
    TransactionStaged,
)

logger = logging.getLogger("headrace.broker")

_NAME_CHARS_MAX = 200
_OPEN_MAX = 100_000
_SEQUENCE_MAX = (1 << 63) - 1
_STAGES_MAX = 1 << STAGES_BITS
_TRIM_BYTES = 16 << 20
_AGAIN_US = 1_000_000
_ENDED_MAX = 200
"""Transactions that are aborted in one tick."""


@dataclass
class _Open:
    """A transaction that is not committed yet."""

    epoch: int
    sequence: int
    timeout_us: int
    shared: bool = False
    """Processes share it, and it outlives the broker's end."""
    stages: dict[int, StagedBatch] = field(default_factory=dict)
    bytes: int = 0
    committing: bool = False


class Transactions:
    """All transactions. After a restart of the broker those that were not committed are gone, but for shared ones."""

    def __init__(
        self,
        staging: Partition,
        topics: TopicRegistry,
        membership: GroupCoordinator,
        ledger: Ledger,
        ports: Ports,
        settings: BrokerSettings,
        now_us: int,
    ) -> None:
        self._staging = StagingLog(staging, ports)
        self._topics = topics
        self._groups = membership
        self._ledger = ledger
        self._ports = ports
        self._settings = settings
        self._open: dict[str, _Open] = {}
        self._deadlines = Deadlines[str]()
        """When a transaction is aborted unless something is heard of it; of those that are not being committed."""
        self._staged_bytes = 0
        """Of all that are open."""
        self._trims = False
        """Whether the staging log is being trimmed."""
        self._epoch = self._stage = ledger.state.session << 32
        self._staging.hold((at, at) for fact in ledger.state.unsettled.values() for at, _, _ in fact.stages)
        self._reopen(now_us)
        self._commit_applier = CommitApplier(self._staging, topics, ledger, ports, now_us)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    @property
    def idle(self) -> bool:
        """Whether no commit is on its way."""
        return self._staging.idle and self._commit_applier.idle

    def begin(self, request: TransactionBegin, now_us: int) -> Answer | PendingAnswer[Answer]:
        """Begin a transaction, or take part in one, or learn that it was committed before."""
        name = request.transaction
        self._check(request)
        last, before = self._ledger.state.transactions.get(name), self._open.get(name)
        sequence = request.sequence
        if sequence is None:
            sequence = last.sequence + 1 if last is not None else 0
            if request.join and before is not None and before.shared:
                sequence = before.sequence
        if last is not None and sequence <= last.sequence:
            return self._ledger.durably(TransactionBegun(last.epoch, sequence, committed=True))
        if before is None and len(self._open) >= _OPEN_MAX:
            raise LimitExceeded(f"there are {_OPEN_MAX} transactions open, and no more are allowed")
        if before is not None and before.committing:
            raise Busy(f"the transaction {name} is being committed")
        if before is not None and request.join:
            if sequence < before.sequence:
                raise TransactionFenced(f"the transaction {name} has gone on to sequence {before.sequence}")
            if before.shared and sequence == before.sequence:
                self._deadlines.set(name, now_us + before.timeout_us)
                return TransactionBegun(before.epoch, sequence)
        return self._begin(request, sequence, before, now_us)

    def stage(self, request: TransactionStage, batch: Batch, now_us: int) -> TransactionStaged:
        """Keep a batch until the commit."""
        opened = self._find(request.transaction, request.epoch, now_us)
        topic = self._topics.get_or_create(request.topic, now_us)
        active = self._topics.active(topic, request.partition)
        if batch.producer_id:
            raise InvalidArgument("a staged batch has no producer of its own")
        if batch.raw_bytes > active.settings.message_bytes_max:
            check_messages(batch.columns(), active.settings.message_bytes_max, request.topic)
        if len(opened.stages) == _STAGES_MAX:
            raise LimitExceeded(f"a transaction has at most {_STAGES_MAX} batches")
        if self._staged_bytes + batch.length > self._settings.staged_bytes_max:
            raise LimitExceeded(
                f"open transactions have staged {self._staged_bytes} bytes, and no more fit (staged_bytes_max)"
            )
        note = None
        if opened.shared:
            self._stage += 1
            note = StageHeader(opened.epoch, self._stage, topic.id, str(topic), request.partition, batch.crc)
        staged = self._staging.keep(batch, topic.id, request.partition, now_us, note)
        number = staged.offset if note is None else note.stage
        opened.stages[number] = staged
        opened.bytes += batch.length
        self._staged_bytes += batch.length
        return TransactionStaged(number)

    def commit(self, request: TransactionCommit, now_us: int) -> Answer | PendingAnswer[Answer]:
        """Make all of it count, or learn that it did before."""
        last = self._ledger.state.transactions.get(request.transaction)
        if last is not None and last.epoch == request.epoch and request.transaction:  # those without a name are ours
            return self._ledger.durably(TransactionCommitted(last.sequence, repeated=True))
        opened = self._find(request.transaction, request.epoch, now_us)
        chosen = self._chosen(request, opened)
        self._moved(request)
        opened.committing = True
        self._deadlines.remove(request.transaction)
        pending_answer: PendingAnswer[Answer] = PendingAnswer()

        def staged(error: HeadraceError | None) -> None:
            if error is not None:
                self._not_committed(request.transaction, opened, now_us)
                pending_answer.resolve(error)
            else:
                self._record(request, opened, chosen, now_us, pending_answer)

        self._staging.when_synced(max((stage.next_offset for stage in chosen), default=0), staged)
        return pending_answer

    def abort(self, request: TransactionAbort, now_us: int) -> Answer:
        """Forget all of it."""
        self._end(request.transaction, self._find(request.transaction, request.epoch, now_us), now_us)
        return Done()

    def commit_internal(
        self, batches: list[tuple[Topic, int, Batch]], facts: list[AnyFact], now_us: int
    ) -> PendingAnswer[list[PartitionOffset]]:
        """Publish batches of the broker's own together with facts: all of it counts, or nothing.

        Settles with where the batches stand, without those that have to wait for room, or with the error.
        """
        assert len(batches) <= _STAGES_MAX
        pending_answer: PendingAnswer[list[PartitionOffset]] = PendingAnswer()
        stages: list[StagedBatch] = []
        try:
            for topic, number, batch in batches:
                stages.append(self._staging.keep(batch, topic.id, number, now_us))
        except (HeadraceError, OSError) as error:
            self._let_go(stages)
            pending_answer.resolve(_told(error))
            return pending_answer

        def staged(error: HeadraceError | None) -> None:
            if error is not None:
                self._let_go(stages)
                pending_answer.resolve(error)
            else:
                self._record_internal_commit(stages, [batch for _, _, batch in batches], facts, now_us, pending_answer)

        self._staging.when_synced(max((stage.next_offset for stage in stages), default=0), staged)
        return pending_answer

    def tick(self, now_us: int) -> None:
        """Abort what took too long; go on with what could not be done; make room."""
        for name in self._deadlines.pop_due(now_us, _ENDED_MAX):
            try:
                self._end(name, self._open[name], now_us)
            except Exception as error:  # noqa: BLE001 it is told; all others go on
                self._deadlines.set(name, now_us + _AGAIN_US)
                failures, text = self._ledger.failures, "transaction not aborted; trying again  transaction=%s"
                failures.note(("abort", name), error, text, name)
            else:
                self._ledger.failures.worked(("abort", name))
                logger.info("transaction timed out; aborted  transaction=%s", name)
        self._commit_applier.tick(now_us)
        self._trim()

    def close(self) -> None:
        """Sync and close the staging log."""
        self._staging.close()

    def _reopen(self, now_us: int) -> None:
        """Go on with the transactions that processes share, as far as their batches are still there."""
        by_epoch: dict[int, _Open] = {}
        for fact in self._ledger.state.shared.values():
            opened = _Open(fact.epoch, fact.sequence, fact.timeout_us, shared=True)
            self._open[fact.transaction] = by_epoch[fact.epoch] = opened
            self._deadlines.set(fact.transaction, now_us + fact.timeout_us)
        try:
            found = self._staging.find_again(now_us) if by_epoch else []
        except (HeadraceError, OSError) as error:
            logger.warning(
                "staged batches of shared transactions unreadable; they cannot be committed  reason=%s", error
            )
            found = []
        for note, staged in found:
            of = by_epoch.get(note.epoch)
            topic = self._topics.by_id.get(note.topic_id)
            if of is not None and (topic is None or str(topic) == note.topic):
                of.stages[note.stage] = staged
                of.bytes += staged.bytes
                self._staged_bytes += staged.bytes
        self._staging.hold((one.offset, one.first_offset) for of in by_epoch.values() for one in of.stages.values())

    def _check(self, request: TransactionBegin) -> None:
        name, sequence = request.transaction, request.sequence
        tenant, slash, rest = name.partition("/")
        bare = rest if slash and len(tenant) <= TENANT_NAME_CHARS_MAX else name
        if not 0 < len(bare) <= _NAME_CHARS_MAX or not name.isprintable():
            raise InvalidArgument(f"a transaction's name has 1 to {_NAME_CHARS_MAX} printable characters")
        if not 0 < request.timeout_ms <= self._settings.transaction_seconds_max * 1000:
            raise InvalidArgument(f"timeout_ms is 1 to {self._settings.transaction_seconds_max * 1000:.0f}")
        if sequence is not None and not 0 <= sequence <= _SEQUENCE_MAX:
            raise InvalidArgument(f"a sequence is 0 to {_SEQUENCE_MAX}, not {sequence}")

    def _begin(self, request: TransactionBegin, sequence: int, before: _Open | None, now_us: int) -> TransactionBegun:
        """Begin one, in the place of one that is open."""
        name, timeout_us = request.transaction, request.timeout_ms * 1000
        self._epoch += 1
        facts: list[AnyFact] = []
        if before is not None and before.shared:
            facts.append(TransactionUnshared(name, before.epoch))
        if request.join:
            facts.append(TransactionShared(name, self._epoch, sequence, timeout_us))
        if facts:
            self._ledger.record(now_us, *facts)
        if before is not None:
            self._close(name, before, before.stages.values())
        self._open[name] = _Open(self._epoch, sequence, timeout_us, request.join)
        self._deadlines.set(name, now_us + timeout_us)
        return TransactionBegun(self._epoch, sequence)

    def _end(self, name: str, opened: _Open, now_us: int) -> None:
        """End one without a commit."""
        if opened.shared:
            self._ledger.record(now_us, TransactionUnshared(name, opened.epoch))
        self._close(name, opened, opened.stages.values())

    def _close(self, name: str, opened: _Open, unneeded: Iterable[StagedBatch]) -> None:
        """It is not open any more."""
        del self._open[name]
        self._deadlines.remove(name)
        self._staged_bytes -= opened.bytes
        self._let_go(unneeded)

    def _let_go(self, stages: Iterable[StagedBatch]) -> None:
        self._staging.let_go(stage.offset for stage in stages)

    def _not_committed(self, name: str, opened: _Open, now_us: int) -> None:
        """The commit failed: it stays open, and can be tried again."""
        opened.committing = False
        self._deadlines.set(name, now_us + opened.timeout_us)

    def _find(self, name: str, epoch: int, now_us: int) -> _Open:
        opened = self._open.get(name)
        if opened is None:
            raise TransactionNotFound(f"there is no open transaction {name}; it may have taken too long: begin again")
        if opened.epoch != epoch:
            raise TransactionFenced(f"the transaction {name} was begun anew by another process")
        if opened.committing:
            raise Busy(f"the transaction {name} is being committed")
        self._deadlines.set(name, now_us + opened.timeout_us)
        return opened

    def _chosen(self, request: TransactionCommit, opened: _Open) -> list[StagedBatch]:
        """What the commit names of what was staged, if all of it is there."""
        names = list(opened.stages) if request.stages is None else list(dict.fromkeys(request.stages))
        missing = sum(1 for name in names if name not in opened.stages)
        chosen = [opened.stages[name] for name in names if name in opened.stages]
        missing += sum(1 for stage in chosen if stage.offset < self._staging.first_offset)
        if missing:
            raise InvalidArgument(
                f"{missing} of the {len(names)} batches that the commit of {request.transaction} names are not there: "
                "they were never staged in it, or were lost when the power failed; abort it and do all of it again"
            )
        if any(stage.topic_id not in self._topics.by_id for stage in chosen):
            raise InvalidArgument("a topic of the transaction was deleted; abort it")
        return chosen

    def _moved(self, request: TransactionCommit) -> OffsetsCommitted:
        """The positions that are committed with it, if they may be."""
        if request.group or request.places:
            return self._groups.checked_move(request.group, request.member, request.places)
        return OffsetsCommitted("", [])

    def _record(
        self,
        request: TransactionCommit,
        opened: _Open,
        chosen: list[StagedBatch],
        now_us: int,
        pending_answer: PendingAnswer[Answer],
    ) -> None:
        """From here on it is committed, as soon as the fact is on the disk."""
        stages = [(stage.offset, stage.topic_id, stage.partition) for stage in chosen]
        self._ledger.flush()  # which may lead to other commits: this one's number comes after theirs
        name, number = request.transaction, self._ledger.state.commits + 1
        try:
            moved = self._moved(request)  # once more: while the disk was busy the partitions may have gone to others
            fact = Committed(number, name, opened.epoch, opened.sequence, now_us, stages, moved.group, moved.places)
            self._ledger.record(now_us, fact)
        except HeadraceError as error:
            self._not_committed(name, opened, now_us)
            pending_answer.resolve(error)
            return
        needed = {stage.offset for stage in chosen}
        self._close(name, opened, (stage for stage in opened.stages.values() if stage.offset not in needed))

        def told(outcome: list[PartitionOffset] | HeadraceError) -> None:
            if isinstance(outcome, HeadraceError):
                pending_answer.resolve(outcome)
            else:
                pending_answer.resolve(TransactionCommitted(fact.sequence, places=outcome))

        self._commit_applier.follow(fact, told, now_us)

    def _record_internal_commit(
        self,
        stages: list[StagedBatch],
        batches: list[Batch],
        facts: list[AnyFact],
        now_us: int,
        pending_answer: PendingAnswer[list[PartitionOffset]],
    ) -> None:
        self._ledger.flush()  # as above
        # It has no name that anybody could begin it again with; the number is all that tells it from others.
        places = [(stage.offset, stage.topic_id, stage.partition) for stage in stages]
        fact = Committed(self._ledger.state.commits + 1, "", 0, 0, now_us, places, "", [])
        try:
            self._ledger.record(now_us, *([fact] if stages else []), *facts)
        except (HeadraceError, OSError) as error:
            self._let_go(stages)
            pending_answer.resolve(_told(error))
            return
        if stages:
            self._commit_applier.follow(fact, pending_answer.resolve, now_us, batches)
        else:
            self._ledger.durably(Done()).then(
                lambda outcome: pending_answer.resolve(outcome if isinstance(outcome, HeadraceError) else [])
            )

    def _trim(self) -> None:
        if self._trims or self._staging.size_bytes < _TRIM_BYTES:
            return
        offset = self._staging.needed_offset
        if offset > self._staging.first_offset:
            self._trims = True
            # Not before the journal says for certain that all of it is settled.
            self._ledger.durably(Done()).then(partial(self._truncate, offset))

    def _truncate(self, offset: int, outcome: object) -> None:
        def job() -> None:
            error: Exception | None = None
            try:
                self._staging.forget_before(offset)
            except (HeadraceError, OSError) as caught:
                error = caught
            self._ports.call_threadsafe(partial(self._truncated, error))

        if isinstance(outcome, HeadraceError):
            self._truncated(outcome)
        else:
            self._ports.background(job)

    def _truncated(self, error: Exception | None) -> None:
        self._trims = False
        if error is not None:
            self._ledger.failures.note("staging", error, "staging log not trimmed; trying again")
        else:
            self._ledger.failures.worked("staging")


def _told(error: HeadraceError | OSError) -> HeadraceError:
    return error if isinstance(error, HeadraceError) else as_headrace_error(error)
