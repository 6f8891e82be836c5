"""Every kind of log is the same log: one suite over files, files on other disks, and memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.replica import check_replica, replicated

from headrace.model.batch import Batch, Columns, encode, parse
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import DiskFull, DurabilityUnavailable, HeadraceError, LogClosed, OffsetOutOfRange
from headrace.storage.disk import Disk
from headrace.storage.log import FileLog
from headrace.storage.memory import MemoryLog
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.storage.stored_log import StoredLog
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import FaultyDisk, InlineWorker, MemoryDisk

MIB = 1 << 20
Open = Callable[[str], StoredLog]


def runtime(disk: Disk | None = None) -> StorageRuntime:
    """A runtime with so few files and mappings that logs have to open theirs again and again."""
    return StorageRuntime(disk, files_max=4, views_max=2, indexes_max=1)


def files(directory: str, disk: Disk | None = None, segment_bytes: int = MIB) -> FileLog:
    return FileLog(runtime(disk), directory, LogSettings(segment_bytes=segment_bytes))


_IN_MEMORY = MemoryDisk()
_STORES: dict[str, MemoryStore] = {}
_REPLICATED: dict[str, ReplicatedDisk] = {}


def replica(directory: str) -> Disk:
    """A disk that replicates a directory, the same one each time."""
    if directory not in _REPLICATED:
        _STORES[directory] = MemoryStore()
        _REPLICATED[directory] = replicated(_IN_MEMORY, directory, _STORES[directory])
    return _REPLICATED[directory]


def check_replicas() -> None:
    """Compare the replicas that were used with their originals."""
    for directory, disk in _REPLICATED.items():
        check_replica(disk, _IN_MEMORY, directory, _STORES[directory])
        disk.writer.close()
    _REPLICATED.clear()


LOGS: dict[str, Open] = {
    "files": files,
    "files in small segments": lambda directory: files(directory, segment_bytes=50_000),
    "files on a faulty disk": lambda directory: files(directory, FaultyDisk()),
    "files on a disk in memory": lambda directory: files(directory, _IN_MEMORY),
    "files on a replicated disk": lambda directory: files(f"{directory}/log", replica(directory)),
    "memory": lambda _: MemoryLog(64 * MIB),
    "memory that spills": lambda directory: MemoryLog(2 * MIB, files(directory)),
}


@pytest.fixture(params=LOGS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredLog]:
    log = LOGS[request.param](str(tmp_path / "log"))
    yield log
    log.close()
    check_replicas()


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
    if log.durable:
        receipt = log.append(batch, 1, Durability.SYNCED)
        receipt.wait(Durability.SYNCED, 10)
        assert receipt.reached is log.durability_max >= Durability.SYNCED
        assert log.synced_offset == 1
    else:
        with pytest.raises(DurabilityUnavailable):
            log.append(batch, 1, Durability.SYNCED)
        assert log.next_offset == 0
        receipt = log.append(batch, 1, Durability.MEMORY)
        assert receipt.reached is Durability.MEMORY
        with pytest.raises(DurabilityUnavailable):
            receipt.wait(Durability.SYNCED, 10)


def test_an_append_that_asks_for_nothing_reaches_what_the_log_promises(log: StoredLog) -> None:
    receipt = log.append(encode(Columns([b"x"]), 1), 1)
    assert receipt.reached >= log.append_durability
    receipt.wait(log.append_durability, 0)
    assert log.awaits_sync(log.next_offset) <= log.durable


def test_whoever_waits_for_a_sync_is_called_back_when_no_sync_is_left_to_do(log: StoredLog) -> None:
    append(log, b"a", b"b")
    reported: list[tuple[HeadraceError | None, bool, Durability]] = []
    log.when_synced(2, lambda error: reported.append((error, log.awaits_sync(2), log.reached(2))))
    log.wait_synced(2, 10)
    append(log, b"c")
    log.request_sync()
    log.wait_synced(3, 10)
    assert reported == [(None, False, log.durability_max)]
    assert not log.awaits_sync(log.next_offset)
    assert not log.is_small_backlog
    assert log.synced_offset == (3 if log.durable else 0)


def test_retention_says_what_it_would_remove(log: StoredLog) -> None:
    for number in range(400):
        append(log, bytes(10_000), now_us=number)
    offset = log.retention_offset(400, bytes_max=1_500_000)
    assert log.first_offset == 0
    assert log.retain(400, bytes_max=1_500_000) == log.first_offset == offset > 0
    assert log.retention_offset(400) == 0


def test_settings_change_while_the_log_is_open(log: StoredLog) -> None:
    for number in range(30):
        append(log, b"%02d" % number + bytes(100_000))
    log.alter(LogSettings(segment_bytes=200_000, memory_bytes=2 * MIB), 1_000)
    for number in range(30, 60):
        append(log, b"%02d" % number + bytes(100_000))
    assert len(log.segments) > 3 if log.durable else log.size_bytes <= 7 * MIB
    assert [value[:2] for value in values(log) if value] == [b"%02d" % number for number in range(log.first_offset, 60)]


def test_the_owner_is_kept_with_the_log(log: StoredLog) -> None:
    assert log.owner == b""
    log.set_owner(b"somebody")
    assert log.owner == b"somebody"


def test_a_new_log_tells_of_itself(log: StoredLog) -> None:
    assert log.location
    assert log.writer_at_work
    assert (log.survived_offset, log.findings.lost, log.size_bytes) == (0, [], 0)
    append(log, b"x" * 1000)
    assert log.size_bytes > 1000
    assert [segment.base_offset for segment in log.segments] == [0]
    assert log.batch_bytes_max >= MIB
    log.refresh()
    assert log.verify().lost == []


def test_a_closed_log_takes_nothing(log: StoredLog) -> None:
    log.close()
    log.close()
    with pytest.raises(LogClosed):
        append(log, b"x")


def test_durable_logs_are_there_when_they_are_opened_again(tmp_path: Path) -> None:
    for name, opened in LOGS.items():
        log = opened(str(tmp_path / name))
        append(log, b"a", b"b")
        log.close()
        again = opened(str(tmp_path / name))
        assert again.survived_offset == (2 if log.durable else 0)
        assert values(again) == ([b"a", b"b"] if log.durable else [])
        again.close()
    check_replicas()


def test_memory_drops_the_oldest() -> None:
    log = MemoryLog(4 * MIB)
    for number in range(100):
        append(log, b"%03d" % number + bytes(100_000))
    assert 0 < log.first_offset < 100
    assert [value[:3] for value in values(log) if value] == [
        b"%03d" % number for number in range(log.first_offset, 100)
    ]
    assert log.size_bytes <= 4 * MIB


def test_what_left_memory_is_read_from_disk(tmp_path: Path) -> None:
    log = MemoryLog(4 * MIB, files(str(tmp_path / "log")))
    for number in range(200):
        append(log, b"%03d" % number + bytes(100_000))
    assert log.first_offset == 0
    assert [value[:3] for value in values(log) if value] == [b"%03d" % number for number in range(200)]
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.seg")) > 10 * MIB
    log.truncate_before(150)
    assert len(values(log)) == 50
    log.close()
    again = MemoryLog(4 * MIB, files(str(tmp_path / "log")))
    assert again.first_offset == again.next_offset >= 150
    again.close()


def test_a_disk_that_fills_up_while_memory_is_moved_there(tmp_path: Path) -> None:
    disk = FaultyDisk()
    host = StorageRuntime(disk, flusher=InlineWorker(), preparer=InlineWorker())
    log = MemoryLog(2 * MIB, FileLog(host, str(tmp_path / "log"), LogSettings(segment_bytes=MIB)))
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
