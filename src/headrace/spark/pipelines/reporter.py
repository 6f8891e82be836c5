"""Publishes the progress of queries in the background."""

import logging
import threading
from collections import deque

import msgspec

from headrace.client._sync.bus import Bus
from headrace.model.errors import HeadraceError
from headrace.spark.pipelines.progress import QueryProgress
from headrace.spark.pipelines.records import PROGRESS_TOPIC

logger = logging.getLogger("headrace.pipelines")

_WAITING_MAX = 1000
"""Queue limit; while the broker is unreachable, the oldest reports are dropped."""
_AGAIN_S = 1.0
_LAST_S = 3.0
"""How long the end of a run waits for unpublished reports."""


class Reporter:
    """Publishes progress on a thread of its own."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: deque[QueryProgress] = deque(maxlen=_WAITING_MAX)
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="progress", daemon=True)
        self._thread.start()

    def add(self, progress: QueryProgress) -> None:
        """Queue a report."""
        with self._changed:
            self._waiting.append(progress)
            self._changed.notify_all()

    def close(self) -> None:
        """Publish the queued reports, up to a short timeout, and stop the thread."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(_LAST_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                taken = list(self._waiting)
                self._waiting.clear()
            try:
                for each in taken:
                    key = f"{each.pipeline}/{each.query}"
                    self._bus.publish(PROGRESS_TOPIC, msgspec.json.encode(each), key=key)
            except HeadraceError as error:
                logger.warning("progress not published  error=%s", error)
                with self._changed:
                    self._changed.wait_for(lambda: self._ending, _AGAIN_S)
                    if self._ending:
                        return
