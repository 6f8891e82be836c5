"""A broker that serves HTTP, and clients of it that use nothing of Headrace."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.known import ENVIRONMENT

from headrace.gateways.http.installation import missing_packages
from headrace.server import EmbeddedServer

JSON = {"Content-Type": "application/json"}
NDJSON = {"Content-Type": "application/x-ndjson"}
EVENTS = {"Accept": "text/event-stream"}
WAIT_S = 30.0

needs_http = pytest.mark.skipif(
    bool(missing_packages()), reason=f"the extra http is not installed: there is no {', '.join(missing_packages())}"
)


class Reply(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a problem."""
        assert self.headers["content-type"] == "application/problem+json", self
        problem = self.json
        assert problem["status"] == self.status
        assert problem["type"].endswith(f"#{problem['code']}")
        assert isinstance(problem["retryable"], bool)
        return str(problem["code"])


class HttpClient:
    """A client on one connection."""

    def __init__(self, url: str) -> None:
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self.url = url
        self._connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """Send a request; a body that is not bytes is sent as JSON."""
        given = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            given = {**JSON, **given}
        self._connection.request(method, path, body, given)
        response = self._connection.getresponse()
        content = response.read()
        return Reply(response.status, {name.lower(): text for name, text in response.getheaders()}, content)

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        return self.ask("POST", path, body, {name.replace("_", "-"): text for name, text in headers.items()})

    def publish(self, topic: str, *values: Any) -> Reply:
        """Publish values as JSON, and expect that they arrive."""
        reply = self.post(f"/v1/topics/{topic}/messages", [{"value": value} for value in values])
        assert reply.status in (201, 202), reply
        return reply

    def raw(self, content: bytes, *, closes: bool = True) -> bytes:
        """Send bytes on a connection of their own; returns what comes until the server closes it."""
        with socket.create_connection((self.host, self.port), timeout=WAIT_S) as end:
            end.sendall(content)
            received = b""
            while part := end.recv(1 << 16):
                received += part
                if not closes and b"\r\n\r\n" in received:
                    break
            return received


class Event(NamedTuple):
    """A Server-Sent Event."""

    name: str
    id: str
    data: Any


class EventReader:
    """Reads Server-Sent Events line by line."""

    def __init__(self, url: str, path: str, **headers: str) -> None:
        client = HttpClient(url)
        self._connection = http.client.HTTPConnection(client.host, client.port, timeout=WAIT_S)
        given = {name.replace("_", "-"): text for name, text in headers.items()}
        self._connection.request("GET", path, headers={**EVENTS, **given})
        self.response = self._connection.getresponse()
        self.id = ""
        """The id of the last event, as a browser remembers it."""

    def __iter__(self) -> Iterator[Event]:
        name, data = "message", ""
        while line := self.response.readline():
            text = line.decode().rstrip("\n")
            field, _, content = text.partition(": ")
            if field == "id":
                self.id = content
            elif field == "event":
                name = content
            elif field == "data":
                data = content
            elif not text and data:
                yield Event(name, self.id, json.loads(data))
                name, data = "message", ""

    def take(self, count: int) -> list[Event]:
        """So many events."""
        events = iter(self)
        return [next(events) for _ in range(count)]

    def close(self) -> None:
        self.response.close()
        self._connection.close()


@contextmanager
def http_server(data: str | os.PathLike[str] = ":memory:", **settings: Any) -> Iterator[EmbeddedServer]:
    """A server in this process that serves HTTP at any free port."""
    server = EmbeddedServer(data, listen=["http://127.0.0.1:0", "headrace://127.0.0.1:0"], **settings)
    try:
        yield server
    finally:
        server.close()


def url_of(server: EmbeddedServer) -> str:
    """Where it serves HTTP."""
    return next(url for url in server._server.listening if url.startswith("http://"))


def native_url_of(server: EmbeddedServer) -> str:
    """Where it serves the native protocol."""
    return next(url for url in server._server.listening if url.startswith("headrace://"))


def also_http() -> dict[str, str]:
    """Settings of a server that serves HTTP besides, where that is installed."""
    return {} if missing_packages() else {"http_address": "127.0.0.1:0"}


class HttpProcess:
    """A server as a process of its own, which can be killed; it comes back at the same port."""

    def __init__(self, data: Path, *arguments: str) -> None:
        self._arguments = ["serve", "--json", "--data", str(data), *arguments]
        self._port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.start()

    def start(self) -> None:
        listen = ["--listen", f"http://127.0.0.1:{self._port}", "--listen", "headrace://127.0.0.1:0"]
        command = [sys.executable, "-m", "headrace", *self._arguments, *listen]
        environment = {name: text for name, text in ENVIRONMENT.items() if not name.startswith("HEADRACE_")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=WAIT_S)[1].decode()
        addresses = json.loads(line)["addresses"]
        self.url = next(url for url in addresses if url.startswith("http://"))
        self.native_url = next(url for url in addresses if url.startswith("headrace://"))
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(WAIT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code
