"""What one delivery costs a broker when one, fifty or five hundred readers wait at the end of a partition."""

import selectors
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.measure import WrongResult, check
from headrace.bench.servers import HOST
from headrace.client._sync.connecting import connect
from headrace.model.batch import Columns, encode, parse
from headrace.model.reading import StreamOpen
from headrace.model.requests import Publish
from headrace.wire.frames import Frames, Memory, frame
from headrace.wire.native import Hello, Kind, Ping

_TOPIC = "readers"
_COUNT = 20
"""Messages of a batch: so many are not gathered with others."""
_VALUE = b"x" * 32
_FILL = 400
"""Batches that are there before: an index entry comes every 64 KiB, and they take several times as much."""
_PUBLISHES = {"min": 10, "max": 100}
_DELIVERIES = 2_500
"""Of a repetition, as far as the bounds above allow."""
_REPEATS = 20
"""The one that took the least counts: others shared the processor's caches with strangers."""
_CREDIT_BYTES = 1 << 40
"""More than is ever delivered: readers that grant credit would cost the broker something else."""
_PATIENCE_S = 60.0
_MEMORY = Memory()


def measure(n: int) -> float:
    """The broker's processor time for one delivery to one of `n` readers of a partition, in microseconds.

    All readers wait when a batch is published, each on a connection of its own, and the next one is published when all
    have it. What the same broker takes to publish without readers is not counted.
    """
    publishes = min(max(_DELIVERIES // n, _PUBLISHES["min"]), _PUBLISHES["max"])
    node = HeadraceNode()
    with ExitStack() as stack:
        node.start(stack.enter_context(tempfile.TemporaryDirectory(prefix="scaling-")), synced=False)
        stack.callback(node.stop)
        with connect(node.address) as bus:
            bus.create_topic(_TOPIC, partitions=1, durability="written")
        publisher = _Client(stack.enter_context(_connected(node.port)))
        for _ in range(_FILL):
            publisher.publish()
        alone_s = min(_published(node, publisher, [], publishes) for _ in range(_REPEATS))
        readers = [_Client(stack.enter_context(_connected(node.port))) for _ in range(n)]
        for reader in readers:
            reader.open_stream(_FILL * _COUNT + _REPEATS * publishes * _COUNT)
        shared_s = min(_published(node, publisher, readers, publishes) for _ in range(_REPEATS))
        expected = _REPEATS * publishes * _COUNT
        check(all(reader.messages == expected for reader in readers), f"a reader did not get {expected} messages")
    return (shared_s - alone_s) / (publishes * n) * 1e6


def _published(node: HeadraceNode, publisher: "_Client", readers: list["_Client"], publishes: int) -> float:
    """The broker's processor time for so many batches, each delivered to all readers before the next."""
    for client in [publisher, *readers]:
        client.ping()  # the broker gives up connections on which nothing is said for long
    before_s = node.cpu_s
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader.socket, selectors.EVENT_READ, reader)
        for _ in range(publishes):
            publisher.publish()
            waiting = set(readers)
            while waiting:
                ready = selector.select(_PATIENCE_S)
                check(bool(ready), f"{len(waiting)} readers wait in vain for a delivery")
                waiting.difference_update(key.data for key, _ in ready if key.data.received_batch())
    return node.cpu_s - before_s


@contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), timeout=_PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


class _Client:
    """The cheapest client there can be: five hundred of them run beside the broker that is measured."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.messages = 0
        """How many were delivered."""
        self._frames = Frames(_MEMORY)
        self._next_offset = 0
        self._batch = bytes(encode(Columns([_VALUE] * _COUNT), time.time_ns() // 1000).data)
        self._ask(Kind.HELLO, Hello(client="scaling"))

    def ping(self) -> None:
        """Give a sign of life."""
        self._ask(Kind.PING, Ping())

    def publish(self) -> None:
        """Publish a batch, and wait until that is answered."""
        self._ask(Kind.PUBLISH, Publish(_TOPIC, 0), self._batch)

    def open_stream(self, offset: int) -> None:
        """Read from an offset on."""
        self._next_offset = offset
        self._ask(Kind.STREAM_OPEN, StreamOpen(_TOPIC, 0, offset, _CREDIT_BYTES))

    def received_batch(self) -> bool:
        """Receive; whether the next batch is there, whole and the right one."""
        before = self.messages
        for kind, body in self._received():
            check(kind == Kind.DELIVERY, f"a frame of kind {kind} in place of a delivery")
            batch = parse(body)
            batch.verify()
            check(batch.base_offset == self._next_offset, f"offset {batch.base_offset}, not {self._next_offset}")
            self._next_offset = batch.next_offset
            self.messages += batch.count
        return self.messages > before

    def _ask(self, kind: Kind, head: object, body: bytes = b"") -> None:
        self.socket.sendall(bytes(frame(kind, 1, head, len(body))) + body)
        answers: list[int] = []
        while not answers:
            answers += [kind for kind, _ in self._received()]
        check(answers == [Kind.ANSWER], f"frames of kinds {answers} in place of an answer")

    def _received(self) -> Iterator[tuple[int, memoryview]]:
        count = self.socket.recv_into(self._frames.buffer())
        if not count:
            raise WrongResult("the broker has closed the connection")
        for one in self._frames.received(count):
            yield one.kind, one.body
