"""What is closed or dropped is gone: no descriptors, no threads, no cycles that wait for the garbage collector."""

import asyncio
import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headrace
from headrace.server import EmbeddedServer

WITHIN_S = 20


@pytest.fixture
def url() -> Iterator[str]:
    server = EmbeddedServer(":memory:", host="127.0.0.1", port=0)
    host, port = server._server.addresses[0]
    address = f"headrace://{host}:{port}"
    with headrace.connect(address) as bus:
        bus.publish_many("t", [b"%d" % number for number in range(50)])
        bus.create_subscription("t")
    yield address
    server.close()


@pytest.fixture(autouse=True)
def _no_collecting() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, (held(), threading.enumerate())
        time.sleep(0.005)


def dead(references: list["weakref.ref[Any]"]) -> bool:
    return not any(reference() is not None for reference in references)


def use(bus: headrace.Bus) -> list["weakref.ref[Any]"]:
    """Use all there is, and close it; returns what is to be gone with the bus."""
    bus.publish("t", b"value")
    with bus.producer("t") as producer:
        producer.send(b"value")
    with bus.subscribe("t", group="g", timeout=5) as subscription:
        next(iter(subscription))
    queue = bus.queue("t")
    queue.release(queue.lease(5), 0)
    with queue.jobs(prefetch=2, timeout=5) as jobs:
        next(iter(jobs))
    with bus.transaction("x") as transaction:
        transaction.publish("t", b"value")
    with bus.subjects.subscribe("s", timeout=5) as live:
        bus.subjects.publish("s", b"value")
        next(iter(live))
    parts = [
        bus,
        bus._broker,
        bus._broker.connection,
        bus._consuming,
        bus._metadata_cache,
        producer,
        subscription,
        jobs,
        transaction,
        live,
        live._receiver,
    ]
    return [weakref.ref(part) for part in parts]


def test_a_bus_that_is_closed_is_gone(url: str) -> None:
    before = held()
    for _ in range(3):
        bus = headrace.connect(url)
        references = use(bus)
        bus.close()
        assert held()[1] == before[1]
        del bus
        until(lambda: dead(references))  # noqa: B023 it is called at once
    until(lambda: held()[0] <= before[0] and held()[1] <= before[1])


def test_a_bus_that_is_dropped_is_gone_and_told_of(url: str) -> None:
    before = held()
    for _ in range(3):
        bus = headrace.connect(url)
        references = use(bus)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            del bus
            until(lambda: told)
        assert "not closed" in str(told.pop().message)
        until(lambda: dead(references))  # noqa: B023 it is called at once
    until(lambda: held()[0] <= before[0] and held()[1] <= before[1])


def test_an_embedded_broker_is_closed_with_a_bus_that_is_dropped() -> None:
    before = held()
    bus = headrace.open(":memory:")
    bus.publish("t", b"value")
    with pytest.warns(ResourceWarning, match="not closed"):
        del bus
    until(lambda: held()[1] == before[1])


@pytest.mark.filterwarnings("ignore:a bus was not closed")
def test_what_is_made_by_a_bus_keeps_it(url: str) -> None:
    before = held()
    parts: list[Callable[[headrace.Bus], Any]] = [
        lambda bus: bus.producer("t").publish(b"value"),
        lambda bus: bus.queue("t").peek(),
        lambda bus: bus.schedule("t", b"later", in_=1000).look(),
        lambda bus: next(iter(bus.subscribe("t", timeout=5))),
        lambda bus: bus.transaction("x").begin(),
        lambda bus: bus.subjects.subscribe("s").begin(),
    ]
    for part in parts:
        part(headrace.connect(url))  # nobody has the bus any more
    until(lambda: gc.collect() >= 0 and held()[1] <= before[1])  # what was not closed is left to the collector


def test_a_live_subscription_that_is_dropped_ends(url: str) -> None:
    with headrace.connect(url) as bus:
        live = bus.subjects.subscribe("s")
        live.begin()
        assert bus.subjects.info().subscriptions == 1
        del live
        until(lambda: bus.subjects.info().subscriptions == 0)


@pytest.mark.filterwarnings("ignore:a bus was not closed")
def test_a_message_that_was_sent_is_delivered_though_all_is_dropped(url: str) -> None:
    before = held()
    sent = headrace.connect(url).producer("t", linger=0.05).send(b"value")
    assert not sent.result(20).duplicate
    until(lambda: gc.collect() >= 0 and held()[1] <= before[1])  # what was not closed is left to the collector


def test_a_member_that_is_dropped_leaves_its_group(url: str) -> None:
    with headrace.connect(url) as bus:
        for _ in bus.subscribe("t", group="left", timeout=20):
            break
        until(lambda: not bus.describe_group("left").members)


def test_jobs_that_are_dropped_are_given_back(url: str) -> None:
    with headrace.connect(url) as bus:
        jobs = bus.queue("t").jobs(prefetch=5)
        series = iter(jobs)
        next(series)
        until(lambda: bus.queue("t").stats().leased == 5)
        del jobs, series
        until(lambda: not bus.queue("t").stats().leased)


async def use_async(bus: headrace.AsyncBus) -> list["weakref.ref[Any]"]:
    await bus.publish("t", b"value")
    async with bus.producer("t") as producer:
        await producer.send(b"value")
    async with bus.subscribe("t", group="g", timeout=5) as subscription:
        async for _ in subscription:
            break
    queue = bus.queue("t")
    await queue.release(await queue.lease(5), 0)
    async with queue.jobs(prefetch=2, timeout=5) as jobs:
        async for _ in jobs:
            break
    async with bus.transaction("x") as transaction:
        await transaction.publish("t", b"value")
    async with bus.subjects.subscribe("s", timeout=5) as live:
        await bus.subjects.publish("s", b"value")
        async for _ in live:
            break
    parts = [
        bus,
        bus._broker,
        bus._broker.connection,
        bus._consuming,
        bus._metadata_cache,
        producer,
        subscription,
        jobs,
        transaction,
        live,
        live._receiver,
    ]
    return [weakref.ref(part) for part in parts]


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_an_asyncio_bus_is_gone(url: str, closed: bool) -> None:
    async def story() -> None:
        before = held()
        for _ in range(3):
            bus = await headrace.connect_async(url)
            references = await use_async(bus)
            deadline = time.monotonic() + WITHIN_S
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                if closed:
                    await bus.close()
                del bus
                while not closed and not told:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.005)
            told.clear()
            while not dead(references):
                assert time.monotonic() < deadline, [reference() for reference in references]
                await asyncio.sleep(0.005)
        while held()[0] > before[0]:
            assert time.monotonic() < deadline, held()
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_group_of_methods_keeps_its_bus(url: str) -> None:
    """What is called on a bus that nobody else holds is carried out."""
    names = ("tenants", "auth", "webhooks", "routes", "services", "logging", "events", "audit", "subjects", "cluster")
    groups = {name: getattr(headrace.connect(url), name) for name in names}
    for thread in threading.enumerate():
        if thread.name == "headrace-finalizer":
            thread.join()
    assert groups["tenants"].create("acme").tenant == "acme"
    assert not groups["auth"].describe().enabled
    assert not groups["audit"].describe().enabled
    for name in ("webhooks", "routes", "services", "logging"):
        assert groups[name].list() == []
    groups["events"].record()
    groups["subjects"].publish("s", b"value")
    with pytest.raises(headrace.errors.UnsupportedOperation, match="not part of a cluster"):
        groups["cluster"].describe()
    for group in groups.values():
        group._bus.close()
