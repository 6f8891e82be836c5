"""Performance traces: how long requests take per endpoint and minute, and the slow ones at once.

Reads `traces`; writes `latencies`, `slow-traces` and, for traces that cannot be read, `traces-dead`.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from headrace.spark import pipeline
from messages import json_topic, to_topic, together, unusable, usable

WINDOW = "1 minute"
LATE_MAX = "2 minutes"
SLOW_MS = 1000.0
ACCURACY = 10_000
"""The rank of a percentile is off by one in so many at most; up to so many requests in a window it is exact."""

TRACES = json_topic(
    "traces", "ts timestamp, trace_id string, service string, endpoint string, status int, duration_ms double"
)
NEEDED = "ts, trace_id, endpoint, duration_ms"


def latencies(traces: DataFrame) -> DataFrame:
    """Percentiles per endpoint and minute."""
    return (
        traces.withWatermark("ts", LATE_MAX)
        .groupBy(f.window("ts", WINDOW), "endpoint")
        .agg(
            f.count("*").alias("requests"),
            f.count_if(f.col("status") >= 500).alias("failures"),
            f.percentile_approx("duration_ms", [0.5, 0.95, 0.99], ACCURACY).alias("at"),
            f.max("duration_ms").alias("max_ms"),
        )
        .select(
            f.col("window.start").alias("start"),
            f.col("window.end").alias("end"),
            "endpoint",
            "requests",
            "failures",
            f.col("at")[0].alias("p50_ms"),
            f.col("at")[1].alias("p95_ms"),
            f.col("at")[2].alias("p99_ms"),
            "max_ms",
        )
    )


def slow(traces: DataFrame) -> DataFrame:
    """Traces that somebody should look at; they wait for no window."""
    return traces.where(f.col("duration_ms") >= SLOW_MS)


@pipeline(source={"traces": TRACES}, sink={"format": "headrace"}, trigger="5 seconds")
def trace_latency(traces: DataFrame) -> DataFrame:
    """All of it in one query."""
    read = usable(traces, NEEDED)
    return together(
        to_topic(latencies(read), "latencies", key="endpoint"),
        to_topic(slow(read), "slow-traces", key="endpoint"),
        unusable(traces, NEEDED, "traces-dead"),
    )
