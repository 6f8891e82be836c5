"""A world: a simulated cluster with clients and faults from a seed, and the checks at its end."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.faults.cluster_history import FinalLog, mistakes
from tests.faults.simulated_clients import PLANS, TOPICS, Clients, answer_of, read_batches

from headrace.broker.settings import BrokerSettings
from headrace.model.leasing import Find
from headrace.model.reading import Fetch
from headrace.storage.replicated.keys import ShardKeys
from headrace.storage.replicated.restore import restore_newest
from headrace.storage.replicated.writer import WalWriter
from headrace.testing import ClusterWorkbench, MemoryDisk
from headrace.testing.cluster_workbench import read_tree
from headrace.testing.simulated_machine import CrashPlan, SimulatedWriter

FAULTS_S = 20.0
END_S = 120.0
SETTINGS = BrokerSettings(journal_bytes=1 << 14, maintenance_seconds=2.0)


class WorldBroken(AssertionError):
    """A promise was not kept."""


class World:
    """A cluster, its clients, and what happens to them."""

    def __init__(
        self,
        seed: int | str,
        new_writer: Callable[..., WalWriter] = SimulatedWriter,
        crash_plan: CrashPlan | None = None,
    ) -> None:
        self.seed = seed
        self.cluster = ClusterWorkbench(seed, 3, settings=SETTINGS, new_writer=new_writer, crash_plan=crash_plan)
        self.clients = Clients(self.cluster)
        self.kills: Counter[str] = Counter()
        """By what the node was doing."""
        self._dice = self.cluster.simulation.random
        self._is_calm = False

    def run(self, faults: Callable[["World"], None] | None = None, seconds: float = FAULTS_S) -> None:
        """Live through faults, by default any, and check everything at the end."""
        try:
            self.clients.start()
            self.cluster.run(2)
            self.cluster.spawn("faults", lambda: (faults or World.any_faults)(self))
            self.cluster.run(seconds)
            self._finish()
            self._check()
        except AssertionError as error:
            raise WorldBroken(f"seed {self.seed!r}: {error}") from error
        finally:
            self.cluster.close()

    # Faults.

    def any_faults(self) -> None:
        """Do this and that to the cluster."""
        kinds = [
            *(self._kill, self._kill, self._kill_soon, self._kill_soon, self._pause, self._cut_store),
            *(self._cut_network, self._lose, self._jump, self._hand_over, self._stop, self._lose_reports),
        ]
        while not self._is_calm:
            self._dice.choice(kinds)(self._victim())
            self.cluster.sleep(self._dice.uniform(0.2, 3.0))

    def _victim(self) -> str:
        serving = self.cluster.serving()
        if serving is not None and self._dice.random() < 0.6:
            return serving.name
        return self._dice.choice(list(self.cluster.machines))

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self.cluster.simulation.after(round(seconds * 1e6), call)

    def restart(self, name: str) -> None:
        """Start a node again after its death, on its directory, on a new one, or on one with some bytes changed."""
        node = self.cluster.machines[name].node
        if node is not None and node.process.is_alive:
            return
        chance = self._dice.random()
        if chance < 0.15:
            self.cluster.lose_directory(name)
        elif chance < 0.4:
            self.cluster.rot(name)
        self.cluster.start(name)

    def _kill(self, name: str) -> None:
        node = self.cluster.machines[name].node
        assert node is not None
        if node.process.is_alive:
            self.kills[node.activity] += 1
            self.cluster.kill(name)
            self._later(self._dice.uniform(0.1, 5), lambda: self.restart(name))

    def _kill_soon(self, name: str) -> None:
        node = self.cluster.machines[name].node
        assert node is not None
        if node.process.is_alive:
            node.point.kill_at = node.point.steps + self._dice.randint(1, 80)

            def dead() -> None:
                self.kills[node.point.killed_in.split(":")[0]] += 1
                self._later(self._dice.uniform(0.1, 5), lambda: self.restart(name))

            node.process.on_death.append(dead)

    def _pause(self, name: str) -> None:
        self.cluster.pause(name, self._dice.choice((0.5, 3, 8)))

    def _cut_store(self, name: str) -> None:
        cut = self.cluster.store_conditions.cut
        cut.add(name)
        self._later(self._dice.uniform(0.5, 8), lambda: cut.discard(name))

    def _cut_network(self, name: str) -> None:
        pair = frozenset((name, self._dice.choice([*self.cluster.machines, "clients"])))
        self.cluster.cut.add(pair)
        self._later(self._dice.uniform(0.5, 8), lambda: self.cluster.cut.discard(pair))

    def _lose(self, name: str) -> None:
        del name
        conditions = self.cluster.store_conditions
        conditions.lost_requests, conditions.lost_answers, conditions.late = 0.1, 0.1, 0.05
        self._later(self._dice.uniform(1, 5), conditions.heal)

    def _lose_reports(self, name: str) -> None:
        del name
        self.cluster.lost_reports = self._dice.choice((0.0, 0.5))

    def _jump(self, name: str) -> None:
        self.cluster.machines[name].skew_us = self._dice.randint(-4_000_000, 4_000_000)

    def _hand_over(self, name: str) -> None:
        del name
        serving = self.cluster.serving()
        if serving is not None:
            serving.hand_over()

    def _stop(self, name: str) -> None:
        node = self.cluster.machines[name].node
        assert node is not None
        if node.process.is_alive:
            node.stop()
            node.process.on_death.append(
                lambda: self._later(self._dice.uniform(0.1, 3), lambda: self.cluster.start(name))
            )

    def zombies(self) -> None:
        """Pause the owner again and again, for so long that another node takes over, while clients go on asking it."""
        while not self._is_calm:
            serving = self.cluster.serving()
            if serving is not None:
                self.cluster.pause(serving.name, self._dice.uniform(3.5, 5))
            self.cluster.sleep(self._dice.uniform(5, 6))

    def one_crash(self) -> None:
        """Have checkpoints, a hand-over, a failover and a restore, in one of which the plan kills a node."""
        self.cluster.checkpoint_s = (0.4, 0.8)
        self._hand_over("")
        self.cluster.sleep(1.5)
        serving = self.cluster.serving()
        if serving is not None:
            self._kill(serving.name)
        self.cluster.sleep(3.5)
        for name in self.cluster.machines:
            self.cluster.start(name)  # also the one that the plan has killed

    # The end.

    def _finish(self) -> None:
        """Heal everything, and let the clients finish what they began."""
        self._is_calm = True
        cluster = self.cluster
        for machine in cluster.machines.values():
            if machine.node is not None:
                machine.node.point.kill_at = None
                machine.node.process.paused_until_us = 0
        cluster.run(3)
        cluster.heal()
        cluster.run(3)
        cluster.heal()
        self.clients.is_stopping = True
        cluster.run(END_S, lambda: not self.clients.running)
        assert not self.clients.running, f"these clients do not come to an end: {self.clients.running}"

    def _check(self) -> None:
        final, dues = self._read_all()
        wrong = mistakes(self.clients.records, final)
        kinds = sorted({one.split(":")[0] for one in wrong})
        assert not wrong, "\n".join([f"broken: {kinds}", *wrong[:5]])
        for offset, may_be in self.clients.plans.items():
            found = dues.get(offset, 0)
            assert found in may_be, f"plan {offset} is due at {found}, not at one of {may_be}"
        self._check_trees()

    def _read_all(self) -> tuple[FinalLog, dict[int, int]]:
        final: FinalLog = {(topic, 0): {} for topic in TOPICS}
        dues: dict[int, int] = {}
        done: list[bool] = []

        def read() -> None:
            client = self.cluster.client("the last reader")
            for topic in TOPICS:
                offset, end = 0, 1
                while offset < end:
                    told = client.ask(Fetch(topic, 0, offset))
                    final[topic, 0].update(read_batches(told, offset))
                    offset, end = answer_of(told).next_offset, answer_of(told).end_offset
            found = answer_of(client.ask(Find(PLANS, messages_max=1000)))
            dues.update({one.offset: one.ready_us for one in found.messages})
            done.append(True)

        self.cluster.spawn("the last reader", read)
        self.cluster.run(END_S, lambda: bool(done))
        assert done, "the last reader gets no answer"
        return final, dues

    def _check_trees(self) -> None:
        """All directories are the same at the same position, and so is one that is restored from the store."""
        cluster = self.cluster

        def is_quiet() -> bool:
            owner = cluster.serving()
            if owner is None or owner.owned is None or owner.owned.writer.backlog_bytes:
                return False
            return all(one.committed == owner.committed for one in cluster.live_nodes())

        cluster.run(END_S, is_quiet)
        assert is_quiet(), "the followers do not catch up"
        trees = {name: cluster.tree(name) for name in cluster.machines}
        disk = MemoryDisk()
        restore_newest(cluster.store, ShardKeys(cluster.name, 0), disk, "/restored").poll()
        trees["the store"] = read_tree(disk, "/restored")
        owner = cluster.serving()
        assert owner is not None
        first = trees[owner.name]
        for name, tree in trees.items():
            other = sorted(path for path in first.keys() | tree.keys() if first.get(path) != tree.get(path))
            assert not other, f"the directories of {owner.name} and {name} differ in {other[:5]}"


def run_world(seed: int | str, **given: Any) -> World:
    """Run a world with any faults."""
    world = World(seed, **given)
    world.run()
    return world
