"""A broker and its gateways on an event loop: opening, starting and stopping them."""

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from headrace.client.connection.fork_guard import detach
from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, InvalidArgument, NotServing
from headrace.plugins import MIDDLEWARE, load_plugin
from headrace.security.certificates import DEFAULT_NAME_RULES
from headrace.server.directory_lock import DirectoryLock
from headrace.server.exposure import check_disabling, check_exposed, is_exposed, warn_exposed
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
    from headrace.broker.cluster_handlers import ClusterPort
    from headrace.broker.definitions_mirror import SharedDefinitionsStore
    from headrace.broker.metrics import Collector
    from headrace.gateways.addresses import ListenAddress
    from headrace.gateways.authentication import Authenticate
    from headrace.gateways.gateway import Gateway, GatewayContext
    from headrace.gateways.listening_sockets import ListeningSockets
    from headrace.gateways.native.gateway import NativeGateway
    from headrace.gateways.tls_certificates import TlsCertificates
    from headrace.push.service import PushService
    from headrace.runtime.broker_ticker import BrokerTicker
    from headrace.runtime.loop_runtime import LoopRuntime
    from headrace.runtime.loop_scheduler import LoopScheduler
    from headrace.security.definitions import SecurityDefinitions
    from headrace.server.jwt_authentication import JwtAuthenticator
    from headrace.storage.disk import Disk
    from headrace.storage.runtime import StorageRuntime
    from headrace.storage.worker import Worker

    OpenDefinitions: TypeAlias = Callable[["LoopPorts"], SharedDefinitionsStore]

logger = logging.getLogger("headrace.server")

_QUIET_US = 250_000
"""Clients that were told to finish and send nothing for so long have finished."""
_TALK_S = 1.0
"""Clients that were told to finish may send requests for so long; later ones are ignored."""
_POLL_S = 0.02
_DESCRIPTORS_SPARE = 208
"""File descriptors for what is neither a segment nor a connection of a client, such as those to receivers of webhooks;
less where there are few."""
_COMMITS_US = 20_000
"""Before a hand-over, clients that are told of it send their last commits within about this time."""
_HAND_OVER_S = 0.2
"""Before a hand-over, clients have so long to fall silent; if they do not, what they send is not handled any more, and
what was begun has as long again. Clients repeat at the next owner what was not handled."""
NODE_CLIENT = "node "
"""What names of clients begin with that are followers of the shard."""
_FAREWELL_S = 1.0
"""Connections have so long to send what waits; then they are aborted."""
_LAST_ANSWERS_S = 0.25
"""After a hand-over, clients have so long to read the answers to their last requests."""


class LoopPorts:
    """The broker's ports, on an event loop."""

    def __init__(self, scheduler: "LoopScheduler", worker: "Worker", wake_at: Callable[[int], None]) -> None:
        self.call_soon = scheduler.call_soon
        self.call_at_turn_end = scheduler.call_at_turn_end
        self.call_threadsafe = scheduler.call_threadsafe
        self.background = worker.submit
        self.new_worker = type(worker)
        self.wake_at = wake_at


class ServedShard(NamedTuple):
    """What surrounds a server that serves a shard of a cluster. Its directory is locked by the node."""

    port: "ClusterPort"
    """Answers requests about the cluster."""
    nodes: Callable[[], list[str]]
    """Tells the URLs of all nodes."""
    collect: "Collector"
    """Collects the metrics of the node."""
    sockets: "ListeningSockets"
    """Listen on the addresses; the gateways accept connections on duplicates of them."""
    before_accepting: Callable[[], None]
    """Lets the node accept no more connections on them."""
    tls: "TlsCertificates | None"
    """The node's certificates, which it watches for as long as it lives; None without TLS."""


class Server:
    """A broker and its gateways, on the event loop that runs."""

    native: "NativeGateway"
    """The gateway of the native protocol, also where no address names it; there once the server has started."""
    _runtime: "LoopRuntime"
    _ticker: "BrokerTicker"

    def __init__(
        self,
        settings: ServerSettings,
        disk: "Disk | None" = None,
        *,
        authenticate: "Authenticate | None" = None,
        definitions: "OpenDefinitions | None" = None,
        shard: ServedShard | None = None,
    ) -> None:
        """Prepare a server. Its data is on this disk, by default the local one with files for its user alone;
        `authenticate` tells who a client is, by default nobody in particular. `definitions` returns where the security
        definitions are, given the broker's ports; by default they are in the journal. `shard` is given by a node.
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
        self.tls: TlsCertificates | None = None
        """The certificates in use; None without TLS."""
        self._own_tls: TlsCertificates | None = None
        """Those that are watched by this server: not those of a node."""
        self._authenticate = authenticate
        self._open_definitions = definitions
        self._shard = shard
        self._lock: DirectoryLock | None = None
        self._worker: Worker | None = None
        self._broker: Broker | None = None
        self._push: PushService | None = None
        self._connections_max = settings.connections_max

    async def start(self) -> None:
        """Open the data and start all gateways; clients are served when it returns."""
        # Imported here: whoever only wants to know the settings should not have to wait for the rest.
        from headrace.gateways.authentication import load_authenticator
        from headrace.push.service import PushService
        from headrace.runtime.process_info import process_info
        from headrace.server.process_metrics import process_collector

        settings = self.settings
        addresses = listen_addresses(settings)
        # Before the data is opened: an unknown scheme or a broken certificate changes nothing there.
        factories = load_gateways(addresses)
        self._own_tls = None if self._shard is not None else _load_certificates(settings)
        self.tls = self._own_tls if self._shard is None else self._shard.tls
        self._authenticate = self._authenticate or load_authenticator(settings.authenticator)
        try:
            broker = self._open()
            self._secure(broker, addresses)
            context = self._context(broker)
            agent = f"headrace/{version()}"
            self._push = PushService(broker, self._runtime, settings.webhook_networks, user_agent=agent)
            self._ticker.start(self._tick)
            if self._shard is not None:
                broker.cluster = self._shard.port
                broker.metrics.add(self._shard.collect)
                self._shard.before_accepting()
            for factory, named in factories.items():
                self.listening += await start_gateway(factory, context, named, self._add_gateway)
            if self._own_tls is not None:
                self._own_tls.start()
            if self.tls is not None:
                broker.metrics.add(self.tls.collect)
            self.addresses, self.socket_path = self.native.tcp_addresses, self.native.socket_path
            limits = {"connections_max": self._connections_max, "topics_max": settings.topics_max}
            broker.surroundings = lambda: process_info(self.listening, **limits)
            directory = None if settings.in_memory else settings.data
            broker.metrics.add(process_collector(self.gateways, self._ticker, directory, self._connections_max))
            self._push.start()
        except BaseException:
            self._close()
            raise

    async def stop(self, hurry: asyncio.Event | None = None) -> bool:
        """Let clients finish, then stop; whether all had finished in time. Setting `hurry` ends the waiting."""
        assert self._broker is not None
        assert self._push is not None
        try:
            tell_gateways(self.gateways, lambda gateway: gateway.stop_accepting())
            self._broker.drain()
            self._push.drain()
            tell_gateways(self.gateways, lambda gateway: gateway.drain())
            logger.info("draining", extra={"connections": self._connections()})
            finished = await self._finished(hurry or asyncio.Event())
            tell_gateways(self.gateways, lambda gateway: gateway.close())
            await _until(lambda: not self._connections(), _FAREWELL_S)
            await self._push.close()
        finally:
            self._close()
        logger.info("stopped", extra={"finished": finished})
        return finished

    async def finish(self, error: NotServing, before_closing: Callable[[], None]) -> None:
        """Before a hand-over: refuse new work, let what was begun finish for a moment, and close the broker.

        Clients are told the error, which says where to go; the connections of followers stay open until `abort`.
        `before_closing` is called when no client is told anything more.
        """
        broker, push, gateways = self._broker, self._push, self.gateways
        assert broker is not None
        assert push is not None
        tell_gateways(gateways, lambda gateway: gateway.stop_accepting())
        broker.drain()
        push.drain()
        tell_gateways(gateways, lambda gateway: gateway.drain())
        told_us = self._runtime.now_us()

        def answered() -> bool:
            return broker.idle and not push.busy and not any_busy(gateways)

        def silent() -> bool:
            return self._runtime.now_us() - max(told_us, self._heard_us()) > _COMMITS_US

        if not await _until(lambda: silent() and answered(), _HAND_OVER_S):
            self.native.ignore_requests()  # clients send again what is not handled, once they are told
            await _until(answered, _HAND_OVER_S)
        broker.end_sessions(error, NODE_CLIENT)
        await push.close()
        before_closing()
        self._close_broker()

    def refuse_requests(self, error: HeadraceError) -> None:
        """Answer what clients still send with an error, where a gateway can: the broker is about to be closed."""

        def refuse(gateway: "Gateway") -> None:
            call = getattr(gateway, "refuse_requests", None)  # not all gateways have it
            if call is not None:
                call(error)

        tell_gateways(self.gateways, refuse)

    async def close_connections(self) -> None:
        """Close all connections; for a moment they may send what waits, and clients may read it."""
        tell_gateways(self.gateways, lambda gateway: gateway.close())
        await _until(lambda: not self._connections(), _LAST_ANSWERS_S)

    def abort(self) -> None:
        """Drop all connections and the broker at once; a broker that is not closed yet flushes nothing.

        The disk must refuse everything by now. It blocks while a thread of the broker waits for the shared store.
        """
        self.abort_connections()
        if self._own_tls is not None:
            self._own_tls.stop()
        try:
            self._close_broker()
        except (HeadraceError, OSError) as error:
            logger.debug("broker dropped  reason=%s", error)

    def abort_connections(self) -> None:
        """Drop all connections, and accept no others; the loop closes their sockets in its next turns."""
        tell_gateways(self.gateways, lambda gateway: gateway.close())
        tell_gateways(self.gateways, lambda gateway: gateway.abort())

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
        if store.data is not None and self._shard is None:
            self._lock = DirectoryLock(host.disk, store.data.path)
        self._worker = Worker("headrace-background")
        ports = LoopPorts(self._runtime.scheduler, self._worker, self._ticker.wake_at)
        self._divide_descriptors(host)
        if not host.disk.is_replicated:  # else a sync waits for the shared store, which the loop must not do
            host.inline_sync.allow_this_thread(time.perf_counter)
        self._broker = Broker(
            store,
            ports,
            self.settings.broker(),
            new_id=secrets.token_hex(8),
            version=version(),
            now_us=self._runtime.now_us(),
            load_middleware=partial(load_plugin, MIDDLEWARE),
            definitions=None if self._open_definitions is None else self._open_definitions(ports),
        )
        self._runtime.clock.go_on_from(self._broker.last_us)
        return self._broker

    def _secure(self, broker: "Broker", addresses: "list[ListenAddress]") -> None:
        """Give the authenticator the broker's definitions; refuse to serve a network without security."""
        from headrace.gateways.builtin_authenticator import BuiltinAuthenticator

        attach = getattr(self._authenticate, "attach", None)
        if attach is not None:
            rules = tuple(self.settings.tls_client_names) or DEFAULT_NAME_RULES
            attach(broker.definitions, self._runtime.now_us, rules)
        if self.settings.jwt_issuer and isinstance(self._authenticate, BuiltinAuthenticator):
            self._authenticate.verify_jwt = self._jwt_authenticator()
        exposed = [address for address in addresses if is_exposed(address)]
        check_exposed(exposed, enabled=broker.definitions.load().enabled, insecure=self.settings.insecure)
        nodes = tuple if self._shard is None else self._shard.nodes
        broker.security.check_disabling = lambda: check_disabling(exposed, nodes(), insecure=self.settings.insecure)
        if exposed:

            def changed(document: "SecurityDefinitions") -> None:
                if not document.enabled:
                    warn_exposed(exposed)

            broker.definitions.on_change(changed)

    def _jwt_authenticator(self) -> "JwtAuthenticator":
        from headrace.security.jwt_verifier import JwtRules
        from headrace.server.jwt_authentication import FileKeys, JwtAuthenticator, UrlKeys, url_fetcher

        given = self.settings
        rules = JwtRules(given.jwt_issuer, given.jwt_audience, given.jwt_name_claim, given.jwt_tenant_claim)
        is_url = given.jwt_keys.startswith("https://")
        keys = given.jwt_keys
        source = UrlKeys(keys, url_fetcher(keys, f"headrace/{version()}")) if is_url else FileKeys(keys)
        return JwtAuthenticator(rules, source, self._runtime.now_us)

    def _context(self, broker: "Broker") -> "GatewayContext":
        assert self._authenticate is not None
        from headrace.gateways.connection_limit import ConnectionLimit
        from headrace.gateways.gateway import GatewayContext, GatewaySettings
        from headrace.gateways.login_guard import LoginGuard

        settings = GatewaySettings(
            server=f"headrace {version()}",
            broker_id=broker.broker_id,
            heartbeat_ms=self.settings.heartbeat_ms,
            receive_bytes_max=self.settings.receive_bytes_max,
            http_hosts=tuple(self.settings.http_hosts),
            http_origins=tuple(self.settings.http_origins),
            http_webhook_origins=tuple(self.settings.http_webhook_origins),
            http_body_bytes_max=self.settings.http_body_bytes_max,
            http_request_seconds=self.settings.http_request_seconds,
            http_idle_seconds=self.settings.http_idle_seconds,
            http_wait_seconds_max=self.settings.http_wait_seconds_max,
            http_stream_seconds=self.settings.http_stream_seconds,
        )
        limit = ConnectionLimit(self._connections_max, self.settings.connections_per_address_max)
        broker.share_connections(self._connections_max)
        runtime, delay_s_max = self._runtime, self.settings.login_delay_seconds_max
        guard = LoginGuard(
            self._authenticate, broker.audit.login_refused, runtime.loop, runtime.now_us, delay_s_max=delay_s_max
        )
        broker.metrics.add(guard.collect)
        context = GatewayContext(broker, runtime, guard, limit, settings, self._adopt_native, self.tls)
        if self._shard is None:
            return context
        return context._replace(nodes=self._shard.nodes, listening=self._shard.sockets.duplicate)

    def _add_gateway(self, gateway: "Gateway") -> None:
        from headrace.gateways.native.gateway import NativeGateway

        self.gateways.append(gateway)
        if isinstance(gateway, NativeGateway):
            self.native = gateway

    def _adopt_native(self, transport: asyncio.Transport, received: bytes) -> None:
        self.native.adopt(transport, received)

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

    def _heard_us(self) -> int:
        """When a client that is connected last sent something."""
        return max((one.heard_us for one in gateway_statistics(self.gateways) if one.connections), default=0)

    def _connections(self) -> int:
        return sum(each.connections for each in gateway_statistics(self.gateways))

    async def _finished(self, hurry: asyncio.Event) -> bool:
        """Wait for clients to finish, as long as the settings say; whether they have."""
        broker, push, gateways = self._broker, self._push, self.gateways
        assert broker is not None
        assert push is not None

        def answered() -> bool:
            return hurry.is_set() or (broker.idle and not push.busy and not any_busy(gateways))

        def quiet() -> bool:
            return answered() and (self._runtime.now_us() - self._heard_us() > _QUIET_US or hurry.is_set())

        patience_s = self.settings.drain_seconds
        if not await _until(quiet, min(_TALK_S, patience_s)):
            tell_gateways(gateways, lambda gateway: gateway.ignore_requests())
            await _until(answered, max(patience_s - _TALK_S, 0))
        return answered() and not hurry.is_set()

    def _close(self) -> None:
        """Close everything that is open, whether the server has started or not."""
        if self._own_tls is not None:
            self._own_tls.stop()
        tell_gateways(self.gateways, lambda gateway: gateway.close())
        tell_gateways(self.gateways, lambda gateway: gateway.abort())
        self._close_broker()

    def _close_broker(self) -> None:
        broker, self._broker = self._broker, None
        if self._push is not None and broker is not None:
            self._push.abort()
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


def _load_certificates(settings: ServerSettings) -> "TlsCertificates | None":
    tls = settings.tls()
    if tls is None:
        return None
    from headrace.gateways.tls_certificates import TlsCertificates

    return TlsCertificates(tls)


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
