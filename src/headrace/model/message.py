"""The message as a reader sees it."""

import msgspec

from headrace.model.errors import MessageTooLarge
from headrace.model.headers import HeaderPair, Headers, header_bytes, header_pairs
from headrace.model.key_versions import version_in
from headrace.model.representation import described_fields


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message of a log. Times are microseconds since 1970, UTC."""

    offset: int
    value: bytes | None
    """None marks the key as deleted."""
    timestamp: int
    key: bytes | None = None
    headers: Headers | None = None
    """A mapping of names to bytes or None, by convention UTF-8 text; the last value of a name that repeats."""
    due: int | None = None
    """Not to be delivered before."""
    priority: int | None = None
    expires: int | None = None
    """Not to be delivered after."""

    @property
    def version(self) -> int | None:
        """How many messages of its key come before it, in a topic with key_versions; None elsewhere."""
        return None if self.key is None else version_in(self.headers)

    @property
    def header_list(self) -> list[HeaderPair]:
        """All headers in the order in which they were published, with names that repeat."""
        return header_pairs(self.headers)

    def __repr__(self) -> str:
        return described_fields(self)


def message_size(value: bytes | None, key: bytes | None = None, headers: Headers | None = None) -> int:
    """Return the size of a message: how many bytes its value, key and headers have.

    >>> message_size(b"value", b"key", {"name": b"text"})
    16
    """
    size = len(value or b"") + len(key or b"")
    return size + header_bytes(headers) if headers else size


def check_message_bytes(size: int, bytes_max: int, topic: str = "") -> None:
    """Refuse a message that is larger than the limit, which is the topic's if one is named."""
    if size > bytes_max:
        raise MessageTooLarge.of(size, bytes_max, topic)
