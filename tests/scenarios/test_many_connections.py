"""A thousand clients at once, some of whom misbehave: everyone is answered, and nothing is left of them."""

import asyncio
import contextlib
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.broker_process import BrokerProcess
from tests.faults.broker_raw import RawClient, batch_of
from tests.faults.fork_server import Nursery

import headrace
from headrace.model.requests import Publish
from headrace.wire.frames import frame
from headrace.wire.native import Kind

CLIENTS = 1000
MISBEHAVING = 100
MESSAGES = 5
DESCRIPTORS = 2 * CLIENTS + MISBEHAVING + 500
"""A client has two connections: one of them for what is delivered."""
TOPIC = "many"
PARTITIONS = 16
PATIENCE_S = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[0] < DESCRIPTORS:
        if before[1] != resource.RLIM_INFINITY and before[1] < DESCRIPTORS:
            pytest.skip(
                f"NOT TESTED: a thousand connections need {DESCRIPTORS} descriptors, and {before[1]} are allowed"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, before[1]))
    try:
        with Nursery(tmp_path) as nursery:
            broker = BrokerProcess(nursery, tmp_path / "data")
            broker.start()
            with broker.connect() as bus:
                bus.create_topic(TOPIC, partitions=PARTITIONS, durability="written")
                for partition in range(PARTITIONS):
                    bus.publish(TOPIC, b"", partition=partition)
                    bus.fetch(TOPIC, partition, 0)
            yield broker
            broker.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def misbehave(port: int, number: int) -> socket.socket:
    """A connection that is not as it should be; returned as it is left."""
    client = RawClient(port)
    way = number % 5
    if way == 0:
        pass  # says nothing at all
    elif way == 1:
        client.socket.sendall(b"\x00\x01")  # less than a header
    elif way == 2:
        client.hello()  # and not a word more
    elif way == 3:
        client.hello()
        batch = batch_of(bytes(1000))
        client.socket.sendall(bytes(frame(Kind.PUBLISH, 9, Publish(TOPIC, 0), len(batch))) + batch[:500])
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # in the middle of a frame, with a reset
    else:
        client.hello()
        client.socket.shutdown(socket.SHUT_WR)  # half open: it can hear, but not speak
    return client.socket


class Turn:
    """Keeps so many clients from going on before all of them have come."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._all_here = asyncio.Event()

    async def wait(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._all_here.set()
        await asyncio.wait_for(self._all_here.wait(), PATIENCE_S)


async def behave(url: str, number: int, dialling: asyncio.Semaphore, turn: Turn) -> None:
    """Publish, and consume what was published."""
    async with dialling:
        bus = await headrace.connect_async(url, timeout=PATIENCE_S)
    try:
        await turn.wait()
        partition = number % PARTITIONS
        first = await bus.publish(TOPIC, b"%d:0" % number, partition=partition)
        for count in range(1, MESSAGES):
            await bus.publish(TOPIC, b"%d:%d" % (number, count), partition=partition)
        await consume(bus, number, partition, first.offset)
        await turn_back(bus, number)
    finally:
        await bus.close()


async def consume(bus: headrace.AsyncBus, number: int, partition: int, start: int) -> None:
    """Our own messages come, in order, among those of others."""
    found = []
    subscription = bus.subscribe(TOPIC, partitions=[partition], start=start, prefetch_bytes=64 << 10)
    async for message in subscription:
        if message.value.startswith(b"%d:" % number):
            found.append(message.value)
            if len(found) == MESSAGES:
                break
    await subscription.close()
    assert found == [b"%d:%d" % (number, count) for count in range(MESSAGES)]


async def turn_back(bus: headrace.AsyncBus, number: int) -> None:
    """Errors find the one they are for as well."""
    with pytest.raises(headrace.HeadraceError, match=f"none-{number}$|none-{number}\\b"):
        await bus.describe_topic(f"none-{number}")


async def all_behave(urls: tuple[str, ...]) -> None:
    turn, dialling = Turn(CLIENTS), asyncio.Semaphore(100)
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(behave(urls[number % len(urls)], number, dialling, turn))


def test_a_thousand_clients_at_once(broker: BrokerProcess) -> None:
    before = broker.descriptors()
    with contextlib.ExitStack() as stack:
        for number in range(MISBEHAVING):
            stack.enter_context(misbehave(broker.port, number))
        asyncio.run(all_behave((broker.tcp_url, broker.unix_url)))
    deadline = time.monotonic() + PATIENCE_S
    while broker.descriptors() > before:
        assert time.monotonic() < deadline, f"{broker.descriptors()} descriptors are open; it were {before} before"
        time.sleep(0.05)
    with broker.connect() as bus:
        assert bus.info().connections == 1
        assert sum(bus.offsets(TOPIC, at="latest").values()) == PARTITIONS + CLIENTS * MESSAGES
