"""Lets the event loop wait for calls that block, on threads that also run while the interpreter ends.

The node of a program is closed by an exit handler, and the thread pools of the standard library take no calls by then.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from headrace.storage.worker import Worker

T = TypeVar("T")


async def run_on_thread(call: Callable[[], T]) -> T:
    """Run a call on a thread of its own, and wait for what it returns or raises."""

    def start(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="headrace-cluster", daemon=True).start()

    return await _outcome(start, call)


class CallQueue:
    """One thread, which runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._worker = Worker(name)

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call after all that were given before, and wait for what it returns or raises."""
        return await _outcome(self._worker.submit, call)

    def close(self) -> None:
        """End the thread after the calls that wait, without waiting for that."""
        self._worker.dismiss()


def _outcome(start: Callable[[Callable[[], None]], None], call: Callable[[], T]) -> "asyncio.Future[T]":
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(tell: Callable[[], None]) -> None:
        if not future.done():  # whoever waited was cancelled
            tell()

    def work() -> None:
        try:
            tell = partial(future.set_result, call())
        except BaseException as error:  # noqa: BLE001 whoever waits gets it
            tell = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(resolve, tell)

    start(work)
    return future
