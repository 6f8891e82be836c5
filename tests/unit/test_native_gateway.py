"""The gateway of the native protocol: fetches that wait, streams with credit, errors that end nothing."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from tests.native_client import NativeClient

from headrace.broker.broker import Broker
from headrace.model.batch import Batch, Columns, encode, parse
from headrace.model.errors import (
    InternalError,
    NotServing,
    OffsetOutOfRange,
    PartitionNotFound,
    ProtocolError,
    TopicNotFound,
)
from headrace.model.reading import Delivery, Fetch, StreamClose, StreamCredit, StreamOpen
from headrace.model.requests import Info, Publish, TopicCreate, TopicDelete, TopicDescribe
from headrace.server import EmbeddedServer
from headrace.storage import scan
from headrace.wire.frames import Frame, frame
from headrace.wire.native import Failure, Kind, Ping, decode

TOPIC = "orders"
BATCH_BYTES = 50_000


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server in memory, on either event loop."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "asyncio":
            patch.setattr("headrace.server.embedded.new_event_loop", asyncio.new_event_loop)
        server = EmbeddedServer(":memory:")
    yield server
    server.close()


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[NativeClient]:
    """A client, and a new topic."""
    with NativeClient(server.connect()) as client:
        client.hello()
        client.ask(TopicCreate(TOPIC))
        yield client
        client.ask(TopicDelete(TOPIC))


@pytest.fixture
def other(server: EmbeddedServer) -> Iterator[NativeClient]:
    """Another client."""
    with NativeClient(server.connect()) as client:
        client.hello()
        yield client


def batch(count: int = 1, value: bytes = b"x") -> bytes:
    return bytes(encode(Columns([value] * count), 1_700_000_000_000_000).data)


def filled(client: NativeClient, batches: int) -> None:
    """Publish some large batches of ten messages."""
    for _ in range(batches):
        client.ask(Publish(TOPIC, 0), batch(10, bytes(BATCH_BYTES // 10)))


def batches(body: bytes | memoryview) -> list[Batch]:
    found, position = [], 0
    while position < len(body):
        found.append(parse(memoryview(body), position))
        position += found[-1].length
    return found


def delivered(client: NativeClient, stream: int) -> tuple[Delivery, list[Batch]]:
    """The next delivery, which must be this stream's."""
    frame = client.receive()
    assert (frame.kind, frame.correlation) == (Kind.DELIVERY, stream)
    return decode(frame.kind, frame.head), batches(frame.body)


def opened(client: NativeClient, offset: int = 0, credit: int = 1 << 20) -> int:
    """Open a stream; returns its name."""
    stream = client.send(StreamOpen(TOPIC, 0, offset, credit))
    assert_answer(client.receive(), stream)
    return stream


def assert_answer(frame: Frame, correlation: int) -> None:
    assert (frame.kind, frame.correlation) == (Kind.ANSWER, correlation)


def failure(frame: Frame) -> Failure:
    return decode(Kind.STREAM_END, frame.head)


# Fetching


def test_fetch_of_nothing_answers_at_once_unless_it_may_wait(client: NativeClient) -> None:
    answer, body = client.ask_for_batches(Fetch(TOPIC, 0, 0))
    assert (answer.next_offset, answer.end_offset, body) == (0, 0, b"")
    answer, body = client.ask_for_batches(Fetch(TOPIC, 0, 0, wait_ms=100))
    assert (answer.next_offset, body) == (0, b"")


def test_waiting_fetch_is_answered_when_something_comes(client: NativeClient, other: NativeClient) -> None:
    waiting = client.send(Fetch(TOPIC, 0, 0, wait_ms=600_000))
    client.ask(Ping())
    other.ask(Publish(TOPIC, 0), batch(3))
    frame = client.receive()
    assert_answer(frame, waiting)
    assert [one.count for one in batches(frame.body)] == [3]


def test_waiting_fetch_fails_when_its_topic_goes(client: NativeClient, other: NativeClient) -> None:
    waiting = client.send(Fetch(TOPIC, 0, 0, wait_ms=600_000))
    client.ask(Ping())
    other.ask(TopicDelete(TOPIC))
    frame = client.receive()
    assert (frame.kind, frame.correlation) == (Kind.FAILURE, waiting)
    assert failure(frame).code == "topic_not_found"
    other.ask(TopicCreate(TOPIC))


def test_fetch_keeps_to_its_size_but_gives_one_batch_at_least(client: NativeClient) -> None:
    filled(client, 4)
    for bytes_max, count in ((1, 1), (-1, 1), (2 * BATCH_BYTES + 2000, 2), (1 << 60, 4)):
        answer, body = client.ask_for_batches(Fetch(TOPIC, 0, 0, bytes_max=bytes_max))
        assert len(batches(body)) == count
        assert (answer.next_offset, answer.end_offset) == (10 * count, 40)


def test_fetch_from_where_nothing_is(client: NativeClient) -> None:
    with pytest.raises(OffsetOutOfRange) as caught:
        client.ask(Fetch(TOPIC, 0, 5))
    assert caught.value.details["next_offset"] == 0
    with pytest.raises(PartitionNotFound):
        client.ask(Fetch(TOPIC, 7, 0))
    client.ask(Ping())


# Streams


def test_stream_delivers_what_is_there_and_what_comes(client: NativeClient, other: NativeClient) -> None:
    filled(other, 5)
    stream = opened(client)
    offset = 0
    while offset < 50:
        delivery, found = delivered(client, stream)
        assert found[0].base_offset == offset
        assert [one.next_offset for one in found][-1] == delivery.next_offset
        assert delivery.end_offset == 50
        offset = delivery.next_offset
    for number in range(3):
        other.ask(Publish(TOPIC, 0), batch(2))
        delivery, found = delivered(client, stream)
        assert (found[0].base_offset, delivery.next_offset) == (50 + 2 * number, 52 + 2 * number)


def test_stream_sends_as_much_as_it_has_credit_for(client: NativeClient) -> None:
    filled(client, 12)
    stream = opened(client, credit=1)
    first, found = delivered(client, stream)
    assert 1 < len(found) < 12, "a delivery has many batches, of which one byte was paid for"
    client.ask(Ping())  # the answer would come behind another delivery
    owed = sum(one.length for one in found) - 1
    client.send(StreamCredit(stream, owed))
    client.ask(Ping())
    client.send(StreamCredit(stream, 1))
    second, found = delivered(client, stream)
    assert found[0].base_offset == first.next_offset
    client.send(StreamCredit(stream, 1 << 30))
    while second.next_offset < 120:
        second, _ = delivered(client, stream)


def test_stream_without_credit_waits(client: NativeClient) -> None:
    filled(client, 1)
    stream = opened(client, credit=0)
    client.ask(Ping())
    client.send(StreamCredit(stream, 1))
    delivered(client, stream)


def test_after_the_answer_to_close_nothing_comes(client: NativeClient, other: NativeClient) -> None:
    filled(client, 20)
    stream = opened(client, credit=1 << 40)
    closing = client.send(StreamClose(stream))
    while (frame := client.receive()).kind == Kind.DELIVERY:
        assert frame.correlation == stream
    assert_answer(frame, closing)
    other.ask(Publish(TOPIC, 0), batch())
    client.send(StreamCredit(stream, 1000))
    client.ask(StreamClose(stream))
    client.ask(StreamClose(987))


def test_streams_of_a_connection_take_turns(client: NativeClient) -> None:
    filled(client, 30)
    streams = [opened(client, credit=0) for _ in range(3)]
    # In one piece, so that all of them begin at once.
    client.socket.sendall(b"".join(frame(Kind.STREAM_CREDIT, 0, StreamCredit(one, 1 << 40)) for one in streams))
    seen: list[int] = []
    ended: set[int] = set()
    while len(ended) < 3:
        come = client.receive()
        if come.kind == Kind.DELIVERY:
            seen.append(come.correlation)
            if decode(come.kind, come.head).next_offset == 300:
                ended.add(come.correlation)
    shared = seen[: len(seen) // 2]
    assert set(shared) == set(streams)
    assert sum(first != second for first, second in pairwise(shared)) > len(shared) // 2


def test_many_readers_get_every_message_and_one_of_them_looks_for_it(
    server: EmbeddedServer, client: NativeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(client, 30)
    scanned: list[int] = []
    batch_at = scan.batch_at

    def counted(source: scan.ByteSource, view: memoryview, position: int, offset: int) -> Batch:
        scanned.append(position)
        return batch_at(source, view, position, offset)

    monkeypatch.setattr(scan, "batch_at", counted)
    looked_at: dict[int, int] = {}
    offset = 300
    with ExitStack() as stack:
        clients = [stack.enter_context(NativeClient(server.connect())) for _ in range(5)]
        streams: list[tuple[NativeClient, int]] = []
        for one in clients:
            one.hello()
        for count in (1, 100):
            while len(streams) < count:
                reader = clients[len(streams) % len(clients)]
                streams.append((reader, opened(reader, offset)))
            for _ in range(4):  # the least counts: new readers have to search, and the broker has other things to do
                before = len(scanned)
                client.ask(Publish(TOPIC, 0), batch(20))
                for number, reader in enumerate(clients):
                    wanted = {stream for one, stream in streams if one is reader}
                    while wanted:
                        come = reader.receive()
                        assert [found.base_offset for found in batches(come.body)] == [offset], number
                        wanted.remove(come.correlation)
                looked_at[count] = min(len(scanned) - before, looked_at.get(count, len(scanned)))
                offset += 20
    assert looked_at[1] == looked_at[100] > 0


def test_stream_ends_with_its_topic(client: NativeClient, other: NativeClient) -> None:
    stream = opened(client)
    other.ask(TopicDelete(TOPIC))
    frame = client.receive()
    assert (frame.kind, frame.correlation) == (Kind.STREAM_END, stream)
    assert failure(frame).code == "topic_not_found"
    other.ask(TopicCreate(TOPIC))
    again = opened(client)
    other.ask(Publish(TOPIC, 0), batch())
    delivered(client, again)


def test_stream_that_cannot_be_opened_fails_that_request_only(client: NativeClient) -> None:
    with pytest.raises(OffsetOutOfRange):
        client.ask(StreamOpen(TOPIC, 0, 99, 1))
    client.ask(Ping())


def test_two_streams_of_one_name_are_a_protocol_error(server: EmbeddedServer, client: NativeClient) -> None:
    with NativeClient(server.connect()) as wrong:
        wrong.hello()
        stream = opened(wrong)
        wrong._correlation = stream - 1
        wrong.send(StreamOpen(TOPIC, 0, 0, 1))
        frame = wrong.receive()
        assert (frame.kind, failure(frame).code) == (Kind.FAILURE, "protocol_error")
        with pytest.raises(EOFError):
            wrong.receive()
    client.ask(Ping())


def test_slow_reader_gets_everything_in_the_end(client: NativeClient, server: EmbeddedServer) -> None:
    filled(client, 100)
    with NativeClient(server.connect()) as slow:
        slow.hello()
        slow.send(StreamOpen(TOPIC, 0, 0, 1 << 40))
        questions = [slow.send(TopicDescribe(TOPIC)) for _ in range(50)]
        client.ask(Ping())
        time.sleep(0.2)
        offset, answers = 0, set()
        while offset < 1000 or len(answers) <= len(questions):
            frame = slow.receive()
            if frame.kind == Kind.DELIVERY:
                assert batches(frame.body)[0].base_offset == offset
                offset = decode(frame.kind, frame.head).next_offset
            else:
                answers.add(frame.correlation)
        assert answers > set(questions), "and the one to the opening"


# Requests


def test_pipelined_requests_are_all_answered(client: NativeClient) -> None:
    one = batch()
    asked = [client.send(Publish(TOPIC, 0), one) for _ in range(3000)]
    answered = {client.receive().correlation for _ in asked}
    assert answered == set(asked)
    assert client.ask(TopicDescribe(TOPIC)).partitions[0].next_offset == 3000


def test_unforeseen_error_is_told_and_the_connection_goes_on(
    client: NativeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("nobody foresaw this")

    with monkeypatch.context() as patch:
        patch.setattr(Broker, "ask", broken)
        with pytest.raises(InternalError):
            client.ask(Info())
        with pytest.raises(InternalError):
            client.ask(StreamOpen(TOPIC, 0, 0, 1))
    assert "nobody foresaw this" in caplog.text
    assert client.ask(Info()).connections >= 1


def test_answer_that_cannot_be_encoded_is_told(
    client: NativeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Broker, "ask", lambda *_: TopicDescribe("\ud800"))
        with pytest.raises(InternalError):
            client.ask(Info())
    assert "cannot be encoded" in caplog.text
    client.ask(Info())


def test_second_hello_is_a_protocol_error(other: NativeClient) -> None:
    with pytest.raises(ProtocolError):
        other.hello()


def test_a_node_that_leaves_says_which_request_it_handled_last() -> None:
    server = EmbeddedServer(":memory:")
    try:
        with NativeClient(server.connect()) as client:
            client.hello()
            client.ask(Info())
            last = client.send(Info())
            assert_answer(client.receive(), last)
            broker = server._server._broker  # type: ignore[union-attr]
            assert broker is not None
            server._loop.call_soon_threadsafe(broker.end_sessions, NotServing("it hands over"), "node ")
            told = client.receive()
            assert (told.correlation, failure(told).code) == (0, "not_serving")
            assert failure(told).details["last_handled"] == last
    finally:
        server.close()


def test_connection_that_breaks_leaves_nothing_behind(client: NativeClient, server: EmbeddedServer) -> None:
    connections = client.ask(Info()).connections
    for _ in range(20):
        with NativeClient(server.connect()) as going:
            going.hello()
            opened(going, credit=1 << 30)
            going.send(Fetch(TOPIC, 0, 0, wait_ms=600_000))
            going.send(Publish(TOPIC, 0), batch())
    deadline = time.monotonic() + 10
    while client.ask(Info()).connections > connections:
        assert time.monotonic() < deadline
    with pytest.raises(TopicNotFound):
        client.ask(TopicDescribe("nothing"))
