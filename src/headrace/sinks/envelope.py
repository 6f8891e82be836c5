"""The JSON form in which the built-in sinks deliver a message."""

import base64
from typing import Any

import msgspec

from headrace.model.headers import header_pairs
from headrace.model.message import Message


def envelope(message: Message) -> dict[str, Any]:
    """A message as a JSON object: text as text, other bytes in Base64 under a name that ends in `_base64`.

    >>> envelope(Message(7, b"3 apples", 1_000_000, key=b"ann", headers={"lang": b"en"}))["value"]
    '3 apples'
    """
    content: dict[str, Any] = {
        "topic": getattr(message, "topic", ""),
        "partition": getattr(message, "partition", 0),
        "offset": message.offset,
        "timestamp": message.timestamp,
    }
    content |= _told("key", message.key)
    content |= _told("value", message.value)
    content["headers"] = [[name, _header(data)] for name, data in header_pairs(message.headers)]
    return content


def envelope_bytes(message: Message) -> bytes:
    """The envelope of a message, encoded."""
    return msgspec.json.encode(envelope(message))


def _told(name: str, data: bytes | None) -> dict[str, Any]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _header(data: bytes | None) -> Any:
    """A header's value: text, null, or an object with `base64`."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
