"""The simplest client of the native protocol: sends a request, waits for its answer, and keeps what else comes."""

import socket
from collections import deque
from types import TracebackType
from typing import Any

from headrace.model.request import Request
from headrace.wire.frames import Frame, Frames, frame
from headrace.wire.native import REQUESTS, Hello, Kind, Welcome, decode_answer

_KINDS = {head: kind for kind, head in REQUESTS.items()}


class NativeClient:
    """A connection to a broker, by hand."""

    def __init__(self, sock: socket.socket, timeout_s: float = 30.0) -> None:
        self.socket = sock
        sock.settimeout(timeout_s)
        self.welcome: Welcome
        self._frames = Frames()
        self._received: deque[Frame] = deque()
        self._correlation = 0

    def __enter__(self) -> "NativeClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def hello(self, name: str = "test") -> Welcome:
        """Say hello, as one must."""
        self.welcome = self.ask(Hello(client="tests", name=name))
        return self.welcome

    def send(self, request: Request[Any], body: bytes = b"") -> int:
        """Ask without waiting; returns the correlation."""
        self._correlation += 1
        self.socket.sendall(bytes(frame(_KINDS[type(request)], self._correlation, request, len(body))) + body)
        return self._correlation

    def ask(self, request: Request[Any], body: bytes = b"") -> Any:
        """Ask, and wait for the answer."""
        return self.answer(request, self.send(request, body))[0]

    def ask_for_batches(self, request: Request[Any]) -> tuple[Any, bytes]:
        """Ask, and wait for the answer and its body."""
        return self.answer(request, self.send(request))

    def receive(self) -> Frame:
        """The next frame, whatever it is."""
        if not self._received:
            self._read()
        return self._received.popleft()

    def answer(self, request: Request[Any], correlation: int) -> tuple[Any, bytes]:
        """Wait for the answer to a request that was sent, and its body."""
        seen = 0
        while True:
            while seen < len(self._received):
                found = self._received[seen]
                if found.kind in (Kind.ANSWER, Kind.FAILURE) and found.correlation in (correlation, 0):
                    del self._received[seen]
                    answer = decode_answer(_KINDS[type(request)], found.kind, found.head)
                    return answer, bytes(found.body)
                seen += 1
            self._read()

    def _read(self) -> None:
        before = len(self._received)
        while len(self._received) == before:
            count = self.socket.recv_into(self._frames.buffer())
            if not count:
                raise EOFError("the broker has closed the connection")
            for one in self._frames.received(count):
                head, body = memoryview(bytes(one.head)), memoryview(bytes(one.body))
                self._received.append(Frame(one.kind, one.correlation, head, body, lasting=True))
