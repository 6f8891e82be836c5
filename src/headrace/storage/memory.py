"""A log in memory, bounded in bytes: messages that no longer fit are dropped or spilled to another log."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from headrace.model.batch import Batch
from headrace.model.durability import Durability
from headrace.model.errors import (
    BatchTooLarge,
    DurabilityUnavailable,
    InvalidArgument,
    LimitExceeded,
    LogClosed,
    OffsetOutOfRange,
)
from headrace.storage.compaction import Keep, before, compacted
from headrace.storage.disk import OpenFile
from headrace.storage.index import Index
from headrace.storage.lookups import Lookups
from headrace.storage.recovery import Findings
from headrace.storage.segment import TIME_NONE, Segment, note
from headrace.storage.settings import LogSettings
from headrace.storage.stored_log import AppendReceipt, StoredLog, SyncCallback

SEGMENT_BYTES = 1 << 20
_POSITIONS_MAX = 256
_SPANS_MAX = 32


class MemorySegment:
    """A segment in a block of memory. A reader's view keeps the block alive after the log has dropped it."""

    begin = 0
    path = "memory"

    def __init__(self, log_id: int, base_offset: int, capacity: int, now_us: int) -> None:
        self.log_id = log_id
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.end = 0
        self.time_max = TIME_NONE
        self.append_time = now_us
        self._block = memoryview(bytearray(capacity))
        self._index = Index()

    @property
    def capacity(self) -> int:
        """How many bytes fit."""
        return len(self._block)

    def append(self, batch: Batch) -> None:
        """Copy a batch behind the last one."""
        position, end = self.end, self.end + batch.length
        self._block[position:end] = batch.data
        note(self._index, batch.base_offset, position, self.time_max)
        time_max, next_offset = max(self.time_max, batch.time_max), batch.next_offset
        # All of it or nothing: no interrupt comes between assignments without calls.
        self.time_max = time_max
        self.append_time = batch.append_time
        self.end = end
        self.next_offset = next_offset

    def size(self) -> int:
        """How many bytes hold batches."""
        return self.end

    def view(self, end: int) -> memoryview:
        """All bytes."""
        assert end <= len(self._block)
        return self._block

    def read(self, position: int, length: int) -> bytes:
        """A copy of some bytes."""
        return bytes(self._block[position : min(position + length, self.end)])

    def index(self) -> Index:
        """The sparse index."""
        return self._index

    def file(self) -> OpenFile | None:
        """There is none."""
        return None

    def report_damage(self, position: int, reason: str) -> None:
        """Do nothing: there is no copy elsewhere."""


class MemoryLog(StoredLog):
    """A log of at most `bytes_max` in memory. Older messages are dropped, or, with `spill`, moved to that log.

    Appends reach the durability `memory` and no more, spilled or not: the log is empty when it is opened again, and
    continues behind the offsets that were spilled, or at `first_offset`.
    """

    durable: ClassVar[bool] = False
    append_durability: ClassVar[Durability] = Durability.MEMORY
    durability_max = Durability.MEMORY
    log_id = 0
    survived_offset = 0

    def __init__(
        self, bytes_max: int, spill: StoredLog | None = None, first_offset: int = 0, *, drop_oldest: bool = True
    ) -> None:
        if bytes_max < 2 * SEGMENT_BYTES:
            raise InvalidArgument(f"a log in memory needs {2 * SEGMENT_BYTES} bytes at least, not {bytes_max}")
        if spill is not None:
            assert spill.next_offset >= first_offset
            spill.truncate_before(spill.next_offset)
        super().__init__(Lookups(_POSITIONS_MAX, _SPANS_MAX))
        self.findings = Findings()
        self.owner = spill.owner if spill is not None else b""
        self._bytes_max = bytes_max
        self._drop_oldest = drop_oldest
        self._spill = spill
        self._lock = threading.Lock()
        self._closed = False
        self._first_offset = spill.next_offset if spill is not None else first_offset
        self._segments: tuple[MemorySegment, ...] = ()
        self._all: tuple[Segment, ...] = ()
        self._set_segments(())

    @property
    def first_offset(self) -> int:
        """The oldest offset that can be read, spilled or in memory."""
        return self._first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        segments = self._segments
        if segments:
            return segments[-1].next_offset
        return max(self._first_offset, self._spill.next_offset if self._spill is not None else 0)

    @property
    def location(self) -> str:
        """No path, as there is none."""
        return "memory"

    @property
    def batch_bytes_max(self) -> int:
        """Half of the memory, so that the batch before stays readable."""
        return self._bytes_max // 2

    @property
    def synced_offset(self) -> int:
        """Nothing is ever synced."""
        return 0

    @property
    def size_bytes(self) -> int:
        """The size of all batches in bytes, in memory and spilled."""
        return sum(segment.end for segment in self._segments) + (self._spill.size_bytes if self._spill else 0)

    def append(self, batch: Batch, now_us: int, durability: Durability = Durability.MEMORY) -> AppendReceipt:
        """Copy a batch into memory; a higher durability than `memory` is refused."""
        if durability > Durability.MEMORY:
            raise DurabilityUnavailable
        if batch.length > self.batch_bytes_max:
            raise BatchTooLarge(
                f"a batch of {batch.length} bytes is too large for a log of {self._bytes_max} bytes in memory; raise "
                "memory_bytes"
            )
        with self._lock:
            if self._closed:
                raise LogClosed
            segment = self._segment_for(batch.length, now_us)
            base_offset = self.next_offset
            batch.place(base_offset, now_us, self.log_id)
            segment.append(batch)
        return AppendReceipt(self, base_offset, segment.next_offset)

    @property
    def is_small_backlog(self) -> bool:
        """Nothing is ever to be synced."""
        return False

    def awaits_sync(self, offset: int) -> bool:  # noqa: ARG002
        """No sync makes memory more durable."""
        return False

    def reached(self, offset: int) -> Durability:  # noqa: ARG002
        """Messages in memory stay there."""
        return Durability.MEMORY

    def request_sync(self) -> None:
        """There is nothing to sync."""

    def when_synced(self, offset: int, callback: SyncCallback) -> None:  # noqa: ARG002
        """Call back at once: no sync makes memory more durable."""
        callback(None)

    def wait_synced(self, offset: int, timeout_s: float | None = None) -> None:
        """Return at once: no sync makes memory more durable."""

    def alter(self, settings: LogSettings, now_us: int) -> None:
        """Use other settings from now on; messages that no longer fit are dropped, or spilled with the next append."""
        with self._lock:
            self._bytes_max = settings.memory_bytes
            if self._spill is not None:
                self._spill.alter(settings, now_us)
            else:
                self._drop_oldest = settings.drop_oldest
                if settings.drop_oldest:
                    self._evict_for(0, now_us)

    def set_owner(self, owner: bytes) -> None:
        """Keep another owner, also with the log that messages are spilled to."""
        if self._spill is not None:
            self._spill.set_owner(owner)
        self.owner = owner

    def truncate_before(self, offset: int) -> None:
        """Remove the messages before an offset."""
        with self._lock:
            if offset > self.next_offset:
                raise OffsetOutOfRange(f"cannot truncate before {offset}: the next offset is {self.next_offset}")
            if offset <= self._first_offset:
                return
            if self._spill is not None:
                self._spill.truncate_before(min(offset, self._spill.next_offset))
            self._first_offset = offset
            self._set_segments(segment for segment in self._segments if segment.next_offset > offset)

    def truncate_after(self, offset: int) -> None:
        """Remove the messages from an offset on."""
        with self._lock:
            if not self._first_offset <= offset <= self.next_offset:
                raise OffsetOutOfRange(f"cannot truncate after {offset}: it is not in the log")
            if self._spill is not None and offset < self._spill.next_offset:
                self._spill.truncate_after(offset)
            kept = [segment for segment in self._segments if segment.base_offset < offset]
            if kept and kept[-1].next_offset > offset:
                kept[-1] = self._copy(kept[-1], list(before(kept[-1], offset)))
            self._set_segments(kept)

    def compact(self, keep: Keep) -> int:
        """Rewrite full segments with only the messages that the rule keeps; returns how many bytes that freed."""
        freed = self._spill.compact(keep) if self._spill is not None else 0
        with self._lock:
            segments = list(self._segments)
            for number, old in enumerate(segments[:-1]):
                new = self._copy(old, list(compacted(old, keep)))
                if new.end < old.end:
                    segments[number] = new
                    freed += old.end - new.end
            self._set_segments(segments)
        return freed

    def verify(self, progress: Callable[[int], None] | None = None) -> Findings:  # noqa: ARG002
        """Memory holds what was written to it."""
        return Findings()

    def close(self, *, is_deleted: bool = False) -> None:  # noqa: ARG002
        """Drop all messages."""
        with self._lock:
            self._closed = True
            self._first_offset = self.next_offset
            if self._spill is not None:
                self._spill.close()
            self._set_segments(())

    def _layout(self) -> Sequence[Segment]:
        return self._all

    def _set_segments(self, segments: Iterable[MemorySegment]) -> None:
        """Replace the segments in memory, and the sequence of all segments, in which spilled ones come first."""
        self._segments = tuple(segments)
        spilled = self._spill.segments if self._spill is not None and not self._closed else ()
        self._all = (*spilled, *self._segments)

    def _segment_for(self, length: int, now_us: int) -> MemorySegment:
        if self._segments and self._segments[-1].end + length <= self._segments[-1].capacity:
            return self._segments[-1]
        capacity = max(SEGMENT_BYTES, length)
        self._evict_for(capacity, now_us)
        segment = MemorySegment(self.log_id, self.next_offset, capacity, now_us)
        self._set_segments((*self._segments, segment))
        return segment

    def _evict_for(self, capacity: int, now_us: int) -> None:
        while self._segments and sum(segment.capacity for segment in self._segments) + capacity > self._bytes_max:
            if self._spill is None and not self._drop_oldest:
                raise LimitExceeded(
                    f"the log has no room for more within {self._bytes_max} bytes in memory, and keeps all of its "
                    "messages; raise memory_bytes"
                )
            self._evict(self._segments[0], now_us)

    def _evict(self, segment: MemorySegment, now_us: int) -> None:
        """Drop the oldest segment, or spill it before it leaves memory."""
        if self._spill is None:
            self._first_offset = segment.next_offset
        else:
            for batch in before(segment, segment.next_offset):
                if batch.base_offset >= self._spill.next_offset:  # else it went there before the disk was full
                    self._spill.append(batch.copied(), now_us)
        self._set_segments(self._segments[1:])

    def _copy(self, old: MemorySegment, batches: list[Batch]) -> MemorySegment:
        new = MemorySegment(self.log_id, old.base_offset, sum(batch.length for batch in batches), old.append_time)
        for batch in batches:
            new.append(batch)
        return new
