"""A partition: a log that recognises batches which its producers send again."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from headrace.engines.last_offsets import LastOffsets
from headrace.engines.producers import FORGOTTEN, Note, Producers, marked
from headrace.model.batch import FLAG_GATHERED, Batch, Columns, encode, parse
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import (
    CorruptBatch,
    DurabilityUnavailable,
    HeadraceError,
    InvalidBatch,
    OffsetOutOfRange,
    UnexpectedOffset,
)
from headrace.storage.compaction import Keep
from headrace.storage.owner import PartitionOwner, decode_owner
from headrace.storage.settings import LogSettings
from headrace.storage.stored_log import StoredLog, SyncCallback
from headrace.storage.worker import CpuThrottle

logger = logging.getLogger("headrace.broker")

_CHECKPOINT_WORK = 10_000
"""How many batches, large ones counted several times, opening a partition may have to read."""


class Appended(NamedTuple):
    """The offsets of a batch in its partition."""

    base_offset: int
    next_offset: int
    append_time: int
    """0 for a duplicate, whose time is not known any more."""
    duplicate: bool = False


class Slice(NamedTuple):
    """Whole batches of a partition, ready for a socket."""

    view: memoryview
    """Of a mapping, which lasts as long as the view."""
    next_offset: int
    end_offset: int
    """The offset after the last message that can be read."""
    cost_bytes: int = 0
    """What the reading cost, in bytes that could have been sent meanwhile; 0 of what only had to be looked up."""


class Partition:
    """One partition's messages, and who produced them. All methods but those of maintenance are for one thread."""

    is_derived: ClassVar[bool] = False
    """Whether batches are made when they are read, at a cost for each offset that they cover."""

    def __init__(self, log: StoredLog, saved: bytes | None = None) -> None:
        self._log = log
        self.durable = log.durable
        """Whether messages can be synced, and are still there when the partition is opened again."""
        self.producers = Producers()
        self._unsaved = self._saved = 0
        self._expired = 0, 0
        """All messages before this offset were appended before this time: retention by age need not read them again."""
        self._damaged: dict[int, int] = {}
        """Ranges of offsets whose messages were found damaged: first to next."""
        self._rewrites = 0
        for lost in log.findings.lost:
            self._damaged[lost.first_offset] = lost.next_offset  # logged when it was found
        self.survived_offset = log.survived_offset
        """The end of the messages found when it was opened; a gap may lie between it and the first new message."""
        start = self.producers.load(saved, self.survived_offset) if saved is not None else 0
        for batch in self.batches(min(max(start, log.first_offset), log.next_offset), log.next_offset):
            if batch.base_offset >= start:
                self.producers.note_batch(batch)
                self._unsaved += 1 + (batch.length >> 14)

    @property
    def first_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._log.first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        return self._log.next_offset

    @property
    def synced_offset(self) -> int:
        """All messages before this offset are on the disk."""
        return self._log.synced_offset

    @property
    def location(self) -> str:
        """Where its messages are, for people to read."""
        return self._log.location

    @property
    def is_small_backlog(self) -> bool:
        """Whether there is something to sync, but only a few bytes."""
        return self._log.is_small_backlog

    @property
    def size_bytes(self) -> int:
        """How many bytes the batches take."""
        return self._log.size_bytes

    @property
    def stored(self) -> "Partition":
        """The partition whose messages are stored: this one, unless it is derived from another."""
        return self

    @property
    def rewrites(self) -> int:
        """How often compaction has run: batches that were read before may have messages that are no more."""
        return self._rewrites

    def check_durability(self, wanted: int) -> None:
        """Raise if messages can never have this durability."""
        if not self.durable and wanted > self._log.append_durability:
            raise DurabilityUnavailable("a topic in memory cannot be written or synced; ask for durability memory")

    def reached(self, next_offset: int) -> Durability:
        """The durability that all messages before an offset have now."""
        return self._log.reached(next_offset)

    def awaits_sync(self, next_offset: int) -> bool:
        """Whether a sync would make messages before an offset more durable than they are."""
        return self._log.awaits_sync(next_offset)

    def append(self, batch: Batch, now_us: int, expected_offset: int | None = None) -> Appended:
        """Append a batch, unless it was appended before."""
        producer = batch.producer
        if producer.id:
            base = self.producers.admit(producer)
            if base is not None:
                return self._repeated(base, batch)
        if expected_offset is not None and expected_offset != self._log.next_offset:
            raise UnexpectedOffset(
                f"the next offset is {self._log.next_offset}, not {expected_offset}; nothing was appended",
                next_offset=self._log.next_offset,
            )
        receipt = self._log.append(batch, now_us)
        if producer.id:
            self.producers.note(producer, receipt.base_offset)
        self._unsaved += 1 + (batch.length >> 14)
        return Appended(receipt.base_offset, receipt.next_offset, now_us)

    def append_gathered(self, batches: Sequence[Batch], codec: Codec, now_us: int) -> list[Appended | HeadraceError]:
        """Append small batches of many producers as one; returns the offsets, or the error, of each."""
        gathered = _BatchJoiner(self._log.next_offset, now_us)
        notes: list[Note] = []
        outcomes: list[Appended | HeadraceError] = []
        try:
            for batch in batches:
                try:
                    outcomes.append(self._gather(batch, gathered, notes))
                except HeadraceError as error:
                    outcomes.append(error)
            if gathered.values:
                self._log.append(gathered.encoded(codec), now_us)
                self._unsaved += len(batches)
        except BaseException:
            self.producers.take_back(notes)
            raise
        return outcomes

    def _gather(self, batch: Batch, gathered: "_BatchJoiner", notes: list[Note]) -> Appended:
        producer = batch.producer
        if producer.id:
            base = self.producers.admit(producer)
            if base is not None:
                return self._repeated(base, batch)
        appended = gathered.add(batch)
        if producer.id:
            notes.append(self.producers.note(producer, appended.base_offset))
        return appended

    def _repeated(self, base: int, batch: Batch) -> Appended:
        # A batch whose offset is forgotten is somewhere before the end.
        next_offset = self._log.next_offset if base == FORGOTTEN else base + batch.count
        return Appended(base, next_offset, 0, duplicate=True)

    def has_committed(self, mark: int) -> bool:
        """Whether a batch of a committed transaction was appended already."""
        return mark <= self.producers.mark

    def append_committed(self, batch: Batch, mark: int, now_us: int) -> Appended:
        """Append a batch of a committed transaction; it is stamped, so nobody else may use its bytes."""
        batch.stamp(marked(mark))
        receipt = self._log.append(batch, now_us)
        self.producers.mark = mark
        self._unsaved += 1 + (batch.length >> 14)
        return Appended(receipt.base_offset, receipt.next_offset, now_us)

    def read(self, offset: int, bytes_max: int, end_offset: int, expired_us: int | None = None) -> Slice | None:
        """Whole batches from an offset on and before `end_offset`, without those appended before `expired_us`."""
        try:
            if expired_us is not None:
                offset = self.unexpired(offset, end_offset, expired_us)
            found = self._log.byte_range(offset, bytes_max, end_offset)
        except CorruptBatch as error:
            self._note_damage(error)
            raise
        return None if found is None else Slice(found.view, found.next_offset, end_offset)

    def find_time(self, time_us: int) -> int:
        """The offset of the first message with this timestamp or a later one."""
        return self._log.find_time(time_us)

    def batch_at(self, offset: int) -> Batch:
        """The batch that holds an offset."""
        try:
            for batch in self._log.batches(offset):
                return batch
        except CorruptBatch as error:
            self._note_damage(error)
            raise
        raise OffsetOutOfRange(f"there is no batch at offset {offset}")

    def batches(self, offset: int, end_offset: int) -> Iterator[Batch]:
        """The batches from an offset on, the first one may begin before it; damaged ones are recorded and skipped."""
        while True:
            try:
                for batch in self.scan(offset, end_offset):
                    yield batch
                    offset = batch.next_offset
            except CorruptBatch as error:
                offset = error.next_offset
            else:
                return

    def scan(self, offset: int, end_offset: int) -> Iterator[Batch]:
        """The batches from an offset on, the first one may begin before it; the first damaged one raises."""
        try:
            yield from self._log.batches(offset, until=end_offset)
        except CorruptBatch as error:
            self._note_damage(error)
            raise

    def damaged_within(self, offsets: range) -> list[range]:
        """The parts of a range of offsets whose messages were found damaged."""
        found = (range(max(first, offsets.start), min(end, offsets.stop)) for first, end in self._damaged.items())
        return sorted((part for part in found if part), key=lambda part: part.start) if self._damaged else []

    def damaged_ranges(self) -> list[tuple[int, int]]:
        """All ranges of offsets whose messages were found damaged and are not removed yet."""
        return sorted(found for found in self._damaged.items() if found[1] > self.first_offset)

    def when_synced(self, offset: int, callback: SyncCallback) -> None:
        """Have everything before an offset synced, and be called back, possibly on another thread."""
        self._log.when_synced(offset, callback)

    def request_sync(self) -> None:
        """Have what was appended synced soon, if a sync makes it more durable."""
        if self._log.awaits_sync(self._log.next_offset):
            self._log.request_sync()

    def save_producers(self, *, at_once: bool = False) -> bytes | None:
        """A checkpoint of the producers, if much was appended since the last one, or `at_once`; None otherwise.

        The caller stores it once all that was appended is synced.
        """
        if not self.durable or not self._unsaved or not (at_once or self._unsaved >= _CHECKPOINT_WORK):
            return None
        self._saved, self._unsaved = self._unsaved, 0
        return self.producers.save(self._log.next_offset)

    @property
    def has_unsaved(self) -> bool:
        """Whether batches were appended since the last checkpoint of the producers."""
        return self.durable and self._unsaved > 0

    def save_again(self) -> None:
        """Undo `save_producers`, as the checkpoint could not be stored."""
        self._unsaved += self._saved
        self._saved = 0

    def retention_offset(self, now_us: int, age_us: int | None, bytes_max: int | None) -> int:
        """The first offset that retention keeps; 0 if it keeps all segments."""
        return self._log.retention_offset(now_us, age_us=age_us, bytes_max=bytes_max)

    # Maintenance: on any thread.

    def alter(self, settings: LogSettings, now_us: int) -> None:
        """Use other settings of the log from now on."""
        self._log.alter(settings, now_us)

    def set_owner(self, owner: PartitionOwner) -> None:
        """Store with the log whose it is."""
        self._log.set_owner(owner.after(decode_owner(self._log.owner)).encoded())

    def truncate_before(self, offset: int) -> None:
        """Remove the messages before an offset."""
        self._log.truncate_before(min(offset, self._log.next_offset))

    def compact_by_key(self) -> int:
        """Keep only the last message of each key, and messages without a key; returns the bytes freed."""
        last, throttle = LastOffsets(), CpuThrottle()
        try:
            for batch in self.batches(self._log.first_offset, self._log.next_offset):
                with suppress(InvalidBatch):  # compaction keeps it as it is, and logs that
                    last.note(batch)
                throttle.step(batch.count, batch.length)
            return self._log.compact(self._if_readable(last.kept))
        finally:
            self._rewrites += 1
            last.clear(throttle)

    def compact_settled(self, settled: Sequence[Callable[[int], bool]]) -> int:
        """Remove the messages that all of these predicates call settled; returns the bytes freed."""

        def keep(batch: Batch) -> list[int] | None:
            places = batch.places(batch.columns())
            offsets = [batch.base_offset + place for place in places]
            kept = [at for at, offset in enumerate(offsets) if not all(is_settled(offset) for is_settled in settled)]
            return None if len(kept) == batch.count else kept

        try:
            return self._log.compact(self._if_readable(keep))
        finally:
            self._rewrites += 1

    def _if_readable(self, keep: Keep) -> Keep:
        """The rule, extended to keep all of a batch that cannot be decoded."""

        def checked(batch: Batch) -> Sequence[int] | None:
            try:
                return keep(batch)
            except InvalidBatch as error:
                offsets = f"{batch.base_offset} to {batch.next_offset - 1}"
                logger.warning(
                    "compaction keeps an invalid batch  path=%s offsets=%s reason=%s", self.location, offsets, error
                )
                return None

        return checked

    def close(self) -> None:
        """Sync and close the log."""
        self._log.close()

    def _note_damage(self, error: CorruptBatch) -> None:
        """Record a damaged range, and log it the first time."""
        known = self._damaged.get(error.first_offset, 0)
        if error.next_offset > known:
            self._damaged[error.first_offset] = error.next_offset
            logger.error(
                "damaged messages  path=%s position=%d first_offset=%d next_offset=%d reason=%s",
                error.path,
                error.position,
                error.first_offset,
                error.next_offset,
                error.reason,
            )

    def unexpired(self, offset: int, end_offset: int, expired_us: int) -> int:
        """The first offset, from this one on, whose batch was appended at a time or later."""
        known_offset, known_us = self._expired
        if known_us <= expired_us:
            offset = max(offset, min(known_offset, end_offset))
        while offset < end_offset:
            found = self._log.byte_range(offset, 1, end_offset)
            if found is None:
                break
            if parse(found.view).append_time >= expired_us:
                break
            offset = found.next_offset
            self._expired = offset, expired_us
        return offset


class _BatchJoiner:
    """Joins the messages of several batches into one batch."""

    def __init__(self, base_offset: int, now_us: int) -> None:
        self._base_offset = base_offset
        self._now_us = now_us
        self.values: list[bytes | None] = []
        self._timestamps: list[int] = []
        self._others: dict[str, list[Any]] = {}
        self._origins: list[tuple[int, int, int, int]] = []

    def add(self, batch: Batch) -> Appended:
        """Add a batch's messages behind the others; returns the offsets that they will have."""
        columns = batch.columns()
        first, count = len(self.values), batch.count
        self.values += columns.values
        self._timestamps += columns.timestamps or [batch.time_max] * count
        if columns.keys or columns.headers or columns.dues or columns.priorities or columns.expires:
            self._add_others(columns, first)
        if batch.producer_id:
            self._origins.append((first, batch.producer_id, batch.producer_epoch, batch.sequence))
        base = self._base_offset + first
        return Appended(base, base + count, self._now_us)

    def _add_others(self, columns: Columns, first: int) -> None:
        for name in _OTHERS:
            if (column := getattr(columns, name)) is not None:
                others = self._others.setdefault(name, [])
                others += [None] * (first - len(others))
                others += column

    def encoded(self, codec: Codec) -> Batch:
        """The joined batch."""
        count = len(self.values)
        others = {name: column + [None] * (count - len(column)) for name, column in self._others.items()}
        columns = Columns(self.values, timestamps=self._timestamps, origins=self._origins or None, **others)
        return encode(columns, self._now_us, codec=codec, flags=FLAG_GATHERED)


_OTHERS = ("keys", "headers", "dues", "priorities", "expires")
