"""Faults of a cluster's nodes, one round after the other, chosen by seeded dice."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from tests.faults.cluster_history import SENT, Record, now_us
from tests.faults.cluster_network import FROM_NODES, INBOUND
from tests.faults.cluster_processes import ClusterNode, ClusterProcesses
from tests.faults.cluster_stage import ClusterClients

KILL, PAUSE, PARTITION = "kill -9", "SIGSTOP", "partition"
STOP = "SIGTERM"
"""No fault, but an end in peace: the shard is handed over."""
_WITHOUT_FAILOVER = (INBOUND, FROM_NODES)
"""Partitions through which the owner reaches the store: it keeps serving whoever reaches it."""
_CUT_S = 2.0
_OWNER = 0.85
"""How often a fault hits the node that serves; else one that follows."""


class Fault(NamedTuple):
    """One fault that was made."""

    kind: str
    detail: str
    node: str
    was_serving: bool
    begin_us: int
    served_us: int
    """When clients got on again."""
    healed_us: int


class FaultDriver:
    """Makes faults, and waits after each until all clients get on again."""

    def __init__(
        self, cluster: ClusterProcesses, clients: ClusterClients, dice: Random, deck: Sequence[str] = ()
    ) -> None:
        """`deck` has the kinds of the first partitions; by default, and then, all kinds come in turn."""
        self._cluster = cluster
        self._clients = clients
        self._dice = dice
        self._deck = list(deck)
        self.faults: list[Fault] = []

    def run(self, kinds: Iterable[str]) -> None:
        """One round for each kind."""
        for kind in kinds:
            self._progress()
            time.sleep(self._dice.uniform(0, 0.3))
            owner = self._cluster.owner()
            others = [node for node in self._cluster.nodes.values() if node is not owner]
            victim = owner if self._dice.random() < _OWNER else self._dice.choice(others)
            make = {KILL: self._kill, STOP: self._stop, PAUSE: self._pause, PARTITION: self._partition}[kind]
            make(victim, victim is owner)
        self._progress()

    def _kill(self, victim: ClusterNode, was_serving: bool) -> None:
        begin_us = now_us()
        victim.kill()
        served_us = self._served(victim, was_serving)
        victim.start()
        self._note(KILL, "", victim, was_serving, begin_us, served_us)

    def _stop(self, victim: ClusterNode, was_serving: bool) -> None:
        begin_us = now_us()
        victim.stop()
        served_us = self._served(victim, was_serving)
        victim.start()
        self._note(STOP, "", victim, was_serving, begin_us, served_us)

    def _pause(self, victim: ClusterNode, was_serving: bool) -> None:
        begin_us = now_us()
        victim.pause()
        try:
            served_us = self._served(victim, was_serving)
            time.sleep(self._dice.choice((0, 0, 0.5)))
        finally:
            victim.resume()
        self._note(PAUSE, "", victim, was_serving, begin_us, served_us)

    def _partition(self, victim: ClusterNode, was_serving: bool) -> None:
        if not self._deck:
            self._deck = list(self._cluster.network.partitions)
            self._dice.shuffle(self._deck)
        detail = self._deck.pop()
        begin_us = now_us()
        self._cluster.network.cut(victim.name, detail)
        try:
            if detail in _WITHOUT_FAILOVER:
                time.sleep(_CUT_S)
            else:
                self._served(victim, was_serving)
        finally:
            self._cluster.network.heal()
        self._note(PARTITION, detail, victim, was_serving, begin_us, self._progress())

    def _served(self, victim: ClusterNode, was_serving: bool) -> int:
        """Wait until another node serves, if the victim did, and clients get on."""
        if was_serving:
            self._cluster.serving(but=victim)
        return self._progress()

    def _progress(self) -> int:
        return self._clients.wait_for_progress(now_us(), self._cluster.check)

    def _note(
        self, kind: str, detail: str, victim: ClusterNode, was_serving: bool, begin_us: int, served_us: int
    ) -> None:
        fault = Fault(kind, detail, victim.name, was_serving, begin_us, served_us, now_us())
        self.faults.append(fault)
        role = "serving" if was_serving else "following"
        lasted_s = (fault.healed_us - begin_us) / 1e6
        print(f"{len(self.faults)}: {kind} {detail} of {victim.name}, which was {role}; {lasted_s:.1f} s", flush=True)


def pauses_after(faults: Iterable[Fault], records: Iterable[Record]) -> list[float]:
    """How many seconds no producer was acknowledged around each fault of the serving node."""
    times = sorted(one.time_us for one in records if one.what == SENT and not one.node)
    found = []
    for fault in faults:
        around = [one for one in times if fault.begin_us - 500_000 <= one <= fault.healed_us + 2_000_000]
        if fault.was_serving:
            found.append(max((two - one for one, two in pairwise(around)), default=0) / 1e6)
    return found


def failover_lines(faults: Sequence[Fault], records: Sequence[Record]) -> list[str]:
    """The pauses of producers by kind of fault: the median and the worst."""
    found: dict[str, list[float]] = defaultdict(list)
    hit = [fault for fault in faults if fault.was_serving]
    for fault, pause_s in zip(hit, pauses_after(hit, records), strict=True):
        found[f"{fault.kind} {fault.detail}".strip()].append(pause_s)
    return [
        f"{kind}: {len(gaps)} failovers, longest pause of producers p50 {sorted(gaps)[len(gaps) // 2]:.2f} s, "
        f"max {max(gaps):.2f} s"
        for kind, gaps in sorted(found.items())
    ]
