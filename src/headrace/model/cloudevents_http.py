"""CloudEvents 1.0 over HTTP: stored messages as headers and bodies in binary, structured and batch mode, and back.

Follows the HTTP protocol binding and the JSON event format. It does no I/O, so every gateway and every delivery uses
it. The attributes of an event are stored as headers `ce_*` of the message, its data as the value; `partitionkey` is
also the key, `time` also the timestamp. A message without these attributes is an event with generated ones.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import msgspec

from headrace.model.cloudevents import (
    CONTENT_TYPE,
    STRUCTURED,
    CloudEvent,
    check_attributes,
    encode_event,
    event_headers,
    event_time_us,
    is_json_type,
    parse_structured,
    stored_event,
)
from headrace.model.errors import InvalidEvent
from headrace.model.headers import Headers
from headrace.model.message import Message

EventMode = Literal["binary", "structured", "batch"]
BATCH = "application/cloudevents-batch+json; charset=utf-8"
"""The content type of events in batch mode."""
STRUCTURED_TYPE = "application/cloudevents+json"
BATCH_TYPE = "application/cloudevents-batch+json"
HEADER_PREFIX = "ce-"
"""What the names of HTTP headers with attributes begin with."""
EVENT_TYPES = "application/cloudevents"
"""What the content types of the structured and the batch mode begin with."""
KEY_ATTRIBUTE = "partitionkey"
_TYPE_PREFIX = "headrace.message."
_ENCODED = re.compile(r"[^!#$&-~]")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_CHARSET = re.compile(r';\s*charset\s*=\s*"?([^";\s]+)', re.IGNORECASE)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_decode_batch = msgspec.json.Decoder(list[msgspec.Raw]).decode


class EventOrigin(NamedTuple):
    """Where a message is stored: what the generated attributes are made of."""

    broker_id: str
    topic: str
    partition: int


class HttpEvent(NamedTuple):
    """One or more events as the headers and the body of an HTTP request or response."""

    headers: dict[str, str]
    """By lower-case name, in printable ASCII; the first is the Content-Type, where there is one."""
    body: bytes


class EventMessage(NamedTuple):
    """An event as a message to be published."""

    value: bytes | None
    key: bytes | None
    headers: Headers
    timestamp: int | None
    """Microseconds since 1970; None if the event has no time."""


# From messages to HTTP.


def message_event(message: Message, origin: EventOrigin) -> CloudEvent:
    """The event that a stored message is; one that has no valid attributes of its own gets generated ones.

    >>> event = message_event(Message(17, b"hello", 0, b"ann"), EventOrigin("b1", "orders", 0))
    >>> event.attributes["id"], event.attributes["source"], event.attributes["type"], event.content_type
    ('orders/0/17', 'headrace:b1/topics/orders', 'headrace.message.text', 'text/plain; charset=UTF-8')
    """
    event = _own_event(message) or _generated_event(message, origin)
    attributes = event.attributes
    if "time" not in attributes:
        attributes["time"] = time_text(message.timestamp)
    if KEY_ATTRIBUTE not in attributes and message.key:
        try:
            named = {**attributes, KEY_ATTRIBUTE: message.key.decode()}
            check_attributes(named)
            attributes[KEY_ATTRIBUTE] = named[KEY_ATTRIBUTE]
        except (UnicodeDecodeError, InvalidEvent):
            return event  # the key is no text, so no attribute can have it
    return event


def encode_binary(event: CloudEvent) -> HttpEvent:
    """An event in binary mode; in structured mode if its data is an event itself, which nobody could tell apart.

    >>> encode_binary(CloudEvent({"specversion": "1.0", "id": "é", "source": "/a", "type": "t"}, "text/plain", b"x"))
    ... # doctest: +NORMALIZE_WHITESPACE
    HttpEvent(headers={'content-type': 'text/plain', 'ce-specversion': '1.0', 'ce-id': '%C3%A9', 'ce-source': '/a',
                       'ce-type': 't'}, body=b'x')
    """
    if event.content_type is not None and event.content_type.lower().startswith(EVENT_TYPES):
        return encode_structured(event)
    headers = {} if event.content_type is None else {CONTENT_TYPE: event.content_type}
    headers |= {f"{HEADER_PREFIX}{name}": header_value(text) for name, text in event.attributes.items()}
    return HttpEvent(headers, event.data or b"")


def encode_structured(event: CloudEvent) -> HttpEvent:
    """An event in structured mode, as JSON."""
    return HttpEvent({CONTENT_TYPE: STRUCTURED}, encode_event(event))


def encode_batch(events: Iterable[CloudEvent]) -> HttpEvent:
    """Events in batch mode, as a JSON array."""
    return HttpEvent({CONTENT_TYPE: BATCH}, join_batch([encode_event(event) for event in events]))


def join_batch(encoded: list[bytes]) -> bytes:
    """The body of a batch of events that are JSON already."""
    return b"[%s]" % b",".join(encoded)


def header_value(text: str) -> str:
    """An attribute as the value of an HTTP header, percent-encoded.

    >>> header_value('Euro € "50%"')
    'Euro%20%E2%82%AC%20%2250%25%22'
    """
    return _ENCODED.sub(lambda found: quote(found[0], safe=""), text)


def time_text(timestamp_us: int) -> str:
    """A timestamp as RFC 3339.

    >>> time_text(1_700_000_000_000_000), time_text(1_700_000_000_000_001)
    ('2023-11-14T22:13:20Z', '2023-11-14T22:13:20.000001Z')
    """
    return (_EPOCH + timedelta(microseconds=timestamp_us)).isoformat().replace("+00:00", "Z")


# From HTTP to messages.


def event_mode(headers: Mapping[str, str]) -> EventMode | None:
    """The mode of a request by its headers, with lower-case names; None if it has no event.

    Raises InvalidEvent for an event format, or a charset, that is not known.
    """
    content_type = headers.get(CONTENT_TYPE, "")
    name = content_type.partition(";")[0].strip().lower()
    if not name.startswith(EVENT_TYPES):
        return "binary" if f"{HEADER_PREFIX}specversion" in headers else None
    charset = _CHARSET.search(content_type)
    if name not in (STRUCTURED_TYPE, BATCH_TYPE) or (charset and charset[1].lower() not in ("utf-8", "us-ascii")):
        raise InvalidEvent(
            f"events are sent as {STRUCTURED_TYPE}, as {BATCH_TYPE} (both in UTF-8), or in binary mode",
            attribute=CONTENT_TYPE,
        )
    return "batch" if name == BATCH_TYPE else "structured"


def parse_binary(headers: Mapping[str, str], body: bytes) -> EventMessage:
    """The message of a request in binary mode; header names are in lower case, values as Latin-1 text.

    A body of no bytes without a Content-Type is an event without data.
    """
    attributes = {}
    for name, value in headers.items():
        if name.startswith(HEADER_PREFIX):
            attributes[name.removeprefix(HEADER_PREFIX)] = header_text(name, value)
    if "datacontenttype" in attributes:
        raise InvalidEvent(
            "leave the header ce-datacontenttype out: Content-Type says what the data is", attribute="datacontenttype"
        )
    content_type = headers.get(CONTENT_TYPE)
    check_attributes(attributes, content_type)
    return event_message(CloudEvent(attributes, content_type, body or (None if content_type is None else b"")))


def parse_event(content: bytes) -> EventMessage:
    """The message of an event as JSON: a request in structured mode, or an element of a batch."""
    return event_message(parse_structured(content))


def split_batch(body: bytes) -> list[bytes]:
    """The events of a request in batch mode, each as JSON for `parse_event`."""
    try:
        body.decode()
        return [bytes(event) for event in _decode_batch(body)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidEvent("a batch of events is a JSON array of them, in UTF-8") from error


def event_message(event: CloudEvent) -> EventMessage:
    """An event as a message to be published: its `partitionkey` is the key, its `time` the timestamp."""
    key, time = event.attributes.get(KEY_ATTRIBUTE), event.attributes.get("time")
    return EventMessage(
        event.data,
        None if key is None else key.encode(),
        event_headers(event),
        None if time is None else event_time_us(time),
    )


def header_text(name: str, value: str) -> str:
    """The attribute that an HTTP header has: quoted strings are unquoted, and then percent-encoding is decoded once.

    >>> header_text("ce-subject", '"Euro "%E2%82%AC')
    'Euro €'
    """
    if '"' in value:
        value = _QUOTED.sub(lambda found: _ESCAPED.sub(r"\1", found[1]), value)
    try:
        return unquote_to_bytes(value.encode("latin-1")).decode()
    except UnicodeError as error:
        raise InvalidEvent(
            f"the header {name[:100]} is no UTF-8, in which other characters than ASCII are written %XX",
            attribute=name.removeprefix(HEADER_PREFIX)[:100],
        ) from error


def _own_event(message: Message) -> CloudEvent | None:
    """The event that a message was published as; None if it has no valid attributes."""
    headers = message.headers
    if not headers:
        return None
    try:
        if "ce_specversion" in headers or "ce-specversion" in headers:
            return stored_event(message.value, headers)
        name = (_content_type(headers) or "").partition(";")[0].strip().lower()
        return parse_structured(message.value or b"") if name == STRUCTURED_TYPE else None
    except InvalidEvent:
        return None  # generated attributes describe it, so that one message does not keep others from being read


def _generated_event(message: Message, origin: EventOrigin) -> CloudEvent:
    content_type = _content_type(message.headers)
    value = message.value
    if value is None:
        kind = "deleted"
    elif content_type is not None:
        kind = "json" if is_json_type(content_type) else "text" if content_type.startswith("text/") else "bytes"
    else:
        try:
            value.decode()
            kind, content_type = "text", "text/plain; charset=UTF-8"
        except UnicodeDecodeError:
            kind, content_type = "bytes", "application/octet-stream"
    attributes = {
        "specversion": "1.0",
        "id": f"{origin.topic}/{origin.partition}/{message.offset}",
        "source": f"headrace:{quote(origin.broker_id)}/topics/{quote(origin.topic, safe='')}",
        "type": f"{_TYPE_PREFIX}{kind}",
    }
    return CloudEvent(attributes, content_type, value)


def _content_type(headers: Headers | None) -> str | None:
    """The content type of a message without attributes; None if it has none, or one that is no media type."""
    for name, content in (headers or {}).items():
        if name.lower() == CONTENT_TYPE and content:
            try:
                text = content.decode("ascii")
                check_attributes({"specversion": "1.0", "id": "0", "source": "/", "type": "t"}, text)
            except (UnicodeDecodeError, InvalidEvent):
                return None
            return text
    return None
