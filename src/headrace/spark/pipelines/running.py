"""Runs the queries of a file until they end, one of them fails, or somebody asks them to stop."""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.spark.errors import QueryFailed
from headrace.spark.pipelines.building import error_text, start_query
from headrace.spark.pipelines.definition import Definition
from headrace.spark.pipelines.listening import Heard, Listener

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger("headrace.pipelines")

GRACE_S = 15.0
"""How long a batch that is under way may take when queries are to stop."""

HEARING_S = 5.0
"""How long to wait for what Spark has to say of queries that have ended."""


class Application:
    """The queries of one file in one session."""

    def __init__(self, session: "SparkSession", name: str, heard: Heard) -> None:
        self._session = session
        self._listener = Listener(name, heard)
        self._queries: list[StreamingQuery] = []
        session.streams.addListener(self._listener)

    def start(self, definitions: Sequence[Definition], *, address: str, checkpoints: str, once: bool) -> None:
        """Start the queries; if one cannot be started, those before it are stopped."""
        try:
            for definition in definitions:
                query = start_query(self._session, definition, address=address, checkpoints=checkpoints, once=once)
                self._queries.append(query)
        except BaseException:
            self.stop(0.0)
            raise

    def running(self) -> bool:
        """Whether any query goes on; raises QueryFailed when one has failed."""
        active = [query for query in self._queries if query.isActive]
        for query in self._queries:
            if query not in active and (error := query.exception()) is not None:
                raise QueryFailed(f"{query.name} has failed: {error_text(error)}")
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
