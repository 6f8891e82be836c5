"""A broker and its gateways on an event loop: opening, starting and stopping them."""

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace.client.connection.fork_guard import detach
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.plugins import MIDDLEWARE, load_plugin
from headrace.server.directory_lock import DirectoryLock
from headrace.server.gateway_list import (
    any_busy,
    gateway_statistics,
    listen_addresses,
    load_gateways,
    start_gateway,
    tell_gateways,
)
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from headrace.broker.broker import Broker
    from headrace.gateways.authentication import Authenticate
    from headrace.gateways.gateway import Gateway, GatewayContext
    from headrace.gateways.native.gateway import NativeGateway
    from headrace.runtime.broker_ticker import BrokerTicker
    from headrace.runtime.loop_runtime import LoopRuntime
    from headrace.runtime.loop_scheduler import LoopScheduler
    from headrace.storage.disk import Disk
    from headrace.storage.runtime import StorageRuntime
    from headrace.storage.worker import Worker

logger = logging.getLogger("headrace.server")

_QUIET_US = 250_000
"""Clients that were told to finish and send nothing for so long have finished."""
_TALK_S = 1.0
"""Clients that were told to finish may send requests for so long; later ones are ignored."""
_POLL_S = 0.02
_DESCRIPTORS_SPARE = 64
"""File descriptors for what is neither a segment nor a connection; less where there are few."""
_FAREWELL_S = 1.0
"""Connections have so long to send what waits; then they are aborted."""


class LoopPorts:
    """The broker's ports, on an event loop."""

    def __init__(self, scheduler: "LoopScheduler", worker: "Worker", wake_at: Callable[[int], None]) -> None:
        self.call_soon = scheduler.call_soon
        self.call_at_turn_end = scheduler.call_at_turn_end
        self.call_threadsafe = scheduler.call_threadsafe
        self.background = worker.submit
        self.new_worker = type(worker)
        self.wake_at = wake_at


class Server:
    """A broker and its gateways, on the event loop that runs."""

    native: "NativeGateway"
    """The gateway of the native protocol, also where no address names it; there once the server has started."""
    _runtime: "LoopRuntime"
    _ticker: "BrokerTicker"

    def __init__(
        self, settings: ServerSettings, disk: "Disk | None" = None, *, authenticate: "Authenticate | None" = None
    ) -> None:
        """Prepare a server. Its data is on this disk, by default the local one with files for its user alone;
        `authenticate` tells who a client is, by default nobody in particular.
        """
        self.settings = settings
        self._disk = _checked_disk(disk)
        self.gateways: list[Gateway] = []
        self.listening: list[str] = []
        """The URLs of all addresses on which it listens, with the real ports."""
        self.addresses: list[tuple[str, int]] = []
        """Hosts and ports on which the native gateway listens, with the real ports."""
        self.socket_path = ""
        """The Unix socket on which the native gateway listens, if there is one."""
        self._authenticate = authenticate
        self._lock: DirectoryLock | None = None
        self._worker: Worker | None = None
        self._broker: Broker | None = None
        self._connections_max = settings.connections_max

    async def start(self) -> None:
        """Open the data and start all gateways; clients are served when it returns."""
        # Imported here: whoever only wants to know the settings should not have to wait for the rest.
        from headrace.gateways.authentication import load_authenticator
        from headrace.runtime.process_info import process_info

        settings = self.settings
        addresses = listen_addresses(settings)
        factories = load_gateways(addresses)  # before the data is opened: an unknown scheme changes nothing there
        self._authenticate = self._authenticate or load_authenticator(settings.authenticator)
        try:
            broker = self._open()
            context = self._context(broker)
            self._ticker.start(self._tick)
            for factory, named in factories.items():
                self.listening += await start_gateway(factory, context, named, self._add_gateway)
            self.addresses, self.socket_path = self.native.tcp_addresses, self.native.socket_path
            limits = {"connections_max": self._connections_max, "topics_max": settings.topics_max}
            broker.surroundings = lambda: process_info(self.listening, **limits)
        except BaseException:
            self._close()
            raise

    async def stop(self, hurry: asyncio.Event | None = None) -> bool:
        """Let clients finish, then stop; whether all had finished in time. Setting `hurry` ends the waiting."""
        assert self._broker is not None
        try:
            tell_gateways(self.gateways, lambda gateway: gateway.stop_accepting())
            self._broker.drain()
            tell_gateways(self.gateways, lambda gateway: gateway.drain())
            logger.info("draining", extra={"connections": self._connections()})
            finished = await self._finished(hurry or asyncio.Event())
            tell_gateways(self.gateways, lambda gateway: gateway.close())
            await _until(lambda: not self._connections(), _FAREWELL_S)
        finally:
            self._close()
        logger.info("stopped", extra={"finished": finished})
        return finished

    def disown(self) -> None:
        """In a forked child: leave data and connections to the parent, and close this copy of its sockets."""
        if self._lock is not None:
            self._lock.disown()
        for gateway in self.gateways:
            for descriptor in gateway.descriptors():
                if descriptor >= 0:
                    detach(descriptor)

    def _open(self) -> "Broker":
        from headrace.broker.broker import Broker
        from headrace.engines.api import Store
        from headrace.runtime.broker_ticker import BrokerTicker
        from headrace.runtime.loop_runtime import LoopRuntime
        from headrace.storage.disk import PrivateDisk
        from headrace.storage.runtime import StorageRuntime
        from headrace.storage.worker import Worker

        self._runtime = LoopRuntime(asyncio.get_running_loop())
        self._ticker = BrokerTicker(self._runtime)
        host = StorageRuntime(self._disk or PrivateDisk())
        store = Store(host, None if self.settings.in_memory else os.path.abspath(self.settings.data))
        if store.data is not None:
            store.data.check_usable()  # before anything is made there
            self._lock = DirectoryLock(host.disk, store.data.path)
        self._worker = Worker("headrace-background")
        ports = LoopPorts(self._runtime.scheduler, self._worker, self._ticker.wake_at)
        self._divide_descriptors(host)
        host.inline_sync.allow_this_thread(time.perf_counter)
        self._broker = Broker(
            store,
            ports,
            self.settings.broker(),
            new_id=secrets.token_hex(8),
            version=version(),
            now_us=self._runtime.now_us(),
            load_middleware=partial(load_plugin, MIDDLEWARE),
        )
        self._runtime.clock.go_on_from(self._broker.last_us)
        return self._broker

    def _context(self, broker: "Broker") -> "GatewayContext":
        assert self._authenticate is not None
        from headrace.gateways.connection_limit import ConnectionLimit
        from headrace.gateways.gateway import GatewayContext, GatewaySettings

        settings = GatewaySettings(
            server=f"headrace {version()}",
            broker_id=broker.broker_id,
            heartbeat_ms=self.settings.heartbeat_ms,
            receive_bytes_max=self.settings.receive_bytes_max,
            http_hosts=tuple(self.settings.http_hosts),
            http_origins=tuple(self.settings.http_origins),
            http_body_bytes_max=self.settings.http_body_bytes_max,
            http_request_seconds=self.settings.http_request_seconds,
            http_idle_seconds=self.settings.http_idle_seconds,
            http_wait_seconds_max=self.settings.http_wait_seconds_max,
            http_stream_seconds=self.settings.http_stream_seconds,
        )
        limit = ConnectionLimit(self._connections_max)
        return GatewayContext(broker, self._runtime, self._authenticate, limit, settings)

    def _add_gateway(self, gateway: "Gateway") -> None:
        from headrace.gateways.native.gateway import NativeGateway

        self.gateways.append(gateway)
        if isinstance(gateway, NativeGateway):
            self.native = gateway

    def _divide_descriptors(self, host: "StorageRuntime") -> None:
        """Lower the limit of connections to what the limit on open files leaves room for, and log the division."""
        limit = host.disk.descriptors_max()
        stored = host.files_max + host.views_max
        left = max(limit - stored - min(_DESCRIPTORS_SPARE, limit // 8), 1)
        self._connections_max = min(self.settings.connections_max, left)
        reduced = self.settings.listens and self._connections_max < self.settings.connections_max
        logger.log(
            logging.WARNING if reduced else logging.DEBUG,
            "open file limit leaves room for fewer connections than connections_max; raise it with ulimit -n"
            if reduced
            else "open file limit fits",
            extra={
                "limit": limit,
                "files": host.files_max,
                "mappings": host.views_max,
                "connections": self._connections_max,
            },
        )

    def _tick(self, now_us: int) -> int:
        assert self._broker is not None
        self._broker.wall_offset_us = self._runtime.clock.wall_offset_us()
        return self._broker.tick(now_us)

    def _connections(self) -> int:
        return sum(each.connections for each in gateway_statistics(self.gateways))

    async def _finished(self, hurry: asyncio.Event) -> bool:
        """Wait for clients to finish, as long as the settings say; whether they have."""
        broker, gateways = self._broker, self.gateways
        assert broker is not None

        def answered() -> bool:
            return hurry.is_set() or (broker.idle and not any_busy(gateways))

        def quiet() -> bool:
            all_statistics = gateway_statistics(gateways)
            heard_us = max((one.heard_us for one in all_statistics if one.connections), default=0)
            return answered() and (self._runtime.now_us() - heard_us > _QUIET_US or hurry.is_set())

        patience_s = self.settings.drain_seconds
        if not await _until(quiet, min(_TALK_S, patience_s)):
            tell_gateways(gateways, lambda gateway: gateway.ignore_requests())
            await _until(answered, max(patience_s - _TALK_S, 0))
        return answered() and not hurry.is_set()

    def _close(self) -> None:
        """Close everything that is open, whether the server has started or not."""
        tell_gateways(self.gateways, lambda gateway: gateway.close())
        tell_gateways(self.gateways, lambda gateway: gateway.abort())
        broker, self._broker = self._broker, None
        try:
            if self._worker is not None:
                self._worker.stop()
            if broker is not None:
                self._ticker.stop()
                broker.close(self._runtime.now_us())
        finally:
            if self._lock is not None:
                self._lock.release()


def _checked_disk(disk: object) -> "Disk | None":
    if disk is None:
        return None
    from headrace.storage.disk import Disk

    if not isinstance(disk, Disk):
        raise InvalidArgument(f"disk is a headrace.storage.disk.Disk, not {shown(disk)}")
    return disk


async def _until(reached: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition holds; whether it did in time."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not reached():
        if loop.time() >= deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def version() -> str:
    """The version of this software."""
    return str(sys.modules["headrace"].__version__)  # not imported: the package itself imports this module
