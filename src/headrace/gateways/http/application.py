"""The application behind uvicorn: checks a request, finds its route, and sends the answer or the problem."""

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from headrace.gateways.http.call import Call, ClientGone, Receive, Reply, Send
from headrace.gateways.http.content_encoding import pack, wants_gzip
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
from headrace.model.errors import HeadraceError, InternalError, InvalidArgument

if TYPE_CHECKING:
    from headrace.gateways.http.connection import HttpConnection
    from headrace.gateways.http.gateway import HttpGateway

logger = logging.getLogger("headrace.http")

_CLOSE = (b"connection", b"close")
_SAFE = (b"x-content-type-options", b"nosniff")
_UNKNOWN = "unknown"


class HttpApplication:
    """An ASGI application over a broker."""

    def __init__(self, gateway: "HttpGateway", guard: HostGuard) -> None:
        self._gateway = gateway
        self.guard = guard
        self._router = Router(ROUTES)
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
        if reply.content_type is PROBLEM_TYPE and connection.cycle is not None and connection.cycle.more_body:
            # The rest of the body is not read: an ordinary close would reset the connection, and lose the answer.
            connection.refuse(HttpError("malformed_request"), _raw_reply(reply, extra))
            return
        await _send_reply(reply, headers, extra, send)

    async def _answer(
        self,
        scope: dict[str, Any],
        headers: dict[bytes, bytes],
        connection: "HttpConnection",
        receive: Receive,
        send: Send,
    ) -> tuple[str, Reply | None]:
        raw_path, method = scope["raw_path"], scope["method"]
        authorization = headers.get(b"authorization", b"")
        if not authorization:
            local_host = scope["server"][0] if scope["server"] else ""
            self.guard.check(headers, local_host)
            if authority := scope["state"].get("authority"):  # it counts instead of the Host
                self.guard.check({**headers, b"host": authority}, local_host)
        if method == "OPTIONS":
            return _UNKNOWN, self._preflight(raw_path, headers)
        route, parameters = self._router.find(raw_path, "GET" if method == "HEAD" else method)
        tenant = headers.get(b"headrace-tenant")
        if tenant == b"":
            raise HttpError("invalid_field", "the header Headrace-Tenant is empty; leave it out, or name a tenant")
        try:
            session = await connection.session(authorization, (tenant or b"").decode("ascii"))
        except UnicodeDecodeError as error:
            raise InvalidArgument("the header Headrace-Tenant is no tenant's name") from error
        call = Call(
            self._gateway, connection, session, route, parameters, headers, scope["query_string"], receive, send
        )
        if route.query is None and scope["query_string"]:
            raise HttpError("invalid_field", "this path has no query")
        if method == "HEAD" and route.streams:
            return route.path, Reply(200)
        try:
            return route.path, await route.handler(call)
        except (HttpError, HeadraceError) as error:
            return route.path, _problem_reply(error, scope)

    def _preflight(self, raw_path: bytes, headers: dict[bytes, bytes]) -> Reply:
        """Answer what methods a path has, and to a browser what a page may send."""
        methods, _ = self._router.methods(raw_path)
        allowed = (b"allow", ", ".join(sorted({*methods, "OPTIONS"})).encode())
        if b"origin" in headers:
            return Reply(204, headers=(allowed, *self.guard.preflight_headers()))
        return Reply(204, headers=(allowed,))


def _problem_reply(error: HttpError | HeadraceError, scope: dict[str, Any]) -> Reply:
    problem = problem_of(error)
    if problem.status >= 500:
        logger.warning(
            "request refused  method=%s path=%s code=%s reason=%s", scope["method"], scope["path"], error.code, error
        )
    more = problem_headers(problem) + list(error.headers if isinstance(error, HttpError) else ())
    return Reply(problem.status, encode_problem(problem), PROBLEM_TYPE, tuple(more))


def _raw_reply(reply: Reply, extra: list[tuple[bytes, bytes]]) -> bytes:
    """A whole response, after which the connection is closed."""
    length = (b"content-length", b"%d" % len(reply.body))
    headers = [*reply.headers, *extra, (b"content-type", reply.content_type), length, _CLOSE, _SAFE]
    lines = [b"HTTP/1.1 %d %s" % (reply.status, HTTPStatus(reply.status).phrase.encode())]
    lines += [b"%s: %s" % header for header in headers]
    return b"\r\n".join([*lines, b"", reply.body])


async def _send_reply(reply: Reply, headers: dict[bytes, bytes], extra: list[tuple[bytes, bytes]], send: Send) -> None:
    status, body, content_type, more = reply
    sent = [*more, *extra]
    if status != 204:
        if b"accept-encoding" in headers and wants_gzip(headers[b"accept-encoding"], len(body)):
            body = await pack(body)
            sent += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
        sent += [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), _SAFE]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})
