"""The ways to have the same rows in Spark: this project's source, native Parquet, a source of tuples, and Kafka."""

import abc
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks import spark_rows, spark_session
from benchmarks.spark_stock import TOPIC, Stock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WRITTEN = "written: with the operating system when it was acknowledged"
_TOUCHED = spark_rows.BATCH
_COLUMNS = "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary"


class Source(abc.ABC):
    """A way to read the rows."""

    name: str
    durability = _WRITTEN

    def __init__(self, stock: Stock) -> None:
        self.stock = stock
        self.rows = stock.rows
        self.more: dict[str, str] = {}
        """What is known of it once it is open, and told as well."""

    @abc.abstractmethod
    def open(self, place: str) -> None:
        """Have everything ready that is read."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go."""

    @abc.abstractmethod
    def load(self, reader: Any, columns: str, end: int | None = None) -> "DataFrame":
        """What a user writes after `spark.read` or `spark.readStream`, who needs these columns; "" for all.

        With `end`, only what is before that offset in each partition; files have no such end.
        """

    @abc.abstractmethod
    def words(self, columns: str) -> str:
        """That, for people."""

    def batch(self, columns: str) -> "DataFrame":
        """The rows as a table."""
        return self.load(spark_session.session().read, columns)

    def stream(self) -> "DataFrame":
        """The rows as a stream."""
        return self.load(spark_session.session().readStream, "")

    def touch(self, columns: str) -> None:
        """Read a few rows, in every task: Spark ends Python processes that have had nothing to do for a minute."""
        self.load(spark_session.session().read, columns, _TOUCHED).count()

    def params(self, columns: str) -> dict[str, Any]:
        """What is told of it."""
        return {"api": self.words(columns), "durability": self.durability, "rows": self.rows}


class Headrace(Source):
    """Through the broker, with only the columns that are needed."""

    name = "headrace"

    def open(self, place: str) -> None:
        """Have the broker run."""
        self.stock.open_topic(place)

    def close(self) -> None:
        """Let it stop."""
        self.stock.broker.stop()

    def load(self, reader: Any, columns: str, end: int | None = None) -> "DataFrame":
        """From the broker."""
        return _load(reader, "headrace", {"address": self.stock.broker.address, **self._options(columns, end)})

    def _options(self, columns: str, end: int | None) -> dict[str, str]:
        return {**_bounds(end), **({"columns": columns} if columns else {})}

    def words(self, columns: str) -> str:
        """With the option that the documentation advises."""
        return f'format("headrace") through a broker{_pruned(columns)}'


class HeadraceAllColumns(Headrace):
    """Through the broker, all columns: without the option `columns`."""

    name = "headrace_all_columns"

    def _options(self, columns: str, end: int | None) -> dict[str, str]:
        del columns
        return super()._options("", end)

    def words(self, columns: str) -> str:
        """Without it."""
        del columns
        return 'format("headrace") through a broker, without the option columns'


class HeadracePath(Headrace):
    """The broker's files, without the broker."""

    name = "headrace_path"

    def load(self, reader: Any, columns: str, end: int | None = None) -> "DataFrame":
        """From the files."""
        return _load(reader, "headrace", {"path": self.stock.data, **self._options(columns, end)})

    def words(self, columns: str) -> str:
        """The same, from files."""
        return f'format("headrace") with the option path: the data directory\'s files{_pruned(columns)}'


class Parquet(Source):
    """What Spark reads best."""

    name = "parquet"
    durability = "files that are written and closed"

    def open(self, place: str) -> None:
        """Have the files."""
        self.stock.open_parquet(place)

    def close(self) -> None:
        """Nothing runs."""

    def load(self, reader: Any, columns: str, end: int | None = None) -> "DataFrame":
        """From the files; Spark itself reads no more columns than it needs."""
        del columns, end
        loaded: DataFrame = reader.schema(_COLUMNS).parquet(self.stock.parquet)
        return loaded

    def words(self, columns: str) -> str:
        """How the files came about."""
        counted = "; a count needs only the files' footers" if columns == "offset" else ""
        return f"spark.read.parquet of the same rows, written by Spark (snappy){counted}"


class Tuples(Source):
    """What one writes first with Spark's Python data sources."""

    name = "tuple_source"

    def __init__(self, stock: Stock) -> None:
        super().__init__(stock)
        self.rows = min(stock.rows, spark_rows.whole(spark_rows.SLOW_ROWS))

    def open(self, place: str) -> None:
        """Have the broker run."""
        from benchmarks import spark_tuples

        self.stock.open_topic(place)
        spark_tuples.register(spark_session.session())

    def close(self) -> None:
        """Let it stop."""
        self.stock.broker.stop()

    def load(self, reader: Any, columns: str, end: int | None = None) -> "DataFrame":
        """The first rows of the same topic."""
        from benchmarks import spark_tuples

        del columns
        until = str(end or self.rows // spark_rows.PARTITIONS)
        return _load(reader, spark_tuples.FORMAT, {"address": self.stock.broker.address, "topic": TOPIC, "end": until})

    def words(self, columns: str) -> str:
        """What it does."""
        del columns
        fewer = "" if self.rows == self.stock.rows else f" (the first {self.rows:,}: it is slow)"
        return f"a Python data source that yields a tuple for each message that Subscription gives{fewer}"


class Kafka(Source):
    """Kafka's rows with Spark's own connector."""

    name = "kafka"

    def open(self, place: str) -> None:
        """Have Kafka run."""
        self.more["connector"] = spark_session.connector()
        self.stock.open_kafka(place)

    def close(self) -> None:
        """Let it stop."""
        self.stock.kafka.stop()

    def load(self, reader: Any, columns: str, end: int | None = None) -> "DataFrame":
        """From Kafka."""
        del columns
        return _load(reader, "kafka", {"kafka.bootstrap.servers": self.stock.kafka_servers, **_bounds(end)})

    def words(self, columns: str) -> str:
        """As its users do."""
        del columns
        return 'format("kafka"), Spark\'s own connector'


def _load(reader: Any, name: str, options: Mapping[str, str]) -> "DataFrame":
    loaded: DataFrame = reader.format(name).options(**options).load()
    return loaded


def _bounds(end: int | None) -> dict[str, str]:
    """The options that are the same for this project's source and Kafka's."""
    wanted = {"subscribe": TOPIC, "startingOffsets": "earliest"}
    if end is None:
        return wanted
    ends = {str(partition): end for partition in range(spark_rows.PARTITIONS)}
    return {**wanted, "endingOffsets": json.dumps({TOPIC: ends})}


def _pruned(columns: str) -> str:
    return f', option("columns", "{columns}")' if columns else ""


SOURCES: tuple[Callable[[Stock], Source], ...] = (Headrace, HeadraceAllColumns, HeadracePath, Parquet, Tuples, Kafka)
