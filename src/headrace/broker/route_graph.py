"""Which topics messages can reach along routes, to refuse a route that would close a loop."""

from collections import Counter
from collections.abc import Iterable, Sequence

from headrace.model.errors import InvalidArgument, LimitExceeded, RouteLoop
from headrace.model.limits import ROUTE_GRAPH_MAX


class RouteGraph:
    """Topics, and the routes between them.

    >>> graph = RouteGraph()
    >>> graph.add("orders", ["billing"])
    >>> graph.check("billing", ["archive"], "billing.errors")
    >>> graph.check("billing", ["orders"], "billing.errors")
    Traceback (most recent call last):
    ...
    headrace.model.errors.RouteLoop: messages would go in a loop: billing -> orders -> billing; choose another target
    """

    def __init__(self) -> None:
        self._targets: dict[str, Counter[str]] = {}
        """By source: how many routes go to each topic."""

    def add(self, source: str, targets: Iterable[str]) -> None:
        """Add a route."""
        self._targets.setdefault(source, Counter()).update(targets)

    def remove(self, source: str, targets: Iterable[str]) -> None:
        """Remove a route."""
        counts = self._targets[source]
        for target in targets:
            counts[target] -= 1
            if not counts[target]:
                del counts[target]
        if not counts:
            del self._targets[source]

    def check(self, source: str, targets: Sequence[str], error_topic: str) -> None:
        """Refuse a route with which messages could come back to its source."""
        if error_topic in targets:
            raise InvalidArgument(
                f"{error_topic} cannot be both a target and the error topic; name another error topic"
            )
        path = self._path(source, [*targets, error_topic])
        if path is not None:
            raise RouteLoop(f"messages would go in a loop: {' -> '.join(path)}; choose another target", topics=path)

    def _path(self, source: str, targets: Sequence[str]) -> list[str] | None:
        """The topics on a way from the targets back to the source, with the source at both ends."""
        came_from = dict.fromkeys(targets, source)
        waiting, steps = list(targets), 0
        while waiting:
            topic = waiting.pop()
            if topic == source:
                path = [source]
                while True:
                    topic = came_from[topic]
                    path.append(topic)
                    if topic == source:
                        return path[::-1]
            for target in self._targets.get(topic, ()):
                steps += 1
                if steps > ROUTE_GRAPH_MAX:
                    raise LimitExceeded(
                        f"more than {ROUTE_GRAPH_MAX} routes lead on from these targets, too many to tell whether "
                        "messages could go in a loop; remove some of them"
                    )
                if target not in came_from:
                    came_from[target] = topic
                    waiting.append(target)
        return None
