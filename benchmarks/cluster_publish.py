"""Publishing to a cluster: the same broker on stores of all kinds, beside one without a store, NATS R3 and Kafka."""

import itertools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.broker import forgiven
from benchmarks.cluster_peers import KafkaReplicated, NatsReplicated
from benchmarks.cluster_stores import (
    MeasuredStore,
    install_stores,
    null_store,
    postgres_store,
    redis_store,
    seaweed_store,
    slow_store,
)
from headrace.bench.broker_workloads import Headrace, HeadraceNode
from headrace.bench.brokers import Comparison, Contestant, publishing
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Benchmark, Sample, Subject, percentile, rate
from headrace.bench.payload import Payload
from headrace.client._async.connecting import connect_async
from headrace.client._sync.connecting import connect
from headrace.model.durability import Durability
from headrace.model.errors import HeadraceError

CLUSTER = "bench"
_ONES_MAX = 5_000
_WARM_UP = 20
_DROPS_S = 0.6
"""A node notices in this time that its epoch was not confirmed while it slept."""
_ONE_API = "AsyncBus.publish awaited, one message after the other, one connection (uvloop)"

Stores = tuple[Callable[[], MeasuredStore], ...]
STORES: Stores = (null_store, postgres_store, seaweed_store, redis_store, slow_store)


class StoredNode(HeadraceNode):
    """One `headrace serve` that is a cluster of its own, on a store whose server runs as long as it does."""

    def __init__(self, store: MeasuredStore) -> None:
        super().__init__()
        self.store = store

    def find(self) -> None:
        """Make sure of the store's server."""
        if self.store.server is not None:
            self.store.server.find()

    def _start(self, place: str, *, synced: bool) -> None:
        if self.store.server is not None:
            beside = Path(place) / "store"
            beside.mkdir()
            self.store.server.start(str(beside), synced=True)
        super()._start(place, synced=synced)
        self.durability = Durability.REPLICATED

    def _stop(self) -> None:
        super()._stop()
        if self.store.server is not None:
            self.store.server.stop()

    def sleep(self) -> None:
        """Suspend it, unless its store forgets what it would need to claim another epoch."""
        if self.store.server is not None:
            super().sleep()

    def wake(self) -> None:
        """Resume it, and let it drop its epoch if it slept for long; it claims the next one once its store is awake."""
        super().wake()
        if self.store.server is not None:
            time.sleep(_DROPS_S)

    def _options(self, place: str) -> list[str]:
        del place
        return ["--cluster", CLUSTER, "--store", self.store.url(), "--node", "bench-1"]

    def _environment(self, place: str) -> dict[str, str]:
        return store_environment(self.store, super()._environment(place), place)

    def _answers(self) -> bool:
        """Whether it serves: at first it follows nobody, and then takes over."""
        try:
            return super()._answers()
        except HeadraceError as error:
            if not error.retryable:
                raise
            return False


def store_environment(store: MeasuredStore, before: dict[str, str], place: str) -> dict[str, str]:
    """The variables of a node's process: with the stores of benchmarks on the path, and what reaches the server."""
    path = os.pathsep.join(filter(None, (before["PYTHONPATH"], install_stores(place))))
    return {**before, **store.environment, "PYTHONPATH": path}


def publish_benchmarks(payload: Payload | None = None, stores: Stores = STORES) -> list[Benchmark]:
    """Batches, and one message at a time."""
    payload = payload or Payload()
    batches = [publishing(Headrace(), payload, synced=True)._replace(name="plain")]
    ones = [publishing_one(Headrace(), payload, headrace_one, _ONE_API)._replace(name="plain")]
    for make in stores:
        batches.append(_on(store := make(), publishing(Headrace(StoredNode(store)), payload, synced=True)))
        ones.append(_on(store := make(), publishing_one(Headrace(StoredNode(store)), payload, headrace_one, _ONE_API)))
    batches += [forgiven(publishing(peer(), payload, synced=False)) for peer in (NatsReplicated, KafkaReplicated)]
    for peer in (NatsReplicated(), KafkaReplicated()):
        ones.append(forgiven(publishing_one(peer, payload, type(peer).publish_one, peer.api["one"])))
    return [
        Benchmark({"publish_replicated": rate()}, batches, payload.params, None, payload.count_max),
        Benchmark(
            {"publish_one_p50_ms": percentile(50, "ms")}, ones, {"size": payload.size, "batch": 1}, None, _ONES_MAX
        ),
    ]


def _on(store: MeasuredStore, subject: Subject) -> Subject:
    return subject._replace(name=store.name, params={**subject.params, "durability": store.words})


Publish = Callable[..., list[float]]
"""Called with a contestant, a topic and values; publishes one after the other, and returns what each took."""


def publishing_one(contestant: Contestant, payload: Payload, publish: Publish, api: str) -> Subject:
    """One message after the other, each once that before is acknowledged."""
    numbers = itertools.count()
    is_ours = isinstance(contestant, Headrace)

    def prepare(place: str) -> None:
        contestant.node.start(place, synced=is_ours)

    def sample(_: str, count: int) -> Sample:
        topic = f"ones{next(numbers)}"
        contestant.create(topic)
        total = count + _WARM_UP
        taken = publish(contestant, topic, payload.values(total))
        comparison = Comparison(payload)
        contestant.consume(topic, total, comparison.take)
        comparison.finish(total)
        contestant.delete(topic)
        return Sample(sum(taken[_WARM_UP:]), taken[_WARM_UP:])

    params = {"api": api, "durability": contestant.words[is_ours]}
    return Subject(contestant.name, sample, params, 1, prepare, contestant.node.stop)


def headrace_one(contestant: Headrace, topic: str, values: Iterable[bytes]) -> list[float]:
    """Publish with Headrace's own client."""

    async def publish() -> list[float]:
        taken = []
        async with await connect_async(contestant.node.address) as bus:
            await bus.describe_topic(topic)
            for value in values:
                begin = time.perf_counter()
                await bus.publish(topic, value)
                taken.append(time.perf_counter() - begin)
        return taken

    return run_async(publish())


def wait_for_owner(address: str, patience_s: float = 60.0) -> None:
    """Wait until a node of the cluster serves."""
    with connect(address, timeout=patience_s, wait=patience_s) as bus:
        bus.info()
