"""Writing with Spark: rows that Spark makes, into topics, files, and nothing."""

import abc
import functools
import itertools
import time
from typing import TYPE_CHECKING, Any

from benchmarks import broker_kafka, spark_rows, spark_session
from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.measure import Sample, Subject, check
from headrace.bench.servers import HOST
from headrace.client._sync.connecting import connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_KEY = f"cast(concat('key-', lpad(id % {spark_rows.KEYS}, 4, '0')) as binary) as key"
_VALUE = f"cast(rpad('', {spark_rows.SIZE}, hex(xxhash64(id))) as binary) as value"  # to make it takes little time
MADE = "spark.range in as many tasks as cores; a key of 1,000, and a hash of the row's number in hexadecimal, repeated"


_TOUCHED = 1000
_WARM_UP_SHARE = 10
"""The part of the rows that is written before it counts."""


class Sink(abc.ABC):
    """A way to write rows."""

    name: str
    words: str
    durability: str

    _numbers = itertools.count()

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.more: dict[str, str] = {}
        """What is known of it once it is open, and told as well."""

    def open(self, place: str) -> None:
        """Have everything ready that is written to."""
        del place

    def close(self) -> None:  # noqa: B027  # some have nothing to let go of
        """Let go."""

    @abc.abstractmethod
    def create(self, place: str) -> str:
        """Make a place to write to; returns its name."""

    @abc.abstractmethod
    def write(self, frame: "DataFrame", to: str) -> None:
        """What a user writes."""

    @abc.abstractmethod
    def read(self, to: str) -> "DataFrame | None":
        """What was written, if it is anywhere."""

    def delete(self, to: str) -> None:
        """Drop what was written."""
        del to

    def topic(self) -> str:
        """A name that nobody has used."""
        return f"written{next(self._numbers)}"


class Headrace(Sink):
    """This project's sink."""

    name = "headrace"
    words = 'format("headrace").mode("append"): staged by tasks, committed once by the driver (exactly once)'
    durability = "written: with the operating system when the write has ended"

    def __init__(self, rows: int, node: HeadraceNode) -> None:
        super().__init__(rows)
        self.node = node

    def open(self, place: str) -> None:
        """Have a broker run."""
        self.node.start(place, synced=False)

    def close(self) -> None:
        """Let it stop."""
        self.node.stop()

    def create(self, place: str) -> str:
        """A topic."""
        del place
        topic = self.topic()
        with connect(self.node.address) as bus:
            durability = self.node.durability.name.lower()
            bus.create_topic(topic, partitions=spark_rows.PARTITIONS, durability=durability)
        return topic

    def write(self, frame: "DataFrame", to: str) -> None:
        """To the topic."""
        writer = frame.write.format("headrace").option("address", self.node.address)
        writer.option("topic", to).mode("append").save()

    def read(self, to: str) -> "DataFrame":
        """All of the topic."""
        reader = spark_session.session().read.format("headrace").option("address", self.node.address)
        return reader.option("subscribe", to).option("columns", "value").load()

    def delete(self, to: str) -> None:
        """The topic."""
        with connect(self.node.address) as bus:
            bus.delete_topic(to)


class Tuples(Headrace):
    """What one writes first with Spark's Python data sources."""

    name = "tuple_source"
    words = "a Python data source that calls Producer.send for each row (at least once)"

    def __init__(self, rows: int, node: HeadraceNode) -> None:
        super().__init__(min(rows, spark_rows.SLOW_ROWS), node)

    def open(self, place: str) -> None:
        """Have a broker run."""
        from benchmarks import spark_tuples

        super().open(place)
        spark_tuples.register(spark_session.session())

    def write(self, frame: "DataFrame", to: str) -> None:
        """To the topic, row by row."""
        from benchmarks import spark_tuples

        writer = frame.write.format(spark_tuples.FORMAT).option("address", self.node.address)
        writer.option("topic", to).mode("append").save()


class Parquet(Sink):
    """What Spark writes best."""

    name = "parquet"
    words = "write.parquet (snappy)"
    durability = "files that are written and closed"

    def create(self, place: str) -> str:
        """A directory."""
        return f"{place}/written"

    def write(self, frame: "DataFrame", to: str) -> None:
        """To files."""
        frame.write.parquet(to)

    def read(self, to: str) -> "DataFrame":
        """The files."""
        return spark_session.session().read.parquet(to)


class Noop(Sink):
    """What it takes to make the rows."""

    name = "noop"
    words = 'format("noop"): the rows are made, and go nowhere'
    durability = "none"

    def create(self, place: str) -> str:
        """Nothing."""
        del place
        return ""

    def write(self, frame: "DataFrame", to: str) -> None:
        """To nowhere."""
        del to
        frame.write.format("noop").mode("append").save()

    def read(self, to: str) -> None:
        """Nothing is there."""


class Kafka(Sink):
    """Kafka with Spark's own connector."""

    name = "kafka"
    words = 'format("kafka"), Spark\'s own connector (at least once)'
    durability = broker_kafka.Kafka.words[False]

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self._kafka = broker_kafka.Kafka(broker_kafka.KafkaNode())

    def open(self, place: str) -> None:
        """Have Kafka run."""
        self.more["connector"] = spark_session.connector()
        self._kafka.node.start(place, synced=False)

    def close(self) -> None:
        """Let it stop."""
        self._kafka.node.stop()

    def create(self, place: str) -> str:
        """A topic."""
        from confluent_kafka.admin import NewTopic

        del place
        topic = self.topic()
        self._kafka._administer(lambda admin: admin.create_topics([NewTopic(topic, spark_rows.PARTITIONS, 1)]))
        return topic

    def write(self, frame: "DataFrame", to: str) -> None:
        """To the topic."""
        frame.write.format("kafka").options(**self._servers()).option("topic", to).save()

    def read(self, to: str) -> "DataFrame":
        """All of the topic."""
        reader = spark_session.session().read.format("kafka").options(**self._servers())
        return reader.option("subscribe", to).load()

    def delete(self, to: str) -> None:
        """The topic."""
        self._kafka.delete(to)

    def _servers(self) -> dict[str, str]:
        return {"kafka.bootstrap.servers": f"{HOST}:{self._kafka.node.port}"}


def writing(rows: int) -> list[Subject]:
    """A batch write of rows with a key and a value."""
    node = HeadraceNode()
    sinks = [Headrace(rows, node), Parquet(rows), Tuples(rows, node), Kafka(rows), Noop(rows)]
    return [_subject(sink) for sink in sinks]


def _subject(sink: Sink) -> Subject:
    params: dict[str, Any] = {"api": sink.words, "durability": sink.durability, "rows": sink.rows}

    def prepare(place: str) -> None:
        spark_session.session()
        sink.open(place)
        try:
            params.update(sink.more)
            _write(sink, f"{place}/warm-up", max(sink.rows // _WARM_UP_SHARE, 1))
        except BaseException:
            sink.close()
            raise

    def sample(place: str, _: int) -> Sample:
        # Spark ends Python processes that have had nothing to do for a minute, as while others were measured.
        _write(sink, f"{place}/touch", min(sink.rows, _TOUCHED))
        return _write(sink, place, sink.rows)

    return Subject(sink.name, sample, params, prepare=prepare, finish=sink.close)


def _write(sink: Sink, place: str, rows: int) -> Sample:
    to = sink.create(place)
    frame = _made(rows)
    begin = time.perf_counter()
    sink.write(frame, to)
    seconds = time.perf_counter() - begin
    written = sink.read(to)
    if written is not None:
        seen, checksum = _sums(written)
        check(seen == rows, f"{seen} rows were written of {rows}")
        check(checksum == _checksum(rows), "all rows were written, but with other values")
    sink.delete(to)
    return Sample(seconds, amount=rows)


@functools.cache
def _checksum(rows: int) -> int:
    return _sums(_made(rows))[1]


def _made(rows: int) -> "DataFrame":
    return spark_session.session().range(0, rows, 1, spark_session.CORES).selectExpr(_KEY, _VALUE)


def _sums(frame: "DataFrame") -> tuple[int, int]:
    from pyspark.sql import functions as F

    rows, checksum = frame.agg(F.count(F.lit(1)), F.sum(F.crc32("value"))).collect()[0]
    return rows, checksum
