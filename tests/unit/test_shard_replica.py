"""A node's copy of a shard: when it is trusted, and when it is compared with the store first."""

import sys
from collections.abc import Callable

import pytest

from headrace.cluster.shards import OwnedShard, ShardPlace, ShardReplica
from headrace.model.errors import InvalidArgument, NotServing
from headrace.storage.replicated.applier import OperationMismatch
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


ROOT = "/node/shards/000"


def empty_root(disk: MemoryDisk) -> None:
    disk.remove_directory("/node/shards")


def remove_one(disk: MemoryDisk) -> None:
    disk.remove(f"{ROOT}/log/0.seg")


def cut_one(disk: MemoryDisk) -> None:
    disk.truncate(disk.open(f"{ROOT}/log/0.seg", write=True), 10)


def replace_one(disk: MemoryDisk) -> None:
    disk.rename(f"{ROOT}/log/0.seg", f"{ROOT}/log/20.seg")


def add_one(disk: MemoryDisk) -> None:
    disk.write(disk.open(f"{ROOT}/log/20.seg", write=True, create=True), 0, b"x")


CHANGES = [empty_root, remove_one, cut_one, replace_one, add_one]


def with_data(store: MemoryStore, disk: MemoryDisk) -> OwnedShard:
    """The first owner, which has committed a file."""
    replica = replica_on(disk, store)
    replica.open()
    owned = claimed(replica, 0)
    owned.disk.make_directory(f"{ROOT}/log")
    write(owned, "log/0.seg", 1000)
    return owned


def has_it(owned: OwnedShard) -> bool:
    return [(name, owned.disk.length(f"{ROOT}/log/{name}")) for name in owned.disk.names(f"{ROOT}/log")] == [
        ("0.seg", 1000)
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_a_follower_whose_files_were_changed_makes_its_copy_anew_before_it_takes_over(
    change: Callable[[MemoryDisk], None],
) -> None:
    store, disk = MemoryStore(), RebootedDisk()
    first = with_data(store, RebootedDisk())
    replica = replica_on(disk, store)
    replica.open()
    replica.restore()
    replica.poll(sys.maxsize)
    change(disk)
    with pytest.raises(OperationMismatch, match="somebody else has changed files below /node/shards/000"):
        claimed(replica, 1)
    manifest = replica.manifest()
    assert manifest is not None
    assert manifest.manifest.epoch == 1, "who lacks files takes the shard from nobody"
    replica.drop()
    owned = claimed(replica, 1)
    assert has_it(owned)
    for each in (first, owned):
        each.writer.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_former_owner_whose_files_were_changed_makes_its_copy_anew(change: Callable[[MemoryDisk], None]) -> None:
    store, disk = MemoryStore(), RebootedDisk()
    replica = replica_on(disk, store)
    owned = with_data(store, disk)
    owned.writer.close()
    replica.open()
    replica.follow_released(owned)
    assert replica.poll(sys.maxsize) == 0
    change(disk)
    with pytest.raises(OperationMismatch):
        claimed(replica, 1)
    replica.drop()
    again = claimed(replica, 1)
    assert has_it(again)
    again.writer.close()


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_were_changed_while_the_node_was_stopped_are_noticed(change: Callable[[MemoryDisk], None]) -> None:
    store, disk = MemoryStore(), RebootedDisk()
    with_data(store, RebootedDisk()).writer.close()
    replica = replica_on(disk, store)
    replica.open()
    replica.restore()
    replica.poll(sys.maxsize)
    replica.note_state(clean=True)
    change(disk)
    again = replica_on(disk, store)
    again.open()
    assert not again.is_restored


def test_a_follower_notices_by_itself_that_files_are_missing() -> None:
    store, disk, now = MemoryStore(), RebootedDisk(), [0.0]
    with_data(store, RebootedDisk()).writer.close()
    replica = ShardReplica(store, disk, ShardPlace("test", "n1", "/node"), now_us=lambda: 1, clock=lambda: now[0])
    replica.open()
    replica.restore()
    replica.poll(sys.maxsize)
    disk.remove_directory("/node")
    replica.poll(sys.maxsize)
    now[0] += 10
    with pytest.raises(OperationMismatch, match="missing"):
        replica.poll(sys.maxsize)
    replica.restore()
    replica.poll(sys.maxsize)
    assert disk.length(f"{ROOT}/log/0.seg") == 1000


def test_an_owner_begins_no_file_anew_that_somebody_else_has_removed() -> None:
    store, disk = MemoryStore(), RebootedDisk()
    with_data(store, RebootedDisk()).writer.close()
    replica = replica_on(disk, store)
    replica.open()
    owned = claimed(replica, 1)
    disk.remove(f"{ROOT}/log/0.seg")
    with pytest.raises(NotServing, match="is missing"):
        owned.disk.open(f"{ROOT}/log/0.seg", write=True, create=True)
    assert owned.disk.damaged == {"log/0.seg": "somebody else has removed it"}
    replica.follow_released(owned)
    assert not replica.is_restored
    owned.writer.close()
