"""A node of a cluster as a server: it stands by, serves the shard when the node owns it, and stands by again."""

import asyncio
import importlib
import logging
import os
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.client.connection.fork_guard import detach
from headrace.client.connection.tls_options import TlsOptions
from headrace.client.connection.token_source import NO_TOKEN, TokenSource
from headrace.cluster.checkpoints import CheckpointSchedule, checkpoint_maker
from headrace.cluster.definitions import SharedDefinitions
from headrace.cluster.node import ClusterNode
from headrace.cluster.node_settings import NodeSettings, monotonic_us, time_us
from headrace.cluster.peers import PeerOptions
from headrace.cluster.shards import OwnedShard
from headrace.cluster.start import START_S, until_answered
from headrace.cluster.store_list import open_store
from headrace.cluster.threads import run_on_thread
from headrace.gateways.addresses import NATIVE_SCHEMES, ListenAddress
from headrace.gateways.listening_sockets import ListeningSockets
from headrace.gateways.tls_certificates import TlsCertificates
from headrace.model.errors import InvalidArgument, NotServing, StoreUnavailable
from headrace.server.cluster_port import ServingNode
from headrace.server.cluster_settings import PEER_SETTINGS
from headrace.server.cluster_transfer import check_no_broker
from headrace.server.directory_lock import DirectoryLock
from headrace.server.exposure import check_exposed, is_exposed
from headrace.server.gateway_list import HTTP_SCHEMES, listen_addresses, load_gateways
from headrace.server.server import ServedShard, Server, version
from headrace.server.settings import EmbeddedSettings, ServerSettings
from headrace.server.standby import OwnerAddresses, StandbyListener
from headrace.storage.disk import PrivateDisk
from headrace.storage.stores.repeating import RepeatingStore
from headrace.wire.native import Hello

if TYPE_CHECKING:
    from headrace.storage.stores.store import SharedStore

logger = logging.getLogger("headrace.server")

_CLOSE_S = 8.0
"""A broker that cannot be closed in this time, because the store does not answer, is dropped."""
_SERVING_MODULES = (
    "headrace.broker.broker",
    "headrace.engines.api",
    "headrace.gateways.builtin_authenticator",
    "headrace.gateways.login_guard",
    "headrace.push.service",
    "headrace.runtime.broker_ticker",
    "headrace.runtime.process_info",
    "headrace.server.process_metrics",
    "headrace.storage.worker",
)
_CLOSING_S = 0.01
"""The loop closes the sockets of dropped connections in its next turns."""
_NATIVE = ("headrace", "headraces")
_UNSPECIFIED = ("0.0.0.0", "::", "")


class ClusterServer:
    """A node of a cluster with its addresses; has what callers use of a Server."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.listening: list[str] = []
        """The URLs of all addresses on which it listens, with the real ports."""
        self.addresses: list[tuple[str, int]] = []
        self.socket_path = ""
        self.tls: TlsCertificates | None = None
        self.server: Server | None = None
        """Serves while the node owns the shard."""
        self.node: ClusterNode | None = None
        self._disk = PrivateDisk()
        self._lock: DirectoryLock | None = None
        self._sockets = ListeningSockets()
        self._standby: StandbyListener | None = None
        self._bound: list[ListenAddress] = []
        self._definitions: SharedDefinitions | None = None
        self._checkpoints: CheckpointSchedule | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # What callers use.

    async def start(self) -> None:
        """Join the cluster; returns when the node serves, or follows another that does."""
        addresses = listen_addresses(self.settings)
        tls = self.settings.tls()
        self.tls = None if tls is None else TlsCertificates(tls)
        data = os.path.abspath(self.settings.data)
        check_no_broker(self._disk, data)
        self._check_token()
        self._lock = DirectoryLock(self._disk, data)
        try:
            if self.tls is not None:
                self.tls.start()
            await until_answered(lambda: run_on_thread(partial(self._open_definitions, addresses)), self._start_s)
            await self._listen(addresses)
            told = self._node_settings(data)
            self.node = ClusterNode(told, self._open_store, self._disk, self, self._peer_options(told.node))
            await self.node.start()
            await run_on_thread(partial(_load_modules, addresses))
            await self._until_ready(self.node)
        except BaseException:
            await self._close()
            raise

    async def stop(self, hurry: asyncio.Event | None = None) -> bool:
        """Hand the shard over if the node owns it, and end; returns whether that was done in order."""
        del hurry  # a hand-over takes no longer than it must
        assert self.node is not None
        try:
            await self.node.stop()
        finally:
            await self._close()
        failure = self.node.ended.exception()
        if failure is not None:
            raise failure
        logger.info("stopped  node=%s", self.node.settings.node)
        return True

    async def wait_ended(self) -> None:
        """Wait until the node cannot go on; raises why."""
        assert self.node is not None
        await asyncio.shield(self.node.ended)

    def disown(self) -> None:
        """In a forked child: leave data and connections to the parent."""
        if self._lock is not None:
            self._lock.disown()
        if self.server is not None:
            self.server.disown()
        accepting = [] if self._standby is None else self._standby.descriptors()
        for descriptor in [*self._sockets.descriptors(), *accepting]:
            detach(descriptor)

    async def _until_ready(self, node: ClusterNode) -> None:
        ready = asyncio.ensure_future(node.ready.wait())
        both: list[asyncio.Future[Any]] = [ready, node.ended]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if node.ended.done():
            node.ended.result()

    async def _close(self) -> None:
        if self.node is not None:
            await self.node.stop()  # also one that has ended by itself: its threads run on
        self._sockets.close()
        if self._standby is not None:
            self._standby.close()
        if self.server is not None:
            await self.abort_serving(stand_by=False)
        if self.tls is not None:
            self.tls.stop()
        if self._definitions is not None:
            await run_on_thread(self._definitions.close)
        if self._lock is not None:
            self._lock.release()

    # Preparing.

    def _open_store(self) -> "SharedStore":
        given = self.settings
        store = open_store(given.store, credentials_file=given.store_credentials_file or None)
        return RepeatingStore(store, clock=time.monotonic, sleep=time.sleep)

    def _open_definitions(self, addresses: list[ListenAddress]) -> None:
        """Check the store, and read the security definitions; refuse addresses that need security without it."""
        from headrace.storage.stores.self_test import qualify_store

        store = self._open_store()
        try:
            qualify_store(store, self.settings.cluster, secrets.token_hex(8))
            remarks = store.remarks()
            definitions = SharedDefinitions(store, self.settings.cluster)
            enabled = definitions.load().enabled
        except BaseException:
            store.close()
            raise
        for remark in remarks:
            logger.warning("store: %s  store=%s", remark, store.location)
        self._definitions = definitions
        exposed = [address for address in addresses if is_exposed(address)]
        check_exposed(exposed, enabled=enabled, insecure=self.settings.insecure)
        self._definitions.start()

    @property
    def _start_s(self) -> float:
        """How long the start waits for the store: a program that opens a log of its own is told at once."""
        return 0.0 if isinstance(self.settings, EmbeddedSettings) else START_S

    def _node_settings(self, data: str) -> NodeSettings:
        given = self.settings
        advertised = given.advertise or [_advertised(one) for one in self._bound if not one.path]
        native = tuple(url for url in advertised if url.partition(":")[0] in _NATIVE)
        return NodeSettings(
            cluster=given.cluster,
            node=given.node or self._default_name(data),
            directory=data,
            addresses=native,
            http_addresses=tuple(url for url in advertised if url not in native),
            zone=given.zone,
            version=version(),
            heartbeat_s=given.cluster_heartbeat_seconds,
            follows=not isinstance(given, EmbeddedSettings),
            start_s=self._start_s,
        )

    def _default_name(self, data: str) -> str:
        """The name of the host and the port; without a port, something that stays with the directory."""
        ports = [one.port for one in self._bound if one.scheme in _NATIVE and not one.path]
        host = socket.gethostname().split(".")[0] or "node"
        return f"{host}-{ports[0]}" if ports else f"{host}-{zlib.crc32(data.encode()):08x}"

    def _check_token(self) -> None:
        """Refuse a token file that cannot be used, rather than to be refused by each owner."""
        path = self.settings.node_token_file
        if path:
            try:
                TokenSource(path=path).greeting(Hello())
            except InvalidArgument as error:
                raise InvalidArgument(
                    f"--node-token-file: {error}; `headrace auth token create NAME --save {path}` writes one"
                ) from error

    def _peer_options(self, node: str) -> PeerOptions:
        given = self.settings
        token = TokenSource(path=given.node_token_file) if given.node_token_file else NO_TOKEN
        certificate, key = given.node_certificate, given.node_key
        if not certificate and given.tls_client_ca and not given.node_token_file:
            certificate, key = given.tls_certificate, given.tls_key
        tls = TlsOptions(given.node_ca or given.tls_client_ca, certificate, key)
        return PeerOptions(node, version(), token, tls)

    # What the node calls.

    def is_reachable(self) -> bool:
        """Whether clients accept the certificate of this node."""
        return self.tls is None or self.tls.certificates[0].is_valid(time.time())

    async def start_serving(self, owned: OwnedShard) -> None:
        """Serve the shard."""
        assert self.node is not None
        assert self._definitions is not None
        node, given = self.node, self.settings
        await run_on_thread(self._definitions.refresh)
        self._checkpoints = CheckpointSchedule(
            owned,
            checkpoint_maker(node.store, node.replica.keys, owned, int(given.backup_seconds * 1e6), time_us),
            each_bytes=given.checkpoint_bytes,
            each_s=given.checkpoint_seconds,
            clock=time.monotonic,
            now_us=time_us,
        )
        port = ServingNode(node, owned, self._checkpoints, monotonic_us, self._spawn)
        assert self._standby is not None
        shard = ServedShard(port, self._all_nodes, port.collect, self._sockets, self._standby.stop_accepting, self.tls)
        own = {"cluster": "", "store": "", "node": "", "zone": "", "advertise": [], **dict.fromkeys(PEER_SETTINGS, "")}
        settings = msgspec.structs.replace(
            given,
            data=f"{node.settings.directory}/shards/000",
            host="",
            unix_socket="",
            http_address="",
            listen=[one.url for one in self._bound],
            store_credentials_file="",
            **own,
        )
        self.server = Server(settings, owned.disk, definitions=self._definitions.attach, shard=shard)
        try:
            await self.server.start()
        except BaseException:
            self.server = None
            await self._standby.start()
            raise
        self._checkpoints.start()

    async def abort_serving(self, *, stand_by: bool = True) -> None:
        """Drop all connections and the broker."""
        server, self.server = self.server, None
        if self._definitions is not None:
            self._definitions.detach()
        if server is not None:
            server.abort_connections()
        if stand_by:
            assert self._standby is not None
            await self._standby.start()
        if server is not None:
            # Clients look elsewhere at once: the broker's threads and a checkpoint may wait for the store for long.
            await asyncio.sleep(_CLOSING_S)
            server.abort()
        await self._stop_checkpoints()

    async def finish_serving(self) -> None:
        """Refuse new work, and close the broker with all that was begun."""
        assert self.node is not None
        assert self.server is not None
        assert self._standby is not None
        server, owned = self.server, self.node.owned
        assert owned is not None
        await self._stop_checkpoints()
        successor = self.node.handing_over.successor or ""
        addresses = list(self.node.knowledge.addresses_of(successor))
        error = NotServing(
            f"this node hands over to {successor or 'another one'}", addresses=addresses, epoch=owned.epoch
        )
        late = StoreUnavailable("the store has not taken everything in time to hand the shard over")
        watchdog = threading.Timer(_CLOSE_S, owned.writer.abandon, (late,))
        watchdog.daemon = True
        watchdog.start()

        def before_closing() -> None:
            server.refuse_requests(error)
            owned.disk.defer_syncs()

        try:
            await self._standby.start()  # from here on, new clients are told that the node does not serve
            await server.finish(error, before_closing)
        finally:
            watchdog.cancel()

    async def end_serving(self) -> None:
        """Close what is left."""
        server, self.server = self.server, None
        if self._definitions is not None:
            self._definitions.detach()
        if server is not None:
            await server.close_connections()
            server.abort()

    async def _stop_checkpoints(self) -> None:
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            await run_on_thread(checkpoints.stop)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Standing by.

    async def _listen(self, addresses: list[ListenAddress]) -> None:
        """Listen for as long as the node lives, whoever answers, and stand by; other gateways' addresses are theirs."""
        own = [one for one in addresses if one.scheme in (*NATIVE_SCHEMES, *HTTP_SCHEMES)]
        bound = [found for one in own for found in await self._sockets.listen(one)]
        self._bound = [*bound, *(one for one in addresses if one not in own)]
        self.listening = [one.url.replace("unix:", "headrace+unix:", 1) for one in bound]
        native = [one for one in bound if one.scheme in _NATIVE]
        self.addresses = [(one.host, one.port or 0) for one in native]
        self.socket_path = next((one.path for one in bound if one.path), "")
        self._standby = StandbyListener(self._sockets, bound, self.tls, self._owner)
        await self._standby.start()

    def _owner(self) -> OwnerAddresses:
        """Who serves, as far as the node knows; nobody while it takes over itself."""
        manifest = None if self.node is None else self.node.manifest
        if manifest is None or self.node is None:
            return OwnerAddresses()
        named = manifest.successor if manifest.released else manifest.owner
        if not named or named == self.node.settings.node:
            return OwnerAddresses(named, manifest.epoch)
        addresses = self.node.knowledge.addresses_of(named) if manifest.released else manifest.addresses
        native = tuple(url for url in addresses if url.partition(":")[0] in _NATIVE)
        http = tuple(url for url in manifest.addresses if url.partition(":")[0] in HTTP_SCHEMES)
        return OwnerAddresses(named, manifest.epoch, native, () if manifest.released else http)

    def _all_nodes(self) -> list[str]:
        """The URLs of all live nodes, this one's first."""
        assert self.node is not None
        own = self.node.settings
        others = [one for one in self.node.knowledge.live_nodes() if one.node != own.node]
        return [*own.addresses, *(url for one in others for url in one.addresses)]


def _load_modules(addresses: list[ListenAddress]) -> None:
    """Load what a server needs, so that a failover does not wait for it."""
    for name in _SERVING_MODULES:
        importlib.import_module(name)
    load_gateways(addresses)


def _advertised(address: ListenAddress) -> str:
    """The URL at which others reach an address on which this node listens."""
    if address.host in _UNSPECIFIED:
        return f"{address.scheme}://{socket.gethostname()}:{address.port}"
    return address.url
