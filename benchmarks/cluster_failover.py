"""Failover of a cluster of real processes on PostgreSQL: after kill -9, after a pause, cold, and on request."""

import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cluster_publish import CLUSTER, store_environment, wait_for_owner
from benchmarks.cluster_stores import MeasuredStore, postgres_store
from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.brokers import Comparison
from headrace.bench.measure import Benchmark, Sample, Subject, Unavailable, WrongResult, check, duration, percentile
from headrace.bench.payload import Payload
from headrace.bench.servers import HOST, BenchServer, ServerNode, free_port
from headrace.client._sync.bus import Bus
from headrace.client._sync.connecting import connect
from headrace.model.cluster_requests import NodeStatus

NODES = 3
KILLS, PAUSES, DRAINS = 4, 3, 3
"""How often in a sample."""
COLD_BYTES = 1 << 30
_COLD_SIZE = 1000
_TOPIC = "steady"
_PATIENCE_S = 60.0
_POLL_S = 0.02
_LAG_US_MAX = 1_000_000
_SETTLE_S = 1.0
"""How long a cluster is left alone before the next fault."""


class ClusterTrio(ServerNode):
    """Several `headrace serve` of one cluster, and its store."""

    def __init__(self, store: MeasuredStore, nodes: int = NODES) -> None:
        super().__init__()
        self.store = store
        self._nodes = nodes
        self._ports: dict[str, int] = {}
        self._running: dict[str, BenchServer] = {}
        self._place = ""

    @property
    def address(self) -> str:
        """The address for clients: all nodes."""
        return "headrace://" + ",".join(f"{HOST}:{port}" for port in self._ports.values())

    def find(self) -> None:
        """Make sure of the store's server."""
        if self.store.server is not None:
            self.store.server.find()

    def _start(self, place: str, *, synced: bool) -> None:
        self._place = place
        if self.store.server is not None:
            (Path(place) / "store").mkdir()
            self.store.server.start(str(Path(place) / "store"), synced=synced)
        for number in range(1, self._nodes + 1):
            self.add(f"node-{number}")
        self.wait_until_complete()

    def _stop(self) -> None:
        self._running.clear()
        super()._stop()
        if self.store.server is not None:
            self.store.server.stop()

    def add(self, name: str) -> None:
        """Start a node; one that ran before continues in its directory, on its port."""
        port = self._ports.setdefault(name, free_port())
        home = Path(self._place) / name
        home.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", "headrace", "serve", "--data", str(home / "data"), "--port", str(port)]
        command += ["--host", HOST, "--log-level", "info", "--cluster", CLUSTER, "--store", self.store.url()]
        command += ["--node", name, "--http-address", f"{HOST}:0"]
        environment = store_environment(self.store, HeadraceNode()._environment(str(home)), str(home))
        self._running[name] = BenchServer(command, str(home), environment=environment)
        self._servers.append(self._running[name])

    def kill(self, name: str) -> None:
        """End the process of a node as kill -9 does; returns when it is gone."""
        server = self._running.pop(name)
        self._servers.remove(server)
        server.stop()

    def pause(self, name: str) -> None:
        """Suspend the process of a node."""
        self._running[name].sleep()

    def resume(self, name: str) -> None:
        """Resume the process of a node."""
        self._running[name].wake()

    def forget(self, name: str) -> None:
        """Clients need not try a node that will not come again."""
        self._ports.pop(name)

    def owner(self) -> str:
        """The node that serves."""
        with connect(self.address, timeout=_PATIENCE_S) as bus:
            return bus.cluster.describe().shards[0].owner

    def wait_until_complete(self) -> None:
        """Wait until one node serves, and all others follow it closely."""
        wait_for_owner(self.address)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with connect(self.address, timeout=_PATIENCE_S) as bus:
                found = bus.cluster.describe()
            owner = found.shards[0].owner
            if {node.node for node in found.nodes if node.node == owner or _follows(node)} >= set(self._running):
                return
            if time.monotonic() > deadline:
                raise Unavailable(f"the nodes do not follow: {found}")
            time.sleep(_POLL_S)


def _follows(node: NodeStatus) -> bool:
    return node.role == "following" and node.lag_us < _LAG_US_MAX


class SteadyPublisher:
    """Publishes one numbered message after the other from a thread, and remembers when each was acknowledged."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._receipts: list[tuple[int, float, float]] = []
        """Offset, begin and acknowledgement of each message."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._publish, name="steady-publisher")
        self._thread.start()
        self.acknowledged_after(time.perf_counter())

    def _publish(self) -> None:
        try:
            with connect(self._address, timeout=_PATIENCE_S) as bus:
                bus.create_topic(_TOPIC, exist_ok=True)
                while not self._ended.is_set():
                    begin = time.perf_counter()
                    receipt = bus.publish(_TOPIC, b"%d" % len(self._receipts))
                    self._receipts.append((receipt.offset, begin, time.perf_counter()))
        except BaseException as error:  # noqa: BLE001 the thread that asks raises it
            self._error = error

    def acknowledged_after(self, moment: float) -> float:
        """Wait for the first message that was begun after a moment; returns when it was acknowledged."""
        at = len(self._receipts)
        deadline = time.perf_counter() + _PATIENCE_S
        while True:
            self._check()
            while at < len(self._receipts):
                _, begin, acknowledged = self._receipts[at]
                if begin > moment:
                    return acknowledged
                at += 1
            check(time.perf_counter() < deadline, f"nothing was acknowledged for {_PATIENCE_S:g} s")
            time.sleep(0.001)

    def longest_gap(self, since: float, until: float) -> float:
        """The longest time without an acknowledgement between two moments."""
        times = [acknowledged for _, _, acknowledged in self._receipts if since <= acknowledged <= until]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    def _check(self) -> None:
        if self._error is not None:
            raise WrongResult(f"publishing failed: {self._error!r}") from self._error

    def close(self) -> None:
        """Stop, and see that the topic has every acknowledged message once, at the offset of its receipt."""
        self.end()
        self._check()
        with connect(self._address, timeout=_PATIENCE_S) as bus:
            seen = _read(bus, _TOPIC)
        check(len(set(seen.values())) == len(seen), "a message is there twice")
        wrong = [offset for number, (offset, _, _) in enumerate(self._receipts) if seen.get(offset) != b"%d" % number]
        check(not wrong, f"{len(wrong)} acknowledged messages are not where their receipts say, such as {wrong[:3]}")

    def end(self) -> None:
        """Stop publishing."""
        self._ended.set()
        self._thread.join()


def _read(bus: Bus, topic: str) -> dict[int, bytes | None]:
    """All values of a topic of one partition, by offset."""
    last = bus.offsets(topic, at="latest")[0]
    found: dict[int, bytes | None] = {}
    with bus.subscribe(topic, start="earliest", timeout=_PATIENCE_S) as subscription:
        for batch in subscription.batches():
            found.update(zip(batch.offsets, batch.values, strict=True))
            if batch.offsets[-1] >= last - 1:
                return found
    return found


Fault = Callable[[ClusterTrio, SteadyPublisher], float]
"""Does something to the serving node, and returns what it cost, in seconds."""


def after_kill(trio: ClusterTrio, publisher: SteadyPublisher) -> float:
    """Kill the serving node, and start it again afterwards."""
    owner = trio.owner()
    begin = time.perf_counter()
    trio.kill(owner)
    took = publisher.acknowledged_after(time.perf_counter()) - begin
    trio.add(owner)
    return took


def after_pause(trio: ClusterTrio, publisher: SteadyPublisher) -> float:
    """Suspend the serving node, and let it go on afterwards: it finds that another has taken over."""
    owner = trio.owner()
    begin = time.perf_counter()
    trio.pause(owner)
    try:
        return publisher.acknowledged_after(time.perf_counter()) - begin
    finally:
        trio.resume(owner)


def after_drain(trio: ClusterTrio, publisher: SteadyPublisher) -> float:
    """Drain the serving node: the longest time without an acknowledgement is the pause."""
    with connect(trio.address, timeout=_PATIENCE_S) as bus:
        owner = bus.cluster.describe().shards[0].owner
        begin = time.perf_counter()
        bus.cluster.drain(owner)
    now = publisher.acknowledged_after(time.perf_counter())
    check(trio.owner() != owner, "the drained node still serves")
    with connect(trio.address, timeout=_PATIENCE_S) as bus:
        bus.cluster.drain(owner, drained=False)  # for the next round
    return publisher.longest_gap(begin - 0.1, now)


def failing_over(fault: Fault, words: str, make_store: Callable[[], MeasuredStore]) -> Subject:
    """A cluster of three nodes and a steady publisher, to which the same happens again and again."""
    trio = ClusterTrio(make_store())
    publishers: list[SteadyPublisher] = []

    def prepare(place: str) -> None:
        trio.start(place, synced=True)
        try:
            publishers.append(SteadyPublisher(trio.address))
        except BaseException:
            trio.stop()
            raise

    def sample(_: str, count: int) -> Sample:
        taken = []
        for _ in range(count):
            trio.wait_until_complete()
            time.sleep(_SETTLE_S)
            taken.append(fault(trio, publishers[0]))
        trio.wait_until_complete()
        return Sample(sum(taken), taken)

    def finish() -> None:
        try:
            while publishers:
                publishers.pop().close()
        finally:
            trio.stop()

    params = {"store": trio.store.words, "nodes": NODES, "measured": words}
    return Subject("headrace", sample, params, 1, prepare, finish)


def cold_start(cold_bytes: int, make_store: Callable[[], MeasuredStore]) -> Subject:
    """The only node dies; another one, with an empty directory, takes over what the store has."""
    trio = ClusterTrio(make_store(), nodes=1)
    payload = Payload(_COLD_SIZE)
    count = max(cold_bytes // _COLD_SIZE // payload.batch, 1) * payload.batch
    names = iter(range(2, 1 << 30))

    def prepare(place: str) -> None:
        trio.start(place, synced=True)
        try:
            with connect(trio.address, timeout=_PATIENCE_S) as bus, bus.producer("cold") as producer:
                bus.create_topic("cold")
                for values in payload.batches(count):
                    producer.send_many(values)
                producer.flush()
        except BaseException:
            trio.stop()
            raise

    def sample(_: str, __: int) -> Sample:
        owner, name = trio.owner(), f"node-{next(names)}"
        trio.kill(owner)
        begin = time.perf_counter()
        trio.add(name)
        trio.forget(owner)
        with connect(trio.address, timeout=_PATIENCE_S, wait=_PATIENCE_S) as bus:
            bus.publish(_TOPIC, b"it serves")
            took = time.perf_counter() - begin
            comparison, seen = Comparison(payload), 0
            with bus.subscribe("cold", start="earliest", timeout=_PATIENCE_S) as subscription:
                for batch in subscription.batches():
                    comparison.take([value or b"" for value in batch.values])
                    seen += len(batch.values)
                    if seen >= count:
                        break
        comparison.finish(count)
        return Sample(took)

    params = {
        "store": trio.store.words,
        "stored_bytes": count * _COLD_SIZE,
        "measured": "from the start of a process with an empty directory, just after the serving one was killed, to "
        "the first acknowledgement; then everything is read and compared",
    }
    return Subject("headrace", sample, params, 1, prepare, trio.stop)


def failover_benchmarks(
    *,
    kills: int = KILLS,
    pauses: int = PAUSES,
    drains: int = DRAINS,
    cold_bytes: int = COLD_BYTES,
    make_store: Callable[[], MeasuredStore] = postgres_store,
) -> list[Benchmark]:
    """What a failover costs whoever publishes; of each sample the 95th percentile of its faults, which is the worst."""
    until = "to the acknowledgement of the first message that was published after it"
    kill = failing_over(after_kill, f"from kill -9 of the serving node {until}", make_store)
    pause = failing_over(after_pause, f"from SIGSTOP of the serving node {until}", make_store)
    drain = failing_over(after_drain, "the longest time without an acknowledgement while a node is drained", make_store)
    return [
        Benchmark({"failover_kill_p95_s": percentile(95, "s")}, [kill], {"faults_per_sample": kills}, kills),
        Benchmark({"failover_pause_p95_s": percentile(95, "s")}, [pause], {"faults_per_sample": pauses}, pauses),
        Benchmark({"failover_cold_1gib_s": duration()}, [cold_start(cold_bytes, make_store)], {}, 1),
        Benchmark({"drain_pause_ms": percentile(95, "ms")}, [drain], {"faults_per_sample": drains}, drains),
    ]
