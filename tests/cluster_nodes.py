"""Nodes of a cluster as clients see them, without a cluster: each answers as it is told."""

import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

from headrace import errors
from headrace.model.requests import BrokerInfo
from headrace.wire.frames import Frame, Frames, frame
from headrace.wire.native import Hello, Kind, Pong, Welcome, decode, failure

INFO = BrokerInfo("scripted", "0", 1, 2, 3, 4, 5, 6, 7, "nowhere")
Answer = Callable[[socket.socket, Frame], None]


class ScriptedNode:
    """Listens, and answers requests by their kinds; `serve` and `follow` are the two roles of a node."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        nodes: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self.listening = socket.create_server((host, port))
        self.port: int = self.listening.getsockname()[1]
        self.url = f"{'headraces' if tls else 'headrace'}://{host}:{self.port}"
        self.nodes = list(nodes)
        self.hellos: list[Hello] = []
        self.asked: list[Kind] = []
        self.connections: list[socket.socket] = []
        self.says: dict[Kind, Answer] = {}
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.serve()
        self._threads[0].start()

    def serve(self) -> None:
        """Answer as a node that serves."""
        self.says = {
            Kind.HELLO: lambda to, ask: self.answer(
                to, ask, Welcome(1, "scripted", "b", 0, 5000, 1 << 25, nodes=self.nodes)
            ),
            Kind.PING: lambda to, ask: self.answer(to, ask, Pong(0)),
            Kind.INFO: lambda to, ask: self.answer(to, ask, INFO),
        }

    def follow(self, *owner: object) -> None:
        """Answer as a node that follows another, which these URLs name."""
        self.says = {Kind.HELLO: lambda to, ask: self.refuse(to, ask, not_serving(*owner))}

    def answer(self, to: socket.socket, ask: Frame, head: Any, kind: Kind = Kind.ANSWER) -> None:
        to.sendall(bytes(frame(kind, ask.correlation, head)))

    def refuse(self, to: socket.socket, ask: Frame, error: errors.HeadraceError) -> None:
        self.answer(to, ask, failure(error), Kind.FAILURE)

    def hang_up(self) -> None:
        """Close all connections."""
        connections, self.connections = self.connections, []
        for connection in connections:
            _shut(connection)

    def close(self) -> None:
        """Listen no more, and close all connections: afterwards the port refuses."""
        _shut(self.listening)
        self.listening.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            self.connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        frames = Frames()
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            while count := connection.recv_into(frames.buffer()):
                for come in frames.received(count):
                    self.asked.append(Kind(come.kind))
                    if come.kind == Kind.HELLO:
                        self.hellos.append(decode(come.kind, come.head))
                    if (say := self.says.get(Kind(come.kind))) is not None:
                        say(connection, come)
        except OSError:
            return
        finally:
            connection.close()


def not_serving(*owner: object) -> errors.NotServing:
    """The answer of a node that follows."""
    return errors.NotServing("this node follows", addresses=list(owner), epoch=7)


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # gone already
