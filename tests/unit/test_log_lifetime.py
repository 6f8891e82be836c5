"""What becomes of logs that are dropped, forked, waited for in vain, or given what they cannot take."""

import gc
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.known import ENVIRONMENT

import headrace
from headrace.embedded.cursor import Position
from headrace.errors import HeadraceError, InvalidArgument, LogClosed, LogFailed, MessageTooLarge
from headrace.storage.disk import LocalDisk
from headrace.storage.runtime import StorageRuntime
from headrace.testing import FaultyDisk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with headrace.Log(tmp_path / "log", segment_bytes=4096) as log:
        log.append_many([b"%d" % number * 100 for number in range(100)])
    return tmp_path / "log"


def held(path: Path) -> list[str]:
    """The files of a log that this process has open or mapped, once its other threads are through with them."""
    deadline = time.monotonic() + 30
    while (found := _held(path)) and any("headrace" in thread.name for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return found


def _held(path: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has just closed it
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    found += [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [file for file in found if file.startswith(f"{path}/")]


# Dropped logs.


def test_a_dropped_reader_lets_go_of_everything_and_says_nothing(path: Path) -> None:
    for read in (
        lambda log: log.read(3),
        lambda log: [*log],
        lambda log: next(log.messages()),
        lambda log: [*log.batches()],
        lambda log: [*log.tail(0, timeout=0)],
        lambda log: log.verify(),
        lambda log: log.cursors(),
    ):
        gc.disable()  # nothing may have to wait for the collector
        try:
            read(headrace.Log(path, readonly=True))
            assert held(path) == []
        finally:
            gc.enable()


def test_the_idiom_of_the_readme_reads_on_while_it_is_used(path: Path) -> None:
    with headrace.Log(path) as writer:
        seen = []
        for message in headrace.Log(path, readonly=True).tail(95, timeout=30):
            seen.append(message.offset)
            if message.offset == 99:
                writer.append(b"more")
                writer.flush(sync=False)
            if message.offset == 100:
                break
        assert seen == [95, 96, 97, 98, 99, 100]
    del message
    assert held(path) == []


def test_messages_of_a_dropped_reader_can_be_read_to_the_end(path: Path) -> None:
    messages, batches = headrace.Log(path, readonly=True).messages(), headrace.Log(path, readonly=True).batches()
    assert len([*messages]) == 100
    assert sum(batch.count for batch in batches) == 100


def test_a_dropped_writer_keeps_its_messages_gives_its_lock_back_and_warns(path: Path) -> None:
    for turn, sync_every in enumerate((None, 100.0)):  # with a short time another thread may just have it
        log: headrace.Log | None = headrace.Log(path, sync_every=sync_every)
        assert log is not None
        gone = weakref.ref(log)
        log.append(b"buffered")
        with pytest.warns(ResourceWarning, match="unclosed"):
            log = None
        assert gone() is None
        assert held(path) == []
        with headrace.Log(path) as again:
            assert again.next_offset == 101 + turn
            assert again.read(100 + turn).value == b"buffered"
            assert again.recovery.sound


def test_a_dropped_writer_whose_disk_fails_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk()
    log: headrace.Log | None = headrace.Log(tmp_path / "log", host=StorageRuntime(disk), sync_every=None)
    assert log is not None
    log.append(b"buffered")
    disk.fail_sync(100)
    with pytest.warns(ResourceWarning):
        log = None
    assert "messages lost" in caplog.text


def test_a_dropped_log_in_memory_just_goes() -> None:
    log: headrace.Log | None = headrace.Log(":memory:")
    assert log is not None
    gone = weakref.ref(log)
    log.append(b"x")
    log = None
    assert gone() is None


def test_a_dropped_cursor_is_free_for_others(path: Path) -> None:
    with headrace.Log(path) as log:
        cursor: headrace.Cursor | None = log.cursor("mine")
        assert cursor is not None
        cursor = None
        log.cursor("mine").close()


def test_logs_that_are_closed_leave_nothing_behind(path: Path) -> None:
    gc.disable()
    try:
        for _ in range(20):
            with headrace.Log(path, readonly=True) as reader, headrace.Log(path) as log:
                log.append(b"x")
                log.flush()
                assert reader.read(100).value == b"x"
                gone = weakref.ref(log), weakref.ref(reader)
            del log, reader
            assert [each() for each in gone] == [None, None]
            assert held(path) == []
    finally:
        gc.enable()


def test_who_waits_for_a_log_in_memory_leaves_nothing_behind() -> None:
    with headrace.Log(":memory:") as log:
        for _ in range(50):
            assert not log.wait(0, timeout=0.001)
        assert log._gates == []


def test_a_closed_reader_still_tells_where_it_stood(path: Path) -> None:
    log = headrace.Log(path, readonly=True)
    log.close()
    assert (log.first_offset, log.next_offset, len(log)) == (0, 100, 100)
    for use in (lambda: log.read(0), lambda: next(log.messages()), lambda: log.wait(0), log.info, log.consume):
        with pytest.raises(LogClosed):
            use()


def test_a_process_that_ends_closes_its_logs_and_warns_of_none(tmp_path: Path) -> None:
    script = "import sys, headrace; log = headrace.Log(sys.argv[1], sync_every=None); log.append(b'x')"
    command = [sys.executable, "-W", "error", "-c", script, str(tmp_path / "log")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert headrace.Log(tmp_path / "log", readonly=True).read(0).value == b"x"


# Time-outs.


def _hold(path: str, ready: Any, done: Any) -> None:
    position = Position(LocalDisk(), f"{path}/cursors", ".shared")
    assert position.lock(None)
    ready.set()
    done.wait(100)
    position.unlock()


def test_consume_waits_no_longer_for_another_process_than_it_may(path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_hold, args=(str(path), ready, done))
    process.start()
    try:
        assert ready.wait(100)
        with headrace.Log(path) as log:
            for timeout in (0.0, 0.3):
                assert log.consume(3, timeout=timeout) == []  # the other one holds on until this is over
            waiter = threading.Timer(0.2, done.set)
            waiter.start()
            assert [message.offset for message in log.consume(3, timeout=100)] == [0, 1, 2]
            waiter.join()
    finally:
        done.set()
        process.join(100)
    assert process.exitcode == 0


def test_waiting_for_a_log_that_another_thread_has_ends_in_time(path: Path) -> None:
    with headrace.Log(path) as log:
        busy, done = threading.Event(), threading.Event()

        def keep(_: headrace.Message) -> bool:
            busy.set()
            assert done.wait(100)
            return True

        def hold() -> None:
            with log._lock:
                busy.set()
                assert done.wait(100)

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            assert busy.wait(100)
            assert not log.wait(0, timeout=0.05)
            assert log.consume(timeout=0.05) == []
            assert [*log.tail(0, timeout=0.05)] == []
        finally:
            done.set()
            thread.join()
        assert log.wait(0, timeout=100)


# What a log cannot take.


def test_a_log_in_memory_refuses_what_it_could_never_hold_and_goes_on() -> None:
    with headrace.Log(":memory:", memory_bytes=2 << 20) as log:
        log.append(b"before")
        for append in (
            lambda: log.append(b"x" * (1 << 20)),
            lambda: log.append(b"x", key=b"k" * (1 << 20)),
            lambda: log.append(b"x", headers={f"{number}": b"" for number in range(200_000)}),
            lambda: log.append_many([b"x", b"x" * (1 << 20)]),
            lambda: log.append_many([b"x"] * 5000 + [b"x" * (1 << 20)]),
        ):
            with pytest.raises(MessageTooLarge):
                append()
            log.flush()
        assert log.append(b"x" * 1_000_000) == 1
        assert log.append_many([b"after"] * 3) == range(2, 5)
        assert [len(message.value or b"") for message in log] == [6, 1_000_000, 5, 5, 5]


def test_what_is_refused_weighs_what_it_takes() -> None:
    """Nothing that the buffer admits can be too large to be written."""
    dice = Random(1)
    for _ in range(30):
        with headrace.Log(":memory:", memory_bytes=2 << 20) as log:
            headers = {chr(0x10000 + number) * dice.randint(1, 3): b"" for number in range(dice.randint(0, 150_000))}
            try:
                log.append(b"x" * dice.randint(0, 1_100_000), key=b"k", headers=headers, timestamp=1)
            except MessageTooLarge:
                continue
            log.flush()


BAD: list[Any] = [
    -1,
    1 << 70,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    "text",
    None,
    [],
    object(),
    b"bytes",
    {},
    True,
    "a\0b",
    "\ud800",
    Decimal("NaN"),
    Decimal("sNaN"),
    1e308,
    1 << 2000,
]
"""What a caller may give by mistake."""


class Endless:
    """Time-outs after which a test would not end soon; a signalling NaN cannot be compared."""

    def __contains__(self, bad: Any) -> bool:
        return bad is None or (isinstance(bad, int | float) and bad >= 1)


ENDLESS = Endless()


def calls(log: headrace.Log, bad: Any) -> list[Callable[[], object]]:
    return [
        lambda: log.append(bad),
        lambda: log.append(b"x", key=bad),
        lambda: log.append(b"x", headers=bad),
        lambda: log.append(b"x", headers={"a": bad}),
        lambda: log.append(b"x", headers={bad: b"x"}),
        lambda: log.append(b"x", timestamp=bad),
        lambda: log.append_many(bad),
        lambda: log.append_many([bad]),
        lambda: log.read(bad),
        lambda: log[bad],
        lambda: log[bad:],
        lambda: log[:bad],
        lambda: log[0:1:bad],
        lambda: [*log.messages(bad)],
        lambda: [*log.messages(time=bad)],
        lambda: [*log.messages(until=bad)],
        lambda: [*log.batches(bad)],
        lambda: [*log.tail(bad, timeout=0)],
        lambda: log.find_time(bad),
        lambda: log.cursor(bad),
        lambda: log.consume(bad),
        lambda: log.truncate_before(bad),
        lambda: log.compact(bad),
        lambda: log.cursor("good").commit(bad),
        lambda: log.cursor("good").seek(bad),
        lambda: log.cursor("good").seek(time=bad),
        *([] if bad in ENDLESS else [lambda: log.wait(1 << 40, timeout=bad)]),
        *([] if bad in ENDLESS else [lambda: log.consume(timeout=bad)]),
    ]


def constructions(path: Path, bad: Any) -> list[Callable[[], object]]:
    def made(**settings: Any) -> None:
        headrace.Log(path, **settings).close()

    names = ("sync_every", "compression", "segment_bytes", "segment_seconds", "retain_seconds", "retain_bytes")
    given: list[Callable[[], object]] = [lambda name=name: made(**{name: bad}) for name in names]  # type: ignore[misc]
    given.append(lambda: headrace.Log(":memory:", memory_bytes=bad).close())
    if isinstance(bad, str | bytes) and "text" not in str(bad):
        given.append(lambda: headrace.Log(bad).close())  # type: ignore[arg-type]
    return given


@pytest.mark.parametrize("bad", BAD, ids=[str(number) for number in range(len(BAD))])
def test_whatever_a_log_is_given_its_errors_are_ours_or_a_type_error(path: Path, bad: Any) -> None:
    for make in constructions(path.with_name("other"), bad):
        _check(make)
    for log in (headrace.Log(path), headrace.Log(":memory:"), headrace.Log(path.with_name("new"))):
        with log:
            log.append(b"before")
            for call in calls(log, bad):
                _check(call)
            end = log.append(b"after")
            assert log.flush() == end + 1
            assert log.read(end).value == b"after"


def _check(call: Callable[[], object]) -> None:
    try:
        call()
    except (HeadraceError, TypeError):
        return


def test_a_failing_disk_raises_only_errors_of_ours(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = headrace.Log(
        tmp_path / "log", host=StorageRuntime(disk, files_max=1, views_max=1), segment_bytes=4096, sync_every=None
    )
    for number in range(50):
        log.append(b"%d" % number * 200)
        log.flush()
    for call in (lambda: log.read(3), lambda: [*log], log.info, log.verify, lambda: log.cursor("a"), log.consume):
        disk.fail_reads(3)
        _check(call)
        disk._read_failures.clear()
    assert log.read(3).value == b"3" * 200
    disk.fail_sync(1)
    log.append(b"x")
    with pytest.raises(LogFailed):
        log.flush()
    for call in (log.trim, log.flush, lambda: log.truncate_before(3), lambda: log.compact(lambda _: False)):
        with pytest.raises(LogFailed):
            call()
    with pytest.raises(LogFailed):
        log.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_a_place_one_may_not_write_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o500)
    with pytest.raises(HeadraceError):
        headrace.Log(tmp_path / "mine" / "log")


def test_places_that_cannot_be_logs_are_errors_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "log", "", "a\0b", "\ud800", "x" * 5000, b"bytes"):
        for readonly in (False, True):
            with pytest.raises(HeadraceError):
                headrace.Log(place, readonly=readonly)  # type: ignore[arg-type]
        with pytest.raises(HeadraceError):
            headrace.repair(place)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sync_every", "segment_seconds", "retain_seconds", "retain_bytes"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, Decimal("NaN"), Decimal("sNaN"), "text", 10**400, 1j, 0, -1])
def test_an_amount_that_cannot_be_is_an_invalid_argument(path: Path, name: str, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} must be a number above 0"):
        headrace.Log(path, **{name: bad})


@pytest.mark.parametrize("name", ["segment_seconds", "retain_seconds"])
def test_seconds_have_a_bound(path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} .* below 1e"):
        headrace.Log(path, **{name: 1e308})


def test_a_time_that_never_comes_stops_no_other_log(path: Path) -> None:
    with headrace.Log(path.with_name("never"), sync_every=1e300) as never, headrace.Log(path, sync_every=0.001) as log:
        never.append(b"x")
        log.append(b"y")
        with headrace.Log(path, readonly=True) as reader:
            assert reader.wait(100, timeout=100)
    with pytest.raises(InvalidArgument):
        headrace.Log(path, sync_every=math.inf)


def test_warnings_are_errors_here() -> None:
    """Else the tests above would see nothing."""
    with pytest.raises(ResourceWarning):
        warnings.warn("unclosed", ResourceWarning, stacklevel=1)
