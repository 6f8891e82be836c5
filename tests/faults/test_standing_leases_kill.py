"""Consumers with session-bound leases are killed or stopped, and so is the broker: others get the messages at once."""

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.broker_process import BrokerProcess
from tests.faults.fork_server import PATIENCE_S, Child, Nursery
from tests.native_client import NativeClient

import headrace
from headrace.model.leasing import Ack, Holding
from headrace.model.standing_lease import LeaseOpen
from headrace.wire.native import Kind, Ping, decode

TOPIC = "jobs"
COUNT = 20
HELD = 12
HEARTBEAT_MS = 200


def hold(port: int) -> None:
    """In a consumer's process: take messages for as long as it is connected, acknowledge one, and live on."""
    with NativeClient(socket.create_connection(("127.0.0.1", port)), PATIENCE_S) as client:
        client.hello("holder")
        client.ask(LeaseOpen(TOPIC, credit_messages=HELD, session_bound=True))
        found = client.receive()
        assert found.kind == Kind.LEASE_DELIVERY
        [portion] = decode(found.kind, found.head).portions
        assert len(portion.all_offsets) == HELD
        client.ask(Ack(TOPIC, [Holding(portion.partition, portion.lease, [portion.all_offsets[0]])]))
        while True:
            client.ask(Ping())
            time.sleep(HEARTBEAT_MS / 2000)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with Nursery(tmp_path) as nursery:
        yield nursery


@pytest.fixture
def broker(nursery: Nursery, tmp_path: Path) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(nursery, tmp_path / "data", "--heartbeat-ms", str(HEARTBEAT_MS))
    broker.start()
    with broker.connect() as bus:
        bus.create_topic(TOPIC)
        bus.create_subscription(TOPIC, lease_seconds=86_400)
        bus.publish_many(TOPIC, [b"%d" % number for number in range(COUNT)])
    yield broker
    broker.stop()


def wait_for(bus: headrace.Bus, child: Child, ready: int, leased: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := bus.describe_subscription(TOPIC)).ready != ready or found.leased != leased:
        assert time.monotonic() < deadline, f"{found}\n{child.said()}"
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_messages_of_a_consumer_that_is_gone_come_back_at_once(
    nursery: Nursery, broker: BrokerProcess, how: str
) -> None:
    holder = nursery.start("holder", f"{__name__}:hold", broker.port)
    with broker.connect() as bus:
        wait_for(bus, holder, COUNT - HELD, HELD - 1)
        if how == "killed":
            holder.kill()
        else:
            holder.signal(signal.SIGSTOP)  # nothing is heard of it for three heartbeats
        wait_for(bus, holder, COUNT - 1, 0)
        jobs = bus.queue(TOPIC).lease(max=COUNT)
        assert sorted(job.deliveries for job in jobs) == [1] * (COUNT - HELD) + [2] * (HELD - 1)
    if how == "stopped":
        holder.kill()


def test_messages_of_consumers_come_back_at_once_when_the_broker_is_killed(
    nursery: Nursery, broker: BrokerProcess
) -> None:
    holder = nursery.start("holder", f"{__name__}:hold", broker.port)
    with broker.connect() as bus:
        wait_for(bus, holder, COUNT - HELD, HELD - 1)
    broker.kill()
    broker.start()
    with broker.connect() as bus:
        wait_for(bus, holder, COUNT - 1, 0)
        jobs = bus.queue(TOPIC).lease(max=COUNT)
        assert len({job.offset for job in jobs}) == COUNT - 1
