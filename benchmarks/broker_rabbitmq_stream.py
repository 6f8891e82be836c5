"""RabbitMQ: a stream with rstream."""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from benchmarks.broker_rabbitmq import RabbitNode
from headrace.bench.brokers import Contestant, PublishPace, Take
from headrace.bench.event_loop import run_async
from headrace.bench.measure import check
from headrace.bench.receiver import Arrived, Receive
from headrace.bench.servers import HOST

_CREDIT = 50
_PATIENCE_S = 30.0


class RabbitStream(Contestant):
    """A stream."""

    name = "rabbitmq_stream"
    words: ClassVar[Mapping[bool, str]] = {False: "written: a stream, confirmed once it is written; never synced"}
    api: ClassVar[Mapping[str, str]] = {
        "publish": "rstream Producer.send_batch, confirms counted, not waiting for one before the next (uvloop)",
        "consume": f"rstream Consumer, {_CREDIT} chunks of credit, values undecoded, a callback a message (uvloop)",
        "latency": "rstream Producer.send_batch of one here, Consumer in another process (uvloop)",
    }
    node: RabbitNode

    def create(self, topic: str) -> None:
        """Make a stream."""
        run_async(_with_producer(self.node.stream_port, lambda producer: producer.create_stream(topic)))

    def delete(self, topic: str) -> None:
        """Drop a stream."""
        run_async(_with_producer(self.node.stream_port, lambda producer: producer.delete_stream(topic)))

    def publish(self, topic: str, batches: Iterable[list[bytes]]) -> float:
        """Batch after batch; confirms come meanwhile."""
        return run_async(_stream_publish(self.node.stream_port, topic, batches))

    def consume(self, topic: str, count: int, take: Take) -> float:
        """Messages pushed by the server."""
        return run_async(_stream_consume(self.node.stream_port, topic, count, take))

    def publish_paced(self, topic: str, values: Iterable[bytes], pace: PublishPace) -> list[int]:
        """Without waiting for one before the next."""
        return run_async(_stream_publish_paced(self.node.stream_port, topic, values, pace))

    def receive(self) -> Receive:
        """Messages pushed by the server."""
        return functools.partial(_stream_receive, self.node.stream_port)


_LOGIN = {"username": "guest", "password": "guest"}


async def _with_producer(port: int, work: Callable[[Any], Any]) -> Any:
    import rstream

    async with rstream.Producer(HOST, port=port, **_LOGIN) as producer:
        return await work(producer)


class _Confirms:
    """Counts what is confirmed."""

    def __init__(self) -> None:
        self._count = 0
        self._wanted: int | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def on_confirm(self, status: Any) -> None:
        check(status.is_confirmed, "a message was refused")
        self._count += 1
        self._look()

    async def wait(self, wanted: int) -> None:
        self._wanted = wanted
        self._look()
        await asyncio.wait_for(self._done, _PATIENCE_S)

    def _look(self) -> None:
        if self._count == self._wanted:
            self._done.set_result(None)


async def _stream_publish(port: int, topic: str, batches: Iterable[list[bytes]]) -> float:
    async def publish(producer: Any) -> float:
        await producer.stream_exists(topic)
        confirms = _Confirms()
        begin = time.perf_counter()
        sent = 0
        for values in batches:
            await producer.send_batch(topic, list(values), on_publish_confirm=confirms.on_confirm)
            sent += len(values)
        await confirms.wait(sent)
        return time.perf_counter() - begin

    seconds: float = await _with_producer(port, publish)
    return seconds


async def _stream_publish_paced(port: int, topic: str, values: Iterable[bytes], pace: PublishPace) -> list[int]:
    async def publish(producer: Any) -> list[int]:
        confirms = _Confirms()
        begun = []
        for value in values:
            begun.append(await pace.turn())
            await producer.send_batch(topic, [value], on_publish_confirm=confirms.on_confirm)
        await confirms.wait(len(begun))
        return begun

    begun: list[int] = await _with_producer(port, publish)
    return begun


async def _stream_listen(port: int, topic: str, on_message: Callable[[bytes, Any], Any], done: Any) -> float:
    """Have all messages of a stream come to a callback, until a future is done; returns the seconds it took."""
    import rstream

    consumer = rstream.Consumer(HOST, port=port, **_LOGIN)
    await consumer.start()
    begin = time.perf_counter()
    await consumer.subscribe(
        topic,
        on_message,
        offset_specification=rstream.ConsumerOffsetSpecification(rstream.OffsetType.FIRST),
        initial_credit=_CREDIT,
        decoder=bytes,
    )
    running = asyncio.ensure_future(consumer.run())
    await asyncio.wait_for(done, _PATIENCE_S)
    seconds = time.perf_counter() - begin
    await consumer.close()
    await running
    return seconds


async def _stream_consume(port: int, topic: str, count: int, take: Take) -> float:
    values: list[bytes] = []
    seen = 0
    done = asyncio.get_running_loop().create_future()

    async def on_message(value: bytes, _: Any) -> None:
        nonlocal seen
        if seen == count:
            return  # there may be more than was asked for
        values.append(value)
        seen += 1
        if len(values) == 1000 or seen == count:
            take(values[:])
            values.clear()
            if seen == count:
                done.set_result(None)

    return await _stream_listen(port, topic, on_message, done)


def _stream_receive(port: int, topic: str, count: int, ready: Callable[[], None]) -> Arrived:
    return run_async(_stream_receive_pushed(port, topic, count, ready))


async def _stream_receive_pushed(port: int, topic: str, count: int, ready: Callable[[], None]) -> Arrived:
    arrived = Arrived(times := [], values := [])
    done = asyncio.get_running_loop().create_future()

    async def on_message(value: bytes, _: Any) -> None:
        times.append(time.monotonic_ns())
        values.append(value)
        if len(values) == count:
            done.set_result(None)

    listening = asyncio.ensure_future(_stream_listen(port, topic, on_message, done))
    # It has no callback for this; all from the first message on come in any case.
    await asyncio.sleep(0.2)
    ready()
    await listening
    return arrived
