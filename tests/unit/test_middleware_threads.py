"""Middleware that hangs on a real thread of a real server: the broker goes on."""

import time
from collections.abc import Iterator

import pytest
from tests.unit import blocking_middleware

import headrace
from headrace.errors import MiddlewareTimeout
from headrace.plugins import BUILT_IN, MIDDLEWARE, forget_plugins


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Iterator[headrace.Bus]:
    monkeypatch.setitem(BUILT_IN[MIDDLEWARE], "blocking", "tests.unit.blocking_middleware:Blocking")
    blocking_middleware.go_on.clear()
    blocking_middleware.entered.clear()
    with headrace.open(":memory:", timeout=2) as bus:
        yield bus
    blocking_middleware.go_on.set()
    forget_plugins()


def test_a_thread_that_hangs_and_returns(bus: headrace.Bus) -> None:
    bus.create_topic("slow", middleware=[{"name": "blocking"}], middleware_seconds=0.1)
    with pytest.raises(MiddlewareTimeout):
        bus.publish("slow", b"1")
    assert blocking_middleware.entered.is_set()
    assert bus.publish("other", b"1").offset == 0
    blocking_middleware.go_on.set()
    deadline = time.monotonic() + 30
    while True:
        try:
            receipt = bus.publish("slow", b"2")
            break
        except MiddlewareTimeout:
            assert time.monotonic() < deadline
    assert receipt.offset == 0
    with bus.subscribe("slow", timeout=20) as messages:
        assert next(iter(messages)).value == b"2"


def test_a_server_stops_while_a_thread_hangs(bus: headrace.Bus) -> None:
    bus.create_topic("slow", middleware=[{"name": "blocking"}], middleware_seconds=0.1)
    with pytest.raises(MiddlewareTimeout):
        bus.publish("slow", b"1")
    bus.close()
