"""What a model of routes remembers, and which messages must therefore be in which topic."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace.model.message import Message
from headrace.model.partitioning import by_key
from headrace.model.route_requests import RouteDefinition

Ends = dict[int, int]
"""Offsets by partition."""
Place = tuple[str, int]
"""A topic and a partition."""


@dataclass(eq=False)
class RouteSpan:
    """A route, and to which messages of its source it applies."""

    definition: RouteDefinition
    since: Ends
    until: Ends | None = None

    def takes(self, partition: int, message: Message) -> bool:
        """Whether a message takes it."""
        if message.offset < self.since.get(partition, 0):
            return False
        if self.until is not None and message.offset >= self.until.get(partition, 0):
            return False
        subject, route = (message.key or b"").decode(), self.definition
        if route.key is not None:
            return subject == route.key
        if route.pattern is not None:
            head, _, tail = subject.partition(".")
            return bool(tail) and route.pattern in (f"{head}.*", f"{head}.#", f"*.{tail}", "#", "*.*")
        if route.content is not None:
            return b'"even"' in (message.value or b"")
        return True


@dataclass(eq=False)
class TargetSpan:
    """A topic of a name: from which messages of each source on, and with how many partitions."""

    id: int
    """0: there is no such topic."""
    partitions: int
    bytes_max: int
    since: dict[str, Ends]


@dataclass
class RouteModel:
    """Routes and targets, and what follows from them."""

    routes: dict[str, list[RouteSpan]] = field(default_factory=dict)
    """By source."""
    targets: dict[str, list[TargetSpan]] = field(default_factory=dict)
    """By name."""

    def live(self, name: str) -> RouteSpan | None:
        """The route of a name that is not removed."""
        spans = (one for spans in self.routes.values() for one in spans if one.definition.name == name)
        return next((one for one in spans if one.until is None), None)

    def span(self, target: str, source: str, partition: int, offset: int) -> TargetSpan:
        """What a target's name means for a message."""
        spans = self.targets[target]
        return next(one for one in reversed(spans) if one.since.get(source, {}).get(partition, 0) <= offset)

    def expected(
        self, source: str, partition: int, messages: Iterator[Message], errors: str, size: Callable[[Message], int]
    ) -> dict[Place, list[bytes]]:
        """The values that come from one partition, in order, by the partition in which they must be."""
        places: dict[Place, list[bytes]] = {}
        for message in messages:
            taken = [route for route in self.routes.get(source, ()) if route.takes(partition, message)]
            names = dict.fromkeys(name for route in taken for name in route.definition.targets)
            found: dict[Place, None] = {}
            for name in names:
                span = self.span(name, source, partition, message.offset)
                if not span.id or size(message) > span.bytes_max:
                    found[errors, 0] = None
                elif span is self.targets[name][-1] or span.id == self.targets[name][-1].id:
                    number = by_key(message.key, span.partitions) if message.key else partition % span.partitions
                    found[name, number] = None
            for place in found:
                places.setdefault(place, []).append(message.value or b"")
        return places
