"""JSON in the values of messages, as several middleware read it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.model.batch import Columns
from headrace.model.middleware import RefusedMessages, check_choice

ON_INVALID = ("refuse", "dead_letter")
"""What can become of messages that a middleware cannot process: their batch is refused, or they are dead letters."""
_decode = msgspec.json.Decoder().decode
encode_json = msgspec.json.Encoder().encode


class NotJson(ValueError):
    """A value is no JSON, or has what cannot be represented; the text never repeats it."""


class _RepeatedName(Exception):
    """An object of a JSON text has two members of one name."""


def decode_json(value: bytes | None) -> Any:
    """The content of a value; raises NotJson."""
    if value is None:
        raise NotJson("the message has no value")
    try:
        return _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(_problem(value, error)) from error


def may_repeat_names(value: bytes) -> bool:
    """Whether an object in a JSON value has two members of one name, of which a decoder shows only the last.

    >>> may_repeat_names(b'{"a": 1, "b": {"a": 2}}'), may_repeat_names(b'{"a": 1, "\\\\u0061": 2}')
    (False, True)
    """
    try:
        json.loads(value.decode(), object_pairs_hook=_check_names, parse_int=len, parse_float=len)
    except (_RepeatedName, ValueError, RecursionError):
        return True
    return False


def _check_names(members: list[tuple[str, Any]]) -> None:
    if len(dict(members)) < len(members):
        raise _RepeatedName


def _problem(value: bytes, error: Exception) -> str:
    """Why a value cannot be decoded."""
    try:
        json.loads(value.decode(), parse_int=len, parse_float=len, parse_constant=_refuse_constant)
    except RecursionError:
        return "the value is nested too deeply"
    except ValueError:
        return "the value is not JSON"
    if isinstance(error, RecursionError):
        return "the value is nested too deeply"
    return "the value has a number or a character that cannot be represented"


def _refuse_constant(_: str) -> None:
    raise ValueError  # NaN and infinity, which Python takes for JSON


def on_invalid(options: Mapping[str, Any]) -> bool:
    """Whether the option says that invalid messages become dead letters."""
    return check_choice("on_invalid", options.get("on_invalid", "refuse"), ON_INVALID) == "dead_letter"


def outcome_of(
    columns: Columns, reasons: Mapping[int, str], *, dead_letter: bool, rows: Sequence[int] | None = None
) -> Columns | RefusedMessages:
    """The columns, or what is refused of them; `rows` are those that they were made of, if they are others."""
    if not reasons:
        return columns
    sources = None if rows is None else {index: rows[index] for index in reasons}
    return RefusedMessages(reasons, dead_letter, columns, sources)


def repeated_rows(columns: Columns, rows: Sequence[int], values: Sequence[bytes | None]) -> Columns:
    """Messages with these values, and all other fields of these rows."""

    def pick(column: Sequence[Any] | None) -> list[Any] | None:
        return None if column is None else [column[row] for row in rows]

    return Columns(
        values,
        pick(columns.keys),
        pick(columns.timestamps),
        pick(columns.headers),
        pick(columns.dues),
        pick(columns.priorities),
        pick(columns.expires),
    )
