"""Looking after topics: retention, compaction, syncing what nobody waits for."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from headrace.broker.active_partition import ActivePartition
from headrace.broker.compaction_cleanup import forget_compacted
from headrace.broker.group_coordinator import GroupCoordinator
from headrace.broker.ledger import Ledger
from headrace.broker.ports import Ports
from headrace.broker.settings import BrokerSettings
from headrace.broker.slices import Steps, in_slices
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic, TopicRegistry
from headrace.engines.api import log_settings
from headrace.model.errors import HeadraceError
from headrace.model.topic import Storage, TopicSettings, Validity

logger = logging.getLogger("headrace.broker")

_OPENED_EACH_TIME = 20
"""Partitions that nobody has used since the start, opened so that retention reaches them too."""
_EDITS_TOGETHER = 500
_SLICE_COST = 64
"""Idle partitions that are looked at in one slice: less than a millisecond."""
_WORK_COST = 16
"""What a partition with something to do counts for."""
_FAILED = "maintenance failed; trying again  topic=%s partition=%s"


class Maintenance:
    """What has to be done from time to time, in slices. Work on files is done in the background."""

    def __init__(
        self,
        topics: TopicRegistry,
        membership: GroupCoordinator,
        subscriptions: SubscriptionRegistry,
        ledger: Ledger,
        ports: Ports,
        settings: BrokerSettings,
        learn: Callable[[], Steps],
    ) -> None:
        """`learn` is done each time: it looks at dead messages before somebody counts them."""
        self._topics = topics
        self._groups = membership
        self._subscriptions = subscriptions
        self._ledger = ledger
        self._ports = ports
        self._settings = settings
        self._next_us = 0
        self._compact_us = 0
        self._learn = learn
        self._under_way: set[str] = set()
        """What goes on in slices, and is not begun again meanwhile."""
        self._closed = False
        self._at_work: set[int] = set()
        self._unopened = deque(
            (topic.id, number)
            for topic in topics
            if topic.settings.storage is Storage.DISK
            for number in range(topic.settings.partitions)
        )
        """Partitions from before the start; those that come later have nothing that retention could remove."""
        self._edits_seen: dict[tuple[int, int], int] = {}
        """Up to where edits were looked through, by topic id and partition; of partitions that have some."""

    @property
    def next_tick_us(self) -> int:
        """When there is something to do again."""
        return self._next_us

    def tick(self, now_us: int) -> None:
        """Begin with what is due, unless the last round is still under way."""
        if now_us < self._next_us or self._closed:
            return
        self._next_us = now_us + round(self._settings.maintenance_seconds * 1e6)
        self._ledger.request_sync()
        self._begin("learning", self._learn)
        self._begin("round", lambda: self._round(now_us))

    def close(self) -> None:
        """Do nothing more: what is under way ends with its next slice."""
        self._closed = True

    def _begin(self, name: str, steps: Callable[[], Steps]) -> None:
        if name not in self._under_way:
            self._under_way.add(name)
            in_slices(self._ports, self._until_closed(name, steps()))

    def _until_closed(self, name: str, steps: Steps) -> Steps:
        try:
            for _ in steps:
                yield
                if self._closed:
                    return
        finally:
            self._under_way.discard(name)

    def _round(self, now_us: int) -> Steps:
        """Look after all partitions that are open. Topics may come and go meanwhile."""
        self._ledger.failures.look_at_disk()
        self._ports.background(self._restore_ballast)
        compacting = now_us >= self._compact_us
        if compacting:
            self._compact_us = now_us + round(self._settings.compact_seconds * 1e6)
        self._edits_seen = {place: seen for place, seen in self._edits_seen.items() if place[0] in self._topics.by_id}
        yield from self._open_some()
        left = _SLICE_COST
        for topic_id in list(self._topics.by_id):
            topic = self._topics.by_id.get(topic_id)
            for active in list(topic.active_partitions.values()) if topic is not None else ():
                if topic is not None and active.gone is None:
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
        """Look after a partition; returns about how much there was to do."""
        key, partition = ("maintenance", topic.id, active.number), active.partition
        unsynced = partition.awaits_sync(partition.next_offset)
        try:
            partition.request_sync()  # which may be done at once, if it is little
            active.reserve_again()
            self._topics.keep_producers(topic, active, now_us, at_once=False)
            works = self._look_after(topic, active, now_us, compacting)
        except Exception as error:  # noqa: BLE001 it is told; all others are looked after
            self._ledger.failures.note(key, error, _FAILED, topic, active.number)
            return _WORK_COST
        self._ledger.failures.worked(key)
        return _WORK_COST if works or unsynced else 1

    def _forget_edits(self, topic: Topic, active: ActivePartition) -> Steps:
        """Look through a partition's edits when messages are gone or settled since the last time."""
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
        except Exception as error:  # noqa: BLE001 it is told; all others are looked after
            self._ledger.failures.note(key, error, _FAILED, topic, active.number)

    def _open_some(self) -> Steps:
        for _ in range(min(_OPENED_EACH_TIME, len(self._unopened))):
            topic_id, number = self._unopened.popleft()
            topic = self._topics.by_id.get(topic_id)
            if topic is None or number in topic.active_partitions or not (topic.failure or _is_trimmed(topic.settings)):
                continue  # one that is altered is opened then
            key = ("opening", topic_id, number)
            try:
                self._topics.active(topic, number)
                self._ledger.failures.worked(key)
            except (HeadraceError, OSError) as error:
                self._unopened.append((topic_id, number))
                text = "partition not opened; trying again  topic=%s partition=%s"
                self._ledger.failures.note(key, error, text, topic, number)
            yield

    def _look_after(self, topic: Topic, active: ActivePartition, now_us: int, compacting: bool) -> bool:
        """Have done what is due with a partition; whether there was anything."""
        settings, partition = topic.settings, active.partition
        age = settings.ttl_seconds if settings.validity is Validity.TTL else settings.retain_seconds
        age_us = None if age is None else round(age * 1e6)
        works: list[Callable[[], object]] = []
        first_offset = 0
        if age_us is not None or settings.retain_bytes is not None:
            first_offset = partition.retention_offset(now_us, age_us, settings.retain_bytes)
        if settings.validity is Validity.UNTIL_CONSUMED:
            first_offset = max(first_offset, self._consumed_offset(topic, active.number))
        if first_offset > partition.first_offset:
            works.append(partial(self._topics.ballast.use, partial(partition.truncate_before, first_offset)))
        if settings.compact_by_key and compacting and self._worth_compacting(active):
            works.append(partial(self._compact, topic, active, partition.compact_by_key))
        if settings.validity is Validity.UNTIL_CONSUMED and compacting and self._worth_compacting(active):
            no_groups = self._groups.consumed_offset(topic, active.number) is None
            rules = self._subscriptions.settled_rules(topic, active.number) if no_groups else []
            if rules:
                works.append(partial(self._compact, topic, active, partial(partition.compact_settled, rules)))
        if works and id(active) not in self._at_work:
            self._at_work.add(id(active))
            # Before messages go: who produced them, and everything else that the journal says of them, must be safe.
            kept = self._topics.keep_producers(topic, active, now_us, at_once=True)
            kept.then(partial(self._do, active, works))
        return bool(works)

    def _worth_compacting(self, active: ActivePartition) -> bool:
        """Whether a segment's worth of messages has come since the last time."""
        grown = active.partition.size_bytes - active.compacted_bytes
        return grown >= log_settings(active.settings).segment_bytes

    def _consumed_offset(self, topic: Topic, partition: int) -> int:
        """What every subscription has passed."""
        by_groups = self._groups.consumed_offset(topic, partition)
        by_leases = self._subscriptions.consumed_offset(topic, partition)
        return min((offset for offset in (by_groups, by_leases) if offset is not None), default=0)

    def _do(self, active: ActivePartition, works: list[Callable[[], object]], outcome: object) -> None:
        """Have it done in the background, unless the disk does not even take notes."""

        def job() -> None:
            failure: Exception | None = None
            try:
                if isinstance(outcome, HeadraceError):
                    raise outcome
                for work in works if active.gone is None else ():
                    work()
            except Exception as error:  # noqa: BLE001 it is told
                failure = error
            self._ports.call_threadsafe(partial(self._done, active, failure))

        self._ports.background(job)

    def _done(self, active: ActivePartition, failure: Exception | None) -> None:
        self._at_work.discard(id(active))
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


def _is_trimmed(settings: TopicSettings) -> bool:
    """Whether messages of a topic go by themselves."""
    return bool(settings.retain_seconds or settings.retain_bytes or settings.validity is not Validity.KEEP)
