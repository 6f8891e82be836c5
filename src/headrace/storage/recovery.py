"""Bringing a log's files in order: cutting a torn tail, setting damage aside, finding where the log ends."""

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest

import msgspec
from crc32c import crc32c

from headrace.model.batch import FLAG_LOST, HEADER_BYTES, Batch, gap
from headrace.model.errors import CorruptFile
from headrace.storage import index as indexes
from headrace.storage.host import Host
from headrace.storage.index import Index
from headrace.storage.scan import Damage, is_zero, scan
from headrace.storage.segment import FILE_ID_UNKNOWN, SUFFIX, FileSegment, Header, read_header, segment_path

logger = logging.getLogger("headrace.storage")

QUARANTINE = "quarantine"


class Lost(msgspec.Struct, frozen=True):
    """Messages that are damaged, or were when a repair found them."""

    path: str
    position: int
    first_offset: int
    next_offset: int
    reason: str
    kept_in: str | None = None
    """A copy of the damaged bytes."""


class Findings(msgspec.Struct):
    """What opening, verifying or repairing a log found."""

    segments: int = 0
    batches: int = 0
    messages: int = 0
    bytes: int = 0
    """Bytes looked at."""
    lost: list[Lost] = []
    torn_bytes: int = 0
    """Bytes after the last whole batch: a write that a crash interrupted."""
    torn_at: int | None = None
    """The offset at which the log was cut because of them."""
    headers: list[str] = []
    """Segments whose own header is damaged."""

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not (self.lost or self.torn_bytes or self.headers)


def segment_bases(host: Host, directory: str) -> list[int]:
    """The base offsets of the segments in a directory."""
    return sorted(
        int(stem)
        for name in host.disk.names(directory)
        if name.endswith(SUFFIX) and (stem := name.removesuffix(SUFFIX)).isdigit()
    )


def open_segments(
    host: Host, directory: str, log_id: int, first_offset: int, findings: Findings, *, everything: bool = False
) -> list[FileSegment]:
    """All segments of a log, ready for a writer; only what may be torn is scanned."""
    for name in host.disk.names(directory):
        if name.endswith(".tmp"):
            host.disk.remove(f"{directory}/{name}")
    bases = segment_bases(host, directory)
    segments = []
    for base, following in zip_longest(bases, bases[1:]):
        if following is not None and following <= first_offset:
            remove_segment(host, segment_path(directory, base))
            continue
        segment = FileSegment.open(host, segment_path(directory, base), log_id, writable=True)
        mend(segment, following, findings, everything=everything)
        segments.append(segment)
    return segments


def remove_segment(host: Host, path: str) -> None:
    """Remove a segment's file, then its index."""
    host.disk.remove(path)
    host.disk.remove(path.removesuffix(SUFFIX) + indexes.SUFFIX, sync=False)


def mend(segment: FileSegment, following: int | None, findings: Findings, *, everything: bool = False) -> None:
    """Make a segment whole from its last checkpoint on, or from its beginning, up to the segment that follows it.

    Damage between good batches is copied aside and replaced by a batch that says so, which keeps its place. What
    follows the last good batch of the last segment was being written in a crash: it is copied aside and cut off.
    """
    findings.segments += 1
    _mend_header(segment, findings)
    disk = segment.host.disk
    size = disk.size(segment.file())
    summary = None if everything else indexes.load_summary(disk, segment.index_path)
    sealed = summary is not None and segment.covered_by(summary) and summary.end == size
    if summary is not None and sealed and summary.next_offset == following:
        segment.apply(summary)
        segment.sealed = True
        return
    index = Index()
    loaded = None if everything else indexes.load(disk, segment.index_path)
    if loaded is not None and segment.covered_by(loaded[0]) and loaded[0].end <= size:
        segment.apply(loaded[0])
        index = loaded[1]
    if segment.end < size or following is not None:
        _mend_batches(segment, index, size, findings)
        _mend_tail(segment, index, following, findings)
    segment.continue_writing(index, segment.end)
    if following is not None:
        segment.seal()


def _mend_header(segment: FileSegment, findings: Findings) -> None:
    if segment.file_id != FILE_ID_UNKNOWN:
        return
    findings.headers.append(segment.path)
    header = Header.new(segment.log_id, segment.base_offset, segment.created_us)
    segment.file_id = header.file_id
    _set_aside(segment, 0, segment.begin)
    segment.host.disk.write(segment.file(), 0, header.packed())
    segment.host.disk.sync(segment.file())
    logger.warning("%s: rewrote a damaged header", segment.path)


def _mend_batches(segment: FileSegment, index: Index, size: int, findings: Findings) -> None:
    findings.bytes += max(size - segment.end, 0)
    for position, item in scan(segment, segment.end, segment.next_offset, size):
        if isinstance(item, Batch):
            batch = item
        elif item.next_offset == item.base_offset:
            return  # the tail
        else:
            batch = _bridge(segment, item, findings)
        findings.batches += 1
        findings.messages += batch.count
        segment.note(index, batch, position)


def _mend_tail(segment: FileSegment, index: Index, following: int | None, findings: Findings) -> None:
    disk, file = segment.host.disk, segment.file()
    size = disk.size(file)
    if following is not None and following < segment.next_offset:
        raise CorruptFile(f"{segment.path} goes on to offset {segment.next_offset}, into the segment that follows it")
    garbage = 0 if is_zero(segment, segment.end, size) else size - segment.end
    if following is not None and following > segment.next_offset:
        damage = Damage(segment.end, garbage, segment.next_offset, following, "the end of the segment is missing")
        batch = _bridge(segment, damage, findings)
        segment.note(index, batch, segment.end)
    elif garbage and following is None:
        kept = _set_aside(segment, segment.end, garbage)
        findings.torn_bytes += garbage
        findings.torn_at = segment.next_offset
        logger.warning(
            "%s: cut %d torn bytes after offset %d; a copy is in %s",
            segment.path,
            garbage,
            segment.next_offset - 1,
            kept,
        )
    if size > segment.end:
        disk.truncate(file, segment.end)
        segment.host.views.drop(segment)


def _bridge(segment: FileSegment, damage: Damage, findings: Findings) -> Batch:
    """Set damaged bytes aside and write in their place a batch that covers their offsets."""
    kept = _set_aside(segment, damage.position, damage.length) if damage.length else None
    body = segment.read(damage.position + HEADER_BYTES, max(damage.length - HEADER_BYTES, 0))
    batch = gap(damage.next_offset - damage.base_offset, FLAG_LOST, max(segment.time_max, 0), body)
    batch.place(damage.base_offset, segment.append_time, segment.log_id)
    # The body is what stands there already: a crash now leaves the damage as it was, to be found again.
    segment.host.disk.write(segment.file(), damage.position, memoryview(batch.data)[:HEADER_BYTES])
    segment.host.disk.sync(segment.file())
    lost = Lost(segment.path, damage.position, damage.base_offset, damage.next_offset, damage.reason, kept)
    findings.lost.append(lost)
    logger.warning(
        "%s: messages %d to %d are lost (%s)",
        lost.path,
        lost.first_offset,
        lost.next_offset - 1,
        lost.reason,
    )
    return batch


def _set_aside(segment: FileSegment, position: int, length: int) -> str:
    """Copy bytes to the quarantine, durably; the same bytes are not copied twice."""
    disk = segment.host.disk
    directory, _, name = segment.path.rpartition("/")
    content = segment.read(position, length)
    quarantine = f"{directory}/{QUARANTINE}"
    disk.make_directory(quarantine)
    path = f"{quarantine}/{name.removesuffix(SUFFIX)}-{position}-{crc32c(content):08x}.bin"
    if not disk.exists(path):
        file = disk.open(path, create=True)
        disk.write(file, 0, content)
        disk.sync(file)
        disk.sync_directory(quarantine)
    return path


def verify(
    segments: Sequence[FileSegment], next_offset: int, progress: Callable[[int], None] | None = None
) -> Findings:
    """Check every byte of a log, changing nothing; progress is told in bytes looked at."""
    findings = Findings()
    for segment, following in zip_longest(segments, segments[1:]):
        findings.segments += 1
        if read_header(segment.read(0, segment.begin), segment.path) is None:
            findings.headers.append(segment.path)
        stop = next_offset if following is None else following.base_offset
        for position, item in scan(segment, segment.begin, segment.base_offset, segment.size(), stop=stop):
            findings.bytes += item.length
            if isinstance(item, Damage) or item.flags & FLAG_LOST:
                reason = item.reason if isinstance(item, Damage) else "lost, as an earlier repair found"
                findings.lost.append(Lost(segment.path, position, item.base_offset, item.next_offset, reason))
            else:
                findings.batches += 1
                findings.messages += item.count
            if progress is not None:
                progress(findings.bytes)
    return findings
