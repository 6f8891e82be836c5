"""The composition root: puts store, broker and gateways together, in a process of its own or inside a program."""

import asyncio
import atexit
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from headrace.broker.settings import BrokerSettings
from headrace.client.connection.fork_guard import detach
from headrace.model.errors import Closed, DiskFull, Forked, HeadraceError, InvalidArgument, LogInUse
from headrace.model.topic import topic_settings
from headrace.runtime.event_loop import new_event_loop as new_event_loop
from headrace.storage.ownership import LOCK_NAME
from headrace.wire.native import DEFAULT_PORT

if TYPE_CHECKING:
    from headrace.broker.broker import Broker
    from headrace.broker.repair import CheckedLog as CheckedLog
    from headrace.broker.repair import Repaired as Repaired
    from headrace.broker.repair import Verified as Verified
    from headrace.gateways.native.gateway import NativeGateway
    from headrace.runtime.broker_clock import BrokerClock
    from headrace.runtime.loop_scheduler import LoopScheduler
    from headrace.storage.disk import Disk, OpenFile
    from headrace.storage.runtime import StorageRuntime
    from headrace.storage.worker import Worker

logger = logging.getLogger("headrace.server")

MEMORY = ":memory:"
"""Instead of a directory: keep everything in memory."""
SOCKET_NAME = "headrace.sock"
_TICK_S_MIN, _TICK_S_MAX = 0.001, 0.1
_QUIET_US = 250_000
"""Clients that are told of the end and say nothing for so long have said all that they wanted to."""
_TALK_S = 1.0
"""Clients that are told of the end and go on talking have so long; then nothing more is taken from them."""
_POLL_S = 0.02
_DESCRIPTORS_SPARE = 64
"""File descriptors for what is neither a segment nor a connection; less where there are few."""
_FAREWELL_S = 1.0

_BROKER_DEFAULTS = BrokerSettings()


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a server."""

    must_listen: ClassVar[bool] = True
    data: str
    """The directory of all data, made if there is none; or `:memory:`, where nothing outlives the server."""
    host: str = "127.0.0.1"
    """Where to listen on TCP: an address or a name of this machine; empty for not at all."""
    port: int = DEFAULT_PORT
    """The TCP port; 0 for any that is free."""
    unix_socket: str | None = None
    """Path of a Unix socket to listen on; by default headrace.sock in the data directory, empty for none."""
    connections_max: int = 10_000
    """Connections at once; more are refused with an error that says so."""
    heartbeat_ms: int = 5000
    """Clients that are idle say something this often, in milliseconds; three times as long in silence is the end."""
    receive_bytes_max: int = 256 << 20
    """Memory for large requests that have arrived only in part, of all connections together."""
    auto_create_topics: bool = _BROKER_DEFAULTS.auto_create_topics
    """Make a topic when something is published to it for the first time, or a reader asks for it with `create`."""
    topics_max: int = _BROKER_DEFAULTS.topics_max
    """Topics at once."""
    maintenance_seconds: float = _BROKER_DEFAULTS.maintenance_seconds
    """How often retention is looked after, and written messages are synced that nobody waits for."""
    compact_seconds: float = _BROKER_DEFAULTS.compact_seconds
    """How often topics with compact_by_key are compacted."""
    transaction_seconds_max: float = _BROKER_DEFAULTS.transaction_seconds_max
    """The longest time that a transaction may ask for."""
    transactions_kept_seconds: float = _BROKER_DEFAULTS.transactions_kept_seconds
    """How long the last sequence of a transaction's name is remembered after its last commit."""
    staged_bytes_max: int = _BROKER_DEFAULTS.staged_bytes_max
    """How much all open transactions together may have staged, in files; 10 million messages of 100 bytes are 1 GB."""
    journal_bytes: int = _BROKER_DEFAULTS.journal_bytes
    """The broker's journal is replaced by a snapshot when it is larger, and four times as large as the last one."""
    drain_seconds: float = 10.0
    """How long a server that is asked to end waits for its clients to finish."""
    log_level: str = "info"
    """How much is logged: debug, info, warning or error."""
    log_format: str = "text"
    """How it is logged: text, or json with an object a line."""
    topic: dict[str, Any] = {}
    """Settings of topics, by name, where whoever makes a topic says nothing else."""

    def __post_init__(self) -> None:
        if not self.data:
            raise InvalidArgument("data must name a directory")
        _check_path("data", self.data)
        _check_path("unix_socket", self.unix_socket or "")
        _check_host(self.host)
        if self.must_listen and not (self.host or self.socket_path):
            raise InvalidArgument(
                "host and unix_socket are both empty: nobody could reach the broker; give one of them"
            )
        _between("port", self.port, 0, 65_535)
        _between("connections_max", self.connections_max, 1, 1_000_000)
        _between("heartbeat_ms", self.heartbeat_ms, 100, 3_600_000)
        _between("receive_bytes_max", self.receive_bytes_max, 1 << 20, 1 << 50)
        _between("drain_seconds", self.drain_seconds, 0, 86_400)
        _among("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _among("log_format", self.log_format, ("text", "json"))
        self.broker()

    @property
    def in_memory(self) -> bool:
        """Whether nothing is kept on a disk."""
        return self.data == MEMORY

    @property
    def socket_path(self) -> str:
        """Where the Unix socket is; empty if there is none."""
        if self.unix_socket is not None:
            return self.unix_socket
        return "" if self.in_memory else os.path.join(self.data, SOCKET_NAME)

    def broker(self) -> BrokerSettings:
        """Those that are the broker's."""
        topic = topic_settings({**({"storage": "memory"} if self.in_memory else {}), **self.topic})
        own = {name: getattr(self, name) for name in BrokerSettings.__struct_fields__ if name != "topic"}
        return BrokerSettings(topic=topic, **own)


class EmbeddedSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Those of a server inside a program, which need not listen anywhere."""

    must_listen: ClassVar[bool] = False
    host: str = ""
    unix_socket: str | None = ""
    drain_seconds: float = 2.0


def _between(name: str, number: float, low: float, high: float) -> None:
    if not low <= number <= high:
        raise InvalidArgument(f"{name} must be {low} to {high}, not {number}")


def _check_path(name: str, path: str) -> None:
    try:
        encoded = os.fsencode(path)
    except UnicodeError as error:
        raise InvalidArgument(f"{name} must be a path that the file system can encode, not {path!r}") from error
    if b"\0" in encoded:
        raise InvalidArgument(f"{name} must be a path without null characters, not {path!r}")


def _check_host(host: str) -> None:
    try:
        encoded = host.encode("idna")  # as the system's resolver will have it
        if b"\0" in encoded:
            raise UnicodeError("it has a null character")
    except UnicodeError as error:
        raise InvalidArgument(f"host must be an address or a name of this machine, not {host!r}: {error}") from error


def server_settings(given: dict[str, Any], kind: type[ServerSettings] = ServerSettings) -> ServerSettings:
    """Settings from plain values by name; says which one is wrong."""
    try:
        return msgspec.convert(given, kind)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a broker's settings are wrong: {error.object!r} is no text in UTF-8") from error
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"a broker's settings are wrong: {error.__cause__ or error}; `headrace serve --print-config` shows them all"
        ) from error


def _among(name: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise InvalidArgument(f"{name} must be one of {', '.join(words)}, not {word!r}")


class LoopPorts:
    """What the broker needs from outside, on an event loop."""

    def __init__(self, turns: "LoopScheduler", worker: "Worker", wake_at: Callable[[int], None]) -> None:
        self.soon = turns.soon
        self.last = turns.last
        self.from_thread = turns.from_thread
        self.background = worker.submit
        self.wake_at = wake_at


class Server:
    """A broker and its gateways, on the event loop that runs."""

    def __init__(self, settings: ServerSettings, disk: "Disk | None" = None) -> None:
        """A server whose data is on this disk; by default the local one, with files for its user alone."""
        self.settings, self._disk = settings, disk
        self.addresses: list[tuple[str, int]] = []
        """Where it listens on TCP, with the real port."""
        self.socket_path = ""
        """Where its Unix socket is, if it has one."""
        self._lock: DirectoryLock | None = None
        self._worker: Worker | None = None
        self._broker: Broker | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._tick_us = 0
        self._connections_max = settings.connections_max
        self.gateway: NativeGateway
        self._clock: BrokerClock

    async def start(self) -> None:
        """Open the data and listen; when it returns clients are served."""
        # Imported here: whoever only wants to know the settings should not have to wait for the rest.
        from headrace.gateways.native.gateway import NativeGateway, NativeSettings
        from headrace.runtime.loop_scheduler import LoopScheduler
        from headrace.runtime.process_info import process_info

        settings = self.settings
        try:
            turns = LoopScheduler(asyncio.get_running_loop())
            broker = self._open(turns)
            native = NativeSettings(
                server=f"headrace {version()}",
                broker_id=broker.broker_id,
                heartbeat_ms=settings.heartbeat_ms,
                connections_max=self._connections_max,
                held_bytes_max=settings.receive_bytes_max,
            )
            loop = asyncio.get_running_loop()
            self.gateway = NativeGateway(broker, native, loop, turns, self._clock.now_us)
            self._tick()
            if settings.host:
                self.addresses = await self.gateway.listen(settings.host, settings.port)
            if settings.socket_path:
                await self._listen_unix(settings.socket_path)
            limits = {"connections_max": self._connections_max, "topics_max": settings.topics_max}
            broker.surroundings = lambda: process_info(self.addresses, self.socket_path, **limits)
        except BaseException:
            self._close()
            raise

    async def stop(self, hurry: asyncio.Event | None = None) -> bool:
        """Let clients finish, then end; whether they all had finished in time. With `hurry` set it ends at once."""
        assert self._broker is not None
        self.gateway.stop_listening()
        self._broker.drain()
        self.gateway.drain()
        logger.info("draining", extra={"connections": self.gateway.connections})
        finished = await self._finished(hurry or asyncio.Event())
        self.gateway.close()
        await _until(lambda: not self.gateway.connections, _FAREWELL_S)
        self._close()
        logger.info("stopped", extra={"finished": finished})
        return finished

    def _open(self, turns: "LoopScheduler") -> "Broker":
        from headrace.broker.broker import Broker
        from headrace.engines.api import Store
        from headrace.runtime.broker_clock import BrokerClock
        from headrace.storage.disk import PrivateDisk
        from headrace.storage.runtime import StorageRuntime
        from headrace.storage.worker import Worker

        self._clock = BrokerClock()
        host = StorageRuntime(self._disk or PrivateDisk())
        store = Store(host, None if self.settings.in_memory else os.path.abspath(self.settings.data))
        if store.data is not None:
            store.data.check_usable()  # before anything is made there
            self._lock = DirectoryLock(host.disk, store.data.path)
        self._worker = Worker("headrace-background")
        ports = LoopPorts(turns, self._worker, self._wake_at)
        self._divide_descriptors(host)
        host.inline_sync.allow_this_thread(time.perf_counter)
        self._broker = Broker(
            store,
            ports,
            self.settings.broker(),
            new_id=secrets.token_hex(8),
            version=version(),
            now_us=self._clock.now_us(),
        )
        self._clock.go_on_from(self._broker.last_us)
        return self._broker

    def _divide_descriptors(self, host: "StorageRuntime") -> None:
        """Take no more connections than the limit on open files leaves room for, and say how it is divided."""
        limit = host.disk.descriptors_max()
        stored = host.files_max + host.views_max
        left = max(limit - stored - min(_DESCRIPTORS_SPARE, limit // 8), 1)
        self._connections_max = min(self.settings.connections_max, left)
        listens = bool(self.settings.host or self.settings.socket_path)
        reduced = listens and self._connections_max < self.settings.connections_max
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

    async def _listen_unix(self, path: str) -> None:
        from headrace.gateways.unix_socket import PATH_BYTES_MAX

        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            text = f"{path} is too long for a Unix socket, which takes {PATH_BYTES_MAX} bytes: give unix_socket another"
            if self.settings.unix_socket is not None:
                raise InvalidArgument(text)
            logger.warning(text)
            return
        await self.gateway.listen_unix(path)
        self.socket_path = path

    def disown(self) -> None:
        """In a forked child: data and connections belong to the parent, and must not stay open when it ends."""
        if self._lock is not None:
            self._lock.disown()
        if "gateway" in self.__dict__:
            for descriptor in self.gateway.descriptors():
                if descriptor >= 0:
                    detach(descriptor)

    def _tick(self) -> None:
        assert self._broker is not None
        self._ticking = None
        now_us = self.gateway.now_us()
        delay_s = _TICK_S_MAX
        self._broker.wall_offset_us = self._clock.wall_offset_us()
        try:
            delay_s = (self._broker.tick(now_us) - now_us) / 1e6
        except Exception:
            logger.exception("what is due could not be done")
        self._tick_later(now_us, min(max(delay_s, _TICK_S_MIN), _TICK_S_MAX))

    def _tick_later(self, now_us: int, delay_s: float) -> None:
        self._tick_us = now_us + round(delay_s * 1e6)
        self._ticking = self.gateway.later(delay_s, self._tick)

    def _wake_at(self, time_us: int) -> None:
        """Come sooner than planned. While nothing is planned, a tick is going on, which will look at all of it."""
        if self._ticking is not None and self._broker is not None and time_us < self._tick_us:
            self._ticking.cancel()
            now_us = self.gateway.now_us()
            self._tick_later(now_us, max(time_us - now_us, 0) / 1e6)

    async def _finished(self, hurry: asyncio.Event) -> bool:
        broker, gateway = self._broker, self.gateway
        assert broker is not None

        def answered() -> bool:
            return hurry.is_set() or (broker.idle and not gateway.busy)

        def quiet() -> bool:
            silent = not gateway.connections or gateway.now_us() - gateway.heard_us() > _QUIET_US
            return answered() and (silent or hurry.is_set())

        patience_s = self.settings.drain_seconds
        if not await _until(quiet, min(_TALK_S, patience_s)):
            gateway.ignore_requests()
            await _until(answered, max(patience_s - _TALK_S, 0))
        return answered() and not hurry.is_set()

    def _close(self) -> None:
        """Let go of everything, in whatever state it is."""
        if self._ticking is not None:
            self._ticking.cancel()
        if "gateway" in self.__dict__:
            self.gateway.close()
            self.gateway.abort()
        if self._worker is not None:
            self._worker.stop()
        broker, self._broker = self._broker, None
        try:
            if broker is not None:
                broker.close(self._clock.now_us())
        finally:
            if self._lock is not None:
                self._lock.release()


async def _until(reached: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for something to be so; whether it was in time."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not reached():
        if loop.time() >= deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


class DirectoryLock:
    """Makes sure that one server at a time works in a directory; tells the others who it is."""

    def __init__(self, disk: "Disk", directory: str) -> None:
        from headrace.storage.disk import open_or_make

        disk.make_directory(directory, private=True)
        self._disk = disk
        path = os.path.join(directory, LOCK_NAME)
        self._file: OpenFile | None = open_or_make(disk, path)
        if not disk.lock(self._file):
            holder = disk.read(self._file, 0, 32).decode("ascii", "replace").strip()
            by = f"process {holder}" if holder.isdigit() else "another process"
            raise LogInUse(f"{directory} is in use by {by}", pid=int(holder) if holder.isdigit() else None)
        try:
            # In place, and no longer than the first time: that needs no room on a full disk.
            disk.write(self._file, 0, b"%-31d\n" % os.getpid())
        except DiskFull as error:
            logger.warning("process id not recorded  path=%s reason=%s", path, error)

    @staticmethod
    def is_held(disk: "Disk", directory: str) -> bool:
        """Whether a server is at work in a directory."""
        path = os.path.join(directory, LOCK_NAME)
        if not disk.exists(path):
            return False
        file = disk.open(path)
        free = disk.lock(file, shared=True)
        if free:
            disk.unlock(file)
        return not free

    def release(self) -> None:
        """Let others in; said in so many words, for a forked child may hold the file too."""
        if self._file is not None:
            self._disk.unlock(self._file)
            self._file = None

    def disown(self) -> None:
        """In a forked child: let go of the file, and leave the lock with the parent."""
        self._file = None


def verify_data(path: str, progress: Callable[[int], None]) -> "Verified":
    """Check a whole data directory, changing nothing; a broker may be at work in it. Progress is told in bytes."""
    from headrace.broker.repair import verify
    from headrace.engines.api import DataDirectory
    from headrace.storage.runtime import StorageRuntime

    host = StorageRuntime()
    try:
        return verify(DataDirectory(host, path), progress, running=DirectoryLock.is_held(host.disk, path))
    finally:
        host.close()


def repair_data(path: str, progress: Callable[[int], None]) -> "Repaired":
    """Make a data directory usable again that a broker refuses; none may be at work in it."""
    from headrace.broker.repair import repair
    from headrace.engines.api import DataDirectory
    from headrace.gateways.native.gateway import time_us
    from headrace.storage.disk import PrivateDisk
    from headrace.storage.runtime import StorageRuntime

    host = StorageRuntime(PrivateDisk())
    data = DataDirectory(host, path)
    data.check_used()  # before a lock is made there
    lock = DirectoryLock(host.disk, path)
    try:
        return repair(data, secrets.token_hex(8), time_us(), progress)
    finally:
        lock.release()
        host.close()


def data_bytes(path: str) -> int:
    """How large the logs of a data directory are, about: what verifying or repairing it has to look at."""
    from headrace.engines.api import DataDirectory
    from headrace.storage.runtime import StorageRuntime

    return DataDirectory(StorageRuntime(), path).size_bytes()


def version() -> str:
    """The version of this software."""
    return str(sys.modules["headrace"].__version__)  # not imported: the package itself imports this module


class EmbeddedServer:
    """A server inside a program: on a thread of its own, reached through pairs of sockets."""

    def __init__(self, data: str | os.PathLike[str], *, disk: "Disk | None" = None, **settings: Any) -> None:
        """Open the data, or make it; `:memory:` keeps all of it in memory. Settings are those of ServerSettings."""
        self._server = Server(server_settings({**settings, "data": os.fspath(data)}, EmbeddedSettings), disk)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        self._closing = threading.Lock()
        self._closed = False
        self._forked = False
        self._attaching: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="headrace-server", daemon=True)
        _embedded.add(self)
        try:
            self._thread.start()
            self._started.wait()
            self._raise_failure()
        except BaseException:
            self._abandon()
            raise

    def connect(self) -> socket.socket:
        """One end of a new connection."""
        if self._forked:
            raise Forked("the embedded broker belongs to the process that this one was forked off")
        if self._closed:
            raise Closed("the broker is closed")
        near, far = socket.socketpair()
        far.setblocking(False)
        self._loop.call_soon_threadsafe(self._attach, far)
        return near

    def close(self) -> None:
        """Sync and close everything; waits until that is done."""
        with self._closing:
            if self._closed or self._forked:
                return
            self._closed = True
            _embedded.discard(self)
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._raise_failure()

    def _abandon(self) -> None:
        """Nobody will have it: let it end, without waiting for it."""
        self._closed = True
        _embedded.discard(self)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def disown(self) -> None:
        """In a forked child: this is the parent's."""
        self._forked = True
        self._closing = threading.Lock()
        self._server.disown()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _attach(self, end: socket.socket) -> None:
        if self._stop.is_set():
            end.close()
            return
        task = self._loop.create_task(self._server.gateway.attach(end))
        self._attaching.add(task)  # or nobody would hold it
        task.add_done_callback(self._attaching.discard)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:  # noqa: BLE001 whoever waits for this thread gets it
                self._failure = error
            finally:
                self._started.set()

    async def _serve(self) -> None:
        await self._server.start()
        self._started.set()
        await self._stop.wait()
        if self._attaching:  # they are closed with all others, and not in the middle of it
            await asyncio.wait(self._attaching)
        await self._server.stop()


_embedded: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for server in list(_embedded):
        try:
            server.close()
        except HeadraceError:
            logger.exception("at exit")


def _forget() -> None:
    global _embedded
    parents, _embedded = list(_embedded), weakref.WeakSet()
    for server in parents:
        server.disown()


os.register_at_fork(after_in_child=_forget)
