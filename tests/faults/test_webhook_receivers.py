"""Receivers that fail, hang, redirect, drip, reset or never end: the message is kept, and other webhooks go on."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.receivers import Arrived
from tests.webhook_stage import needs_outgoing, sending_bus, threaded_receiver, until

import headrace
from headrace.broker.broker import Broker
from headrace.model.limits import PUSH_REQUESTS_MAX
from headrace.runtime.process_info import memory_bytes
from headrace.server import EmbeddedServer

pytestmark = needs_outgoing
Script = Callable[[Arrived, asyncio.StreamWriter], Awaitable[bool]]
SOON = {"retry_seconds": 0.01, "retry_jitter": 0.0}


async def hangs(request: Arrived, _: asyncio.StreamWriter) -> bool:
    await request.gone()
    return False


async def closes_early(_: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    await writer.drain()
    return False


async def closes_at_once(_: Arrived, __: asyncio.StreamWriter) -> bool:
    return False


async def resets(_: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.transport.abort()
    return False


async def redirects(_: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 307 Temporary\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    return True


async def drips(request: Arrived, writer: asyncio.StreamWriter) -> bool:
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Drip: " + b"a" * 10_000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.05)
    return bool(request)


async def endless_headers(_: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not writer.is_closing():
        writer.write(b"X-More: " + b"a" * 8000 + b"\r\n")
        await writer.drain()
    return False


async def speaks_nonsense(_: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"\x16\x03\x01 what?\r\n\r\n")
    await writer.drain()
    return False


@pytest.mark.parametrize(
    "script",
    [hangs, closes_early, closes_at_once, resets, redirects, drips, endless_headers, speaks_nonsense],
    ids=lambda script: script.__name__,
)
def test_a_receiver_that_misbehaves_gets_the_message_again(script: Script) -> None:
    with sending_bus() as bus, threaded_receiver(script) as bad, threaded_receiver() as good:
        bus.webhooks.set("bad", "orders", bad.url, timeout_seconds=0.3, **SOON)
        bus.webhooks.set("good", "orders", good.url)
        bus.publish("orders", b"a")
        bad.wait_for(2)
        assert len({one.headers["webhook-id"] for one in bad.requests}) == 1
        good.wait_for(1)
        failed = until(lambda: bus.webhooks.deliveries("bad", failed=True))
        assert failed[0].outcome == "retry"
        assert failed[0].error
        bad.script = bad._answer
        until(lambda: bus.webhooks.describe("bad").delivered == 1)
        assert bus.webhooks.describe("bad").ready == 0


def test_a_tenant_whose_receivers_hang_does_not_stop_the_others() -> None:
    server = EmbeddedServer(":memory:", host="127.0.0.1", port=0, webhook_networks=["loopback"])
    host, port = server._server.addresses[0]
    address = f"headrace://{host}:{port}"
    try:
        with (
            headrace.connect(address, tenant="acme") as acme,
            headrace.connect(address) as bus,
            threaded_receiver(hangs) as bad,
            threaded_receiver() as good,
        ):
            names = [f"bad-{number}" for number in range(6)]
            for name in names:
                acme.webhooks.set(name, "orders", bad.url, concurrency=64, timeout_seconds=300)
            acme.publish_many("orders", [b"x"] * 300)
            waiting = until(
                lambda: (
                    len(found := [one for one in acme.webhooks.list() if one.waits_for == "requests"]) >= 5 and found
                )
            )
            assert min(one.in_flight for one in acme.webhooks.list()) >= 1
            assert max(one.in_flight for one in waiting) < 64
            acme.webhooks.set("late", "bills", good.url)
            acme.publish("bills", b"of the same tenant")
            bus.webhooks.set("good", "orders", good.url)
            bus.publish_many("orders", [b"%d" % number for number in range(20)])
            good.wait_for(21)
            until(lambda: bus.webhooks.describe("good").delivered == 20)
            assert bus.webhooks.describe("good").waits_for == ""
    finally:
        server.close()


def test_a_tenant_whose_receivers_do_not_give_permission_does_not_stop_the_others() -> None:
    server = EmbeddedServer(":memory:", host="127.0.0.1", port=0, webhook_networks=["loopback"])
    host, port = server._server.addresses[0]
    address = f"headrace://{host}:{port}"
    try:
        with (
            headrace.connect(address, tenant="acme") as acme,
            headrace.connect(address) as bus,
            threaded_receiver(hangs) as bad,
            threaded_receiver() as good,
        ):
            for number in range(PUSH_REQUESTS_MAX // 2 + 100):
                acme.webhooks.set(f"bad-{number}", "orders", bad.url, validate=True, timeout_seconds=300)
            until(lambda: any("when others end" in one.error for one in acme.webhooks.list()))
            bus.webhooks.set("good", "orders", good.url)
            bus.publish("orders", b"a")
            good.wait_for(1)
            assert len(bad.requests) <= PUSH_REQUESTS_MAX // 2
    finally:
        server.close()


def test_surplus_answers_to_one_webhook_deliver_nothing_of_another() -> None:
    async def surplus(request: Arrived, writer: asyncio.StreamWriter) -> bool:
        ok, error = (b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % head for head in (b"200 OK", b"500 No"))
        writer.write(error if request.target == "/fails" else ok * 50)
        await writer.drain()
        return True

    with sending_bus() as bus, threaded_receiver(surplus) as receiver:
        bus.webhooks.set("surplus", "orders", receiver.url)
        bus.webhooks.set("fails", "bills", receiver.url.replace("/hook", "/fails"))
        bus.publish("orders", b"a")
        until(lambda: bus.webhooks.describe("surplus").delivered == 1)
        bus.publish("bills", b"b")
        until(lambda: bus.webhooks.deliveries("fails"))
        info = bus.webhooks.describe("fails")
        assert (info.delivered, info.failed) == (0, 1)


def test_an_endless_body_counts_by_its_status_and_costs_no_memory() -> None:
    async def endless(_: Arrived, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"10000\r\n" + b"a" * 65536 + b"\r\n")
            await writer.drain()
        return False

    with sending_bus() as bus, threaded_receiver(endless) as receiver:
        bus.webhooks.set("a", "orders", receiver.url)
        before = memory_bytes()
        bus.publish_many("orders", [b"x"] * 20)
        until(lambda: bus.webhooks.describe("a").delivered == 20)
        assert memory_bytes() - before < 64 << 20


def test_a_slow_receiver_gets_no_message_twice_at_once() -> None:
    """The lease lasts as long as the request, however long the subscription's lease would."""

    async def slow(_: Arrived, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.5)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return True

    with sending_bus() as bus, threaded_receiver(slow) as receiver:
        bus.webhooks.set("a", "orders", receiver.url, concurrency=4)
        bus.publish_many("orders", [b"1", b"2", b"3"])
        until(lambda: bus.webhooks.describe("a").delivered == 3)
        assert len(receiver.requests) == 3


def test_a_thousand_webhooks_are_defined_and_all_deliver_without_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    real = Broker.ask

    def counting(*given: object) -> object:
        nonlocal asked
        asked += 1
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Broker, "ask", counting)
    with sending_bus() as bus, threaded_receiver() as receiver:
        before = memory_bytes()
        for number in range(1000):
            bus.webhooks.set(f"hook-{number}", "orders", receiver.url)
        assert memory_bytes() - before < 200 << 20
        bus.publish("orders", b"to all")
        receiver.wait_for(1000)
        assert len({one.headers["headrace-webhook"] for one in receiver.requests}) == 1000
        until(lambda: all(one.delivered == 1 for one in bus.webhooks.list()))
        settled = asked
        until(lambda: bus.webhooks.describe("hook-0").leased == 0)
        assert asked - settled < 50  # nothing is asked while nothing happens
