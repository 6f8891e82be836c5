"""Waiting, waking and doing things later, with asyncio. `_sync/concurrency.py` has the same names for threads."""

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
"""Loops count time in milliseconds."""

now = time.monotonic

Lock = asyncio.Lock
"""Lets one do something that takes a while; others wait."""

ENDS_TASKS = (asyncio.CancelledError,)
"""Errors that end a task, and must not be taken for one of its work's."""


FORK_REFUSED = True
"""A bus cannot go on in a forked child: its event loop stays with the parent."""


class Guard:
    """Keeps threads apart, where there are some: all of this happens on the loop's."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...


class PendingResult:
    """Something whose result can be awaited."""

    __slots__ = ()

    async def result(self, timeout: float | None = None) -> Any:
        """Its result, when there is one."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result().__await__()


class ResultCell(Generic[T]):
    """A result that is there sooner or later, or an error; any number may wait for it."""

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
        """There will be none, and this is why."""
        if not self.done:
            self.error = error
            self.done = True
            if self._waiters is not None:
                self._wake()

    async def wait(self, timeout: float | None = None) -> T:
        """The result; raises the error, or Timeout when it is not there in time."""
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
    """A guard under which one can wait until somebody says that something has changed."""

    def __init__(self) -> None:
        self.guard = Guard()
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notice, with the guard held; returns whether one came in time."""
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
        """Wait for a notice or, with more precision than a loop's timers have, for so long: call it until it is time.

        It returns early, for others may need a turn of the loop in the meantime.
        """
        if seconds > 2 * _TIMER_ERROR_S:
            await self.wait(seconds - _TIMER_ERROR_S)
        else:
            await asyncio.sleep(0)

    def notify(self, count: int | None = None) -> None:
        """Something has changed: wake all who wait, or only so many of them. Call it with the guard held."""
        if self._waiters:
            waiters = self._waiters[:count]
            self._waiters = self._waiters[len(waiters) :]
            for waiter in waiters:
                _wake(waiter)


class Timer:
    """Something that will be called."""

    __slots__ = ("_handle",)

    def __init__(self, handle: asyncio.TimerHandle) -> None:
        self._handle = handle

    def cancel(self) -> None:
        """Do not call it."""
        self._handle.cancel()


class Timers:
    """Calls things later; they must not block."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call this after so many seconds."""
        return Timer(self._loop.call_later(seconds, call))

    def soon(self, call: Callable[[], None]) -> None:
        """Call this after what is going on now, so that what others do at the same time can be done in one go."""
        self._loop.call_soon(call)

    def aside(self, call: Callable[[], None]) -> None:
        """Call this soon, but not now: for finalizers, which may come at any moment, on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all that is on it with it
            self._loop.call_soon_threadsafe(call)

    def disown(self) -> None:
        """In a forked child: the loop stays with the parent."""

    def close(self) -> None:
        """Call nothing any more; the loop's timers that are left find nothing to do."""


class Task:
    """Work that goes on beside."""

    def __init__(self, task: "asyncio.Task[None]") -> None:
        self._task = task

    async def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; returns whether it came in time."""
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        return bool(done)


def spawn(name: str, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> Task:
    """Do this work beside."""
    return Task(asyncio.get_running_loop().create_task(work(*args), name=name))


async def breathe() -> None:
    """Let others have their turn."""
    await asyncio.sleep(0)


def run_detached(call: Callable[[], None]) -> None:
    """Do something that takes a while and that nobody waits for; on the loop's thread."""
    asyncio.get_running_loop().run_in_executor(None, call)


async def run_blocking(call: Callable[[], None]) -> None:
    """Do something that takes a while and knows nothing of loops; it is done also if who waits for it is cancelled."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, call))


class HandlerExecutor:
    """Calls handlers: coroutine functions on the loop, plain functions in threads, so that they do not block it."""

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._threads: ThreadPoolExecutor | None = None

    async def call(self, handler: Handler, message: Any) -> None:
        """Call a handler and wait for its end; raises what it raises."""
        returned = handler(message) if is_coroutine_function(handler) else await self._call_in_thread(handler, message)
        if isinstance(returned, Awaitable):
            await returned
        else:
            check_returned(returned)

    def close(self) -> None:
        """Let the threads end."""
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
    """Call a handler; errors are returned, because a future does not take all of them."""
    try:
        return handler(message), None
    except BaseException as error:  # noqa: BLE001  # raised again where the result is waited for
        return None, error


def survives(error: BaseException) -> bool:
    """Whether work goes on after an error of this kind: what was cancelled was something inside of it."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM and SIGINT call this while the block lasts, and the second of them end the process."""
    loop = asyncio.get_running_loop()
    handler = StopSignalHandler(lambda: None)  # the loop calls `stop`, at a moment when it may be called
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)  # this wakes the loop
        signal.signal(number, handler)  # this is called also when a handler blocks the loop
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
