"""A journal: facts in the order in which they were decided, on a log; snapshots bound what is replayed."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headrace.model.batch import Batch, Columns, encode
from headrace.model.errors import CorruptBatch
from headrace.storage.reader import LogReader
from headrace.storage.stored_log import StoredLog, SyncCallback

_FACT, _SNAPSHOT_BEGIN, _SNAPSHOT, _SNAPSHOT_END = range(4)  # a record's kind, in the column of priorities
_SNAPSHOT_RECORDS = 1000
_SNAPSHOT_BYTES = 256 << 10
"""A snapshot is written in batches of about so many records and bytes, whichever comes first."""


class Gap(NamedTuple):
    """A point in the journal where facts may be missing."""

    reason: str


class Survey(NamedTuple):
    """What reading the whole journal found."""

    start: int
    """Where replay begins: the last whole snapshot, or the beginning."""
    snapshot: int | None
    """Where that snapshot begins, if there is one."""
    lost: list[str]
    """Damage that may have destroyed facts."""
    harmless: list[str]
    """Damage that destroyed none: a whole snapshot follows it, or it is inside a snapshot whose facts are all there."""


class JournalReader:
    """The facts of a journal, as they are stored: a prefix of what was written, if the writer crashed."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self.last_us = 0
        """When the last of the facts that were read was written."""

    def survey(self) -> Survey:
        """Find the last whole snapshot, and what is damaged; changes nothing and raises for no damage."""
        snapshot: int | None = None
        begun: int | None = None
        """Where a snapshot begins that is whole so far."""
        before = _FACT
        broken: str | None = None
        lost: list[str] = []
        harmless: list[str] = []
        for item in self._items(self._log.first_offset):
            if isinstance(item, CorruptBatch):
                begun, broken = None, _damage(item)
                continue
            kind = _kind(item)
            if broken is not None:
                inside = before in (_SNAPSHOT_BEGIN, _SNAPSHOT) and kind in (_SNAPSHOT, _SNAPSHOT_END)
                (harmless if inside else lost).append(broken)
                broken = None
            if kind == _SNAPSHOT_BEGIN:
                begun = item.base_offset
            elif kind == _FACT:
                begun = None  # a snapshot that a crash cut short is ignored
            elif kind == _SNAPSHOT_END and begun is not None:
                snapshot, begun = begun, None
                harmless, lost = harmless + lost, []
            before = kind
        lost += [broken] if broken is not None else []
        if snapshot is None and self._log.first_offset:
            lost.insert(0, f"the records before {self._log.first_offset} (their files are missing)")
        return Survey(self._log.first_offset if snapshot is None else snapshot, snapshot, lost, harmless)

    def facts(self, start: int | None = None) -> Iterator[bytes | None]:
        """The facts from an offset on, in order, without damaged ones; None means: discard all facts before this point.

        Without an offset it begins at the last whole snapshot; `survey` lists what is damaged after that.
        """
        return (fact for fact in self.salvage(start) if not isinstance(fact, Gap))

    def salvage(self, start: int | None = None) -> Iterator[bytes | Gap | None]:
        """The same as `facts`, with a Gap where facts may be missing."""
        start = self.survey().start if start is None else start
        snapshot: list[bytes] | None = None
        for item in self._items(start):
            if isinstance(item, CorruptBatch):
                snapshot = None
                yield Gap(_damage(item))
                continue
            columns = item.columns()
            self.last_us = item.append_time
            for kind, value in zip(columns.priorities or (), columns.values, strict=True):
                content = value or b""
                if kind == _FACT:
                    snapshot = None  # a snapshot that a crash cut short is ignored
                    yield content
                elif kind == _SNAPSHOT_BEGIN:
                    snapshot = []
                elif kind == _SNAPSHOT and snapshot is not None:
                    snapshot.append(content)
                elif kind == _SNAPSHOT_END and snapshot is not None:
                    yield None
                    yield from snapshot
                    snapshot = None

    def _items(self, offset: int) -> Iterator[Batch | CorruptBatch]:
        """The batches from an offset on, and what is damaged among them."""
        while offset < self._log.next_offset:
            try:
                for batch in self._log.batches(offset):
                    yield batch
                    offset = batch.next_offset
            except CorruptBatch as error:
                yield error
                offset = max(error.next_offset, offset + 1)
            else:
                return


class Journal(JournalReader):
    """A journal that one thread writes: facts, each a few bytes."""

    _log: StoredLog

    def __init__(self, log: StoredLog) -> None:
        super().__init__(log)

    @property
    def synced_offset(self) -> int:
        """All facts before this offset are on the disk."""
        return self._log.synced_offset

    @property
    def is_small_backlog(self) -> bool:
        """Whether there is something to sync, but only a few bytes."""
        return self._log.is_small_backlog

    @property
    def overlaps_syncs(self) -> bool:
        """Whether the next sync is better requested before the last is done."""
        return self._log.overlaps_syncs

    @property
    def synced(self) -> bool:
        """Whether no sync could make what was written more durable."""
        return not self._log.awaits_sync(self._log.next_offset)

    def write(self, facts: list[bytes], now_us: int) -> int:
        """Write facts, all or none; returns the offset behind them."""
        return self._append(facts, _FACT, now_us)

    def write_snapshot(self, facts: Iterable[bytes], now_us: int) -> int:
        """Write a snapshot of these facts; returns its offset, for `forget_before`."""
        snapshot = Snapshot(now_us)
        for fact in facts:
            snapshot.add(fact)
        return self.append_snapshot(snapshot, now_us)

    def append_snapshot(self, snapshot: "Snapshot", now_us: int) -> int:
        """Write a snapshot that was encoded before, with nothing between its parts; returns its offset."""
        begin = self._append([b""], _SNAPSHOT_BEGIN, now_us) - 1
        for batch in snapshot.finish():
            self._append_batch(batch, now_us)
        self._append([b""], _SNAPSHOT_END, now_us)
        return begin

    def forget_before(self, offset: int) -> None:
        """Remove what a synced snapshot has replaced; slow, and allowed on any thread."""
        self._log.truncate_before(offset)

    def when_synced(self, offset: int, callback: SyncCallback) -> None:
        """Have everything before an offset synced, and be called back, possibly on another thread."""
        self._log.when_synced(offset, callback)

    def request_sync(self) -> None:
        """Have what was written synced soon."""
        self._log.request_sync()

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        self._log.wait_synced(self._log.next_offset)

    def close(self) -> None:
        """Sync and close."""
        self._log.close()

    def _append(self, records: list[bytes], kind: int, now_us: int) -> int:
        return self._append_batch(_encoded(records, kind, now_us), now_us)

    def _append_batch(self, batch: Batch, now_us: int) -> int:
        return self._log.append(batch, now_us).next_offset


class Snapshot:
    """A snapshot that is encoded fact by fact, and written at once."""

    def __init__(self, now_us: int) -> None:
        self._now_us = now_us
        self._batches: list[Batch] = []
        self._some: list[bytes] = []
        self._some_bytes = 0
        self.bytes = 0

    def add(self, fact: bytes) -> None:
        """Add a fact."""
        self._some.append(fact)
        self._some_bytes += len(fact)
        self.bytes += len(fact)
        if len(self._some) == _SNAPSHOT_RECORDS or self._some_bytes >= _SNAPSHOT_BYTES:
            self._encode()

    def finish(self) -> list[Batch]:
        """All batches of the snapshot."""
        if self._some:
            self._encode()
        return self._batches

    def _encode(self) -> None:
        self._batches.append(_encoded(self._some, _SNAPSHOT, self._now_us))
        self._some, self._some_bytes = [], 0


def _encoded(records: list[bytes], kind: int, now_us: int) -> Batch:
    return encode(Columns(records, priorities=[kind] * len(records)), now_us)


def _kind(batch: Batch) -> int:
    """All records of a batch are of one kind."""
    return (batch.columns().priorities or [_FACT])[0] or _FACT


def _damage(error: CorruptBatch) -> str:
    records = f"records {error.first_offset} to {error.next_offset - 1}"
    return f"{records} ({error.path} at byte {error.position}: {error.reason})"
