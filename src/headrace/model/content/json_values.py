"""JSON values: equality and containment, where true is not 1."""

from typing import Any

from headrace.model.content.budget import Evaluation

Number = (int, float)


def is_equal(left: Any, right: Any, evaluation: Evaluation | None = None) -> bool:
    """Whether two JSON values are equal: numbers by value, objects without regard to order.

    >>> is_equal({"a": [1]}, {"a": [1.0]}), is_equal([1], [True])
    (True, False)
    """
    kind = type(left)
    if evaluation is not None and (kind is dict or kind is list or kind is str):
        evaluation.spend(1 + (len(left) >> 8 if kind is str else len(left)))
    if kind is dict:
        return (
            type(right) is dict
            and left.keys() == right.keys()
            and all(is_equal(member, right[name], evaluation) for name, member in left.items())
        )
    if kind is list:
        return (
            type(right) is list
            and len(left) == len(right)
            and all(is_equal(one, other, evaluation) for one, other in zip(left, right, strict=True))
        )
    if kind is bool or type(right) is bool:
        return left is right
    return bool(left == right)


def is_contained(pattern: Any, document: Any) -> bool:
    """Whether a document contains a pattern: objects by their members, everything else is equal.

    >>> is_contained({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}, "d": 3})
    True
    """
    if type(pattern) is not dict:
        return is_equal(pattern, document)
    if type(document) is not dict:
        return False
    for name, member in pattern.items():
        if name not in document or not is_contained(member, document[name]):
            return False
    return True


def count_nodes(value: Any) -> int:
    """The number of values within a JSON value, itself included.

    >>> count_nodes({"a": [1, 2]})
    4
    """
    inner = value.values() if type(value) is dict else value if type(value) is list else ()
    return 1 + sum(count_nodes(one) for one in inner)
