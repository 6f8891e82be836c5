"""Business metrics: orders and revenue per segment of customers, for each minute and for the last ten.

Reads `orders`, and `customers` as a table: the last message of a customer counts. Writes `revenue-by-minute`,
`revenue-last-10-minutes` and, for orders that cannot be read, `orders-dead`.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from headrace.spark import pipeline
from messages import json_topic, once, to_topic, together, unusable, usable

LATE_MAX = "2 minutes"
UNKNOWN = "unknown"

ORDERS = json_topic("orders", "ts timestamp, order_id string, customer string, amount decimal(12,2), channel string")
NEEDED = "ts, order_id, customer, amount"
CUSTOMERS = {**json_topic("customers", "customer string, segment string"), "batch": True}


def segments(customers: DataFrame) -> DataFrame:
    """A customer's segment by the last message about them: those of a key are in one partition, so offsets tell."""
    return (
        customers.where("value.customer is not null")
        .groupBy("value.customer")
        .agg(f.max_by("value.segment", "offset").alias("segment"))
    )


def sales(orders: DataFrame, customers: DataFrame) -> DataFrame:
    """Orders once each, however often they were sent, with their customers' segments.

    The table of customers is read again for each trigger: a customer who was unknown may be known to the next.
    """
    known = segments(customers)
    return once(orders, "order_id", LATE_MAX).join(known, "customer", "left").fillna(UNKNOWN, ["segment"])


def revenue(sold: DataFrame, length: str, every: str | None = None) -> DataFrame:
    """Orders and revenue per segment: in windows side by side, or overlapping if `every` is given."""
    return (
        sold.groupBy(f.window("ts", length, every), "segment")
        .agg(
            f.count("*").alias("orders"),
            f.sum("amount").alias("revenue"),
            f.max("amount").alias("largest"),
        )
        .select(
            f.col("window.start").alias("start"),
            f.col("window.end").alias("end"),
            "segment",
            "orders",
            "revenue",
            "largest",
        )
    )


@pipeline(source={"orders": ORDERS, "customers": CUSTOMERS}, sink={"format": "headrace"}, trigger="10 seconds")
def revenue_by_minute(orders: DataFrame, customers: DataFrame) -> DataFrame:
    """Tumbling windows."""
    rows = revenue(sales(usable(orders, NEEDED), customers), "1 minute")
    return together(to_topic(rows, "revenue-by-minute", key="segment"), unusable(orders, NEEDED, "orders-dead"))


@pipeline(source={"orders": ORDERS, "customers": CUSTOMERS}, sink="revenue-last-10-minutes", trigger="10 seconds")
def revenue_last_10_minutes(orders: DataFrame, customers: DataFrame) -> DataFrame:
    """Sliding windows."""
    rows = revenue(sales(usable(orders, NEEDED), customers), "10 minutes", "1 minute")
    return to_topic(rows, "revenue-last-10-minutes", key="segment")
