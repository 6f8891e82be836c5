"""What a node answers to requests about its cluster, and its metrics, while it serves."""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from headrace.broker.pending_answer import PendingAnswer
from headrace.cluster.node_record import BLOCKED, SERVING, SILENT, STOPPED
from headrace.cluster.node_settings import time_us
from headrace.cluster.shards import checkpoint_of
from headrace.model.cluster_requests import (
    ClusterDrain,
    ClusterMove,
    ClusterMoveBegun,
    ClusterStatus,
    ClusterUpgraded,
    NodeReport,
    NodeStatus,
    OwnerReport,
    ShardStatus,
)
from headrace.model.errors import HeadraceError, InvalidArgument, NotServing, StoreUnavailable
from headrace.model.metric_requests import MetricFamily, MetricSample, counter, gauge
from headrace.storage.replicated.epochs import set_format
from headrace.storage.replicated.keys import Position
from headrace.storage.replicated.manifest import FORMAT

if TYPE_CHECKING:
    from headrace.broker.metrics import CollectorSteps
    from headrace.cluster.checkpoints import CheckpointSchedule
    from headrace.cluster.node import ClusterNode
    from headrace.cluster.node_record import NodeRecord
    from headrace.cluster.shards import OwnedShard

_SILENT_BEATS = 4
"""A node that has not renewed its record for so many heartbeats is shown as silent."""


class ServingNode:
    """The cluster port of a broker that serves a shard: its node."""

    def __init__(
        self,
        node: "ClusterNode",
        owned: "OwnedShard",
        checkpoints: "CheckpointSchedule",
        now_us: Callable[[], int],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`now_us` is the node's own clock; `spawn` runs a coroutine on the event loop."""
        self._node = node
        self._owned = owned
        self._checkpoints = checkpoints
        self._now_us = now_us
        self._spawn = spawn

    def check_current(self) -> None:
        """Refuse requests while the epoch is not confirmed: after a pause, another node may have replaced this one."""
        if self._node.is_unconfirmed:
            raise NotServing("this node was paused, or cannot reach the store: another one may serve by now; try again")

    def report(self, report: NodeReport, now_us: int) -> OwnerReport:
        """Remember how far a follower is."""
        del now_us  # the broker's time: nodes measure with a clock that nobody sets
        if report.shard != 0:
            raise InvalidArgument(f"the cluster has one shard, 0, not {report.shard}")
        if report.role == BLOCKED:
            self._checkpoints.want_beyond(Position(report.epoch, report.objects))
        return self._node.take_report(report)

    def describe(self) -> PendingAnswer[ClusterStatus]:
        """Describe the cluster, as the heartbeat has last seen it."""
        node, answer = self._node, PendingAnswer[ClusterStatus]()
        nodes = [
            self._node_status(record)
            for record in sorted(node.knowledge.watch.records.values(), key=lambda one: one.node)
        ]
        answer.resolve(
            ClusterStatus(
                cluster=node.settings.cluster,
                store=node.store.location,
                node=node.settings.node,
                shards=[self._shard_status()],
                nodes=nodes,
                format_max=min((one.format_max for one in node.knowledge.live_nodes()), default=FORMAT),
                time_us=time_us(),
            )
        )
        return answer

    def move(self, request: ClusterMove) -> ClusterMoveBegun:
        """Hand the shard over to a node that follows it."""
        node = self._node
        if request.shard != 0:
            raise InvalidArgument(f"the cluster has one shard, 0, not {request.shard}")
        if request.node == node.settings.node:
            raise InvalidArgument(f"{request.node} serves the shard already")
        able = node.able_successors()
        if request.node not in able:
            others = f"{', '.join(able)} could" if able else "no other node can either"
            raise InvalidArgument(
                f"{request.node} cannot take the shard over: it does not follow it, is not up to date, or was drained; "
                f"{others}"
            )
        node.hand_over(request.node)
        return ClusterMoveBegun(0, self._owned.epoch, node.settings.node, request.node)

    def drain(self, request: ClusterDrain) -> ClusterMoveBegun:
        """Let a node serve nothing, or again."""
        node = self._node
        if request.node not in node.knowledge.watch.records:
            known = ", ".join(sorted(node.knowledge.watch.records))
            raise InvalidArgument(f"the cluster has no node {request.node}; there are {known}")
        begun = ClusterMoveBegun(0, self._owned.epoch, node.settings.node)
        if request.node != node.settings.node:
            node.reports.set_drained(request.node, request.drained)
            return begun
        if request.drained:
            best = node.best_successor()
            if best is None:
                raise InvalidArgument(
                    f"no other node can take over the shard that {request.node} serves: start one, or let one serve "
                    "again with `headrace cluster drain NODE --undo`, and wait until "
                    "`headrace cluster status` shows it as following"
                )
            begun.successor = best.node
            node.hand_over(best.node)
        node.set_drained(request.drained)
        return begun

    def upgrade(self) -> PendingAnswer[ClusterUpgraded]:
        """Write the newest format that this node knows, if every live node knows it."""
        node, answer = self._node, PendingAnswer[ClusterUpgraded]()
        older = sorted(one.node for one in node.knowledge.live_nodes() if one.format_max < node.settings.format_max)
        if older:
            raise InvalidArgument(
                f"{', '.join(older)} cannot read format {node.settings.format_max}: install the same version of "
                "Headrace on every node first"
            )
        manifest = node.manifest
        before = 0 if manifest is None else manifest.format

        def change() -> int:
            return set_format(node.store, node.replica.keys, self._owned.epoch, node.settings.format_max).format

        async def upgrade() -> None:
            try:
                answer.resolve(ClusterUpgraded(await node.blocking(change), before))
            except HeadraceError as error:
                answer.resolve(error)
            except Exception as error:
                answer.resolve(StoreUnavailable(f"the format was not changed: {error}"))
                raise

        self._spawn(upgrade())
        return answer

    def _shard_status(self) -> ShardStatus:
        node, committed = self._node, self._owned.writer.committed
        manifest = node.manifest or self._owned.stored.manifest
        checkpoint = checkpoint_of(node.knowledge.stored)
        return ShardStatus(
            shard=0,
            epoch=committed.epoch,
            owner=node.settings.node,
            addresses=list(manifest.addresses),
            objects=committed.objects,
            backlog_bytes=self._owned.writer.backlog_bytes,
            format=manifest.format,
            checkpoint=manifest.checkpoint,
            checkpoint_epoch=0 if checkpoint is None else checkpoint.epoch,
            checkpoint_objects=0 if checkpoint is None else checkpoint.objects,
            checkpoint_us=self._checkpoints.last_us,
            serving_us=node.serving_since_us,
            releasing=node.is_releasing,
            successor=node.successor,
        )

    def _node_status(self, record: "NodeRecord") -> NodeStatus:
        node, now_us = self._node, self._now_us()
        age_us = now_us - node.knowledge.watch.changed_us(record.node)
        report, committed = node.reports.get(record.node), self._owned.writer.committed
        is_own = record.node == node.settings.node
        position = committed if is_own else record.position if report is None else report.position
        behind = committed.objects - (position.objects if position.epoch == committed.epoch else 0)
        drained = node.drained if is_own else node.reports.drained(record.node)
        return NodeStatus(
            node=record.node,
            role=SERVING if is_own else self._role(record, age_us),
            addresses=list(record.addresses),
            http_addresses=list(record.http_addresses),
            version=record.version,
            format_max=record.format_max,
            zone=record.zone,
            beat=record.beat,
            beat_age_us=0 if is_own else age_us,
            epoch=position.epoch,
            objects=position.objects,
            lag_objects=max(behind, 0),
            lag_us=node.reports.lag_us(record.node, now_us),
            drained=record.drained if drained is None else drained,
        )

    def _role(self, record: "NodeRecord", age_us: int) -> str:
        """The role of another node: what it last said, while it renews its record; this one serves, and no other."""
        if record.role == STOPPED:
            return STOPPED
        is_silent = age_us > _SILENT_BEATS * self._node.settings.heartbeat_s * 1e6
        return SILENT if is_silent or record.role == SERVING else record.role

    def collect(self, tenant: str | None, now_us: int) -> "CollectorSteps":
        """Collect the metrics of the node."""
        del now_us
        if tenant is not None:
            return  # the cluster belongs to all tenants
        node, owned = self._node, self._owned
        statistics, committed, now = owned.writer.statistics(), owned.writer.committed, self._now_us()
        yield gauge("cluster_epoch", "The epoch in which this node owns the shard.", committed.epoch)
        yield gauge("cluster_serving", "1 while this node serves the shard.", 1)
        yield gauge("cluster_committed_objects", "WAL objects of the epoch in the store.", committed.objects)
        yield gauge("cluster_backlog_bytes", "Recorded, and not in the store yet.", statistics.backlog_bytes, "bytes")
        yield gauge("cluster_puts_in_flight", "WAL objects that are being stored.", statistics.in_flight)
        yield counter("cluster_put_bytes", "Bytes of WAL objects stored.", statistics.bytes, "bytes")
        yield counter("cluster_put_seconds", "Time of all puts of WAL objects.", statistics.put_seconds, "seconds")
        yield counter("cluster_puts", "WAL objects stored by this owner.", statistics.objects)
        yield counter("cluster_store_retries", "Puts of WAL objects that were repeated.", statistics.retries)
        yield counter("cluster_heartbeat_failures", "Heartbeats not answered by the store.", node.heartbeat.failures)
        yield counter("cluster_checkpoints", "Checkpoints stored by this owner.", self._checkpoints.made)
        yield counter("cluster_checkpoint_failures", "Checkpoints that failed.", self._checkpoints.failures)
        age_s = self._checkpoints.age_s()
        if age_s is not None:
            yield gauge("cluster_checkpoint_age_seconds", "Time since the last checkpoint.", age_s, "seconds")
        lags = [
            MetricSample(node.reports.lag_us(one.node, now) / 1e6, {"node": one.node}) for one in node.reports.all()
        ]
        yield MetricFamily("cluster_follower_lag_seconds", "gauge", "How far each follower is behind.", lags, "seconds")
