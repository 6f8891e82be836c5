"""One connection to a broker, on an event loop. `_sync/connection/connection.py` has the same names for threads."""

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from headrace.client._async.concurrency import ResultCell
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
from headrace.client.connection.tls import client_context, server_name
from headrace.client.connection.tls_errors import connect_failed, connection_broken
from headrace.model.errors import ConnectionFailed, HeadraceError, InvalidArgument, Timeout, TlsFailed
from headrace.model.request import AnswerType, Request
from headrace.wire.frames import Frames, Memory
from headrace.wire.native import Hello

_JOINED_BYTES_MAX = 120 << 10
_SMALL_BYTES = 4 << 10
"""Two pieces up to this are quicker joined and sent as one."""


class Connection(RequestRouter, asyncio.BufferedProtocol):
    """One connection on an event loop. It is never reopened: an AsyncReconnectingConnection makes another."""

    def __init__(self, on_lost: Callable[["Connection", HeadraceError], None], memory: Memory | None) -> None:
        super().__init__()
        self._on_lost = on_lost
        self._frames = Frames(memory)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._gathers = False
        """Whether the transport sends many pieces at once without joining them: uvloop's does, and newer Pythons'."""
        self._outgoing: list[Bytes] = []
        self._before_flush: list[Callable[[], None]] = []
        self._flushing = False
        """The loop will flush."""
        self._gone: ResultCell[None] = ResultCell()
        fork_guard.register(self)

    @classmethod
    async def open(
        cls,
        target: Target,
        hello: Hello,
        timeout: float,
        on_lost: Callable[["Connection", HeadraceError], None],
        memory: Memory | None,
        clock: Clock,
    ) -> "Connection":
        """Connect and say hello; raises ConnectionFailed."""
        connection = cls(on_lost, memory)
        connection.clock = clock
        try:
            async with asyncio.timeout(timeout):
                await connection._connect(target)
                asked_us = monotonic_us()
                connection.welcome, _ = await connection.request(hello, b"", timeout)
                clock.sample(asked_us, connection.welcome.time_us, monotonic_us())
        except TimeoutError as error:
            connection.end()
            raise ConnectionFailed(unreachable(target, f"no answer within {timeout:.3g} s")) from error
        except (InvalidArgument, TlsFailed):
            connection.end()
            raise
        except (OSError, ValueError) as error:  # a ValueError: a name that no host can have
            connection.end()
            raise connect_failed(target, error) from error
        except BaseException:
            connection.end()
            raise
        return connection

    async def request(
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
            return await outcome.wait(timeout)
        except BaseException as error:
            awaited.give_up()
            if isinstance(error, Timeout) and outcome.error is None:
                told = f"no answer to {request.declared.name} within {timeout:.3g} s; it may still happen"
                raise Timeout(told) from error
            raise

    def write(self, head: bytearray, body: Bytes) -> None:
        """Send a frame; those of one turn of the loop go together."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        outgoing = self._outgoing
        outgoing.append(head)
        if body:
            outgoing.append(body)

    def before_flush(self, call: Callable[[], None]) -> None:
        """Call this in the next turn of the loop, before it sends."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        self._before_flush.append(call)

    def flush(self) -> None:
        """The loop does it, after what is going on now."""

    def end(self, error: HeadraceError | None = None) -> None:
        """End the connection, after what has been written."""
        if not self.closed:
            self._flush()
            self._lost(error or ConnectionFailed("the connection was closed here"))
        if self._transport is not None:
            self._transport.close()

    async def close(self, error: HeadraceError | None = None) -> None:
        """End the connection, and wait until it has."""
        self.end(error)
        if self._transport is not None:
            await self._gone.wait()

    def _disown(self) -> None:
        """In a forked child: close its copy of the connection; that says nothing to the broker."""
        self.closed = True
        self._outgoing, self._before_flush = [], []
        transport, self._transport = self._transport, None
        connected = None if transport is None else transport.get_extra_info("socket")
        if connected is not None and connected.fileno() >= 0:
            fork_guard.detach(connected.fileno())

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        with_tls = transport.get_extra_info("ssl_object") is not None  # each piece would be a record of its own
        self._gathers = not with_tls and (sys.version_info >= (3, 12) or not isinstance(transport, asyncio.Transport))
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio's

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to receive."""
        del sizehint
        return self._frames.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes came."""
        try:
            for come in self._frames.received(nbytes):
                self.arrived(come)
        except HeadraceError as error:
            self.end(error)

    def feed(self, data: bytes) -> None:
        """Take bytes that came before the connection had the transport."""
        try:
            for come in self._frames.feed(data):
                self.arrived(come)
        except HeadraceError as error:
            self.end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._lost(connection_broken(exc or "the broker closed it"))
        self._gone.resolve(None)

    def eof_received(self) -> bool:
        """The broker will send no more: so the connection is over."""
        return False

    async def _connect(self, target: Target) -> None:
        if not isinstance(target, Address):
            await self._loop.create_unix_connection(lambda: self, sock=_unblocked(target.connect()))
        elif target.path:
            await self._loop.create_unix_connection(lambda: self, target.path)
        else:
            await self._connect_to_host(target)

    async def _connect_to_host(self, target: Address) -> None:
        """Connect to a host, with TLS or without, and by way of HTTP if the address says so."""
        security: dict[str, Any] = {}
        if target.has_tls:  # its context reads files, and the CAs of the system are many
            context = await asyncio.to_thread(client_context, target)
            security = {"ssl": context, "server_hostname": server_name(target)}
        if target.upgrades:
            _, upgrading = await self._loop.create_connection(
                lambda: _UpgradingProtocol(target), *target[:2], **security
            )
            await upgrading.finish(self)
        else:
            await self._loop.create_connection(lambda: self, *target[:2], **security)

    def _flush(self) -> None:
        if self._before_flush:
            calls, self._before_flush = self._before_flush, []
            for call in calls:
                call()
        self._flushing = False
        outgoing, self._outgoing = self._outgoing, []
        if not outgoing or self._transport is None or self._transport.is_closing():
            return
        if len(outgoing) == 2 and len(outgoing[1]) <= _SMALL_BYTES:
            self._transport.write(b"".join(outgoing))
        elif self._gathers:
            self._transport.writelines(outgoing)
        else:
            for joined in _joined(outgoing):
                self._transport.write(joined)

    def _lost(self, error: HeadraceError) -> None:
        if not self.closed:
            self.lose(error)
            self._on_lost(self, error)


class _UpgradingProtocol(asyncio.Protocol):
    """Switches a connection from HTTP to the native protocol."""

    _transport: asyncio.Transport

    def __init__(self, address: Address) -> None:
        self._upgrade = HttpUpgrade(address)
        self._rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """What comes behind the switch."""

    async def finish(self, connection: Connection) -> None:
        """Wait for the switch, and let the connection go on."""
        try:
            rest = await self._rest
            if self._transport.is_closing():
                raise ConnectionResetError("the server closed the connection")
        except BaseException:
            self._transport.abort()
            raise
        connection.connection_made(self._transport)
        self._transport.set_protocol(connection)
        connection.feed(rest)
        self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the native protocol."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio's
        self._transport.write(self._upgrade.request())

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer."""
        if self._rest.done():
            return
        try:
            rest = self._upgrade.receive(data)
        except HeadraceError as error:
            self._rest.set_exception(error)
            return
        if rest is not None:
            self._transport.pause_reading()  # until the connection has the transport
            self._rest.set_result(rest)

    def eof_received(self) -> bool:
        """The server sends no more."""
        self.data_received(b"")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection broke before it was switched."""
        if not self._rest.done():
            self._rest.set_exception(exc or ConnectionResetError("the server closed the connection"))


def _joined(parts: list[Bytes]) -> Iterator[Bytes]:
    """The parts, joined as far as that is cheaper than to send them one by one."""
    group: list[Bytes] = []
    size = 0
    for part in parts:
        if group and size + len(part) > _JOINED_BYTES_MAX:
            yield b"".join(group) if len(group) > 1 else memoryview(group[0])
            group, size = [], 0
        group.append(part)
        size += len(part)
    yield b"".join(group) if len(group) > 1 else memoryview(group[0])


def _unblocked(connected: socket.socket) -> socket.socket:
    connected.setblocking(False)
    return connected


def receive_memory() -> Memory:
    """Memory for all connections of a bus, which are on one loop."""
    return Memory(RECEIVE_AT_ONCE_BYTES)
