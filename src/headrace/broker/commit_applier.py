"""Appends the batches of committed transactions to their partitions, in commit order and exactly once."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.broker.active_partition import ActivePartition
from headrace.broker.facts import Committed, TransactionApplied
from headrace.broker.ledger import Ledger
from headrace.broker.ports import Ports
from headrace.broker.staging import StagingLog
from headrace.broker.topics import TopicRegistry
from headrace.broker.version_gate import VersionHold
from headrace.model.batch import Batch
from headrace.model.errors import CorruptBatch, HeadraceError, OffsetOutOfRange
from headrace.model.requests import Done, PartitionOffset

logger = logging.getLogger("headrace.broker")

STAGES_BITS = 20
"""A batch's mark in its partition is the commit's number, followed by the batch's index in this many bits."""
_TURN_BYTES = 2 << 20
"""Bytes appended per loop turn by all commits together, so that other I/O is not starved."""
_SYNC_BYTES = 32 << 20
_RETRY_US = 1_000_000
"""The delay before a failed append is retried."""

AppliedCallback = Callable[[list[PartitionOffset] | HeadraceError], None]


@dataclass(eq=False)
class _PendingCommit:
    """A committed transaction whose batches are not all in their partitions yet."""

    fact: Committed
    tell: AppliedCallback
    """Called once, with the batches' offsets, or with none if the batches have to wait."""
    batches: list[Batch] = field(default_factory=list)
    """The batches, if still in memory; empty if they must be read from the staging log."""
    next: int = 0
    places: list[PartitionOffset] = field(default_factory=list)
    active_partitions: dict[int, ActivePartition] = field(default_factory=dict)
    targets: frozenset[tuple[int, int]] = frozenset()
    """The partitions that it writes to, as topic ids and numbers."""
    unsynced_bytes: int = 0
    holds: list[VersionHold] = field(default_factory=list)
    """In partitions with key versions: what keeps publishes from coming between."""

    def __post_init__(self) -> None:
        self.targets = frozenset((topic_id, number) for _, topic_id, number in self.fact.stages)


class CommitApplier:
    """Applies committed transactions: appends their staged batches to the partitions."""

    def __init__(self, staging: StagingLog, topics: TopicRegistry, ledger: Ledger, ports: Ports, now_us: int) -> None:
        self._staging = staging
        self._topics = topics
        self._ledger = ledger
        self._ports = ports
        self._pending = {
            number: _PendingCommit(fact, _ignore) for number, fact in sorted(ledger.state.unsettled.items())
        }
        """The commits being applied, by number and in this order."""
        self._stuck: dict[int, _PendingCommit] = {}
        """Commits whose append failed, and later commits to the same partitions; they are retried with a delay."""
        self._stuck_targets: set[tuple[int, int]] = set()
        self._retry_us = 0
        self._waiting: list[tuple[tuple[int, int], Callable[[], None]]] = []
        """Callbacks that wait until nothing is left to be applied to a partition."""
        self._applied: deque[Committed] = deque()
        self._now_us = now_us
        self._turn_scheduled = False
        for commit in self._pending.values():
            self._hold(commit)
        self._append_pending()

    @property
    def idle(self) -> bool:
        """Whether all commits are applied."""
        return not self._pending and not self._stuck

    def follow(
        self,
        fact: Committed,
        tell: AppliedCallback,
        now_us: int,
        batches: list[Batch] | None = None,
        holds: list[VersionHold] | None = None,
    ) -> None:
        """Apply a commit as soon as its fact is synced; then its holds end."""
        commit = _PendingCommit(fact, tell, batches or [], holds=holds or [])

        def durable(outcome: object) -> None:
            if isinstance(outcome, HeadraceError):
                for hold in commit.holds:
                    hold.fail(outcome)
                tell(outcome)
            else:
                self._pending[fact.number] = commit
                self._now_us = max(self._now_us, now_us)
                self._append_pending()

        self._ledger.durably(Done()).then(durable)

    def when_applied(self, target: tuple[int, int], tell: Callable[[], None]) -> None:
        """Call back when no commit is left to be applied to a partition; at once if there is none."""
        if self.is_pending(target):
            self._waiting.append((target, tell))
        else:
            tell()

    def is_pending(self, target: tuple[int, int]) -> bool:
        """Whether a commit is left to be applied to a partition."""
        if not self._pending and not self._stuck:
            return False
        return any(target in commit.targets for commits in (self._pending, self._stuck) for commit in commits.values())

    def _tell_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for target, tell in waiting:
            self.when_applied(target, tell)

    def tick(self, now_us: int) -> None:
        """Retry what failed, and continue with the rest."""
        self._now_us = now_us
        if self._stuck and now_us >= self._retry_us:
            self._retry_us = now_us + _RETRY_US
            self._pending = dict(sorted({**self._stuck, **self._pending}.items()))
            self._stuck, self._stuck_targets = {}, set()
        self._append_pending()
        self._record_applied()

    def _append_pending(self) -> None:
        """Append some batches of each commit, in commit order within every partition; set failing commits aside."""
        waiting: set[tuple[int, int]] = set()
        share = _TURN_BYTES // max(len(self._pending), 1)
        for number, commit in list(self._pending.items()):
            key = ("apply", number)
            try:
                free = self._stuck_targets.isdisjoint(commit.targets) and waiting.isdisjoint(commit.targets)
                if free and self._has_versions(commit):
                    self._append_some(commit, share)
            except (HeadraceError, OSError) as error:
                text = "committed transaction not published; trying again  transaction=%s"
                self._ledger.failures.note(key, error, text, _name(commit.fact))
                self._stuck_targets |= commit.targets
            if commit.next == len(commit.fact.stages):
                del self._pending[number]
                self._ledger.failures.worked(key)
                for hold in commit.holds:
                    hold.release()
                self._finish(commit)
            elif self._stuck_targets.isdisjoint(commit.targets):
                waiting |= commit.targets
            else:
                del self._pending[number]
                self._stuck[number] = commit
                self._stuck_targets |= commit.targets
                commit.tell([])  # it is committed, though its messages become readable later
                commit.tell, commit.batches = _ignore, []
        if self._waiting:
            self._tell_waiting()
        if waiting and not self._turn_scheduled:
            self._turn_scheduled = True
            self._ports.call_at_turn_end(self._another_turn)  # call_soon could run several times in one loop turn

    def _another_turn(self) -> None:
        self._turn_scheduled = False
        self._append_pending()

    def _hold(self, commit: _PendingCommit) -> None:
        """After a restart: keep publishes to partitions with key versions back until the commit is applied."""
        for topic_id, number in commit.targets:
            topic = self._topics.by_id.get(topic_id)
            if topic is None or not topic.settings.key_versions or topic.failure:
                continue
            try:
                gate = self._topics.active(topic, number).gate
            except (HeadraceError, OSError) as error:  # nobody can publish to it either
                logger.warning("partition not opened  topic=%s partition=%s reason=%s", topic, number, error)
                continue
            if gate is not None:
                commit.holds.append(gate.hold(None))

    def _has_versions(self, commit: _PendingCommit) -> bool:
        """Whether the versions of all keys are known that the commit needs; if not, they are being read."""
        for topic_id, number in commit.targets:
            topic = self._topics.by_id.get(topic_id)
            if topic is not None and topic.settings.key_versions:
                gate = self._topics.active(topic, number).gate
                if gate is not None and not gate.is_loaded:
                    gate.load()
                    return False
        return True

    def _append_some(self, commit: _PendingCommit, bytes_max: int) -> None:
        """Append batches of about this many bytes, and at least one."""
        left = max(bytes_max, 1)
        while left > 0 and commit.next < len(commit.fact.stages):
            left -= self._append(commit)
            commit.next += 1

    def _append(self, commit: _PendingCommit) -> int:
        stage, topic_id, number = commit.fact.stages[commit.next]
        topic = self._topics.by_id.get(topic_id)
        if topic is None:
            return 0  # the topic was deleted meanwhile
        active = self._topics.active(topic, number)
        mark = commit.fact.number << STAGES_BITS | commit.next
        commit.active_partitions[id(active)] = active
        if active.partition.has_committed(mark):
            return 0
        try:
            batch = (commit.batches[commit.next] if commit.batches else self._staging.batch_at(stage)).copied()
        except (CorruptBatch, OffsetOutOfRange) as error:
            logger.error(
                "batch of a committed transaction lost  transaction=%s topic=%s reason=%s",
                _name(commit.fact),
                topic,
                error,
            )
            return 0
        appended = active.committed(batch, mark, self._now_us)
        commit.places.append(PartitionOffset(str(topic), number, appended.base_offset))
        commit.unsynced_bytes += batch.length
        if commit.unsynced_bytes >= _SYNC_BYTES:
            # An early sync leaves less to wait for at the end.
            commit.unsynced_bytes = 0
            for each in commit.active_partitions.values():
                each.partition.request_sync()
        return batch.length

    def _finish(self, commit: _PendingCommit) -> None:
        """Report the offsets once all batches are synced in their partitions, and release the staged batches."""
        waiting, failed = len(commit.active_partitions) + 1, False

        def synced(error: HeadraceError | None) -> None:
            nonlocal waiting, failed
            waiting -= 1
            failed = failed or error is not None
            if not waiting:
                commit.tell(commit.places)
            if not waiting and not failed:
                self._applied.append(commit.fact)
                self._record_applied()

        for active in commit.active_partitions.values():
            active.when_synced(synced)
        synced(None)

    def _record_applied(self) -> None:
        try:
            while self._applied:
                fact = self._applied[0]
                self._ledger.record(self._now_us, TransactionApplied(fact.number))
                self._applied.popleft()
                self._staging.let_go(stage for stage, _, _ in fact.stages)
                self._ledger.failures.worked("settled")
        except HeadraceError as error:
            self._ledger.failures.note("settled", error, "journal write failed; retrying")


def _name(fact: Committed) -> str:
    return fact.transaction or f"internal-{fact.number}"


def _ignore(_: object) -> None:
    """The callback of commits that nobody waits for."""
