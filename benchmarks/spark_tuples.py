"""A source and a sink as one writes them first: a Python tuple or row for each message, through the Python client."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

import headrace

FORMAT = "tuples"
_TASKS = 2
"""Tasks for each partition: no fewer than cores."""


class Span(InputPartition):
    """What a task reads."""

    def __init__(self, partition: int, start: int, end: int) -> None:
        self.partition = partition
        self.start = start
        self.end = end


class TupleSource(DataSource):
    """A topic, up to an offset that is the same for all its partitions."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return FORMAT

    def schema(self) -> str:
        """As a topic has it."""
        return "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary"

    def reader(self, schema: StructType) -> "Tuples":  # noqa: ARG002
        """What reads a batch."""
        return Tuples(self.options)

    def streamReader(self, schema: StructType) -> "StreamOfTuples":  # noqa: ARG002
        """What reads a stream."""
        return StreamOfTuples(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> "RowByRow":  # noqa: ARG002
        """What writes a batch."""
        return RowByRow(self.options)


def _spans(options: Any) -> list[InputPartition]:
    end, spans = int(options["end"]), []
    with headrace.connect(options["address"]) as bus:
        for partition in bus.describe_topic(options["topic"]).partitions:
            edges = [end * at // _TASKS for at in range(_TASKS + 1)]
            spans += [Span(partition.partition, edges[at], edges[at + 1]) for at in range(_TASKS)]
    return spans


def _tuples(options: Any, span: Span) -> Iterator[tuple[Any, ...]]:
    topic = options["topic"]
    with headrace.connect(options["address"]) as bus:
        subscription = bus.subscribe(topic, partitions=[span.partition], start={span.partition: span.start})
        with subscription:
            for message in subscription:
                if message.offset >= span.end:
                    return
                at = datetime.fromtimestamp(message.timestamp / 1e6, UTC)
                yield topic, message.partition, message.offset, at, message.key, message.value
                if message.offset == span.end - 1:
                    return


class Tuples(DataSourceReader):
    """Reads a batch."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """What tasks read."""
        return _spans(self._options)

    def read(self, partition: Any) -> Iterator[tuple[Any, ...]]:
        """The messages of a task."""
        return _tuples(self._options, partition)


class StreamOfTuples(DataSourceStreamReader):
    """Reads a stream, all of it at once."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def initialOffset(self) -> dict[str, int]:  # Spark's names
        """The beginning."""
        return {"end": 0}

    def latestOffset(self) -> dict[str, int]:
        """The end."""
        return {"end": int(self._options["end"])}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """What tasks read."""
        return _spans(self._options) if start != end else []

    def read(self, partition: Any) -> Iterator[tuple[Any, ...]]:
        """The messages of a task."""
        return _tuples(self._options, partition)


class RowByRow(DataSourceWriter):
    """Publishes each row, at once for all to see."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Publish a task's rows."""
        with headrace.connect(self._options["address"]) as bus, bus.producer(self._options["topic"]) as producer:
            for row in iterator:
                producer.send(bytes(row.value), bytes(row.key))
        return WriterCommitMessage()


def register(session: SparkSession) -> None:
    """Make the format known to a session, also where workers cannot import this module."""
    import benchmarks.spark_tuples as this

    cloudpickle.register_pickle_by_value(this)
    session.dataSource.register(TupleSource)
