"""The seam between the server and its gateways: what a gateway can do, and what the server gives it."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from headrace.gateways.addresses import ListenAddress
from headrace.gateways.authentication import Authenticate
from headrace.gateways.connection_limit import ConnectionLimit

if TYPE_CHECKING:
    from headrace.broker.broker import Broker
    from headrace.gateways.tls_certificates import TlsCertificates
    from headrace.runtime.loop_runtime import LoopRuntime


class GatewayStatistics(NamedTuple):
    """What a gateway tells about itself."""

    connections: int
    """Open connections."""
    heard_us: int
    """When a client last sent something, by the broker's clock; 0 if there is none."""


class Gateway(Protocol):
    """Connections of one protocol to a broker. The server calls all methods on the broker's thread."""

    @property
    def busy(self) -> bool:
        """Whether requests wait for their answers, other than those that wait for new messages."""

    async def start(self) -> list[str]:
        """Listen on all addresses of this gateway; returns their URLs, with the port that the system chose for 0."""

    def stop_accepting(self) -> None:
        """Accept no new connections; those that are open go on."""

    def drain(self) -> None:
        """Tell all clients that the broker is going to stop, if the protocol can."""

    def ignore_requests(self) -> None:
        """Take no more requests; answers to earlier ones are still sent."""

    def close(self) -> None:
        """Accept no new connections, and close all after what waits to be sent; may be called again."""

    def abort(self) -> None:
        """Close all connections at once."""

    def statistics(self) -> GatewayStatistics:
        """Tell how many connections there are, and when one of them was last heard."""

    def descriptors(self) -> Sequence[int]:
        """The file descriptors of all sockets, which a forked child must not keep open."""


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a server that gateways follow."""

    server: str = "headrace"
    """Name and version of this software."""
    broker_id: str = ""
    heartbeat_ms: int = 5000
    """Idle clients send something this often; after three times as long in silence a connection is closed."""
    receive_bytes_max: int = 256 << 20
    """Memory for requests that have arrived only in part, of all connections of a gateway together."""
    http_hosts: tuple[str, ...] = ()
    http_origins: tuple[str, ...] = ()
    http_webhook_origins: tuple[str, ...] = ()
    http_body_bytes_max: int = 32 << 20
    http_request_seconds: float = 30.0
    http_idle_seconds: float = 60.0
    http_wait_seconds_max: float = 60.0
    http_stream_seconds: float = 0.0


def _no_socket(_: ListenAddress) -> None:
    """No socket listens yet."""


class GatewayContext(NamedTuple):
    """What the server gives a gateway."""

    broker: "Broker"
    runtime: "LoopRuntime"
    """The event loop, the broker's clock, and the scheduler."""
    authenticate: Authenticate
    """Asked before a session is opened with `broker.connect`."""
    limit: ConnectionLimit
    """Asked before a connection is served."""
    settings: GatewaySettings
    adopt_native: Callable[[asyncio.Transport, bytes], None]
    """Hands a connection, and what was received of it so far, over to the native gateway, which admits it anew."""
    tls: "TlsCertificates | None" = None
    """The server's certificates; None if it has none."""
    nodes: Callable[[], Sequence[str]] = tuple
    """Of a cluster: tells the URLs at which clients reach its nodes, as they are now; a plain broker has none."""
    listening: Callable[[ListenAddress], socket.socket | None] = _no_socket
    """Of a cluster: returns a duplicate of the socket that listens on an address already. A gateway accepts connections
    on it, and closes it to stop; for None, as of a plain broker, it listens by itself."""


GatewayFactory = Callable[[GatewayContext, Sequence[ListenAddress]], Gateway]
"""Makes the gateway of a protocol for all addresses with its scheme; it listens when it is started."""
