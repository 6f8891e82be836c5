"""The standby listener: answers clients of a node that does not serve, on the addresses of its server.

Clients of the native protocol are told `not_serving` with the owner's addresses, those of HTTP are redirected. It holds
few connections for a short time, and reads little of what they send.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.gateways.addresses import ListenAddress
from headrace.gateways.listening_sockets import ListeningSockets, accept_tcp, accept_unix
from headrace.gateways.tls_listener import TlsListener, server_descriptors, stop_accepting, tls_listener
from headrace.gateways.tls_settings import HTTP_ALPN, NATIVE_ALPN
from headrace.model.errors import NotServing, ProtocolError, TlsFailed
from headrace.server.gateway_list import HTTP_SCHEMES
from headrace.wire.frames import Frames, frame, frame_correlation
from headrace.wire.native import Kind, failure

if TYPE_CHECKING:
    from headrace.gateways.tls_certificates import TlsCertificates

logger = logging.getLogger("headrace.server")

_CONNECTIONS_MAX = 512
"""With more, the oldest is closed."""
_HEAD_S = 5.0
"""How long a client may take for its first frame, or the head of its first request."""
_LINGER_S = 1.0
"""How long what a client still sends is thrown away, so that it gets the answer."""
_FRAME_BYTES_MAX = 64 << 10
_HEAD_BYTES_MAX = 16 << 10
_LINGER_BYTES_MAX = 4 << 20
_TARGET = re.compile(rb"/[!-~]{0,8000}")
"""Targets of requests that are repeated in a redirection: neither control characters nor spaces."""
_METHOD = re.compile(rb"[A-Z]{1,20}")


class OwnerAddresses(NamedTuple):
    """Who serves, as far as this node knows."""

    owner: str = ""
    epoch: int = 0
    native: tuple[str, ...] = ()
    http: tuple[str, ...] = ()


class StandbyListener:
    """Answers on all addresses of a node while it does not serve."""

    def __init__(
        self,
        sockets: ListeningSockets,
        addresses: Sequence[ListenAddress],
        tls: "TlsCertificates | None",
        owner: Callable[[], OwnerAddresses],
    ) -> None:
        """`sockets` listen on these addresses. `owner` tells who serves, whenever a client asks."""
        self._sockets = sockets
        self._addresses = addresses
        self._tls = tls
        self.owner = owner
        self._servers: list[asyncio.Server | TlsListener] = []
        self._is_accepting = False
        self._connections: dict[_StandbyConnection, None] = {}
        """In the order of their coming."""

    async def start(self) -> None:
        """Accept connections, unless it does already."""
        if self._is_accepting:
            return
        self._is_accepting = True
        try:
            for address in self._addresses:
                self._servers.append(await self._accept(address))
        except BaseException:
            self.close()
            raise

    def stop_accepting(self) -> None:
        """Accept no new connections; those that it has accepted are answered."""
        self._is_accepting = False
        for server in self._servers:
            stop_accepting(server)
        self._servers.clear()

    def close(self) -> None:
        """Accept no new connections, and close all after what waits to be sent."""
        self.stop_accepting()
        for connection in list(self._connections):
            connection.finish()

    def descriptors(self) -> list[int]:
        """The file descriptors of the sockets on which it accepts connections."""
        return [descriptor for server in self._servers for descriptor in server_descriptors(server)]

    async def _accept(self, address: ListenAddress) -> asyncio.Server | TlsListener:
        is_http = address.scheme in HTTP_SCHEMES
        kind = _HttpStandby if is_http else _NativeStandby

        def connection() -> _StandbyConnection:
            return kind(self)

        listening = self._sockets.duplicate(address)
        assert listening is not None
        if address.is_unix:
            return await accept_unix(connection, address.path, listening)
        tls = None
        if address.has_tls:
            plain, alpn = (_plain_http, HTTP_ALPN) if is_http else (_plain_native, NATIVE_ALPN)
            tls = tls_listener(asyncio.get_running_loop(), self._tls, alpn, connection, plain)
        return await accept_tcp(connection, address, listening, tls)

    def admit(self, connection: "_StandbyConnection") -> None:
        """Count a connection; the oldest makes room for one too many."""
        self._connections[connection] = None
        if len(self._connections) > _CONNECTIONS_MAX:
            next(iter(self._connections)).abort()

    def forget(self, connection: "_StandbyConnection") -> None:
        """Count a closed connection no longer."""
        self._connections.pop(connection, None)

    def refusal(self) -> NotServing:
        """What clients are told."""
        found = self.owner()
        if found.native:
            text = f"this node does not serve: {found.owner} does, at {found.native[0]}"
        else:
            text = "no node of the cluster serves at the moment; try again"
        return NotServing(text, addresses=list(found.native), epoch=found.epoch)


class _StandbyConnection(asyncio.Protocol):
    """One connection, until it is answered."""

    _transport: asyncio.Transport

    def __init__(self, standby: StandbyListener) -> None:
        self._standby = standby
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._answered = False
        self._dropped_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio's
        self._timer = self._loop.call_later(_HEAD_S, self.abort)
        self._standby.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        del exc
        if self._timer is not None:
            self._timer.cancel()
        self._standby.forget(self)

    def data_received(self, data: bytes) -> None:
        """Take what the client sends; after the answer it is thrown away."""
        if not self._answered:
            self._receive(data)
            return
        self._dropped_bytes += len(data)
        if self._dropped_bytes > _LINGER_BYTES_MAX:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def finish(self) -> None:
        """Close the connection, after what waits to be sent."""
        self._transport.close()

    def _receive(self, data: bytes) -> None:
        raise NotImplementedError

    def _answer(self, data: bytes) -> None:
        """Send the answer, and close once the client has it."""
        if self._answered:
            return
        self._answered = True
        if self._timer is not None:
            self._timer.cancel()
        self._transport.write(data)
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._timer = self._loop.call_later(_LINGER_S, self.finish)
        else:
            self._timer = self._loop.call_later(_LINGER_S / 10, self.finish)


class _NativeStandby(_StandbyConnection):
    """Answers the first frame of a client of the native protocol."""

    def __init__(self, standby: StandbyListener) -> None:
        super().__init__(standby)
        self._frames = Frames(bytes_max=_FRAME_BYTES_MAX)

    def _receive(self, data: bytes) -> None:
        try:
            for come in self._frames.feed(data):
                self._answer(bytes(frame(Kind.FAILURE, come.correlation, failure(self._standby.refusal()))))
                return
        except ProtocolError as error:
            self._answer(bytes(frame(Kind.FAILURE, 0, failure(error))))


class _HttpStandby(_StandbyConnection):
    """Answers the first request of a client of HTTP."""

    def __init__(self, standby: StandbyListener) -> None:
        super().__init__(standby)
        self._head = bytearray()

    def _receive(self, data: bytes) -> None:
        self._head += data[: _HEAD_BYTES_MAX + 1]
        end = self._head.find(b"\r\n\r\n")
        if end < 0 and len(self._head) <= _HEAD_BYTES_MAX:
            return
        request, *lines = bytes(self._head[:end]).split(b"\r\n")
        words = request.split(b" ")
        if end < 0 or len(words) != 3 or not _METHOD.fullmatch(words[0]) or not words[2].startswith(b"HTTP/1."):
            self._answer(_response(400, "Bad Request", {"title": "bad request", "status": 400}))
            return
        scheme = "ws" if any(map(_asks_for_websocket, lines)) else "http"
        self._answer(self._response_to(words[1], scheme, is_head=words[0] == b"HEAD"))

    def _response_to(self, target: bytes, scheme: str, *, is_head: bool) -> bytes:
        path = target.partition(b"?")[0]
        if path == b"/healthz":
            return _response(200, "OK", {"status": "ok", "role": "following"}, is_head=is_head)
        found = self._standby.owner()
        if path != b"/readyz" and found.http and _TARGET.fullmatch(target):
            location = f"{scheme}{found.http[0].removeprefix('http').rstrip('/')}{target.decode('ascii')}"
            return _response(307, "Temporary Redirect", {"location": location}, {"Location": location}, is_head=is_head)
        error = self._standby.refusal()
        problem = {
            "type": f"/v1/docs#{error.code}",
            "title": error.code.replace("_", " "),
            "status": 503,
            "detail": str(error),
            "code": error.code,
            "retryable": True,
            "details": error.details,
        }
        return _response(503, "Service Unavailable", problem, {"Retry-After": "1"}, is_head=is_head)


def _asks_for_websocket(line: bytes) -> bool:
    """Whether a header asks for a WebSocket, whose clients follow no redirection to another scheme than ws or wss."""
    name, _, content = line.partition(b":")
    asked = [one.strip().lower() for one in content.split(b",")] if name.lower() == b"upgrade" else []
    return b"websocket" in asked


def _response(
    status: int, reason: str, body: object, headers: dict[str, str] | None = None, *, is_head: bool = False
) -> bytes:
    kind = "application/problem+json" if status >= 400 else "application/json"
    encoded = json.dumps(body).encode()
    lines = {
        "Content-Type": kind,
        "Content-Length": str(len(encoded)),
        "Cache-Control": "no-store",
        "Connection": "close",
        **(headers or {}),
    }
    head = f"HTTP/1.1 {status} {reason}\r\n" + "".join(f"{name}: {text}\r\n" for name, text in lines.items())
    return head.encode("latin-1") + b"\r\n" + (b"" if is_head else encoded)


def _plain_native(first: bytes) -> bytes:
    """The answer to a client of the native protocol that speaks no TLS."""
    error = TlsFailed("this address speaks TLS: connect to headraces:// instead of headrace://")
    return bytes(frame(Kind.FAILURE, frame_correlation(first), failure(error)))


def _plain_http(_: bytes) -> bytes:
    """The answer to a client of HTTP that speaks no TLS."""
    return _response(400, "Bad Request", {"title": "tls failed", "status": 400, "detail": "this address speaks TLS"})
