"""The registry of topics: creates, alters, lists and deletes topics, and opens their partitions."""

import logging
import shlex
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from types import MappingProxyType

from msgspec.structs import replace

from headrace.broker.active_partition import ActivePartition
from headrace.broker.assignment import wanted_topics
from headrace.broker.facts import (
    AnyFact,
    OffsetsCommitted,
    OffsetsReserved,
    ProducersCheckpointed,
    TopicDeleted,
    TopicSet,
    partition_name,
)
from headrace.broker.ledger import Ledger
from headrace.broker.middleware_chain import MiddlewareChain
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.reservation import Reservation
from headrace.broker.settings import BrokerSettings
from headrace.broker.signal import Inquiry, Signal
from headrace.broker.topic_files import TopicFiles
from headrace.broker.topic_middleware import TopicMiddleware
from headrace.broker.views import ActiveView, ViewFactory, inherited, new_view_settings
from headrace.engines.api import (
    DerivedCache,
    Partition,
    PartitionOwner,
    Store,
)
from headrace.model.durability import Durability
from headrace.model.errors import (
    DurabilityUnavailable,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    PartitionNotFound,
    TopicExists,
    TopicFailed,
    TopicHasViews,
    TopicIsView,
    TopicNotFound,
    UnexpectedOffset,
)
from headrace.model.middleware import LoadMiddleware
from headrace.model.request import Answer
from headrace.model.requests import Done, PartitionInfo, TopicCreate, TopicInfo, TopicList
from headrace.model.suggestions import nearest, question
from headrace.model.system_topics import AUDIT_SETTINGS, AUDIT_TOPIC, BROKER_TOPICS, SYSTEM_TOPICS, check_audit_settings
from headrace.model.topic import DEFAULT_TENANT, Storage, TopicName, TopicSettings, parse_topic, topic_settings
from headrace.security.definitions import DefinitionsStore

logger = logging.getLogger("headrace.broker")


_MATCHED_TOGETHER = 1000
_DESCRIBED_TOGETHER = 100
"""Topics described per slice of a list request."""
_LIKENESS, _LENGTHS_APART_MAX = 0.75, 2
"""The minimum similarity to a missing topic's name, and maximum difference in length, for a suggestion."""


class Topic:
    """A topic; the registry opens its partitions on first use."""

    def __init__(self, fact: TopicSet, settings: TopicSettings) -> None:
        self.id = fact.id
        self.name = parse_topic(fact.name)
        self.created_us = fact.created_us
        self.settings = settings
        self.active_partitions: dict[int, ActivePartition] = {}
        self.failure = ""
        """Why the topic could not be opened; empty if it is open."""
        self.revision = fact.revision
        self.is_brokers = self.name.topic in BROKER_TOPICS
        """Whether only the broker itself writes to it."""
        self.middleware: MiddlewareChain | None = None
        """What its batches pass through; None if there is nothing, and never was since the broker started."""

    def __str__(self) -> str:
        return str(self.name)

    @property
    def is_view(self) -> bool:
        """Whether it is a virtual topic, which has no files of its own."""
        return self.settings.view_of is not None

    def partition_name(self, number: int) -> str:
        """The name of a partition's log, unique among all topics ever created."""
        return partition_name(self.id, number)

    def owner(self, number: int, identity: str, *, journaled: bool = False) -> PartitionOwner:
        """The record stored with a partition's files, from which a repair restores the topic if the journal is lost."""
        settings = self.settings.as_dict()
        return PartitionOwner(identity, self.id, str(self), number, self.created_us, self.revision, settings, journaled)


class TopicRegistry:
    """All topics of a broker."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        definitions: DefinitionsStore,
        ports: Ports,
        settings: BrokerSettings,
        load_middleware: LoadMiddleware,
    ) -> None:
        cache = DerivedCache()
        self._middleware = TopicMiddleware(load_middleware, cache)
        self._store = store
        self._ledger = ledger
        self._definitions = definitions
        self._ports = ports
        self._settings = settings
        self._boot_id = store.boot_id
        self.durability_max = Durability.REPLICATED if store.is_replicated else Durability.SYNCED
        """The durability that messages on the disk have once they are synced."""
        self.ballast = store.ballast
        self.making: Signal[str, int, int] = Signal()
        """Emitted before a tenant gets so many more topics and partitions; a listener refuses by raising."""
        self.changed: Signal[Topic, int] = Signal()
        """Emitted when a topic is created, deleted or gets more partitions, with the time."""
        self.altered: Signal[Topic, int] = Signal()
        """Emitted when a topic's settings change, with the time."""
        self.companions: Inquiry[[str, int, TopicSettings | None], AnyFact] = Inquiry()
        """Facts to record together with a change of a topic: given its name, id (0: it is deleted) and settings."""
        self._by_name: dict[TopicName, Topic] = {}
        self._by_text: dict[str, Topic] = {}
        self.by_id: dict[int, Topic] = {}
        self._counts: dict[str, int] = {}
        self.partitions: Mapping[str, int] = MappingProxyType(self._counts)
        """A live view of partition counts by topic name."""
        self._view_factory = ViewFactory(ports, cache)
        self._views: dict[int, dict[int, Topic]] = {}
        """The views of each topic that has any, by the ids of both."""
        for fact in ledger.state.topics.values():
            topic = _opened(fact)
            self._open_middleware(topic)
            self._add(topic)
        for topic in self:
            self._attach_view(topic)
        self._files = TopicFiles(store.data, ledger, ports)
        self._files.check()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self.by_id.values()))

    def log_view_failures(self, now_us: int) -> None:
        """Log what the queries of views have failed on."""
        self._view_factory.log_failures(now_us)

    def views_of(self, topic: Topic) -> list[Topic]:
        """The virtual topics that read from a topic."""
        return list(self._views[topic.id].values()) if topic.id in self._views else []

    def with_views(self, topic: Topic) -> list[Topic]:
        """A topic and the virtual topics that read from it: whoever reads one of them needs its messages."""
        return [topic, *self.views_of(topic)]

    def source_of(self, topic: Topic) -> Topic:
        """The topic that stores a topic's messages: the source of a view, any other topic itself."""
        view_of = topic.settings.view_of
        return topic if view_of is None else self.find(view_of) or topic

    def active_partitions(self) -> Iterator[ActivePartition]:
        """All open partitions."""
        return (active for topic in self for active in topic.active_partitions.values())

    def find(self, name: str) -> Topic | None:
        """The topic of that name, if there is one."""
        topic = self._by_text.get(name)
        return topic if topic is not None else self._by_name.get(parse_topic(name))

    def get(self, name: str) -> Topic:
        """The topic of that name; raises if it is missing or could not be opened."""
        topic = self._by_text.get(name)
        if topic is None or topic.failure:
            topic = self.known(name)
            self.check(topic)
        return topic

    def known(self, name: str) -> Topic:
        """The topic of that name, even if it could not be opened; raises if it is missing."""
        topic = self.find(name)
        if topic is None:
            raise self._not_found(name)
        return topic

    def _not_found(self, name: str) -> TopicNotFound:
        """The error for a missing topic, with similar names of the same tenant unless security is enabled."""
        tenant, wanted = parse_topic(name)
        is_secured = self._definitions.load().enabled  # not everybody may see all topics
        known = () if is_secured else self._by_text.values()
        names = (topic.name.topic for topic in known if topic.name.tenant == tenant)
        near = [str(TopicName(tenant, one)) for one in nearest(wanted, names, _LIKENESS, _LENGTHS_APART_MAX)]
        meant = f"; {question(near)}" if near else ";"
        hint = f"`headrace topic create {shlex.quote(name)}` makes it"
        return TopicNotFound(f"there is no topic {name}{meant} {hint}", nearest=near)

    def check(self, topic: Topic) -> None:
        """Raise TopicFailed for a topic that could not be opened."""
        if topic.failure:
            raise TopicFailed(
                f"the topic {topic} could not be opened: {topic.failure}; alter the topic to store valid settings, or "
                "delete it"
            )

    def check_begun(self, name: str, expected_offset: int) -> None:
        """Refuse a message that is to get a later offset than the first, if there is no such topic."""
        if self._settings.auto_create_topics and self.find(name) is None:
            raise UnexpectedOffset(
                f"there is no topic {name}, whose first message would get offset 0, not {expected_offset}; nothing was "
                "appended",
                next_offset=0,
            )

    def check_new_partition(self, name: str, number: int) -> None:
        """Refuse a partition that a missing topic would not have either if it were created."""
        if self._settings.auto_create_topics and self.find(name) is None:
            partitions = self._defaults(TopicCreate(name)).partitions
            if not 0 <= number < partitions:
                raise PartitionNotFound(
                    f"there is no topic {name}, and a new one has no partition {number}; it has 0 to {partitions - 1}",
                    partitions=partitions,
                )

    def get_or_create(self, name: str, now_us: int) -> Topic:
        """The topic of that name, created if it is missing and auto_create_topics is on."""
        topic = self._by_text.get(name)
        if topic is not None and not topic.failure:
            return topic  # the hot path of every publish
        topic = self.find(name)
        if topic is None and (self._settings.auto_create_topics or parse_topic(name).topic in SYSTEM_TOPICS):
            return self.create(TopicCreate(name), now_us)
        if topic is None:
            raise TopicNotFound(f"there is no topic {name}, and auto_create_topics is off; create it first")
        self.check(topic)
        return topic

    def create(self, request: TopicCreate, now_us: int) -> Topic:
        """Create a topic."""
        name = parse_topic(request.topic)
        existing = self._by_name.get(name)
        if existing is not None:
            if request.exist_ok:
                return existing
            raise TopicExists(f"there is already a topic {name}; choose another name, or pass exist_ok")
        check_audit_settings(str(name), request.settings)
        if len(self.by_id) >= self._settings.topics_max:
            raise LimitExceeded(
                f"there are {len(self.by_id)} topics, which is the maximum; delete some, or raise topics_max"
            )
        if request.settings.get("view_of") is not None or request.settings.get("view_query") is not None:
            settings = self._view_settings(name, request)
        else:
            settings = topic_settings(request.settings, self._defaults(request))
            self._check_storage(settings)
        if name.topic != AUDIT_TOPIC:  # no quota keeps actions from being recorded
            self.making(name.tenant, 1, settings.partitions)
        middleware = self._middleware.make(settings)  # first what may go wrong
        fact = TopicSet(self._ledger.state.topic_id + 1, str(name), now_us, settings.as_dict())
        self._ledger.record(now_us, fact, *self.companions(str(name), fact.id, settings))
        topic = Topic(fact, settings)
        topic.middleware = middleware
        self._add(topic)
        self._attach_view(topic)
        self.changed(topic, now_us)
        return topic

    def _view_settings(self, name: TopicName, request: TopicCreate) -> TopicSettings:
        """The settings of a new view: its source's, and its query."""
        given = new_view_settings(name, request.settings)
        assert given.view_of is not None
        source = self.get(given.view_of)
        if source.is_view:
            raise TopicIsView(
                f"{source} is a virtual topic itself: make {name} a view of its source, {source.settings.view_of}",
                view_of=source.settings.view_of,
            )
        if source.name.tenant != name.tenant:
            raise InvalidArgument(f"a view and its source belong to one tenant, and {name} and {source} do not")
        count = request.settings.get("partitions")
        if count not in (None, source.settings.partitions):
            raise InvalidArgument(
                f"a view has as many partitions as its source, {source.settings.partitions}, not {count}: leave it out"
            )
        return inherited(source.settings, str(source), given.view_query)

    def _attach_view(self, topic: Topic) -> None:
        """Connect a view with its source, whose settings it has; without a source it fails."""
        view_of = topic.settings.view_of
        if view_of is None or topic.failure:
            return
        source = self.find(view_of)
        if source is None or source.is_view:
            topic.failure = f"its source {view_of} is missing: delete this view"
            logger.error("view failed; delete it  view=%s reason=%s", topic, topic.failure)
            return
        self._views.setdefault(source.id, {})[topic.id] = topic
        topic.settings = inherited(source.settings, view_of, topic.settings.view_query)
        self._counts[str(topic)] = topic.settings.partitions

    def alter(self, name: str, given: dict[str, object], now_us: int) -> Topic:
        """Change a topic's settings; storage is fixed, and the partition count can only grow."""
        topic = self.known(name)
        if topic.is_view:
            raise TopicIsView(
                f"the settings of {topic}, a virtual topic, are those of its source, {topic.settings.view_of}: alter "
                f"that one; for another view_query delete {topic} and create it again",
                view_of=topic.settings.view_of,
            )
        if given.get("view_of") is not None or given.get("view_query") is not None:
            raise InvalidArgument(f"{topic} is no virtual topic and cannot become one; create another topic as a view")
        check_audit_settings(str(topic), given, AUDIT_SETTINGS)
        settings = topic_settings(given, topic.settings)
        if settings.storage is not topic.settings.storage:
            raise InvalidArgument("a topic's storage cannot be changed; create another topic and copy the messages")
        if settings.partitions < topic.settings.partitions:
            raise InvalidArgument(f"{topic} has {topic.settings.partitions} partitions; that number can only grow")
        if settings.key_versions and settings.partitions != topic.settings.partitions:
            raise InvalidArgument(
                f"the partitions of {topic} cannot become more while it has key_versions: keys would move to other "
                "partitions, where their versions begin anew; create another topic and copy the messages"
            )
        if "durability" in given:
            self._check_storage(settings)
        altered = [(topic, settings)]
        altered += [(view, inherited(settings, str(topic), view.settings.view_query)) for view in self.views_of(topic)]
        more = (settings.partitions - topic.settings.partitions) * len(altered)
        if more:
            self.making(topic.name.tenant, 0, more)
        middleware = self._middleware.alter(topic.middleware, topic.settings, settings, anew=bool(topic.failure))
        facts = [
            TopicSet(each.id, str(each), each.created_us, given.as_dict(), each.revision + 1) for each, given in altered
        ]
        self._ledger.record(now_us, *facts, *self.companions(str(topic), topic.id, settings))
        grown = settings.partitions > topic.settings.partitions
        topic.middleware = middleware
        for each, others in altered:
            self._apply_settings(each, others, now_us)
        for each, _ in altered if grown else ():
            self.changed(each, now_us)
        for each, _ in altered:
            self.altered(each, now_us)
        return topic

    def _apply_settings(self, topic: Topic, settings: TopicSettings, now_us: int) -> None:
        """Use other settings, which the journal has, from now on."""
        topic.settings, topic.revision, topic.failure = settings, topic.revision + 1, ""
        self._counts[str(topic)] = settings.partitions
        for active in topic.active_partitions.values():
            active.alter(settings, now_us)
            if not topic.is_view:
                self._middleware.apply(topic.name, topic.middleware, active)
                self._ports.background(
                    partial(self._files.store_owner, active, topic.owner(active.number, self._identity))
                )

    def delete(self, name: str, now_us: int) -> None:
        """Delete a topic and its messages, and end its readers."""
        topic = self.known(name)
        if views := sorted(map(str, self.views_of(topic))):
            raise TopicHasViews(
                f"{topic} cannot be deleted while virtual topics read from it: delete {', '.join(views)} first",
                views=views,
            )
        self._ledger.record(now_us, TopicDeleted(topic.id), *self.companions(str(topic), 0, None))
        self._forget_view(topic)
        del self._by_name[topic.name], self._by_text[str(topic)], self.by_id[topic.id], self._counts[str(topic)]
        active_partitions, topic.active_partitions = topic.active_partitions, {}
        for active in active_partitions.values():
            active.end()
        self.changed(topic, now_us)
        self._ledger.durably(Done()).then(partial(self._files.remove_once, topic.id, list(active_partitions.values())))

    def _forget_view(self, topic: Topic) -> None:
        source = self.find(topic.settings.view_of) if topic.settings.view_of is not None else None
        if source is not None and source.id in self._views:
            self._views[source.id].pop(topic.id, None)
            if not self._views[source.id]:
                del self._views[source.id]
        self._view_factory.forget(topic.id)

    def active(self, topic: Topic, number: int) -> ActivePartition:
        """A partition of a topic, opened on first use."""
        active = topic.active_partitions.get(number)
        if active is None:
            if not 0 <= number < topic.settings.partitions:
                raise PartitionNotFound(
                    f"{topic} has no partition {number}; it has 0 to {topic.settings.partitions - 1}",
                    partitions=topic.settings.partitions,
                )
            self.check(topic)
            active = topic.active_partitions[number] = self._open(topic, number)
        return active

    def all_active(self, topic: Topic) -> list[ActivePartition]:
        """All partitions of a topic, opened on first use."""
        return [self.active(topic, number) for number in range(topic.settings.partitions)]

    def matching(self, request: TopicList) -> Generator[None, None, list[TopicInfo]]:
        """Describe the topics that match a pattern, by name and without their partitions, in slices."""
        pattern = request.pattern.removeprefix(f"{DEFAULT_TENANT}/")
        names = list(self._by_text)
        if not {"*", "?"}.intersection(pattern):
            names = [pattern] if pattern in self._by_text else []
        found: list[str] = []
        for start in range(0, len(names), _MATCHED_TOGETHER):
            if start:
                yield
            found += wanted_topics((), (pattern,), names[start : start + _MATCHED_TOGETHER])
        infos = []
        for at, name in enumerate(sorted(found), 1):
            topic = self._by_text.get(name)
            if topic is not None:  # it may have been deleted between slices
                infos.append(self.info(topic, partitions=False))
            if not at % _DESCRIBED_TOGETHER:
                yield
        return infos

    def info(self, topic: Topic, *, partitions: bool, new: bool = False) -> TopicInfo:
        """Describe a topic; opens its partitions unless they are `new` and therefore empty."""
        if partitions and not new and not topic.failure:
            self.all_active(topic)
        numbers = range(topic.settings.partitions) if partitions else ()
        active_partitions = [
            topic.active_partitions[at].info() if at in topic.active_partitions else PartitionInfo(at, 0, 0, 0)
            for at in numbers
        ]
        groups = self._ledger.state.groups_of(topic.id) if partitions else []
        settings = topic.settings.as_dict()
        if topic.settings.durability > self.durability_max:  # it was made in a cluster: this is what it has here
            settings["durability"] = self.durability_max.name.lower()
        info = TopicInfo(str(topic), topic.id, topic.created_us, settings, active_partitions, groups, topic.failure)
        if topic.id in self._views:
            info.views = sorted(map(str, self.views_of(topic)))
        if topic.is_view:
            opened = topic.active_partitions.values()
            info.view_failed = sum(each.failed_count for each in opened if isinstance(each, ActiveView))
        return info

    def keep_producers(
        self, topic: Topic, active: ActivePartition, now_us: int, *, at_once: bool
    ) -> PendingAnswer[Answer]:
        """Checkpoint a partition's producers if much was appended, or `at_once` if anything was; resolves when synced.

        The journal records the checkpoint after the partition is synced, so that it holds after a power loss.
        """
        pending_answer: PendingAnswer[Answer] = PendingAnswer()
        saved = active.partition.save_producers(at_once=at_once)
        if saved is None and not at_once:
            return pending_answer

        def keep(error: HeadraceError | None) -> None:
            if error is None and saved is None and active.partition.has_unsaved:
                # More was appended, or an earlier checkpoint could not be recorded.
                self.keep_producers(topic, active, now_us, at_once=True).then(pending_answer.resolve)
                return
            try:
                if error is not None:
                    raise error
                if saved is not None and active.gone is None:
                    fact = ProducersCheckpointed(topic.partition_name(active.number), saved)
                    record = partial(self._ledger.record, now_us, fact)
                    self.ballast.use(record) if at_once else record()
            except HeadraceError as failure:
                if saved is not None:
                    active.partition.save_again()
                pending_answer.resolve(failure)
            else:
                self._ledger.durably(Done()).then(pending_answer.resolve)

        active.when_synced(keep)
        return pending_answer

    def close(self, now_us: int) -> None:
        """Sync and close all partitions and checkpoint their producers; raises if any of that failed."""
        with ExitStack() as closing:
            for topic in self:
                for active in topic.active_partitions.values():
                    closing.callback(self._close, topic, active, now_us)

    def _close(self, topic: Topic, active: ActivePartition, now_us: int) -> None:
        active.flush()
        saved = active.partition.save_producers(at_once=True)
        end = active.partition.next_offset
        active.partition.close()
        if saved is not None:
            self._ledger.record(now_us, ProducersCheckpointed(topic.partition_name(active.number), saved))
        reserved = self._ledger.state.reserved.get((topic.id, active.number))
        if reserved is not None and reserved.end != end:
            # All messages are synced, or were in memory: the next start need not skip reserved offsets.
            self._ledger.record(now_us, OffsetsReserved(topic.id, active.number, end, self._boot_id))

    def _add(self, topic: Topic) -> None:
        self._by_name[topic.name] = self._by_text[str(topic)] = self.by_id[topic.id] = topic
        self._counts[str(topic)] = topic.settings.partitions

    def _open_middleware(self, topic: Topic) -> None:
        """Make a stored topic's middleware; one that cannot be had isolates the topic."""
        if topic.failure or not topic.settings.middleware:
            return
        try:
            topic.middleware = self._middleware.make(topic.settings)
        except HeadraceError as error:
            logger.error("topic failed; install its middleware, or alter it  topic=%s reason=%s", topic, error)
            topic.failure = str(error)

    def _defaults(self, request: TopicCreate) -> TopicSettings:
        own = SYSTEM_TOPICS.get(parse_topic(request.topic).topic, {})
        if self._store.directory is None and "storage" not in request.settings:
            own = {**own, "storage": "memory", "durability": "memory"}
        defaults = self._settings.topic
        if self._store.is_replicated and defaults.durability is Durability.SYNCED:
            defaults = replace(defaults, durability=Durability.REPLICATED)
        return topic_settings(own, defaults) if own else defaults

    def _check_storage(self, settings: TopicSettings) -> None:
        if settings.durability > self.durability_max:
            raise DurabilityUnavailable(
                "this broker is not part of a cluster, so a topic cannot have durability replicated: use synced, or "
                "start the broker with --cluster and --store"
            )
        if self._store.directory is None and settings.storage is not Storage.MEMORY:
            raise InvalidArgument(
                "this broker has no data directory, so topics cannot have storage disk; use storage memory"
            )

    def _open(self, topic: Topic, number: int) -> ActivePartition:
        if topic.is_view:
            source = self.active(self.source_of(topic), number)
            return self._view_factory.open(str(topic), topic.id, topic.settings, source)
        name, state = topic.partition_name(number), self._ledger.state
        reserved = state.reserved.get((topic.id, number)) or OffsetsReserved(topic.id, number, 0, b"")
        floor = max(state.known_end(each.id, number) for each in self.with_views(topic))
        if topic.settings.storage is not Storage.DISK or not reserved.boot_id == self._boot_id != b"":
            floor = max(floor, reserved.end)
        owner = topic.owner(number, self._identity, journaled=self._ledger.synced)
        partition = self._store.open_partition(name, topic.settings, state.producers.get(name), floor, owner)
        end = partition.next_offset
        try:
            self._skip(topic, number, partition)
        except HeadraceError:
            partition.close()
            raise
        # Until the journal has synced the topic, a power loss would undo it, and its messages are not safe.
        held = partition.durable and not end and not self._ledger.synced
        reservation = None
        if self._store.directory is not None:  # a journal in memory has nothing to protect
            reserve = partial(self._reserve, topic, number)
            reservation = Reservation(reserve, max(end, reserved.end), self._ports)
        where = str(topic), topic.id, number
        active = ActivePartition(*where, partition, topic.settings, self._ports, reservation, held=held)
        self._middleware.apply(topic.name, topic.middleware, active)
        if held:
            self._ledger.durably(Done()).then(partial(self._release, topic, active))
        return active

    def _skip(self, topic: Topic, number: int, partition: Partition) -> None:
        """Move groups past lost messages, whose offsets are never used again."""
        begin, end = partition.survived_offset, partition.next_offset
        if begin >= end:
            return
        if partition.durable:
            logger.warning(
                "offsets skipped; the messages that had them are lost  topic=%s partition=%s first=%s last=%s",
                topic, number, begin, end - 1,
            )  # fmt: skip
        for each in self.with_views(topic):
            for group in self._ledger.state.groups_within(each.id, number, begin, end):
                self._ledger.record(self._ledger.now_us, OffsetsCommitted(group, [(each.id, number, end)]))

    def _reserve(self, topic: Topic, number: int, end: int) -> PendingAnswer[Answer]:
        self._ledger.record(self._ledger.now_us, OffsetsReserved(topic.id, number, end, self._boot_id))
        return self._ledger.durably(Done())

    def _release(self, topic: Topic, active: ActivePartition, outcome: object) -> None:
        """Release the answers held until the journal synced the topic, or fail them."""
        active.release(outcome)
        if not isinstance(outcome, HeadraceError):
            owner = topic.owner(active.number, self._identity, journaled=True)
            self._ports.background(partial(self._files.store_owner, active, owner))

    @property
    def _identity(self) -> str:
        return self._ledger.state.broker_id


def _opened(fact: TopicSet) -> Topic:
    """The topic of a fact; if its settings are invalid, the topic has a failure and the valid ones among them."""
    try:
        return Topic(fact, topic_settings(fact.settings))
    except InvalidArgument as error:
        logger.error("topic failed; alter or delete it  topic=%s reason=%s", fact.name, error)
        failure = str(error)
    valid: dict[str, object] = {}
    for name, value in fact.settings.items():
        with suppress(InvalidArgument):  # logged above
            topic_settings({**valid, name: value})
            valid[name] = value
    topic = Topic(fact, topic_settings(valid))
    topic.failure = failure
    return topic
