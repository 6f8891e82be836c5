"""Clients that take nothing of what they asked for cost the broker next to no memory, and nobody else anything."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tests.faults.broker_process import BrokerProcess
from tests.faults.broker_raw import RawClient, batch_of
from tests.faults.fork_server import Nursery

import headrace
from headrace.gateways.native.connection import UNANSWERED_MAX
from headrace.model.reading import Fetch, StreamOpen
from headrace.model.requests import Info, Publish, TopicDescribe
from headrace.wire.frames import frame
from headrace.wire.native import Kind

TOPIC = "large"
MESSAGE_BYTES = 64 << 10
BATCH_COUNT = 16
BATCHES = 300
STREAMS = 30
SILENT = 10
MEMORY_BYTES_MAX = 100 << 20
"""How much more memory all of them together may cost; they ask for a thousand times as much."""
MOMENT_S = 0.5
GONE_S = 30.0
ASKED_MAX = 200_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("slow")
    with Nursery(directory) as nursery:
        broker = BrokerProcess(nursery, directory / "data")
        broker.start()
        with broker.connect() as bus:
            bus.create_topic(TOPIC, durability="written")
            for number in range(BATCHES):
                bus.publish_many(TOPIC, [b"%06d" % number + bytes(MESSAGE_BYTES)] * BATCH_COUNT)
        yield broker
        broker.stop()


@pytest.fixture(autouse=True)
def _all_gone(broker: BrokerProcess) -> Iterator[None]:
    """In the end nothing is left of the clients, whatever they were waiting for."""
    yield
    with broker.connect() as bus:
        deadline = time.monotonic() + GONE_S
        while (count := bus.info().connections) > 1:
            assert time.monotonic() < deadline, f"the broker has {count - 1} connections of clients that are gone"
            time.sleep(0.05)


@contextmanager
def watched(broker: BrokerProcess) -> Iterator[list[int]]:
    """In the end, how much more memory the broker took than before must be within bounds."""
    before = broker.memory_bytes()
    samples = [before]
    yield samples
    samples.append(broker.memory_bytes())
    grown = max(samples) - before
    print(f"memory before {before >> 20} MiB, grown by up to {grown >> 20} MiB")
    assert grown < MEMORY_BYTES_MAX, f"the broker's memory grew from {before >> 20} by {grown >> 20} MiB"


def work(bus: headrace.Bus, broker: BrokerProcess, samples: list[int], moment_s: float = MOMENT_S) -> None:
    """A client that behaves publishes and consumes for a while, and gets what it should."""
    topic = f"normal-{time.monotonic_ns()}"
    bus.create_topic(topic)
    until, published = time.monotonic() + moment_s, 0
    subscription = iter(bus.subscribe(topic, group=topic))
    while time.monotonic() < until or published < 100:
        assert bus.publish(topic, b"%d" % published).offset == published
        assert next(subscription).value == b"%d" % published
        published += 1
        if published % 20 == 0:
            samples.append(broker.memory_bytes())
    (batch, *_) = bus.fetch(TOPIC, 0, 0)
    assert batch.columns().values[0] == b"%06d" % 0 + bytes(MESSAGE_BYTES)


def clients(stack: ExitStack, broker: BrokerProcess, count: int) -> list[RawClient]:
    """Connections that take little at once."""
    found = []
    for _ in range(count):
        client = RawClient(broker.port, receive_bytes=4096)
        stack.callback(client.close)
        client.hello()
        found.append(client)
    return found


def test_streams_that_nobody_reads(broker: BrokerProcess) -> None:
    with broker.connect() as bus, ExitStack() as stack, watched(broker) as samples:
        for client in clients(stack, broker, STREAMS):
            client.tell(Kind.STREAM_OPEN, StreamOpen(TOPIC, 0, 0, 1 << 40))
            client.tell(Kind.STREAM_OPEN, StreamOpen(TOPIC, 0, BATCHES, 1 << 40))
        work(bus, broker, samples)


def test_streams_that_are_read_very_slowly(broker: BrokerProcess) -> None:
    with broker.connect() as bus, ExitStack() as stack, watched(broker) as samples:
        slow = clients(stack, broker, STREAMS)
        for client in slow:
            client.tell(Kind.STREAM_OPEN, StreamOpen(TOPIC, 0, 0, 1 << 40))
        for _ in range(10):
            for client in slow:
                assert client.socket.recv(1024)
            work(bus, broker, samples, moment_s=MOMENT_S / 10)


@pytest.mark.parametrize(
    ("kind", "head", "body"),
    [
        (Kind.FETCH, Fetch(TOPIC, 0, 0, bytes_max=4 << 20), b""),
        (Kind.INFO, Info(), b""),
        (Kind.TOPIC_DESCRIBE, TopicDescribe("y" * 200), b""),
        (Kind.PUBLISH, Publish("unread", 0), batch_of(b"x")),
        (Kind.PUBLISH, Publish("unread", 0), batch_of(bytes(1 << 19))),
        (Kind.STREAM_OPEN, StreamOpen(TOPIC, 0, 0, 1 << 40), b""),
    ],
    ids=["fetch", "info", "refused", "publish", "publish large", "ever more streams"],
)
def test_requests_whose_answers_nobody_reads(broker: BrokerProcess, kind: Kind, head: object, body: bytes) -> None:
    with broker.connect() as bus, ExitStack() as stack, watched(broker) as samples:
        bus.create_topic("unread", exist_ok=True, durability="written", retain_bytes=16 << 20)
        silent = clients(stack, broker, SILENT)
        until = time.monotonic() + MOMENT_S
        asked = 0
        while time.monotonic() < until and asked < ASKED_MAX:
            taken = sum(client.push(kind, head, body) for client in silent)
            asked += taken
            if not taken:
                time.sleep(0.01)
            samples.append(broker.memory_bytes())
        print(f"{asked} requests were taken")
        work(bus, broker, samples)


def test_more_requests_that_wait_than_are_read(broker: BrokerProcess) -> None:
    with broker.connect() as bus, ExitStack() as stack, watched(broker) as samples:
        bus.create_topic("empty")
        # Not so many that the last of them, and the end of the connection, get stuck in the clients' own system.
        for client in clients(stack, broker, SILENT):
            for _ in range(2 * UNANSWERED_MAX):
                client.tell(Kind.FETCH, Fetch("empty", 0, 0, wait_ms=600_000))
        work(bus, broker, samples)


def test_frames_that_never_end(broker: BrokerProcess) -> None:
    with broker.connect() as bus, ExitStack() as stack, watched(broker) as samples:
        for client in clients(stack, broker, 10 * SILENT):
            client.socket.sendall(_beginning(32 << 20))
        work(bus, broker, samples)
        for client in clients(stack, broker, SILENT):
            client.socket.sendall(_beginning(32 << 20) + bytes(1 << 20))
        work(bus, broker, samples)


def _beginning(length: int) -> bytes:
    return bytes(frame(Kind.PUBLISH, 7, Publish("never", 0), length))
