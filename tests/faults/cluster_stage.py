"""The clients of a cluster at work, and what they wrote down; a plain broker can be on the stage as well."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults.cluster_clients import EVENTS, JOBS, LEASE_S, STOP, TOPICS
from tests.faults.cluster_history import (
    COMMITTED,
    DONE_WHOLE,
    READ,
    SENT,
    TOLD,
    UNSENT,
    FinalLog,
    HistoryReader,
    Record,
    dump,
    mistakes,
    now_us,
)
from tests.faults.fork_server import PATIENCE_S, Child, Nursery

import headrace

_CLIENTS = "tests.faults.cluster_clients"
_ROLES = {
    "events-1": "produce",
    "events-2": "produce",
    "jobs-1": "produce",
    "replay-1": "replay",
    "worker-1": "work",
    "worker-2": "work",
    "consumer-1": "consume",
    "transactions-1": "transact",
}
_READERS = {topic: ("replay-1", "consumer-1") if topic == EVENTS else ("replay-1",) for topic in TOPICS}
"""Who reads a topic to its end."""
PROGRESS = {SENT, TOLD, COMMITTED, DONE_WHOLE}
"""Records that show that somebody serves."""


class ClusterClients:
    """All clients, started once; they live through every fault."""

    def __init__(self, nursery: Nursery, directory: Path, seed: int, url: str, nodes: dict[str, str]) -> None:
        self._nursery = nursery
        self._directory = directory
        self._seed = seed
        self._url = url
        self._nodes = nodes
        """Nodes to their own addresses, for the clients that stay with one."""
        self.reader = HistoryReader(directory)
        self._members: dict[str, Child] = {}
        self._failed: list[Record] = []
        self._progress: dict[str, Record] = {}
        """Kinds of progress to the last record of each."""
        self._ends: dict[tuple[str, str, int], int] = {}
        """Readers, topics and partitions to the highest offset that was read."""

    @property
    def records(self) -> list[Record]:
        """All that was written down, as far as it was read."""
        return self.reader.records

    def connect(self) -> headrace.Bus:
        """Another client of the cluster."""
        return headrace.connect(self._url, timeout=PATIENCE_S, wait=PATIENCE_S)

    def start(self) -> None:
        """Create the topics, and let all clients begin."""
        with self.connect() as bus:
            for topic, partitions in TOPICS.items():
                bus.create_topic(topic, partitions=partitions, segment_bytes=1 << 20)
            bus.create_subscription(JOBS, lease_seconds=LEASE_S, deliveries_max=0, retry_seconds=0.1)
        directory = str(self._directory)
        for name, role in _ROLES.items():
            function = f"{_CLIENTS}:{role}"
            self._members[name] = self._nursery.start(name, function, name, self._seed, self._url, directory)
        for node, address in self._nodes.items():
            name, function = f"sticky-{node}", f"{_CLIENTS}:stick"
            self._members[name] = self._nursery.start(name, function, name, self._seed, address, directory, node)

    def check(self) -> None:
        """All of them must be alive, and no call of a producer failed within its time-out."""
        for member in self._members.values():
            member.check()
        assert not self._failed, f"{len(self._failed)} messages were not sent, such as {self._failed[0]}"

    def wait_for_progress(self, since_us: int, during: Callable[[], None] | None = None) -> int:
        """Wait until producers, workers, the group and transactions all got on after a time; returns when all had."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._update()
            last_us = {what: self._progress[what].time_us if what in self._progress else 0 for what in PROGRESS}
            if min(last_us.values()) > since_us:
                return now_us()
            self.check()
            if during is not None:
                during()
            missing = [what for what, time_us in last_us.items() if time_us <= since_us]
            assert time.monotonic() < deadline, f"no client gets on with {missing}:\n{self.doing()}"
            time.sleep(0.02)

    def doing(self) -> str:
        """The last errors that clients wrote down, and what some of them are just doing."""
        errors = [f"{one.time_us} {one.who} {one.what}: {one.error}" for one in self.records if one.error]
        doing = [
            f"{name}:\n{self._members[name].doing()}" for name in ("events-1", "worker-1") if name in self._members
        ]
        return "\n".join([*errors[-20:], *doing])

    def finish(self) -> FinalLog:
        """No more is produced; workers and the group get to the end. Returns what readers see then."""
        (self._directory / STOP).touch()
        for name in [name for name, member in self._members.items() if name.startswith(("events", "jobs", "tr", "st"))]:
            self._members.pop(name).wait()
        with self.connect() as bus:
            final = {
                (topic, number): read_all(bus, topic, number)
                for topic, count in TOPICS.items()
                for number in range(count)
            }
            self._wait_for_the_end(bus, final)
        for member in list(self._members.values()):
            member.kill()
        self._update()
        return final

    def mistakes(self, final: FinalLog) -> list[str]:
        """Whatever is wrong; the history is kept beside the files of the test then."""
        found = mistakes(self.records, final)
        if found:
            dump(self.records, self._directory / "whole.history-in-order")
        return found

    def counts(self) -> Counter[str]:
        """How many records of each kind there are."""
        return Counter(one.what for one in self.records)

    def _wait_for_the_end(self, bus: headrace.Bus, final: FinalLog) -> None:
        queue = bus.queue(JOBS)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.check()
            self._update()
            stats = queue.stats()
            unread = [
                (who, *place)
                for place, values in final.items()
                for who in _READERS[place[0]]
                if values and self._ends.get((who, *place), -1) < max(values)
            ]
            if not (stats.waiting + stats.ready + stats.leased) and not unread:
                return
            assert time.monotonic() < deadline, f"not read to the end: {unread}, {stats}\n{self.doing()}"
            time.sleep(0.1)

    def _update(self) -> None:
        for one in self.reader.update():
            if one.what == UNSENT:
                self._failed.append(one)
            elif one.what == READ:
                key = one.who, one.topic, one.partition
                self._ends[key] = max(one.offset, self._ends.get(key, -1))
            elif one.what in PROGRESS and not one.node:
                self._progress[one.what] = one


def read_all(bus: headrace.Bus, topic: str, partition: int) -> dict[int, str]:
    """All offsets of a partition with their values."""
    found: dict[int, str] = {}
    offset = 0
    while batches := bus.fetch(topic, partition, offset):
        for batch in batches:
            columns = batch.columns()
            for place, value in zip(batch.places(columns), columns.values, strict=True):
                found[batch.base_offset + place] = (value or b"").decode()
            offset = batch.base_offset + batch.span
    return found
