"""A broker with security and two tenants that have the same things, and one way to ask over each gateway."""

import http.client
import json
import re
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tests.access_oracle import OWN_ROLES, ROLES, Actor, Rule
from tests.http_client import WAIT_S, HttpClient, native_url_of, url_of
from tests.native_client import NativeClient
from tests.socket_client import JSON, MESSAGE_PACK, SocketClient

from headrace.errors import HeadraceError
from headrace.model.batch import Columns, encode
from headrace.model.leasing import SubscriptionCreate
from headrace.model.request import Request
from headrace.model.requests import Commit, PartitionOffset, Publish, TopicCreate, TransactionBegin
from headrace.model.route_requests import RouteDefinition, RouteSet
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleSet
from headrace.model.security_requests import Binding, BindingAdd, Grant, RoleSet, SecurityAlter, TokenCreate
from headrace.model.service_requests import ErrorReport, ServiceDefinition, ServiceError, ServiceRegister
from headrace.model.subject_requests import SubjectSubscribe
from headrace.model.tenant_requests import TenantCreate
from headrace.model.webhook_requests import WebhookDefinition, WebhookPause, WebhookSet
from headrace.server import EmbeddedServer
from headrace.wire.native import Hello

TENANTS = ("default", "acme")
BUILT_IN = ("operator", "developer", "publisher", "consumer", "worker", "service", "observer", "auditor")
_ORDERS_SCOPE: frozenset[Rule] = frozenset({("publish", "topic", "orders")})

ACTORS: dict[str, Actor] = {
    "administrator": Actor("root", {"*": ["administrator"]}),
    **{role: Actor(f"a-{role}", {"default": [role]}) for role in (*BUILT_IN, *OWN_ROLES)},
    "acme-administrator": Actor("a-acme-administrator", {"acme": ["administrator"]}),
    "acme-developer": Actor("a-acme-developer", {"acme": ["developer"]}),
    "everywhere-consumer": Actor("a-everywhere-consumer", {"*": ["consumer"]}),
    "token-of-acme": Actor("a-token-of-acme", {"*": ["administrator"]}, tenant="acme"),
    "scoped-token": Actor("a-scoped-token", {"*": ["administrator"]}, scopes=_ORDERS_SCOPE),
    "stranger": Actor("a-stranger", {}),
    "anonymous": Actor("anonymous", {}),
}
"""By the name that a test has."""
NAMES = {
    "orders", "archive", "billing", "m1", "import", "workers", "nightly", "orders.eu", "orders.*", "prices.get",
    "copies", "websub.a", "shop", "one", "auditor", "acme",
}  # fmt: skip
"""The names in the examples."""
_WEBSUB = re.compile(r"websub-[0-9a-f]{24}")
"""The name of a WebSub subscription, which is made of what was asked for."""
BATCH = bytes(encode(Columns([b"x"]), 1_800_000_000_000_000).data)


class Outcome(NamedTuple):
    """What a client was told."""

    code: str
    """Of the error; empty if there was none."""
    text: str = ""
    details: str = ""
    status: int = 0
    """Of HTTP."""
    answer: Any = None

    @property
    def is_refused(self) -> bool:
        """Whether the client may not do it."""
        return self.code in ("forbidden", "not_authenticated")

    def without(self, suffix: str) -> tuple[str, str, str, int]:
        """What was told, as if the name that was asked for had no suffix."""
        text, details = (_WEBSUB.sub("websub-", one).replace(suffix, "") for one in (self.text, self.details))
        return self.code, text, details, self.status


def renamed(part: Any, suffix: str, prefix: str = "", names: Collection[str] = NAMES) -> Any:
    """A copy of a request, or of a part of it, with other names."""
    if isinstance(part, msgspec.Struct):
        fields = {name: renamed(getattr(part, name), suffix, prefix, names) for name in part.__struct_fields__}
        return type(part)(**fields)
    if isinstance(part, dict):
        return {name: renamed(one, suffix, prefix, names) for name, one in part.items()}
    if isinstance(part, list):
        return [renamed(one, suffix, prefix, names) for one in part]
    if isinstance(part, str) and part in names:
        first, dot, rest = part.partition(".")
        return f"{prefix}{first}{suffix}{dot}{rest}"
    return part


def error_outcome(error: HeadraceError) -> Outcome:
    """An error of the native protocol."""
    return Outcome(error.code, str(error), json.dumps(error.details, sort_keys=True, default=str))


class NativeLine:
    """A connection of the native protocol, over whatever carries it."""

    def __init__(self, sock: socket.socket, name: str, token: str, tenant: str) -> None:
        self.client = NativeClient(sock)
        credentials = {"mechanism": "bearer", "credentials": token.encode()} if token else {}
        try:
            self.client.ask(Hello(client="tests", name=name, tenant=tenant, **credentials))
        except BaseException:
            self.client.close()
            raise

    def ask(self, request: Request[Any]) -> Outcome:
        """Ask, and wait."""
        try:
            return Outcome("", answer=self.client.ask(request, _body(request)))
        except HeadraceError as error:
            return error_outcome(error)

    def close(self) -> None:
        """Hang up."""
        self.client.close()


def _body(request: Request[Any]) -> bytes:
    name = type(request).__name__
    return BATCH if name in ("Publish", "PublishOnce", "TransactionStage", "SubjectPublish") else b""


class SocketLine:
    """A WebSocket."""

    def __init__(self, url: str, subprotocol: str, token: str, tenant: str) -> None:
        from websockets.exceptions import InvalidStatus

        try:
            self._client = SocketClient(url, subprotocol, token=token, query=f"?tenant={tenant}")
        except InvalidStatus as refused:
            problem = json.loads(refused.response.body)
            raise SocketRefused(problem) from refused
        self._is_json = subprotocol == JSON

    def offers(self, request: Request[Any]) -> bool:
        """Whether the request is one that a WebSocket has."""
        return type(request).__name__ not in ("PublishOnce", "PartitionCount")

    def ask(self, request: Request[Any]) -> Outcome:
        """Ask, and wait."""
        name = type(request).__name__
        messages = [{"value": 1}] if _body(request) else None
        frame = self._client.answer(self._client.send(name, messages, **self._fields(request)))
        if "problem" not in frame:
            return Outcome("", answer=frame)
        problem = frame["problem"]
        details = json.dumps(problem.get("details"), sort_keys=True)
        return Outcome(problem["code"], problem["detail"], details, problem["status"])

    def _fields(self, request: Request[Any]) -> dict[str, Any]:
        """The fields as a WebSocket has them, which are others for some requests."""
        name = type(request).__name__
        given: dict[str, Any] = msgspec.to_builtins(
            request, builtin_types=() if self._is_json else (bytes,), str_keys=self._is_json
        )
        if name in ("Publish", "StreamOpen"):
            return {"topic": given["topic"]}
        if name in ("Ack", "Extend", "Release", "Reject"):
            held = [{"partition": 0, "offset": 0, "lease": 1}]
            return {"topic": given["topic"], "subscription": given["subscription"], "messages": held}
        return given

    def close(self) -> None:
        """Hang up."""
        self._client.connection.close()


class SocketRefused(Exception):
    """A WebSocket that was not opened."""

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(problem["detail"])
        self.outcome = Outcome(problem["code"], problem["detail"])


class Stage:
    """The broker, and a token for everybody."""

    def __init__(self, place: Path) -> None:
        self._socket = str(place / "s")
        self.server = EmbeddedServer(
            place / "data", listen=["http://127.0.0.1:0", "headrace://127.0.0.1:0"], unix_socket=self._socket,
            login_delay_seconds_max=0,
        )  # fmt: skip
        self.http = url_of(self.server)
        self.admin = {tenant: self._line("unix", "administrator", "", tenant) for tenant in TENANTS[:1]}
        self.tokens: dict[str, str] = {}
        self._define()
        self.admin["acme"] = self._line("unix", "administrator", "", "acme")
        for tenant in TENANTS:
            for request in seeds(tenant):
                self.tell(request, tenant)

    def tell(self, request: Request[Any], tenant: str = "default") -> Any:
        """Ask as the administrator what must be accepted."""
        outcome = self.admin[tenant].ask(request)
        assert not outcome.code, (request, outcome)
        return outcome.answer

    def _define(self) -> None:
        self.tell(TenantCreate("acme"))
        for role in OWN_ROLES:
            self.tell(RoleSet(role, [Grant([verb], what, [pattern]) for verb, what, pattern in sorted(ROLES[role])]))
        for key, actor in ACTORS.items():
            for tenant, roles in actor.roles.items():
                for role in roles:
                    self.tell(BindingAdd(Binding(role, actor.name, tenant=tenant)))
            if not actor.is_anonymous:
                scopes = [Grant([verb], what, [pattern]) for verb, what, pattern in sorted(actor.scopes)]
                created = self.tell(TokenCreate(actor.name, actor.tenant, scopes))
                self.tokens[key] = created.token
        self.tell(SecurityAlter(True))

    def open(self, gateway: str, who: str, tenant: str) -> Any:
        """A connection of somebody in a tenant; raises what refuses it."""
        return self._line(gateway, who, self.tokens.get(who, ""), tenant)

    def _line(self, gateway: str, who: str, token: str, tenant: str) -> Any:
        if gateway in ("websocket-json", "websocket-msgpack"):
            return SocketLine(self.http, JSON if gateway == "websocket-json" else MESSAGE_PACK, token, tenant)
        if gateway == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self._socket)
            return NativeLine(sock, who, token, tenant)
        client = HttpClient(self.http if gateway == "upgraded" else native_url_of(self.server).partition("//")[2])
        sock = socket.create_connection((client.host, client.port), timeout=WAIT_S)
        if gateway == "upgraded":
            head = f"GET /v1/native HTTP/1.1\r\nHost: {client.host}\r\nConnection: Upgrade\r\nUpgrade: headrace\r\n\r\n"
            sock.sendall(head.encode())
            received = b""
            while not received.endswith(b"\r\n\r\n"):
                received += sock.recv(1)
            assert received.startswith(b"HTTP/1.1 101"), received
        return NativeLine(sock, who, token, tenant)

    @contextmanager
    def http_client(self, who: str, tenant: str) -> Iterator["HttpLine"]:
        """A client of HTTP."""
        line = HttpLine(self.http, self.tokens.get(who, ""), tenant)
        try:
            yield line
        finally:
            line.close()

    def close(self) -> None:
        """Stop."""
        for line in self.admin.values():
            line.close()
        self.server.close()


class HttpLine:
    """A client of HTTP that looks at the head of each answer, and at the whole of problems."""

    def __init__(self, url: str, token: str, tenant: str) -> None:
        client = HttpClient(url)
        self.url = url
        self._connection = http.client.HTTPConnection(client.host, client.port, timeout=WAIT_S)
        self._headers = {"Headrace-Tenant": tenant, **({"Authorization": f"Bearer {token}"} if token else {})}

    def ask(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], *, streams: bool = False
    ) -> Outcome:
        """Ask; a stream is left after its head."""
        self._connection.request(method, path, body, {**self._headers, **headers})
        response = self._connection.getresponse()
        is_problem = response.getheader("content-type") == "application/problem+json"
        if streams and not is_problem:
            response.close()
            self._connection.close()
            return Outcome("", status=response.status)
        content = response.read()
        if not is_problem:
            return Outcome("", status=response.status, answer=content)
        problem = json.loads(content)
        details = json.dumps(problem.get("details"), sort_keys=True)
        return Outcome(problem["code"], problem["detail"], details, response.status)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def seeds(tenant: str) -> list[Request[Any]]:
    """What makes everything that the examples name, in a session of the tenant; `secret` things besides."""
    return [
        TopicCreate("orders"),
        TopicCreate("archive"),
        TopicCreate(f"secret-{tenant}"),
        Publish("orders", 0),
        Publish("orders", 0),
        Publish("archive", 0),
        Publish(f"secret-{tenant}", 0),
        SubscriptionCreate("orders", "workers"),
        SubscriptionCreate(f"secret-{tenant}", f"secret-{tenant}"),
        Commit("billing", [PartitionOffset("orders", 0, 0), PartitionOffset(f"secret-{tenant}", 0, 0)]),
        Commit(f"secret-{tenant}", [PartitionOffset("orders", 0, 0)]),
        ScheduleSet(ScheduleDefinition("nightly", "orders", "@yearly")),
        ScheduleSet(ScheduleDefinition(f"secret-{tenant}", "orders", "@yearly")),
        RouteSet(RouteDefinition("copies", ["archive"], "orders", all=True)),
        RouteSet(RouteDefinition(f"secret-{tenant}", [f"secret-{tenant}"], "orders", all=True)),
        WebhookSet(WebhookDefinition("billing", "orders", "https://receiver.invalid/")),
        WebhookPause("billing"),
        WebhookSet(WebhookDefinition(f"secret-{tenant}", f"secret-{tenant}", "https://receiver.invalid/")),
        WebhookPause(f"secret-{tenant}"),
        ServiceRegister(ServiceDefinition("shop", "one", produces=["orders"], consumes=[f"secret-{tenant}"])),
        ServiceRegister(ServiceDefinition(f"secret-{tenant}", "one")),
        ErrorReport("shop", "one", [ServiceError("failed", "it failed")]),
        ErrorReport(f"secret-{tenant}", "one", [ServiceError("failed", f"secret-{tenant}")]),
        TransactionBegin("import"),
        SubjectSubscribe("orders.*"),
    ]
