"""Futures, conditions, timers and background work, on asyncio. `_sync/concurrency` has the same names for threads."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from headrace.client.app.handlers import Handler, check_returned, is_coroutine_function
from headrace.client.app.stop_signals import STOP_SIGNALS, StopSignalHandler
from headrace.model.errors import HeadraceError, Timeout

T = TypeVar("T")

_TIMER_ERROR_S = 0.0015
"""The resolution of an event loop's timers, in seconds."""

now = time.monotonic

Lock = asyncio.Lock
"""A mutual exclusion lock for sections that may wait."""

ENDS_TASKS = (asyncio.CancelledError,)
"""Errors that end a task, as opposed to errors of its work."""


FORK_REFUSED = True
"""A bus cannot be used in a forked child: its event loop belongs to the parent."""


class Guard:
    """The asyncio counterpart of a thread lock: does nothing, as all callers run on the loop's thread."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...


class PendingResult:
    """An operation whose result can be awaited."""

    __slots__ = ()

    async def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result().__await__()


class ResultCell(Generic[T]):
    """A future: a result or an error that becomes available later; any number of tasks may wait for it."""

    __slots__ = ("_waiters", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: T | None = None
        self.error: HeadraceError | None = None
        self._waiters: list[asyncio.Future[None]] | None = None

    def resolve(self, value: T) -> None:
        """Here it is."""
        if not self.done:
            self.value = value
            self.done = True
            if self._waiters is not None:
                self._wake()

    def fail(self, error: HeadraceError) -> None:
        """Resolve it with an error."""
        if not self.done:
            self.error = error
            self.done = True
            if self._waiters is not None:
                self._wake()

    async def wait(self, timeout: float | None = None) -> T:
        """Wait for the result and return it; raises the error, or Timeout if it is not resolved in time."""
        if not self.done:
            waiter: asyncio.Future[None] = asyncio.Future()
            if self._waiters is None:
                self._waiters = [waiter]
            else:
                self._waiters.append(waiter)
            if timeout is None:
                await waiter
            else:
                timer = waiter.get_loop().call_later(max(timeout, 0), _wake, waiter)
                try:
                    await waiter
                finally:
                    timer.cancel()
        if not self.done:
            raise Timeout(f"no answer within {timeout:.3g} s; it may still happen")
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # resolve() gave it

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)


class Monitor:
    """A condition variable: a guard, and waiting under it for a notification."""

    def __init__(self) -> None:
        self.guard = Guard()
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification, with the guard held; returns whether one arrived in time."""
        if timeout is not None and timeout <= 0:
            return False
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.append(waiter)
        timer = None if timeout is None else loop.call_later(timeout, _wake, waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            noticed = waiter not in self._waiters
            if not noticed:
                self._waiters.remove(waiter)
        return noticed

    async def wait_finely(self, seconds: float) -> None:
        """Wait for a notification or for a time, more precisely than a loop's timers: call it until the time is over.

        It returns early, so that other tasks get turns of the loop.
        """
        if seconds > 2 * _TIMER_ERROR_S:
            await self.wait(seconds - _TIMER_ERROR_S)
        else:
            await asyncio.sleep(0)

    def notify(self, count: int | None = None) -> None:
        """Wake all waiting tasks, or only some of them. Call it with the guard held."""
        if self._waiters:
            waiters = self._waiters[:count]
            self._waiters = self._waiters[len(waiters) :]
            for waiter in waiters:
                _wake(waiter)


class Timer:
    """A scheduled callback, which can be cancelled."""

    __slots__ = ("_handle",)

    def __init__(self, handle: asyncio.TimerHandle) -> None:
        self._handle = handle

    def cancel(self) -> None:
        """Cancel the callback."""
        self._handle.cancel()


class Timers:
    """Schedules callbacks on the event loop; they must not block."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call a function after a delay in seconds."""
        return Timer(self._loop.call_later(seconds, call))

    def soon(self, call: Callable[[], None]) -> None:
        """Call a function at the end of the current loop turn, so that it can batch the work of that turn."""
        self._loop.call_soon(call)

    def aside(self, call: Callable[[], None]) -> None:
        """Call a function soon on the loop's thread: for finalizers, which run at any moment on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all its work with it
            self._loop.call_soon_threadsafe(call)

    def disown(self) -> None:
        """In a forked child: do nothing, as the loop belongs to the parent."""

    def close(self) -> None:
        """Cancel all callbacks; the loop's remaining timers do nothing."""


class Task:
    """A background task."""

    def __init__(self, task: "asyncio.Task[None]") -> None:
        self._task = task

    async def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; returns whether it ended in time."""
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        return bool(done)


def spawn(name: str, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> Task:
    """Start a background task."""
    return Task(asyncio.get_running_loop().create_task(work(*args), name=name))


async def breathe() -> None:
    """Yield to other tasks."""
    await asyncio.sleep(0)


def run_detached(call: Callable[[], None]) -> None:
    """Start a slow call without waiting for it; runs on the loop's thread."""
    asyncio.get_running_loop().run_in_executor(None, call)


async def run_blocking(call: Callable[[], None]) -> None:
    """Run a blocking call in a thread; it completes even if the waiting task is cancelled."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, call))


class HandlerExecutor:
    """Calls handlers: coroutine functions on the loop, plain functions in threads, so that they do not block it."""

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._threads: ThreadPoolExecutor | None = None

    async def call(self, handler: Handler, message: Any) -> Any:
        """Call a handler, and return its result; raises the handler's error."""
        returned = handler(message) if is_coroutine_function(handler) else await self._call_in_thread(handler, message)
        if isinstance(returned, Awaitable):
            return await returned
        check_returned(returned)
        return returned

    def close(self) -> None:
        """Shut down the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def _call_in_thread(self, handler: Handler, message: Any) -> Any:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._threads_max, "headrace-handler")
        run = copy_context().run
        returned, error = await asyncio.get_running_loop().run_in_executor(
            self._threads, run, _call_and_catch, handler, message
        )
        if error is not None:
            raise error
        return returned


def _call_and_catch(handler: Handler, message: Any) -> tuple[Any, BaseException | None]:
    """Call a handler; returns its error, because a future cannot hold every kind of error."""
    try:
        return handler(message), None
    except BaseException as error:  # noqa: BLE001  # raised again where the result is waited for
        return None, error


def survives(error: BaseException) -> bool:
    """Return whether work continues after this error: a cancellation inside the work, not of the task."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """In the block, call a function at the first SIGTERM or SIGINT, and end the process at the second."""
    loop = asyncio.get_running_loop()
    handler = StopSignalHandler(lambda: None)  # the loop calls `stop` between two callbacks
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)  # this wakes the loop
        signal.signal(number, handler)  # Python calls this one even when a handler blocks the loop
    try:
        yield
    finally:
        for number, earlier in before.items():
            loop.remove_signal_handler(number)
            if earlier is not None:
                signal.signal(number, earlier)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
