"""The sink: tasks stage what they write in one transaction that they share, and the driver commits it, once."""

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.client._sync.bus import Bus, connect
from headrace.model.errors import HeadraceError, InvalidArgument, TransactionFenced
from headrace.spark.sink.options import SinkOptions, checked_columns, sink_options
from headrace.spark.sink.topic_batches import TopicBatches

logger = logging.getLogger("headrace.spark")

_CLIENT = "spark"
_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"
_SILENCE_S = 3600.0
"""How long the broker keeps what was staged when it hears nothing more of it: tasks may take long to come to it."""
_COMMIT_BYTES_PER_S = 4 << 20
"""A commit may take longer when there is much: a slow disk writes so much."""
_ABORT_S = 10.0


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task has staged."""

    transaction: str
    sequence: int
    epoch: int
    committed: bool
    """There was nothing to do: a write before this one has committed all of it."""
    stages: Sequence[int] = ()
    rows: int = 0
    bytes: int = 0


class _Sink:
    """What batches and streams have in common."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._places = checked_columns(schema, options)

    def stage(self, transaction: str, sequence: int, batches: Iterator[pa.RecordBatch]) -> Written:
        """Stage rows in a transaction, on an executor."""
        options = self._options
        task = TaskContext.get()
        with self._connect(options.timeout) as bus:
            part = bus.transaction(transaction, sequence=sequence, timeout=_SILENCE_S)
            part.join()
            if part.already_committed:
                for _ in batches:  # Spark wants to be rid of them
                    pass
                return Written(transaction, sequence, part.epoch, committed=True)
            outgoing = TopicBatches(part, self._places, options.topic, task.partitionId() if task is not None else 0)
            for batch in batches:
                outgoing.add(batch)
            outgoing.flush()
            stages = part.staged()
        return Written(transaction, sequence, part.epoch, False, stages, outgoing.rows, outgoing.bytes)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make what the tasks staged visible, on the driver."""
        written = [message for message in messages if isinstance(message, Written)]
        if not written or any(one.committed for one in written):
            return  # if it was committed when one of them came to it, all of it was
        first = written[0]
        if len({one.epoch for one in written}) > 1:
            raise TransactionFenced(
                f"the transaction {first.transaction} was begun anew while tasks were writing; nothing was written: "
                "write again"
            )
        with self._connect(self._options.timeout) as bus:
            whole = bus.transaction(first.transaction, sequence=first.sequence)
            whole.adopt_stages(first.epoch, [stage for one in written for stage in one.stages])
            whole.commit(self._options.timeout + sum(one.bytes for one in written) / _COMMIT_BYTES_PER_S)

    def abort(self, transaction: str, sequence: int, *, for_good: bool) -> None:
        """Have what the tasks staged forgotten, on the driver; if that fails the broker does it in its time."""
        try:
            with self._connect(min(self._options.timeout, _ABORT_S)) as bus:
                whole = bus.transaction(transaction, sequence=sequence)
                whole.join()
                if for_good:
                    # A task that does not know yet that all is over would begin it anew. So it is done, with nothing
                    # in it.
                    whole.commit()
                else:
                    whole.abort()
        except HeadraceError as error:
            logger.info("the transaction %s is left for the broker to abort: %s", transaction, error)

    def _connect(self, timeout: float) -> Bus:
        return connect(self._options.address, name=_CLIENT, timeout=timeout, wait=timeout)


class HeadraceArrowWriter(DataSourceArrowWriter):
    """Writes a DataFrame, all of it or nothing."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        checked = sink_options(options)
        self._sink = _Sink(checked, schema)
        self._repeatable = bool(checked.app_id)
        self._transaction = f"spark:app:{checked.app_id}" if self._repeatable else f"spark:batch:{uuid.uuid4()}"
        self._sequence = checked.version

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage a task's rows."""
        return self._sink.stage(self._transaction, self._sequence, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make all of it visible."""
        self._sink.commit(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Forget all of it."""
        del messages
        self._sink.abort(self._transaction, self._sequence, for_good=not self._repeatable)


class HeadraceStreamArrowWriter(DataSourceStreamArrowWriter):
    """Writes a stream, each batch of it once."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        checked = sink_options(options)
        if checked.app_id:
            raise InvalidArgument("txnAppId and txnVersion are for batch writes: a stream's batches have numbers")
        self._sink = _Sink(checked, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage a task's rows of a batch."""
        task = TaskContext.get()
        query = task.getLocalProperty(_QUERY_ID) if task is not None else None
        batch = task.getLocalProperty(_BATCH_ID) if task is not None else None
        if query is None or batch is None:
            raise InvalidArgument("Spark does not say which batch of which query it writes, so nothing can be written")
        return self._sink.stage(f"spark:{query}", int(batch), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002
        """Make all of a batch visible."""
        self._sink.commit(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002
        """Forget all of a batch."""
        for message in messages:
            if isinstance(message, Written):
                self._sink.abort(message.transaction, message.sequence, for_good=False)
                return
