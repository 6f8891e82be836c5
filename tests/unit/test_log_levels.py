"""Logging levels per topic, producer and consumer, changed while the broker runs."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.broker import log_levels
from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.ports import Session
from headrace.model.errors import InvalidArgument, LimitExceeded
from headrace.model.leasing import Ack, Holding, Lease, SubscriptionCreate
from headrace.model.log_level_requests import LogLevelList, LogLevelReset, LogLevelRule, LogLevelSet
from headrace.model.requests import Commit, PartitionOffset, Publish, TopicCreate
from headrace.model.standing_lease import LeaseOpen
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


def set_level(bench: Workbench, scope: str, pattern: str, level: str, session: Session | None = None) -> None:
    bench.ask(LogLevelSet(LogLevelRule(scope, pattern, level)), session=session)


def rules(bench: Workbench, session: Session | None = None) -> list[tuple[str, str, str]]:
    return [(rule.scope, rule.pattern, rule.level) for rule in bench.ask(LogLevelList(), session=session).rules]


def publish(bench: Workbench, topic: str, session: Session | None = None) -> None:
    bench.ask(Publish(topic, 0), bench.batch([b"secret", b"secret"]).data, session=session)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.name == "headrace.traffic"]
    caplog.clear()
    return lines


def test_batches_of_a_topic_are_logged_at_debug(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    publish(bench, "orders")
    assert logged(caplog) == []
    set_level(bench, "topic", "orders", "debug")
    publish(bench, "orders")
    publish(bench, "bills")
    (line,) = logged(caplog)
    assert line.startswith("publish  topic=orders partition=0 client=workbench messages=2 bytes=")
    assert "secret" not in line
    bench.values("orders")
    assert [line.split("  ")[0] for line in logged(caplog)] == ["deliver"]
    bench.ask(LogLevelReset("topic", "orders"))
    publish(bench, "orders")
    bench.values("orders")
    assert logged(caplog) == []


def test_they_are_logged_although_the_broker_logs_little(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("headrace").setLevel(logging.WARNING)
    try:
        set_level(bench, "topic", "orders", "debug")
        publish(bench, "orders")
        assert len(logged(caplog)) == 1
    finally:
        logging.getLogger("headrace").setLevel(logging.NOTSET)


def test_leases_and_settlements_are_logged(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    bench.ask(TopicCreate("jobs"))
    bench.ask(SubscriptionCreate("jobs"))
    set_level(bench, "topic", "jobs", "debug")
    publish(bench, "jobs")
    answer = bench.ask(Lease("jobs", messages_max=10))
    assert isinstance(answer, AnswerWithBody)
    held = [Holding(one.partition, one.lease, list(one.all_offsets)) for one in answer.answer.portions]
    bench.ask(Ack("jobs", held))
    lines = logged(caplog)
    assert [line.split("  ")[0] for line in lines] == ["publish", "lease", "ack"]
    assert "subscription=default client=workbench" in lines[1]
    assert lines[2].endswith("messages=2")


def test_standing_leases_are_logged(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    bench.ask(TopicCreate("jobs"))
    bench.ask(SubscriptionCreate("jobs"))
    bench.ask(LeaseOpen("jobs", credit_messages=10, credit_bytes=1 << 20))
    set_level(bench, "consumer", "workbench", "debug")
    publish(bench, "jobs")
    assert [line.split("  ")[0] for line in logged(caplog)] == ["lease"]


def test_producers_and_consumers_by_their_names(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    shop, till = bench.connect("shop-1"), bench.connect("till-1")
    set_level(bench, "producer", "shop-*", "debug")
    publish(bench, "orders", shop)
    publish(bench, "orders", till)
    assert [line.split("client=")[1].split()[0] for line in logged(caplog)] == ["shop-1"]
    bench.values("orders")
    assert logged(caplog) == []
    set_level(bench, "consumer", "work*", "debug")
    bench.values("orders")
    assert len(logged(caplog)) == 1


def test_consumers_by_group(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    publish(bench, "orders")
    set_level(bench, "consumer", "readers", "debug")
    bench.ask(Commit("readers", [PartitionOffset("orders", 0, 1)]))
    bench.ask(Commit("others", [PartitionOffset("orders", 0, 1)]))
    assert [line.split("  ")[0] for line in logged(caplog)] == ["commit"]


def test_an_open_stream_follows_a_change(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    publish(bench, "orders")
    stream = bench.open_stream("orders")
    assert stream.read(1, bench.now_us) is not None
    assert logged(caplog) == []
    set_level(bench, "topic", "orders", "debug")
    publish(bench, "orders")
    assert stream.read(1 << 20, bench.now_us) is not None
    assert [line.split("  ")[0] for line in logged(caplog)] == ["publish", "deliver"]
    stream.close()


def test_the_more_specific_pattern_wins(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    set_level(bench, "topic", "*", "debug")
    set_level(bench, "topic", "orders.*", "info")
    set_level(bench, "topic", "orders.eu", "debug")
    for topic in ("bills", "orders.us", "orders.eu"):
        publish(bench, topic)
    assert [line.split("topic=")[1].split()[0] for line in logged(caplog)] == ["bills", "orders.eu"]


def test_higher_levels_silence_lines_about_a_topic(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    broker = logging.getLogger("headrace.broker")
    set_level(bench, "topic", "noisy", "error")
    set_level(bench, "consumer", "slow", "error")
    with caplog.at_level(logging.INFO):
        broker.warning("offsets skipped  topic=%s partition=%s", "noisy", 0)
        broker.warning("offsets skipped  topic=%s partition=%s", "quiet", 0)
        broker.error("topic failed  topic=%s reason=%s", "noisy", "why")
        broker.warning("group tick failed  group=%s", "slow")
    assert [record.args for record in caplog.records] == [("quiet", 0), ("noisy", "why")]
    bench.ask(LogLevelReset())
    caplog.clear()
    broker.warning("offsets skipped  topic=%s partition=%s", "noisy", 0)
    assert len(caplog.records) == 1


def test_the_brokers_own_level(bench: Workbench) -> None:
    own = logging.getLogger("headrace")
    before = own.level
    set_level(bench, "broker", "", "debug")
    assert own.level == logging.DEBUG
    set_level(bench, "broker", "", "warning")
    assert rules(bench) == [("broker", "", "warning")]
    bench.ask(LogLevelReset("broker"))
    assert (own.level, rules(bench)) == (before, [])


def test_a_closed_broker_leaves_no_trace() -> None:
    own = logging.getLogger("headrace")
    before, filters = own.level, list(logging.getLogger("headrace.broker").filters)
    bench = Workbench()
    set_level(bench, "broker", "", "debug")
    set_level(bench, "topic", "a", "error")
    bench.close()
    assert (own.level, logging.getLogger("headrace.broker").filters) == (before, filters)


def test_levels_are_listed_replaced_and_reset(bench: Workbench) -> None:
    set_level(bench, "topic", "orders", "debug")
    set_level(bench, "topic", "orders", "error")
    set_level(bench, "consumer", "c*", "debug")
    assert rules(bench) == [("consumer", "c*", "debug"), ("topic", "orders", "error")]
    bench.ask(LogLevelReset("consumer", "c*"))
    bench.ask(LogLevelReset("consumer", "nobody"))
    assert rules(bench) == [("topic", "orders", "error")]
    bench.ask(LogLevelReset())
    assert rules(bench) == []


def test_levels_survive_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Workbench(str(tmp_path))
    set_level(bench, "topic", "orders", "debug")
    set_level(bench, "topic", "bills", "debug")
    bench.ask(LogLevelReset("topic", "bills"))
    bench = Workbench(str(tmp_path))  # the one before was killed
    assert rules(bench) == [("topic", "orders", "debug")]
    publish(bench, "orders")
    assert len(logged(caplog)) == 1
    bench.close()


def test_tenants_are_isolated(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    acme = bench.connect("a", tenant="acme")
    set_level(bench, "topic", "orders", "debug", acme)
    publish(bench, "orders")
    assert logged(caplog) == []
    publish(bench, "orders", acme)
    assert len(logged(caplog)) == 1
    assert rules(bench) == []
    assert rules(bench, acme) == [("topic", "orders", "debug")]
    with pytest.raises(InvalidArgument, match="default tenant"):
        set_level(bench, "broker", "", "debug", acme)


def test_without_levels_the_handlers_are_the_plain_ones(bench: Workbench) -> None:
    broker = bench.broker

    def is_plain() -> bool:
        return all(one.handle is broker._plain_handlers[kind] for kind, one in broker._handlers.items())

    assert is_plain()
    assert broker._readers.trace is broker._leasing.trace is None
    set_level(bench, "topic", "orders", "debug")
    assert not is_plain()
    bench.ask(LogLevelReset())
    assert is_plain()


@pytest.mark.parametrize(
    ("scope", "pattern", "level", "text"),
    [
        ("queue", "a", "debug", "scope is"),
        ("topic", "a", "loud", "level is"),
        ("topic", "", "debug", "1 to 249 characters"),
        ("topic", "x" * 250, "debug", "1 to 249 characters"),
        ("topic", "acme/x", "debug", "leave the tenant out"),
        ("broker", "a", "debug", "has no pattern"),
    ],
)
def test_what_is_refused(bench: Workbench, scope: str, pattern: str, level: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        set_level(bench, scope, pattern, level)
    assert rules(bench) == []


def test_levels_are_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_levels, "LOG_RULES_MAX", 2)
    for name in ("a", "b"):
        set_level(bench, "topic", name, "debug")
    set_level(bench, "topic", "b", "info")
    with pytest.raises(LimitExceeded):
        set_level(bench, "topic", "c", "debug")


def test_brackets_and_hostile_patterns_match_literally(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    set_level(bench, "topic", "[ab]", "debug")
    set_level(bench, "topic", "*a" * 100 + "b", "debug")
    publish(bench, "a" * 200)
    publish(bench, "a")
    assert logged(caplog) == []
    publish(bench, "[ab]")
    assert len(logged(caplog)) == 1
