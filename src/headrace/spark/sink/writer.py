"""The sink: tasks stage their rows in one shared transaction, which the driver commits once."""

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.client._sync.bus import Bus
from headrace.client._sync.connecting import connect
from headrace.model.errors import HeadraceError, InvalidArgument, TransactionFenced
from headrace.spark.sink.options import SinkOptions, checked_columns, sink_options
from headrace.spark.sink.topic_batches import TopicBatches

logger = logging.getLogger("headrace.spark")

_CLIENT = "spark"
_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"
_SILENCE_S = 3600.0
"""Transaction timeout: how long the broker keeps staged batches without activity; tasks may start late."""
_COMMIT_BYTES_PER_S = 4 << 20
"""Assumed write rate of a slow disk, by which the timeout of a commit grows with its size."""
_ABORT_S = 10.0


@dataclass(frozen=True)
class StagedRows(WriterCommitMessage):
    """A task's commit message: the stages that it has added to the transaction."""

    transaction: str
    sequence: int
    epoch: int
    committed: bool
    """Whether an earlier write has committed this transaction already."""
    stages: Sequence[int] = ()
    rows: int = 0
    bytes: int = 0


class _Sink:
    """Stages, commits and aborts rows, for batch and stream writers."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._column_indexes = checked_columns(schema, options)

    def stage(self, transaction: str, sequence: int, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage rows in a transaction, on an executor."""
        options = self._options
        task = TaskContext.get()
        with self._connect(options.timeout) as bus:
            part = bus.transaction(transaction, sequence=sequence, timeout=_SILENCE_S)
            part.join()
            if part.already_committed:
                for _ in batches:  # Spark requires the input to be consumed
                    pass
                return StagedRows(transaction, sequence, part.epoch, committed=True)
            outgoing = TopicBatches(
                part, self._column_indexes, options.topic, task.partitionId() if task is not None else 0
            )
            for batch in batches:
                outgoing.add(batch)
            outgoing.flush()
            stages = part.staged()
        return StagedRows(transaction, sequence, part.epoch, False, stages, outgoing.rows, outgoing.bytes)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit the rows that the tasks have staged, on the driver."""
        staged = [message for message in messages if isinstance(message, StagedRows)]
        if not staged or any(one.committed for one in staged):
            return  # a transaction that one task finds committed is committed as a whole
        first = staged[0]
        if len({one.epoch for one in staged}) > 1:
            raise TransactionFenced(
                f"the transaction {first.transaction} was begun anew while tasks were writing; nothing was written: "
                "write again"
            )
        with self._connect(self._options.timeout) as bus:
            whole = bus.transaction(first.transaction, sequence=first.sequence)
            whole.adopt_stages(first.epoch, [stage for one in staged for stage in one.stages])
            whole.commit(self._options.timeout + sum(one.bytes for one in staged) / _COMMIT_BYTES_PER_S)

    def abort(self, transaction: str, sequence: int, *, for_good: bool) -> None:
        """Abort the transaction on the driver; if that fails, the broker aborts it at its timeout."""
        try:
            with self._connect(min(self._options.timeout, _ABORT_S)) as bus:
                whole = bus.transaction(transaction, sequence=sequence)
                whole.join()
                if for_good:
                    # A task that is still running would begin the transaction anew. An empty commit ends it for good.
                    whole.commit()
                else:
                    whole.abort()
        except HeadraceError as error:
            logger.info("abort failed; the broker aborts at its timeout  transaction=%s error=%s", transaction, error)

    def _connect(self, timeout: float) -> Bus:
        token = self._options.token or None
        return connect(self._options.address, name=_CLIENT, timeout=timeout, wait=timeout, token=token)


class HeadraceArrowWriter(DataSourceArrowWriter):
    """Writes a DataFrame in one transaction."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        checked = sink_options(options)
        self._sink = _Sink(checked, schema)
        self._repeatable = bool(checked.app_id)
        self._transaction = f"spark:app:{checked.app_id}" if self._repeatable else f"spark:batch:{uuid.uuid4()}"
        self._sequence = checked.version

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of a task."""
        return self._sink.stage(self._transaction, self._sequence, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit the rows of all tasks."""
        self._sink.commit(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Abort the transaction."""
        del messages
        self._sink.abort(self._transaction, self._sequence, for_good=not self._repeatable)


class HeadraceStreamArrowWriter(DataSourceStreamArrowWriter):
    """Writes each batch of a stream in one transaction, exactly once."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        checked = sink_options(options)
        if checked.app_id:
            raise InvalidArgument("txnAppId and txnVersion are for batch writes: a stream's batches have numbers")
        self._sink = _Sink(checked, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage a task's rows of a batch."""
        task = TaskContext.get()
        query = task.getLocalProperty(_QUERY_ID) if task is not None else None
        batch = task.getLocalProperty(_BATCH_ID) if task is not None else None
        if query is None or batch is None:
            raise InvalidArgument("Spark does not say which batch of which query it writes, so nothing can be written")
        return self._sink.stage(f"spark:{query}", int(batch), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002
        """Commit a batch."""
        self._sink.commit(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002
        """Abort a batch."""
        for message in messages:
            if isinstance(message, StagedRows):
                self._sink.abort(message.transaction, message.sequence, for_good=False)
                return
