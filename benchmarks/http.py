"""Publishing and streaming over HTTP, beside RabbitMQ's management API and beside a bare application on uvicorn."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

from benchmarks.broker_rabbitmq import RabbitNode, blocking
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Benchmark, Figure, Sample, Subject, Unavailable, check, percentile, rate, uses

CONNECTIONS = 32
BATCH_CONNECTIONS = 4
BATCH = 1000
READERS = 200
PUBLISHED_PER_SECOND = 1000
VALUE = '{"id": 1, "text": "' + "x" * 80 + '"}'
_HOST = "127.0.0.1"
_READY_S = 30
_PATH = "/v1/topics/bench/messages"
_RABBIT_PATH = "/api/exchanges/%2F/amq.default/publish"
_BARE = f"""
import asyncio, uvicorn
async def application(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({{"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"58")]}})
    await send({{"type": "http.response.body", "body": b"x" * 58}})
async def main():
    config = uvicorn.Config(application, host="{_HOST}", port=0, http="httptools", log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await task
import uvloop
uvloop.run(main())
"""


class RabbitOverHttp:
    """RabbitMQ's management API, which publishes a message for each request."""

    params: ClassVar[dict[str, str]] = {
        "durability": "a persistent message in a durable classic queue, answered once it is routed, before it is synced"
    }

    def __init__(self) -> None:
        self._node = RabbitNode(streams=False, management=True)

    def start(self, directory: str) -> None:
        """Start it, with a queue."""
        self._node.start(directory, synced=True)
        connection = blocking(self._node.port)
        connection.channel().queue_declare("bench", durable=True)
        connection.close()

    def sample(self, _: str, count: int) -> Sample:
        """Publish so many messages."""
        body = {
            "properties": {"delivery_mode": 2},
            "routing_key": "bench",
            "payload": VALUE,
            "payload_encoding": "string",
        }
        credentials = f"Authorization: Basic {b64encode(b'guest:guest').decode()}\r\n"
        request = _request(json.dumps(body).encode(), "application/json", _RABBIT_PATH, credentials)
        return Sample(run_async(_send_all(self._node.http_port, request, count, CONNECTIONS, b"200")))

    def stop(self) -> None:
        """End it."""
        self._node.stop()


class ServerProcess:
    """A server of HTTP in a process of its own."""

    def __init__(self, make_command: Callable[[str], list[str]]) -> None:
        self._make_command = make_command
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self, directory: str) -> None:
        """Start it, with its data in a directory."""
        for package in ("uvicorn", "httptools"):
            if find_spec(package) is None:
                raise Unavailable(f"{package} is not installed: pip install 'headrace[http]'")
        self._process = subprocess.Popen(self._make_command(directory), stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        check(bool(line), "the server does not start")
        found = json.loads(line)
        urls = found.get("addresses", []) if isinstance(found, dict) else [f"http://{_HOST}:{found}"]
        self.port = int(next((url for url in urls if url.startswith("http:")), ":0").rpartition(":")[2])
        uses(self)

    def stop(self) -> None:
        """End it."""
        assert self._process is not None
        self.wake()
        self._process.kill()
        self._process.communicate()

    def sleep(self) -> None:
        """Stand still while another is measured."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def memory_mb(self) -> float:
        """The memory of the process."""
        assert self._process is not None
        with open(f"/proc/{self._process.pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _headrace(directory: str, *more: str) -> list[str]:
    data = os.path.join(directory, "data")
    listen = more or ("--listen", f"http://{_HOST}:0")
    return [sys.executable, "-m", "headrace", "serve", "--json", "--log-level", "error", "--data", data, *listen]


def _bare(_: str) -> list[str]:
    return [sys.executable, "-c", _BARE]


class RequestSender(asyncio.Protocol):
    """Sends the same request again and again on one connection, each after the answer to the last."""

    def __init__(self, request: bytes, left: list[int], status: bytes) -> None:
        self._request = request
        self._left = left
        self._status = b"HTTP/1.1 " + status
        self._received = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Send the first request."""
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """Send the next request when the answer is whole."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        at = head.lower().index(b"content-length: ") + 16
        if len(body) < int(head[at:].split(b"\r\n")[0]):
            return
        if not head.startswith(self._status):
            self.ended.set_exception(RuntimeError(self._received.decode()[:500]))
            return
        self._received = b""
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell that the connection is over."""
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the server closed the connection"))

    def _send(self) -> None:
        if self._left[0] > 0:
            self._left[0] -= 1
            self._transport.write(self._request)
        elif not self.ended.done():
            self.ended.set_result(None)
            self._transport.close()


def _request(body: bytes, content_type: str, path: str = _PATH, more: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {_HOST}\r\n{more}"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _send_all(port: int, request: bytes, count: int, connections: int, status: bytes = b"201") -> float:
    """Send a request so many times over some connections; returns the seconds."""
    loop, left = asyncio.get_running_loop(), [count]
    started = time.perf_counter()
    made = [
        await loop.create_connection(lambda: RequestSender(request, left, status), _HOST, port)
        for _ in range(min(connections, count))
    ]
    await asyncio.gather(*(protocol.ended for _, protocol in made))
    return time.perf_counter() - started


def _single(server: ServerProcess) -> Callable[[str, int], Sample]:
    request = _request(f'{{"value": {VALUE}}}'.encode(), "application/json")

    def sample(_: str, count: int) -> Sample:
        return Sample(run_async(_send_all(server.port, request, count, CONNECTIONS)))

    return sample


def _batches(server: ServerProcess) -> Callable[[str, int], Sample]:
    lines = "\n".join([f'{{"value": {VALUE}}}'] * BATCH).encode()
    request = _request(lines, "application/x-ndjson")

    def sample(_: str, count: int) -> Sample:
        return Sample(run_async(_send_all(server.port, request, count // BATCH, BATCH_CONNECTIONS)))

    return sample


class StreamReader(asyncio.Protocol):
    """Reads a stream, counts its events, and takes the lag of the last one that each reading brings."""

    def __init__(self, lags_s: list[float]) -> None:
        self._lags_s = lags_s
        self.events = 0

    def connection_made(self, transport: Any) -> None:
        """Ask for the stream."""
        self.transport = transport
        transport.write(f"GET {_PATH} HTTP/1.1\r\nHost: {_HOST}\r\nAccept: text/event-stream\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        """Count events."""
        self.events += data.count(b"\ndata: ")
        at = data.rfind(b'"timestamp":')
        if at > 0:
            stamp = data[at + 12 : at + 28]
            if stamp.isdigit():
                self._lags_s.append(time.time() - int(stamp) / 1e6)


async def _fan_out(port: int, count: int, readers: int) -> Sample:
    loop = asyncio.get_running_loop()
    first = _request(b'{"value": 0}', "application/json")
    await _send_all(port, first, 1, 1)
    lags_s: list[float] = []
    made = [await loop.create_connection(lambda: StreamReader(lags_s), _HOST, port) for _ in range(readers)]
    await asyncio.sleep(0.5)
    portion = 20
    body = "\n".join([f'{{"value": {VALUE}}}'] * portion).encode()
    request = _request(body, "application/x-ndjson")
    started = time.perf_counter()
    for number in range(1, count // portion + 1):
        await _send_all(port, request, 1, 1)
        await asyncio.sleep(max(started + number * portion / PUBLISHED_PER_SECOND - time.perf_counter(), 0))
    wanted, deadline_s = count // portion * portion, time.perf_counter() + 30
    while any(protocol.events < wanted for _, protocol in made) and time.perf_counter() < deadline_s:
        await asyncio.sleep(0.01)
    taken_s = time.perf_counter() - started
    for transport, protocol in made:
        transport.abort()
        check(protocol.events == wanted, f"a reader got {protocol.events} of {wanted} messages")
    return Sample(taken_s, lags_s)


class MemoryComparison:
    """Two brokers, one of them with HTTP that has served requests: the difference is what the gateway takes."""

    def __init__(self) -> None:
        self._with = ServerProcess(_headrace)
        self._without = ServerProcess(lambda place: _headrace(place, "--listen", f"headrace://{_HOST}:0"))

    def sample(self, directory: str, _: int) -> Sample:
        """Start both, publish some over HTTP, and compare."""
        started = time.perf_counter()
        places = [os.path.join(directory, name) for name in ("with", "without")]
        for place in places:
            os.mkdir(place)
        self._without.start(places[1])
        try:
            plain_mb = self._without.memory_mb()
        finally:
            self._without.stop()
        self._with.start(places[0])
        try:
            request = _request(b'{"value": 0}', "application/json")
            run_async(_send_all(self._with.port, request, 2000, CONNECTIONS))
            served_mb = self._with.memory_mb()
        finally:
            self._with.stop()
        return Sample(time.perf_counter() - started, amount=served_mb - plain_mb)


def _subject(
    name: str,
    command: Callable[[str], list[str]],
    sample: Callable[[ServerProcess], Callable[[str, int], Sample]],
    params: dict[str, Any],
    step: int = 1,
) -> Subject:
    server = ServerProcess(command)
    return Subject(name, sample(server), params, step, server.start, server.stop)


def benchmarks(readers: int = READERS, streamed: int = 2 * PUBLISHED_PER_SECOND) -> list[Benchmark]:
    """All benchmarks of this group."""
    requests = Figure("requests/s", True, lambda count, taken: count / taken.seconds)
    memory, rabbit = MemoryComparison(), RabbitOverHttp()
    synced, answered = {"durability": "synced"}, {"durability": "none: it answers 201"}
    fan_out = _subject(
        "headrace",
        _headrace,
        lambda server: lambda _, count: run_async(_fan_out(server.port, count, readers)),
        synced,
        step=20,
    )
    return [
        Benchmark(
            {"publish_single_rps": requests},
            [
                _subject("headrace", _headrace, _single, synced),
                _subject("bare_uvicorn", _bare, _single, answered),
                Subject("rabbitmq", rabbit.sample, rabbit.params, 1, rabbit.start, rabbit.stop),
            ],
            {"connections": CONNECTIONS, "size": len(VALUE)},
        ),
        Benchmark(
            {"publish_batch": rate()},
            [_subject("headrace", _headrace, _batches, synced, BATCH)],
            {"connections": BATCH_CONNECTIONS, "batch": BATCH, "size": len(VALUE)},
        ),
        Benchmark(
            {"sse_fanout_lag_p50_ms": percentile(50, "ms"), "sse_fanout_lag_p99_ms": percentile(99, "ms")},
            [fan_out],
            {"readers": readers, "published_per_second": PUBLISHED_PER_SECOND, "size": len(VALUE)},
            operations=streamed,
        ),
        Benchmark(
            {"http_rss_mb": Figure("MB", False, lambda _, taken: taken.amount)},
            [Subject("headrace", memory.sample, synced)],
            {"requests": 2000},
            operations=1,
        ),
    ]
