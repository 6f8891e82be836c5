"""The small parts of the storage engine: records, indexes, pools, the worker and the beacon."""

import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.storage import index as indexes
from headrace.storage.beacon import Beacon
from headrace.storage.disk import LocalDisk
from headrace.storage.index import Index, IndexSummary
from headrace.storage.pool import Pool
from headrace.storage.record import SlottedRecord
from headrace.storage.worker import Worker

DISK = LocalDisk()
SUMMARY = IndexSummary(1, 2, 3, 4_000, 5, 6, 7)


def test_a_record_keeps_the_last_content(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    record = SlottedRecord(DISK, path, write=True, create=True)
    assert record.load() is None
    for number in range(5):
        record.store(b"%d" % number)
        assert SlottedRecord(DISK, path, write=False).load() == b"%d" % number


def test_a_damaged_slot_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = SlottedRecord(DISK, str(path), write=True, create=True)
    record.store(b"one")
    record.store(b"two")
    content = bytearray(path.read_bytes())
    content[content.index(b"two")] ^= 1
    path.write_bytes(content)
    assert SlottedRecord(DISK, str(path), write=False).load() == b"one"
    content[content.index(b"one")] ^= 1
    path.write_bytes(content)
    assert SlottedRecord(DISK, str(path), write=False).load() is None


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 5_000), st.integers(0, 50)), max_size=30), st.data())
def test_an_index_finds_the_last_entry_before(steps: list[tuple[int, int, int]], data: st.DataObject) -> None:
    index = Index()
    offset = position = time = 0
    entries = []
    for more_offset, more_position, more_time in steps:
        index.add(offset, position, time)
        entries.append((offset, position, time))
        offset, position, time = offset + more_offset, position + more_position, time + more_time
    if not entries:
        return
    wanted = data.draw(st.integers(0, offset))
    assert entries[index.at_offset(wanted)] == max(entry for entry in entries if entry[0] <= wanted)
    wanted_time = data.draw(st.integers(1, time + 1))
    before = [entry for entry in entries if entry[2] < wanted_time]
    assert entries[index.at_time(wanted_time)] == (before[-1] if before else entries[0])


def test_an_index_is_saved_up_to_what_was_synced(tmp_path: Path) -> None:
    path = str(tmp_path / "0.idx")
    index = Index()
    for number in range(10):
        index.add(number, number * 1_000, number)
    index.save(DISK, path, SUMMARY)
    assert indexes.load_summary(DISK, path) == SUMMARY
    loaded = indexes.load(DISK, path)
    assert loaded is not None
    assert loaded[0] == SUMMARY
    assert list(loaded[1].positions) == [0, 1_000, 2_000, 3_000]


def test_a_damaged_or_missing_index_is_none(tmp_path: Path) -> None:
    path = tmp_path / "0.idx"
    assert indexes.load(DISK, str(path)) is None
    index = Index()
    index.add(0, 0, 0)
    index.save(DISK, str(path), SUMMARY)
    good = path.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 4
        path.write_bytes(bad)
        assert indexes.load(DISK, str(path)) is None, position
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert indexes.load(DISK, str(path)) is None, length


def test_a_pool_gives_up_what_was_used_longest_ago() -> None:
    pool: Pool[str, int] = Pool(2)
    made: list[str] = []

    def get(key: str) -> int:
        return pool.get_or_make(key, lambda: made.append(key) or len(made))

    assert [get("a"), get("b"), get("a"), get("c"), get("a"), get("b")] == [1, 2, 1, 3, 1, 4]
    assert len(pool) == 2


def test_a_worker_does_each_waiting_job_once() -> None:
    worker = Worker("test")
    started, go, done = threading.Event(), threading.Event(), []

    def first() -> None:
        started.set()
        go.wait()

    def second() -> None:
        done.append(1)

    worker.submit(first)
    started.wait()
    for _ in range(5):
        worker.submit(second)
    go.set()
    worker.stop()
    assert done == [1]
    worker.submit(second)
    worker.stop()
    assert done == [1, 1]


def test_a_beacon_wakes_who_sleeps_on_it(tmp_path: Path) -> None:
    path = str(tmp_path / "live")
    writer = Beacon(DISK, DISK.open(path, create=True), write=True)
    writer.begin(0, 5)
    reader = Beacon(DISK, DISK.open(path), write=False)
    assert (reader.session, reader.first_offset, reader.next_offset) == (1, 0, 5)
    assert not reader.wait(5, 0.01)
    woken = threading.Event()
    thread = threading.Thread(target=lambda: reader.wait(5, 30) and woken.set())
    thread.start()
    writer.publish(6)
    assert woken.wait(10)
    thread.join()
    assert reader.wait(5, 30)
    reader.close()
    writer.close()


def test_closing_a_beacon_ends_the_sleep(tmp_path: Path) -> None:
    beacon = Beacon(DISK, DISK.open(str(tmp_path / "live"), create=True), write=True)
    thread = threading.Thread(target=beacon.wait, args=(0, 30))
    thread.start()
    beacon.close()
    thread.join(10)
    assert not thread.is_alive()


def test_the_lock_lasts_as_long_as_the_mapping(tmp_path: Path) -> None:
    path = str(tmp_path / "live")
    file = DISK.open(path, create=True)
    assert DISK.lock(file)
    beacon = Beacon(DISK, file, write=True)
    del file
    other = DISK.open(path)
    assert not DISK.lock(other)
    beacon.close()
    assert DISK.lock(other)
