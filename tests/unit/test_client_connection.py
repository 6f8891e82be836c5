"""The client's connections against a broker of straw, which does what a real one does only on bad days."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.conformance.faces import awaitable

import headrace
from headrace import errors
from headrace.model.batch import Columns, encode, received
from headrace.model.reading import Delivery, Fetched, StreamOpened
from headrace.model.requests import BrokerInfo, OffsetsFound, Published, TopicInfo
from headrace.model.topic import TopicSettings
from headrace.wire.frames import Frame, Frames, frame
from headrace.wire.native import Done, Kind, Pong, Welcome, decode, failure

INFO = BrokerInfo("straw", "0", 1, 2, 3, 4, 5, 6, 7, "nowhere")
TOPIC = TopicInfo("t", 1, 0, TopicSettings().as_dict())


class Straw:
    """Listens, and answers as it is told. `says` maps kinds of requests to what is done about them."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"headrace://127.0.0.1:{self.listening.getsockname()[1]}"
        self.heartbeat_ms = 5000
        self.connections: list[socket.socket] = []
        self.heard: list[tuple[int, Frame]] = []
        self.split = False
        self.says: dict[Kind, Callable[[socket.socket, Frame], None]] = {
            Kind.HELLO: lambda to, ask: self.answer(to, ask, Welcome(1, "straw", "b", 0, self.heartbeat_ms, 1 << 25)),
            Kind.PING: lambda to, ask: self.answer(to, ask, Pong(0)),
            Kind.INFO: lambda to, ask: self.answer(to, ask, INFO),
            Kind.TOPIC_DESCRIBE: lambda to, ask: self.answer(to, ask, TOPIC),
            Kind.OFFSETS: lambda to, ask: self.answer(to, ask, OffsetsFound({0: 0})),
            Kind.STREAM_CLOSE: lambda to, ask: self.answer(to, ask, Done()),
        }
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def answer(self, to: socket.socket, ask: Frame, head: Any, body: bytes = b"", kind: Kind = Kind.ANSWER) -> None:
        data = bytes(frame(kind, ask.correlation, head, len(body))) + body
        if not self.split:
            to.sendall(data)
            return
        for index in range(len(data)):
            to.sendall(data[index : index + 1])

    def refuse(self, to: socket.socket, ask: Frame, error: errors.HeadraceError) -> None:
        self.answer(to, ask, failure(error), kind=Kind.FAILURE)

    def asked(self, kind: Kind) -> list[Frame]:
        return [ask for _, ask in list(self.heard) if ask.kind == kind]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        number, frames = len(self.connections), Frames()
        try:
            while count := connection.recv_into(frames.buffer()):
                for come in frames.received(count):
                    kept = Frame(
                        come.kind,
                        come.correlation,
                        memoryview(bytes(come.head)),
                        memoryview(bytearray(come.body)),
                        True,
                    )
                    self.heard.append((number, kept))
                    if (say := self.says.get(Kind(come.kind))) is not None:
                        say(connection, kept)
        except OSError:
            return
        finally:
            connection.close()

    def close(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        for connection in self.connections:
            hang_up(connection)
        for thread in self._threads:
            thread.join(10)


def hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # gone already


@pytest.fixture
def straw() -> Iterator[Straw]:
    broker = Straw()
    yield broker
    broker.close()


Story = Callable[[Any], Awaitable[None]]


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest, straw: Straw) -> Callable[..., None]:
    """Runs a story with a bus."""

    async def bus_and(story: Story, timeout: float) -> None:
        if request.param == "sync":
            bus = awaitable(headrace.connect(straw.url, timeout=timeout))
        else:
            bus = await headrace.connect_async(straw.url, timeout=timeout)
        async with bus:
            await story(bus)

    return lambda story, timeout=20.0: asyncio.run(asyncio.wait_for(bus_and(story, timeout), 60))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


def test_frames_may_come_byte_by_byte(straw: Straw, run: Callable[..., None]) -> None:
    straw.split = True

    async def story(bus: Any) -> None:
        for _ in range(3):
            assert await bus.info() == INFO

    run(story)


def test_an_answer_may_be_larger_than_what_is_received_at_once(straw: Straw, run: Callable[..., None]) -> None:
    big = encode(Columns([bytes(3 << 20)]), 1)
    big.place(0, 1, 1)
    small = encode(Columns([b"x"]), 1)
    small.place(1, 1, 1)
    body = bytes(big.data) + bytes(small.data)
    straw.says[Kind.FETCH] = lambda to, ask: straw.answer(to, ask, Fetched(2, 2), body)

    async def story(bus: Any) -> None:
        batches = await bus.fetch("t", 0, 0)
        assert [batch.columns().values for batch in batches] == [[bytes(3 << 20)], [b"x"]]

    run(story)


def test_what_is_never_answered_ends_in_time(straw: Straw, run: Callable[..., None]) -> None:
    del straw.says[Kind.INFO]

    async def story(bus: Any) -> None:
        with pytest.raises(errors.Timeout, match=r"no answer to Info within 0\.[12]"):
            await bus.info()
        straw.says[Kind.INFO] = lambda to, ask: straw.answer(to, ask, INFO)
        assert await bus.info() == INFO

    run(story, timeout=0.2)


def test_a_request_is_asked_again_over_the_next_connection(straw: Straw, run: Callable[..., None]) -> None:
    def hang_up_first(to: socket.socket, _ask: Frame) -> None:
        straw.says[Kind.INFO] = lambda to, ask: straw.answer(to, ask, INFO)
        hang_up(to)

    straw.says[Kind.INFO] = hang_up_first

    async def story(bus: Any) -> None:
        assert await bus.info() == INFO
        assert len(straw.connections) == 2

    run(story)


def test_what_must_not_be_done_twice_is_not_asked_twice(straw: Straw, run: Callable[..., None]) -> None:
    straw.says[Kind.TOPIC_DELETE] = lambda to, _: hang_up(to)

    async def story(bus: Any) -> None:
        with pytest.raises(errors.ConnectionFailed):
            await bus.delete_topic("t")
        assert len(straw.asked(Kind.TOPIC_DELETE)) == 1

    run(story)


def test_a_busy_broker_is_asked_again(straw: Straw, run: Callable[..., None]) -> None:
    def busy_twice(to: socket.socket, ask: Frame) -> None:
        if len(straw.asked(Kind.TOPIC_DELETE)) < 3:
            straw.refuse(to, ask, errors.Busy())
        else:
            straw.answer(to, ask, Done())

    straw.says[Kind.TOPIC_DELETE] = busy_twice

    async def story(bus: Any) -> None:
        await bus.delete_topic("t")

    run(story)


def test_an_error_that_nobody_knows_keeps_its_code(straw: Straw, run: Callable[..., None]) -> None:
    class NewKind(errors.HeadraceError):
        """Of a later version."""

    error = NewKind("something new", answer=42)
    error.__dict__["code"] = "new_kind"
    straw.says[Kind.INFO] = lambda to, ask: straw.refuse(to, ask, error)

    async def story(bus: Any) -> None:
        with pytest.raises(errors.HeadraceError, match="something new") as caught:
            await bus.info()
        assert caught.value.details == {"answer": 42}

    run(story)


def test_a_broker_that_refuses_the_hello(straw: Straw, run: Callable[..., None]) -> None:
    straw.says[Kind.HELLO] = lambda to, ask: straw.refuse(to, ask, errors.UnsupportedVersion("only version 7"))

    async def story(_bus: Any) -> None:
        raise AssertionError

    with pytest.raises(errors.UnsupportedVersion, match="only version 7"):
        run(story)


def test_one_that_is_no_broker(straw: Straw, run: Callable[..., None]) -> None:
    straw.says[Kind.HELLO] = lambda to, _: to.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def story(_bus: Any) -> None:
        raise AssertionError

    with pytest.raises(errors.ProtocolError):
        run(story)


def test_an_idle_client_pings_and_a_silent_broker_is_given_up(straw: Straw, run: Callable[..., None]) -> None:
    straw.heartbeat_ms = 120

    async def story(_bus: Any) -> None:
        while len(straw.asked(Kind.PING)) < 2:
            await asyncio.sleep(0.01)
        assert len(straw.connections) == 1
        del straw.says[Kind.PING]
        while len(straw.connections) < 2:
            await asyncio.sleep(0.01)

    run(story)


def test_batches_are_sent_again_as_they_were_and_in_order(straw: Straw, run: Callable[..., None]) -> None:
    def appended(to: socket.socket, ask: Frame) -> None:
        batch = received(ask.body)
        straw.answer(to, ask, Published(100 + batch.sequence, 2, 7))

    def hang_up_at_third(to: socket.socket, _ask: Frame) -> None:
        if len(straw.asked(Kind.PUBLISH)) == 3:
            straw.says[Kind.PUBLISH] = appended
            hang_up(to)

    straw.says[Kind.PUBLISH] = hang_up_at_third

    async def story(bus: Any) -> None:
        async with bus.producer("t", batch_count=1) as producer:
            sents = [await producer.send(b"%d" % number) for number in range(6)]
            assert [(await sent).offset for sent in sents] == [100 + number for number in range(6)]
        batches = [received(ask.body) for connection, ask in straw.heard if ask.kind == Kind.PUBLISH and connection > 1]
        assert [batch.sequence for batch in batches] == list(range(6))
        assert [batch.columns().values for batch in batches] == [[b"%d" % number] for number in range(6)]
        assert len({(batch.producer_id, batch.producer_epoch) for batch in batches}) == 1
        assert batches[0].producer_id >= 16

    run(story)


@pytest.mark.usefixtures("straw")
def test_a_message_is_given_up_in_time_and_flush_says_so(run: Callable[..., None]) -> None:
    async def story(bus: Any) -> None:
        producer = bus.producer("t", timeout=0.3)
        asked = await producer.send(b"asked about")
        with pytest.raises(errors.Timeout):
            await asked
        for _ in range(5):
            await producer.send(b"forgotten")
        with pytest.raises(errors.Timeout, match="6 messages"):
            await producer.flush(0.1)
        await asyncio.sleep(1)
        with pytest.raises(errors.HeadraceError, match=r"\d messages"):
            await producer.close(0.1)

    run(story)


def test_a_draining_broker_gets_nothing_new(straw: Straw, run: Callable[..., None]) -> None:
    def appended(to: socket.socket, ask: Frame) -> None:
        straw.answer(to, ask, Published(0, 2, 7))

    straw.says[Kind.PUBLISH] = appended

    async def story(bus: Any) -> None:
        producer = bus.producer("t", linger=0)
        await producer.publish(b"before")
        straw.connections[0].sendall(frame(Kind.DRAIN, 0, Done()))
        await asyncio.sleep(0.1)
        sent = await producer.send(b"after")
        await asyncio.sleep(0.1)
        assert len(straw.asked(Kind.PUBLISH)) == 1
        hang_up(straw.connections[0])
        assert (await sent.result(10)).offset == 0
        assert [connection for connection, ask in straw.heard if ask.kind == Kind.PUBLISH] == [1, 2]
        await producer.close()

    run(story)


def deliver(straw: Straw, to: socket.socket, ask: Frame, base_offset: int, *values: bytes, spoil: bool = False) -> None:
    batch = encode(Columns(list(values)), 1)
    batch.place(base_offset, 1, 1)
    data = bytearray(batch.data)
    if spoil:
        data[-1] ^= 1
    straw.answer(to, ask, Delivery(batch.next_offset, 100), bytes(data), Kind.DELIVERY)


class SpoilingBroker:
    """Delivers three messages; the second arrives spoilt so many times. What it says of that is the test's choice."""

    def __init__(self, straw: Straw, spoilt: int) -> None:
        self.straw = straw
        self.left = spoilt
        self.opened_at: list[int] = []
        straw.says[Kind.STREAM_OPEN] = self.opened

    def opened(self, to: socket.socket, ask: Frame) -> None:
        offset = decode(Kind.STREAM_OPEN, ask.head).offset
        self.opened_at.append(offset)
        self.straw.answer(to, ask, StreamOpened(0, 3, 1))
        for at in range(offset, 3):
            spoil = at == 1 and self.left > 0
            self.left -= spoil
            deliver(self.straw, to, ask, at, b"%d" % at, spoil=spoil)


def says_good(straw: Straw) -> Callable[[socket.socket, Frame], None]:
    return lambda to, ask: straw.answer(to, ask, Fetched(2, 3))


def test_a_delivery_that_was_spoilt_on_its_way_is_read_again(straw: Straw, run: Callable[..., None]) -> None:
    broker = SpoilingBroker(straw, 1)
    straw.says[Kind.FETCH] = says_good(straw)

    async def story(bus: Any) -> None:
        async with bus.subscribe("t", timeout=0.2) as subscription:
            assert [message.value async for message in subscription] == [b"0", b"1", b"2"]

    run(story)
    assert broker.opened_at == [0, 1]


def test_a_message_that_is_spoilt_each_time_is_gone_past(straw: Straw, run: Callable[..., None]) -> None:
    SpoilingBroker(straw, 99)
    straw.says[Kind.FETCH] = says_good(straw)

    async def story(bus: Any) -> None:
        async with bus.subscribe("t", timeout=0.2) as subscription:
            with pytest.raises(errors.CorruptBatch, match=r"messages 1 to 1 .*t\[0\]"):
                assert [message.value async for message in subscription] == []
            assert [message.value async for message in subscription] == [b"2"]

    run(story)


def test_damage_that_the_broker_finds_is_skipped(straw: Straw, run: Callable[..., None]) -> None:
    broker = SpoilingBroker(straw, 99)
    found = errors.CorruptBatch(1, 2, "/data/0.seg", 99, "a bit flipped")
    straw.says[Kind.FETCH] = lambda to, ask: straw.refuse(to, ask, found)

    async def story(bus: Any) -> None:
        async with bus.subscribe("t", timeout=0.2, on_corrupt="skip") as subscription:
            assert [message.value async for message in subscription] == [b"0", b"2"]

    run(story)
    assert broker.opened_at == [0, 2]


def test_a_node_that_repairs_its_copy_is_asked_again(straw: Straw, run: Callable[..., None]) -> None:
    broker = SpoilingBroker(straw, 3)
    straw.says[Kind.FETCH] = lambda to, ask: straw.refuse(to, ask, errors.Busy())

    async def story(bus: Any) -> None:
        async with bus.subscribe("t", timeout=5, on_corrupt="skip") as subscription:
            seen = []
            async for message in subscription:
                seen.append(message.value)
                if len(seen) == 3:
                    break
            assert seen == [b"0", b"1", b"2"]

    run(story)
    assert broker.opened_at == [0, 1, 1, 1]


def test_a_stream_that_ends_is_opened_again_behind_what_came(straw: Straw, run: Callable[..., None]) -> None:
    def opened(to: socket.socket, ask: Frame) -> None:
        straw.answer(to, ask, StreamOpened(0, 3, 1))
        offset = decode(Kind.STREAM_OPEN, ask.head).offset
        if offset == 0:
            deliver(straw, to, ask, 0, b"0", b"1")
            straw.answer(to, ask, failure(errors.Busy()), kind=Kind.STREAM_END)
        else:
            deliver(straw, to, ask, offset - 1, b"%d" % (offset - 1), b"%d" % offset)

    straw.says[Kind.STREAM_OPEN] = opened

    async def story(bus: Any) -> None:
        seen = []
        async with bus.subscribe("t", timeout=5) as subscription:
            async for message in subscription:
                seen.append((message.offset, message.value))
                if len(seen) == 3:
                    break
        assert seen == [(0, b"0"), (1, b"1"), (2, b"2")]

    run(story)


def test_credit_is_given_back_as_messages_are_taken(straw: Straw, run: Callable[..., None]) -> None:
    streams: list[tuple[socket.socket, Frame]] = []

    def opened(to: socket.socket, ask: Frame) -> None:
        assert decode(Kind.STREAM_OPEN, ask.head).credit_bytes == 100_000
        straw.answer(to, ask, StreamOpened(0, 100, 1))
        for offset in range(10):
            deliver(straw, to, ask, offset, bytes(10_000))

    straw.says[Kind.STREAM_OPEN] = opened

    async def story(bus: Any) -> None:
        count = 0
        async with bus.subscribe("t", timeout=0.2, prefetch_bytes=100_000) as subscription:
            async for _ in subscription.batches():
                count += 1
        assert count == 10
        given = [decode(Kind.STREAM_CREDIT, ask.head).bytes for ask in straw.asked(Kind.STREAM_CREDIT)]
        assert 75_000 <= sum(given) <= 105_000

    run(story)
    assert not streams


def test_many_requests_at_once_are_answered_in_any_order(straw: Straw) -> None:
    waiting: list[tuple[socket.socket, Frame]] = []

    def in_reverse(to: socket.socket, ask: Frame) -> None:
        waiting.append((to, ask))
        if len(waiting) == 20:
            for connection, kept in reversed(waiting):
                topic = decode(Kind.TOPIC_DESCRIBE, kept.head).topic
                straw.answer(connection, kept, TopicInfo(topic, 1, 0, TopicSettings().as_dict()))

    straw.says[Kind.TOPIC_DESCRIBE] = in_reverse

    async def story() -> None:
        async with await headrace.connect_async(straw.url) as bus:
            found = await asyncio.gather(*(bus.describe_topic(f"t{number}") for number in range(20)))
            assert [info.topic for info in found] == [f"t{number}" for number in range(20)]

    asyncio.run(asyncio.wait_for(story(), 30))
    waiting.clear()
    names: dict[int, str] = {}
    with headrace.connect(straw.url) as bus:

        def describe(number: int) -> None:
            names[number] = bus.describe_topic(f"t{number}").topic

        threads = [threading.Thread(target=describe, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert names == {number: f"t{number}" for number in range(20)}


def test_a_broker_that_does_not_listen_blocks_nobody_who_listens(straw: Straw) -> None:
    """Answers are heard while a mountain of requests is waiting to be sent."""
    paused = threading.Event()

    def pause(to: socket.socket, ask: Frame) -> None:
        if not paused.is_set():
            to.sendall(frame(Kind.DRAIN, 0, Done()))  # something to hear
            paused.wait(20)
        straw.answer(to, ask, Published(0, 2, 7))

    straw.says[Kind.PUBLISH] = pause
    with headrace.connect(straw.url) as bus, bus.producer("t", batch_bytes=4 << 20) as producer:
        sents = [producer.send(bytes(1 << 20)) for _ in range(32)]
        link = bus._broker.connection
        assert link is not None
        until(lambda: link.draining)
        paused.set()
        hang_up(straw.connections[0])
        assert all(sent.result(20).offset >= 0 for sent in sents)


def test_what_nobody_asked_about_is_told_at_the_end(straw: Straw, run: Callable[..., None]) -> None:
    straw.says[Kind.PUBLISH] = lambda to, ask: straw.refuse(to, ask, errors.LimitExceeded("no more today"))

    async def story(bus: Any) -> None:
        producer = bus.producer("t")
        for _ in range(5):
            await producer.send(b"unseen")
        with pytest.raises(headrace.Undelivered, match=r"5 messages .* no more today") as caught:
            await producer.flush()
        assert caught.value.count == 5
        sent = await producer.send(b"seen")
        with pytest.raises(errors.LimitExceeded):
            await sent
        await producer.close()

    run(story)
