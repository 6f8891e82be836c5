"""A sink for the output modes update and complete, which Spark's Python sinks lack: writes each batch exactly once."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from headrace.model.errors import InvalidArgument
from headrace.spark.sink.options import checked_columns, sink_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_START_S = 600.0
"""How long the first batch waits for the id of its query."""


class BatchSink:
    """Writes the batches of one query.

    Each batch is a transaction named by the query's id in its checkpoint and numbered by the batch. If Spark repeats
    a batch, because the driver died before it recorded the batch as done, the broker recognises it.
    """

    def __init__(self, session: "SparkSession", frame: "DataFrame", options: Mapping[str, str], mode: str) -> None:
        if getattr(session, "_sc", None) is None:
            raise InvalidArgument(
                f"the output mode {mode} into a topic does not work on Spark Connect: run it on another master, or use "
                "append"
            )
        checked_columns(frame.schema, sink_options(options))
        self._options = dict(options)
        self._query_id: Future[str] = Future()

    def begin(self, query: "StreamingQuery") -> None:
        """Set the query's id, once the query is started."""
        self._query_id.set_result(str(query.id))

    def write(self, batch: "DataFrame", number: int) -> None:
        """Write a batch unless it was written before."""
        once = {"txnAppId": f"pipeline:{self._query_id.result(_START_S)}", "txnVersion": str(number)}
        batch.write.format("headrace").options(**self._options, **once).mode("append").save()
