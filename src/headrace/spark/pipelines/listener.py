"""Hears from Spark how the queries get on."""

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

Heard = Callable[[QueryProgress], None]


class Listener(StreamingQueryListener):
    """Hands on the progress of queries, and notes when each of them was last between two batches.

    Spark calls it on threads of its own.
    """

    def __init__(self, pipeline: str, heard: Heard) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._heard = heard
        self._changed = threading.Condition()
        self._pauses: dict[str, int] = {}
        self._last: dict[str, QueryProgress] = {}
        self._ended: set[str] = set()

    def pauses(self, run_id: str) -> int:
        """How often a query has been between two batches."""
        with self._changed:
            return self._pauses.get(run_id, 0)

    def wait_for_pause(self, run_id: str, after: int, timeout: float) -> bool:
        """Wait until a query has been between two batches once more; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pauses.get(run_id, 0) > after, timeout)

    def wait_for_ends(self, run_ids: set[str], timeout: float) -> bool:
        """Wait until all has been heard of queries that have ended; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: run_ids <= self._ended, timeout)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """A query has begun."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """A batch is done."""
        said = json.loads(event.progress.json)
        run_id = str(said["runId"])
        progress = progress_of(self._pipeline, said)
        self._last[run_id] = progress
        self._pause(run_id)
        self._heard(progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """There was nothing to do for a while."""
        run_id = str(event.runId)
        self._pause(run_id)
        last = self._last.get(run_id)
        if last is not None:
            self._heard(idle_after(last))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """A query has ended; this is the last that is heard of it."""
        self._ended.add(str(event.runId))
        self._pause(str(event.runId))

    def _pause(self, run_id: str) -> None:
        with self._changed:
            self._pauses[run_id] = self._pauses.get(run_id, 0) + 1
            self._changed.notify_all()
