"""Measurement: subjects take turns, each sample has a fresh directory, and medians are reported."""

import contextlib
import gc
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

SAMPLES_MIN = 5
_CALIBRATION_SHARE = 0.3
"""A rate counts as known once it was measured over this share of a sample's time."""
_GROWTH_MAX = 10
_AWAKE_S = 1.0
"""How long a resumed subject may catch up before it is measured, in seconds."""


class WrongResult(Exception):
    """A benchmark's own check failed: something was lost, changed or out of order."""


class Unavailable(Exception):
    """A subject cannot be measured here, and why."""


class Sample(NamedTuple):
    """The measurements of one sample."""

    seconds: float
    latencies_s: Sequence[float] = ()
    """Of each single operation, when that is what is asked for."""
    amount: float = 0.0
    """An amount other than time, if that is measured."""


class Figure(NamedTuple):
    """A number that is reported for a sample."""

    unit: str
    higher_is_better: bool
    of: Callable[[int, Sample], float]
    """Makes it of the count of operations and what they took."""


class Subject(NamedTuple):
    """One of those compared."""

    name: str
    sample: Callable[[str, int], Sample]
    """Does so many operations in a directory, checks its work outside of the time it tells, and tells the time."""
    params: Mapping[str, Any]
    step: int = 1
    """Operations come in multiples of this."""
    prepare: Callable[[str], None] | None = None
    """Called once, before the first sample, with a directory that stays until the last."""
    finish: Callable[[], None] | None = None
    """Called once, after the last sample, whatever happened, if `prepare` came through."""


class Sleeper(Protocol):
    """What a subject needs all the time, and may be put to sleep while another is measured."""

    def sleep(self) -> None:
        """Do nothing at all."""

    def wake(self) -> None:
        """Go on."""


_used: set[Sleeper] = set()
"""By whatever is being prepared."""


def uses(sleeper: Sleeper) -> None:
    """Whoever is being prepared needs this."""
    _used.add(sleeper)


class Benchmark(NamedTuple):
    """What is measured, in one go, of every subject."""

    figures: Mapping[str, Figure]
    """By the name of the benchmark: one set of samples may tell several."""
    subjects: Sequence[Subject]
    params: Mapping[str, Any]
    operations: int | None = None
    """Operations in a sample; None: as many as the time of a sample allows."""
    operations_max: int | None = None


def rate() -> Figure:
    """Messages in a second."""
    return Figure("msg/s", True, lambda count, taken: count / taken.seconds)


def duration() -> Figure:
    """The seconds that the whole sample took."""
    return Figure("s", False, lambda _, taken: taken.seconds)


def each_us() -> Figure:
    """The microseconds that one operation took on average."""
    return Figure("µs", False, lambda count, taken: taken.seconds / count * 1e6)


def percentile(percent: float, unit: str) -> Figure:
    """The latency, in µs, ms or s, that this percentage of the operations did not exceed."""
    scale = {"µs": 1e6, "ms": 1e3, "s": 1.0}[unit]

    def of(_: int, taken: Sample) -> float:
        ordered = sorted(taken.latencies_s)
        return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)] * scale

    return Figure(unit, False, of)


def check(right: bool, what: str) -> None:
    """Raise unless the condition holds; unlike assert, also in optimized mode."""
    if not right:
        raise WrongResult(what)


def measure(
    group: str,
    benchmark: Benchmark,
    root: str,
    *,
    seconds: float,
    samples: int = SAMPLES_MIN,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """One line for every figure and subject, after all samples; `seconds` is about what each sample lasts.

    Subjects take turns, and what the others need sleeps meanwhile: no server takes time from one that is measured.
    """
    title = f"{group}.{'/'.join(benchmark.figures)}"
    runs = [_Run(benchmark, subject, root) for subject in benchmark.subjects]
    with contextlib.ExitStack() as kept:
        for run in runs:
            say(f"{title} {run.subject.name}: preparing")
            run.begin(seconds, kept)
        everybody = set[Sleeper]().union(*(run.uses for run in runs))
        for number in range(1, samples + 1):
            for run in runs:
                with _asleep(everybody - run.uses):
                    taken = run.go()
                if taken:
                    say(f"{title} {run.subject.name}: {number} of {samples}: {run.last()}")
    for name in benchmark.figures:
        for run in runs:
            yield run.line(group, name)


class _Run:
    """The samples of one subject."""

    def __init__(self, benchmark: Benchmark, subject: Subject, root: str) -> None:
        self.subject = subject
        self.why_not: str | None = None
        self.uses: set[Sleeper] = set()
        self._benchmark = benchmark
        self._root = root
        self._count = benchmark.operations or 0
        self._taken: list[Sample] = []

    def begin(self, seconds: float, kept: contextlib.ExitStack) -> None:
        """Prepare, and find out how much to do in a sample."""
        _used.clear()
        try:
            if self.subject.prepare is not None:
                self.subject.prepare(kept.enter_context(_directory(self._root)))
            if self.subject.finish is not None:
                kept.callback(self.subject.finish)
            if not self._count:
                self._count = self._calibrated(seconds)
        except Unavailable as error:
            self.why_not = str(error)
        self.uses = set(_used)

    def go(self) -> bool:
        """Take a sample, if that can be done."""
        if self.why_not is not None:
            return False
        try:
            self._taken.append(_sample(self.subject, self._root, self._count))
        except Unavailable as error:
            self.why_not = str(error)
            self._taken.clear()
        return self.why_not is None

    def last(self) -> str:
        """Format the last sample."""
        figures = self._benchmark.figures.values()
        return ", ".join(f"{self._value(figure, self._taken[-1]):,} {figure.unit}" for figure in figures)

    def line(self, group: str, name: str) -> dict[str, Any]:
        """What is told of a figure."""
        figure = self._benchmark.figures[name]
        values = [self._value(figure, taken) for taken in self._taken]
        line = {
            "name": f"{group}.{name}",
            "subject": self.subject.name,
            "unit": figure.unit,
            "median": _rounded(statistics.median(values)) if values else None,
            "samples": values,
            "higher_is_better": figure.higher_is_better,
            "params": {**self._benchmark.params, **self.subject.params, "operations_per_sample": self._count},
        }
        return line if self.why_not is None else {**line, "why": self.why_not}

    def _value(self, figure: Figure, taken: Sample) -> float:
        return _rounded(figure.of(self._count, taken))

    def _calibrated(self, seconds: float) -> int:
        """Find the number of operations that fills a sample's time; this also warms up."""
        step = self.subject.step
        steps_max = max((self._benchmark.operations_max or 1 << 40) // step, 1)
        steps = 1
        while True:
            taken = max(_sample(self.subject, self._root, steps * step).seconds, 1e-9)
            wanted = min(max(round(steps * seconds / taken), 1), steps_max)
            if taken >= seconds * _CALIBRATION_SHARE or steps == steps_max:
                return wanted * step
            steps = min(steps * _GROWTH_MAX, max(wanted, steps + 1), steps_max)


@contextlib.contextmanager
def _asleep(sleepers: Iterable[Sleeper]) -> Iterator[None]:
    sleepers = list(sleepers)
    for sleeper in sleepers:
        sleeper.sleep()
    try:
        if sleepers:
            time.sleep(_AWAKE_S)
        yield
    finally:
        for sleeper in sleepers:
            sleeper.wake()


def _sample(subject: Subject, root: str, count: int) -> Sample:
    with _directory(root) as place:
        gc.collect()
        try:
            return subject.sample(place, count)
        except WrongResult as error:
            raise WrongResult(f"{subject.name}: {error}") from error


@contextlib.contextmanager
def _directory(root: str) -> Iterator[str]:
    place = tempfile.mkdtemp(prefix="sample-", dir=root)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def _rounded(value: float) -> float:
    """Round to four digits, more than a benchmark's precision."""
    return round(value) if value >= 1000 else float(f"{value:.4g}")
