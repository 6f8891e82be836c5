"""The beacon of a log: a page of memory that the writer shares with reading processes, which wait for it to change.

On Linux they wait in a futex, on the low half of the word that holds the next offset: the writer wakes them within tens
of microseconds, and waiting costs nothing. Elsewhere they poll every millisecond.
"""

import ctypes
import errno
import functools
import platform
import sys
import threading
import time

from headrace.model.errors import LogNotFound
from headrace.storage.disk import Disk, OpenFile

_MAGIC = int.from_bytes(b"HRLIVE01", "little")
_PAGE_BYTES = 4096
# The words of the page, eight bytes each.
_MAGIC_AT, _SESSION, _CHANGES, _CUTS, _FIRST, _NEXT = range(6)

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 0x7FFFFFFF
_QUIET = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)
_POLL_S = 0.001


class Beacon:
    """The first and next offset of a log, for all processes of this machine. Nothing here is trusted after a crash.

    Each word is stored and loaded atomically, and independently of the others.
    """

    def __init__(self, disk: Disk, file: OpenFile, *, write: bool) -> None:
        """Map the page. A writer holds the file's lock, and `close` releases it."""
        if write:
            # Real blocks now, or a full disk would kill the process when the page is touched; whoever copied the file
            # may have left holes in it.
            disk.write(file, 0, disk.read(file, 0, _PAGE_BYTES).ljust(_PAGE_BYTES, b"\0"))
        elif disk.size(file) < _PAGE_BYTES:
            raise LogNotFound(f"{file.path} is empty; no log was ever written there")
        self._released = True
        self._disk = disk
        self._locked = file if write else None
        page = disk.map(file, _PAGE_BYTES, write=write)
        self._words = page.cast("Q")
        self._sleepers: set[int] = set()
        self._futex = _futex(page, _NEXT * 8)
        self._closed = self._released = False

    @property
    def session(self) -> int:
        """Counts the times a writer has opened the log."""
        return self._words[_SESSION]

    @property
    def changes(self) -> int:
        """Counts the times the log's files have changed: one added, replaced or removed."""
        return self._words[_CHANGES]

    @property
    def cuts(self) -> int:
        """Counts the times messages were taken back from the end of the log."""
        return self._words[_CUTS]

    @property
    def first_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._words[_FIRST]

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        return self._words[_NEXT]

    def begin(self, first_offset: int, next_offset: int) -> None:
        """Announce a new writer, and wake those who wait."""
        words = self._words
        words[_MAGIC_AT] = _MAGIC
        words[_FIRST] = first_offset
        self._count(_CHANGES)
        self._count(_CUTS)
        words[_NEXT] = next_offset
        self._count(_SESSION)
        self._futex.wake()

    def publish(self, next_offset: int) -> None:
        """Make messages visible that are written already, and wake those who wait for them."""
        self._words[_NEXT] = next_offset
        self._futex.wake()

    def announce_change(self, first_offset: int, *, cut: bool = False) -> None:
        """Announce that files changed, before messages in new files are published."""
        self._words[_FIRST] = first_offset
        if cut:
            self._count(_CUTS)
        self._count(_CHANGES)

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Sleep until next_offset differs from `seen`, a signal arrives or time is up; returns whether it differs."""
        me = threading.get_ident()
        try:
            self._sleepers.add(me)
            if not self._closed and self._words[_NEXT] == seen:
                self._futex.sleep(seen, timeout_s)
            return not self._closed and self._words[_NEXT] != seen
        finally:
            self._sleepers.discard(me)

    def _count(self, word: int) -> None:
        self._words[word] = (self._words[word] + 1) % (1 << 64)  # whatever stood there

    def abandon(self) -> None:
        """In a forked child: release the page, whatever threads of the parent did with it, and leave the lock."""
        self._sleepers = set()
        self._locked = None
        self.close()

    def forget_sleepers(self) -> None:
        """In a forked child that continues reading: the sleepers are threads of the parent."""
        self._sleepers = set()

    def close(self) -> None:
        """Release the page, once nobody sleeps on it, and the lock; the last values can still be read."""
        if self._released:
            return
        # Each step can be repeated, as an interrupt may come between them.
        self._closed = True
        while self._sleepers:
            self._futex.wake()
            time.sleep(_POLL_S)
        self._futex.close()
        # The mapping goes with its last view: another thread may just be reading a word.
        self._words = memoryview(bytes(self._words)).cast("Q")
        if self._locked is not None:
            # Explicitly: the file may still be open elsewhere, as in a forked child or in the frames of an error.
            self._disk.unlock(self._locked)
            self._locked = None
        self._released = True

    def __del__(self) -> None:
        if not getattr(self, "_released", True) and not sys.is_finalizing():  # files may be closed already then
            self.close()


class _Polling:
    """Waiting by polling, where there is no futex."""

    def sleep(self, _: int, timeout_s: float) -> None:
        """Sleep for a moment."""
        time.sleep(min(timeout_s, _POLL_S))

    def wake(self) -> None:
        """Nobody sleeps for long."""

    def close(self) -> None:
        """Nothing is held."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _PyBuffer(ctypes.Structure):
    # CPython's Py_buffer, of which only the first field is read.
    _fields_ = (("address", ctypes.c_void_p), ("rest", ctypes.c_char * 128))


class _Futex(_Polling):
    """Waiting in the kernel on a 32-bit word of a shared page."""

    def __init__(self, page: object, position: int, number: int) -> None:
        # A page mapped for reading only has an address too, but ctypes gives it only by the C interface.
        self._buffer = _PyBuffer()
        self._python = ctypes.PyDLL(None)
        get_buffer = self._python.PyObject_GetBuffer
        get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
        get_buffer(page, ctypes.addressof(self._buffer), 0)
        word = (ctypes.c_long(number), ctypes.c_void_p(self._buffer.address + position))
        # Waiting lets other threads run meanwhile; waking is too short for that.
        waiting = ctypes.CDLL(None, use_errno=True).syscall
        self._wait = functools.partial(waiting, *word, ctypes.c_int(_FUTEX_WAIT))
        self.wake = functools.partial(  # type: ignore[method-assign]
            self._python.syscall, *word, ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_ALL)
        )

    def sleep(self, seen: int, timeout_s: float) -> None:
        """Sleep until the word differs, a signal arrives, or time is up."""
        span = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        if self._wait(ctypes.c_uint32(seen & 0xFFFFFFFF), ctypes.byref(span)) and ctypes.get_errno() not in _QUIET:
            super().sleep(seen, timeout_s)  # a sandbox that forbids it

    def close(self) -> None:
        """Release the page."""
        self._python.PyBuffer_Release(ctypes.byref(self._buffer))


def _futex(page: object, position: int) -> _Polling:
    number = _FUTEX_CALL.get(platform.machine())
    if sys.platform != "linux" or sys.implementation.name != "cpython" or number is None or sys.maxsize < 1 << 32:
        return _Polling()
    return _Futex(page, position, number)
