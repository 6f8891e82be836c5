"""Syncs of little happen on the thread that asks, where that may wait and the disk is quick."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.model.batch import Columns, encode
from headrace.model.errors import HeadraceError, LogFailed
from headrace.storage.disk import OpenFile
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime
from headrace.testing import FaultyDisk


class TimedDisk(FaultyDisk):
    """A disk that takes as long for a sync as it is told to, by a clock of its own."""

    now = 0.0
    sync_s = 0.0001

    def sync(self, file: OpenFile) -> None:
        self.now += self.sync_s
        super().sync(file)


class Desk:
    """A log that has been written to, and a thread that may wait for it: this one."""

    def __init__(self, directory: Path) -> None:
        self.disk = TimedDisk()
        self.host = StorageRuntime(self.disk)
        self.host.inline_sync.allow_this_thread(lambda: self.disk.now)
        self._directory = directory
        self.log = self.opened("log")

    def opened(self, name: str) -> FileLog:
        """A log whose files are made: others have to see to that."""
        log = FileLog(self.host, str(self._directory / name))
        self.append(log=log)
        self.synced_here(log)
        return log

    def append(self, size: int = 10, log: FileLog | None = None, later_s: float = 1.0) -> None:
        self.disk.now += later_s
        (log or self.log).append(encode(Columns([b"." * size]), 1), 1)

    def synced_here(self, log: FileLog | None = None) -> bool:
        """Have all synced; whether it was done on this thread."""
        log = log or self.log
        threads: list[int] = []
        told = threading.Event()

        def tell(error: HeadraceError | None) -> None:
            assert error is None
            threads.append(threading.get_ident())
            told.set()

        log.when_synced(log.next_offset, tell)
        assert told.wait(10)
        self.host.close()  # whatever else was asked of other threads is done
        assert log.synced_offset == log.next_offset
        return threads == [threading.get_ident()]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.host.close()


def test_little_is_synced_where_it_is_asked_for(desk: Desk) -> None:
    for _ in range(3):
        desk.append()
        assert desk.synced_here()


def test_much_is_not(desk: Desk) -> None:
    desk.append(100_000)
    assert not desk.synced_here()
    desk.append()
    assert desk.synced_here()


def test_another_thread_need_not_wait(desk: Desk) -> None:
    desk.append()
    here: list[bool] = []
    asking = threading.Thread(target=lambda: here.append(desk.synced_here()))
    asking.start()
    asking.join()
    assert here == [False]


def test_a_slow_disk_is_left_to_others_until_it_is_quick_again(desk: Desk) -> None:
    desk.disk.sync_s = 0.1
    desk.append()
    assert desk.synced_here()  # who could know
    for _ in range(5):
        desk.append()
        assert not desk.synced_here()
    desk.disk.sync_s = 0.0001
    for _ in range(60):
        desk.append()
        desk.synced_here()
    desk.append()
    assert desk.synced_here()


def test_who_has_just_waited_does_not_wait_again_at_once(desk: Desk) -> None:
    other = desk.opened("other")
    desk.append()
    desk.append(log=other)
    assert desk.synced_here()
    assert not desk.synced_here(other)
    desk.append(later_s=desk.disk.sync_s)
    assert desk.synced_here()


def test_nobody_waits_for_work_on_the_files(desk: Desk) -> None:
    desk.append()
    busy, done = threading.Event(), threading.Event()

    def work() -> None:
        with desk.log._structure:
            busy.set()
            done.wait(10)

    worker = threading.Thread(target=work)
    worker.start()
    busy.wait(10)
    synced: list[HeadraceError | None] = []
    desk.log.when_synced(desk.log.next_offset, synced.append)
    assert synced == []
    done.set()
    worker.join()
    desk.log.wait_synced(desk.log.next_offset)
    assert synced == [None]


def test_who_waits_hears_of_a_failure(desk: Desk) -> None:
    desk.append()
    desk.disk.fail_sync()
    told: list[HeadraceError | None] = []
    desk.log.when_synced(desk.log.next_offset, told.append)
    assert isinstance(told[0], LogFailed)
    with pytest.raises(LogFailed):
        desk.append()
