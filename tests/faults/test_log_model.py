"""A log on a disk that fails, against a plain list: nothing acknowledged is ever lost or changed."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.model.batch import Batch, Columns, encode
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import Fenced, LogFailed
from headrace.storage.disk import Disk
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, InlineWorker, PowerLoss, Unsynced

SETTINGS = LogSettings(segment_bytes=4096, checkpoint_bytes=1500, ahead_bytes_max=2048)
MEMORY = Path("/dev/shm")
POWER_OFF = (PowerLoss, LogFailed, Fenced)


def kept_by_rule(offset: int) -> bool:
    """The rule that compaction uses here."""
    return offset % 3 != 0


def keep(batch: Batch) -> list[int]:
    """The same, as storage wants it."""
    return [index for index, message in enumerate(batch.messages()) if kept_by_rule(message.offset)]


class LogOnAFaultyDisk(RuleBasedStateMachine):
    """Each rule does the same to the log and to the model; a crash may come at any operation of the disk."""

    @initialize(seed=st.integers(0, 2**32), codec=st.sampled_from(Codec))
    def begin(self, seed: int, codec: Codec) -> None:
        self.root = tempfile.mkdtemp(dir=MEMORY if MEMORY.exists() else None)
        self.disk = self.new_disk(seed)
        self.codec = codec
        self.now = 1_000
        self.values: dict[int, bytes] = {}
        self.times: dict[int, int] = {}
        self.gone: set[int] = set()  # what compaction may have removed
        self.first = self.next = self.written = self.synced = 0
        self.firsts = {0}  # what the first offset may be after a crash
        self.cut_to: int | None = None  # a truncation from the end that a crash may have interrupted
        self.open()

    def new_disk(self, seed: int) -> Any:
        """The disk with its faults."""
        return FaultyDisk(seed)

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    def open(self) -> None:
        self.open_on(self.disk)

    def open_on(self, disk: Disk) -> None:
        host = StorageRuntime(
            disk, files_max=2, views_max=2, indexes_max=1, flusher=InlineWorker(), preparer=InlineWorker()
        )
        self.log = FileLog(host, f"{self.root}/log", SETTINGS)

    @rule(
        sizes=st.lists(st.integers(0, 700), min_size=1, max_size=6),
        durability=st.sampled_from([Durability.WRITTEN, Durability.SYNCED]),
        late=st.booleans(),
    )
    def append(self, sizes: list[int], durability: Durability, late: bool) -> None:
        self.now += 1_000
        values = [bytes([(self.next + index) % 256]) * size for index, size in enumerate(sizes)]
        times = [self.now - (5_000 if late else 0) + index for index in range(len(values))]
        batch = encode(Columns(values, None, times), self.now, codec=self.codec)
        for index, value in enumerate(values):
            self.values[self.next + index] = value
            self.times[self.next + index] = times[index]
        before, self.next = self.next, self.next + len(values)
        receipt = self.attempt(lambda: self.log.append(batch, self.now, durability))
        if receipt is None:
            return
        assert (receipt.base_offset, receipt.next_offset) == (before, self.next)
        self.written = self.next
        if durability is Durability.SYNCED and self.attempt(lambda: receipt.wait(Durability.SYNCED) or True):
            assert receipt.reached >= Durability.SYNCED
            self.synced = self.next

    @rule(share=st.floats(0, 1))
    def truncate_before(self, share: float) -> None:
        offset = self.first + int((self.next - self.first) * share)
        self.firsts = {self.first, offset}
        if self.attempt(lambda: self.log.truncate_before(offset) or True):
            self.first = offset
            self.firsts = {offset}

    @rule(share=st.floats(0, 1))
    def truncate_after(self, share: float) -> None:
        offset = self.first + int((self.next - self.first) * share)
        self.cut_to = offset
        if self.attempt(lambda: self.log.truncate_after(offset) or True):
            self.cut_to = None
            self.next = offset
            self.synced = min(self.synced, offset)
            self.written = offset
            self.gone = {at for at in self.gone if at < offset}

    @rule()
    def compact(self) -> None:
        self.gone |= {at for at in range(self.first, self.next) if not kept_by_rule(at)}
        self.attempt(lambda: self.log.compact(keep))

    @rule()
    def reopen(self) -> None:
        if self.attempt(lambda: self.log.close() or True):
            self.synced = self.next
            self.attempt(self.open)

    @rule(unsynced=st.sampled_from(Unsynced), again=st.integers(0, 30))
    def lose_power(self, unsynced: Unsynced, again: int) -> None:
        """Cut the power now, and perhaps again while the log is being recovered."""
        self.disk.crash_after(0)
        with contextlib.suppress(*POWER_OFF):
            self.log.close()
        self.recover(unsynced, again)

    @rule(operations=st.integers(1, 25))
    @precondition(lambda self: not self.disk.crashed)
    def arm(self, operations: int) -> None:
        """Cut the power at some operation from now on."""
        self.disk.crash_after(operations)

    @rule()
    @precondition(lambda self: self.next > self.first and not self.disk.crashed)
    def find_by_time(self) -> None:
        present = [at for at in range(self.first, self.next) if at not in self.gone]
        for time in {self.times[at] for at in present[:: max(len(present) // 4, 1)]}:
            expected = next(at for at in present if self.times[at] >= time)
            found = self.log.find_time(time)
            assert found <= expected
            assert found == expected or found in self.gone

    @invariant()
    def reads_what_was_written(self) -> None:
        if not hasattr(self, "log") or self.disk.crashed:
            return
        assert (self.log.first_offset, self.log.next_offset) == (self.first, self.next)
        expected = {at: self.values[at] for at in range(self.first, self.next)}
        found = self.read_all()
        assert found.items() <= expected.items()
        assert expected.keys() - found.keys() <= self.gone
        middle = (self.first + self.next) // 2
        assert self.read_all(middle).items() == {(at, found[at]) for at in found if at >= middle}

    def read_all(self, start: int | None = None) -> dict[int, bytes]:
        offset = self.first if start is None else start
        batches = self.log.batches(offset)
        return {m.offset: m.value or b"" for batch in batches for m in batch.messages() if m.offset >= offset}

    def attempt(self, action):  # type: ignore[no-untyped-def]
        """Do it; if the power goes off on the way, recover and return None."""
        try:
            return action()
        except POWER_OFF:
            if not self.disk.crashed:
                raise
            self.recover(Unsynced.RANDOM, 0)
            return None

    def recover(self, unsynced: Unsynced, again: int) -> None:
        self.disk.power_loss(unsynced)
        if again:
            self.disk.crash_after(again)
            try:
                self.open()
            except PowerLoss:
                note(f"power lost again after {again} operations")
                self.disk.power_loss(unsynced)
        self.disk.crash_after(10**9)
        self.open()
        self.adopt(self.written if unsynced is Unsynced.KEPT else self.synced)

    def adopt(self, promised: int) -> None:
        """Check what the log came back with: a part from its beginning with all that was promised; go on from there."""
        log = self.log
        floor = promised if self.cut_to is None else min(promised, self.cut_to)
        assert floor <= log.next_offset <= self.next
        assert log.first_offset in self.firsts | {min(first, log.next_offset) for first in self.firsts}
        assert not log.findings.lost
        self.first, self.next = log.first_offset, log.next_offset
        self.firsts, self.cut_to = {self.first}, None
        self.synced = self.written = self.next


LogOnAFaultyDisk.TestCase.settings = settings(
    max_examples=int(os.environ.get("HEADRACE_MODEL_EXAMPLES", "200")), stateful_step_count=30
)
test_log_on_a_faulty_disk = LogOnAFaultyDisk.TestCase


def opened(disk: FaultyDisk, directory: Path) -> FileLog:
    host = StorageRuntime(disk, flusher=InlineWorker(), preparer=InlineWorker())
    return FileLog(host, str(directory), SETTINGS)


def batch(size: int) -> Batch:
    return encode(Columns([b"x" * size], None, [1_000]), 1_000, codec=Codec.NONE)


def append_and_crash(log: FileLog, disk: FaultyDisk, size: int, operations: int) -> None:
    disk.crash_after(operations)
    with pytest.raises(PowerLoss):
        log.append(batch(size), 1_000)


@pytest.mark.parametrize("operations", [1, 2, 3, 4])
def test_an_index_left_behind_says_nothing_of_a_new_segment(tmp_path: Path, operations: int) -> None:
    disk = FaultyDisk()
    log = opened(disk, tmp_path)
    log.append(batch(100), 1_000)
    log.close()
    disk.power_loss(Unsynced.KEPT)  # whatever is there is on the disk from now on
    log = opened(disk, tmp_path)
    log.truncate_after(0)
    disk.power_loss(Unsynced.LOST)
    assert [path.suffix for path in tmp_path.glob("0*")] == [".idx"]  # its removal was not on the disk yet
    append_and_crash(opened(disk, tmp_path), disk, 100, operations)  # one of them writes the new segment's header
    disk.power_loss(Unsynced.KEPT)
    log = opened(disk, tmp_path)
    assert log.next_offset == 0
    assert not log.findings.lost


def test_what_recovery_cut_off_does_not_come_back(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = opened(disk, tmp_path)
    log.append(batch(SETTINGS.checkpoint_bytes), 1_000, Durability.SYNCED).wait(Durability.SYNCED)
    append_and_crash(log, disk, 600, 1)
    disk.power_loss(Unsynced.KEPT)
    assert opened(disk, tmp_path).findings.torn_bytes
    disk.power_loss(Unsynced.LOST)
    log = opened(disk, tmp_path)
    assert log.next_offset == 1
    assert not log.findings.torn_bytes
