"""CloudEvents 1.0: events as JSON (structured mode), and as a value with attributes in headers (binary mode)."""

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import msgspec

from headrace.model.envelope import time_us
from headrace.model.errors import InvalidEvent
from headrace.model.headers import Headers, replaced_headers, without_headers
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN

PREFIX = "ce_"
"""What the names of headers with attributes begin with, as in the Kafka binding."""
PREFIXES = (PREFIX, "ce-")
"""What they may begin with in messages of others: those of HTTP requests and of NATS keep the hyphen."""
CONTENT_TYPE = "content-type"
TYPES = "cloudevents-types"
"""The header that tells which attributes are no texts, such as `flag=boolean,size=integer`; left out if all are."""
STRUCTURED = "application/cloudevents+json; charset=utf-8"
"""The content type of an event in structured mode."""
REQUIRED = ("specversion", "id", "source", "type")
"""The attributes that every event has."""
_JSON = "application/json"
_NOT_EMPTY = (*REQUIRED, "subject", "dataschema", "time", "partitionkey")
_ATTRIBUTE = re.compile(r"[a-z0-9]{1,100}")
_JSON_TYPE = re.compile(r"[^;]*[/+]json\s*(;.*)?", re.IGNORECASE | re.DOTALL)
_TEXT_TYPE = re.compile(r"\s*(text/[^;]*|[^;]*[/+]xml\s*)(;.*)?", re.IGNORECASE | re.DOTALL)
_MEDIA_TYPE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+[ \t]*(;[\t -~]*)?")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff]")
_INTEGER = re.compile(r"-?[0-9]{1,10}")
_LEAP_SECOND = re.compile(r"(.{17})60(.*)", re.DOTALL)
_RESERVED = ("data", "data_base64", "datacontenttype")
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_encode = msgspec.json.Encoder().encode


class CloudEvent(NamedTuple):
    """An event: its attributes, and its data as bytes."""

    attributes: dict[str, str]
    """By name, as text; without `datacontenttype`."""
    content_type: str | None
    """What the data is: the attribute `datacontenttype`."""
    data: bytes | None
    """None if it has none."""
    types: dict[str, str] = {}  # noqa: RUF012 never changed
    """`boolean` or `integer` by name, of the attributes that are no texts."""


def to_binary(value: bytes | None, headers: Headers | None) -> tuple[bytes | None, Headers]:
    """An event from structured to binary mode: its data as the value, None if it has none, attributes as headers.

    One that is in binary mode already, as every event that came over HTTP, stays as it is.

    >>> to_binary(b'{"specversion":"1.0","id":"1","source":"/a","type":"t","data":[1]}', None)
    ... # doctest: +NORMALIZE_WHITESPACE
    (b'[1]', {'ce_specversion': b'1.0', 'ce_id': b'1', 'ce_source': b'/a', 'ce_type': b't',
              'content-type': b'application/json'})
    """
    if headers and any(f"{prefix}specversion" in headers for prefix in PREFIXES):
        event = stored_event(value, headers)
        if event.content_type is None or not event.content_type.startswith(STRUCTURED.partition(";")[0]):
            return value, headers
    event = parse_structured(value or b"")
    kept = without_headers(headers, _tells_event)
    return event.data, replaced_headers(kept, event_headers(event))


def to_structured(value: bytes | None, headers: Headers | None) -> tuple[bytes, Headers]:
    """An event from binary to structured mode."""
    event = stored_event(value, headers)
    kept = without_headers(headers, _tells_event)
    return encode_event(event), replaced_headers(kept, {CONTENT_TYPE: STRUCTURED.encode()})


def parse_structured(content: bytes) -> CloudEvent:
    """The event that JSON describes; raises InvalidEvent for anything else."""
    try:
        content.decode()
        members = _decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidEvent("the event is no JSON object") from error
    attributes, types = {}, {}
    content_type = None
    for name, raw in members.items():
        if name in ("data", "data_base64") or bytes(raw) == b"null":  # null: the event does not have it
            continue
        text, kind = _text(name, raw)
        if name == "datacontenttype":
            content_type = text
            continue
        attributes[name] = text
        if kind:
            types[name] = kind
    check_attributes(attributes, content_type)
    if content_type is None and "data" in members:
        content_type = _JSON  # what the JSON format says about data whose type it does not name
    return CloudEvent(attributes, content_type, _data(members, content_type), types)


def event_headers(event: CloudEvent) -> dict[str, bytes | None]:
    """The headers of a message that is an event in binary mode."""
    told: dict[str, bytes | None] = {f"{PREFIX}{name}": text.encode() for name, text in event.attributes.items()}
    if event.content_type is not None:
        told[CONTENT_TYPE] = event.content_type.encode()
    if event.types:
        told[TYPES] = ",".join(f"{name}={kind}" for name, kind in event.types.items()).encode()
    return told


def stored_event(value: bytes | None, headers: Headers | None) -> CloudEvent:
    """The event that a message in binary mode is; raises InvalidEvent for anything else."""
    attributes: dict[str, str] = {}
    types: dict[str, str] = {}
    content_type = None
    for name, content in (headers or {}).items():
        if name.startswith(PREFIXES):
            attributes[name[len(PREFIX) :]] = _header(name, content)
        elif name.lower() == CONTENT_TYPE:
            content_type = _header(name, content)
        elif name == TYPES:
            types = dict(pair.split("=", 1) for pair in _header(name, content).split(",") if "=" in pair)
    check_attributes(attributes, content_type)
    return CloudEvent(attributes, content_type, value, types)


def encode_event(event: CloudEvent) -> bytes:
    """The event as JSON, with its required attributes first and its data last."""
    attributes, content_type, data, types = event
    members: dict[str, Any] = {name: attributes[name] for name in REQUIRED}
    if content_type is not None:
        members["datacontenttype"] = content_type
    members |= attributes
    for name, kind in types.items():
        if name in members and name not in REQUIRED:
            members[name] = _typed(members[name], kind)
    if data is not None:
        members |= _data_member(data, content_type)
    return _encode(members)


def check_attributes(attributes: Mapping[str, str], content_type: str | None = None) -> None:
    """Refuse attributes that no event may have, or lacks."""
    for name in REQUIRED:
        if not attributes.get(name):
            raise InvalidEvent(f"the attribute {name} is missing or empty; every event has one", attribute=name)
    if attributes["specversion"] != "1.0":
        raise InvalidEvent("the attribute specversion is not 1.0, the only version there is", attribute="specversion")
    for name, text in attributes.items():
        if not _ATTRIBUTE.fullmatch(name) or name in _RESERVED:
            raise InvalidEvent("the name of an attribute has other characters than a to z and digits")
        if _FORBIDDEN.search(text) or (not text and name in _NOT_EMPTY):
            raise InvalidEvent(f"the attribute {name} is empty, or has a control character", attribute=name)
    if content_type is not None and not _MEDIA_TYPE.fullmatch(content_type):
        raise InvalidEvent(
            "the attribute datacontenttype is no media type, such as text/plain", attribute="datacontenttype"
        )
    if "time" in attributes:
        event_time_us(attributes["time"])


def event_time_us(text: str) -> int:
    """Microseconds since 1970 of the attribute `time`; a leap second counts as the second before it.

    >>> event_time_us("2023-11-14T22:13:20Z")
    1700000000000000
    """
    leap = _LEAP_SECOND.fullmatch(text)
    try:
        moment = msgspec.convert(f"{leap[1]}59{leap[2]}" if leap else text, Annotated[datetime, msgspec.Meta(tz=True)])
        found = time_us(moment)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidEvent(
            "the attribute time is not like 2030-01-01T09:00:00Z (RFC 3339 with a time zone)", attribute="time"
        ) from error
    if not TIMESTAMP_US_MIN <= found <= TIMESTAMP_US_MAX:
        raise InvalidEvent("the attribute time is too early or too late to be stored", attribute="time")
    return found


def is_json_type(content_type: str | None) -> bool:
    """Whether data of this content type is JSON, as it is by default."""
    return content_type is None or _JSON_TYPE.fullmatch(content_type) is not None


def _tells_event(name: str) -> bool:
    return name.startswith(PREFIXES) or name == TYPES or name.lower() == CONTENT_TYPE


def _text(name: str, raw: msgspec.Raw) -> tuple[str, str]:
    """An attribute as the text of a header, and its type if it is no text."""
    content = _decode_any(raw)
    if isinstance(content, bool):
        return ("true" if content else "false"), "boolean"
    if isinstance(content, int) and -(1 << 31) <= content < 1 << 31:
        return str(content), "integer"
    if not isinstance(content, str):
        raise InvalidEvent(f"the attribute {name[:100]} is neither text, nor a number of 32 bits, nor true or false")
    return content, ""


def _typed(text: str, kind: str) -> Any:
    """The text of an attribute as what it was; as it is where it cannot be that."""
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    return int(text) if kind == "integer" and _INTEGER.fullmatch(text) else text


def _header(name: str, content: bytes | None) -> str:
    try:
        return (content or b"").decode()
    except UnicodeDecodeError as error:
        raise InvalidEvent(f"the header {name[:100]} is not UTF-8") from error


def _data(members: Mapping[str, msgspec.Raw], content_type: str | None) -> bytes | None:
    """The data of an event in structured mode."""
    if "data_base64" in members:
        content = _decode_any(members["data_base64"])
        if "data" in members or not isinstance(content, str):
            raise InvalidEvent("data_base64 is no text, or there is data besides")
        try:
            return b64decode(content, validate=True)
        except ValueError as error:
            raise InvalidEvent("data_base64 is not Base64") from error
    if "data" not in members:
        return None
    if is_json_type(content_type):
        return bytes(members["data"]).strip()
    content = _decode_any(members["data"])
    if not isinstance(content, str):
        raise InvalidEvent("data is not text, and datacontenttype is not JSON")
    return content.encode()


def _data_member(value: bytes, content_type: str | None) -> dict[str, Any]:
    """The member of an event that has its data: as JSON, as text, or in Base64."""
    if is_json_type(content_type):
        try:
            value.decode()
            _check_json(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {"data_base64": b64encode(value).decode()}
        return {"data": msgspec.Raw(value)}
    if content_type is not None and _TEXT_TYPE.fullmatch(content_type):
        try:
            return {"data": value.decode()}
        except UnicodeDecodeError:
            return {"data_base64": b64encode(value).decode()}
    return {"data_base64": b64encode(value).decode()}
