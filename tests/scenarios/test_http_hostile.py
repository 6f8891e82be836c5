"""Requests that no honest client sends: refused with 4xx, with bounded memory, and others are served meanwhile."""

import gzip
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.http_client import JSON, NDJSON, WAIT_S, HttpClient, http_server, needs_http, url_of

from headrace.runtime.process_info import memory_bytes
from headrace.server import EmbeddedServer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = needs_http

ORDERS = "/v1/topics/orders/messages"
HEAD = b"POST /v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with http_server(
        http_body_bytes_max=1 << 20,
        http_request_seconds=0.5,
        http_origins=["https://app.example.org"],
        http_hosts=["broker.example.org"],
    ) as served:
        yield served


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[HttpClient]:
    client = HttpClient(url_of(server))
    yield client
    client.close()


def status(received: bytes) -> int:
    """The status of the only response, which is a problem."""
    assert received.count(b"HTTP/1.1 ") == 1, received
    head, _, body = received.partition(b"\r\n\r\n")
    assert json.loads(body)["code"]
    return int(head.split(b" ")[1])


# Pages in a browser.


@pytest.mark.parametrize(
    "host", ["evil.example.org", "evil.example.org:7391", "127.0.0.1.evil.org", "localhost.evil", ""]
)
def test_a_foreign_host_is_refused(client: HttpClient, host: str) -> None:
    for method, path in (("GET", "/v1/topics"), ("POST", ORDERS), ("GET", "/metrics"), ("OPTIONS", ORDERS)):
        refused = client.ask(method, path, None, {"Host": host})
        assert (refused.status, refused.code) == (403, "host_refused")


@pytest.mark.parametrize(
    "host",
    [
        "[::1].evil.org", "[::1]evil.org", "[::1", "[::1]:80:80", "::1", "a@127.0.0.1", "127.0.0.1:80@evil.org",
        "localhost:abc", "localhost:1:2", "localhost/evil.org", "localhost#", "localhost?x", "localhost evil.org",
        "localhost,evil.org", "localhost:evil.org", "[localhost]", "broker.example.org:1@evil.org",
    ],
)  # fmt: skip
def test_what_is_no_host_and_port_is_refused(client: HttpClient, host: str) -> None:
    refused = client.ask("GET", "/v1/topics", None, {"Host": host, "Origin": f"http://{host}"})
    assert (refused.status, refused.code) == (400, "malformed_request")
    headers = "Host: localhost\r\nConnection: close"
    received = client.raw(f"GET http://{host}/v1/topics HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    assert received.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403", b"HTTP/1.1 404")), host


@pytest.mark.parametrize(
    ("target", "host", "expected"),
    [
        ("http://localhost/v1/topics", "127.0.0.1", 200),
        ("http://evil.org/v1/topics", "localhost", 403),
        ("http://localhost/v1/topics", "evil.org", 403),
        ("http://localhost@evil.org/v1/topics", "localhost", 400),
    ],
)
def test_the_host_of_a_whole_url_counts(client: HttpClient, target: str, host: str, expected: int) -> None:
    received = client.raw(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert int(received.split(b" ")[1]) == expected


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:7391", "broker.example.org:80"])
def test_the_brokers_own_names_are_good(client: HttpClient, host: str) -> None:
    assert client.ask("GET", "/v1/topics", None, {"Host": host}).status == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example.org", "null", "http://localhost:1", "https://app.example.org.evil"]
)
def test_a_page_of_another_site_can_neither_publish_nor_read(client: HttpClient, origin: str) -> None:
    simple = {"Origin": origin, "Content-Type": "text/plain"}
    assert client.ask("POST", ORDERS, b'{"value": 1}', simple).code == "origin_refused"
    assert client.ask("POST", ORDERS, {"value": 1}, {"Origin": origin}).code == "origin_refused"
    refused = client.ask("GET", ORDERS, None, {"Origin": origin, "Accept": "text/event-stream"})
    assert (refused.status, refused.headers.get("access-control-allow-origin")) == (403, None)
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert client.ask("OPTIONS", ORDERS, None, preflight).status == 403
    assert client.get("/v1/topics/orders").code == "topic_not_found"


def test_a_request_without_origin_from_another_site_is_refused(client: HttpClient) -> None:
    assert client.ask("GET", "/v1/topics", None, {"Sec-Fetch-Site": "cross-site"}).code == "origin_refused"
    assert client.ask("GET", "/v1/topics", None, {"Sec-Fetch-Site": "same-site"}).code == "origin_refused"
    assert client.ask("GET", "/v1/docs", None, {"Sec-Fetch-Site": "none"}).status == 200


def test_a_page_that_is_listed_may(client: HttpClient) -> None:
    origin = {"Origin": "https://app.example.org"}
    preflight = client.ask("OPTIONS", ORDERS, None, {**origin, "Access-Control-Request-Method": "POST"})
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (204, origin["Origin"])
    assert "idempotency-key" in preflight.headers["access-control-allow-headers"]
    published = client.ask("POST", ORDERS, {"value": 1}, origin)
    assert (published.status, published.headers["access-control-allow-origin"]) == (202, origin["Origin"])
    own = client.ask("GET", "/v1/topics", None, {"Origin": client.url})
    assert own.status == 200
    client.ask("DELETE", "/v1/topics/orders")


def test_credentials_that_nobody_checks_are_refused(client: HttpClient) -> None:
    refused = client.ask("GET", "/v1/topics", None, {"Authorization": "Bearer abc", "Host": "evil"})
    assert (refused.status, refused.code) == (401, "not_authenticated")
    assert refused.headers["www-authenticate"] == "Bearer"


# Content types and encodings.


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_another_content_type_is_refused(client: HttpClient, kind: str) -> None:
    for path in (ORDERS, "/v1/topics", "/v1/groups/g/commits"):
        refused = client.ask("POST", path, b'{"topic": "a", "value": 1}', {"Content-Type": kind})
        assert (refused.status, refused.code) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"value": 1} x',
        b'{"value": "\xff"}',
        b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
        b'{"value": nan}',
        b"",
    ],
)
def test_what_is_no_json_is_refused(client: HttpClient, body: bytes) -> None:
    for headers in (JSON, NDJSON):
        refused = client.ask("POST", ORDERS, body, headers)
        assert refused.status in (400, 413, 422), refused
    assert client.ask("POST", "/v1/topics", body or b" ", JSON).code in ("invalid_json", "invalid_field")


def test_unknown_fields_are_named(client: HttpClient) -> None:
    refused = client.post(ORDERS, {"value": 1, "duee": 2})
    assert (refused.status, refused.code) == (422, "invalid_field")
    assert "duee" in refused.json["detail"]
    nested = client.post("/v1/topics", {"topic": "a", "settings": {"partitions": "many"}})
    assert "$.settings.partitions" in nested.json["detail"]
    assert client.get("/v1/topics?limit=0").code == "invalid_field"
    assert client.get("/v1/topics?limit=1&limit=2").code == "invalid_field"
    assert client.get("/v1/topics?x=1").code == "invalid_field"
    assert client.get("/v1/broker?x=1").code == "invalid_field"
    assert client.get("/v1/topics?after=%ff").code == "invalid_encoding"
    assert client.get("/v1/topics/%ff").code == "invalid_encoding"


def test_bodies_that_are_too_large_are_refused_before_they_are_read(client: HttpClient) -> None:
    large = client.raw(HEAD + b"Content-Length: 99999999999\r\n\r\n")
    assert status(large) == 413
    chunks = b"".join(b"40000\r\n" + b" " * 0x40000 + b"\r\n" for _ in range(6))
    assert status(client.raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)) == 413


def zstd_of_unknown_size(content: bytes) -> bytes:
    """A frame whose head does not tell how much it expands to."""
    packer = zstd.ZstdCompressor()
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize(
    ("name", "compress"), [("gzip", gzip.compress), ("zstd", zstd.compress), ("zstd", zstd_of_unknown_size)]
)
def test_a_compressed_bomb_is_refused_with_bounded_memory(client: HttpClient, name: str, compress: Any) -> None:
    bomb = compress(b" " * (200 << 20))
    assert len(bomb) < 1 << 20
    before = memory_bytes()
    headers = {**JSON, "Content-Encoding": name}
    assert client.ask("POST", ORDERS, bomb, headers).code == "body_too_large"
    assert memory_bytes() - before < 50 << 20
    assert client.ask("POST", ORDERS, b"no such format", headers).code == "invalid_encoding"
    assert client.ask("POST", ORDERS, compress(b"{}")[:-3], headers).code == "invalid_encoding"
    refused = client.ask("POST", ORDERS, b"{}", {**JSON, "Content-Encoding": "br"})
    assert (refused.status, refused.headers["accept-encoding"]) == (415, "gzip, zstd")


# Heads.


def test_a_huge_head_is_refused(client: HttpClient) -> None:
    filler = b"X-A: " + b"a" * 1000 + b"\r\n"
    assert status(client.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + filler * 100 + b"\r\n")) == 431
    assert status(client.raw(b"GET /" + b"a" * (100 << 10) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")) == 431
    assert status(client.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 200 + b"\r\n")) == 431


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"X: a\r\n Transfer-Encoding: chunked\r\n",
        b"X\0: a\r\n",
        b"Headrace-Tenant: a\r\nHeadrace-Tenant: b\r\n",
        b"Content-Type: application/json\r\n",
        b"Host: localhost\r\n",
        b"Origin: http://localhost\r\nOrigin: http://localhost\r\n",
        b"Idempotency-Key: a\r\nIdempotency-Key: a\r\n",
        b'If-Match: "1"\r\nIf-Match: "1"\r\n',
    ],
)
def test_smuggling_shapes_are_refused(client: HttpClient, head: bytes) -> None:
    received = client.raw(HEAD + head + b"\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status(received) == 400
    assert b'"status":"ok"' not in received


def test_what_is_no_http_is_refused(client: HttpClient) -> None:
    assert status(client.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10)) == 400
    assert status(client.raw(b"HELLO\r\n\r\n")) == 400
    assert (
        status(client.raw(b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n"))
        == 400
    )
    assert status(client.raw(b"GET /v1/topics HTTP/1.1\r\nConnection: close\r\n\r\n")) == 400
    old = b"POST /v1/topics/orders/messages HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert status(client.raw(old)) == 400


def test_a_text_that_is_no_time_is_explained_without_the_pattern(client: HttpClient) -> None:
    refused = client.get("/v1/topics/orders/partitions/0/messages?time=abc")
    assert refused.code == "invalid_field"
    assert "openapi.json" in refused.json["detail"]
    assert "[0-9]" not in refused.json["detail"]


def test_an_upgrade_is_answered_as_a_plain_request(client: HttpClient) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n"
    received = client.raw(b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n" + upgrade)
    assert received.startswith(b"HTTP/1.1 200")


# Time.


def test_a_slow_head_and_a_slow_body_end(client: HttpClient) -> None:
    for content in (b"GET /healthz HTTP/1.1\r\nX-", HEAD + b"Content-Length: 100\r\n\r\n{"):
        assert status(client.raw(content)) == 408
    assert client.raw(b"") == b""


def test_many_slow_clients_do_not_hold_up_others(server: EmbeddedServer, client: HttpClient) -> None:
    slow = [socket.create_connection((client.host, client.port), timeout=WAIT_S) for _ in range(300)]
    for one in slow:
        one.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    assert client.get("/healthz").status == 200
    gateway = server._server.gateways[1]
    deadline_s = time.monotonic() + WAIT_S
    while len(gateway.connections) > 1 and time.monotonic() < deadline_s:  # type: ignore[attr-defined]
        time.sleep(0.05)
    assert len(gateway.connections) <= 1  # type: ignore[attr-defined]
    for one in slow:
        one.close()


def test_connections_beyond_the_limit_are_told() -> None:
    with http_server(connections_max=2) as server:
        clients = [HttpClient(url_of(server)) for _ in range(2)]
        for one in clients:
            assert one.get("/healthz").status == 200
        refused = HttpClient(url_of(server)).raw(b"")
        assert status(refused) == 503
        body = b'{"value":1}'
        refused = HttpClient(url_of(server)).raw(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        assert status(refused) == 503
        assert b"retry-after: 1\r\n" in refused
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["retryable"] is True
        assert clients[0].get("/v1/topics/orders").code == "topic_not_found"
        for one in clients:
            one.close()


def test_pipelined_requests_are_answered_in_order(client: HttpClient) -> None:
    one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /v1/topics/none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    received = client.raw(one * 5 + last)
    assert received.count(b"HTTP/1.1 200") == 5
    assert b"topic_not_found" in received[received.rindex(b"HTTP/1.1") :]


UNFINISHED = b"POST /v1/topics/x/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


@pytest.mark.parametrize("last", [b"", b"GARBAGE\0\r\n\r\n", UNFINISHED])
@pytest.mark.parametrize("path", [b"/v1/topics", b"/v1/topics/none", b"/metrics"])
def test_a_client_that_pipelines_and_goes_leaves_no_error(
    client: HttpClient, server: EmbeddedServer, path: bytes, last: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for count in (2, 50, 500):
        with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
            end.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path * count + last)
    deadline = time.monotonic() + WAIT_S
    while server._server._connections() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.get("/healthz").status == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Behind the body.


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
ONE = b'b\r\n{"value":1}\r\n'


@pytest.mark.parametrize(
    "trailer",
    [
        b"Headrace-Tenant: victim",
        b"Host: localhost",
        b"Origin: http://localhost",
        b"Sec-Fetch-Site: same-origin",
        b"Content-Type: application/json",
        b'If-Match: "0"',
        b"Idempotency-Key: k",
        b"X: y",
    ],
)
def test_headers_behind_the_body_are_refused_and_nothing_is_done(client: HttpClient, trailer: bytes) -> None:
    assert status(client.raw(HEAD + CHUNKED + ONE + b"0\r\n" + trailer + b"\r\n\r\n")) == 400
    delete = b"DELETE /v1/topics/kept HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED + b"0\r\n" + trailer + b"\r\n\r\n"
    client.publish("kept", 1)
    assert status(client.raw(delete)) == 400
    assert client.get("/v1/topics/kept").status == 200
    assert client.get("/v1/topics/orders").code == "topic_not_found"
    victim = client.ask("GET", "/v1/topics/orders", None, {"Headrace-Tenant": "victim"})
    assert victim.code == "topic_not_found"


@pytest.mark.parametrize(
    "endless", [b"0\r\nX: " + b"y" * (300 << 10), b"0\r\n" + b"X: y\r\n" * 50_000, b"1;" + b"x" * (300 << 10)]
)
def test_what_frames_a_body_is_bounded(client: HttpClient, endless: bytes) -> None:
    started = time.monotonic()
    assert status(client.raw(HEAD + CHUNKED + ONE + endless)) == 400
    assert time.monotonic() - started < WAIT_S
    assert client.get("/v1/topics/orders").code == "topic_not_found"


def test_a_body_of_tiny_chunks_is_bounded_by_all_its_bytes(client: HttpClient) -> None:
    chunks = (b"1;" + b"x" * 1000 + b"\r\n \r\n") * 3000
    assert status(client.raw(HEAD + CHUNKED + chunks)) == 413


def test_a_body_in_chunks_with_extensions_is_taken(client: HttpClient) -> None:
    received = client.raw(
        HEAD + b"Connection: close\r\n" + CHUNKED + b'5;a=b\r\n{"val\r\n0000006\r\nue":1}\r\n0\r\n\r\n'
    )
    assert received.startswith(b"HTTP/1.1 202")
    client.ask("DELETE", "/v1/topics/orders")
