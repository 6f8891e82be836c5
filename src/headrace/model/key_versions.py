"""Versions of keys: the number of a message among those of its key, and the request that reads one key's messages."""

from headrace.model.headers import Headers, replaced_headers
from headrace.model.kinds import Kind
from headrace.model.limits import HISTORY_MESSAGES_MAX
from headrace.model.request import Answer, Permission, Request, Resource, Verb, declare

VERSION_HEADER = "headrace-version"
"""The header with a message's version, in decimal digits; the broker writes it, and replaces one that a client sent."""
VERSION_HEADER_BYTES = 40
"""At most what the header adds to a stored message."""
VERSION_MAX = (1 << 32) - 2


def version_in(headers: Headers | None) -> int | None:
    """The version that headers tell; None if they tell none.

    >>> version_in({"headrace-version": b"7"}), version_in({"lang": b"en"})
    (7, None)
    """
    text = None if headers is None else headers.get(VERSION_HEADER)
    return int(text) if text and len(text) <= 10 and text.isdigit() else None


def with_version(headers: Headers | None, version: int) -> Headers:
    """The headers with a version in place of any that they had."""
    if headers is None:
        return {VERSION_HEADER: b"%d" % version}
    return replaced_headers(headers, {VERSION_HEADER: b"%d" % version})


class HistoryPage(Answer):
    """The answer to History, with the messages in one batch in the body; without a body if there are none."""

    offsets: list[int]
    versions: list[int]
    """Rising; what compaction removed is missing."""
    partition: int
    topic_id: int
    next_version: int = 0
    """How many messages of the key were published: the version of the next one."""
    following: int | None = None
    """The version from which the next page goes on; None after the last page."""


@declare(Kind.HISTORY, Permission(Verb.CONSUME, Resource.TOPIC, "topic"))
class History(Request[HistoryPage]):
    """Read messages of one key in the order of their versions; of a topic with key_versions."""

    topic: str
    key: bytes
    start_version: int = 0
    messages_max: int = HISTORY_MESSAGES_MAX
    bytes_max: int = 1 << 20
