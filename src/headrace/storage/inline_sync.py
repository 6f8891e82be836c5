"""Decides whether a small fsync runs inline on the broker thread or on the flusher thread, from a moving average."""

import threading
from collections.abc import Callable

_LATENCY_S_MAX = 0.001
_WEIGHT = 0.1
"""The weight of the latest sync in the moving average."""


class InlineSyncPolicy:
    """Allows one thread to run small syncs itself while the disk is so quick that handing them over costs more."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = lambda: 0.0
        """A clock, in seconds."""
        self._thread: int | None = None
        self._latency_s = 0.0
        """The moving average of the time that a small sync takes."""
        self._not_before = 0.0

    def allow_this_thread(self, clock: Callable[[], float]) -> None:
        """Let the current thread sync inline: requests that arrive meanwhile are served together afterwards."""
        self.now = clock
        self._thread = threading.get_ident()

    @property
    def latency_s(self) -> float:
        """How long a small sync takes, about."""
        return self._latency_s

    @property
    def allows(self) -> bool:
        """Whether the current thread may sync inline now: it has not just done so, and the disk is quick enough."""
        if threading.get_ident() != self._thread or self._latency_s >= _LATENCY_S_MAX:
            return False
        return self.now() >= self._not_before

    def record_inline(self, seconds: float) -> None:
        """Record an inline sync: for half as long as it took, the thread does not sync inline again."""
        self._not_before = self.now() + seconds / 2

    def record_latency(self, seconds: float) -> None:
        """Record how long a small sync took, on whichever thread."""
        self._latency_s += (seconds - self._latency_s) * _WEIGHT
