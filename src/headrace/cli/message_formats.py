"""Input and output formats of messages and times: text for people, JSON for programs, plain bytes."""

import argparse
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from headrace.model.errors import InvalidArgument
from headrace.model.headers import HeaderPair, Headers, header_pairs, headers_from_pairs
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.model.message import Message

if TYPE_CHECKING:
    from headrace.client.results import Received

Form = Callable[[Message], bytes]
"""Formats a message for output."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class JsonHeader(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A header as a JSON object."""

    name: str
    value: str | UnsetType | None = UNSET
    value_base64: bytes | UnsetType = UNSET

    def pair(self) -> HeaderPair:
        """Return the header as a name and bytes."""
        if (self.value is UNSET) == (self.value_base64 is UNSET):
            raise InvalidArgument(f'header {self.name!r} has "value" (which may be null) or "value_base64"')
        if isinstance(self.value_base64, bytes):
            return self.name, self.value_base64
        return self.name, self.value.encode() if isinstance(self.value, str) else None


class JsonMessage(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A message as a JSON object. Bytes that are not UTF-8 are in a field whose name ends in _base64 instead."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    timestamp: int | None = None
    key: str | None = None
    key_base64: bytes | None = None
    value: str | UnsetType | None = UNSET
    value_base64: bytes | UnsetType = UNSET
    headers: dict[str, str | None] | None = None
    headers_base64: dict[str, bytes] | None = None
    """Only the headers that are not UTF-8."""
    header_list: list[JsonHeader] | None = None
    """All headers in order, instead of `headers` and `headers_base64`, if a name repeats."""
    due: int | None = None
    priority: int | None = None
    expires: int | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JsonMessage)


class GivenMessage(msgspec.Struct, frozen=True):
    """A message to append or publish."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers | None = None
    timestamp: int | None = None
    due: int | None = None
    priority: int | None = None
    expires: int | None = None


def as_json(message: Message) -> bytes:
    """Encode a message as one line of JSON, which `from_json` decodes to the same message."""
    shown = JsonMessage(
        offset=message.offset,
        timestamp=message.timestamp,
        due=message.due,
        priority=message.priority,
        expires=message.expires,
    )
    if message.key is not None:
        try:
            shown.key = message.key.decode()
        except UnicodeDecodeError:
            shown.key_base64 = message.key
    try:
        shown.value = None if message.value is None else message.value.decode()
    except UnicodeDecodeError:
        shown.value_base64 = message.value or b""
    if message.headers:
        shown.headers, shown.headers_base64, shown.header_list = json_headers(message.headers)
    return _encoder.encode(shown) + b"\n"


class JsonHeaders(NamedTuple):
    """The JSON fields for headers; None for a field that is left out."""

    headers: dict[str, str | None] | None
    headers_base64: dict[str, bytes] | None
    header_list: list[JsonHeader] | None

    def given(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON values."""
        return {name: msgspec.to_builtins(field) for name, field in self._asdict().items() if field is not None}


def json_headers(headers: Headers) -> JsonHeaders:
    """Return the fields for these headers: two mappings, or the list if a name repeats."""
    texts: dict[str, str | None] = {}
    others: dict[str, bytes] = {}
    listed: list[JsonHeader] = []
    for name, content in header_pairs(headers):
        try:
            texts[name] = text = None if content is None else content.decode()
            listed.append(JsonHeader(name, text))
        except UnicodeDecodeError:
            others[name] = content or b""
            listed.append(JsonHeader(name, value_base64=content or b""))
    return (
        JsonHeaders(texts or None, others or None, None) if type(headers) is dict else JsonHeaders(None, None, listed)
    )


def from_json(line: bytes, *, by_broker: bool = False) -> GivenMessage:
    """Decode a message from one line of JSON; ignores topic, partition and offset, as the message gets new ones."""
    try:
        given = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"not a message in JSON: {error}") from error
    if (given.value is UNSET) == (given.value_base64 is UNSET):
        raise InvalidArgument('a message has "value" (null: the key is deleted) or "value_base64"')
    if given.key is not None and given.key_base64 is not None:
        raise InvalidArgument('a message has "key" or "key_base64", not both')
    for name in ("due", "priority", "expires"):
        if getattr(given, name) is not None and not by_broker:
            raise InvalidArgument(f'"{name}" cannot be appended to a log without a broker')
    if given.header_list is not None and (given.headers is not None or given.headers_base64 is not None):
        raise InvalidArgument('a message has "header_list", or "headers" and "headers_base64", not both')
    texts = ((name, None if text is None else text.encode()) for name, text in (given.headers or {}).items())
    pairs = [*texts, *(given.headers_base64 or {}).items(), *(header.pair() for header in given.header_list or ())]
    key = given.key_base64 if given.key is None else given.key.encode()
    if isinstance(given.value_base64, bytes):
        value: bytes | None = given.value_base64
    else:
        value = given.value.encode() if isinstance(given.value, str) else None
    headers = headers_from_pairs(pairs)
    return GivenMessage(value, key, headers, given.timestamp, given.due, given.priority, given.expires)


def as_text(message: Message) -> bytes:
    """Return a line for people: offset, time, key, value and headers, separated by tabs."""
    columns = [
        str(message.offset),
        time_text(message.timestamp),
        "-" if message.key is None else printable(message.key),
        "(deleted)" if message.value is None else printable(message.value),
    ]
    columns += map(header_shown, message.header_list)
    return "\t".join(columns).encode() + b"\n"


def header_shown(header: HeaderPair) -> str:
    """Format a header for people: NAME=VALUE, or only the name if the value is null.

    >>> header_shown(("lang", b"en")), header_shown(("lang", None))
    ('lang=en', 'lang')
    """
    name, content = header
    return printable(name.encode()) + ("" if content is None else f"={printable(content)}")


def as_value(separator: bytes) -> Form:
    """Return the bytes of the value, and a separator."""
    return lambda message: (message.value or b"") + separator


def received_form(given: argparse.Namespace, *, several_topics: bool) -> Callable[["Received"], bytes]:
    """Return the output format that the options ask for."""
    if given.values:
        return as_value(b"\0" if given.null_separated else b"\n")
    if given.json:
        return lambda message: (
            b'{"topic":%s,"partition":%d,' % (_encoder.encode(message.topic), message.partition) + as_json(message)[1:]
        )
    if several_topics:
        return lambda message: b"%s\t%d:" % (message.topic.encode(), message.partition) + as_text(message)
    return lambda message: b"%d:" % message.partition + as_text(message)


def printable(content: bytes) -> str:
    """Decode bytes to text, escaping invalid UTF-8 and terminal control characters."""
    text = content.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


@lru_cache(maxsize=16)
def time_text(time_us: int) -> str:
    """Format a time for people, in UTC.

    >>> time_text(1_700_000_000_123_456)
    '2023-11-14T22:13:20.123456Z'
    """
    try:
        moment = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} µs"  # after the year 9999, or before the year 1
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> int:
    """Parse microseconds since 1970, as a number or as ISO 8601, which is UTC if it names no zone.

    >>> parse_time("2023-11-14 22:13:20Z"), parse_time("1700000000000000")
    (1700000000000000, 1700000000000000)
    """
    try:
        time_us = int(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        time_us = (moment - _EPOCH) // _MICROSECOND
    if not TIMESTAMP_US_MIN <= time_us <= TIMESTAMP_US_MAX:
        raise ValueError(f"{text} is out of range")
    return time_us
