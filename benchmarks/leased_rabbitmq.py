"""RabbitMQ as a work queue: a durable classic queue, and manual acknowledgements, with pika."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from benchmarks.broker_rabbitmq import RabbitMQ, RabbitNode, _Talking, blocking
from headrace.bench.queues import BATCH, Take, Worked, WorkQueue

_PREFETCH = 100


class RabbitQueue(WorkQueue):
    """A consumer gets as many messages as it may hold, and the next when it acknowledges."""

    name = "rabbitmq"
    words: ClassVar[str] = (
        "synced: persistent messages in a durable classic queue, confirmed once they are synced (in groups); acks are "
        "not answered at all, and not synced: the server has got them all when the time ends"
    )
    api: ClassVar[Mapping[str, str]] = {
        "enqueue": "pika SelectConnection, basic_publish with publisher confirms, not waiting for one before the next",
        "batches": f"pika SelectConnection, prefetch {2 * BATCH}, basic_ack(multiple=True) for each {BATCH}",
        "singles": "pika SelectConnection, a channel a consumer, prefetch 1, basic_ack for each message",
    }
    node: RabbitNode
    prefetch = 1

    def __init__(self, node: RabbitNode) -> None:
        super().__init__(node)
        self._broker = RabbitMQ(node)

    def create(self, queue: str) -> None:
        """Make a queue."""
        self._broker.create(queue)

    def delete(self, queue: str) -> None:
        """Drop a queue."""
        self._broker.delete(queue)

    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        """Batch after batch into the socket; confirms come meanwhile."""
        return self._broker.publish(queue, batches)

    def lease_batches(self, queue: str, count: int, take: Take) -> float:
        """Messages pushed by the server, acknowledged many at once."""
        return _Batches(self.node.port, queue, count, take).run()

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:
        """Messages pushed by the server, acknowledged one by one."""
        working = _Singles(self.node.port, queue, count, consumers, self.prefetch)
        return Worked(working.run(), working.values)

    def left(self, queue: str) -> int:
        """Those of nobody; what a consumer has not acknowledged is put back when it goes."""
        connection = blocking(self.node.port)
        count: int = connection.channel().queue_declare(queue, passive=True).method.message_count
        connection.close()
        return count


class RabbitPrefetching(RabbitQueue):
    """Consumers that have the next messages at hand while they work on one."""

    name = "rabbitmq_prefetch"
    api: ClassVar[Mapping[str, str]] = {
        "singles": f"pika SelectConnection, a channel a consumer, prefetch {_PREFETCH}, basic_ack for each message"
    }
    prefetch = _PREFETCH


class _Batches(_Talking):
    def __init__(self, port: int, queue: str, count: int, take: Take) -> None:
        super().__init__(port)
        self._queue = queue
        self._left = count
        self._take = take
        self._values: list[bytes] = []

    def go(self) -> None:
        self._channel.basic_qos(prefetch_count=2 * BATCH, callback=lambda _: self._start())

    def _start(self) -> None:
        self.started()
        self._channel.basic_consume(self._queue, self._on_message)

    def _on_message(self, channel: Any, method: Any, _: Any, body: bytes) -> None:
        self._values.append(body)
        self._left -= 1
        if len(self._values) == BATCH or not self._left:
            self._take(self._values)
            self._values = []
            channel.basic_ack(method.delivery_tag, multiple=True)
            if not self._left:
                # Answered after all that was said before on the channel.
                channel.queue_declare(self._queue, passive=True, callback=lambda _: self.finished())


class _Singles(_Talking):
    def __init__(self, port: int, queue: str, count: int, consumers: int, prefetch: int) -> None:
        super().__init__(port)
        self.values: list[bytes] = []
        self._queue = queue
        self._count = count
        self._consumers = consumers
        self._prefetch = prefetch
        self._channels: list[Any] = []
        self._ready = self._quiet = 0

    def go(self) -> None:
        self._use(self._channel)
        for _ in range(self._consumers - 1):
            self._connection.channel(on_open_callback=self._use)

    def _use(self, channel: Any) -> None:
        self._channels.append(channel)
        channel.basic_qos(prefetch_count=self._prefetch, callback=lambda _: self._start())

    def _start(self) -> None:
        self._ready += 1
        if self._ready == self._consumers:
            self.started()
            for channel in self._channels:
                channel.basic_consume(self._queue, self._on_message)

    def _on_message(self, channel: Any, method: Any, _: Any, body: bytes) -> None:
        self.values.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(self.values) == self._count:
            for each in self._channels:
                # Answered after all that was said before on the channel.
                each.queue_declare(self._queue, passive=True, callback=self._on_quiet)

    def _on_quiet(self, _: Any) -> None:
        self._quiet += 1
        if self._quiet == self._consumers:
            self.finished()
