"""A CQRS projection: what has happened to orders, as a table with a row for each order; in Parquet and in PostgreSQL.

Reads `order-events`: OrderPlaced, OrderPaid, OrderShipped, OrderCancelled, each with the version of its order that
it makes. Writes to the directory $ORDERS_PATH, to the table `orders` of the database $ORDERS_DATABASE if there is
one, and, for events that cannot be read, to the topic `order-events-dead`.

    python pipelines/orders_projection.py rebuild PATH [ADDRESS]

makes the table anew from the first event on, with the same functions.
"""

import os
import sys
from collections.abc import Iterable

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from headrace.spark import pipeline
from messages import json_topic, unusable, usable

PATH = os.environ.get("ORDERS_PATH", "orders-table")
DATABASE = os.environ.get("ORDERS_DATABASE", "")
"""Such as postgresql://shop@db/shop."""

EVENTS = json_topic(
    "order-events",
    "ts timestamp, order_id string, version int, type string, customer string, amount decimal(12,2), carrier string",
)
NEEDED = "ts, order_id, version, type"
STATUS = {"OrderPlaced": "placed", "OrderPaid": "paid", "OrderShipped": "shipped", "OrderCancelled": "cancelled"}
ONCE_SAID = ("customer", "amount", "carrier", *(f"{status}_at" for status in STATUS.values()))
"""Columns of which at most one event of an order says anything."""

TABLE = """
CREATE TABLE IF NOT EXISTS orders (
  order_id text PRIMARY KEY, version int NOT NULL, status text NOT NULL,
  customer text, amount numeric(12, 2), carrier text,
  placed_at timestamptz, paid_at timestamptz, shipped_at timestamptz, cancelled_at timestamptz
)
"""
UPSERT = f"""
INSERT INTO orders AS old (order_id, version, status, {", ".join(ONCE_SAID)})
VALUES (%(order_id)s, %(version)s, %(status)s, {", ".join(f"%({name})s" for name in ONCE_SAID)})
ON CONFLICT (order_id) DO UPDATE SET
  status = CASE WHEN excluded.version > old.version THEN excluded.status ELSE old.status END,
  version = greatest(excluded.version, old.version),
  {", ".join(f"{name} = coalesce(old.{name}, excluded.{name})" for name in ONCE_SAID)}
"""


def partial_rows(events: DataFrame) -> DataFrame:
    """What each event by itself says of its order's row."""
    kinds = f.create_map(*(f.lit(text) for pair in STATUS.items() for text in pair))
    times = [f.when(f.col("status") == status, f.col("ts")).alias(f"{status}_at") for status in STATUS.values()]
    known = events.withColumn("status", kinds[f.col("type")]).where("status is not null")
    return known.select("order_id", "version", "status", "customer", "amount", "carrier", *times)


def merged(rows: DataFrame) -> DataFrame:
    """One row for each order: all that is said of it, and the status of the highest version.

    Rows may come in any order and any number of times, and rows that were merged may be merged again: the result is
    the same. That is why nothing has to be remembered about what has been applied.
    """
    return rows.groupBy("order_id").agg(
        f.max("version").alias("version"),
        f.max_by("status", "version").alias("status"),
        *(f.max(name).alias(name) for name in ONCE_SAID),
    )


def projected(events: DataFrame) -> DataFrame:
    """The table that events make."""
    return merged(partial_rows(events))


def current(spark: SparkSession, path: str) -> DataFrame:
    """The table as it is in Parquet."""
    return merged(spark.read.parquet(path).drop("batch"))


def save_parquet(rows: DataFrame, path: str, batch: int) -> None:
    """Put a trigger's rows beside those before; if the trigger is repeated, they replace themselves."""
    rows.coalesce(1).write.mode("overwrite").parquet(f"{path}/batch={batch}")


def save_postgres(rows: DataFrame, database: str) -> None:
    """Merge a trigger's rows into the table; if the trigger is repeated, nothing changes."""

    def upsert(some: Iterable[Row]) -> None:
        import psycopg

        with psycopg.connect(database) as connection, connection.cursor() as cursor:
            cursor.executemany(UPSERT, [row.asDict() for row in sorted(some)])

    rows.foreachPartition(upsert)


def make_table(database: str) -> None:
    """Make the table if it is not there."""
    import psycopg

    with psycopg.connect(database) as connection:
        connection.execute(TABLE)


def save_positions(events: DataFrame, database: str) -> None:
    """Store how far the table is, where projections in Python do: one of the same name can go on from there."""
    import headrace

    ends = events.groupBy("partition").agg((f.max("offset") + 1).alias("end")).collect()
    with headrace.PostgresStore(database) as store:
        store.advance("orders_projection", {(EVENTS["subscribe"], row["partition"]): row["end"] for row in ends})


def save(batch: DataFrame, number: int) -> None:
    """What becomes of a trigger's events."""
    batch.persist()
    try:
        rows = projected(batch)
        save_parquet(rows, PATH, number)
        if DATABASE:
            make_table(DATABASE)
            save_postgres(rows, DATABASE)
            save_positions(batch, DATABASE)
    finally:
        batch.unpersist()


@pipeline(source={"events": EVENTS}, sink=save, trigger="5 seconds")
def orders_projection(events: DataFrame) -> DataFrame:
    """Events that can be read, and where they are."""
    return usable(events, NEEDED, "partition", "offset")


@pipeline(source={"events": EVENTS}, sink={"format": "headrace"}, trigger="5 seconds")
def order_events_dead(events: DataFrame) -> DataFrame:
    """Events that cannot."""
    return unusable(events, NEEDED, "order-events-dead")


def rebuild(spark: SparkSession, path: str, address: str | None = None) -> None:
    """Make the table anew, in a batch job over all events."""
    options = EVENTS | ({"address": address} if address else {})
    events = spark.read.format("headrace").options(**options).load()
    projected(usable(events, NEEDED)).write.mode("overwrite").parquet(path)


if __name__ == "__main__":
    if sys.argv[1:2] != ["rebuild"] or len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    from headrace.spark import session

    rebuild(session(), *sys.argv[2:])
