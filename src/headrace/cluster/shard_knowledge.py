"""What a node knows about its shard: the manifest, the records of the nodes, and when it saw them change."""

import logging
from typing import NamedTuple

from headrace.cluster.claims import ANSWER_US, FollowerReport, FollowerView, rank_of
from headrace.cluster.heartbeat import BeatRound
from headrace.cluster.node_record import BLOCKED, CLAIMING, FOLLOWING, STOPPED, BeatWatch, NodeRecord
from headrace.cluster.node_settings import NodeSettings, monotonic_us
from headrace.cluster.peers import FollowerReports, OwnerLink
from headrace.storage.replicated.epochs import StoredManifest
from headrace.storage.replicated.keys import Position
from headrace.storage.replicated.manifest import Manifest

logger = logging.getLogger("headrace.cluster")

LIVE_BEATS = 8
"""A node whose record has not changed for so many heartbeats is not counted among the live ones."""
_RECENT_BEATS = 3
"""A node whose record has not changed for so many heartbeats is not waited for."""
_HOLD_OFF_US = 1_000_000
_HOLD_OFF_US_MAX = 60_000_000
_STABLE_US = 60_000_000
"""A node whose disk has not failed for so long begins again with the shortest pause."""


class CopyState(NamedTuple):
    """The state of the node's own copy, for decisions."""

    position: Position
    is_restored: bool
    drained: bool
    problem: str = ""
    lags: bool = False


class ShardKnowledge:
    """What a node knows; used on its event loop."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self.watch = BeatWatch()
        self.stored: StoredManifest | None = None
        """The manifest as it was last read."""
        self.has_looked = False
        """Whether a round of the heartbeat has ended since the start."""
        self.manifest_us = 0
        """When this epoch, or its release, was first seen."""
        self.lost_us = 0
        """When the shard was last taken from this node by force."""
        self.held_until_us = 0
        """Before this time the node claims nothing, for the reason beside it."""
        self._held_reason = ""
        self.problem = ""
        """Why the manifest in the store cannot be used; empty: it can."""
        self._owner_read_us = 0
        self._hold_offs = 0
        self._held_us = 0

    @property
    def manifest(self) -> Manifest | None:
        """The manifest as it was last read."""
        return None if self.stored is None else self.stored.manifest

    @property
    def format(self) -> int:
        """The format of the shard; 0 before the first claim."""
        return 0 if self.stored is None else self.stored.manifest.format

    @property
    def is_held_off(self) -> bool:
        """Whether the node claims nothing at the moment, as its disk has failed, its last claim, or its serving."""
        return monotonic_us() < self.held_until_us

    def hold_off(self, reason: str = "its disk has failed") -> float:
        """Claim nothing for a while, longer each time; returns for how many seconds."""
        now_us = monotonic_us()
        self._hold_offs = 0 if now_us - self._held_us > _STABLE_US else self._hold_offs + 1
        pause_us = min(_HOLD_OFF_US << self._hold_offs, _HOLD_OFF_US_MAX)
        self.held_until_us = now_us + pause_us
        self._held_us = self.held_until_us
        self._held_reason = reason
        return pause_us / 1e6

    def hold_claims(self, pause_s: float) -> None:
        """Claim nothing for so long, as the last claim has failed; a longer pause stays."""
        until_us = monotonic_us() + int(pause_s * 1e6)
        if until_us > self.held_until_us:
            self.held_until_us, self._held_reason = until_us, "its last claim has failed"

    def adopt(self, stored: StoredManifest | None, now_us: int) -> bool:
        """Take a manifest as it was read; returns whether it is another epoch or its release.

        An older one than is known, from a late answer, is ignored.
        """
        before = self.manifest
        after = None if stored is None else stored.manifest
        if before is not None and (after is None or (after.epoch, after.change) < (before.epoch, before.change)):
            return False
        is_other = before is None or after is None or before.epoch != after.epoch or before.released != after.released
        if before is not None and after is not None and before.epoch != after.epoch:
            self._tell_if_passed_over(before, after)
        self.stored = stored
        if not is_other or (before is None and after is None and self.manifest_us):
            return False
        self.manifest_us = now_us
        self._owner_read_us = 0
        return True

    def _tell_if_passed_over(self, before: Manifest, after: Manifest) -> None:
        """Log that another node has claimed a shard that was handed to this one."""
        node = self._settings.node
        if before.released and before.successor == node and after.owner != node:
            reason = self._held_reason if self.is_held_off else "this node did not claim it in time"
            logger.warning("another node took over  node=%s owner=%s reason=%s", node, after.owner, reason)

    def take_round(self, found: BeatRound) -> None:
        """Take the records that a round of the heartbeat has read."""
        self.has_looked = True
        self.problem = found.problem
        if found.manifest is None and self.stored is not None and found.began_us > self.manifest_us:
            epoch = self.stored.manifest.epoch
            self.problem = self.problem or f"the manifest is missing from the store, though it was at epoch {epoch}"
        if found.nodes is not None:
            self.watch.observe_all(found.nodes, found.ended_us)
        manifest = self.manifest
        if manifest is None or found.manifest is None or manifest.epoch != found.manifest.manifest.epoch:
            return
        if manifest.owner not in ("", self._settings.node):
            self.watch.observe(manifest.owner, found.owner, found.ended_us)
            self._owner_read_us = found.ended_us

    def live_nodes(self) -> list[NodeRecord]:
        """The records of nodes that are alive, this one's among them."""
        age_us = int(LIVE_BEATS * self._settings.heartbeat_s * 1e6)
        found = self.watch.live(monotonic_us(), age_us)
        return [one for one in found if one.role != STOPPED]

    def expects_follower(self, reports: FollowerReports, now_us: int) -> bool:
        """Whether a live node could take over that has not reported to this one, as it only begins to follow."""
        age_us = int(_RECENT_BEATS * self._settings.heartbeat_s * 1e6)
        return any(
            one.node != self._settings.node
            and one.role not in (STOPPED, BLOCKED)  # a former owner has not said yet that it follows
            and not one.drained
            and one.format_max >= self.format
            and reports.age_us(one.node, now_us) >= ANSWER_US
            for one in self.watch.live(now_us, age_us)
        )

    def addresses_of(self, node: str) -> tuple[str, ...]:
        """Where clients reach a node; empty if that is not known."""
        record = self.watch.records.get(node)
        return () if record is None else record.addresses

    def follower_view(self, link: OwnerLink, copy: CopyState) -> FollowerView:
        """What the node decides by while it follows."""
        manifest = self.manifest
        owner = "" if manifest is None else manifest.owner
        record = self.watch.records.get(owner)
        return FollowerView(
            node=self._settings.node,
            heartbeat_us=int(self._settings.heartbeat_s * 1e6),
            format_max=self._settings.format_max,
            manifest=manifest,
            manifest_us=self.manifest_us,
            addresses=self._settings.addresses,
            connection=link.state,
            answered_us=link.answered_us,
            beat_changed_us=max(self.watch.changed_us(owner), self.manifest_us),
            beat_read_us=self._owner_read_us,
            owner_owns=0 if record is None else record.owns,
            rank=self._rank(owner, copy.position),
            lost_us=self.lost_us,
            held_until_us=self.held_until_us,
            held_reason=self._held_reason,
            problem=copy.problem or self.problem,
            drained=copy.drained,
            restored=copy.is_restored,
            lags=copy.lags,
        )

    def _rank(self, owner: str, position: Position) -> int:
        """How many other followers come before this one."""
        others = [
            FollowerReport(one.node, one.position, 0, one.drained, one.format_max)
            for one in self.live_nodes()
            if one.node not in (owner, self._settings.node) and one.role in (FOLLOWING, CLAIMING)
        ]
        return rank_of(self._settings.node, position, others)
