"""Several processes and one log: one writes, the others read, take turns consuming, or want to write too."""

import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.faults.writer import Writers
from tests.known import append, quick_place
from tests.scenarios.processes import END, finish, start

import headrace
from headrace.model.batch import parse
from headrace.model.errors import CursorInUse, LogInUse, LogNotFound, OffsetOutOfRange
from headrace.storage.disk import LocalDisk, OpenFile
from headrace.storage.runtime import StorageRuntime
from headrace.storage.segment import DATA_AT

SEED = 7
PAGE_BYTES = 4096


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as path:
        yield path


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes to be ended with the test, whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


Started = list["subprocess.Popen[str]"]


def wait_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


# Reading what another process writes.


@pytest.mark.parametrize("changes", ["append", "truncate", "compact", "truncate and compact"])
def test_four_readers_see_everything_in_order(place: Path, started: Started, changes: str) -> None:
    count = 6000
    readers = [
        start("read", place / "log", SEED, opening) for opening in ("all", "all", 400, 50)
    ]  # before there is a log
    started += readers
    writer = start("write", place / "log", SEED, count, changes)
    started.append(writer)
    finish(writer)
    for reader in finish(*readers):
        if "truncate" not in changes:
            assert reader["messages"] + reader["holes"] > count
            assert not reader["truncations"]
        if changes == "append":
            assert not reader["holes"]


def test_readers_outlive_their_writers(place: Path, started: Started) -> None:
    """Each writer is killed and followed by another; readers stay, come back, and come new."""
    readers = [start("read", place / "log", SEED, opening) for opening in ("all", 300, 20)]
    started += readers
    writers, dice = Writers(place / "log", SEED, churning=True), Random(SEED)
    try:
        for number in range(40):
            writers.write_and_be_killed(number, dice.uniform(0, 0.06))
            if number == 20:
                readers.append(start("read", place / "log", SEED, "all"))
                started.append(readers[-1])
    finally:
        writers.dismiss()
    with headrace.Log(place / "log") as log:
        log.append(b"", key=END)
    finish(*readers)


def test_a_reader_goes_on_after_the_writer_closed_the_log_and_opened_it_again(place: Path, started: Started) -> None:
    reader = start("read", place / "log", SEED, "all")
    started.append(reader)
    for _ in range(20):
        with headrace.Log(place / "log", segment_bytes=8 << 10) as log:
            append(log, SEED, 100)
    with headrace.Log(place / "log") as log:
        log.append(b"", key=END)
    assert finish(reader)[0]["messages"] == 2001


def test_a_reader_survives_that_the_last_segment_is_cut_while_it_looks_for_its_end(
    place: Path, started: Started
) -> None:
    """The writer died and left room prepared behind the last message; the next one cuts it off: no SIGBUS."""
    path = place / "log"
    with headrace.Log(path) as log:
        log.append(b"x")
    (segment,) = path.glob("*.seg")
    overhead = parse(memoryview(segment.read_bytes()), DATA_AT).length
    for file in (segment, segment.with_suffix(".idx")):
        file.unlink()
    with headrace.Log(path) as log:
        # The batch ends 10 bytes before the end of a page: a header behind it would lie on two.
        log.append(bytes(PAGE_BYTES - 10 - DATA_AT - overhead - 1))
    end = segment.stat().st_size
    assert PAGE_BYTES - 20 < end < PAGE_BYTES
    segment.with_suffix(".idx").unlink()
    with open(segment, "ab") as file:
        file.write(bytes(10 * PAGE_BYTES))
    reader = start("be_surprised", path)
    started.append(reader)
    assert finish(reader)[0]["messages"] == 1


class Truncating(LocalDisk):
    """Before the reader looks whether a writer is at work, one truncates the log and leaves."""

    def lock(self, file: OpenFile, *, wait: bool = False, shared: bool = False) -> bool:
        with headrace.Log(os.path.dirname(file.path)) as log:
            log.truncate_before(log.next_offset)
        return super().lock(file, wait=wait, shared=shared)


def test_a_reader_opened_while_a_writer_truncates_and_leaves_sees_the_first_offset_that_is_left(place: Path) -> None:
    with headrace.Log(place / "log", segment_bytes=8 << 10) as log:
        append(log, SEED, 1000)
    with headrace.Log(place / "log", readonly=True, host=StorageRuntime(Truncating())) as reader:
        assert (reader.first_offset, reader.next_offset) == (1000, 1000)
        assert list(reader) == []
        with pytest.raises(OffsetOutOfRange):
            reader.read(500)


def test_who_opens_a_log_that_is_not_there_is_told_so(place: Path) -> None:
    with pytest.raises(LogNotFound):
        headrace.Log(place / "log", readonly=True)
    with pytest.raises(LogNotFound):
        headrace.Log(place / "log", create=False)
    assert not (place / "log").exists()


def test_a_reader_that_is_closed_ends_its_tail(place: Path) -> None:
    with headrace.Log(place / "log") as log:
        log.append(b"x")
        log.flush()
        for _ in range(20):
            reader = headrace.Log(place / "log", readonly=True)
            seen: list[object] = []
            thread = threading.Thread(target=lambda into, log: into.extend(log.tail(0)), args=(seen, reader))
            thread.start()
            while not seen:
                pass
            reader.close()
            thread.join(30)
            assert not thread.is_alive()
            assert len(seen) == 1


# Taking turns.


def test_four_consumers_take_each_message_once(place: Path, started: Started) -> None:
    count = 20_000
    consumers = [start("consume", place / "log", count) for _ in range(4)]
    started += consumers
    for consumer in consumers:
        wait_ready(consumer)
    with headrace.Log(place / "log", segment_bytes=64 << 10) as log:
        append(log, SEED, 100)
        log.flush()
        for consumer in consumers:  # all at once, to meet when the shared cursor is made
            assert consumer.stdin is not None
            consumer.stdin.write("go\n")
            consumer.stdin.flush()
        while log.next_offset < count:
            append(log, SEED, min(500, count - log.next_offset))
            log.flush(sync=False)
        taken = []
        for consumer in consumers:
            out, complaints = consumer.communicate(timeout=120)
            assert consumer.returncode == 0, complaints
            taken.append(json.loads(out.splitlines()[-1]))
    times = Counter(offset for offsets in taken for offset in offsets)
    assert {offset for offset, n in times.items() if n > 1} == set(), "taken twice"
    assert set(range(count)) - times.keys() == set(), "taken by nobody"
    assert all(offsets == sorted(offsets) for offsets in taken)
    assert sum(map(bool, taken)) > 1, "one consumer took everything: this tested nothing"


def test_two_processes_make_the_same_file_at_the_same_moment(place: Path) -> None:
    class Late(LocalDisk):
        """Another process always makes the file an instant earlier."""

        def open(self, path: str, *, write: bool = False, create: bool = False) -> OpenFile:
            if create and os.path.basename(path) in ("live", ".shared", "reader"):
                super().open(path, create=True)
            return super().open(path, write=write, create=create)

    host = StorageRuntime(Late())
    with headrace.Log(place / "log", host=host) as log:
        log.append(b"x")
        with log.cursor("reader") as cursor:
            cursor.commit(1)
        assert len(log.consume()) == 1
    host.close()


def test_a_cursor_has_one_holder(place: Path, started: Started) -> None:
    with headrace.Log(place / "log") as log:
        append(log, SEED, 10)
        log.flush()
        holder = start("hold_cursor", place / "log", "billing")
        started.append(holder)
        wait_ready(holder)
        with pytest.raises(CursorInUse, match="billing"):
            log.cursor("billing")
        with headrace.Log(place / "log", readonly=True) as reader, pytest.raises(CursorInUse):
            reader.cursor("billing")
        log.cursor("other").close()
        holder.kill()
        holder.wait()
        with log.cursor("billing") as cursor:
            with pytest.raises(CursorInUse):
                log.cursor("billing")
            cursor.commit(5)
        with log.cursor("billing") as cursor:
            assert cursor.committed == 5


# Wanting to write too.


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_a_second_writer_has_to_wait_until_the_first(place: Path, started: Started, end: str) -> None:
    holder = start("hold_log", place / "log")
    started.append(holder)
    wait_ready(holder)
    with pytest.raises(LogInUse, match=f"{place / 'log'} is open for writing elsewhere.*readonly"):
        headrace.Log(place / "log")
    with headrace.Log(place / "log", readonly=True) as reader:
        assert reader.next_offset == 0
    if end == "closes":
        holder.communicate("")
    else:
        holder.kill()
        holder.wait()
    with headrace.Log(place / "log") as log:
        append(log, SEED, 3)
        with pytest.raises(LogInUse):
            headrace.Log(place / "log")
        with pytest.raises(LogInUse):
            headrace.repair(place / "log")
    with headrace.Log(place / "log") as log:
        assert log.next_offset == 3


def test_a_writer_gets_its_turn_however_many_look_in(place: Path) -> None:
    """Who opens a log for reading looks for an instant whether somebody writes."""
    headrace.Log(place / "log").close()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            headrace.Log(place / "log", readonly=True).close()

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            headrace.Log(place / "log").close()
    finally:
        done.set()
        for thread in threads:
            thread.join()
