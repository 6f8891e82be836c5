"""The AsyncAPI document with security: a session finds in it what its roles let it describe."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.http_client import HttpClient, needs_http

from headrace.gateways.authentication import Peer
from headrace.model.identity import ANONYMOUS, LOCAL, Identity
from headrace.model.security_requests import Binding, BindingAdd, Grant, RoleSet, SecurityAlter
from headrace.runtime.event_loop import new_event_loop
from headrace.server import Server, server_settings

pytestmark = needs_http

KNOWN = {b"admin": LOCAL, b"ada": Identity("ada"), b"eve": Identity("eve")}


def authenticate(_: str, credentials: bytes, __: Peer) -> Identity:
    """Know an administrator and two users."""
    return KNOWN.get(credentials, ANONYMOUS)


@pytest.fixture
def client() -> Iterator[HttpClient]:
    loop, stop, ready = new_event_loop(), asyncio.Event(), threading.Event()
    server = Server(server_settings({"data": ":memory:", "listen": ["http://127.0.0.1:0"]}), authenticate=authenticate)

    async def secure() -> None:
        """Let ada use orders, and eve schedules only."""
        broker: Any = server._broker
        now_us = server._runtime.now_us
        session = broker.connect(lambda _: None, "test", now_us(), identity=LOCAL)
        for request in (
            RoleSet("orders", [Grant(["describe", "publish", "consume"], "topic", ["orders*"])]),
            RoleSet("planner", [Grant(["describe"], "schedule", ["*"])]),
            BindingAdd(Binding("orders", "ada")),
            BindingAdd(Binding("planner", "eve")),
            SecurityAlter(True),
        ):
            answer = broker.ask(session, request, memoryview(bytearray()), now_us())
            if hasattr(answer, "__await__"):
                await answer

    async def serve() -> None:
        await server.start()
        await secure()
        ready.set()
        await stop.wait()
        await server.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    client = HttpClient(server.listening[0])
    yield client
    client.close()
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def test_each_identity_sees_its_topics(client: HttpClient) -> None:
    admin, ada, eve = ({"Authorization": f"Bearer {name}"} for name in ("admin", "ada", "eve"))
    for topic in ("orders", "orders.old", "secrets"):
        assert client.ask("POST", "/v1/topics", {"topic": topic}, admin).status == 201
    service = {"produces": ["orders", "secrets"], "serves": ["prices"]}
    assert client.ask("PUT", "/v1/services/shop/instances/1", service, admin).status == 200
    whole = client.ask("GET", "/v1/asyncapi.json", None, admin).json
    assert {"topic.orders", "topic.secrets", "subject.prices"} <= set(whole["channels"])
    seen = client.ask("GET", "/v1/asyncapi.json", None, ada)
    assert list(seen.json["channels"]) == ["topic.orders", "topic.orders.old"]
    assert b"secrets" not in seen.body
    assert b"shop" not in seen.body
    page = client.ask("GET", "/v1/asyncapi", None, ada).body
    assert b"orders.old" in page
    assert b"secrets" not in page
    nothing = client.ask("GET", "/v1/asyncapi.json", None, eve)
    assert b"orders" not in nothing.body
