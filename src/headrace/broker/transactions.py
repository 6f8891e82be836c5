"""Transactions: clients stage batches in a log, and one fact in the journal commits all of them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from headrace.broker.signal import Signal
from headrace.broker.staging import StagedBatch, StageHeader, StagingLog
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.version_checks import VersionChecks
from headrace.broker.views import check_stores
from headrace.engines.api import Partition, as_headrace_error, key_counts
from headrace.model.batch import Batch, check_messages
from headrace.model.errors import (
    Busy,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    TransactionFenced,
    TransactionNotFound,
)
from headrace.model.limits import TENANT_NAME_CHARS_MAX, TRANSACTIONS_MAX
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
_SEQUENCE_MAX = (1 << 63) - 1
_STAGES_MAX = 1 << STAGES_BITS
_TRIM_BYTES = 16 << 20
_RETRY_US = 1_000_000
_ABORTED_MAX = 200
"""Maximum transactions aborted per tick."""


@dataclass
class _OpenTransaction:
    """A transaction that is neither committed nor aborted."""

    epoch: int
    sequence: int
    timeout_us: int
    shared: bool = False
    """Whether several processes share it; a shared transaction survives a restart of the broker."""
    stages: dict[int, StagedBatch] = field(default_factory=dict)
    companions: dict[int, list[StagedBatch]] = field(default_factory=dict)
    """Dead letters of a staged batch, by its number: committed if it is."""
    processed: int = 0
    """Batches that are in the middleware of their topics."""
    bytes: int = 0
    committing: bool = False

    def all_stages(self) -> Iterator[StagedBatch]:
        """All staged batches, the dead letters included."""
        yield from self.stages.values()
        for companions in self.companions.values():
            yield from companions


class Transactions:
    """All transactions. A restart of the broker aborts open ones, except shared ones."""

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
        self.making: Signal[str, int, int] = Signal()
        """Emitted before a transaction is begun (1) or gets so many bytes; a listener refuses by raising."""
        self.changed: Signal[str, int, int] = Signal()
        """A transaction was begun (1) or has ended (-1), or its staged bytes have changed by so many."""
        self._open: dict[str, _OpenTransaction] = {}
        self._deadlines = Deadlines[str]()
        """When each transaction times out without another request; transactions that are committing have none."""
        self._staged_bytes = 0
        """The bytes staged by all open transactions."""
        self._trimming = False
        """Whether the staging log is being trimmed."""
        self._epoch = self._stage = ledger.state.session << 32
        self._staging.hold((at, at) for fact in ledger.state.unsettled.values() for at, _, _ in fact.stages)
        self._reopen(now_us)
        self._versions = VersionChecks(self._staging, topics)
        self._commit_applier = CommitApplier(self._staging, topics, ledger, ports, now_us)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def opened(self) -> list[tuple[str, int]]:
        """The names of all open transactions, and the bytes that they have staged."""
        return [(name, opened.bytes) for name, opened in self._open.items()]

    @property
    def idle(self) -> bool:
        """Whether no commit is in progress."""
        return self._staging.idle and self._commit_applier.idle

    def begin(self, request: TransactionBegin, now_us: int) -> Answer | PendingAnswer[Answer]:
        """Begin a transaction, join a shared one, or report that it was committed before."""
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
        if before is None and len(self._open) >= TRANSACTIONS_MAX:
            raise LimitExceeded(
                f"there are {TRANSACTIONS_MAX} open transactions, which is the maximum; commit or abort some"
            )
        if before is not None and before.committing:
            raise Busy(f"the transaction {name} is being committed")
        if before is not None and request.join:
            if sequence < before.sequence:
                raise TransactionFenced(f"the transaction {name} is already at sequence {before.sequence}")
            if before.shared and sequence == before.sequence:
                self._deadlines.set(name, now_us + before.timeout_us)
                return TransactionBegun(before.epoch, sequence)
        return self._begin(request, sequence, before, now_us)

    def check_open(self, request: TransactionStage, now_us: int) -> None:
        """Raise if the transaction is not open, or is another process's."""
        self._find(request.transaction, request.epoch, now_us)

    def expect_stage(self, request: TransactionStage, batch: Batch, now_us: int) -> Callable[[], None]:
        """Refuse to commit a transaction while a batch for it is in middleware; returns what ends that, once."""
        opened = self._find(request.transaction, request.epoch, now_us)
        if batch.producer_id:
            raise InvalidArgument("a staged batch must not have a producer id")
        opened.processed += 1
        ended = False

        def end() -> None:
            nonlocal ended
            opened.processed -= not ended
            ended = True

        return end

    def stage(
        self,
        request: TransactionStage,
        batch: Batch,
        now_us: int,
        companions: Sequence[tuple[Topic, int, Batch]] = (),
    ) -> TransactionStaged | PendingAnswer[TransactionStaged]:
        """Stage a batch until the commit, and other batches that are committed with it.

        A shared transaction survives a failover, so in a cluster the answer waits until the batch does, too.
        """
        opened = self._find(request.transaction, request.epoch, now_us)
        topic = self._topics.get_or_create(request.topic, now_us)
        check_stores(str(topic), topic.settings, "publish to")
        active = self._topics.active(topic, request.partition)
        if batch.producer_id:
            raise InvalidArgument("a staged batch must not have a producer id")
        if batch.raw_bytes > active.settings.message_bytes_max:
            check_messages(batch.columns(), active.settings.message_bytes_max, request.topic)
        if active.gate is not None or request.expected_version is not None:
            self._versions.check_batch(active, batch, request.expected_version)
        if len(opened.stages) == _STAGES_MAX:
            raise LimitExceeded(
                f"the transaction has {_STAGES_MAX} batches, which is the maximum; commit it and begin another"
            )
        size = batch.length + sum(one.length for _, _, one in companions)
        if self._staged_bytes + size > self._settings.staged_bytes_max:
            raise LimitExceeded(
                f"open transactions have staged {self._staged_bytes} bytes, and this batch would exceed "
                "staged_bytes_max; commit or abort some, or raise the limit"
            )
        self.making(request.transaction, 0, size)
        # Companions first: a batch that is there has all of them.
        number, before_bytes = self._stage + 1, opened.bytes
        self._stage = number
        try:
            kept = [self._keep(opened, number, *companion, now_us, is_companion=True) for companion in companions]
            staged = self._keep(opened, number, topic, request.partition, batch, now_us, request.expected_version)
        finally:
            self.changed(request.transaction, 0, opened.bytes - before_bytes)
        if active.gate is not None:
            staged.keys, staged.expected_version = key_counts(batch), request.expected_version
        number = number if opened.shared else staged.offset
        opened.stages[number] = staged
        if kept:
            opened.companions[number] = kept
        answer = TransactionStaged(number)
        return self._once_synced(staged, answer) if opened.shared and self._staging.is_replicated else answer

    def _once_synced(self, staged: StagedBatch, answer: TransactionStaged) -> PendingAnswer[TransactionStaged]:
        """The answer, when the staging log is synced up to the end of a batch; or the error."""
        pending_answer: PendingAnswer[TransactionStaged] = PendingAnswer()
        self._staging.when_synced(staged.next_offset, lambda error: pending_answer.resolve(error or answer))
        return pending_answer

    def _keep(
        self,
        opened: _OpenTransaction,
        number: int,
        topic: Topic,
        partition: int,
        batch: Batch,
        now_us: int,
        expected_version: int | None = None,
        *,
        is_companion: bool = False,
    ) -> StagedBatch:
        """Append a batch to the staging log, with a header if the transaction is shared."""
        header = None
        if opened.shared:
            where = topic.id, str(topic), partition, batch.crc, expected_version
            header = StageHeader(opened.epoch, 0 if is_companion else number, *where, number if is_companion else 0)
        staged = self._staging.keep(batch, topic.id, partition, now_us, header)
        opened.bytes += batch.length
        self._staged_bytes += batch.length
        return staged

    def commit(self, request: TransactionCommit, now_us: int) -> Answer | PendingAnswer[Answer]:
        """Commit a transaction, or report that it was committed before."""
        last = self._ledger.state.transactions.get(request.transaction)
        if (
            last is not None and last.epoch == request.epoch and request.transaction
        ):  # the broker's own commits have no name
            return self._ledger.durably(TransactionCommitted(last.sequence, repeated=True))
        opened = self._find(request.transaction, request.epoch, now_us)
        if opened.processed:
            raise Busy(f"{opened.processed} batches of the transaction {request.transaction} are being processed")
        chosen = self._select_stages(request, opened)
        self._checked_offsets(request)
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
        """Abort a transaction and discard its batches."""
        self._end(request.transaction, self._find(request.transaction, request.epoch, now_us), now_us)
        return Done()

    def abandon(self, name: str, now_us: int) -> None:
        """Abort a transaction whose tenant is deleted; one that is being committed ends by itself."""
        opened = self._open.get(name)
        if opened is not None and not opened.committing:
            self._end(name, opened, now_us)

    def commit_internal(
        self, batches: list[tuple[Topic, int, Batch]], facts: list[AnyFact], now_us: int
    ) -> PendingAnswer[list[PartitionOffset]]:
        """Publish the broker's own batches and record facts, atomically.

        Resolves with the batches' offsets, or with the error; batches that must wait for disk space have no offset yet.
        """
        assert len(batches) <= _STAGES_MAX
        pending_answer: PendingAnswer[list[PartitionOffset]] = PendingAnswer()
        stages: list[StagedBatch] = []
        try:
            for topic, number, batch in batches:
                stages.append(self._staging.keep(batch, topic.id, number, now_us))
        except (HeadraceError, OSError) as error:
            self._discard(stages)
            pending_answer.resolve(_translated(error))
            return pending_answer

        def staged(error: HeadraceError | None) -> None:
            if error is not None:
                self._discard(stages)
                pending_answer.resolve(error)
            else:
                self._record_internal_commit(stages, [batch for _, _, batch in batches], facts, now_us, pending_answer)

        self._staging.when_synced(max((stage.next_offset for stage in stages), default=0), staged)
        return pending_answer

    def is_applying(self, topic_id: int, partition: int) -> bool:
        """Whether a commit is left to be applied to a partition."""
        return self._commit_applier.is_pending((topic_id, partition))

    def when_applied(self, topic_id: int, partition: int, tell: Callable[[], None]) -> None:
        """Call back when no commit is left to be applied to a partition; at once if there is none."""
        self._commit_applier.when_applied((topic_id, partition), tell)

    def tick(self, now_us: int) -> None:
        """Abort transactions that timed out, retry failed commits, and trim the staging log."""
        for name in self._deadlines.pop_due(now_us, _ABORTED_MAX):
            try:
                self._end(name, self._open[name], now_us)
            except Exception as error:  # noqa: BLE001 logged; all others continue
                self._deadlines.set(name, now_us + _RETRY_US)
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
        """Reopen shared transactions after a restart, with the staged batches that survived."""
        by_epoch: dict[int, _OpenTransaction] = {}
        for fact in self._ledger.state.shared.values():
            opened = _OpenTransaction(fact.epoch, fact.sequence, fact.timeout_us, shared=True)
            self._open[fact.transaction] = by_epoch[fact.epoch] = opened
            self._deadlines.set(fact.transaction, now_us + fact.timeout_us)
        try:
            found = self._staging.find_again(now_us) if by_epoch else []
        except (HeadraceError, OSError) as error:
            logger.warning("staged batches unreadable; shared transactions lose them  reason=%s", error)
            found = []
        for header, staged in found:
            of = by_epoch.get(header.epoch)
            topic = self._topics.by_id.get(header.topic_id)
            if of is not None and (topic is None or str(topic) == header.topic):
                if header.companion_of:
                    of.companions.setdefault(header.companion_of, []).append(staged)
                else:
                    of.stages[header.stage] = staged
                of.bytes += staged.bytes
                self._staged_bytes += staged.bytes
        self._staging.hold((one.offset, one.first_offset) for of in by_epoch.values() for one in of.all_stages())

    def _check(self, request: TransactionBegin) -> None:
        name, sequence = request.transaction, request.sequence
        tenant, slash, rest = name.partition("/")
        bare = rest if slash and len(tenant) <= TENANT_NAME_CHARS_MAX else name
        if not 0 < len(bare) <= _NAME_CHARS_MAX or not name.isprintable():
            raise InvalidArgument(f"a transaction's name must have 1 to {_NAME_CHARS_MAX} printable characters")
        if not 0 < request.timeout_ms <= self._settings.transaction_seconds_max * 1000:
            raise InvalidArgument(f"timeout_ms must be 1 to {self._settings.transaction_seconds_max * 1000:.0f}")
        if sequence is not None and not 0 <= sequence <= _SEQUENCE_MAX:
            raise InvalidArgument(f"sequence must be 0 to {_SEQUENCE_MAX}, not {sequence}")

    def _begin(
        self, request: TransactionBegin, sequence: int, before: _OpenTransaction | None, now_us: int
    ) -> TransactionBegun:
        """Begin a transaction, and abort the open one that it replaces."""
        name, timeout_us = request.transaction, request.timeout_ms * 1000
        if before is None:
            self.making(name, 1, 0)
        self._epoch += 1
        facts: list[AnyFact] = []
        if before is not None and before.shared:
            facts.append(TransactionUnshared(name, before.epoch))
        if request.join:
            facts.append(TransactionShared(name, self._epoch, sequence, timeout_us))
        if facts:
            self._ledger.record(now_us, *facts)
        if before is not None:
            self._close(name, before, before.all_stages())
        self._open[name] = _OpenTransaction(self._epoch, sequence, timeout_us, request.join)
        self.changed(name, 1, 0)
        self._deadlines.set(name, now_us + timeout_us)
        return TransactionBegun(self._epoch, sequence)

    def _end(self, name: str, opened: _OpenTransaction, now_us: int) -> None:
        """Abort a transaction."""
        if opened.shared:
            self._ledger.record(now_us, TransactionUnshared(name, opened.epoch))
        self._close(name, opened, opened.all_stages())

    def _close(self, name: str, opened: _OpenTransaction, unneeded: Iterable[StagedBatch]) -> None:
        """Remove a transaction from the open ones, and discard the batches that no commit needs."""
        del self._open[name]
        self.changed(name, -1, -opened.bytes)
        self._deadlines.remove(name)
        self._staged_bytes -= opened.bytes
        self._discard(unneeded)

    def _discard(self, stages: Iterable[StagedBatch]) -> None:
        self._staging.let_go(stage.offset for stage in stages)

    def _not_committed(self, name: str, opened: _OpenTransaction, now_us: int) -> None:
        """Leave a transaction open whose commit failed, so that the client can retry."""
        opened.committing = False
        self._deadlines.set(name, now_us + opened.timeout_us)

    def _find(self, name: str, epoch: int, now_us: int) -> _OpenTransaction:
        opened = self._open.get(name)
        if opened is None:
            raise TransactionNotFound(f"there is no open transaction {name}; it may have timed out: begin it again")
        if opened.epoch != epoch:
            raise TransactionFenced(f"another process has begun the transaction {name} again, and has taken it over")
        if opened.committing:
            raise Busy(f"the transaction {name} is being committed")
        self._deadlines.set(name, now_us + opened.timeout_us)
        return opened

    def _select_stages(self, request: TransactionCommit, opened: _OpenTransaction) -> list[StagedBatch]:
        """The staged batches that a commit names; raises if any is missing."""
        names = list(opened.stages) if request.stages is None else list(dict.fromkeys(request.stages))
        missing = sum(1 for name in names if name not in opened.stages)
        chosen = [opened.stages[name] for name in names if name in opened.stages]
        chosen += [one for name in names for one in opened.companions.get(name, ())]
        missing += sum(1 for stage in chosen if stage.offset < self._staging.first_offset)
        if missing:
            raise InvalidArgument(
                f"{missing} of the {len(names)} batches that the commit of {request.transaction} names are missing: "
                "they were never staged, or a power loss destroyed them; abort the transaction and repeat it"
            )
        if any(stage.topic_id not in self._topics.by_id for stage in chosen):
            raise InvalidArgument(
                f"a topic of the transaction {request.transaction} was deleted; abort the transaction"
            )
        return chosen

    def _checked_offsets(self, request: TransactionCommit) -> OffsetsCommitted:
        """The offsets that a transaction commits for a group; raises if that is not allowed."""
        if request.group or request.places:
            return self._groups.checked_move(request.group, request.member, request.places)
        return OffsetsCommitted("", [])

    def _record(
        self,
        request: TransactionCommit,
        opened: _OpenTransaction,
        chosen: list[StagedBatch],
        now_us: int,
        pending_answer: PendingAnswer[Answer],
    ) -> None:
        """Record the commit: the transaction is committed once this fact is synced."""
        stages = [(stage.offset, stage.topic_id, stage.partition) for stage in chosen]
        self._ledger.flush()  # may record other commits, whose numbers come before this one
        name, number = request.transaction, self._ledger.state.commits + 1
        try:
            postponed = self._versions.check(chosen)
            if postponed is not None:
                postponed(partial(self._record_later, request, opened, chosen, now_us, pending_answer))
                return
            moved = self._checked_offsets(
                request
            )  # checked again: a rebalance may have moved partitions during the sync
            fact = Committed(number, name, opened.epoch, opened.sequence, now_us, stages, moved.group, moved.places)
            is_new = bool(moved.group) and self._groups.is_new(moved.group)
            self._ledger.record(now_us, fact)
        except HeadraceError as error:
            self._not_committed(name, opened, now_us)
            pending_answer.resolve(error)
            return
        own = len(opened.stages if request.stages is None else dict.fromkeys(request.stages))
        if is_new:
            self._groups.group_changed(moved.group, "created", now_us)
        needed = {stage.offset for stage in chosen}
        self._close(name, opened, [stage for stage in opened.all_stages() if stage.offset not in needed])

        def told(outcome: list[PartitionOffset] | HeadraceError) -> None:
            if isinstance(outcome, HeadraceError):
                pending_answer.resolve(outcome)
            else:
                pending_answer.resolve(TransactionCommitted(fact.sequence, places=outcome[:own]))

        self._commit_applier.follow(fact, told, now_us, holds=self._versions.hold(chosen))

    def _record_later(
        self,
        request: TransactionCommit,
        opened: _OpenTransaction,
        chosen: list[StagedBatch],
        now_us: int,
        pending_answer: PendingAnswer[Answer],
        error: HeadraceError | None,
    ) -> None:
        """Record a commit that had to wait until the versions that it expects could be checked."""
        if error is not None:
            self._not_committed(request.transaction, opened, now_us)
            pending_answer.resolve(error)
        else:
            self._record(request, opened, chosen, now_us, pending_answer)

    def _record_internal_commit(
        self,
        stages: list[StagedBatch],
        batches: list[Batch],
        facts: list[AnyFact],
        now_us: int,
        pending_answer: PendingAnswer[list[PartitionOffset]],
    ) -> None:
        self._ledger.flush()  # may record other commits, whose numbers come before this one
        # It needs no name, because nobody can begin it again; its number identifies it.
        places = [(stage.offset, stage.topic_id, stage.partition) for stage in stages]
        fact = Committed(self._ledger.state.commits + 1, "", 0, 0, now_us, places, "", [])
        try:
            self._ledger.record(now_us, *([fact] if stages else []), *facts)
        except (HeadraceError, OSError) as error:
            self._discard(stages)
            pending_answer.resolve(_translated(error))
            return
        if stages:
            holds = self._versions.hold(stages, batches)
            self._commit_applier.follow(fact, pending_answer.resolve, now_us, batches, holds)
        else:
            self._ledger.durably(Done()).then(
                lambda outcome: pending_answer.resolve(outcome if isinstance(outcome, HeadraceError) else [])
            )

    def _trim(self) -> None:
        if self._trimming or self._staging.size_bytes < _TRIM_BYTES:
            return
        offset = self._staging.needed_offset
        if offset > self._staging.first_offset:
            self._trimming = True
            # Only after a sync of the journal: a power loss must not bring back commits that need these batches.
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
        self._trimming = False
        if error is not None:
            self._ledger.failures.note("staging", error, "staging log not trimmed; trying again")
        else:
            self._ledger.failures.worked("staging")


def _translated(error: HeadraceError | OSError) -> HeadraceError:
    return error if isinstance(error, HeadraceError) else as_headrace_error(error)
