"""Any bytes as a handshake: nobody gets in, the error has a code, and the broker answers the next client.

Hypothesis makes the Hello of the native protocol, over TCP and after an HTTP Upgrade; the head of an Upgrade and of a
WebSocket; and the header Authorization. Security is enabled. Broken TLS handshakes are in scenarios/test_tls.py.
"""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.access_stage import Stage
from tests.http_client import WAIT_S, HttpClient, native_url_of, needs_http
from tests.native_client import NativeClient

from headrace.errors import HeadraceError
from headrace.model.requests import TopicList
from headrace.wire.native import Hello, Kind

pytestmark = needs_http
BOUNDED = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
REFUSALS = {"not_authenticated", "invalid_argument", "invalid_name", "protocol_error", "unsupported_operation"}
FIELDS = sorted(Hello.__struct_fields__)
NAMES = st.sampled_from(["", "default", "acme", "nobody", "../x", "a/b", "acme\0"]) | st.text(max_size=12)
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.text(max_size=8) | st.binary(max_size=8)
CREDENTIALS = st.binary(max_size=80) | st.from_regex(rb"hr_[A-Za-z0-9]{12}_[A-Za-z0-9_-]{43}", fullmatch=True)
HEADER = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)
MECHANISMS = st.sampled_from(["bearer", "peer", "certificate", "anonymous", "basic", ""]) | st.text(max_size=8)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    staged = Stage(tmp_path_factory.mktemp("handshakes"))
    yield staged
    staged.close()


@pytest.fixture(autouse=True)
def answers_afterwards(stage: Stage) -> Iterator[None]:
    """The broker answers good clients after all that."""
    yield
    assert stage.tell(TopicList()).topics


def connected(stage: Stage, gateway: str) -> socket.socket:
    """A connection on which the native protocol begins."""
    url = stage.http if gateway == "upgraded" else native_url_of(stage.server).partition("//")[2]
    client = HttpClient(url)
    end = socket.create_connection((client.host, client.port), timeout=WAIT_S)
    if gateway == "upgraded":
        head = f"GET /v1/native HTTP/1.1\r\nHost: {client.host}\r\nConnection: Upgrade\r\nUpgrade: headrace\r\n\r\n"
        end.sendall(head.encode())
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            received += end.recv(1)
    return end


def everything(end: socket.socket) -> bytes:
    """What comes after the client has said all that it says."""
    received = b""
    try:
        end.shutdown(socket.SHUT_WR)
        while part := end.recv(65536):
            received += part
    except ConnectionError:
        pass  # the broker has closed it
    return received


@pytest.mark.parametrize("gateway", ["tcp", "upgraded"])
@BOUNDED
@given(mechanism=MECHANISMS, credentials=CREDENTIALS, tenant=NAMES, name=st.text(max_size=20))
def test_no_hello_opens_a_session_without_a_token(
    stage: Stage, gateway: str, mechanism: str, credentials: bytes, tenant: str, name: str
) -> None:
    with NativeClient(connected(stage, gateway), WAIT_S) as client:
        hello = Hello(client="fuzz", name=name, tenant=tenant, mechanism=mechanism, credentials=credentials)
        with pytest.raises((HeadraceError, EOFError)) as refused:
            client.ask(hello)
        assert refused.type is EOFError or refused.value.code in REFUSALS  # type: ignore[attr-defined]


@pytest.mark.parametrize("gateway", ["tcp", "upgraded"])
@BOUNDED
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), SCALARS | st.lists(SCALARS, max_size=3)),
    kind=st.sampled_from([int(Kind.HELLO)]) | st.integers(0, 255),
    tail=st.binary(max_size=40),
)
def test_a_malformed_hello_is_refused(
    stage: Stage, gateway: str, fields: dict[str, Any], kind: int, tail: bytes
) -> None:
    head = msgspec.msgpack.encode(fields)
    with connected(stage, gateway) as end:
        end.sendall(struct.pack("<IBBHII", len(head), kind, 1, 0, 1, len(head)) + head + tail)
        assert b"broker_id" not in everything(end)


@pytest.mark.parametrize("gateway", ["tcp", "upgraded"])
@BOUNDED
@given(data=st.binary(max_size=200))
def test_any_bytes_are_no_hello(stage: Stage, gateway: str, data: bytes) -> None:
    with connected(stage, gateway) as end:
        end.sendall(data)
        assert b"broker_id" not in everything(end)


@BOUNDED
@given(
    path=st.sampled_from(["/v1/native", "/v1/socket", "/v1/socket?tenant=acme"]),
    headers=st.dictionaries(
        st.sampled_from(
            ["Connection", "Upgrade", "Sec-WebSocket-Version", "Sec-WebSocket-Key", "Sec-WebSocket-Protocol",
             "Authorization", "Headrace-Tenant", "Content-Length", "Origin"]
        ),
        HEADER | st.sampled_from(
            ["Upgrade", "websocket", "headrace", "13", "AAAAAAAAAAAAAAAAAAAAAA==", "headrace.json", "acme",
             "headrace.json, headrace.bearer.aHJf"]
        ),
    ),
    behind=st.binary(max_size=60),
)  # fmt: skip
def test_an_upgrade_lets_nobody_in_without_a_token(
    stage: Stage, path: str, headers: dict[str, str], behind: bytes
) -> None:
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", *(f"{name}: {text}" for name, text in headers.items())]
    client = HttpClient(stage.http)
    with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
        end.sendall("\r\n".join([*lines, "", ""]).encode() + behind)
        received = everything(end)
    assert not received or received.startswith(b"HTTP/1.1 "), received
    is_native = path == "/v1/native" and received.startswith(b"HTTP/1.1 101")
    assert is_native or not received.startswith(b"HTTP/1.1 101"), received  # a WebSocket authenticates in the head
    assert b"broker_id" not in received


@BOUNDED
@given(
    scheme=st.sampled_from(["Bearer", "bearer", "Basic", "Digest", ""]) | HEADER,
    credentials=HEADER | CREDENTIALS.map(lambda data: data.decode("latin-1")),
    path=st.sampled_from(["/v1/topics/orders", "/v1/auth", "/metrics", "/v1/broker"]),
)
def test_no_authorization_but_a_token_is_accepted(stage: Stage, scheme: str, credentials: str, path: str) -> None:
    client = HttpClient(stage.http)
    given_ = f"{scheme} {credentials}".replace("\r", "").replace("\n", "").encode("latin-1")
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: ".encode()
    with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
        end.sendall(head + given_ + b"\r\n\r\n")
        received = b""
        while part := end.recv(65536):
            received += part
    status, problem = int(received.split(b" ", 2)[1]), json.loads(received.partition(b"\r\n\r\n")[2])
    assert status in (400, 401), received
    assert problem["code"] in ("not_authenticated", "malformed_request")
    secret = credentials.strip()
    assert len(secret) < 17 or secret not in problem["detail"]


def test_a_token_without_its_scheme_is_not_repeated(stage: Stage) -> None:
    client, token = HttpClient(stage.http), stage.tokens["administrator"]
    for header in (token, f"{token} ", f"{token} x", token.removeprefix("hr_")):
        told = client.ask("GET", "/v1/topics", None, {"Authorization": header})
        assert told.status in (400, 401)
        assert token[16:].lower() not in told.body.decode().lower()
    client.close()
