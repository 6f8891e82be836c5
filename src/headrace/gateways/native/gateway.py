"""The gateway of the native protocol: listens, admits connections, and watches over them."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace.gateways.listen_errors import listen_failed, listen_unix_failed
from headrace.gateways.native.connection import NativeConnection
from headrace.gateways.native.delivery_queue import DeliveryQueue
from headrace.gateways.native.frame_writer import FrameWriter
from headrace.gateways.unix_socket import bind, make_room, remove
from headrace.model.errors import HeadraceError, LimitExceeded
from headrace.model.limits import FRAME_BYTES_MAX
from headrace.runtime.loop_scheduler import LoopScheduler
from headrace.wire.frames import Memory
from headrace.wire.native import PROTOCOL_VERSION, Welcome

if TYPE_CHECKING:
    from headrace.broker.broker import Broker

logger = logging.getLogger("headrace.native")

_BACKLOG = 1024
_SILENT_BEATS = 3
"""After so many heartbeats of silence a connection is taken for dead."""


class NativeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know."""

    server: str = "headrace"
    """Name and version of this software."""
    broker_id: str = ""
    heartbeat_ms: int = 5000
    connections_max: int = 10_000
    held_bytes_max: int = 256 << 20
    """Bytes of unfinished frames of all connections together."""


def time_us() -> int:
    """The time now, in microseconds since 1970."""
    return time.time_ns() // 1000


class NativeGateway:
    """All connections of the native protocol to one broker."""

    def __init__(
        self,
        broker: "Broker",
        settings: NativeSettings,
        loop: asyncio.AbstractEventLoop,
        turns: LoopScheduler,
        now_us: Callable[[], int] = time_us,
    ) -> None:
        self.broker = broker
        self.settings = settings
        self.now_us = now_us
        self.memory = Memory()
        """Where all connections receive, one after the other."""
        self.call_soon = turns.call_soon
        self.deliver_soon = DeliveryQueue(loop, turns.call_soon, now_us).add
        self.draining = False
        self.ignores_requests = False
        """Whether what clients send is thrown away, because the end is near."""
        self._loop = loop
        self._servers: list[asyncio.Server] = []
        self._socket_paths: list[str] = []
        self._connections: set[NativeConnection] = set()
        self._refused: set[NativeConnection] = set()
        self._held_bytes = 0
        self._unflushed: list[FrameWriter] = []
        self._supervised_us = now_us()
        self._supervision = self.later(settings.heartbeat_ms / 2000, self._supervise)

    def later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Call it after so long."""
        return self._loop.call_later(delay_s, call)

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._connections)

    @property
    def busy(self) -> bool:
        """Whether something is still to be answered."""
        return any(connection.busy for connection in self._connections)

    def heard_us(self) -> int:
        """When anyone last said something."""
        return max((connection.heard_us for connection in self._connections), default=0)

    async def listen(self, host: str, port: int) -> list[tuple[str, int]]:
        """Listen on TCP; returns the addresses, with the real port when 0 was asked for."""
        try:
            server = await self._loop.create_server(self._connection, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise listen_failed(error, host, port) from error
        self._servers.append(server)
        return [listening.getsockname()[:2] for listening in server.sockets]

    async def listen_unix(self, path: str) -> None:
        """Listen on a Unix socket for this user alone; one that a process left there when it died is replaced."""
        make_room(path)
        try:
            bound = bind(path)
            self._socket_paths.append(path)  # whatever happens now, it is removed with the rest
            server = await self._loop.create_unix_server(self._connection, sock=bound, backlog=_BACKLOG)
        except OSError as error:
            raise listen_unix_failed(error, path) from error
        self._servers.append(server)

    async def attach(self, end: socket.socket) -> None:
        """Serve a connection that stands already, such as one end of a socket pair."""
        await self._loop.connect_accepted_socket(self._connection, end)

    def stop_listening(self) -> None:
        """Take no new connections."""
        for path in self._socket_paths:
            remove(path)
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._socket_paths.clear()

    def drain(self) -> None:
        """Tell all clients that the broker is going to stop."""
        self.draining = True
        for connection in self._connections:
            connection.drain()

    def ignore_requests(self) -> None:
        """Take nothing more from clients; what they were told of the end comes with the end of their connections."""
        self.ignores_requests = True

    def close(self) -> None:
        """End all connections, once what they wait for is sent."""
        self.draining = True
        self.stop_listening()
        self._supervision.cancel()
        self._flush()
        for connection in [*self._connections, *self._refused]:
            connection.close()

    def abort(self) -> None:
        """End all connections now."""
        for connection in [*self._connections, *self._refused]:
            connection.abort()

    def descriptors(self) -> list[int]:
        """Of everything that it listens on and is connected to."""
        listening = [each.fileno() for server in self._servers for each in server.sockets]
        return [*listening, *(connection.descriptor for connection in [*self._connections, *self._refused])]

    # What connections say.

    def admit(self, connection: NativeConnection) -> HeadraceError | None:
        """A connection was made: why it cannot stay, if so."""
        if len(self._connections) < self.settings.connections_max:
            self._connections.add(connection)
            return None
        self._refused.add(connection)
        return LimitExceeded(
            f"the broker has {len(self._connections)} connections already, as many as connections_max and its "
            "limit on open files allow",
            connections_max=self.settings.connections_max,
        )

    def forget(self, connection: NativeConnection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        self._refused.discard(connection)

    def welcome(self, now_us: int, features: list[str]) -> Welcome:
        """The answer to Hello."""
        return Welcome(
            protocol=PROTOCOL_VERSION,
            server=self.settings.server,
            broker_id=self.settings.broker_id,
            time_us=now_us,
            heartbeat_ms=self.settings.heartbeat_ms,
            frame_bytes_max=FRAME_BYTES_MAX,
            features=features,
        )

    def hold(self, more_bytes: int) -> bool:
        """Unfinished frames take so many bytes more; whether that is too much."""
        self._held_bytes += more_bytes
        return self._held_bytes > self.settings.held_bytes_max

    def flush_soon(self, out: FrameWriter) -> None:
        """Send what a connection gathers, when all that happens at this moment has happened."""
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
        """End silent connections: one timer for all of them."""
        now_us, beat_us = self.now_us(), self.settings.heartbeat_ms * 1000
        stood_still = now_us - self._supervised_us > 2 * beat_us
        self._supervised_us = now_us
        for connection in list(self._connections):
            if stood_still:  # the clock was set, or the machine slept: that is not the clients' fault
                connection.heard_us = now_us
            connection.supervise(now_us, beat_us * _SILENT_BEATS)
        self._supervision = self.later(self.settings.heartbeat_ms / 2000, self._supervise)
