"""Runs the queries of a file until they end, one of them fails, or somebody asks them to stop."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.spark.pipelines.definition import Definition
from headrace.spark.pipelines.failures import query_failure
from headrace.spark.pipelines.listener import Heard, Listener
from headrace.spark.pipelines.query_builder import error_text, start_query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger("headrace.pipelines")

GRACE_S = 15.0
"""How long a batch that is under way may take when queries are to stop."""

HEARING_S = 5.0
"""How long to wait for what Spark has to say of queries that have ended."""

FIRST_BATCHES_S = 30.0
"""How long the first batches of all queries may take before they count as running all the same."""

_LOOK_EVERY_S = 0.05
_FIXED = ("Processing new data", "No new data but cleaning up state")
"""What Spark says of a query whose next batch has its offsets written to the checkpoint."""
_BETWEEN = ("Waiting for next trigger", "Waiting for data to arrive")
"""What it says of one that has nothing left to do."""


class Application:
    """The queries of one file in one session."""

    def __init__(self, session: "SparkSession", name: str, heard: Heard) -> None:
        self._session = session
        self._listener = Listener(name, heard)
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
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the queries, each when the one before knows where it begins to read.

        One at a time, because each of their sources starts Python processes, and Spark waits 10 s for one, however many
        are being started. If a query cannot be started, those before it are stopped.

        Parameters:
            definitions: what to start.
            address: of the broker, for sources and sinks that name none.
            checkpoints: below this the queries keep how far they are.
            once: end when all that is there now is done, whatever the triggers say.
            tell: told what is going on.
            asked: whether somebody wants it to end; then no more queries are started.
        """
        self._checkpoints = checkpoints.rstrip("/")
        try:
            for number, definition in enumerate(definitions, 1):
                if asked():
                    return
                of = f" ({number} of {len(definitions)})" if len(definitions) > 1 else ""
                tell(f"starting query {definition.name}{of}")
                query = start_query(self._session, definition, address=address, checkpoints=checkpoints, once=once)
                self._queries.append(query)
                self._wait([query], (*_FIXED, *_BETWEEN), asked)
            tell("waiting for the first batch")
            self._wait(self._queries, _BETWEEN, asked, FIRST_BATCHES_S)
        except BaseException:
            self.stop(0.0)
            raise

    def _wait(
        self,
        queries: "Sequence[StreamingQuery]",
        messages: Sequence[str],
        asked: Callable[[], bool],
        timeout: float | None = None,
    ) -> None:
        """Wait until Spark has said one of these of each query, or a batch of it is done; raises QueryFailed."""
        end = None if timeout is None else time.monotonic() + timeout
        left = list(queries)
        while left and not asked() and (end is None or time.monotonic() < end):
            self.running()
            left = [query for query in left if not self._has_come(query, messages)]
            time.sleep(_LOOK_EVERY_S if left else 0.0)

    def _has_come(self, query: "StreamingQuery", messages: Sequence[str]) -> bool:
        if not query.isActive or self._listener.pauses(str(query.runId)):
            return True
        return query.status["message"] in messages

    def running(self) -> bool:
        """Whether any query goes on; raises QueryFailed when one has failed."""
        active = [query for query in self._queries if query.isActive]
        for query in self._queries:
            if query not in active and (error := query.exception()) is not None:
                raise query_failure(query.name, error_text(error), f"{self._checkpoints}/{query.name}")
        return bool(active)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop the queries, each when the batch is done that it is at, if that does not take too long."""
        end = time.monotonic() + grace_s
        active = [query for query in self._queries if query.isActive]
        before = {str(query.runId): self._listener.pauses(str(query.runId)) for query in active}
        for query in active:
            run_id = str(query.runId)
            if query.isActive and query.status["isTriggerActive"]:
                self._listener.wait_for_pause(run_id, before[run_id], max(end - time.monotonic(), 0.0))
            _stop(query)

    def close(self) -> None:
        """Stop what still runs, at once, hear all that there is to hear, and let go of the session."""
        self.stop(0.0)
        self._listener.wait_for_ends({str(query.runId) for query in self._queries}, HEARING_S)
        self._session.streams.removeListener(self._listener)


def _stop(query: "StreamingQuery") -> None:
    try:
        query.stop()
    except Exception:  # it takes too long; the end of the session does not wait for it
        logger.error("%s did not stop in time", query.name, exc_info=True)
