"""Policies, logging levels and events, with the power off at any moment: what was answered lasts, no event lies."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.model.bus_event import decode_event
from headrace.model.log_level_requests import LogLevelList, LogLevelReset, LogLevelRule, LogLevelSet
from headrace.model.request import Request
from headrace.model.requests import TopicCreate, TopicDelete
from headrace.model.service_requests import ServiceList, ServicePolicyAlter
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

State = tuple[bool, tuple[str, ...], frozenset[str]]
"""Whether registration is required, the patterns with a logging level, and the topics."""

STEPS: list[tuple[Request[object], State]] = [  # type: ignore[type-var]
    (TopicCreate("a"), (False, (), frozenset("a"))),
    (ServicePolicyAlter(True), (True, (), frozenset("a"))),
    (LogLevelSet(LogLevelRule("topic", "x", "debug")), (True, ("x",), frozenset("a"))),
    (TopicCreate("b"), (True, ("x",), frozenset("ab"))),
    (LogLevelSet(LogLevelRule("topic", "y", "error")), (True, ("x", "y"), frozenset("ab"))),
    (ServicePolicyAlter(False), (False, ("x", "y"), frozenset("ab"))),
    (LogLevelReset("topic", "x"), (False, ("y",), frozenset("ab"))),
    (TopicDelete("a"), (False, ("y",), frozenset("b"))),
]
BEGIN: State = (False, (), frozenset())


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def state(bench: Workbench) -> State:
    required = bench.ask(ServiceList()).require_registration
    patterns = tuple(rule.pattern for rule in bench.ask(LogLevelList()).rules)
    topics = frozenset(str(topic) for topic in bench.broker._topics if topic.name.topic in ("a", "b"))
    return required, patterns, topics


def told(bench: Workbench) -> list[tuple[str, str, str]]:
    """What the recorded events say."""
    if bench.broker._topics.find("headrace.events") is None:
        return []
    events = [decode_event(value) for value in bench.values("headrace.events") if value is not None]
    assert len({event.id for event in events}) == len(events)
    return [(event.kind, event.action, event.name) for event in events if not event.name.startswith("headrace.")]


@pytest.mark.parametrize("journal_bytes", [1, 16 << 20])
@pytest.mark.parametrize("operations", range(1, 70))
def test_a_power_loss_at_any_moment(data: str, operations: int, journal_bytes: int) -> None:
    settings = BrokerSettings(record_events=True, journal_bytes=journal_bytes)
    disk = FaultyDisk(operations)
    bench = Workbench(data, disk=disk, settings=settings)
    bench.syncing_later = True
    disk.crash_after(operations)
    answered, begun = 0, 0
    try:
        for request, _ in STEPS:
            begun += 1
            bench.ask(request)
            answered += 1
        bench.tick(10)
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    states = [BEGIN, *(expected for _, expected in STEPS)]
    for unsynced in (Unsynced.RANDOM, Unsynced.LOST):
        disk.power_loss(unsynced)
        bench = Workbench(data, disk=disk, settings=settings)
        done = states.index(state(bench))
        assert answered <= done <= begun
        _check(told(bench), done)
    for request, expected in STEPS[done:]:  # and it goes on
        bench.ask(request)
        assert state(bench) == expected
    bench.close()


def _check(events: list[tuple[str, str, str]], done: int) -> None:
    """No event tells of a change that the power loss took back."""
    changes = [
        ("topic", "created", "a"),
        ("policy", "altered", "services"),
        ("log_level", "set", "topic"),
        ("topic", "created", "b"),
        ("log_level", "set", "topic"),
        ("policy", "altered", "services"),
        ("log_level", "reset", "topic"),
        ("topic", "deleted", "a"),
    ]
    assert events == changes[: len(events)]
    assert len(events) <= done
