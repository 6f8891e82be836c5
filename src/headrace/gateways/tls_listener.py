"""A listener of TLS: accepts connections, limits unfinished handshakes, and answers clients that speak no TLS."""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.gateways.addresses import tcp_url
from headrace.gateways.tls_handshake import HandshakeAttempt, HandshakeCounts
from headrace.model.errors import InvalidArgument
from headrace.model.limits import TLS_HANDSHAKES_MAX

if TYPE_CHECKING:
    from headrace.gateways.tls_certificates import TlsCertificates

logger = logging.getLogger("headrace.tls")

_TLS_HANDSHAKE = 0x16
"""The first byte of a client that speaks TLS."""
_PEEKED_BYTES = 16
_LINGER_S = 1.0
"""A refused client has so long to read why."""
_ACCEPTED_AT_ONCE = 64
_PAUSE_S = 0.5
_REPORT_S = 10.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

ProtocolFactory = Callable[[], asyncio.BaseProtocol]
PlainAnswer = Callable[[bytes], bytes]
"""What a client is answered that speaks no TLS, given its first bytes."""


class TlsListener:
    """Sockets that listen for clients with TLS; has what the gateways use of asyncio's servers."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: Callable[[], ssl.SSLContext],
        handshake_seconds: float,
        counts: HandshakeCounts,
        factory: ProtocolFactory,
        plain_answer: PlainAnswer,
    ) -> None:
        self.sockets: list[socket.socket] = []
        self._loop = loop
        self._context = context
        self._handshake_s = handshake_seconds
        self._counts = counts
        self._factory = factory
        self._plain_answer = plain_answer
        self._handshakes: dict[asyncio.Task[None], tuple[socket.socket, int]] = {}
        """Unfinished handshakes, the oldest first, with their sockets and file descriptors."""
        self._reported_s = float("-inf")

    def accept(self, sockets: list[socket.socket]) -> None:
        """Accept connections on sockets that listen, and close them at the end."""
        self.sockets += sockets
        for listening in sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def stop_accepting(self) -> None:
        """Accept no new connections; the handshakes that have begun go on."""
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()
        self.sockets.clear()

    def close(self) -> None:
        """Accept no new connections, and end the handshakes that are not finished."""
        self.stop_accepting()
        for handshake in list(self._handshakes):
            handshake.cancel()

    def descriptors(self) -> list[int]:
        """The file descriptors of listening sockets, and of those whose handshake is not finished."""
        unfinished = (descriptor for _, descriptor in self._handshakes.values())
        return [*(listening.fileno() for listening in self.sockets), *unfinished]

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                logger.error("connection not accepted; trying again in %s s  reason=%s", _PAUSE_S, error.strerror)
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE_S, self._resume, listening)
                return
            client.setblocking(False)
            if len(self._handshakes) >= TLS_HANDSHAKES_MAX:
                self._drop_oldest()
            task = self._loop.create_task(self._serve(client, tcp_url("tcp", *address[:2])[6:]))
            self._handshakes[task] = client, client.fileno()
            task.add_done_callback(self._finished)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self.sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _drop_oldest(self) -> None:
        """End the oldest handshake: one of a client that means it takes less time than many others need to begin."""
        oldest = next(iter(self._handshakes))
        oldest.cancel()
        self._finished(oldest)
        if self._loop.time() - self._reported_s > _REPORT_S:
            self._reported_s = self._loop.time()
            logger.warning("too many unfinished TLS handshakes; the oldest are dropped  limit=%s", TLS_HANDSHAKES_MAX)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        """Forget a handshake, and close its socket unless that belongs to a connection by now."""
        found = self._handshakes.pop(task, None)
        if found is not None:
            client, _ = found
            if client.fileno() >= 0:
                self._loop.remove_reader(client)
                client.close()

    async def _serve(self, client: socket.socket, address: str) -> None:
        """Bring a connection from its first bytes to its protocol; nobody waits for this task."""
        first, completed = b"", False
        try:
            async with asyncio.timeout(self._handshake_s):
                first = await self._first_bytes(client)
                if first and first[0] == _TLS_HANDSHAKE:
                    completed = await self._shake_hands(client, address)
                elif first:
                    await self._refuse(client, address, first)
        except TimeoutError:
            logger.info("TLS handshake timed out  client=%s seconds=%s", address, self._handshake_s)
        except OSError as error:
            reason = error if str(error) else "the client closed the connection"
            logger.info("TLS handshake failed  client=%s reason=%s", address, reason)
        finally:
            self._counts.completed += completed
            self._counts.failed += bool(first) and not completed  # one that sends nothing only looks who is there

    async def _first_bytes(self, client: socket.socket) -> bytes:
        """Wait for the first bytes of a client, and leave them where they are; empty if it has gone."""
        arrived: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(client, _resolve, arrived)
        try:
            await arrived
        finally:
            if client.fileno() >= 0:
                self._loop.remove_reader(client)
        return client.recv(_PEEKED_BYTES, socket.MSG_PEEK)

    async def _shake_hands(self, client: socket.socket, address: str) -> bool:
        """Do the handshake; whether the connection is its protocol's now. A client is told of a failure."""
        attempt = HandshakeAttempt()
        attempt.begin()
        given = socket.socket(fileno=client.detach())  # which is the connection's from now on
        connecting = self._loop.create_task(
            self._loop.connect_accepted_socket(
                self._factory, given, ssl=self._context(), ssl_handshake_timeout=self._handshake_s
            )
        )
        try:
            ends: set[asyncio.Future[Any]] = {connecting, attempt.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if attempt.failure.done():
                logger.info("TLS handshake failed  client=%s reason=%s", address, attempt.failure.result())
                await asyncio.wait({connecting}, timeout=_LINGER_S)
        finally:
            connecting.cancel()
            outcome = (await asyncio.gather(connecting, return_exceptions=True))[0]
        if isinstance(outcome, OSError) and not attempt.failure.done():
            raise outcome
        return not isinstance(outcome, BaseException)

    async def _refuse(self, client: socket.socket, address: str, first: bytes) -> None:
        """Answer a client that speaks no TLS, and read what it has sent, or the system would reset the connection."""
        logger.info("connection refused; the client speaks no TLS  client=%s", address)
        await self._loop.sock_sendall(client, self._plain_answer(first))
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while await self._loop.sock_recv(client, 1 << 16):
                    pass


def tls_listener(
    loop: asyncio.AbstractEventLoop,
    certificates: "TlsCertificates | None",
    protocol: str,
    factory: ProtocolFactory,
    plain_answer: PlainAnswer,
) -> TlsListener:
    """Make a listener for a protocol, named as in ALPN."""
    if certificates is None:
        raise InvalidArgument("an address with TLS needs tls_certificate")
    seconds, counts = certificates.settings.handshake_seconds, certificates.handshakes
    return TlsListener(loop, partial(certificates.context, protocol), seconds, counts, factory, plain_answer)


def stop_accepting(server: asyncio.Server | TlsListener) -> None:
    """Accept no new connections, with TLS or without; those that it has accepted, and their handshakes, go on."""
    if isinstance(server, TlsListener):
        server.stop_accepting()
    elif type(server) is asyncio.Server:
        # It drops what it has accepted in this loop turn if it is closed before the next; uvloop's server does not.
        loop = server.get_loop()
        for listening in server.sockets:
            loop.remove_reader(listening.fileno())
        loop.call_soon(loop.call_soon, server.close)
    else:
        server.close()


def server_descriptors(server: asyncio.Server | TlsListener) -> list[int]:
    """The file descriptors of the sockets of a server, with TLS or without."""
    if isinstance(server, TlsListener):
        return server.descriptors()
    return [listening.fileno() for listening in server.sockets]


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
