"""Random changes to a replicated disk: at every moment, what the store has is what the files had after some change."""

import threading
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replica import DoubtfulStore, check_replica, committed, replay, replicated, seal, tree

from headrace.model.errors import Fenced, HeadraceError
from headrace.storage.disk import OpenFile
from headrace.storage.replicated.applier import Applier
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import MemoryDisk

ROOT = "/data/shards/000"
PLACES = ["", "d/", "d/e/", "f/"]


class Changes:
    """Changes to files below a directory, by a seed; several of them may run on threads of their own."""

    def __init__(self, disk: ReplicatedDisk, seed: int, below: str = "") -> None:
        self._disk = disk
        self._random = Random(seed)
        self._root = f"{ROOT}/{below}".rstrip("/")
        self._files: list[OpenFile] = []
        disk.make_directory(self._root)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.change()

    def change(self) -> None:
        """One change; those that the disk refuses, such as the rename of a file that is not there, count too."""
        random = self._random
        kinds = [self.create, self.write, self.write, self.write, self.append, self.append, self.zero, self.truncate]
        kinds += [self.open, self.rename, self.remove, self.make_directory, self.move_directory, self.sync]
        try:
            random.choice(kinds if random.random() < 0.97 else [self.remove_directory])()
        except FileExistsError:
            pass
        except HeadraceError as error:
            if error.code in ("fenced", "closed", "store_unavailable"):
                raise

    def path(self) -> str:
        return f"{self._root}/{self._random.choice(PLACES)}{self._random.choice('abcdef')}"

    def file(self) -> OpenFile:
        if not self._files:
            self.create()
        return self._random.choice(self._files)

    def create(self) -> None:
        self._keep(self._disk.open(self.path(), create=True))

    def open(self) -> None:
        self._keep(self._disk.open(self.path(), write=True))

    def _keep(self, file: OpenFile) -> None:
        self._files = [*self._files, file][-8:]

    def write(self) -> None:
        data = bytearray(self._random.randbytes(self._random.choice([1, 10, 600])))
        self._disk.write(self.file(), self._random.randrange(700), data)
        data[:] = bytes(len(data))

    def append(self) -> None:
        file = self.file()
        self._disk.write(file, self._disk.size(file), self._random.randbytes(self._random.randrange(100)))

    def zero(self) -> None:
        self._disk.zero(self.file(), self._random.randrange(700), self._random.randrange(300))

    def truncate(self) -> None:
        self._disk.truncate(self.file(), self._random.randrange(1000))

    def rename(self) -> None:
        self._disk.rename(self.path(), self.path())

    def remove(self) -> None:
        self._disk.remove(self.path())

    def make_directory(self) -> None:
        self._disk.make_directory(f"{self._root}/{self._random.choice(PLACES[1:])}".rstrip("/"))

    def move_directory(self) -> None:
        self._disk.rename(f"{self._root}/d", f"{self._root}/f")

    def remove_directory(self) -> None:
        self._disk.remove_directory(f"{self._root}/{self._random.choice(PLACES[1:])}".rstrip("/"))

    def sync(self) -> None:
        self._disk.sync(self.file())


def states_of(store: MemoryStore) -> list[dict[str, bytes | None]]:
    """What a replica has after each operation that the store has."""
    disk = MemoryDisk()
    applier = Applier(disk, "/copy")
    states = [tree(disk, "/copy")]
    for operations in committed(store):
        for operation in operations:
            applier.apply([operation])
            states.append(tree(disk, "/copy"))
    return states


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120))
def test_a_replica_has_the_same_files_after_any_changes(seed: int, steps: int) -> None:
    inner, store = MemoryDisk(), MemoryStore()
    disk = replicated(inner, ROOT, store)
    Changes(disk, seed).run(steps)
    check_replica(disk, inner, ROOT, store)
    disk.writer.close()


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
@settings(max_examples=50)
def test_a_crash_at_any_moment_leaves_what_the_files_had_at_the_committed_sequence(seed: int, steps: int) -> None:
    inner, store = MemoryDisk(), MemoryStore()
    disk = replicated(inner, ROOT, store)
    changes = Changes(disk, seed)
    had = {disk.writer.recorded: tree(inner, ROOT)}
    synced = 0
    for _ in range(steps):
        changes.change()
        had[disk.writer.recorded] = tree(inner, ROOT)
        if disk.writer.backlog_bytes == 0:
            synced = disk.writer.recorded
    disk.writer.close()  # a crash: what was not committed by now never is
    survived = sum(len(operations) for operations in committed(store))
    assert survived >= synced
    states = states_of(store)
    assert len(states) == survived + 1
    for sequence, files in had.items():
        if sequence <= survived:
            assert states[sequence] == files


@given(seed=st.integers(0, 2**32), doubt=st.sampled_from([0.0, 0.2]))
@settings(max_examples=15)
def test_several_threads_and_a_store_that_leaves_doubts(seed: int, doubt: float) -> None:
    inner, store = MemoryDisk(), DoubtfulStore(seed, doubt=doubt, delay_s=0.0005)
    disk = replicated(inner, ROOT, store)
    workers = [Changes(disk, seed + number, below=str(number)) for number in range(3)]
    failed: list[BaseException] = []

    def run(changes: Changes) -> None:
        try:
            changes.run(40)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(each,)) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    check_replica(disk, inner, ROOT, store)
    disk.writer.close()


@given(seed=st.integers(0, 2**32), before=st.integers(0, 40))
@settings(max_examples=50)
def test_once_another_has_sealed_nothing_more_is_acknowledged(seed: int, before: int) -> None:
    inner, store = MemoryDisk(), DoubtfulStore(seed, doubt=0.1)
    store._delay_s = 0.0
    disk = replicated(inner, ROOT, store)
    changes = Changes(disk, seed)
    changes.run(before)
    disk.writer.flush(60)
    position = seal(store)
    kept = tree(replay(store), "/copy")
    file = disk.open(f"{ROOT}/{seed}", create=True)
    with pytest.raises(Fenced):
        disk.sync(file)
    with pytest.raises(Fenced):
        changes.run(1000)
    assert disk.writer.committed.objects == position
    assert tree(replay(store), "/copy") == kept


@given(seed=st.integers(0, 2**32), before=st.integers(0, 60), meanwhile=st.integers(0, 60), after=st.integers(0, 60))
def test_a_frozen_tree_and_the_objects_behind_it_make_the_present_one(
    seed: int, before: int, meanwhile: int, after: int
) -> None:
    inner, store = MemoryDisk(), MemoryStore()
    disk = replicated(inner, ROOT, store)
    changes = Changes(disk, seed)
    changes.run(before)
    then = tree(inner, ROOT)
    frozen = disk.freeze()
    checkpoint: dict[str, bytes | None] = dict.fromkeys(frozen.directories)
    random = Random(seed)
    for file in random.sample(frozen.files, len(frozen.files)):
        changes.run(random.randint(0, meanwhile))
        content = b"".join(frozen.read(file, at, 300) for at in range(0, file.data_end, 300))
        checkpoint[file.path] = content.ljust(file.length, b"\0")
    bindings = frozen.bindings
    disk.thaw()
    assert checkpoint == then
    changes.run(after)
    disk.writer.flush(30)
    copy = restored(checkpoint)
    applier = Applier(copy, "/copy", bindings)
    for operations in list(committed(store))[frozen.position.objects :]:
        applier.apply(operations)
    assert tree(copy, "/copy") == tree(inner, ROOT)
    assert inner.names(f"{ROOT}-trash") == []


def restored(files: dict[str, bytes | None]) -> MemoryDisk:
    """A disk with these files and directories below /copy."""
    disk: Any = MemoryDisk()
    disk.make_directory("/copy")
    for path, content in sorted(files.items()):
        if content is None:
            disk.make_directory(f"/copy/{path}")
        else:
            disk.write(disk.open(f"/copy/{path}", create=True), 0, content)
    return disk
