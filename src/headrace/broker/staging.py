"""Where a transaction's batches wait for its commit: a log, in which a shared one's can be found again."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from headrace.broker.ports import Ports
from headrace.broker.sync_waiters import SyncWaiters
from headrace.engines.api import FormerBatch, Partition
from headrace.model.batch import Batch, Columns, Producer, encode
from headrace.model.errors import HeadraceError

_NOTES = 2
"""The producer of notes: one of the ids that are the broker's own, so that no client's batch is taken for a note."""
_SYNC_BYTES = 32 << 20
"""A commit has to wait for less when the disk has begun before."""


class StageHeader(msgspec.Struct, array_like=True, frozen=True):
    """Stands in the log before a batch of a shared transaction, and tells after a restart whose it is."""

    epoch: int
    """Of the transaction."""
    stage: int
    """By which the batch goes; never given to another, whatever a power loss takes back."""
    topic_id: int
    topic: str
    """The name too: a power loss may take back a topic, and its id is then another's."""
    partition: int
    crc: int
    """Of the batch: after a crash it may be another's that follows."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StageHeader).decode


@dataclass(slots=True)
class StagedBatch:
    """A batch that waits."""

    topic_id: int
    partition: int
    first_offset: int
    """Of its note, or else its own."""
    offset: int
    next_offset: int
    bytes: int


def with_new_crc(batch: Batch, following: FormerBatch) -> Batch:
    """A note of the former format, for the crc that the batch behind it has got; other batches are as they were."""
    content = batch.columns().values[0] if batch.producer_id == _NOTES else None
    note = _decode(content) if content else None
    if note is None or note.crc != following.crc:
        return batch
    note = msgspec.structs.replace(note, crc=following.batch.crc)
    changed = encode(Columns([_encode(note)]), batch.time_max, producer=batch.producer)
    changed.place(batch.base_offset, batch.append_time, batch.log_id, batch.synced_offset)
    return changed


class StagingLog:
    """The log of batches that wait."""

    def __init__(self, log: Partition, ports: Ports) -> None:
        self._log = log
        self._syncing = SyncWaiters(log, ports)
        self._notes = 0
        self._unsynced_bytes = 0
        self._held: OrderedDict[int, int] = OrderedDict()
        """The batches that are needed: their offsets, which rise, and where each begins, with its note."""

    @property
    def idle(self) -> bool:
        """Whether nobody waits for the disk."""
        return self._syncing.idle

    @property
    def size_bytes(self) -> int:
        """How many bytes the log has."""
        return self._log.size_bytes

    @property
    def first_offset(self) -> int:
        """What was before is gone."""
        return self._log.first_offset

    @property
    def next_offset(self) -> int:
        """Where the next batch will stand."""
        return self._log.next_offset

    @property
    def needed_offset(self) -> int:
        """Nothing before this offset is needed any more."""
        return next(iter(self._held.values()), self._log.next_offset)

    def hold(self, places: Iterable[tuple[int, int]]) -> None:
        """After a restart: these are needed, given as offsets and where each begins."""
        self._held = OrderedDict(sorted({*self._held.items(), *places}))

    def let_go(self, offsets: Iterable[int]) -> None:
        """Batches at these offsets are not needed any more."""
        for offset in offsets:
            self._held.pop(offset, None)

    def keep(
        self, batch: Batch, topic_id: int, partition: int, now_us: int, note: StageHeader | None = None
    ) -> StagedBatch:
        """Keep a batch until it is let go of, with a note if it is to be found again."""
        first_offset = self._log.next_offset
        if note is not None:
            self._write(_encode(note), now_us)
        appended = self._log.append(batch, now_us)
        self._held[appended.base_offset] = first_offset
        self._unsynced_bytes += batch.length
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._unsynced_bytes = 0
            self._log.request_sync()
        return StagedBatch(topic_id, partition, first_offset, appended.base_offset, appended.next_offset, batch.length)

    def find_again(self, now_us: int) -> list[tuple[StageHeader, StagedBatch]]:
        """All batches with notes that an earlier session of the broker has left."""
        found: list[tuple[StageHeader, StagedBatch]] = []
        note: StageHeader | None = None
        end = self._log.first_offset
        for batch in self._log.batches(end, self._log.next_offset):
            if batch.producer_id == _NOTES:
                content = batch.columns().values[0]
                note = _decode(content) if content else None
            else:
                if note is not None and batch.crc == note.crc and batch.base_offset == end:
                    place = (end - 1, batch.base_offset, batch.next_offset)
                    found.append((note, StagedBatch(note.topic_id, note.partition, *place, batch.length)))
                note = None
            end = batch.next_offset
        if found:
            # They were written, but the names of the files they are in may not be on the disk. With something behind
            # them, to be synced first, a commit sees to that too.
            behind = self._write(b"", now_us)
            for _, staged in found:
                staged.next_offset = behind
        return found

    def batch_at(self, offset: int) -> Batch:
        """The batch that stands there."""
        return self._log.batch_at(offset)

    def when_synced(self, offset: int, tell: Callable[[HeadraceError | None], None]) -> None:
        """Tell when everything before an offset is on the disk, at once if it is, or will never be in files."""
        if self._log.awaits_sync(offset):
            self._syncing.wait(offset, tell)
        else:
            tell(None)

    def forget_before(self, offset: int) -> None:
        """Remove what is not needed any more. Takes a while; on any thread."""
        self._log.truncate_before(offset)

    def close(self) -> None:
        """Sync and close the log."""
        self._log.close()

    def _write(self, content: bytes, now_us: int) -> int:
        """Write a note; returns the offset behind it."""
        # Numbered as any producer's batches, though nobody will ever repeat one.
        by = Producer(_NOTES, self._notes >> 32, self._notes & 0xFFFFFFFF)
        appended = self._log.append(encode(Columns([content]), now_us, producer=by), now_us)
        self._notes += 1
        return appended.next_offset
