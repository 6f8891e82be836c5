"""A TCP proxy in a process of its own, whose links a test cuts: silently, with resets, or in one direction only.

It is the network between clients, nodes and the shared store where network namespaces cannot be had. A cut link holds
the bytes that it was given and delivers them after it is healed, as TCP does after packets were lost.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.fork_server import PATIENCE_S, Child, Nursery

PASS, HOLD, RESET = "pass", "hold", "reset"
"""What a link does: deliver; deliver nothing and leave connections open; reset connections and refuse new ones."""
REQUESTS, ANSWERS, BOTH = "requests", "answers", "both"
"""Which direction a link holds, as its client sees it."""
_CHUNK_BYTES = 1 << 16


class Link:
    """In the proxy's process: one listening port, its target, and the connections through it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._open = {REQUESTS: asyncio.Event(), ANSWERS: asyncio.Event()}
        for event in self._open.values():
            event.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()

    def change(self, mode: str, direction: str) -> None:
        """Change what the link does with present and later connections."""
        self._refuses = mode == RESET
        for name, event in self._open.items():
            if mode == HOLD and direction in (name, BOTH):
                event.clear()
            else:
                event.set()
        if mode == RESET:
            for writer in self._writers:
                _reset(writer)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side ends it."""
        if self._refuses:
            return _reset(writer)
        self._writers.add(writer)
        try:
            await self._open[REQUESTS].wait()  # its SYN is lost, too
            with contextlib.suppress(OSError):
                other_reader, other_writer = await asyncio.open_connection(*self._target)
                self._writers.add(other_writer)
                try:
                    await asyncio.gather(
                        self._copy(reader, other_writer, REQUESTS), self._copy(other_reader, writer, ANSWERS)
                    )
                finally:
                    self._writers.discard(other_writer)
                    _reset(other_writer)
        finally:
            self._writers.discard(writer)
            _reset(writer)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._open[direction].wait()
            writer.write(data)
            await writer.drain()
        await self._open[direction].wait()  # the end of a connection does not get through a cut, either
        raise ConnectionError("one side ended the connection")


def _reset(writer: asyncio.StreamWriter) -> None:
    transport: Any = writer.transport
    transport.abort()


async def _run(control: str) -> None:
    links: dict[int, Link] = {}
    servers: list[asyncio.Server] = []

    async def command(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            asked = json.loads(line)
            if "target" in asked:
                link = links[asked["port"]] = Link(tuple(asked["target"]))
                servers.append(await asyncio.start_server(link.serve, "127.0.0.1", asked["port"]))
            else:
                links[asked["port"]].change(asked["mode"], asked["direction"])
            writer.write(b"done\n")
            await writer.drain()
        writer.close()

    await asyncio.start_unix_server(command, control)
    await asyncio.Event().wait()


def serve(control: str) -> None:
    """In the proxy's process: be it."""
    asyncio.run(_run(control))


class TcpProxy:
    """The test's end of the proxy: adds links and cuts them."""

    def __init__(self, nursery: Nursery, directory: Path) -> None:
        path = directory / "proxy.sock"
        self._process: Child = nursery.start("proxy", "tests.faults.tcp_proxy:serve", str(path))
        deadline = time.monotonic() + PATIENCE_S
        self._socket = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self._socket.connect(str(path))
                break
            except OSError:
                self._process.check()
                assert time.monotonic() < deadline, f"the proxy does not start:\n{self._process.doing()}"
                time.sleep(0.005)

    def add(self, port: int, host: str, target_port: int) -> None:
        """Forward connections to a port of this machine to a server."""
        self._ask({"port": port, "target": [host, target_port]})

    def change(self, port: int, mode: str, direction: str = BOTH) -> None:
        """Cut or heal the link of a port."""
        self._ask({"port": port, "mode": mode, "direction": direction})

    @contextlib.contextmanager
    def cut(self, port: int, mode: str = HOLD, direction: str = BOTH) -> Iterator[None]:
        """Cut the link of a port for a block."""
        self.change(port, mode, direction)
        try:
            yield
        finally:
            self.change(port, PASS)

    def close(self) -> None:
        """Hang up; the process ends with the nursery."""
        self._socket.close()

    def _ask(self, command: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(command).encode() + b"\n")
        answer = self._socket.recv(64)
        assert answer == b"done\n", f"the proxy is gone:\n{self._process.said()}"
