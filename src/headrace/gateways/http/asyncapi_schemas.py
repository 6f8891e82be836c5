"""JSON Schemas inside an AsyncAPI document: references within a schema are made to point to where it stands there."""

from importlib.util import find_spec
from typing import Any

import msgspec

SCHEMA_FORMAT = "application/schema+json;version=draft-07"
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_DATA_KEYWORDS = frozenset({"const", "default", "enum", "examples"})
"""Their content is data, in which `$ref` is no reference; readers of the document would take it for one."""
_OWN_BASE = frozenset({"$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveRef", "id"})
"""Keywords that make references depend on where a schema stands."""
_DEPTH_MAX = 100


class _NotEmbeddable(Exception):
    """The schema has references that mean something else in a document."""


def embedded_schema(schema: Any, place: str) -> dict[str, Any]:
    """The schema as the member of a document at a place such as `#/components/schemas/orders`.

    One that cannot stand there, because of its references or because it is no valid schema, is told as text.

    >>> embedded_schema({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": True}}, "#/a")["schema"]
    {'properties': {'a': {'$ref': '#/a/schema/$defs/x'}}, '$defs': {'x': True}}
    """
    try:
        if not _is_valid(schema):
            raise _NotEmbeddable
        whole: Any = {} if schema is True else {"not": {}} if schema is False else schema
        told = {key: part for key, part in whole.items() if key not in ("$id", "id")}
        found = _placed(told, told, f"{place}/schema", 0)
    except _NotEmbeddable:
        text = msgspec.json.encode(schema).decode()
        found = {"description": "A JSON Schema that cannot be part of this document", "x-json-schema": text}
    return {"schemaFormat": SCHEMA_FORMAT, "schema": found}


def _is_valid(schema: Any) -> bool:
    """Whether it is a JSON Schema of draft 7; none is known to be without the package that validates messages."""
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or find_spec("jsonschema_rs") is None:
        return False
    from jsonschema_rs import meta

    try:
        return meta.is_valid({**schema, "$schema": _DRAFT_7})
    except (ValueError, RecursionError):
        return False


def _placed(part: Any, root: Any, place: str, depth: int) -> Any:
    """A part of a schema whose references begin at the place of the schema."""
    if depth > _DEPTH_MAX:
        raise _NotEmbeddable
    if isinstance(part, list):
        return [_placed(one, root, place, depth + 1) for one in part]
    if not isinstance(part, dict):
        return part
    found = {}
    for key, below in part.items():
        if key == "$ref":
            if not isinstance(below, str) or not _is_inside(below, root):
                raise _NotEmbeddable
            found[key] = place + below[1:]
        elif key in _OWN_BASE and isinstance(below, str):
            raise _NotEmbeddable
        elif key in _DATA_KEYWORDS:
            if _has_reference(below, 0):
                raise _NotEmbeddable
            found[key] = below
        else:
            found[key] = _placed(below, root, place, depth + 1)
    return found


def _is_inside(reference: str, root: Any) -> bool:
    """Whether a reference points to a part of the same schema."""
    if reference == "#":
        return True
    if not reference.startswith("#/") or "%" in reference:
        return False
    part = root
    for token in reference[2:].split("/"):
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdigit() and len(name) < 6 and int(name) < len(part):
            part = part[int(name)]
        else:
            return False
    return isinstance(part, dict | bool)


def _has_reference(data: Any, depth: int) -> bool:
    if depth > _DEPTH_MAX:
        return True
    if isinstance(data, dict):
        return "$ref" in data or any(_has_reference(one, depth + 1) for one in data.values())
    return isinstance(data, list) and any(_has_reference(one, depth + 1) for one in data)
