"""The native protocol over a bare socket, for clients that do not behave."""

import contextlib
import socket
from collections import deque
from typing import Any

from headrace.model.batch import Columns, encode
from headrace.wire.frames import Frames, frame
from headrace.wire.native import Hello, Kind, decode_answer

PATIENCE_S = 60.0


class RawClient:
    """A connection that does what a test says, and nothing else: no pings, no reading."""

    def __init__(self, port: int, *, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", port))
        self._frames = Frames()
        self._come: deque[tuple[int, int, bytes, int]] = deque()
        self._asked = 0
        self.unsent = memoryview(b"")
        """What the other side has not taken of what was to be sent."""

    def hello(self) -> None:
        """Say hello, and wait for the answer."""
        self.ask(Kind.HELLO, Hello(name="raw"))

    def ask(self, kind: Kind, head: Any, body: bytes | bytearray = b"") -> Any:
        """A request and its answer, while nothing else is under way."""
        number = self.tell(kind, head, body)
        while True:
            come, correlation, content, _ = self.receive()
            if correlation == number and come in (Kind.ANSWER, Kind.FAILURE):
                return decode_answer(kind, come, memoryview(content))

    def tell(self, kind: Kind, head: Any, body: bytes | bytearray = b"") -> int:
        """Send a frame whole; returns its number."""
        self._asked += 1
        self.socket.sendall(bytes(frame(kind, self._asked, head, len(body))) + body)
        return self._asked

    def push(self, kind: Kind, head: Any, body: bytes | bytearray = b"") -> bool:
        """Send a frame if the other side takes it; whether it took all of it. Never waits."""
        if not self.unsent:
            self._asked += 1
            self.unsent = memoryview(bytes(frame(kind, self._asked, head, len(body))) + body)
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self.unsent = self.unsent[self.socket.send(self.unsent) :]
        self.socket.settimeout(PATIENCE_S)
        return not self.unsent

    def receive(self) -> tuple[int, int, bytes, int]:
        """Kind, correlation, head and the body's length of the next frame."""
        while not self._come:
            count = self.socket.recv_into(self._frames.buffer())
            if not count:
                raise ConnectionError("the broker closed the connection")
            self._come.extend(
                (come.kind, come.correlation, bytes(come.head), len(come.body)) for come in self._frames.received(count)
            )
        return self._come.popleft()

    def close(self) -> None:
        """End it at once."""
        self.socket.close()


def batch_of(*values: bytes) -> bytes:
    """A batch without a producer, as it is sent."""
    return bytes(encode(Columns(list(values)), 1).data)
