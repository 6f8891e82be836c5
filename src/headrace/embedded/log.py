"""The embedded log: append from one process, read from any number."""

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from headrace.embedded import process_shared
from headrace.embedded.buffer import (
    BatchColumns,
    Buffer,
    BufferedMessage,
    BufferPortion,
    checked_message,
    portions,
)
from headrace.embedded.cursor import committed_end
from headrace.embedded.readable import Readable, held, whole
from headrace.embedded.repair import checked_path, locked
from headrace.model.arguments import check_callable, shown
from headrace.model.batch import HEADER_BYTES
from headrace.model.codec import Codec
from headrace.model.errors import (
    DiskFull,
    HeadraceError,
    InvalidArgument,
    LogClosed,
    LogFailed,
    LogInUse,
    LogReadOnly,
    MessageTooLarge,
    TooManyFiles,
)
from headrace.model.headers import GivenHeaders
from headrace.model.limits import BATCH_BYTES_MAX, SECONDS_MAX, SEGMENT_BYTES_MIN
from headrace.model.message import Message
from headrace.model.representation import described, short, state_of
from headrace.storage.beacon import Beacon
from headrace.storage.compaction import Keep
from headrace.storage.follower import Follower
from headrace.storage.log import FileLog
from headrace.storage.memory import MemoryLog
from headrace.storage.offline_reader import OfflinePartitionReader
from headrace.storage.ownership import check_not_owned, is_owned
from headrace.storage.recovery import Findings
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import DEFAULT_SETTINGS, LogSettings
from headrace.storage.stored_log import StoredLog

logger = logging.getLogger("headrace.embedded")

MEMORY = ":memory:"
_RETENTION_SEGMENTS = 8
"""The minimum number of segments with which retention, which removes whole segments, is precise enough."""


class Log(Readable):
    """A durable log in a directory, or, with the path ":memory:", a bounded one in memory.

    One process at a time writes; any number read, with `readonly=True`. A broker's log can only be read. Appended
    messages are collected in a buffer:

    - they are *written* (visible to every reader, safe from a killed process) when the buffer is full, on `flush()`,
      at the latest `sync_every` seconds after they were appended, and before this object reads anything;
    - they are *synced* (safe from a power loss) when `flush()` or `close()` returns, including the end of the `with`
      block, and otherwise soon after `sync_every` seconds.

    Example:
        >>> with Log(directory) as log:
        ...     log.append(b"hello")
        ...     log.append(b"world", key=b"k", headers={"lang": "en"})
        ...     [message.value for message in log]
        0
        1
        [b'hello', b'world']
    """

    _written: StoredLog | None = None
    """The stored log, if this process writes it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        readonly: bool = False,
        create: bool = True,
        sync_every: float | None = 0.1,
        compression: str = "none",
        segment_bytes: int | None = None,
        segment_seconds: float | None = None,
        retain_seconds: float | None = None,
        retain_bytes: int | None = None,
        until_consumed: bool = False,
        memory_bytes: int = 256 << 20,
        host: StorageRuntime | None = None,
    ) -> None:
        """Open the log, or create it.

        Parameters:
            path: the directory of the log; `:memory:` for a log in memory.
            readonly: read what another process writes.
            create: create the log if there is none.
            sync_every: seconds after which appended messages are synced automatically; None: never.
            compression: of each batch: none, lz4 or zstd.
            segment_bytes: the size of the log's files; a smaller one frees space in smaller steps.
            segment_seconds: start a new file after so long.
            retain_seconds: remove files whose newest message was appended longer ago.
            retain_bytes: remove the oldest files while the log is larger.
            until_consumed: remove files that every cursor has passed.
            memory_bytes: how much a log in memory holds before it drops the oldest messages.
            host: share files and threads with these logs rather than with all of the process.
        """
        super().__init__()
        self.path = checked_path(path)
        self.readonly = readonly
        self._codec = _codec(compression)
        self._sync_every = None if sync_every is None else float(_positive(sync_every, "sync_every"))
        self._retain_us = _microseconds(retain_seconds, "retain_seconds")
        self._retain_bytes = (
            None if retain_bytes is None else whole(_positive(retain_bytes, "retain_bytes"), "retain_bytes")
        )
        self._until_consumed = until_consumed
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._data = bytearray(HEADER_BYTES)
        self._ticking = False
        """Whether a tick that writes the buffer is scheduled, or none is needed."""
        self._closing = False
        self._released = False
        self._failure: HeadraceError | None = None
        """The error because of which `close` could not sync everything."""
        self._tick_error = ""
        """The error of the last tick, which is logged once and not at every tick."""
        if host is not None and not isinstance(host, StorageRuntime):
            raise InvalidArgument(f"host is a headrace.storage.runtime.StorageRuntime, not {shown(host)}")
        self._host = host or process_shared.host()
        self._disk = self._host.disk
        self._beacon: Beacon | None = None
        settings = self._settings(segment_bytes, _microseconds(segment_seconds, "segment_seconds"))
        self._open(settings, create, memory_bytes)
        self._segments_seen = len(self._stored.segments)
        self._weight_max = BATCH_BYTES_MAX if self._written is None else self._written.batch_bytes_max
        self._buffer = Buffer(self._stored.next_offset)
        process_shared.close_at_exit(self)
        if not readonly:
            self._trim_if_asked()

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        if self.readonly:
            return self._stored.next_offset
        with self._lock:
            return max(self._stored.next_offset, self._buffer.next_offset)

    @property
    def recovery(self) -> Findings:
        """What recovery found and repaired when the log was opened."""
        return Findings() if self._written is None else self._written.findings

    def append(
        self,
        value: bytes | None,
        key: bytes | None = None,
        headers: GivenHeaders | None = None,
        timestamp: int | None = None,
    ) -> int:
        """Append a message. If this raises, the message was not appended.

        Parameters:
            value: bytes; None says that the key is deleted.
            key: the message's key.
            headers: names mapped to text or bytes.
            timestamp: microseconds since 1970; by default the time at which the message is written.

        Returns:
            The offset of the message.

        Raises:
            InvalidArgument: if an argument is wrong.
            MessageTooLarge: if the message is too large for a batch, or for a log in memory.
            LogReadOnly: if the log was opened for reading.
            LogClosed: if the log is closed.
            DiskFull: if the buffer is full and cannot be written.

        Example:
            >>> with Log(directory) as log:
            ...     log.append(b"paid", key=b"order-7", headers={"source": "web"})
            0
        """
        if key is None and headers is None and timestamp is None:
            try:
                offset: int = self._buffer.send(value)
            except (ValueError, StopIteration):
                offset = -1
            if offset >= 0:
                return offset
        message = checked_message(value, key, headers, timestamp)
        with self._lock:
            return self._add(message)

    def append_many(self, values: Iterable[bytes]) -> range:
        """Append messages that have only a value.

        If the disk fills up half-way, `next_offset` says how many were appended.

        Parameters:
            values: bytes each; nothing is appended if one is not.

        Returns:
            The offsets of the messages.

        Raises:
            InvalidArgument: if a value is not bytes.
            LogReadOnly: if the log was opened for reading.
            LogClosed: if the log is closed.
            DiskFull: if the buffer is full and cannot be written.

        Example:
            >>> with Log(directory) as log:
            ...     log.append_many([b"a", b"b", b"c"])
            range(0, 3)
        """
        given = portions(values)
        for portion in given:
            self._check_weight(portion)
        with self._lock:
            if len(given) == 1:
                first = self._add(given[0])
                return range(first, first + len(given[0].values))
            # While the buffer is closed no other thread can append.
            first = self._write(close=True)
            self._see_to_it()
            for portion in given:
                gathered = BatchColumns(self._stored.next_offset)
                gathered.extend(portion)
                self._append(gathered)
            return range(first, self._stored.next_offset)

    def flush(self, *, sync: bool = True) -> int:
        """Write what was appended, so that readers see it, and wait until the disk has it.

        Parameters:
            sync: false to return when it is written, without waiting for the disk.

        Returns:
            The offset before which all messages are that safe.

        Raises:
            DiskFull: if the disk is full; the messages stay in the buffer.
            LogFailed: if the disk failed to sync.
            LogClosed: if the log is closed.

        Example:
            >>> with Log(directory) as log:
            ...     offset = log.append(b"paid")
            ...     log.flush()
            1
        """
        with self._lock:
            self._check_open()
            offset, writer = self._write(), self._writer()
        if sync:
            writer.wait_synced(offset)
        return offset

    def truncate_before(self, offset: int) -> None:
        """Remove the messages before an offset.

        Parameters:
            offset: the first offset that stays.

        Raises:
            OffsetOutOfRange: if the offset is after the end.
            LogReadOnly: if the log was opened for reading.

        Example:
            >>> with Log(directory) as log:
            ...     offsets = log.append_many([b"a", b"b", b"c"])
            ...     log.truncate_before(2)
            ...     log.first_offset
            2
        """
        offset = whole(offset, "an offset")
        with self._lock:
            self._write()
            self._writer().truncate_before(offset)

    def trim(self) -> int:
        """Apply the retention settings now; it also happens automatically.

        Returns:
            The first offset that is left.

        Raises:
            LogReadOnly: if the log was opened for reading.

        Example:
            >>> with Log(directory, retain_seconds=3600) as log:
            ...     log.trim()
            0
        """
        now_us = _now_us()
        with self._lock:
            writer = self._writer()
            writer.retain(now_us, age_us=self._retain_us, bytes_max=self._retain_bytes)
            consumed = self._consumed() if self._until_consumed else None
            if consumed is not None:
                writer.truncate_before(min(consumed, self._stored.next_offset))
        return self.first_offset

    def compact(self, keep: Callable[[Message], bool]) -> int:
        """Remove the messages that a rule does not keep from all files but the newest.

        Offsets stay as they are. Reading and appending continue meanwhile.

        Parameters:
            keep: called with each message; true to keep it.

        Returns:
            How many bytes were freed.

        Raises:
            LogReadOnly: if the log was opened for reading.
            DiskFull: if there is no space for the compacted files.

        Example:
            >>> with Log(directory) as log:
            ...     offset = log.append(b"a")
            ...     log.compact(lambda message: message.value != b"a")
            0
        """
        check_callable(keep, "the rule of compaction")
        self.flush(sync=False)
        return self._writer().compact(_by_message(keep))

    def verify(self, progress: Callable[[int], None] | None = None) -> Findings:
        """Check every byte of the log, and change nothing.

        Parameters:
            progress: called with the number of bytes that were checked.

        Returns:
            The findings: damaged ranges and files.

        Raises:
            LogClosed: if the log is closed.

        Example:
            >>> with Log(directory) as log:
            ...     offset = log.append(b"a")
            ...     findings = log.verify()
        """
        if progress is not None:
            check_callable(progress, "progress")
        self._settle()
        return self._stored.verify(progress)

    def info(self) -> dict[str, Any]:
        """Describe the log.

        Returns:
            Its offsets, sizes, times and settings; `messages` counts the readable ones, `unwritten` those that wait for
            space on the disk.

        Raises:
            LogClosed: if the log is closed.

        Example:
            >>> with Log(directory) as log:
            ...     offset = log.append(b"a")
            ...     log.info()["messages"]
            1
        """
        self._settle()
        end = self._stored.next_offset
        return {
            "path": self.path,
            "first_offset": self.first_offset,
            "next_offset": self.next_offset,
            "messages": end - self.first_offset,
            "unwritten": max(self.next_offset - end, 0),
            "bytes": self._stored.size_bytes,
            "segments": len(self._stored.segments),
            "writer": bool(self._stored.writer_at_work),
            "owner": "broker" if self._is_owned else None,
            "cursors": self.cursors(),
        }

    def close(self) -> None:
        """Write and sync what was appended, and release the log in any case; repeated calls have no effect.

        Raises:
            DiskFull: if messages could not be written; they are lost (`flush()` keeps them).

        Example:
            >>> log = Log(directory)
            >>> log.close()
        """
        with self._lock:
            if self._released:
                return
            if not self.readonly and self._pid != os.getpid():
                self._closed = self._released = True  # a forked child has only a copy of its parent's buffer
                return
            # Each step can be done again, as an interrupt may come between them.
            if not self._closed:
                self._close_stored()
            self._closed = True
            process_shared.closed(self)
            self._wake()
            if self._beacon is not None:
                self._beacon.close()
            self._released = True
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    def _close_stored(self) -> None:
        """Write the buffer and close the stored log; records the error if not everything could be synced."""
        if not self.readonly:
            self._closing = True
            try:
                self._write()
            except HeadraceError as error:
                self._abandon(error)
        try:
            self._stored.close()
        except HeadraceError as error:
            self._failure = self._failure or error

    def _abandon(self, error: HeadraceError) -> None:
        """Drop messages that could not be written before the log is closed, and record the error."""
        end = self._stored.next_offset
        abandoned, fresh = self._buffer, Buffer(end)
        # Atomic: no interrupt can occur between assignments without calls.
        self._buffer = fresh
        self._failure = error
        abandoned.taken = None
        abandoned.take(close=True)  # other threads may still use it
        lost = abandoned.next_offset - end
        if lost > 0 and isinstance(error, DiskFull | TooManyFiles | LogFailed):
            self._failure = type(error)(
                f"{self.path} was closed and lost {lost} message{'s' if lost > 1 else ''} from offset {end} on, which "
                f"could not be written ({error}); when the cause is fixed, open the log and append again",
                messages=lost,
                offset=end,
            )

    def _disown(self) -> None:
        """In a forked child: give up a writer's log, which belongs to the parent, as does its lock.

        A reader continues with locks and files of its own.
        """
        self._lock = threading.RLock()
        self._after_fork()
        if self.readonly:
            self._stored.after_fork()
            if self._beacon is not None:
                self._beacon.forget_sleepers()
            return
        self._buffer = Buffer(0)
        if self._beacon is not None:
            self._beacon.abandon()

    def __del__(self) -> None:
        """Close a writer that was dropped without `close()`, and warn, as its errors are lost. Readers just end."""
        if "_buffer" not in self.__dict__ or self._released or self.readonly or self._pid != os.getpid():
            return
        if sys.is_finalizing():
            return  # other threads have ended anywhere, and may have left locks held
        try:
            self.close()
        except HeadraceError as error:
            logger.error("log dropped without close; messages lost  path=%s reason=%s", self.path, str(error))
        if self.path != MEMORY:
            text = f"unclosed {self!r}: close it, or use it in a with block"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield short(str(self.path))
        yield state_of(closed=self._closed, readonly=self.readonly, of_another_process=self._pid != os.getpid())

    def _open(self, settings: LogSettings, create: bool, memory_bytes: int) -> None:
        if self.path == MEMORY:
            if self.readonly:
                raise InvalidArgument("a log in memory is its process's own: it cannot be opened readonly")
            self._stored = self._written = MemoryLog(whole(memory_bytes, "memory_bytes"))
            return
        self.path = os.path.abspath(self.path)
        if self.readonly:
            self._open_to_read()
            return
        check_not_owned(self._host, self.path)
        live = locked(self._host, self.path, create=create)
        try:
            # A power loss may have lost messages that cursors have passed: new messages must not reuse their offsets.
            floor = committed_end(self._disk, self.path)
            stored = FileLog(self._host, self.path, settings, create=create, floor=floor)
            self._stored = self._written = stored
            self._beacon = Beacon(self._disk, live, write=True)
        except BaseException:
            self._disk.unlock(live)
            raise
        self._beacon.begin(stored.first_offset, stored.next_offset)
        stored.beacon = self._beacon

    def _open_to_read(self) -> None:
        if is_owned(self._host, self.path):
            self._stored, self._is_owned = OfflinePartitionReader(self._host, self.path), True
            return
        follower = Follower(self._host, self.path)
        self._stored, self._beacon = follower, follower.beacon

    def _settings(self, segment_bytes: int | None, segment_age_us: int | None) -> LogSettings:
        if segment_bytes is None:
            segment_bytes = DEFAULT_SETTINGS.segment_bytes
            if self._retain_bytes is not None:
                segment_bytes = max(min(segment_bytes, self._retain_bytes // _RETENTION_SEGMENTS), SEGMENT_BYTES_MIN)
        if segment_age_us is None and self._retain_us is not None:
            segment_age_us = max(self._retain_us // _RETENTION_SEGMENTS, 1)
        return LogSettings(segment_bytes=whole(segment_bytes, "segment_bytes"), segment_age_us=segment_age_us)

    def _begin(self) -> None:
        """Before the first message of a batch: check that the log accepts writes, and schedule its tick."""
        self._see_to_it()
        self._buffer.open(self._stored.next_offset)

    def _see_to_it(self) -> None:
        """Check that the log accepts writes, and schedule the tick that writes and syncs the messages."""
        self._check_open()
        if not self._ticking and not self._closing:
            self._ticking = True
            if self._sync_every is not None and self.path != MEMORY:
                self._tick_later(self._sync_every)

    def _tick_later(self, delay_s: float) -> None:
        # A weak reference: a log that is dropped is closed at once, not at its next tick.
        weak = weakref.WeakMethod(self._tick)

        def tick() -> None:
            call = weak()
            if call is not None:
                call()

        process_shared.ticker().call_later(delay_s, tick)

    def _tick(self) -> None:
        """Write and sync what has waited long enough."""
        with self._lock:
            self._ticking = False
            if self._closed:
                return
            try:
                self._write()
                self._tick_error = ""
            except HeadraceError as error:
                # The messages stay in the buffer; the next append or flush meets the same error and raises it.
                if str(error) != self._tick_error:
                    self._tick_error = str(error)
                    logger.warning("messages not written; trying again  path=%s reason=%s", self.path, str(error))
                self._ticking = not isinstance(error, LogFailed)
                if self._ticking and self._sync_every is not None:
                    self._tick_later(self._sync_every)
            self._writer().request_sync()

    def _add(self, message: BufferedMessage | BufferPortion) -> int:
        """Add to the buffer, and write the buffer if it is full; the caller holds the lock."""
        self._check_weight(message)
        offset = self._buffer.add(message)
        while offset < 0:
            self._write()
            self._begin()
            offset = self._buffer.add(message)
        return offset

    def _check_weight(self, message: BufferedMessage | BufferPortion) -> None:
        """Refuse a message that is too large to be written, as it would block all messages after it."""
        if message.weight > self._weight_max:
            more = "; give the log more memory_bytes" if self.path == MEMORY else ""
            raise MessageTooLarge(
                f"a message of {message.weight} bytes, with its key and headers, is more than the {self._weight_max} "
                f"that this log takes at once{more}"
            )

    def _write(self, *, close: bool = False) -> int:
        """Write the buffer as a batch; if this raises, the messages stay for the next attempt.

        Returns the offset of the next message. The caller holds the lock.
        """
        self._write_taken()  # a batch whose last write failed
        # While a tick is scheduled the buffer stays open; otherwise a batch begins by scheduling one.
        self._buffer.take(close=close or self._closing or not self._ticking)
        self._write_taken()
        return self._stored.next_offset

    def _write_taken(self) -> None:
        taken = self._buffer.taken
        if taken is not None:
            self._append(taken)
            self._buffer.taken = None

    def _append(self, gathered: BatchColumns) -> None:
        if self._stored.next_offset == gathered.base_offset:  # otherwise an interrupt occurred after it was written
            now_us = _now_us()
            self._writer().append(gathered.batch(now_us, self._codec, self._data), now_us)
        assert self._stored.next_offset == gathered.base_offset + len(gathered.values)
        if self.path == MEMORY:
            self._wake()
        elif len(self._stored.segments) != self._segments_seen:
            self._trim_if_asked()

    def _trim_if_asked(self) -> None:
        if self._retain_us is not None or self._retain_bytes is not None or self._until_consumed:
            self.trim()
        self._segments_seen = len(self._stored.segments)

    def _settle(self, timeout_s: float | None = None) -> bool:
        if self._closed:
            raise LogClosed
        self._stored.refresh()
        if self.readonly:
            return True
        self._check_open()
        with held(self._lock, timeout_s) as acquired:
            if acquired:
                self._check_open()
                with contextlib.suppress(DiskFull, TooManyFiles, LogFailed):  # written messages can be read
                    self._write()
        return acquired

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed
        if self.readonly:
            raise LogReadOnly
        if self._pid != os.getpid():
            raise LogInUse(
                "the log was opened before this process was forked off, and is its parent's; open it again with "
                "readonly=True, or another to write"
            )

    def _writer(self) -> StoredLog:
        self._check_open()
        assert self._written is not None
        return self._written


def _by_message(keep: Callable[[Message], bool]) -> Keep:
    return lambda batch: [index for index, message in enumerate(batch.messages()) if keep(message)]


def _codec(name: str) -> Codec:
    try:
        return Codec[name.upper()]
    except (KeyError, AttributeError):
        raise InvalidArgument(f"compression is none, lz4 or zstd, not {shown(name)}") from None


def _positive(number: Any, name: str, below: float = float("inf")) -> Any:
    try:
        fits = number is None or (not isinstance(number, str | bytes) and 0 < float(number) < below)
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        limit = "" if below == float("inf") else f" and below {below:.0e}"
        raise InvalidArgument(f"{name} must be a number above 0{limit}, or None, not {shown(number)}")
    return number


def _microseconds(seconds: float | None, name: str) -> int | None:
    return None if seconds is None else max(int(float(_positive(seconds, name, SECONDS_MAX)) * 1_000_000), 1)


def _now_us() -> int:
    return time.time_ns() // 1000
