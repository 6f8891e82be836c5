"""Topics as a sink for output modes that Spark has no sinks in Python for: each batch is written as a whole, once."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from headrace.model.errors import InvalidArgument
from headrace.spark.sink.options import checked_columns, sink_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_START_S = 600.0
"""How long the first batch waits until Spark has told which query it is of."""


class BatchSink:
    """Writes the batches of one query.

    Each is a transaction that is named by the query, as its checkpoint knows it, and numbered by the batch: one that
    Spark hands over again, because the driver died before Spark had noted that it is done, is recognised.
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
        """Learn which query it is of, as soon as it is started."""
        self._query_id.set_result(str(query.id))

    def write(self, batch: "DataFrame", number: int) -> None:
        """Write a batch, unless it was."""
        once = {"txnAppId": f"pipeline:{self._query_id.result(_START_S)}", "txnVersion": str(number)}
        batch.write.format("headrace").options(**self._options, **once).mode("append").save()
