"""Fairness: the latency of one tenant while another floods the broker, beside a control.

In the control the same flood goes to a server that does nothing but receive, so it takes about as much of the machine,
and nothing of the broker.
"""

import asyncio
import contextlib
import itertools
import select
import socket
import time
from multiprocessing.context import SpawnProcess
from typing import Any

from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Benchmark, Sample, Subject, check, percentile
from headrace.bench.processes import start
from headrace.client._async.connecting import connect_async
from headrace.client._sync.connecting import connect
from headrace.model.batch import Columns, encode
from headrace.model.requests import Publish
from headrace.wire.frames import frame
from headrace.wire.native import Hello, Kind

CONNECTIONS = 4
PACE_S = 0.001
"""A publish begins so long after the last one was acknowledged."""
_SIZE = 100
_HOST = "127.0.0.1"
_WARM_UP = 20
_FLOOD_S = 1.0
"""How long the flood lasts before anything is measured."""
_RECEIVED_BYTES = 1 << 20
_OPERATIONS_MAX = 5_000


def fairness_benchmarks() -> list[Benchmark]:
    """The latency of single publishes of one tenant, while another sends batches or single messages."""
    return [
        Benchmark(
            {f"fairness_{name}_p99_ms": percentile(99, "ms"), f"fairness_{name}_p50_ms": percentile(50, "ms")},
            [flooded(messages, is_control=False), flooded(messages, is_control=True)],
            {
                "flood": f"{CONNECTIONS} connections of one process, requests of {messages} messages of {_SIZE} bytes, "
                "as fast as they are taken",
                "pace_s": PACE_S,
            },
            None,
            _OPERATIONS_MAX,
        )
        for name, messages in (("batches", 1000), ("singles", 1))
    ]


def flooded(messages: int, *, is_control: bool) -> Subject:
    """Publish for one tenant while another floods the same broker, or in the control a server that does nothing."""
    node, numbers = HeadraceNode(), itertools.count()
    processes: list[SpawnProcess] = []

    def prepare(place: str) -> None:
        node.start(place, synced=False)
        try:
            port = node.port
            if is_control:
                with socket.create_server((_HOST, 0)) as listening:
                    port = listening.getsockname()[1]
                processes.append(start(discard_everything, port))
            _make_topics(node.address)
            processes.append(start(flood, port, messages))
            time.sleep(_FLOOD_S)
        except BaseException:
            finish()
            raise

    def finish() -> None:
        while processes:
            process = processes.pop()
            process.terminate()
            process.join()
        node.stop()

    def sample(_: str, count: int) -> Sample:
        for process in processes:
            check(process.is_alive(), "the flood has ended")
        return run_async(_publish_paced(node.address, next(numbers), count))

    params: dict[str, Any] = {
        "api": "AsyncBus.publish awaited, tenant victim",
        "durability": "written: acknowledged once it is with the operating system",
        "flooded": "a server that reads and does nothing" if is_control else "the broker, tenant flood",
    }
    name = "control" if is_control else "headrace"
    return Subject(name, sample, params, 1, prepare, finish)


def _make_topics(address: str) -> None:
    with connect(address, tenant="flood") as bus:
        settings = {"durability": "written", "retain_bytes": 64 << 20, "segment_bytes": 16 << 20}
        for number in range(CONNECTIONS):
            bus.create_topic(f"flood-{number}", exist_ok=True, **settings)


async def _publish_paced(address: str, number: int, count: int) -> Sample:
    """Publish one message after the other, and measure how long each takes."""
    topic, latencies = f"paced-{number}", []
    async with await connect_async(address, tenant="victim") as bus:
        await bus.create_topic(topic, durability="written")
        begun = time.perf_counter()
        for at in range(count + _WARM_UP):
            before = time.perf_counter()
            receipt = await bus.publish(topic, b"x" * _SIZE, durability="written")
            latencies.append(time.perf_counter() - before)
            check(receipt.offset == at, "a message has another offset than its number")
            await asyncio.sleep(PACE_S)
        took = time.perf_counter() - begun
        await bus.delete_topic(topic)
    return Sample(took, latencies[_WARM_UP:])


def flood(port: int, messages: int) -> None:
    """Send requests over several connections as fast as they are taken; answers are read and thrown away."""
    batch = encode(Columns([b"y" * _SIZE] * messages), time.time_ns() // 1000).data
    poller = select.poll()
    sending: dict[int, tuple[socket.socket, memoryview]] = {}
    for number in range(CONNECTIONS):
        connection = _connected(port)
        hello = frame(int(Kind.HELLO), 1, Hello(client="flood", name="flood", tenant="flood"))
        connection.sendall(hello)
        request = frame(int(Kind.PUBLISH), 2, Publish(f"flood-{number}", 0, durability=1), len(batch)) + batch
        requests = memoryview(bytes(request) * max(1, (256 << 10) // len(request)))
        connection.setblocking(False)
        sending[connection.fileno()] = connection, requests
        poller.register(connection, select.POLLIN | select.POLLOUT)
    left = {descriptor: memoryview(b"") for descriptor in sending}
    while True:
        for descriptor, events in poller.poll():
            connection, requests = sending[descriptor]
            with contextlib.suppress(BlockingIOError):
                if events & select.POLLIN and not connection.recv(_RECEIVED_BYTES):
                    return
                if events & select.POLLOUT:
                    left[descriptor] = left[descriptor] or requests
                    left[descriptor] = left[descriptor][connection.send(left[descriptor]) :]


def discard_everything(port: int) -> None:
    """Receive whatever comes on any number of connections, and answer nothing."""

    class Discarding(asyncio.BufferedProtocol):
        buffer = bytearray(_RECEIVED_BYTES)

        def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
            return self.buffer

        def buffer_updated(self, count: int) -> None:
            """Forget it."""

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(Discarding, _HOST, port)
        await server.serve_forever()

    run_async(serve())


def _connected(port: int) -> socket.socket:
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((_HOST, port))
        time.sleep(0.05)
    raise ConnectionRefusedError(f"nobody listens on port {port}")
