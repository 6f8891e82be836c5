"""The staging log: holds the batches of transactions until their commit; shared transactions survive a restart."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from headrace.broker.ports import Ports
from headrace.broker.sync_waiters import SyncWaiters
from headrace.engines.api import FormerBatch, KeyCounts, Partition
from headrace.model.batch import Batch, Columns, Producer, encode
from headrace.model.durability import Durability
from headrace.model.errors import HeadraceError

_HEADER_PRODUCER = 2
"""The producer id of stage headers: reserved for the broker, so that no client's batch passes for a header."""
_SYNC_BYTES = 32 << 20
"""Unsynced bytes that trigger an early sync, so that a commit has less to wait for."""


class StageHeader(msgspec.Struct, array_like=True, frozen=True):
    """Precedes a batch of a shared transaction in the log, and identifies its transaction after a restart."""

    epoch: int
    """The transaction's epoch."""
    stage: int
    """The batch's number, which no other batch ever gets, even after a power loss."""
    topic_id: int
    topic: str
    """The topic's name as well: after a power loss, another topic may have its id."""
    partition: int
    crc: int
    """The batch's checksum: after a crash, another batch may follow the header."""
    expected_version: int | None = None
    """The version that the first message must get at the commit."""
    companion_of: int = 0
    """The number of the batch with which it is committed, if a commit does not name this one."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StageHeader).decode


@dataclass(slots=True)
class StagedBatch:
    """A batch in the staging log."""

    topic_id: int
    partition: int
    first_offset: int
    """The offset of its header, or its own if it has none."""
    offset: int
    next_offset: int
    bytes: int
    keys: KeyCounts | None = None
    """For a topic with key_versions: how many messages each key has; None after a restart."""
    expected_version: int | None = None
    """The version that the first message must get; its batch has one key."""


def with_new_crc(batch: Batch, following: FormerBatch) -> Batch:
    """Update a stage header of the former format with the new checksum of its batch; returns others unchanged."""
    content = batch.columns().values[0] if batch.producer_id == _HEADER_PRODUCER else None
    header = _decode(content) if content else None
    if header is None or header.crc != following.crc:
        return batch
    header = msgspec.structs.replace(header, crc=following.batch.crc)
    changed = encode(Columns([_encode(header)]), batch.time_max, producer=batch.producer)
    changed.place(batch.base_offset, batch.append_time, batch.log_id, batch.synced_offset)
    return changed


class StagingLog:
    """The log of staged batches."""

    def __init__(self, log: Partition, ports: Ports) -> None:
        self._log = log
        self._syncing = SyncWaiters(log, ports)
        self._headers_written = 0
        self._unsynced_bytes = 0
        self._held: OrderedDict[int, int] = OrderedDict()
        """The batches still needed: first offsets (with the header) by batch offset, in ascending order."""

    @property
    def idle(self) -> bool:
        """Whether nobody waits for a sync."""
        return self._syncing.idle

    @property
    def is_replicated(self) -> bool:
        """Whether a sync makes batches survive the loss of this machine."""
        return self._log.durability_max >= Durability.REPLICATED

    @property
    def size_bytes(self) -> int:
        """The size of the log."""
        return self._log.size_bytes

    @property
    def first_offset(self) -> int:
        """The oldest offset that is still there."""
        return self._log.first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next batch will have."""
        return self._log.next_offset

    @property
    def needed_offset(self) -> int:
        """The lowest offset that is still needed."""
        return next(iter(self._held.values()), self._log.next_offset)

    def hold(self, places: Iterable[tuple[int, int]]) -> None:
        """Mark batches as needed after a restart; each is given as its offset and first offset."""
        self._held = OrderedDict(sorted({*self._held.items(), *places}))

    def let_go(self, offsets: Iterable[int]) -> None:
        """Mark the batches at these offsets as no longer needed."""
        for offset in offsets:
            self._held.pop(offset, None)

    def keep(
        self, batch: Batch, topic_id: int, partition: int, now_us: int, header: StageHeader | None = None
    ) -> StagedBatch:
        """Append a batch and hold it until `let_go`; with a header, a restarted broker can find it again."""
        first_offset = self._log.next_offset
        if header is not None:
            self._write(_encode(header), now_us)
        appended = self._log.append(batch, now_us)
        self._held[appended.base_offset] = first_offset
        self._unsynced_bytes += batch.length
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._unsynced_bytes = 0
            self._log.request_sync()
        return StagedBatch(topic_id, partition, first_offset, appended.base_offset, appended.next_offset, batch.length)

    def find_again(self, now_us: int) -> list[tuple[StageHeader, StagedBatch]]:
        """All batches with headers that an earlier run of the broker has left."""
        found: list[tuple[StageHeader, StagedBatch]] = []
        header: StageHeader | None = None
        end = self._log.first_offset
        for batch in self._log.batches(end, self._log.next_offset, empty=True):
            if batch.producer_id == _HEADER_PRODUCER:
                content = batch.columns().values[0]
                header = _decode(content) if content else None
            else:
                if header is not None and batch.crc == header.crc and batch.base_offset == end:
                    place = (end - 1, batch.base_offset, batch.next_offset)
                    staged = StagedBatch(header.topic_id, header.partition, *place, batch.length)
                    staged.expected_version = header.expected_version
                    found.append((header, staged))
                header = None
            end = batch.next_offset
        if found:
            # They are written, but the directory entries of their files may not be synced. A commit waits for a sync of
            # this record behind them, which includes the entries.
            behind = self._write(b"", now_us)
            for _, staged in found:
                staged.next_offset = behind
        return found

    def batch_at(self, offset: int) -> Batch:
        """The batch at an offset."""
        return self._log.batch_at(offset, empty=True)

    def when_synced(self, offset: int, tell: Callable[[HeadraceError | None], None]) -> None:
        """Call back when everything before an offset is synced; at once if it is, or if the log is in memory."""
        if self._log.awaits_sync(offset):
            self._syncing.wait(offset, tell)
        else:
            tell(None)

    def forget_before(self, offset: int) -> None:
        """Remove batches before an offset; slow, and allowed on any thread."""
        self._log.truncate_before(offset)

    def close(self) -> None:
        """Sync and close the log."""
        self._log.close()

    def _write(self, content: bytes, now_us: int) -> int:
        """Write a header; returns the offset behind it."""
        # The log requires sequence numbers, although nobody ever repeats a header.
        by = Producer(_HEADER_PRODUCER, self._headers_written >> 32, self._headers_written & 0xFFFFFFFF)
        appended = self._log.append(encode(Columns([content]), now_us, producer=by), now_us)
        self._headers_written += 1
        return appended.next_offset
