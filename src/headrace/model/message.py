"""The message as a reader sees it."""

from collections.abc import Mapping

import msgspec

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
