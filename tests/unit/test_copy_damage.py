"""Damage of the local copy: what a replicated disk makes of it, and what checkpoints verify."""

from collections.abc import Iterator

import pytest
from tests.replica import tree
from tests.unit.test_checkpoints import ROOT, Owner

from headrace.model.batch import Columns, encode
from headrace.model.errors import CorruptBatch, NotServing
from headrace.storage.log import FileLog
from headrace.storage.replicated.damage import damaged_ranges
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import MemoryDisk

LOG = f"{ROOT}/topics/log"
SEGMENT = f"{LOG}/{0:020d}.seg"
MOMENT = 1_000_000


class OwnerOfLog:
    """An owner with a log of batches of ten messages."""

    def __init__(self, store: MemoryStore, local: MemoryDisk | None = None) -> None:
        self.owner = Owner(store, local)
        self.disk, self.local = self.owner.disk, self.owner.local
        self._moments = iter(range(self.owner.epoch * MOMENT, 2**60, MOMENT))

    def open(self) -> FileLog:
        self.disk.make_directory(f"{ROOT}/topics")
        return FileLog(StorageRuntime(self.disk), LOG, LogSettings(segment_bytes=1 << 20))

    def append(self, batches: int) -> None:
        log = self.open()
        for number in range(batches):
            log.append(encode(Columns([b"%d-%d" % (number, at) for at in range(10)]), 1), 1)
        log.close()
        self.owner.writer.flush(10)

    def checkpoint(self) -> None:
        self.owner.checkpointer.make_from(self.disk, next(self._moments))

    def flip(self, position: int, path: str = SEGMENT) -> None:
        file = self.local.open(path, write=True)
        self.local.write(file, position, bytes([self.local.read(file, position, 1)[0] ^ 0x40]))

    def end(self) -> None:
        self.owner.writer.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def shard(store: MemoryStore) -> Iterator[OwnerOfLog]:
    made = OwnerOfLog(store)
    yield made
    made.end()


@pytest.mark.parametrize("position", [3, 70, 700, 1500])
def test_damage_is_in_no_checkpoint(shard: OwnerOfLog, store: MemoryStore, position: int) -> None:
    shard.append(20)
    shard.flip(position)
    with pytest.raises(NotServing):
        shard.checkpoint()
    assert list(shard.disk.damaged) == ["topics/log/" + SEGMENT.rpartition("/")[2]]
    assert not store.names("test/shards/000/checkpoints/")
    with pytest.raises(NotServing):
        shard.disk.make_directory(f"{ROOT}/new")  # nothing changes any more


@pytest.mark.parametrize("length", [None, 0, 1, 700], ids=["removed", "empty", "nearly empty", "cut"])
@pytest.mark.parametrize("name", ["meta", SEGMENT.rpartition("/")[2]])
def test_a_file_that_somebody_removes_or_cuts_ends_the_serving_at_the_next_checkpoint(
    shard: OwnerOfLog, store: MemoryStore, name: str, length: int | None
) -> None:
    shard.append(20)
    if length is None:
        shard.local.remove(f"{LOG}/{name}")
    else:
        shard.local.truncate(shard.local.open(f"{LOG}/{name}", write=True), length)
    with pytest.raises(NotServing, match="it is restored from the store"):
        shard.checkpoint()
    assert list(shard.disk.damaged) == [f"topics/log/{name}"]
    assert not store.names("test/shards/000/checkpoints/")


def test_a_record_that_cannot_be_read_is_in_no_checkpoint(shard: OwnerOfLog, store: MemoryStore) -> None:
    shard.append(1)
    for position in (20, 4116):
        shard.flip(position, f"{LOG}/meta")
    with pytest.raises(NotServing):
        shard.checkpoint()
    assert list(shard.disk.damaged) == ["topics/log/meta"]
    assert not store.names("test/shards/000/checkpoints/")


@pytest.mark.parametrize("position", [70, 700])
def test_damage_below_the_checkpoint_before_is_in_no_checkpoint(
    shard: OwnerOfLog, store: MemoryStore, position: int
) -> None:
    shard.append(20)
    shard.checkpoint()
    good = tree(shard.local, ROOT)
    shard.flip(position)
    shard.append(1)
    with pytest.raises(NotServing):
        shard.checkpoint()
    shard.end()
    again = OwnerOfLog(store)
    path = SEGMENT.removeprefix(f"{ROOT}/")
    before = good[path]
    assert before is not None
    assert (tree(again.local, ROOT)[path] or b"").startswith(before.rstrip(b"\0"))
    again.end()


def test_a_new_owner_verifies_what_its_copy_has(shard: OwnerOfLog, store: MemoryStore) -> None:
    shard.append(20)
    shard.checkpoint()
    shard.append(20)
    shard.end()
    later = OwnerOfLog(store)
    later.append(1)
    later.flip(1500)
    with pytest.raises(NotServing):
        later.checkpoint()
    later.end()


@pytest.mark.parametrize("position", [3, 70, 1500, -5])
def test_recovery_cuts_nothing_of_a_damaged_copy(shard: OwnerOfLog, store: MemoryStore, position: int) -> None:
    shard.append(20)
    shard.end()
    later = OwnerOfLog(store)
    later.local.remove(SEGMENT.replace(".seg", ".idx"))
    size = len(tree(later.local, ROOT)[SEGMENT.removeprefix(f"{ROOT}/")] or b"")
    later.flip(position % size)
    with pytest.raises(NotServing, match="is damaged at byte"):
        later.open()
    assert size == len(tree(later.local, ROOT)[SEGMENT.removeprefix(f"{ROOT}/")] or b"")
    later.end()
    again = OwnerOfLog(store)
    assert sum(batch.count for batch in again.open().batches(0)) == 200
    again.end()


def test_damage_that_the_store_has_is_repaired_as_ever(shard: OwnerOfLog) -> None:
    shard.append(20)
    log = shard.open()
    shard.flip(1500)
    shard.disk.known_damage = {SEGMENT.removeprefix(f"{ROOT}/"): damaged_ranges(shard.local, SEGMENT)}
    with pytest.raises(CorruptBatch):
        list(log.batches(0))
    assert sum(batch.count for batch in log.batches(0, skip_corrupt=True)) == 190
    log.close()
    shard.checkpoint()
    shard.flip(700)
    with pytest.raises(NotServing):
        list(shard.open().batches(0))


def test_an_owner_after_another_does_not_recover_as_after_a_power_loss(shard: OwnerOfLog, store: MemoryStore) -> None:
    shard.append(20)
    shard.end()
    later = OwnerOfLog(store)
    before = later.owner.writer.statistics().objects
    later.open()
    later.owner.writer.flush(10)
    assert later.owner.writer.statistics().objects == before  # not even the record of the boot is written again
    later.end()


def test_known_damage_ends_with_what_is_written_there(shard: OwnerOfLog) -> None:
    path = f"{ROOT}/file"
    file = shard.disk.open(path, create=True)
    shard.disk.write(file, 0, b"0123456789")
    shard.disk.known_damage = {"file": [range(2, 4), range(6, 8)]}
    shard.disk.report_damage(path, 3, "known")
    shard.disk.write(file, 3, b"x")
    shard.disk.report_damage(path, 6, "known")
    shard.disk.truncate(file, 5)
    assert shard.disk.known_damage == {"file": []}
    with pytest.raises(NotServing, match="damaged at byte 3"):
        shard.disk.report_damage(path, 3, "new")
