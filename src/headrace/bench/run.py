"""Runs the benchmarks of a log or a broker in a directory."""

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from headrace.bench import log_workloads
from headrace.bench.measure import SAMPLES_MIN, Benchmark, measure
from headrace.bench.payload import Payload


def run(directory: str, *, seconds: float, size: int, batch: int, emit: Callable[[dict[str, Any]], None]) -> None:
    """Measure the log with values of `size` bytes, in a directory made and removed below the one given.

    Each benchmark runs for about `seconds`, in five samples, and as long again to prepare and to check them. `emit`
    gets a line for each as soon as it is done.
    """
    payload = Payload(size, batch)
    sample_s = seconds / SAMPLES_MIN
    _measure("storage", log_workloads.benchmarks(payload, visibility_s=sample_s), directory, sample_s, emit)


def run_broker(
    directory: str, *, seconds: float, size: int, batch: int, emit: Callable[[dict[str, Any]], None]
) -> None:
    """Measure a broker, started for it with its data in a directory made and removed below the one given.

    All else is as for `run`.
    """
    # The client and the server are not needed by those who measure a log.
    from headrace.bench import broker_workloads

    payload = Payload(size, batch)
    sample_s = seconds / SAMPLES_MIN
    _measure("broker", broker_workloads.benchmarks(payload, latency_s=sample_s), directory, sample_s, emit)


def run_leased(
    directory: str, *, seconds: float, size: int, batch: int, emit: Callable[[dict[str, Any]], None]
) -> None:
    """Measure a broker's leased subscriptions. All is as for `run_broker`; values have 8 bytes at least.

    In a run of a second or more for each number a million messages wait while the time is kept, in a shorter one fewer.
    """
    from headrace.bench import leased_workloads
    from headrace.bench.queues import Timeline

    payload = Payload(size, batch)
    sample_s = seconds / SAMPLES_MIN
    timeline = Timeline(seconds=sample_s, pending=round(Timeline().pending * min(seconds, 1.0)))
    _measure("leased", leased_workloads.benchmarks(payload, timeline=timeline), directory, sample_s, emit)


def _measure(
    group: str,
    benchmarks: Mapping[str, Benchmark],
    directory: str,
    sample_s: float,
    emit: Callable[[dict[str, Any]], None],
) -> None:
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=directory) as root:
        for benchmark in benchmarks.values():
            for line in measure(group, benchmark, root, seconds=sample_s, samples=SAMPLES_MIN):
                emit(line)
