"""A server on a replicated disk: clients and receivers of webhooks hear of nothing that the store does not have."""

import asyncio
import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.http_client import HttpClient, Reply, http_server, native_url_of, needs_http, url_of
from tests.replica import replay, replicated, seal
from tests.socket_client import SocketClient
from tests.webhook_stage import needs_outgoing, threaded_receiver

import headrace
from headrace.cluster.definitions import SharedDefinitions
from headrace.model.errors import DurabilityUnavailable, HeadraceError, Timeout
from headrace.model.leasing import Lease
from headrace.model.security_requests import Grant
from headrace.server import EmbeddedServer
from headrace.server.server import Server
from headrace.server.settings import ServerSettings
from headrace.storage.disk import OpenFile, PrivateDisk
from headrace.storage.stores.memory import MemoryStore
from headrace.testing.workbench import Workbench

QUIET_S = 0.3


class HeldDisk(PrivateDisk):
    """A disk whose store does not answer while it is held."""

    is_replicated = True

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()

    def sync(self, file: OpenFile) -> None:  # noqa: ARG002
        """Wait for the store."""
        assert self.answers.wait(60)


@pytest.fixture
def disk() -> HeldDisk:
    return HeldDisk()


@pytest.fixture
def address(tmp_path: Path, disk: HeldDisk) -> Iterator[str]:
    server = EmbeddedServer(tmp_path / "data", disk=disk, host="127.0.0.1", port=0, webhook_networks=["loopback"])
    host, port = server._server.addresses[0]
    yield f"headrace://{host}:{port}"
    disk.answers.set()
    server.close()


def test_receipts_say_replicated_once_the_store_has_the_message(address: str, disk: HeldDisk) -> None:
    with headrace.connect(address) as bus:
        assert bus.publish("orders", b"1").durability.name == "REPLICATED"
        assert bus.publish("orders", b"2", durability="replicated").durability.name == "REPLICATED"
        disk.answers.clear()
        receipts: list[str] = []
        publishing = threading.Thread(target=lambda: receipts.append(bus.publish("orders", b"3").durability.name))
        publishing.start()
        time.sleep(QUIET_S)
        assert receipts == []
        disk.answers.set()
        publishing.join()
        assert receipts == ["REPLICATED"]


def test_a_plain_broker_refuses_replicated() -> None:
    with headrace.open(":memory:") as bus, pytest.raises(DurabilityUnavailable):
        bus.publish("orders", b"1", durability="replicated")


@pytest.mark.parametrize("is_standing", [False, True])
def test_a_worker_gets_a_message_only_when_its_lease_is_in_the_store(
    address: str, disk: HeldDisk, is_standing: bool
) -> None:
    with headrace.connect(address) as bus, headrace.connect(address) as other:
        bus.publish("jobs", b"1")
        got: list[bytes | None] = []

        def work() -> None:
            queue = other.queue("jobs")
            for job in queue.jobs(timeout=30) if is_standing else queue.lease(wait=30):
                got.append(job.value)
                if not is_standing:
                    queue.ack(job)
                break

        disk.answers.clear()
        working = threading.Thread(target=work)
        working.start()
        time.sleep(QUIET_S)
        assert got == []
        disk.answers.set()
        working.join()
        assert got == [b"1"]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_batch_of_a_shared_transaction_is_staged_once_the_store_has_it(
    address: str, disk: HeldDisk, is_shared: bool
) -> None:
    """One that is not shared ends with the node, so that nobody needs its batches afterwards."""
    with headrace.connect(address) as bus:
        bus.create_topic("orders")
        part = bus.transaction("load", sequence=1)
        part.join() if is_shared else part.begin()
        part.publish("orders", b"1")
        staged: list[list[int]] = []
        disk.answers.clear()
        staging = threading.Thread(target=lambda: staged.append(part.staged()))
        staging.start()
        time.sleep(QUIET_S)
        assert len(staged) == (not is_shared)
        disk.answers.set()
        staging.join()
        assert len(staged[0]) == 1
        part.commit()
        assert bus.offsets("orders") == {0: 1}


@needs_http
@needs_outgoing
def test_a_receiver_of_a_webhook_hears_nothing_that_is_not_in_the_store(address: str, disk: HeldDisk) -> None:
    with headrace.connect(address) as bus, threaded_receiver() as receiver:
        bus.webhooks.set("a", "orders", receiver.url)
        bus.publish("orders", b"1")
        receiver.wait_for(1)
        disk.answers.clear()
        publishing = threading.Thread(target=lambda: bus.publish("orders", b"2"))
        publishing.start()
        time.sleep(QUIET_S)
        assert len(receiver.requests) == 1
        disk.answers.set()
        publishing.join()
        receiver.wait_for(2)


def publish_and_leave(url: str, path: str, content: bytes, key: str) -> None:
    """Send a publish with a key, and close the connection before the answer comes."""
    client = HttpClient(url)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {client.host}\r\nContent-Type: application/json\r\nIdempotency-Key: {key}\r\n"
    )
    with socket.create_connection((client.host, client.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        time.sleep(QUIET_S)
        assert not select.select([connection], [], [], 0)[0], "it is answered while the disk does not answer"


@needs_http
@pytest.mark.parametrize("is_replicated", [True, False], ids=["cluster", "plain"])
@pytest.mark.parametrize("content", [{"value": 1}, [{"value": 1}, {"value": 2}]], ids=["one", "many"])
def test_a_publish_with_a_key_is_stored_once_although_its_client_left_and_repeats_it(
    tmp_path: Path, disk: HeldDisk, is_replicated: bool, content: Any
) -> None:
    disk.is_replicated = is_replicated
    path, body = "/v1/topics/orders/messages", json.dumps(content).encode()
    with http_server(tmp_path / "data", disk=disk) as server, headrace.connect(native_url_of(server)) as bus:
        bus.create_topic("orders")
        disk.answers.clear()
        try:
            for _ in range(2):
                publish_and_leave(url_of(server), path, body, "a")
            replies: list[Reply] = []
            client = HttpClient(url_of(server))
            repeat = threading.Thread(
                target=lambda: replies.append(
                    client.post(path, body, Content_Type="application/json", Idempotency_Key="a")
                )
            )
            repeat.start()
            time.sleep(QUIET_S)
            assert not replies
        finally:
            disk.answers.set()
        repeat.join()
        again = client.post(path, body, Content_Type="application/json", Idempotency_Key="a")
        client.close()
        for reply in (replies[0], again):
            assert (reply.status, reply.headers["idempotency-replayed"]) == (201, "true")
        assert again.json == replies[0].json
        assert bus.offsets("orders") == {0: len(content) if isinstance(content, list) else 1}


@needs_http
def test_a_publish_with_a_key_is_stored_once_although_its_websocket_closed(tmp_path: Path, disk: HeldDisk) -> None:
    with http_server(tmp_path / "data", disk=disk) as server, headrace.connect(native_url_of(server)) as bus:
        bus.create_topic("orders")
        disk.answers.clear()
        try:
            with SocketClient(url_of(server)) as first:
                first.send("Publish", [{"value": 1}], topic="orders", idempotency_key="a")
                time.sleep(QUIET_S)
            second = SocketClient(url_of(server))
            number = second.send("Publish", [{"value": 1}], topic="orders", idempotency_key="a")
            time.sleep(QUIET_S)
        finally:
            disk.answers.set()
        with second:
            assert [one["offset"] for one in second.answer(number)["answer"]["receipts"]] == [0]
        assert bus.offsets("orders") == {0: 1}


def test_administration_of_security_is_unchanged_with_shared_definitions(tmp_path: Path) -> None:
    store = MemoryStore()

    async def administer(data: Path) -> list[str]:
        definitions = SharedDefinitions(store, "test")
        server = Server(
            ServerSettings(data=str(data), host="127.0.0.1", port=0), HeldDisk(), definitions=definitions.attach
        )
        await server.start()
        host, port = server.addresses[0]
        try:
            async with await headrace.connect_async(f"headrace://{host}:{port}") as bus:
                names = [role.name for role in (await bus.auth.describe()).roles if not role.is_built_in]
                await bus.auth.set_role(f"role-{len(names)}", [Grant(["consume"], "topic", ["orders.*"])])
                await bus.auth.create_token("ada")
                assert len(await bus.auth.tokens()) == len(names) + 1
        finally:
            await server.stop()
            definitions.close()
        return names

    assert asyncio.run(administer(tmp_path / "one")) == []
    assert asyncio.run(administer(tmp_path / "two")) == ["role-0"], "another node has them"


def test_an_owner_that_was_sealed_off_acknowledges_nothing(tmp_path: Path) -> None:
    store, data = MemoryStore(), str(tmp_path / "data")
    disk = replicated(PrivateDisk(), data, store)
    server = EmbeddedServer(data, disk=disk, host="127.0.0.1", port=0)
    host, port = server._server.addresses[0]
    try:
        bus = headrace.connect(f"headrace://{host}:{port}", timeout=1)
        assert bus.publish("jobs", b"1").durability.name == "REPLICATED"
        assert [job.value for job in bus.queue("jobs").lease()] == [b"1"]
        disk.writer.flush(30)
        seal(store)
        with pytest.raises(HeadraceError) as refused:
            bus.publish("jobs", b"2")
        assert refused.value.retryable
        with pytest.raises(HeadraceError):
            bus.create_topic("more")
        with pytest.raises(Timeout, match="they may still be"):
            bus.close()
    finally:
        with contextlib.suppress(HeadraceError):
            server.close()
    after = Workbench("/copy", disk=replay(store), now_us=time.time_ns() // 1000)
    assert after.values("jobs") == [b"1"]
    assert after.ask(Lease("jobs")).portions == [], "the next owner knows the lease"
