"""CloudEvents 1.0: events as JSON (structured mode), and as a value with attributes in headers (binary mode)."""

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.model.headers import Headers, replaced_headers, without_headers

PREFIX = "ce_"
"""What the names of headers with attributes begin with, as in the Kafka binding."""
CONTENT_TYPE = "content-type"
STRUCTURED = "application/cloudevents+json; charset=UTF-8"
"""The content type of an event in structured mode."""
REQUIRED = ("specversion", "id", "source", "type")
"""The attributes that every event has."""
_ATTRIBUTE = re.compile(r"[a-z0-9]{1,100}")
_JSON_TYPE = re.compile(r"[^;]*[/+]json\s*(;.*)?", re.IGNORECASE | re.DOTALL)
_TEXT_TYPE = re.compile(r"\s*(text/[^;]*|[^;]*[/+]xml\s*)(;.*)?", re.IGNORECASE | re.DOTALL)
_RESERVED = ("data", "data_base64", "datacontenttype")
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class NotCloudEvent(ValueError):
    """A message is no CloudEvent; the text never repeats its content."""


def to_binary(value: bytes | None, headers: Headers | None) -> tuple[bytes | None, Headers]:
    """An event from structured to binary mode: its data as the value, None if it has none, attributes as headers.

    >>> to_binary(b'{"specversion":"1.0","id":"1","source":"/a","type":"t","data":[1]}', None)
    (b'[1]', {'ce_specversion': b'1.0', 'ce_id': b'1', 'ce_source': b'/a', 'ce_type': b't'})
    """
    try:
        _decode_any(value or b"")
        members = _decode(value or b"")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotCloudEvent("the value is no JSON object") from error
    content_type = _text("datacontenttype", members["datacontenttype"]) if "datacontenttype" in members else None
    attributes = {name: _text(name, raw) for name, raw in members.items() if name not in _RESERVED}
    check_attributes(attributes)
    told: dict[str, bytes | None] = {f"{PREFIX}{name}": text.encode() for name, text in attributes.items()}
    if content_type is not None:
        told[CONTENT_TYPE] = content_type.encode()
    kept = without_headers(headers, lambda name: name.startswith(PREFIX) or name.lower() == CONTENT_TYPE)
    return _data(members, content_type), replaced_headers(kept, told)


def to_structured(value: bytes | None, headers: Headers | None) -> tuple[bytes, Headers]:
    """An event from binary to structured mode."""
    attributes: dict[str, str] = {}
    content_type = None
    for name, content in (headers or {}).items():
        if name.startswith(PREFIX):
            attributes[name.removeprefix(PREFIX)] = _header(name, content)
        elif name.lower() == CONTENT_TYPE:
            content_type = _header(name, content)
    check_attributes(attributes)
    event: dict[str, Any] = {name: attributes.pop(name) for name in REQUIRED}
    if content_type is not None:
        event["datacontenttype"] = content_type
    event |= attributes
    if value is not None:
        event |= _data_member(value, content_type)
    kept = without_headers(headers, lambda name: name.startswith(PREFIX) or name.lower() == CONTENT_TYPE)
    return _encode(event), replaced_headers(kept, {CONTENT_TYPE: STRUCTURED.encode()})


def check_attributes(attributes: Mapping[str, str]) -> None:
    """Refuse attributes that no event may have, or lacks."""
    for name in REQUIRED:
        if not attributes.get(name):
            raise NotCloudEvent(f"the attribute {name} is missing or empty")
    if attributes["specversion"] != "1.0":
        raise NotCloudEvent("specversion is not 1.0")
    for name in attributes:
        if not _ATTRIBUTE.fullmatch(name) or name in _RESERVED:
            raise NotCloudEvent("the name of an attribute has other characters than a to z and digits")


def is_json_type(content_type: str | None) -> bool:
    """Whether data of this content type is JSON, as it is by default."""
    return content_type is None or _JSON_TYPE.fullmatch(content_type) is not None


def _text(name: str, raw: msgspec.Raw) -> str:
    """An attribute as the text of a header."""
    content = _decode_any(raw)
    if isinstance(content, bool):
        return "true" if content else "false"
    if isinstance(content, int) and -(1 << 31) <= content < 1 << 31:
        return str(content)
    if not isinstance(content, str):
        raise NotCloudEvent(f"the attribute {name[:100]} is neither text, nor a number of 32 bits, nor true or false")
    return content


def _header(name: str, content: bytes | None) -> str:
    try:
        return (content or b"").decode()
    except UnicodeDecodeError as error:
        raise NotCloudEvent(f"the header {name[:100]} is not UTF-8") from error


def _data(members: Mapping[str, msgspec.Raw], content_type: str | None) -> bytes | None:
    """The data of an event in structured mode."""
    if "data_base64" in members:
        content = _decode_any(members["data_base64"])
        if "data" in members or not isinstance(content, str):
            raise NotCloudEvent("data_base64 is no text, or there is data besides")
        try:
            return b64decode(content, validate=True)
        except ValueError as error:
            raise NotCloudEvent("data_base64 is not Base64") from error
    if "data" not in members:
        return None
    if is_json_type(content_type):
        return bytes(members["data"]).strip()
    content = _decode_any(members["data"])
    if not isinstance(content, str):
        raise NotCloudEvent("data is not text, and datacontenttype is not JSON")
    return content.encode()


def _data_member(value: bytes, content_type: str | None) -> dict[str, Any]:
    """The member of an event that has its data: as JSON, as text, or in Base64."""
    if is_json_type(content_type):
        try:
            _decode_any(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {"data_base64": b64encode(value).decode()}
        return {"data": msgspec.Raw(value)}
    if content_type is not None and _TEXT_TYPE.fullmatch(content_type):
        try:
            return {"data": value.decode()}
        except UnicodeDecodeError:
            return {"data_base64": b64encode(value).decode()}
    return {"data_base64": b64encode(value).decode()}
