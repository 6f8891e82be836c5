"""A node of a cluster: follows the shard, claims it when its owner is gone, has it served, and hands it over."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from headrace.cluster.claims import (
    STALE_BEATS,
    Claim,
    FollowerReport,
    StopServing,
    Wait,
    best_successor,
    decide_follower,
    decide_owner,
)
from headrace.cluster.copy_keeper import CopyKeeper
from headrace.cluster.hand_over import CATCHING_UP_S, HandOver
from headrace.cluster.heartbeat import BeatRound, Heartbeat
from headrace.cluster.node_record import (
    BLOCKED,
    CLAIMING,
    FOLLOWING,
    RELEASING,
    RESTORING,
    SERVING,
    STOPPED,
    NodeRecord,
    NodeRecordWriter,
    read_record,
)
from headrace.cluster.node_settings import NodeSettings, ShardHost, monotonic_us, time_us
from headrace.cluster.ownership import Ownership
from headrace.cluster.peers import FollowerReports, OwnerLink, PeerOptions, wait_for_event
from headrace.cluster.retry_pause import RetryPause, log_failure
from headrace.cluster.shard_knowledge import CopyState, ShardKnowledge
from headrace.cluster.shards import DISK_FAULTS, IN_DOUBT, STORE_FAULTS, OwnedShard, ShardPlace, ShardReplica
from headrace.cluster.start import until_answered, wait_for_name
from headrace.cluster.threads import CallQueue, run_on_thread
from headrace.model.cluster_requests import NodeReport, OwnerReport
from headrace.model.errors import (
    DataDirectoryDamaged,
    DiskFull,
    Fenced,
    HeadraceError,
    LogFailed,
    LogInUse,
    NotServing,
    StoreUnavailable,
    UnsupportedFormat,
)
from headrace.storage.disk import Disk
from headrace.storage.replicated.epochs import StoredManifest, create_cluster, new_nonce, release
from headrace.storage.replicated.keys import Position
from headrace.storage.replicated.manifest import Manifest
from headrace.storage.stores.store import SharedStore

logger = logging.getLogger("headrace.cluster")

T = TypeVar("T")

_RETRY_S = 0.5
_FULL_TOLD_S = 60.0
"""How often a node that stays the owner on a full disk says so."""
_PASSING = (StoreUnavailable, NotServing, Fenced, LogFailed)
"""Errors of a broker's start after which another attempt, perhaps of another node, may succeed."""
_CLAIM_RETRY_S = 0.05
_CLAIM_S = 20.0
"""A claim that the store does not let finish in this time is given up."""
_FLUSH_S = 10.0
"""A hand-over that cannot store everything in this time is given up."""
_REMEMBER_S = 10.0
"""How often the highest position seen is written down."""


class ClusterNode:
    """One node. Its methods run on the event loop; everything that waits for the store runs on threads."""

    def __init__(
        self,
        settings: NodeSettings,
        open_store: Callable[[], SharedStore],
        disk: Disk,
        host: ShardHost,
        options: PeerOptions,
    ) -> None:
        """`open_store` is called twice: heartbeats have a store of their own."""
        self.settings = settings
        self.process = secrets.token_hex(8)
        self._open_store = open_store
        self._disk = disk
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._worker = CallQueue("headrace-shard")
        self._stores: list[SharedStore] = []
        self.link = OwnerLink(options, self._report, monotonic_us, self._link_changed)
        self.reports = FollowerReports()
        self.knowledge = ShardKnowledge(settings)
        self.role = RESTORING
        self.drained = False
        self._ownership = Ownership(self._post, self._changed.set, self._on_disk_full)
        self.owns = 0
        """The epoch that it owns, or is making; 0: none."""
        self.serving_since_us = 0
        """When it began to serve, as time of day; 0: it does not."""
        self._full_told_s = 0.0
        self._was_compared = False
        """Whether the broker has refused the copy as damaged, since it last served."""
        self._claims = RetryPause(time.monotonic)
        self._manifest_told = RetryPause(time.monotonic)
        self._beat = 0
        self.handing_over = HandOver()
        """The hand-over that was asked for, if one was."""
        self._ends = False
        self._is_closed = False
        self.ready = asyncio.Event()
        """Set once it serves, or follows a live owner."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the node has ended; an error if it could not go on."""
        self._task: asyncio.Task[None] | None = None
        self._remembering: asyncio.Task[None] | None = None

    # Starting and stopping.

    async def start(self) -> None:
        """Join the cluster, or make it, and begin to follow."""
        place = ShardPlace(self.settings.cluster, self.settings.node, self.settings.directory, process=self.process)
        self.store, beat_store = await self._blocking(self._open_stores)
        self.replica = ShardReplica(self.store, self._disk, place, now_us=time_us, clock=time.monotonic)
        self._copy = CopyKeeper(self.replica, self._blocking, self._set_role)
        create = partial(create_cluster, self.store, self.settings.cluster)
        await until_answered(partial(self._blocking, create), self.settings.start_s)
        opened = await until_answered(partial(self._blocking, self.replica.open), self.settings.start_s)
        read = partial(read_record, beat_store, self.settings.cluster, self.settings.node)
        left = await until_answered(
            lambda: wait_for_name(
                partial(self._blocking, read), self.replica.process_before, self.settings.heartbeat_s
            ),
            self.settings.start_s,
        )
        self._beat = 0 if left is None else left.beat  # a former process that wakes up finds out that it is the older
        self._adopt_manifest(opened, monotonic_us())
        writer = NodeRecordWriter(beat_store, self.settings.cluster, self.settings.node, self.process)
        self.heartbeat = Heartbeat(
            beat_store,
            self.replica.keys,
            writer,
            self.settings.cluster,
            interval_s=self.settings.heartbeat_s,
            make_record=self._record,
            now_us=monotonic_us,
            done=self._on_beat,
            failed=lambda error: self._post(self._fail, error),
        )
        self.heartbeat.start()
        self._task = self._loop.create_task(self._run())
        self._remembering = self._loop.create_task(self._remember())

    def _open_stores(self) -> tuple[SharedStore, SharedStore]:
        self._stores = [self._open_store(), self._open_store()]
        return self._stores[0], self._stores[1]

    async def stop(self) -> None:
        """Hand the shard over to the best follower, if there is one, and end; may be called again."""
        if self._is_closed:
            return
        self._ends = True
        if self.owned is not None and not self.handing_over.is_asked:
            best = self.best_successor()
            self.hand_over("" if best is None else best.node)
        self._changed.set()
        if self._task is not None:
            self._copy.more.set()
            await asyncio.wait([self._task])
        await self._close()

    async def _close(self) -> None:
        self._is_closed = True
        if self._remembering is not None:
            self._remembering.cancel()
        self.link.stop()
        self.role, self.owns = STOPPED, 0
        if hasattr(self, "heartbeat"):
            with log_failure("state of the node not written; its copy is compared at the next start"):
                await self._blocking(partial(self.replica.note_state, clean=True))
            await run_on_thread(self.heartbeat.stop)
        self._worker.close()
        for store in self._stores:
            await run_on_thread(store.close)
        if not self.ended.done():
            self.ended.set_result(None)

    def hand_over(self, successor: str) -> None:
        """Begin to hand the shard over to a node; empty: to anybody."""
        self.handing_over.ask(successor, self.committed, monotonic_us())
        self.heartbeat.hurry()  # it tells which nodes are there
        self._changed.set()

    def set_drained(self, drained: bool) -> None:
        """Serve nothing from now on, or again."""
        if drained != self.drained:
            logger.info("node %s", "drained" if drained else "may serve again")
        self.drained = drained
        self._changed.set()

    # What others ask.

    @property
    def owned(self) -> OwnedShard | None:
        """The shard that it owns."""
        return self._ownership.owned

    @property
    def manifest(self) -> Manifest | None:
        """The manifest as it was last read."""
        return self.knowledge.manifest

    @property
    def committed(self) -> Position:
        """How far the owner has committed, or a follower has applied."""
        return self.replica.position if self.owned is None else self.owned.writer.committed

    def best_successor(self) -> FollowerReport | None:
        """The follower to hand over to; None if there is none that could."""
        form, now_us = self.knowledge.format, monotonic_us()
        return best_successor(self.reports.all(), form, now_us, without=self.settings.node)

    def able_successors(self) -> list[str]:
        """The followers that could take the shard over, by name."""
        form, now_us = self.knowledge.format, monotonic_us()
        reports = self.reports.all()
        return sorted(one.node for one in reports if best_successor([one], form, now_us) is not None)

    @property
    def is_unconfirmed(self) -> bool:
        """Whether followers may have taken this owner for dead: it has not renewed its record for so long."""
        return self._ownership.is_unconfirmed(int(STALE_BEATS * self.settings.heartbeat_s * 1e6))

    def take_report(self, report: NodeReport) -> OwnerReport:
        """Answer a follower's report, as the owner."""
        committed = self.committed
        self.reports.take(report, committed, monotonic_us())
        return OwnerReport(
            node=self.settings.node,
            epoch=committed.epoch,
            objects=committed.objects,
            time_us=time_us(),
            releasing=self.handing_over.is_asked,
            successor=self.handing_over.successor or "",
            drained=self.reports.drained(report.node),
        )

    # The life of the node.

    async def _run(self) -> None:
        try:
            while not self._ends:
                claim = await self._follow()
                if claim is None:
                    break
                owned = await self._claim(claim)
                if owned is not None:
                    await self._serve(owned)
                    if not self.settings.follows and not owned.disk.damaged and not self._ends:
                        raise Fenced("another node of the cluster has taken the shard over")
        except Exception as error:
            if not isinstance(error, HeadraceError):
                logger.exception("node failed")
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the node with an error: it cannot go on."""
        self._ends = True
        self._changed.set()
        if not self.ended.done():
            logger.error("node ends  node=%s reason=%s", self.settings.node, error)
            self.ended.set_exception(error)

    async def _follow(self) -> Claim | None:
        """Follow until the shard is to be claimed; None when the node ends."""
        polling = self._loop.create_task(self._copy.run())
        told = ""
        try:
            while not self._ends:
                self._changed.clear()
                if polling.done():
                    polling.result()
                decision = self._decide()
                if isinstance(decision, Claim):
                    await self._look_again()  # its owner may just have handed the shard to another node
                    decision = self._decide()
                if isinstance(decision, Claim):
                    return decision
                if not self.settings.follows:
                    self._check_unused()
                if decision.reason != told:
                    told = decision.reason
                    self._tell_following(told)
                pause_s = (
                    max(decision.until_us - monotonic_us(), 10_000) / 1e6 if self.knowledge.has_looked else _RETRY_S
                )
                await wait_for_event(self._changed, pause_s)
            return None
        finally:
            polling.cancel()
            with suppress(asyncio.CancelledError):
                await polling
            await self._blocking(lambda: None)  # what it began is finished before anything else touches the copy

    def _check_unused(self) -> None:
        """Of a node that does not follow: refuse to wait for a live owner."""
        manifest = self.manifest
        if manifest is None or manifest.released or manifest.owner == self.settings.node:
            return
        if self.link.answered_us or self.knowledge.watch.has_changed(manifest.owner):
            where = f" at {manifest.addresses[0]}: connect to it" if manifest.addresses else ", inside a program"
            raise LogInUse(f"the cluster {self.settings.cluster} is served by {manifest.owner}{where}")

    def _tell_following(self, reason: str) -> None:
        manifest = self.manifest
        owner, epoch = ("", 0) if manifest is None else (manifest.owner, manifest.epoch)
        logger.info("following  node=%s owner=%s epoch=%d reason=%s", self.settings.node, owner, epoch, reason)
        if self.replica.is_restored and reason and self.settings.follows:
            self.ready.set()

    async def _claim(self, claim: Claim) -> OwnedShard | None:
        """Claim the shard; None if another node was first, or the store does not answer."""
        began = time.monotonic()
        nonce, addresses = new_nonce(), (*self.settings.addresses, *self.settings.http_addresses)
        self._set_role(CLAIMING)
        self.owns = claim.expected_epoch + 1
        self._ownership.begin_claim()
        level = logging.DEBUG if self._claims.has_failed else logging.INFO
        logger.log(level, "claiming  node=%s epoch=%d reason=%s", self.settings.node, self.owns, claim.reason)
        take = partial(self.replica.claim, nonce, addresses, claim.expected_epoch, self._ownership.on_fenced)
        owned: OwnedShard | None = None
        why = "another node was first"
        while time.monotonic() - began < _CLAIM_S:
            try:
                owned = await self._blocking(take)
                break
            except StoreUnavailable as error:
                why = str(error)
                await asyncio.sleep(_CLAIM_RETRY_S)
            except STORE_FAULTS as error:
                why = str(error)
                self._copy.block(error)
                await self._give_up_claim(claim.expected_epoch + 1)
                break
            except IN_DOUBT as error:
                why = str(error)
                await self._copy.wait_in_doubt(error)
            except DISK_FAULTS as error:
                why = f"disk failed: {error}"
                self.knowledge.hold_off()
                await self._blocking(self.replica.drop)
                await self._give_up_claim(claim.expected_epoch + 1)
                break
            except (Fenced, UnsupportedFormat) as error:
                why = str(error)
                await self._blocking(self.replica.drop)
                break
        if owned is None:
            await self._end_claim(claim, why)
            return None
        self._claims.reset()
        self._adopt_manifest(owned.stored, monotonic_us())
        self._ownership.begin(owned, int(owned.begun_s * 1e6))
        self.heartbeat.hurry()
        took_s = time.monotonic() - began
        logger.info("claimed  node=%s epoch=%d seconds=%.3f", self.settings.node, owned.epoch, took_s)
        return owned

    async def _end_claim(self, claim: Claim, why: str) -> None:
        """Follow again after a claim without success, and claim later if nothing has changed meanwhile."""
        self.owns = 0
        was_retried = self._claims.has_failed
        self._set_role(BLOCKED if self.replica.problem else FOLLOWING)
        await self._look_again()
        manifest = self.manifest
        is_later = manifest is not None and manifest.epoch > claim.expected_epoch
        if manifest is not None and is_later and manifest.owner != self.settings.node:
            self._claims.reset()
        else:
            self.knowledge.hold_claims(self._claims.failed())
        level = logging.INFO if self._claims.is_news(why) or not was_retried else logging.DEBUG
        logger.log(level, "claim given up  node=%s reason=%s", self.settings.node, why)

    async def _give_up_claim(self, epoch: int) -> None:
        """Leave the epoch that this node has made, if it has, to others: it cannot serve it."""
        await self._look_again()
        manifest = self.manifest
        if manifest is not None and (manifest.epoch, manifest.owner) == (epoch, self.settings.node):
            await self._release(epoch)

    async def _release(self, epoch: int, successor: str = "") -> None:
        """Leave an epoch to others that this node does not serve."""
        with log_failure("shard not released; others take over when the record of this node is old"):
            await run_on_thread(partial(release, self.store, self.replica.keys, epoch, successor))

    async def _look_again(self) -> None:
        """Read the manifest, so that the next decision is about what is there now."""
        with log_failure("manifest not read; the next heartbeat reads it"):
            self._adopt_manifest(await self._blocking(self.replica.manifest), monotonic_us())

    async def _serve(self, owned: OwnedShard) -> None:
        """Serve until the shard is lost, handed over, or the node ends."""
        began = time.monotonic()
        self.link.stop()
        self.reports = FollowerReports()
        try:
            await self._host.start_serving(owned)
        except BaseException as error:
            await self._give_back(owned)
            if owned.disk.damaged and not isinstance(error, asyncio.CancelledError):
                return
            if isinstance(error, DataDirectoryDamaged) and self.settings.follows and not self._was_compared:
                self._was_compared = True  # the copy is compared with the store, which may have it whole
                logger.error("local copy damaged; comparing it with the store  reason=%s", error)
                return
            if not isinstance(error, (*DISK_FAULTS, *IN_DOUBT, *_PASSING)) or not self.ready.is_set():
                raise
            reason = "its disk has failed" if isinstance(error, DISK_FAULTS) else "it could not serve the shard"
            pause_s = self.knowledge.hold_off(reason)
            logger.warning("shard not served; trying again in %g s  epoch=%d reason=%s", pause_s, owned.epoch, error)
            return
        self.serving_since_us, self._was_compared = time_us(), False
        self._set_role(SERVING)
        took_s = time.monotonic() - began
        logger.info("serving  node=%s epoch=%d seconds=%.3f", self.settings.node, owned.epoch, took_s)
        self.ready.set()
        while True:
            self._changed.clear()
            decision = decide_owner(self._ownership.view(self.settings.node, owned, self.manifest), monotonic_us())
            if isinstance(decision, StopServing):
                await self._stop_serving(owned, decision)
                return
            pause_s = max(decision.until_us - monotonic_us(), 10_000) / 1e6
            if self.handing_over.is_asked or self._ends:
                best, now_us = self.best_successor(), monotonic_us()
                expects = best is None and self.knowledge.expects_follower(self.reports, now_us)
                if self.ended.done() or self.handing_over.may_begin(self.reports, best, now_us, expects=expects):
                    await self._hand_over(owned, self.handing_over.successor or "")
                    return
                pause_s = min(pause_s, CATCHING_UP_S)
            await wait_for_event(self._changed, pause_s)

    async def _give_back(self, owned: OwnedShard) -> None:
        """Release a shard that could not be served."""
        self._forget_owned(owned, "the shard could not be served")
        await self._release(owned.epoch)
        await run_on_thread(owned.writer.close)
        await self._blocking(partial(self.replica.note_damage, owned.disk.damaged))
        self._set_role(RESTORING)
        await self._look_again()

    def _forget_owned(self, owned: OwnedShard, reason: str) -> None:
        """Write nothing more to the store, and own nothing."""
        self.replica.note_committed(owned.writer.committed)
        self._ownership.end(owned, reason)
        self.owns = self.serving_since_us = 0
        self.handing_over.end()

    async def _stop_serving(self, owned: OwnedShard, decision: StopServing) -> None:
        """Stop at once: another node owns the shard, or may own it soon, or this one cannot go on."""
        logger.warning("stopped serving  node=%s epoch=%d reason=%s", self.settings.node, owned.epoch, decision.reason)
        is_released = decision.disk_failed or decision.copy_damaged
        best = self.best_successor() if is_released else None
        self._forget_owned(owned, decision.reason)
        if decision.by_force:
            self.knowledge.lost_us = monotonic_us()
        self._set_role(RESTORING)
        if decision.disk_failed:
            pause_s = self.knowledge.hold_off()
            logger.warning("claiming nothing for %g s, as the disk has failed  node=%s", pause_s, self.settings.node)
        if is_released:
            await self._release(owned.epoch, "" if best is None else best.node)
        await self._host.abort_serving()
        await run_on_thread(owned.writer.close)
        await self._blocking(partial(self.replica.note_damage, owned.disk.damaged))
        self.knowledge.manifest_us = monotonic_us()
        await self._look_again()

    async def _hand_over(self, owned: OwnedShard, successor: str) -> None:
        """Finish, store everything, release the shard, and send clients to the successor."""
        began = time.monotonic()
        self._set_role(RELEASING)
        logger.info("handing over  node=%s epoch=%d successor=%s", self.settings.node, owned.epoch, successor)
        try:
            await self._host.finish_serving()
            await run_on_thread(partial(owned.writer.flush, _FLUSH_S))
            manifest = await run_on_thread(partial(release, self.store, self.replica.keys, owned.epoch, successor))
        except (HeadraceError, OSError) as error:
            failed = isinstance(error, DISK_FAULTS) or self._ownership.disk_failure is not None
            await self._stop_serving(
                owned, StopServing(f"hand-over failed: {error}", by_force=False, disk_failed=failed)
            )
            return
        stored = self.knowledge.stored
        self.knowledge.stored = None if stored is None else stored._replace(manifest=manifest)
        self.knowledge.manifest_us = monotonic_us()
        self._forget_owned(owned, "it was handed over")
        await self._host.end_serving()
        await run_on_thread(owned.writer.close)
        await self._blocking(partial(self.replica.follow_released, owned))
        self._set_role(FOLLOWING)
        took_s = time.monotonic() - began
        logger.info("handed over  node=%s successor=%s seconds=%.3f", self.settings.node, successor, took_s)

    # What is known.

    def _decide(self) -> Wait | Claim:
        """What to do next about a shard that this node follows."""
        if not self.knowledge.has_looked:
            return Wait(0, "")
        drained = self.drained or not self._host.is_reachable()
        replica = self.replica
        copy = CopyState(replica.position, replica.is_restored, drained, replica.problem, self._copy.lags)
        return decide_follower(self.knowledge.follower_view(self.link, copy), monotonic_us())

    def _adopt_manifest(self, stored: StoredManifest | None, now_us: int) -> None:
        """Take a manifest as it was read, and follow the owner that it names."""
        if self.knowledge.adopt(stored, now_us):
            self._changed.set()
            self._copy.more.set()
        if stored is not None and stored is self.knowledge.stored and self.owned is None:
            manifest = stored.manifest
            native = [one for one in manifest.addresses if one.startswith(("headrace://", "headraces://"))]
            follows = manifest.owner != self.settings.node and not manifest.released
            self.link.follow(manifest.epoch, native if follows else ())

    def _on_beat(self, found: BeatRound) -> None:
        """A round of the heartbeat has ended; called on its thread."""
        self._ownership.confirm(found)
        self._post(self._beat_done, found)

    def _beat_done(self, found: BeatRound) -> None:
        """Take what a round of the heartbeat has found."""
        self._adopt_manifest(found.manifest, found.ended_us)
        self.knowledge.take_round(found)
        problem = self.knowledge.problem
        if problem and self._manifest_told.is_news(problem):
            logger.error(
                "manifest cannot be used; nobody can serve before it is back from a backup of the store  reason=%s",
                problem,
            )
        self._changed.set()

    def _link_changed(self) -> None:
        """The owner answered, or its connection broke: it may have committed more, released the shard, or died."""
        answer = self.link.answer
        if answer is not None and answer.drained is not None and answer.drained != self.drained:
            self.set_drained(answer.drained)
        if answer is None or Position(answer.epoch, answer.objects) > self.replica.position:
            self._copy.more.set()
        if not self.link.is_open:
            self.heartbeat.hurry()
            self._copy.more.set()
        self._changed.set()

    def _on_disk_full(self, error: DiskFull) -> None:
        """Hand the shard over in order: what the disk has is right, and is served as far as possible meanwhile."""
        best, now_s = self.best_successor(), time.monotonic()
        if best is not None and not self.handing_over.is_asked:
            logger.warning("disk full; handing over  node=%s successor=%s", self.settings.node, best.node)
            self.knowledge.hold_off()
            self.hand_over(best.node)
            self.handing_over.is_disk_full = True
        elif best is None and now_s - self._full_told_s > _FULL_TOLD_S:
            self._full_told_s = now_s
            logger.warning("disk full, and no other node follows; publishing is refused  reason=%s", error)

    # Small things.

    def _record(self) -> NodeRecord:
        """The record of this node as it is now; called by the heartbeat's thread."""
        self._beat += 1
        settings, position = self.settings, self.committed
        return NodeRecord(
            node=settings.node,
            process=self.process,
            beat=self._beat,
            role=self.role,
            addresses=settings.addresses,
            http_addresses=settings.http_addresses,
            version=settings.version,
            format_max=settings.format_max,
            zone=settings.zone,
            epoch=position.epoch,
            objects=position.objects,
            owns=self.owns,
            drained=self.drained,
        )

    def _report(self) -> NodeReport:
        position, settings = self.replica.position, self.settings
        return NodeReport(
            settings.node,
            epoch=position.epoch,
            objects=position.objects,
            role=self.role if self._host.is_reachable() and not self.knowledge.is_held_off else RESTORING,
            version=settings.version,
            format_max=settings.format_max,
            drained=self.drained,
        )

    def _set_role(self, role: str) -> None:
        if role != self.role:
            self.role = role
            self.heartbeat.hurry()
            self._changed.set()

    async def _remember(self) -> None:
        """Write the highest position seen down now and then."""
        while True:
            await asyncio.sleep(_REMEMBER_S)
            if self.owned is not None:
                self.replica.note_committed(self.owned.writer.committed)
            with log_failure("state of the node not written; trying again"):
                await self._blocking(partial(self.replica.note_state, clean=False))

    async def _blocking(self, call: Callable[[], T]) -> T:
        """Run something on the worker thread, after all that was given to it before."""
        return await self._worker.run(call)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        """Call something on the event loop; from any thread."""
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(call, *arguments)
