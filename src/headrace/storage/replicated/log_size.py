"""How large the log of a shard is behind its last checkpoint, which earlier owners have stored, or this one."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from headrace.storage.replicated.keys import Position

PART_BYTES = 16 << 20
"""Sizes are kept for parts of the log of about this size."""
_PARTS_MAX = 1024


class LogPart(NamedTuple):
    """A part of the log, without gaps behind the part before."""

    epoch: int
    objects: int
    """With `epoch` the position at its end."""
    bytes: int


class LogSize:
    """The sizes of the last parts of the log that a follower has applied: 16 GiB, or since its copy was made anew."""

    def __init__(self, parts: Iterable[LogPart] = ()) -> None:
        self._parts = deque(parts, _PARTS_MAX)

    @property
    def parts(self) -> list[LogPart]:
        """The parts, in order, to make another of."""
        return list(self._parts)

    def add(self, end: Position, size_bytes: int) -> None:
        """Note the next objects: so many bytes, up to a position."""
        if self._parts and self._parts[-1].bytes < PART_BYTES:
            size_bytes += self._parts.pop().bytes
        self._parts.append(LogPart(*end, size_bytes))

    def behind(self, position: Position) -> int:
        """How many bytes follow a position, up to one part too many; fewer if not all parts are known."""
        return sum(part.bytes for part in self._parts if (part.epoch, part.objects) > position)
