"""Apps report failures at a bounded rate, and go on whatever becomes of a report."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.client._sync.app import error_reporter
from headrace.client._sync.app.error_reporter import ErrorReporter
from headrace.model.errors import ConnectionFailed
from headrace.model.requests import Done
from headrace.model.service_requests import ErrorReport, ServiceError


class Line:
    """A connection that keeps what is sent, or refuses."""

    def __init__(self) -> None:
        self.closed = False
        self.sent: list[ServiceError] = []
        self.failure: Exception | None = None
        self.answer: Any = Done()

    def request_nowait(self, request: ErrorReport, _: bytes, callback: Any, timeout: float) -> None:
        assert timeout > 0
        if self.failure is not None:
            raise self.failure
        self.sent += request.errors
        callback(self.answer, b"")


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time_s = [0.0]
    monkeypatch.setattr(error_reporter, "now", lambda: time_s[0])
    return time_s


@pytest.fixture
def reporter(line: Line, clock: list[float]) -> ErrorReporter:
    assert clock
    return ErrorReporter(SimpleNamespace(connection=line), "billing", "i1")  # type: ignore[arg-type]


def job() -> Any:
    return SimpleNamespace(topic="orders", partition=1, offset=7, key=b"ann\xff", subscription="default", deliveries=2)


def test_a_failure_is_described(reporter: ErrorReporter, line: Line) -> None:
    reporter.report(job(), KeyError("plum"), "Traceback ...")
    (error,) = line.sent
    assert (error.code, error.message, error.traceback) == ("key_error", "KeyError: 'plum'", "Traceback ...")
    assert (error.topic, error.partition, error.offset, error.key) == ("orders", 1, 7, "ann\\xff")
    assert error.details == {"subscription": "default", "delivery": 2}


def test_a_long_traceback_loses_its_middle(reporter: ErrorReporter, line: Line) -> None:
    reporter.report(job(), KeyError("plum"), "first" + "x" * 1_000_000 + "last")
    assert len(line.sent[0].traceback) < 10_000
    assert line.sent[0].traceback.endswith("last")


def test_too_many_are_counted_and_not_sent(reporter: ErrorReporter, line: Line, clock: list[float]) -> None:
    for _ in range(250):
        reporter.report(job(), KeyError("plum"), "")
    assert len(line.sent) == 100
    clock[0] = 1.0
    reporter.report_request("price.quote", KeyError("plum"))
    assert line.sent[-1].details == {"suppressed": 150}
    reporter.report_request("price.quote", KeyError("plum"))
    assert line.sent[-1].details == {}


def test_without_a_connection_they_are_counted(reporter: ErrorReporter, line: Line) -> None:
    line.closed = True
    reporter.report(job(), KeyError("plum"), "")
    line.closed = False
    line.answer = ConnectionFailed("gone")
    reporter.report(job(), KeyError("plum"), "")
    assert line.sent[-1].details["suppressed"] == 1
    reporter.report(job(), KeyError("plum"), "")
    assert line.sent[-1].details["suppressed"] == 1  # the one before was lost with the connection


def test_whatever_happens_the_app_goes_on(
    reporter: ErrorReporter, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    line.failure = ValueError("cannot be sent")
    with caplog.at_level(logging.WARNING):
        reporter.report(job(), KeyError("plum"), "")
    assert "handler failure not reported  service=billing" in caplog.text
    line.failure = None
    reporter.report(job(), Hostile(), "")
    reporter.report(job(), KeyError("plum"), "")
    assert line.sent
