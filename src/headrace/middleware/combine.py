"""The middleware `combine`: messages of a batch that have the same key become one message with a JSON array."""

from collections.abc import Mapping
from typing import Any

from headrace.middleware.json_values import NotJson, decode_json, on_invalid, outcome_of, repeated_rows
from headrace.model.batch import Columns
from headrace.model.middleware import COLUMNS, Middleware, MiddlewareContext, RefusedMessages, check_options


class CombineMiddleware(Middleware):
    """Combines messages by key, those without a key too; each array has the other fields of its first message."""

    needs = COLUMNS
    inline = True
    changes_count = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_options(options, {"on_invalid": str})
        self._dead_letter = on_invalid(options)

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns | RefusedMessages:
        """Combine the messages, in the order of the first of each key."""
        keys = columns.keys or [None] * len(columns.values)
        groups: dict[object, list[int]] = {}
        refused: dict[object, str] = {}
        for row, (key, value) in enumerate(zip(keys, columns.values, strict=True)):
            group: object = key
            try:
                decode_json(value)
            except NotJson as error:
                group = ("refused", row)
                refused[group] = str(error)
            groups.setdefault(group, []).append(row)
        values: list[bytes | None] = []
        reasons: dict[int, str] = {}
        for index, (group, rows) in enumerate(groups.items()):
            if group in refused:
                reasons[index] = refused[group]
                values.append(columns.values[rows[0]])
            else:
                values.append(b"[" + b",".join(columns.values[row] or b"" for row in rows) + b"]")
        firsts = [rows[0] for rows in groups.values()]
        combined = repeated_rows(columns, firsts, values)
        return outcome_of(combined, reasons, dead_letter=self._dead_letter, rows=firsts)
