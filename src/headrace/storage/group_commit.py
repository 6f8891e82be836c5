"""Group commit of a log in files: one sync for all appends that wait, on the flusher thread or inline."""

import logging
import threading
from collections.abc import Sequence
from copy import copy
from typing import ClassVar

from headrace.model.cluster_errors import IN_DOUBT_TEXT, Fenced
from headrace.model.durability import Durability
from headrace.model.errors import DiskFull, HeadraceError, LogClosed, LogFailed, LogNotFound, Timeout, TooManyFiles
from headrace.storage.meta import sync_meta
from headrace.storage.runtime import StorageRuntime
from headrace.storage.segment import FileSegment, SegmentReplaced
from headrace.storage.settings import LogSettings
from headrace.storage.stored_log import StoredLog, SyncCallback
from headrace.storage.worker import SHARD_LOST

logger = logging.getLogger("headrace.storage")

_SMALL_BACKLOG_BYTES = 64 << 10


class GroupCommitLog(StoredLog):
    """The half of a file log that makes its segments durable and reports to those who wait; see FileLog.

    A failed sync is final: nobody knows what is on the disk, and the log takes no more messages.
    """

    __slots__ = (
        "_closed",
        "_failure",
        "_first_offset",
        "_generation",
        "_lock",
        "_segments",
        "_structure",
        "_synced_offset",
        "_unsynced_directories",
        "_waiting",
        "directory",
        "durability_max",
        "host",
        "settings",
    )

    durable: ClassVar[bool] = True
    append_durability: ClassVar[Durability] = Durability.WRITTEN

    def __init__(self, host: StorageRuntime, directory: str, settings: LogSettings) -> None:
        super().__init__(host.lookups)
        self.host = host
        self.directory = directory
        self.settings = settings
        self.durability_max = Durability.REPLICATED if host.disk.is_replicated else Durability.SYNCED
        self._lock = threading.Lock()
        self._structure = threading.RLock()
        """Held while files are synced, replaced or removed."""
        self._generation = 0
        """Counts syncs that were waited for: what began before them is synced, and may have been removed since."""
        self._waiting: list[tuple[int, SyncCallback]] = []
        self._failure: LogFailed | Fenced | None = None
        self._closed = False
        self._first_offset = self._synced_offset = 0
        self._segments: tuple[FileSegment, ...] = ()
        # The process that created the log may have crashed before its directory was on the disk.
        self._unsynced_directories = [directory, directory.rpartition("/")[0] or "/"]

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        # Not a field of its own: an interrupt might come between the update of a segment and of the field.
        segments = self._segments
        return segments[-1].next_offset if segments else self._first_offset

    @property
    def synced_offset(self) -> int:
        """All messages before this offset are on the disk."""
        return self._synced_offset

    @property
    def is_small_backlog(self) -> bool:
        """Whether there is something to sync, but only a few bytes."""
        segments = self._segments
        return bool(segments) and 0 < segments[-1].end - segments[-1].synced_end <= _SMALL_BACKLOG_BYTES

    @property
    def sync_latency_s(self) -> float:
        """How long a small sync takes, about."""
        return self.host.inline_sync.latency_s

    def awaits_sync(self, offset: int) -> bool:
        """Whether a sync would make messages before an offset more durable than they are."""
        return self._synced_offset < offset

    def reached(self, offset: int) -> Durability:
        """The durability that all messages before an offset have now."""
        return self.durability_max if self._synced_offset >= offset else Durability.WRITTEN

    def request_sync(self) -> None:
        """Have the flusher sync what has been written by now, or sync inline if that is small and the disk is quick."""
        policy = self.host.inline_sync
        inline = policy.allows and self.is_small_backlog and not self._needs_more_than_one_sync()
        if not inline or not self._structure.acquire(blocking=False):
            self.host.flusher.submit(self._sync)
            return
        began = policy.now()
        try:
            self._sync()
        finally:
            self._structure.release()
            policy.record_inline(policy.now() - began)

    def _needs_more_than_one_sync(self) -> bool:
        """Whether the next sync also syncs directories or saves the index."""
        last = self._segments[-1]
        return bool(self._unsynced_directories) or last.end - last.checkpoint >= self.settings.checkpoint_bytes

    def wait_synced(self, offset: int, timeout_s: float | None = None) -> None:
        """Return when all messages before an offset are on the disk."""
        if self._synced_offset >= offset:
            return
        # A bare lock, as an interrupt does not harm it.
        gate = threading.Lock()
        gate.acquire()
        reported: list[HeadraceError | None] = []

        def report(error: HeadraceError | None) -> None:
            reported.append(error)
            gate.release()

        self.when_synced(offset, report)
        if not gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise Timeout(f"the messages before offset {offset} were not synced in {timeout_s} s")
        if reported[0] is not None:
            raise copy(reported[0])

    def when_synced(self, offset: int, callback: SyncCallback) -> None:
        """Call back, on the flusher thread or this one, when all messages before an offset are on the disk.

        Or with the error, when they cannot be.
        """
        with self._lock:
            waits = self._synced_offset < offset and self._failure is None
            if waits:
                self._waiting.append((offset, callback))
        if waits:
            self.request_sync()
        else:
            callback(self._failure)

    @property
    def overlaps_syncs(self) -> bool:
        """Whether the next sync is better requested before the last is done."""
        return self.host.disk.overlaps_syncs

    def _sync(self) -> None:
        """Sync what has been written by now, in the order in which it was written, and report to those who wait."""
        if not self._begin_sync():
            self._try_sync()

    def _begin_sync(self) -> bool:
        """Begin a sync of what has been written by now; False if there is more to do than that, or it has to wait."""
        disk = self.host.disk
        if not disk.overlaps_syncs:
            return False
        with self._structure:
            with self._lock:
                segments, target, generation = self._segments, self.next_offset, self._generation
                if self._closed or self._failure is not None or not segments or self._needs_more_than_one_sync():
                    return False
                last, end, small = segments[-1], segments[-1].end, self.is_small_backlog
            began = self.host.inline_sync.now()

            def done(error: HeadraceError | None) -> None:
                took_s = self.host.inline_sync.now() - began
                if error is not None:
                    self._fail(error)
                elif small:
                    self.host.inline_sync.record_latency(took_s)
                with self._lock:
                    if error is None and generation == self._generation:
                        self.host.sync_counts.add(took_s, max(end - last.synced_end, 0))
                        self._synced_offset = max(self._synced_offset, target)
                        last.synced_end = max(last.synced_end, end)
                self._report_synced()

            try:
                return disk.begin_sync(last.file(), done)
            except TooManyFiles:
                return False

    def _try_sync(self) -> TooManyFiles | None:
        """Sync; returns why that was not possible yet. Those who wait get the reason, and a later sync does it."""
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
        self._report_synced(postponed)
        return postponed

    def _sync_now(self) -> None:
        """Sync on this thread, or raise."""
        postponed = self._try_sync()
        if postponed is not None:
            raise postponed
        self._check_writable()

    def _sync_written(self) -> None:
        with self._lock:
            self._generation += 1
            target = self.next_offset
            segments = self._segments
            summary = segments[-1].summary() if segments else None
            small = self.is_small_backlog
            directories, self._unsynced_directories = self._unsynced_directories, []
        began = self.host.inline_sync.now()
        try:
            self._sync_files(segments, directories)
        except BaseException:  # an interrupt, or no descriptor: the next sync does it
            with self._lock:
                self._unsynced_directories = directories + self._unsynced_directories
            raise
        self._synced_offset = target
        if summary is None:
            return
        took_s = self.host.inline_sync.now() - began
        if small and not directories:
            self.host.inline_sync.record_latency(took_s)
        last = segments[-1]
        self.host.sync_counts.add(took_s, max(summary.end - last.synced_end, 0))
        if summary.end - last.checkpoint >= self.settings.checkpoint_bytes:
            last.save_index(summary)
        last.synced_end = summary.end
        # Zeros ahead halve the time of a small sync, but only cost when much is written between syncs, or when a shared
        # store has it instead of the local disk.
        if small and not self.host.disk.is_replicated and last.needs_zeros_ahead(self.settings.ahead_bytes_max):
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
            logger.debug("zeros ahead not written  directory=%s reason=%s", self.directory, str(error))
        except Exception as error:  # noqa: BLE001 a failed sync here is as bad as the flusher's: the system reports it only once
            self._fail(error)
            self._report_synced()
        finally:
            if self._closed:  # meanwhile, and the file may have been opened once more since
                self._forget_files()

    def _forget_files(self) -> None:
        for segment in self._segments:
            self.host.forget(segment)

    def _report_synced(self, postponed: TooManyFiles | None = None) -> None:
        """Call back those who wait for what is synced now; all of them if the sync failed or was postponed."""
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

    def _check_writable(self) -> None:
        if self._closed:
            raise LogClosed
        if self._failure is not None:
            raise self._failed()

    def _fail(self, error: BaseException) -> None:
        """Never sync again: after a failed sync the system may have dropped the data and forgotten that it did."""
        if self.host.disk.is_replicated:
            self._stop_serving(error)
            return
        self._failure = LogFailed(
            f"{self.directory} could not be written or synced ({error!r}); messages from offset {self._synced_offset} "
            "on may not survive a power loss. The log is read-only until it is opened again: check the disk first"
        )
        logger.error(
            "log failed; read-only until it is opened again  directory=%s synced_offset=%d reason=%r",
            self.directory,
            self._synced_offset,
            error,
        )

    def _stop_serving(self, error: BaseException) -> None:
        """Fail a log of a cluster: what is not committed is not acknowledged, and another node goes on.

        With it or without it: the store may have got what it has not answered, so this is never NotServing.
        """
        if self._failure is not None:
            return
        self._failure = Fenced(f"this node of the cluster no longer serves: {IN_DOUBT_TEXT} ({error})")
        # All logs of a disk that was fenced or abandoned fail at the same time, and its owner logs that once.
        level = logging.DEBUG if isinstance(error, SHARD_LOST) else logging.ERROR
        text = "log failed; this node must stop serving  directory=%s synced_offset=%d reason=%r"
        logger.log(level, text, self.directory, self._synced_offset, error)
        self.host.disk.on_failure(error)

    def _failed(self) -> LogFailed | Fenced:
        assert self._failure is not None
        return type(self._failure)(str(self._failure))
