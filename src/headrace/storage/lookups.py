"""A cache of the positions of offsets, shared by all readers, so that only the first reader at an offset searches."""

import weakref
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from headrace.storage.segment import Segment

K = TypeVar("K")
V = TypeVar("V")


class RecentLookups(Generic[K, V]):
    """A cache of recently used values: at least `limit` of them, at most twice as many.

    There is no lock. Threads that race can lose a value, which is then looked up again.
    """

    __slots__ = ("_limit", "_new", "_old")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Two generations: values in use move to the new one, and when that is full, the old one is dropped.
        self._new: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The value of a key, if it is cached."""
        found = self._new.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Add or replace the value of a key."""
        if len(self._new) >= self._limit:
            self._old, self._new = self._new, {}
        self._new[key] = value

    def __len__(self) -> int:
        return len(self._new) + len(self._old)


Position = tuple["weakref.ref[Segment]", int, int]
"""Where to begin reading for an offset: the segment, the position in it, and the base offset of the batch there.

Segments are referred to weakly, so that the cache keeps no removed or replaced segment.
"""


class LookupSpan(NamedTuple):
    """A run of whole, adjacent batches."""

    first_offset: int
    next_offset: int
    position: int
    length: int


class Lookups:
    """The positions and spans found recently in the logs that share this cache.

    Keys hold the id of a segment; the weak references tell whether the id has been reused.
    """

    __slots__ = ("positions", "spans")

    def __init__(self, positions_max: int, spans_max: int) -> None:
        self.positions: RecentLookups[tuple[int, int], Position] = RecentLookups(positions_max)
        self.spans: RecentLookups[tuple[int, int, int], tuple[weakref.ref[Segment], LookupSpan, int | None]] = (
            RecentLookups(spans_max)
        )

    def position(self, segment: "Segment", offset: int) -> tuple[int, int] | None:
        """The position at which to read an offset in a segment, with the base offset there; None if unknown."""
        found = self.positions.get((id(segment), offset))
        return found[1:] if found is not None and found[0]() is segment else None

    def add_position(self, segment: "Segment", offset: int, position: int, base_offset: int) -> None:
        """Cache where an offset is."""
        self.positions.put((id(segment), offset), (weakref.ref(segment), position, base_offset))

    def span(self, segment: "Segment", offset: int, bytes_max: int, until: int) -> LookupSpan | None:
        """The span that an earlier reader got for the same arguments, if it is still the right answer."""
        found = self.spans.get((id(segment), offset, bytes_max))
        if found is None or found[0]() is not segment:
            return None
        _, span, stopped_at = found
        return span if span.next_offset <= until and stopped_at in (None, until) else None

    def add_span(
        self, segment: "Segment", offset: int, bytes_max: int, span: LookupSpan, stopped_at: int | None
    ) -> None:
        """Cache what a reader got.

        `stopped_at` is the end offset at which it had to stop; None if it stopped for a reason that appends do not
        change.
        """
        self.spans.put((id(segment), offset, bytes_max), (weakref.ref(segment), span, stopped_at))
