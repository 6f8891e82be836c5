"""An interrupt, as by Ctrl-C, at every point of appending, rolling, syncing and closing: nothing is lost or damaged."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType, TracebackType
from typing import Any

import pytest
from tests.known import quick_place

import headrace
from headrace.storage.runtime import StorageRuntime
from headrace.testing.inline import InlineWorker

# Python itself swallows an interrupt that comes while a generator is given up, and only warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SOURCE = str(Path(headrace.__file__).parent)
STEPS: list[Callable[[headrace.Log], object]] = [
    lambda log: log.append(b"one" + b"x" * 1500),
    lambda log: log.append(b"two", key=b"k"),
    lambda log: log.flush(),
    lambda log: log.append_many([b"three" + b"x" * 1500, b"four" + b"x" * 1500]),
    lambda log: log.flush(sync=False),
    lambda log: log.append(b"five" + b"x" * 3500),
    lambda log: log.flush(),
    lambda log: log.close(),
]


class Interrupts:
    """Raises KeyboardInterrupt in this thread at given points: where Python looks for signals in Headrace's code.

    That is when a function begins and when it has ended, those in C included, but not between: no signal comes between
    a lock's acquisition by `with` and the block, nor between the block and the lock's release.
    """

    def __init__(self, points: set[int]) -> None:
        self._points = points
        self.passed = 0
        """How many points have been passed."""

    def __enter__(self) -> "Interrupts":
        sys.setprofile(self._look)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "c_call" or not frame.f_code.co_filename.startswith(SOURCE) or is_finalizing(frame):
            return
        self.passed += 1
        if self.passed in self._points:
            raise KeyboardInterrupt


def is_finalizing(frame: FrameType | None) -> bool:
    """Whether an object is being given up, where an interrupt would be swallowed by Python itself."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as path:
        yield path


def live_through(path: Path, interrupts: Interrupts) -> int:
    """Do all steps, those that are interrupted once more, and check what came of it; returns the points passed."""
    # Syncs happen in this thread too: on a thread of their own nobody interrupts them.
    host = StorageRuntime(flusher=InlineWorker(), preparer=InlineWorker())
    log = headrace.Log(path, segment_bytes=4096, sync_every=None, host=host)
    promised: dict[int, bytes] = {}
    for number, step in enumerate(STEPS):
        for _ in range(100):
            try:
                with interrupts:
                    given = step(log)
            except KeyboardInterrupt:
                continue
            if number in (0, 1, 5):
                assert isinstance(given, int)
                promised[given] = {0: b"one", 1: b"two", 5: b"five"}[number]
            break
        else:
            pytest.fail(f"step {number} never came to its end")
    with headrace.Log(path, readonly=True) as reader:
        findings = reader.verify()
        assert findings.sound, findings
        values = {message.offset: message.value or b"" for message in reader}
        assert [*values] == [*range(reader.next_offset)]
        for offset, value in promised.items():
            assert values[offset].rstrip(b"x") == value
    with headrace.Log(path) as again:
        assert again.recovery.sound, again.recovery
        assert again.append(b"after") == len(values)
    return interrupts.passed


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_one_interrupt_at_every_point(place: Path, step: int) -> None:
    points = live_through(place / "peace", Interrupts(set()))
    for point in range(step, points + 1, step):
        try:
            live_through(place / f"{point}", Interrupts({point}))
        except BaseException as error:
            error.add_note(f"the interrupt came at point {point}")
            raise


@pytest.mark.long
def test_storms_of_interrupts(place: Path) -> None:
    seed = Random().getrandbits(32)
    dice = Random(seed)
    points = live_through(place / "peace", Interrupts(set()))
    for number in range(60):
        storm = {at for _ in range(6) for at in [dice.randrange(1, 2 * points)] for at in range(at, at + 200, 61)}
        try:
            live_through(place / f"{number}", Interrupts(storm))
        except BaseException as error:
            error.add_note(f"seed {seed}, life {number}, points {sorted(storm)}")
            raise
