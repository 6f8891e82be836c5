"""The message as a reader sees it."""

from collections.abc import Mapping

import msgspec

from headrace.model.errors import MessageTooLarge
from headrace.model.representation import described_fields

Headers = Mapping[str, bytes]
"""A message's headers: names to bytes, by convention UTF-8 text."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message of a log. Times are microseconds since 1970, UTC."""

    offset: int
    value: bytes | None
    """None marks the key as deleted."""
    timestamp: int
    key: bytes | None = None
    headers: Headers | None = None
    due: int | None = None
    """Not to be delivered before."""
    priority: int | None = None
    expires: int | None = None
    """Not to be delivered after."""

    def __repr__(self) -> str:
        return described_fields(self)


def message_size(value: bytes | None, key: bytes | None = None, headers: Headers | None = None) -> int:
    """Return the size of a message: how many bytes its value, key and headers have.

    >>> message_size(b"value", b"key", {"name": b"text"})
    16
    """
    size = len(value or b"") + len(key or b"")
    return size + header_bytes(headers) if headers else size


def header_bytes(headers: Headers | None) -> int:
    """Return how many bytes the names and values of headers have."""
    return sum(len(name.encode()) + len(text) for name, text in (headers or {}).items())


def check_message_bytes(size: int, bytes_max: int, topic: str = "") -> None:
    """Refuse a message that is larger than the limit, which is the topic's if one is named."""
    if size > bytes_max:
        raise MessageTooLarge.of(size, bytes_max, topic)
