"""The group `spark`: topics in Spark, beside native Parquet, a source of tuples, and Kafka with Spark's connector."""

import contextlib
from collections.abc import Iterator

from benchmarks import spark_latency, spark_reads, spark_rows, spark_session, spark_sinks
from benchmarks.spark_reads import rows_rate
from benchmarks.spark_stock import Stock
from headrace.bench.measure import Benchmark, Sample, Subject, Unavailable, WrongResult, percentile

_WARM_UP = (
    "of every subject: the query once before the first sample (a write: a tenth of it), a few rows before each one "
    "(Spark ends Python processes that were idle for a minute)"
)
_OTHERS = ("parquet", "kafka")


def benchmarks(*, rows: int | None = None, messages: int = spark_latency.MESSAGES) -> list[Benchmark]:
    """All of the group."""
    rows = spark_rows.rows_asked() if rows is None else spark_rows.whole(rows)
    stock = Stock(rows)
    spark = {"spark": spark_session.words()}
    params = {**spark_rows.params(rows), **spark, "warm_up": _WARM_UP}
    grouped = {**params, "query": 'groupBy("key").agg(count(*), sum(length(value)), max(timestamp))'}
    drained = {**params, "query": 'trigger(availableNow=True) into format("noop"), all columns, no limit for a trigger'}
    written = {**params, "made": spark_sinks.MADE}
    # Each sample is one query: what it has read is in `rows`.
    return [
        _benchmark("batch_count", spark_reads.counting(stock), {**params, "query": "load().count()"}),
        _benchmark("batch_groupby", spark_reads.grouping(stock), grouped),
        _benchmark("stream_drain", spark_reads.draining(stock), drained),
        _benchmark("sink_write", spark_sinks.writing(rows), written),
        Benchmark(
            {
                "microbatch_latency_p50_ms": percentile(50, "ms"),
                "microbatch_latency_p99_ms": percentile(99, "ms"),
                "trigger_overhead_ms": spark_latency.trigger_ms(),
            },
            [_forgiven(subject) for subject in spark_latency.passing()],
            {
                "size": spark_rows.SIZE,
                "messages_per_second": spark_latency.RATE,
                "warm_up": "a query is started for each sample; its first messages do not count",
                **spark,
            },
            messages,
        ),
    ]


def _benchmark(name: str, subjects: list[Subject], params: dict[str, object]) -> Benchmark:
    return Benchmark({name: rows_rate()}, [_forgiven(subject) for subject in subjects], params, 1)


def _forgiven(subject: Subject) -> Subject:
    """Others' servers and connectors may fail in ways of their own: that is told, and the rest goes on."""
    if not subject.name.startswith(_OTHERS):
        return subject

    def sample(place: str, count: int) -> Sample:
        with _telling():
            return subject.sample(place, count)

    def prepare(place: str) -> None:
        with _telling():
            if subject.prepare is not None:
                subject.prepare(place)

    return subject._replace(sample=sample, prepare=prepare)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except (Unavailable, WrongResult):
        raise
    except Exception as error:
        # Java's errors come with all their causes; the last one is what went wrong.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        causes = [line for line in lines if line.startswith("Caused by:")]
        raise Unavailable(f"it failed: {' / '.join([*lines[:2], *causes[-1:]]) or repr(error)}") from error
