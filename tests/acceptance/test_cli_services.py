"""`headrace service`, `events` and `logging`, used as a person or a script uses them."""

import json
import re
import signal
from collections.abc import Iterator

import pytest
from tests.acceptance.test_cli_broker import broker, ended, error_of, line_of, run, started, text_of, told, topic

import headrace
from headrace import ServiceError

__all__ = ["broker", "topic"]  # pytest finds the fixtures here


@pytest.fixture
def bus(broker: str) -> Iterator[headrace.Bus]:
    with headrace.connect(broker, name="shop-1") as bus:
        yield bus


def test_services_are_listed_and_described(bus: headrace.Bus, topic: str) -> None:
    assert b"no service is registered" in run("service", "list", "--consumes", topic).stderr
    bus.services.register(
        topic, instance="i1", version="1.2", consumes=[topic], serves=["price.*"], metadata={"region": "eu"}
    )
    lines = text_of("service", "list").splitlines()
    assert lines[0].split() == ["service", "version", "instances", "consumes", "produces", "errors"]
    assert re.search(rf"^{topic} +1\.2 +1 +{topic} +- +0$", "\n".join(lines), re.MULTILINE)
    for words in (["--consumes", topic], ["--serves", "price.quote"], ["--names"]):
        assert topic in text_of("service", "list", *words)
    described = text_of("service", "describe", topic)
    assert re.search(r"^i1 +1\.2 +shop-1 +connected +\S+Z +region=eu$", described, re.MULTILINE)
    (content,) = told("service", "describe", topic)
    assert (content["name"], content["serves"], content["instances"][0]["metadata"]) == (
        topic,
        ["price.*"],
        {"region": "eu"},
    )
    assert error_of(run("service", "describe", "nobody", code=1))[1] == "service_not_found"


def test_errors_of_services(bus: headrace.Bus, topic: str) -> None:
    assert b"no errors of" in run("service", "errors", topic).stderr
    error = ServiceError(code="no_stock", message="there are no apples", topic="orders", partition=0, offset=7)
    bus.services.report(topic, [error, error])
    lines = text_of("service", "errors", topic, "--last", "1").splitlines()
    assert lines[1].split() == [topic, "no_stock", "2"]
    assert re.fullmatch(rf"\S+Z  {topic}  no_stock orders\[0\] offset 7", lines[3])
    assert lines[4:] == ["    there are no apples"]
    (content,) = told("service", "errors", topic)
    assert (content["codes"], len(content["last"])) == ({"no_stock": 2}, 2)


def test_the_policy(bus: headrace.Bus, topic: str) -> None:
    assert told("service", "policy") == [{"require_registration": False}]
    try:
        assert "only registered services" in text_of("service", "policy", "--require-registration", "on")
        text, code = error_of(run("publish", topic, "x", code=1))
        assert code == "not_registered"
        assert "headrace service policy --require-registration off" in text
        run("topic", "create", topic)
        run("events", "-n", "1")
        bus.services.register(topic)
        assert bus.publish(topic, b"x").offset == 0
    finally:
        assert "everybody" in text_of("service", "policy", "--require-registration", "off")
    run("publish", topic, "x")


def test_events_are_printed(topic: str) -> None:
    run("topic", "create", topic)
    line = next(line for line in text_of("events").splitlines() if f"\t{topic}\t" in line)
    time, what, name, by, details = line.split("\t")
    assert (what, name, by) == ("topic.created", topic, "headrace command line")
    assert time.endswith("Z")
    assert json.loads(details) == {"settings": {"partitions": 1}}
    event = next(event for event in told("events", "--kind", "topic") if event["name"] == topic)
    assert (event["subject"], event["action"]) == ("$events.topic.created", "created")
    refused = run("events", "--kind", "nothing", code=2)
    assert b"topic" in refused.stderr
    assert b"dead_letter" in refused.stderr
    assert len(told("events", "-n", "1")) == 1


def test_events_are_followed(topic: str) -> None:
    run("events")
    with started("events", "--follow", "--json", "-n", "1") as following:
        assert json.loads(line_of(following))
        run("topic", "create", topic)
        while (event := json.loads(line_of(following)))["name"] != topic:
            pass
        assert event["subject"] == "$events.topic.created"
        following.send_signal(signal.SIGINT)
        ended(following, 130)


def test_own_topics_are_listed_on_demand(topic: str) -> None:
    run("events")
    run("topic", "create", topic)
    assert "headrace.events" not in text_of("topic", "list", "--names").splitlines()
    assert topic in text_of("topic", "list", "--names").splitlines()
    assert "headrace.events" in text_of("topic", "list", "--all", "--names").splitlines()
    assert text_of("topic", "list", "headrace.ev*", "--names") == "headrace.events\n"


def test_logging_levels(topic: str) -> None:
    lines = text_of("logging", "set", "debug", "--topic", f"{topic}*").splitlines()
    assert [line.split() for line in lines] == [["scope", "pattern", "level"], ["topic", f"{topic}*", "debug"]]
    run("logging", "set", "error", "--consumer", "slow")
    assert {"scope": "consumer", "pattern": "slow", "level": "error"} in told("logging", "list")
    run("logging", "set", "warning")
    assert told("logging", "list")[0] == {"scope": "broker", "pattern": "", "level": "warning"}
    run("logging", "reset", "--broker")
    run("logging", "reset", "--consumer", "slow")
    assert len(told("logging", "list")) == 1
    assert b"no logging level is set" in run("logging", "reset").stderr
    run("logging", "set", "loud", code=2)
    run("logging", "set", "debug", "--topic", "a", "--consumer", "b", code=2)
