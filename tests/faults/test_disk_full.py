"""The disk fills up, again and again, wherever it hurts: every call fails whole, and works once there is room."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random, SystemRandom
from typing import TypeVar

import pytest
from tests.known import append, content, quick_place, said

import headrace
from headrace.model.batch import Batch, Columns, encode
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import DiskFull, LogClosed, LogFailed, OffsetOutOfRange
from headrace.storage.disk import LocalDisk, OpenFile
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.storage.worker import Worker
from headrace.testing import FaultyDisk
from headrace.testing.workbench import Workbench

LIVES = 60
STEPS = 40
SETTINGS = LogSettings(segment_bytes=4096, checkpoint_bytes=1500, ahead_bytes_max=2048)
T = TypeVar("T")


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as path:
        yield path


class SmallDisk(LocalDisk):
    """A disk that fills up. What counts is what was written: a file that was only made longer takes no room."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.refusals = 0
        self._ends: dict[int, int] = {}
        """How far each file has been written, by its number."""
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(self._ends.values())

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        with self._lock:
            number = os.fstat(file.fd).st_ino
            end = self._ends.get(number, 0)
            room = len(data)
            if self.capacity_bytes is not None:
                room = min(room, max(end + max(self.capacity_bytes - self.used_bytes, 0) - position, 0))
            super().write(file, position, data[:room])
            if room:
                self._ends[number] = max(end, position + room)
            if room < len(data):
                self.refusals += 1
                raise DiskFull(f"no room to write {file.path}")

    def truncate(self, file: OpenFile, length: int) -> None:
        with self._lock:
            super().truncate(file, length)
            number = os.fstat(file.fd).st_ino
            self._ends[number] = min(self._ends.get(number, 0), length)

    def rename(self, source: str, target: str, *, sync: bool = True) -> None:
        with self._lock:
            self._forget(target)
            super().rename(source, target, sync=sync)

    def remove(self, path: str, *, sync: bool = True) -> None:
        with self._lock:
            self._forget(path)
            super().remove(path, sync=sync)

    def _forget(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ends.pop(os.stat(path).st_ino, None)


class Refusing(LocalDisk):
    """A disk that has no room for some files."""

    refused = "nothing"

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        if self.refused in file.path:
            super().write(file, position, data[: len(data) // 2])
            raise DiskFull
        super().write(file, position, data)


class Unyielding(Refusing):
    """The same, but what was written there can be replaced."""

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        if self.refused in file.path and not any(self.read(file, position, len(data))):
            raise DiskFull
        LocalDisk.write(self, file, position, data)


class Idle(Worker):
    """Does nothing: no room is prepared ahead of the writer, so that a full disk is full at once."""

    def submit(self, job: Callable[[], None]) -> None:
        pass


@pytest.fixture
def disk() -> SmallDisk:
    return SmallDisk()


@pytest.fixture
def host(disk: SmallDisk) -> Iterator[StorageRuntime]:
    host = StorageRuntime(disk, preparer=Idle("idle"))
    yield host
    host.close()


def fill(disk: SmallDisk, room: int = 0) -> None:
    """Leave so much room and no more."""
    disk.capacity_bytes = disk.used_bytes + room


def kept(offset: int) -> bool:
    """The rule of compaction here."""
    return offset % 3 != 0


class Tight:
    """A disk that is nearly always full, and gets a little room only when something failed for want of it."""

    def __init__(self, seed: int, check: Callable[[], None]) -> None:
        self.dice = Random(seed)
        self.disk = SmallDisk(capacity_bytes=0)
        self.failures = 0
        self._check = check

    def insist(self, step: Callable[[], T]) -> T:
        """Do something, making room little by little for as long as there is not enough."""
        while True:
            try:
                return step()
            except DiskFull as error:
                assert error.retryable  # noqa: PT017
                self.failures += 1
                self._check()
            assert self.disk.capacity_bytes is not None
            room = self.dice.choice((1, 10, 100, 1000, 5000))
            self.disk.capacity_bytes = max(self.disk.capacity_bytes, self.disk.used_bytes) + room


class StoredLife:
    """What happens to a log in storage on such a disk."""

    def __init__(self, place: Path, seed: int) -> None:
        self.tight = Tight(seed, self.check)
        self.dice = self.tight.dice
        self.path = str(place / f"log-{seed}")
        self.codec = self.dice.choice(list(Codec))
        self.log: FileLog | None = None
        self.next_offset = self.first_offset = self.now_us = 0
        self.compacted = 0
        """Messages before this offset may have gone by the rule."""
        self.open()

    def open(self) -> None:
        self.host = StorageRuntime(self.tight.disk, files_max=4, views_max=2, indexes_max=1)
        self.log = self.tight.insist(lambda: FileLog(self.host, self.path, SETTINGS))

    def reopen(self) -> None:
        assert self.log is not None
        if self.dice.random() < 0.5:
            self.log.close()
        self.log = None  # or it is left as a killed process would leave it
        self.host.close()
        self.open()

    def append(self) -> None:
        assert self.log is not None
        count = self.dice.choice((1, 2, 10))
        values = [content(1, offset).value for offset in range(self.next_offset, self.next_offset + count)]
        batch = encode(Columns(values), self.now_us, codec=self.codec)
        receipt = self.log.append(batch, self.now_us)
        assert receipt.base_offset == self.next_offset
        self.next_offset = receipt.next_offset
        if self.dice.random() < 0.5:
            receipt.wait(Durability.SYNCED)

    def truncate(self) -> None:
        assert self.log is not None
        offset = self.dice.randint(self.first_offset, self.next_offset)
        self.log.truncate_before(offset)
        self.first_offset = offset

    def compact(self) -> None:
        assert self.log is not None
        self.compacted = self.next_offset
        self.log.compact(lambda batch: [index for index, one in enumerate(batch.messages()) if kept(one.offset)])

    def step(self) -> None:
        doing = self.dice.choice((self.append, self.append, self.append, self.append, self.truncate, self.compact))
        self.tight.insist(doing)
        if self.dice.random() < 0.1:
            self.reopen()

    def check(self) -> None:
        """Everything is there, and nothing of what failed."""
        if self.log is None:
            return
        assert (self.log.first_offset, self.log.next_offset) == (self.first_offset, self.next_offset)
        found = {}
        for batch in self.log.batches(self.first_offset):
            found.update({message.offset: message for message in batch.messages()})
        for offset in range(self.first_offset, self.next_offset):
            if offset in found:
                assert found[offset].value == content(1, offset).value
            else:
                assert offset < self.compacted
                assert not kept(offset)
        assert max(found, default=-1) < self.next_offset


class EmbeddedLife:
    """What happens to a Log, its cursor and its consumers on such a disk; a reader without that disk looks on."""

    def __init__(self, place: Path, seed: int) -> None:
        self.tight = Tight(seed, self.check)
        self.dice = self.tight.dice
        self.path = place / f"log-{seed}"
        self.log: headrace.Log | None = None
        self.flushed = self.first_offset = self.compacted = self.committed = self.consumed = 0
        self.open()

    def open(self) -> None:
        self.host = StorageRuntime(self.tight.disk)

        def opened() -> headrace.Log:
            return headrace.Log(self.path, segment_bytes=4096, sync_every=None, host=self.host)

        self.log = self.tight.insist(opened)
        self.tight.insist(self.check_cursor)

    def close(self) -> None:
        assert self.log is not None
        self.tight.insist(self.log.flush)  # closing would not try again
        self.log.close()
        self.flushed = self.log.next_offset
        self.log = None
        self.host.close()

    def append(self) -> None:
        assert self.log is not None
        append(self.log, 1, self.dice.choice((1, 2, 5)))

    def flush(self) -> None:
        assert self.log is not None
        self.flushed = self.log.flush()

    def truncate(self) -> None:
        assert self.log is not None
        offset = self.dice.randint(self.first_offset, self.log.next_offset)
        self.log.truncate_before(offset)
        self.first_offset, self.flushed = offset, max(self.flushed, offset)

    def compact(self) -> None:
        assert self.log is not None
        self.compacted = self.log.next_offset
        self.log.compact(lambda message: kept(message.offset))

    def commit(self) -> None:
        assert self.log is not None
        with self.log.cursor("reader") as cursor:
            before = cursor.committed
            offset = self.dice.randint(0, self.flushed)
            try:
                cursor.commit(offset)
            except DiskFull:
                assert cursor.committed == before, "the cursor says that it is committed, and is not"
                raise
            self.committed = cursor.committed

    def consume(self) -> None:
        assert self.log is not None
        for message in self.log.consume(self.dice.choice((1, 10))):
            assert message.offset >= self.consumed, "consumed twice"
            assert all(not kept(offset) for offset in range(max(self.consumed, self.first_offset), message.offset))
            assert said(message) == content(1, message.offset)
            self.consumed = message.offset + 1
            self.flushed = max(self.flushed, self.consumed)

    def check_cursor(self) -> None:
        assert self.log is not None
        with self.log.cursor("reader") as cursor:
            assert cursor.committed == self.committed

    def step(self) -> None:
        doing = (self.append, self.append, self.append, self.flush, self.commit, self.consume, self.truncate)
        self.tight.insist(self.dice.choice((*doing, self.compact)))
        if self.dice.random() < 0.1:
            self.close()
            self.open()

    def check(self) -> None:
        """Who reads sees all that was flushed, perhaps some that was appended since, and nothing wrong."""
        if self.log is None:
            return
        with headrace.Log(self.path, readonly=True) as reader:
            assert reader.first_offset == self.first_offset
            assert self.flushed <= reader.next_offset <= self.log.next_offset
            found = {message.offset: message for message in reader}
            for offset in range(reader.first_offset, reader.next_offset):
                if offset in found:
                    assert said(found[offset]) == content(1, offset)
                else:
                    assert offset < self.compacted
                    assert not kept(offset)


@pytest.mark.parametrize("kind", [StoredLife, EmbeddedLife])
def test_a_life_on_a_disk_that_is_nearly_always_full(place: Path, kind: type[StoredLife] | type[EmbeddedLife]) -> None:
    first = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    failures = 0
    for seed in range(first, first + LIVES):
        print(f"HEADRACE_SEED={seed}")
        life = kind(place, seed)
        for _ in range(STEPS):
            life.step()
        if isinstance(life, StoredLife):
            life.reopen()
        else:
            life.close()
            life.open()
        life.check()
        assert life.log is not None
        life.log.close()
        life.host.close()
        failures += life.tight.failures
    assert failures > 10 * LIVES, "the disk was hardly ever full: this tested nothing"


# The places where it hurts, one by one.


def test_a_new_segment_finds_no_room(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    log = FileLog(host, str(place / "log"), SETTINGS)
    for _ in range(3):
        log.append(encode(Columns([b"x" * 1000]), 0), 0).wait(Durability.SYNCED)
    for room in (0, 30, 64, 100, 1000):  # not even the header fits, or only that, or half of the batch
        fill(disk, room)
        with pytest.raises(DiskFull):
            log.append(encode(Columns([b"y" * 1500]), 0), 0)
        assert log.next_offset == 3
        assert [batch.base_offset for batch in log.batches(0)] == [0, 1, 2]
    disk.capacity_bytes = None
    assert log.append(encode(Columns([b"y" * 1500]), 0), 0).base_offset == 3
    log.close()
    again = FileLog(host, str(place / "log"), SETTINGS)
    assert again.findings.sound
    assert [batch.columns().values for batch in again.batches(2)] == [[b"x" * 1000], [b"y" * 1500]]
    again.close()


def test_a_long_batch_that_did_not_fit_leaves_nothing_behind_a_shorter_one(
    place: Path, host: StorageRuntime, disk: SmallDisk
) -> None:
    log = FileLog(host, str(place / "log"), LogSettings())
    log.append(encode(Columns([b"first"]), 0), 0).wait(Durability.SYNCED)
    fill(disk, 900)
    with pytest.raises(DiskFull):
        log.append(encode(Columns([b"long" * 700]), 0), 0)
    log.append(encode(Columns([b"short"]), 0), 0)
    log = FileLog(StorageRuntime(), str(place / "log"), SETTINGS)  # as after a kill
    assert not log.findings.lost
    assert [batch.columns().values for batch in log.batches(0)] == [[b"first"], [b"short"]]
    log.close()


@pytest.mark.parametrize("when", ["rolling", "checkpoint"])
def test_an_index_finds_no_room(place: Path, host: StorageRuntime, disk: SmallDisk, when: str) -> None:
    """An index can be rebuilt: that there is no room for it keeps nobody from appending."""
    checkpoint_bytes = 1500 if when == "checkpoint" else 1 << 20
    settings = LogSettings(segment_bytes=4096, checkpoint_bytes=checkpoint_bytes)
    log = FileLog(host, str(place / "log"), settings)
    batches = [encode(Columns([b"%d" % number * 500]), 0) for number in range(20)]
    for number, batch in enumerate(batches):
        fill(disk, batch.length + 64)  # for the batch and perhaps a segment's header, not for an index
        receipt = log.append(batch, 0)
        receipt.wait(Durability.SYNCED)
        assert receipt.base_offset == number
    disk.capacity_bytes = None
    log.append(encode(Columns([b"last"]), 0), 0).wait(Durability.SYNCED)
    log.close()
    again = FileLog(host, str(place / "log"), settings)
    assert [batch.columns().values[0] for batch in again.batches(0)] == [
        *(b"%d" % number * 500 for number in range(20)),
        b"last",
    ]
    again.close()


def test_who_reads_needs_no_room(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    """Not even when the index has to be rebuilt."""
    log = FileLog(host, str(place / "log"), SETTINGS)
    for number in range(20):
        log.append(encode(Columns([b"%d" % number * 500]), 0), 0)
    log.close()
    for file in place.glob("log/*.idx"):
        file.write_bytes(file.read_bytes()[:-1])  # the summary is good, the entries are not
    log = FileLog(host, str(place / "log"), SETTINGS)
    fill(disk)
    assert [batch.base_offset for number in range(20) for batch in log.batches(number, until=number + 1)] == [
        *range(20)
    ]
    disk.capacity_bytes = None
    log.close()


def torn(place: Path, host: StorageRuntime) -> str:
    """A log as a killed writer leaves it: behind its last message lies half of a write."""
    path = str(place / "log")
    log = FileLog(host, path, LogSettings())
    for number in range(10):
        log.append(encode(Columns([b"%d" % number * 500]), 0), 0)
    log.wait_synced(10)
    file = host.disk.open(log.segments[-1].path, write=True)
    host.disk.write(file, log.segments[-1].end, encode(Columns([b"x" * 5000]), 0).data[:3000])
    host.forget(log.segments[-1])
    return path


def test_recovery_finds_no_room_for_a_copy(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    """What is torn is cut without one, and that is said; all else is there, and appending goes on with some room."""
    path = torn(place, host)
    fill(disk)
    log = FileLog(host, path, LogSettings())
    assert (log.findings.torn_at, log.findings.torn_kept_in) == (10, [])
    assert log.findings.uncopied_bytes == log.findings.torn_bytes > 0
    assert [batch.base_offset for batch in log.batches(0)] == [*range(10)]
    fill(disk)
    with pytest.raises(DiskFull):
        log.append(encode(Columns([b"y" * 5000]), 0), 0)
    disk.capacity_bytes = None
    log.append(encode(Columns([b"y" * 5000]), 0), 0)
    log.close()
    again = FileLog(host, path, LogSettings())
    assert again.next_offset == 11
    assert again.findings.sound
    assert not (place / "log" / "quarantine").exists() or not any((place / "log" / "quarantine").iterdir())
    again.close()


def test_a_repair_waits_for_room_for_its_copies(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    path = torn(place, host)
    fill(disk)
    with pytest.raises(DiskFull):
        FileLog(host, path, create=False, repair=True)
    disk.capacity_bytes = None
    log = FileLog(host, path, create=False, repair=True)
    assert [Path(kept).stat().st_size for kept in log.findings.torn_kept_in] == [log.findings.torn_bytes]
    assert log.findings.uncopied_bytes == 0
    log.close()


def test_a_segment_that_was_just_being_made_is_made_later(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    """A writer was killed between a file's making and its header's, and then there is no room for that."""
    path = str(place / "log")
    log = FileLog(host, path, SETTINGS)
    for number in range(3):
        log.append(encode(Columns([b"%d" % number * 500]), 0), 0)
    log.wait_synced(3)
    (place / "log" / f"{3:020d}.seg").touch()
    fill(disk)
    log = FileLog(host, path, SETTINGS)
    assert [batch.base_offset for batch in log.batches(0)] == [0, 1, 2]
    disk.capacity_bytes = None
    log.append(encode(Columns([b"x"]), 0), 0)
    log.close()
    again = FileLog(host, path, SETTINGS)
    assert (again.next_offset, again.findings.sound) == (4, True)
    again.close()


def test_what_is_stored_once_can_be_replaced_on_a_full_disk(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    with headrace.Log(place / "log", host=host) as log:
        log.append_many([b"x"] * 10)
        log.flush()
        with log.cursor("reader") as cursor:
            fill(disk)
            for offset in range(1, 10):
                cursor.commit(offset)
            assert cursor.committed == 9
        disk.capacity_bytes = None


def test_a_broker_starts_on_a_full_disk(place: Path) -> None:
    """It serves what is there, refuses what needs room, and goes on when there is some."""
    disk = SmallDisk()
    Workbench(str(place), disk=disk).publish("orders", [b"a", b"b"])
    for _ in range(3):
        fill(disk)
        bench = Workbench(str(place), disk=disk)
        assert bench.values("orders") == [b"a", b"b"]
        fill(disk)  # opening has made some room
        with pytest.raises(DiskFull) as refused:
            bench.publish("orders", [b"c" * 5000])
        assert refused.value.retryable
        with pytest.raises(DiskFull):
            bench.publish("new", [b"c"])
    disk.capacity_bytes = None
    bench.publish("orders", [b"c"])
    assert bench.publish("new", [b"c"]).base_offset == 0
    bench.close()
    last = Workbench(str(place), disk=disk)
    assert last.values("orders") == [b"a", b"b", b"c"]
    last.close()


def test_no_start_of_a_broker_has_a_number_twice_though_the_journal_finds_no_room(place: Path) -> None:
    disk = Unyielding()
    sessions = []
    for refused in ("nothing", "broker/journal", "broker/journal", "nothing", "broker/journal"):
        disk.refused = refused
        bench = Workbench(str(place), disk=disk)
        sessions.append(bench.broker._ledger.state.session)
        if refused == "nothing":
            bench.publish("orders", [b"a"])
        else:
            with pytest.raises(DiskFull):
                bench.publish("new", [b"c"])
        assert bench.values("orders")[0] == b"a"
    assert sessions == [1, 2, 3, 4, 5]
    disk.refused = "nothing"
    assert bench.publish("new", [b"c"]).base_offset == 0
    bench.close()


def test_a_new_broker_needs_some_room(place: Path) -> None:
    with pytest.raises(DiskFull):
        Workbench(str(place), disk=SmallDisk(0))


def test_the_record_of_the_log_finds_no_room(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    fill(disk)
    for room in (0, 4000, 4100):
        fill(disk, room)
        with pytest.raises(DiskFull):
            FileLog(host, str(place / "log"), SETTINGS)
    disk.capacity_bytes = None
    log = FileLog(host, str(place / "log"), SETTINGS)
    log.append(encode(Columns([b"%d" % number for number in range(10)]), 0), 0)
    log.wait_synced(10)
    log.close()
    assert FileLog(host, str(place / "log"), SETTINGS).next_offset == 10


def test_truncation_finds_no_room(place: Path) -> None:
    disk = Refusing()
    host = StorageRuntime(disk)
    log = FileLog(host, str(place / "log"), SETTINGS)
    for number in range(20):
        log.append(encode(Columns([b"%d" % number * 500]), 0), 0)
    disk.refused = "meta"
    for _ in range(3):
        with pytest.raises(DiskFull):
            log.truncate_before(15)
        assert log.first_offset == 0
        assert [batch.base_offset for batch in log.batches(0)] == [*range(20)]
    disk.refused = "nothing"
    log.truncate_before(15)
    log.close()
    again = FileLog(host, str(place / "log"), SETTINGS)
    assert (again.first_offset, again.next_offset) == (15, 20)
    again.close()
    host.close()


def test_compaction_finds_no_room(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    def keep(batch: Batch) -> list[int]:
        return [0] if kept(batch.base_offset) else []

    log = FileLog(host, str(place / "log"), SETTINGS)
    for number in range(40):
        log.append(encode(Columns([b"%d" % number * 500]), 0), 0)
    for room in (0, 64, 500, 2000, 2500, 2800, 3000):
        fill(disk, room)
        with contextlib.suppress(DiskFull):
            log.compact(keep)
        offsets = [batch.base_offset for batch in log.batches(0)]
        assert [offset for offset in offsets if kept(offset)] == [*filter(kept, range(40))]
    disk.capacity_bytes = None
    log.compact(keep)
    last = log.segments[-1].base_offset
    assert [batch.base_offset for batch in log.batches(0, until=last)] == [*filter(kept, range(last))]
    log.close()
    again = FileLog(host, str(place / "log"), SETTINGS)
    assert again.findings.sound
    assert [batch.base_offset for batch in again.batches(0, until=last)] == [*filter(kept, range(last))]
    again.close()


def test_a_cursor_finds_no_room(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    with headrace.Log(place / "log", host=host) as log:
        log.append_many([b"x"] * 10)
        log.flush()
        fill(disk)
        with pytest.raises(DiskFull) as raised:
            log.cursor("new")
        assert raised.value.retryable
        with pytest.raises(DiskFull):
            log.consume(3)
        disk.capacity_bytes = None
        with log.cursor("new") as cursor:
            assert cursor.committed == 0
            cursor.commit(3)
        with log.cursor("new") as cursor:
            assert cursor.committed == 3
        assert [message.offset for message in log.consume(3)] == [0, 1, 2]


def test_a_commit_that_failed_is_not_believed(place: Path) -> None:
    disk = Refusing()
    host = StorageRuntime(disk)
    with headrace.Log(place / "log", host=host) as log:
        log.append_many([b"x"] * 10)
        log.flush()
        with log.cursor("reader") as cursor:
            cursor.commit(3)
            disk.refused = "cursors"
            for _ in range(3):
                with pytest.raises(DiskFull):
                    cursor.commit(4)
                assert (cursor.committed, cursor.lag) == (3, 7)
                with pytest.raises(DiskFull):
                    log.consume()
        with log.cursor("reader") as cursor:
            assert cursor.committed == 3
            disk.refused = "nothing"
            cursor.commit(6)
            assert cursor.committed == 6
        assert log.consume()[0].offset == 0
    host.close()


def test_a_full_disk_keeps_nobody_from_reading(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    log = headrace.Log(place / "log", host=host, sync_every=None)
    log.append(b"before")
    log.flush()
    log.append(b"x" * 10_000)
    fill(disk)
    with pytest.raises(DiskFull):
        log.flush()
    assert log.read(0).value == b"before"
    assert log.info()["messages"] >= 1
    disk.capacity_bytes = None
    log.close()


def test_what_found_no_room_is_written_when_there_is_some(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    """The log tries again by itself, or when it is asked to."""
    log = headrace.Log(place / "log", host=host, sync_every=0.02)
    log.append(b"before")
    log.flush()
    fill(disk)
    for number in range(3000):
        try:
            log.append(b"%d" % number * 100)
        except DiskFull:
            break
    else:
        pytest.fail("the disk is full and nobody noticed")
    end = log.next_offset
    assert end == number + 1
    disk.capacity_bytes = None
    with headrace.Log(place / "log", readonly=True) as reader:
        assert reader.wait(end - 1, timeout=30), "nothing was written though there is room"
        assert [message.value for message in reader.messages(1)] == [b"%d" % at * 100 for at in range(number)]
    assert log.append(b"after") == end
    log.close()
    with headrace.Log(place / "log", readonly=True) as reader:
        assert reader.read(end).value == b"after"


def test_flush_after_a_full_disk_writes_what_was_appended_since_too(
    place: Path, host: StorageRuntime, disk: SmallDisk
) -> None:
    log = headrace.Log(place / "log", host=host)
    for number in range(10):
        fill(disk)
        log.append(b"%d" % number * 10_000)
        with pytest.raises(DiskFull):
            log.flush()
        with contextlib.suppress(DiskFull):
            log.append(b"small")
        disk.capacity_bytes = None
        end = log.next_offset
        assert log.flush() == end
        with headrace.Log(place / "log", readonly=True) as reader:
            assert reader.next_offset == end
    log.close()


def test_many_messages_find_room_for_some(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    log = headrace.Log(place / "log", host=host, sync_every=None)
    fill(disk, 500_000)
    values = [b"%d" % number * 100 for number in range(5000)]
    with pytest.raises(DiskFull):
        log.append_many(values)
    came = log.next_offset
    assert 0 < came < 5000
    disk.capacity_bytes = None
    assert log.append_many(values[came:]) == range(came, 5000)
    assert [message.value for message in log] == values
    log.close()


def test_a_log_closed_on_a_full_disk_is_let_go_of_and_says_what_is_lost(
    place: Path, host: StorageRuntime, disk: SmallDisk
) -> None:
    log = headrace.Log(place / "log", host=host, sync_every=0.01)
    log.append(b"kept")
    log.flush()
    fill(disk)
    written = append_until_full(log)
    waiting = log.next_offset - written
    info = log.info()
    assert (info["messages"], info["unwritten"]) == (len([*log]), waiting) == (written, waiting)
    with pytest.raises(OffsetOutOfRange, match=f"up to {written}$"):
        log.read(written)
    with pytest.raises(DiskFull, match=f"lost {waiting} messages from offset {written} on") as raised:
        log.close()
    assert raised.value.details == {"messages": waiting, "offset": written}
    log.close()
    assert log.next_offset == written
    with pytest.raises(LogClosed):
        log.append(b"late")
    disk.capacity_bytes = None
    with headrace.Log(place / "log", host=host) as again:
        assert (again.next_offset, again.read(0).value) == (written, b"kept")
        assert again.append(b"after") == written


def append_until_full(log: headrace.Log) -> int:
    """Append until there is no room; returns the offset of the first message that was not written."""
    for _ in range(3000):
        try:
            log.append(b"x" * 3000)
        except DiskFull:
            return log._stored.next_offset
    raise AssertionError("the disk is full and nobody noticed")


def test_the_block_of_a_log_ends_with_the_full_disk(place: Path, host: StorageRuntime, disk: SmallDisk) -> None:
    def use() -> None:
        with headrace.Log(place / "log", host=host) as log:
            fill(disk)
            append_until_full(log)

    with pytest.raises(DiskFull, match="closed and lost"):
        use()
    headrace.Log(place / "log", host=host).close()


def test_a_writer_dropped_on_a_full_disk_lets_go_and_logs_it(
    place: Path, host: StorageRuntime, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    log: headrace.Log | None = headrace.Log(place / "log", host=host, sync_every=None)
    assert log is not None
    fill(disk)
    log.append(b"x" * 10_000)
    with pytest.warns(ResourceWarning, match="unclosed"):
        log = None
    assert "1 message from offset 0 on" in caplog.text
    headrace.Log(place / "log", host=host).close()


def test_a_disk_that_stays_full_is_logged_once(
    place: Path, host: StorageRuntime, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    log = headrace.Log(place / "log", host=host, sync_every=0.001)
    for turn in (1, 2):
        fill(disk)
        end = log.append(b"x" * 10_000) + 1
        begin, deadline = disk.refusals, time.monotonic() + 60
        while disk.refusals < begin + 20:
            assert time.monotonic() < deadline, "the log does not try again"
            time.sleep(0.001)
        assert sum("not written" in record.getMessage() for record in caplog.records) == turn
        disk.capacity_bytes = None
        with headrace.Log(place / "log", readonly=True) as reader:
            assert reader.wait(end - 1, timeout=60), "nothing was written though there is room"
    log.close()


def test_a_log_that_could_not_be_made_for_want_of_room_is_not_in_use(
    place: Path, host: StorageRuntime, disk: SmallDisk
) -> None:
    fill(disk)
    try:
        headrace.Log(place / "log", host=host)
    except DiskFull:
        disk.capacity_bytes = None
        headrace.Log(place / "log", host=host).close()  # with the error, and what it refers to, still around
    else:
        pytest.fail("there was room")


def test_a_log_whose_disk_failed_can_be_opened_again(place: Path) -> None:
    """Not for want of room, but its end has to be as clean."""
    disk = FaultyDisk()
    host = StorageRuntime(disk, preparer=Idle("idle"))
    log = headrace.Log(place / "log", host=host, sync_every=None)
    log.append(b"first")
    log.flush()
    log.append(b"second")
    disk.fail_sync()
    with pytest.raises(LogFailed):
        log.flush()
    with contextlib.suppress(LogFailed):
        log.append(b"third")
    with pytest.raises(LogFailed):
        log.flush()
    with pytest.raises(LogFailed):
        log.close()
    with headrace.Log(place / "log", host=host) as again:
        assert again.read(0).value == b"first"
        again.append(b"new")
        again.flush()
    host.close()
