"""The content query: one condition on a message's value, in one of four kinds."""

import math
from typing import Any

import msgspec

from headrace.model.arguments import shown
from headrace.model.errors import InvalidContentQuery
from headrace.model.limits import CONTENT_PATTERN_CHARS_MAX, CONTENT_QUERY_BYTES_MAX, CONTENT_QUERY_DEPTH_MAX
from headrace.model.type_info import build_type_info

KINDS = ("exact", "partial", "regex", "jsonpath")


class ContentQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A condition on the value of a message: exactly one of the four kinds is given.

    >>> ContentQuery(partial={"country": "CH"}).kind
    'partial'
    """

    exact: Any = msgspec.UNSET
    """The value is JSON, and equal to this as a whole."""
    partial: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """The value is a JSON object that contains this one: objects by their members, everything else is equal."""
    regex: str | msgspec.UnsetType = msgspec.UNSET
    """An RE2 regular expression that is found somewhere in the value's bytes."""
    jsonpath: str | msgspec.UnsetType = msgspec.UNSET
    """A JSONPath (RFC 9535) that selects at least one node of the value."""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not msgspec.UNSET]
        if len(given) != 1:
            told = " and ".join(given) or "none of them"
            raise InvalidContentQuery(f"a content query has exactly one of {', '.join(KINDS)}, not {told}")
        argument = getattr(self, given[0])
        if given[0] in ("regex", "jsonpath"):
            _check_pattern(given[0], argument)
        elif given[0] == "partial" and not isinstance(argument, dict):
            raise InvalidContentQuery(f"partial is a JSON object, not {shown(argument)}")
        else:
            _check_json(given[0], argument)
            if (size := len(msgspec.json.encode(argument))) > CONTENT_QUERY_BYTES_MAX:
                raise InvalidContentQuery(f"{given[0]} has {size} bytes, more than {CONTENT_QUERY_BYTES_MAX}")

    @property
    def kind(self) -> str:
        """Which of the four kinds it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not msgspec.UNSET)

    @property
    def argument(self) -> Any:
        """What it compares with: a JSON value, a pattern or a path."""
        return getattr(self, self.kind)

    def as_dict(self) -> dict[str, Any]:
        """The query in plain values, as `view_query` takes it.

        >>> ContentQuery(regex="^ERROR").as_dict()
        {'regex': '^ERROR'}
        """
        return {self.kind: self.argument}


build_type_info(ContentQuery)


def query_error(text: str, position: int | None) -> InvalidContentQuery:
    """The error about a pattern or a path, with the character at which it is wrong, counted from 0, where known."""
    if position is None:
        return InvalidContentQuery(text)
    return InvalidContentQuery(f"{text} (at character {position})", position=position)


def _check_pattern(kind: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise InvalidContentQuery(f"{kind} is a text that is not empty, not {shown(pattern)}")
    if len(pattern) > CONTENT_PATTERN_CHARS_MAX:
        raise InvalidContentQuery(f"{kind} has {len(pattern)} characters, more than {CONTENT_PATTERN_CHARS_MAX}")
    if not pattern.isascii() and any("\ud800" <= character <= "\udfff" for character in pattern):
        raise InvalidContentQuery(f"{kind} has half of a surrogate pair, which is no character: {shown(pattern)}")


def _check_json(kind: str, value: Any, depth: int = 0) -> None:
    """Refuse what JSON cannot express, or a message cannot carry."""
    if depth > CONTENT_QUERY_DEPTH_MAX:
        raise InvalidContentQuery(f"{kind} is nested more than {CONTENT_QUERY_DEPTH_MAX} deep")
    if isinstance(value, dict):
        for name, member in value.items():
            _check_json(kind, name, depth + 1)
            if not isinstance(name, str):
                raise InvalidContentQuery(f"{kind} is JSON, whose objects have names, not {shown(name)}")
            _check_json(kind, member, depth + 1)
    elif isinstance(value, list):
        for element in value:
            _check_json(kind, element, depth + 1)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise InvalidContentQuery(f"{kind} has half of a surrogate pair, which is no character: {shown(value)}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidContentQuery(f"{kind} is JSON, which has no {value}")
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise InvalidContentQuery(f"{kind} has a number beyond 64 bits: {shown(value)}")
    elif value is not None:
        raise InvalidContentQuery(f"{kind} is JSON, not a {type(value).__name__}: {shown(value)}")
