"""A log on a slow shared store: the next sync begins before the last one is done."""

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.replica import KEYS, DoubtfulStore, replicated, seal, wait_until

from headrace.model.batch import Columns, encode
from headrace.model.errors import Fenced
from headrace.storage.log import FileLog
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.testing import MemoryDisk

ROOT = "/node/shards/000"
MESSAGE = b"x" * 100


class SlowLog:
    """A log whose store holds objects back when the test says so."""

    def __init__(self) -> None:
        self.store = DoubtfulStore(1, doubt=0.0)
        self.disk: ReplicatedDisk = replicated(MemoryDisk(), ROOT, self.store)
        self.host = StorageRuntime(disk=self.disk)
        self.log = FileLog(self.host, f"{ROOT}/log", LogSettings())
        self.told: list[tuple[int, object]] = []
        self.append()
        self.log.wait_synced(1)
        self.disk.writer._latency_s = 1.0
        self.told.clear()

    def append(self) -> int:
        """Append a message, and have it synced; what comes of it is told."""
        offset = self.log.append(encode(Columns([MESSAGE]), 1), 1).next_offset
        self.log.when_synced(offset, lambda error: self.told.append((offset, error)))
        return offset

    def hold_back(self) -> None:
        """Let the next object not arrive."""
        self.store.blocked.add(KEYS.wal(1, self.disk.writer.committed.objects))

    def overtaken(self) -> None:
        """Wait until the object behind the one that was held back is in the store."""
        behind = KEYS.wal(1, self.disk.writer.committed.objects + 1)
        wait_until(lambda: behind in self.store.puts)

    def in_flight(self, count: int) -> None:
        wait_until(lambda: self.disk.writer.statistics().in_flight == count)


@pytest.fixture
def slow() -> Iterator[SlowLog]:
    made = SlowLog()
    yield made
    made.disk.writer.close()
    made.host.flusher.stop()


def test_the_next_sync_begins_while_the_last_is_under_way(slow: SlowLog) -> None:
    slow.hold_back()
    assert slow.append() == 2
    slow.in_flight(1)
    assert slow.append() == 3
    slow.overtaken()
    assert (slow.told, slow.log.synced_offset) == ([], 1)
    slow.store.blocked.clear()
    wait_until(lambda: len(slow.told) == 2)
    assert slow.told == [(2, None), (3, None)]
    assert slow.log.synced_offset == 3
    slow.log.close()


def test_all_who_wait_are_told_that_the_shard_is_lost(slow: SlowLog) -> None:
    slow.hold_back()
    slow.append()
    slow.in_flight(1)
    slow.append()
    slow.overtaken()
    seal(slow.store)
    slow.store.blocked.clear()
    wait_until(lambda: len(slow.told) == 2)
    assert [type(error) for _, error in slow.told] == [Fenced, Fenced]
    with pytest.raises(Fenced):
        slow.log.append(encode(Columns([MESSAGE]), 1), 1)
    assert slow.log.synced_offset == 1


@pytest.mark.parametrize("late", [False, True])
def test_messages_that_were_removed_do_not_come_to_count_as_synced(
    slow: SlowLog, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the end of a sync is told only after a later sync was waited for, and the messages were removed."""
    kept: list[Callable[[], None]] = []
    begin_sync = ReplicatedDisk.begin_sync

    def begin_late(disk: ReplicatedDisk, file: object, done: Callable[[object], None]) -> bool:
        return begin_sync(disk, file, lambda error: kept.append(lambda: done(error)))  # type: ignore[arg-type]

    if late:
        monkeypatch.setattr(ReplicatedDisk, "begin_sync", begin_late)
    slow.hold_back()
    slow.append()
    slow.append()
    slow.in_flight(1)
    cutting = threading.Thread(target=slow.log.truncate_after, args=(1,))
    cutting.start()
    slow.store.blocked.clear()
    cutting.join(30)
    for tell in kept:
        tell()
    assert bool(kept) is late
    assert (slow.log.next_offset, slow.log.synced_offset) == (1, 1)
    slow.log.close()
