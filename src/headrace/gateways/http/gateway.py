"""The gateway of HTTP: listens, supervises connections, and drains them; uvicorn parses, on the broker's own loop."""

import asyncio
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from headrace.gateways.addresses import ListenAddress, tcp_url
from headrace.gateways.gateway import GatewayContext, GatewayStatistics
from headrace.gateways.http.application import HttpApplication
from headrace.gateways.http.connection import HttpConnection
from headrace.gateways.http.event_stream import EncodedBatches
from headrace.gateways.http.fair_gate import FairGate
from headrace.gateways.http.host_guard import HostGuard
from headrace.gateways.http.metrics import collect_http
from headrace.gateways.http.problems import HttpError, raw_problem
from headrace.gateways.listening_sockets import accept_tcp
from headrace.gateways.tls_listener import TlsListener, server_descriptors, stop_accepting, tls_listener
from headrace.gateways.tls_settings import HTTP_ALPN
from headrace.model.arguments import shown_url
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.wire.native import DEFAULT_HTTP_PORT

if TYPE_CHECKING:
    from headrace.gateways.http.websocket.connection import SocketConnection

_SUPERVISE_S = 1.0
_SILENT_BEATS = 3
_ANSWER_WITHOUT_TLS = raw_problem(
    HttpError("malformed_request", "this port speaks HTTPS: write https:// instead of http://")
)


class HttpGateway:
    """All connections of HTTP to one broker."""

    api = 1

    def __init__(self, context: GatewayContext, addresses: Sequence[ListenAddress] = ()) -> None:
        runtime = context.runtime
        self.broker = context.broker
        self.settings = context.settings
        self.authenticate = context.authenticate
        self.limit = context.limit
        self.adopt_native = context.adopt_native
        self.loop = runtime.loop
        self.now_us = runtime.now_us
        self.gate = FairGate(self.loop)
        """Lets requests of tenants begin in turns."""
        self.heard_us = 0
        """When a client last sent something."""
        self.draining = False
        self.ignores_requests = False
        """Whether what clients send is thrown away, because the broker is about to stop."""
        self.refusal: HeadraceError | None = None
        """What requests are answered, because the broker is closed."""
        self.requests = 0
        """Requests that wait for their answers, other than those that wait for new messages."""
        self.received_bytes = 0
        """Bytes of bodies that have arrived and whose requests are not answered."""
        self.streams = 0
        """Streams of messages that are open."""
        self.encoded_batches = EncodedBatches()
        """What streams have sent a moment ago."""
        self.on_drain: set[Callable[[], object]] = set()
        """Ends those who wait for new messages."""
        self._addresses = [_checked_address(address) for address in addresses]
        self._tls = context.tls
        self._listening = context.listening
        self._servers: list[asyncio.Server | TlsListener] = []
        guard = HostGuard(self.settings.http_hosts, self.settings.http_origins, self.settings.http_webhook_origins)
        self.application = HttpApplication(self, guard)
        self.config = Config(
            self.application,
            loop="none",
            http=HttpConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=round(self.settings.http_idle_seconds),
        )
        self.config.load()
        self.state = ServerState()
        self.broker.metrics.add(lambda tenant, _: collect_http(self, tenant))
        self._supervision = self.loop.call_soon(self._supervise)

    @property
    def busy(self) -> bool:
        """Whether requests wait for their answers."""
        return self.requests > 0

    async def start(self) -> list[str]:
        """Listen on all addresses; returns their URLs, with the port that the system chose for 0."""
        urls: list[str] = []
        for address in self._addresses:
            server = await self._listen(address)
            self._servers.append(server)
            urls += [tcp_url(address.scheme, *listening.getsockname()[:2]) for listening in server.sockets]
        return urls

    async def _listen(self, address: ListenAddress) -> asyncio.Server | TlsListener:
        def connection() -> HttpConnection:
            return HttpConnection(self)

        tls = None
        if address.has_tls:
            tls = tls_listener(self.loop, self._tls, HTTP_ALPN, connection, lambda _: _ANSWER_WITHOUT_TLS)
        return await accept_tcp(connection, address, self._listening(address), tls)

    def stop_accepting(self) -> None:
        """Accept no new connections."""
        for server in self._servers:
            stop_accepting(server)

    def drain(self) -> None:
        """End streams and waiting requests, and close each connection after its next answer.

        A connection without a request stays open until `close`: one may be on its way.
        """
        self.draining = True
        for end in list(self.on_drain):
            end()
        for connection in self.connections:
            connection.shutdown()

    def refuse_requests(self, error: HeadraceError) -> None:
        """Answer all that clients still send with an error: the broker is closed. What was begun ends with it, too."""
        self.refusal = error
        for connection in self.connections:
            connection.end_session(error)

    def ignore_requests(self) -> None:
        """Take no more requests; clients find out when their connections are closed."""
        self.ignores_requests = True

    def close(self) -> None:
        """Accept no new connections, and close all after what waits to be sent."""
        self.draining = True
        self.stop_accepting()
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._supervision.cancel()
        for end in list(self.on_drain):
            end()
        for connection in self.connections:
            connection.close()

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in self.connections:
            connection.transport.abort()

    def statistics(self) -> GatewayStatistics:
        """Tell how many connections there are, and when one of them was last heard."""
        return GatewayStatistics(len(self.state.connections), self.heard_us)

    def descriptors(self) -> list[int]:
        """The file descriptors of all sockets."""
        sockets: list[Any] = [connection.transport.get_extra_info("socket") for connection in self.connections]
        open_ = [one.fileno() for one in sockets if one is not None]  # None: it is being closed
        return [*open_, *(descriptor for server in self._servers for descriptor in server_descriptors(server))]

    @property
    def connections(self) -> "list[HttpConnection | SocketConnection]":
        """All connections that are open."""
        return list(self.state.connections)  # type: ignore[arg-type]  # they are all of these classes

    def _supervise(self) -> None:
        """End connections that hang; one timer for all of them."""
        now_s = self.loop.time()
        self.state.default_headers = [(b"date", formatdate(self.now_us() / 1e6, usegmt=True).encode())]
        silence_s = self.settings.heartbeat_ms * _SILENT_BEATS / 1000
        for connection in self.connections:
            connection.supervise(now_s, self.settings.http_request_seconds, silence_s)
        self._supervision = self.loop.call_later(_SUPERVISE_S, self._supervise)


def _checked_address(address: ListenAddress) -> ListenAddress:
    url = address.url
    if not address.host or address.path not in ("", "/") or "?" in url or "#" in url or "@" in url:
        raise InvalidArgument(
            f"listen: {shown_url(url)} must be a host and a port; write http://127.0.0.1:{DEFAULT_HTTP_PORT}"
        )
    return address._replace(port=DEFAULT_HTTP_PORT if address.port is None else address.port, path="")
