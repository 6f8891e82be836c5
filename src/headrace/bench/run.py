"""How fast a log is on this machine, in this directory."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

from headrace.bench.log_workloads import benchmarks
from headrace.bench.measure import SAMPLES_MIN, measure
from headrace.bench.payload import Payload


def run(directory: str, *, seconds: float, size: int, batch: int, emit: Callable[[dict[str, Any]], None]) -> None:
    """Measure the log with values of `size` bytes, in a directory made and removed below the one given.

    Each benchmark runs for about `seconds`, in five samples, and as long again to prepare and to check them. `emit`
    gets a line for each as soon as it is done.
    """
    payload = Payload(size, batch)
    os.makedirs(directory, exist_ok=True)
    sample_s = seconds / SAMPLES_MIN
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=directory) as root:
        for benchmark in benchmarks(payload, visibility_s=sample_s).values():
            for line in measure("storage", benchmark, root, seconds=sample_s, samples=SAMPLES_MIN):
                emit(line)
