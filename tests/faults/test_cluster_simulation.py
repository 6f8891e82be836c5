"""Whole clusters in simulated worlds: real brokers on real replicated disks, killed, paused, cut off and handed over.

A world is a function of its seed, which is in the message of whatever is found: `run_world(seed)` repeats it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.faults.simulated_world import World, WorldBroken, run_world

from headrace.broker.commit_gate import CommitGate
from headrace.storage.replicated.epochs import read_manifest_steps
from headrace.storage.replicated.following import ShardFollower
from headrace.storage.replicated.keys import Position
from headrace.storage.replicated.steps import Steps
from headrace.storage.replicated.wal import PendingObject, PutOutcome
from headrace.testing.simulated_machine import CrashPlan, SimulatedWriter
from headrace.testing.simulated_node import DIRECTORY

WORLDS = 5
MANY_WORLDS = 200
FOUND_WITHIN = 12
ACTIVITIES = {"claim": 12, "recover": 60, "checkpoint": 40, "hand over": 30, "restore": 30, "follow": 30}
"""What nodes do, each with about as many steps of the disk and the store as it has in these worlds."""


def run_worlds(seeds: range) -> Counter[str]:
    """Run worlds; returns how often what happened in them."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += run_world(seed).cluster.counts
    return counts


def test_worlds() -> None:
    counts = run_worlds(range(WORLDS))
    for what in ("claims", "checkpoints", "restores"):
        assert counts[what] >= WORLDS, counts
    assert counts["handed over"] > 1, counts


def test_owners_that_wake_up_after_another_took_over() -> None:
    world = World("zombies")
    world.run(World.zombies)
    assert world.cluster.counts["fenced"] > 1


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_many_worlds(part: int) -> None:
    each = MANY_WORLDS // 20
    run_worlds(range(WORLDS + part * each, WORLDS + (part + 1) * each))


def test_a_world_is_a_function_of_its_seed() -> None:
    first, second = World("twice"), World("twice")
    first.run(seconds=6)
    second.run(seconds=6)
    assert first.clients.records == second.clients.records
    assert first.cluster.counts == second.cluster.counts


def crash(activity: str, step: int) -> str:
    """Kill a node at a step of something that it does; returns what it was about to do."""
    plan = CrashPlan(activity, step)
    world = World(f"{activity} {step}", crash_plan=plan)
    world.run(World.one_crash, seconds=6)
    return "" if plan.steps else activity


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_kill_at_a_step(activity: str) -> None:
    """A few of the steps of each, spread over it."""
    count = ACTIVITIES[activity]
    killed = [crash(activity, step) for step in (1 + count // 5, 1 + count * 3 // 5)]
    assert activity in killed


@pytest.mark.long
@pytest.mark.parametrize("activity", ACTIVITIES)
def test_kill_at_every_step(activity: str) -> None:
    for step in range(1, ACTIVITIES[activity] + 1):
        crash(activity, step)


# Wrong variants, which these worlds must find.


def find(match: str, **given: Any) -> None:
    """Run worlds until one is broken, and see that it is for this reason."""
    with pytest.raises(WorldBroken, match=match):
        run_short_worlds(**given)


def run_short_worlds(faults: Callable[[World], None] = World.any_faults, **given: Any) -> None:
    """Run worlds."""
    for seed in range(FOUND_WITHIN):
        World(seed, **given).run(faults)


class EarlyWriter(SimulatedWriter):
    """Acknowledges what is on its way to the store."""

    def _attempt(self, pending: PendingObject, data: bytes) -> PutOutcome:
        self._point.process.spawn("late put", lambda: self._put_late(pending, data))
        return PutOutcome.COMMITTED

    def _put_late(self, pending: PendingObject, data: bytes) -> None:
        self._simulation.sleep(0.1)
        while super()._attempt(pending, data) is PutOutcome.AGAIN:
            self._simulation.sleep(0.1)


class UnfencedWriter(SimulatedWriter):
    """Takes another node's seal for an object of its own."""

    def _look(self, position: int, key: str) -> PutOutcome:
        del position, key
        return PutOutcome.COMMITTED


def test_acknowledging_before_the_commit_is_found() -> None:
    find("lost|vanished|is missing before|lacks that object now", new_writer=EarlyWriter)


def test_a_writer_that_ignores_seals_is_found() -> None:
    find("lost|vanished|two values|missing before", faults=World.zombies, new_writer=UnfencedWriter)


def test_a_broker_without_the_commit_gate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommitGate, "answer", staticmethod(lambda outcome: outcome))
    monkeypatch.setattr(CommitGate, "pushing", staticmethod(lambda push: push))
    find("valid at the same time|transactions|positions")


def test_a_claim_without_seals_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def seal_steps(self: ShardFollower, epoch: int, nonce: bytes, time_us: int) -> Steps[None]:
        del nonce, time_us
        yield from read_manifest_steps(self.keys)
        while self.position.epoch < epoch:
            yield from self.poll_steps(end=epoch)
            if self.position.epoch < epoch:
                self.target.begin_epoch()
                self.position = Position(self.position.epoch + 1, 0)

    monkeypatch.setattr(ShardFollower, "seal_steps", seal_steps)
    find("lost|two values|vanished|leases|missing before|do not come to an end")


def test_a_directory_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check = World._check_trees

    def check_rotten(self: World) -> None:
        self.cluster.run(5)
        owner = self.cluster.serving()
        assert owner is not None
        other = next(name for name in self.cluster.machines if name != owner.name)
        disk = self.cluster.machines[other].disk
        file = disk.open(f"{DIRECTORY}/shards/000/format", write=True)
        disk.write(file, 5000, b"rot")
        check(self)

    monkeypatch.setattr(World, "_check_trees", check_rotten)
    with pytest.raises(WorldBroken, match=r"differ in .'format'"):
        World("rotten").run(World.one_crash, seconds=3)
