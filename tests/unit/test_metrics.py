"""Metrics: what is counted, by bounded labels, in slices. What counts here is work, not time."""

import logging
from typing import Any
from unittest.mock import patch

import pytest

from headrace.broker import metric_collectors
from headrace.broker.metrics import CollectorSteps
from headrace.broker.topics import Topic
from headrace.model.errors import TopicNotFound
from headrace.model.leasing import Lease, SubscriptionCreate
from headrace.model.metric_requests import MetricFamily, MetricsCollect, gauge
from headrace.model.requests import Commit, PartitionOffset, TopicCreate, TopicDescribe
from headrace.model.route_requests import RouteDefinition, RouteSet
from headrace.model.subject_requests import SubjectSubscribe
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Workbench:
    return Workbench()


def families(bench: Workbench, session: Any = None) -> dict[str, MetricFamily]:
    found = bench.ask(MetricsCollect(), session=session).families
    assert len({family.name for family in found}) == len(found), "each family stands once"
    return {family.name: family for family in found}


def by_label(family: MetricFamily, label: str) -> dict[str, float]:
    return {one.labels[label]: one.value for one in family.samples}


def value(family: MetricFamily) -> float:
    (sample,) = family.samples
    return sample.value


def test_requests_are_counted_by_class_and_outcome(bench: Workbench) -> None:
    bench.ask(TopicCreate("orders"))
    bench.publish("orders", [b"1"])
    bench.publish("orders", [b"2"])
    for _ in range(3):
        with pytest.raises(TopicNotFound):
            bench.ask(TopicDescribe("none"))
    counted = {(one.labels["request"], one.labels["outcome"]): one.value for one in families(bench)["requests"].samples}
    assert counted["Publish", "accepted"] == 2
    assert counted["Publish", "refused"] == 0
    assert counted["TopicDescribe", "refused"] == 3
    assert counted["MetricsCollect", "accepted"] == 1
    assert ("Fetch", "accepted") not in counted


def test_sizes_lags_and_states_are_told(bench: Workbench) -> None:
    bench.ask(TopicCreate("orders"))
    bench.ask(SubscriptionCreate("orders", "billing"))
    bench.publish("orders", [b"1", b"2", b"3"])
    bench.ask(Commit("readers", [PartitionOffset("orders", 0, 1)]))
    bench.ask(Lease("orders", "billing", messages_max=1))
    bench.ask(RouteSet(RouteDefinition("copy", ["copies"], "orders", all=True)))
    bench.ask(SubjectSubscribe("news.*"))
    found = families(bench)
    assert by_label(found["topic_messages"], "topic") == {"orders": 3, "copies": 0}
    assert by_label(found["topic_bytes"], "topic")["orders"] > 0
    assert by_label(found["group_lag"], "group") == {"readers": 2}
    assert by_label(found["subscription_messages"], "state") == {"waiting": 0, "ready": 2, "leased": 1, "dead": 0}
    assert by_label(found["subscription_events"], "event")["delivered"] == 1
    assert by_label(found["route_behind"], "route") == {"copy": 0}
    assert value(found["live_subscriptions"]) == 1
    assert value(found["topics"]) == 2
    assert value(found["metrics_failed_collectors"]) == 0


def test_names_beyond_a_number_are_counted_together(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_collectors, "NAMES_MAX", 3)
    for number in range(6):
        bench.publish(f"t{number}", [b"x" * 100 * (number + 1)])
        bench.ask(Commit(f"g{number}", [PartitionOffset(f"t{number}", 0, 0)]))
    found = families(bench)
    sizes = by_label(found["topic_bytes"], "topic")
    assert set(sizes) == {"t5", "t4", "t3", metric_collectors.OTHERS}, "the largest ones have names"
    assert sizes[metric_collectors.OTHERS] < sizes["t3"] + sizes["t4"]
    assert by_label(found["topic_messages"], "topic")[metric_collectors.OTHERS] == 3
    assert by_label(found["group_lag"], "group") == {"g0": 1, "g1": 1, "g2": 1, metric_collectors.OTHERS: 3}


def test_a_scrape_looks_at_a_bounded_number_of_topics_per_slice(bench: Workbench) -> None:
    for number in range(3_000):
        bench.ask(TopicCreate(f"t{number}"))
    told = 0
    real = Topic.__str__

    def counting(topic: Topic) -> str:
        nonlocal told
        told += 1
        return real(topic)

    with patch.object(Topic, "__str__", counting):
        pending = bench.begin(MetricsCollect())
        most, before = told, told
        while bench.step():
            most, before = max(most, told - before), told
    assert told >= 3_000
    assert most <= 500
    assert by_label({one.name: one for one in pending.outcome.families}["topic_bytes"], "topic")


def test_a_tenant_sees_what_it_has_and_nothing_of_the_process(bench: Workbench) -> None:
    bench.publish("orders", [b"1"])
    acme = bench.connect(tenant="acme")
    bench.ask(TopicCreate("theirs"), session=acme)
    found = families(bench, acme)
    assert list(by_label(found["topic_bytes"], "topic")) == ["theirs"]
    assert not {"requests", "syncs", "broker", "start_time_seconds", "uptime_seconds"} & found.keys()
    assert set(by_label(families(bench)["topic_bytes"], "topic")) == {"orders", "acme/theirs"}


def test_components_add_collectors_and_one_that_fails_does_not_hide_the_others(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_: str | None, __: int) -> CollectorSteps:
        yield gauge("before", "Told before it fails.", 1)
        raise ValueError("broken")

    def working(_: str | None, now_us: int) -> CollectorSteps:
        now_us = yield None
        yield gauge("mine", "A component's own.", now_us)

    bench.broker.metrics.add(failing)
    bench.broker.metrics.add(working)
    with caplog.at_level(logging.ERROR):
        found = families(bench)
    assert value(found["before"]) == 1
    assert value(found["mine"]) == bench.now_us
    assert value(found["metrics_failed_collectors"]) == 1
    assert "metrics collector failed" in caplog.text


def test_syncs_are_counted(tmp_path: Any) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.publish("orders", [b"1" * 1000])
    bench.tick(1)
    found = families(bench)
    assert value(found["syncs"]) > 0
    assert value(found["synced_bytes"]) >= 1000
    bench.close()
