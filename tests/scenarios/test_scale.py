"""Many logs, and large ones: what a process needs for them stays bounded."""

import gc
import os
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.known import quick_place

import headrace
from headrace.model.batch import Columns, encode
from headrace.storage.follower import Follower
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings

MIB = 1 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as path:
        yield path


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def mappings_of(path: Path) -> int:
    with open("/proc/self/maps") as file:
        return sum(str(path) in line for line in file)


def test_ten_thousand_logs_need_no_more_files_than_a_few(place: Path) -> None:
    count = 10_000
    host = StorageRuntime()
    gc.collect()
    resident, before = resident_bytes(), open_files()  # of other tests
    logs = [FileLog(host, str(place / f"{number}")) for number in range(count)]
    most = 0
    for turn in range(2):
        for number, log in enumerate(logs):
            log.append(encode(Columns([b"%d/%d" % (number, turn)]), 0), 0)
            if number % 100 == 0:
                most = max(most, open_files() - before)
    for log in logs:
        log.wait_synced(2)
    most = max(most, open_files() - before)
    grown = resident_bytes() - resident
    print(f"{most} open files, {grown / MIB:.0f} MiB for {count} open logs")
    assert most < 600
    assert grown < 100 * MIB
    for log in logs:
        log.close()

    logs = [FileLog(host, str(place / f"{number}")) for number in range(count)]
    for number in Random(1).sample(range(count), count):
        values = [batch.columns().values for batch in logs[number].batches(0)]
        assert values == [[b"%d/%d" % (number, turn)] for turn in range(2)]
        if number % 100 == 0:
            most = max(most, open_files() - before)
    assert most < 600
    for log in logs:
        log.close()
    host.close()


def test_two_thousand_embedded_logs_in_one_process(place: Path) -> None:
    count = 2_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * count:
        pytest.skip(f"this system allows only {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * count), hard))
    gc.collect()
    resident, files = resident_bytes(), open_files()
    logs = [headrace.Log(place / f"{number}") for number in range(count)]
    try:
        for turn in range(3):
            for number, log in enumerate(logs):
                assert log.append(b"%d/%d" % (number, turn)) == turn
        for log in logs:
            log.flush()
        files, grown = open_files() - files, resident_bytes() - resident
        print(f"{files} more open files, {grown / MIB:.0f} MiB for {count} open logs")
        assert files < 2 * count + 600  # each keeps its lock
        assert grown < 100 * MIB
        for number, log in enumerate(logs):
            assert [message.value for message in log] == [b"%d/%d" % (number, turn) for turn in range(3)]
    finally:
        for log in logs:
            log.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with headrace.Log(place / "1999", readonly=True) as log:
        assert len(log) == 3


def test_a_log_much_larger_than_what_may_be_mapped(place: Path) -> None:
    """Hundred segments, two of them mapped at a time, read at random."""
    count, segment_bytes = 12_800, 256 << 10
    host = StorageRuntime(views_max=2, files_max=8, indexes_max=4)
    log = FileLog(host, str(place / "log"), LogSettings(segment_bytes=segment_bytes))
    filler = Random(1).randbytes(8000)
    for first in range(0, count, 4):
        values = [b"%d:" % offset + filler[:2000] for offset in range(first, first + 4)]
        log.append(encode(Columns(values), 0), 0)
    log.wait_synced(count)
    assert len(log.segments) > 90
    gc.collect()
    resident, files, dice, most_mapped, most_resident = resident_bytes(), open_files(), Random(2), 0, 0
    for turn in range(4000):
        offset = dice.randrange(count)
        (batch,) = log.batches(offset, until=offset + 1)
        assert batch.columns().values[offset % 4] == b"%d:" % offset + filler[:2000]
        if turn % 50 == 0:
            most_mapped = max(most_mapped, mappings_of(place))
            most_resident = max(most_resident, resident_bytes())
    print(f"{most_mapped} mappings, {(most_resident - resident) / MIB:.1f} MiB")
    assert most_mapped <= 4
    assert most_resident - resident < 16 * MIB
    assert open_files() - files < 20
    held = [batch for offset in range(0, count, 400) for batch in log.batches(offset, until=offset + 1)]
    assert [batch.base_offset for batch in held] == [*range(0, count, 400)]
    assert all(batch.columns().values[0] == b"%d:" % batch.base_offset + filler[:2000] for batch in held)
    del held, batch
    gc.collect()
    assert mappings_of(place) <= 4
    log.close()
    assert mappings_of(place) <= 1
    host.close()


def test_an_open_log_of_two_thousand_segments_takes_little_memory(place: Path) -> None:
    host = StorageRuntime()
    path, settings = str(place / "log"), LogSettings(segment_bytes=4096)
    with headrace.Log(place / "log", segment_bytes=4096, host=host, sync_every=None) as log:
        while log.info()["segments"] < 2000:
            for _ in range(100):
                log.append(bytes(3900))
                log.flush(sync=False)
        end = log.next_offset
    for kind in ("writer", "reader"):
        tracemalloc.start()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        opened = FileLog(host, path, settings) if kind == "writer" else Follower(host, path)
        for offset in Random(1).sample(range(end), 300):
            (batch,) = opened.batches(offset, until=offset + 1)
            assert batch.base_offset == offset
        del batch
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"{kind}: {(after - before) / MIB:.2f} MiB")
        assert after - before < 2 * MIB
        opened.close()
    host.close()
