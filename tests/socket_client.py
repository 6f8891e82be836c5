"""A client of the broker's WebSocket that uses nothing of Headrace."""

import base64
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
from tests.http_client import WAIT_S, HttpClient

JSON, MESSAGE_PACK = "headrace.json", "headrace.msgpack"


class SocketClient:
    """A WebSocket: asks, and keeps what is pushed meanwhile."""

    def __init__(
        self, url: str, subprotocol: str = JSON, *, query: str = "", token: str = "", tls: Any = None, **headers: str
    ) -> None:
        from websockets.sync.client import connect

        offered = [subprotocol]
        if token:
            offered.append("headrace.bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("="))
        opening = connect(
            f"ws{url.removeprefix('http')}/v1/socket{query}",
            subprotocols=offered,  # type: ignore[arg-type]
            additional_headers={name.replace("_", "-"): text for name, text in headers.items()},
            compression=None,
            ssl=tls,
            max_size=None,
            close_timeout=WAIT_S,
        )
        self.connection = opening.__enter__()  # closed by its own method
        self.pushed: deque[Any] = deque()
        self._is_json = subprotocol == JSON
        self._number = 0

    def __enter__(self) -> "SocketClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    def send(self, request: str, messages: Any = None, /, **fields: Any) -> int:
        """Ask without waiting; returns the id."""
        self._number += 1
        frame = {"id": self._number, "request": request, "fields": fields}
        frame |= {} if messages is None else {"messages": messages}
        self.connection.send(json.dumps(frame) if self._is_json else msgspec.msgpack.encode(frame))
        return self._number

    def receive(self) -> Any:
        """The next frame, whatever it is."""
        received = self.connection.recv(WAIT_S)
        return json.loads(received) if self._is_json else msgspec.msgpack.decode(received)  # type: ignore[arg-type]

    def answer(self, number: int) -> Any:
        """Wait for the frame that answers a request."""
        while True:
            frame = self.receive()
            if frame.get("id") == number:
                return frame
            assert "push" in frame, frame
            self.pushed.append(frame)

    def ask(self, request: str, messages: Any = None, /, **fields: Any) -> Any:
        """Ask, and wait for the whole answer, which is no problem."""
        frame = self.answer(self.send(request, messages, **fields))
        assert "problem" not in frame, frame
        return frame

    def problem(self, request: str, messages: Any = None, /, **fields: Any) -> str:
        """Ask what is refused; returns the code."""
        return str(self.answer(self.send(request, messages, **fields))["problem"]["code"])

    def push(self, kind: str) -> Any:
        """Wait for what the broker tells unasked."""
        while True:
            frame = self.pushed.popleft() if self.pushed else self.receive()
            if frame.get("push") == kind:
                return frame

    def take(self, kind: str, count: int) -> list[Any]:
        """Wait for so many messages of pushes."""
        found: list[Any] = []
        while len(found) < count:
            found += self.push(kind)["messages"]
        return found


def handshake(url: str, **headers: str | None) -> bytes:
    """A request for a WebSocket; None leaves a header out."""
    key = base64.b64encode(os.urandom(16)).decode()
    given: dict[str, str | None] = {
        "Host": url.removeprefix("http://"), "Connection": "Upgrade", "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key, "Sec-WebSocket-Protocol": JSON,
    }  # fmt: skip
    given |= {name.replace("_", "-"): text for name, text in headers.items()}
    lines = [f"{name}: {text}" for name, text in given.items() if text is not None]
    return "\r\n".join(["GET /v1/socket HTTP/1.1", *lines, "", ""]).encode()


def raw_socket(url: str, subprotocol: str = JSON) -> socket.socket:
    """A connection after the handshake, to send whatever bytes there are."""
    client = HttpClient(url)
    end = socket.create_connection((client.host, client.port), timeout=WAIT_S)
    end.sendall(handshake(url, Sec_WebSocket_Protocol=subprotocol))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += end.recv(1)
    assert head.startswith(b"HTTP/1.1 101 "), head
    return end


def raw_frame(opcode: int, data: bytes, *, fin: bool = True, masked: bool = True, length: int | None = None) -> bytes:
    """A frame by hand, perhaps a wrong one."""
    length = len(data) if length is None else length
    mask = 0x80 if masked else 0
    head = bytes([(0x80 if fin else 0) | opcode])
    head += struct.pack("!BQ", mask | 127, length) if length > 125 else bytes([mask | length])
    return head + (b"\0\0\0\0" if masked else b"") + data


def close_code(end: socket.socket, skip: Callable[[int], bool] = lambda opcode: opcode != 8) -> int:
    """Wait for the frame that closes the connection; returns its code."""
    received = bytearray()

    def take(count: int) -> bytes:
        while len(received) < count:
            part = end.recv(1 << 16)
            assert part, "the connection was closed without a frame"
            received.extend(part)
        found = bytes(received[:count])
        del received[:count]
        return found

    while True:
        opcode, length = take(2)
        if length == 126:
            length = int.from_bytes(take(2), "big")
        elif length == 127:
            length = int.from_bytes(take(8), "big")
        content = take(length)
        if not skip(opcode & 15):
            return int.from_bytes(content[:2], "big")
