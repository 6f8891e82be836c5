"""A topic that routes carry messages from: its routes, and the forwarders of its partitions."""

from typing import Protocol

from headrace.broker.route_facts import OffsetsByPartition, RouteStored, RouteTargetBound, SourceState
from headrace.broker.route_table import CompiledRoute, RouteTable
from headrace.broker.topics import Topic


class SourceForwarder(Protocol):
    """What forwards the messages of one partition."""

    position: int
    synced_position: int
    lost: int
    error: str

    @property
    def behind(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    def open(self) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def plan(self) -> None: ...
    def sync_again(self) -> None: ...


class RoutedSource:
    """The routes of one source topic in use."""

    def __init__(self, topic: Topic, state: SourceState) -> None:
        self.topic = topic
        self.state = state
        self.table = RouteTable()
        self.routes: dict[int, CompiledRoute] = {}
        """By id; also removed ones that some forwarder has not passed."""
        self.forwarders: dict[int, SourceForwarder] = {}
        """By partition."""
        self.changing: dict[CompiledRoute, None] = {}
        """Routes that begin or end to apply at an offset which some forwarder has not passed."""
        self.failures: dict[str, str] = {}
        """Why routes could not be restored, by name: nothing is forwarded along them."""
        self.holds = 0
        """Changes that are not synced in the journal: nothing is forwarded before they are."""
        self.version = 0
        """Counts what changes the meaning of names and routes: a forwarder then begins its slice anew."""

    def add(self, fact: RouteStored, until: OffsetsByPartition | None = None) -> None:
        """Add a route."""
        route = CompiledRoute(fact, until)
        self.routes[fact.id] = route
        self.table.add(route)
        self.changing[route] = None
        self.version += 1
        self.forget_passed()

    def end(self, route_id: int, until: OffsetsByPartition) -> None:
        """Let a route apply only to messages before these offsets."""
        route = self.routes.get(route_id)
        if route is not None:
            route.until = until
            self.changing[route] = None
            self.version += 1
            self.forget_passed()

    def forget_passed(self) -> None:
        """Forget removed routes that no message can take any more, and that others are new."""
        for route in list(self.changing):
            if route.until is not None and self._have_passed(route.until):
                self.table.remove(route)
                del self.changing[route], self.routes[route.id]
            elif route.until is None and self._have_passed(route.since):
                del self.changing[route]

    def _have_passed(self, offsets: OffsetsByPartition) -> bool:
        return all(
            self.forwarders[partition].position >= offset
            for partition, offset in offsets.items()
            if partition in self.forwarders
        )

    def inactive(self, partition: int, offset: int) -> set[CompiledRoute]:
        """The routes that do not apply to a message at this offset."""
        return {route for route in self.changing if not route.applies_to(partition, offset)}

    def next_change(self, partition: int, offset: int) -> int | None:
        """The first offset after this one at which a route begins or ends, or a target's name changes its meaning."""
        bounds = [bound for route in self.changing for bound in route.bounds(partition)]
        bounds += [
            one.since.get(partition, 0) for name in self.state.rebound for one in self.state.bindings.get(name, ())
        ]
        return min((bound for bound in bounds if bound > offset), default=None)

    def binding(self, target: str, partition: int, offset: int) -> RouteTargetBound | None:
        """What a target's name means for messages from an offset on."""
        return self.state.binding(target, partition, offset)

    def start(self) -> None:
        """Let all forwarders begin."""
        for forwarder in self.forwarders.values():
            forwarder.start()

    def stop(self) -> None:
        """Let all forwarders end."""
        for forwarder in self.forwarders.values():
            forwarder.stop()

    def release(self) -> None:
        """One change more is synced in the journal: if all are, forwarders go on."""
        self.holds -= 1
        if not self.holds:
            for forwarder in list(self.forwarders.values()):
                forwarder.sync_again()  # a target may have been deleted
                forwarder.plan()
