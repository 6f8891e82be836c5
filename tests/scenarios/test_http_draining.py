"""What clients of HTTP send while the broker drains, or after another node has taken its place, is answered."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from tests.http_client import WAIT_S, HttpClient, Reply, http_server, needs_http, url_of
from tests.scenarios.test_http_upgrade import code_of, eventually
from tests.socket_client import SocketClient

from headrace.model.errors import Draining, Fenced, HeadraceError, NotServing, TokenRevoked
from headrace.model.standing_lease import LeaseEnd
from headrace.server import EmbeddedServer

ConnectionClosed = pytest.importorskip("websockets.exceptions").ConnectionClosed
pytestmark = needs_http

_MOVED = NotServing("this node hands over to b")


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with http_server() as served:
        yield served


def gateway_of(server: EmbeddedServer):  # type: ignore[no-untyped-def]
    return next(each for each in server._server.gateways if hasattr(each, "application"))


def on_loop(server: EmbeddedServer, call: Callable[[], object]) -> None:
    async def run() -> None:
        call()

    asyncio.run_coroutine_threadsafe(run(), server._loop).result(WAIT_S)


def read_all(end: socket.socket) -> bytes:
    received = b""
    while part := end.recv(1 << 16):
        received += part
    return received


def connected(server: EmbeddedServer, sent: bytes = b"") -> socket.socket:
    """A connection that the gateway knows, with something that it has received."""
    gateway = gateway_of(server)
    before = set(gateway.connections)
    client = HttpClient(url_of(server))
    end = socket.create_connection((client.host, client.port), timeout=WAIT_S)
    eventually(lambda: set(gateway.connections) - before)
    if sent:
        heard_us = gateway.heard_us
        end.sendall(sent)
        eventually(lambda: gateway.heard_us > heard_us)
    return end


def test_a_request_that_comes_while_the_broker_drains_is_answered_and_ends_the_connection(
    server: EmbeddedServer,
) -> None:
    used, gateway = HttpClient(url_of(server)), gateway_of(server)
    used.publish("orders", 1)
    with connected(server) as fresh, closing(used):
        on_loop(server, lambda: (server._server._broker.drain(), gateway.drain()))  # type: ignore[union-attr]
        fresh.sendall(b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = read_all(fresh)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        refused = used.post("/v1/topics/orders/messages", {"value": 2})
        assert_refused(refused, "draining")


def test_what_comes_after_the_broker_was_closed_is_refused(server: EmbeddedServer) -> None:
    used, gateway = HttpClient(url_of(server)), gateway_of(server)
    used.publish("orders", 1)
    with connected(server) as fresh, connected(server, b"GET /v1/to") as half, closing(used):
        on_loop(server, lambda: (gateway.drain(), gateway.refuse_requests(_MOVED)))
        assert_refused(used.post("/v1/topics/orders/messages", {"value": 2}), "not_serving")
        fresh.sendall(b"POST /v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n")
        answer = read_all(fresh)
        assert code_of(answer) == (503, "not_serving")
        assert b"retry-after: 1\r\n" in answer
        on_loop(server, gateway.close)
        assert code_of(read_all(half)) == (503, "not_serving")


def test_connections_that_were_refused_before_do_not_keep_the_gateway_from_stopping(server: EmbeddedServer) -> None:
    unread = b"GET /v1/topics/none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
    refused = [connected(server, unread) for _ in range(3)]
    eventually(lambda: all(each.is_refused for each in gateway_of(server).connections))
    on_loop(server, lambda: gateway_of(server).refuse_requests(_MOVED))
    on_loop(server, lambda: gateway_of(server).close())
    for end in refused:
        with closing(end):
            assert read_all(end).startswith(b"HTTP/1.1 404")


def test_what_was_begun_before_is_in_doubt(server: EmbeddedServer) -> None:
    with closing(HttpClient(url_of(server))) as client:
        client.publish("orders", 1)
    begun = b"POST /v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    with connected(server, begun) as end:
        on_loop(server, lambda: gateway_of(server).refuse_requests(_MOVED))
        assert code_of(read_all(end)) == (503, "fenced")


def assert_refused(reply: Reply, code: str) -> None:
    assert (reply.status, reply.code) == (503, code)
    assert (reply.headers["retry-after"], reply.headers["connection"]) == ("1", "close")


@pytest.mark.parametrize(
    ("error", "code"),
    [(_MOVED, 1001), (Fenced("another node serves"), 1001), (Draining(), 1001), (TokenRevoked("gone"), 1008)],
)
def test_the_close_code_of_a_websocket_says_whether_to_connect_again(
    server: EmbeddedServer, error: HeadraceError, code: int
) -> None:
    with SocketClient(url_of(server)) as client:
        (connection,) = gateway_of(server).connections
        on_loop(server, lambda: connection.end_session(error))
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (code, f"{error.code}: {error}")


def test_pushes_keep_their_order_behind_an_answer_and_before_the_close(server: EmbeddedServer) -> None:
    with SocketClient(url_of(server)) as client:
        (connection,) = gateway_of(server).connections

        async def answer() -> None:
            connection.send({"id": 1, "answer": {}})

        def decide() -> None:
            connection.run(answer())  # as the task of an answer that was resolved just now
            connection.push(LeaseEnd(1, "first", ""))
            connection.push(LeaseEnd(2, "second", ""))
            connection.shutdown()

        on_loop(server, decide)
        assert client.receive() == {"id": 1, "answer": {}}
        told = [client.receive() for _ in range(3)]
        assert [(one["push"], one["fields"].get("standing")) for one in told] == [
            ("LeaseEnd", 1),
            ("LeaseEnd", 2),
            ("Drain", None),
        ]

        def end() -> None:
            connection.push(LeaseEnd(3, "third", ""))
            connection.close()
            connection.push(LeaseEnd(4, "fourth", ""))

        on_loop(server, end)
        assert client.receive()["fields"]["standing"] == 3
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
