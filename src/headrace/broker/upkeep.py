"""Looking after topics: retention, compaction, syncing what nobody waits for."""

import logging
from collections.abc import Callable
from functools import partial

from headrace.broker.lane import Lane
from headrace.broker.membership import Membership
from headrace.broker.ports import Ports
from headrace.broker.settings import BrokerSettings
from headrace.broker.topics import Topic, Topics
from headrace.engines.api import log_settings
from headrace.model.errors import HeadraceError
from headrace.model.topic import Storage, Validity

logger = logging.getLogger("headrace.broker")

_OPENED_EACH_TIME = 20
"""Partitions that nobody has used since the start, opened so that retention reaches them too."""


class Upkeep:
    """What has to be done from time to time. Work on files is done in the background."""

    def __init__(self, topics: Topics, membership: Membership, ports: Ports, settings: BrokerSettings) -> None:
        self._topics = topics
        self._membership = membership
        self._ports = ports
        self._settings = settings
        self._next_us = 0
        self._compact_us = 0
        self._at_work: set[int] = set()

    @property
    def next_tick_us(self) -> int:
        """When there is something to do again."""
        return self._next_us

    def tick(self, now_us: int) -> None:
        """Do what is due."""
        if now_us < self._next_us:
            return
        self._next_us = now_us + round(self._settings.upkeep_seconds * 1e6)
        compacting = now_us >= self._compact_us
        if compacting:
            self._compact_us = now_us + round(self._settings.compact_seconds * 1e6)
        self._open_some()
        for topic in self._topics:
            for lane in list(topic.lanes.values()):
                lane.partition.request_sync()
                self._topics.keep_producers(topic, lane, now_us)
                self._look_after(topic, lane, now_us, compacting)

    def _open_some(self) -> None:
        left = _OPENED_EACH_TIME
        for topic in self._topics:
            settings = topic.settings
            trimmed = settings.retain_seconds or settings.retain_bytes or settings.validity is not Validity.KEEP
            if settings.storage is Storage.DISK and trimmed:
                for number in range(settings.partitions):
                    if number not in topic.lanes and left:
                        left -= 1
                        self._topics.lane(topic, number)

    def _look_after(self, topic: Topic, lane: Lane, now_us: int, compacting: bool) -> None:
        settings, partition = topic.settings, lane.partition
        age = settings.ttl_seconds if settings.validity is Validity.TTL else settings.retain_seconds
        age_us = None if age is None else round(age * 1e6)
        if age_us is not None or settings.retain_bytes is not None:
            self._do(lane, partial(partition.retain, now_us, age_us, settings.retain_bytes))
        if settings.validity is Validity.UNTIL_CONSUMED:
            consumed = self._membership.consumed_offset(topic, lane.number)
            if consumed is not None and consumed > partition.first_offset:
                self._do(lane, partial(partition.truncate_before, consumed))
        if settings.compact_by_key and compacting:
            segment_bytes = log_settings(settings).segment_bytes
            if partition.size_bytes - lane.compacted_bytes >= segment_bytes:
                self._do(lane, partial(_compact, lane))

    def _do(self, lane: Lane, work: Callable[[], object]) -> None:
        """Have it done in the background, unless something is being done there already."""
        if id(lane) in self._at_work:
            return
        self._at_work.add(id(lane))

        def job() -> None:
            try:
                if lane.gone is None:
                    work()
            except HeadraceError as error:
                logger.warning("%s partition %s could not be looked after: %s", lane.topic, lane.number, error)
            finally:
                self._ports.from_thread(lambda: self._at_work.discard(id(lane)))

        self._ports.background(job)


def _compact(lane: Lane) -> None:
    freed = lane.partition.compact_by_key()
    lane.compacted_bytes = lane.partition.size_bytes
    if freed:
        logger.info("compacted %s partition %s: %s bytes freed", lane.topic, lane.number, freed)
