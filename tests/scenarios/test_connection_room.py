"""Clients that are not let in keep no connections: there is room for others, whatever they do."""

import http.client
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.http_client import HttpClient, also_http, http_server, native_url_of, needs_http, url_of
from tests.native_client import NativeClient

import headrace
from headrace.errors import QuotaExceeded
from headrace.gateways.http.resource_table import ROUTES
from headrace.server import EmbeddedServer
from headrace.wire.native import Hello

pytestmark = needs_http
ROOM = 12
TOKEN: dict[EmbeddedServer, str] = {}
"""What another client gives, where security is enabled."""
SWITCHING = {route.path for route in ROUTES if route.upgrade}
"""Where a connection gets another protocol, which authenticates its clients itself."""


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with http_server(connections_max=ROOM) as opened:
        yield opened


def answers_of(server: EmbeddedServer, path: str, headers: dict[str, str]) -> list[tuple[int, str]]:
    """Open more connections than there is room for, and leave open what the server does: status and Connection."""
    client = HttpClient(url_of(server))
    left, found = [], []
    for _ in range(ROOM + 5):
        connection = http.client.HTTPConnection(client.host, client.port, timeout=30)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.read()
        found.append((response.status, response.getheader("connection", "")))
        left.append(connection)
    with headrace.connect(native_url_of(server), token=TOKEN.get(server)) as other:
        assert other.tenant == "default"
    for connection in left:
        connection.close()
    return found


def test_a_tenant_beyond_its_quota_takes_no_room(server: EmbeddedServer) -> None:
    with headrace.connect(native_url_of(server)) as admin:
        admin.tenants.create("acme", quotas={"connections": 2})
        found = answers_of(server, "/v1/topics", {"Headrace-Tenant": "acme"})
    assert found == [(200, "")] * 2 + [(403, "close")] * (ROOM + 3)


@pytest.mark.parametrize("authorization", ["", "Bearer hr_000000000000_" + "x" * 43])
def test_a_client_without_a_valid_token_takes_no_room(tmp_path: Path, authorization: str) -> None:
    listening = {"unix_socket": f"{tmp_path}/s", "login_delay_seconds_max": 0.0}
    with http_server(tmp_path / "data", connections_max=ROOM, **listening) as server:
        with headrace.connect(f"headrace+unix://{tmp_path}/s") as admin:
            admin.auth.bind("administrator", "ada")
            TOKEN[server] = admin.auth.create_token("ada").token
            admin.auth.enable()
        headers = {"Authorization": authorization} if authorization else {}
        assert set(answers_of(server, "/v1/topics", headers)) == {(401, "close")}
        assert set(answers_of(server, "/healthz", {})) == {(200, "")}, "the oldest of them give way to others"
        del TOKEN[server]


def test_a_refused_native_client_is_disconnected(server: EmbeddedServer) -> None:
    with headrace.connect(native_url_of(server)) as admin:
        admin.tenants.create("acme", quotas={"connections": 0})
    with ExitStack() as left:
        for _ in range(ROOM + 5):
            client = left.enter_context(NativeClient(server.connect()))
            with pytest.raises(QuotaExceeded):
                client.ask(Hello(tenant="acme"))
            assert client.socket.recv(1) == b"", "the broker has hung up"
        left.enter_context(headrace.connect(native_url_of(server)))


def test_nobody_without_a_token_is_told_of_anything(tmp_path: Path) -> None:
    """Not even that there is nothing: only whether the broker works, and how it is used."""
    listening = {"host": "127.0.0.1", "port": 0, "unix_socket": f"{tmp_path}/s", **also_http()}
    server = EmbeddedServer(tmp_path / "data", **listening)
    try:
        with headrace.connect(f"headrace+unix://{tmp_path}/s") as admin:
            admin.auth.enable()
        client = HttpClient(url_of(server))
        paths = [path for path, methods in client.get("/v1/openapi.json").json["paths"].items() if "get" in methods]
        public = {"/healthz", "/readyz", "/v1/openapi.json", "/v1/docs"}
        assert public < set(paths)
        for path in paths:
            reply = client.get(path.replace("{", "").replace("}", ""))
            assert (path, reply.status) == (path, 200 if path in public else 426 if path in SWITCHING else 401)
        client.close()
    finally:
        server.close()
