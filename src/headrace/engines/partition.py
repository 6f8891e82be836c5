"""A partition: a log that recognises batches which its producers send again."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from headrace.engines.key_index import KeyIndex, has_versions, stamped
from headrace.engines.last_offsets import LastOffsets
from headrace.engines.producers import FORGOTTEN, Note, Producers, mark_of, marked
from headrace.model.arguments import shown
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
    UnexpectedVersion,
)
from headrace.storage.compaction import Keep
from headrace.storage.owner import PartitionOwner, decode_owner
from headrace.storage.settings import LogSettings
from headrace.storage.stored_log import AppendReceipt, StoredLog, SyncCallback
from headrace.storage.worker import CpuThrottle

logger = logging.getLogger("headrace.broker")

_CHECKPOINT_WORK = 10_000
"""How many batches, large ones counted several times, opening a partition may have to read."""
_INDEXED_TOGETHER = 1000
_INDEXED_BYTES = 64 << 10
"""Messages and bytes whose keys are indexed per slice; at least one batch."""


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
        self._append: Callable[[Batch, int], AppendReceipt] = log.append
        """Appends a batch to the log; with `key_index` it writes the versions of the messages first."""
        self.key_index: KeyIndex | None = None
        """The messages of each key, in a topic with key_versions, once it is loaded."""
        self._counts_keys = False
        """Whether the versions of messages are counted, or will be when the index is loaded."""
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
        begin = min(max(start, log.first_offset), log.next_offset)
        for batch in self.batches(begin, log.next_offset, empty=True):
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
    def overlaps_syncs(self) -> bool:
        """Whether the next sync is better requested before the last is done."""
        return self._log.overlaps_syncs

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

    @property
    def sync_latency_us(self) -> int:
        """How long a small sync takes, about; 0 if nothing is synced."""
        return round(self._log.sync_latency_s * 1e6)

    def check_durability(self, wanted: int) -> None:
        """Raise if messages can never have this durability."""
        if wanted <= self._log.durability_max:
            return
        if not self.durable:
            raise DurabilityUnavailable("a topic in memory cannot be written or synced; ask for durability memory")
        raise DurabilityUnavailable(
            "messages of this broker cannot be replicated, as it is not part of a cluster: ask for durability synced, "
            "or start it with --cluster and --store"
        )

    @property
    def durability_max(self) -> Durability:
        """The durability that messages have once they are synced."""
        return self._log.durability_max

    def reached(self, next_offset: int) -> Durability:
        """The durability that all messages before an offset have now."""
        return self._log.reached(next_offset)

    def awaits_sync(self, next_offset: int) -> bool:
        """Whether a sync would make messages before an offset more durable than they are."""
        return self._log.awaits_sync(next_offset)

    def append(
        self, batch: Batch, now_us: int, expected_offset: int | None = None, expected_version: int | None = None
    ) -> Appended:
        """Append a batch, unless it was appended before."""
        producer = batch.producer
        if producer.id:
            base = self.producers.admit(producer)
            if base is not None:
                return self._repeated(base, batch, self._log.next_offset)
        if expected_offset is not None and expected_offset != self._log.next_offset:
            raise UnexpectedOffset(
                f"the next offset is {self._log.next_offset}, not {expected_offset}; nothing was appended",
                next_offset=self._log.next_offset,
            )
        if expected_version is not None:
            self._check_version(batch, expected_version)
        receipt = self._append(batch, now_us)
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
                self._append(gathered.encoded(codec), now_us)
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
                return self._repeated(base, batch, gathered.next_offset)  # the first one may be in the same gathering
        appended = gathered.add(batch)
        if producer.id:
            notes.append(self.producers.note(producer, appended.base_offset))
        return appended

    def _repeated(self, base: int, batch: Batch, end: int) -> Appended:
        # A batch whose offset is forgotten is somewhere before the end.
        # Middleware may have made fewer messages of it than it has.
        next_offset = end if base == FORGOTTEN else min(base + batch.count, end)
        return Appended(base, next_offset, 0, duplicate=True)

    def find_repeated(self, batch: Batch) -> Appended | None:
        """The offsets of a batch that was appended before; None if it was not, or is not of a known producer."""
        base = self.producers.find_repeated(batch.producer) if batch.producer_id else None
        return None if base is None else self._repeated(base, batch, self._log.next_offset)

    def admit(self, batch: Batch) -> Appended | None:
        """The offsets of a batch that was appended before; None for its producer's next one; raises for any other."""
        base = self.producers.admit(batch.producer) if batch.producer_id else None
        return None if base is None else self._repeated(base, batch, self._log.next_offset)

    def count_at(self, base_offset: int) -> int:
        """How many messages the batch that begins at an offset has; 0 if no batch begins there any more."""
        try:
            batch = self.batch_at(base_offset)
        except (CorruptBatch, OffsetOutOfRange):
            return 0
        return batch.count if batch.base_offset == base_offset else 0

    def has_committed(self, mark: int) -> bool:
        """Whether a batch of a committed transaction was appended already."""
        return mark <= self.producers.mark

    def append_committed(self, batch: Batch, mark: int, now_us: int) -> Appended:
        """Append a batch of a committed transaction; it is stamped, so nobody else may use its bytes."""
        batch.stamp(marked(mark))
        receipt = self._append(batch, now_us)
        self.producers.note_batch(batch)
        self._unsaved += 1 + (batch.length >> 14)
        return Appended(receipt.base_offset, receipt.next_offset, now_us)

    def forwarded_before(self, forwarder: int) -> int:
        """The offset of a forwarder's source before which all messages for this partition are in it."""
        return self.producers.forwarded.get(forwarder, 0)

    def append_forwarded(self, batch: Batch, now_us: int) -> Appended:
        """Append a batch that a forwarder has stamped with where in its source it has been."""
        receipt = self._append(batch, now_us)
        self.producers.forwarded[batch.producer_id] = mark_of(batch.producer)
        self._unsaved += 1 + (batch.length >> 14)
        return Appended(receipt.base_offset, receipt.next_offset, now_us)

    # Versions of keys.

    def load_key_index(self) -> Iterator[None]:
        """Read the keys of all messages, some at a time; yields in between. From its end on, versions are written.

        If there is an index already, it is replaced, and messages can be appended meanwhile.
        """
        self._counts_keys = True
        index, position, work = KeyIndex(), self._log.first_offset, 0
        while position < self._log.next_offset:
            for batch in self.batches(position, self._log.next_offset):
                try:
                    yield from index.note_batch(batch)
                except InvalidBatch as error:
                    logger.warning("keys unknown  path=%s offset=%d reason=%s", self.location, position, error)
                position = batch.next_offset
                work += 1 + batch.count + (batch.length * _INDEXED_TOGETHER // _INDEXED_BYTES)
                if work >= _INDEXED_TOGETHER:
                    work = 0
                    yield
                    break
            else:
                break
        self.key_index = index
        self._append = self._append_versioned

    def forget_key_index(self) -> None:
        """Write no versions from now on."""
        self.key_index = None
        self._counts_keys = False
        self._append = self._log.append

    def _append_versioned(self, batch: Batch, now_us: int) -> AppendReceipt:
        """Append a batch with the versions of its messages, and index them."""
        index = self.key_index
        assert index is not None
        columns = batch.columns()
        if columns.keys is None:
            return self._log.append(batch, now_us)
        versions = index.versions_for(columns.keys)
        receipt = self._log.append(stamped(batch, columns, versions), now_us)
        index.note(columns.keys, range(receipt.base_offset, receipt.next_offset), versions)
        return receipt

    def _check_version(self, batch: Batch, expected: int) -> None:
        """Refuse a batch of one key that would not get the version that is expected of it."""
        keys = batch.columns().keys
        assert self.key_index is not None
        assert keys is not None
        assert keys[0] is not None  # the door has checked it
        check_version(keys[0], expected, self.key_index.next_version(keys[0]))

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

    def delivered(self, columns: Columns) -> Columns:
        """Messages that are not stored, such as edited ones, as consumers see them: here as they are."""
        return columns

    def find_time(self, time_us: int) -> int:
        """The offset of the first message with this timestamp or a later one."""
        return self._log.find_time(time_us)

    def batch_at(self, offset: int, *, empty: bool = False) -> Batch:
        """The batch that holds an offset; the next one if that batch has no messages, unless it may be `empty`."""
        try:
            for batch in self._log.batches(offset, empty=empty):
                return batch
        except CorruptBatch as error:
            self._note_damage(error)
            raise
        raise OffsetOutOfRange(f"there is no batch at offset {offset}")

    def batches(self, offset: int, end_offset: int, *, empty: bool = False) -> Iterator[Batch]:
        """The batches from an offset on, the first one may begin before it; damaged ones are recorded and skipped.

        Those without messages are left out, unless `empty` ones are wanted too.
        """
        while True:
            try:
                for batch in self.scan(offset, end_offset, empty=empty):
                    yield batch
                    offset = batch.next_offset
            except CorruptBatch as error:
                offset = error.next_offset
            else:
                return

    def scan(self, offset: int, end_offset: int, *, empty: bool = False) -> Iterator[Batch]:
        """The batches from an offset on, the first one may begin before it; the first damaged one raises."""
        try:
            yield from self._log.batches(offset, until=end_offset, empty=empty)
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

    def compact_by_key(self, before: int | None = None) -> int:
        """Keep only the last message of each key, and messages without a key; returns the bytes freed.

        Batches that do not end before an offset are kept whole, if one is given.
        """
        last, throttle = LastOffsets(), CpuThrottle()
        kept: Keep = _keeping_uncounted(last.kept) if self._counts_keys else last.kept

        def keep(batch: Batch) -> Sequence[int] | None:
            return None if before is not None and batch.next_offset > before else kept(batch)

        try:
            for batch in self.batches(self._log.first_offset, self._log.next_offset):
                with suppress(InvalidBatch):  # compaction keeps it as it is, and logs that
                    last.note(batch)
                throttle.step(batch.count, batch.length)
            return self._log.compact(self._if_readable(keep))
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

    def close(self, *, is_deleted: bool = False) -> None:
        """Sync and close the log, whose files are removed next if it is deleted."""
        self._log.close(is_deleted=is_deleted)

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


def check_version(key: bytes, expected: int, actual: int) -> None:
    """Refuse a version that is not the key's next one."""
    if expected != actual:
        raise UnexpectedVersion(
            f"the next version of {shown(key)} is {actual}, not {expected}; nothing was appended",
            expected=expected,
            actual=actual,
        )


def _keeping_uncounted(keep: Keep) -> Keep:
    """The rule, extended to keep messages that do not tell their versions: those of their keys are counted by them."""

    def checked(batch: Batch) -> Sequence[int] | None:
        return keep(batch) if has_versions(batch) else None

    return checked


class _BatchJoiner:
    """Joins the messages of several batches into one batch."""

    def __init__(self, base_offset: int, now_us: int) -> None:
        self._base_offset = base_offset
        self._now_us = now_us
        self.values: list[bytes | None] = []
        self._timestamps: list[int] = []
        self._others: dict[str, list[Any]] = {}
        self._origins: list[tuple[int, int, int, int]] = []

    @property
    def next_offset(self) -> int:
        """The offset behind the last message."""
        return self._base_offset + len(self.values)

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
