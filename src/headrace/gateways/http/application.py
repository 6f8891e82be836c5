"""The application behind uvicorn: checks a request, finds its route, and sends the answer or the problem."""

import logging
import re
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from headrace.gateways.http.call import Call, ClientGone, Receive, Reply, Send, tenant_of
from headrace.gateways.http.content_encoding import chosen_encoding, pack
from headrace.gateways.http.host_guard import HostGuard
from headrace.gateways.http.metrics import RequestCounts
from headrace.gateways.http.problems import (
    PROBLEM_TYPE,
    HttpError,
    encode_problem,
    problem_headers,
    problem_of,
)
from headrace.gateways.http.resource_table import ROUTES
from headrace.gateways.http.router import Router
from headrace.gateways.http.unframed_body import unframed
from headrace.gateways.http.upgrade import check_upgrade
from headrace.gateways.http.websub_hub import hub_links
from headrace.model.errors import HeadraceError, InternalError, NotAuthenticated

if TYPE_CHECKING:
    from headrace.broker.ports import Session
    from headrace.gateways.http.connection import HttpConnection
    from headrace.gateways.http.gateway import HttpGateway

logger = logging.getLogger("headrace.http")

_CLOSE = (b"connection", b"close")
_BODY_HEADERS = b"content-length: %d\r\nx-content-type-options: nosniff\r\n\r\n"
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_UNKNOWN = "unknown"
_CREDENTIALS_NEEDED = (
    "this broker has security enabled, and the client gave no credentials: give a token with the header Authorization: "
    "Bearer hr_..."
)


class HttpApplication:
    """An ASGI application over a broker."""

    def __init__(self, gateway: "HttpGateway", guard: HostGuard) -> None:
        self._gateway = gateway
        self.guard = guard
        self._router = Router(ROUTES)
        self.upgrade_paths = {route.upgrade: route.path for route in ROUTES if route.upgrade}
        """Paths at which a connection switches, by protocol."""
        self.counts = RequestCounts()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request."""
        gateway, connection = self._gateway, scope["state"]["connection"]
        if connection.is_refused:
            return  # what followed the head was no request, which the client has been told
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["http_version"] == "1.0":
            send = unframed(scope["state"]["cycle"])
        gateway.requests += 1
        label, reply, extra = _UNKNOWN, None, []
        try:
            label, reply = await self._answer(scope, headers, connection, receive, send)
        except (HttpError, HeadraceError) as error:
            reply = _problem_reply(error, scope)
        except (ClientGone, ConnectionResetError):
            return
        except Exception:
            logger.exception("request failed  method=%s path=%s", scope["method"], scope["path"])
            reply = _problem_reply(InternalError(), scope)
        finally:
            gateway.requests -= 1
        if reply is None:
            return  # a stream, which has sent everything
        self.counts.add(label, scope["method"], reply.status)
        if b"origin" in headers:
            extra = self.guard.answer_headers(headers)
        if reply.content_type is PROBLEM_TYPE and scope["state"]["cycle"].more_body:
            # The rest of the body is not read: an ordinary close would reset the connection, and lose the answer.
            connection.refuse(HttpError("malformed_request"), _encode_reply(reply, [*extra, _CLOSE]))
            return
        await _send_reply(reply, headers, extra, scope)

    async def _answer(
        self,
        scope: dict[str, Any],
        headers: dict[bytes, bytes],
        connection: "HttpConnection",
        receive: Receive,
        send: Send,
    ) -> tuple[str, Reply | None]:
        if self._gateway.refusal is not None:
            raise self._gateway.refusal
        raw_path, method = scope["raw_path"], scope["method"]
        if b"host" not in headers and scope["http_version"] != "1.0":
            raise HttpError("malformed_request", "a request has a header Host")
        authorization = headers.get(b"authorization", b"")
        if not authorization:
            self.check_guarded(scope, headers)
        if method == "OPTIONS":
            return _UNKNOWN, self._preflight(raw_path, headers)
        route, parameters = self._router.find(raw_path, "GET" if method == "HEAD" else method)
        session: Session
        if route.upgrade:
            check_upgrade(route.upgrade, method, headers, connection)
            session = None  # type: ignore[assignment]  # the other protocol opens one
        else:
            try:
                session = await connection.session(authorization, tenant_of(headers))
                if session.access is not None and session.access.is_empty and not route.is_public:
                    raise NotAuthenticated(_CREDENTIALS_NEEDED)
            except HeadraceError:
                scope["state"]["cycle"].keep_alive = False  # who was not let in keeps no connection
                raise
            if self._gateway.broker.is_shared:
                await self._gateway.gate.enter(session.turn_key)
        call = Call(
            self._gateway, connection, session, route, parameters, headers, scope["query_string"], receive, send
        )
        if route.query is None and scope["query_string"]:
            raise HttpError("invalid_field", "this path has no query")
        if method == "HEAD" and route.streams:
            return route.path, Reply(200, headers=hub_links(call))
        try:
            return route.path, await route.handler(call)
        except (HttpError, HeadraceError) as error:
            return route.path, _problem_reply(error, scope)

    def check_guarded(self, scope: Any, headers: dict[bytes, bytes]) -> None:
        """Refuse a request of a foreign Host, or of a page that is not listed."""
        local_host = scope["server"][0] if scope["server"] else ""
        self.guard.check(headers, local_host)
        if authority := scope["state"].get("authority"):  # it counts instead of the Host
            self.guard.check({**headers, b"host": authority}, local_host)

    def _preflight(self, raw_path: bytes, headers: dict[bytes, bytes]) -> Reply:
        """Answer what methods a path has, and to a browser what a page may send."""
        methods, _ = self._router.methods(raw_path)
        allowed = (b"allow", ", ".join(sorted({*methods, "OPTIONS"})).encode())
        if b"origin" in headers:
            return Reply(204, headers=(allowed, *self.guard.preflight_headers(headers)))
        if b"webhook-request-origin" in headers and "POST" in methods and methods["POST"].takes_events:
            return Reply(204, headers=(allowed, *self.guard.webhook_headers(headers)))
        return Reply(204, headers=(allowed,))


def _problem_reply(error: HttpError | HeadraceError, scope: dict[str, Any]) -> Reply:
    problem = problem_of(error)
    if problem.status >= 500 and not scope["state"]["connection"].is_lost:
        logger.warning(
            "request refused  method=%s path=%s code=%s reason=%s", scope["method"], scope["path"], error.code, error
        )
    more = problem_headers(problem) + list(error.headers if isinstance(error, HttpError) else ())
    return Reply(problem.status, encode_problem(problem), PROBLEM_TYPE, tuple(more))


def _encode_reply(reply: Reply, extra: list[tuple[bytes, bytes]]) -> bytes:
    """A whole response."""
    status, body, content_type, more = reply
    lines = [STATUS_LINE[status]]
    for name, content in (*more, *extra):
        if _CONTROL.search(content):
            raise InternalError(f"the answer has a control character in its header {name.decode()}")
        lines.append(b"%b: %b\r\n" % (name, content))
    if status == 204:
        lines.append(b"\r\n")
    else:
        if content_type:  # the data of an event may have none
            lines.append(b"content-type: %b\r\n" % content_type)
        lines.append(_BODY_HEADERS % len(body))
        lines.append(body)
    return b"".join(lines)


async def _send_reply(
    reply: Reply, headers: dict[bytes, bytes], extra: list[tuple[bytes, bytes]], scope: dict[str, Any]
) -> None:
    """Send a whole response with one write: a second one would cost a system call more for each request."""
    if b"accept-encoding" in headers and (encoding := chosen_encoding(headers[b"accept-encoding"], len(reply.body))):
        extra = [*extra, (b"content-encoding", encoding), (b"vary", b"accept-encoding")]
        reply = reply._replace(body=await pack(reply.body, encoding))
    cycle: RequestResponseCycle = scope["state"]["cycle"]
    if cycle.flow.write_paused:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    response = _encode_reply(reply, cycle.default_headers + extra + ([] if cycle.keep_alive else [_CLOSE]))
    if scope["method"] == "HEAD":
        response = response[: len(response) - len(reply.body)]
    cycle.response_started = cycle.response_complete = True
    cycle.transport.write(response)
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
