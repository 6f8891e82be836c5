"""Routes: messages published one by one to ten topics by pattern, beside RabbitMQ, and by content."""

import asyncio
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.broker import forgiven
from benchmarks.broker_rabbitmq import RabbitNode, blocking
from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Benchmark, Sample, Subject, WrongResult, check, rate
from headrace.bench.payload import Payload
from headrace.client._async.bus import AsyncBus
from headrace.client._async.connecting import connect_async
from headrace.client._sync.connecting import connect

TARGETS = 10
_SUBJECT = "sensors.hall.temperature"
_PATTERNS = ("sensors.#", "sensors.*.temperature", "#.temperature", "*.hall.*", "sensors.hall.#")
"""Each of them is the pattern of two targets; all match."""
_SINGLES_MAX = 20_000
_JSON_MAX = 200_000
_PATIENCE_S = 60.0
_POLL_S = 0.001
_DOCUMENT = {"order": [{"item": "apple", "price": 0}], "customer": "ann", "country": "CH", "note": ""}
_JSON_BYTES = 200
_PATH = "$.order[?@.price > 50]"


def route_benchmarks() -> list[Benchmark]:
    """Routing by pattern, the single publishes that it is compared with in the same run, and routing by content."""
    payload = Payload()
    params = {"size": payload.size, "batch": 1, "clients": 1, "waits": "for each acknowledgement before the next"}
    return [
        Benchmark(
            {"publish_one_by_one": rate()},
            [headrace_singles(payload, 0), forgiven(rabbitmq_singles(payload, 0))],
            params,
            None,
            _SINGLES_MAX,
        ),
        Benchmark(
            {"route_pattern_10": rate()},
            [headrace_singles(payload, TARGETS), forgiven(rabbitmq_singles(payload, TARGETS))],
            {**params, "targets": TARGETS, "patterns": ", ".join(_PATTERNS), "counted": "until all are in all targets"},
            None,
            _SINGLES_MAX,
        ),
        Benchmark(
            {"route_jsonpath": rate()}, [by_content()], {"size": _JSON_BYTES, "jsonpath": _PATH}, None, _JSON_MAX
        ),
    ]


def headrace_singles(payload: Payload, targets: int) -> Subject:
    """Publish to a topic that routes carry to others, or to none."""
    node, numbers = HeadraceNode(), itertools.count()

    def sample(_: str, count: int) -> Sample:
        return run_async(_publish_one_by_one(node.address, next(numbers), list(payload.values(count)), targets))

    params = {
        "api": "AsyncBus.publish awaited, one after the other (uvloop)" + (", bus.routes.add" if targets else ""),
        "durability": "synced: acknowledged once the source is synced; targets show messages once they are synced",
    }
    start = functools.partial(node.start, synced=True)
    return Subject("headrace", sample, params, 1, start, node.stop)


async def _publish_one_by_one(address: str, number: int, values: Sequence[bytes], targets: int) -> Sample:
    source, names = f"source-{number}", [f"target-{number}-{at}" for at in range(targets)]
    async with await connect_async(address) as bus:
        await bus.create_topic(source)
        for at, name in enumerate(names):
            pattern = _PATTERNS[at % len(_PATTERNS)]
            await bus.routes.add(f"route-{number}-{at}", source=source, pattern=pattern, to=name)
        begin = time.perf_counter()
        for value in values:
            await bus.publish(source, value, key=_SUBJECT)
        await _await_messages(bus, names, len(values))
        seconds = time.perf_counter() - begin
        for name in names or [source]:
            check(await _read(bus, name) == list(values), f"{name} does not have the messages in order")
        for name in [source, *names]:
            await bus.delete_topic(name)
    return Sample(seconds)


async def _await_messages(bus: AsyncBus, names: Sequence[str], count: int) -> None:
    """Wait until the last message can be read in all topics."""
    for name in names:
        deadline = time.monotonic() + _PATIENCE_S
        while (await bus.describe_topic(name)).partitions[0].next_offset < count:
            if time.monotonic() > deadline:
                raise WrongResult(f"{name} does not have all messages after {_PATIENCE_S:g} s")
            await asyncio.sleep(_POLL_S)


async def _read(bus: AsyncBus, topic: str) -> list[bytes | None]:
    found: list[bytes | None] = []
    while batches := await bus.fetch(topic, 0, len(found)):
        for batch in batches:
            found += batch.columns().values
    return found


def rabbitmq_singles(payload: Payload, targets: int) -> Subject:
    """Publish to a topic exchange that is bound to durable queues, or straight to one."""
    node, numbers = RabbitNode(streams=False), itertools.count()

    def sample(_: str, count: int) -> Sample:
        return _publish_to_rabbitmq(node.port, next(numbers), list(payload.values(count)), targets)

    params = {
        "api": "pika BlockingConnection, confirm_delivery, basic_publish one after the other"
        + (", a topic exchange bound to durable classic queues" if targets else ", a durable classic queue"),
        "durability": "persistent messages, confirmed once they are synced in all queues (in groups)",
    }
    start = functools.partial(node.start, synced=True)
    return Subject("rabbitmq", sample, params, 1, start, node.stop)


def _publish_to_rabbitmq(port: int, number: int, values: Sequence[bytes], targets: int) -> Sample:
    import pika

    connection = blocking(port)
    channel = connection.channel()
    queues = [f"queue-{number}-{at}" for at in range(max(targets, 1))]
    exchange, key = (f"exchange-{number}", _SUBJECT) if targets else ("", queues[0])
    for queue in queues:
        channel.queue_declare(queue, durable=True)
    if targets:
        channel.exchange_declare(exchange, "topic", durable=True)
        for at, queue in enumerate(queues):
            channel.queue_bind(queue, exchange, _PATTERNS[at % len(_PATTERNS)])
    channel.confirm_delivery()
    persistent = pika.BasicProperties(delivery_mode=2)
    begin = time.perf_counter()
    for value in values:
        channel.basic_publish(exchange, key, value, persistent)
    seconds = time.perf_counter() - begin
    for queue in queues:
        there: Any = channel.queue_declare(queue, passive=True)
        check(there.method.message_count == len(values), f"{queue} has {there.method.message_count} messages")
        channel.queue_delete(queue)
    if targets:
        channel.exchange_delete(exchange)
    connection.close()
    return Sample(seconds)


def by_content() -> Subject:
    """Route JSON documents by a JSONPath; half of them are selected."""
    node, numbers = HeadraceNode(), itertools.count()
    documents = [_document(price) for price in range(101)]

    def sample(_: str, count: int) -> Sample:
        number = next(numbers)
        source, target = f"documents-{number}", f"selected-{number}"
        values = list(itertools.islice(itertools.cycle(documents), count))
        selected = [value for price, value in zip(itertools.cycle(range(101)), values, strict=False) if price > 50]
        with connect(node.address) as bus:
            bus.create_topic(source)
            bus.routes.add(f"content-{number}", source=source, content={"jsonpath": _PATH}, to=target)
            begin = time.perf_counter()
            bus.publish_many(source, values)
            while any(info.behind for info in bus.routes.list(source)):
                time.sleep(0.001)
            seconds = time.perf_counter() - begin
            found: list[bytes | None] = []
            while batches := bus.fetch(target, 0, len(found), wait=0.1):
                for batch in batches:
                    found += batch.columns().values
            check(found == selected, f"{len(found)} documents were routed of {len(selected)}, or not in order")
            bus.delete_topic(source)
            bus.delete_topic(target)
        return Sample(seconds)

    params = {"api": "Bus.publish_many, bus.routes.add", "counted": "from the first publish until all are forwarded"}
    return Subject("headrace", sample, params, 1, functools.partial(node.start, synced=False), node.stop)


def _document(price: int) -> bytes:
    """A JSON document of 200 bytes."""
    given = {**_DOCUMENT, "order": [{"item": "apple", "price": price}]}
    missing = _JSON_BYTES - len(msgspec.json.encode(given))
    return msgspec.json.encode({**given, "note": "." * missing})
