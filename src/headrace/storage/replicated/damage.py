"""Finds damage in the segments of a shard by the checksums of their batches."""

from collections.abc import Callable, Iterator
from contextlib import suppress

from headrace.model.batch import HEADER_BYTES, parse
from headrace.model.errors import InvalidBatch
from headrace.storage import meta
from headrace.storage.disk import Disk
from headrace.storage.scan import ByteSource, Damage, find_log_id, scan_copied
from headrace.storage.segment import DATA_AT, offset_in_name, read_header

_RECORDS = ("format", meta.NAME)
Read = Callable[[int, int], bytes]
"""Reads so many bytes from a position on; fewer at the end."""


class SegmentBytes(ByteSource):
    """The bytes of a segment that is not open as one."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.log_id = 0

    def view(self, end: int) -> memoryview:
        """A copy of the bytes up to `end`."""
        return memoryview(self._read(0, end))

    def read(self, position: int, length: int) -> bytes:
        """A copy of some bytes; fewer at the end."""
        return self._read(position, length)


def is_segment(path: str) -> bool:
    """Whether a file is a segment of a log, by its name, or is about to become one."""
    return _base_offset(path) is not None


def is_record(path: str) -> bool:
    """Whether a file is the format file of a data directory, or the record of a log, by its name."""
    return path.rpartition("/")[2] in _RECORDS


def _base_offset(path: str) -> int | None:
    return offset_in_name(path.rpartition("/")[2].removesuffix(".tmp"))


def scan_segment(path: str, read: Read, size: int, start: int = 0) -> Iterator[tuple[int, int, str]]:
    """Begin, end and damage of every part of a segment of so many bytes; the damage is empty for a good batch.

    :param start: the position of a batch to begin with; 0 for all of them.
    """
    base = _base_offset(path)
    assert base is not None
    if not size:
        return  # it is being created
    source = SegmentBytes(read)
    header = read_header(read(0, DATA_AT), path)
    if header is None or header.base_offset != base:
        yield 0, DATA_AT, "the header of the segment is damaged"
        source.log_id = find_log_id(source, DATA_AT, size) or 0
    else:
        source.log_id = header.log_id
    if start:
        with suppress(InvalidBatch):  # which the scan reports
            base = parse(memoryview(read(start, HEADER_BYTES)), whole=False).base_offset
    for position, item in scan_copied(source, start or DATA_AT, base, size):
        yield position, position + item.length, item.reason if isinstance(item, Damage) else ""


def damaged_ranges(disk: Disk, path: str) -> list[range]:
    """The damaged ranges of a segment on a disk, and the byte behind its last batch, where more may be missing."""
    file = disk.open(path)
    found, last = [], DATA_AT
    for begin, end, damage in scan_segment(path, lambda at, length: disk.read(file, at, length), disk.size(file)):
        if damage:
            found.append(range(begin, end))
        else:
            last = end
    return [*found, range(last, last + 1)]
