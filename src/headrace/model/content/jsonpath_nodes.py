"""What the functions of a compiled JSONPath give and take."""

from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.model.content.budget import Evaluation


class _Nothing:
    """RFC 9535's special result Nothing: no node is there."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()

Lookup = Callable[[Any], Any]
"""The one node that is there below a node, or NOTHING."""
Find = Callable[[Any, Evaluation], list[Any]]
"""All nodes that a path selects below a node."""
Test = Callable[[Any, Evaluation], bool]
"""Whether a condition holds for a node."""
Get = Callable[[Any, Evaluation], Any]
"""A value for a node, or NOTHING."""


class FilterTest(NamedTuple):
    """A compiled filter expression."""

    test: Test
    is_relative: bool
    """Whether it looks at the current node: the result is the same for all nodes otherwise."""


CompileFilter = Callable[[Any], FilterTest]
"""Compiles the expression of a filter."""
