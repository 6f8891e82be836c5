"""Who a client of HTTP is: the server's `authenticate` decides, and a session belongs to one identity and tenant."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from tests.http_client import HttpClient, needs_http

from headrace.broker.pending_answer import PendingAnswer
from headrace.gateways.authentication import ANONYMOUS_MECHANISM, Peer
from headrace.model.errors import InvalidArgument
from headrace.model.identity import ANONYMOUS, Identity
from headrace.runtime.event_loop import new_event_loop
from headrace.server import Server, server_settings

pytestmark = needs_http

asked: list[tuple[str, bytes]] = []


def authenticate(mechanism: str, credentials: bytes, peer: Peer) -> Identity | PendingAnswer[Identity]:
    """Know two people: ann at once, bob after a moment."""
    asked.append((mechanism, credentials))
    assert peer.gateway == "http"
    assert peer.is_local
    if mechanism == ANONYMOUS_MECHANISM:
        return ANONYMOUS
    if (mechanism, credentials) == ("bearer", b"ann"):
        return Identity("ann", "acme")
    if mechanism == "basic":
        pending: PendingAnswer[Identity] = PendingAnswer()
        outcome = Identity("bob") if credentials == b"Ym9i" else InvalidArgument("nobody knows you")
        asyncio.get_running_loop().call_later(0.02, pending.resolve, outcome)
        return pending
    raise InvalidArgument("nobody knows you")


@pytest.fixture
def client() -> Iterator[HttpClient]:
    loop, stop, ready = new_event_loop(), asyncio.Event(), threading.Event()
    settings = server_settings({"data": ":memory:", "listen": ["http://127.0.0.1:0"]})
    server = Server(settings, authenticate=authenticate)

    async def serve() -> None:
        await server.start()
        ready.set()
        await stop.wait()
        await server.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    asked.clear()
    client = HttpClient(server.listening[0])
    yield client
    client.close()
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def test_credentials_name_the_identity_and_its_tenant(client: HttpClient) -> None:
    ann = {"Authorization": "Bearer ann"}
    assert client.ask("POST", "/v1/topics/orders/messages", {"value": 1}, ann).status == 202
    assert client.get("/v1/topics/orders").code == "topic_not_found"  # it is acme's
    assert client.ask("GET", "/v1/topics/orders", None, {"Headrace-Tenant": "acme"}).status == 200
    refused = client.ask("GET", "/v1/topics", None, {**ann, "Headrace-Tenant": "other"})
    assert refused.status == 422
    assert ("bearer", b"ann") in asked


def test_an_answer_may_take_a_moment_and_holds_for_the_connection(client: HttpClient) -> None:
    bob = {"Authorization": "Basic Ym9i"}
    for _ in range(3):
        assert client.ask("GET", "/v1/topics", None, bob).status == 200
    assert asked == [("basic", b"Ym9i")]


def test_wrong_credentials_get_401_and_right_ones_may_have_any_host(client: HttpClient) -> None:
    for credentials in ("Bearer eve", "Basic ZXZl"):
        refused = client.ask("GET", "/v1/topics", None, {"Authorization": credentials})
        assert (refused.status, refused.code, refused.json["detail"]) == (401, "not_authenticated", "nobody knows you")
    proxied = {"Authorization": "Bearer ann", "Host": "broker.example.org", "Origin": "https://other.example.org"}
    answered = client.ask("GET", "/v1/topics", None, proxied)
    assert (answered.status, answered.headers.get("access-control-allow-origin")) == (200, None)
