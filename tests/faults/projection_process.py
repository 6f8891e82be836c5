"""A process that runs a projection, always of the same topic into the same database, until it is killed."""

import sqlite3
from typing import Any

import headrace

TOPIC = "orders"
MAKE = "CREATE TABLE seen (part bigint, at bigint, value text)"
TOTALS = "CREATE TABLE totals (key text PRIMARY KEY, count bigint)"


def store_at(where: str) -> "headrace.SqliteStore | headrace.PostgresStore":
    """Connect to the database."""
    return headrace.PostgresStore(where) if where.startswith("postgresql:") else headrace.SqliteStore(where)


def write(connection: Any, message: headrace.Received) -> None:
    """Write a row, which a second time would be there twice, and count the messages of the key."""
    sign = "?" if isinstance(connection, sqlite3.Connection) else "%s"
    key, value = (message.key or b"").decode(), (message.value or b"").decode()
    connection.execute(f"INSERT INTO seen VALUES ({sign}, {sign}, {sign})", (message.partition, message.offset, value))
    connection.execute(
        f"INSERT INTO totals AS old VALUES ({sign}, 1) ON CONFLICT (key) DO UPDATE SET count = old.count + 1", (key,)
    )


def project(url: str, where: str) -> None:
    """Run the projection."""
    with headrace.connect(url, wait=30) as bus, store_at(where) as store:
        headrace.Projection(bus, TOPIC, "seen", write, store, messages_max=3).run()
