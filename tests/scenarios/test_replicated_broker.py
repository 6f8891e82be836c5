"""A whole broker on a replicated disk: another machine that restores the objects has everything acknowledged."""

from random import Random

import pytest
from tests.replica import check_replica, replay, replicated, seal, tree

from headrace.model.batch import parse
from headrace.model.leasing import Ack, Holding, Lease, Leased
from headrace.model.requests import TopicCreate, TopicDelete, TopicList
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import MemoryDisk, Workbench

ROOT = "/data/shards/000"
LEASE_MS = 60_000


class Shard:
    """A shard that one machine after the other owns: each restores what the store has, and starts a broker on it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.epoch = 0
        self.now_us = 1_700_000_000_000_000
        self.take_over()

    def take_over(self) -> None:
        """Lose the machine, with everything that the store does not have."""
        if self.epoch:
            self.now_us = self.bench.now_us
            self.disk.writer.abandon()
            seal(self.store, self.epoch, self.epoch + 1)
        restored = tree(replay(self.store, self.epoch), "/copy")
        self.epoch += 1
        self.inner = MemoryDisk()
        self.inner.make_directory(ROOT)
        for path, content in sorted(restored.items()):
            if content is None:
                self.inner.make_directory(f"{ROOT}/{path}")
            else:
                self.inner.write(self.inner.open(f"{ROOT}/{path}", create=True), 0, content)
        self.disk: ReplicatedDisk = replicated(self.inner, ROOT, self.store, self.epoch)
        self.restart()

    def restart(self) -> None:
        """Kill the broker's process, and start another on the same machine, in the same epoch."""
        self.bench = Workbench(ROOT, disk=self.disk, now_us=self.now_us)

    def lease(self, messages_max: int) -> dict[bytes, Holding]:
        """Lease jobs: each value with what settles it."""
        answer = self.bench.ask(Lease("jobs", messages_max=messages_max, lease_ms=LEASE_MS))
        if isinstance(answer, Leased):
            return {}  # without a body
        found, position, values, body = {}, 0, [], bytes(answer.body)
        while position < len(body):
            batch = parse(memoryview(body), position)
            values += batch.columns().values
            position += batch.length
        held = [Holding(one.partition, one.lease, [at]) for one in answer.answer.portions for at in one.all_offsets]
        for value, holding in zip(values, held, strict=True):
            found[value] = holding
        return found

    def check(self) -> None:
        """A replica has the same files as the owner, byte by byte."""
        check_replica(self.disk, self.inner, ROOT, self.store, self.epoch)


def test_everything_acknowledged_survives_the_loss_of_machine_after_machine() -> None:
    shard = Shard()
    expected: list[bytes | None] = []
    shard.bench.ask(TopicCreate("orders", {"partitions": 2}))
    for machine in range(6):
        for number in range(20):
            values = [b"%d.%d.%d" % (machine, number, index) for index in range(3)]
            shard.bench.publish("orders", values, partition=1)
            expected += values
        shard.check()
        shard.take_over()
        assert shard.bench.values("orders", 1) == expected
        assert shard.bench.values("orders", 0) == []


@pytest.mark.parametrize("seed", range(8))
def test_jobs_are_done_once_over_restarts_and_failovers(seed: int) -> None:
    random, shard = Random(seed), Shard()
    shard.bench.ask(TopicCreate("jobs"))
    published: set[bytes] = set()
    done: set[bytes] = set()
    held: dict[bytes, tuple[Holding, int]] = {}
    for step in range(120):
        kind = random.choices(["publish", "lease", "ack", "pass", "restart", "fail over"], [5, 5, 5, 2, 1, 1])[0]
        bench = shard.bench
        held = {value: one for value, one in held.items() if one[1] > bench.now_us}
        if kind == "publish":
            values = [b"%d.%d" % (step, index) for index in range(random.randint(1, 5))]
            bench.publish("jobs", values)
            published |= set(values)
        elif kind == "lease":
            for value, holding in shard.lease(random.randint(1, 4)).items():
                assert value not in done, "a job that was done was handed out again"
                assert value not in held, "a job was handed out to two"
                held[value] = holding, bench.now_us + LEASE_MS * 1000
        elif kind == "ack" and held:
            value = random.choice(sorted(held))
            holding, _ = held.pop(value)
            assert bench.ask(Ack("jobs", [holding])).refused == []
            done.add(value)
        elif kind == "pass":
            bench.tick(random.choice([1, 90]))
        elif kind == "restart":
            shard.now_us = bench.now_us
            shard.restart()
        elif kind == "fail over":
            shard.take_over()
    shard.take_over()
    shard.bench.tick(2 * LEASE_MS / 1000)
    while found := shard.lease(100):
        for value, holding in found.items():
            assert value not in done
            assert shard.bench.ask(Ack("jobs", [holding])).refused == []
            done.add(value)
    assert done == published
    shard.check()


def test_topics_that_were_deleted_are_gone_everywhere() -> None:
    shard = Shard()
    for number in range(5):
        shard.bench.publish(f"t{number}", [b"x"] * 10)
    shard.bench.ask(TopicDelete("t3"))
    shard.bench.tick(10)
    shard.check()
    shard.take_over()
    assert [topic.topic for topic in shard.bench.ask(TopicList()).topics] == ["t0", "t1", "t2", "t4"]
    shard.check()
