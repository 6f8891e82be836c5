"""Reading an embedded log: by offset, by time, by cursor, and waiting for new messages."""

import contextlib
import errno
import operator
import sys
import threading
import time as clock
from collections.abc import Iterator
from itertools import chain, dropwhile, islice, takewhile
from typing import Any, overload

from headrace.embedded.cursor import DIRECTORY, Cursor, MemoryPosition, Position, checked_name, load_offset
from headrace.model.arguments import checked_timeout, shown
from headrace.model.batch import Batch
from headrace.model.errors import (
    CorruptBatch,
    DiskFailed,
    InvalidArgument,
    LogOwned,
    LogReadOnly,
    MessageGone,
    OffsetOutOfRange,
)
from headrace.model.message import Message
from headrace.storage.beacon import Beacon
from headrace.storage.disk import Disk
from headrace.storage.reader import LogReader

_SHARED = ".shared"
_WAIT_S = 0.25
"""The longest single sleep, which bounds how late a signal or a close is noticed, in seconds."""

_PATIENCE_S = 0.05
"""The minimum time that `consume` waits for the lock of the shared position, in seconds."""
_LOOK_S = 0.02
"""The polling interval for a broker's log, which has no beacon for waiting readers, in seconds."""


class Readable:
    """The read operations of a log, in the process that writes it or in another."""

    _stored: LogReader
    _beacon: Beacon | None
    _disk: Disk
    path: str

    def __init__(self) -> None:
        self._positions: dict[str, MemoryPosition] = {}
        self._shared: Position | MemoryPosition | None = None
        self._shared_lock = threading.RLock()
        self._gates: list[threading.Lock] = []
        """Locks on which readers wait for a log in memory to grow."""
        self._closed = False
        self._is_owned = False
        """Whether this is a broker's log, in which other programs may not store cursors."""

    def _settle(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002
        """Make appended messages of this process readable; returns whether that was done in time."""
        return True

    @property
    def first_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._stored.first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        return self._stored.next_offset

    def __len__(self) -> int:
        """How many offsets the log holds; messages that compaction removed count too."""
        return self.next_offset - self.first_offset

    def __bool__(self) -> bool:
        """Return True: an empty log is not false."""
        return True

    def read(self, offset: int) -> Message:
        """Read the message at an offset.

        Parameters:
            offset: the offset; negative ones count from the end.

        Returns:
            The message.

        Raises:
            OffsetOutOfRange: if there is no message at the offset.
            MessageGone: if compaction removed it.
            CorruptBatch: if it is damaged.

        Example:
            >>> with Log(directory) as log:
            ...     offsets = log.append_many([b"a", b"b"])
            ...     log.read(1).value
            b'b'
        """
        offset = whole(offset, "an offset")
        self._settle()
        if not self._stored.first_offset <= offset < self._stored.next_offset:
            there = f"the log has {self.first_offset} up to {self._stored.next_offset}"
            raise OffsetOutOfRange(f"there is no message at offset {shown(offset)}; {there}")
        for message in self.messages(offset, until=offset + 1):
            return message
        raise MessageGone(f"the message at offset {offset} was removed by compaction")

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        """Return the message at an offset, or those in a range of offsets; negative offsets count from the end."""
        if isinstance(at, slice):
            if at.step is not None and whole(at.step, "the step of a slice") != 1:
                raise InvalidArgument("slices of a log have no step")
            first, following = self.first_offset, self.next_offset
            start = first if at.start is None else _from_end(at.start, following)
            stop = following if at.stop is None else _from_end(at.stop, following)
            return list(self.messages(min(max(start, first), following), until=stop))
        return self.read(_from_end(at, self.next_offset))

    def __iter__(self) -> Iterator[Message]:
        """Iterate over all messages, up to the current end."""
        return self.messages()

    def messages(
        self, start: int | None = None, *, time: int | None = None, until: int | None = None, skip_corrupt: bool = False
    ) -> Iterator[Message]:
        """Iterate over the messages from an offset or a time to the end of the log as it is now.

        Parameters:
            start: the first offset; by default the oldest message.
            time: or start with the first message of this time or later, in microseconds since 1970.
            until: end before this offset.
            skip_corrupt: skip damaged messages.

        Yields:
            The messages.

        Raises:
            CorruptBatch: if messages are damaged; it says where to continue.
            OffsetOutOfRange: if `start` is not in the log.

        Example:
            >>> with Log(directory) as log:
            ...     offsets = log.append_many([b"a", b"b", b"c"])
            ...     [message.value for message in log.messages(start=1)]
            [b'b', b'c']
        """
        self._settle()
        start = self._start(start, time)
        until = None if until is None else whole(until, "an offset")
        batches = self._stored.batches(start, until=until, skip_corrupt=skip_corrupt)
        messages = chain.from_iterable(map(Batch.messages, batches))
        later = dropwhile(lambda message: message.offset < start, messages)
        return later if until is None else takewhile(lambda message: message.offset < until, later)

    def batches(
        self, start: int | None = None, *, time: int | None = None, until: int | None = None, skip_corrupt: bool = False
    ) -> Iterator[Batch]:
        """Iterate over whole batches, the fastest way to read: `batch.columns().values` is a list of the values.

        The first batch may begin before `start`, and the last may end after `until`.

        Parameters:
            start: as for `messages`.
            time: as for `messages`.
            until: as for `messages`.
            skip_corrupt: as for `messages`.

        Yields:
            The batches.

        Raises:
            CorruptBatch: if messages are damaged; it says where to continue.
            OffsetOutOfRange: if `start` is not in the log.

        Example:
            >>> with Log(directory) as log:
            ...     offsets = log.append_many([b"a", b"b", b"c"])
            ...     [batch.columns().values for batch in log.batches()]
            [[b'a', b'b', b'c']]
        """
        self._settle()
        until = None if until is None else whole(until, "an offset")
        return self._stored.batches(self._start(start, time), until=until, skip_corrupt=skip_corrupt)

    def tail(
        self,
        start: int | None = None,
        *,
        time: int | None = None,
        timeout: float | None = None,
        skip_corrupt: bool = False,
    ) -> Iterator[Message]:
        """Iterate over messages as they arrive, from an offset, a time, or by default from now on.

        Ends when the log is closed, or after `timeout` seconds without a message.

        Parameters:
            start: the first offset; by default the next message.
            time: or start with the first message of this time or later, in microseconds since 1970.
            timeout: end after so many seconds without a message; by default never.
            skip_corrupt: skip damaged messages.

        Yields:
            The messages.

        Raises:
            CorruptBatch: if messages are damaged; it says where to continue.
            OffsetOutOfRange: if `start` is not in the log.

        Example:
            >>> with Log(directory) as log:
            ...     offset = log.append(b"a")
            ...     [message.value for message in log.tail(start=0, timeout=0.1)]
            [b'a']
        """
        if timeout is not None:
            checked_timeout(timeout)  # evaluated now, not when the first message is requested
        return self._tail(start, time, timeout, skip_corrupt)

    def _tail(
        self, start: int | None, time: int | None, timeout: float | None, skip_corrupt: bool
    ) -> Iterator[Message]:
        if not self._settle(_left(_deadline(timeout))):
            return
        offset = self.next_offset if start is None and time is None else self._start(start, time)
        while self.wait(offset, timeout):
            end = self._stored.next_offset
            for batch in self._stored.batches(offset, until=end, skip_corrupt=skip_corrupt):
                for message in batch.messages():
                    if message.offset >= offset:
                        yield message
                offset = batch.next_offset
            offset = max(offset, end)  # the range up to the end may contain only gaps

    def wait(self, offset: int, timeout: float | None = None) -> bool:
        """Wait until there is a message at an offset or after it, without polling.

        Parameters:
            offset: the offset.
            timeout: for how many seconds; by default without limit.

        Returns:
            Whether there is one.

        Raises:
            LogClosed: if the log is closed.

        Example:
            >>> with Log(directory) as log:
            ...     log.wait(0, timeout=0.01)
            False
        """
        deadline = _deadline(timeout)
        offset = whole(offset, "an offset")
        if not self._settle(_left(deadline)):
            return False
        while not self._closed:
            seen = self._stored.next_offset if self._beacon is None else self._beacon.next_offset
            if self._stored.next_offset > offset:
                return True
            left = _WAIT_S if deadline is None else min(deadline - clock.monotonic(), _WAIT_S)
            if left <= 0:
                return False
            self._sleep(seen, left)
        return False

    def find_time(self, time: int) -> int:
        """Find the first message with a timestamp, or a later one.

        Parameters:
            time: microseconds since 1970.

        Returns:
            Its offset; the next offset if there is none.

        Raises:
            LogClosed: if the log is closed.

        Example:
            >>> with Log(directory) as log:
            ...     offset = log.append(b"a", timestamp=1_700_000_000_000_000)
            ...     log.find_time(1_600_000_000_000_000)
            0
        """
        self._settle()
        return self._stored.find_time(whole(time, "a time in microseconds"))

    def cursor(self, name: str) -> Cursor:
        """Open the durable cursor of a name; a new one starts with the oldest message.

        Parameters:
            name: the cursor's name.

        Returns:
            The cursor.

        Raises:
            CursorInUse: if another reader has it open.
            LogOwned: if the log is a broker's.
            InvalidArgument: if the name is wrong.

        Example:
            >>> with Log(directory) as log, log.cursor("billing") as cursor:
            ...     cursor.offset
            0
        """
        return Cursor(self, checked_name(name), self._position(name))

    def cursors(self) -> dict[str, int]:
        """List the cursors.

        Returns:
            Their names, mapped to their committed offsets.

        Raises:
            LogClosed: if the log is closed.

        Example:
            >>> with Log(directory) as log:
            ...     offset = log.append(b"a")
            ...     with log.cursor("billing") as cursor:
            ...         cursor.commit(1)
            ...     log.cursors()
            {'billing': 1}
        """
        return {name: offset for name, offset in self._offsets().items() if name != _SHARED}

    def consume(self, max_messages: int = 1, *, timeout: float | None = 0.0) -> list[Message]:
        """Take the next messages, which no other consumer of this log gets.

        All consumers, in any process, share one durable position. It has moved when this returns: a consumer that fails
        then has consumed the messages. Use a cursor to read messages again until they are committed. Damaged messages
        raise CorruptBatch once, to one consumer.

        Parameters:
            max_messages: how many at most.
            timeout: how many seconds to wait for a message; None waits without limit.

        Returns:
            The messages; none if none arrive in time.

        Raises:
            CorruptBatch: if the next messages are damaged; they count as consumed.
            LogOwned: if the log is a broker's.
            LogClosed: if the log is closed.

        Example:
            >>> with Log(directory) as log:
            ...     offsets = log.append_many([b"a", b"b", b"c"])
            ...     [message.value for message in log.consume(2)]
            [b'a', b'b']
        """
        if whole(max_messages, "max_messages") < 1:
            raise InvalidArgument(f"max_messages must be 1 at least, not {shown(max_messages)}")
        deadline = _deadline(timeout)
        while True:
            # Other consumers usually hold the lock only briefly, so wait for it even with a timeout of 0.
            patience = None if deadline is None else max(deadline - clock.monotonic(), _PATIENCE_S)
            found = self._take(max_messages, patience)
            if found is None:
                return []
            taken, offset = found
            if taken or self._closed:
                return taken
            left = _left(deadline)
            if left == 0 or not self.wait(offset, left):
                return []

    def _take(self, max_messages: int, timeout_s: float | None) -> tuple[list[Message], int] | None:
        """Return the next messages and the offset after them; None if the shared position stayed locked too long."""
        deadline = _deadline(timeout_s)
        if not self._settle(timeout_s):
            return None
        with held(self._shared_lock, _left(deadline)) as acquired:
            if not acquired:
                return None
            if self._shared is None:
                self._shared = self._position(_SHARED)
            return self._take_from(self._shared, max_messages, deadline)

    def _take_from(
        self, position: Position | MemoryPosition, max_messages: int, deadline: float | None
    ) -> tuple[list[Message], int] | None:
        if not position.lock(_left(deadline)):  # between processes
            return None
        try:
            offset = max(position.load() or 0, self.first_offset)
            end = self._stored.next_offset
            taken = self._next_messages(position, offset, max_messages)
            if taken:
                offset = taken[-1].offset + 1
                position.store(offset)
            return taken, offset if taken else max(offset, end)
        finally:
            position.unlock()

    def _next_messages(self, position: Position | MemoryPosition, offset: int, max_messages: int) -> list[Message]:
        """Return messages from an offset up to damaged ones; if the first are damaged, skip them and raise."""
        taken: list[Message] = []
        try:
            taken.extend(islice(self.messages(offset), min(max_messages, sys.maxsize)))
        except CorruptBatch as error:
            if not taken:
                position.store(error.next_offset)
                raise
        return taken

    def _consumed(self) -> int | None:
        """Return the offset that every cursor has passed; None if there is no cursor."""
        return min(self._offsets().values(), default=None)

    def _offsets(self) -> dict[str, int]:
        """Return the offsets of all cursors, including the shared one; needs no write permission."""
        if self._beacon is None:
            offsets = {name: position.load() for name, position in self._positions.items()}
        else:
            directory = f"{self.path}/{DIRECTORY}"
            offsets = {name: load_offset(self._disk, f"{directory}/{name}") for name in self._disk.names(directory)}
        return {name: offset for name, offset in offsets.items() if offset is not None}

    def _position(self, name: str) -> Position | MemoryPosition:
        if self._is_owned:
            raise LogOwned(f"{self.path} is a broker's log; read its topic in a group to store a position")
        if self._beacon is None:
            return self._positions.setdefault(name, MemoryPosition())
        try:
            return Position(self._disk, f"{self.path}/{DIRECTORY}", name)
        except DiskFailed as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise LogReadOnly(f"cursors of {self.path} need write permission there: {error}") from error

    def _start(self, start: int | None, time: int | None) -> int:
        if start is not None and time is not None:
            raise InvalidArgument("start at an offset or at a time, not both")
        if time is not None:
            return self._stored.find_time(whole(time, "a time in microseconds"))
        return self._stored.first_offset if start is None else whole(start, "an offset")

    def _sleep(self, seen: int, timeout_s: float) -> None:
        if self._beacon is not None:
            self._beacon.wait(seen, timeout_s)
            return
        if self._is_owned:
            clock.sleep(min(timeout_s, _LOOK_S))
            self._stored.refresh()
            return
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        if self._stored.next_offset == seen and not self._closed:
            gate.acquire(timeout=timeout_s)
        with contextlib.suppress(ValueError):  # a writer has released it
            self._gates.remove(gate)

    def _after_fork(self) -> None:
        """In a forked child: replace the locks and the handle of the shared position."""
        self._shared = None
        self._shared_lock = threading.RLock()
        self._gates = []

    def _wake(self) -> None:
        """Wake the readers that wait for a log in memory to grow."""
        gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()


@contextlib.contextmanager
def held(lock: Any, timeout_s: float | None) -> Iterator[bool]:
    """Hold a reentrant lock in the block; yields whether it was acquired in time. No interrupt leaves it locked."""
    if lock._is_owned():
        yield True
        return
    try:
        yield lock.acquire(timeout=-1 if timeout_s is None else timeout_s)
    finally:
        if lock._is_owned():  # also when the interrupt came just after it was acquired
            lock.release()


def whole(number: int, what: str) -> int:
    """Validate a whole number and return it."""
    try:
        return operator.index(number)
    except TypeError:
        raise InvalidArgument(f"{what} is a whole number, not {shown(number)}") from None


def _from_end(offset: int, following: int) -> int:
    """Resolve an offset of a slice: a negative one counts from the end."""
    offset = whole(offset, "an offset")
    return offset if offset >= 0 else offset + following


def _deadline(timeout_s: float | None) -> float | None:
    """Return the deadline of a timeout; None for no timeout."""
    return None if timeout_s is None else clock.monotonic() + checked_timeout(timeout_s)


def _left(deadline: float | None) -> float | None:
    """Return the seconds left until the deadline, at least 0."""
    return None if deadline is None else max(deadline - clock.monotonic(), 0.0)
