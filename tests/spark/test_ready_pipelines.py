"""The ready pipelines on logs, clicks, traces and orders: on generated data, against plain Python."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.spark import ready
from tests.spark.conftest import SparkBroker
from tests.spark.ready import Body, Lateness, bodies, halves, made, minute_of, publish, readable, run

from messages import usable

MINUTE = timedelta(minutes=1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkBroker]:
    yield from ready.running(tmp_path_factory.mktemp("ready"))


def end_of_minute(ts: datetime) -> datetime:
    return minute_of(ts) + MINUTE


def test_logs(spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> None:
    messages = made("logs", 4000, 0.5)
    runs = halves(messages)
    for some in runs:
        publish(broker.bus, "logs", some)
        run(spark, broker, "logs_errors.py", tmp_path)
    ready.forget_last_commit(tmp_path, "logs_errors")
    run(spark, broker, "logs_errors.py", tmp_path)

    lateness = Lateness(120, runs)
    lines = lateness.counted(end_of_minute)
    assert len(lines) < sum(readable(message) is not None for message in messages), "none was too late"
    closed = [line for line in lines if end_of_minute(line["ts"]) <= lateness.watermark]
    counts = Counter((minute_of(line["ts"]), line["service"], line["level"]) for line in closed)
    found = bodies(broker.bus, "log-counts")
    assert {(row["start"], row["service"], row["level"]): row["lines"] for row in found} == counts
    assert len(found) == len(counts)
    assert all(row["end"] - row["start"] == MINUTE for row in found)

    totals = Counter((minute_of(line["ts"]), line["service"]) for line in closed)
    errors = Counter((minute_of(line["ts"]), line["service"]) for line in closed if line["level"] == "ERROR")
    expected = {place: errors[place] / total for place, total in totals.items() if total >= 20}
    expected = {place: rate for place, rate in expected.items() if rate > 0.05}
    assert expected
    alerts = bodies(broker.bus, "log-alerts")
    assert {(alert["start"], alert["service"]): alert["rate"] for alert in alerts} == expected
    assert len(alerts) == len(expected)
    ready.check_dead(broker, "logs-dead", messages)

    run(spark, broker, "error_counts.sql", tmp_path)
    _check_errors_in_sql(broker, messages)


def _check_errors_in_sql(broker: SparkBroker, messages: list[ready.samples.Message]) -> None:
    # By the times of the messages, which are there even if the values cannot be read.
    watermark = max(message.at for message in messages) - timedelta(minutes=2)
    lines: Counter[tuple[datetime, str]] = Counter()
    errors: Counter[tuple[datetime, str]] = Counter()
    for message in messages:
        if end_of_minute(message.at) <= watermark:
            body = _whatever_is_json(message)
            place = minute_of(message.at), body.get("service", "unreadable")
            lines[place] += 1
            errors[place] += body.get("level") == "ERROR"
    found = bodies(broker.bus, "error-counts")
    assert {(row["start"], row["service"]): (row["lines"], row["errors"]) for row in found} == {
        place: (count, errors[place]) for place, count in lines.items()
    }


def _whatever_is_json(message: ready.samples.Message) -> Body:
    try:
        body: Body = json.loads(message.value)
    except ValueError:
        return {}
    return body


def test_sessions(spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> None:
    messages = made("clicks", 3000, 8.0)
    runs = halves(messages)
    for some in runs:
        publish(broker.bus, "clicks", some)
        run(spark, broker, "user_sessions.py", tmp_path)

    lateness = Lateness(600, runs)
    once = {click["id"]: click for click in lateness.counted()}
    found = bodies(broker.bus, "sessions")
    expected = [session for session in sessions_of(list(once.values())) if session["closed"] <= lateness.watermark]
    assert len(expected) > 100
    assert sorted(_comparable(row) for row in found) == sorted(_comparable(row) for row in expected)
    assert any(row["conversions"] for row in found)
    ready.check_dead(broker, "clicks-dead", messages)


def sessions_of(clicks: list[Body]) -> list[Body]:
    """Each user's clicks, parted where nothing happened for half an hour."""
    gap = timedelta(minutes=30)
    parts: list[list[Body]] = []
    for click in sorted(clicks, key=lambda click: (click["user"], click["ts"], click["id"])):
        if parts and parts[-1][-1]["user"] == click["user"] and click["ts"] - parts[-1][-1]["ts"] <= gap:
            parts[-1].append(click)
        else:
            parts.append([click])
    return [
        {
            "user": part[0]["user"],
            "start": part[0]["ts"],
            "end": part[-1]["ts"],
            "closed": part[-1]["ts"] + gap,
            "pages": sum(click["kind"] == "view" for click in part),
            "entry_page": part[0]["page"],
            "exit_page": part[-1]["page"],
            "conversions": sum(click["kind"] == "purchase" for click in part),
            "revenue": float(sum(Decimal(str(click.get("amount", 0))) for click in part)),
            "seconds": (part[-1]["ts"] - part[0]["ts"]).total_seconds(),
        }
        for part in parts
    ]


def _comparable(session: Body) -> tuple[object, ...]:
    return tuple(session[name] for name in sorted(session) if name != "closed")


def test_latencies(spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> None:
    messages = made("traces", 3000, 0.5)
    publish(broker.bus, "traces", messages)
    run(spark, broker, "trace_latency.py", tmp_path)

    lateness = Lateness(120, [messages])
    traces = lateness.counted()
    windows: dict[tuple[datetime, str], list[Body]] = defaultdict(list)
    for trace in traces:
        if end_of_minute(trace["ts"]) <= lateness.watermark:
            windows[minute_of(trace["ts"]), trace["endpoint"]].append(trace)
    expected = {place: _summary(some) for place, some in windows.items()}
    found = bodies(broker.bus, "latencies")
    names = ("requests", "failures", "p50_ms", "p95_ms", "p99_ms", "max_ms")
    assert {(row["start"], row["endpoint"]): tuple(row[name] for name in names) for row in found} == expected
    assert len(found) == len(expected) > 50

    slow = sorted(trace["trace_id"] for trace in traces if trace["duration_ms"] >= 1000)
    assert slow
    assert sorted(row["trace_id"] for row in bodies(broker.bus, "slow-traces")) == slow
    ready.check_dead(broker, "traces-dead", messages)


def _summary(traces: list[Body]) -> tuple[float, ...]:
    took = sorted(trace["duration_ms"] for trace in traces)
    percentiles = (took[math.ceil(share * len(took)) - 1] for share in (0.5, 0.95, 0.99))
    return len(traces), sum(trace["status"] >= 500 for trace in traces), *percentiles, took[-1]


def test_revenue(spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> None:
    table = made("customers", 300, 1.0, ready.samples.NO_FAULTS)
    messages = made("orders", 3000, 1.0)
    runs = halves(messages)
    broker.bus.create_topic("customers", partitions=2)
    publish(broker.bus, "customers", table[:200])
    publish(broker.bus, "orders", runs[0])
    run(spark, broker, "business_metrics.py", tmp_path)
    publish(broker.bus, "customers", table[200:])
    publish(broker.bus, "orders", runs[1])
    run(spark, broker, "business_metrics.py", tmp_path, "revenue_by_minute")

    before = _sold(Lateness(120, runs[:1]), runs[0], table)
    told = _told(bodies(broker.bus, "revenue-last-10-minutes"))
    assert told == _revenue(before, 10, Lateness(120, runs[:1]).watermark)
    lateness = Lateness(120, runs)
    orders = _sold(lateness, runs[0], table)
    assert {order["segment"] for order in orders} == {"consumer", "business", "reseller", "unknown"}
    assert _told(bodies(broker.bus, "revenue-by-minute")) == _revenue(orders, 1, lateness.watermark)
    ready.check_dead(broker, "orders-dead", messages)


def _sold(lateness: Lateness, first: list[ready.samples.Message], table: list[ready.samples.Message]) -> list[Body]:
    """The orders that count, once each, with segments; those of the first run know only the first customers."""
    early = {body["order_id"] for body in map(readable, first) if body is not None}
    before, after = ({row.key: json.loads(row.value)["segment"] for row in rows} for rows in (table[:200], table))
    orders = {order["order_id"]: order for order in lateness.counted()}
    for name, order in orders.items():
        order["segment"] = (before if name in early else after).get(order["customer"], "unknown")
    return list(orders.values())


def _revenue(orders: list[Body], minutes: int, watermark: datetime) -> dict[tuple[datetime, str], tuple[int, float]]:
    windows: dict[tuple[datetime, str], list[Decimal]] = defaultdict(list)
    for order in orders:
        for back in range(minutes):
            start = minute_of(order["ts"]) - back * MINUTE
            if start + minutes * MINUTE <= watermark:
                windows[start, order["segment"]].append(Decimal(str(order["amount"])))
    return {place: (len(amounts), float(sum(amounts))) for place, amounts in windows.items()}


def _told(rows: list[Body]) -> dict[tuple[datetime, str], tuple[int, float]]:
    told = {(row["start"], row["segment"]): (row["orders"], row["revenue"]) for row in rows}
    assert len(told) == len(rows) > 10
    return told


def test_the_same_functions_in_batch_jobs(spark: SparkSession, broker: SparkBroker) -> None:
    import logs_errors
    import user_sessions

    def everything(kind: str, source: dict[str, str], needed: str) -> tuple[DataFrame, list[Body]]:
        messages = made(kind, 600, 8.0)
        publish(broker.bus, f"{kind}-once", messages)
        options = source | {"subscribe": f"{kind}-once", "address": broker.address}
        found = spark.read.format("headrace").options(**options).load()
        return usable(found, needed), [body for body in map(readable, messages) if body is not None]

    logs, lines = everything("logs", logs_errors.LOGS, logs_errors.NEEDED)
    counts = Counter((minute_of(line["ts"]), line["service"], line["level"]) for line in lines)
    rows = ready.plain(logs_errors.counts(logs))
    assert {(row["start"], row["service"], row["level"]): row["lines"] for row in rows} == counts

    clicks, read = everything("clicks", user_sessions.CLICKS, user_sessions.NEEDED)
    expected = sessions_of(list({click["id"]: click for click in read}.values()))
    found = [row | {"revenue": float(row["revenue"])} for row in ready.plain(user_sessions.sessions(clicks))]
    assert sorted(map(_comparable, found)) == sorted(map(_comparable, expected))
