"""Runs the queries of a file until they end, one of them fails, or somebody asks them to stop."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.spark.pipelines.definition import Definition
from headrace.spark.pipelines.failures import query_failure
from headrace.spark.pipelines.listener import Listener, ProgressCallback
from headrace.spark.pipelines.query_builder import error_text, start_query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger("headrace.pipelines")

GRACE_S = 15.0
"""How long a stop waits for the current batch of each query."""

HEARING_S = 5.0
"""How long a close waits for Spark's last events of ended queries."""

FIRST_BATCHES_S = 30.0
"""How long a start waits for the first batches; after that the queries count as running."""

_LOOK_EVERY_S = 0.05
_FIXED = ("Processing new data", "No new data but cleaning up state")
"""Spark's status of a query that has written the offsets of its next batch to the checkpoint."""
_BETWEEN = ("Waiting for next trigger", "Waiting for data to arrive")
"""Spark's status of a query between two batches."""


class Application:
    """The queries of one file in one session."""

    def __init__(self, session: "SparkSession", name: str, on_progress: ProgressCallback) -> None:
        self._session = session
        self._listener = Listener(name, on_progress)
        self._queries: list[StreamingQuery] = []
        self._checkpoints = ""
        session.streams.addListener(self._listener)

    def start(
        self,
        definitions: Sequence[Definition],
        *,
        address: str,
        checkpoints: str,
        once: bool,
        tell: Callable[[str], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the queries one by one, each after the one before has fixed its start offsets.

        Each source starts Python processes, and Spark waits only 10 s for one, however many start at once. If a query
        cannot be started, those before it are stopped.

        Parameters:
            definitions: what to start.
            address: the broker's address, for sources and sinks that name none.
            checkpoints: the directory of the queries' checkpoints.
            once: process the available data and end, whatever the triggers are.
            tell: called with a text at each step.
            should_stop: returns whether a stop was requested; then no more queries are started.
        """
        self._checkpoints = checkpoints.rstrip("/")
        try:
            for number, definition in enumerate(definitions, 1):
                if should_stop():
                    return
                of = f" ({number} of {len(definitions)})" if len(definitions) > 1 else ""
                tell(f"starting query {definition.name}{of}")
                query = start_query(self._session, definition, address=address, checkpoints=checkpoints, once=once)
                self._queries.append(query)
                self._wait([query], (*_FIXED, *_BETWEEN), should_stop)
            tell("waiting for the first batch")
            self._wait(self._queries, _BETWEEN, should_stop, FIRST_BATCHES_S)
        except BaseException:
            self.stop(0.0)
            raise

    def _wait(
        self,
        queries: "Sequence[StreamingQuery]",
        messages: Sequence[str],
        should_stop: Callable[[], bool],
        timeout: float | None = None,
    ) -> None:
        """Wait until each query has one of these statuses or has finished a batch; raises QueryFailed."""
        end = None if timeout is None else time.monotonic() + timeout
        left = list(queries)
        while left and not should_stop() and (end is None or time.monotonic() < end):
            self.running()
            left = [query for query in left if not self._has_come(query, messages)]
            time.sleep(_LOOK_EVERY_S if left else 0.0)

    def _has_come(self, query: "StreamingQuery", messages: Sequence[str]) -> bool:
        if not query.isActive or self._listener.pauses(str(query.runId)):
            return True
        return query.status["message"] in messages

    def running(self) -> bool:
        """Return whether any query is active; raises QueryFailed if one has failed."""
        active = [query for query in self._queries if query.isActive]
        for query in self._queries:
            if query not in active and (error := query.exception()) is not None:
                raise query_failure(query.name, error_text(error), f"{self._checkpoints}/{query.name}")
        return bool(active)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop the queries, each after its current batch or the grace period."""
        end = time.monotonic() + grace_s
        active = [query for query in self._queries if query.isActive]
        before = {str(query.runId): self._listener.pauses(str(query.runId)) for query in active}
        for query in active:
            run_id = str(query.runId)
            if query.isActive and query.status["isTriggerActive"]:
                self._listener.wait_for_pause(run_id, before[run_id], max(end - time.monotonic(), 0.0))
            _stop(query)

    def close(self) -> None:
        """Stop running queries at once, wait for their last events, and remove the listener."""
        self.stop(0.0)
        self._listener.wait_for_ends({str(query.runId) for query in self._queries}, HEARING_S)
        self._session.streams.removeListener(self._listener)


def _stop(query: "StreamingQuery") -> None:
    try:
        query.stop()
    except Exception:  # Spark's stop timed out; the end of the session does not wait for the query
        logger.error("query did not stop in time  query=%s", query.name, exc_info=True)
