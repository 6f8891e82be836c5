"""A server inside a program."""

import asyncio
import atexit
import logging
import os
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any

from headrace.model.errors import Closed, Forked, HeadraceError, InvalidArgument
from headrace.runtime.event_loop import new_event_loop
from headrace.server.cluster_server import ClusterServer
from headrace.server.server import Server
from headrace.server.settings import EmbeddedSettings, server_settings

if TYPE_CHECKING:
    from headrace.storage.disk import Disk

logger = logging.getLogger("headrace.server")


class EmbeddedServer:
    """A server inside a program, on a thread of its own; clients reach it through socket pairs."""

    def __init__(self, data: str | os.PathLike[str], *, disk: "Disk | None" = None, **settings: Any) -> None:
        """Open or create the data; `:memory:` keeps all of it in memory. Settings are those of ServerSettings."""
        given = server_settings({**settings, "data": os.fspath(data)}, EmbeddedSettings)
        if given.clustered and disk is not None:
            raise InvalidArgument("a node of a cluster has its copy on the local disk: leave `disk` out")
        self._server = ClusterServer(given) if given.clustered else Server(given, disk)
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
        """Open a connection and return the client's end."""
        if self._forked:
            raise Forked("the embedded broker belongs to the process that this one was forked off")
        if self._closed:
            raise Closed("the broker is closed")
        near, far = socket.socketpair()
        far.setblocking(False)
        self._loop.call_soon_threadsafe(self._attach, far)
        return near

    def close(self) -> None:
        """Drain, sync and close everything; returns when that is done."""
        with self._closing:
            if self._closed or self._forked:
                return
            self._closed = True
            _embedded.discard(self)
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._raise_failure()

    def _abandon(self) -> None:
        """Stop a server that failed to start, without waiting for its end."""
        self._closed = True
        _embedded.discard(self)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def disown(self) -> None:
        """In a forked child: leave data and connections to the parent."""
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
        serving = self._server.server if isinstance(self._server, ClusterServer) else self._server
        if serving is None:  # it has lost the shard
            end.close()
            return
        task = self._loop.create_task(serving.native.attach(end))
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
            logger.exception("embedded server not closed at exit")


def _forget() -> None:
    global _embedded
    parents, _embedded = list(_embedded), weakref.WeakSet()
    for server in parents:
        server.disown()


os.register_at_fork(after_in_child=_forget)
