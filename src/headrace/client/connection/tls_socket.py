"""TLS on a socket that one thread reads while others write, without ever blocking once the handshake is done."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence

Bytes = bytes | bytearray | memoryview

_RECEIVED_BYTES = 256 << 10
_WRITTEN_BYTES = 256 << 10
"""Encrypted at once, before the system has taken it."""
_JOINED_BYTES = 64 << 10
_RECORD_BYTES = 16 << 10
"""The largest record of TLS: parts below it are joined, so that not each is a record of its own."""


class TlsSocket:
    """Has what a connection uses of a socket. A lock that is never held for long guards the state of the encryption.

    What is encrypted is never lost: `sendmsg` keeps what the system did not take, and `unsent` tells that it does.
    """

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, server_name: str, deadline: float = float("inf")
    ) -> None:
        """Do the handshake until a time of the monotonic clock; raises OSError, of which errors of TLS are some."""
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._lock = threading.Lock()
        self._encrypted = memoryview(b"")
        """What the system has not taken yet."""
        self._received = memoryview(bytearray(_RECEIVED_BYTES))
        self._shake_hands(deadline)

    @property
    def unsent(self) -> bool:
        """Whether something is encrypted and not sent."""
        return bool(self._encrypted) or self._outgoing.pending > 0

    def fileno(self) -> int:
        """The file descriptor of the socket."""
        return self._socket.fileno()

    def settimeout(self, seconds: float | None) -> None:
        """Let calls take so long."""
        self._socket.settimeout(seconds)

    def setblocking(self, blocking: bool) -> None:
        """Let calls wait, or raise BlockingIOError."""
        self._socket.setblocking(blocking)

    def recv(self, length: int) -> bytes:
        """Receive some bytes; none if the broker sends no more."""
        buffer = memoryview(bytearray(length))
        return bytes(buffer[: self.recv_into(buffer)])

    def recv_into(self, buffer: memoryview) -> int:
        """Receive as much as there is and fits; 0 if the broker sends no more. Raises BlockingIOError."""
        while True:
            with self._lock:
                filled, ended = self._decrypt(buffer)
            if filled or ended:
                return filled
            count = self._socket.recv_into(self._received)
            if not count:
                return 0
            with self._lock:
                self._incoming.write(self._received[:count])

    def sendall(self, data: bytes) -> None:
        """Send all of it, within the time-out of the socket."""
        self.sendmsg([data])

    def sendmsg(self, parts: Sequence[Bytes]) -> int:
        """Encrypt parts, and send them; returns how many bytes were taken. Raises BlockingIOError if none can be."""
        taken = 0
        with self._lock:
            if not self._push():
                raise BlockingIOError
            for piece in _pieces(parts):
                self._tls.write(piece)
                taken += len(piece)
                if not self._push():
                    break
        return taken

    def end(self) -> None:
        """Tell the broker that nothing more comes, if it listens."""
        with self._lock:
            with contextlib.suppress(ssl.SSLError, ValueError):  # the broker need not answer, or has ended before
                self._tls.unwrap()
            self._try_push()

    def close(self) -> None:
        """Close the socket, which says nothing to the broker."""
        self._socket.close()

    def _shake_hands(self, deadline: float) -> None:
        while True:
            if deadline < float("inf"):  # for each step, as the other side may send byte by byte
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._push()
            except ssl.SSLError:
                self._try_push()  # the alert
                raise
            count = self._socket.recv_into(self._received)
            if not count:
                raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "the broker closed the connection")
            self._incoming.write(self._received[:count])
        self._push()

    def _decrypt(self, buffer: memoryview) -> tuple[int, bool]:
        """Put what was received into a buffer; returns how much that is, and whether it is the end."""
        filled = 0
        try:
            while filled < len(buffer):
                count = int(self._tls.read(len(buffer) - filled, buffer[filled:]))  # typeshed does not know it
                if not count:
                    return filled, True  # the broker has announced the end
                filled += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            return filled, True
        if self._outgoing.pending:
            self._try_push()
        return filled, False

    def _push(self) -> bool:
        """Send what is encrypted; whether that was all."""
        while True:
            if not self._encrypted:
                if not self._outgoing.pending:
                    return True
                self._encrypted = memoryview(self._outgoing.read())
            try:
                sent = self._socket.send(self._encrypted)
            except (BlockingIOError, InterruptedError):
                return False
            self._encrypted = self._encrypted[sent:]

    def _try_push(self) -> None:
        with contextlib.suppress(OSError):  # whoever reads or writes finds out that the connection is broken
            self._push()


def _pieces(parts: Sequence[Bytes]) -> Iterator[Bytes]:
    """Parts for encryption: small ones joined, large ones divided."""
    joined: list[Bytes] = []
    size = 0
    for part in parts:
        if joined and (len(part) >= _RECORD_BYTES or size + len(part) > _JOINED_BYTES):
            yield b"".join(joined)
            joined, size = [], 0
        if len(part) < _RECORD_BYTES:
            joined.append(part)
            size += len(part)
            continue
        for start in range(0, len(part), _WRITTEN_BYTES):
            yield memoryview(part)[start : start + _WRITTEN_BYTES]
    if joined:
        yield b"".join(joined)
