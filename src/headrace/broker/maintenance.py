"""Periodic maintenance of partitions: retention, compaction, and syncs that nobody waits for."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from headrace.broker.active_partition import ActivePartition
from headrace.broker.compaction_cleanup import forget_compacted
from headrace.broker.group_coordinator import GroupCoordinator
from headrace.broker.ledger import Ledger
from headrace.broker.ports import Ports
from headrace.broker.routes import RouteRegistry
from headrace.broker.settings import BrokerSettings
from headrace.broker.slices import Steps, in_slices
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic, TopicRegistry
from headrace.engines.api import log_settings
from headrace.model.errors import HeadraceError
from headrace.model.topic import Storage, TopicSettings, Validity

logger = logging.getLogger("headrace.broker")

_OPENED_EACH_TIME = 20
"""Partitions opened per round that nobody has used since the start, so that retention reaches them, and the keys of
topics with key_versions are read before somebody waits for that."""
_EDITS_TOGETHER = 500
_SLICE_COST = 64
"""The cost of one slice, in idle partitions: less than a millisecond."""
_WORK_COST = 16
"""The cost of a partition with run to do."""
_FAILED = "maintenance failed; trying again  topic=%s partition=%s"


class Maintenance:
    """Maintains all open partitions at an interval, in slices; run on files runs in the background."""

    def __init__(
        self,
        topics: TopicRegistry,
        membership: GroupCoordinator,
        subscriptions: SubscriptionRegistry,
        routes: RouteRegistry,
        ledger: Ledger,
        ports: Ports,
        settings: BrokerSettings,
        learn: Callable[[], Steps],
    ) -> None:
        """Every round also runs `learn`, which indexes dead letters before somebody asks for their number."""
        self._topics = topics
        self._groups = membership
        self._subscriptions = subscriptions
        self._routes = routes
        self._ledger = ledger
        self._ports = ports
        self._settings = settings
        self._next_us = 0
        self._compact_us = 0
        self._learn = learn
        self._running: set[str] = set()
        """The names of tasks in progress, which are not started again meanwhile."""
        self._closed = False
        self._removing: set[int] = set()
        self._unopened = deque(
            (topic.id, number)
            for topic in topics
            if topic.settings.storage is Storage.DISK and not topic.is_view
            for number in range(topic.settings.partitions)
        )
        """Partitions from before the start that are not open; later ones are opened when they are first written."""
        self._edits_seen: dict[tuple[int, int], int] = {}
        """The offset up to which edits were checked, by topic id and partition."""

    @property
    def next_tick_us(self) -> int:
        """When the next round is due."""
        return self._next_us

    def tick(self, now_us: int) -> None:
        """Start a round if one is due and the last one has ended."""
        if now_us < self._next_us or self._closed:
            return
        self._next_us = now_us + round(self._settings.maintenance_seconds * 1e6)
        self._ledger.request_sync()
        self._begin("learning", self._learn)
        self._begin("round", lambda: self._round(now_us))

    def is_removing(self, topic: Topic) -> bool:
        """Whether messages of a topic are being removed."""
        return any(id(active) in self._removing for active in topic.active_partitions.values())

    def close(self) -> None:
        """Stop: a round in progress ends with its current slice."""
        self._closed = True

    def _begin(self, name: str, steps: Callable[[], Steps]) -> None:
        if name not in self._running:
            self._running.add(name)
            in_slices(self._ports, self._until_closed(name, steps()))

    def _until_closed(self, name: str, steps: Steps) -> Steps:
        try:
            for _ in steps:
                yield
                if self._closed:
                    return
        finally:
            self._running.discard(name)

    def _round(self, now_us: int) -> Steps:
        """Maintain all open partitions; topics may be created and deleted between slices."""
        self._ledger.failures.look_at_disk()
        self._topics.log_view_failures(now_us)
        self._ports.background(self._restore_ballast)
        compacting = now_us >= self._compact_us
        if compacting:
            self._compact_us = now_us + round(self._settings.compact_seconds * 1e6)
        self._edits_seen = {place: seen for place, seen in self._edits_seen.items() if place[0] in self._topics.by_id}
        yield from self._open_some()
        left = _SLICE_COST
        for topic_id in list(self._topics.by_id):
            topic = self._topics.by_id.get(topic_id)
            if topic is None or topic.is_view:
                continue  # its source is maintained
            for active in list(topic.active_partitions.values()):
                if active.gone is None:
                    left -= self._maintain(topic, active, now_us, compacting)
                    yield from self._forget_edits(topic, active)
                if left <= 0:
                    left = _SLICE_COST
                    yield

    def _restore_ballast(self) -> None:
        failure: HeadraceError | OSError | None = None
        try:
            self._topics.ballast.restore()
        except (HeadraceError, OSError) as error:
            failure = error
        self._ports.call_threadsafe(partial(self._ballast_restored, failure))

    def _ballast_restored(self, failure: Exception | None) -> None:
        if failure is None:
            self._ledger.failures.worked("ballast")
        else:
            self._ledger.failures.note("ballast", failure, "ballast not written; trying again")

    def _maintain(self, topic: Topic, active: ActivePartition, now_us: int, compacting: bool) -> int:
        """Maintain a partition; returns the approximate cost."""
        key, partition = ("maintenance", topic.id, active.number), active.partition
        unsynced = partition.awaits_sync(partition.next_offset)
        try:
            partition.request_sync()  # a small backlog may be synced inline
            active.reserve_again()
            self._topics.keep_producers(topic, active, now_us, at_once=False)
            jobs = self._start_removal(topic, active, now_us, compacting)
        except Exception as error:  # noqa: BLE001 logged; all other partitions are maintained
            self._ledger.failures.note(key, error, _FAILED, topic, active.number)
            return _WORK_COST
        self._ledger.failures.worked(key)
        return _WORK_COST if jobs or unsynced else 1

    def _forget_edits(self, topic: Topic, active: ActivePartition) -> Steps:
        """Forget edits of messages that were removed or settled since the last round."""
        leased, place, first_offset = (
            self._ledger.state.leased,
            (topic.id, active.number),
            active.partition.first_offset,
        )
        if not leased.has_edits(*place):
            return
        key = ("edits", *place)
        try:
            bound = max(first_offset, leased.settled_offset(*place))
            if self._edits_seen.get(place, 0) == bound:
                return
            self._edits_seen[place] = bound
            leased.forget_settled_edits(*place, first_offset)
            offsets = list(leased.edits.get(place, ()))
            for start in range(0, len(offsets), _EDITS_TOGETHER):
                leased.forget_edits(*place, first_offset, offsets[start : start + _EDITS_TOGETHER])
                yield
        except Exception as error:  # noqa: BLE001 logged; all other partitions are maintained
            self._ledger.failures.note(key, error, _FAILED, topic, active.number)

    def _open_some(self) -> Steps:
        for _ in range(min(_OPENED_EACH_TIME, len(self._unopened))):
            topic_id, number = self._unopened.popleft()
            topic = self._topics.by_id.get(topic_id)
            if topic is None or number in topic.active_partitions:
                continue
            if not (topic.failure or topic.settings.key_versions or _is_trimmed(topic.settings)):
                continue  # if the topic is altered later, that opens it
            key = ("opening", topic_id, number)
            try:
                self._topics.active(topic, number)
                self._ledger.failures.worked(key)
            except (HeadraceError, OSError) as error:
                self._unopened.append((topic_id, number))
                text = "partition not opened; trying again  topic=%s partition=%s"
                self._ledger.failures.note(key, error, text, topic, number)
            yield

    def _start_removal(self, topic: Topic, active: ActivePartition, now_us: int, compacting: bool) -> bool:
        """Start due truncation and compaction of a partition; returns whether any is due."""
        settings, partition = topic.settings, active.partition
        age = settings.ttl_seconds if settings.validity is Validity.TTL else settings.retain_seconds
        age_us = None if age is None else round(age * 1e6)
        jobs: list[Callable[[], object]] = []
        first_offset = 0
        if age_us is not None or settings.retain_bytes is not None:
            first_offset = partition.retention_offset(now_us, age_us, settings.retain_bytes)
            unforwarded = self._routes.consumed_offset(topic, active.number)
            first_offset = first_offset if unforwarded is None else min(first_offset, unforwarded)
        if settings.validity is Validity.UNTIL_CONSUMED:
            first_offset = max(first_offset, self._consumed_offset(topic, active.number))
        if first_offset > partition.first_offset:
            jobs.append(partial(self._topics.ballast.use, partial(partition.truncate_before, first_offset)))
        if settings.compact_by_key and compacting and self._worth_compacting(active):
            unforwarded = self._routes.consumed_offset(topic, active.number)
            jobs.append(partial(self._compact, topic, active, partial(partition.compact_by_key, unforwarded)))
        if settings.validity is Validity.UNTIL_CONSUMED and compacting and self._worth_compacting(active):
            no_groups = self._groups.consumed_offset(topic, active.number) is None
            rules = self._subscriptions.settled_rules(topic, active.number) if no_groups else []
            unforwarded = self._routes.consumed_offset(topic, active.number)
            if rules and unforwarded is not None:
                rules = [*rules, unforwarded.__gt__]
            if rules:
                jobs.append(partial(self._compact, topic, active, partial(partition.compact_settled, rules)))
        if jobs and id(active) not in self._removing:
            self._removing.add(id(active))
            # Before messages are removed, their producers and everything else in the journal about them must be synced.
            kept = self._topics.keep_producers(topic, active, now_us, at_once=True)
            kept.then(partial(self._do, active, jobs))
        return bool(jobs)

    def _worth_compacting(self, active: ActivePartition) -> bool:
        """Whether the partition has grown by a segment since the last compaction."""
        grown = active.partition.size_bytes - active.compacted_bytes
        return grown >= log_settings(active.settings).segment_bytes

    def _consumed_offset(self, topic: Topic, partition: int) -> int:
        """The offset that all groups, leased subscriptions and routes have consumed."""
        by_groups = self._groups.consumed_offset(topic, partition)
        by_leases = self._subscriptions.consumed_offset(topic, partition)
        by_routes = self._routes.consumed_offset(topic, partition)
        return min((offset for offset in (by_groups, by_leases, by_routes) if offset is not None), default=0)

    def _do(self, active: ActivePartition, jobs: list[Callable[[], object]], outcome: object) -> None:
        """Run removals in the background, unless the journal could not be written."""

        def job() -> None:
            failure: Exception | None = None
            try:
                if isinstance(outcome, HeadraceError):
                    raise outcome
                for run in jobs if active.gone is None else ():
                    run()
            except Exception as error:  # noqa: BLE001 logged by _done
                failure = error
            self._ports.call_threadsafe(partial(self._done, active, failure))

        self._ports.background(job)

    def _done(self, active: ActivePartition, failure: Exception | None) -> None:
        self._removing.discard(id(active))
        key = ("removing", active.topic_id, active.number)
        if failure is None:
            self._ledger.failures.worked(key)
        else:
            self._ledger.failures.note(key, failure, _FAILED, active.topic, active.number)

    def _compact(self, topic: Topic, active: ActivePartition, compact: Callable[[], int]) -> None:
        freed = compact()
        active.compacted_bytes = active.partition.size_bytes
        if freed:
            logger.info("partition compacted  topic=%s partition=%s freed_bytes=%s", active.topic, active.number, freed)
            steps = forget_compacted(topic, active, self._subscriptions, self._ledger.state.leased)
            self._ports.call_threadsafe(lambda: in_slices(self._ports, steps))  # type: ignore[arg-type]
            if active.gate is not None:
                self._ports.call_threadsafe(active.gate.load)  # it forgets the messages that are gone


def _is_trimmed(settings: TopicSettings) -> bool:
    """Whether retention or validity removes messages of a topic."""
    return bool(settings.retain_seconds or settings.retain_bytes or settings.validity is not Validity.KEEP)
