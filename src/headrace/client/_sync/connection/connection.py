"""One connection to a broker, with a thread that receives; `_async/connection/connection.py` is the one for asyncio."""

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.client._sync.concurrency import ResultCell, logger
from headrace.client.connection import fork_guard
from headrace.client.connection.addresses import Address, Target, unreachable
from headrace.client.connection.clock import Clock, monotonic_us
from headrace.client.connection.http_upgrade import HttpUpgrade
from headrace.client.connection.request_router import (
    RECEIVE_AT_ONCE_BYTES,
    AwaitedAnswer,
    Bytes,
    LateCallback,
    RequestRouter,
)
from headrace.client.connection.tls_errors import connect_failed, connection_broken
from headrace.model.errors import ConnectionFailed, HeadraceError, InvalidArgument, Timeout, TlsFailed
from headrace.model.request import AnswerType, Request
from headrace.wire.frames import Frames, Memory
from headrace.wire.native import Hello

if TYPE_CHECKING:
    from headrace.client.connection.tls_socket import TlsSocket

_PARTS_MAX = 64
"""How many pieces are handed to the kernel at once."""
_UPGRADE_BYTES = 16 << 10


class Connection(RequestRouter):
    """A connection. When it is gone it is gone: a Line makes another.

    Whoever writes tries to send at once, without blocking; what the kernel does not take is sent by the thread that
    listens. So nobody who handles an answer can be kept from listening by a broker that does not listen either.
    """

    def __init__(
        self,
        connected: "socket.socket | TlsSocket",
        on_lost: Callable[["Connection", HeadraceError], None],
        received: bytes = b"",
    ) -> None:
        super().__init__()
        self._socket = connected
        self._tls = None if isinstance(connected, socket.socket) else connected
        self._unsent = False
        """Whether something is encrypted that the kernel has not taken."""
        self._received = received
        """What came before the thread that listens."""
        self._socket.setblocking(False)
        self._on_lost = on_lost
        self._frames = Frames(Memory(RECEIVE_AT_ONCE_BYTES))
        self._backlog: deque[Bytes] = deque()
        """What is to be sent. Anyone appends; who has `_sending` takes."""
        self._sending = threading.Lock()
        self._full = False
        """The kernel takes no more for now: the thread that listens waits for room."""
        self._ending_lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._poll.register(self._socket, select.POLLIN)
        self._polls_out = False
        """Whether the thread that listens is to wake up when there is room."""
        self._ending: HeadraceError | None = None
        self._disowned = False
        self._thread = threading.Thread(target=self._run, name="headrace-link", daemon=True)
        fork_guard.register(self)

    @classmethod
    def open(
        cls,
        target: Target,
        hello: Hello,
        timeout: float,
        on_lost: Callable[["Connection", HeadraceError], None],
        memory: Memory | None,
        clock: Clock,
    ) -> "Connection":
        """Connect and say hello; raises ConnectionFailed."""
        del memory  # each connection has a thread, and memory of its own
        deadline = time.monotonic() + timeout
        try:
            connected = _connected(target, timeout)
            connection = cls(connected, on_lost, _upgraded(connected, target, deadline))
        except (InvalidArgument, TlsFailed):
            raise
        except (OSError, ValueError) as error:  # a ValueError: a name that no host can have
            raise connect_failed(target, error) from error
        connection.clock = clock
        try:
            connection._thread.start()
            asked_us = monotonic_us()
            connection.welcome, _ = connection.request(hello, b"", max(deadline - time.monotonic(), 0.001))
            clock.sample(asked_us, connection.welcome.time_us, monotonic_us())
        except Timeout as error:
            connection.close()
            raise ConnectionFailed(unreachable(target, f"no answer within {timeout:.3g} s")) from error
        except BaseException:
            connection.end()
            raise
        return connection

    def request(
        self,
        request: Request[AnswerType],
        body: Bytes = b"",
        timeout: float | None = None,
        late: LateCallback[AnswerType] | None = None,
    ) -> tuple[AnswerType, Bytes]:
        """Send a request, and wait for the answer and its body.

        An answer that comes too late, or after an interrupt, goes to `late`.
        """
        outcome: ResultCell[tuple[AnswerType, Bytes]] = ResultCell()
        awaited = AwaitedAnswer(outcome, late)
        try:
            self.request_nowait(request, body, awaited.told)
            return outcome.wait(timeout)
        except BaseException as error:
            awaited.give_up()
            if isinstance(error, Timeout) and outcome.error is None:
                told = f"no answer to {request.declared.name} within {timeout:.3g} s; it may still happen"
                raise Timeout(told) from error
            raise

    def write(self, head: bytearray, body: Bytes) -> None:
        """Queue a frame."""
        self._backlog.extend((head, body) if body else (head,))

    def before_flush(self, call: Callable[[], None]) -> None:
        """Call this now: threads have nothing to gain by waiting."""
        call()

    def flush(self) -> None:
        """Send what is queued; what does not go at once is left to the thread that listens.

        If another thread is at it this one need not wait: the other sees what was queued in the meantime.
        """
        while (self._backlog or self._unsent) and not self._full and self._sending.acquire(blocking=False):
            try:
                self._send()
            finally:
                self._sending.release()

    def end(self, error: HeadraceError | None = None) -> None:
        """Let the connection end, after what has been written; does not wait for it."""
        with self._ending_lock:
            if not self.closed and self._ending is None:
                self._ending = error or ConnectionFailed("the connection was closed here")
                self._wake()

    def close(self, error: HeadraceError | None = None) -> None:
        """End the connection, and wait until it has."""
        self.end(error)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _disown(self) -> None:
        """In a forked child: close its copies of the descriptors; that says nothing to the broker."""
        self._disowned = True
        was_closed, self.closed = self.closed, True
        self._socket.close()
        if not was_closed:  # else the thread was closing them in the moment of the fork
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    def _run(self) -> None:
        try:
            ending = self._listen()
        except HeadraceError as error:
            ending = error
        except Exception as error:  # noqa: BLE001  # whatever it is, all who wait must be told
            logger.error("a connection to the broker failed", exc_info=error)
            ending = connection_broken(error)
        if self._disowned:  # a callback has forked: the descriptors may be somebody else's by now
            return
        with self._ending_lock, self._sending:
            self._lost_by = ending
            self.closed = True
            if self._tls is not None:
                self._tls.end()
            self._socket.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1
        self.lose(ending)
        self._on_lost(self, ending)

    def _listen(self) -> HeadraceError:
        """Receive and send until it ends; returns why."""
        receive, frames = self._socket.recv_into, self._frames
        for come in frames.feed(self._received):
            self.arrived(come)
        while True:
            if self._ending is not None:
                self.flush()
                return self._ending
            buffer = frames.buffer()
            try:
                count = receive(buffer)
            except (BlockingIOError, InterruptedError):
                self._wait()
                continue
            except OSError as error:
                return connection_broken(error)
            if not count:
                return connection_broken("the broker closed it")
            for come in frames.received(count):
                self.arrived(come)
            if self._full:
                self._full = False  # an answer came: perhaps there is room
                self.flush()
            if count < len(buffer):  # that was all there is
                self._wait()

    def _wait(self) -> None:
        """Sleep until there is something to receive, or room to send what is left."""
        full = self._full  # others may set it now, and then wake this thread
        if full is not self._polls_out:
            self._polls_out = full
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT if full else select.POLLIN)
        for descriptor, events in self._poll.poll():
            if descriptor == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 1024)
            elif events & ~select.POLLIN:
                self._full = False
        self.flush()

    def _send(self) -> None:
        """Send until all is sent or the kernel takes no more; one thread at a time."""
        backlog = self._backlog
        while backlog or self._unsent:
            parts = [backlog.popleft() for _ in range(min(len(backlog), _PARTS_MAX))]
            try:
                sent = self._socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                backlog.clear()
                self._ending = self._ending or connection_broken(error)
                self._wake()
                return
            left = _left(parts, sent)
            self._unsent = self._tls is not None and self._tls.unsent
            if left or self._unsent:
                backlog.extendleft(reversed(left))
                self._full = True
                if threading.current_thread() is not self._thread:
                    self._wake()
                return

    def _wake(self) -> None:
        """Let the thread that listens look around; whoever calls this holds one of the locks."""
        if not self.closed:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"!")


def receive_memory() -> Memory | None:
    """Connections with threads of their own share no memory."""
    return None


def _left(parts: list[Bytes], sent: int) -> list[Bytes]:
    """What of the parts was not sent."""
    for index, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[index + 1 :]]
        sent -= len(part)
    return []


def _connected(target: Target, timeout: float) -> "socket.socket | TlsSocket":
    if not isinstance(target, Address):
        return target.connect()
    if target.path:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout)
            connected.connect(target.path)
        except BaseException:
            connected.close()
            raise
        return connected
    if target.has_tls:
        return _connected_with_tls(target, timeout)
    return _connected_to_host(target.host, target.port, timeout)


def _connected_with_tls(target: Address, timeout: float) -> "TlsSocket":
    from headrace.client.connection.tls import client_context, server_name
    from headrace.client.connection.tls_socket import TlsSocket

    deadline = time.monotonic() + timeout
    context = client_context(target)  # first: a file that cannot be used is told also when the broker is away
    connected = _connected_to_host(target.host, target.port, timeout)
    try:
        return TlsSocket(connected, context, server_name(target), deadline)
    except BaseException:
        connected.close()
        raise


def _connected_to_host(host: str, port: int, timeout: float) -> socket.socket:
    """A connection to the first address of a host that answers; all of them together have so much time."""
    deadline = time.monotonic() + timeout
    failed = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connected = None
        try:
            connected = socket.socket(family, kind, protocol)
            connected.settimeout(max(deadline - time.monotonic(), 0.001))
            connected.connect(address)
        except OSError as error:
            failed = error
            if connected is not None:
                connected.close()
        except BaseException:
            if connected is not None:
                connected.close()
            raise
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connected
    raise failed


def _upgraded(connected: "socket.socket | TlsSocket", target: Target, deadline: float) -> bytes:
    """Switch a connection from HTTP to the native protocol, if it begins so; returns what came behind the switch."""
    if not isinstance(target, Address) or not target.upgrades:
        return b""
    upgrade, rest = HttpUpgrade(target), None
    try:
        connected.settimeout(max(deadline - time.monotonic(), 0.001))
        connected.sendall(upgrade.request())
        while rest is None:
            connected.settimeout(max(deadline - time.monotonic(), 0.001))
            rest = upgrade.receive(connected.recv(_UPGRADE_BYTES))
    except BaseException:
        connected.close()
        raise
    return rest
