"""JSON in the values of messages, as several middleware read it."""

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
    """A value is no JSON; the text never repeats it."""


def decode_json(value: bytes | None) -> Any:
    """The content of a value; raises NotJson."""
    if value is None:
        raise NotJson("the message has no value")
    try:
        return _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson("the value is not JSON") from error


def on_invalid(options: Mapping[str, Any]) -> bool:
    """Whether the option says that invalid messages become dead letters."""
    return check_choice("on_invalid", options.get("on_invalid", "refuse"), ON_INVALID) == "dead_letter"


def outcome_of(columns: Columns, reasons: Mapping[int, str], *, dead_letter: bool) -> Columns | RefusedMessages:
    """The columns, or what is refused of them."""
    return RefusedMessages(reasons, dead_letter, columns) if reasons else columns


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
