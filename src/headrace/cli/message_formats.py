"""The forms in which messages and times are printed and given: text for people, JSON for programs, plain bytes."""

import argparse
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from headrace.model.errors import InvalidArgument
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.model.message import Message

if TYPE_CHECKING:
    from headrace.client.results import Received

Form = Callable[[Message], bytes]
"""How a message is printed."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class JsonMessage(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A message as a JSON object. What is not UTF-8 has a field whose name ends in _base64 instead."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    timestamp: int | None = None
    key: str | None = None
    key_base64: bytes | None = None
    value: str | UnsetType | None = UNSET
    value_base64: bytes | UnsetType = UNSET
    headers: dict[str, str] | None = None
    headers_base64: dict[str, bytes] | None = None
    """Only the headers that are not UTF-8."""
    due: int | None = None
    priority: int | None = None
    expires: int | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JsonMessage)


class GivenMessage(msgspec.Struct, frozen=True):
    """A message to append or publish."""

    value: bytes | None
    key: bytes | None = None
    headers: dict[str, bytes] | None = None
    timestamp: int | None = None
    due: int | None = None
    priority: int | None = None
    expires: int | None = None


def as_json(message: Message) -> bytes:
    """One line of JSON, of which `from_json` makes the same message."""
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
    for name, content in (message.headers or {}).items():
        try:
            text = content.decode()
        except UnicodeDecodeError:
            shown.headers_base64 = {**(shown.headers_base64 or {}), name: content}
        else:
            shown.headers = {**(shown.headers or {}), name: text}
    return _encoder.encode(shown) + b"\n"


def from_json(line: bytes, *, by_broker: bool = False) -> GivenMessage:
    """The message of one line of JSON; where it was before is ignored, for it gets a place and an offset of its own."""
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
    headers = {name: text.encode() for name, text in (given.headers or {}).items()}
    headers |= given.headers_base64 or {}
    key = given.key_base64 if given.key is None else given.key.encode()
    if isinstance(given.value_base64, bytes):
        value: bytes | None = given.value_base64
    else:
        value = given.value.encode() if isinstance(given.value, str) else None
    return GivenMessage(value, key, headers or None, given.timestamp, given.due, given.priority, given.expires)


def as_text(message: Message) -> bytes:
    """A line for people: offset, time, key, value and headers, with tabs between them."""
    columns = [
        str(message.offset),
        time_text(message.timestamp),
        "-" if message.key is None else printable(message.key),
        "(deleted)" if message.value is None else printable(message.value),
    ]
    columns += [f"{printable(name.encode())}={printable(text)}" for name, text in (message.headers or {}).items()]
    return "\t".join(columns).encode() + b"\n"


def as_value(separator: bytes) -> Form:
    """Only the bytes of the value, and a separator."""
    return lambda message: (message.value or b"") + separator


def received_form(given: argparse.Namespace, *, several_topics: bool) -> Callable[["Received"], bytes]:
    """How the user wants messages of a broker to be printed."""
    if given.values:
        return as_value(b"\0" if given.null_separated else b"\n")
    if given.json:
        return lambda message: (
            b'{"topic":"%s","partition":%d,' % (message.topic.encode(), message.partition) + as_json(message)[1:]
        )
    if several_topics:
        return lambda message: b"%s\t%d:" % (message.topic.encode(), message.partition) + as_text(message)
    return lambda message: b"%d:" % message.partition + as_text(message)


def printable(content: bytes) -> str:
    """The text of some bytes, with escapes for what is not UTF-8 and for what would upset a terminal."""
    text = content.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


@lru_cache(maxsize=16)
def time_text(time_us: int) -> str:
    """A time for people, in UTC.

    >>> time_text(1_700_000_000_123_456)
    '2023-11-14T22:13:20.123456Z'
    """
    try:
        moment = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} µs"  # after the year 9999, or before the year 1
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> int:
    """Microseconds since 1970 from a whole number of them, or from ISO 8601, which is UTC unless it says otherwise.

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
        raise ValueError(f"{text} is too far away")
    return time_us
