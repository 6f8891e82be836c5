"""The registry of topics: made, changed, listed and deleted while the broker runs."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from headrace.broker.assignment import wanted_topics
from headrace.broker.facts import Moved, ProducersKept, TopicGone, TopicSet, partition_name
from headrace.broker.lane import Lane
from headrace.broker.later import Later
from headrace.broker.leased_facts import EditsLost
from headrace.broker.ledger import Ledger
from headrace.broker.ports import Ports
from headrace.broker.settings import BrokerSettings
from headrace.engines.api import Store
from headrace.model.errors import (
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    PartitionNotFound,
    TopicExists,
    TopicNotFound,
)
from headrace.model.requests import Done, PartitionInfo, TopicCreate, TopicInfo, TopicList, Words
from headrace.model.topic import DEFAULT_TENANT, Storage, TopicName, TopicSettings, parse_topic, topic_settings

logger = logging.getLogger("headrace.broker")

_PARTITION = re.compile(r".+\..+\.[0-9]+\.[0-9]+")


class Topic:
    """A topic; its partitions are opened when they are first needed."""

    def __init__(self, fact: TopicSet, settings: TopicSettings) -> None:
        self.id = fact.id
        self.name = parse_topic(fact.name)
        self.created_us = fact.created_us
        self.settings = settings
        self.lanes: dict[int, Lane] = {}
        self._fact = fact

    def __str__(self) -> str:
        return str(self.name)

    def partition_name(self, number: int) -> str:
        """The name of a partition's log, which no other topic ever has."""
        return partition_name(self._fact, number)


class Topics:
    """All topics."""

    def __init__(self, store: Store, ledger: Ledger, ports: Ports, settings: BrokerSettings) -> None:
        self._store = store
        self._ledger = ledger
        self._ports = ports
        self._settings = settings
        self.on_change: Callable[[int], None] = lambda _now_us: None
        """Called with the time when topics came, went or got more partitions."""
        self._by_name: dict[TopicName, Topic] = {}
        self._by_text: dict[str, Topic] = {}
        self.by_id: dict[int, Topic] = {}
        for fact in ledger.state.topics.values():
            self._add(Topic(fact, topic_settings(fact.settings)))
        self._remove_strays()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self.by_id.values()))

    def lanes(self) -> Iterator[Lane]:
        """All partitions that are open."""
        return (lane for topic in self for lane in topic.lanes.values())

    def partitions(self) -> dict[str, int]:
        """The names of all topics, with how many partitions they have."""
        return {str(topic): topic.settings.partitions for topic in self}

    def find(self, name: str) -> Topic | None:
        """The topic of that name, if there is one."""
        topic = self._by_text.get(name)
        return topic if topic is not None else self._by_name.get(parse_topic(name))

    def get(self, name: str) -> Topic:
        """The topic of that name."""
        topic = self.find(name)
        if topic is None:
            raise TopicNotFound(f"there is no topic {name}; create it first")
        return topic

    def get_or_create(self, name: str, now_us: int) -> Topic:
        """The topic of that name, made if the broker may do that by itself."""
        topic = self.find(name)
        if topic is None and self._settings.auto_create_topics:
            topic = self.create(TopicCreate(name), now_us)
        return topic if topic is not None else self.get(name)

    def create(self, request: TopicCreate, now_us: int) -> Topic:
        """Make a topic."""
        name = parse_topic(request.topic)
        existing = self._by_name.get(name)
        if existing is not None:
            if request.exist_ok:
                return existing
            raise TopicExists(f"there is already a topic {name}")
        if len(self.by_id) >= self._settings.topics_max:
            raise LimitExceeded(f"there are {len(self.by_id)} topics, and no more are allowed (topics_max)")
        settings = topic_settings(request.settings, self._defaults(request))
        self._check_storage(settings)
        fact = TopicSet(self._ledger.state.topic_id + 1, str(name), now_us, settings.as_dict())
        self._ledger.record(now_us, fact)
        topic = Topic(fact, settings)
        self._add(topic)
        self.on_change(now_us)
        return topic

    def alter(self, name: str, given: dict[str, object], now_us: int) -> Topic:
        """Change a topic's settings; its storage stays, and partitions are only added."""
        topic = self.get(name)
        settings = topic_settings(given, topic.settings)
        if settings.storage is not topic.settings.storage:
            raise InvalidArgument("a topic's storage cannot be changed; make another topic and copy the messages")
        if settings.partitions < topic.settings.partitions:
            raise InvalidArgument(f"a topic has at least its {topic.settings.partitions} partitions; it can get more")
        fact = TopicSet(topic.id, str(topic), topic.created_us, settings.as_dict())
        self._ledger.record(now_us, fact)
        grown = settings.partitions > topic.settings.partitions
        topic.settings = settings
        for lane in topic.lanes.values():
            lane.alter(settings)
        if grown:
            self.on_change(now_us)
        return topic

    def delete(self, name: str, now_us: int) -> None:
        """Remove a topic and its messages; whoever reads it is told."""
        topic = self.get(name)
        self._ledger.record(now_us, TopicGone(topic.id))
        del self._by_name[topic.name], self._by_text[str(topic)], self.by_id[topic.id]
        lanes, topic.lanes = topic.lanes, {}
        for lane in lanes.values():
            lane.end()
        self.on_change(now_us)
        self._ledger.durably(Done()).then(partial(self._remove_files, topic, lanes))

    def lane(self, topic: Topic, number: int) -> Lane:
        """A partition, opened if need be."""
        lane = topic.lanes.get(number)
        if lane is None:
            if not 0 <= number < topic.settings.partitions:
                raise PartitionNotFound(
                    f"{topic} has the partitions 0 to {topic.settings.partitions - 1}, not {number}",
                    partitions=topic.settings.partitions,
                )
            lane = topic.lanes[number] = self._open(topic, number)
        return lane

    def all_lanes(self, topic: Topic) -> list[Lane]:
        """All partitions of a topic, opened if need be."""
        return [self.lane(topic, number) for number in range(topic.settings.partitions)]

    def matching(self, request: TopicList) -> list[Topic]:
        """The topics that match, by name."""
        tenant = f"{request.tenant}/" if request.tenant not in ("", DEFAULT_TENANT) else ""
        pattern = tenant + request.pattern
        return [self.get(name) for name in sorted(wanted_topics((), (pattern,), self._by_text))]

    def info(self, topic: Topic, *, partitions: bool, new: bool = False) -> TopicInfo:
        """What is told of a topic; partitions that are not open are opened, or are `new` and have nothing yet."""
        if partitions and not new:
            self.all_lanes(topic)
        numbers = range(topic.settings.partitions) if partitions else ()
        lanes = [topic.lanes[at].info() if at in topic.lanes else PartitionInfo(at, 0, 0, 0) for at in numbers]
        groups = [
            group
            for group, positions in sorted(self._ledger.state.groups.items())
            if partitions and any(topic_id == topic.id for topic_id, _ in positions)
        ]
        return TopicInfo(str(topic), topic.id, topic.created_us, topic.settings.as_dict(), lanes, groups)

    def keep_producers(self, topic: Topic, lane: Lane, now_us: int, *, at_once: bool) -> Later[Words]:
        """Remember what a partition knows of its producers, if it has learnt much, or anything; tells when it is done.

        Not before all of that is synced: what is remembered must be true after a power loss.
        """
        later: Later[Words] = Later()
        saved = lane.partition.save_producers(at_once=at_once)

        def keep(error: HeadraceError | None) -> None:
            try:
                if error is not None:
                    raise error
                if saved is not None and lane.gone is None:
                    self._ledger.record(now_us, ProducersKept(topic.partition_name(lane.number), saved))
            except HeadraceError as trouble:
                later.settle(trouble)
            else:
                self._ledger.durably(Done()).then(later.settle)

        if saved is not None or at_once:
            lane.when_synced(keep)
        return later

    def close(self, now_us: int) -> None:
        """Sync and close all partitions, and remember their producers; raises if that went wrong with any of them."""
        with ExitStack() as closing:
            for topic in self:
                for lane in topic.lanes.values():
                    closing.callback(self._close, topic, lane, now_us)

    def _close(self, topic: Topic, lane: Lane, now_us: int) -> None:
        lane.flush()
        saved = lane.partition.save_producers(at_once=True)
        lane.partition.close()
        if saved is not None:
            self._ledger.record(now_us, ProducersKept(topic.partition_name(lane.number), saved))

    def _add(self, topic: Topic) -> None:
        self._by_name[topic.name] = self._by_text[str(topic)] = self.by_id[topic.id] = topic

    def _defaults(self, request: TopicCreate) -> TopicSettings:
        if self._store.directory is None and "storage" not in request.settings:
            return topic_settings({"storage": "memory"}, self._settings.topic)
        return self._settings.topic

    def _check_storage(self, settings: TopicSettings) -> None:
        if self._store.directory is None and settings.storage is not Storage.MEMORY:
            raise InvalidArgument("this broker keeps everything in memory: topics cannot be on a disk")

    def _open(self, topic: Topic, number: int) -> Lane:
        name = topic.partition_name(number)
        partition = self._store.open_partition(name, topic.settings, self._ledger.state.producers.get(name))
        end = partition.next_offset
        try:
            # Messages that were not synced may be gone, or all of a topic in memory: the next ones have their offsets.
            for group in self._ledger.state.groups_beyond(topic.id, number, end):
                self._ledger.record(self._ledger.now_us, Moved(group, [(topic.id, number, end)]))
            if self._ledger.state.leased.last_edited(topic.id, number) >= end:
                self._ledger.record(self._ledger.now_us, EditsLost(topic.id, number, end))
        except HeadraceError:
            partition.close()
            raise
        # A topic that a power loss may take back has no messages that are safe.
        held = partition.in_files and not end and not self._ledger.synced
        lane = Lane(str(topic), number, partition, topic.settings, self._ports, held=held)
        lane.topic_id = topic.id
        if held:
            self._ledger.durably(Done()).then(lane.release)
        return lane

    def _remove_files(self, topic: Topic, lanes: dict[int, Lane], outcome: object) -> None:
        """Remove what is left of a topic, once no power loss can bring it back."""
        if not isinstance(outcome, HeadraceError):
            for number in range(topic.settings.partitions):
                self._ports.background(partial(self._remove, lanes.get(number), topic.partition_name(number)))

    def _remove(self, lane: Lane | None, partition_name: str) -> None:
        try:
            if lane is not None:
                lane.partition.close()
        except HeadraceError as error:
            logger.info("%s is removed, though it could not be closed: %s", partition_name, error)
        self._store.delete_partition(partition_name)

    def _remove_strays(self) -> None:
        """Remove what a crash left of deleted topics."""
        known = {topic.partition_name(number) for topic in self for number in range(topic.settings.partitions)}
        for name in self._store.partition_names():
            if name not in known and _PARTITION.fullmatch(name):
                # The power may have gone before the journal had it: its id is not given out again all the same.
                _, topic_id, _ = name.rsplit(".", 2)
                self._ledger.state.topic_id = max(self._ledger.state.topic_id, int(topic_id))
                self._ports.background(partial(self._store.delete_partition, name))
