"""The native protocol over HTTP: clients, commands and reconnects work, and what is no such upgrade is refused."""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.commands import run_command
from tests.http_client import WAIT_S, HttpClient, HttpProcess, http_server, needs_http, url_of
from tests.native_client import NativeClient

import headrace
from headrace.model.errors import ConnectionFailed
from headrace.model.requests import Info
from headrace.server import EmbeddedServer
from headrace.wire.frames import frame
from headrace.wire.native import Hello, Kind

pytestmark = needs_http

UPGRADE = "Connection: Upgrade\r\nUpgrade: headrace\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with http_server(http_origins=["https://app.example.org"], http_hosts=["broker.example.org"]) as served:
        yield served


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[HttpClient]:
    with closing(HttpClient(url_of(server))) as client:
        yield client


def request(headers: str = UPGRADE, line: str = "GET /v1/native HTTP/1.1", host: str = "localhost") -> bytes:
    """A request for the native protocol."""
    return f"{line}\r\nHost: {host}\r\n{headers}\r\n".encode()


def upgraded(server: EmbeddedServer, behind: bytes = b"") -> socket.socket:
    """A connection that speaks the native protocol."""
    client = HttpClient(url_of(server))
    end = socket.create_connection((client.host, client.port), timeout=WAIT_S)
    end.sendall(request() + behind)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += end.recv(1)
    assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n"), head
    return end


def code_of(received: bytes) -> tuple[int, str]:
    """The status and the code of the only response."""
    assert received.count(b"HTTP/1.1 ") == 1, received
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["code"]


def eventually(holds: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Clients.


def test_requests_before_the_upgrade_are_answered_first(server: EmbeddedServer) -> None:
    client = HttpClient(url_of(server))
    with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
        plain = b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        end.sendall(plain + plain + request())
        received = b""
        while b"101 Switching" not in received or not received.endswith(b"\r\n\r\n"):
            received += end.recv(1 << 16)
        assert received.count(b"HTTP/1.1 200 ") == 2
        with NativeClient(end) as native:
            assert native.hello().server.startswith("headrace ")
            assert native.ask(Info()).connections >= 1


def test_what_is_sent_with_the_request_is_not_lost(server: EmbeddedServer) -> None:
    hello = bytes(frame(Kind.HELLO, 1, Hello(client="tests", name="quick")))
    with NativeClient(upgraded(server, hello)) as native:
        assert native.receive().kind == Kind.ANSWER
        assert native.ask(Info()).connections >= 1


def test_a_connection_is_counted_once() -> None:
    with http_server(connections_max=2) as served:
        for _ in range(5):
            with headrace.connect(url_of(served)), headrace.connect(url_of(served)):
                assert served._server._connections() == 2
                with pytest.raises(ConnectionFailed, match=r"503 to GET /v1/native: .* 2 connections already"):
                    headrace.connect(url_of(served))
            eventually(lambda: not served._server._connections())


def test_a_client_goes_on_after_the_broker_is_killed(tmp_path: Path) -> None:
    broker = HttpProcess(tmp_path)
    try:
        with headrace.connect(broker.url) as bus:
            bus.publish("orders", b"1")
            broker.kill()
            broker.start()
            bus.publish("orders", b"2")
            assert bus.info().topics == 1
    finally:
        broker.stop()


def test_a_forked_child_connects_by_itself(server: EmbeddedServer) -> None:
    with headrace.connect(url_of(server)) as bus:
        bus.publish("forked", b"parent")
        child = os.fork()
        if not child:
            code = 1
            try:
                bus.publish("forked", b"child")
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        bus.publish("forked", b"parent again")
        with bus.subscribe("forked", start="earliest") as messages:
            found = [message.value for message in islice(messages, 3)]
        assert sorted(found) == [b"child", b"parent", b"parent again"]


def test_draining_reaches_clients(tmp_path: Path) -> None:
    broker = HttpProcess(tmp_path)
    with headrace.connect(broker.url) as bus:
        bus.publish("orders", b"1")
        assert broker.stop() == 0
    with pytest.raises(ConnectionFailed, match=r"is it running, and does it listen for HTTP\?"):
        headrace.connect(broker.url)


def test_the_commands_work(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*arguments: str, stdin: bytes = b"") -> list[Any]:
        finished = run_command([*arguments, "--json"], stdin, timeout_s=WAIT_S)
        assert finished.returncode == 0, finished.stderr
        return [json.loads(line) for line in finished.stdout.splitlines()]

    monkeypatch.setenv("HEADRACE_URL", f"{url_of(server)}?tenant=acme")
    run("topic", "create", "jobs")
    run("publish", "jobs", stdin=b"one\ntwo\n")
    assert [topic["topic"] for topic in run("topic", "list")] == ["jobs"]
    assert [message["value"] for message in run("tail", "jobs", "--from", "earliest", "--limit", "2")] == ["one", "two"]
    run("queue", "create", "jobs", "work")
    assert [message["value"] for message in run("queue", "drain", "jobs", "work")] == ["one", "two"]
    monkeypatch.delenv("HEADRACE_URL")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run("context", "add", "web", url_of(server))
    run("context", "use", "web")
    assert "jobs" not in [topic["topic"] for topic in run("topic", "list")]


# Proxies, and servers that are none of ours.


@contextmanager
def answering(*pieces: bytes) -> Iterator[str]:
    """A server that answers every connection with the same bytes, in pieces, and closes it."""

    def serve() -> None:
        while True:
            try:
                end, _ = listening.accept()
            except OSError:
                return
            with end:
                end.settimeout(WAIT_S)
                end.recv(1 << 16)
                for piece in pieces:
                    end.sendall(piece)
                    time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(WAIT_S)


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n", b"no"], "answers 404 .* is it a Headrace broker"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], "answers 200 .* pass the headers Upgrade and Connection"),
        ([b"HTTP/1.1 403 Forbidden\r\n\r\n"], "answers 403 .* refuses"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "answers 400 .* does not understand"),
        ([b"HTTP/1.1 302 Found\r\nLocation: https://b.example\r\n\r\n"], "refers to 'https://b.example'; connect to"),
        ([b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\n\r\n"], "switches to 'websocket', not to 'headrace'"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], r"does not speak HTTP: it sent 'SSH-2.0-OpenSSH_9.2"),
        ([b"HT", b"TP/2"], "does not speak HTTP"),
        ([b"HTTP/1.1 200"], "closed the connection after 'HTTP/1.1 200'"),
        ([], "closed the connection without an answer"),
        ([b"HTTP/1.1 101 S\r\n" + b"x: y\r\n" * 5000], "a head of more than 16384 bytes"),
        (
            [b"HTTP/1.1 403 No\r\nContent-Type: application/problem+json\r\nContent-Length: 23\r\n\r\n", b'{"detail": ',
             b'"go away :-("}'],
            r"answers 403 to GET /v1/native: go away :-\(",
        ),
    ],
)  # fmt: skip
def test_another_answer_is_explained(pieces: list[bytes], told: str) -> None:
    with answering(*pieces) as url:
        with pytest.raises(ConnectionFailed, match=told):
            headrace.connect(url, timeout=WAIT_S)
        with pytest.raises(ConnectionFailed, match=told):
            asyncio.run(headrace.connect_async(url, timeout=WAIT_S))


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConnectionFailed, match="cannot reach a broker"):
            headrace.connect(url, timeout=0.2)
        with pytest.raises(ConnectionFailed, match="no answer within"):
            asyncio.run(headrace.connect_async(url, timeout=0.2))


def test_the_native_port_is_no_http(server: EmbeddedServer) -> None:
    port = server._server.addresses[0][1]
    with pytest.raises(ConnectionFailed, match="does not speak HTTP"):
        headrace.connect(f"http://127.0.0.1:{port}")


def test_a_proxy_with_a_path_in_front(server: EmbeddedServer) -> None:
    """A proxy as nginx is one: takes a prefix off the path, and passes the bytes on in both directions."""
    target = HttpClient(url_of(server))

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes = b"") -> None:
        data = first
        while data or (data := await reader.read(1 << 16)):
            writer.write(data)
            data = b""
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /broker/v1/native HTTP/1.1\r\n")
        there_in, there_out = await asyncio.open_connection(target.host, target.port)
        await asyncio.gather(
            pass_on(reader, there_out, head.replace(b" /broker/", b" /", 1)), pass_on(there_in, writer)
        )

    async def story() -> None:
        async with await asyncio.start_server(accept, "127.0.0.1", 0) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            async with await headrace.connect_async(f"http://127.0.0.1:{port}/broker/") as bus:
                await bus.publish("proxied", b"1")
                assert (await bus.describe_topic("proxied")).topic == "proxied"

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


# Hostile upgrades.


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (request(""), (426, "upgrade_required")),
        (request("Connection: Upgrade\r\nUpgrade: websocket\r\n"), (426, "upgrade_required")),
        (request("Connection: Upgrade\r\nUpgrade: h2c\r\n"), (426, "upgrade_required")),
        (request("Upgrade: headrace\r\n"), (426, "upgrade_required")),
        (request(line="HEAD /v1/native HTTP/1.1"), (426, None)),
        (request(line="GET /v1/native HTTP/1.0"), (426, "upgrade_required")),
        (request(line="POST /v1/native HTTP/1.1"), (405, "method_not_allowed")),
        (request(line="GET /v1/native?tenant=acme HTTP/1.1"), (422, "invalid_field")),
        (request(UPGRADE + "Content-Length: 2\r\n") + b"{}", (400, "malformed_request")),
        (request(UPGRADE + "Content-Length: 0\r\n"), (400, "malformed_request")),
        (request(UPGRADE + "Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n", (400, "malformed_request")),
        (request(UPGRADE + "Upgrade: headrace\r\n"), (400, "malformed_request")),
        (request(host="evil.example.org"), (403, "host_refused")),
        (request(UPGRADE + "Authorization: Bearer x\r\n", host="evil.example.org"), (403, "host_refused")),
        (request(UPGRADE + "Origin: https://evil.example.org\r\n"), (403, "origin_refused")),
        (request(UPGRADE + "Origin: null\r\n"), (403, "origin_refused")),
        (request(UPGRADE + "Authorization: Bearer x\r\nOrigin: http://evil.example.org\r\n"), (403, "origin_refused")),
        (request(UPGRADE + "Sec-Fetch-Site: cross-site\r\n"), (403, "origin_refused")),
    ],
)
def test_what_is_no_upgrade_is_refused(client: HttpClient, sent: bytes, expected: tuple[int, str | None]) -> None:
    if b"Connection:" not in sent:
        sent = sent.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    received = client.raw(sent)
    if expected[1] is None:
        assert received.startswith(b"HTTP/1.1 426 ")
    else:
        assert code_of(received) == expected
    assert client.get("/v1/topics").status == 200


def test_credentials_for_a_proxy_are_not_judged(server: EmbeddedServer) -> None:
    client = HttpClient(url_of(server))
    with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
        end.sendall(request(UPGRADE + "Authorization: Basic Ym9i\r\nOrigin: https://app.example.org\r\n"))
        assert end.recv(12) == b"HTTP/1.1 101"


def test_garbage_after_the_upgrade_ends_the_connection(server: EmbeddedServer) -> None:
    for garbage in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\0" * 64, b"\xff" * 4096):
        with upgraded(server) as end, closing(NativeClient(end)) as native:
            end.sendall(garbage)
            assert native.receive().kind == Kind.FAILURE
            assert not end.recv(1)
    eventually(lambda: not server._server._connections())


def test_a_flood_behind_the_request_is_refused(client: HttpClient) -> None:
    with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
        slow = b"GET /v1/topics/none/partitions/0/messages?wait=20 HTTP/1.1\r\nHost: localhost\r\n"
        end.sendall(slow + UPGRADE.encode() + b"\r\n" + b"x" * (65 << 10))
        assert code_of(end.recv(1 << 16)) == (400, "malformed_request")
    assert client.get("/v1/topics").status == 200


def test_silence_after_the_upgrade_ends_the_connection() -> None:
    hello = bytes(frame(Kind.HELLO, 1, Hello(client="tests", name="slow")))
    with http_server(heartbeat_ms=100) as served:
        for sent in (b"", hello[: len(hello) // 2]):
            with upgraded(served) as end:
                end.sendall(sent)
                assert not end.recv(1 << 16)
        eventually(lambda: not served._server._connections())


def test_nobody_is_upgraded_while_the_broker_drains() -> None:
    with http_server() as served:
        client = HttpClient(url_of(served))
        with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
            end.sendall(b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert end.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            gateway = next(each for each in served._server.gateways if hasattr(each, "application"))
            gateway.draining = True
            end.sendall(request())
            received = b""
            while part := end.recv(1 << 16):
                received += part
            assert code_of(received) == (503, "draining")
