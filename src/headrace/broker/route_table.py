"""The routes of one source topic, indexed so that a message finds those that it takes without a look at all of them."""

from collections.abc import Generator, Iterable, Sequence

from headrace.broker.route_facts import OffsetsByPartition, RouteStored
from headrace.broker.subject_trie import SubjectTrie
from headrace.model.batch import Columns
from headrace.model.content.decoded_values import DecodedValues
from headrace.model.content.matcher import QueryMatcher, Selection, compile_query
from headrace.model.headers import Headers, header_pairs
from headrace.model.limits import CONTENT_STEPS_MAX, ROUTE_STEPS_MAX, SUBJECT_CHARS_MAX
from headrace.model.route_requests import SUBJECT_HEADER

_CACHED_MAX = 4096
"""Subjects whose routes are remembered until a route is added or removed."""
_SUBJECT_BYTES_MAX = 4 * SUBJECT_CHARS_MAX
_TOGETHER_STEPS = 4096
"""Steps of a content query that are taken in one go, about a millisecond; at least one message is looked at."""
_TOGETHER_BYTES = 32 << 10
"""Bytes of values that are decoded in one go, about a millisecond at worst; or one message."""
_SLICE_STEPS = CONTENT_STEPS_MAX
"""Steps of all content queries after which a slice ends."""
_ASKING_COST = 5
"""The cost of asking a content query at all, in microseconds."""
_NODES_MAX = 16_384
"""Nodes of patterns that the new subjects of messages may visit in one go; at least one subject is looked up."""

OVER_BUDGET = "the content queries need too many steps, or the value is too large, too deep or not representable"


class CompiledRoute:
    """A route that messages can be matched with."""

    __slots__ = ("definition", "error_topic", "id", "matcher", "name", "since", "targets", "until")

    def __init__(self, fact: RouteStored, until: OffsetsByPartition | None = None) -> None:
        definition = fact.definition
        self.id = fact.id
        self.name = definition.name
        self.definition = definition
        self.targets = tuple(definition.targets)
        self.error_topic = definition.error_topic
        self.since = fact.since
        self.until = until
        """None unless it was removed."""
        self.matcher: QueryMatcher | None = None if definition.content is None else compile_query(definition.content)

    def applies_to(self, partition: int, offset: int) -> bool:
        """Whether it was there when a message was published."""
        if offset < self.since.get(partition, 0):
            return False
        return self.until is None or offset < self.until.get(partition, 0)

    def bounds(self, partition: int) -> tuple[int, ...]:
        """The offsets of a partition at which it begins and ends to apply."""
        since = self.since.get(partition, 0)
        return (since,) if self.until is None else (since, self.until.get(partition, 0))


Taken = tuple[CompiledRoute, ...]


class RoutingDecision:
    """Which routes the messages of a slice take."""

    __slots__ = ("count", "failed", "groups")

    def __init__(self, count: int) -> None:
        self.count = count
        """How many messages, from the first one on, it is about."""
        self.groups: list[tuple[Taken, Sequence[int]]] = []
        """Indexes of messages, rising, by the routes that they take."""
        self.failed: list[tuple[int, CompiledRoute]] = []
        """Messages that a content query could not decide about."""


class RouteTable:
    """The routes of one source topic."""

    def __init__(self) -> None:
        self._by_key: dict[str, dict[CompiledRoute, None]] = {}
        self._patterns: SubjectTrie[CompiledRoute] = SubjectTrie()
        self._to_all: dict[CompiledRoute, None] = {}
        self._headers = HeaderRoutes()
        self._content: dict[CompiledRoute, None] = {}
        self._unmatched: dict[CompiledRoute, None] = {}
        self._cache: dict[bytes | None, Taken] = {}
        self._interned: dict[Taken, Taken] = {}

    @property
    def content_count(self) -> int:
        """How many routes look into the content of messages."""
        return len(self._content)

    def check(self, route: CompiledRoute) -> None:
        """Refuse a route with whose pattern it could take too long to find the routes of a message."""
        if route.definition.pattern is not None:
            self._patterns.check(route.definition.pattern, route)

    def add(self, route: CompiledRoute) -> None:
        """Add a route."""
        definition = route.definition
        if definition.key is not None:
            self._by_key.setdefault(definition.key, {})[route] = None
        elif definition.pattern is not None:
            self._patterns.add(definition.pattern, route, limited=False)  # it was checked when it was made
        elif definition.headers is not None:
            self._headers.add(route)
        elif definition.content is not None:
            self._content[route] = None
        elif definition.unmatched:
            self._unmatched[route] = None
        else:
            self._to_all[route] = None
        self._forget_matches()

    def remove(self, route: CompiledRoute) -> None:
        """Remove a route."""
        definition = route.definition
        if definition.key is not None:
            self._by_key[definition.key].pop(route, None)
            if not self._by_key[definition.key]:
                del self._by_key[definition.key]
        elif definition.pattern is not None:
            self._patterns.remove(definition.pattern, route)
        elif definition.headers is not None:
            self._headers.remove(route)
        else:
            for routes in (self._content, self._unmatched, self._to_all):
                routes.pop(route, None)
        self._forget_matches()

    def has_subject(self, subject: str) -> bool:
        """Whether a route by key or pattern takes messages with a subject."""
        return subject in self._by_key or bool(len(self._patterns) and self._patterns.match(subject))

    def decide(self, columns: Columns, inactive: set[CompiledRoute]) -> Generator[int, None, RoutingDecision]:
        """Find the routes of all messages; yields the cost so far from time to time, and returns a RoutingDecision."""
        decision = RoutingDecision(len(columns.values))
        added: dict[int, list[CompiledRoute]] = {}
        if self._content:
            yield from self._search_content(columns, inactive, decision, added)
        if self._headers and columns.headers is not None:
            for index, headers in enumerate(columns.headers[: decision.count]):
                if headers and (found := self._headers.match(headers)):
                    added.setdefault(index, []).extend(found)
        taken = self._by_subject(columns, decision.count)
        if len(taken) < decision.count:
            decision.count = len(taken)
            decision.failed = [one for one in decision.failed if one[0] < decision.count]
        if added or inactive or self._unmatched:
            failed = {index for index, _ in decision.failed}
            taken = [self._settled(one, added.get(index), inactive, index in failed) for index, one in enumerate(taken)]
        groups: dict[int, tuple[Taken, list[int]]] = {}
        for index, one in enumerate(taken):
            if one:
                group = groups.get(id(one))
                if group is None:
                    group = groups[id(one)] = (one, [])
                group[1].append(index)
        decision.groups = list(groups.values())
        return decision

    def _search_content(
        self,
        columns: Columns,
        inactive: set[CompiledRoute],
        decision: RoutingDecision,
        added: dict[int, list[CompiledRoute]],
    ) -> Generator[int, None, None]:
        """Ask all content queries about one message, two more, four more, until that has taken many steps.

        What the queries may take for a message together is theirs in the order in which the routes were made: after a
        crash the same ones fail.
        """
        routes = in_budget_order(route for route in self._content if route not in inactive)
        decoded, count, taken = DecodedValues(columns.values), decision.count, 0
        budgets = [ROUTE_STEPS_MAX] * count
        begin, window = 0, 1
        while routes and begin < count and taken < _SLICE_STEPS:
            end = _window_end(columns.values, begin, min(begin + window, count))
            for route, matcher in routes:
                at = begin
                while at < end:
                    selection = matcher.select(decoded, at, _TOGETHER_STEPS, stop=end, budgets=budgets)
                    for index in selection.matched:
                        added.setdefault(index, []).append(route)
                    decision.failed += [(index, route) for index in selection.failed]
                    taken += selection.steps
                    yield content_cost(selection)
                    at = selection.end
            begin, window = end, 2 * window
            decision.count = begin

    def _by_subject(self, columns: Columns, count: int) -> list[Taken]:
        """The routes that each message takes because of its subject, and those that take all.

        It is about fewer messages if many have subjects whose routes take long to find, but at least about one.
        """
        cache = self._cache
        if not self._by_key and not len(self._patterns):
            return [cache[None] if None in cache else self._found(None)] * count
        subjects: Sequence[bytes | None] = columns.keys or [None] * count
        if columns.headers is not None:
            subjects = [
                subject if not headers or (named := headers.get(SUBJECT_HEADER)) is None else named
                for subject, headers in zip(subjects, columns.headers, strict=True)
            ]
        left = max(1, _NODES_MAX // self._patterns.weight)
        taken: list[Taken] = []
        for subject in subjects[:count]:
            routes = cache.get(subject)
            if routes is None:
                if not left:
                    break
                left -= 1
                routes = self._found(subject)
            taken.append(routes)
        return taken

    def _found(self, subject: bytes | None) -> Taken:
        routes = dict(self._to_all)
        if subject is not None and len(subject) <= _SUBJECT_BYTES_MAX:
            text = subject_text(subject)
            if text is not None:
                routes.update(self._by_key.get(text, {}))
                routes.update(dict.fromkeys(self._patterns.find(text)))
        taken = self._intern(tuple(routes))
        if subject is None or len(subject) <= _SUBJECT_BYTES_MAX:
            if len(self._cache) >= _CACHED_MAX:
                self._cache.clear()
            self._cache[subject] = taken
        return taken

    def _settled(
        self, taken: Taken, added: list[CompiledRoute] | None, inactive: set[CompiledRoute], failed: bool
    ) -> Taken:
        """The routes of one message, without those that do not apply to it; or those for messages that take none."""
        routes = taken if added is None else (*taken, *added)
        if inactive and routes:
            routes = tuple(route for route in routes if route not in inactive)
        if not routes and self._unmatched and not failed:
            routes = tuple(route for route in self._unmatched if route not in inactive)
        return taken if routes is taken else self._intern(routes)

    def _intern(self, routes: Taken) -> Taken:
        """The same tuple for the same routes, so that messages can be grouped by its identity."""
        if len(self._interned) >= _CACHED_MAX:
            self._interned.clear()
            self._cache.clear()
        return self._interned.setdefault(routes, routes)

    def _forget_matches(self) -> None:
        self._cache.clear()
        self._interned.clear()


def in_budget_order(routes: Iterable[CompiledRoute]) -> list[tuple[CompiledRoute, QueryMatcher]]:
    """The routes with a content query, in the order in which they may take steps for a message."""
    found = [(route, route.matcher) for route in routes if route.matcher is not None]
    return sorted(found, key=lambda pair: pair[0].id)


def content_cost(selection: Selection) -> int:
    """What it has cost to ask a content query, in microseconds, about."""
    return _ASKING_COST + selection.steps * 3 // 10


def _window_end(values: Sequence[bytes | None], begin: int, end: int) -> int:
    """The end of the messages to be decoded together, at least one."""
    size = 0
    for index in range(begin, end):
        size += len(values[index] or b"")
        if size > _TOGETHER_BYTES and index > begin:
            return index
    return end


class HeaderRoutes:
    """Routes by header, each found by one of its headers, or by any of them if any is enough."""

    def __init__(self) -> None:
        self._exact: dict[tuple[str, bytes | None], dict[CompiledRoute, None]] = {}
        """By name and value."""
        self._named: dict[str, dict[CompiledRoute, None]] = {}
        """By the name of a header that may have any value."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, route: CompiledRoute) -> None:
        """Add a route; one that needs all of its headers goes where the fewest are."""
        tables = self._tables(route)
        if route.definition.headers_match == "all":
            tables = [min(tables, key=len)]
        for table in tables:
            table[route] = None
        self._count += 1

    def remove(self, route: CompiledRoute) -> None:
        """Remove a route."""
        for table in self._tables(route):
            table.pop(route, None)
        for name, content in (route.definition.headers or {}).items():
            if content is None:
                if not self._named[name]:
                    del self._named[name]
            elif not self._exact[name, content]:
                del self._exact[name, content]
        self._count -= 1

    def _tables(self, route: CompiledRoute) -> list[dict[CompiledRoute, None]]:
        return [
            self._named.setdefault(name, {}) if content is None else self._exact.setdefault((name, content), {})
            for name, content in (route.definition.headers or {}).items()
        ]

    def match(self, headers: Headers) -> list[CompiledRoute]:
        """The routes that a message with these headers takes."""
        pairs = header_pairs(headers)
        found: dict[CompiledRoute, None] = {}
        for pair in pairs:
            for routes in (self._exact.get(pair), self._named.get(pair[0])):
                for route in routes or ():
                    if route not in found and (
                        route.definition.headers_match == "any" or not missing_headers(route, pairs)
                    ):
                        found[route] = None
        return list(found)


def missing_headers(route: CompiledRoute, pairs: Sequence[tuple[str, bytes | None]]) -> list[str]:
    """The names of the route's headers that a message does not have, or not with the value."""
    names = {name for name, _ in pairs}
    return [
        name
        for name, content in (route.definition.headers or {}).items()
        if (name not in names if content is None else (name, content) not in pairs)
    ]


def subject_text(subject: bytes) -> str | None:
    """The subject as text; None if it is none."""
    try:
        return subject.decode()
    except UnicodeDecodeError:
        return None
