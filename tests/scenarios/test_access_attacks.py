"""Attacks on tokens, tenants and open streams: what is taken away ends at once, and nothing crosses tenants."""

import json
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.access_stage import BATCH, SocketRefused, Stage
from tests.http_client import WAIT_S, HttpClient, needs_http
from tests.native_client import NativeClient
from tests.socket_client import JSON, MESSAGE_PACK, SocketClient

from headrace.errors import HeadraceError
from headrace.model.batch import Columns, encode
from headrace.model.reading import Fetch, StreamOpen
from headrace.model.requests import (
    Publish,
    TopicCreate,
    TopicDescribe,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.model.security_requests import (
    Binding,
    BindingAdd,
    BindingRemove,
    Grant,
    SecurityDescribe,
    TokenCreate,
    TokenCreated,
    TokenList,
    TokenRevoke,
    WhoAmI,
)
from headrace.model.standing_lease import LeaseOpen
from headrace.model.subject_requests import SubjectPublish, SubjectSubscribe
from headrace.model.webhook_requests import WebhookDefinition, WebhookDescribe, WebhookSet
from headrace.wire.frames import Frame
from headrace.wire.native import Kind

pytestmark = needs_http

_numbers = count()
NATIVE = ("tcp", "unix", "upgraded")
OPENINGS = [
    StreamOpen("orders", 0, 0, 1 << 20, 1),
    LeaseOpen("orders", "workers", credit_messages=9),
    SubjectSubscribe("orders.*"),
]
ENDS = (Kind.FAILURE, Kind.STREAM_END, Kind.LEASE_END, Kind.SUBJECT_END)
ALTERED = {
    "shortened": lambda token: token[:-1],
    "lengthened": lambda token: token + "x",
    "swapped-case": lambda token: token.swapcase(),
    "with-space": lambda token: f" {token}",
    "with-another-secret": lambda token: token[:16] + token[:15:-1],
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    place: Path = tmp_path_factory.mktemp("attacks")
    staged = Stage(place)
    yield staged
    staged.close()


@pytest.fixture
def reader(stage: Stage) -> TokenCreated:
    """A new token of somebody who may read and lease everything in the default tenant."""
    stage.tell(BindingAdd(Binding("developer", "reader", tenant="default")))
    created: TokenCreated = stage.tell(TokenCreate("reader"))
    stage.tokens["reader"] = created.token
    return created


def publish_late(stage: Stage) -> bytes:
    """Publish what nobody whose access has ended may get; returns the value, which is no other's."""
    late = b"published as number %d." % next(_numbers)
    data = bytes(encode(Columns([late]), 1_800_000_000_000_000).data)
    client: NativeClient = stage.admin["default"].client
    client.ask(Publish("orders", 0), data)
    client.ask(SubjectPublish("orders.eu"), data)
    return late


def has(value: bytes, received: bytes) -> bool:
    """Whether a value was received, as it is or in base64."""
    return value in received or b64encode(value) in received


def take_away(stage: Stage, reader: TokenCreated, how: str) -> str:
    """End the access of the reader; returns the code that its streams end with."""
    if how == "revoked":
        stage.tell(TokenRevoke(reader.info.id))
        return "token_revoked"
    stage.tell(BindingRemove(Binding("developer", "reader", tenant="default")))
    return "forbidden"


def native_reader(stage: Stage, gateway: str) -> NativeClient:
    line = stage.open(gateway, "reader", "default")
    client: NativeClient = line.client
    return client


def frames_until_the_end(client: NativeClient) -> list[Frame]:
    found = []
    try:
        while True:
            found.append(client.receive())
    except (EOFError, ConnectionResetError):
        return found


@pytest.mark.parametrize("how", ["revoked", "unbound"])
@pytest.mark.parametrize("opens", OPENINGS, ids=lambda request: type(request).__name__)
@pytest.mark.parametrize("gateway", NATIVE)
def test_native_streams_end_with_the_access(
    stage: Stage, reader: TokenCreated, gateway: str, opens: Any, how: str
) -> None:
    client = native_reader(stage, gateway)
    client.ask(opens)
    code = take_away(stage, reader, how)
    late = publish_late(stage)
    frames = frames_until_the_end(client)
    client.close()
    assert late not in b"".join(bytes(frame.body) for frame in frames)
    told = [frame for frame in frames if frame.kind in ENDS]
    assert any(code.encode() in bytes(frame.head) for frame in told), frames


@pytest.mark.parametrize("how", ["revoked", "unbound"])
@pytest.mark.parametrize("accept", ["text/event-stream", "application/x-ndjson"])
@pytest.mark.parametrize("path", ["/v1/topics/orders/messages", "/v1/subjects/orders.*/messages"])
def test_streams_over_http_end_with_the_access(
    stage: Stage, reader: TokenCreated, path: str, accept: str, how: str
) -> None:
    client = HttpClient(stage.http)
    with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
        head = f"GET {path} HTTP/1.1\r\nHost: {client.host}\r\nAuthorization: Bearer {reader.token}\r\n"
        end.sendall(f"{head}Accept: {accept}\r\n\r\n".encode())
        received = b""
        while b"\r\n\r\n" not in received:
            received += end.recv(65536)
        assert received.startswith(b"HTTP/1.1 200"), received
        early = publish_late(stage)
        while not has(early, received):
            received += end.recv(65536)
        code = take_away(stage, reader, how)
        late = publish_late(stage)
        while part := end.recv(65536):
            received += part
            if received.endswith(b"0\r\n\r\n"):
                break
    assert not has(late, received)
    assert code.encode() in received


@pytest.mark.parametrize("how", ["revoked", "unbound"])
@pytest.mark.parametrize("subprotocol", [JSON, MESSAGE_PACK])
def test_streams_of_a_websocket_end_with_the_access(
    stage: Stage, reader: TokenCreated, subprotocol: str, how: str
) -> None:
    from websockets.exceptions import ConnectionClosed, InvalidStatus

    client = SocketClient(stage.http, subprotocol, token=reader.token)
    client.ask("StreamOpen", topic="orders")
    client.ask("LeaseOpen", topic="orders", subscription="workers", credit_messages=9)
    client.ask("SubjectSubscribe", pattern="orders.*")
    early = publish_late(stage)
    while not has(early, str(client.receive()).encode()):
        pass
    take_away(stage, reader, how)
    late = publish_late(stage)
    received: list[str] = []
    code = 0
    while not code:
        try:
            received.append(str(client.receive()))
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd is not None else -1
    assert not has(late, "".join(received).encode())
    assert code == 1008  # policy violation
    with pytest.raises(InvalidStatus):
        SocketClient(stage.http, subprotocol, token=reader.token)


def test_what_an_identity_has_defined_stays_when_it_is_gone(stage: Stage, reader: TokenCreated) -> None:
    """A webhook is authorised when it is defined; who wants it to end deletes it."""
    client = native_reader(stage, "tcp")
    client.ask(WebhookSet(WebhookDefinition("left", "orders", "https://receiver.invalid/")))
    take_away(stage, reader, "revoked")
    take_away(stage, reader, "unbound")
    assert stage.tell(WebhookDescribe("left")).state == "active"
    client.close()


def asked_over_all(stage: Stage, who: str, tenant: str = "") -> set[str]:
    """The codes of the errors that a token gets everywhere."""
    codes = set()
    for gateway in (*NATIVE, "websocket-json"):
        try:
            line = stage.open(gateway, who, tenant)
            codes.add(line.ask(TopicDescribe("orders")).code)
            line.close()
        except HeadraceError as error:
            codes.add(error.code)
        except SocketRefused as refused:
            codes.add(refused.outcome.code)
    with stage.http_client(who, tenant or "default") as client:
        codes.add(client.ask("GET", "/v1/topics/orders", None, {}).code)
    return codes


def test_an_expired_or_revoked_token_is_refused_however_often_it_is_replayed(stage: Stage) -> None:
    stage.tell(BindingAdd(Binding("consumer", "short")))
    until_us = time.time_ns() // 1000 + 1_000_000
    stage.tokens["short"] = stage.tell(TokenCreate("short", expires_us=until_us)).token
    deadline = time.monotonic() + WAIT_S
    while asked_over_all(stage, "short", "default") != {"token_expired"}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    created = stage.tell(TokenCreate("short"))
    stage.tokens["short"] = created.token
    assert asked_over_all(stage, "short", "default") == {""}
    stage.tell(TokenRevoke(created.info.id))
    for _ in range(3):
        assert asked_over_all(stage, "short", "default") == {"token_revoked"}


@pytest.mark.parametrize("how", ALTERED)
def test_a_token_that_is_almost_right_is_wrong(stage: Stage, how: str) -> None:
    stage.tokens["altered"] = ALTERED[how](stage.tokens["administrator"])
    with pytest.raises(HeadraceError) as refused:
        stage.open("tcp", "altered", "default")
    assert refused.value.code == "not_authenticated"
    assert stage.tokens["administrator"][16:40] not in str(refused.value)
    if how != "with-space":  # which HTTP takes for one between the scheme and the token
        assert asked_over_all(stage, "altered", "default") == {"not_authenticated"}


@pytest.mark.parametrize("tenant", ["default", "acme", "nobody", "ACME", "..", "acme/orders", "%61cme"])
def test_the_header_names_no_other_tenant_than_the_tokens(stage: Stage, tenant: str) -> None:
    with stage.http_client("token-of-acme", tenant) as client:
        outcome = client.ask("GET", "/v1/topics/secret-default", None, {})
        own = client.ask("GET", "/v1/topics/secret-acme", None, {})
    assert outcome.code in (("topic_not_found",) if tenant == "acme" else ("invalid_argument", "invalid_name"))
    assert (own.status == 200) == (tenant == "acme")


def test_a_refused_tenant_is_not_told_from_one_that_does_not_exist(stage: Stage) -> None:
    told = set()
    for tenant in ("acme", "nobody"):
        with stage.http_client("developer", tenant) as client:
            outcome = client.ask("GET", "/v1/topics/orders", None, {})
        told.add((outcome.code, outcome.status, outcome.text.replace(tenant, "")))
        with pytest.raises(HeadraceError) as refused:
            stage.open("tcp", "developer", tenant)
        told.add((refused.value.code, 403, str(refused.value).replace(tenant, "")))
    assert len(told) == 1, told


def test_credentials_of_one_request_do_not_count_for_the_next_on_the_connection(stage: Stage) -> None:
    client = HttpClient(stage.http)
    admin = {"Authorization": f"Bearer {stage.tokens['administrator']}"}
    assert client.ask("GET", "/v1/auth", None, admin).status == 200
    assert client.ask("GET", "/v1/auth", None, {}).status == 401
    bystander = {"Authorization": f"Bearer {stage.tokens['bystander']}"}
    assert client.ask("GET", "/v1/auth", None, bystander).status == 403
    assert client.ask("GET", "/v1/auth", None, {**admin, "Headrace-Tenant": "acme"}).status == 200
    assert client.ask("GET", "/v1/auth", None, {"Headrace-Tenant": "acme"}).status == 401
    client.close()


def test_a_token_of_the_http_head_does_not_authenticate_the_protocol_behind_it(stage: Stage) -> None:
    client = HttpClient(stage.http)
    with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
        head = f"GET /v1/native HTTP/1.1\r\nHost: {client.host}\r\nConnection: Upgrade\r\nUpgrade: headrace\r\n"
        end.sendall(f"{head}Authorization: Bearer {stage.tokens['administrator']}\r\n\r\n".encode())
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            received += end.recv(1)
        with pytest.raises(HeadraceError) as refused:
            NativeClient(end).hello()
    assert refused.value.code == "not_authenticated"


def test_transactions_and_idempotency_keys_do_not_cross_tenants(stage: Stage) -> None:
    first, second = (stage.open("tcp", "administrator", tenant).client for tenant in ("default", "acme"))
    begun = first.ask(TransactionBegin("shared"))
    first.ask(TransactionStage("shared", begun.epoch, "orders", 0), BATCH)
    for request in (
        TransactionCommit("shared", begun.epoch),
        TransactionAbort("shared", begun.epoch),
        TransactionBegin("default/shared"),
        TransactionCommit("default/shared", begun.epoch),
    ):
        with pytest.raises(HeadraceError):
            second.ask(request)
    with pytest.raises(HeadraceError):
        second.ask(TransactionStage("shared", begun.epoch, "orders", 0), BATCH)
    second.ask(TransactionBegin("shared"))  # another one, which fences nobody
    assert not first.ask(TransactionCommit("shared", begun.epoch)).repeated
    with pytest.raises(HeadraceError):
        first.ask(TransactionBegin("acme/shared"))
    admin = {"Authorization": f"Bearer {stage.tokens['administrator']}", "Idempotency-Key": "same"}
    client = HttpClient(stage.http)
    receipts = [
        client.ask("POST", "/v1/topics/orders/messages", {"value": tenant}, {**admin, "Headrace-Tenant": tenant})
        for tenant in ("default", "acme")
    ]
    assert [one.status for one in receipts] == [201, 201]
    client.close()
    first.close()
    second.close()


def test_a_scoped_token_does_not_widen_itself(stage: Stage) -> None:
    """An administrator's token for one topic makes no other tokens, roles or webhooks."""
    line = stage.open("tcp", "scoped-token", "default")
    for request in (
        TokenCreate("a-scoped-token"),
        BindingAdd(Binding("administrator", "a-scoped-token")),
        TopicCreate("orders-scoped"),
        Fetch("orders", 0, 0),
        WebhookSet(WebhookDefinition("scoped", "orders", "https://receiver.invalid/")),
    ):
        assert line.ask(request).code == "forbidden", request
    assert line.ask(Publish("orders", 0)).code == ""
    assert line.ask(WhoAmI()).answer.identity == "a-scoped-token"
    line.close()


def test_a_token_is_shown_nowhere(stage: Stage) -> None:
    line = stage.open("tcp", "administrator", "default")
    told = json.dumps([str(line.ask(request).answer) for request in (SecurityDescribe(), TokenList(), WhoAmI())])
    assert not [token for token in stage.tokens.values() if token[16:] in told]
    created = line.ask(TokenCreate("shown", scopes=[Grant(["publish"], "topic", ["x"])])).answer
    assert created.token not in repr(created)
    line.close()
