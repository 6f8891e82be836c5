"""The write-ahead log of one epoch at its writer: cuts recorded operations into objects, and commits them in order.

No I/O, no threads, no clock: WalWriter drives it, and tests simulate it.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum

from headrace.model.errors import Fenced, HeadraceError, UnsupportedFormat
from headrace.storage.replicated.operations import (
    FRAME_BYTES,
    OPERATIONS,
    SEAL,
    WRITE_HEAD_BYTES,
    DamagedObject,
    WalHeader,
    decode_header,
    encode_object,
    encode_write_head,
)
from headrace.storage.stores.store import OBJECT_BYTES_MAX

IN_FLIGHT_MAX = 4
"""An object is put only when the one so many before it is committed: where that is absent, it was lost, not late."""
EAGER_BYTES = 256 << 10
"""So much is put without anybody waiting for it."""
PART_BYTES = 1 << 20
"""Larger writes are recorded in parts of at most this size, so that they fit into objects."""
_ALIGNED = 4096

Waiter = Callable[[], None]


class PutOutcome(Enum):
    """What follows from a put that was answered with "exists"."""

    COMMITTED = "committed"
    """The object is this writer's own: an answer was lost."""
    AGAIN = "again"
    """Put the same bytes once more."""
    FENCED = "fenced"
    """Another has the position: this writer's epoch is over."""


class PendingObject:
    """An object that was cut, and is not known to be committed yet."""

    __slots__ = ("_data", "_parts", "attempts", "began", "bytes", "is_put", "last", "operations", "position")

    def __init__(self, position: int, parts: list[bytes], size: int, operations: int, last: int) -> None:
        self.position = position
        self._parts = parts
        self.bytes = size
        self.operations = operations
        self.last = last
        """The sequence of its last operation."""
        self.is_put = False
        self.attempts = 0
        """How often it was put; the writer counts."""
        self.began = 0.0
        """When it was put first, by the writer's clock."""
        self._data: bytes | None = None

    def encoded(self, epoch: int, nonce: bytes, now_us: Callable[[], int]) -> bytes:
        """The bytes to put: always the same ones, with the time of the first call."""
        if self._data is None:
            header = WalHeader(OPERATIONS, epoch, self.position, nonce, now_us(), self.operations)
            self._data = encode_object(header, self._parts)
            self._parts = []
        return self._data


class WriteAheadLog:
    """The operations that the owner of an epoch records, and what is known of their objects in the store.

    A *sequence* counts operations: the n-th recorded has sequence n. Objects are cut in order, handed out by `next_put`
    in order, may be acknowledged in any order, and are committed in order.
    """

    def __init__(self, epoch: int, nonce: bytes, position: int = 0) -> None:
        """Begin at the first free position of the epoch."""
        self.epoch = epoch
        self.nonce = nonce
        self.recorded = 0
        """The sequence of the last operation recorded."""
        self.committed = 0
        """The sequence of the last operation of which, and of all before it, the store has the objects."""
        self.committed_objects = position
        """The position of the first object that is not known to be committed."""
        self.backlog_bytes = 0
        """Of operations that are recorded and not committed."""
        self.failure: HeadraceError | None = None
        """Why nothing is recorded or committed any more."""
        self._cut_sequence = 0
        self._wanted = 0
        self._parts: list[bytes] = []
        self._bytes = 0
        self._position = position
        self._waiting_to_put: deque[PendingObject] = deque()
        self._put: dict[int, PendingObject] = {}
        """Handed out and not committed, by position."""
        self._in_flight = 0
        self._waiters: list[tuple[int, Waiter]] = []

    @property
    def in_flight(self) -> int:
        """How many objects are being put."""
        return self._in_flight

    @property
    def position(self) -> int:
        """The position of the next object that will be cut."""
        return self._position

    # Recording.

    def record(self, operation: bytes) -> None:
        """Record an encoded operation."""
        size = len(operation)
        if self._bytes + size > OBJECT_BYTES_MAX - FRAME_BYTES:
            self.cut()
        self._parts.append(operation)
        self._bytes += size
        self.backlog_bytes += size
        self.recorded += 1

    def record_write(self, file_id: int, position: int, data: bytes) -> None:
        """Record a Write; the data must not change any more. A large one becomes several operations."""
        size = WRITE_HEAD_BYTES + len(data)
        if size > PART_BYTES:
            self._record_parts(file_id, position, data)
            return
        if self._bytes + size > OBJECT_BYTES_MAX - FRAME_BYTES:
            self.cut()
        self._parts += (encode_write_head(file_id, position, len(data)), data)
        self._bytes += size
        self.backlog_bytes += size
        self.recorded += 1

    def _record_parts(self, file_id: int, position: int, data: bytes) -> None:
        """Split at aligned positions of the file: a write of 512 aligned bytes is in one object."""
        at = 0
        while at < len(data):
            end = (position + at + PART_BYTES - WRITE_HEAD_BYTES) // _ALIGNED * _ALIGNED - position
            self.record_write(file_id, position + at, data[at:end])
            at = end

    # Cutting and putting.

    def cut(self) -> int:
        """End the object here, if it has any operation; returns the position of the next one."""
        if self.recorded > self._cut_sequence:
            made = PendingObject(
                self._position, self._parts, self._bytes, self.recorded - self._cut_sequence, self.recorded
            )
            self._waiting_to_put.append(made)
            self._parts, self._bytes = [], 0
            self._cut_sequence = self.recorded
            self._position += 1
        return self._position

    def want(self, sequence: int) -> None:
        """Put everything up to an operation as soon as the number of puts in flight allows it."""
        self._wanted = max(self._wanted, sequence)

    @property
    def has_put(self) -> bool:
        """Whether `next_put` has an object."""
        if len(self._put) >= IN_FLIGHT_MAX or self.failure is not None:
            return False
        return bool(self._waiting_to_put) or self._wanted > self._cut_sequence or self._bytes >= EAGER_BYTES

    def next_put(self) -> PendingObject | None:
        """The next object to put, or None if there is nothing to do, or enough is in flight."""
        if not self.has_put:
            return None
        if not self._waiting_to_put:
            self.cut()
        made = self._waiting_to_put.popleft()
        self._put[made.position] = made
        self._in_flight += 1
        return made

    def acknowledge(self, position: int) -> list[Waiter]:
        """Note that the store has an object; returns those whose wait is over, for the caller to call."""
        if self.failure is not None:
            return []  # it may be there, and nobody is told
        self._put[position].is_put = True
        self._in_flight -= 1
        while (first := self._put.get(self.committed_objects)) is not None and first.is_put:
            del self._put[first.position]
            self.committed = first.last
            self.committed_objects += 1
            self.backlog_bytes -= first.bytes
        done = [waiter for sequence, waiter in self._waiters if sequence <= self.committed]
        if done:
            self._waiters = [each for each in self._waiters if each[0] > self.committed]
        return done

    def compare(self, found: bytes | None) -> PutOutcome:
        """Decide what follows when a put was answered with "exists", by what is there."""
        if found is None:
            return PutOutcome.AGAIN  # the store contradicts itself; only a put or an object decides
        try:
            header = decode_header(found)
        except (DamagedObject, UnsupportedFormat):
            return PutOutcome.FENCED  # not ours: ours was put whole
        is_own = header.nonce == self.nonce and header.epoch == self.epoch and header.kind == OPERATIONS
        return PutOutcome.COMMITTED if is_own else PutOutcome.FENCED

    def fenced_error(self, position: int, found: bytes) -> Fenced:
        """The error that says who has the position of an object."""
        what = "an object of another writer"
        try:
            header = decode_header(found)
        except (DamagedObject, UnsupportedFormat) as error:
            what = f"an object that cannot be read ({error})"
        else:
            if header.kind == SEAL:
                what = f"the seal of epoch {header.sealed_by}"
        return Fenced(f"epoch {self.epoch} is over: position {position} has {what}", epoch=self.epoch)

    # Waiting and failing.

    def wait(self, sequence: int, waiter: Waiter) -> bool:
        """Have a waiter returned by `acknowledge` or `fail`; False if it need not wait."""
        if self.committed >= sequence or self.failure is not None:
            return False
        self.want(sequence)
        self._waiters.append((sequence, waiter))
        return True

    def stop_waiting(self, waiter: Waiter) -> None:
        """Forget a waiter."""
        self._waiters = [each for each in self._waiters if each[1] is not waiter]

    def fail(self, error: HeadraceError) -> list[Waiter]:
        """End it: nothing is recorded, put or committed any more; returns all waiters, for the caller to call."""
        if self.failure is None:
            self.failure = error
        waiters, self._waiters = [waiter for _, waiter in self._waiters], []
        self._parts, self._bytes = [], 0
        self._waiting_to_put.clear()
        self._put.clear()
        self._in_flight = 0
        return waiters
