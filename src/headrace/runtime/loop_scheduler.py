"""What is to be done soon, on an event loop: all of it in one turn, with what follows from it."""

import asyncio
import threading
import time
from collections.abc import Callable

_PASSES = 4
"""How often what follows from what was done is done in the same turn, before others have theirs."""
_TURN_S = 0.002
"""After so long no further round of follow-up callbacks begins in the same turn: long work comes in slices."""


class LoopScheduler:
    """Calls put off until all that has just arrived was looked at.

    A message that comes in is gathered with others, appended, and handed to readers, each put off after the other. On
    the loop itself every step would cost a turn, with a look at all sockets.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._loop = loop
        self._now_s = now_s
        self._thread = threading.get_ident()
        self._calls: list[Callable[[], None]] = []
        self._last: list[Callable[[], None]] = []
        self._comes = False

    def soon(self, call: Callable[[], None]) -> None:
        """Call it when all that is going on now is done."""
        self._calls.append(call)
        self._come()

    def last(self, call: Callable[[], None]) -> None:
        """Call it at the end of the turn, when what is to be done soon is done."""
        self._last.append(call)
        self._come()

    def from_thread(self, call: Callable[[], None]) -> None:
        """Call it on the loop's thread, with what follows; may be said on any thread."""
        if threading.get_ident() == self._thread:
            self.soon(call)
            return
        try:
            self._loop.call_soon_threadsafe(self._run_now, call)
        except RuntimeError:
            # The loop is closed, and with it everyone who could have been told.
            if not self._loop.is_closed():
                raise

    def _run_now(self, call: Callable[[], None]) -> None:
        self._comes = True
        self._calls.append(call)
        self._run()

    def _come(self) -> None:
        if not self._comes:
            self._comes = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        until_s = self._now_s() + _TURN_S
        self._do_passes(until_s)
        if self._last:
            last, self._last = self._last, []
            self._do(last)
            self._do_passes(until_s)
        self._comes = False
        if self._calls or self._last:
            self._come()

    def _do_passes(self, until_s: float) -> None:
        """Run at least one round of callbacks, and rounds of what follows from them while there is time."""
        for _ in range(_PASSES):
            calls, self._calls = self._calls, []
            if not calls:
                break
            self._do(calls)
            if self._now_s() > until_s:
                break

    def _do(self, calls: list[Callable[[], None]]) -> None:
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001 the loop tells of it, as it would have by itself
                self._loop.call_exception_handler({"message": "what was put off failed", "exception": error})
