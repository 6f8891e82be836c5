"""A log in files: segments in order, one writer, group commit."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy

from headrace.model.batch import FLAG_COMPACTED, FLAG_LOST, SPAN_MAX, Batch, gap
from headrace.model.durability import Durability
from headrace.model.errors import (
    DiskFull,
    HeadraceError,
    LogClosed,
    LogFailed,
    LogNotFound,
    LogOwned,
    OffsetOutOfRange,
    Timeout,
    TooManyFiles,
)
from headrace.storage.append_receipt import AppendReceipt
from headrace.storage.beacon import Beacon
from headrace.storage.compaction import Keep, before, compacted, discard, swap, write_copy
from headrace.storage.meta import OWNED, open_meta, store_meta, sync_meta
from headrace.storage.reader import LogReader, retention_offset
from headrace.storage.recovery import Findings, LostRange, Recovery, remove_leftovers, remove_segment
from headrace.storage.runtime import StorageRuntime
from headrace.storage.segment import FileSegment, SegmentHeader, SegmentReplaced, segment_path
from headrace.storage.settings import DEFAULT_SETTINGS, LogSettings

logger = logging.getLogger("headrace.storage")

_LITTLE_BYTES = 64 << 10


class FileLog(LogReader):
    """A log in a directory. Appends are written at once and synced in groups, together with other logs'.

    One thread at a time appends; any thread reads. The caller sees to it that no other process writes.
    """

    __slots__ = (
        "_closed",
        "_compacting",
        "_failure",
        "_first_offset",
        "_lock",
        "_segments",
        "_structure",
        "_synced_offset",
        "_unsynced_directories",
        "_waiting",
        "beacon",
        "directory",
        "findings",
        "host",
        "log_id",
        "owner",
        "settings",
        "survived_offset",
    )

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
        """Open a log, bringing its files in order after a crash, or make a new one.

        A broker's is `owned`, and who is not the broker is refused then; an `owner` is kept in the log's record, in
        place of the one there. To `repair` is to look at all of it, not only at what a crash may have torn; progress is
        told in bytes. No new message has an offset below the `floor`: if the log ends before it, a gap covers the
        offsets in between. Messages below the `lost_floor` were synced: if they are missing, they are reported as lost.
        `root` is the directory above the log's parent, which is then made too.
        """
        super().__init__(host.lookups)
        self.host = host
        self.directory = directory
        self.settings = settings
        self.findings = Findings()
        """What recovery found when the log was opened."""
        self.beacon: Beacon | None = None
        """Set by who wants other processes to see the log grow."""
        self._lock = threading.Lock()
        self._structure = threading.RLock()
        """Held while files are synced, replaced or removed."""
        self._compacting = threading.Lock()
        self._waiting: list[tuple[int, Callable[[HeadraceError | None], None]]] = []
        self._failure: LogFailed | None = None
        self._closed = False
        # Whoever made the log may have crashed before its directory was on the disk.
        parent = directory.rpartition("/")[0] or "/"
        self._unsynced_directories = [directory, parent]
        if root is not None:
            self._unsynced_directories.append(root)
            host.disk.make_directory(parent, sync=False)
        meta = open_meta(host, directory, create=create)
        if meta.owner and not owned:
            raise LogOwned(f"{directory} is a log of a broker, and only the broker writes there")
        self.owner = owner or meta.owner or (OWNED if owned else b"")
        self.log_id, self._first_offset = meta.log_id, meta.first_offset
        recovery = Recovery(
            host,
            directory,
            self.log_id,
            self.findings,
            power_lost=meta.power_lost(host),
            everything=repair,
            progress=progress,
        )
        segments = recovery.segments(self._first_offset)
        self._segments: tuple[FileSegment, ...] = tuple(segments)
        if segments and segments[0].base_offset > self._first_offset:
            self._begin_at(segments[0].base_offset, is_loss=bool(meta.boot_id))
        self._synced_offset = self.next_offset
        if segments and segments[-1].checkpoint != segments[-1].end:
            host.disk.sync(segments[-1].file())
        self.survived_offset = self.next_offset
        """The end of what was found in the files; less than the first new offset if there is a gap between them."""
        self._skip_to(max(lost_floor, self._first_offset), FLAG_LOST)
        self._skip_to(floor, FLAG_COMPACTED)
        if meta.power_lost(host) or meta.owner != self.owner:
            # Only now: a crash before must not make the next recovery believe that the power was never lost.
            self._note_boot(new=not segments and not self._first_offset)

    def _note_boot(self, *, new: bool) -> None:
        try:
            self._store_meta(self._first_offset, sync=False)
        except DiskFull as error:
            if new:
                raise
            # The next recovery takes the power for lost once more, which is the more careful way.
            logger.warning("boot not recorded  directory=%s reason=%s", self.directory, str(error))

    @property
    def first_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        # Not a field of its own: an interrupt might come between a segment's growing and the field's.
        segments = self._segments
        return segments[-1].next_offset if segments else self._first_offset

    @property
    def synced_offset(self) -> int:
        """All messages before this offset are on the disk."""
        return self._synced_offset

    @property
    def size_bytes(self) -> int:
        """How many bytes the log's batches take."""
        return sum(segment.end for segment in self._segments)

    @property
    def segments(self) -> Sequence[FileSegment]:
        """The segments now, oldest first."""
        return self._segments

    def _layout(self) -> Sequence[FileSegment]:
        return self._segments

    def append(self, batch: Batch, now_us: int, durability: Durability = Durability.WRITTEN) -> AppendReceipt:
        """Write a batch, and have it synced soon if that is asked for. Returns at once; the receipt can wait.

        When this raises, nothing was appended.
        """
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
        except OSError as error:
            self._fail(error)
            self._tell()
            raise self._failed() from error
        if self.beacon is not None:
            self.beacon.publish(next_offset)
        if rolled or durability is Durability.SYNCED:
            self.request_sync()
        return AppendReceipt(self, base_offset, next_offset, Durability.WRITTEN)

    def request_sync(self) -> None:
        """Have the flusher sync soon what has been written by now; or do it here, if it is little and soon done."""
        quickness = self.host.quickness
        here = quickness.is_here and self.is_small_backlog and not self._has_chores()
        if not here or not self._structure.acquire(blocking=False):
            self.host.flusher.submit(self._sync)
            return
        began = quickness.now()
        try:
            self._sync()
        finally:
            self._structure.release()
            quickness.waited(quickness.now() - began)

    def _has_chores(self) -> bool:
        """Whether more is to be done than to sync one file."""
        last = self._segments[-1]
        return bool(self._unsynced_directories) or last.end - last.checkpoint >= self.settings.checkpoint_bytes

    @property
    def is_small_backlog(self) -> bool:
        """Whether there is something to be synced, but not much."""
        return bool(self._segments) and 0 < self._segments[-1].end - self._segments[-1].synced_end <= _LITTLE_BYTES

    def wait_synced(self, offset: int, timeout_s: float | None = None) -> None:
        """Return when all messages before an offset are on the disk."""
        if self._synced_offset >= offset:
            return
        # A bare lock, as an interrupt does not harm it.
        gate = threading.Lock()
        gate.acquire()
        told: list[HeadraceError | None] = []

        def tell(error: HeadraceError | None) -> None:
            told.append(error)
            gate.release()

        self.when_synced(offset, tell)
        if not gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise Timeout(f"the messages before offset {offset} were not synced in {timeout_s} s")
        if told[0] is not None:
            raise copy(told[0])

    def when_synced(self, offset: int, callback: Callable[[HeadraceError | None], None]) -> None:
        """Call back, from the flusher's thread or this one, when all messages before an offset are on the disk.

        Or when they cannot be.
        """
        with self._lock:
            waits = self._synced_offset < offset and self._failure is None
            if waits:
                self._waiting.append((offset, callback))
        if waits:
            self.request_sync()
        else:
            callback(self._failure)

    def _begin_at(self, offset: int, *, is_loss: bool) -> None:
        """The log begins later than its record says: its first segments are missing."""
        if is_loss:
            self._report_missing(self._first_offset, offset)
        self._first_offset = offset
        self._store_meta(offset, sync=False)

    def _report_missing(self, begin: int, end: int) -> None:
        lost = LostRange(segment_path(self.directory, begin), 0, begin, end, "the segment, or its end, is missing")
        self.findings.lost.append(lost)
        logger.error("messages missing  directory=%s first_offset=%d next_offset=%d", self.directory, begin, end)

    def _skip_to(self, offset: int, flag: int) -> None:
        """Let the next message have this offset, or a later one; a gap with this flag covers those before."""
        if offset <= self.next_offset:
            return
        if flag == FLAG_LOST and offset > self._first_offset:
            self._report_missing(max(self.next_offset, self._first_offset), offset)
        last = self._segments[-1] if self._segments else None
        time_us, append_time = (max(last.time_max, 0), last.append_time) if last is not None else (0, 0)
        while (missing := offset - self.next_offset) > 0:
            self.append(gap(min(missing, SPAN_MAX), flag, time_us), append_time)
        # Readers that go on in the gap need not wait for what is published next.
        self._sync_now()

    def set_owner(self, owner: bytes) -> None:
        """Keep another owner in the log's record; it is on the disk with what is synced next."""
        with self._structure:
            self._check_writable()
            self.owner = owner
            self._store_meta(self._first_offset, sync=False)
            with self._lock:
                self._unsynced_directories.append(self.directory)

    def _store_meta(self, first_offset: int, *, sync: bool) -> None:
        store_meta(self.host, self.directory, self.log_id, first_offset, self.owner, sync=sync)

    def truncate_before(self, offset: int) -> None:
        """Forget the messages before an offset; whole segments of them are removed."""
        with self._structure:
            self._check_writable()
            if offset > self.next_offset:
                raise OffsetOutOfRange(f"cannot truncate before {offset}: the next offset is {self.next_offset}")
            if offset <= self._first_offset:
                return
            self._sync_now()
            if offset == self.next_offset and self._segments:
                self._begin_anew(offset)
            # The new beginning is durable before anything is removed: a crash in between leaves files to remove.
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

    def _begin_anew(self, offset: int) -> None:
        """Start an empty segment, durably: if all others go, its name still tells which offset comes next."""
        with self._lock:
            last = self._segments[-1]
            if last.base_offset == offset or self.next_offset != offset:
                return
            self._add_segment(last.append_time)
        self._sync_now()

    def retain(self, now_us: int, *, age_us: int | None = None, bytes_max: int | None = None) -> int:
        """Forget whole segments that are too old, or too many bytes from the end; returns the first offset left."""
        self.truncate_before(retention_offset(self._segments, now_us, age_us, bytes_max))
        return self._first_offset

    def truncate_after(self, offset: int) -> None:
        """Forget the messages from an offset on; the next message appended gets that offset."""
        with self._structure:
            self._check_writable()
            if not self._first_offset <= offset <= self.next_offset:
                raise OffsetOutOfRange(f"cannot truncate after {offset}: it is not in the log")
            self._sync_now()
            with self._changing_files():
                # From the end backwards, and the last one swapped: a crash in between leaves a shorter, whole log.
                while self._segments and self._segments[-1].base_offset >= offset:
                    self._drop_last()
                if self.next_offset > offset:
                    self._cut_last(offset)
                self._synced_offset = min(self._synced_offset, offset)

    def compact(self, keep: Keep) -> int:
        """Rewrite sealed segments with only the messages that the rule keeps; returns how many bytes that freed.

        Offsets stay as they are. Readers go on undisturbed, and appending too.
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

    def close(self) -> None:
        """Sync everything, seal the last segment so that opening is quick, and let go of the files.

        Raises LogFailed or TooManyFiles if not everything could be synced; the log is closed then too.
        """
        with self._structure:
            if self._closed:
                return
            postponed = self._try_sync()
            try:
                for segment in self._segments if self._failure is None and postponed is None else ():
                    if segment.wants_seal:
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

    def _sync(self) -> None:
        """Sync what has been written by now, in the order in which it was written, and tell who waits for it."""
        self._try_sync()

    def _try_sync(self) -> TooManyFiles | None:
        """Sync; returns why it could not be tried. Whoever waits is told that, and a later sync does it."""
        postponed = None
        with self._structure:
            if not self._closed and self._failure is None:
                try:
                    self._sync_written()
                except TooManyFiles as error:
                    postponed = error
                    logger.warning("sync postponed  directory=%s reason=%s", self.directory, str(error))
                except Exception as error:  # noqa: BLE001 whatever it was, what is on the disk is unknown now
                    self._fail(error)
        self._tell(postponed)
        return postponed

    def _sync_or_wait(self) -> None:
        postponed = self._try_sync()
        if postponed is not None:
            raise postponed

    def _sync_now(self) -> None:
        self._sync_or_wait()
        self._check_writable()

    def _sync_written(self) -> None:
        with self._lock:
            target = self.next_offset
            segments = self._segments
            summary = segments[-1].summary() if segments else None
            little = self.is_small_backlog
            directories, self._unsynced_directories = self._unsynced_directories, []
        began = self.host.quickness.now()
        try:
            self._sync_files(segments, directories)
        except BaseException:  # an interrupt, or no descriptor: the next sync does it
            with self._lock:
                self._unsynced_directories = directories + self._unsynced_directories
            raise
        self._synced_offset = target
        if summary is None:
            return
        if little and not directories:
            self.host.quickness.took(self.host.quickness.now() - began)
        last = segments[-1]
        if summary.end - last.checkpoint >= self.settings.checkpoint_bytes:
            last.save_index(summary)
        last.synced_end = summary.end
        # Zeros ahead halve the time of a small sync, but only cost when much is written between syncs.
        if little and last.wants_room(self.settings.ahead_bytes_max):
            self.host.preparer.submit(self._prepare)

    def _sync_files(self, segments: Sequence[FileSegment], directories: list[str]) -> None:
        if directories:
            sync_meta(self.host, self.directory)
        for segment in segments[:-1] if directories else ():
            if segment.wants_seal:  # it was rolled since the last time
                segment.seal()
        if segments:
            self.host.disk.sync(segments[-1].file())
        for directory in dict.fromkeys(directories):
            self.host.disk.sync_directory(directory)

    def _prepare(self) -> None:
        """Fill the last segment with zeros ahead of the writer."""
        try:
            for segment in self._segments[-1:]:
                if not self._closed and self._failure is None:
                    segment.prepare(self.settings.ahead_bytes_max)
        except (DiskFull, TooManyFiles, SegmentReplaced, LogNotFound) as error:
            logger.debug("no room prepared ahead  directory=%s reason=%s", self.directory, str(error))
        except Exception as error:  # noqa: BLE001 a failed sync here is as bad as the flusher's: the system tells only once
            self._fail(error)
            self._tell()
        finally:
            if self._closed:  # meanwhile, and the file may have been opened once more since
                self._forget_files()

    def _forget_files(self) -> None:
        for segment in self._segments:
            self.host.forget(segment)

    def _tell(self, postponed: TooManyFiles | None = None) -> None:
        with self._lock:
            synced, error = self._synced_offset, self._failure or postponed
            waiting, self._waiting = self._waiting, []
            if error is None:
                self._waiting = [each for each in waiting if each[0] > synced]
        for offset, callback in waiting:
            if offset <= synced:
                callback(None)
            elif error is not None:
                callback(error)

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
        """A part that must not end half-way: if it does, by an error or an interrupt, only opening again helps."""
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

    def _check_writable(self) -> None:
        if self._closed:
            raise LogClosed
        if self._failure is not None:
            raise self._failed()

    def _fail(self, error: BaseException) -> None:
        """Never sync again: after a failed sync the system may have dropped the data and forgotten that it did."""
        self._failure = LogFailed(
            f"{self.directory} could not be written or synced ({error!r}); messages from offset {self._synced_offset} "
            "on may not survive a power loss. The log is read-only until it is opened again: check the disk first"
        )
        logger.error("%s", self._failure)

    def _failed(self) -> LogFailed:
        assert self._failure is not None
        return LogFailed(str(self._failure))
