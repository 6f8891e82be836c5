"""Python processes that benchmarks start."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnProcess
from typing import Any

_SAFE_PATH = "PYTHONSAFEPATH"

spawn = multiprocessing.get_context("spawn")


def start(target: Callable[..., None], *arguments: Any) -> SpawnProcess:
    """Run a function in another process, which ends with this one."""
    process = spawn.Process(target=target, args=arguments, daemon=True)
    with _safe_path():
        process.start()
    return process


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that start meanwhile import nothing from the directory they are started in, as `python -P`."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"  # multiprocessing has no option for it
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
