"""A segment: the batches of one range of offsets, in one file or in memory."""

import logging
import re
import secrets
import struct
import threading
from typing import NamedTuple, Protocol

from crc32c import crc32c

from headrace.model.batch import Batch
from headrace.model.errors import DiskFull, InvalidBatch, TooManyFiles, UnsupportedFormat
from headrace.storage import index as indexes
from headrace.storage.disk import OpenFile
from headrace.storage.index import Index, IndexSummary
from headrace.storage.runtime import StorageRuntime
from headrace.storage.scan import ByteSource, scan

logger = logging.getLogger("headrace.storage")

SUFFIX = ".seg"
INDEX_BYTES = 64 << 10
"""The distance between index entries in bytes, or more."""
FILE_ID_UNKNOWN = 0
"""The file id of a segment whose header is damaged."""
TIME_NONE = -(1 << 63)
"""The latest timestamp of a segment without messages."""

_MAGIC = b"HRSEGMT2"
FORMER_MAGIC = b"HRSEGMT1"
"""Of segments whose batches have version 1."""
# magic log_id file_id base_offset created_us | crc over all before | zeros to 64 bytes
_HEADER = struct.Struct("<8sIIQq")
_CRC = struct.Struct("<I")
DATA_AT = 64
"""The position of the first batch."""

_NAME = re.compile(r"([0-9]{20})\.(?:seg|idx)")
_OFFSET_MAX = (1 << 63) - 1

_ZERO_STEP_BYTES = 1 << 20
_AHEAD_BYTES_MIN = 64 << 10
_LENGTHEN_BYTES_MAX = 1 << 20


class SegmentHeader(NamedTuple):
    """The header of a segment's file."""

    log_id: int
    file_id: int
    """Random, so that the index of an earlier file of the same name is not mistaken for this one's."""
    base_offset: int
    created_us: int

    @staticmethod
    def new(log_id: int, base_offset: int, created_us: int) -> "SegmentHeader":
        """The header of a new file."""
        return SegmentHeader(log_id, 1 + secrets.randbelow((1 << 32) - 1), base_offset, created_us)

    def packed(self) -> bytes:
        """The header's bytes."""
        header = _HEADER.pack(_MAGIC, *self)
        return (header + _CRC.pack(crc32c(header))).ljust(DATA_AT, b"\0")


def read_header(content: bytes, path: str) -> SegmentHeader | None:
    """The header of a segment's file; None when it is damaged."""
    if not _is_whole(content):
        return None
    magic, *fields = _HEADER.unpack_from(content)
    if magic == FORMER_MAGIC:
        raise UnsupportedFormat(
            f"{path} was written by an earlier Headrace; `headrace upgrade DIRECTORY`, with the broker's data "
            "directory or else the log's, brings it over"
        )
    if magic != _MAGIC:
        raise UnsupportedFormat(
            f"{path} has a format that this Headrace does not know; use the Headrace that wrote it, or a newer one"
        )
    return SegmentHeader(*fields)


def is_current(content: bytes) -> bool:
    """Whether a segment's file begins with a header of the present format, which is not damaged."""
    return content.startswith(_MAGIC) and _is_whole(content)


def read_former_header(content: bytes) -> SegmentHeader | None:
    """The header of a segment of the former format; None when it is damaged."""
    if not content.startswith(FORMER_MAGIC) or not _is_whole(content):
        return None
    return SegmentHeader(*_HEADER.unpack_from(content)[1:])


def _is_whole(content: bytes) -> bool:
    whole = len(content) >= DATA_AT
    return whole and bool(_CRC.unpack_from(content, _HEADER.size)[0] == crc32c(content[: _HEADER.size]))


def segment_path(directory: str, base_offset: int) -> str:
    """The path of the segment that begins at an offset."""
    return f"{directory}/{base_offset:020d}{SUFFIX}"


def offset_in_name(name: str, suffix: str = SUFFIX) -> int | None:
    """The base offset in the name of a segment's file, or of its index's; None for the name of any other file.

    Another spelling of the same number, such as `0.seg`, is not a segment: its path would name a different file.
    """
    found = _NAME.fullmatch(name) if name.endswith(suffix) else None
    offset = None if found is None else int(found[1])
    return offset if offset is not None and offset <= _OFFSET_MAX else None


class SegmentReplaced(Exception):
    """The segment's file was replaced by another of the same name; the caller must look it up again."""


class Segment(ByteSource, Protocol):
    """What readers need of a segment."""

    base_offset: int
    next_offset: int
    begin: int
    """The position of the first batch."""
    end: int
    """The position of the next batch to come."""
    time_max: int
    append_time: int
    path: str

    def size(self) -> int:
        """The size of the part that may hold batches, in bytes."""

    def index(self) -> Index:
        """The sparse index."""

    def file(self) -> OpenFile | None:
        """The open file; None for a segment in memory."""

    def report_damage(self, position: int, reason: str) -> None:
        """Tell the disk that the bytes at a position are damaged; it may raise."""


class FileSegment:
    """A segment in a file. File, mapping and index come from the runtime's pools, so idle segments cost nothing."""

    begin = DATA_AT

    __slots__ = (
        "__weakref__",
        "_index",
        "_zeroing",
        "allocated",
        "append_time",
        "base_offset",
        "checkpoint",
        "created_us",
        "end",
        "file_id",
        "host",
        "length",
        "log_id",
        "next_offset",
        "path",
        "sealed",
        "synced_end",
        "time_max",
        "writable",
    )

    def __init__(self, host: StorageRuntime, path: str, header: SegmentHeader) -> None:
        self.host = host
        self.path = path
        self.log_id, self.file_id, self.base_offset, self.created_us = header
        self.next_offset = self.base_offset
        self.end = DATA_AT
        self.time_max = TIME_NONE
        self.append_time = self.created_us
        self.sealed = False
        self.writable = False
        self.allocated = 0
        """How far zeros or batches have been written."""
        self.length = 0
        """The length of the file, or more."""
        self.checkpoint = 0
        """The end of the part that the index on the disk covers, in bytes."""
        self.synced_end = DATA_AT
        self._index: Index | None = None
        self._zeroing: threading.Lock | None = None

    @staticmethod
    def create(host: StorageRuntime, path: str, header: SegmentHeader) -> "FileSegment":
        """Create a new file; it is durable once it and its directory are synced."""
        segment = FileSegment(host, path, header)
        file = host.disk.open(path, create=True)
        try:
            host.disk.write(file, 0, header.packed())
        except BaseException:
            host.disk.remove(path)
            raise
        host.files.put(segment, file)
        segment.continue_writing(Index(), DATA_AT)
        return segment

    @staticmethod
    def open(host: StorageRuntime, path: str, log_id: int, *, writable: bool) -> "FileSegment":
        """Open an existing file; the caller must find the end of its batches.

        A damaged header is replaced by what is known from elsewhere; the file's id is then unknown.
        """
        file = host.disk.open(path, write=writable)
        base_offset = int(path.rpartition("/")[2].removesuffix(SUFFIX))
        header = read_header(host.disk.read(file, 0, DATA_AT), path)
        if header is None or header.base_offset != base_offset or header.log_id != (log_id or header.log_id):
            header = SegmentHeader(log_id, FILE_ID_UNKNOWN, base_offset, 0)
        segment = FileSegment(host, path, header)
        segment.writable = writable
        host.files.put(segment, file)
        return segment

    def continue_writing(self, index: Index, allocated: int) -> None:
        """Make this the segment that a writer appends to."""
        self._index = index
        self._zeroing = threading.Lock()
        self.writable = True
        self.sealed = False
        self.allocated = self.length = allocated

    def covered_by(self, summary: IndexSummary) -> bool:
        """Whether an index belongs to this segment, according to its header."""
        if self.file_id not in (summary.file_id, FILE_ID_UNKNOWN):
            return False
        return (summary.log_id, summary.base_offset) == (self.log_id, self.base_offset)

    def apply(self, summary: IndexSummary) -> None:
        """Adopt what the index on the disk certifies."""
        self.end, self.next_offset = summary.end, summary.next_offset
        self.time_max, self.append_time = summary.time_max, summary.append_time
        self.checkpoint = summary.end

    def summary(self) -> IndexSummary:
        """The header of an index saved now; the caller has synced the segment."""
        return IndexSummary(
            self.log_id, self.file_id, self.base_offset, self.end, self.next_offset, self.time_max, self.append_time
        )

    @property
    def index_path(self) -> str:
        """The path of the index."""
        return self.path.removesuffix(SUFFIX) + indexes.SUFFIX

    def file(self) -> OpenFile:
        """The open file."""
        # A file may be closed with writes not synced yet: Linux reports a failed write to whoever opens it next.
        return self.host.files.get(self) or self.host.files.put(self, self._reopened())

    def view(self, end: int) -> memoryview:
        """The bytes up to `end` at least, mapped."""
        view = self.host.views.get(self)
        while view is None or len(view) < end:
            file = self.file()
            size = self.host.disk.size(file)
            if size < end:
                raise InvalidBatch("the file ends inside the batch")
            try:
                view = self.host.views.put(self, self.host.disk.map(file, size))
            except ValueError:
                continue  # it has just been truncated
        return view

    def size(self) -> int:
        """The size of the part that may hold batches: only the writer knows the end of a segment that grows."""
        return self.end if self.sealed or self.writable else self.host.disk.size(self.file())

    def read(self, position: int, length: int) -> bytes:
        """A copy of some bytes; fewer at the end of the file."""
        return self.host.disk.read(self.file(), position, length)

    def report_damage(self, position: int, reason: str) -> None:
        """Tell the disk that the bytes at a position are damaged; one that has a copy elsewhere raises."""
        self.host.disk.report_damage(self.path, position, reason)

    def index(self) -> Index:
        """The sparse index, loaded or rebuilt if necessary."""
        return self._index or self.host.indexes.get_or_make(self, self._load_index)

    def append(self, batch: Batch) -> None:
        """Write a batch after the last one; when this raises, nothing has changed."""
        assert self._index is not None
        assert self._zeroing is not None
        position = self.end
        end = position + batch.length
        if end > self.allocated:
            with self._zeroing:  # or zeros that are being written there would overwrite the batch
                self.allocated = max(self.allocated, end)
                self._lengthen(end)
        self.host.disk.write(self.file(), position, batch.data)
        self.note(self._index, batch, position)

    def note(self, index: Index, batch: Batch, position: int) -> None:
        """Account for a batch that is written at the end of the segment."""
        note(index, batch.base_offset, position, self.time_max)
        time_max = max(self.time_max, batch.time_max)
        end, next_offset = position + batch.length, batch.base_offset + batch.span
        # Atomic: no interrupt comes between assignments without calls.
        self.time_max = time_max
        self.append_time = batch.append_time
        self.end = end
        self.next_offset = next_offset

    def needs_zeros_ahead(self, ahead_bytes_max: int) -> bool:
        """Whether less than half of the zeros that should lie ahead of the writer are left."""
        return self.allocated - self.end < self._ahead(ahead_bytes_max) // 2

    def prepare(self, ahead_bytes_max: int) -> None:
        """Write zeros ahead of the writer and sync them, so that syncing what comes there is cheap."""
        if self.is_retired() or self._zeroing is None:
            return
        disk, file = self.host.disk, self.file()
        target = self.end + self._ahead(ahead_bytes_max)
        while True:
            with self._zeroing:
                if self.is_retired():
                    return
                if self.allocated >= target:
                    break
                step = min(_ZERO_STEP_BYTES, target - self.allocated)
                disk.zero(file, self.allocated, step)
                self.allocated += step
                self.length = max(self.length, self.allocated)
        disk.sync(file)

    def seal(self) -> None:
        """End writing: truncate unused space, sync, and save the index."""
        assert self._index is not None
        self.retire()
        disk, file = self.host.disk, self.file()
        if disk.size(file) > self.end:
            disk.truncate(file, self.end)
        disk.sync(file)
        self.save_index(self.summary())
        self.host.indexes.put(self, self._index)
        self._index = None

    @property
    def wants_seal(self) -> bool:
        """Whether it is not sealed yet, or was interrupted while it was sealed."""
        return self._index is not None

    def is_retired(self) -> bool:
        """Whether nobody writes to it any more; another thread may retire it at any time."""
        return self.sealed

    def retire(self) -> None:
        """Write no more zeros: the segment is complete, or is about to be replaced."""
        if self._zeroing is not None:
            with self._zeroing:
                self.sealed = True

    def save_index(self, summary: IndexSummary) -> None:
        """Save the part of the index that the summary covers, which has been synced."""
        self._save(self.index(), summary)

    def _save(self, index: Index, summary: IndexSummary) -> None:
        try:
            index.save(self.host.disk, self.index_path, summary)
        except (OSError, DiskFull, TooManyFiles) as error:
            logger.info("index not saved; it will be rebuilt  path=%s reason=%s", self.path, error)
        else:
            self.checkpoint = summary.end

    def _lengthen(self, end: int) -> None:
        """Lengthen the file in steps, without using space, so that readers need not map it again for each batch."""
        if end > self.length:
            self.length = max(self.allocated, end + min(_LENGTHEN_BYTES_MAX, max(end, _AHEAD_BYTES_MIN)))
            self.host.disk.truncate(self.file(), self.length)

    def _ahead(self, ahead_bytes_max: int) -> int:
        # As much as the segment holds already: a log that is hardly used stays small.
        return min(ahead_bytes_max, max(self.end, _AHEAD_BYTES_MIN))

    def _reopened(self) -> OpenFile:
        file = self.host.disk.open(self.path, write=self.writable)
        header = read_header(self.host.disk.read(file, 0, DATA_AT), self.path)
        if header is not None and self.file_id not in (header.file_id, FILE_ID_UNKNOWN):
            raise SegmentReplaced
        return file

    def _load_index(self) -> Index:
        loaded = indexes.load(self.host.disk, self.index_path)
        known = loaded is not None and self.file_id != FILE_ID_UNKNOWN and self.covered_by(loaded[0])
        if loaded is not None and known and (loaded[0].end == self.end or not self.sealed):
            return loaded[1]
        return self._rebuild_index()

    def _rebuild_index(self) -> Index:
        index = Index()
        time_max = TIME_NONE
        for position, item in scan(self, DATA_AT, self.base_offset, self.end):
            note(index, item.base_offset, position, time_max)  # damage too, or readers would skip it silently
            if isinstance(item, Batch):
                time_max = max(time_max, item.time_max)
        if self.writable and self.sealed:
            self._save(index, self.summary())
        return index


def note(index: Index, offset: int, position: int, time_before: int) -> None:
    """Add a batch to a sparse index if the last entry is far enough away."""
    positions = index.positions
    if not positions or position - positions[-1] >= INDEX_BYTES:
        index.add(offset, position, time_before)
