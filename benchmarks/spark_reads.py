"""Reading with Spark: a count, a group-by, and a stream that is read to its end."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import spark_rows, spark_session
from benchmarks.spark_sources import SOURCES, HeadraceAllColumns, Source
from benchmarks.spark_stock import Stock
from headrace.bench.measure import Figure, Sample, Subject, check

_COUNTED = "offset"
_GROUPED = "key,value,timestamp"
_PATIENCE_S = 300


def rows_rate() -> Figure:
    """Rows in a second, of those that the subject has dealt with."""
    return Figure("rows/s", True, lambda _, taken: taken.amount / taken.seconds)


def counting(stock: Stock) -> list[Subject]:
    """`count()` as a user writes it."""
    return [_subject(make(stock), _count, _COUNTED) for make in SOURCES]


def grouping(stock: Stock) -> list[Subject]:
    """A group-by that needs the key, the value and the time of each row."""
    return [_subject(make(stock), _group, _GROUPED) for make in SOURCES]


def draining(stock: Stock) -> list[Subject]:
    """A stream with the trigger `availableNow`, all columns."""
    made = [make(stock) for make in SOURCES if make is not HeadraceAllColumns]
    return [_subject(source, _drain, "") for source in made]


def _subject(source: Source, query: Callable[[Source, str], Sample], columns: str) -> Subject:
    params = source.params(columns)

    def prepare(place: str) -> None:
        spark_session.session()
        source.open(place)
        try:
            params.update(source.more)
            _verify(source, place, stream=query is _drain)
            query(source, f"{place}/warm-up")
        except BaseException:
            source.close()
            raise

    def sample(place: str, _: int) -> Sample:
        source.touch(columns)
        return query(source, place)

    return Subject(source.name, sample, params, prepare=prepare, finish=source.close)


def _verify(source: Source, place: str, *, stream: bool) -> None:
    """Compare all values with what they should be, once in a run."""
    from pyspark.sql import functions as F

    what = f"{source.name} {'stream' if stream else 'batch'}"
    if what in source.stock.verified:
        return
    sums = [F.count(F.lit(1)).alias("rows"), F.sum(F.crc32("value")).alias("checksum")]
    if stream:
        seen = _run(source.stream().observe("sums", *sums), f"{place}/verify")
        found = [progress.observedMetrics["sums"] for progress in seen if progress.numInputRows]
    else:
        found = source.batch("value").agg(*sums).collect()
    rows, checksum = sum(one["rows"] for one in found), sum(one["checksum"] or 0 for one in found)
    spark_rows.check_all(rows, checksum, spark_rows.truth(source.rows))
    source.stock.verified.add(what)


def _count(source: Source, place: str) -> Sample:
    del place
    begin = time.perf_counter()
    count = source.batch(_COUNTED).count()
    seconds = time.perf_counter() - begin
    check(count == source.rows, f"it counted {count} rows of {source.rows}")
    return Sample(seconds, amount=count)


def _group(source: Source, place: str) -> Sample:
    from pyspark.sql import functions as F

    del place
    sums = [F.count(F.lit(1)), F.sum(F.length("value")), F.unix_millis(F.max("timestamp"))]
    begin = time.perf_counter()
    found = source.batch(_GROUPED).groupBy("key").agg(*sums).collect()
    seconds = time.perf_counter() - begin
    spark_rows.check_groups(found, spark_rows.truth(source.rows))
    return Sample(seconds, amount=source.rows)


def _drain(source: Source, place: str) -> Sample:
    begin = time.perf_counter()
    seen = _run(source.stream(), place)
    seconds = time.perf_counter() - begin
    rows = sum(progress.numInputRows for progress in seen)
    check(rows == source.rows, f"{rows} rows came of {source.rows}")
    return Sample(seconds, amount=rows)


def _run(stream: Any, place: str) -> Sequence[Any]:
    """Read a stream to its end, into nothing; returns what Spark tells of each trigger."""
    writer = stream.writeStream.format("noop").option("checkpointLocation", f"{place}/checkpoint")
    query = writer.trigger(availableNow=True).start()
    try:
        check(query.awaitTermination(_PATIENCE_S), f"the stream did not end in {_PATIENCE_S} s")
    finally:
        query.stop()
    progresses: Sequence[Any] = query.recentProgress
    return progresses
