"""Durable positions in a log: named cursors, and the position that all consumers share."""

import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.model.arguments import shown
from headrace.model.errors import Closed, CursorInUse, InvalidArgument
from headrace.model.message import Message
from headrace.model.representation import described, short, state_of
from headrace.storage.disk import Disk
from headrace.storage.record import SlottedRecord

if TYPE_CHECKING:
    from headrace.embedded.readable import Readable

DIRECTORY = "cursors"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_POSITION = struct.Struct("<Q")
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.0005, 0.02
"""The pause between attempts to get another process's file lock, which has no timeout of its own, in seconds."""


def checked_name(name: str) -> str:
    """Validate the name of a cursor, which becomes a file name; returns it."""
    if type(name) is not str or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{shown(name)} cannot be the name of a cursor: use 1 to 200 letters, digits, '_', '-' and '.', not "
            "beginning with '.'"
        )
    return name


def load_offset(disk: Disk, path: str) -> int | None:
    """Read the offset from a cursor's file; None if there is no file."""
    return _offset(SlottedRecord(disk, path, write=False))


def committed_end(disk: Disk, log_directory: str) -> int:
    """Return the greatest offset of all cursors of a log, including the shared one."""
    directory = f"{log_directory}/{DIRECTORY}"
    offsets = (load_offset(disk, f"{directory}/{name}") for name in disk.names(directory))
    return max((offset for offset in offsets if offset is not None), default=0)


def _offset(record: SlottedRecord) -> int | None:
    content = record.load()
    return None if content is None else int(_POSITION.unpack(content)[0])


class Position:
    """A durable offset in a file, which one holder has locked."""

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        disk.make_directory(directory)
        self._disk = disk
        path = f"{directory}/{name}"
        new = not disk.exists(path)
        self._record = SlottedRecord(disk, path, write=True, create=True)
        if new:
            disk.sync_directory(directory)

    def lock(self, timeout_s: float | None = 0.0) -> bool:
        """Become the holder, waiting so long at most, or for ever; whether that came about."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _PAUSE_S_MIN
        while not self._disk.lock(self._record.file):
            left = pause_s if deadline is None else min(deadline - time.monotonic(), pause_s)
            if left <= 0:
                return False
            time.sleep(left)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        return True

    def unlock(self) -> None:
        """Let another be the holder."""
        self._disk.unlock(self._record.file)

    def load(self) -> int | None:
        """The offset, or None when there is none yet."""
        return _offset(self._record)

    def store(self, offset: int) -> None:
        """Store an offset durably."""
        self._record.store(_POSITION.pack(offset))


class MemoryPosition:
    """An offset in memory, for a log in memory."""

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._offset: int | None = None

    def lock(self, timeout_s: float | None = 0.0) -> bool:
        """Become the holder, waiting so long at most, or for ever; whether that came about."""
        return self._held.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0.0))

    def unlock(self) -> None:
        """Let another be the holder."""
        self._held.release()

    def load(self) -> int | None:
        """The offset, or None when there is none yet."""
        return self._offset

    def store(self, offset: int) -> None:
        """Keep an offset."""
        self._offset = offset


class Cursor:
    """A named position in a log that survives restarts. Iterating reads on from it; `commit` stores it.

    Example:
        >>> with Log(directory) as log:
        ...     offsets = log.append_many([b"a", b"b", b"c"])
        ...     with log.cursor("billing") as cursor:
        ...         first = next(iter(cursor))
        ...         cursor.commit()
        ...     with log.cursor("billing") as cursor:
        ...         [message.value for message in cursor]
        [b'b', b'c']
    """

    def __init__(self, log: "Readable", name: str, position: Position | MemoryPosition) -> None:
        if not position.lock():
            raise CursorInUse(f"cursor {name} is open elsewhere; close it there or use another name")
        self.name = name
        self._log = log
        self._position = position
        try:
            stored = position.load()
            self._committed = log.first_offset if stored is None else stored
            if stored is None:
                position.store(self._committed)
        except BaseException:
            position.unlock()
            raise
        self._next = self._committed
        self._pid = os.getpid()
        self._open = True

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield short(self.name)
        yield f"offset={self._next} committed={self._committed}"
        yield state_of(closed=not self._open, of_another_process=self._pid != os.getpid())

    @property
    def offset(self) -> int:
        """The offset of the message that comes next."""
        return self._next

    @property
    def committed(self) -> int:
        """The offset at which reading resumes after a restart."""
        return self._committed

    @property
    def lag(self) -> int:
        """How many offsets there are from the committed one to the end of the log."""
        return max(self._log.next_offset - self._committed, 0)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over the messages from the position to the current end."""
        return self.messages()

    def messages(self, *, skip_corrupt: bool = False) -> Iterator[Message]:
        """Iterate over the messages from the position to the end of the log.

        Parameters:
            skip_corrupt: skip damaged messages.

        Yields:
            The messages.

        Raises:
            CorruptBatch: if messages are damaged; iterating again continues after them.

        Example:
            >>> with Log(directory) as log, log.cursor("billing") as cursor:
            ...     offset = log.append(b"a")
            ...     [message.value for message in cursor.messages(skip_corrupt=True)]
            [b'a']
        """
        for message in self._log.messages(self._start(), skip_corrupt=skip_corrupt):
            self._next = message.offset + 1
            yield message

    def tail(self, timeout: float | None = None, *, skip_corrupt: bool = False) -> Iterator[Message]:
        """Iterate over the messages from the position, and wait for new ones.

        Parameters:
            timeout: end after so many seconds without a message; by default never.
            skip_corrupt: skip damaged messages.

        Yields:
            The messages.

        Raises:
            CorruptBatch: if messages are damaged; iterating again continues after them.

        Example:
            >>> with Log(directory) as log, log.cursor("billing") as cursor:
            ...     offset = log.append(b"a")
            ...     [message.value for message in cursor.tail(timeout=0.1)]
            [b'a']
        """
        for message in self._log.tail(self._start(), timeout=timeout, skip_corrupt=skip_corrupt):
            self._next = message.offset + 1
            yield message

    def commit(self, offset: int | None = None) -> None:
        """Store the position durably.

        Parameters:
            offset: the next offset to read; by default the one after the last message that was read.

        Raises:
            OffsetOutOfRange: if the offset is not in the log.
            LogClosed: if the cursor or the log is closed.

        Example:
            >>> with Log(directory) as log, log.cursor("billing") as cursor:
            ...     offset = log.append(b"a")
            ...     cursor.commit(1)
            ...     cursor.committed
            1
        """
        committed = self._next if offset is None else self._checked(offset)
        if not self._open:
            raise Closed(f"cursor {self.name} is closed")
        if self._pid != os.getpid():
            raise CursorInUse(
                f"cursor {self.name} was opened before this process was forked off, and is its parent's; open another"
            )
        self._position.store(committed)
        self._committed = committed

    def seek(self, offset: int | None = None, *, time: int | None = None) -> None:
        """Move to an offset or a time, without committing.

        Parameters:
            offset: the next offset to read.
            time: or the first message of this time or later, in microseconds since 1970.

        Raises:
            OffsetOutOfRange: if the offset is not in the log.
            InvalidArgument: if neither or both are given.

        Example:
            >>> with Log(directory) as log, log.cursor("billing") as cursor:
            ...     offsets = log.append_many([b"a", b"b"])
            ...     cursor.seek(1)
            ...     [message.value for message in cursor]
            [b'b']
        """
        if (offset is None) == (time is None):
            raise InvalidArgument("seek to an offset or to a time")
        self._next = self._log.find_time(time) if time is not None else self._checked(offset or 0)

    def close(self) -> None:
        """Let others open the cursor; what was not committed is read again.

        Raises:
            DiskFailed: if its file cannot be closed.

        Example:
            >>> with Log(directory) as log:
            ...     cursor = log.cursor("billing")
            ...     cursor.close()
        """
        if self._open:
            self._open = False
            if self._pid == os.getpid():  # a forked child shares the lock, and must not release it
                self._position.unlock()

    def __enter__(self) -> "Cursor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> int:
        # Skips messages that retention has removed.
        return max(self._next, self._log.first_offset)

    def _checked(self, offset: int) -> int:
        if type(offset) is not int or not 0 <= offset <= self._log.next_offset:
            raise InvalidArgument(f"offset {shown(offset)} is not between 0 and {self._log.next_offset}, the log's end")
        return offset
