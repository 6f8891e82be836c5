"""What a node answers to requests about its cluster, and its metrics, while it serves."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.broker.pending_answer import PendingAnswer
from headrace.cluster.claims import ANSWER_US
from headrace.cluster.node_record import BLOCKED, FOLLOWING, RESTORING, SERVING, SILENT, STOPPED
from headrace.cluster.node_settings import time_us
from headrace.cluster.shards import checkpoint_of
from headrace.cluster.threads import run_on_thread
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
from headrace.model.errors import Busy, HeadraceError, InvalidArgument, NotServing, StoreUnavailable
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
_TOLD_US = 5_000_000
"""How long an owner waits until a follower has heard that it is to serve nothing."""
_TOLD_POLL_S = 0.05


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

    @property
    def _silent_us_max(self) -> int:
        """A node whose record is older is silent."""
        return int(_SILENT_BEATS * self._node.settings.heartbeat_s * 1e6)

    def check_current(self) -> None:
        """Refuse requests while the epoch is not confirmed: after a pause, another node may have replaced this one."""
        if self._node.handing_over.is_disk_full:
            successor = self._node.handing_over.successor
            raise NotServing(f"the disk of this node is full: it hands over to {successor}; try again")
        if self._node.is_unconfirmed:
            raise NotServing("this node was paused, or cannot reach the store: another one may serve by now; try again")

    def report(self, report: NodeReport, now_us: int) -> OwnerReport:
        """Remember how far a follower is."""
        del now_us  # the broker's time: nodes measure with a clock that nobody sets
        if report.shard != 0:
            raise InvalidArgument(f"the cluster has one shard, 0, not {report.shard}")
        if report.role == BLOCKED:
            self._checkpoints.want_beyond(Position(report.epoch, report.objects))
        if report.node not in self._node.knowledge.watch.records:
            self._node.heartbeat.hurry()  # who joins is listed at once
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
        if request.node not in node.able_successors():
            self._refuse_successor(request.node)
        node.hand_over(request.node)
        return ClusterMoveBegun(0, self._owned.epoch, node.settings.node, request.node)

    def drain(self, request: ClusterDrain) -> ClusterMoveBegun | PendingAnswer[ClusterMoveBegun]:
        """Let a node serve nothing, or again."""
        node = self._node
        if request.node not in node.knowledge.watch.records:
            known = ", ".join(sorted(node.knowledge.watch.records))
            raise InvalidArgument(f"the cluster has no node {request.node}; there are {known}")
        begun = ClusterMoveBegun(0, self._owned.epoch, node.settings.node)
        if request.node != node.settings.node:
            node.reports.set_drained(request.node, request.drained)
            silent_us = self._now_us() - node.knowledge.watch.changed_us(request.node)
            is_gone = node.knowledge.watch.records[request.node].role == STOPPED or silent_us > self._silent_us_max
            is_told = node.reports.has_heard(request.node, request.drained)
            return begun if is_gone or is_told else self._begun_when_told(request, begun)
        if request.drained:
            best = node.best_successor()
            if best is None:
                self._refuse_drain()
            begun.successor = best.node
            node.hand_over(best.node)
        node.set_drained(request.drained)
        return begun

    def _begun_when_told(self, request: ClusterDrain, begun: ClusterMoveBegun) -> PendingAnswer[ClusterMoveBegun]:
        """The answer once the node has heard of it: before that it would forget it if this node died."""
        reports, answer, until_us = self._node.reports, PendingAnswer[ClusterMoveBegun](), self._now_us() + _TOLD_US

        async def wait() -> None:
            while not reports.has_heard(request.node, request.drained) and self._now_us() < until_us:
                await asyncio.sleep(_TOLD_POLL_S)
            if reports.has_heard(request.node, request.drained):
                answer.resolve(begun)
            else:
                answer.resolve(
                    Busy(f"{request.node} has not heard of it yet: {self._why_not_yet(request.node)}; try again")
                )

        self._spawn(wait())
        return answer

    def _refuse_successor(self, name: str) -> NoReturn:
        """Refuse to hand over to a node: for the moment, if it is alive and only has to follow first."""
        node = self._node
        why = self._why_never(name)
        if not why:
            raise Busy(
                f"{name} cannot take the shard over yet: {self._why_not_yet(name)}; try again in a moment, or read the "
                f"log of {name} if it stays so"
            )
        able = node.able_successors()
        others = f"{', '.join(able)} could" if able else "no other node can either"
        raise InvalidArgument(f"{name} cannot take the shard over: {why}; {others}")

    def _refuse_drain(self) -> NoReturn:
        """Refuse to drain this node, as no other can take over: for the moment, if one only has to follow first."""
        own = self._node.settings.node
        waited_for = [name for name in sorted(self._node.knowledge.watch.records) if not self._why_never(name)]
        if waited_for:
            reasons = "; ".join(f"{name}: {self._why_not_yet(name)}" for name in waited_for)
            raise Busy(
                f"no other node can take over the shard that {own} serves yet ({reasons}); try again in a moment, or "
                f"read the log of {waited_for[0]} if it stays so"
            )
        raise InvalidArgument(
            f"no other node can take over the shard that {own} serves: start one, or let one serve again with "
            "`headrace cluster drain NODE --undo`, and wait until `headrace cluster status` shows it as following"
        )

    def _why_never(self, name: str) -> str:
        """Why it does not help to wait until a node can take the shard over; empty: it may help."""
        node = self._node
        record = node.knowledge.watch.records.get(name)
        if record is None:
            return f"the cluster has no such node; there are {', '.join(sorted(node.knowledge.watch.records))}"
        if name == node.settings.node:
            return "it serves the shard already"
        if record.role == STOPPED:
            return "it was stopped; start it"
        silent_us = self._now_us() - node.knowledge.watch.changed_us(name)
        if silent_us > self._silent_us_max:
            return f"it has been silent for {silent_us / 1e6:.0f} s; start it, or see its log"
        if self._is_drained(record):
            return f"it was drained; let it serve again with `headrace cluster drain {name} --undo`"
        if record.format_max < node.knowledge.format:
            return f"it cannot read format {node.knowledge.format}, which the cluster writes; upgrade it"
        return ""

    def _is_drained(self, record: "NodeRecord") -> bool:
        """Whether another node was asked to serve nothing: as this node was told, else as that one said last."""
        told, report = self._node.reports.drained(record.node), self._node.reports.get(record.node)
        if told is not None:
            return told
        return record.drained if report is None else report.drained

    def _why_not_yet(self, name: str) -> str:
        """Why a node that is alive cannot take the shard over at the moment."""
        report = self._node.reports.get(name)
        if report is None or self._now_us() - report.heard_us >= ANSWER_US:
            return "it is not connected to this node as a follower"
        role = self._node.knowledge.watch.records[name].role
        if role in (RESTORING, BLOCKED):
            return f"it is {role}"
        return "its disk, its last claim or its serving has failed a moment ago, or its certificate is not valid now"

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
                answer.resolve(ClusterUpgraded(await run_on_thread(change), before))
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
            releasing=node.handing_over.is_asked,
            successor=node.handing_over.successor or "",
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
        report = self._node.reports.get(record.node)
        if report is not None and report.is_able and self._now_us() - report.heard_us < ANSWER_US:
            return FOLLOWING  # its record may be older
        is_silent = age_us > self._silent_us_max
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
