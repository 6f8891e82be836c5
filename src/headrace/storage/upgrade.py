"""Upgrades logs of an earlier format: rewrites each segment to a new file, which then replaces it.

A partly upgraded log has segments of both formats. The next run skips the upgraded ones, so after a crash at any moment
the upgrade can be run again.
"""

import logging
import struct
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from crc32c import crc32c

from headrace.model.batch import FLAG_LOST, HEADER_BYTES, MAGIC, VERSION, Batch, gap, parse
from headrace.model.errors import LogNotFound, UnsupportedFormat
from headrace.storage import index as indexes
from headrace.storage.disk import Disk, OpenFile
from headrace.storage.meta import read_meta
from headrace.storage.recovery import segment_bases
from headrace.storage.runtime import StorageRuntime
from headrace.storage.segment import DATA_AT, SUFFIX, SegmentHeader, is_current, read_former_header, segment_path

logger = logging.getLogger("headrace.storage")

FORMER_VERSION = 1
FORMER_HEADER_BYTES = 88
# As in model/batch.py, without epoch and key_id.
_FORMER = struct.Struct("<4sI QqQI IIBBHII qq QII")
_CURRENT = struct.Struct("<4sI QqQII IIBBHIII qq QII")
_CHUNK_BYTES = 1 << 20

Amend = Callable[[Batch, "FormerBatch"], Batch]
"""Changes a batch by the one that follows it in the log."""


class FormerBatch(NamedTuple):
    """A batch of version 1, and what it becomes."""

    position: int
    end: int
    crc: int
    """The one that it had."""
    batch: Batch


class UpgradeGap(NamedTuple):
    """Messages that an upgrade found damaged, and replaced by a gap."""

    path: str
    first_offset: int
    next_offset: int


class UpgradedLog(NamedTuple):
    """What an upgrade has done with a log."""

    segments: int
    """The number of segments that this run has rewritten."""
    damaged: list[UpgradeGap]


class _Bounds(NamedTuple):
    """The offsets of a segment, and what comes behind it."""

    base: int
    next_base: int | None
    """None: it is the last one."""
    beyond: FormerBatch | None


class _Segment(NamedTuple):
    """A segment of the former format, being read."""

    disk: Disk
    file: OpenFile
    size: int
    log_id: int
    """As its header says, or else its log's record; 0 when neither does."""

    def read(self, begin: int, end: int) -> bytes:
        """Bytes from one position to another."""
        return self.disk.read(self.file, begin, end - begin)

    def batch_at(self, position: int, offset_min: int) -> FormerBatch | None:
        """The whole and good batch of this log that begins there, if one does."""
        head = self.disk.read(self.file, position, FORMER_HEADER_BYTES)
        if len(head) < FORMER_HEADER_BYTES or not head.startswith(MAGIC):
            return None
        magic, check, base, appended, synced, log_id, crc, length, version, codec, flags, *rest = _FORMER.unpack(head)
        if check != crc32c(head[8:]) or version != FORMER_VERSION or position + length > self.size:
            return None
        if base < offset_min or (self.log_id and log_id != self.log_id) or length < FORMER_HEADER_BYTES:
            return None
        body = self.disk.read(self.file, position + FORMER_HEADER_BYTES, length - FORMER_HEADER_BYTES)
        if crc32c(body, crc32c(head[40:])) != crc:
            return None
        count, span, *times_and_producer = rest
        data = bytearray(HEADER_BYTES)
        data += body
        _CURRENT.pack_into(
            data, 0, magic, 0, base, appended, synced, log_id, 0, 0, len(data), VERSION, codec, flags, count, span, 0,
            *times_and_producer,
        )  # fmt: skip
        return FormerBatch(position, position + length, crc, _sealed(data))

    def batches(self, offset: int) -> Iterator[FormerBatch]:
        """The good batches, in order; between them there may be damage."""
        position: int | None = DATA_AT
        while position is not None and position < self.size:
            found = self.batch_at(position, offset)
            if found is None:
                position = self._next_candidate(position + 1)
            else:
                yield found
                position, offset = found.end, found.batch.next_offset

    def _next_candidate(self, position: int) -> int | None:
        """Where the next batch may begin."""
        while position < self.size:
            chunk = self.disk.read(self.file, position, _CHUNK_BYTES)
            at = chunk.find(MAGIC)
            if at >= 0:
                return position + at
            if len(chunk) < len(MAGIC):
                break
            position += len(chunk) - len(MAGIC) + 1
        return None


def upgrade_log(
    host: StorageRuntime, directory: str, progress: Callable[[int], None], amend: Amend | None = None
) -> UpgradedLog:
    """Bring over a log's segments, the oldest first. Progress is told in bytes.

    Messages keep their offsets. Damaged ones become a gap that says so, with the damaged bytes in it.
    """
    bases = segment_bases(host, directory)
    upgraded, damaged = 0, list[UpgradeGap]()
    for base, following in zip_longest(bases, bases[1:]):
        path = segment_path(directory, base)
        file = host.disk.open(path)
        size = host.disk.size(file)
        if _is_former(host, file, base):
            beyond = None if following is None else _first_batch(host, segment_path(directory, following), following)
            damaged += _rewrite(host, path, file, _Bounds(base, following, beyond), amend)
            upgraded += 1
        progress(size)
    return UpgradedLog(upgraded, damaged)


def _is_former(host: StorageRuntime, file: OpenFile, base: int) -> bool:
    """Whether a segment has the former format: as its header says, or else its batches if the header is damaged."""
    head = host.disk.read(file, 0, DATA_AT)
    if len(head) < DATA_AT or is_current(head):
        return False
    return read_former_header(head) is not None or _first_batch(host, file.path, base) is not None


def _first_batch(host: StorageRuntime, path: str, base: int) -> FormerBatch | None:
    return next(_opened(host, host.disk.open(path)).batches(base), None)


def _opened(host: StorageRuntime, file: OpenFile) -> _Segment:
    header = read_former_header(host.disk.read(file, 0, DATA_AT))
    return _Segment(
        host.disk, file, host.disk.size(file), _log_id(host, file.path) if header is None else header.log_id
    )


def _log_id(host: StorageRuntime, path: str) -> int:
    """The id of the log that a segment with a damaged header belongs to; 0 when nothing tells it."""
    try:
        return read_meta(host, path.rpartition("/")[0]).log_id
    except (LogNotFound, UnsupportedFormat):
        return 0


def _rewrite(host: StorageRuntime, path: str, file: OpenFile, bounds: _Bounds, amend: Amend | None) -> list[UpgradeGap]:
    """Write a segment in the present format; returns the damage that became gaps in it."""
    damaged: list[UpgradeGap] = []
    disk, segment = host.disk, _opened(host, file)
    head = disk.read(file, 0, DATA_AT)
    former = read_former_header(head)
    beside = f"{path}.tmp"
    disk.remove(beside)  # of one that was killed
    target = disk.open(beside, create=True)
    # A damaged header stays damaged: opening the log rewrites it.
    header = head if former is None else SegmentHeader.new(former.log_id, bounds.base, former.created_us).packed()
    position, gathered = 0, bytearray(header)
    for part in _parts(segment, bounds, amend, damaged):
        gathered += part
        if len(gathered) >= _CHUNK_BYTES:
            disk.write(target, position, gathered)
            position += len(gathered)
            gathered.clear()
    disk.write(target, position, gathered)
    disk.sync(target)
    disk.rename(beside, path)
    disk.remove(path.removesuffix(SUFFIX) + indexes.SUFFIX)  # its positions are the former ones
    return damaged


def _parts(segment: _Segment, bounds: _Bounds, amend: Amend | None, damaged: list[UpgradeGap]) -> Iterator[bytes]:
    """The bytes of the new segment, behind its header; adds what it finds to `damaged`."""
    position, offset, appended_us = DATA_AT, bounds.base, 0
    batches = segment.batches(offset)
    found = next(batches, None)
    while found is not None:
        following = next(batches, None)
        batch = found.batch
        if found.position > position or batch.base_offset > offset:
            content = segment.read(position, found.position)
            yield _lost(segment, content, offset, batch.base_offset, appended_us, damaged)
        successor = following or bounds.beyond
        if amend is not None and successor is not None:
            batch = amend(batch, successor)
        yield bytes(batch.data)
        position, offset, appended_us = found.end, batch.next_offset, batch.append_time
        found = following
    # Behind the last batch are zeros, prepared for what comes, or what a crash left, which opening the log sets aside.
    rest = segment.read(position, segment.size).rstrip(b"\0")
    if bounds.next_base is not None and offset < bounds.next_base:
        rest = _lost(segment, rest, offset, bounds.next_base, appended_us, damaged)
    yield rest


def _lost(
    segment: _Segment, content: bytes, offset: int, next_offset: int, appended_us: int, damaged: list[UpgradeGap]
) -> bytes:
    """What stands in the place of damaged bytes that were messages with these offsets."""
    logger.warning(
        "damaged messages found while upgrading  path=%s first=%d last=%d bytes=%d",
        segment.file.path, offset, next_offset - 1, len(content),
    )  # fmt: skip
    if next_offset <= offset:
        return content  # it has no offsets: opening the log finds it again
    damaged.append(UpgradeGap(segment.file.path, offset, next_offset))
    lost = gap(next_offset - offset, FLAG_LOST, max(appended_us, 0), content)
    lost.place(offset, appended_us, segment.log_id)
    return bytes(lost.data)


def _sealed(data: bytearray) -> Batch:
    """The batch that these bytes are, with checksums that hold."""
    view = memoryview(data)
    struct.pack_into("<I", data, 40, crc32c(view[44:]))
    struct.pack_into("<I", data, 4, crc32c(view[8:HEADER_BYTES]))
    return parse(view)
