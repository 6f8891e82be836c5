"""User behaviour: visits to a site, each told when it is over: how long, which pages, what was bought.

Reads `clicks`; writes `sessions` and, for clicks that cannot be read, `clicks-dead`.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from headrace.spark import pipeline
from messages import json_topic, once, to_topic, together, unusable, usable

GAP = "30 minutes"
"""Who has done nothing for so long has gone; what comes later is another session."""
LATE_MAX = "10 minutes"

CLICKS = json_topic("clicks", "id string, ts timestamp, user string, kind string, page string, amount decimal(12,2)")
NEEDED = "id, ts, user, kind, page"


def sessions(clicks: DataFrame, gap: str = GAP) -> DataFrame:
    """One row for each visit; clicks that are sent twice count once, and their order is that of their times."""
    order = f.struct("ts", "id")
    is_purchase = f.col("kind") == "purchase"
    return (
        once(clicks, "id", LATE_MAX)
        .groupBy(f.session_window("ts", gap), "user")
        .agg(
            f.min("ts").alias("start"),
            f.max("ts").alias("end"),
            f.count_if(f.col("kind") == "view").alias("pages"),
            f.min_by("page", order).alias("entry_page"),
            f.max_by("page", order).alias("exit_page"),
            f.count_if(is_purchase).alias("conversions"),
            f.coalesce(f.sum("amount"), f.lit(0).cast("decimal(22,2)")).alias("revenue"),
        )
        .withColumn("seconds", (f.unix_millis("end") - f.unix_millis("start")) / 1000)
        .drop("session_window")
    )


@pipeline(source={"clicks": CLICKS}, sink={"format": "headrace"}, trigger="10 seconds")
def user_sessions(clicks: DataFrame) -> DataFrame:
    """Sessions that are over, and what could not be read."""
    return together(
        to_topic(sessions(usable(clicks, NEEDED)), "sessions", key="user"),
        unusable(clicks, NEEDED, "clicks-dead"),
    )
