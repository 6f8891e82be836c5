"""Services whose processes are killed vanish; those whose broker is killed are back with it."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.faults.broker_process import BrokerProcess
from tests.faults.fork_server import PATIENCE_S, Nursery

import headrace
from headrace.errors import NotRegistered

HEARTBEAT_MS = 200
TTL_S = 1.0


def be(url: str, instance: str) -> None:
    """In a service's process: register, publish now and then, and live on."""
    with headrace.connect(url, name=instance, timeout=PATIENCE_S) as bus:
        bus.services.register("billing", instance=instance, produces=["bills"], ttl=TTL_S)
        while True:
            bus.publish("bills", instance.encode())
            time.sleep(0.05)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with Nursery(tmp_path) as nursery:
        yield nursery


@pytest.fixture
def broker(nursery: Nursery, tmp_path: Path) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(nursery, tmp_path / "data", "--heartbeat-ms", str(HEARTBEAT_MS))
    broker.start()
    yield broker
    broker.stop()


def instances(bus: headrace.Bus) -> set[str]:
    return {one.instance for info in bus.services.find(produces="bills") for one in info.instances if one.connected}


def published(bus: headrace.Bus, end: int) -> bool:
    return bus.describe_topic("bills").partitions[0].next_offset >= end


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_service_vanishes_and_the_others_stay(broker: BrokerProcess, nursery: Nursery) -> None:
    with broker.connect() as bus:
        bus.events.record()
        first, _ = (nursery.start(name, "tests.faults.test_services_kill:be", broker.tcp_url, name) for name in "ab")
        wait_until(lambda: instances(bus) == {"a", "b"})
        first.kill()
        wait_until(lambda: [one.instance for one in bus.services.describe("billing").instances] == ["b"])
        told = [(event.action, event.details["instance"]) for event in bus.events.history() if event.kind == "service"]
        assert ("expired", "a") in told
        assert ("expired", "b") not in told


def test_services_are_back_with_a_killed_broker(broker: BrokerProcess, nursery: Nursery) -> None:
    with broker.connect() as bus:
        bus.create_topic("bills")
        bus.services.require_registration(True)
        nursery.start("a", "tests.faults.test_services_kill:be", broker.tcp_url, "a")
        wait_until(lambda: instances(bus) == {"a"})
        for _ in range(3):
            before = bus.describe_topic("bills").partitions[0].next_offset
            broker.kill()
            broker.start()
            wait_until(lambda: instances(bus) == {"a"})
            # It publishes, which the policy allows to those only that are registered.
            wait_until(partial(published, bus, before + 3))
        with pytest.raises(NotRegistered):
            bus.publish("bills", b"stranger")
        bus.services.require_registration(False)
        bus.publish("bills", b"stranger")
