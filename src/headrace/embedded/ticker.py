"""One thread that writes out what has waited in a buffer long enough."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Ticker:
    """Calls functions at their time, one after the other, in a thread that starts with the first."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call a function, which deals with its own errors, after a delay."""
        entry = (time.monotonic() + delay_s, next(self._numbers), call)
        with self._changed:
            heapq.heappush(self._due, entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headrace-tick", daemon=True)
                self._thread.start()
            elif self._due[0] is entry:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due:
                    self._changed.wait()
                wait_s = self._due[0][0] - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                call = heapq.heappop(self._due)[2]
            call()
