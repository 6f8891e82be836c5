"""Which node may take the shard over: what is refused for good, and what the client may ask again in a moment."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cluster.claims import best_successor
from headrace.cluster.node_record import BLOCKED, FOLLOWING, RESTORING, SERVING, STOPPED, NodeRecord
from headrace.cluster.peers import FollowerReports
from headrace.model.cluster_requests import ClusterDrain, ClusterMove, NodeReport
from headrace.model.errors import Busy, InvalidArgument
from headrace.server.cluster_port import ServingNode
from headrace.storage.replicated.keys import Position

SECOND_US = 1_000_000
NOW_US = 1000 * SECOND_US
FORMAT = 3


class Stage:
    """Node a serves; what it knows of the others is set by hand."""

    def __init__(self) -> None:
        self.records = {"a": NodeRecord(node="a", role=SERVING, format_max=FORMAT)}
        self.changed_us: dict[str, int] = {}
        self.reports = FollowerReports()
        self.handed: list[str] = []
        self.drained: list[bool] = []
        watch = SimpleNamespace(records=self.records, changed_us=lambda name: self.changed_us.get(name, NOW_US))
        node: Any = SimpleNamespace(
            settings=SimpleNamespace(node="a", heartbeat_s=1.0),
            knowledge=SimpleNamespace(watch=watch, format=FORMAT),
            reports=self.reports,
            able_successors=self.able,
            best_successor=lambda: best_successor(self.reports.all(), FORMAT, NOW_US, without="a"),
            hand_over=self.handed.append,
            set_drained=self.drained.append,
        )
        owned: Any = SimpleNamespace(epoch=7)
        checkpoints: Any = SimpleNamespace()
        self.port = ServingNode(node, owned, checkpoints, lambda: NOW_US, lambda waits: waits.close())

    def able(self) -> list[str]:
        one_by_one = ((one.node, best_successor([one], FORMAT, NOW_US)) for one in self.reports.all())
        return sorted(name for name, able in one_by_one if able is not None)

    def add(self, name: str, role: str = FOLLOWING, silent_s: float = 0.5, **more: Any) -> None:
        self.records[name] = NodeRecord(node=name, role=role, **{"format_max": FORMAT, **more})
        self.changed_us[name] = NOW_US - round(silent_s * SECOND_US)

    def report(self, name: str, role: str = FOLLOWING, heard_s: float = 0.1, drained: bool = False) -> None:
        position = Position(7, 5)
        report = NodeReport(name, epoch=7, objects=5, role=role, format_max=FORMAT, drained=drained)
        self.reports.take(report, position, NOW_US - round(heard_s * SECOND_US))

    def move(self, name: str) -> None:
        self.port.move(ClusterMove(0, name))

    def drain(self, name: str = "a") -> None:
        self.port.drain(ClusterDrain(name, True))


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_node_that_follows_takes_over(stage: Stage) -> None:
    stage.add("b")
    stage.report("b")
    stage.move("b")
    stage.drain()
    assert (stage.handed, stage.drained) == (["b", "b"], [True])


def not_connected(stage: Stage) -> None:
    stage.add("b")


def connection_broke(stage: Stage) -> None:
    stage.add("b")
    stage.report("b", heard_s=2)


def served_a_moment_ago(stage: Stage) -> None:
    stage.add("b", SERVING, silent_s=3)


def restores(stage: Stage) -> None:
    stage.add("b", RESTORING)
    stage.report("b", RESTORING)


def is_blocked(stage: Stage) -> None:
    stage.add("b", BLOCKED)
    stage.report("b", BLOCKED)


def holds_off(stage: Stage) -> None:
    stage.add("b", FOLLOWING)
    stage.report("b", RESTORING)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (not_connected, "it is not connected to this node as a follower"),
        (connection_broke, "it is not connected to this node as a follower"),
        (served_a_moment_ago, "it is not connected to this node as a follower"),
        (restores, "it is restoring"),
        (is_blocked, "it is blocked"),
        (
            holds_off,
            "its disk, its last claim or its serving has failed a moment ago, or its certificate is not valid now",
        ),
    ],
)
def test_a_live_node_that_is_not_able_yet_is_worth_another_try(stage: Stage, state: Any, why: str) -> None:
    state(stage)
    with pytest.raises(Busy, match=f"^b cannot take the shard over yet: {why}; try again .* the log of b"):
        stage.move("b")
    with pytest.raises(Busy, match=f"^no other node can take over the shard that a serves yet .b: {why}.; try again"):
        stage.drain()
    assert (stage.handed, stage.drained) == ([], [])


def unknown(stage: Stage) -> None:
    del stage


def silent(stage: Stage) -> None:
    stage.add("b", silent_s=5)
    stage.report("b", heard_s=5)


def stopped(stage: Stage) -> None:
    stage.add("b", STOPPED)


def says_that_it_is_drained(stage: Stage) -> None:
    stage.add("b")
    stage.report("b", drained=True)


def was_drained_before(stage: Stage) -> None:
    stage.add("b", drained=True)


def was_drained_here(stage: Stage) -> None:
    stage.add("b")
    stage.report("b")
    stage.drain("b")


def older(stage: Stage) -> None:
    stage.add("b", format_max=FORMAT - 1)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (unknown, "the cluster has no such node; there are a"),
        (silent, "it has been silent for 5 s"),
        (stopped, "it was stopped"),
        (says_that_it_is_drained, "it was drained; let it serve again with .* b --undo"),
        (was_drained_before, "it was drained"),
        (was_drained_here, "it was drained"),
        (older, "it cannot read format 3"),
    ],
)
def test_a_node_that_will_not_become_able_is_refused(stage: Stage, state: Any, why: str) -> None:
    state(stage)
    with pytest.raises(InvalidArgument, match=f"^b cannot take the shard over: {why}.*; no other node can either"):
        stage.move("b")
    with pytest.raises(InvalidArgument, match=r"^no other node can take over the shard that a serves: start one"):
        stage.drain()
    stage.add("c")
    stage.report("c")
    with pytest.raises(InvalidArgument, match=f"^b cannot take the shard over: {why}.*; c could"):
        stage.move("b")
    assert (stage.handed, stage.drained) == ([], [])


def test_a_node_that_was_drained_and_let_serve_again_is_worth_another_try(stage: Stage) -> None:
    stage.add("b", drained=True)
    stage.port.drain(ClusterDrain("b", False))
    with pytest.raises(Busy):
        stage.move("b")
