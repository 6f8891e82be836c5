"""The broker is killed or stopped while it delivers: nothing is lost, the order of each key is kept."""

import asyncio
import json
import random
import threading
import time
from pathlib import Path

import pytest
from tests.http_client import HttpProcess, needs_http
from tests.known import quick_place
from tests.receivers import Arrived
from tests.webhook_stage import ThreadedReceiver, needs_outgoing, threaded_receiver, until

import headrace
from headrace.errors import HeadraceError
from headrace.server import EmbeddedServer
from headrace.testing.faulty_disk import FaultyDisk

pytestmark = [needs_http, needs_outgoing]
KEYS = 5
LOOPBACK = ("--webhook-networks", "loopback")


def deliver_across_kills(messages: int, kills: int) -> None:
    dice = random.Random(7)
    taken: dict[str, list[int]] = {}

    async def sometimes(request: Arrived, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(dice.uniform(0, 0.01))
        is_taken = dice.random() > 0.1
        if is_taken:
            for one in json.loads(request.body):
                taken.setdefault(one["key"], []).append(int(one["value"]))
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % (200 if is_taken else 500))
        await writer.drain()
        return True

    with quick_place() as place, threaded_receiver(sometimes) as receiver:
        server = HttpProcess(place / "data", *LOOPBACK)
        with headrace.connect(server.native_url) as bus:
            bus.create_topic("orders", partitions=2)
            bus.webhooks.set(
                "a", "orders", receiver.url, ordered_by_key=True, concurrency=8, batch_max=3, deliveries_max=0,
                retry_seconds=0.01,
            )  # fmt: skip
            for number in range(messages):
                bus.publish("orders", str(number // KEYS).encode(), key=f"k{number % KEYS}")
        for _ in range(kills):
            time.sleep(0.3)
            server.kill()
            server.start()
        wanted = set(range(messages // KEYS))
        until(lambda: len(taken) == KEYS and all(set(came) == wanted for came in list(taken.values())))
        for key, came in taken.items():
            assert came == sorted(came), f"the order of {key} is broken"
        with headrace.connect(server.native_url) as bus:
            until(
                lambda: not any((info := bus.webhooks.describe("a")).ready or info.leased or info.waiting for _ in "x")
            )
        assert server.stop() == 0


def test_messages_survive_kills_in_the_order_of_their_keys() -> None:
    deliver_across_kills(150, 2)


@pytest.mark.long
def test_many_messages_survive_many_kills() -> None:
    deliver_across_kills(3000, 20)


def answering_when(released: threading.Event) -> ThreadedReceiver:
    async def answer(_: Arrived, writer: asyncio.StreamWriter) -> bool:
        while not released.is_set():
            await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return True

    return ThreadedReceiver(answer)


def test_a_broker_that_stops_waits_for_answers_and_sends_the_rest_later() -> None:
    released = threading.Event()
    receiver = answering_when(released)
    with quick_place() as place:
        server = HttpProcess(place / "data", *LOOPBACK, "--drain-seconds", "15")
        with headrace.connect(server.native_url) as bus:
            bus.webhooks.set("a", "orders", receiver.url, concurrency=1)
            bus.publish_many("orders", [b"1", b"2"])
            receiver.wait_for(1)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        time.sleep(0.2)
        released.set()
        stopping.join(20)
        assert receiver.values() == ["1"]
        server.start()
        receiver.wait_for(2)
        assert receiver.values() == ["1", "2"]
        assert receiver.requests[1].headers["headrace-attempt"] == "1"  # it was leased, but never sent
        server.stop()
    receiver.close()


def test_a_receiver_that_hangs_does_not_keep_the_broker_from_stopping() -> None:
    released = threading.Event()
    receiver = answering_when(released)
    with quick_place() as place:
        server = HttpProcess(place / "data", *LOOPBACK, "--drain-seconds", "0.3")
        with headrace.connect(server.native_url) as bus:
            bus.webhooks.set("a", "orders", receiver.url, timeout_seconds=300.0)
            bus.publish("orders", b"1")
            receiver.wait_for(1)
        server.stop()
        released.set()
        server.start()
        receiver.wait_for(2)
        assert receiver.values() == ["1", "1"]
        assert len({one.headers["webhook-id"] for one in receiver.requests}) == 1
        with pytest.raises(HeadraceError), headrace.connect(server.native_url) as bus:
            bus.webhooks.set("b", "orders", "http://10.0.0.1/")
        server.stop()
    receiver.close()


def test_an_answer_is_recorded_when_the_journal_works_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The disk fails just when the receiver has taken the message: it is acknowledged once the disk works again."""
    disk = FaultyDisk()

    async def taking(_: Arrived, writer: asyncio.StreamWriter) -> bool:
        disk.fail_writes(1)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return True

    server = EmbeddedServer(tmp_path / "data", disk=disk, host="127.0.0.1", port=0, webhook_networks=["loopback"])
    host, port = server._server.addresses[0]
    try:
        with headrace.connect(f"headrace://{host}:{port}") as bus, threaded_receiver(taking) as receiver:
            bus.webhooks.set("a", "orders", receiver.url)
            bus.publish("orders", b"1")
            receiver.wait_for(1)
            until(lambda: not (info := bus.webhooks.describe("a")).leased and not info.ready)
            assert len(receiver.requests) == 1
            assert "webhook's messages not settled; trying again" in caplog.text
    finally:
        server.close()
