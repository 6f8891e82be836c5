"""The earliest state of a cluster that can be restored: what is named as the beginning works, and nothing before."""

from pathlib import Path

import pytest
from tests.unit.test_holes import KEYS, claimed, lose, replica_of, write_objects

import headrace
from headrace.cli.arguments import relative_moment
from headrace.model.errors import InvalidArgument
from headrace.server import list_restorable, restore_directory
from headrace.storage.disk import PrivateDisk
from headrace.storage.replicated.epochs import claim, create_cluster, new_nonce
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.restore import Restored, first_with_file, restore_at, shown_moment
from headrace.storage.stores.directory import DirectoryStore
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import MemoryDisk

CLUSTER = "trading"


def restore(store: str, target: Path, at: int | Position | None) -> Position:
    return restore_directory(str(target), store, CLUSTER, "", at, lambda *_: None).position


def test_the_beginning_that_is_listed_can_be_restored_and_nothing_before(tmp_path: Path) -> None:
    store = f"directory://{tmp_path}/store"
    with headrace.open(str(tmp_path / "node"), store=store, cluster=CLUSTER) as bus:
        bus.publish("orders", b"1")
    begin, *_, newest = list_restorable(store, CLUSTER, "")
    assert (begin.what, begin.position > (1, 0), newest.what) == ("beginning", True, "newest")
    early: list[int | Position] = [Position(1, number) for number in range(begin.position.objects)]
    for at in (*early, begin.time_us - 1, 5):
        with pytest.raises(InvalidArgument) as refused:
            restore(store, tmp_path / "early", at)
        named = f"it begins at {begin.position} of {shown_moment(begin.time_us)}"
        assert named in str(refused.value)
        assert refused.value.details["earliest"] == str(begin.position)
        assert not (tmp_path / "early").exists()
    assert restore(store, tmp_path / "at-position", begin.position) == begin.position
    assert restore(store, tmp_path / "at-time", begin.time_us) >= begin.position
    assert relative_moment(shown_moment(begin.time_us)) == begin.time_us
    for copy in ("at-position", "at-time"):
        with headrace.open(str(tmp_path / copy)) as bus:
            assert bus.publish("orders", b"1").offset == 0
    for number in range(begin.position.objects, newest.position.objects + 1):
        restore(store, tmp_path / f"at-{number}", Position(1, number))


def test_a_cluster_that_no_node_has_served_has_no_beginning(tmp_path: Path) -> None:
    store = DirectoryStore(PrivateDisk(), str(tmp_path / "store"))
    create_cluster(store, CLUSTER)
    assert claim(store, ShardKeys(CLUSTER, 0), node="a", addresses=(), nonce=new_nonce(), expected=0)
    url = f"directory://{tmp_path}/store"
    assert [point.what for point in list_restorable(url, CLUSTER, "")] == ["newest"]
    for at in (None, Position(1, 0), 5):
        with pytest.raises(InvalidArgument, match="has no data yet: no node has served it"):
            restore(url, tmp_path / "copy", at)
    assert not (tmp_path / "copy").exists()


def store_of_two_epochs() -> tuple[MemoryStore, int]:
    """A store whose second owner made the file; and how many objects of its epoch that took."""
    store = MemoryStore()
    first = claimed(replica_of(store, "a"), 0)
    write_objects(first, 3)
    first.writer.close()
    second = claimed(replica_of(store, "b"), 1)
    write_objects(second, 2)
    disk, root = second.disk, "/node/shards/000"
    file = disk.open(f"{root}/format", create=True)
    disk.zero(file, 0, 100)
    disk.sync(file)
    assert first_with_file(store, KEYS, "format") is None
    disk.write(file, 0, b"x")
    disk.sync(file)
    objects = len(store.names(KEYS.epoch_prefix(2)))
    disk.write(file, 1, b"y")
    disk.sync(file)
    second.writer.close()
    return store, objects


def test_the_file_may_be_written_in_a_later_epoch_and_some_time_after_it_was_made() -> None:
    store, objects = store_of_two_epochs()
    found = first_with_file(store, KEYS, "format")
    assert found == Restored(Position(2, objects), 1)
    disk = MemoryDisk()
    restore_at(store, "test", 0, disk, "/new", found.position)
    assert disk.read(disk.open("/new/format"), 0, 2) == b"x\0"


def test_a_log_with_a_hole_before_the_file_has_no_beginning() -> None:
    store, _ = store_of_two_epochs()
    lose(store, 0, epoch=2)
    assert first_with_file(store, KEYS, "format") is None
