"""A connection of HTTP: uvicorn's protocol with limits on heads and times, and the client's session with the broker."""

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.broker.pending_answer import PendingAnswer
from headrace.gateways.authentication import ANONYMOUS_MECHANISM, Peer, as_not_authenticated, transport_credentials
from headrace.gateways.connection_limit import peer_host
from headrace.gateways.http.problems import HttpError, begun_error, raw_problem
from headrace.gateways.native.connection import is_this_machine
from headrace.gateways.socket_options import reset
from headrace.model.errors import HeadraceError

if TYPE_CHECKING:
    import asyncio

    from headrace.broker.ports import Session
    from headrace.gateways.http.gateway import HttpGateway
    from headrace.model.identity import Identity

logger = logging.getLogger("headrace.http")

HEAD_BYTES_MAX = 64 << 10
"""Of a request: its first line and all headers."""
HEADERS_MAX = 128
"""Headers of a request."""
BODY_OVERHEAD_BYTES = 64 << 10
"""Received at most between two pieces of a body: the sizes of chunks and their extensions."""
UPGRADE_BYTES_MAX = 64 << 10
"""Received at most behind a request that asks for another protocol, before it is answered."""
SINGLE_HEADERS = frozenset(
    b"host content-type content-length content-encoding origin sec-fetch-site authorization headrace-tenant "
    b"idempotency-key if-match last-event-id upgrade".split()
)
"""Headers that a request has at most once, as those of events (`ce-*`): proxies might count another one."""
_IDLE, _HEAD, _BODY, _ANSWER = range(4)
_LINGER_S = 1.0


class HttpConnection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, gateway: "HttpGateway") -> None:
        super().__init__(gateway.config, gateway.state, {}, _loop=gateway.loop)
        self.app_state = {"connection": self}  # what uvicorn copies into the scope of each request
        self.access_log = False
        self._gateway = gateway
        self._phase = _HEAD
        self._phase_since_s = gateway.loop.time()
        self._head_bytes = 0
        self._in_body = False
        """Whether the head of a request is complete, and its body is not."""
        self._body_bytes = 0
        """Received since the head, with everything that frames the body."""
        self._frame_bytes = 0
        """Received since the last piece of the body."""
        self._refusal: HttpError | None = None
        self._behind_upgrade: bytearray | None = None
        """What came behind a request that asks for another protocol; None before there is one."""
        self._running: RequestResponseCycle | None = None
        """The request that is carried out; those behind it wait in the pipeline."""
        self._session: Session | None = None
        self._session_key: tuple[bytes, str] | None = None
        self._unsent_bytes = 0
        self._unsent_since_s = 0.0
        self.is_admitted = False
        self._host = ""
        self.is_lost = False
        self.on_lost: Callable[[], object] | None = None
        """Withdraws what the current request waits for, when the client is gone."""
        self.on_ended: Callable[[HeadraceError], object] | None = None
        """Ends the stream that is being sent, when the broker ends the session."""
        self.streams = 0
        """How many streams the session has had, each with a number of its own."""

    # Called by the event loop.

    cycle: RequestResponseCycle | None  # type: ignore[assignment]  # None before the first request

    def connection_made(self, transport: "asyncio.Transport") -> None:  # type: ignore[override]
        """Admit the connection, or refuse it."""
        super().connection_made(transport)
        self._host = peer_host(transport)
        refusal = self._gateway.limit.admit(self._host, self.evict)
        if refusal is None:
            self.is_admitted = True
        else:
            logger.info("connection refused  client=%s code=%s", self.client, refusal.code)
            self._refusal = HttpError("too_many_connections", str(refusal), **refusal.details)
            self._end(raw_problem(self._refusal))

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything that belongs to the connection."""
        super().connection_lost(exc)
        self.is_lost = True
        self._disconnect_cycles()
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()
        self._disconnect()
        self._release()

    def _release(self) -> None:
        """Count the connection no longer."""
        if self.is_admitted:
            self.is_admitted = False
            self._gateway.limit.release(self._host, self.evict)

    def evict(self) -> None:
        """Close at once a connection without a session, to make room for another."""
        logger.info("connection closed; it has no session, and others need the room  client=%s", self.client)
        self._release()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; what is no request is refused, and the connection closed."""
        gateway = self._gateway
        gateway.heard_us = gateway.now_us()
        if gateway.ignores_requests or self._refusal is not None or self.parser is None:
            return
        if self._behind_upgrade is not None:
            self._receive_behind_upgrade(data)
            return
        self._unset_keepalive_if_required()
        if self._in_body:
            self._body_bytes += len(data)
            self._frame_bytes += len(data)
        elif self._phase <= _HEAD:
            self._head_bytes += len(data)
            if len(data) > HEAD_BYTES_MAX and data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX) < 0:
                self.refuse(HttpError("head_too_large"))
                return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.cycle is not None:
                self.cycle.keep_alive = False  # unless its route takes it over, it is answered as a plain request
            self._behind_upgrade = bytearray()
            self._receive_behind_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            reason = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self.refuse(reason if isinstance(reason, HttpError) else HttpError("malformed_request"))
            return
        if self._in_body:
            self._check_body_bytes()
        elif self._phase <= _HEAD and self._head_bytes > HEAD_BYTES_MAX:
            self.refuse(HttpError("head_too_large"))

    def _receive_behind_upgrade(self, data: bytes) -> None:
        """Keep the first bytes of another protocol until the request that asks for it is answered."""
        assert self._behind_upgrade is not None
        self._behind_upgrade += data
        if len(self._behind_upgrade) > UPGRADE_BYTES_MAX:
            self.refuse(HttpError("malformed_request", "too much follows an Upgrade; wait for the answer to it"))

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._in_body = False
        if self._phase == _IDLE:
            self._head_bytes = 0
        self._enter(_HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; one behind the body (a trailer) is refused, as it would count as one that was checked."""
        if self._in_body:
            raise HttpError(
                "malformed_request", "headers behind the body (trailers) are not taken; send them before it"
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head, and start the request."""
        if len(self.headers) > HEADERS_MAX:
            raise HttpError("head_too_large", f"a request has at most {HEADERS_MAX} headers, not {len(self.headers)}")
        self._check_unambiguous()
        self._enter(_BODY)
        self._in_body = True
        self._body_bytes = self._frame_bytes = 0
        if not self.url.startswith(b"/"):
            self.scope["state"]["authority"] = _authority(self.url)
        try:
            super().on_headers_complete()
        except httptools.HttpParserInvalidURLError:
            if len(self.url) > HEAD_BYTES_MAX:  # it arrived in pieces, each of which was small enough
                raise HttpError("head_too_large") from None
            raise HttpError("malformed_request", "the target of the request is no path") from None
        assert self.cycle is not None
        self.scope["state"]["cycle"] = self.cycle
        if self._gateway.draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._frame_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body has arrived."""
        self._in_body = False
        super().on_message_complete()
        self._enter(_IDLE if self.cycle is not None and self.cycle.response_complete else _ANSWER)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        if not self._in_body:
            self._enter(_IDLE)
        self._head_bytes = 0
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _disconnect_cycles(self) -> None:
        """Let requests send nothing more: the one that is carried out, those behind it, and the last, of which the body
        may be on its way."""
        waiting = [cycle for cycle, _ in self.pipeline]
        for cycle in (self._running, *waiting, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _should_upgrade(self) -> bool:
        return False

    def _check_unambiguous(self) -> None:
        """Refuse a head that a proxy in between could understand in another way."""
        lengths = encodings = 0
        seen = set()
        for name, content in self.headers:
            if name in SINGLE_HEADERS or name.startswith(b"ce-"):
                if name in seen and name != b"content-length":
                    raise HttpError("malformed_request", f"a request has one {name.decode().title()}")
                seen.add(name)
            if name == b"content-length":
                lengths += 1
                if not content.isdigit():
                    raise HttpError("malformed_request", "Content-Length is no number")
            elif name == b"transfer-encoding":
                encodings += 1
                if content.strip().lower() != b"chunked":
                    raise HttpError("malformed_request", "Transfer-Encoding is `chunked`, or there is none")
        if encodings and self.parser.get_http_version() == "1.0":
            raise HttpError("malformed_request", "HTTP/1.0 has no Transfer-Encoding; send a Content-Length")
        if lengths + encodings > 1:
            raise HttpError("malformed_request", "a body has one Content-Length, or Transfer-Encoding, not both")

    def _check_body_bytes(self) -> None:
        """Refuse a body whose framing never ends: sizes of chunks, their extensions, the line of a trailer."""
        if self._frame_bytes > BODY_OVERHEAD_BYTES:
            self.refuse(HttpError("malformed_request", "the body is framed by too many bytes that are none of it"))
        elif self._body_bytes > 2 * self._gateway.settings.http_body_bytes_max + BODY_OVERHEAD_BYTES:
            self.refuse(HttpError("body_too_large"))

    # Called by the gateway and the application.

    @property
    def is_refused(self) -> bool:
        """Whether the client was told that its request is refused: nothing of it is carried out."""
        return self._refusal is not None

    def refuse(self, error: HttpError, response: bytes = b"") -> None:
        """Answer with a problem, or with a whole response that tells it, and close the connection; once."""
        if self.is_refused:
            return
        self._refusal = error
        started = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        self._disconnect_cycles()
        self._end(b"" if started else response or raw_problem(error))

    @property
    def asks_for_upgrade(self) -> bool:
        """Whether the last request asks for another protocol, in a way that may be answered with it."""
        return self._behind_upgrade is not None and self.scope["http_version"] == "1.1"

    def upgrade(self, response: bytes, adopt: "Callable[[asyncio.Transport, bytes], None]") -> None:
        """Send a response that switches protocols, and hand the connection over; nothing here belongs to it then."""
        if self.is_lost or self.is_refused or self.transport.is_closing():
            raise ConnectionResetError
        assert self.cycle is not None
        assert self._behind_upgrade is not None
        received, self._behind_upgrade = bytes(self._behind_upgrade), None
        self.cycle.response_started = self.cycle.response_complete = True
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        self._disconnect()
        self.is_lost = True
        self._release()  # it is admitted again, in the same moment
        self.transport.write(response)
        self.flow.resume_reading()
        adopt(self.transport, received)

    def _end(self, last_words: bytes) -> None:
        """Send this, and close; what the client still sends is read for a moment, or it might never see the answer."""
        if self.transport.is_closing():
            return
        self.transport.write(last_words)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # with TLS, closing sends an end and reads on until that of the client
            self.transport.close()
        self._gateway.loop.call_later(_LINGER_S, self.transport.abort)

    def supervise(self, now_s: float, request_s: float, silence_s: float) -> None:
        """End a connection whose request does not arrive, or whose client does not take the answer."""
        if self.transport.is_closing():
            return
        busy = self.cycle is not None and not self.cycle.response_complete
        late = now_s - self._phase_since_s > request_s
        if self._refusal is None and late and (self._phase == _BODY or (self._phase == _HEAD and not busy)):
            if self._phase == _HEAD and not self._head_bytes:
                self.transport.close()  # it never sent anything
            else:
                self.refuse(HttpError("request_timeout"))
            return
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent, now_s
        elif now_s - self._unsent_since_s > silence_s:
            logger.info("connection closed; the client does not read  client=%s", self.client)
            reset(self.transport)

    def shutdown(self) -> None:
        """Close the connection after the answer to the request that is carried out, or to the next one."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def close(self) -> None:
        """Close the connection after what waits to be sent; nobody carries out what has arrived since the refusal."""
        if self.is_refused:
            return  # it is closed when the client has read why
        error = self._gateway.refusal
        if error is not None and (self._phase > _IDLE and self._head_bytes):
            self.refuse(HttpError("malformed_request"), raw_problem(error))
        else:
            self.transport.close()

    async def session(self, authorization: bytes, tenant: str) -> "Session":
        """The session of this client, with these credentials, in this tenant; opened when they change."""
        if self._session is not None and self._session_key == (authorization, tenant):
            return self._session
        identity = await self.identify(authorization)
        self._disconnect()
        self._session = self.open_session(lambda _: None, self.end_session, "http", identity, tenant)
        self._session_key = authorization, tenant
        if self._session.is_counted:
            self._gateway.limit.has_session(self.evict)
        return self._session

    async def identify(self, authorization: bytes) -> "Identity":
        """Who the client is, by these credentials."""
        identity = self._authenticate(authorization)
        if isinstance(identity, PendingAnswer):
            try:
                identity = await self.answered(identity)
            except HeadraceError as error:
                raise as_not_authenticated(error) from error
        if self.is_lost:
            raise ConnectionResetError
        return identity

    def open_session(
        self,
        push: Callable[[Any], None],
        end: Callable[[HeadraceError], None],
        protocol: str,
        identity: "Identity",
        tenant: str,
    ) -> "Session":
        """Open a session; the broker calls `push` with what it tells the client unasked, and `end` to end it."""
        peer = self._peer
        return self._gateway.broker.connect(
            push,
            f"{protocol} at {peer.address}",
            self._gateway.now_us(),
            identity=identity,
            tenant=tenant,
            address=peer.address,
            gateway=peer.gateway,
            is_local=peer.is_local,
            end=end,
        )

    def end_session(self, error: HeadraceError) -> None:
        """End the session, as the broker says: the next request is authenticated anew."""
        if self.on_ended is not None:
            self.on_ended(error)
        elif self.cycle is not None and not self.cycle.response_complete:
            self.refuse(HttpError("malformed_request"), raw_problem(begun_error(error)))
        self._disconnect()

    async def answered(self, pending: PendingAnswer[Any]) -> Any:
        """Wait for an answer; it is withdrawn when the client goes."""
        if not pending.resolved:
            self.on_lost = pending.cancel
            try:
                return await pending
            finally:
                self.on_lost = None
        return await pending

    @property
    def _peer(self) -> Peer:
        host, port = self.client or ("", 0)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return Peer("http", address, is_this_machine(self.transport.get_extra_info("peername")))

    def _authenticate(self, authorization: bytes) -> "Identity | PendingAnswer[Identity]":
        name, credentials, peer = transport_credentials(self.transport, self._peer)
        try:
            if authorization:
                mechanism, _, given = authorization.partition(b" ")
                name, credentials = mechanism.decode("ascii").lower() or ANONYMOUS_MECHANISM, given.strip()
            return self._gateway.authenticate(name, credentials, peer)
        except (HeadraceError, UnicodeDecodeError) as error:
            raise as_not_authenticated(error) from error

    def _enter(self, phase: int) -> None:
        self._phase = phase
        self._phase_since_s = self._gateway.loop.time()

    def _disconnect(self) -> None:
        session, self._session, self._session_key = self._session, None, None
        if session is not None:
            self._gateway.broker.disconnect(session, self._gateway.now_us())


def _authority(target: bytes) -> bytes:
    """The host and port of a target that is a whole URL; nothing for `*`.

    >>> _authority(b"http://localhost:7391/v1/topics?limit=1"), _authority(b"*")
    (b'localhost:7391', b'')
    """
    return re.split(rb"[/?#]", target.partition(b"://")[2], maxsplit=1)[0]
