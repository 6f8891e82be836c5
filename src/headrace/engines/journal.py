"""A journal: facts in the order in which they were decided, on a log; a snapshot bounds what has to be replayed."""

from collections.abc import Callable, Iterable, Iterator

from headrace.model.batch import Columns, encode
from headrace.model.durability import Durability
from headrace.model.errors import HeadraceError
from headrace.storage.driver import StoredLog
from headrace.storage.log import FileLog

_FACT, _SNAPSHOT_BEGIN, _SNAPSHOT, _SNAPSHOT_END = range(4)  # a record's kind, in the column of priorities
_SNAPSHOT_RECORDS = 1000
_SNAPSHOT_BYTES = 1 << 20
"""A snapshot is written in batches of about so many records and bytes, whichever comes first."""


class Journal:
    """Facts, each a few bytes. One thread writes; after a crash there is a prefix of what was written."""

    def __init__(self, log: StoredLog) -> None:
        self._log = log
        self._in_files = isinstance(log, FileLog)
        self.last_us = 0
        """When the last of the facts that were read was written."""

    @property
    def synced_offset(self) -> int:
        """All facts before this offset are on the disk."""
        return self._log.synced_offset

    @property
    def has_little(self) -> bool:
        """Whether only a few bytes are to be synced."""
        return isinstance(self._log, FileLog) and self._log.has_little

    @property
    def synced(self) -> bool:
        """Whether all that was written is as safe as it will ever be."""
        return not self._in_files or self._log.synced_offset >= self._log.next_offset

    def facts(self) -> Iterator[bytes | None]:
        """Everything that was written, in order; None says: forget all that came before. Raises on damage."""
        snapshot: list[bytes] = []
        for batch in self._log.batches(self._log.first_offset):
            columns = batch.columns()
            self.last_us = batch.append_time
            for kind, value in zip(columns.priorities or (), columns.values, strict=True):
                content = value or b""
                if kind == _FACT:
                    snapshot.clear()  # of one that a crash cut short nothing counts
                    yield content
                elif kind == _SNAPSHOT_BEGIN:
                    snapshot.clear()
                elif kind == _SNAPSHOT:
                    snapshot.append(content)
                else:
                    yield None
                    yield from snapshot
                    snapshot.clear()

    def write(self, facts: list[bytes], now_us: int) -> int:
        """Write facts, all or none; returns the offset behind them."""
        return self._append(facts, _FACT, now_us)

    def write_snapshot(self, facts: Iterable[bytes], now_us: int) -> int:
        """Write all that counts; returns an offset for `forget_before`, which ends what came before."""
        begin = self._append([b""], _SNAPSHOT_BEGIN, now_us) - 1
        some: list[bytes] = []
        some_bytes = 0
        for fact in facts:
            some.append(fact)
            some_bytes += len(fact)
            if len(some) == _SNAPSHOT_RECORDS or some_bytes >= _SNAPSHOT_BYTES:
                self._append(some, _SNAPSHOT, now_us)
                some, some_bytes = [], 0
        if some:
            self._append(some, _SNAPSHOT, now_us)
        self._append([b""], _SNAPSHOT_END, now_us)
        return begin

    def forget_before(self, offset: int) -> None:
        """Remove what a snapshot has replaced, once that is on the disk. Takes a while; on any thread."""
        self._log.truncate_before(offset)

    def when_synced(self, offset: int, tell: Callable[[HeadraceError | None], None]) -> None:
        """Have everything before an offset synced, and be told, possibly on another thread."""
        if isinstance(self._log, FileLog):
            self._log.when_synced(offset, tell)
        else:
            tell(None)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        if isinstance(self._log, FileLog):
            self._log.wait_synced(self._log.next_offset)

    def close(self) -> None:
        """Sync and close."""
        self._log.close()

    def _append(self, records: list[bytes], kind: int, now_us: int) -> int:
        batch = encode(Columns(records, priorities=[kind] * len(records)), now_us)
        at_once = Durability.WRITTEN if self._in_files else Durability.MEMORY
        return self._log.append(batch, now_us, at_once).next_offset
