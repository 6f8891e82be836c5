"""Positions that readers share: one search for all at an offset, right whatever happens to the log, and bounded."""

import contextlib
import gc
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import headrace
from headrace.embedded.repair import locked
from headrace.model.batch import Batch, Columns, encode
from headrace.storage import scan
from headrace.storage.beacon import Beacon
from headrace.storage.follower import Follower
from headrace.storage.log import FileLog
from headrace.storage.lookups import Lookups, RecentLookups
from headrace.storage.memory import SEGMENT_BYTES, MemoryLog
from headrace.storage.reader import LogReader
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.testing import InlineWorker

MEMORY = Path("/dev/shm")
DELIVERY_BYTES = 512 << 10


def quiet_host(**limits: int) -> StorageRuntime:
    return StorageRuntime(flusher=InlineWorker(), preparer=InlineWorker(), **limits)


def batch_of(value_bytes: int, count: int = 1) -> Batch:
    return encode(Columns([b"x" * value_bytes] * count), 1_000)


Stored = FileLog | MemoryLog
LOGS: dict[str, Callable[[Path], Stored]] = {
    "files": lambda path: FileLog(quiet_host(), str(path / "log")),
    "memory": lambda _: MemoryLog(8 * SEGMENT_BYTES),
}


@pytest.fixture(params=LOGS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stored]:
    log = LOGS[request.param](tmp_path)
    yield log
    log.close()


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions at which readers have looked at a header."""
    positions: list[int] = []
    batch_at = scan.batch_at

    def counted(source: scan.ByteSource, view: memoryview, position: int, offset: int) -> Batch:
        positions.append(position)
        return batch_at(source, view, position, offset)

    monkeypatch.setattr(scan, "batch_at", counted)
    return positions


def fill(log: Stored) -> None:
    """So much that an offset cannot be found without looking at many headers."""
    for _ in range(200):
        log.append(batch_of(900), 1_000)


@pytest.mark.parametrize("readers", [1, 50, 500])
def test_one_header_is_looked_at_however_many_readers_wait_for_it(
    log: Stored, scanned: list[int], readers: int
) -> None:
    fill(log)
    offsets = [log.next_offset] * readers
    for _ in range(3):
        log.append(batch_of(900), 1_000)
        scanned.clear()
        for number, offset in enumerate(offsets):
            found = log.byte_range(offset, DELIVERY_BYTES, log.next_offset)
            assert found is not None
            assert (found.first_offset, found.next_offset) == (offset, log.next_offset)
            offsets[number] = found.next_offset
    assert len(scanned) == 1


def test_readers_at_many_offsets_each_look_at_what_they_get(log: Stored, scanned: list[int]) -> None:
    """They lag behind each other by up to sixty batches; none of them looks at a header that is not its own."""
    fill(log)
    offsets = [log.next_offset - lag for lag in range(60)]
    for round_ in range(5):
        log.append(batch_of(900), 1_000)
        scanned.clear()
        for number, offset in enumerate(offsets):
            found = log.byte_range(offset, 1, log.next_offset)
            assert found is not None
            assert (found.first_offset, found.next_offset) == (offset, offset + 1)
            offsets[number] += 1
        if round_:  # in the first they are new
            assert len(scanned) <= 2 * len(offsets)  # the one that is delivered, and the first that is not


def test_who_catches_up_goes_on_where_the_last_delivery_ended(log: Stored, scanned: list[int]) -> None:
    fill(log)
    offset = deliveries = 0
    while (found := log.byte_range(offset, 5_000, log.next_offset)) is not None:
        offset = found.next_offset
        deliveries += 1
    assert len(scanned) <= 200 + deliveries  # each batch once, and once more if it did not fit


def test_those_who_tail_decode_only_what_is_new(log: Stored, scanned: list[int]) -> None:
    fill(log)
    end = log.next_offset
    for _ in range(20):
        assert list(log.batches(end)) == []
    log.append(batch_of(900), 1_000)
    list(log.batches(end))  # finds the position for all
    scanned.clear()
    for _ in range(20):
        assert [batch.base_offset for batch in log.batches(end)] == [end]
    assert len(scanned) == 20


def test_an_embedded_log_is_tailed_by_many_at_the_price_of_one(scanned: list[int]) -> None:
    with headrace.Log(":memory:") as log:
        for _ in range(200):
            log.append(b"x" * 900)
            log.flush()
        tails = [log.tail(log.next_offset, timeout=30) for _ in range(20)]
        for number in range(3):
            log.append(b"%d" % number)
            log.flush()
            if number == 2:
                scanned.clear()
            assert {next(tail).value for tail in tails} == {b"%d" % number}
    assert len(scanned) == len(tails)


def test_a_reader_may_not_see_what_another_has_seen(log: Stored) -> None:
    """What is found for one who may read to the end is not given to one who may not."""
    for _ in range(5):
        log.append(batch_of(100), 1_000)
    for until, next_offset in [(5, 5), (3, 3), (5, 5), (1, 1), (4, 4)]:
        found = log.byte_range(0, DELIVERY_BYTES, until)
        assert found is not None
        assert found.next_offset == next_offset


def test_a_full_range_is_not_given_to_one_who_may_read_less(log: Stored) -> None:
    for _ in range(5):
        log.append(batch_of(100), 1_000)
    for until, next_offset in [(5, 3), (2, 2), (4, 3), (1, 1), (3, 3), (5, 3)]:
        found = log.byte_range(0, 3 * batch_of(100).length, until)
        assert found is not None
        assert found.next_offset == next_offset


def test_what_is_appended_later_is_found_too(log: Stored) -> None:
    for number in range(5):
        log.append(batch_of(100), 1_000)
        found = log.byte_range(0, DELIVERY_BYTES)
        assert found is not None
        assert found.next_offset == number + 1


@pytest.mark.parametrize("damage_at", [0, 60])
def test_what_follows_damage_is_found_by_those_who_stopped_there(tmp_path: Path, damage_at: int) -> None:
    """In a header or in a body: where damage ends is not known to one who may not read further."""
    log = FileLog(quiet_host(), str(tmp_path / "log"))
    for _ in range(4):
        log.append(batch_of(100), 1_000)
    length = batch_of(100).length
    (path,) = (tmp_path / "log").glob("*.seg")
    with path.open("r+b") as file:
        file.seek(log.segments[0].begin + length + damage_at)
        file.write(b"damaged!")
    assert [batch.base_offset for batch in log.batches(0, until=2, skip_corrupt=True)] == [0]
    for _ in range(2):
        assert [batch.base_offset for batch in log.batches(2)] == [2, 3]
        assert [batch.base_offset for batch in log.batches(0, skip_corrupt=True)] == [0, 2, 3]
    log.close()


def remove(log: Stored) -> None:
    log.truncate_before(log.next_offset)


def replace(log: Stored) -> None:
    log.compact(lambda _: [])


@pytest.mark.parametrize("change", [remove, replace, lambda log: log.truncate_after(0)])
def test_segments_that_are_gone_are_not_kept(tmp_path: Path, change: Callable[[Stored], None]) -> None:
    """Neither their files and mappings, nor their memory, nor what is known of them."""
    host = quiet_host()
    logs: list[Stored] = [
        FileLog(host, str(tmp_path / "log"), LogSettings(segment_bytes=100_000)),
        MemoryLog(8 * SEGMENT_BYTES),
    ]
    for log in logs:
        while len(log._layout()) < 3:
            log.append(batch_of(40_000), 1_000)
        for offset in range(log.next_offset):
            assert log.byte_range(offset, DELIVERY_BYTES) is not None
            assert list(log.batches(offset))
        gone = [weakref.ref(segment) for segment in log._layout()[:-1]]
        change(log)
        gc.collect()
        assert [segment() for segment in gone] == [None] * len(gone)
    assert len(host.views) <= 1
    for log in logs:
        log.close()


def test_what_is_remembered_is_bounded_and_what_is_used_stays() -> None:
    recent: RecentLookups[int, str] = RecentLookups(8)
    recent.put(-1, "used")
    for number in range(1000):
        recent.put(number, "once")
        if number % 5 == 0:
            assert recent.get(-1) == "used"
        assert len(recent) <= 16
    assert recent.get(999) == "once"
    assert recent.get(900) is None


def test_readers_in_many_threads_share_what_they_find(log: Stored) -> None:
    fill(log)
    wrong: list[object] = []

    def read() -> None:
        for _ in range(20):
            offset = 0
            while (found := log.byte_range(offset, 3_000)) is not None:
                if found.first_offset != offset or found.next_offset <= offset:
                    wrong.append(found)
                offset = found.next_offset

    log._lookups = Lookups(4, 2)  # which they take from each other all the time
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(log._lookups.positions) <= 2 * (4 + len(threads))


@contextlib.contextmanager
def without_memory(reader: LogReader) -> Iterator[None]:
    """Have a reader find everything by itself."""
    known, reader._lookups = reader._lookups, Lookups(1, 1)
    try:
        yield
    finally:
        reader._lookups = known


class SharedPositions(RuleBasedStateMachine):
    """Whatever happens to a log, who uses what others have found reads what one reads who searches."""

    @initialize(kind=st.sampled_from(["files", "memory", "memory that spills"]), limit=st.sampled_from([1, 4, 100]))
    def begin(self, kind: str, limit: int) -> None:
        self.root = tempfile.mkdtemp(dir=MEMORY if MEMORY.exists() else None)
        self.scale = 1 if kind == "files" else 400
        self.host = quiet_host(files_max=3, views_max=2, indexes_max=1)
        self.readers: list[LogReader] = []
        self.limit = limit
        self.offsets: deque[int] = deque([0], maxlen=8)
        """Those that are read again and again."""
        self.cut = False
        self.beacon = None
        files = LogSettings(segment_bytes=4096, checkpoint_bytes=1500, ahead_bytes_max=2048)
        path = f"{self.root}/log"
        if kind == "files":
            live = locked(self.host, path, create=True)
            self.log: Stored = FileLog(self.host, path, files)
            self.beacon = Beacon(self.host.disk, live, write=True)
            self.beacon.begin(0, 0)
            self.log.beacon = self.beacon
            # Another process, which has room for one file and one mapping.
            self.readers.append(Follower(quiet_host(files_max=1, views_max=1, indexes_max=1), path))
        elif kind == "memory":
            self.log = MemoryLog(2 * SEGMENT_BYTES)
        else:
            spill = FileLog(self.host, path, LogSettings(segment_bytes=SEGMENT_BYTES))
            self.log = MemoryLog(2 * SEGMENT_BYTES, spill)
        self.readers.append(self.log)
        for reader in self.readers:
            reader._lookups = Lookups(limit, limit)

    def teardown(self) -> None:
        if hasattr(self, "root"):
            for reader in self.readers:
                reader.close()  # type: ignore[attr-defined]
            if self.beacon is not None:
                self.beacon.close()
            shutil.rmtree(self.root)

    @rule(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=6), count=st.integers(1, 3))
    def append(self, sizes: list[int], count: int) -> None:
        for size in sizes:
            self.log.append(batch_of(size * self.scale // count, count), 1_000)

    def at(self, share: float) -> int:
        return self.log.first_offset + int((self.log.next_offset - self.log.first_offset) * share)

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        self.log.truncate_before(self.at(share))

    @rule(bytes_max=st.integers(0, 20_000))
    def retain(self, bytes_max: int) -> None:
        self.log.retain(2_000, bytes_max=bytes_max * self.scale)

    @rule(share=st.floats(0.7, 1))
    def cut_end(self, share: float) -> None:
        self.cut = True
        self.log.truncate_after(self.at(share))

    @rule(rest=st.integers(0, 2))
    def compact(self, rest: int) -> None:
        self.log.compact(lambda batch: [0] if batch.base_offset % 3 == rest else None)

    @rule(
        share=st.floats(0, 1),
        bytes_max=st.sampled_from([1, 2_000, 1 << 20]),
        ends=st.lists(st.floats(0, 1), max_size=2),
    )
    def read(self, share: float, bytes_max: int, ends: list[float]) -> None:
        self.offsets.append(self.at(share))
        there = [offset for offset in self.offsets if self.log.first_offset <= offset <= self.log.next_offset]
        for reader in self.readers:
            for until in [None, *self.batch_ends(reader, ends)]:
                for offset in there:
                    self.read_range(reader, offset, bytes_max, until)
                    self.read_batches(reader, offset, until)

    def batch_ends(self, reader: LogReader, shares: list[float]) -> list[int]:
        with without_memory(reader):
            ends = [batch.next_offset for batch in reader.batches(reader.first_offset)]
        return [ends[int(share * (len(ends) - 1))] for share in shares if ends]

    def read_range(self, reader: LogReader, offset: int, bytes_max: int, until: int | None) -> None:
        found = [reader.byte_range(offset, bytes_max, until) for _ in range(2)]
        with without_memory(reader):
            searched = reader.byte_range(offset, bytes_max, until)
        for one in found:
            if one is None or searched is None:
                assert one is searched
                continue
            assert (one.first_offset, one.position) == (searched.first_offset, searched.position)
            if self.cut:  # a segment that was the last one once may have grown: less than there is may be found
                assert one.next_offset <= searched.next_offset
                assert bytes(one.view) == bytes(searched.view[: one.length])
            else:
                assert one.next_offset == searched.next_offset
                assert one.view == searched.view

    def read_batches(self, reader: LogReader, offset: int, until: int | None) -> None:
        found = [(batch.base_offset, bytes(batch.data)) for batch in reader.batches(offset, until=until)]
        with without_memory(reader):
            searched = [(batch.base_offset, bytes(batch.data)) for batch in reader.batches(offset, until=until)]
        assert found == searched

    @invariant()
    def is_bounded(self) -> None:
        for reader in getattr(self, "readers", ()):
            assert len(reader._lookups.positions) <= 2 * self.limit
            assert len(reader._lookups.spans) <= 2 * self.limit


TestSharedPositions = SharedPositions.TestCase
TestSharedPositions.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
