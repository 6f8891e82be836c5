"""Every place a log can live gives the same log: one suite over all drivers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.model.batch import Batch, Columns, encode, parse
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import (
    DiskFull,
    DurabilityUnavailable,
    InvalidArgument,
    LogClosed,
    LogNotFound,
    OffsetOutOfRange,
)
from headrace.storage.driver import Driver, FileDriver, MemoryDriver, StoredLog
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, InlineWorker

MIB = 1 << 20
Drivers = dict[str, Callable[[str, StorageRuntime], Driver]]

DRIVERS: Drivers = {
    "files": lambda root, host: FileDriver(host, root, LogSettings(segment_bytes=MIB)),
    "files in small segments": lambda root, host: FileDriver(host, root, LogSettings(segment_bytes=50_000)),
    "memory": lambda *_: MemoryDriver(64 * MIB),
    "memory that spills": lambda root, host: MemoryDriver(
        2 * MIB, FileDriver(host, root, LogSettings(segment_bytes=MIB))
    ),
}


@pytest.fixture
def host() -> Iterator[StorageRuntime]:
    host = StorageRuntime(files_max=4, views_max=2, indexes_max=1)
    yield host
    host.close()


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, tmp_path: Path, host: StorageRuntime) -> Driver:
    return DRIVERS[request.param](str(tmp_path / "logs"), host)


@pytest.fixture
def log(driver: Driver) -> Iterator[StoredLog]:
    log = driver.open("orders")
    yield log
    log.close()


def append(log: StoredLog, *values: bytes, now_us: int = 1_000, codec: Codec = Codec.NONE, **columns: list) -> int:
    return log.append(encode(Columns(list(values), **columns), now_us, codec=codec), now_us).base_offset


def values(log: StoredLog, start: int | None = None) -> list[bytes | None]:
    offset = log.first_offset if start is None else start
    return [message.value for batch in log.batches(offset) for message in batch.messages() if message.offset >= offset]


def test_a_new_log_is_empty(log: StoredLog) -> None:
    assert (log.first_offset, log.next_offset) == (0, 0)
    assert list(log.batches(0)) == []
    assert log.byte_range(0, 1000) is None
    assert log.find_time(0) == 0


def test_messages_come_back_in_order_with_all_their_parts(log: StoredLog) -> None:
    append(log, b"a", b"b", keys=[b"k", None], headers=[None, {"h": b"1"}], timestamps=[7, 9])
    append(log, b"c", dues=[5], priorities=[3], expires=[99], now_us=2_000)
    messages = [message for batch in log.batches(0) for message in batch.messages()]
    assert [message.offset for message in messages] == [0, 1, 2]
    assert [message.value for message in messages] == [b"a", b"b", b"c"]
    assert [message.key for message in messages] == [b"k", None, None]
    assert [message.headers for message in messages] == [None, {"h": b"1"}, None]
    assert [message.timestamp for message in messages] == [7, 9, 2_000]
    assert (messages[2].due, messages[2].priority, messages[2].expires) == (5, 3, 99)


@pytest.mark.parametrize("codec", Codec)
def test_every_codec(log: StoredLog, codec: Codec) -> None:
    append(log, *[b"the same again and again"] * 100, codec=codec)
    assert values(log) == [b"the same again and again"] * 100


def test_reading_from_any_offset(log: StoredLog) -> None:
    for number in range(100):
        append(log, *[b"%d.%d" % (number, index) for index in range(3)])
    everything = values(log)
    for start in (0, 1, 2, 3, 149, 150, 298, 299):
        assert values(log, start) == everything[start:]
    assert values(log, 300) == []


@pytest.mark.parametrize("offset", [-1, 4, 1000])
def test_an_offset_that_is_not_there(log: StoredLog, offset: int) -> None:
    append(log, b"a", b"b", b"c")
    with pytest.raises(OffsetOutOfRange):
        log.byte_range(offset, 100)
    with pytest.raises(OffsetOutOfRange):
        list(log.batches(offset))


def test_a_byte_range_holds_whole_batches(log: StoredLog) -> None:
    for number in range(50):
        append(log, bytes([number]) * 50)
    offset = found = 0
    while (piece := log.byte_range(offset, 500)) is not None:
        position = 0
        while position < piece.length:
            batch = parse(piece.view, position)
            batch.verify()
            assert [message.value for message in batch.messages()] == [bytes([found]) * 50]
            position += batch.length
            found += 1
        assert piece.length <= 500
        assert (piece.first_offset, piece.next_offset) == (offset, found)
        offset = piece.next_offset
    assert found == 50


def test_a_batch_larger_than_the_range_asked_for_comes_whole(log: StoredLog) -> None:
    append(log, b"x" * 1000)
    piece = log.byte_range(0, 1)
    assert piece is not None
    assert piece.length > 1000


def test_finding_by_time_when_times_go_back_and_forth(log: StoredLog) -> None:
    times = [10, 30, 20, 50, 40, 60]
    for time in times:
        append(log, b"x" * 2000, timestamps=[time])
    expected = {0: 0, 10: 0, 11: 1, 30: 1, 31: 3, 50: 3, 51: 5, 60: 5, 61: 6}
    assert {time: log.find_time(time) for time in expected} == expected


def test_truncating_before(log: StoredLog) -> None:
    for number in range(10):
        append(log, bytes([number]) * 1500, bytes([number]))
    log.truncate_before(11)
    assert log.first_offset == 11
    assert values(log)[:2] == [bytes([5]), bytes([6]) * 1500]
    log.truncate_before(3)
    assert log.first_offset == 11
    with pytest.raises(OffsetOutOfRange):
        list(log.batches(10))
    with pytest.raises(OffsetOutOfRange):
        log.truncate_before(21)


def test_truncating_after_and_writing_again(log: StoredLog) -> None:
    for number in range(10):
        append(log, b"a%d" % number, b"b%d" % number)
    log.truncate_after(7)
    assert log.next_offset == 7
    assert values(log)[-1] == b"a3"
    assert append(log, b"new") == 7
    assert values(log, 6) == [b"a3", b"new"]
    log.truncate_after(0)
    assert values(log) == []
    assert append(log, b"again") == 0
    with pytest.raises(OffsetOutOfRange):
        log.truncate_after(2)


def drop_odd(batch: Batch) -> list[int]:
    return [index for index, message in enumerate(batch.messages()) if message.offset % 2 == 0]


def test_compaction_keeps_offsets(log: StoredLog) -> None:
    for number in range(600):
        append(log, b"%d" % number * 500, b"%d" % number * 500)
    before = {m.offset: m.value for batch in log.batches(0) for m in batch.messages()}
    log.compact(drop_odd)
    after = {m.offset: m.value for batch in log.batches(log.first_offset) for m in batch.messages()}
    assert after.items() <= before.items()
    assert {offset for offset in before if offset % 2 == 0} <= after.keys()
    assert log.next_offset == 1200
    assert log.compact(drop_odd) == 0
    assert append(log, b"on") == 1200


def test_retention_by_size_and_age(log: StoredLog) -> None:
    for number in range(400):
        append(log, bytes(10_000), now_us=number)
    log.retain(400, bytes_max=1_500_000)
    assert log.size_bytes <= 1_500_000
    first = log.first_offset
    assert 0 < first < 400
    log.retain(400, age_us=1)
    assert log.first_offset > first or log.size_bytes < 1_100_000
    assert log.next_offset == 400
    assert list(log.batches(log.first_offset))


def test_a_receipt_says_what_was_reached(log: StoredLog) -> None:
    batch = encode(Columns([b"x"]), 1)
    try:
        receipt = log.append(batch, 1, Durability.SYNCED)
    except DurabilityUnavailable:
        assert log.append(batch, 1, Durability.MEMORY).reached is Durability.MEMORY
        with pytest.raises(DurabilityUnavailable):
            log.wait_synced(1)
    else:
        receipt.wait(Durability.SYNCED, 10)
        assert receipt.reached is Durability.SYNCED
        assert log.synced_offset == 1


def test_a_closed_log_takes_nothing(driver: Driver) -> None:
    log = driver.open("orders")
    log.close()
    log.close()
    with pytest.raises(LogClosed):
        append(log, b"x")


def test_logs_have_names(driver: Driver) -> None:
    for name in ("b", "a", "with-dash_and.dot"):
        append(driver.open(name), b"x")
    assert driver.names() == ["a", "b", "with-dash_and.dot"]
    for log in map(driver.open, ["a"]):
        log.close()
    driver.delete("a")
    assert driver.names() == ["b", "with-dash_and.dot"]
    with pytest.raises(LogNotFound):
        driver.delete("a")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "x" * 201, "ü", "a b"])
def test_names_that_cannot_be(driver: Driver, name: str) -> None:
    with pytest.raises(InvalidArgument):
        driver.open(name)


def test_memory_drops_the_oldest() -> None:
    log = MemoryDriver(4 * MIB).open("x")
    for number in range(100):
        append(log, b"%03d" % number + bytes(100_000))
    assert 0 < log.first_offset < 100
    assert [value[:3] for value in values(log) if value] == [
        b"%03d" % number for number in range(log.first_offset, 100)
    ]
    assert log.size_bytes <= 4 * MIB


def test_what_left_memory_is_read_from_disk(tmp_path: Path, host: StorageRuntime) -> None:
    files = FileDriver(host, str(tmp_path), LogSettings(segment_bytes=MIB))
    log = MemoryDriver(4 * MIB, files).open("x")
    for number in range(200):
        append(log, b"%03d" % number + bytes(100_000))
    assert log.first_offset == 0
    assert [value[:3] for value in values(log) if value] == [b"%03d" % number for number in range(200)]
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.seg")) > 10 * MIB
    log.truncate_before(150)
    assert len(values(log)) == 50
    log.close()
    assert MemoryDriver(4 * MIB, files).open("x").first_offset == MemoryDriver(4 * MIB, files).open("x").next_offset


def test_a_disk_that_fills_up_while_memory_is_moved_there(tmp_path: Path) -> None:
    disk = FaultyDisk()
    host = StorageRuntime(disk, flusher=InlineWorker(), preparer=InlineWorker())
    files = FileDriver(host, str(tmp_path / "logs"), LogSettings(segment_bytes=MIB))
    log = MemoryDriver(2 * MIB, files).open("x")
    refused = 0
    for number in range(60):
        disk.capacity_bytes = disk.used_bytes + 350_000 if number == 30 else disk.capacity_bytes
        try:
            append(log, b"%03d" % number + bytes(100_000))
        except DiskFull:
            refused += 1
            disk.capacity_bytes = None
            append(log, b"%03d" % number + bytes(100_000))
    assert refused == 1
    assert [value[:3] for value in values(log) if value] == [b"%03d" % number for number in range(60)]
