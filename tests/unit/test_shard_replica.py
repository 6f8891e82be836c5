"""A node's copy of a shard: when it is trusted, and when it is compared with the store first."""

import sys

import pytest

from headrace.cluster.shards import OwnedShard, ShardPlace, ShardReplica
from headrace.model.errors import InvalidArgument
from headrace.storage.replicated.epochs import create_cluster, new_nonce
from headrace.storage.replicated.keys import Position
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import MemoryDisk


class RebootedDisk(MemoryDisk):
    """A disk whose machine can be started again."""

    boots = 1

    def boot_id(self) -> bytes:
        """Another one after each start."""
        return self.boots.to_bytes(16, "big")


def replica_on(disk: MemoryDisk, store: MemoryStore, cluster: str = "test") -> ShardReplica:
    create_cluster(store, cluster)
    return ShardReplica(store, disk, ShardPlace(cluster, "n1", "/node"), now_us=lambda: 1, clock=lambda: 0.0)


def stopped_in_order(disk: MemoryDisk, store: MemoryStore) -> None:
    replica = replica_on(disk, store)
    replica.open()
    replica.restore()
    replica.note_state(clean=True)


def test_a_copy_that_was_left_in_order_is_trusted() -> None:
    disk, store = RebootedDisk(), MemoryStore()
    stopped_in_order(disk, store)
    again = replica_on(disk, store)
    again.open()
    assert again.is_restored


def test_after_a_restart_of_the_machine_the_copy_is_compared_first() -> None:
    disk, store = RebootedDisk(), MemoryStore()
    stopped_in_order(disk, store)
    disk.boots += 1  # the copy is never synced: its newest bytes may be gone
    again = replica_on(disk, store)
    again.open()
    assert not again.is_restored


def test_after_a_crash_the_copy_is_compared_first() -> None:
    disk, store = RebootedDisk(), MemoryStore()
    stopped_in_order(disk, store)
    replica_on(disk, store).open()  # and the process dies
    again = replica_on(disk, store)
    again.open()
    assert not again.is_restored


def test_a_directory_belongs_to_one_cluster() -> None:
    disk, store = RebootedDisk(), MemoryStore()
    stopped_in_order(disk, store)
    with pytest.raises(InvalidArgument, match="data of the cluster test, not of other"):
        replica_on(disk, store, "other").open()


BEGINNING = Position(1, 0)


def claimed(replica: ShardReplica, expected: int) -> OwnedShard:
    owned = replica.claim(new_nonce(), (), expected, lambda: None)
    assert owned is not None
    return owned


def write(owned: OwnedShard, name: str, size: int) -> None:
    """Commit so many bytes."""
    file = owned.disk.open(f"/node/shards/000/{name}", write=True, create=True)
    owned.disk.write(file, 0, bytes(size))
    owned.disk.sync(file)


def test_each_owner_knows_the_size_of_the_log_that_others_have_left() -> None:
    store, first, second = MemoryStore(), RebootedDisk(), RebootedDisk()
    one, two = replica_on(first, store), replica_on(second, store)
    one.open()
    two.open()
    owned = claimed(one, 0)
    assert owned.log_size.behind(BEGINNING) < 1000
    write(owned, "a", 100_000)
    taken = claimed(two, 1)
    assert 100_000 < taken.log_size.behind(BEGINNING) < 101_000
    write(taken, "b", 50_000)
    taken.writer.close()
    two.follow_released(taken)
    two.note_state(clean=True)
    two = replica_on(second, store)
    two.open()
    again = claimed(two, 2)
    assert 150_000 < again.log_size.behind(BEGINNING) < 152_000
    one.drop()
    one.restore()
    one.poll(sys.maxsize)
    last = claimed(one, 3)
    assert 150_000 < last.log_size.behind(BEGINNING) < 152_000
    for each in (owned, again, last):
        each.writer.close()
