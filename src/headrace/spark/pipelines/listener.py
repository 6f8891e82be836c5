"""Receives Spark's events about the progress of queries."""

import json
import threading
from collections.abc import Callable

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from headrace.spark.pipelines.progress import QueryProgress, idle_after, progress_of

ProgressCallback = Callable[[QueryProgress], None]


class Listener(StreamingQueryListener):
    """Forwards the progress of queries, and counts how often each has been between two batches.

    Spark calls it on threads of its own.
    """

    def __init__(self, pipeline: str, on_progress: ProgressCallback) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._pauses: dict[str, int] = {}
        self._last: dict[str, QueryProgress] = {}
        self._ended: set[str] = set()

    def pauses(self, run_id: str) -> int:
        """Return how often a query has been between two batches."""
        with self._changed:
            return self._pauses.get(run_id, 0)

    def wait_for_pause(self, run_id: str, after: int, timeout: float) -> bool:
        """Wait until a query has been between two batches once more; returns whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pauses.get(run_id, 0) > after, timeout)

    def wait_for_ends(self, run_ids: set[str], timeout: float) -> bool:
        """Wait for the last events of ended queries; returns whether they have arrived."""
        with self._changed:
            return self._changed.wait_for(lambda: run_ids <= self._ended, timeout)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Ignore the start of a query."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Forward the progress of a finished batch."""
        said = json.loads(event.progress.json)
        run_id = str(said["runId"])
        progress = progress_of(self._pipeline, said)
        self._last[run_id] = progress
        self._pause(run_id)
        self._on_progress(progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Forward that a query is idle."""
        run_id = str(event.runId)
        self._pause(run_id)
        last = self._last.get(run_id)
        if last is not None:
            self._on_progress(idle_after(last))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Record the end of a query, its last event."""
        self._ended.add(str(event.runId))
        self._pause(str(event.runId))

    def _pause(self, run_id: str) -> None:
        with self._changed:
            self._pauses[run_id] = self._pauses.get(run_id, 0) + 1
            self._changed.notify_all()
