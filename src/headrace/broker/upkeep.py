"""Looking after topics: retention, compaction, syncing what nobody waits for."""

import logging
from collections.abc import Callable
from functools import partial

from headrace.broker.compacted import forget_compacted
from headrace.broker.lane import Lane
from headrace.broker.ledger import Ledger
from headrace.broker.membership import Membership
from headrace.broker.ports import Ports
from headrace.broker.settings import BrokerSettings
from headrace.broker.slices import Steps, in_slices
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic, Topics
from headrace.engines.api import log_settings
from headrace.model.errors import HeadraceError
from headrace.model.topic import Storage, Validity

logger = logging.getLogger("headrace.broker")

_OPENED_EACH_TIME = 20
"""Partitions that nobody has used since the start, opened so that retention reaches them too."""
_EDITS_TOGETHER = 500


class Upkeep:
    """What has to be done from time to time. Work on files is done in the background."""

    def __init__(
        self,
        topics: Topics,
        membership: Membership,
        subscriptions: SubscriptionRegistry,
        ledger: Ledger,
        ports: Ports,
        settings: BrokerSettings,
    ) -> None:
        self._topics = topics
        self._membership = membership
        self._subscriptions = subscriptions
        self._ledger = ledger
        self._ports = ports
        self._settings = settings
        self._next_us = 0
        self._compact_us = 0
        self.learn: Callable[[], None] = lambda: None
        """Called each time: has dead messages looked at before somebody counts them."""
        self._at_work: set[int] = set()
        self._edits_seen: dict[tuple[int, int], int] = {}
        """Up to where edits were looked through, by topic id and partition."""

    @property
    def next_tick_us(self) -> int:
        """When there is something to do again."""
        return self._next_us

    def tick(self, now_us: int) -> None:
        """Do what is due."""
        if now_us < self._next_us:
            return
        self._next_us = now_us + round(self._settings.upkeep_seconds * 1e6)
        self._edits_seen = {place: seen for place, seen in self._edits_seen.items() if place[0] in self._topics.by_id}
        compacting = now_us >= self._compact_us
        if compacting:
            self._compact_us = now_us + round(self._settings.compact_seconds * 1e6)
        self._ledger.request_sync()
        self.learn()
        self._open_some()
        for topic in self._topics:
            for lane in list(topic.lanes.values()):
                lane.partition.request_sync()
                lane.reserve_again()
                self._topics.keep_producers(topic, lane, now_us, at_once=False)
                self._look_after(topic, lane, now_us, compacting)
                self._forget_edits(topic, lane)

    def _forget_edits(self, topic: Topic, lane: Lane) -> None:
        """Look through a partition's edits when messages are gone or settled since the last time."""
        leased, place, first_offset = self._ledger.state.leased, (topic.id, lane.number), lane.partition.first_offset
        bound = max(first_offset, leased.settled_offset(*place))
        if self._edits_seen.get(place, 0) == bound:
            return
        self._edits_seen[place] = bound
        leased.forget_settled_edits(*place, first_offset)

        def steps() -> Steps:
            offsets = list(leased.edits.get(place, ()))
            for start in range(0, len(offsets), _EDITS_TOGETHER):
                leased.forget_edits(*place, first_offset, offsets[start : start + _EDITS_TOGETHER])
                yield

        in_slices(self._ports, steps())

    def _open_some(self) -> None:
        left = _OPENED_EACH_TIME
        for topic in self._topics:
            settings = topic.settings
            trimmed = settings.retain_seconds or settings.retain_bytes or settings.validity is not Validity.KEEP
            if settings.storage is Storage.DISK and trimmed:
                for number in range(settings.partitions):
                    if number not in topic.lanes and left:
                        left -= 1
                        try:
                            self._topics.lane(topic, number)
                        except (HeadraceError, OSError) as error:
                            logger.warning("partition not opened  topic=%s partition=%s: %s", topic, number, error)

    def _look_after(self, topic: Topic, lane: Lane, now_us: int, compacting: bool) -> None:
        settings, partition = topic.settings, lane.partition
        age = settings.ttl_seconds if settings.validity is Validity.TTL else settings.retain_seconds
        age_us = None if age is None else round(age * 1e6)
        works: list[Callable[[], object]] = []
        first_offset = partition.kept_from(now_us, age_us, settings.retain_bytes)
        if settings.validity is Validity.UNTIL_CONSUMED:
            first_offset = max(first_offset, self._consumed_offset(topic, lane.number))
        if first_offset > partition.first_offset:
            works.append(partial(partition.truncate_before, first_offset))
        if not partition.in_files and (age_us is not None or settings.retain_bytes is not None):
            works.append(partial(partition.retain, now_us, age_us, settings.retain_bytes))
        if settings.compact_by_key and compacting and self._worth_compacting(lane):
            works.append(partial(self._compact, topic, lane, partition.compact_by_key))
        if settings.validity is Validity.UNTIL_CONSUMED and compacting and self._worth_compacting(lane):
            no_groups = self._membership.consumed_offset(topic, lane.number) is None
            rules = self._subscriptions.settled_rules(topic, lane.number) if no_groups else []
            if rules:
                works.append(partial(self._compact, topic, lane, partial(partition.compact_settled, rules)))
        if works and id(lane) not in self._at_work:
            self._at_work.add(id(lane))
            # Before messages go: who produced them, and everything else that the journal says of them, must be safe.
            kept = self._topics.keep_producers(topic, lane, now_us, at_once=True)
            kept.then(partial(self._do, lane, works))

    def _worth_compacting(self, lane: Lane) -> bool:
        """Whether a segment's worth of messages has come since the last time."""
        grown = lane.partition.size_bytes - lane.compacted_bytes
        return grown >= log_settings(lane.settings).segment_bytes

    def _consumed_offset(self, topic: Topic, partition: int) -> int:
        """What every subscription has passed."""
        by_groups = self._membership.consumed_offset(topic, partition)
        by_leases = self._subscriptions.consumed_offset(topic, partition)
        return min((offset for offset in (by_groups, by_leases) if offset is not None), default=0)

    def _do(self, lane: Lane, works: list[Callable[[], object]], outcome: object) -> None:
        """Have it done in the background, unless the disk does not even take notes."""

        def job() -> None:
            try:
                if isinstance(outcome, HeadraceError):
                    raise outcome
                for work in works if lane.gone is None else ():
                    work()
            except HeadraceError as error:
                logger.warning("%s partition %s could not be looked after: %s", lane.topic, lane.number, error)
            finally:
                self._ports.from_thread(lambda: self._at_work.discard(id(lane)))

        self._ports.background(job)

    def _compact(self, topic: Topic, lane: Lane, compact: Callable[[], int]) -> None:
        freed = compact()
        lane.compacted_bytes = lane.partition.size_bytes
        if freed:
            logger.info("compacted %s partition %s: %s bytes freed", lane.topic, lane.number, freed)
            steps = forget_compacted(topic, lane, self._subscriptions, self._ledger.state.leased)
            self._ports.from_thread(lambda: in_slices(self._ports, steps))  # type: ignore[arg-type]
