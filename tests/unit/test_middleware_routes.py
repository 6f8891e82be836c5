"""Forwarded messages pass through the middleware of their target; what it refuses goes to the route's error topic."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.middleware import Columns, Middleware, MiddlewareContext
from headrace.model.requests import TopicAlter, TopicCreate
from headrace.model.route_requests import RouteDefinition, RouteSet
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

SCHEMA = {"name": "schema", "schema": {"type": "object"}}
ERRORS = "in.errors"


class Mark(Middleware):
    """Adds a mark to values; fails for those with an x."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.inline = options.get("inline", False)

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns:
        assert not any(b"x" in (value or b"") for value in columns.values)
        return msgspec.structs.replace(columns, values=[(value or b"") + b"!" for value in columns.values])


def routed(*middleware: dict[str, Any], bench: Workbench | None = None) -> Workbench:
    """A broker with a route from one topic to a plain one and to one with middleware."""
    bench = bench or Workbench(middleware={"mark": Mark})
    bench.ask(TopicCreate("in"))
    bench.ask(TopicCreate("plain"))
    bench.ask(TopicCreate("out", {"middleware": list(middleware)}))
    bench.ask(RouteSet(RouteDefinition("all", ["plain", "out"], source="in", all=True, error_topic=ERRORS)))
    return bench


def test_forwarded_messages_are_changed() -> None:
    bench = routed({"name": "redact", "fields": ["$.card"]})
    bench.publish("in", [b'{"card":1}', b"{}"])
    assert bench.values("plain") == [b'{"card":1}', b"{}"]
    assert bench.values("out") == [b'{"card":"***"}', b"{}"]


@pytest.mark.parametrize("on_invalid", ["refuse", "dead_letter"])
def test_refused_messages_go_to_the_error_topic(on_invalid: str) -> None:
    bench = routed({**SCHEMA, "on_invalid": on_invalid})
    bench.publish("in", [b"{}", b"1", b'{"a":1}', b"2"])
    assert bench.values("plain") == [b"{}", b"1", b'{"a":1}', b"2"]
    assert bench.values("out") == [b"{}", b'{"a":1}']
    letters = [one for batch in bench.batches(ERRORS) for one in batch.messages()]
    assert [one.value for one in letters] == [b"1", b"2"]
    assert letters[0].headers is not None
    assert letters[0].headers["headrace-route-target"] == b"out"
    assert b"schema" in (letters[0].headers["headrace-route-reason"] or b"")
    assert bench.broker._topics.find("out.dead") is None


def test_middleware_that_fails_sends_all_to_the_error_topic() -> None:
    bench = routed({"name": "mark", "inline": True})
    bench.publish("in", [b"1", b"x"])
    bench.publish("in", [b"2"])
    assert bench.values("out") == [b"2!"]
    assert bench.values(ERRORS) == [b"1", b"x"]
    assert bench.values("plain") == [b"1", b"x", b"2"]


def test_a_route_waits_for_a_thread() -> None:
    bench = routed({"name": "mark"})
    bench.holding_workers = True
    bench.publish("in", [b"1", b"2"])
    bench.publish("in", [b"3"])
    assert bench.values("out") == []
    bench.release_workers()
    bench.run()
    bench.tick(1)
    assert bench.values("out") == [b"1!", b"2!", b"3!"]
    assert bench.values("plain") == [b"1", b"2", b"3"]


def test_a_route_goes_on_after_a_thread_that_hung() -> None:
    bench = routed({"name": "mark"})
    bench.holding_workers = True
    bench.publish("in", [b"1"])
    bench.tick(6)
    assert bench.values("out") == []
    bench.release_workers()
    bench.run()
    for _ in range(3):
        bench.tick(1)
    assert bench.values("out") == [b"1!"]


def test_split_messages_are_forwarded() -> None:
    bench = routed({"name": "split"})
    bench.publish("in", [b"[1,2]", b"{}", b"[3]"])
    assert bench.values("out") == [b"1", b"2", b"3"]
    assert bench.values(ERRORS) == [b"{}"]


def test_a_route_forwards_what_its_source_delivers() -> None:
    bench = routed()
    bench.publish("in", [b'{"card":0}'])
    bench.ask(TopicAlter("in", {"middleware": [{"name": "redact", "fields": ["$.card"], "when": "deliver"}]}))
    bench.publish("in", [b'{"card":1}'])
    assert bench.values("plain") == [b'{"card":0}', b'{"card":"***"}']


@pytest.fixture
def data() -> Iterator[str]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.exists() else None) as directory:
        yield f"{directory}/data"


@pytest.mark.parametrize("entry", [SCHEMA, {"name": "split"}])
@pytest.mark.parametrize("operations", range(1, 30))
def test_a_power_loss_at_any_moment_of_forwarding(data: str, operations: int, entry: dict[str, Any]) -> None:
    disk = FaultyDisk(operations)
    bench = routed(entry, bench=Workbench(data, disk=disk))
    valid, invalid = (b"{}", b"1") if entry is SCHEMA else (b"[1]", b"{}")
    bench.publish("in", [valid, invalid])
    disk.crash_after(operations)
    try:
        bench.publish("in", [invalid, valid, valid])
        bench.tick(10)
        disk.crash_after(0)
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    disk.power_loss(Unsynced.RANDOM)
    bench = Workbench(data, disk=disk)
    for _ in range(3):
        bench.tick(1)
    sent = bench.values("in")
    assert len(sent) in (2, 5)
    assert bench.values("plain") == sent
    assert len(bench.values("out")) == sent.count(valid)
    assert bench.values(ERRORS) == [value for value in sent if value == invalid]
