"""A whole cluster in one process: nodes with real brokers and disks, a simulated network, store and clock.

Every run with the same seed is the same. Clients are functions that run on simulated threads; `ClusterClient.ask` sends
a request to the node that serves, and waits in virtual time.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.broker.settings import BrokerSettings
from headrace.model.errors import ConnectionFailed, Fenced, HeadraceError, NotServing, Timeout
from headrace.model.request import Request
from headrace.storage.replicated.listing import walk
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.store import SharedStore
from headrace.testing.memory_disk import MemoryDisk
from headrace.testing.simulated_machine import CrashPlan, SimulatedWriter, StoreConditions
from headrace.testing.simulated_node import DIRECTORY, SimulatedMachine, SimulatedNode
from headrace.testing.simulation import Simulation
from headrace.testing.workbench import START_US

_ASK_S = 3.0


class ClusterAnswer(NamedTuple):
    """An answer, who gave it, and when by the broker's own time."""

    answer: Any
    node: str
    time_us: int


class ClusterWorkbench:
    """A cluster for tests.

    >>> from headrace.testing import ClusterWorkbench
    >>> from headrace.model.requests import TopicCreate
    >>> cluster = ClusterWorkbench(seed=1, nodes=2)
    >>> answers = []
    >>> def client():
    ...     answers.append(cluster.client("me").ask(TopicCreate("orders")).answer.topic)
    >>> cluster.spawn("me", client)
    >>> cluster.run(10)
    >>> answers
    ['orders']
    >>> cluster.close()
    """

    name = "sim"

    def __init__(
        self,
        seed: int | str = 0,
        nodes: int = 3,
        *,
        settings: BrokerSettings | None = None,
        new_writer: Callable[..., WalWriter] = SimulatedWriter,
        crash_plan: CrashPlan | None = None,
    ) -> None:
        """A cluster whose nodes start at once. `new_writer` may be a wrong one, to see that a test finds it."""
        self.simulation = Simulation(seed)
        self.store: SharedStore = MemoryStore(f"simulation {seed}")
        self.store_conditions = StoreConditions()
        self.broker_settings = settings or BrokerSettings()
        self.new_writer = new_writer
        self.checkpoint_s = (2.0, 8.0)
        """The least and the longest time between two checkpoints."""
        self.keep_us = 0
        """For how long what is older than the newest checkpoint is kept."""
        self.latency_us = (100, 4_000)
        """Of messages between nodes, and between clients and nodes."""
        self.cut: set[frozenset[str]] = set()
        """Pairs of names, of nodes and `clients`, between which no message arrives."""
        self.lost_reports = 0.0
        """The share of reports of followers that are lost."""
        self.crash_plan = crash_plan
        self.counts: Counter[str] = Counter()
        self._clients = self.simulation.new_process("clients")
        names = [f"n{number}" for number in range(1, nodes + 1)]
        self.machines = {name: SimulatedMachine(self.simulation, name, START_US) for name in names}
        for name in names:
            self.start(name)

    # Nodes.

    def start(self, name: str) -> SimulatedNode:
        """Start the process of a node, if none runs."""
        machine = self.machines[name]
        if machine.node is None or not machine.node.process.is_alive:
            machine.node = SimulatedNode(self, machine)
            self.count("started")
        return machine.node

    def live_nodes(self) -> list[SimulatedNode]:
        """The nodes whose processes run."""
        return [one.node for one in self.machines.values() if one.node is not None and one.node.process.is_alive]

    def serving(self) -> SimulatedNode | None:
        """The node that serves with the highest epoch; None if there is none."""
        nodes = [one for one in self.live_nodes() if one.serving is not None and one.serving.is_serving]
        return max(nodes, key=lambda one: 0 if one.owned is None else one.owned.epoch, default=None)

    def kill(self, name: str) -> None:
        """Kill the process of a node."""
        node = self.machines[name].node
        if node is not None:
            node.process.kill()

    def pause(self, name: str, seconds: float) -> None:
        """Let the process of a node do nothing for some time, and go on then as if nothing had happened."""
        node = self.machines[name].node
        if node is not None and node.process.is_alive:
            node.process.paused_until_us = self.simulation.now_us + round(seconds * 1e6)

    def lose_directory(self, name: str) -> None:
        """Give a machine, whose process must be dead, a new disk."""
        self.machines[name].disk = MemoryDisk()

    def rot(self, name: str, count: int = 4) -> int:
        """Change some bytes of the replicated directory of a node, whose process must be dead; returns how many."""
        disk, dice = self.machines[name].disk, self.simulation.random
        root = f"{DIRECTORY}/shards/000"
        files = [f"{root}/{path}" for path, is_directory in walk(disk, root) if not is_directory]
        rotten = 0
        for path in (dice.choice(files) for _ in range(count if files else 0)):
            file = disk.open(path, write=True)
            if size := disk.size(file):
                at = dice.randrange(size)
                disk.write(file, at, bytes([disk.read(file, at, 1)[0] ^ (1 << dice.randrange(8))]))
                rotten += 1
        return rotten

    def tree(self, name: str) -> dict[str, bytes]:
        """The replicated directory of a node, by path; directories have no content and end with a slash."""
        return read_tree(self.machines[name].disk, f"{DIRECTORY}/shards/000")

    def heal(self) -> None:
        """End all faults of networks, and start the nodes that are not running."""
        self.store_conditions.heal()
        self.cut.clear()
        self.lost_reports = 0.0
        for name in self.machines:
            self.start(name)

    def count(self, what: str) -> None:
        """Count that something has happened."""
        self.counts[what] += 1

    # Time.

    def run(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, until something is true; raises what a simulated thread raised."""
        self.simulation.run(self.simulation.now_us + round(seconds * 1e6), stop)
        if self.simulation.failures:
            raise AssertionError(self.simulation.failures[0])

    def spawn(self, name: str, call: Callable[[], None]) -> None:
        """Run a client on a simulated thread."""
        self._clients.spawn(name, call)

    def sleep(self, seconds: float) -> None:
        """Let the client that calls sleep."""
        self.simulation.sleep(seconds)

    def close(self) -> None:
        """End all threads."""
        self.simulation.close()

    # The network.

    def client(self, name: str) -> "ClusterClient":
        """A client, which finds the node that serves."""
        return ClusterClient(self, name)

    def is_cut(self, one: str, two: str) -> bool:
        """Whether no message arrives between two."""
        return frozenset((one, two)) in self.cut

    def later(self, call: Callable[[], None]) -> None:
        """Call something after the time that a message takes."""
        self.simulation.after(self.simulation.random.randint(*self.latency_us), call)

    def send_report(self, follower: SimulatedNode, owner: str, epoch: int) -> None:
        """Carry a report to the owner, and its answer back, unless it is lost."""
        position, dice = follower.replica.position, self.simulation.random
        if dice.random() < self.lost_reports:
            return

        def arrive() -> None:
            node = self.machines[owner].node
            if self.is_cut(follower.name, owner):
                return
            if node is None or not node.process.is_alive:
                self.later(lambda: follower.report_refused(epoch))
            elif node.process.paused_until_us <= self.simulation.now_us:
                answer = node.take_report(follower.name, position)
                if answer is not None and dice.random() >= self.lost_reports:
                    self.later(lambda: follower.report_answered(answer))

        self.later(arrive)


class ClusterClient:
    """A client of a cluster, with one connection and one request at a time. It must run on a simulated thread."""

    def __init__(self, cluster: ClusterWorkbench, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._node = next(iter(cluster.machines))
        self._connections = 0

    def ask(
        self, request: Request[Any], body: bytes = b"", *, repeats: bool = True, timeout_s: float = _ASK_S
    ) -> ClusterAnswer:
        """Send a request to the node that serves; with `repeats`, again until it is answered or refused for good."""
        while True:
            try:
                return self.ask_node(self._node, request, body, timeout_s)
            except (ConnectionFailed, NotServing, Timeout) as error:
                is_sure = isinstance(error, NotServing) and bool(error.details.get("standby"))
                self._find()
                if not repeats and not is_sure:
                    raise
            except HeadraceError as error:
                if not error.retryable or not repeats:
                    raise
            self._cluster.sleep(0.1)

    def ask_node(self, name: str, request: Request[Any], body: bytes = b"", timeout_s: float = _ASK_S) -> ClusterAnswer:
        """Send a request to a node, whoever serves; raises ConnectionFailed, NotServing or Timeout if it cannot."""
        cluster, told = self._cluster, cluster_event(self._cluster)
        outcome: list[tuple[Any, int]] = []
        connection = f"{self._name}.{self._connections}"

        def reply(answer: Any, time_us: int) -> None:
            def arrive() -> None:
                if not cluster.is_cut("clients", name):
                    outcome.append((answer, time_us))
                    told.set()

            cluster.later(arrive)

        def arrive() -> None:
            node = cluster.machines[name].node
            if cluster.is_cut("clients", name):
                return
            if node is None or not node.process.is_alive:
                reply(ConnectionFailed("connection refused"), 0)
            elif node.serving is None or not node.serving.is_serving:
                if node.process.paused_until_us <= cluster.simulation.now_us:
                    reply(NotServing("standing by", standby=True), 0)
            else:
                node.serving.ask(connection, request, body, reply)

        cluster.later(arrive)
        if not told.wait(timeout_s):
            self._drop(name, connection)
            raise Timeout(f"{name} has not answered")
        answer, time_us = outcome[0]
        if isinstance(answer, Fenced):
            answer = ConnectionFailed(str(answer))  # in doubt, as after a lost connection
        if isinstance(answer, HeadraceError):
            if isinstance(answer, ConnectionFailed | NotServing):
                self._drop(name, connection)
            raise answer
        return ClusterAnswer(answer, name, time_us)

    def _drop(self, name: str, connection: str) -> None:
        """Close the connection; the node learns it later."""
        self._connections += 1

        def arrive() -> None:
            node = self._cluster.machines[name].node
            if node is not None and node.process.is_alive and node.serving is not None and node.serving.is_serving:
                node.serving.disconnect(connection)

        self._cluster.later(arrive)

    def forget(self) -> None:
        """Close the connection, and find the node that serves anew."""
        self._drop(self._node, f"{self._name}.{self._connections}")
        self._find()

    def _find(self) -> None:
        """Go to the node that serves, or to another one."""
        serving = self._cluster.serving()
        names = list(self._cluster.machines)
        dice = self._cluster.simulation.random
        self._node = serving.name if serving is not None and dice.random() < 0.8 else dice.choice(names)


def cluster_event(cluster: ClusterWorkbench) -> Any:
    """Something that a client can wait for."""
    return cluster.simulation.event()


def read_tree(disk: MemoryDisk, root: str) -> dict[str, bytes]:
    """All files below a directory with their content."""
    found: dict[str, bytes] = {}
    for path, is_directory in walk(disk, root):
        if is_directory:
            found[f"{path}/"] = b""
        else:
            file = disk.open(f"{root}/{path}")
            found[path] = disk.read(file, 0, disk.size(file))
    return found
