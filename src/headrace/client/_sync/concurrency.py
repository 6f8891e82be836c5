"""Futures, conditions, timers and background work, on threads. `_async/concurrency` has the same names for asyncio."""

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
"""A lock that is held only for an instant."""

Lock = threading.Lock
"""A mutual exclusion lock for sections that may wait."""

ENDS_TASKS = (KeyboardInterrupt, SystemExit)
"""Errors that end a program, as opposed to errors of its work."""

_SIGNALS_S = 0.5
"""The longest sleep of the main thread, which must wake up to run signal handlers if another thread got the signal."""

FORK_REFUSED = False
"""A bus can be used in a forked child, with connections and threads of its own."""

_outcomes = threading.Lock()
"""Held for an instant when a future is resolved or waited for; shared by all, so that each future is small."""


def _free_outcomes() -> None:
    """In a forked child: replace the lock, as another thread of the parent may have held it."""
    global _outcomes
    _outcomes = threading.Lock()


os.register_at_fork(after_in_child=_free_outcomes)


class PendingResult:
    """An operation whose result can be waited for."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it."""
        raise NotImplementedError


class ResultCell(Generic[T]):
    """A future: a result or an error that becomes available later; any number of threads may wait for it."""

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
        """Resolve it with an error."""
        self._finish(None, error)

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result and return it; raises the error, or Timeout if it is not resolved in time."""
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
    """A condition variable: a guard, and waiting under it for a notification."""

    def __init__(self) -> None:
        self.guard = Guard()
        self._condition = threading.Condition(self.guard)
        self._sleepers = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification, with the guard held; returns whether one arrived in time."""
        if timeout is not None and timeout <= 0:
            return False
        self._sleepers += 1
        try:
            if timeout is None and threading.current_thread() is threading.main_thread():
                self._condition.wait(_SIGNALS_S)
                return True  # a caller that waits forever checks again anyway
            return self._condition.wait(timeout)
        finally:
            self._sleepers -= 1

    def wait_finely(self, seconds: float) -> None:
        """Wait for a notification or precisely for a time; it may return early."""
        self.wait(seconds)

    def notify(self, count: int | None = None) -> None:
        """Wake all waiting threads, or only some of them. Call it with the guard held."""
        if self._sleepers:
            self._condition.notify(self._sleepers if count is None else count)


class Timer:
    """A scheduled callback, which can be cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Cancel the callback."""
        self.call = None


class Timers:
    """Runs scheduled callbacks on a thread of its own; they must not block."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call a function after a delay in seconds."""
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
        """Call a function now: with threads there is no loop turn whose work could be batched."""
        call()

    def close(self) -> None:
        """Cancel all callbacks."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            self._heap.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def aside(self, call: Callable[[], None]) -> None:
        """Call a function soon on another thread: for finalizers, which run at any moment, whichever locks are held."""
        if is_finalizing():
            return  # the program is exiting, and a thread that is started now never runs
        with contextlib.suppress(RuntimeError):  # the program is exiting
            threading.Thread(target=call, name="headrace-finalizer", daemon=True).start()

    def disown(self) -> None:
        """In a forked child: drop all callbacks; the parent calls them."""
        self._changed = threading.Condition()
        self._heap = []
        self._thread = None

    def _run(self) -> None:
        while True:
            with self._changed:
                ours = self._thread is threading.current_thread()  # false in a child that a callback has forked
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
                    logger.exception("scheduled callback failed")


class Task:
    """A background thread."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; returns whether it ended in time."""
        if self._thread is threading.current_thread():
            return False
        if timeout is None and threading.current_thread() is threading.main_thread():
            while self._thread.is_alive():
                self._thread.join(_SIGNALS_S)
        else:
            self._thread.join(timeout)
        return not self._thread.is_alive()


def spawn(name: str, work: Callable[..., None], *args: Any) -> Task:
    """Start background work in a thread."""
    thread = threading.Thread(target=work, args=args, name=f"headrace-{name}", daemon=True)
    thread.start()
    return Task(thread)


def breathe() -> None:
    """Do nothing: the system schedules threads."""


def run_detached(call: Callable[[], None]) -> None:
    """Do something that takes a while."""
    call()


def run_blocking(call: Callable[[], None]) -> None:
    """Do something that takes a while."""
    call()


class HandlerExecutor:
    """Calls handlers: plain functions in the caller's thread, coroutines on one event loop in a thread of its own."""

    def __init__(self, threads_max: int) -> None:
        del threads_max  # plain functions run in the callers' threads
        self._guard = threading.Lock()
        self._loop: _LoopThread | None = None

    def call(self, handler: Handler, message: Any) -> Any:
        """Call a handler, and return its result; raises the handler's error."""
        returned = handler(message)
        if isinstance(returned, Awaitable):
            return self._started_loop().wait_for(returned)
        check_returned(returned)
        return returned

    def close(self) -> None:
        """Stop the event loop, and cancel the tasks that handlers have left running on it."""
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

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        """Run a coroutine on the loop, and return its result; raises its error."""
        import asyncio

        returned, error = asyncio.run_coroutine_threadsafe(_await_and_catch(awaitable), self._loop).result()
        if error is not None:
            raise error
        return returned

    def close(self) -> None:
        """Cancel the loop's tasks, and stop it."""
        self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        import asyncio  # imported here: most programs with threads never need asyncio

        with asyncio.Runner() as runner:
            self._loop, self._closing = runner.get_loop(), asyncio.Event()
            self._started.set()
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._closing.wait()


async def _await_and_catch(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Await a handler; returns its error, because some errors would end the loop."""
    try:
        return await awaitable, None
    except BaseException as error:  # noqa: BLE001  # raised again where the result is waited for
        return None, error


def survives(error: BaseException) -> bool:
    """Return whether work continues after this error, which is not an Exception: a cancellation inside the work."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and isinstance(error, asyncio.CancelledError)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """In the block, call a function at the first SIGTERM or SIGINT, and exit at the second; main thread only."""
    handler = StopSignalHandler(stop)
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
