"""The ready projection: events become the same table in Parquet, in PostgreSQL, streaming, and in one go."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks.leased_postgres import PostgresNode, _found
from pyspark.sql import SparkSession
from tests.spark import ready
from tests.spark.conftest import SparkBroker
from tests.spark.ready import Body, halves, made, publish, readable, run

import headrace

NAMES = ("order_id", "version", "status", "customer", "amount", "carrier")
TIMES = ("placed_at", "paid_at", "shipped_at", "cancelled_at")
Table = dict[str, tuple[Any, ...]]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """A PostgreSQL server, if there is one to be had; the table in Parquet is tested without."""
    if find_spec("psycopg") is None or _found("postgres") is None:
        yield ""
        return
    node = PostgresNode()
    node.start(str(tmp_path), synced=False)
    yield node.address
    node.stop()


def test_projection(
    spark: SparkSession, own_broker: SparkBroker, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORDERS_PATH", str(tmp_path / "table"))
    monkeypatch.setenv("ORDERS_DATABASE", database)
    messages = made("order-events", 2000, 1.0)
    bus, checkpoints = own_broker.bus, tmp_path / "checkpoints"
    bus.create_topic("order-events", partitions=2)
    for some in halves(messages):
        publish(bus, "order-events", some)
        run(spark, own_broker, "orders_projection.py", checkpoints, "orders_projection")
    ready.forget_last_commit(checkpoints, "orders_projection")
    run(spark, own_broker, "orders_projection.py", checkpoints)

    import orders_projection

    expected = _folded(messages)
    assert {row[2] for row in expected.values()} == {"placed", "paid", "shipped", "cancelled"}
    assert _table(ready.plain(orders_projection.current(spark, str(tmp_path / "table")))) == expected
    orders_projection.rebuild(spark, str(tmp_path / "rebuilt"), own_broker.address)
    assert _table(ready.plain(spark.read.parquet(str(tmp_path / "rebuilt")))) == expected
    ready.check_dead(own_broker, "order-events-dead", messages)
    if not database:
        pytest.skip("all but PostgreSQL is tested: it needs postgres and psycopg")
    assert _in_postgres(database) == expected
    with headrace.PostgresStore(database) as store:
        stored = {place: position.next_offset for place, position in store.positions("orders_projection").items()}
    ends = bus.offsets("order-events")
    assert stored.keys() == {("order-events", 0), ("order-events", 1)}
    assert all(0 < offset <= ends[partition] for (_, partition), offset in stored.items())
    applied: list[int] = []
    with headrace.PostgresStore(database) as store:
        rest = headrace.Projection(
            bus, "order-events", "orders_projection", lambda _, message: applied.append(message.offset), store
        )
        assert rest.catch_up() == len(applied) == sum(ends.values()) - sum(stored.values())


def _folded(messages: list[ready.samples.Message]) -> Table:
    """Each order's events by version, applied one after the other."""
    events: dict[tuple[str, int], Body] = {}
    for body in map(readable, messages):
        if body is not None:
            events[body["order_id"], body["version"]] = body
    table: dict[str, Body] = {}
    for (order, version), event in sorted(events.items()):
        row = table.setdefault(order, dict.fromkeys((*NAMES, *TIMES)))
        status = event["type"].removeprefix("Order").lower()
        row |= {"order_id": order, "version": version, "status": status, f"{status}_at": event["ts"]}
        row |= {name: event[name] for name in ("customer", "carrier") if name in event}
        if "amount" in event:
            row["amount"] = Decimal(str(event["amount"])).quantize(Decimal("0.01"))
    return _table(list(table.values()))


def _table(rows: list[Body]) -> Table:
    table = {row["order_id"]: tuple(row[name] for name in (*NAMES, *TIMES)) for row in rows}
    assert len(table) == len(rows)
    return table


def _in_postgres(database: str) -> Table:
    import psycopg
    from psycopg.rows import dict_row

    with psycopg.connect(database, row_factory=dict_row) as connection:
        rows = connection.execute("SELECT * FROM orders").fetchall()
    return _table([{name: _utc(value) for name, value in row.items()} for row in rows])


def _utc(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def test_rows_may_be_merged_in_any_order_and_again(spark: SparkSession) -> None:
    import orders_projection

    rows = [body for body in map(readable, made("order-events", 300, 1.0)) if body is not None]
    schema = orders_projection.EVENTS["value.schema"]
    for row in rows:
        row["amount"] = Decimal(str(row["amount"])) if "amount" in row else None
    fields = [field.split()[0] for field in schema.split(", ")]
    tuples = [tuple(row.get(name) for name in fields) for row in rows]
    whole = orders_projection.projected(spark.createDataFrame(tuples, schema))
    random.Random(1).shuffle(tuples)
    parts = [orders_projection.projected(spark.createDataFrame(some, schema)) for some in (tuples[:200], tuples[100:])]
    again = orders_projection.merged(parts[1].union(parts[0]).union(parts[1]))
    assert _table(ready.plain(again)) == _table(ready.plain(whole))
