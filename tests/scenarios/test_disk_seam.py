"""The whole broker on a disk that is not this machine's: it is given one, and touches no other."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest

import headrace
from headrace.server import DirectoryLock, EmbeddedServer
from headrace.storage.runtime import StorageRuntime
from headrace.testing import MemoryDisk
from headrace.testing.workbench import Workbench

DATA = "/there-is-no-such-directory/data"
_writing: list[str] | None = None
"""Paths that were opened to be written, made, renamed or removed while somebody looks."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _writing is None:
        return
    if event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        _writing.append(os.fsdecode(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
        _writing.append(f"{event} {arguments[0]}")


sys.addaudithook(_watch)


@contextmanager
def files_changed() -> Iterator[list[str]]:
    """The files of this machine that the block changes; the compiler's own do not count."""
    global _writing
    _writing = found = []
    try:
        yield found
    finally:
        _writing = None
        found[:] = [path for path in found if "__pycache__" not in path]


def test_a_broker_publishes_leases_and_restarts_on_a_disk_in_memory() -> None:
    disk = MemoryDisk()
    values = [b"job %d" % number for number in range(2000)]
    with files_changed() as changed:
        with headrace.open(DATA, disk=disk) as bus:
            bus.create_topic("jobs", partitions=2, durability="synced")
            bus.publish_many("orders", values)
            for value in values[:10]:
                bus.publish("jobs", value)
            with bus.lease("jobs", max=4, wait=10) as jobs:
                done = {job.value for job in jobs}
            with bus.subscribe("orders", group="billing", timeout=10) as orders:
                read = [message.value for message in islice(orders, 700)]
            taken = bus.queue("jobs").lease(2, wait=10)
        assert disk.names(f"{DATA}/topics") != []

        with headrace.open(DATA, disk=disk) as bus:
            queue = bus.queue("jobs")
            assert queue.release(taken, delay=0) == []  # their leases have survived the restart
            left: list[bytes] = []
            while len(left) < 6:
                with bus.lease("jobs", max=10, wait=10) as jobs:
                    left += [job.value for job in jobs]
            with bus.subscribe("orders", group="billing", timeout=10) as orders:
                read += [message.value for message in islice(orders, 1300)]
    assert sorted([*done, *left]) == values[:10]
    assert read == values
    assert changed == []
    assert not os.path.exists(os.path.dirname(DATA))


def test_one_server_at_a_time_works_on_a_disk_in_memory() -> None:
    disk = MemoryDisk()
    server = EmbeddedServer(DATA, disk=disk)
    assert DirectoryLock.is_held(disk, DATA)
    with pytest.raises(headrace.errors.LogInUse):
        EmbeddedServer(DATA, disk=disk)
    server.close()
    EmbeddedServer(DATA, disk=disk).close()


def test_a_killed_broker_recovers_from_a_disk_in_memory() -> None:
    disk = MemoryDisk()
    with files_changed() as changed:
        for start in range(5):
            bench = Workbench(DATA, disk=disk)
            assert bench.values("orders") == [b"%d" % number for number in range(start * 3)] if start else True
            bench.publish("orders", [b"%d" % (start * 3 + number) for number in range(3)])
    assert changed == []


def test_the_embedded_log_works_on_a_disk_in_memory() -> None:
    host = StorageRuntime(MemoryDisk())
    with files_changed() as changed:
        with headrace.Log(f"{DATA}/log", host=host) as log, headrace.Log(log.path, readonly=True, host=host) as reader:
            log.append_many([b"%d" % number for number in range(1000)])
            log.flush()
            with log.cursor("mine") as cursor:
                cursor.seek(500)
                cursor.commit()
            tail = threading.Thread(target=lambda: seen.append(next(reader.tail(1000, timeout=30)).value))
            seen: list[bytes | None] = []
            tail.start()
            log.append(b"last")
            log.flush()
            tail.join(30)
        with headrace.Log(f"{DATA}/log", host=host) as log:
            assert [message.value for message in log][-2:] == [b"999", b"last"]
            assert log.cursors() == {"mine": 500}
            assert log.verify().sound
    host.close()
    assert seen == [b"last"]
    assert changed == []
