"""A data directory that becomes a cluster is verified first: what is damaged then would be damaged for ever."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.test_data_directory import contents
from tests.unit.test_directory_copy import CLUSTER, VALUES, restore, values

import headrace
from headrace.model.errors import DataDirectoryDamaged, InvalidArgument
from headrace.server import import_directory, repair_data
from headrace.storage.disk import PrivateDisk
from headrace.storage.replicated.epochs import read_manifest
from headrace.storage.replicated.keys import ShardKeys
from headrace.storage.stores.directory import DirectoryStore
from headrace.testing.workbench import Workbench


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with messages."""
    with headrace.open(str(tmp_path / "plain")) as bus:
        for at in range(0, len(VALUES), 100):
            bus.publish_many("orders", VALUES[at : at + 100])
    return tmp_path / "plain"


def segment(data: Path) -> Path:
    (path,) = data.glob("topics/*/0/*.seg")
    return path


def imported(data: Path, damaged: bool = False) -> list[tuple[int, int]]:
    """Import a directory; returns the progress of verifying it."""
    told: list[tuple[int, int]] = []
    store = f"directory://{data.parent}/store"
    import_directory(
        str(data), store, CLUSTER, "", lambda *_: None, verifying=lambda *each: told.append(each), damaged=damaged
    )
    return told


def has_cluster(data: Path) -> bool:
    store = DirectoryStore(PrivateDisk(), f"{data.parent}/store")
    return read_manifest(store, ShardKeys(CLUSTER, 0)) is not None


def flip(data: Path) -> None:
    content = bytearray(segment(data).read_bytes())
    content[len(content.rstrip(b"\0")) // 2] ^= 0x40
    segment(data).write_bytes(content)


def flip_header(data: Path) -> None:
    content = bytearray(segment(data).read_bytes())
    content[9] ^= 0x40
    segment(data).write_bytes(content)


def remove(data: Path) -> None:
    segment(data).unlink()


def remove_partition(data: Path) -> None:
    shutil.rmtree(segment(data).parent)


def remove_record(data: Path) -> None:
    (segment(data).parent / "meta").unlink()


@pytest.mark.parametrize("damage", [flip, flip_header, remove, remove_partition, remove_record])
def test_a_damaged_directory_is_refused_until_it_is_repaired_or_taken_as_it_is(
    data: Path, damage: Callable[[Path], None]
) -> None:
    place = segment(data).parent
    damage(data)
    before = contents(data)
    with pytest.raises(DataDirectoryDamaged) as refused:
        imported(data)
    for text in (str(place), f"`headrace verify {data}`", f"`headrace repair {data}`", "`--damaged`"):
        assert text in str(refused.value)
    assert not has_cluster(data)
    assert contents(data).keys() - before.keys() <= {"lock"}
    copy = data.parent / "repaired"
    shutil.copytree(data, copy)
    assert imported(data, damaged=True) == []
    assert has_cluster(data)
    restore(f"directory://{data.parent}/store", data.parent / "copy")
    shutil.rmtree(data.parent / "store")
    repair_data(str(copy), lambda _: None)
    assert imported(copy)
    assert has_cluster(data)


def test_a_damaged_journal_is_refused_in_any_case(data: Path) -> None:
    (data / "format").unlink()
    for damaged in (False, True):
        with pytest.raises(DataDirectoryDamaged, match="`headrace repair "):
            imported(data, damaged)
    assert not has_cluster(data)


def test_torn_bytes_are_not_damage(data: Path) -> None:
    path = segment(data)
    content = path.read_bytes().rstrip(b"\0")
    path.write_bytes(content + content[4096 : 4096 + 500].replace(b"\0", b"\1"))
    told = imported(data)
    assert told[-1][0] > 0
    restore(f"directory://{data.parent}/store", data.parent / "copy")
    assert values(data.parent / "copy") == VALUES


def test_a_broker_that_was_killed_leaves_a_directory_that_can_be_imported(tmp_path: Path) -> None:
    data = tmp_path / "plain"
    bench = Workbench(str(data))
    bench.publish("orders", VALUES[:100])
    imported(data)  # the workbench is as good as killed
    restore(f"directory://{tmp_path}/store", tmp_path / "copy")
    assert values(tmp_path / "copy") == VALUES[:100]


def test_a_cluster_that_exists_is_told_before_anything_is_verified(data: Path) -> None:
    imported(data)
    flip(data)
    with pytest.raises(InvalidArgument, match="has a cluster trading already"):
        imported(data)
