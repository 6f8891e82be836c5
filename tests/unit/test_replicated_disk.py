"""The replicated disk: what it records, refuses and passes on, and the frozen tree that checkpoints read."""

import threading
from pathlib import Path

import pytest
from tests.replica import DoubtfulStore, check_replica, committed, replay, replicated, seal, tree

from headrace.model.errors import Busy, DiskFailed, DiskFull, Fenced, InvalidArgument, LogNotFound, StoreUnavailable
from headrace.storage.disk import LocalDisk, OpenFile
from headrace.storage.replicated.applier import Applier
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.replicated.frozen import FrozenTree
from headrace.storage.replicated.operations import OpenExisting, Write, Zero
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import FaultyDisk, MemoryDisk

ROOT = "/data/shards/000"


@pytest.fixture
def inner() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def disk(inner: MemoryDisk, store: MemoryStore) -> ReplicatedDisk:
    return replicated(inner, ROOT, store)


def put(disk: ReplicatedDisk, name: str, data: bytes) -> OpenFile:
    file = disk.open(f"{ROOT}/{name}", create=True)
    disk.write(file, 0, data)
    return file


def frozen_content(tree: FrozenTree) -> dict[str, bytes | None]:
    """What a checkpoint of the tree holds, read in small pieces."""
    found: dict[str, bytes | None] = dict.fromkeys(tree.directories)
    for file in tree.files:
        parts = [tree.read(file, at, 3) for at in range(0, file.data_end, 3)]
        found[file.path] = b"".join(parts).ljust(file.length, b"\0")
    return found


# Recording.


def test_nothing_is_put_before_somebody_waits_and_then_everything_is(disk: ReplicatedDisk, store: MemoryStore) -> None:
    first = put(disk, "a", b"one")
    put(disk, "b", b"two")
    assert list(committed(store)) == []
    disk.sync(first)
    assert tree(replay(store), "/copy") == {"a": b"one", "b": b"two"}
    assert len(list(committed(store))) == 1
    disk.sync(first)
    disk.rename(f"{ROOT}/a", f"{ROOT}/c", sync=True)
    disk.remove(f"{ROOT}/b", sync=True)
    disk.sync_directory(ROOT)
    assert len(list(committed(store))) == 1
    disk.sync(first)
    assert tree(replay(store), "/copy") == {"c": b"one"}


def test_syncs_can_be_left_to_one_flush_in_the_end(disk: ReplicatedDisk) -> None:
    disk.defer_syncs()
    file = put(disk, "a", b"1")
    before = disk.writer.committed
    for at in range(50):
        disk.write(file, 1 + at, b"x")
        disk.sync(file)
    assert disk.writer.committed == before, "nobody has waited"
    disk.writer.flush()
    assert disk.writer.committed.objects == before.objects + 1
    disk.writer.abandon(Fenced("it is over"))
    with pytest.raises(Fenced):
        disk.sync(file)


def test_much_is_put_without_a_sync(disk: ReplicatedDisk, store: MemoryStore) -> None:
    put(disk, "a", bytes(300_000))
    disk.writer.wait(2, 30)
    assert len(list(committed(store))) == 1


def test_the_caller_may_use_its_buffer_again(disk: ReplicatedDisk, store: MemoryStore) -> None:
    data = bytearray(b"right")
    file = disk.open(f"{ROOT}/a", create=True)
    disk.write(file, 0, data)
    data[:] = b"wrong"
    disk.write(file, 5, memoryview(data)[:2])
    data[:] = b"again"
    disk.sync(file)
    assert tree(replay(store), "/copy") == {"a": b"rightwr"}


def test_a_large_write_is_several_objects_that_meet_at_aligned_positions(
    disk: ReplicatedDisk, inner: MemoryDisk, store: MemoryStore
) -> None:
    file = disk.open(f"{ROOT}/a", create=True)
    data = bytes(range(256)) * (40 << 12)
    disk.write(file, 100, data)
    disk.sync(file)
    objects = list(committed(store))
    writes = [operation for operations in objects for operation in operations if isinstance(operation, Write)]
    assert len(objects) >= 3
    assert all(write.position % 4096 == 0 for write in writes[1:])
    assert max(len(stored.data) for stored in store._objects.values()) <= 16 << 20
    check_replica(disk, inner, ROOT, store)


def test_zeros_are_not_stored_as_bytes(disk: ReplicatedDisk, store: MemoryStore) -> None:
    file = disk.open(f"{ROOT}/a", create=True)
    disk.zero(file, 10, 5 << 20)
    disk.sync(file)
    assert [operations[1:] for operations in committed(store)] == [[Zero(1, 10, 5 << 20)]]
    assert len(tree(replay(store), "/copy")["a"] or b"") == 10 + (5 << 20)


def test_files_of_an_earlier_epoch_get_an_id_when_they_are_changed(inner: MemoryDisk, store: MemoryStore) -> None:
    disk = replicated(inner, ROOT, store)
    disk.make_directory(f"{ROOT}/d")
    disk.sync(put(disk, "d/a", b"old content"))
    later = replicated(inner, ROOT, store, epoch=2)
    file = later.open(f"{ROOT}/d/a", write=True)
    later.sync(file)
    later.rename(f"{ROOT}/d", f"{ROOT}/e")
    later.write(file, 0, b"new")
    later.sync(file)
    (operations,) = committed(store, 2)
    assert operations[1:] == [OpenExisting(1, "e/a"), Write(1, 0, b"new")]
    check_replica(later, inner, ROOT, store, epochs=2)
    assert disk.boot_id() != later.boot_id()
    assert later.boot_id() == replicated(inner, ROOT, store, epoch=2).boot_id()
    assert later.kept_order_since(disk.boot_id())
    assert not later.kept_order_since(bytes(16))
    assert not later.kept_order_since(b"")


def test_what_is_written_to_a_file_that_is_gone_is_in_no_replica(
    disk: ReplicatedDisk, inner: MemoryDisk, store: MemoryStore
) -> None:
    gone, replaced, new = put(disk, "a", b"1"), put(disk, "b", b"2"), put(disk, "c", b"3")
    disk.remove(f"{ROOT}/a")
    disk.rename(f"{ROOT}/c", f"{ROOT}/b")
    for file in (gone, replaced, new):
        disk.write(file, 1, b"x")
        disk.zero(file, 2, 2)
        disk.truncate(file, 3)
    assert disk.read(replaced, 0, 9) == b"2x\0"
    check_replica(disk, inner, ROOT, store)
    assert tree(replay(store), "/copy") == {"b": b"3x\0"}


def test_other_directories_are_passed_on(disk: ReplicatedDisk, store: MemoryStore) -> None:
    disk.make_directory("/data/own")
    file = disk.open("/data/own/node.json", create=True)
    disk.write(file, 0, b"{}")
    disk.sync(file)
    disk.sync_directory("/data/own")
    disk.rename("/data/own/node.json", "/data/own/b")
    assert disk.names("/data/own") == ["b"]
    disk.remove("/data/own/b")
    disk.remove_directory("/data/own")
    with pytest.raises(LogNotFound):
        disk.sync_directory("/data/own")
    assert list(committed(store)) == []
    assert disk.writer.recorded == 0


def test_the_root_stays_where_it_is(disk: ReplicatedDisk) -> None:
    put(disk, "a", b"x")
    for path in (ROOT, "/data/shards", "/data"):
        with pytest.raises(InvalidArgument, match="must stay"):
            disk.remove_directory(path)
        with pytest.raises(InvalidArgument, match="must stay"):
            disk.rename(path, "/elsewhere")
    with pytest.raises(InvalidArgument, match="only one of them"):
        disk.rename(f"{ROOT}/a", "/data/a")
    with pytest.raises(InvalidArgument, match="without empty parts"):
        disk.open(f"{ROOT}/b/../a")
    assert disk.read(disk.open(f"{ROOT}/a"), 0, 9) == b"x"


def test_a_write_that_fails_in_the_middle_is_recorded_as_far_as_it_went(tmp_path: Path, store: MemoryStore) -> None:
    inner = FaultyDisk(1, capacity_bytes=10)
    disk = replicated(inner, str(tmp_path / "r"), store)
    file = disk.open(f"{tmp_path}/r/a", create=True)
    disk.write(file, 0, b"12345")
    with pytest.raises(DiskFull):
        disk.write(file, 3, b"abcdefghijkl")
    with pytest.raises(DiskFull):
        disk.zero(file, 9, 5)
    assert inner.size(file) > 5
    check_replica(disk, inner, str(tmp_path / "r"), store)


def test_an_append_that_fails_in_the_middle_leaves_nothing(tmp_path: Path, store: MemoryStore) -> None:
    inner = FaultyDisk(1, capacity_bytes=10)
    disk = replicated(inner, str(tmp_path / "r"), store)
    file = disk.open(f"{tmp_path}/r/a", create=True)
    disk.write(file, 0, b"12345")
    with pytest.raises(DiskFull):
        disk.write(file, 5, b"abcdefghijkl")
    assert inner.read(file, 0, 100) == b"12345"
    disk.write(file, 5, b"6")
    check_replica(disk, inner, str(tmp_path / "r"), store)
    assert sum(len(operations) for operations in committed(store)) == 3  # one makes the file


def test_a_local_disk_that_fails_altogether_ends_the_epoch(tmp_path: Path, store: MemoryStore) -> None:
    inner = FaultyDisk(1)
    disk = replicated(inner, str(tmp_path / "r"), store)
    file = disk.open(f"{tmp_path}/r/a", create=True)
    disk.write(file, 0, b"abcdef")
    inner.fail_writes()
    inner.fail_reads()
    with pytest.raises(DiskFull):
        disk.write(file, 0, b"12345")
    with pytest.raises(DiskFailed, match="cannot be trusted"):
        disk.sync(file)


def test_the_node_is_told_of_a_local_disk_that_is_full_or_fails(tmp_path: Path, store: MemoryStore) -> None:
    inner, root, told = FaultyDisk(1), str(tmp_path / "shard"), list[BaseException]()
    inner.make_directory(root)
    disk = replicated(inner, root, store)
    disk.on_failure = told.append
    file = disk.open(f"{root}/a", create=True)
    disk.write(file, 0, b"one")
    inner.fail_writes()
    with pytest.raises(DiskFull):
        disk.write(file, 3, b"two")
    inner.fail_reads()
    with pytest.raises(DiskFailed):
        disk.read(file, 0, 3)
    assert [type(error) for error in told] == [DiskFull, DiskFailed]
    with pytest.raises(LogNotFound):
        disk.open(f"{root}/b", write=True)
    assert len(told) == 2


def test_busy_while_the_store_is_far_behind(inner: MemoryDisk) -> None:
    store = DoubtfulStore(1, doubt=1.0)
    disk = replicated(inner, ROOT, store, backlog_bytes_max=1000)
    disk.make_directory(f"{ROOT}/topics")
    topic, journal = put(disk, "topics/a", b""), put(disk, "journal", b"")
    disk.write(topic, 0, bytes(1000))
    before = tree(inner, ROOT)
    with pytest.raises(Busy, match="wait for the shared store"):
        disk.write(topic, 1000, b"more")
    assert tree(inner, ROOT) == before
    disk.write(journal, 0, b"what the broker must record")
    store._doubt = 0.0
    disk.sync(journal)
    disk.write(topic, 1000, b"more")
    check_replica(disk, inner, ROOT, store)


# Fenced and abandoned.


def test_after_a_seal_nothing_is_changed_or_acknowledged(
    disk: ReplicatedDisk, inner: MemoryDisk, store: MemoryStore
) -> None:
    file = put(disk, "a", b"acknowledged")
    disk.make_directory(f"{ROOT}/d")
    disk.sync(file)
    assert seal(store) == 1
    disk.write(file, 0, b"not acknowledged")
    with pytest.raises(Fenced, match="seal of epoch 2"):
        disk.sync(file)
    here = tree(inner, ROOT)
    changes = [
        lambda: disk.write(file, 0, b"x"),
        lambda: disk.zero(file, 0, 1),
        lambda: disk.truncate(file, 0),
        lambda: disk.open(f"{ROOT}/b", create=True),
        lambda: disk.rename(f"{ROOT}/a", f"{ROOT}/b"),
        lambda: disk.remove(f"{ROOT}/a"),
        lambda: disk.make_directory(f"{ROOT}/e"),
        lambda: disk.remove_directory(f"{ROOT}/d"),
        lambda: disk.sync(file),
        lambda: disk.freeze(),
    ]
    for change in changes:
        with pytest.raises(Fenced):
            change()
    assert tree(inner, ROOT) == here
    assert disk.read(file, 0, 16) == b"not acknowledged"
    assert tree(replay(store), "/copy") == {"a": b"acknowledged", "d": None}


def test_who_waits_when_the_node_gives_up_is_told(inner: MemoryDisk) -> None:
    store = DoubtfulStore(1, doubt=1.0)
    disk = replicated(inner, ROOT, store)
    file = put(disk, "a", b"x")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            disk.sync(file)
        except StoreUnavailable as error:
            errors.append(error)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    disk.writer.abandon()
    for thread in waiting:
        thread.join(30)
    assert len(errors) == 3
    with pytest.raises(StoreUnavailable):
        disk.write(file, 0, b"y")


# The frozen tree.


def test_a_frozen_tree_is_exactly_what_the_objects_before_its_position_make(
    disk: ReplicatedDisk, inner: MemoryDisk, store: MemoryStore
) -> None:
    disk.make_directory(f"{ROOT}/d/empty")
    grows, overwritten, removed = put(disk, "grows", b"12345"), put(disk, "over", b"abcde"), put(disk, "d/gone", b"xyz")
    replaced, cut, zeroed = put(disk, "replaced", b"old one"), put(disk, "cut", b"123456789"), put(disk, "z", b"data")
    put(disk, "new", b"new one")
    disk.truncate(zeroed, 50)
    disk.zero(zeroed, 4, 100)
    before = tree(inner, ROOT)
    frozen = disk.freeze()
    disk.write(grows, 5, b"more")
    disk.write(overwritten, 1, b"ZZ")
    disk.write(overwritten, 0, b"Y")
    disk.remove_directory(f"{ROOT}/d")
    disk.rename(f"{ROOT}/new", f"{ROOT}/replaced")
    disk.write(removed, 0, b"?")
    disk.write(replaced, 0, b"?")
    disk.truncate(cut, 2)
    disk.zero(zeroed, 0, 1)
    put(disk, "late", b"not in it")
    disk.rename(f"{ROOT}/grows", f"{ROOT}/renamed")
    assert frozen_content(frozen) == before
    disk.writer.wait(frozen.sequence)
    assert frozen.position == disk.writer.committed
    objects = list(committed(store))
    assert len(objects) == frozen.position.objects
    assert tree(replay(store), "/copy") == before
    assert inner.names(f"{ROOT}-trash") != []
    disk.thaw()
    disk.thaw()
    assert inner.names(f"{ROOT}-trash") == []
    with pytest.raises(DiskFailed, match="not frozen any more"):
        frozen.read(frozen.files[0], 0, 1)
    check_replica(disk, inner, ROOT, store)


def test_the_replay_goes_on_from_a_checkpoint_with_its_ids(
    disk: ReplicatedDisk, inner: MemoryDisk, store: MemoryStore
) -> None:
    file = put(disk, "a", b"12345")
    disk.make_directory(f"{ROOT}/d")
    frozen = disk.freeze()
    copy = MemoryDisk()
    copy.make_directory("/copy/d")
    copy.write(copy.open("/copy/a", create=True), 0, frozen_content(frozen)["a"] or b"")
    disk.thaw()
    disk.write(file, 5, b"67")
    disk.rename(f"{ROOT}/a", f"{ROOT}/d/b")
    disk.write(file, 7, b"89")
    disk.sync(file)
    applier = Applier(copy, "/copy", frozen.bindings)
    for operations in list(committed(store))[frozen.position.objects :]:
        applier.apply(operations)
    assert tree(copy, "/copy") == tree(inner, ROOT) == {"d": None, "d/b": b"123456789"}


def test_files_that_nobody_opened_are_in_a_frozen_tree_without_the_zeros_at_their_end(
    inner: MemoryDisk, store: MemoryStore
) -> None:
    inner.make_directory(f"{ROOT}/d")
    file = inner.open(f"{ROOT}/d/a", create=True)
    inner.write(file, 0, b"data")
    inner.truncate(file, 3 << 20)
    inner.write(inner.open(f"{ROOT}/empty", create=True), 0, bytes(10_000))
    disk = replicated(inner, ROOT, store)
    frozen = disk.freeze()
    assert sorted((file.path, file.length, file.data_end) for file in frozen.files) == [
        ("d/a", 3 << 20, 4),
        ("empty", 10_000, 0),
    ]
    disk.write(disk.open(f"{ROOT}/d/a", write=True), 4, b" and more")
    assert frozen_content(frozen)["d/a"] == b"data".ljust(3 << 20, b"\0")
    assert inner.names(f"{ROOT}-trash") == []


def test_a_file_that_cannot_be_preserved_ends_the_checkpoint_not_the_broker(tmp_path: Path, store: MemoryStore) -> None:
    inner = FaultyDisk(1, capacity_bytes=12)
    root = str(tmp_path / "r")
    disk = replicated(inner, root, store)
    file = disk.open(f"{root}/a", create=True)
    disk.write(file, 0, b"0123456789")
    frozen = disk.freeze()
    assert frozen.read(frozen.files[0], 0, 100) == b"0123456789"
    disk.write(file, 0, b"overwritten"[:10])
    with pytest.raises(DiskFailed, match="could not be preserved"):
        frozen.read(frozen.files[0], 0, 100)
    disk.thaw()
    check_replica(disk, inner, root, store)


def test_a_rename_that_fails_leaves_the_file_that_it_would_have_replaced(
    disk: ReplicatedDisk, inner: MemoryDisk, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(disk, "a", b"new")
    put(disk, "b", b"old")
    frozen = disk.freeze()
    renamed = inner.rename

    def fail(source: str, target: str, *, sync: bool = True) -> None:
        if source.endswith("/a"):
            raise DiskFailed("the disk fails now")
        renamed(source, target, sync=sync)

    with monkeypatch.context() as patch:
        patch.setattr(inner, "rename", fail)
        with pytest.raises(DiskFailed):
            disk.rename(f"{ROOT}/a", f"{ROOT}/b")
    assert tree(inner, ROOT) == {"a": b"new", "b": b"old"} == frozen_content(frozen)
    disk.rename(f"{ROOT}/a", f"{ROOT}/b")
    assert frozen_content(frozen) == {"a": b"new", "b": b"old"}
    check_replica(disk, inner, ROOT, store)


def test_a_file_is_never_away_while_it_is_replaced(tmp_path: Path, store: MemoryStore) -> None:
    root = str(tmp_path / "r")
    disk = replicated(LocalDisk(), root, store)
    disk.write(disk.open(f"{root}/a", create=True), 0, b"0")
    missing: list[object] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                disk.open(f"{root}/a")
            except LogNotFound as error:
                missing.append(error)
            if not disk.exists(f"{root}/a") or "a" not in disk.names(root):
                missing.append("a")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for number in range(100):
            disk.freeze()
            disk.write(disk.open(f"{root}/b", create=True), 0, b"%d" % number)
            disk.rename(f"{root}/b", f"{root}/a")
            disk.thaw()
    finally:
        done.set()
        looking.join()
    assert missing == []


def test_the_trash_of_an_interrupted_checkpoint_is_removed(inner: MemoryDisk, store: MemoryStore) -> None:
    disk = replicated(inner, ROOT, store)
    put(disk, "a", b"one")
    disk.freeze()
    disk.remove(f"{ROOT}/a")
    assert len(inner.names(f"{ROOT}-trash")) == 1
    again = replicated(inner, ROOT, store, epoch=2)
    for name in "bc":
        again.write(again.open(f"{ROOT}/{name}", create=True), 0, name.encode())
    frozen = again.freeze()
    for name in "bc":
        again.remove(f"{ROOT}/{name}")
    assert frozen_content(frozen) == {"b": b"b", "c": b"c"}
    again.thaw()
    assert inner.names(f"{ROOT}-trash") == []
