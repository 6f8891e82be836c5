"""A log in files: opens, appends to, truncates and compacts its segments; see group_commit.py for syncs."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.model.batch import FLAG_COMPACTED, FLAG_LOST, SPAN_MAX, Batch, gap
from headrace.model.cluster_errors import Fenced
from headrace.model.durability import Durability
from headrace.model.errors import (
    DiskFull,
    DurabilityUnavailable,
    HeadraceError,
    LogOwned,
    OffsetOutOfRange,
    TooManyFiles,
)
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.storage.beacon import Beacon
from headrace.storage.compaction import Keep, before, compacted, discard, swap, write_copy
from headrace.storage.group_commit import GroupCommitLog
from headrace.storage.meta import NAME, OWNED, Meta, open_meta, store_meta
from headrace.storage.recovery import Findings, LostRange, Recovery, remove_leftovers, remove_segment, verify
from headrace.storage.runtime import StorageRuntime
from headrace.storage.segment import FileSegment, SegmentHeader, segment_path
from headrace.storage.settings import DEFAULT_SETTINGS, LogSettings
from headrace.storage.stored_log import AppendReceipt

logger = logging.getLogger("headrace.storage")


class FileLog(GroupCommitLog):
    """A log in a directory. Appends are written at once and synced in groups, together with other logs'.

    One thread at a time appends; any thread reads. The caller makes sure that no other process writes.
    """

    __slots__ = ("_compacting", "beacon", "findings", "log_id", "owner", "survived_offset")

    def __init__(
        self,
        host: StorageRuntime,
        directory: str,
        settings: LogSettings = DEFAULT_SETTINGS,
        *,
        create: bool = True,
        owned: bool = False,
        repair: bool = False,
        progress: Callable[[int], None] | None = None,
        floor: int = 0,
        lost_floor: int = 0,
        owner: bytes | None = None,
        root: str | None = None,
    ) -> None:
        """Open a log, recovering its files after a crash, or create it.

        :param create: create the log if there is none.
        :param owned: the caller is the broker, whose logs nobody else may write.
        :param repair: check all of the log, not only the part that a crash may have torn.
        :param progress: is called with the number of bytes checked.
        :param floor: no new message gets an offset below it; a gap covers the offsets in between.
        :param lost_floor: messages below it were synced: missing ones are reported as lost.
        :param owner: replaces the owner in the log's record.
        :param root: the directory above the log's parent; the parent is then created too.
        """
        super().__init__(host, directory, settings)
        self.findings = Findings()
        self.beacon: Beacon | None = None
        """Set by a writer whose log other processes follow."""
        self._compacting = threading.Lock()
        if root is not None:
            self._unsynced_directories.append(root)
            host.disk.make_directory(directory.rpartition("/")[0] or "/", sync=False)
        meta = open_meta(host, directory, create=create)
        if meta.owner and not owned:
            raise LogOwned(f"{directory} is a log of a broker, and only the broker writes there")
        self.owner = owner or meta.owner or (OWNED if owned else b"")
        self.log_id, self._first_offset = meta.log_id, meta.first_offset
        self._recover(meta, repair, progress)
        self.survived_offset = self.next_offset
        is_new = not self._segments and not self._first_offset
        self._skip_to(max(lost_floor, self._first_offset), FLAG_LOST)
        self._skip_to(floor, FLAG_COMPACTED)
        if meta.power_lost(host) or meta.owner != self.owner:
            # Only now: a crash before must not make the next recovery believe that the power was never lost.
            self._record_boot(is_new)

    def _recover(self, meta: Meta, repair: bool, progress: Callable[[int], None] | None) -> None:
        host = self.host
        recovery = Recovery(
            host,
            self.directory,
            self.log_id,
            self.findings,
            power_lost=meta.power_lost(host),
            everything=repair,
            progress=progress,
        )
        segments = recovery.segments(self._first_offset)
        self._segments = tuple(segments)
        if segments and segments[0].base_offset > self._first_offset:
            self._begin_at(segments[0].base_offset, is_loss=not meta.is_reconstructed)
        if meta.is_reconstructed and self.next_offset > self._first_offset:
            self.findings.record = f"{self.directory}/{NAME}"
            logger.warning("log record missing or damaged; made up from the segments  directory=%s", self.directory)
        self._synced_offset = self.next_offset
        if segments and segments[-1].checkpoint != segments[-1].end:
            host.disk.sync(segments[-1].file())

    def _record_boot(self, is_new: bool) -> None:
        try:
            self._store_meta(self._first_offset, sync=False)
        except DiskFull as error:
            if is_new:
                raise
            # The next recovery assumes a power loss once more, which is the safe side.
            logger.warning("boot not recorded  directory=%s reason=%s", self.directory, str(error))

    @property
    def first_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._first_offset

    @property
    def location(self) -> str:
        """The directory."""
        return self.directory

    @property
    def size_bytes(self) -> int:
        """The size of all batches in bytes."""
        return sum(segment.end for segment in self._segments)

    @property
    def segments(self) -> Sequence[FileSegment]:
        """The segments now, oldest first."""
        return self._segments

    @property
    def batch_bytes_max(self) -> int:
        """The size of the largest batch that the log takes."""
        return BATCH_BYTES_MAX

    def _layout(self) -> Sequence[FileSegment]:
        return self._segments

    def append(self, batch: Batch, now_us: int, durability: Durability = Durability.MEMORY) -> AppendReceipt:
        """Write a batch, and request a sync if `durability` is synced or replicated; the receipt can wait.

        When this raises, nothing was appended.
        """
        if durability > self.durability_max:
            raise DurabilityUnavailable
        try:
            with self._lock:
                self._check_writable()
                before = self._segments
                base_offset = self.next_offset
                batch.place(base_offset, now_us, self.log_id, self._synced_offset)
                segment = self._segment_for(batch, now_us)
                segment.append(batch)
                next_offset = segment.next_offset
                rolled = self._segments is not before
        except (OSError, Fenced) as error:
            self._fail(error)
            self._report_synced()
            raise self._failed() from error
        if self.beacon is not None:
            self.beacon.publish(next_offset)
        if rolled or durability >= Durability.SYNCED:
            self.request_sync()
        return AppendReceipt(self, base_offset, next_offset)

    def _begin_at(self, offset: int, *, is_loss: bool) -> None:
        """Begin the log at a later offset than its record says, as its first segments are missing."""
        if is_loss:
            self._report_missing(self._first_offset, offset)
        self._first_offset = offset
        self._store_meta(offset, sync=False)

    def _report_missing(self, begin: int, end: int) -> None:
        lost = LostRange(segment_path(self.directory, begin), 0, begin, end, "the segment, or its end, is missing")
        self.findings.lost.append(lost)
        logger.error("messages missing  directory=%s first_offset=%d next_offset=%d", self.directory, begin, end)

    def _skip_to(self, offset: int, flag: int) -> None:
        """Append a gap with this flag, so that the next message gets this offset or a later one."""
        if offset <= self.next_offset:
            return
        if flag == FLAG_LOST and offset > self._first_offset:
            self._report_missing(max(self.next_offset, self._first_offset), offset)
        last = self._segments[-1] if self._segments else None
        time_us, append_time = (max(last.time_max, 0), last.append_time) if last is not None else (0, 0)
        while (missing := offset - self.next_offset) > 0:
            self.append(gap(min(missing, SPAN_MAX), flag, time_us), append_time)
        # Readers inside the gap need not wait for the next append.
        self._sync_now()

    def verify(self, progress: Callable[[int], None] | None = None) -> Findings:
        """Check every byte of the log and change nothing; `progress` is called with the number of bytes checked."""
        return verify(self._segments, self.next_offset, progress)

    def alter(self, settings: LogSettings, now_us: int) -> None:  # noqa: ARG002
        """Use other settings from now on."""
        self.settings = settings

    def set_owner(self, owner: bytes) -> None:
        """Store another owner in the log's record; it is on the disk with the next sync."""
        with self._structure:
            self._check_writable()
            self.owner = owner
            self._store_meta(self._first_offset, sync=False)
            with self._lock:
                self._unsynced_directories.append(self.directory)

    def _store_meta(self, first_offset: int, *, sync: bool) -> None:
        store_meta(self.host, self.directory, self.log_id, first_offset, self.owner, sync=sync)

    def truncate_before(self, offset: int) -> None:
        """Remove the messages before an offset; segments are deleted once all of their messages are."""
        with self._structure:
            self._check_writable()
            if offset > self.next_offset:
                raise OffsetOutOfRange(f"cannot truncate before {offset}: the next offset is {self.next_offset}")
            if offset <= self._first_offset:
                return
            self._sync_now()
            if offset == self.next_offset and self._segments:
                self._add_empty_segment(offset)
            # The new first offset is durable before files are removed: after a crash in between, recovery removes them.
            self._store_meta(offset, sync=True)
            with self._lock:
                self._first_offset = offset
                gone = [segment for segment in self._segments[:-1] if segment.next_offset <= offset]
                self._segments = self._segments[len(gone) :]
            self._changed()
            for segment in gone:
                segment.retire()
                self.host.forget(segment)
                remove_segment(self.host, segment.path)

    def _add_empty_segment(self, offset: int) -> None:
        """Add an empty segment, durably: if all others are removed, its name still holds the next offset."""
        with self._lock:
            last = self._segments[-1]
            if last.base_offset == offset or self.next_offset != offset:
                return
            self._add_segment(last.append_time)
        self._sync_now()

    def truncate_after(self, offset: int) -> None:
        """Remove the messages from an offset on; the next message appended gets that offset."""
        with self._structure:
            self._check_writable()
            if not self._first_offset <= offset <= self.next_offset:
                raise OffsetOutOfRange(f"cannot truncate after {offset}: it is not in the log")
            self._sync_now()
            with self._changing_files():
                # From the end backwards, and the last one replaced: a crash in between leaves a shorter, valid log.
                while self._segments and self._segments[-1].base_offset >= offset:
                    self._drop_last()
                if self.next_offset > offset:
                    self._cut_last(offset)
                self._synced_offset = min(self._synced_offset, offset)

    def compact(self, keep: Keep) -> int:
        """Rewrite sealed segments with only the messages that the rule keeps; returns how many bytes that freed.

        Offsets stay as they are. Reads and appends continue meanwhile.
        """
        with self._compacting:
            with self._structure:
                self._check_writable()
                self._sync_now()
            return sum(self._compact(old, keep) for old in self._segments[:-1])

    def _compact(self, old: FileSegment, keep: Keep) -> int:
        new = write_copy(old, compacted(old, keep))
        with self._structure:
            if new.end >= old.end or old not in self._segments or self._closed:
                discard(new)
                return 0
            with self._changing_files():
                swap(old, new)
                new.seal()
                with self._lock:
                    self._segments = tuple(new if segment is old else segment for segment in self._segments)
            self.host.forget(old)
            self._changed()
        return old.end - new.end

    def close(self, *, is_deleted: bool = False) -> None:
        """Sync everything, seal the last segment so that opening is quick unless it is deleted, and close the files.

        Raises LogFailed, Fenced or TooManyFiles if not everything could be synced; the log is closed then too.
        """
        with self._structure:
            if self._closed:
                return
            postponed = self._try_sync()
            try:
                for segment in self._segments if self._failure is None and postponed is None else ():
                    if is_deleted:
                        segment.retire()
                    elif segment.wants_seal:
                        segment.seal()
            except TooManyFiles as error:
                postponed = error
            except HeadraceError as error:
                self._fail(error)
            self._closed = True
            self._forget_files()
            if self._failure is not None:
                raise self._failed()
            if postponed is not None:
                raise postponed

    def _segment_for(self, batch: Batch, now_us: int) -> FileSegment:
        """The segment to append a batch to: the last one, or a new one when that is full or old."""
        settings = self.settings
        if self._segments:
            segment = self._segments[-1]
            if segment.next_offset == segment.base_offset:
                return segment
            aged = settings.segment_age_us is not None and now_us - segment.created_us >= settings.segment_age_us
            if segment.end + batch.length <= settings.segment_bytes and not aged and not segment.sealed:
                return segment
        return self._add_segment(now_us)

    def _add_segment(self, now_us: int) -> FileSegment:
        path = segment_path(self.directory, self.next_offset)
        header = SegmentHeader.new(self.log_id, self.next_offset, now_us)
        remove_leftovers(self.host, path)
        segment = FileSegment.create(self.host, path, header)
        self._segments = (*self._segments, segment)
        self._unsynced_directories.append(self.directory)
        self._changed()
        return segment

    def _drop_last(self) -> None:
        segment = self._segments[-1]
        segment.retire()
        with self._lock:
            self._segments = self._segments[:-1]
        self._changed(cut=True)
        self.host.forget(segment)
        remove_segment(self.host, segment.path)

    def _cut_last(self, offset: int) -> None:
        old = self._segments[-1]
        old.retire()
        new = write_copy(old, before(old, offset))
        swap(old, new)
        with self._lock:
            self._segments = (*self._segments[:-1], new)
        self.host.forget(old)
        self._changed(cut=True)

    @contextmanager
    def _changing_files(self) -> Iterator[None]:
        """Fail the log if the block does not complete: after an error or an interrupt only opening it again helps."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _changed(self, *, cut: bool = False) -> None:
        if self.beacon is not None:
            self.beacon.announce_change(self._first_offset, cut=cut)
            if cut:
                self.beacon.publish(self.next_offset)
