"""The ready pipeline on trades: every alert that plain Python finds, once, and somebody who acts on it."""

import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from tests.spark import ready
from tests.spark.conftest import SparkBroker
from tests.spark.ready import Body, Lateness, bodies, halves, made, publish, run

Mark = tuple[str, str, int]
"""A kind, an instrument, and a minute or a second."""

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkBroker]:
    yield from ready.running(tmp_path_factory.mktemp("trades"))


def test_trades(spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="transformWithState needs protobuf: pip install headrace[spark]")
    messages = made("trades", 3000, 0.25)
    runs = halves(messages)
    publish(broker.bus, "trades", runs[0])
    run(spark, broker, "trade_alerts.py", tmp_path, "trade_alerts")
    publish(broker.bus, "trades", runs[1])
    run(spark, broker, "trade_alerts.py", tmp_path)

    lateness = Lateness(60, runs)
    seconds: dict[str, dict[int, list[Body]]] = defaultdict(lambda: defaultdict(list))
    for trade in _once(lateness):
        seconds[trade["instrument"]][int(trade["ts"].timestamp())].append(trade)
    expected = {mark for name, tape in seconds.items() for mark in _moves(name, tape)}
    expected |= {mark for name, tape in seconds.items() for mark in _silences(name, tape, lateness)}
    assert {kind for kind, _, _ in expected} == {"spike", "burst", "silence"}

    alerts = bodies(broker.bus, "trade-alerts")
    assert len({alert["alert"] for alert in alerts}) == len(alerts), "told twice"
    washed = {alert["alert"] for alert in alerts if alert["kind"] == "wash"}
    found = [_mark(alert) for alert in alerts if alert["kind"] != "wash"]
    assert sorted(found) == sorted(expected)
    assert washed == _washed(_once(Lateness(60, [messages])))
    ready.check_dead(broker, "trades-dead", messages)

    _check_actions(broker, alerts)


@settings(max_examples=200, deadline=None)
@given(
    trades=st.lists(st.tuples(st.integers(0, 200), st.integers(90, 110), st.integers(0, 400_000)), max_size=40),
    data=st.data(),
)
def test_the_order_of_trades_makes_no_difference(trades: list[tuple[int, int, int]], data: st.DataObject) -> None:
    import trade_alerts

    seconds: dict[int, list[Body]] = defaultdict(list)
    for second, price, turnover in trades:
        seconds[second].append({"price": price, "quantity": turnover / price})
    left, found = data.draw(st.permutations(trades)), []
    tape = trade_alerts.Tape({}, set())
    while left:
        some = [left.pop() for _ in range(data.draw(st.integers(1, len(left))))]
        for trade in some:
            tape.add(*trade)
        found += tape.found(second for second, _, _ in some)
    marks = [(kind, "X", second // 60) for kind, second, _ in found]
    assert sorted(marks) == sorted(set(_moves("X", seconds)))


def _once(lateness: Lateness) -> list[Body]:
    return list({trade["trade_id"]: trade for trade in lateness.counted()}.values())


def _mark(alert: Body) -> Mark:
    second = int(alert["ts"].timestamp())
    return alert["kind"], alert["instrument"], second if alert["kind"] == "silence" else second // 60


def _moves(name: str, tape: dict[int, list[Body]]) -> Iterator[Mark]:
    for second, trades in tape.items():
        window = [trade for at in range(second - 9, second + 1) for trade in tape.get(at, ())]
        prices, last = [trade["price"] for trade in window], [trade["price"] for trade in trades]
        if max(last) / min(prices) - 1 >= 0.05 or 1 - min(last) / max(prices) >= 0.05:
            yield "spike", name, second // 60
        if sum(trade["price"] * trade["quantity"] for trade in window) >= 1e6:
            yield "burst", name, second // 60


def _silences(name: str, tape: dict[int, list[Body]], lateness: Lateness) -> Iterator[Mark]:
    for second, after in itertools.pairwise([*sorted(tape), 1 << 40]):
        told_at = second + 61
        assert told_at != lateness.watermark.timestamp(), "whether it is told now or later is left to Spark"
        if after > second + 60 and told_at < lateness.watermark.timestamp():
            yield "silence", name, second


def _washed(trades: list[Body]) -> set[str]:
    by_position = defaultdict(list)
    for trade in trades:
        by_position[trade["instrument"], trade["account"], trade["side"]].append(trade)
    return {
        f"wash/{buy['trade_id']}/{sell['trade_id']}"
        for (instrument, account, side), buys in by_position.items()
        if side == "buy"
        for buy, sell in itertools.product(buys, by_position.get((instrument, account, "sell"), ()))
        if abs((buy["ts"] - sell["ts"]).total_seconds()) <= 30
        and abs(buy["quantity"] - sell["quantity"]) <= 0.1 * max(buy["quantity"], sell["quantity"])
    }


def _check_actions(broker: SparkBroker, alerts: list[Body]) -> None:
    """A leased subscription acts on each of them."""
    import act_on_alerts

    broker.bus.publish("trade-alerts", json.dumps({"alert": "?", "kind": "odd", "instrument": "ACME"}).encode())
    expected = {
        (alert["alert"], act_on_alerts.ACTIONS[alert["kind"]], alert.get("account") or alert["instrument"])
        for alert in alerts
    }
    with broker.connect() as bus:
        bus.create_topic("trading-actions")
        app = act_on_alerts.acting(bus)
        working = threading.Thread(target=app.run, kwargs={"stop_on_signals": False})
        working.start()
        try:
            with broker.bus.subscribe("trading-actions", timeout=60) as actions:
                told = [json.loads(action.value) for action in itertools.islice(actions, len(expected))]
            queue, deadline = bus.queue("trade-alerts", "actions"), time.monotonic() + 60
            while not queue.stats().dead and time.monotonic() < deadline:
                time.sleep(0.05)  # the odd one may be the last that it comes to
        finally:
            app.stop()
            working.join()
        assert {(action["alert"], action["action"], action["on"]) for action in told} == expected
        assert queue.stats().dead == 1
