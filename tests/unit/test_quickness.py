"""Syncs of little happen on the thread that asks, where that may wait and the disk is quick."""

import threading
from collections.abc import Iterator

import pytest

from headrace.model.batch import Columns, encode
from headrace.model.errors import HeadraceError, LogFailed
from headrace.storage.host import Host
from headrace.storage.log import FileLog
from headrace.testing import FaultyDisk


class Desk:
    """A log whose disk takes as long for a sync as it is told to."""

    def __init__(self, directory: str, disk: FaultyDisk | None = None) -> None:
        self.host = Host(disk)
        self.sync_s = 0.0
        self._now = 0.0
        self.host.quickness.wait_here(self._clock)
        self.log = FileLog(self.host, directory)
        self.append()  # the first one makes files, which others have to see to
        assert self.synced() != threading.get_ident()

    def _clock(self) -> float:
        """Every other look is at the end of a sync."""
        self._now += self.sync_s / 2
        return self._now

    def append(self, size: int = 10) -> None:
        self.log.append(encode(Columns([b"." * size]), 1), 1)

    def synced(self) -> int:
        """Have all synced; the thread that did it."""
        threads: list[int] = []
        told = threading.Event()

        def tell(error: HeadraceError | None) -> None:
            assert error is None
            threads.append(threading.get_ident())
            told.set()

        self.log.when_synced(self.log.next_offset, tell)
        assert told.wait(10)
        self.host.close()  # whatever else was asked of other threads is done
        assert self.log.synced_offset == self.log.next_offset
        return threads[0]


@pytest.fixture
def desk(tmp_path) -> Iterator[Desk]:
    desk = Desk(str(tmp_path / "log"))
    yield desk
    desk.log.close()
    desk.host.close()


def test_little_is_synced_where_it_is_asked_for(desk: Desk) -> None:
    desk.append()
    assert desk.synced() == threading.get_ident()


def test_much_is_not(desk: Desk) -> None:
    desk.append(100_000)
    assert desk.synced() != threading.get_ident()
    desk.append()
    assert desk.synced() == threading.get_ident()


def test_another_thread_need_not_wait(desk: Desk) -> None:
    desk.append()
    threads: list[int] = []
    asking = threading.Thread(target=lambda: threads.extend((threading.get_ident(), desk.synced())))
    asking.start()
    asking.join()
    assert threads[0] != threads[1]


def test_a_slow_disk_is_left_to_others_until_it_is_quick_again(desk: Desk) -> None:
    desk.sync_s = 0.1
    desk.append()
    assert desk.synced() == threading.get_ident()  # who could know
    for _ in range(5):
        desk.append()
        assert desk.synced() != threading.get_ident()
    desk.sync_s = 0.0001
    for _ in range(100):
        desk.append()
        desk.synced()
    desk.append()
    assert desk.synced() == threading.get_ident()


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


def test_who_waits_hears_of_a_failure(tmp_path) -> None:
    disk = FaultyDisk()
    desk = Desk(str(tmp_path / "log"), disk)
    desk.append()
    disk.fail_sync()
    told: list[HeadraceError | None] = []
    desk.log.when_synced(desk.log.next_offset, told.append)
    assert isinstance(told[0], LogFailed)
    with pytest.raises(LogFailed):
        desk.append()
    desk.host.close()
