"""Every request goes through Broker.ask: reading too."""

from typing import Any

import pytest

from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.streams import Stream, WaitingFetch
from headrace.model.errors import LimitExceeded, OffsetOutOfRange, ProtocolError, TopicNotFound
from headrace.model.kinds import Kind
from headrace.model.limits import STREAMS_MAX
from headrace.model.reading import Fetch, Fetched, StreamClose, StreamCredit, StreamOpen
from headrace.model.request import REQUESTS
from headrace.model.requests import Done, TopicCreate
from headrace.testing.workbench import Workbench
from headrace.wire import native


@pytest.fixture
def bench() -> Workbench:
    bench = Workbench()
    bench.ask(TopicCreate("orders"))
    return bench


def test_a_fetch_is_answered_with_a_view_of_what_is_stored(bench: Workbench) -> None:
    bench.publish("orders", [b"a", b"b"])
    found = bench.ask(Fetch("orders", 0, 0))
    assert isinstance(found, AnswerWithBody)
    assert found.answer == Fetched(2, 2)
    assert isinstance(found.body, memoryview)
    assert bench.ask(Fetch("orders", 0, 2)) == (Fetched(2, 2), b"")
    with pytest.raises(OffsetOutOfRange):
        bench.ask(Fetch("orders", 0, 9))
    with pytest.raises(TopicNotFound):
        bench.ask(Fetch("nothing", 0, 0))


def test_a_fetch_that_waits_is_read_when_its_reader_has_room(bench: Workbench) -> None:
    told: list[str] = []
    fetch = bench.begin(Fetch("orders", 0, 0, wait_ms=5000))
    assert isinstance(fetch, WaitingFetch)
    fetch.start(lambda: told.append("ready"))
    assert fetch.read(bench.now_us) is None
    bench.publish("orders", [b"a"])
    bench.publish("orders", [b"b"])
    assert told == ["ready"]  # once, and nothing is read before the reader does
    found = fetch.read(bench.now_us)
    assert found is not None
    assert found.answer == Fetched(2, 2)
    bench.tick(6)
    assert told == ["ready"]


def test_a_fetch_waits_no_longer_than_it_said(bench: Workbench) -> None:
    told: list[str] = []
    fetch = bench.begin(Fetch("orders", 0, 0, wait_ms=1500))
    fetch.start(lambda: told.append("ready"))
    assert bench.wakes_us[-1] == bench.now_us + 1_500_000
    bench.tick(1)
    assert fetch.read(bench.now_us) is None
    bench.tick(0.5)
    assert told == ["ready"]
    assert fetch.read(bench.now_us) == (Fetched(0, 0), b"")
    bench.publish("orders", [b"a"])
    assert told == ["ready"]


def test_a_stream_delivers_as_far_as_its_credit_reaches(bench: Workbench) -> None:
    told: list[str] = []
    stream = bench.begin(StreamOpen("orders", 0, 0, credit_bytes=1, stream=7))
    assert isinstance(stream, Stream)
    assert (stream.answer.first_offset, stream.answer.end_offset) == (0, 0)
    stream.start(lambda: told.append("ready"))
    assert stream.read(1 << 20, bench.now_us) is None
    bench.publish("orders", [b"a"])
    assert told == ["ready"]
    assert stream.read(1 << 20, bench.now_us)[1:3] == (1, 1)
    bench.publish("orders", [b"b"])
    assert told == ["ready"]  # there is no credit left
    assert stream.read(1 << 20, bench.now_us) is None
    assert bench.ask(StreamCredit(7, 1 << 20)) == Done()
    assert told == ["ready", "ready"]
    assert stream.read(1 << 20, bench.now_us)[1:3] == (2, 2)
    assert not stream.has_more()
    assert bench.ask(StreamClose(7)) == Done()
    bench.publish("orders", [b"c"])
    assert told == ["ready", "ready"]
    assert stream.read(1 << 20, bench.now_us) is None


def test_streams_are_numbered_and_bounded_per_session(bench: Workbench) -> None:
    for number in range(STREAMS_MAX):
        bench.ask(StreamOpen("orders", 0, 0, 1, number))
    with pytest.raises(LimitExceeded):
        bench.ask(StreamOpen("orders", 0, 0, 1, STREAMS_MAX))
    with pytest.raises(ProtocolError, match="already a stream 3"):
        bench.ask(StreamOpen("orders", 0, 0, 1, 3))
    other = bench.connect("other")
    stream: Any = bench.ask(StreamOpen("orders", 0, 0, 1 << 20, 3), session=other)
    with pytest.raises(ProtocolError, match="must not be negative"):
        bench.ask(StreamCredit(3, -1))
    assert bench.ask(StreamCredit(1 << 40, 1)) == Done()  # it has ended, and the client does not know yet
    bench.broker.disconnect(other, bench.now_us)
    bench.publish("orders", [b"a"])
    assert stream.read(1 << 20, bench.now_us) is None
    bench.broker.disconnect(bench.session, bench.now_us)


def test_kinds_are_named_as_their_requests() -> None:
    for kind, request in REQUESTS.items():
        assert Kind(kind).name.replace("_", "").lower() == request.__name__.lower()
    assert {kind for kind in Kind if not 128 <= kind < 160} == set(REQUESTS)


def test_the_broker_handles_all_that_is_declared_but_what_is_about_the_connection(bench: Workbench) -> None:
    handled = set(bench.broker._handlers)
    assert set(REQUESTS.values()) - handled == {native.Hello, native.Ping}
