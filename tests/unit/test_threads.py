"""Threads, interrupts and forks: whatever runs beside it, an append is done once, and its offset is true."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from tests.known import ENVIRONMENT, quick_place

import headrace
from headrace.embedded.ticker import Ticker
from headrace.model.errors import HeadraceError, LogClosed, MessageGone, OffsetOutOfRange
from headrace.storage.worker import Worker

INTERRUPTED_S = 5


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as path:
        yield path


@pytest.fixture
def _nervous() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Threads:
    """Threads whose errors are the test's."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, work: Callable[..., object], *arguments: object) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 it is raised again below
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def join(self, timeout_s: float = 100) -> None:
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a thread hangs"
        self._threads.clear()
        for error in self._errors:
            raise error


class Appender:
    """One thread's appends of every kind, and the offsets that it was given for them."""

    def __init__(self, name: int, log: headrace.Log, count: int) -> None:
        self._name = name
        self._log = log
        self._count = count
        self._dice = Random(name)
        self.given: list[tuple[int, bytes]] = []

    def run(self) -> None:
        while len(self.given) < self._count:
            kind = self._dice.random()
            if kind < 0.9:
                for _ in range(50):
                    value = self._value(len(self.given))
                    self.given.append((self._log.append(value), value))
            elif kind < 0.95:
                value = self._value(len(self.given))
                self.given.append((self._log.append(value, key=b"k", headers={"a": "b"}), value))
            else:
                some = range(len(self.given), len(self.given) + self._dice.choice((2, 100, 3000)))
                values = [self._value(number) for number in some]
                self.given += zip(self._log.append_many(values), values, strict=True)

    def _value(self, number: int) -> bytes:
        return b"%d/%d" % (self._name, number) + b"." * self._dice.choice((0, 0, 0, 300))


def check_given(log: headrace.Log, appenders: list[Appender]) -> None:
    """Every offset that was given is true, nothing is lost or doubled, and each thread's messages are in order."""
    values = {message.offset: message.value for message in log}
    assert [*values] == [*range(log.next_offset)]
    given = [pair for appender in appenders for pair in appender.given]
    untrue = [(offset, value, values.get(offset)) for offset, value in given if values.get(offset) != value]
    assert not untrue, f"{len(untrue)} of {len(given)} offsets are not true, such as {untrue[0]}"
    assert len(given) == len(values), "there are messages that nobody appended, or twice"
    for appender in appenders:
        offsets = [offset for offset, _ in appender.given]
        assert offsets == sorted(offsets)


@pytest.mark.usefixtures("_nervous")
@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_many_threads_append_at_once(place: Path, compression: str) -> None:
    log = headrace.Log(place / "log", segment_bytes=256 << 10, sync_every=0.001, compression=compression)
    appenders = [Appender(number, log, 20_000) for number in range(6)]
    done, others, threads = threading.Event(), Threads(), Threads()

    def look_on() -> None:
        offset = 0
        while not done.is_set():
            for message in log.messages(offset):
                assert message.offset == offset
                offset += 1
            assert log.next_offset >= offset

    def flush() -> None:
        while not done.is_set():
            before = log.next_offset
            assert log.flush(sync=False) >= before, "flush left something unwritten that was appended before"

    others.start(look_on)
    others.start(flush)
    for appender in appenders:
        threads.start(appender.run)
    try:
        threads.join()
    finally:
        done.set()
        others.join()
    check_given(log, appenders)
    log.close()
    with headrace.Log(place / "log") as log:
        check_given(log, appenders)


@pytest.mark.usefixtures("_nervous")
def test_offsets_of_many_messages_are_true_while_others_append(place: Path) -> None:
    """A batch appended at once lies at one stretch: nobody's message comes between."""
    with headrace.Log(place / "log", sync_every=None) as log:
        threads, done = Threads(), threading.Event()
        found = []

        def append_one_by_one() -> None:
            while not done.is_set():
                log.append(b"other")

        def append_many() -> None:
            try:
                for number in range(60):
                    found.append((number, log.append_many([b"%d" % number] * 4000)))
            finally:
                done.set()

        threads.start(append_one_by_one)
        threads.start(append_many)
        threads.join()
        values = [message.value for message in log]
        for number, offsets in found:
            assert [values[offset] for offset in offsets] == [b"%d" % number] * 4000


@pytest.mark.usefixtures("_nervous")
def test_a_log_is_closed_while_threads_append(place: Path) -> None:
    """What was appended before the log was closed is there, and who comes later is told that it is closed."""
    for turn in range(30):
        log = headrace.Log(place / f"{turn}", sync_every=0.001)
        given: list[tuple[int, bytes]] = []

        def append(name: int, log: headrace.Log, given: list[tuple[int, bytes]]) -> None:
            with contextlib.suppress(LogClosed):
                for number in range(1_000_000):
                    value = b"%d/%d" % (name, number)
                    given.append((log.append(value), value))

        threads = Threads()
        for name in range(3):
            threads.start(append, name, log, given)
        while len(given) < 500:
            pass
        log.close()
        threads.join()
        with headrace.Log(place / f"{turn}") as again:
            values = [message.value for message in again]
        assert sorted(given) == list(enumerate(values))


@pytest.mark.usefixtures("_nervous")
def test_threads_read_while_the_log_is_truncated_and_compacted(place: Path) -> None:
    with headrace.Log(place / "log", segment_bytes=4096, sync_every=None) as log:
        threads, done = Threads(), threading.Event()

        def read(seed: int) -> None:
            dice = Random(seed)
            while not done.is_set():
                with contextlib.suppress(OffsetOutOfRange, MessageGone):
                    offset = dice.randrange(log.first_offset, log.next_offset)
                    assert log.read(offset).value == b"%d" % offset * 30
                with contextlib.suppress(OffsetOutOfRange):
                    last = -1
                    for message in log.messages():
                        assert message.value == b"%d" % message.offset * 30
                        assert all(not offset % 3 for offset in range(last + 1, message.offset)) or last < 0
                        last = message.offset

        log.append(b"0" * 30)
        for seed in range(3):
            threads.start(read, seed)
        try:
            for number in range(1, 6000):
                assert log.append(b"%d" % number * 30) == number
                if number % 20 == 0:
                    log.flush(sync=False)
                if number % 200 == 0:
                    log.compact(lambda message: message.offset % 3 != 0)
                if number % 500 == 0:
                    log.truncate_before(number - 300)
        finally:
            done.set()
            threads.join()


def test_many_threads_meet_a_damaged_index(place: Path) -> None:
    """Each of them would rebuild it."""
    with headrace.Log(place / "log", segment_bytes=64 << 10) as log:
        for number in range(3000):
            log.append(b"%d" % number * 100)
            if number % 100 == 99:
                log.flush(sync=False)
    for turn in range(10):
        for index in (place / "log").glob("*.idx"):
            index.write_bytes(index.read_bytes()[:-1] + b"!")  # the head is good, the entries are not
        with headrace.Log(place / "log", segment_bytes=64 << 10) as log:
            threads = Threads()
            for _ in range(8):
                threads.start(lambda log: [log.read(offset) for offset in range(0, 3000, 100)], log)
            threads.join()
            assert log.next_offset == 3000, turn


def test_one_bad_message_stops_nobody_else(place: Path) -> None:
    """What cannot be encoded is refused when it is appended: later it would stand in the way of all that follows."""
    with headrace.Log(place / "a", sync_every=0.01) as log, headrace.Log(place / "b", sync_every=0.01) as other:
        with pytest.raises(HeadraceError):
            log.append(b"bad", headers={"\ud800": b"x"})
        with pytest.raises(HeadraceError):
            log.append(b"bad", headers={"x": "\ud800"})
        log.append(b"good")
        other.append(b"good too")
        for path in ("a", "b"):  # one thread writes for all logs, after a while
            with headrace.Log(place / path, readonly=True) as reader:
                assert reader.wait(0, timeout=30)
        log.flush()


def run(script: str, *arguments: object, timeout_s: float = 100) -> str:
    """Run a script beside this file; if it hangs, say where."""
    path = str(Path(__file__).with_name(script))
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", path, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )
    try:
        out, complaints = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        _, complaints = process.communicate()
        pytest.fail(f"{script} {arguments} hangs\n{complaints}")
    assert process.returncode == 0, f"{script} {arguments} ended with {process.returncode}\n{complaints}"
    return out


@pytest.mark.parametrize("turn", range(3))
def test_interrupts_lose_nothing_and_wedge_nothing(place: Path, turn: int) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", Random().getrandbits(32))) + turn
    print(f"HEADRACE_SEED={seed}")
    said = json.loads(run("interrupted.py", place / "log", seed, INTERRUPTED_S / 3, timeout_s=30))
    assert said["interrupts"] > 100
    assert said["flushed"] > 1000


@pytest.mark.parametrize("running", [False, True], ids=["not yet running", "running already"])
def test_an_interrupt_that_comes_while_a_thread_is_started(running: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next job starts the thread again, if need be; no job waits for one that never came to be."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if running:
            start(thread)
        raise KeyboardInterrupt

    worker, ticker = Worker("headrace-test"), Ticker()
    for ask in (worker.submit, lambda job: ticker.call_later(0, job)):
        done = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(done.set)
        ask(done.set)
        assert done.wait(10), "the job is never done"


@pytest.mark.parametrize(
    "role",
    [
        "touch",
        "end_normally",
        "read_and_write_elsewhere",
        "fork_while_threads_append",
        "close_with_a_child_alive",
        "read_on",
        "hold_cursors",
        "drop_in_child",
        "open_broker",
    ],
)
def test_fork(place: Path, role: str) -> None:
    run("forked.py", role, place / "log")
