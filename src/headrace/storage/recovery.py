"""Recovery of a log's files after a crash: truncates a torn tail, quarantines damage, and finds the end of the log."""

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest

import msgspec
from crc32c import crc32c

from headrace.model.batch import FLAG_LOST, HEADER_BYTES, Batch, gap
from headrace.model.errors import CorruptFile, DiskFull
from headrace.storage import index as indexes
from headrace.storage.index import Index, IndexSummary
from headrace.storage.runtime import StorageRuntime
from headrace.storage.scan import Damage, find_batch, is_zero, scan, scan_copied
from headrace.storage.segment import (
    FILE_ID_UNKNOWN,
    SUFFIX,
    FileSegment,
    SegmentHeader,
    offset_in_name,
    read_header,
    segment_path,
)

logger = logging.getLogger("headrace.storage")

QUARANTINE = "quarantine"
_CHUNK_BYTES = 1 << 20


class LostRange(msgspec.Struct, frozen=True):
    """Messages that are damaged, or were when a repair found them."""

    path: str
    position: int
    first_offset: int
    next_offset: int
    reason: str
    kept_in: str | None = None
    """A copy of the damaged bytes."""
    repaired: bool = False
    """Whether an earlier repair or upgrade found it and made it a gap."""


class Findings(msgspec.Struct):
    """What opening, verifying or repairing a log found."""

    segments: int = 0
    batches: int = 0
    messages: int = 0
    bytes: int = 0
    """Bytes checked."""
    lost: list[LostRange] = []
    torn_bytes: int = 0
    """Bytes after the last whole batch: a write that a crash interrupted."""
    torn_at: int | None = None
    """The offset at which the log was cut because of them, or would be."""
    torn_kept_in: list[str] = []
    """Copies of them."""
    uncopied_bytes: int = 0
    """Damaged or torn bytes that were replaced or cut without a copy, as the disk was full."""
    headers: list[str] = []
    """Segments whose own header is damaged."""
    record: str | None = None
    """The record of the log, if it is missing or damaged: messages trimmed inside the oldest segment are back then."""

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged except what was repaired before."""
        return not (self.torn_bytes or self.headers or self.record or any(not lost.repaired for lost in self.lost))


def segment_bases(host: StorageRuntime, directory: str) -> list[int]:
    """The base offsets of the segments in a directory."""
    return sorted(offset for name in host.disk.names(directory) if (offset := offset_in_name(name)) is not None)


def remove_segment(host: StorageRuntime, path: str) -> None:
    """Remove a segment's file, then its index."""
    host.disk.remove(path)
    host.disk.remove(path.removesuffix(SUFFIX) + indexes.SUFFIX, sync=False)


def remove_leftovers(host: StorageRuntime, path: str) -> None:
    """Remove the files that a removed segment, or one whose creation was interrupted, left under a new segment's name.

    An index that a crash left there describes the earlier segment, and recovery would trust it for the new one if the
    next crash came before that one's header was on the disk.
    """
    index = path.removesuffix(SUFFIX) + indexes.SUFFIX
    if host.disk.exists(index):
        host.disk.remove(index)  # synced: it must not reappear beside the new segment
    host.disk.remove(path, sync=False)


class Recovery:
    """Opens a log's segments for a writer, and checks what a crash may have touched, or everything.

    Damage between good batches is copied to the quarantine and replaced by a gap over its offsets. Bytes after the last
    good batch were being written in a crash: they are copied to the quarantine and truncated. After a power loss,
    unsynced writes may have reached the disk in any order: the log then ends at the first that is missing.
    A disk that has a copy elsewhere is told of all damage first, and raises instead of having it repaired here.
    """

    def __init__(
        self,
        host: StorageRuntime,
        directory: str,
        log_id: int,
        findings: Findings,
        *,
        power_lost: bool,
        everything: bool,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._host = host
        self._disk = host.disk
        self._directory = directory
        self._log_id = log_id
        self._findings = findings
        self._power_lost = power_lost
        self._everything = everything
        self._progress = progress or (lambda _: None)

    def segments(self, first_offset: int) -> list[FileSegment]:
        """All segments of the log, in order, recovered."""
        for name in self._disk.names(self._directory):
            if name.endswith(".tmp") and _is_own(name.removesuffix(".tmp")):
                self._disk.remove(f"{self._directory}/{name}")
        bases = segment_bases(self._host, self._directory)
        while len(bases) > 1 and bases[1] <= first_offset:
            remove_segment(self._host, segment_path(self._directory, bases.pop(0)))
        segments: list[FileSegment] = []
        while bases:
            segment = self._open(bases.pop(0))
            try:
                self._mend(segment, bases)
            except DiskFull:
                # A file that was being created is created again when needed, unless only its name has the next offset.
                is_known = bool(segments) or segment.base_offset <= first_offset
                if bases or self._disk.size(segment.file()) > segment.begin or not is_known:
                    raise
                self._host.forget(segment)
                remove_segment(self._host, segment.path)
                continue
            segments.append(segment)
        return segments

    def _open(self, base: int) -> FileSegment:
        return FileSegment.open(self._host, segment_path(self._directory, base), self._log_id, writable=True)

    def _mend(self, segment: FileSegment, later: list[int]) -> None:
        """Recover a segment; if the log turns out to end in it, the later ones are removed."""
        self._findings.segments += 1
        size = self._disk.size(segment.file())
        if not self._everything and self._is_sealed(segment, size, later):
            return
        index = Index()
        certified = segment.summary()
        loaded = indexes.load(self._disk, segment.index_path)
        if loaded is not None and segment.covered_by(loaded[0]):
            certified = loaded[0]
            if not self._everything and certified.end <= size and segment.file_id != FILE_ID_UNKNOWN:
                segment.apply(certified)
                index = loaded[1]
        self._mend_header(segment)
        if segment.end < size or later or segment.next_offset < certified.next_offset:
            self._mend_batches(segment, index, size, certified, later)
            self._mend_tail(segment, index, certified, later)
            self._write_again(segment, min(certified.end, segment.end))
        segment.continue_writing(index, segment.end)
        if later:
            segment.seal()

    def _is_sealed(self, segment: FileSegment, size: int, later: list[int]) -> bool:
        summary = indexes.load_summary(self._disk, segment.index_path)
        if segment.file_id == FILE_ID_UNKNOWN or summary is None or not segment.covered_by(summary):
            return False
        if summary.end != size or not later or summary.next_offset != later[0]:
            return False
        segment.apply(summary)
        segment.sealed = True
        return True

    def _mend_header(self, segment: FileSegment) -> None:
        if segment.file_id != FILE_ID_UNKNOWN:
            return
        header = SegmentHeader.new(segment.log_id, segment.base_offset, segment.created_us)
        segment.file_id = header.file_id
        if self._disk.size(segment.file()) > segment.begin:  # or a crash came while the file was being created
            segment.report_damage(0, "the header of the segment is damaged")
            self._findings.headers.append(segment.path)
            self._quarantine(segment, 0, segment.begin)
            logger.warning("damaged segment header rewritten  path=%s", segment.path)
        self._disk.write(segment.file(), 0, header.packed())
        self._disk.sync(segment.file())

    def _mend_batches(
        self, segment: FileSegment, index: Index, size: int, certified: IndexSummary, later: list[int]
    ) -> None:
        """Scan the batches from the segment's end on; an index certifies that some of them were good once."""
        start, limit = segment.end, later[0] if later else None
        for position, item in scan_copied(segment, segment.end, segment.next_offset, size, limit=limit):
            if isinstance(item, Damage):
                segment.report_damage(position, item.reason)
            if isinstance(item, Batch):
                batch = item
            elif item.base_offset < certified.next_offset:
                batch = self._bridge(segment, _within(item, certified, size))
            elif item.next_offset == item.base_offset:
                break  # nothing good follows in this segment
            elif self._was_not_synced(segment, later):
                self._forget_later(later)
                break
            else:
                batch = self._bridge(segment, item)
            self._findings.batches += 1
            self._findings.messages += batch.count
            segment.note(index, batch, position)
            self._progress(self._findings.bytes + segment.end - start)
        self._findings.bytes += segment.end - start
        if start < segment.end < size and segment.end == certified.end:
            self._mend_batches(segment, index, size, certified, later)  # damage up to there has hidden what follows

    def _mend_tail(self, segment: FileSegment, index: Index, certified: IndexSummary, later: list[int]) -> None:
        """Handle the bytes between the last good batch and the next segment, or the end."""
        while later and later[0] < segment.next_offset:
            self._remove_empty(later)
        size = self._disk.size(segment.file())
        garbage = 0 if is_zero(segment, segment.end, size) else size - segment.end
        due = later[0] if later else certified.next_offset
        if due > segment.next_offset or (garbage and not later):
            segment.report_damage(segment.end, "the end of the segment is missing")
        if due > segment.next_offset:
            if segment.next_offset >= certified.next_offset and self._was_not_synced(segment, later):
                self._forget_later(later)
            else:
                damage = Damage(segment.end, garbage, segment.next_offset, due, "the end of the segment is missing")
                segment.note(index, self._bridge(segment, damage), segment.end)
                garbage = 0
        if garbage and not later:
            self._report_cut(segment, self._quarantine(segment, segment.end, garbage), garbage)
        if self._disk.size(segment.file()) > segment.end:
            self._disk.truncate(segment.file(), segment.end)
            self._disk.sync(segment.file())  # or a power loss could restore it behind what is appended next
            self._host.views.drop(segment)

    def _was_not_synced(self, segment: FileSegment, later: list[int]) -> bool:
        """Whether the power was lost before the rest of this segment was known to be on the disk."""
        if not self._power_lost:
            return False
        synced = 0
        for _, item in scan_copied(segment, segment.end, segment.next_offset, self._disk.size(segment.file())):
            synced = max(synced, item.synced_offset if isinstance(item, Batch) else 0)
        for base in later:
            other = self._open(base)
            summary = indexes.load_summary(self._disk, other.index_path)
            if summary is not None and other.covered_by(summary):
                return False  # indexes cover only what was synced, and syncs happen in order
            for _, item in scan_copied(other, other.begin, base, self._disk.size(other.file())):
                synced = max(synced, item.synced_offset if isinstance(item, Batch) else 0)
        return segment.next_offset >= synced

    def _forget_later(self, later: list[int]) -> None:
        """Quarantine the later segments, the last one first, so that a crash in between leaves a known state."""
        while later:
            segment = self._open(later.pop())
            size = self._disk.size(segment.file())
            self._report_cut(segment, self._quarantine(segment, 0, size), size)
            self._host.forget(segment)
            remove_segment(self._host, segment.path)

    def _remove_empty(self, later: list[int]) -> None:
        """Remove a segment that was created and not used."""
        segment = self._open(later[0])
        if find_batch(segment, segment.begin, self._disk.size(segment.file()), 0) is not None:
            segment.report_damage(segment.begin, "its offsets are those of the segment before it")
            raise CorruptFile(
                f"{segment.path} has offsets that the segment before it has too; move the one that does not belong "
                "here out of the directory"
            )
        self._host.forget(segment)
        remove_segment(self._host, segment.path)
        later.pop(0)

    def _bridge(self, segment: FileSegment, damage: Damage) -> Batch:
        """Quarantine damaged bytes, and replace them by a gap that covers their offsets."""
        kept = self._quarantine(segment, damage.position, damage.length) if damage.length else None
        body = segment.read(damage.position + HEADER_BYTES, max(damage.length - HEADER_BYTES, 0))
        batch = gap(damage.next_offset - damage.base_offset, FLAG_LOST, max(segment.time_max, 0), body)
        batch.place(damage.base_offset, segment.append_time, segment.log_id)
        # The body stays as it is: a crash now leaves the damage as it was, to be found again.
        self._disk.write(segment.file(), damage.position, memoryview(batch.data)[:HEADER_BYTES])
        self._disk.sync(segment.file())
        lost = LostRange(segment.path, damage.position, damage.base_offset, damage.next_offset, damage.reason, kept)
        self._findings.lost.append(lost)
        logger.warning(
            "messages lost  path=%s first_offset=%d next_offset=%d reason=%s",
            lost.path,
            lost.first_offset,
            lost.next_offset,
            lost.reason,
        )
        return batch

    def _write_again(self, segment: FileSegment, position: int) -> None:
        """Write the bytes that no index certifies once more, unchanged.

        If their sync failed in an earlier process, the system takes them for synced, and would not write them. A
        replicated disk does not rely on the system for that.
        """
        if self._disk.is_replicated:
            return
        while position < segment.end:
            chunk = segment.read(position, min(_CHUNK_BYTES, segment.end - position))
            self._disk.write(segment.file(), position, chunk)
            position += len(chunk)

    def _report_cut(self, segment: FileSegment, kept: str | None, length: int) -> None:
        if kept is not None:
            self._findings.torn_kept_in.append(kept)
        self._findings.torn_bytes += length
        self._findings.torn_at = segment.next_offset
        logger.warning(
            "torn bytes truncated  path=%s bytes=%d offset=%d kept_in=%s",
            segment.path,
            length,
            segment.next_offset,
            kept or "-",
        )

    def _quarantine(self, segment: FileSegment, position: int, length: int) -> str | None:
        """Copy bytes to the quarantine, durably; the same bytes are not copied twice.

        On a full disk there is no copy: opening a log must still work, as consuming it may be what frees space. A
        repair, which somebody asked for, raises DiskFull instead.
        """
        content = segment.read(position, length)
        quarantine = f"{self._directory}/{QUARANTINE}"
        path = f"{quarantine}/{segment.base_offset:020d}-{position}-{crc32c(content):08x}.bin"
        try:
            self._disk.make_directory(quarantine)
            if not self._disk.exists(path):
                self._disk.remove(path + ".tmp")
                self._keep(path, content)
        except DiskFull as error:
            if self._everything:
                raise
            self._findings.uncopied_bytes += length
            logger.warning(
                "damaged bytes not copied to the quarantine  path=%s bytes=%d reason=%s",
                segment.path,
                length,
                str(error),
            )
            return None
        return path

    def _keep(self, path: str, content: bytes) -> None:
        try:
            file = self._disk.open(path + ".tmp", create=True)
            self._disk.write(file, 0, content)
            self._disk.sync(file)
            self._disk.rename(path + ".tmp", path)
        except DiskFull:
            self._disk.remove(path + ".tmp", sync=False)
            raise


def _is_own(name: str) -> bool:
    """Whether a name in a log's directory is a segment's or an index's."""
    return offset_in_name(name) is not None or offset_in_name(name, indexes.SUFFIX) is not None


def _within(damage: Damage, certified: IndexSummary, size: int) -> Damage:
    """The damage, extended to the end of what the index certifies if nothing good was found behind it."""
    if damage.next_offset > damage.base_offset:
        return damage
    return damage._replace(length=min(certified.end, size) - damage.position, next_offset=certified.next_offset)


def verify(
    segments: Sequence[FileSegment],
    next_offset: int,
    progress: Callable[[int], None] | None = None,
    *,
    ended: bool = False,
) -> Findings:
    """Check every byte of a log and change nothing; `progress` is called with the number of bytes checked.

    If the log has `ended`, as no writer is at work, bytes after its end are torn.
    """
    findings = Findings()
    position = 0
    for segment, following in zip_longest(segments, segments[1:]):
        findings.segments += 1
        is_new = following is None and segment.size() <= segment.begin  # its file was being created
        if not is_new and read_header(segment.read(0, segment.begin), segment.path) is None:
            findings.headers.append(segment.path)
        stop = next_offset if following is None else following.base_offset
        for position, item in scan(segment, segment.begin, segment.base_offset, segment.size(), stop=stop):
            findings.bytes += item.length
            if isinstance(item, Damage) or item.flags & FLAG_LOST:
                repaired = isinstance(item, Batch)
                reason = "lost, as an earlier repair or upgrade found" if isinstance(item, Batch) else item.reason
                findings.lost.append(
                    LostRange(segment.path, position, item.base_offset, item.next_offset, reason, repaired=repaired)
                )
            else:
                findings.batches += 1
                findings.messages += item.count
            position += item.length
            if progress is not None:
                progress(findings.bytes)
    for last in segments[-1:]:
        end = max(position, last.begin)
        if ended and not is_zero(last, end, last.size()):
            findings.torn_bytes = last.size() - end
            findings.torn_at = next_offset
    return findings
