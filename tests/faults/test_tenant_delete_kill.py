"""A broker that is killed while it deletes a tenant goes on with that, and others lose nothing."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.broker_process import BrokerProcess
from tests.faults.fork_server import PATIENCE_S, Nursery

import headrace
from headrace.errors import HeadraceError

TOPICS = 150


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with Nursery(tmp_path) as nursery:
        broker = BrokerProcess(nursery, tmp_path / "data")
        broker.start()
        yield broker
        broker.stop()


def fill(url: str, tenant: str) -> None:
    """Let a tenant have topics with messages, subscriptions and routes."""
    with headrace.connect(url, tenant=tenant, timeout=PATIENCE_S) as bus:
        for number in range(TOPICS):
            bus.create_topic(f"t{number}")
        for number in range(10):
            bus.publish(f"t{number}", b"x")
            bus.create_subscription(f"t{number}")
            bus.routes.add(f"r{number}", source=f"t{number}", all=True, to=f"t{number + 10}")


def delete(url: str) -> None:
    """Ask for the deletion; the broker dies meanwhile."""
    with suppress(HeadraceError), headrace.connect(url, timeout=1.0) as bus:  # it is killed
        bus.tenants.delete("acme", cascade=True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_deletion_goes_on(broker: BrokerProcess, seed: int) -> None:
    with broker.connect() as bus:
        bus.tenants.create("acme", description="A customer")
    fill(broker.tcp_url, "acme")
    fill(broker.tcp_url, "zeta")
    deleting = threading.Thread(target=delete, args=(broker.tcp_url,))
    deleting.start()
    time.sleep(random.Random(seed).uniform(0.0, 0.08))
    broker.kill()
    deleting.join()
    broker.start()
    with broker.connect() as bus:
        deadline = time.monotonic() + PATIENCE_S
        while "acme" in {one.tenant for one in bus.tenants.list()} or bus.topics("acme/*"):
            # Either the deletion was never recorded, and all is there, or it goes on and the tenant is not listed.
            if "acme" in {one.tenant for one in bus.tenants.list()}:
                assert len(bus.topics("acme/*")) == TOPICS
                bus.tenants.delete("acme", cascade=True)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert bus.tenants.create("acme").usage.topics == 0
        assert len(bus.topics("zeta/*")) == TOPICS
