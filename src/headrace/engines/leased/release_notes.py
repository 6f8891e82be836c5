"""Why messages were released: the last few notes of each message."""

from collections.abc import Sequence
from typing import NamedTuple

_NOTES_KEPT = 5
_NOTE_CHARS = 200


class ReleaseNote(NamedTuple):
    """Why a message was released, when and by whom."""

    time_us: int
    holder: str
    reason: str


def noted(notes: dict[int, list[ReleaseNote]], offsets: Sequence[int], note: ReleaseNote) -> None:
    """Add a note to those of some messages."""
    for offset in offsets:
        earlier = [each._replace(reason=each.reason[-_NOTE_CHARS:]) for each in notes.get(offset, ())]
        notes[offset] = [*earlier, note][-_NOTES_KEPT:]
