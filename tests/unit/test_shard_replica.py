"""A node's copy of a shard: when it is trusted, and when it is compared with the store first."""

import pytest

from headrace.cluster.shards import ShardPlace, ShardReplica
from headrace.model.errors import InvalidArgument
from headrace.storage.replicated.epochs import create_cluster
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
