"""NATS JetStream as a work queue: a stream with work-queue retention, a consumer, and scheduled messages."""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

from benchmarks.broker_nats import NatsAddress, NatsNode, _connect, _publish_batches
from headrace.bench.event_loop import run_async
from headrace.bench.queues import BATCH, Dated, Take, Timeline, Worked, WorkQueue
from headrace.bench.receiver import Arrived, Receive

_DURABLE = "workers"
_PATIENCE_S = 30.0
_PENDING = 4000
"""Messages that are published before the first is acknowledged."""


class NatsQueue(WorkQueue):
    """What nats-py's own calls give."""

    name = "nats"
    words: ClassVar[str] = (
        "synced: file storage, sync_interval always, work-queue retention; the ack of a single message, and the last "
        "of a batch, is awaited (double ack)"
    )
    api: ClassVar[Mapping[str, str]] = {
        "enqueue": "atomic batches: Client.publish with batch headers, Client.request for the last of a batch (uvloop)",
        "batches": f"pull consumer: fetch({BATCH}), ack of each, ack_sync of the last (uvloop)",
        "singles": "pull consumer: fetch(1), ack_sync, a connection a consumer, all in one process (uvloop)",
        "timeline": "Nats-Schedule header, a subject for each message; a push consumer with acks in another process",
    }
    node: NatsNode

    def create(self, queue: str) -> None:
        """Make a stream and its consumer."""
        run_async(_create(self.node.address, queue))

    def delete(self, queue: str) -> None:
        """Drop the stream."""
        run_async(_delete(self.node.address, queue))

    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        """An atomic batch for each."""
        return run_async(_publish_batches(self.node.address, _ready(queue), batches))

    def lease_batches(self, queue: str, count: int, take: Take) -> float:
        """Fetch, ack, and again."""
        return run_async(_lease_batches(self.node.address, queue, count, take))

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:
        """A task and a connection for each consumer."""
        return run_async(_lease_singles(self.node.address, queue, count, consumers))

    def left(self, queue: str) -> int:
        """What the stream still has: it drops what was acknowledged."""
        return run_async(_left(self.node.address, queue))

    def timeline(self, whole: Timeline) -> Timeline:
        """As many as can be loaded."""
        return whole.at_most(20_000, 1000, "each is published by itself, some thousands in a second")

    def schedule(self, queue: str, batches: Iterable[Dated]) -> None:
        """Each with a schedule."""
        run_async(_schedule(self.node.address, queue, batches))

    def receive(self) -> Receive:
        """Messages pushed by the server."""
        return functools.partial(_receive, self.node.address)


def _ready(queue: str) -> str:
    return f"{queue}.ready"


async def _create(address: NatsAddress, queue: str) -> None:
    from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StreamConfig

    client = await _connect(address)
    stream = StreamConfig(
        name=queue,
        subjects=[_ready(queue), f"{queue}.waiting.*"],
        retention=RetentionPolicy.WORK_QUEUE,
        allow_atomic=True,
        allow_msg_schedules=True,
        allow_msg_ttl=True,
        allow_rollup_hdrs=True,
    )
    await client.jetstream().add_stream(stream)
    wanted = ConsumerConfig(
        durable_name=_DURABLE, ack_policy=AckPolicy.EXPLICIT, filter_subject=_ready(queue), max_ack_pending=100_000
    )
    await client.jetstream().add_consumer(queue, wanted)
    await client.close()


async def _delete(address: NatsAddress, queue: str) -> None:
    client = await _connect(address)
    await client.jetstream().delete_stream(queue)
    await client.close()


async def _left(address: NatsAddress, queue: str) -> int:
    client = await _connect(address)
    count: int = (await client.jetstream().stream_info(queue)).state.messages
    await client.close()
    return count


async def _bound(client: Any, queue: str) -> Any:
    return await client.jetstream(timeout=_PATIENCE_S).pull_subscribe_bind(_DURABLE, stream=queue)


async def _lease_batches(address: NatsAddress, queue: str, count: int, take: Take) -> float:
    client = await _connect(address)
    consumer = await _bound(client, queue)
    begin = time.perf_counter()
    seen = 0
    while seen < count:
        messages = await consumer.fetch(min(BATCH, count - seen), timeout=_PATIENCE_S)
        take([message.data for message in messages])
        for message in messages[:-1]:
            await message.ack()
        await messages[-1].ack_sync(timeout=_PATIENCE_S)
        seen += len(messages)
    seconds = time.perf_counter() - begin
    await client.close()
    return seconds


async def _lease_singles(address: NatsAddress, queue: str, count: int, consumers: int) -> Worked:
    clients = await asyncio.gather(*(_connect(address) for _ in range(consumers)))
    seen: list[bytes] = []
    taken = 0

    async def consume(consumer: Any) -> None:
        nonlocal taken
        while taken < count:
            taken += 1  # as many are asked for as there are: nobody waits for one that does not come
            [message] = await consumer.fetch(1, timeout=_PATIENCE_S)
            seen.append(message.data)
            await message.ack_sync(timeout=_PATIENCE_S)

    bound = [await _bound(client, queue) for client in clients]
    begin = time.perf_counter()
    await asyncio.gather(*map(consume, bound))
    seconds = time.perf_counter() - begin
    await asyncio.gather(*(client.close() for client in clients))
    return Worked(seconds, seen)


async def _schedule(address: NatsAddress, queue: str, batches: Iterable[Dated]) -> None:
    client = await _connect(address)
    stream = client.jetstream(publish_async_max_pending=_PENDING)
    for values, dues in batches:
        acknowledged = []
        for value, due in zip(values, dues, strict=True):
            at = datetime.fromtimestamp(due / 1e6, UTC).isoformat().replace("+00:00", "Z")
            headers = {"Nats-Schedule": f"@at {at}", "Nats-Schedule-Target": _ready(queue)}
            subject = f"{queue}.waiting.{due}"
            acknowledged.append(await stream.publish_async(subject, value, headers=headers, wait_stall=_PATIENCE_S))
        await asyncio.gather(*acknowledged)
    await client.close()


def _receive(address: NatsAddress, queue: str, count: int, ready: Callable[[], None]) -> Arrived:
    return run_async(_receive_pushed(address, queue, count, ready))


async def _receive_pushed(address: NatsAddress, queue: str, count: int, ready: Callable[[], None]) -> Arrived:
    from nats.js.api import AckPolicy, ConsumerConfig

    times: list[int] = []
    values: list[bytes] = []
    client = await _connect(address)
    stream = client.jetstream(timeout=_PATIENCE_S)
    done = asyncio.get_running_loop().create_future()

    async def on_message(message: Any) -> None:
        times.append(time.time_ns())
        values.append(message.data)
        await message.ack()
        if len(values) == count:
            done.set_result(None)

    # A work queue's messages go to one consumer, and that is now this one.
    await stream.delete_consumer(queue, _DURABLE)
    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=on_message, pending_msgs_limit=1 << 24, pending_bytes_limit=1 << 32)
    wanted = ConsumerConfig(
        durable_name=_DURABLE,
        ack_policy=AckPolicy.EXPLICIT,
        filter_subject=_ready(queue),
        deliver_subject=inbox,
        max_ack_pending=-1,
    )
    await stream.add_consumer(queue, wanted)
    ready()
    await asyncio.wait_for(done, _PATIENCE_S)
    await client.flush()
    await client.close()
    return Arrived(times, values)
