"""What has been changed about messages since they were published."""

from typing import NamedTuple


class Content(NamedTuple):
    """What an edit has put in the place of a message's value and headers."""

    value: bytes | None
    headers: dict[str, bytes] | None


class EditRecord(NamedTuple):
    """All edits of a message together."""

    version: int
    due: int | None = None
    """None: as it was published."""
    priority: int | None = None
    content: Content | None = None
    deleted: bool = False
