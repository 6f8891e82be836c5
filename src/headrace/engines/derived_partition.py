"""A derived partition: another partition's messages, filtered or changed when they are read, at the same offsets.

A derived batch covers the same offsets as the part of the source batch that it is made of. Messages that are left out
leave what compaction leaves: `places`, or a batch without messages, which clients and leased subscriptions know.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, NoReturn, Protocol

from headrace.engines.derived_cache import DerivedCache
from headrace.engines.partition import Appended, Partition, Slice
from headrace.model.batch import FLAG_COMPACTED, FLAG_LOST, SPAN_MAX, Batch, Columns, encode, gap, message_sizes
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import CorruptBatch, HeadraceError, InvalidBatch, LogReadOnly
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.storage.owner import PartitionOwner
from headrace.storage.settings import LogSettings
from headrace.storage.stored_log import SyncCallback

logger = logging.getLogger("headrace.broker")

PART_MESSAGES = 1000
"""Messages of a source batch that are derived together; a larger batch becomes several derived ones."""
PART_BYTES = 512 << 10
"""Bytes of messages that are derived together, or one message."""
_BATCHES_TOGETHER = 100
"""Source batches looked at in one read."""
_COST_BYTES = 1 << 10
"""What deriving a message costs, in bytes that could have been sent meanwhile."""
_BATCH_BYTES = 500
"""What a batch takes in the cache besides its bytes."""
_FAILED_KEPT = 10_000
"""Offsets of failed messages that are remembered, so that none is counted twice."""


class DerivedPart(NamedTuple):
    """What became of the messages of a source batch from one index on."""

    indexes: Sequence[int]
    """Which messages are still there, rising."""
    stop: int
    """The index of the first message that was not looked at: the end of the part, or less to limit the work."""
    failed: Sequence[int] = ()
    """Which messages are left out because they could not be derived."""
    columns: Columns | None = None
    """The messages at these indexes as readers see them; None if they are unchanged."""
    work: int = 0
    """How many plain messages would have taken as long, if that is more than there are."""


class BatchTransform(Protocol):
    """Derives messages. It is given the whole source batch, and changes nothing of it."""

    def derive(self, columns: Columns, start: int, stop: int) -> DerivedPart: ...


class DerivedPartition(Partition):
    """A partition for reading only, whose batches are made of another one's."""

    is_derived: ClassVar[bool] = True

    def __init__(
        self,
        source: Partition,
        transform: BatchTransform,
        cache: DerivedCache,
        on_failed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_failed` is called with the number of messages that failed and had not failed before."""
        self._source = source
        self._transform = transform
        self._cache = cache
        self._on_failed = on_failed
        self._sources = 1
        """How many sources it has had."""
        self._failed: set[int] = set()
        self.failed_count = 0
        """Messages left out because they could not be derived, as far as they were read."""
        self.work = 0
        """Messages that were derived; large ones, and those that took long, count as several."""
        self.durable = False
        self.survived_offset = source.survived_offset

    # Read.

    def read(self, offset: int, bytes_max: int, end_offset: int, expired_us: int | None = None) -> Slice | None:
        """Derived batches from an offset on, at least one; what has no messages is one batch without any."""
        if expired_us is not None:
            offset = self._source.unexpired(offset, end_offset, expired_us)
        if offset >= end_offset:
            return None
        delivery, before, position = _Delivery(offset), self.work, offset
        try:
            for batch in self.scan(offset, end_offset):
                position = batch.next_offset
                delivery.add(batch)
                derived = self.work - before
                if delivery.size >= bytes_max or derived >= PART_MESSAGES or delivery.batches >= _BATCHES_TOGETHER:
                    break
            else:
                position = end_offset
        except CorruptBatch:
            if position == offset:
                raise
        return Slice(delivery.joined(position), position, end_offset, (self.work - before) * _COST_BYTES)

    def scan(self, offset: int, end_offset: int, *, empty: bool = False) -> Iterator[Batch]:  # noqa: ARG002
        """The derived batches from an offset on, those without messages too; damage raises."""
        sources: Iterator[Batch] | None = None
        source: Batch | None = None
        while offset < end_offset:
            batch: Batch | None = self._cache.get(self._key(offset))
            if batch is None or batch.next_offset > end_offset or offset < self._source.first_offset:
                if source is None or source.next_offset <= offset:
                    if sources is None or source is None or source.next_offset != offset:
                        sources = self._source.scan(offset, end_offset)
                    source = next(sources, None)
                    if source is None:
                        return
                # Compaction may have left nothing before the batch.
                batch = self._derived(source, max(offset, source.base_offset))
            yield batch
            offset = batch.next_offset

    def batch_at(self, offset: int, *, empty: bool = False) -> Batch:
        """The derived batch that holds an offset."""
        source = self._source.batch_at(offset, empty=empty)
        return self._derived(source, max(offset, source.base_offset))

    def delivered(self, columns: Columns) -> Columns:
        """Messages that are not stored, such as edited ones, as the consumers of the source see them."""
        return self._source.delivered(columns)

    def read_from(self, source: Partition) -> None:
        """Derive from another partition with the same messages, perhaps changed, from now on."""
        if source is not self._source:
            self._source = source
            self._sources += 1

    def find_time(self, time_us: int) -> int:
        """The offset of the source's first message with this timestamp or a later one."""
        return self._source.find_time(time_us)

    def unexpired(self, offset: int, end_offset: int, expired_us: int) -> int:
        """The first offset, from this one on, whose batch was appended at a time or later."""
        return self._source.unexpired(offset, end_offset, expired_us)

    def damaged_within(self, offsets: range) -> list[range]:
        """The parts of a range of offsets whose messages were found damaged in the source."""
        return self._source.damaged_within(offsets)

    def damaged_ranges(self) -> list[tuple[int, int]]:
        """All ranges of offsets whose messages were found damaged in the source."""
        return self._source.damaged_ranges()

    def _key(self, offset: int) -> tuple[Partition, str, int, int]:
        return self, "derived", self._source.rewrites + (self._sources << 48), offset

    def _derived(self, source: Batch, offset: int) -> Batch:
        """The part of a source batch that has an offset, derived."""
        if not source.count:
            return source
        try:
            columns = self._cache.columns(self._source, source)
        except InvalidBatch as error:
            logger.warning(
                "batch cannot be decoded, and is left out  path=%s offsets=%s to %s reason=%s",
                self.location, source.base_offset, source.next_offset - 1, error,
            )  # fmt: skip
            return _placed_like(source, gap(source.span, FLAG_LOST, source.time_max), source.base_offset)
        index = _index_of(source, columns, offset)
        start, stop = _part(source, columns, index)
        key = self._key(source.base_offset + _place(source, columns, start))
        batch: Batch | None = self._cache.get(key)
        if batch is not None and batch.next_offset <= offset:  # the part was cut short before
            start, key = index, self._key(source.base_offset + _place(source, columns, index))
            batch = self._cache.get(key)
        if batch is None:
            part = self._transform.derive(columns, start, stop)
            if part.stop <= index:  # it stopped before the offset that is wanted
                self._note(source, columns, part, start, stop)
                start, part = index, self._transform.derive(columns, index, stop)
                key = self._key(source.base_offset + _place(source, columns, start))
            self._note(source, columns, part, start, stop)
            batch = _made(source, columns, start, part)
            if batch is source:
                batch = source.copied()  # the source's own bytes would keep its file in use
            self._cache.put(key, batch, batch.length + _BATCH_BYTES)
        return batch

    def _note(self, source: Batch, columns: Columns, part: DerivedPart, start: int, stop: int) -> None:
        """Count the work, and the messages that failed for the first time."""
        looked_at = part.stop - start
        by_bytes = source.raw_bytes * looked_at // source.count * PART_MESSAGES // PART_BYTES
        self.work += max(looked_at, by_bytes, part.work, PART_MESSAGES if part.stop < stop else 0)
        if not part.failed:
            return
        offsets = {source.base_offset + _place(source, columns, index) for index in part.failed}
        new = len(offsets.difference(self._failed))
        if len(self._failed) < _FAILED_KEPT:
            self._failed |= offsets
        if new:
            self.failed_count += new
            self._on_failed(new)

    # Describe.

    @property
    def stored(self) -> Partition:
        """The partition that it is derived from in the end."""
        return self._source.stored

    @property
    def rewrites(self) -> int:
        """How often the source was compacted."""
        return self._source.rewrites

    @property
    def first_offset(self) -> int:
        """The source's oldest offset."""
        return self._source.first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the source's next message will have."""
        return self._source.next_offset

    @property
    def synced_offset(self) -> int:
        """The source's messages before this offset are on the disk."""
        return self._source.synced_offset

    @property
    def location(self) -> str:
        """Where the source's messages are."""
        return self._source.location

    @property
    def is_small_backlog(self) -> bool:
        """Nothing is ever to be synced."""
        return False

    @property
    def overlaps_syncs(self) -> bool:
        """Nothing is ever to be synced."""
        return False

    @property
    def size_bytes(self) -> int:
        """It stores nothing."""
        return 0

    @property
    def has_unsaved(self) -> bool:
        """It has no producers."""
        return False

    def check_durability(self, wanted: int) -> None:  # noqa: ARG002
        """Nothing can be appended."""
        self._refuse()

    @property
    def durability_max(self) -> Durability:
        """The durability that the source's messages have once they are synced."""
        return self._source.durability_max

    def reached(self, next_offset: int) -> Durability:
        """The durability that the source's messages have."""
        return self._source.reached(next_offset)

    def awaits_sync(self, next_offset: int) -> bool:  # noqa: ARG002
        """A sync is the source's business."""
        return False

    def when_synced(self, offset: int, callback: SyncCallback) -> None:
        """Have the source synced."""
        self._source.when_synced(offset, callback)

    def request_sync(self) -> None:
        """A sync is the source's business."""

    def save_producers(self, *, at_once: bool = False) -> bytes | None:  # noqa: ARG002
        """It has no producers."""
        return None

    def save_again(self) -> None:
        """It has no producers."""

    def retention_offset(self, now_us: int, age_us: int | None, bytes_max: int | None) -> int:  # noqa: ARG002
        """Retention is the source's business."""
        return 0

    def alter(self, settings: LogSettings, now_us: int) -> None:
        """It has no log."""

    def set_owner(self, owner: PartitionOwner) -> None:
        """It has no files."""

    def close(self, *, is_deleted: bool = False) -> None:
        """The source is closed by its owner."""

    # Refuse to change.

    def append(
        self,
        batch: Batch,  # noqa: ARG002
        now_us: int,  # noqa: ARG002
        expected_offset: int | None = None,  # noqa: ARG002
        expected_version: int | None = None,  # noqa: ARG002
    ) -> Appended:
        """Nothing can be appended."""
        self._refuse()

    def append_gathered(
        self,
        batches: Sequence[Batch],  # noqa: ARG002
        codec: Codec,  # noqa: ARG002
        now_us: int,  # noqa: ARG002
    ) -> list[Appended | HeadraceError]:
        """Nothing can be appended."""
        self._refuse()

    def has_committed(self, mark: int) -> bool:  # noqa: ARG002
        """Nothing can be appended."""
        self._refuse()

    def append_committed(self, batch: Batch, mark: int, now_us: int) -> Appended:  # noqa: ARG002
        """Nothing can be appended."""
        self._refuse()

    def append_forwarded(self, batch: Batch, now_us: int) -> Appended:  # noqa: ARG002
        """Nothing can be appended."""
        self._refuse()

    def truncate_before(self, offset: int) -> None:  # noqa: ARG002
        """Nothing can be removed."""
        self._refuse()

    def compact_by_key(self, before: int | None = None) -> int:  # noqa: ARG002
        """Nothing can be removed."""
        self._refuse()

    def compact_settled(self, settled: Sequence[Callable[[int], bool]]) -> int:  # noqa: ARG002
        """Nothing can be removed."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise LogReadOnly(f"a derived partition is for reading only: change its source, {self.location}")


class _Delivery:
    """Derived batches that go out together; those without messages are joined."""

    def __init__(self, offset: int) -> None:
        self._parts: list[bytes | bytearray | memoryview] = []
        self._gap_from: int | None = None
        self._end = offset
        self._like: Batch | None = None
        self.size = 0
        self.batches = 0

    def add(self, batch: Batch) -> None:
        """Add a batch behind the others."""
        self.batches += 1
        if not batch.count:
            self._gap_from = batch.base_offset if self._gap_from is None else self._gap_from
        else:
            self._close_gap(batch.base_offset)
            self._parts.append(batch.data)
            self.size += batch.length
        self._end, self._like = batch.next_offset, batch

    def joined(self, end: int) -> memoryview:
        """All of it, up to an offset."""
        if self._end < end and self._gap_from is None:
            self._gap_from = self._end
        self._close_gap(end)
        return memoryview(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))

    def _close_gap(self, end: int) -> None:
        start, self._gap_from = self._gap_from, None
        while start is not None and start < end:
            span = min(end - start, SPAN_MAX)
            like = self._like
            made = gap(span, FLAG_COMPACTED, 0 if like is None else like.time_max)
            made.place(start, 0 if like is None else like.append_time, 0 if like is None else like.log_id)
            self._parts.append(made.data)
            self.size += made.length
            start += span


def _index_of(source: Batch, columns: Columns, offset: int) -> int:
    """The index of the first message at an offset or behind it; the last one if there is none."""
    place = offset - source.base_offset
    index = place if columns.places is None else bisect_left(columns.places, place)
    return min(max(index, 0), source.count - 1)


def _place(source: Batch, columns: Columns, index: int) -> int:
    """Where the part that begins with a message begins: the first one with the batch."""
    if not index:
        return 0
    if index >= source.count:
        return source.span
    return index if columns.places is None else columns.places[index]


def _part(source: Batch, columns: Columns, index: int) -> tuple[int, int]:
    """The messages that are derived together with one: so many, or fewer if they are large."""
    if source.count <= PART_MESSAGES and source.raw_bytes <= PART_BYTES:
        return 0, source.count
    start = index - index % PART_MESSAGES
    stop = min(start + PART_MESSAGES, source.count)
    if source.raw_bytes <= PART_BYTES:
        return start, stop
    size, begin = 0, start
    for at, of in enumerate(message_sizes(columns.picked(range(start, stop), range(source.count))), start):
        size += of
        if size > PART_BYTES and at > begin:
            if at > index:
                return begin, at
            size, begin = of, at
    return begin, stop


def _made(source: Batch, columns: Columns, start: int, part: DerivedPart) -> Batch:
    """The batch of a derived part."""
    indexes, stop = part.indexes, part.stop
    if part.columns is None and not start and len(indexes) == stop == source.count:
        return source
    first, end = _place(source, columns, start), _place(source, columns, stop)
    base_offset, span = source.base_offset + first, end - first
    if not indexes:
        return _placed_like(source, gap(span, FLAG_COMPACTED, source.time_max), base_offset)
    places = [index - first for index in indexes]
    if columns.places is not None:
        places = [columns.places[index] - first for index in indexes]
    made = columns.picked(indexes, range(source.count)) if part.columns is None else part.columns
    made = Columns(
        made.values,
        made.keys,
        made.timestamps,
        made.headers,
        made.dues,
        made.priorities,
        made.expires,
        None if len(indexes) == span else places,
    )
    batch = encode(made, source.time_max, span=span, message_bytes_max=BATCH_BYTES_MAX)
    return _placed_like(source, batch, base_offset)


def _placed_like(source: Batch, batch: Batch, base_offset: int) -> Batch:
    batch.place(base_offset, source.append_time, source.log_id, source.synced_offset)
    return batch
