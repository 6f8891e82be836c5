"""Bounds the work of a JSON Schema: validators hold the interpreter, and a small schema can ask for endless work.

The *cost* of a schema is how often, at most, subschemas are applied to one place of a value, with all that applies to
the same place added up: `allOf` twice the same doubles the work, and does so again at each level of a value if the
schema refers to itself. A validator's work is at most the cost times the size of the value. The width of patterns
(see pattern_cost) is added up in the same way.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from headrace.middleware.pattern_cost import PatternCost, pattern_cost
from headrace.model.errors import InvalidArgument

COST_MAX = 200
"""The highest cost of a schema."""
WIDTH_MAX = 1_000
"""The highest width of the patterns that apply to one place of a value."""
_PROGRAM_BYTES_MAX = 2 << 20
"""The compiled patterns of a schema, together."""
_SUBSCHEMAS_MAX = 2_000
_LEVELS_MAX = 64
"""Levels of a value after which the cost must not rise any more, or the schema is refused."""
_WORK_MAX = 600_000
"""Steps that the computation of a cost may take, so that it cannot stall its caller either."""
_SAME_PLACE = ("allOf", "anyOf", "oneOf")
_SAME_PLACE_ONE = ("not", "if", "then", "else")
_EVERY_MEMBER = ("unevaluatedProperties", "propertyNames")
_EVERY_ITEM = ("contains", "unevaluatedItems", "additionalItems")
_REFUSED = ("$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "$anchor", "$id")
_CONTENT = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""
_DRAFTS = tuple(f"json-schema.org/{name}/schema" for name in ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06"))
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose values have names of the schema's own."""
_ENUM_SHARE = 8
"""So many values of an `enum` count as one subschema."""
_COMPARED_WEIGHT = 4
"""What an object or array in an `enum`, `uniqueItems` and `format` count."""
_PATTERN_WEIGHT, _MULTIPLE_WEIGHT, _FRACTION_WEIGHT = 4, 12, 40
"""What a pattern counts besides its width, and what `multipleOf` counts for whole numbers and for others."""
_MULTIPLE_MIN, _MULTIPLE_MAX = 1e-9, 1e15


class SchemaCost(NamedTuple):
    """What it costs to validate with a schema, at most."""

    cost: int
    width: int
    """The width of all patterns that apply to one place; patterns that are followed at one place only do not count."""
    has_multiples: bool
    """Whether the schema has `multipleOf`, which takes long for numbers with many digits or a large exponent."""
    errors: int
    """How many errors about one place may be gathered before the first is told; 0: only the first is made."""


def schema_cost(schema: Any, measure: Callable[[str], int]) -> SchemaCost:
    """The cost of a schema; raises InvalidArgument if it is higher than allowed. For `measure` see pattern_cost.

    >>> schema_cost({"properties": {"a": {"allOf": [{"type": "string"}, {"pattern": "^[^@]+@[^@]+$"}]}}}, len)
    SchemaCost(cost=7, width=3, has_multiples=False, errors=0)
    """
    graph = _SchemaGraph(schema, measure)
    cost = _total(graph, {number: node.weight for number, node in graph.nodes.items()}, COST_MAX)
    if cost is None:
        raise InvalidArgument(
            f"validating with this schema could take too long: more than {COST_MAX} subschemas may apply to one place "
            "of a value, or more at each level; use fewer allOf, anyOf and $ref at the same place"
        )
    widths = {number: node.width for number, node in graph.nodes.items()}
    width = _total(graph, widths, WIDTH_MAX) if any(widths.values()) else 0
    if width is None:
        raise InvalidArgument(
            "validating with this schema could take too long: its patterns are too complex; use fewer repetitions "
            "within repetitions, and smaller counts"
        )
    errors = cost + graph.required if graph.has_choices else 0
    return SchemaCost(cost, width, graph.has_multiples, errors)


def _total(graph: "_SchemaGraph", weights: Mapping[int, int], most: int) -> int | None:
    """The weights that apply to one place of a value, added up; None if they are more than allowed."""
    costs = dict(weights)
    for _ in range(_LEVELS_MAX):
        risen = graph.next_level(costs, weights)
        if max(risen.values()) > most:
            return None
        if risen == costs:
            return costs[graph.root]
        costs = risen
    return None


class _Subschema:
    """What a subschema applies to the same place, to members and to items."""

    def __init__(self) -> None:
        self.weight = 1
        self.width = 0
        self.same: list[int] = []
        self.members: dict[str, int] = {}
        self.every_member: list[int] = []
        self.other_members: list[int] = []
        """For members that `properties` does not name."""
        self.items: list[int] = []
        """Of these, one applies to an item."""
        self.every_item: list[int] = []


class _Applied(NamedTuple):
    """How many subschemas apply to a place, to a member of each name, to one of another name, and to an item."""

    here: int
    members: Mapping[str, int]
    other: int
    item: int

    @property
    def highest(self) -> int:
        return max(self.here, self.other, self.item, *self.members.values())


class _SchemaGraph:
    """The subschemas of a schema by number."""

    def __init__(self, schema: Any, measure: Callable[[str], int]) -> None:
        self.has_choices = self.has_multiples = False
        self.required = 0
        self._measure = measure
        self._patterns: dict[str, PatternCost] = {}
        self._program_bytes = 0
        self._schema = schema
        self._numbers: dict[int, int] = {}
        self.nodes: dict[int, _Subschema] = {}
        self._todo: list[tuple[int, dict[str, Any]]] = []
        self._work = 0
        self._check_keywords(schema)
        self.root = self._number(schema)
        while self._todo:
            self._look_at(*self._todo.pop())
        self._order = self._sorted()

    def next_level(self, costs: Mapping[int, int], weights: Mapping[int, int]) -> dict[int, int]:
        """The costs for values with one level more, of the costs of what is below and the weights of all here."""
        applied: dict[int, _Applied] = {}
        for number in self._order:  # those at the same place first
            node = self.nodes[number]
            every = sum(costs[one] for one in node.every_member)
            total = _Applied(
                weights[number],
                {name: costs[one] + every for name, one in node.members.items()},
                sum(costs[one] for one in node.other_members) + every,
                max((costs[one] for one in node.items), default=0) + sum(costs[one] for one in node.every_item),
            )
            self._count(1 + len(node.members))
            for other in node.same:
                self._count(len(total.members) + len(applied[other].members))
                total = _added(total, applied[other])
            applied[number] = total
        return {number: total.highest for number, total in applied.items()}

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > _WORK_MAX:
            raise InvalidArgument("the schema is too complicated: use fewer subschemas and references")

    def _check_keywords(self, schema: Any) -> None:
        """Refuse what would make references mean something else than a place in this schema."""
        draft = schema.get("$schema") if isinstance(schema, dict) else None
        if draft is not None and str(draft).partition("://")[2].rstrip("#") not in _DRAFTS:
            raise InvalidArgument(f"$schema is one of {', '.join(_DRAFTS)}, not {str(draft)[:200]!r}")
        todo: list[tuple[Any, bool]] = [(schema, False)]
        while todo:
            found, is_named = todo.pop()
            self._count(1)
            if isinstance(found, list):
                todo += [(one, False) for one in found]
            elif isinstance(found, dict):
                refused = [name for name in _REFUSED if isinstance(found.get(name), str | bool)]
                if refused and not is_named:
                    text = f"a schema must not use {', '.join(refused)}; refer to #/$defs/NAME with $ref"
                    raise InvalidArgument(text)
                todo += [(one, name in _NAMED) for name, one in found.items() if is_named or name not in _CONTENT]

    def _number(self, schema: Any) -> int:
        """The number of a subschema, which is looked at once."""
        if not isinstance(schema, dict | bool):
            raise InvalidArgument("a schema is an object, or true or false")
        key = id(schema) if isinstance(schema, dict) else int(schema)
        if key not in self._numbers:
            if len(self._numbers) == _SUBSCHEMAS_MAX:
                raise InvalidArgument(f"a schema has at most {_SUBSCHEMAS_MAX} subschemas")
            number = self._numbers[key] = len(self._numbers)
            self.nodes[number] = _Subschema()
            if isinstance(schema, dict):
                self._todo.append((number, schema))
        return self._numbers[key]

    def _look_at(self, number: int, schema: dict[str, Any]) -> None:
        node = self.nodes[number]
        self._weigh(node, schema)
        node.same = [self._number(part) for part in self._same_place(schema)]
        node.members = {name: self._number(part) for name, part in _dict(schema.get("properties")).items()}
        patterns = [self._number(part) for part in _dict(schema.get("patternProperties")).values()]
        node.every_member = patterns + [self._number(schema[name]) for name in _EVERY_MEMBER if name in schema]
        if "additionalProperties" in schema:
            node.other_members = [self._number(schema["additionalProperties"])]
        items = schema.get("items", [])
        listed = [*_list(schema.get("prefixItems")), *(items if isinstance(items, list) else [items])]
        node.items = [self._number(part) for part in listed]
        node.every_item = [self._number(schema[name]) for name in _EVERY_ITEM if name in schema]

    def _weigh(self, node: _Subschema, schema: dict[str, Any]) -> None:
        """Count the keywords of a subschema that take long."""
        allowed = _list(schema.get("enum"))
        node.weight += len(allowed) // _ENUM_SHARE
        node.weight += _COMPARED_WEIGHT * sum(isinstance(one, dict | list) for one in allowed)
        node.weight += _COMPARED_WEIGHT * sum(name in schema for name in ("uniqueItems", "format"))
        node.weight += len(_dict(schema.get("dependentRequired"))) + len(_dict(schema.get("dependencies")))
        self.required += len(_list(schema.get("required")))
        self.has_choices = self.has_choices or "anyOf" in schema or "oneOf" in schema
        if isinstance(schema.get("pattern"), str):
            self._add_pattern(node, schema["pattern"])
        for pattern in _dict(schema.get("patternProperties")):
            self._add_pattern(node, pattern)  # for the names' own schemas, and for those of the other names
            self._add_pattern(node, pattern)
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and multiple > 0:
            if not _MULTIPLE_MIN <= multiple <= _MULTIPLE_MAX:
                raise InvalidArgument(f"multipleOf must be from {_MULTIPLE_MIN:g} to {_MULTIPLE_MAX:g}")
            self.has_multiples = True
            node.weight += _MULTIPLE_WEIGHT if multiple == int(multiple) else _FRACTION_WEIGHT

    def _add_pattern(self, node: _Subschema, pattern: str) -> None:
        self._count(len(pattern))
        found = self._patterns.get(pattern)
        if found is None:
            found = self._patterns[pattern] = pattern_cost(pattern, self._measure)
            self._program_bytes += found.program_bytes
            if self._program_bytes > _PROGRAM_BYTES_MAX:
                text = "the patterns of the schema are too large: use smaller counts, or maxLength"
                raise InvalidArgument(text)
        node.weight += _PATTERN_WEIGHT
        node.width += found.width if found.width > 1 else 0

    def _same_place(self, schema: dict[str, Any]) -> Iterator[Any]:
        for name in _SAME_PLACE:
            yield from _list(schema.get(name))
        for name in _SAME_PLACE_ONE:
            if name in schema:
                yield schema[name]
        yield from _dict(schema.get("dependentSchemas")).values()
        yield from (one for one in _dict(schema.get("dependencies")).values() if not isinstance(one, list))
        if "$ref" in schema:
            yield self._resolve(schema["$ref"])

    def _resolve(self, reference: Any) -> Any:
        """The subschema that a reference names; only references within the schema are allowed."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise InvalidArgument("a $ref must be #, or begin with #/: other documents are not read")
        found = self._schema
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and len(name) < 6 and int(name) < len(found):
                found = found[int(name)]
            else:
                raise InvalidArgument(f"the schema has nothing at the $ref {reference[:200]!r}")
        return found

    def _sorted(self) -> list[int]:
        """All subschemas, each after those that apply to the same place; raises if that goes round in a circle."""
        order: list[int] = []
        state: dict[int, bool] = {}
        """False while what is at the same place is looked at, then True."""
        for start, first in self.nodes.items():
            path = [(start, iter(first.same))] if start not in state else []
            state.setdefault(start, False)
            while path:
                number, others = path[-1]
                for other in others:
                    if other not in state:
                        state[other] = False
                        path.append((other, iter(self.nodes[other].same)))
                        break
                    if not state[other]:
                        raise InvalidArgument("a $ref of the schema leads back to itself at the same place of a value")
                else:
                    state[number] = True
                    order.append(number)
                    path.pop()
        return order


def _added(one: _Applied, other: _Applied) -> _Applied:
    """What applies if both apply to the same place."""
    names = one.members.keys() | other.members.keys()
    members = {name: one.members.get(name, one.other) + other.members.get(name, other.other) for name in names}
    return _Applied(one.here + other.here, members, one.other + other.other, one.item + other.item)


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _dict(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}
