"""Output formats of what comes by subjects: messages, requests and replies."""

import argparse
import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.message_formats import header_shown, json_headers, printable, time_text
from headrace.model.headers import Headers, header_pairs

if TYPE_CHECKING:
    from headrace.client.subjects.messages import SubjectMessage


def json_bytes(name: str, content: bytes | None) -> dict[str, Any]:
    """Return bytes as a JSON field: text, or base64 in a field whose name ends so if they are not UTF-8.

    >>> json_bytes("value", b"plum"), json_bytes("value", b"\\xff")
    ({'value': 'plum'}, {'value_base64': '/w=='})
    """
    try:
        return {name: None if content is None else content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content or b"").decode()}


def json_content(value: bytes | None, headers: Headers | None) -> dict[str, Any]:
    """Return a value and headers as JSON fields."""
    return json_bytes("value", value) | (json_headers(headers).given() if headers else {})


def message_form(given: argparse.Namespace) -> Callable[["SubjectMessage"], bytes]:
    """Return the output format that the options ask for."""
    if given.values:
        separator = b"\0" if given.null_separated else b"\n"
        return lambda message: (message.value or b"") + separator
    return _as_json if given.json else _as_text


def _as_json(message: "SubjectMessage") -> bytes:
    content: dict[str, Any] = {"subject": message.subject, "timestamp": message.timestamp}
    if message.key is not None:
        content |= json_bytes("key", message.key)
    return msgspec.json.encode(content | json_content(message.value, message.headers)) + b"\n"


def _as_text(message: "SubjectMessage") -> bytes:
    columns = [
        message.subject,
        time_text(message.timestamp),
        "-" if message.key is None else printable(message.key),
        "(deleted)" if message.value is None else printable(message.value),
        *map(header_shown, header_pairs(message.headers)),
    ]
    return "\t".join(columns).encode() + b"\n"
