"""The registry of topics: made, changed, listed and deleted while the broker runs."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial

from headrace.broker.facts import ProducersKept, TopicGone, TopicSet
from headrace.broker.lane import Lane
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
from headrace.model.requests import TopicCreate, TopicInfo, TopicList
from headrace.model.topic import Storage, TopicName, TopicSettings, parse_topic, topic_settings


class Topic:
    """A topic; its partitions are opened when they are first needed."""

    def __init__(self, fact: TopicSet, settings: TopicSettings) -> None:
        self.id = fact.id
        self.name = parse_topic(fact.name)
        self.created_us = fact.created_us
        self.settings = settings
        self.lanes: dict[int, Lane] = {}

    def __str__(self) -> str:
        return str(self.name)

    def partition_name(self, number: int) -> str:
        """The name of a partition's log, which no other topic ever has."""
        return f"{self.name.tenant}.{self.name.topic}.{self.id}.{number}"


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
        for number in range(topic.settings.partitions):
            partition_name = topic.partition_name(number)
            self._ledger.state.producers.pop(partition_name, None)
            lane = topic.lanes.pop(number, None)
            if lane is not None:
                lane.end()
            self._ports.background(partial(self._remove, lane, partition_name))
        self.on_change(now_us)

    def lane(self, topic: Topic, number: int) -> Lane:
        """A partition, opened if need be."""
        lane = topic.lanes.get(number)
        if lane is None:
            if not 0 <= number < topic.settings.partitions:
                raise PartitionNotFound(
                    f"{topic} has the partitions 0 to {topic.settings.partitions - 1}, not {number}",
                    partitions=topic.settings.partitions,
                )
            name = topic.partition_name(number)
            partition = self._store.open_partition(name, topic.settings, self._ledger.state.producers.get(name))
            lane = Lane(str(topic), number, partition, topic.settings, self._ports)
            topic.lanes[number] = lane
        return lane

    def all_lanes(self, topic: Topic) -> list[Lane]:
        """All partitions of a topic, opened if need be."""
        return [self.lane(topic, number) for number in range(topic.settings.partitions)]

    def matching(self, request: TopicList) -> list[Topic]:
        """The topics that match, by name."""
        return sorted(
            (
                topic
                for topic in self
                if matches(str(topic), request.pattern) and request.tenant in ("", topic.name.tenant)
            ),
            key=lambda topic: topic.name,
        )

    def info(self, topic: Topic, *, partitions: bool) -> TopicInfo:
        """What is told of a topic."""
        lanes = self.all_lanes(topic) if partitions else []
        groups = [
            group
            for group, positions in sorted(self._ledger.state.groups.items())
            if partitions and any(topic_id == topic.id for topic_id, _ in positions)
        ]
        return TopicInfo(
            str(topic), topic.id, topic.created_us, topic.settings.as_dict(), [lane.info() for lane in lanes], groups
        )

    def keep_producers(self, topic: Topic, lane: Lane, now_us: int) -> None:
        """Remember what a partition knows of its producers, if it has learnt much, once all of that is synced."""
        saved = lane.partition.save_producers()
        if saved is not None:
            name = topic.partition_name(lane.number)

            def keep(error: HeadraceError | None) -> None:
                if error is None and lane.gone is None:
                    self._ledger.record(now_us, ProducersKept(name, saved))

            lane.when_synced(keep)

    def close(self, now_us: int) -> None:
        """Sync and close all partitions, and remember their producers."""
        for topic in self:
            for lane in topic.lanes.values():
                lane.flush()
                saved = lane.partition.save_producers(closing=True)
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

    def _remove(self, lane: Lane | None, partition_name: str) -> None:
        if lane is not None:
            lane.partition.close()
        self._store.delete_partition(partition_name)

    def _remove_strays(self) -> None:
        """Remove what a crash left of deleted topics."""
        known = {topic.partition_name(number) for topic in self for number in range(topic.settings.partitions)}
        for name in self._store.partition_names():
            if name not in known:
                self._ports.background(partial(self._store.delete_partition, name))


def matches(name: str, pattern: str) -> bool:
    """Whether a topic's name matches a pattern: `*` stands for any characters, `?` for one."""
    return fnmatchcase(name, pattern.replace("[", "[[]"))
