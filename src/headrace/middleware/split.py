"""The middleware `split`: a message whose value is a list becomes one message for each element."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.middleware.json_values import NotJson, decode_json, on_invalid, outcome_of, repeated_rows
from headrace.model.batch import Columns
from headrace.model.limits import BATCH_COUNT_MAX
from headrace.model.middleware import (
    COLUMNS,
    Middleware,
    MiddlewareContext,
    RefusedMessages,
    check_choice,
    check_options,
)

_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class SplitMiddleware(Middleware):
    """Splits JSON arrays, or lines of JSON; each part has the key, the headers and the times of the whole."""

    needs = COLUMNS
    inline = True
    changes_count = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_options(options, {"format": str, "on_invalid": str})
        lines = check_choice("format", options.get("format", "json"), ("json", "ndjson")) == "ndjson"
        self._parts = _split_lines if lines else _split_array
        self._dead_letter = on_invalid(options)

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns | RefusedMessages:
        """Split every message."""
        rows: list[int] = []
        values: list[bytes | None] = []
        reasons: dict[int, str] = {}
        left = BATCH_COUNT_MAX - len(columns.values)
        for row, value in enumerate(columns.values):
            try:
                parts: list[Any] = self._parts(value)
                if len(parts) > left + 1:
                    raise NotJson(f"the messages of a batch have more than {BATCH_COUNT_MAX} elements together")
                left -= len(parts) - 1
            except NotJson as error:
                parts = [value]
                reasons[len(values)] = str(error)
            values += parts
            rows += [row] * len(parts)
        return outcome_of(repeated_rows(columns, rows, values), reasons, dead_letter=self._dead_letter, rows=rows)


def _split_array(value: bytes | None) -> list[bytes]:
    if not isinstance(decode_json(value), list):
        raise NotJson("the value is no JSON array")
    assert value is not None
    parts = [bytes(part) for part in _elements(value)]
    if not parts:
        raise NotJson("the value is an empty array")
    return parts


def _split_lines(value: bytes | None) -> list[bytes]:
    parts = [line.strip() for line in (value or b"").split(b"\n") if line.strip()]
    if not parts:
        raise NotJson("the value has no lines")
    for part in parts:
        decode_json(part)
    return parts
