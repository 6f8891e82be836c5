"""The gateway of HTTP: listens, supervises connections, and drains them; uvicorn parses, on the broker's own loop."""

import asyncio
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from headrace.gateways.addresses import ListenAddress, tcp_url
from headrace.gateways.gateway import GatewayContext, GatewayStatistics
from headrace.gateways.http.application import HttpApplication
from headrace.gateways.http.connection import HttpConnection
from headrace.gateways.http.event_stream import EncodedBatches
from headrace.gateways.http.host_guard import HostGuard
from headrace.gateways.http.installation import DEFAULT_HTTP_PORT
from headrace.gateways.listen_errors import listen_failed
from headrace.model.errors import InvalidArgument

_BACKLOG = 1024
_SUPERVISE_S = 1.0
_SILENT_BEATS = 3


class HttpGateway:
    """All connections of HTTP to one broker."""

    api = 1

    def __init__(self, context: GatewayContext, addresses: Sequence[ListenAddress] = ()) -> None:
        runtime = context.runtime
        self.broker = context.broker
        self.settings = context.settings
        self.authenticate = context.authenticate
        self.limit = context.limit
        self.loop = runtime.loop
        self.now_us = runtime.now_us
        self.heard_us = 0
        """When a client last sent something."""
        self.draining = False
        self.ignores_requests = False
        """Whether what clients send is thrown away, because the broker is about to stop."""
        self.requests = 0
        """Requests that wait for their answers, other than those that wait for new messages."""
        self.received_bytes = 0
        """Bytes of bodies that have arrived and whose requests are not answered."""
        self.loop_lag_s = 0.0
        """How late the supervision ran the last time: so long other work held the loop."""
        self.streams = 0
        """Streams of messages that are open."""
        self.encoded_batches = EncodedBatches()
        """What streams have sent a moment ago."""
        self.on_drain: set[Callable[[], object]] = set()
        """Ends those who wait for new messages."""
        self._addresses = [_checked_address(address) for address in addresses]
        self._servers: list[asyncio.Server] = []
        guard = HostGuard(self.settings.http_hosts, self.settings.http_origins)
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
        self._due_s = self.loop.time()
        self._supervision = self.loop.call_soon(self._supervise)

    @property
    def busy(self) -> bool:
        """Whether requests wait for their answers."""
        return self.requests > 0

    async def start(self) -> list[str]:
        """Listen on all addresses; returns their URLs, with the port that the system chose for 0."""
        urls: list[str] = []
        for address in self._addresses:
            assert address.port is not None
            try:
                server = await self.loop.create_server(
                    lambda: HttpConnection(self), address.host, address.port, backlog=_BACKLOG
                )
            except OSError as error:
                raise listen_failed(error, address.host, address.port) from error
            self._servers.append(server)
            urls += [tcp_url("http", *listening.getsockname()[:2]) for listening in server.sockets]
        return urls

    def stop_accepting(self) -> None:
        """Accept no new connections."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def drain(self) -> None:
        """End streams and waiting requests, and close each connection after its answer."""
        self.draining = True
        for end in list(self.on_drain):
            end()
        for connection in self.connections:
            connection.shutdown()

    def ignore_requests(self) -> None:
        """Take no more requests; clients find out when their connections are closed."""
        self.ignores_requests = True

    def close(self) -> None:
        """Accept no new connections, and close all after what waits to be sent."""
        self.draining = True
        self.stop_accepting()
        self._supervision.cancel()
        for end in list(self.on_drain):
            end()
        for connection in self.connections:
            connection.transport.close()

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in self.connections:
            connection.transport.abort()

    def statistics(self) -> GatewayStatistics:
        """Tell how many connections there are, and when one of them was last heard."""
        return GatewayStatistics(len(self.state.connections), self.heard_us)

    def descriptors(self) -> list[int]:
        """The file descriptors of all sockets."""
        sockets: list[Any] = [one for server in self._servers for one in server.sockets]
        sockets += [connection.transport.get_extra_info("socket") for connection in self.connections]
        return [one.fileno() for one in sockets if one is not None]  # None: it is being closed

    @property
    def connections(self) -> list[HttpConnection]:
        """All connections that are open."""
        return list(self.state.connections)  # type: ignore[arg-type]  # they are all of this class

    def _supervise(self) -> None:
        """End connections that hang; one timer for all of them."""
        now_s = self.loop.time()
        self.loop_lag_s = max(now_s - self._due_s, 0.0)
        self.state.default_headers = [(b"date", formatdate(self.now_us() / 1e6, usegmt=True).encode())]
        silence_s = self.settings.heartbeat_ms * _SILENT_BEATS / 1000
        for connection in self.connections:
            connection.supervise(now_s, self.settings.http_request_seconds, silence_s)
        self._due_s = now_s + _SUPERVISE_S
        self._supervision = self.loop.call_later(_SUPERVISE_S, self._supervise)


def _checked_address(address: ListenAddress) -> ListenAddress:
    url = address.url
    if not address.host or address.path not in ("", "/") or "?" in url or "#" in url or "@" in url:
        raise InvalidArgument(f"listen: {url!r} must be a host and a port; write http://127.0.0.1:{DEFAULT_HTTP_PORT}")
    return address._replace(port=DEFAULT_HTTP_PORT if address.port is None else address.port, path="")
