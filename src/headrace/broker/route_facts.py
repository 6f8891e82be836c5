"""The facts about routes, and the state that they add up to."""

from collections.abc import Iterator

from headrace.broker.fact import Fact
from headrace.model.route_requests import RouteDefinition

OffsetsByPartition = dict[int, int]


class RouteStored(Fact, tag=100):
    """A route was made; it applies to messages of its source from these offsets on, elsewhere from 0 on."""

    definition: RouteDefinition
    id: int
    created_us: int
    source_id: int
    since: OffsetsByPartition


class RouteRemoved(Fact, tag=101):
    """A route was removed or replaced; it still applies to messages before these offsets, and to no others."""

    id: int
    source_id: int
    until: OffsetsByPartition


class RouteAdvanced(Fact, tag=102):
    """All messages of a source before these offsets are forwarded, and synced where they were forwarded to."""

    source_id: int
    positions: OffsetsByPartition


class RouteTargetBound(Fact, tag=103):
    """From these offsets of a source on, a target's name means this topic with these settings; 0: no topic."""

    source_id: int
    target: str
    since: OffsetsByPartition
    topic_id: int = 0
    partitions: int = 0
    message_bytes_max: int = 0

    def binds_like(self, other: "RouteTargetBound") -> bool:
        """Whether the name means the same, from wherever on."""
        mine = self.topic_id, self.partitions, self.message_bytes_max
        return mine == (other.topic_id, other.partitions, other.message_bytes_max)


RouteFact = RouteStored | RouteRemoved | RouteAdvanced | RouteTargetBound


class SourceState:
    """The routes of one source topic, and how far its messages are forwarded."""

    def __init__(self, source_id: int) -> None:
        self.source_id = source_id
        self.positions: OffsetsByPartition = {}
        """By partition; 0 of one that is not there."""
        self.routes: dict[int, RouteStored] = {}
        """By id; also removed ones that still apply to messages which are not forwarded yet."""
        self.removed: dict[int, RouteRemoved] = {}
        self.bindings: dict[str, list[RouteTargetBound]] = {}
        """What each target's name means: the last one that begins at or before an offset."""
        self.rebound: set[str] = set()
        """The names with more than one meaning."""

    def binding(self, target: str, partition: int, offset: int) -> RouteTargetBound | None:
        """What a target's name means for a message."""
        bindings = self.bindings.get(target, ())
        return next((one for one in reversed(bindings) if one.since.get(partition, 0) <= offset), None)

    def known_end(self, partition: int) -> int:
        """The highest offset of a partition that is referred to."""
        since = [route.since.get(partition, 0) for route in self.routes.values()]
        until = [removed.until.get(partition, 0) for removed in self.removed.values()]
        bound = [one.since.get(partition, 0) for bindings in self.bindings.values() for one in bindings]
        return max(self.positions.get(partition, 0), *since, *until, *bound, 0)

    def has_passed(self, offsets: OffsetsByPartition) -> bool:
        """Whether all messages before these offsets are forwarded."""
        positions = self.positions
        return all(positions.get(partition, 0) >= offset for partition, offset in offsets.items())

    def forget_passed(self) -> None:
        """Forget what applies only to messages that are forwarded."""
        for removed in [one for one in self.removed.values() if self.has_passed(one.until)]:
            del self.removed[removed.id], self.routes[removed.id]
        used = {name for route in self.routes.values() for name in target_names(route.definition)}
        for name, bindings in list(self.bindings.items()):
            if name not in used:
                del self.bindings[name]
                continue
            while len(bindings) > 1 and self.has_passed(bindings[1].since):
                del bindings[0]
        self.rebound = {name for name in self.rebound if len(self.bindings.get(name, ())) > 1}

    def facts(self) -> Iterator[Fact]:
        """The facts that tell all of it."""
        yield RouteAdvanced(self.source_id, dict(self.positions))
        for bindings in self.bindings.values():
            yield from list(bindings)
        yield from list(self.routes.values())
        yield from list(self.removed.values())


class RoutesState:
    """All routes, as far as the journal's facts reach."""

    def __init__(self) -> None:
        self.sources: dict[int, SourceState] = {}
        """By the topic's id."""
        self.by_name: dict[str, RouteStored] = {}
        """The routes that are not removed."""
        self.users: dict[str, set[int]] = {}
        """The sources whose routes may write to a topic, by its name; some may not have such a route any more."""
        self.route_id = 0
        """The highest id that is known."""

    def apply(self, fact: RouteFact) -> None:
        """Apply a fact."""
        if isinstance(fact, RouteRemoved | RouteTargetBound) and fact.source_id not in self.sources:
            return  # the source was deleted
        source = self.sources.setdefault(fact.source_id, SourceState(fact.source_id))
        match fact:
            case RouteStored():
                source.routes[fact.id] = fact
                for name in target_names(fact.definition):
                    self.users.setdefault(name, set()).add(fact.source_id)
                self.by_name[fact.definition.name] = fact
                self.route_id = max(self.route_id, fact.id)
            case RouteRemoved():
                self._remove(source, fact)
            case RouteAdvanced():
                for partition, position in fact.positions.items():
                    source.positions[partition] = max(position, source.positions.get(partition, 0))
                if source.removed or source.rebound:
                    self._forget_passed(source)
            case RouteTargetBound():
                bindings = source.bindings.setdefault(fact.target, [])
                bindings.append(fact)
                if len(bindings) > 1:
                    source.rebound.add(fact.target)

    def facts(self) -> Iterator[Fact]:
        """The facts that tell all of it."""
        for source in self.sources.values():
            yield from source.facts()

    def forget_topic(self, topic_id: int) -> None:
        """Forget the routes whose source is a topic."""
        source = self.sources.pop(topic_id, None)
        self._forget_users(topic_id)
        for route in source.routes.values() if source is not None else ():
            if self.by_name.get(route.definition.name) is route:
                del self.by_name[route.definition.name]

    def known_end(self, topic_id: int, partition: int) -> int:
        """The highest offset of a partition that is referred to."""
        source = self.sources.get(topic_id)
        return 0 if source is None else source.known_end(partition)

    def _remove(self, source: SourceState, fact: RouteRemoved) -> None:
        route = source.routes.get(fact.id)
        if route is None:
            return
        if self.by_name.get(route.definition.name) is route:
            del self.by_name[route.definition.name]
        source.removed[fact.id] = fact
        self._forget_passed(source)

    def _forget_passed(self, source: SourceState) -> None:
        source.forget_passed()
        if not source.routes:
            del self.sources[source.source_id]
            self._forget_users(source.source_id)

    def _forget_users(self, source_id: int) -> None:
        for name in [name for name, users in self.users.items() if source_id in users]:
            self.users[name].discard(source_id)
            if not self.users[name]:
                del self.users[name]


def target_names(definition: RouteDefinition) -> list[str]:
    """The names of all topics that a route may write to."""
    return [*definition.targets, definition.error_topic]
