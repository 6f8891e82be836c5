"""The gateway of the native protocol: listens, admits connections, and closes silent ones."""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.gateways.addresses import ListenAddress, tcp_url, unix_url
from headrace.gateways.gateway import GatewayContext, GatewayStatistics
from headrace.gateways.listening_sockets import accept_tcp, accept_unix, bind_unix
from headrace.gateways.native.connection import NativeConnection
from headrace.gateways.native.delivery_queue import DeliveryQueue
from headrace.gateways.native.fair_turns import FairTurns
from headrace.gateways.native.frame_writer import FrameWriter
from headrace.gateways.tls_listener import TlsListener, server_descriptors, stop_accepting, tls_listener
from headrace.gateways.tls_settings import NATIVE_ALPN
from headrace.gateways.unix_socket import remove
from headrace.model.errors import HeadraceError, TlsFailed
from headrace.model.limits import FRAME_BYTES_MAX
from headrace.model.metric_requests import MetricFamily, MetricSample, gauge
from headrace.wire.frames import Memory, frame, frame_correlation
from headrace.wire.native import PROTOCOL_VERSION, Kind, Welcome, failure

if TYPE_CHECKING:
    from headrace.broker.metrics import CollectorSteps

logger = logging.getLogger("headrace.native")

_SILENT_BEATS = 3
"""After so many heartbeats of silence a connection is taken for dead."""


class NativeGateway:
    """All connections of the native protocol to one broker."""

    api = 1

    def __init__(self, context: GatewayContext, addresses: Sequence[ListenAddress] = ()) -> None:
        runtime = context.runtime
        self.broker = context.broker
        self.settings = context.settings
        self.authenticate = context.authenticate
        self.now_us = runtime.now_us
        self.call_soon = runtime.scheduler.call_soon
        self.later = runtime.call_later
        self.memory = Memory()
        """The memory that all connections receive into, one after the other."""
        self.turns = FairTurns(runtime.loop)
        self.deliver_soon = DeliveryQueue(runtime.loop, self.call_soon, self.now_us).add
        self.draining = False
        self.ignores_requests = False
        """Whether what clients send is thrown away, because the broker is about to stop."""
        self.tcp_addresses: list[tuple[str, int]] = []
        """Hosts and ports on which it listens, with the port that the system chose."""
        self.socket_path = ""
        """The Unix socket on which it listens: the last one, if there are several."""
        self._addresses = addresses
        self._limit = context.limit
        self._loop = runtime.loop
        self._tls = context.tls
        self._nodes = context.nodes
        self._listening = context.listening
        self._servers: list[asyncio.Server | TlsListener] = []
        self._socket_paths: list[str] = []
        self._connections: set[NativeConnection] = set()
        self._refused: set[NativeConnection] = set()
        self._held_bytes = 0
        self.failures: Counter[str] = Counter()
        """Requests that were answered with an error, by its code."""
        self.broker.metrics.add(lambda tenant, _: self._collect(tenant))
        self._unflushed: list[FrameWriter] = []
        self._supervised_us = self.now_us()
        self._supervision = self.later(self.settings.heartbeat_ms / 2000, self._supervise)

    @property
    def busy(self) -> bool:
        """Whether requests wait for their answers."""
        return any(connection.busy for connection in self._connections)

    def statistics(self) -> GatewayStatistics:
        """Tell how many connections there are, and when one of them was last heard."""
        heard_us = max((connection.heard_us for connection in self._connections), default=0)
        return GatewayStatistics(len(self._connections), heard_us)

    def _collect(self, tenant: str | None) -> "CollectorSteps":
        """Collect the metrics of this gateway."""
        if tenant is not None:
            return  # it serves all tenants
        samples = [MetricSample(count, {"code": code}, "_total") for code, count in sorted(self.failures.items())]
        yield MetricFamily("native_failures", "counter", "Requests answered with an error, by code.", samples)
        yield gauge("native_received_bytes", "Frames that have arrived in part.", self._held_bytes, "bytes")

    async def start(self) -> list[str]:
        """Listen on all addresses; returns their URLs, with the port that the system chose for 0."""
        urls: list[str] = []
        for address in self._addresses:
            if address.path:
                await self._listen_unix(address)
                urls.append(unix_url("headrace+unix", address.path))
            else:
                bound = await self._listen(address)
                urls += [tcp_url(address.scheme, host, port) for host, port in bound]
        return urls

    async def _listen(self, address: ListenAddress) -> list[tuple[str, int]]:
        tls = None
        if address.has_tls:
            tls = tls_listener(self._loop, self._tls, NATIVE_ALPN, self._connection, _answer_without_tls)
        server = await accept_tcp(self._connection, address, self._listening(address), tls)
        self._servers.append(server)
        bound = [listening.getsockname()[:2] for listening in server.sockets]
        self.tcp_addresses += bound
        return bound

    async def _listen_unix(self, address: ListenAddress) -> None:
        path = address.path
        bound = self._listening(address)
        if bound is None:
            bound = bind_unix(path)
            self._socket_paths.append(path)  # whatever happens now, it is removed with the rest
        self._servers.append(await accept_unix(self._connection, path, bound))
        self.socket_path = path

    async def attach(self, end: socket.socket) -> None:
        """Serve a connected socket, such as one end of a socket pair."""
        await self._loop.connect_accepted_socket(self._connection, end)

    def adopt(self, transport: asyncio.Transport, received: bytes) -> None:
        """Serve a connection that another gateway has accepted; of it these bytes have been received."""
        connection = NativeConnection(self)
        transport.pause_reading()  # uvloop decides how to receive when reading starts
        transport.set_protocol(connection)
        connection.connection_made(transport)
        transport.resume_reading()
        connection.receive(received)

    def stop_accepting(self) -> None:
        """Accept no new connections."""
        for path in self._socket_paths:
            remove(path)
        for server in self._servers:
            stop_accepting(server)
        self._socket_paths.clear()

    def drain(self) -> None:
        """Tell all clients that the broker is going to stop."""
        self.draining = True
        for connection in self._connections:
            connection.drain()

    def ignore_requests(self) -> None:
        """Take no more requests; clients find out when their connections are closed."""
        self.ignores_requests = True

    def close(self) -> None:
        """Close all connections after what waits to be sent."""
        self.draining = True
        self.stop_accepting()
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._supervision.cancel()
        self._flush()
        for connection in [*self._connections, *self._refused]:
            connection.close()

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in [*self._connections, *self._refused]:
            connection.abort()

    def descriptors(self) -> list[int]:
        """The file descriptors of all sockets."""
        listening = [descriptor for server in self._servers for descriptor in server_descriptors(server)]
        return [*listening, *(connection.descriptor for connection in [*self._connections, *self._refused])]

    # Called by connections.

    def admit(self, connection: NativeConnection) -> HeadraceError | None:
        """Count a new connection; the error to refuse it with if there are too many."""
        refusal = self._limit.admit(connection.host, connection.evict)
        (self._connections if refusal is None else self._refused).add(connection)
        return refusal

    def forget(self, connection: NativeConnection) -> None:
        """Count a closed connection no longer."""
        self._refused.discard(connection)
        if connection in self._connections:
            self._connections.remove(connection)
            self._limit.release(connection.host, connection.evict)

    def has_session(self, connection: NativeConnection) -> None:
        """Keep a connection also when others need room: its client was let in."""
        self._limit.has_session(connection.evict)

    def welcome(self, now_us: int, features: list[str]) -> Welcome:
        """Make the answer to Hello."""
        return Welcome(
            protocol=PROTOCOL_VERSION,
            server=self.settings.server,
            broker_id=self.settings.broker_id,
            time_us=now_us,
            heartbeat_ms=self.settings.heartbeat_ms,
            frame_bytes_max=FRAME_BYTES_MAX,
            features=features,
            nodes=list(self._nodes()),
        )

    def hold(self, more_bytes: int) -> bool:
        """Count the bytes of unfinished frames; whether there are too many."""
        self._held_bytes += more_bytes
        return self._held_bytes > self.settings.receive_bytes_max

    def flush_soon(self, out: FrameWriter) -> None:
        """Send the small frames of a connection together, after the code that runs now."""
        if not self._unflushed:
            self.call_soon(self._flush)
        self._unflushed.append(out)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for out in unflushed:
            out.flush()

    def _connection(self) -> NativeConnection:
        return NativeConnection(self)

    def _supervise(self) -> None:
        """Close silent connections; one timer for all of them."""
        now_us, beat_us = self.now_us(), self.settings.heartbeat_ms * 1000
        stood_still = now_us - self._supervised_us > 2 * beat_us
        self._supervised_us = now_us
        for connection in list(self._connections):
            if stood_still:  # the clock was set, or the machine slept: that is not the clients' fault
                connection.heard_us = now_us
            connection.supervise(now_us, beat_us * _SILENT_BEATS)
        self._supervision = self.later(self.settings.heartbeat_ms / 2000, self._supervise)


def _answer_without_tls(first: bytes) -> bytes:
    """The answer to a client of the native protocol that speaks no TLS."""
    error = TlsFailed("this address speaks TLS: connect to headraces:// instead of headrace://")
    return bytes(frame(Kind.FAILURE, frame_correlation(first), failure(error)))
