"""The evaluator of JSONPath: a parsed path becomes functions from a node to the nodes that it selects.

Every function that goes over several nodes spends steps before it does, so that no path and no document takes long.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.model.content.budget import Evaluation
from headrace.model.content.jsonpath_nodes import NOTHING, CompileFilter, FilterTest, Find, Lookup, Test
from headrace.model.errors import InvalidContentQuery

_Select = Callable[[Any, Evaluation, list[Any]], None]
"""Append to the list what a selector selects of a node's children."""


class CompiledPath(NamedTuple):
    """A path as functions: `lookup` if it selects one node at most, `find` in any case."""

    lookup: Lookup | None
    find: Find
    exists: Test


def compile_segments(segments: Sequence[Any], compile_filter: CompileFilter) -> CompiledPath:
    """Compile the segments of a path; `compile_filter` compiles the expression of a filter."""
    singular = 0
    while singular < len(segments) and _step_of(segments[singular]) is not None:
        singular += 1
    lookup = _compile_lookup([_step_of(segment) for segment in segments[:singular]])
    if singular == len(segments):

        def find_one(node: Any, evaluation: Evaluation) -> list[Any]:  # noqa: ARG001
            found = lookup(node)
            return [] if found is NOTHING else [found]

        return CompiledPath(lookup, find_one, lambda node, _: lookup(node) is not NOTHING)
    last = segments[-1]
    if singular == len(segments) - 1 and _selector_kinds(last) == ["Filter"] and _is_child_segment(last):
        return _compile_filtered(lookup, compile_filter(last.selectors[0].expression))
    rest = [_compile_segment(segment, compile_filter) for segment in segments[singular:]]

    def find(node: Any, evaluation: Evaluation) -> list[Any]:
        start = lookup(node)
        nodes = [] if start is NOTHING else [start]
        for expand in rest:
            nodes = expand(nodes, evaluation)
        return nodes

    return CompiledPath(None, find, lambda node, evaluation: bool(find(node, evaluation)))


def _compile_filtered(lookup: Lookup, compiled: FilterTest) -> CompiledPath:
    """A path with one filter at its end: to know whether it selects anything, the first node is enough."""
    select, (test, is_relative) = _select_by_filter(compiled), compiled

    def find(node: Any, evaluation: Evaluation) -> list[Any]:
        found: list[Any] = []
        select(lookup(node), evaluation, found)
        return found

    def exists(node: Any, evaluation: Evaluation) -> bool:
        children = children_of(lookup(node))
        evaluation.spend(len(children))
        if not is_relative:
            return bool(children) and test(NOTHING, evaluation)
        for child in children:  # noqa: SIM110  # a generator would cost more than the tests
            if test(child, evaluation):
                return True
        return False

    return CompiledPath(None, find, exists)


def children_of(node: Any) -> Any:
    """The values of an object's members, or the elements of an array; nothing of any other value."""
    kind = type(node)
    return list(node.values()) if kind is dict else node if kind is list else ()


def _step_of(segment: Any) -> str | int | None:
    """The name or the index, if the segment selects one child at most."""
    kinds = _selector_kinds(segment)
    if not _is_child_segment(segment) or kinds not in (["NameSelector"], ["IndexSelector"]):
        return None
    selector = segment.selectors[0]
    return str(selector.name) if kinds == ["NameSelector"] else int(selector.index)


def _is_child_segment(segment: Any) -> bool:
    return type(segment).__name__ == "JSONPathChildSegment"


def _selector_kinds(segment: Any) -> list[str]:
    return [type(selector).__name__ for selector in segment.selectors]


def _compile_lookup(steps: Sequence[str | int | None]) -> Lookup:
    if not steps:
        return lambda node: node
    if len(steps) == 1 and isinstance(steps[0], str):
        name = steps[0]
        return lambda node: node.get(name, NOTHING) if type(node) is dict else NOTHING

    def lookup(node: Any) -> Any:
        for step in steps:
            if type(step) is str:
                if type(node) is not dict:
                    return NOTHING
                node = node.get(step, NOTHING)
            else:
                if type(node) is not list:
                    return NOTHING
                assert type(step) is int
                node = node[step] if -len(node) <= step < len(node) else NOTHING
        return node

    return lookup


def _compile_segment(segment: Any, compile_filter: CompileFilter) -> Callable[[list[Any], Evaluation], list[Any]]:
    selects = [_compile_selector(selector, compile_filter) for selector in segment.selectors]
    if _is_child_segment(segment):
        return lambda nodes, evaluation: _select_children(nodes, evaluation, selects)
    if type(segment).__name__ == "JSONPathRecursiveDescentSegment":
        return lambda nodes, evaluation: _select_descendants(nodes, evaluation, selects)
    raise InvalidContentQuery(f"{segment} is not in RFC 9535")


def _select_children(nodes: list[Any], evaluation: Evaluation, selects: list[_Select]) -> list[Any]:
    found: list[Any] = []
    for node in nodes:
        evaluation.spend(len(selects))
        for select in selects:
            select(node, evaluation, found)
    return found


def _select_descendants(nodes: list[Any], evaluation: Evaluation, selects: list[_Select]) -> list[Any]:
    """Apply selectors to each node and all below it, parents before children; the stack replaces recursion."""
    found: list[Any] = []
    for start in nodes:
        stack = [start]
        while stack:
            node = stack.pop()
            children = children_of(node)
            evaluation.spend(len(selects) + len(children))
            for select in selects:
                select(node, evaluation, found)
            stack.extend(child for child in reversed(children) if type(child) is dict or type(child) is list)
    return found


def _compile_selector(selector: Any, compile_filter: CompileFilter) -> _Select:
    kind = type(selector).__name__
    if kind in ("NameSelector", "IndexSelector"):
        lookup = _compile_lookup([selector.name if kind == "NameSelector" else selector.index])

        def select_one(node: Any, evaluation: Evaluation, found: list[Any]) -> None:  # noqa: ARG001
            if (child := lookup(node)) is not NOTHING:
                found.append(child)

        return select_one
    if kind == "WildcardSelector":

        def select_all(node: Any, evaluation: Evaluation, found: list[Any]) -> None:
            children = children_of(node)
            evaluation.spend(len(children))
            found.extend(children)

        return select_all
    if kind == "SliceSelector":
        bounds: slice = selector.slice

        def select_slice(node: Any, evaluation: Evaluation, found: list[Any]) -> None:
            if type(node) is list and bounds.step != 0:
                children = node[bounds]
                evaluation.spend(len(children))
                found.extend(children)

        return select_slice
    if kind == "Filter":
        return _select_by_filter(compile_filter(selector.expression))
    raise InvalidContentQuery(f"{selector} is not in RFC 9535")


def _select_by_filter(compiled: FilterTest) -> _Select:
    test, is_relative = compiled

    def select_filtered(node: Any, evaluation: Evaluation, found: list[Any]) -> None:
        children = children_of(node)
        evaluation.spend(len(children))
        if is_relative:
            found.extend([child for child in children if test(child, evaluation)])
        elif children and test(NOTHING, evaluation):
            found.extend(children)

    return select_filtered
