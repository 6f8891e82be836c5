"""Measuring: subjects take turns, each sample has a fresh directory, and medians are told."""

import contextlib
import gc
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SAMPLES_MIN = 5
_CALIBRATION_SHARE = 0.1
"""A rate counts as known once it was measured over this share of a sample's time."""
_GROWTH_MAX = 10


class WrongResult(Exception):
    """A benchmark's own check failed: something was lost, changed or out of order."""


class Unavailable(Exception):
    """A subject cannot be measured here, and why."""


class Taken(NamedTuple):
    """What one sample took."""

    seconds: float
    latencies_s: Sequence[float] = ()
    """Of each single operation, when that is what is asked for."""


class Figure(NamedTuple):
    """A number that is told of a sample."""

    unit: str
    higher_is_better: bool
    of: Callable[[int, Taken], float]
    """Makes it of the count of operations and what they took."""


class Subject(NamedTuple):
    """One of those compared."""

    name: str
    sample: Callable[[str, int], Taken]
    """Does so many operations in a directory, checks its work outside of the time it tells, and tells the time."""
    params: Mapping[str, Any]
    step: int = 1
    """Operations come in multiples of this."""
    prepare: Callable[[str], None] | None = None
    """Called once, before the first sample, with a directory that stays until the last."""


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
    """The latency, in µs or ms, that this percentage of the operations did not exceed."""
    scale = {"µs": 1e6, "ms": 1e3}[unit]

    def of(_: int, taken: Taken) -> float:
        ordered = sorted(taken.latencies_s)
        return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)] * scale

    return Figure(unit, False, of)


def check(right: bool, what: str) -> None:
    """Fail loudly unless it is right; unlike assert, also in optimized mode."""
    if not right:
        raise WrongResult(what)


def measure(
    group: str,
    benchmark: Benchmark,
    root: str,
    *,
    seconds: float,
    samples: int = SAMPLES_MIN,
    names: Collection[str] | None = None,
    subjects: Collection[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """One line for every figure and subject, after all samples; `seconds` is about what each sample lasts."""
    figures = {name: figure for name, figure in benchmark.figures.items() if names is None or name in names}
    chosen = [subject for subject in benchmark.subjects if subjects is None or subject.name in subjects]
    title = f"{group}.{'/'.join(figures)}"
    counts: dict[str, int] = {}
    missing: dict[str, str] = {}
    taken: dict[str, list[Taken]] = {subject.name: [] for subject in chosen}
    with contextlib.ExitStack() as kept:
        for subject in chosen:
            say(f"{title} {subject.name}: preparing")
            try:
                if subject.prepare is not None:
                    subject.prepare(kept.enter_context(_directory(root)))
                counts[subject.name] = _calibrated(benchmark, subject, root, seconds)
            except Unavailable as error:
                missing[subject.name] = str(error)
        for number in range(1, samples + 1):
            for subject in chosen:
                if subject.name not in missing:
                    count = counts[subject.name]
                    taken[subject.name].append(_sample(subject, root, count))
                    shown = ", ".join(
                        f"{_rounded(figure.of(count, taken[subject.name][-1])):,} {figure.unit}"
                        for figure in figures.values()
                    )
                    say(f"{title} {subject.name}: {number} of {samples}: {shown}")
    for name, figure in figures.items():
        for subject in chosen:
            values = [_rounded(figure.of(counts[subject.name], one)) for one in taken[subject.name]]
            params = {**benchmark.params, **subject.params}
            if subject.name in counts:
                params["operations_per_sample"] = counts[subject.name]
            yield _line(f"{group}.{name}", subject.name, figure, values, params, missing.get(subject.name))


def _line(
    name: str, subject: str, figure: Figure, values: list[float], params: dict[str, Any], why: str | None
) -> dict[str, Any]:
    line = {
        "name": name,
        "subject": subject,
        "unit": figure.unit,
        "median": _rounded(statistics.median(values)) if values else None,
        "samples": values,
        "higher_is_better": figure.higher_is_better,
        "params": params,
    }
    return line if why is None else {**line, "why": why}


def _calibrated(benchmark: Benchmark, subject: Subject, root: str, seconds: float) -> int:
    """How many operations fill a sample's time. Finding out warms up, too."""
    if benchmark.operations is not None:
        _sample(subject, root, benchmark.operations)
        return benchmark.operations
    steps_max = max((benchmark.operations_max or 1 << 40) // subject.step, 1)
    steps = 1
    while True:
        taken = max(_sample(subject, root, steps * subject.step).seconds, 1e-9)
        wanted = min(max(round(steps * seconds / taken), 1), steps_max)
        if taken >= seconds * _CALIBRATION_SHARE or steps == steps_max:
            return wanted * subject.step
        steps = min(steps * _GROWTH_MAX, wanted if wanted > steps else steps + 1)


def _sample(subject: Subject, root: str, count: int) -> Taken:
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
    """Four digits say more than a benchmark knows."""
    return round(value) if value >= 1000 else float(f"{value:.4g}")
