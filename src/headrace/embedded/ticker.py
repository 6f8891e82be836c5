"""A timer thread, which writes the buffers of embedded logs after their delay."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

logger = logging.getLogger("headrace.embedded")

_WAIT_S_MAX = 3600.0
"""Longest single wait in seconds: locks cannot wait longer than this at once."""


class Ticker:
    """Calls functions at their scheduled times, one after the other, in a thread that starts with the first."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[float, int, Callable[[], None]]] = SimpleQueue()
        self._numbers = itertools.count()
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call a function after a delay; the function handles its own errors."""
        self._asked.put((time.monotonic() + delay_s, next(self._numbers), call))
        if not self._is_running():
            with self._starting:
                if not self._is_running():
                    self._thread = threading.Thread(target=self._run, name="headrace-tick", daemon=True)
                    self._thread.start()

    def _is_running(self) -> bool:
        # An interrupt may have occurred before the thread was started.
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        due: list[tuple[float, int, Callable[[], None]]] = []
        while True:
            wait_s = min(due[0][0] - time.monotonic(), _WAIT_S_MAX) if due else None
            if wait_s is None or wait_s > 0:
                try:
                    heapq.heappush(due, self._asked.get(timeout=wait_s))
                except Empty:
                    continue  # the first call is due
            else:
                try:
                    heapq.heappop(due)[2]()
                except Exception:
                    logger.exception("scheduled call failed")
