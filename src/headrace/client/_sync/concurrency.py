"""Waiting, waking and doing things later, with threads. `_async/concurrency.py` has the same names for asyncio."""

import contextlib
import heapq
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from sys import is_finalizing
from typing import Any, Generic, TypeVar

from headrace.client.app.handlers import Handler, check_returned
from headrace.client.app.stop_signals import STOP_SIGNALS, StopSignalHandler
from headrace.model.errors import HeadraceError, Timeout

T = TypeVar("T")

now = time.monotonic
logger = logging.getLogger("headrace.client")

Guard = threading.RLock
"""Keeps threads apart, for an instant."""

Lock = threading.Lock
"""Lets one do something that takes a while; others wait."""

ENDS_TASKS = (KeyboardInterrupt, SystemExit)
"""Errors that end a program, and must not be taken for one of its work's."""

_SIGNALS_S = 0.5
"""How long the main thread sleeps: Python hears of a signal when it goes on, and is not woken if another took it."""

FORK_REFUSED = False
"""A bus goes on in a forked child, with connections and threads of its own."""

_outcomes = threading.Lock()
"""Held for an instant when an outcome is settled or begun to be waited for; one for all, so that each is small."""


def _free_outcomes() -> None:
    """In a forked child: another thread may have held it."""
    global _outcomes
    _outcomes = threading.Lock()


os.register_at_fork(after_in_child=_free_outcomes)


class PendingResult:
    """Something whose result can be waited for."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> Any:
        """Its result, when there is one."""
        raise NotImplementedError


class ResultCell(Generic[T]):
    """A result that is there sooner or later, or an error; any number may wait for it."""

    __slots__ = ("_waiters", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: T | None = None
        self.error: HeadraceError | None = None
        self._waiters: list[threading.Lock] | None = None

    def resolve(self, value: T) -> None:
        """Here it is."""
        self._finish(value, None)

    def fail(self, error: HeadraceError) -> None:
        """There will be none, and this is why."""
        self._finish(None, error)

    def wait(self, timeout: float | None = None) -> T:
        """The result; raises the error, or Timeout when it is not there in time."""
        if not self.done:
            self._sleep(timeout)
        if not self.done:
            raise Timeout(f"no answer within {timeout:.3g} s; it may still happen")
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # resolve() gave it

    def _sleep(self, timeout: float | None) -> None:
        waiter = threading.Lock()
        waiter.acquire()
        with _outcomes:
            if self.done:
                return
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
        waiter.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX))

    def _finish(self, value: T | None, error: HeadraceError | None) -> None:
        with _outcomes:
            if self.done:
                return
            self.value, self.error = value, error
            self.done = True
            waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            waiter.release()


class Monitor:
    """A guard under which one can wait until somebody says that something has changed."""

    def __init__(self) -> None:
        self.guard = Guard()
        self._condition = threading.Condition(self.guard)
        self._sleepers = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notice, with the guard held; returns whether one came in time."""
        if timeout is not None and timeout <= 0:
            return False
        self._sleepers += 1
        try:
            if timeout is None and threading.current_thread() is threading.main_thread():
                self._condition.wait(_SIGNALS_S)
                return True  # whoever waits for ever looks again anyway
            return self._condition.wait(timeout)
        finally:
            self._sleepers -= 1

    def wait_finely(self, seconds: float) -> None:
        """Wait for a notice, or precisely for so long; it may return early."""
        self.wait(seconds)

    def notify(self, count: int | None = None) -> None:
        """Something has changed: wake all who wait, or only so many of them. Call it with the guard held."""
        if self._sleepers:
            self._condition.notify(self._sleepers if count is None else count)


class Timer:
    """Something that will be called."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not call it."""
        self.call = None


class Timers:
    """Calls things later, on a thread of its own; they must not block."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call this after so many seconds."""
        timer = Timer(call)
        with self._changed:
            entry = (now() + seconds, next(self._numbers), timer)
            heapq.heappush(self._heap, entry)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="headrace-timers", daemon=True)
                self._thread.start()
            elif self._heap[0] is entry:
                self._changed.notify()
        return timer

    def soon(self, call: Callable[[], None]) -> None:
        """Call this now: threads have nothing to gain by waiting."""
        call()

    def close(self) -> None:
        """Call nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            self._heap.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def aside(self, call: Callable[[], None]) -> None:
        """Call this soon, but not now: for finalizers, which may come at any moment, whatever their thread holds."""
        if is_finalizing():
            return  # the program ends, and a thread that is started now never runs
        with contextlib.suppress(RuntimeError):  # the program is about to end
            threading.Thread(target=call, name="headrace-finalizer", daemon=True).start()

    def disown(self) -> None:
        """In a forked child: what was to be called is called in the parent."""
        self._changed = threading.Condition()
        self._heap = []
        self._thread = None

    def _run(self) -> None:
        while True:
            with self._changed:
                ours = self._thread is threading.current_thread()  # not so in a child that a callback has forked
                while ours and not self._closed and (not self._heap or self._heap[0][0] > now()):
                    self._changed.wait(self._heap[0][0] - now() if self._heap else None)
                if self._closed or not ours:
                    return
                timer = heapq.heappop(self._heap)[2]
            call = timer.call
            if call is not None:
                try:
                    call()
                except Exception:
                    logger.exception("something that was to be done later failed")


class Task:
    """Work that goes on beside."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; returns whether it came in time."""
        if self._thread is threading.current_thread():
            return False
        if timeout is None and threading.current_thread() is threading.main_thread():
            while self._thread.is_alive():
                self._thread.join(_SIGNALS_S)
        else:
            self._thread.join(timeout)
        return not self._thread.is_alive()


def spawn(name: str, work: Callable[..., None], *args: Any) -> Task:
    """Do this work beside."""
    thread = threading.Thread(target=work, args=args, name=f"headrace-{name}", daemon=True)
    thread.start()
    return Task(thread)


def breathe() -> None:
    """Let others have their turn: threads have it anyway."""


def run_detached(call: Callable[[], None]) -> None:
    """Do something that takes a while."""
    call()


def run_blocking(call: Callable[[], None]) -> None:
    """Do something that takes a while."""
    call()


class HandlerExecutor:
    """Calls handlers: plain functions in the caller's thread, coroutines on one event loop in a thread of its own."""

    def __init__(self, threads_max: int) -> None:
        del threads_max  # the callers' threads are all it needs
        self._guard = threading.Lock()
        self._loop: _LoopThread | None = None

    def call(self, handler: Handler, message: Any) -> None:
        """Call a handler and wait for its end; raises what it raises."""
        returned = handler(message)
        if isinstance(returned, Awaitable):
            self._started_loop().wait_for(returned)
        else:
            check_returned(returned)

    def close(self) -> None:
        """End the event loop, and what handlers have left running on it."""
        if self._loop is not None:
            self._loop.close()

    def _started_loop(self) -> "_LoopThread":
        with self._guard:
            if self._loop is None:
                self._loop = _LoopThread()
            return self._loop


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-handlers", daemon=True)
        self._thread.start()
        self._started.wait()

    def wait_for(self, awaitable: Awaitable[Any]) -> None:
        """Run something on the loop, and wait for its end; raises what it raises."""
        import asyncio

        error = asyncio.run_coroutine_threadsafe(_await_and_catch(awaitable), self._loop).result()
        if error is not None:
            raise error

    def close(self) -> None:
        """Cancel what runs on the loop, and end it."""
        self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        import asyncio  # most programs with threads never need it

        with asyncio.Runner() as runner:
            self._loop, self._closing = runner.get_loop(), asyncio.Event()
            self._started.set()
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._closing.wait()


async def _await_and_catch(awaitable: Awaitable[Any]) -> BaseException | None:
    """Await a handler; its error is returned, because some would end the loop."""
    try:
        await awaitable
    except BaseException as error:  # noqa: BLE001  # raised again where the result is waited for
        return error
    return None


def survives(error: BaseException) -> bool:
    """Whether work goes on after an error of this kind, which is no Exception: something inside was cancelled."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and isinstance(error, asyncio.CancelledError)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM and SIGINT call this while the block lasts, and the second end the process; main thread only."""
    handler = StopSignalHandler(stop)
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
