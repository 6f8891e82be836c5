"""A file system in memory that is really full: a hole that is touched through a mapping would kill the process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from tests.known import ENVIRONMENT

import headrace
from headrace.errors import DiskFull, Timeout

WRITER = """
import os, sys
import headrace
log = headrace.Log(sys.argv[1], sync_every=None)
try:
    while True:
        log.append(os.urandom(30_000))
        log.flush()
except headrace.errors.DiskFull:
    print(log.recovery.sound, flush=True)
    os._exit(9)
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path, name: str = "filler") -> None:
    """Take all the room that is left."""
    with (place / name).open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@contextmanager
def broker(
    data: Path, log: "IO[bytes] | int" = subprocess.DEVNULL
) -> "Iterator[tuple[subprocess.Popen[bytes], headrace.Bus]]":
    command = [sys.executable, "-m", "headrace", "serve", "--data", str(data), "--host", "", "--json"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline() or "{}")
            assert ready, f"the broker ended with {process.wait(30)}"
            bus = headrace.connect(f"headrace+unix://{ready['unix_socket']}", timeout=1.0)
            yield process, bus
            with suppress(Timeout):  # a batch whose outcome is unknown is sent again until it is known
                bus.close()
        finally:
            process.kill()


FULL = (DiskFull, Timeout)
"""The client tries again until its time is over: then the outcome of the last attempt may be unknown."""


def publish_until_full(bus: headrace.Bus) -> int:
    published = 0
    with suppress(*FULL):
        while True:
            bus.publish("orders", os.urandom(30_000))
            published += 1
    return published


def exhaust_journal(bus: headrace.Bus) -> None:
    """Take the room that was prepared for the journal."""
    with suppress(*FULL):
        for _ in range(100_000):
            bus.commit("filler", {("orders", 0): 0})
        pytest.fail("the disk is full and nobody noticed")


def offsets(bus: headrace.Bus) -> list[int]:
    with bus.subscribe("orders", start="earliest", timeout=1) as orders:
        return [message.offset for message in orders]


def test_a_broker_that_was_killed_when_the_disk_was_full(small: Path) -> None:
    """It starts again, serves all that was acknowledged, and takes more as soon as there is room."""
    (small / "spare").write_bytes(bytes(1 << 20))
    with broker(small / "data") as (process, bus):
        published = publish_until_full(bus)
        fill(small)
        process.kill()
    for _ in range(3):
        with broker(small / "data") as (process, bus):
            fill(small)
            assert offsets(bus)[:published] == [*range(published)]
            with pytest.raises(FULL):
                bus.publish("orders", os.urandom(300_000))
            process.kill()
    with broker(small / "data") as (process, bus):
        (small / "spare").unlink()
        receipt = bus.publish("orders", os.urandom(300_000))
        assert offsets(bus)[-1] == receipt.offset
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0


def test_a_log_whose_writer_was_killed_when_the_disk_was_full(small: Path) -> None:
    """Whoever reads it, and whoever opens it to write, sees all of it and lives."""
    path = str(small / "log")
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", WRITER, path], env=ENVIRONMENT, check=False, capture_output=True)
        assert ended.returncode == 9, ended.stderr.decode()
        fill(small)
        with headrace.Log(path, readonly=True) as reader:
            read = [message.offset for message in reader]
            assert read == [*range(reader.next_offset)]
            reader.verify()
        with headrace.Log(path) as log:
            assert [message.offset for message in log] == read


def test_a_topic_is_trimmed_when_the_disk_is_full(small: Path, tmp_path: Path) -> None:
    """A part of it, then all of it; publishing goes on, and the log has told of the full disk once."""
    told = tmp_path / "log"
    with told.open("wb") as log, broker(small / "data", log) as (process, bus):
        bus.create_topic("orders", segment_bytes=1 << 20)
        deadline = time.monotonic() + 100
        while not (small / "data/broker/ballast").exists():
            assert time.monotonic() < deadline, "there is no ballast"
            time.sleep(0.05)
        for _ in range(2):
            published = publish_until_full(bus)
            fill(small)
            exhaust_journal(bus)
            (info,) = bus.describe_topic("orders").partitions
            end = info.next_offset
            for bound in (end - 10, end):
                assert bus.trim_topic("orders", {0: bound}, unread=True) == {0: bound}
            (small / "filler").unlink()
            deadline = time.monotonic() + 100
            while True:
                with suppress(*FULL):
                    assert bus.publish("orders", b"small").offset >= end
                    break
                assert time.monotonic() < deadline, "nothing can be published though there is room"
            assert published
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
    text = told.read_text()
    assert "Traceback" not in text
    assert text.count("disk full;") <= 2, text


def free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize("cascade", [False, True])
def test_what_is_deleted_on_a_full_disk_is_free_at_once(small: Path, cascade: bool) -> None:
    """A topic, or its tenant with all that it has; nobody keeps the file open, nor saves its index."""
    told = small.parent / "log"
    with told.open("wb") as log, broker(small / "data", log) as (_, bus):
        topic = "acme/orders" if cascade else "orders"
        bus.create_topic(topic, durability="written")
        for size in (300_000, 3_000, 30):
            with suppress(*FULL):
                while True:
                    bus.publish(topic, os.urandom(size))
        assert free_bytes(small) < 1 << 20
        bus.tenants.delete("acme", cascade=True) if cascade else bus.delete_topic("orders")
        deadline = time.monotonic() + 20
        while free_bytes(small) < 4 << 20:
            assert time.monotonic() < deadline, "the room of the topic is not free"
            time.sleep(0.05)
    assert "index not saved" not in told.read_text()
