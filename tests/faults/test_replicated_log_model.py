"""A log on a replicated disk, against a plain list: a machine is lost, another restores the objects and goes on."""

from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from tests.faults.test_log_model import LogOnAFaultyDisk
from tests.replica import DoubtfulStore, check_replica, replay, replicated, seal, tree

from headrace.storage.disk import OpenFile
from headrace.storage.replicated import writer
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.testing import MemoryDisk, PowerLoss, Unsynced

ROOT = "/data/shards/000"


class MortalDisk(MemoryDisk):
    """A disk in memory whose machine ends at some change."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)
        self.left = 10**9

    def _spend(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise PowerLoss

    def open(self, path: str, *, write: bool = False, create: bool = False) -> OpenFile:
        if create:
            self._spend()
        return super().open(path, write=write, create=create)

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        try:
            self._spend()
        except PowerLoss:
            super().write(file, position, bytes(data[: self._random.randint(0, len(data))]))
            raise
        super().write(file, position, data)

    def truncate(self, file: OpenFile, length: int) -> None:
        self._spend()
        super().truncate(file, length)

    def make_directory(self, path: str, *, sync: bool = True, private: bool = False) -> None:
        self._spend()
        super().make_directory(path, sync=sync, private=private)

    def rename(self, source: str, target: str, *, sync: bool = True) -> None:
        self._spend()
        super().rename(source, target, sync=sync)

    def remove(self, path: str, *, sync: bool = True) -> None:
        self._spend()
        super().remove(path, sync=sync)


class Machines:
    """One machine after the other owns the shard; each restores what the store has. The faults of a FaultyDisk."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.store = DoubtfulStore(seed, doubt=0.02)
        self.epoch = 0
        self.take_over()

    def take_over(self) -> None:
        """Seal the epoch, restore, and begin the next one."""
        if self.epoch:
            seal(self.store, self.epoch, self.epoch + 1)
        restored = tree(replay(self.store, self.epoch), "/copy")
        self.epoch += 1
        self.inner = MortalDisk(self._seed + self.epoch)
        self.inner.make_directory(ROOT)
        for path, content in sorted(restored.items()):
            if content is None:
                self.inner.make_directory(f"{ROOT}/{path}")
            else:
                MemoryDisk.write(self.inner, self.inner.open(f"{ROOT}/{path}", create=True), 0, content)
        self.disk: ReplicatedDisk = replicated(self.inner, ROOT, self.store, self.epoch)

    @property
    def crashed(self) -> bool:
        """Whether the machine is lost."""
        return self.inner.left <= 0

    def crash_after(self, operations: int) -> None:
        """Lose the machine at the n-th change from now on."""
        self.inner.left = operations

    def power_loss(self, unsynced: Unsynced) -> None:
        """Go on: in a new process on the same machine if all is kept, else on another machine."""
        if unsynced is Unsynced.KEPT:
            self.inner.left = 10**9
            return
        self.disk.writer.close()
        self.take_over()


class LogOnAReplicatedDisk(LogOnAFaultyDisk):
    """The same rules; a power loss is the loss of the machine, and what was synced is in the store."""

    def new_disk(self, seed: int) -> Any:
        return Machines(seed)

    def open(self) -> None:
        self.root_of_log()
        self.open_on(self.disk.disk)

    def root_of_log(self) -> None:
        """The log is below the replicated directory, not below the temporary one that this machine makes."""
        if not self.root.startswith(ROOT):
            self.directory, self.root = self.root, f"{ROOT}/topics"

    @rule(share=st.floats(0, 1))
    def truncate_before(self, share: float) -> None:
        super().truncate_before(share)
        self.disk.disk.writer.flush(60)  # removals are in order, and are in the store with the next sync

    @rule(share=st.floats(0, 1))
    def truncate_after(self, share: float) -> None:
        super().truncate_after(share)
        self.disk.disk.writer.flush(60)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            machines = self.disk
            machines.inner.left = 10**9
            check_replica(machines.disk, machines.inner, ROOT, machines.store, machines.epoch)
            machines.disk.writer.close()
            self.root = self.directory
        super().teardown()


_SETTINGS = settings(max_examples=60, stateful_step_count=30)
LogOnAReplicatedDisk.TestCase.settings = _SETTINGS
test_log_on_a_replicated_disk = LogOnAReplicatedDisk.TestCase


def test_a_log_whose_syncs_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a slow store, though this one is quick."""
    monkeypatch.setattr(writer, "_INLINE_S_MAX", -1.0)
    run_state_machine_as_test(LogOnAReplicatedDisk, settings=_SETTINGS)
