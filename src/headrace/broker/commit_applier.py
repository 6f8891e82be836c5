"""From the commit to the partitions: the batches of committed transactions go where they belong, in order and once."""

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
from headrace.model.batch import Batch
from headrace.model.errors import CorruptBatch, HeadraceError, OffsetOutOfRange
from headrace.model.requests import Done, PartitionOffset

logger = logging.getLogger("headrace.broker")

STAGES_BITS = 20
"""A batch's mark in its partition is the number of its commit, and in so many bits its own."""
_TURN_BYTES = 2 << 20
"""So much is appended at once, of all of them together; then others have their turn."""
_SYNC_BYTES = 32 << 20
_AGAIN_US = 1_000_000
"""How long what could not be appended waits for the next try."""

Told = Callable[[list[PartitionOffset] | HeadraceError], None]


@dataclass(eq=False)
class _Work:
    """A committed transaction whose batches are on their way into their partitions."""

    fact: Committed
    tell: Told
    """To be told where the batches are, or, without that, that they have to wait; called once."""
    batches: list[Batch] = field(default_factory=list)
    """What was staged a moment ago, and need not be looked for; empty when it has to."""
    next: int = 0
    places: list[PartitionOffset] = field(default_factory=list)
    active_partitions: dict[int, ActivePartition] = field(default_factory=dict)
    targets: frozenset[tuple[int, int]] = frozenset()
    """The partitions, as topic ids and numbers."""
    unsynced_bytes: int = 0

    def __post_init__(self) -> None:
        self.targets = frozenset((topic_id, number) for _, topic_id, number in self.fact.stages)


class CommitApplier:
    """The committed transactions whose batches are not all in their partitions yet."""

    def __init__(self, staging: StagingLog, topics: TopicRegistry, ledger: Ledger, ports: Ports, now_us: int) -> None:
        self._staging = staging
        self._topics = topics
        self._ledger = ledger
        self._ports = ports
        self._works = {number: _Work(fact, _nothing) for number, fact in sorted(ledger.state.unsettled.items())}
        """By the commits' numbers, in their order: those whose turn has come."""
        self._stuck: dict[int, _Work] = {}
        """Those that could not be appended, and those behind them: they are tried again from time to time."""
        self._stuck_targets: set[tuple[int, int]] = set()
        self._again_us = 0
        self._settled: deque[Committed] = deque()
        self._now_us = now_us
        self._comes = False
        self._go_on()

    @property
    def idle(self) -> bool:
        """Whether all of them are."""
        return not self._works and not self._stuck

    def follow(self, fact: Committed, tell: Told, now_us: int, batches: list[Batch] | None = None) -> None:
        """Have the batches of a commit put into their partitions as soon as the fact is on the disk."""
        work = _Work(fact, tell, batches or [])

        def durable(outcome: object) -> None:
            if isinstance(outcome, HeadraceError):
                tell(outcome)
            else:
                self._works[fact.number] = work
                self._now_us = max(self._now_us, now_us)
                self._go_on()

        self._ledger.durably(Done()).then(durable)

    def tick(self, now_us: int) -> None:
        """Go on with what could not be done."""
        self._now_us = now_us
        if self._stuck and now_us >= self._again_us:
            self._again_us = now_us + _AGAIN_US
            self._works = dict(sorted({**self._stuck, **self._works}.items()))
            self._stuck, self._stuck_targets = {}, set()
        self._go_on()
        self._record_settled()

    def _go_on(self) -> None:
        """Append committed batches to their partitions, in each in the order of the commits; or try again later."""
        waiting: set[tuple[int, int]] = set()
        share = _TURN_BYTES // max(len(self._works), 1)
        for number, work in list(self._works.items()):
            key = ("apply", number)
            try:
                if self._stuck_targets.isdisjoint(work.targets) and waiting.isdisjoint(work.targets):
                    self._append_some(work, share)
            except (HeadraceError, OSError) as error:
                text = "committed transaction not published; trying again  transaction=%s"
                self._ledger.failures.note(key, error, text, _name(work.fact))
                self._stuck_targets |= work.targets
            if work.next == len(work.fact.stages):
                del self._works[number]
                self._ledger.failures.worked(key)
                self._settle(work)
            elif self._stuck_targets.isdisjoint(work.targets):
                waiting |= work.targets
            else:
                del self._works[number]
                self._stuck[number] = work
                self._stuck_targets |= work.targets
                work.tell([])  # it is committed, whenever it can be seen
                work.tell, work.batches = _nothing, []
        if waiting and not self._comes:
            self._comes = True
            self._ports.call_at_turn_end(self._another_turn)  # not soon: several of those run in one loop turn

    def _another_turn(self) -> None:
        self._comes = False
        self._go_on()

    def _append_some(self, work: _Work, bytes_max: int) -> None:
        """Append about so many bytes, one batch at least."""
        left = max(bytes_max, 1)
        while left > 0 and work.next < len(work.fact.stages):
            left -= self._append(work)
            work.next += 1

    def _append(self, work: _Work) -> int:
        stage, topic_id, number = work.fact.stages[work.next]
        topic = self._topics.by_id.get(topic_id)
        if topic is None:
            return 0  # deleted since, with all of its messages
        active = self._topics.active(topic, number)
        mark = work.fact.number << STAGES_BITS | work.next
        work.active_partitions[id(active)] = active
        if active.partition.has_committed(mark):
            return 0
        try:
            batch = (work.batches[work.next] if work.batches else self._staging.batch_at(stage)).copied()
        except (CorruptBatch, OffsetOutOfRange) as error:
            logger.error(
                "batch of a committed transaction lost  transaction=%s topic=%s reason=%s",
                _name(work.fact),
                topic,
                error,
            )
            return 0
        appended = active.committed(batch, mark, self._now_us)
        work.places.append(PartitionOffset(str(topic), number, appended.base_offset))
        work.unsynced_bytes += batch.length
        if work.unsynced_bytes >= _SYNC_BYTES:
            # The disk begins with what there is: at the end there is less to wait for.
            work.unsynced_bytes = 0
            for each in work.active_partitions.values():
                each.partition.request_sync()
        return batch.length

    def _settle(self, work: _Work) -> None:
        """Tell when all batches are on the disk in their partitions, and can be read; the staged ones may go then."""
        waiting, failed = len(work.active_partitions) + 1, False

        def synced(error: HeadraceError | None) -> None:
            nonlocal waiting, failed
            waiting -= 1
            failed = failed or error is not None
            if not waiting:
                work.tell(work.places)
            if not waiting and not failed:
                self._settled.append(work.fact)
                self._record_settled()

        for active in work.active_partitions.values():
            active.when_synced(synced)
        synced(None)

    def _record_settled(self) -> None:
        try:
            while self._settled:
                fact = self._settled[0]
                self._ledger.record(self._now_us, TransactionApplied(fact.number))
                self._settled.popleft()
                self._staging.let_go(stage for stage, _, _ in fact.stages)
                self._ledger.failures.worked("settled")
        except HeadraceError as error:
            self._ledger.failures.note("settled", error, "journal write failed; retrying")


def _name(fact: Committed) -> str:
    return fact.transaction or f"{fact.number} of the broker's own"


def _nothing(_: object) -> None:
    """Nobody waits for it."""
