"""The handlers of requests about the cluster that the broker is part of."""

from collections.abc import Callable
from typing import Any, Protocol

from headrace.broker.pending_answer import PendingAnswer
from headrace.model.cluster_requests import (
    ClusterDescribe,
    ClusterDrain,
    ClusterMove,
    ClusterMoveBegun,
    ClusterStatus,
    ClusterUpgrade,
    ClusterUpgraded,
    NodeReport,
    OwnerReport,
)
from headrace.model.errors import UnsupportedOperation
from headrace.model.request import Request


class ClusterPort(Protocol):
    """The node around a broker that serves a shard. It is called on the broker's thread, and does not block it."""

    def check_current(self) -> None:
        """Raise NotServing if another node may serve by now, so that this one may know an earlier state only."""

    def report(self, report: NodeReport, now_us: int) -> OwnerReport:
        """Remember how far a follower is; returns how far this node is."""

    def describe(self) -> PendingAnswer[ClusterStatus]:
        """Describe the cluster: shards, nodes and their state."""

    def move(self, request: ClusterMove) -> ClusterMoveBegun:
        """Begin to hand a shard over."""

    def drain(self, request: ClusterDrain) -> ClusterMoveBegun | PendingAnswer[ClusterMoveBegun]:
        """Begin to let a node serve nothing, or let it serve again."""

    def upgrade(self) -> PendingAnswer[ClusterUpgraded]:
        """Write the newest format that every live node knows."""


def cluster_handlers(port: Callable[[], ClusterPort | None]) -> dict[type[Request[Any]], Callable[..., Any]]:
    """The handlers, by request; a broker that is not part of a cluster refuses all of them."""

    def node() -> ClusterPort:
        found = port()
        if found is None:
            raise UnsupportedOperation(
                "this broker is not part of a cluster; `headrace serve --cluster NAME --store URL` starts a node of one"
            )
        return found

    return {
        NodeReport: lambda _, ask, __, now: node().report(ask, now),
        ClusterDescribe: lambda *_: node().describe(),
        ClusterMove: lambda _, ask, __, ___: node().move(ask),
        ClusterDrain: lambda _, ask, __, ___: node().drain(ask),
        ClusterUpgrade: lambda *_: node().upgrade(),
    }
