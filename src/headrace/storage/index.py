"""The sparse index of a segment: offset to position, and time to offset. It can always be rebuilt."""

import struct
from array import array
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from crc32c import crc32c

from headrace.storage.disk import Disk

SUFFIX = ".idx"
_MAGIC = b"HRINDEX1"
# magic log_id file_id base_offset | position next_offset time_max append_time | entries entries_crc
_HEADER = struct.Struct("<8sIIQQQqqII")
_CRC = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CRC.size
_ENTRY_BYTES = 24


class IndexSummary(NamedTuple):
    """The header of an index: it certifies that the first `end` bytes of the segment are synced, and what they hold."""

    log_id: int
    file_id: int
    base_offset: int
    end: int
    next_offset: int
    time_max: int
    append_time: int


class Index:
    """Entries, one every so many bytes: the offset and position of a batch, and the latest timestamp before it."""

    __slots__ = ("offsets", "positions", "times")

    def __init__(self) -> None:
        self.offsets = array("Q")
        self.positions = array("Q")
        self.times = array("q")

    def add(self, offset: int, position: int, time_before: int) -> None:
        """Add an entry; offsets and positions rise, times do not fall."""
        # The position is added last, and the number of positions counts: a reader in another thread sees whole entries
        # only, and the rest of an interrupted call is removed.
        count = len(self.positions)
        del self.times[count:], self.offsets[count:]
        self.times.append(time_before)
        self.offsets.append(offset)
        self.positions.append(position)

    def at_offset(self, offset: int) -> int:
        """The number of the last entry at or before the offset."""
        return max(bisect_right(self.offsets, offset, 0, len(self.positions)) - 1, 0)

    def at_time(self, time_us: int) -> int:
        """The number of the last entry before which no message has that time or a later one."""
        return max(bisect_left(self.times, time_us, 0, len(self.positions)) - 1, 0)

    def cut(self, position: int) -> "Index":
        """A copy with the entries below a position only."""
        kept = Index()
        count = bisect_left(self.positions, position)
        kept.offsets, kept.positions, kept.times = self.offsets[:count], self.positions[:count], self.times[:count]
        return kept

    def save(self, disk: Disk, path: str, summary: IndexSummary) -> None:
        """Write the index; the segment must be on the disk up to the summary's end already."""
        kept = self.cut(summary.end)
        entries = kept.offsets.tobytes() + kept.positions.tobytes() + kept.times.tobytes()
        header = _HEADER.pack(_MAGIC, *summary, len(kept.offsets), crc32c(entries))
        temporary = path + ".tmp"
        disk.remove(temporary, sync=False)
        file = disk.open(temporary, create=True)
        disk.write(file, 0, header + _CRC.pack(crc32c(header)) + entries)
        # Nothing is synced: an index lost or torn in a crash is rebuilt.
        disk.rename(temporary, path, sync=False)


def load_summary(disk: Disk, path: str) -> IndexSummary | None:
    """The header of the index at the path; None if it is missing or damaged."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    header = disk.read(file, 0, _HEADER_BYTES)
    return _summary(header)


def load(disk: Disk, path: str) -> tuple[IndexSummary, Index] | None:
    """The index at the path with its header; None if it is missing or damaged."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    content = disk.read(file, 0, disk.size(file))
    summary = _summary(content)
    if summary is None:
        return None
    entries, entries_crc = _HEADER.unpack_from(content)[-2:]
    body = memoryview(content)[_HEADER_BYTES:]
    if len(body) != entries * _ENTRY_BYTES or crc32c(body) != entries_crc:
        return None
    index = Index()
    column = entries * 8
    index.offsets.frombytes(body[:column])
    index.positions.frombytes(body[column : 2 * column])
    index.times.frombytes(body[2 * column :])
    return summary, index


def _summary(content: bytes) -> IndexSummary | None:
    if len(content) < _HEADER_BYTES:
        return None
    header = content[: _HEADER.size]
    magic, *fields, _, _ = _HEADER.unpack(header)
    if magic != _MAGIC or _CRC.unpack_from(content, _HEADER.size)[0] != crc32c(header):
        return None
    return IndexSummary(*fields)
