"""Where offsets were found lately, shared by all readers, so that only the first one at an offset searches for it."""

import weakref
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from headrace.storage.segment import Segment

K = TypeVar("K")
V = TypeVar("V")


class RecentLookups(Generic[K, V]):
    """Keeps the values used last: `limit` of them at least, and twice as many at most.

    There is no lock. Threads that come in each other's way can lose a value, which is then looked up again.
    """

    __slots__ = ("_limit", "_new", "_old")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Two generations: what is used moves to the new one, and when that is full, the old one goes.
        self._new: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The value kept for a key."""
        found = self._new.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Keep a value, in place of an earlier one."""
        if len(self._new) >= self._limit:
            self._old, self._new = self._new, {}
        self._new[key] = value

    def __len__(self) -> int:
        return len(self._new) + len(self._old)


Position = tuple["weakref.ref[Segment]", int, int]
"""Where to begin reading for an offset: in which segment, at which position, and the offset that is due there.

That is less than the one looked up if that is inside a batch. Segments are referred to weakly: what was removed or
replaced is not kept for this.
"""


class LookupSpan(NamedTuple):
    """Whole batches side by side."""

    first_offset: int
    next_offset: int
    position: int
    length: int


class Lookups:
    """The positions and spans found lately in the logs that share this.

    Segments are told apart by their ids in the keys, and by the weak references: an id may be used again.
    """

    __slots__ = ("positions", "spans")

    def __init__(self, positions_max: int, spans_max: int) -> None:
        self.positions: RecentLookups[tuple[int, int], Position] = RecentLookups(positions_max)
        self.spans: RecentLookups[tuple[int, int, int], tuple[weakref.ref[Segment], LookupSpan, int | None]] = (
            RecentLookups(spans_max)
        )

    def position(self, segment: "Segment", offset: int) -> tuple[int, int] | None:
        """Where an offset was found in a segment: a position, and the offset that is due there, of the same batch."""
        found = self.positions.get((id(segment), offset))
        return found[1:] if found is not None and found[0]() is segment else None

    def add_position(self, segment: "Segment", offset: int, position: int, base_offset: int) -> None:
        """Remember where an offset is."""
        self.positions.put((id(segment), offset), (weakref.ref(segment), position, base_offset))

    def span(self, segment: "Segment", offset: int, bytes_max: int, until: int) -> LookupSpan | None:
        """What a reader got who asked the same, if one who asks now gets the same."""
        found = self.spans.get((id(segment), offset, bytes_max))
        if found is None or found[0]() is not segment:
            return None
        _, span, stopped_at = found
        return span if span.next_offset <= until and stopped_at in (None, until) else None

    def add_span(
        self, segment: "Segment", offset: int, bytes_max: int, span: LookupSpan, stopped_at: int | None
    ) -> None:
        """Remember what a reader got.

        It had to stop at an offset; or at None for another reason, which stays whatever is appended.
        """
        self.spans.put((id(segment), offset, bytes_max), (weakref.ref(segment), span, stopped_at))
