"""Every disk keeps the same promises: one suite over the local disk, a faulty one without faults, memory, a replica."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.replica import check_replica, replicated

from headrace.model.errors import DiskFailed, LogNotFound, UnsupportedOperation
from headrace.storage.disk import Disk, LocalDisk, PrivateDisk, open_or_make
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import FaultyDisk, MemoryDisk

DISKS: list[Callable[[], Disk]] = [LocalDisk, PrivateDisk, FaultyDisk, MemoryDisk]
REPLICATED = {f"replicated {kind.__name__}": kind for kind in (LocalDisk, MemoryDisk)}


@pytest.fixture(params=[*DISKS, *REPLICATED])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param not in REPLICATED:
        yield request.param()
        return
    store, inner = MemoryStore(), REPLICATED[request.param]()
    disk = replicated(inner, str(tmp_path), store)
    yield disk
    check_replica(disk, inner, str(tmp_path), store)
    disk.writer.close()


@pytest.fixture
def root(disk: Disk, tmp_path: Path) -> str:
    disk.make_directory(f"{tmp_path}/root")
    return f"{tmp_path}/root"


def put(disk: Disk, path: str, data: bytes = b"") -> None:
    disk.write(disk.open(path, create=True), 0, data)


def content(disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    return disk.read(file, 0, disk.size(file))


def test_bytes_come_back_from_where_they_were_written(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    disk.write(file, 3, b"hello")
    disk.write(file, 100_000, memoryview(b"far"))
    assert disk.size(file) == 100_003
    assert disk.read(file, 0, 10) == bytes(3) + b"hello" + bytes(2)
    assert disk.read(file, 99_999, 100) == b"\0far"
    assert disk.read(file, 200_000, 10) == b""
    disk.zero(file, 4, 3)
    assert disk.read(file, 3, 5) == b"h\0\0\0o"
    disk.sync(file)
    assert content(disk, f"{root}/a")[-3:] == b"far"


def test_a_file_that_was_cut_has_zeros_when_it_is_made_longer(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    disk.write(file, 0, b"abcdef")
    disk.truncate(file, 2)
    disk.truncate(file, 10_000)
    assert disk.size(file) == 10_000
    assert disk.read(file, 0, 6) == b"ab" + bytes(4)


def test_a_mapping_shows_what_is_written_later(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    disk.truncate(file, 5000)
    before = disk.map(file, 5000)
    assert before.readonly
    for at in range(0, 5000, 1000):
        disk.write(file, at, b"x")
        disk.truncate(file, (at + 1) * 100 + 5000)  # the file outgrows the mapping
        disk.write(file, at + 1, b"y")
    assert bytes(before[::1000]) == b"xxxxx"
    assert bytes(before[1::1000]) == b"yyyyy"
    assert len(before) == 5000
    with pytest.raises(ValueError, match=r"."):
        disk.map(file, 10_000_000)


def test_a_mapping_for_writing_changes_the_file(disk: Disk, root: str) -> None:
    put(disk, f"{root}/a", bytes(4096))
    if disk.is_replicated:  # such changes could not be recorded
        with pytest.raises(UnsupportedOperation, match="on a replicated disk"):
            disk.map(disk.open(f"{root}/a", write=True), 4096, write=True)
        return
    page = disk.map(disk.open(f"{root}/a", write=True), 4096, write=True)
    seen = disk.map(disk.open(f"{root}/a"), 4096)
    page[10:13] = b"new"
    assert bytes(seen[10:13]) == b"new"
    assert content(disk, f"{root}/a")[10:13] == b"new"


def test_a_mapping_outlives_its_file(disk: Disk, root: str) -> None:
    put(disk, f"{root}/a", b"old")
    view = disk.map(disk.open(f"{root}/a"), 3)
    put(disk, f"{root}/b", b"new")
    disk.rename(f"{root}/b", f"{root}/a")
    assert (bytes(view), content(disk, f"{root}/a")) == (b"old", b"new")
    disk.remove(f"{root}/a")
    assert bytes(view) == b"old"


def test_names(disk: Disk, root: str) -> None:
    disk.make_directory(f"{root}/x/y/z", private=True)
    disk.make_directory(f"{root}/x/y")
    for name in ("b", "a"):
        put(disk, f"{root}/x/{name}", name.encode())
    disk.sync_directory(f"{root}/x")
    assert disk.names(f"{root}/x") == ["a", "b", "y"]
    assert disk.names(f"{root}/none") == []
    assert [disk.is_directory(f"{root}/x/{name}") for name in ("a", "y", "none")] == [False, True, False]
    assert [disk.exists(f"{root}/x/{name}") for name in ("a", "y", "none")] == [True, True, False]
    disk.rename(f"{root}/x/a", f"{root}/x/b")
    assert (disk.names(f"{root}/x"), content(disk, f"{root}/x/b")) == (["b", "y"], b"a")
    disk.rename(f"{root}/x", f"{root}/moved")
    assert disk.names(f"{root}/moved/y") == ["z"]
    assert not disk.exists(f"{root}/x")
    disk.remove(f"{root}/moved/b")
    disk.remove(f"{root}/moved/b")
    disk.remove_directory(f"{root}/moved")
    assert disk.names(root) == []


def test_what_is_not_there_and_what_is_in_the_way(disk: Disk, root: str) -> None:
    put(disk, f"{root}/file", b"x")
    for bad in (f"{root}/none", f"{root}/none/file"):
        with pytest.raises(LogNotFound):
            disk.open(bad)
    with pytest.raises(LogNotFound):
        disk.rename(f"{root}/none", f"{root}/other")
    with pytest.raises(LogNotFound):
        disk.sync_directory(f"{root}/none")
    with pytest.raises(FileExistsError):
        disk.open(f"{root}/file", create=True)
    with pytest.raises(DiskFailed):
        disk.make_directory(f"{root}/file/inside")
    with pytest.raises(DiskFailed):
        disk.write(disk.open(f"{root}/file"), 0, b"y")
    with pytest.raises(DiskFailed):
        disk.remove(root)
    disk.make_directory(f"{root}/directory/inside")
    with pytest.raises(DiskFailed):
        disk.rename(f"{root}/directory", f"{root}/directory/inside/itself")
    with pytest.raises(DiskFailed):
        disk.rename(f"{root}/directory", f"{root}/file")
    assert disk.read(open_or_make(disk, f"{root}/file"), 0, 1) == b"x"
    assert disk.size(open_or_make(disk, f"{root}/new")) == 0


def test_one_holder_at_a_time_has_the_lock_or_many_share_it(disk: Disk, root: str) -> None:
    put(disk, f"{root}/a")
    one, two, three = (disk.open(f"{root}/a", write=True) for _ in range(3))
    assert disk.lock(one)
    assert disk.lock(one)
    assert not disk.lock(two)
    assert not disk.lock(two, shared=True)
    disk.unlock(one)
    assert disk.lock(two, shared=True)
    assert disk.lock(three, shared=True)
    assert not disk.lock(one)
    del two
    disk.unlock(three)
    assert disk.lock(one)


def test_waiting_for_the_lock(disk: Disk, root: str) -> None:
    put(disk, f"{root}/a")
    one, two = (disk.open(f"{root}/a", write=True) for _ in range(2))
    assert disk.lock(one)
    got = threading.Event()
    waiting = threading.Thread(target=lambda: disk.lock(two, wait=True) and got.set())
    waiting.start()
    assert not disk.lock(two)
    disk.unlock(one)
    waiting.join(30)
    assert got.is_set()


def test_a_disk_tells_of_itself(disk: Disk) -> None:
    assert len(disk.boot_id()) in (0, 16)
    assert disk.boot_id() == disk.boot_id()
    assert disk.descriptors_max() > 0
    assert not disk.close_some()


def test_an_open_directory_has_its_files_below_it(disk: Disk, root: str) -> None:
    with pytest.raises(LogNotFound):
        disk.open_directory(f"{root}/none")
    opened = disk.open_directory(root)
    assert opened.is_current()
    inner = opened.disk
    inner.make_directory(opened.within("a/b/c"))
    put(inner, opened.within("a/b/one"), b"1")
    assert content(disk, f"{root}/a/b/one") == b"1"
    inner.rename(opened.within("a/b/one"), opened.within("two"))
    put(disk, f"{root}/three", b"3")
    assert inner.names(opened.within("")) == disk.names(root) == ["a", "three", "two"]
    assert inner.names(opened.within("a")) == ["b"]
    assert inner.names(opened.within("none")) == []
    assert [inner.exists(opened.within(name)) for name in ("a", "two", "none")] == [True, True, False]
    assert [inner.is_directory(opened.within(name)) for name in ("a", "two", "none")] == [True, False, False]
    assert content(inner, opened.within("three")) == b"3"
    with pytest.raises(FileExistsError):
        inner.open(opened.within("two"), create=True)
    with pytest.raises(LogNotFound):
        inner.open(opened.within("none"))
    inner.remove(opened.within("two"))
    inner.remove(opened.within("none"))
    inner.remove_directory(opened.within("a"))
    inner.sync_directory(opened.within(""))
    assert disk.names(root) == ["three"]
    file = inner.open(opened.within("three"))
    assert inner.is_current(file)
    inner.remove(opened.within("three"))
    assert not inner.is_current(file)


@pytest.mark.parametrize("local", [LocalDisk, PrivateDisk])
def test_an_open_directory_is_used_wherever_it_is_moved(local: Callable[[], LocalDisk], tmp_path: Path) -> None:
    disk, root, away = local(), tmp_path / "root", tmp_path / "away"
    disk.make_directory(str(root))
    opened = disk.open_directory(str(root))
    root.rename(away)
    assert not opened.is_current()
    root.mkdir()
    assert not opened.is_current()
    opened.disk.make_directory(opened.within("a"))
    put(opened.disk, opened.within("a/one"), b"1")
    opened.disk.rename(opened.within("a/one"), opened.within("two"))
    opened.disk.sync_directory(opened.within("a"))
    assert sorted(path.name for path in away.iterdir()) == ["a", "two"]
    assert (away / "two").stat().st_mode & 0o777 == local().file_mode
    assert not list(root.iterdir())
    root.rmdir()
    away.rename(root)
    assert opened.is_current()
    with pytest.raises(DiskFailed, match=f"{root}/two is a file"):
        opened.disk.make_directory(opened.within("two/a"))
