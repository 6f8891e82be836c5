"""The middleware `redact`: hides fields of JSON values, and headers, when messages are stored or delivered."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.middleware.json_values import NotJson, decode_json, encode_json, may_repeat_names, on_invalid
from headrace.model.batch import Columns
from headrace.model.errors import InvalidArgument
from headrace.model.headers import Headers, header_pairs, headers_from_pairs
from headrace.model.middleware import Middleware, MiddlewareContext, RefusedMessages, check_choice, check_options

Path = tuple[str | int | None, ...]
"""Names and indexes from the root on; None stands for every element or member."""
_OPTIONS: dict[str, type | tuple[type, ...]] = {
    "fields": list,
    "headers": list,
    "when": str,
    "replacement": (str, int, float, bool, type(None)),
    "on_invalid": str,
}
_PATHS_MAX = 100
_STEPS_MAX = 32
# The path is the topic owner's, short, and matched step by step without alternatives that overlap.
_STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_-]*|\*)|\[(\*|\d{1,9})\]|\['([^'\\]{1,200})'\]")


def parse_path(text: Any) -> Path:
    """The steps of a path.

    >>> parse_path("$.cards[*].number"), parse_path("$['first name']")
    (('cards', None, 'number'), ('first name',))
    """
    found: list[str | int | None] = []
    at = 1
    while isinstance(text, str) and text.startswith("$") and at < len(text):
        step = _STEP.match(text, at)
        if step is None or len(found) == _STEPS_MAX:
            break
        name, index, quoted = step.groups()
        if quoted is not None:
            found.append(quoted)
        elif name == "*" or index == "*":
            found.append(None)
        else:
            found.append(name if name is not None else int(index))
        at = step.end()
    if not isinstance(text, str) or at != len(text) or not found:
        raise InvalidArgument(
            f"{text!r} is no path: write $.name, $.items[*].name, $.items[0] or $['a name'], with at most {_STEPS_MAX} "
            "steps"
        )
    return tuple(found)


def make_redact(options: Mapping[str, Any]) -> Middleware:
    """The middleware that redacts when the option `when` says."""
    check_options(options, _OPTIONS)
    if check_choice("when", options.get("when", "publish"), ("publish", "deliver")) == "deliver":
        if "on_invalid" in options:
            raise InvalidArgument("the option 'on_invalid' is for messages that are published")
        return RedactAtDelivery(options)
    return RedactAtPublish(options)


make_redact.api = 1  # type: ignore[attr-defined]


class _Redaction(Middleware):
    """What both kinds of redaction have in common."""

    inline = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        fields, headers = options.get("fields", []), options.get("headers", [])
        if not fields and not headers:
            raise InvalidArgument("give the option 'fields' or 'headers'")
        if len(fields) + len(headers) > _PATHS_MAX:
            raise InvalidArgument(f"there are at most {_PATHS_MAX} fields and headers")
        if not all(isinstance(name, str) for name in headers):
            raise InvalidArgument("the option 'headers' is a list of names")
        self._paths = [parse_path(text) for text in fields]
        self._headers = frozenset(headers)
        self._replacement = options.get("replacement", "***")
        text = self._replacement if isinstance(self._replacement, str) else encode_json(self._replacement).decode()
        self._header_replacement = text.encode()
        self.needs = (*(("values",) if fields else ()), *(("headers",) if headers else ()))

    def redact_value(self, value: bytes | None) -> bytes | None:
        """The value without what the paths hide; as it is if they find nothing; raises NotJson.

        Of members with the same name only the last is decoded: a value that has such is encoded again in any case.
        """
        if value is None or not self._paths:
            return value
        content = decode_json(value)
        changed = False
        for path in self._paths:
            changed = self._hide(content, path) or changed
        made = encode_json(content)
        return value if not changed and (made == value or not may_repeat_names(value)) else made

    def redact_headers(self, columns: Columns) -> Sequence[Headers | None] | None:
        """The headers with those that are to be hidden replaced."""
        names = self._headers
        if columns.headers is None or not names:
            return columns.headers
        return [each if each is None or names.isdisjoint(each) else self._hidden(each) for each in columns.headers]

    def _hidden(self, headers: Headers) -> Headers | None:
        hidden = self._header_replacement
        return headers_from_pairs((name, hidden if name in self._headers else it) for name, it in header_pairs(headers))

    def _hide(self, content: Any, path: Path) -> bool:
        """Replace what is at a path; whether anything is."""
        step, rest = path[0], path[1:]
        if isinstance(content, dict) and not isinstance(step, int):
            found: list[Any] = list(content) if step is None else [step] if step in content else []
        elif isinstance(content, list) and not isinstance(step, str):
            found = list(range(len(content))) if step is None else [step] if step < len(content) else []
        else:
            return False
        hidden = False
        for at in found:
            if rest:
                hidden = self._hide(content[at], rest) or hidden
            else:
                content[at] = self._replacement
                hidden = True
        return hidden


class RedactAtPublish(_Redaction):
    """Redacts before messages are stored: nobody ever sees what it hides. Refuses values that are not JSON."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._dead_letter = on_invalid(options)

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns | RefusedMessages:
        """Redact every message."""
        values: Sequence[bytes | None] = columns.values
        reasons: dict[int, str] = {}
        if self._paths:
            values = list(columns.values)
            for index, value in enumerate(columns.values):
                try:
                    values[index] = self.redact_value(value)
                except NotJson as error:
                    reasons[index] = str(error)
        made = msgspec.structs.replace(columns, values=values, headers=self.redact_headers(columns))
        return RefusedMessages(reasons, self._dead_letter, made) if reasons else made


class RedactAtDelivery(_Redaction):
    """Redacts when messages are delivered: the topic has them whole."""

    def on_deliver(self, columns: Columns, _: MiddlewareContext) -> Columns:
        """Redact every message; raises for values that are not JSON, which are not delivered then."""
        values = [self.redact_value(value) for value in columns.values] if self._paths else columns.values
        return msgspec.structs.replace(columns, values=values, headers=self.redact_headers(columns))
