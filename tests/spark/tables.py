"""Topics as the tests read them."""

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.spark.conftest import SparkBroker


def _set(reader: Any, broker: SparkBroker, options: dict[str, Any]) -> Any:
    if "path" not in options:
        reader = reader.option("address", broker.address)
    for name, value in options.items():
        reader = reader.option(name.replace("__", "."), value)
    return reader


def table(spark: SparkSession, broker: SparkBroker, **options: Any) -> DataFrame:
    """A batch read; two underscores in an option's name stand for a dot."""
    loaded: DataFrame = _set(spark.read.format("headrace"), broker, options).load()
    return loaded


def stream(spark: SparkSession, broker: SparkBroker, **options: Any) -> DataFrame:
    """A streaming read."""
    loaded: DataFrame = _set(spark.readStream.format("headrace"), broker, options).load()
    return loaded


def drain(source: DataFrame, out: Path, *, batches: list[int] | None = None) -> None:
    """Run a query over all there is, from where it was before; writes Parquet to `out`/rows."""
    query = (
        source.writeStream.format("parquet")
        .option("path", str(out / "rows"))
        .option("checkpointLocation", str(out / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)
    if batches is not None:
        batches += [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def finish(query: StreamingQuery) -> None:
    """Wait for a query that ends by itself."""
    assert query.awaitTermination(120), "the query does not end"


def drained(spark: SparkSession, out: Path) -> list[Any]:
    """What a query has written so far."""
    return spark.read.parquet(str(out / "rows")).orderBy("topic", "partition", "offset").collect()
