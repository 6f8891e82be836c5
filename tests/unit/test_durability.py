"""Group commit, receipts, and what happens when the disk does not keep its word."""

import threading
from pathlib import Path

import pytest

from headrace.model.batch import Batch, Columns, encode
from headrace.model.durability import Durability
from headrace.model.errors import HeadraceError, LogFailed
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk


def batch(value: bytes = b"x") -> Batch:
    return encode(Columns([value]), 1)


def test_many_waiting_appends_share_a_sync(tmp_path: Path) -> None:
    disk = FaultyDisk()
    host = StorageRuntime(disk)
    logs = [FileLog(host, str(tmp_path / f"log{number}")) for number in range(3)]
    receipts = [log.append(batch(), 1, Durability.SYNCED) for _ in range(200) for log in logs]
    for receipt in receipts:
        receipt.wait(Durability.SYNCED)
    assert all(receipt.reached is Durability.SYNCED for receipt in receipts)
    assert disk.syncs < 600
    for log in logs:
        log.close()
    host.close()


def test_an_append_returns_before_it_is_synced(tmp_path: Path) -> None:
    host = StorageRuntime()
    log = FileLog(host, str(tmp_path / "log"))
    receipt = log.append(batch(), 1, Durability.WRITTEN)
    assert (receipt.base_offset, receipt.next_offset) == (0, 1)
    assert receipt.reached >= Durability.WRITTEN  # the disk may have been quick
    receipt.wait(Durability.WRITTEN)
    receipt.wait(Durability.SYNCED)
    assert log.synced_offset == 1
    log.close()


def test_callbacks_come_when_their_messages_are_synced(tmp_path: Path) -> None:
    host = StorageRuntime()
    log = FileLog(host, str(tmp_path / "log"))
    told: list[tuple[int, HeadraceError | None]] = []
    everything = threading.Event()

    def tell(offset: int, error: HeadraceError | None) -> None:
        assert log.synced_offset >= offset
        told.append((offset, error))
        if offset == 50:
            everything.set()

    for number in range(1, 51):
        log.append(batch(), 1)
        log.when_synced(number, lambda error, number=number: tell(number, error))
    assert everything.wait(10)
    assert told == [(number, None) for number in range(1, 51)]
    log.close()


def test_after_a_failed_sync_the_log_only_reads(tmp_path: Path) -> None:
    disk = FaultyDisk()
    host = StorageRuntime(disk)
    log = FileLog(host, str(tmp_path / "log"), LogSettings(ahead_bytes_max=0))
    log.append(batch(b"safe"), 1, Durability.SYNCED).wait(Durability.SYNCED)
    errors: list[HeadraceError | None] = []
    disk.fail_sync(1)
    receipt = log.append(batch(b"unsafe"), 1)
    log.when_synced(2, errors.append)
    with pytest.raises(LogFailed, match="read-only until it is opened again"):
        receipt.wait(Durability.SYNCED)
    assert receipt.reached is Durability.WRITTEN
    syncs = disk.syncs
    with pytest.raises(LogFailed):
        log.append(batch(), 1)
    with pytest.raises(LogFailed):
        log.truncate_before(1)
    assert [message.value for part in log.batches(0) for message in part.messages()] == [b"safe", b"unsafe"]
    with pytest.raises(LogFailed):
        log.close()
    host.close()
    assert disk.syncs == syncs, "a failed sync must not be tried again"
    assert isinstance(errors[0], LogFailed)
    again = FileLog(StorageRuntime(), str(tmp_path / "log"))
    again.append(batch(b"on"), 1, Durability.SYNCED).wait(Durability.SYNCED)
    again.close()


def test_small_syncs_have_room_prepared_for_them(tmp_path: Path) -> None:
    host = StorageRuntime()
    log = FileLog(host, str(tmp_path / "log"), LogSettings(ahead_bytes_max=256 << 10))
    for _ in range(20):
        log.append(batch(), 1, Durability.SYNCED).wait(Durability.SYNCED)
    host.flusher.stop()
    host.preparer.stop()
    (segment,) = (tmp_path / "log").glob("*.seg")
    assert segment.stat().st_size > log.size_bytes + 30_000
    log.close()
    assert segment.stat().st_size == log.size_bytes
