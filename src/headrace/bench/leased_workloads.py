"""Benchmarks of leased subscriptions: a real server process over TCP, and the Python client in this process."""

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from headrace.bench import queues
from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Benchmark, check, rate
from headrace.bench.payload import Payload
from headrace.bench.queues import BATCH, CONSUMERS, Dated, Take, Timeline, Worked, WorkQueue
from headrace.bench.receiver import Arrived, Receive
from headrace.client._async.bus import AsyncBus
from headrace.client._async.connecting import connect_async
from headrace.client._async.leasing.jobs import AsyncJobs
from headrace.client._sync.bus import Bus
from headrace.client._sync.connecting import connect

SINGLES_MAX = 60_000
"""No more than there are different values, so that one that is handed over twice is noticed."""
_PREFETCH = 1000


def benchmarks(
    payload: Payload, *, timeline: Timeline | None = None, consumers: int = CONSUMERS
) -> dict[str, Benchmark]:
    """The benchmarks of `headrace bench --group leased`, by name."""
    batches, most = payload.params, payload.count_max
    one, two = HeadraceNode(), HeadraceNode()  # each shared by those that are measured in turn
    many = [HeadraceQueue(one), HeadraceOverlapped(one)]
    singly = [HeadraceQueue(two), HeadraceQueueOneBus(two), HeadraceJobs(two), HeadraceStanding(two)]
    return {
        "enqueue_synced": Benchmark(
            {"enqueue_synced": rate()}, [queues.enqueueing(HeadraceQueue(), payload)], batches, None, most
        ),
        "lease_ack_batch1000": Benchmark(
            {"lease_ack_batch1000": rate()},
            [queues.leasing_batches(each, payload) for each in many],
            {**batches, "lease": BATCH},
            None,
            most,
        ),
        "lease_ack_single": Benchmark(
            {"lease_ack_single": rate()},
            [queues.leasing_singles(each, payload, consumers) for each in singly],
            {"size": payload.size, "lease": 1, "consumers": consumers},
            None,
            SINGLES_MAX,
        ),
        "timeline": Benchmark(
            queues.timing(), [queues.keeping_time(HeadraceQueue(), payload, timeline or Timeline())], batches, 1
        ),
    }


class HeadraceQueue(WorkQueue):
    """The broker and its Python client."""

    name = "headrace"
    words: ClassVar[str] = (
        "synced: enqueued and acked once that is synced (group commit); leases are written to the journal, and outlive "
        "the broker's process"
    )
    api: ClassVar[Mapping[str, str]] = {
        "enqueue": "Producer.send_many of a list a batch, Producer.flush at the end",
        "batches": f"AsyncQueue.lease(max={BATCH}), AsyncQueue.ack of the list, one after the other (uvloop)",
        "singles": "AsyncQueue.lease(max=1), AsyncQueue.ack, a connection a consumer, all in one process (uvloop)",
        "timeline": f"Producer.send_many with dues; AsyncQueue.jobs(prefetch={_PREFETCH}) in another process (uvloop)",
    }
    node: HeadraceNode

    def __init__(self, node: HeadraceNode | None = None) -> None:
        super().__init__(node or HeadraceNode())

    def _connect(self) -> Bus:
        return connect(self.node.address)

    def create(self, queue: str) -> None:
        """Make a topic of one partition, and its leased subscription."""
        with self._connect() as bus:
            bus.create_topic(queue, partitions=1, durability="synced")
            bus.create_subscription(queue)

    def delete(self, queue: str) -> None:
        """Drop the topic."""
        with self._connect() as bus:
            bus.delete_topic(queue)

    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        """A call for each batch."""
        with self._connect() as bus, bus.producer(queue) as producer:
            bus.describe_topic(queue)
            begin = time.perf_counter()
            for values in batches:
                producer.send_many(values)
            producer.flush()
            return time.perf_counter() - begin

    def schedule(self, queue: str, batches: Iterable[Dated]) -> None:
        """The same, with due times."""
        with self._connect() as bus, bus.producer(queue) as producer:
            for values, dues in batches:
                producer.send_many(values, dues=dues or None)
            producer.flush()

    def lease_batches(self, queue: str, count: int, take: Take) -> float:
        """Lease, ack, and again."""
        return run_async(_lease_batches(self.node.address, queue, count, take))

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:
        """A task and a connection for each consumer."""
        return run_async(_lease_singles(self.node.address, queue, count, consumers, buses=consumers))

    def left(self, queue: str) -> int:
        """All that the subscription has not settled."""
        with self._connect() as bus:
            known = bus.describe_subscription(queue)
            return known.waiting + known.ready + known.leased

    def receive(self) -> Receive:
        """Messages that are leased ahead and handed over when they are due."""
        return functools.partial(_receive, self.node.address)


class HeadraceOverlapped(HeadraceQueue):
    """The next messages are leased while those before are acknowledged."""

    name = "headrace_overlapped"
    api: ClassVar[Mapping[str, str]] = {
        "batches": f"AsyncQueue.ack of a list and AsyncQueue.lease(max={BATCH}) of the next, both at once (uvloop)"
    }

    def lease_batches(self, queue: str, count: int, take: Take) -> float:
        """Ack and lease, and again."""
        return run_async(_lease_overlapped(self.node.address, queue, count, take))


class HeadraceQueueOneBus(HeadraceQueue):
    """Consumers of one service: all of them through one bus."""

    name = "headrace_one_bus"
    api: ClassVar[Mapping[str, str]] = {
        "singles": "AsyncQueue.lease(max=1), AsyncQueue.ack by as many tasks, all through one bus (uvloop)"
    }

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:
        """A task for each consumer."""
        return run_async(_lease_singles(self.node.address, queue, count, consumers, buses=1))


class HeadraceJobs(HeadraceQueue):
    """Consumers that have the next messages at hand while they work on one."""

    name = "headrace_jobs"
    prefetch = 100
    api: ClassVar[Mapping[str, str]] = {
        "singles": "AsyncQueue.jobs(), acked by itself when the next is asked for, a connection a consumer (uvloop)"
    }

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:
        """A task and a connection for each consumer."""
        return run_async(_iterate(self.node.address, queue, count, consumers, self.prefetch))


class HeadraceStanding(HeadraceJobs):
    """Consumers with a standing request whose credit is small: each delivery has few messages."""

    name = "headrace_standing"
    prefetch = 8
    api: ClassVar[Mapping[str, str]] = {
        "singles": f"AsyncQueue.jobs(prefetch={prefetch}), acked by itself when the next is asked for, a connection a "
        "consumer (uvloop)"
    }


async def _lease_batches(address: str, queue: str, count: int, take: Take) -> float:
    async with await connect_async(address) as bus:
        work = bus.queue(queue)
        await work.stats()
        begin = time.perf_counter()
        seen = 0
        while seen < count and (jobs := await work.lease(BATCH)):
            take([job.value for job in jobs])
            refused = await work.ack(jobs)
            check(not refused, "acks were refused")
            seen += len(jobs)
        return time.perf_counter() - begin


async def _lease_overlapped(address: str, queue: str, count: int, take: Take) -> float:
    async with await connect_async(address) as bus:
        work = bus.queue(queue)
        await work.stats()
        begin = time.perf_counter()
        seen = 0
        jobs = await work.lease(BATCH)
        while jobs:
            take([job.value for job in jobs])
            seen += len(jobs)
            acked = asyncio.create_task(work.ack(jobs))
            jobs = await work.lease(BATCH) if seen < count else []
            check(not await acked, "acks were refused")
        return time.perf_counter() - begin


async def _lease_singles(address: str, queue: str, count: int, consumers: int, buses: int) -> Worked:
    opened = await asyncio.gather(*(connect_async(address) for _ in range(buses)))
    seen: list[bytes] = []

    async def consume(bus: AsyncBus) -> None:
        work = bus.queue(queue)
        while len(seen) < count and (jobs := await work.lease(1)):
            [job] = jobs
            seen.append(job.value)
            await work.ack(job)

    await asyncio.gather(*(bus.queue(queue).stats() for bus in opened))
    begin = time.perf_counter()
    await asyncio.gather(*map(consume, itertools.islice(itertools.cycle(opened), consumers)))
    seconds = time.perf_counter() - begin
    await asyncio.gather(*(bus.close() for bus in opened))
    return Worked(seconds, seen)


async def _iterate(address: str, queue: str, count: int, consumers: int, prefetch: int) -> Worked:
    opened = await asyncio.gather(*(connect_async(address) for _ in range(consumers)))
    seen: list[bytes] = []
    all_jobs = [bus.queue(queue).jobs(prefetch) for bus in opened]

    async def consume(jobs: AsyncJobs) -> None:
        async with jobs:
            async for job in jobs:
                seen.append(job.value)
                if len(seen) == count:
                    for each in all_jobs:
                        each.stop()

    await asyncio.gather(*(bus.queue(queue).stats() for bus in opened))
    begin = time.perf_counter()
    # What a consumer has at hand when all are seen is settled, with answers, when its iteration ends.
    await asyncio.gather(*map(consume, all_jobs))
    seconds = time.perf_counter() - begin
    await asyncio.gather(*(bus.close() for bus in opened))
    return Worked(seconds, seen)


def _receive(address: str, queue: str, count: int, ready: Callable[[], None]) -> Arrived:
    return run_async(_receive_jobs(address, queue, count, ready))


async def _receive_jobs(address: str, queue: str, count: int, ready: Callable[[], None]) -> Arrived:
    times: list[int] = []
    values: list[bytes] = []
    async with await connect_async(address) as bus, bus.queue(queue).jobs(_PREFETCH) as jobs:
        ready()
        async for job in jobs:
            times.append(time.time_ns())
            values.append(job.value)
            if len(values) == count:
                break
    return Arrived(times, values)
