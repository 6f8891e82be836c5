"""Benchmarks of the broker: a real server process over TCP, and the Python client in this process."""

import asyncio
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from headrace.bench import brokers
from headrace.bench.brokers import CLIENTS, RATE, Contestant, Footprint, PublishPace, Take, megabytes
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Benchmark, Unavailable, WrongResult, check, duration, percentile, rate
from headrace.bench.payload import Payload
from headrace.bench.receiver import Arrived, Receive
from headrace.bench.servers import HOST, ServerNode, answers, free_port
from headrace.client._async.bus import AsyncBus
from headrace.client._async.connecting import connect_async
from headrace.client._sync.bus import Bus
from headrace.client._sync.connecting import connect
from headrace.model.durability import Durability
from headrace.model.errors import HeadraceError

_SINGLES_MAX = 60_000
"""At most the number of distinct values, by which clients are distinguished."""
_PATIENCE_S = 30.0


def benchmarks(payload: Payload, *, latency_s: float = 1.0, clients: int = CLIENTS) -> dict[str, Benchmark]:
    """The benchmarks of `headrace bench`, by name."""
    one_by_one = {"size": payload.size, "batch": 1}
    paced = {**one_by_one, "messages_per_second": RATE}
    paced_count = max(round(RATE * latency_s), 1)
    batches, most = payload.params, payload.count_max
    synced = brokers.publishing(Headrace(), payload, synced=True)
    written = brokers.publishing(Headrace(), payload, synced=False)
    single = brokers.publishing_single(Headrace(), payload, clients)
    tasks = brokers.publishing_single(HeadraceOneBus(), payload, clients)
    footprint = Footprint("headrace", HeadraceNode(), {"ready": "answers a client", "durability": "none needed"})
    return {
        "publish_synced": Benchmark({"publish_synced": rate()}, [synced], batches, None, most),
        "publish_written": Benchmark({"publish_written": rate()}, [written], batches, None, most),
        "consume": Benchmark({"consume": rate()}, [brokers.consuming(Headrace(), payload)], batches, None, most),
        "latency": Benchmark(
            {"latency_p50_ms": percentile(50, "ms"), "latency_p99_ms": percentile(99, "ms")},
            [brokers.latency(Headrace(), payload, synced=False)],
            paced,
            paced_count,
        ),
        "latency_synced": Benchmark(
            {"latency_synced_p50_ms": percentile(50, "ms"), "latency_synced_p99_ms": percentile(99, "ms")},
            [brokers.latency(Headrace(), payload, synced=True)],
            paced,
            paced_count,
        ),
        "publish_single_100_clients": Benchmark(
            {"publish_single_100_clients": rate()},
            [single, tasks],
            {**one_by_one, "clients": clients},
            None,
            _SINGLES_MAX,
        ),
        "footprint": Benchmark(
            {"idle_rss_mb": megabytes(), "ready_s": duration()}, [brokers.starting(footprint)], {}, 1
        ),
    }


class HeadraceNode(ServerNode):
    """One `headrace serve`."""

    port = 0
    durability = Durability.WRITTEN

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"headrace://{HOST}:{self.port}"

    def find(self) -> None:
        """It is here: this is it."""

    def _start(self, place: str, *, synced: bool) -> None:
        self.port = free_port()
        self.durability = Durability.SYNCED if synced else Durability.WRITTEN
        data = os.path.join(place, "data")
        command = [sys.executable, "-P", "-m", "headrace", "serve", "--data", data, "--port", str(self.port)]
        command += ["--host", HOST, "--log-level", "warning", *self._options(place)]
        try:
            self._launch(command, place, self._answers, self._environment(place))
        except Unavailable as error:
            raise WrongResult(f"headrace serve does not start: {error}") from error

    def _environment(self, place: str) -> dict[str, str]:
        """Variables of the process: it is the installation that runs the benchmark, whatever the current directory."""
        del place
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}  # an empty one is the current directory

    def _options(self, place: str) -> list[str]:
        """Further options of the command."""
        del place
        return []

    def _answers(self) -> bool:
        if not answers(self.port, b"", b""):
            return False
        with connect(self.address) as bus:
            bus.info()
        return True


class Headrace(Contestant):
    """The broker and its Python client."""

    name = "headrace"
    words: ClassVar[Mapping[bool, str]] = {
        False: "written: acknowledged once it is with the operating system",
        True: "synced: acknowledged, and shown to consumers, once it is synced (group commit)",
    }
    api: ClassVar[Mapping[str, str]] = {
        "publish": "Producer.send_many of a list a batch, Producer.flush at the end",
        "consume": "AsyncSubscription.batches, ReceivedBatch.values (uvloop)",
        "latency": "Producer.send with linger=0 here, AsyncSubscription.batches in another process (uvloop)",
        "single": "AsyncBus.publish awaited, one connection a client, all in one process (uvloop)",
    }
    node: HeadraceNode

    def __init__(self, node: HeadraceNode | None = None) -> None:
        super().__init__(node or HeadraceNode())

    def _connect(self) -> Bus:
        return connect(self.node.address, wait=_PATIENCE_S)

    def create(self, topic: str) -> None:
        """Make a topic of one partition; a node of a cluster that slept has to claim its shard before."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with self._connect() as bus:
                    durability = self.node.durability.name.lower()
                    bus.create_topic(topic, partitions=1, durability=durability, exist_ok=True)
            except HeadraceError as error:
                if not error.retryable or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def delete(self, topic: str) -> None:
        """Drop a topic."""
        with self._connect() as bus:
            bus.delete_topic(topic)

    def publish(self, topic: str, batches: Iterable[list[bytes]]) -> float:
        """A call for each batch."""
        with self._connect() as bus, bus.producer(topic) as producer:
            bus.describe_topic(topic)
            begin = time.perf_counter()
            for values in batches:
                producer.send_many(values)
            producer.flush()
            return time.perf_counter() - begin

    def consume(self, topic: str, count: int, take: Take) -> float:
        """Batch after batch."""
        return run_async(_consume(self.node.address, topic, count, take))

    def publish_paced(self, topic: str, values: Iterable[bytes], pace: PublishPace) -> list[int]:
        """Receipts come meanwhile."""
        begun = []
        with self._connect() as bus, bus.producer(topic, linger=0) as producer:
            bus.describe_topic(topic)
            for value in values:
                begun.append(pace.wait())
                producer.send(value)
            producer.flush()
        return begun

    def receive(self) -> Receive:
        """Batches as they come."""
        return functools.partial(_receive, self.node.address)

    def publish_single(self, topic: str, shares: Sequence[Sequence[bytes]]) -> float:
        """A task and a connection for each share."""
        return run_async(_publish_single(self.node.address, topic, shares))


class HeadraceOneBus(Headrace):
    """Single messages published as by a service: all tasks use one bus."""

    name = "headrace_one_bus"
    api: ClassVar[Mapping[str, str]] = {
        **Headrace.api,
        "single": "AsyncBus.publish awaited by as many tasks, all through one bus and its connection (uvloop)",
    }

    def publish_single(self, topic: str, shares: Sequence[Sequence[bytes]]) -> float:
        """A task for each share."""
        return run_async(_publish_single(self.node.address, topic, shares, buses=1))


async def _consume(address: str, topic: str, count: int, take: Take) -> float:
    seen = 0
    async with await connect_async(address) as bus:
        await bus.info()
        begin = time.perf_counter()
        async with bus.subscribe(topic, start="earliest", timeout=_PATIENCE_S) as subscription:
            async for batch in subscription.batches():
                values = batch.values
                take(values)  # type: ignore[arg-type]  # none of them is None
                seen += len(values)
                if seen >= count:
                    break
            return time.perf_counter() - begin


def _receive(address: str, topic: str, count: int, ready: Callable[[], None]) -> Arrived:
    return run_async(_receive_pushed(address, topic, count, ready))


async def _receive_pushed(address: str, topic: str, count: int, ready: Callable[[], None]) -> Arrived:
    times: list[int] = []
    values: list[bytes] = []
    async with await connect_async(address) as bus, bus.subscribe(topic, timeout=_PATIENCE_S) as subscription:
        ready()
        async for batch in subscription.batches():
            for value in batch.values:
                check(value is not None, "a value is missing")
                times.append(time.monotonic_ns())
                values.append(value)  # type: ignore[arg-type]
            if len(values) >= count:
                break
    return Arrived(times, values)


async def _publish_single(
    address: str, topic: str, shares: Sequence[Sequence[bytes]], buses: int | None = None
) -> float:
    opened = await asyncio.gather(*(connect_async(address) for _ in range(buses or len(shares))))

    async def publish(bus: AsyncBus, values: Sequence[bytes]) -> None:
        for value in values:
            await bus.publish(topic, value)

    await asyncio.gather(*(bus.describe_topic(topic) for bus in opened))
    begin = time.perf_counter()
    await asyncio.gather(*map(publish, itertools.cycle(opened), shares))
    seconds = time.perf_counter() - begin
    await asyncio.gather(*(bus.close() for bus in opened))
    return seconds
