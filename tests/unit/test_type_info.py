"""Types that are converted while a program runs are prepared when their modules are imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import headrace
from headrace.model.type_info import build_type_info

SOURCES = sorted(Path(headrace.__file__).parent.rglob("*.py"))
ARGUMENTS = {"kind", "field.type"}
"""Types that are arguments: the table of routes prepares those of queries, and others are used by one thread alone."""


def used_types(tree: ast.AST) -> Iterator[str]:
    """The types that msgspec is given with a value, rather than before in a decoder."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called = ast.unparse(node.func)
        if called == "msgspec.convert":
            yield ast.unparse(node.args[1])
        elif called in ("msgspec.json.decode", "msgspec.msgpack.decode"):
            yield from (ast.unparse(one.value) for one in node.keywords if one.arg == "type")


def prepared_types(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.Expr(ast.Call(ast.Name("build_type_info"), given)):
                yield from map(ast.unparse, given)


def test_every_struct_that_is_converted_was_prepared() -> None:
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    used = {name for tree in trees for name in used_types(tree)} - ARGUMENTS
    structs = {name for name in used if classes & {*name.replace("[", " ").replace("]", " ").split()}}
    assert structs == {name for tree in trees for name in prepared_types(tree)} & structs, "call build_type_info"
    assert "TopicSettings" in structs


class _Unprepared(msgspec.Struct):
    field: "Missing"  # type: ignore[name-defined]  # noqa: F821


def test_a_type_is_looked_at_when_it_is_prepared() -> None:
    with pytest.raises(NameError):
        build_type_info(_Unprepared)
