"""The scheduler on the broker's event loop: callbacks and what they schedule run together in one loop turn."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_ROUNDS_MAX = 4
"""Maximum rounds of follow-up callbacks per loop turn, so that other I/O is not starved."""
_TURN_S = 0.002
"""After so long no further round of follow-up callbacks begins in the same turn: long work comes in slices."""


class CallbackLoop(Protocol):
    """The part of an event loop that the scheduler uses; a test runs it on a loop without sockets."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> object: ...
    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object: ...
    def call_exception_handler(self, context: dict[str, Any]) -> None: ...
    def is_closed(self) -> bool: ...


class LoopScheduler:
    """Runs callbacks on an event loop after the requests that have just arrived.

    A published message is batched with others, appended, and delivered to readers, and each step schedules the next.
    Scheduled on the event loop itself, every step would cost a loop turn, which polls all sockets.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop | CallbackLoop, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._loop = loop
        self._now_s = now_s
        self._thread = threading.get_ident()
        self._calls: list[Callable[[], None]] = []
        self._calls_at_end: list[Callable[[], None]] = []
        self._scheduled = False

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run a callback after the code that runs now."""
        self._calls.append(call)
        self._schedule()

    def call_at_turn_end(self, call: Callable[[], None]) -> None:
        """Run a callback at the end of the loop turn, after the callbacks of `call_soon`."""
        self._calls_at_end.append(call)
        self._schedule()

    def call_threadsafe(self, call: Callable[[], None]) -> None:
        """Run a callback on the loop's thread; may be called on any thread."""
        if threading.get_ident() == self._thread:
            self.call_soon(call)
            return
        try:
            self._loop.call_soon_threadsafe(self._run_now, call)
        except RuntimeError:
            # The loop is closed, and with it everyone who could have been told.
            if not self._loop.is_closed():
                raise

    def turn(self) -> Iterator[None]:
        """Run the callbacks of one loop turn in their order; yields after each of them."""
        until_s = self._now_s() + _TURN_S
        rounds, is_late, is_end = 0, False, False
        while True:
            if self._calls and (rounds == 0 or (rounds < _ROUNDS_MAX and not is_late)):
                calls, self._calls = self._calls, []
                rounds += 1
            elif self._calls_at_end and not is_end:
                calls, self._calls_at_end = self._calls_at_end, []
                rounds, is_end = 0, True  # what these schedule has rounds of its own
            else:
                break
            for call in calls:
                try:
                    call()
                except Exception as error:  # noqa: BLE001 the loop reports it, as if it had run the callback itself
                    self._loop.call_exception_handler({"message": "scheduled callback failed", "exception": error})
                yield
            is_late = self._now_s() > until_s
        self._scheduled = False
        if self._calls or self._calls_at_end:
            self._schedule()

    def _run(self) -> None:
        for _ in self.turn():
            pass

    def _run_now(self, call: Callable[[], None]) -> None:
        self._scheduled = True
        self._calls.append(call)
        self._run()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)
