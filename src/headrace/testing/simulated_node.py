"""A simulated node of a cluster: the real replica of a shard, the real decisions, and the real broker while it owns.

What ClusterNode does with an event loop and threads, this does with simulated threads, in the same order.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from headrace.broker.settings import BrokerSettings
from headrace.cluster.checkpoints import checkpoint_maker
from headrace.cluster.claims import (
    LOOK_US,
    Claim,
    FollowerReport,
    FollowerView,
    OwnerConnection,
    OwnerView,
    StopServing,
    best_successor,
    decide_follower,
    decide_owner,
    rank_of,
)
from headrace.cluster.node_record import (
    CLAIMING,
    FOLLOWING,
    RELEASING,
    RESTORING,
    SERVING,
    STOPPED,
    BeatWatch,
    NodeRecord,
    NodeRecordWriter,
    read_record,
    read_records,
)
from headrace.cluster.shards import IN_DOUBT, OwnedShard, ShardPlace, ShardReplica
from headrace.model.errors import Fenced, HeadraceError, StoreUnavailable
from headrace.runtime.broker_clock import BrokerClock
from headrace.storage.replicated.epochs import StoredManifest, create_cluster, release
from headrace.storage.replicated.keys import Position
from headrace.storage.replicated.manifest import FORMAT, Manifest
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.store import SharedStore
from headrace.testing.memory_disk import MemoryDisk
from headrace.testing.simulated_broker import SimulatedBroker
from headrace.testing.simulated_machine import CrashingDisk, CrashPlan, CrashPoint, NodeStore, StoreConditions
from headrace.testing.simulation import InlineExecutor, Simulation

T = TypeVar("T")

HEARTBEAT_S = 1.0
REPORT_S = 0.5
_POLL_OBJECTS = 64
DIRECTORY = "/node"
_LIVE_BEATS = 8
_CLAIM_S = 20.0
_FLUSH_S = 10.0


class SimulatedMachine:
    """A machine: its disk and its clocks outlast the processes on it."""

    def __init__(self, simulation: Simulation, name: str, start_us: int) -> None:
        self.name = name
        self.disk = MemoryDisk()
        self.skew_us = 0
        """How much its clock is ahead."""
        self.node: SimulatedNode | None = None
        """The process that was started last."""
        self._simulation = simulation
        self._start_us = start_us
        self.booted_us = simulation.random.randrange(1_000_000_000)

    def wall_us(self) -> int:
        """The time of day by its clock."""
        return self._start_us + self._simulation.now_us + self.skew_us

    def monotonic_us(self) -> int:
        """The time since it was started."""
        return 1 + self.booted_us + self._simulation.now_us


class NodeSurroundings(Protocol):
    """What a node needs of the cluster around it: a ClusterWorkbench."""

    name: str
    simulation: Simulation
    store: SharedStore
    store_conditions: StoreConditions
    broker_settings: BrokerSettings
    new_writer: Callable[..., WalWriter]
    crash_plan: CrashPlan | None
    checkpoint_s: tuple[float, float]
    keep_us: int

    def count(self, what: str) -> None: ...
    def send_report(self, follower: "SimulatedNode", owner: str, epoch: int) -> None: ...


class SimulatedNode:
    """One process of a node."""

    def __init__(self, cluster: NodeSurroundings, machine: SimulatedMachine) -> None:
        self.name = machine.name
        self.machine = machine
        self._cluster = cluster
        self._simulation = cluster.simulation
        self.process = cluster.simulation.new_process(machine.name)
        self.point = CrashPoint(cluster.simulation, self.process)
        self.point.label = lambda: self.activity
        self.point.plan = cluster.crash_plan
        self.activity = "start"
        """What it does, as far as a kill is concerned."""
        self._store = NodeStore(cluster.store, self.name, cluster.store_conditions, self.point)
        self.replica = ShardReplica(
            self._store,
            CrashingDisk(machine.disk, self.point),
            ShardPlace(cluster.name, self.name, DIRECTORY),
            now_us=machine.wall_us,
            clock=lambda: machine.monotonic_us() / 1e6,
            new_writer=partial(cluster.new_writer, self.point),
            new_pool=InlineExecutor,
        )
        self.role = RESTORING
        self.owned: OwnedShard | None = None
        self.serving: SimulatedBroker | None = None
        self.successor: str | None = None
        self.ends = False
        self.stored: StoredManifest | None = None
        self.watch = BeatWatch()
        self.reports: dict[str, FollowerReport] = {}
        self.connection = OwnerConnection.NONE
        self._owns = 0
        self._answered_us = self._manifest_us = self._owner_read_us = self._lost_us = self._confirmed_us = 0
        self._looked = self._fenced = self._lags = False
        self._beats = 0
        self._token = f"{cluster.simulation.random.getrandbits(64):016x}"
        self._changed = cluster.simulation.event()
        self.process.spawn("shard", self._run)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest as it was last read."""
        return None if self.stored is None else self.stored.manifest

    @property
    def _is_to_end(self) -> bool:
        return self.successor is not None or self.ends

    @property
    def committed(self) -> Position:
        """How far it has committed, or applied."""
        return self.replica.position if self.owned is None else self.owned.writer.committed

    def hand_over(self, successor: str | None = None) -> None:
        """Hand the shard over, by default to the best follower."""
        if successor is None:
            best = best_successor(self.reports.values(), FORMAT, self.machine.monotonic_us(), without=self.name)
            successor = "" if best is None else best.node
        self.successor = successor
        self._changed.set()

    def stop(self) -> None:
        """Hand over, and end in order."""
        self.ends = True
        if self.owned is not None:
            self.hand_over()
        self._changed.set()

    # The main thread.

    def _run(self) -> None:
        self._persist(lambda: create_cluster(self._store, self._cluster.name))
        self._adopt(self._persist(self.replica.open))
        self.process.spawn("heartbeat", self._beat)
        self.process.spawn("reports", self._report)
        while (claim := self._follow()) is not None:
            owned = self._claim(claim)
            if owned is not None:
                self._serve(owned)
        self.activity, self.role, self._owns = "stop", STOPPED, 0
        self.replica.note_state(clean=True)
        self.process.kill()

    def _persist(self, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except StoreUnavailable:
                self._simulation.sleep(0.5)

    def _follow(self) -> Claim | None:
        """Follow until the shard is to be claimed; None: the node ends."""
        while not self.ends:
            try:
                if not self.replica.is_restored:
                    self.activity, self.role = "restore", RESTORING
                    self._lags = True
                    self.replica.restore()
                    self._cluster.count("restores")
                self.activity, self.role = "follow", FOLLOWING
                self._lags = self.replica.poll(_POLL_OBJECTS) == _POLL_OBJECTS
            except IN_DOUBT:
                self._cluster.count("doubts")
                self.replica.drop()
                continue
            except StoreUnavailable:
                self._simulation.sleep(0.5)
            if self._looked:
                decision = decide_follower(self._view(), self.machine.monotonic_us())
                if isinstance(decision, Claim):
                    return decision
            self._changed.clear()
            self._changed.wait(LOOK_US / 1e6 if self._lags else 0.25)
        return None

    def _claim(self, claim: Claim) -> OwnedShard | None:
        self.activity, self.role = "claim", CLAIMING
        self._owns, self._fenced = claim.expected_epoch + 1, False
        nonce = f"{self._simulation.random.getrandbits(128):032x}"
        began_us, owned = self.machine.monotonic_us(), None
        while self.machine.monotonic_us() - began_us < _CLAIM_S * 1e6:
            try:
                owned = self.replica.claim(nonce, (), claim.expected_epoch, self._on_fenced)
                break
            except IN_DOUBT:
                self._persist(self.replica.restore)
            except StoreUnavailable:
                self._simulation.sleep(0.1)
            except Fenced:
                self.replica.drop()
                break
        if owned is None:
            self._owns, self.role = 0, FOLLOWING
            self._look_again()
            return None
        self._cluster.count("claims")
        self._adopt(owned.stored)
        self._confirmed_us = int(owned.begun_s * 1e6)
        self.owned = owned
        return owned

    def _look_again(self) -> None:
        try:
            self._adopt(self.replica.manifest())
        except StoreUnavailable:
            self._changed.set()

    def _serve(self, owned: OwnedShard) -> None:
        self.activity = "recover"
        self.reports, self.successor = {}, None
        clock = BrokerClock(lambda: self.machine.wall_us() * 1000, lambda: self.machine.monotonic_us() * 1000)
        self.serving = SimulatedBroker(
            self.point, owned, f"{DIRECTORY}/shards/000", clock, self._cluster.broker_settings
        )
        checkpoints_end = self._simulation.event()
        while True:
            self._changed.clear()
            decision = decide_owner(self._owner_view(owned), self.machine.monotonic_us())
            if isinstance(decision, StopServing):
                break
            if self.role != SERVING and self.serving.is_serving:
                self.role, self.activity = SERVING, "serve"
                self._cluster.count("served")
                self.process.spawn("checkpoints", lambda: self._checkpoint(owned, checkpoints_end))
            if self.activity == "serve" and self._is_to_end:
                checkpoints_end.set()
                if self._hand_over(owned):
                    return
                decision = StopServing("the hand-over failed", by_force=False)
                break
            self._changed.wait(0.25)
        checkpoints_end.set()
        self._stop_serving(owned, decision)

    def _stop_serving(self, owned: OwnedShard, decision: StopServing) -> None:
        assert self.serving is not None
        owned.writer.abandon(Fenced(f"this node does not serve the shard any more: {decision.reason}"))
        self.activity = "stop serving"
        self.owned, self._owns, self.successor = None, 0, None
        if decision.by_force:
            self._lost_us = self.machine.monotonic_us()
            self._cluster.count("fenced")
        self.role = RESTORING
        self.serving.abort()
        self.serving = None
        owned.writer.close()
        self.replica.drop()
        self._manifest_us = self.machine.monotonic_us()
        self._look_again()

    def _hand_over(self, owned: OwnedShard) -> bool:
        """Hand over; whether that was done."""
        assert self.serving is not None
        self.activity, self.role = "hand over", RELEASING
        successor = self.successor or ""
        try:
            self.serving.finish()
            if self.serving.failure is not None:
                return False
            owned.writer.flush(_FLUSH_S)
            manifest = release(self._store, self.replica.keys, owned.epoch, successor)
        except HeadraceError:
            return False
        self._cluster.count("handed over")
        self.stored = None if self.stored is None else self.stored._replace(manifest=manifest)
        self._manifest_us = self.machine.monotonic_us()
        self.owned, self._owns, self.successor, self.serving = None, 0, None, None
        owned.writer.close()
        self.replica.follow_released(owned)
        return True

    def _checkpoint(self, owned: OwnedShard, ends: object) -> None:
        """Store checkpoints every now and then."""
        store_checkpoint = checkpoint_maker(
            self._store,
            self.replica.keys,
            owned,
            self._cluster.keep_us,
            self.machine.wall_us,
            InlineExecutor,
        )
        assert hasattr(ends, "wait")
        while not ends.wait(self._simulation.random.uniform(*self._cluster.checkpoint_s)):
            before, self.activity = self.activity, "checkpoint"
            try:
                store_checkpoint()
                self._cluster.count("checkpoints")
            except HeadraceError:
                if owned.writer.failure is not None:
                    return
                self._cluster.count("checkpoints that failed")
            finally:
                self.activity = before

    # Heartbeats and reports.

    def _beat(self) -> None:
        writer = NodeRecordWriter(self._store, self._cluster.name, self.name, self._token)
        while self.role != STOPPED:
            began_us = self.machine.monotonic_us()
            try:
                writer.write(self._record())
                stored = self.replica.manifest()
                self._beat_done(began_us, stored)
            except StoreUnavailable:
                self._cluster.count("heartbeats without an answer")
            self._looked = True
            self._changed.set()
            self._simulation.sleep(HEARTBEAT_S if self._owns else HEARTBEAT_S / 2)

    def _beat_done(self, began_us: int, stored: StoredManifest | None) -> None:
        self._adopt(stored)
        owner = "" if stored is None else stored.manifest.owner
        if owner not in ("", self.name):
            record = read_record(self._store, self._cluster.name, owner)
            manifest = self.manifest
            if manifest is not None and stored is not None and manifest.epoch == stored.manifest.epoch:
                now_us = self.machine.monotonic_us()
                self.watch.observe(owner, record, now_us)
                self._owner_read_us = now_us
        if self._owns or self._beats % 10 == 1:
            records = read_records(self._store, self._cluster.name)
            self.watch.observe_all(records, self.machine.monotonic_us())
        if self.owned is not None and stored is not None and stored.manifest.epoch == self.owned.epoch:
            self._confirmed_us = max(self._confirmed_us, began_us)

    def _record(self) -> NodeRecord:
        self._beats += 1
        position = self.committed
        return NodeRecord(
            node=self.name,
            process=self._token,
            beat=self._beats,
            role=self.role,
            format_max=FORMAT,
            epoch=position.epoch,
            objects=position.objects,
            owns=self._owns,
        )

    def _report(self) -> None:
        """Report to the owner, and note whether it answers."""
        while self.role != STOPPED:
            manifest = self.manifest
            if manifest is not None and self.owned is None and manifest.owner != self.name and not manifest.released:
                self._cluster.send_report(self, manifest.owner, manifest.epoch)
            self._simulation.sleep(REPORT_S)

    def take_report(self, node: str, position: Position) -> int | None:
        """As the owner: take a follower's report; returns the epoch, None if it does not serve."""
        if self.owned is None or self.serving is None:
            return None
        self.reports[node] = FollowerReport(node, position, self.machine.monotonic_us(), format_max=FORMAT)
        return self.owned.epoch

    def report_answered(self, epoch: int) -> None:
        """The owner of an epoch has answered."""
        if self.manifest is not None and self.manifest.epoch == epoch:
            self.connection, self._answered_us = OwnerConnection.OPEN, self.machine.monotonic_us()

    def report_refused(self, epoch: int) -> None:
        """The owner's machine has refused the connection."""
        if self.manifest is not None and self.manifest.epoch == epoch and self.connection is OwnerConnection.OPEN:
            self.connection = OwnerConnection.REFUSED
            self._changed.set()

    # What is known.

    def _view(self) -> FollowerView:
        manifest = self.manifest
        owner = "" if manifest is None else manifest.owner
        record = self.watch.records.get(owner)
        return FollowerView(
            node=self.name,
            heartbeat_us=int(HEARTBEAT_S * 1e6),
            format_max=FORMAT,
            manifest=manifest,
            manifest_us=self._manifest_us,
            connection=self.connection,
            answered_us=self._answered_us,
            beat_changed_us=max(self.watch.changed_us(owner), self._manifest_us),
            beat_read_us=self._owner_read_us,
            owner_owns=0 if record is None else record.owns,
            rank=self._rank(owner),
            lost_us=self._lost_us,
            restored=self.replica.is_restored,
            lags=self._lags,
        )

    def _rank(self, owner: str) -> int:
        live = self.watch.live(self.machine.monotonic_us(), int(_LIVE_BEATS * HEARTBEAT_S * 1e6))
        others = [
            FollowerReport(one.node, one.position, 0, one.drained, one.format_max)
            for one in live
            if one.node not in (owner, self.name) and one.role in (FOLLOWING, CLAIMING)
        ]
        return rank_of(self.name, self.replica.position, others)

    def _owner_view(self, owned: OwnedShard) -> OwnerView:
        manifest = self.manifest
        return OwnerView(
            node=self.name,
            epoch=owned.epoch,
            confirmed_us=self._confirmed_us,
            manifest_epoch=owned.epoch if manifest is None else manifest.epoch,
            fenced=self._fenced,
        )

    def _adopt(self, stored: StoredManifest | None) -> None:
        before = self.manifest
        after = None if stored is None else stored.manifest
        if before is not None and (after is None or (after.epoch, after.change) < (before.epoch, before.change)):
            return
        is_other = before is None or after is None or before.epoch != after.epoch or before.released != after.released
        self.stored = stored
        if is_other and not (before is None and after is None and self._manifest_us):
            self._manifest_us = self.machine.monotonic_us()
            self._owner_read_us = self._answered_us = 0
            self.connection = OwnerConnection.NONE
            self._changed.set()

    def _on_fenced(self) -> None:
        self._fenced = True
        self._changed.set()
