"""Log aggregation: lines per service and level and minute, and an alert when too many of a service's are errors.

Reads `logs`; writes `log-counts`, `log-alerts` and, for lines that cannot be read, `logs-dead`.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from headrace.spark import pipeline
from messages import json_topic, to_topic, together, unusable, usable

WINDOW = "1 minute"
LATE_MAX = "2 minutes"
"""A window is closed, and its rows are written, when so much more time has passed in the data."""
ERROR_LEVELS = ("ERROR", "FATAL")
ERROR_RATE_MAX = 0.05
LINES_MIN = 20
"""Fewer lines in a window prove nothing."""

LOGS = json_topic("logs", "ts timestamp, service string, level string, message string, host string")
NEEDED = "ts, service, level"


def counts(lines: DataFrame) -> DataFrame:
    """Lines per service, level and minute."""
    return (
        lines.withWatermark("ts", LATE_MAX)
        .groupBy(f.window("ts", WINDOW), "service", "level")
        .agg(f.count("*").alias("lines"))
        .select(*_bounds(), "service", "level", "lines")
    )


def error_rates(lines: DataFrame) -> DataFrame:
    """Lines, errors and their share per service and minute."""
    return (
        lines.withWatermark("ts", LATE_MAX)
        .groupBy(f.window("ts", WINDOW), "service")
        .agg(f.count("*").alias("lines"), f.count_if(f.col("level").isin(*ERROR_LEVELS)).alias("errors"))
        .withColumn("rate", f.col("errors") / f.col("lines"))
        .select(*_bounds(), "service", "lines", "errors", "rate")
    )


def alerts(rates: DataFrame) -> DataFrame:
    """The services and minutes with too many errors."""
    return rates.where((f.col("rate") > ERROR_RATE_MAX) & (f.col("lines") >= LINES_MIN))


@pipeline(source={"logs": LOGS}, sink={"format": "headrace"}, trigger="10 seconds")
def logs_errors(logs: DataFrame) -> DataFrame:
    """All of it in one query."""
    lines = usable(logs, NEEDED)
    return together(
        to_topic(counts(lines), "log-counts", key="service"),
        to_topic(alerts(error_rates(lines)), "log-alerts", key="service"),
        unusable(logs, NEEDED, "logs-dead"),
    )


def _bounds() -> list[Column]:
    return [f.col("window.start").alias("start"), f.col("window.end").alias("end")]
