"""Reading a log: by offset, by time, as batches or as byte ranges; the same for every kind of log."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

from headrace.model.batch import FLAG_LOST, Batch
from headrace.model.errors import CorruptBatch, InvalidBatch, LogNotFound, OffsetOutOfRange
from headrace.storage.index import Index
from headrace.storage.lookups import Lookups, LookupSpan
from headrace.storage.recovery import Findings
from headrace.storage.scan import Damage, scan
from headrace.storage.segment import Segment, SegmentReplaced


class ByteRange(NamedTuple):
    """Adjacent whole batches, ready for a socket."""

    first_offset: int
    """Of the first batch, which may begin before the offset asked for."""
    next_offset: int
    view: memoryview
    position: int
    length: int


class LogReader:
    """Reads a log. Readers hold no lock and never make the writer wait."""

    __slots__ = ("_lookups",)

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups

    @property
    def first_offset(self) -> int:
        """The oldest offset that can be read."""
        raise NotImplementedError

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        """The size of all batches in bytes."""
        raise NotImplementedError

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments now, oldest first."""
        return self._layout()

    @property
    def writer_at_work(self) -> bool | None:
        """Whether a process has the log open for writing; None if that cannot be known."""
        raise NotImplementedError

    def verify(self, progress: Callable[[int], None] | None = None) -> Findings:
        """Check every byte of the log and change nothing; `progress` is called with the number of bytes checked."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Look for messages that another process has appended since; nothing to do where they are seen anyway."""

    def after_fork(self) -> None:
        """In a forked child: replace locks that threads of the parent may hold."""

    def close(self) -> None:
        """Release the files."""
        raise NotImplementedError

    def _layout(self) -> Sequence[Segment]:
        """The segments now, oldest first; a new sequence whenever they change."""
        raise NotImplementedError

    def batches(
        self, offset: int, *, until: int | None = None, skip_corrupt: bool = False, empty: bool = False
    ) -> Iterator[Batch]:
        """The batches from the one with `offset` to the end as it is now, checked whole.

        Damaged messages raise CorruptBatch, which holds the next offset to read, or are skipped. Batches without
        messages are left out unless those that are `empty` are wanted too.
        """
        self._check(offset)
        end = self.next_offset if until is None else min(until, self.next_offset)
        for position, item, segment in self._from(offset, end):
            if isinstance(item, Damage) or item.flags & FLAG_LOST:
                if not skip_corrupt:
                    raise _corrupt(item, segment, position)
            elif item.count or empty:
                yield item

    def byte_range(self, offset: int, bytes_max: int, until: int | None = None) -> ByteRange | None:
        """Whole batches from the one with `offset` on, of one segment, at least one; None at the end of the log.

        They end before `until`, the end of a batch, if that is given, and before damage. Damage at the offset asked for
        raises CorruptBatch, which holds the next offset to read.

        Only headers are verified: the decoder of a batch verifies the rest.
        """
        self._check(offset)
        end = self.next_offset if until is None else min(until, self.next_offset)
        if offset >= end:
            return None
        layout = self._layout()
        number = _segment_number(layout, offset)
        found = self._lookups.span(layout[number], offset, bytes_max, end) if number >= 0 else None
        if found is not None:
            # Unless its file is gone or replaced: then the search below finds the current one.
            with suppress(SegmentReplaced, LogNotFound, InvalidBatch):
                return _byte_range(layout[number], found)
        return self._find_range(offset, bytes_max, end)

    def _find_range(self, offset: int, bytes_max: int, end: int) -> ByteRange:
        asked = offset
        stopped_at: int | None = end
        begin = length = first = 0
        segment: Segment | None = None
        for position, item, found_in in self._from(offset, end, verify=False):
            if segment is not None and (found_in is not segment or position + item.length - begin > bytes_max):
                stopped_at = None
                self._lookups.add_position(segment, offset, begin + length, offset)
                break
            if isinstance(item, Damage) or item.flags & FLAG_LOST:
                if segment is None:
                    raise _corrupt(item, found_in, position)
                break
            if segment is None:
                segment, begin, first = found_in, position, item.base_offset
            length = position + item.length - begin
            offset = item.next_offset
        assert segment is not None
        found = LookupSpan(first, offset, begin, length)
        self._lookups.add_span(segment, asked, bytes_max, found, stopped_at)
        return _byte_range(segment, found)

    def find_time(self, time_us: int) -> int:
        """The offset of the first message with this timestamp or a later one; next_offset when there is none."""
        layout = self._layout()
        if not layout:
            return self.next_offset
        # The latest timestamp so far rises from segment to segment even where the segments' own do not.
        latest = list(accumulate((segment.time_max for segment in layout[:-1]), max))
        segment = layout[bisect_left(latest, time_us)]
        index = segment.index()
        start = index.offsets[index.at_time(time_us)] if index.positions else segment.base_offset
        first = self.first_offset
        for batch in self.batches(max(start, first), skip_corrupt=True):
            if batch.time_max >= time_us:
                with suppress(InvalidBatch):  # it cannot be decoded, so it is not found by time
                    for message in batch.messages():
                        if message.timestamp >= time_us and message.offset >= first:
                            return message.offset
        return self.next_offset

    def _from(self, offset: int, end: int, *, verify: bool = True) -> Iterator[tuple[int, Batch | Damage, Segment]]:
        """Batches and damage from an offset on, before `end`, with position and segment."""
        while offset < end:
            layout = self._layout()
            number = _segment_number(layout, offset)
            if number < 0:
                raise OffsetOutOfRange(f"offset {offset} is before the first one, {self.first_offset}")
            segment = layout[number]
            stop = min(end, layout[number + 1].base_offset) if number + 1 < len(layout) else end
            try:
                after = 0
                for position, item in self._scan(segment, offset, stop, verify):
                    if isinstance(item, Damage):
                        if self._layout() is not layout:
                            break  # the segment was replaced or removed while we read it
                        segment.report_damage(position, item.reason)
                    if item.next_offset > offset:
                        offset = item.next_offset
                        after = position + item.length
                        yield position, item, segment
                if after and not isinstance(item, Damage):  # whose end is only a guess
                    self._lookups.add_position(segment, offset, after, offset)
            except (SegmentReplaced, LogNotFound):
                if not self._stale(segment, layout):
                    raise
            self._check(offset)

    def _scan(self, segment: Segment, offset: int, stop: int, verify: bool) -> Iterator[tuple[int, Batch | Damage]]:
        position, base = self._lookups.position(segment, offset) or self._search(segment, offset, stop)
        return scan(segment, position, base, segment.size(), start=offset, stop=stop, verify=verify)

    def _search(self, segment: Segment, offset: int, stop: int) -> tuple[int, int]:
        """The position of the batch with an offset, and its base offset; cached for other readers."""
        index = self._index(segment, offset)
        entry = index.at_offset(offset)
        if index.positions:
            position, base = index.positions[entry], index.offsets[entry]
        else:
            position, base = segment.begin, segment.base_offset
        for at, item in scan(segment, position, base, segment.size(), start=offset, stop=stop, verify=False):
            if item.next_offset > offset:
                if isinstance(item, Damage):
                    break  # the caller scans from the index entry on, and reports it
                self._lookups.add_position(segment, offset, at, item.base_offset)
                return at, item.base_offset
        return position, base

    def _stale(self, segment: Segment, layout: Sequence[Segment]) -> bool:  # noqa: ARG002
        """Whether a segment whose file is gone or replaced can be looked up again."""
        return self._layout() is not layout

    def _index(self, segment: Segment, offset: int) -> Index:  # noqa: ARG002
        """A segment's index, which covers an offset."""
        return segment.index()

    def _check(self, offset: int) -> None:
        first, following = self.first_offset, self.next_offset
        if not first <= offset <= following:
            has = f"offsets {first} to {following - 1}" if first < following else f"nothing before offset {following}"
            raise OffsetOutOfRange(f"there is no offset {offset}; the log has {has}")


def _segment_number(layout: Sequence[Segment], offset: int) -> int:
    """The number of the segment that holds an offset; -1 if it is before all of them."""
    if layout and layout[-1].base_offset <= offset:  # nearly always: most readers are near the end
        return len(layout) - 1
    return bisect_right(layout, offset, key=lambda segment: segment.base_offset) - 1


def _byte_range(segment: Segment, found: LookupSpan) -> ByteRange:
    first_offset, next_offset, begin, length = found
    view = segment.view(begin + length)[begin : begin + length]
    return ByteRange(first_offset, next_offset, view, begin, length)


def _corrupt(item: Batch | Damage, segment: Segment, position: int) -> CorruptBatch:
    reason = item.reason if isinstance(item, Damage) else "lost, as an earlier repair or upgrade found"
    return CorruptBatch(item.base_offset, item.next_offset, segment.path, position, reason)
