"""Routes: makes and removes them, runs their forwarders, and records how far messages are forwarded."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from headrace.broker.facts import AnyFact
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports, Session
from headrace.broker.route_explanation import explain
from headrace.broker.route_facts import (
    OffsetsByPartition,
    RouteAdvanced,
    RouteRemoved,
    RouteStored,
    RouteTargetBound,
    SourceState,
    target_names,
)
from headrace.broker.route_forwarder import ForwarderQueue, RouteForwarder, Sift
from headrace.broker.route_graph import RouteGraph
from headrace.broker.route_table import CompiledRoute, RouteTable
from headrace.broker.routed_source import RoutedSource
from headrace.broker.signal import Signal
from headrace.broker.slices import Steps, in_slices
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.turns import Turns
from headrace.broker.views import check_stores
from headrace.model.errors import HeadraceError, InvalidArgument, LimitExceeded, RouteExists, RouteNotFound
from headrace.model.limits import ROUTE_CONTENT_MAX, ROUTES_MAX
from headrace.model.request import Answer, Request
from headrace.model.requests import Done
from headrace.model.route import checked_route
from headrace.model.route_requests import (
    RouteDefinition,
    RouteExplain,
    RouteExplained,
    RouteInfo,
    RouteList,
    RouteRemove,
    RouteSet,
    RoutesFound,
)
from headrace.model.system_topics import INGRESS_TOPIC, check_clients_topic
from headrace.model.topic import DEFAULT_TENANT, TopicName, TopicSettings, parse_topic, tenant_of

logger = logging.getLogger("headrace.broker")

Handler = Callable[[Session, Any, memoryview, int], Any]

_LISTED_MAX = 200
"""Routes listed per slice."""
_ADVANCE_US = 1_000_000
"""How often positions are recorded: after a crash, messages of about this long are looked at again."""


class RouteRegistry:
    """All routes of a broker."""

    def __init__(
        self,
        topics: TopicRegistry,
        ledger: Ledger,
        ports: Ports,
        turns: Turns,
        check_room: Callable[[Topic], None],
        sift: Sift,
    ) -> None:
        """Go on with the routes in the ledger; `check_room` raises when a topic takes no messages at the moment.

        `sift` passes batches through the middleware of their targets.
        """
        self._sift = sift
        self._topics = topics
        self._ledger = ledger
        self._state = ledger.state.routes
        self._ports = ports
        self._turns = turns
        self._check_room = check_room
        self._queue = ForwarderQueue(turns, ports)
        self.making: Signal[str] = Signal()
        """Emitted before a route is made; a listener refuses by raising."""
        self.changed: Signal[RouteDefinition, str, int] = Signal()
        """A route was `created`, `altered` or `deleted`, with the time."""
        self._sources: dict[int, RoutedSource] = {}
        self._graph = RouteGraph()
        self._advance_us = 0
        for state in list(self._state.sources.values()):
            topic = topics.by_id.get(state.source_id)
            if topic is None or not state.routes:
                self._state.forget_topic(state.source_id)
                continue
            self._restore(topic, state)
        topics.companions.connect(self._bindings_of)
        topics.changed.connect(self._topic_changed)
        topics.altered.connect(self._topic_altered)

    def __len__(self) -> int:
        return len(self._state.by_name)

    def _restore(self, topic: Topic, state: SourceState) -> None:
        source = self._add_source(topic, state)
        for fact in state.routes.values():
            removed = state.removed.get(fact.id)
            try:
                source.add(fact, None if removed is None else removed.until)
            except Exception as error:  # noqa: BLE001 logged; all other routes work
                logger.error("route failed; remove or replace it  route=%s reason=%s", fact.definition.name, error)
                source.failures[fact.definition.name] = str(error)
        for fact in state.routes.values():
            if self._state.by_name.get(fact.definition.name) is fact:
                self._graph.add(str(topic), target_names(fact.definition))
        names = [name for fact in state.routes.values() for name in target_names(fact.definition)]
        changed = self._rebindings(source.state, names)
        if changed:  # only after a repair: changes of topics are recorded together with what names mean
            self._ledger.record(self._ledger.now_us, *changed)
        source.start()

    # Requests.

    def requests(self) -> dict[type[Request[Any]], Handler]:
        """What handles each request about routes."""
        return {
            RouteSet: lambda session, ask, _, now: self.set(ask, session.tenant, now),
            RouteRemove: lambda _, ask, __, now: self.remove(ask, now),
            RouteList: lambda session, ask, _, __: self.listed(ask, session.tenant),
            RouteExplain: lambda session, ask, _, __: self.explained(ask, session.tenant),
        }

    def set(self, request: RouteSet, tenant: str, now_us: int) -> PendingAnswer[RouteInfo]:
        """Make a route, or replace the one of that name."""
        route = checked_route(request.definition, str(TopicName(tenant, INGRESS_TOPIC)))
        before = self._state.by_name.get(route.name)
        if before is not None and not request.replace and not (request.exist_ok and before.definition == route):
            raise RouteExists(f"there is already a route {route.name}; replace it, or choose another name")
        if before is not None and before.definition == route:
            return self._ledger.durably(self._info(before))
        if before is None and len(self) >= ROUTES_MAX:
            raise LimitExceeded(f"there are {ROUTES_MAX} routes, which is the maximum; remove some")
        if before is None:
            self.making(route.name)
        for target in target_names(route):
            check_clients_topic(target)
        self._check_views(route)
        compiled = CompiledRoute(RouteStored(route, 0, 0, 0, {}))  # raises if its query cannot be used
        self._check(compiled, before)
        topic = self._topics.get_or_create(route.source, now_us)
        for target in route.targets:
            self._topics.get_or_create(target, now_us)
        return self._ledger.durably(self._info(self._store(route, topic, before, now_us)))

    def _check_views(self, route: RouteDefinition) -> None:
        """Refuse virtual topics: they store nothing; instead of a route from one, make a route by content."""
        for name, action in ((route.source, "route from"), *((name, "route to") for name in target_names(route))):
            topic = self._topics.find(name)
            if topic is not None:
                check_stores(str(topic), topic.settings, action)

    def _check(self, compiled: CompiledRoute, before: RouteStored | None) -> None:
        """Refuse a route that would close a loop, is one too many of its kind, or has too costly a pattern."""
        route, replaced = compiled.definition, None
        if before is not None:
            replaced = before.definition.source, target_names(before.definition)
            self._graph.remove(*replaced)
        try:
            self._graph.check(route.source, route.targets, route.error_topic)
        finally:
            if replaced is not None:
                self._graph.add(*replaced)
        source = self._topics.find(route.source)
        routed = None if source is None else self._sources.get(source.id)
        (RouteTable() if routed is None else routed.table).check(compiled)
        if route.content is not None and routed is not None and routed.table.content_count >= ROUTE_CONTENT_MAX:
            raise LimitExceeded(
                f"{route.source} has {ROUTE_CONTENT_MAX} routes by content, which is the maximum; remove some"
            )

    def _store(self, route: RouteDefinition, topic: Topic, before: RouteStored | None, now_us: int) -> RouteStored:
        ends = self._ends(topic)
        fact = RouteStored(route, self._state.route_id + 1, now_us, topic.id, ends)
        state = self._state.sources.get(topic.id)
        facts: list[AnyFact] = [] if state is not None else [RouteAdvanced(topic.id, ends)]
        facts += self._rebindings(state or SourceState(topic.id), target_names(route), ends)
        facts.append(fact)
        until: OffsetsByPartition = {}
        if before is not None:
            source = self._topics.by_id[before.source_id]
            until = ends if source is topic else self._ends(source)
            facts.append(RouteRemoved(before.id, before.source_id, until))
        self._ledger.record(now_us, *facts)
        routed = self._sources.get(topic.id) or self._add_source(topic, self._state.sources[topic.id])
        routed.state = self._state.sources[topic.id]
        routed.add(fact)
        self._graph.add(route.source, target_names(route))
        self._hold(routed)
        if before is not None:
            self._end(before, until)
        routed.start()
        self.changed(route, "created" if before is None else "altered", now_us)
        return fact

    def remove(self, request: RouteRemove, now_us: int) -> PendingAnswer[Done]:
        """Remove a route; messages published before are still forwarded."""
        fact = self._known(request.name)
        until = self._ends(self._topics.by_id[fact.source_id])
        self._ledger.record(now_us, RouteRemoved(fact.id, fact.source_id, until))
        self._end(fact, until)
        self.changed(fact.definition, "deleted", now_us)
        return self._ledger.durably(Done())

    def _end(self, fact: RouteStored, until: OffsetsByPartition) -> None:
        self._graph.remove(fact.definition.source, target_names(fact.definition))
        source = self._sources[fact.source_id]
        source.failures.pop(fact.definition.name, None)
        source.end(fact.id, until)
        self._hold(source)
        self._forget_unused(source)

    def listed(self, request: RouteList, tenant: str) -> PendingAnswer[RoutesFound]:
        """List a tenant's routes by name."""
        topic = str(parse_topic(request.topic)) if request.topic else ""

        def steps() -> Steps:
            by_name, found = self._state.by_name, list[RouteInfo]()
            for number, name in enumerate(sorted(by_name), 1):
                fact = by_name.get(name)  # it may be removed between slices
                if fact is not None and tenant_of(name) == tenant:
                    route = fact.definition
                    if topic in ("", route.source, *route.targets):
                        yield from self._open_source(fact.source_id)
                        found.append(self._info(fact))
                if not number % _LISTED_MAX:
                    yield
            return RoutesFound(found)

        return in_slices(self._ports, steps())

    def names(self) -> list[str]:
        """The names of all routes, with their tenants."""
        return list(self._state.by_name)

    def describe(self, name: str) -> RouteInfo | None:
        """A route as it is known without opening anything; None if there is no such route."""
        fact = self._state.by_name.get(name)
        return None if fact is None else self._info(fact)

    def _open_source(self, source_id: int) -> Steps:
        """Open the partitions of a source that were not used since the start: only then is known what they have."""
        source = self._sources.get(source_id)
        for forwarder in [] if source is None else list(source.forwarders.values()):
            if not forwarder.is_open:
                with suppress(HeadraceError, OSError):  # the forwarder tells why, and tries again
                    forwarder.open()
                yield

    def explained(self, request: RouteExplain, tenant: str) -> PendingAnswer[RouteExplained]:
        """Tell which routes a message would take, and why."""
        name = str(parse_topic(request.source)) if request.source else str(TopicName(tenant, INGRESS_TOPIC))
        topic = self._topics.find(name) if not request.source else self._topics.known(name)
        source = None if topic is None else self._sources.get(topic.id)
        routes = [] if source is None else [one for one in source.routes.values() if one.until is None]
        return in_slices(self._ports, explain(name, routes, request))

    # For others.

    def takes_subject(self, tenant: str, subject: str) -> bool:
        """Whether a route of a tenant's ingress takes messages because of their subject."""
        topic = self._topics.find(INGRESS_TOPIC if tenant == DEFAULT_TENANT else f"{tenant}/{INGRESS_TOPIC}")
        source = None if topic is None else self._sources.get(topic.id)
        return source is not None and source.table.has_subject(subject)

    def ingress(self, tenant: str) -> str:
        """The topic for messages that a tenant's sessions publish without one."""
        return str(TopicName(tenant, INGRESS_TOPIC))

    def consumed_offset(self, topic: Topic, partition: int) -> int | None:
        """The offset before which all messages of a partition are forwarded for good; None without routes."""
        state = self._state.sources.get(topic.id)
        return None if state is None else state.positions.get(partition, 0)

    def tick(self, now_us: int) -> None:
        """Try again what failed, and record how far messages are forwarded."""
        self._queue.tick(now_us)
        if now_us >= self._advance_us:
            self._advance_us = now_us + _ADVANCE_US
            self.record_positions(now_us)

    def record_positions(self, now_us: int) -> None:
        """Record how far messages are forwarded and synced."""
        facts: list[AnyFact] = []
        sources, self._queue.moved = self._queue.moved, {}
        for source in sources:
            if self._sources.get(source.topic.id) is not source:
                continue
            before = source.state.positions
            moved = {
                number: forwarder.synced_position
                for number, forwarder in source.forwarders.items()
                if forwarder.synced_position > before.get(number, 0)
            }
            if moved:
                facts.append(RouteAdvanced(source.topic.id, moved))
        if facts:
            try:
                self._ledger.record(now_us, *facts)
                self._ledger.failures.worked("routes")
            except HeadraceError as error:
                self._queue.moved |= sources
                self._ledger.failures.note("routes", error, "positions of routes not recorded; trying again")
            for source in sources:
                self._forget_unused(source)

    # Topics that change.

    def _bindings_of(self, name: str, topic_id: int, settings: TopicSettings | None) -> Sequence[AnyFact]:
        """The facts that tell what a name means to the sources of routes, when the topic of that name changes."""
        facts: list[AnyFact] = []
        if settings is not None and settings.view_of is not None and self._state.users.get(name):
            raise InvalidArgument(
                f"routes write to {name}, so it cannot be a view: choose another name, or remove them"
            )
        for source_id in sorted(self._state.users.get(name, ())):
            source, state = self._sources.get(source_id), self._state.sources.get(source_id)
            if source is None or state is None:
                continue
            is_target = any(name in route.definition.targets for route in state.routes.values())
            now_missing = state.bindings.get(name, [])[-1:] and not state.bindings[name][-1].topic_id
            is_new = settings is not None and (not state.bindings.get(name) or now_missing)
            # Messages that were forwarded keep their place; those that a missing error topic waits for get it.
            since = self._positions(source) if settings is None or (is_new and not is_target) else None
            fact = _bound(source_id, name, topic_id, settings, since or self._known_ends(source))
            if not state.bindings.get(name) or not state.bindings[name][-1].binds_like(fact):
                facts.append(fact)
        return facts

    def _rebindings(
        self, state: SourceState, names: Sequence[str], since: OffsetsByPartition | None = None
    ) -> list[AnyFact]:
        """The facts that tell what names mean, for those of which the last fact tells something else."""
        facts: list[AnyFact] = []
        for name in dict.fromkeys(names):
            topic = self._topics.find(name)
            settings = None if topic is None else topic.settings
            topic_id = 0 if topic is None else topic.id
            fact = _bound(state.source_id, name, topic_id, settings, since or dict(state.positions))
            last = state.bindings.get(name, [])[-1:]
            if (last and not last[0].binds_like(fact)) or (not last and fact.topic_id):
                facts.append(fact)
        return facts

    def _topic_changed(self, topic: Topic, now_us: int) -> None:
        """A topic was created, deleted or got more partitions."""
        source = self._sources.get(topic.id)
        if source is not None:
            if topic.id in self._topics.by_id:
                for number in range(topic.settings.partitions):
                    if number not in source.forwarders:
                        self._add_forwarder(source, number, 0)
                        source.forwarders[number].start()
            else:
                source.stop()
                for route in source.routes.values():
                    if route.until is None:
                        self._graph.remove(str(topic), target_names(route.definition))
                        self.changed(route.definition, "deleted", now_us)
                del self._sources[topic.id]
        self._topic_altered(topic, now_us)

    def _topic_altered(self, topic: Topic, _: int) -> None:
        """What a name means may have changed: the sources that use it begin their slices anew, once that is synced."""
        for source_id in self._state.users.get(str(topic), ()):
            source = self._sources.get(source_id)
            if source is not None:
                source.version += 1
                self._hold(source)

    # Sources.

    def _add_source(self, topic: Topic, state: SourceState) -> RoutedSource:
        source = self._sources[topic.id] = RoutedSource(topic, state)
        for number in range(topic.settings.partitions):
            self._add_forwarder(source, number, state.positions.get(number, 0))
        return source

    def _add_forwarder(self, source: RoutedSource, number: int, position: int) -> None:
        source.forwarders[number] = RouteForwarder(
            source, number, position, self._topics, self._queue, self._ledger.failures, self._check_room, self._sift
        )

    def _forget_unused(self, source: RoutedSource) -> None:
        """Forget a source whose last route was removed, once all messages before that are forwarded."""
        if source.topic.id not in self._state.sources and self._sources.get(source.topic.id) is source:
            source.stop()
            del self._sources[source.topic.id]

    def _hold(self, source: RoutedSource) -> None:
        """Forward nothing before what was recorded is synced: a replay after a power loss must decide the same."""
        source.holds += 1
        self._ledger.durably(Done()).then(partial(self._release, source))

    def _release(self, source: RoutedSource, outcome: Answer | HeadraceError) -> None:
        if not isinstance(outcome, HeadraceError):
            source.release()

    def _ends(self, topic: Topic) -> OffsetsByPartition:
        """The offsets behind everything that is published to a topic."""
        ends: OffsetsByPartition = {}
        for active in self._topics.all_active(topic):
            active.flush()
            ends[active.number] = active.partition.next_offset
        return ends

    def _known_ends(self, source: RoutedSource) -> OffsetsByPartition:
        """The same for a source, of which as far as it is known if it cannot be opened."""
        try:
            return self._ends(source.topic)
        except (HeadraceError, OSError):  # logged where the forwarders try to open it
            return {number: source.state.known_end(number) for number in source.forwarders}

    def _positions(self, source: RoutedSource) -> OffsetsByPartition:
        return {number: forwarder.position for number, forwarder in source.forwarders.items()}

    def _known(self, name: str) -> RouteStored:
        fact = self._state.by_name.get(name) or self._state.by_name.get(name.removeprefix(f"{DEFAULT_TENANT}/"))
        if fact is None:
            raise RouteNotFound(f"there is no route {name}; `headrace route list` shows those there are")
        return fact

    def _info(self, fact: RouteStored) -> RouteInfo:
        source = self._sources.get(fact.source_id)
        info = RouteInfo(fact.definition, fact.created_us)
        if source is not None:
            forwarders = source.forwarders.values()
            info.behind = sum(forwarder.behind for forwarder in forwarders)
            info.lost = sum(forwarder.lost for forwarder in forwarders)
            errors = [forwarder.error for forwarder in forwarders if forwarder.error]
            info.error = source.failures.get(fact.definition.name) or (errors[0] if errors else "")
        return info


def _bound(
    source_id: int, name: str, topic_id: int, settings: TopicSettings | None, since: OffsetsByPartition
) -> RouteTargetBound:
    if settings is None or settings.view_of is not None:  # a view stores nothing
        return RouteTargetBound(source_id, name, since)
    return RouteTargetBound(source_id, name, since, topic_id, settings.partitions, settings.message_bytes_max)
