"""What a node does next about a shard: pure decisions, with the time as an argument.

Safety never depends on what is decided here: the store admits one owner an epoch, whoever claims and whenever. What
depends on it is how long nobody serves, and how often a shard moves without need. docs/adr/0070-claims-and-failover.md
has the reasons.

All times are microseconds of the node's own monotonic clock; 0 means never.
"""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from headrace.storage.replicated.keys import Position
from headrace.storage.replicated.manifest import Manifest

ANSWER_US = 1_500_000
"""An owner that has not answered a report for so long may be dead."""
RANK_US = 500_000
"""Each follower waits so much longer than the one before it in rank."""
DRAINED_RANKS = 20
"""A drained node takes over only when no other has done so for this many ranks, ten seconds."""
LOST_US = 30_000_000
"""A node that lost a shard by force takes it back only from an owner that the store, too, shows to be dead."""
SUCCESSOR_US = 2_000_000
"""How long others leave a released shard to the successor that its owner named."""
CAUGHT_UP_US = 1_000_000
"""A follower that lacks only what was committed within this time can take over without a long pause."""
CATCH_UP_US = 10_000_000
"""How long an owner that hands over serves on while its successor catches up."""
LOOK_US = 20_000
"""How soon a node that would claim the shard looks again whether it has caught up."""
UNCONFIRMED_US = 5_000_000
"""An owner that could not confirm its epoch for so long stops serving."""
STALE_BEATS = 2
"""An owner that does not answer is dead when its record has not changed for so many heartbeats."""
STALE_BEATS_ANSWERING = 5
"""An owner that answers has lost the store when its record has not changed for so many heartbeats."""
OWNING_BEATS = 3
"""A new owner has so many heartbeats to say in its record that it owns the shard."""

NAME_BEATS = 4
"""An owner of this node's own name at other addresses may be another process: it has so many heartbeats to object."""


class OwnerConnection(Enum):
    """The follower's connection to the owner."""

    NONE = "none"
    """It has not been made yet, or the owner cannot be reached."""
    OPEN = "open"
    """The owner of this epoch has answered over it."""
    REFUSED = "refused"
    """It was open in this epoch and broke, and the owner's machine refuses another at once: its process is dead."""


class FollowerView(NamedTuple):
    """What a node that follows a shard knows about it."""

    node: str
    heartbeat_us: int
    format_max: int
    """The highest format that this node knows."""
    manifest: Manifest | None
    """As it was last read; None: the shard has never been owned."""
    manifest_us: int
    """When this epoch, or its release, was first seen."""
    addresses: tuple[str, ...] = ()
    """At which this node listens: who listens there has no other process beside it."""
    connection: OwnerConnection = OwnerConnection.NONE
    answered_us: int = 0
    """When the owner last answered in this epoch."""
    beat_changed_us: int = 0
    """When the owner's record was last seen to change; where there is none, when it was first looked for."""
    beat_read_us: int = 0
    """When the owner's record was last read with success."""
    owner_owns: int = 0
    """The epoch that the owner's record says it owns; 0: none."""
    rank: int = 0
    """How many live followers come before this one."""
    lost_us: int = 0
    """When the shard was last taken from this node by force."""
    held_until_us: int = 0
    """Before this time it claims nothing: its own disk has failed, or its last claim."""
    held_reason: str = "its disk has failed"
    problem: str = ""
    """Why nobody with this copy can serve, which is a fault of the store; empty: it can."""
    drained: bool = False
    """Whether this node was asked to serve nothing."""
    restored: bool = True
    """Whether its directory has the state of the shard up to some position."""
    lags: bool = False
    """Whether it has to apply more that was committed, as far as it knows."""


class Wait(NamedTuple):
    """Follow on, and decide again at this time, or when something has changed."""

    until_us: int
    reason: str


class Claim(NamedTuple):
    """Claim the shard, if it is still in the epoch that was seen."""

    expected_epoch: int
    reason: str


def decide_follower(view: FollowerView, now_us: int) -> Wait | Claim:
    """What a node that follows a shard does next.

    One that has much to apply yet does that first: meanwhile another can take over that has not.
    """
    decision = _decide_when_level(view, now_us)
    if isinstance(decision, Claim) and view.lags:
        return Wait(now_us + LOOK_US, "catching up")
    return decision


def _decide_when_level(view: FollowerView, now_us: int) -> Wait | Claim:
    manifest = view.manifest
    again_us = now_us + view.heartbeat_us // 2
    if view.problem:
        return Wait(again_us, view.problem)
    if not view.restored:
        return Wait(again_us, "restoring")
    if now_us < view.held_until_us:
        return Wait(min(view.held_until_us, again_us), view.held_reason)
    if view.drained:
        view = view._replace(rank=view.rank + DRAINED_RANKS)
    if manifest is None:
        return _claim_at(view, 0, "no owner yet", view.manifest_us + view.rank * RANK_US, now_us)
    if manifest.format > view.format_max:
        return Wait(again_us, f"format {manifest.format} is newer than this software")
    if manifest.released:
        return _decide_released(view, manifest, now_us)
    if manifest.owner == view.node:
        is_here = not view.addresses or not set(view.addresses).isdisjoint(manifest.addresses)
        delay_us = 0 if is_here else NAME_BEATS * view.heartbeat_us
        return _claim_at(view, manifest.epoch, "owned before", view.manifest_us + delay_us, now_us)
    return _decide_owned(view, manifest, now_us)


def _decide_released(view: FollowerView, manifest: Manifest, now_us: int) -> Wait | Claim:
    if manifest.successor == view.node:
        return Claim(manifest.epoch, "handed over")
    delay_us = view.rank * RANK_US
    if manifest.successor:
        delay_us += SUCCESSOR_US
    return _claim_at(view, manifest.epoch, "released", view.manifest_us + delay_us, now_us)


def _decide_owned(view: FollowerView, manifest: Manifest, now_us: int) -> Wait | Claim:
    """Whether another node's ownership has come to its end."""
    rank_us = view.rank * RANK_US
    stale_us = view.beat_read_us - view.beat_changed_us
    """For how long the record certainly has not changed: time without a successful read proves nothing."""
    lost_recently = bool(view.lost_us) and now_us < view.lost_us + LOST_US
    if view.connection is OwnerConnection.REFUSED and not lost_recently:
        return _claim_at(view, manifest.epoch, "owner's process is gone", view.answered_us + rank_us, now_us)
    unanswered_us = now_us - max(view.answered_us, view.manifest_us)
    if unanswered_us >= ANSWER_US and stale_us >= STALE_BEATS * view.heartbeat_us + rank_us:
        return Claim(manifest.epoch, "owner is silent, and so is its record")
    if stale_us >= STALE_BEATS_ANSWERING * view.heartbeat_us + rank_us:
        return Claim(manifest.epoch, "owner has lost the store")
    owned_us = now_us - view.manifest_us
    if (
        unanswered_us >= ANSWER_US
        and view.beat_read_us
        and view.owner_owns < manifest.epoch
        and owned_us >= OWNING_BEATS * view.heartbeat_us + rank_us
    ):
        return Claim(manifest.epoch, "owner does not serve")
    return Wait(now_us + view.heartbeat_us // 2, "owner is alive")


def _claim_at(view: FollowerView, epoch: int, reason: str, at_us: int, now_us: int) -> Wait | Claim:
    if now_us >= at_us:
        return Claim(epoch, reason)
    return Wait(min(at_us, now_us + view.heartbeat_us // 2), reason)


class OwnerView(NamedTuple):
    """What the owner of a shard knows about its ownership."""

    node: str
    epoch: int
    confirmed_us: int
    """When the last round of heartbeat and manifest began that confirmed the epoch."""
    manifest_epoch: int
    """The highest epoch that was seen in the manifest."""
    fenced: bool = False
    """Whether a WAL object met a seal, or another node's object."""
    disk_failure: str = ""
    """Why its own disk cannot go on; empty: it can."""
    store_problem: str = ""
    """Why the store does not confirm the epoch though it answers; empty: it does."""
    damaged: str = ""
    """The files of its copy that were found damaged; empty: none was."""


class ServeOn(NamedTuple):
    """Serve on; look again at this time."""

    until_us: int


class StopServing(NamedTuple):
    """Drop all connections at once, flush nothing, and follow."""

    reason: str
    by_force: bool
    """Whether another node owns the shard now."""
    disk_failed: bool = False
    """Whether the store is there, and the node's own disk is not: the shard is released to whoever can serve it."""
    copy_damaged: bool = False
    """Whether the copy has to be restored first: the shard is released to whoever has a whole one."""


def decide_owner(view: OwnerView, now_us: int) -> ServeOn | StopServing:
    """Whether the owner of a shard goes on serving."""
    if view.fenced:
        return StopServing("fenced", by_force=True)
    if view.manifest_epoch > view.epoch:
        return StopServing("another node has claimed the shard", by_force=True)
    if view.store_problem:
        return StopServing(view.store_problem, by_force=False)
    if view.damaged:
        return StopServing(f"the local copy is damaged: {view.damaged}", by_force=False, copy_damaged=True)
    if now_us - view.confirmed_us >= UNCONFIRMED_US:
        return StopServing("the store could not be reached to confirm the epoch", by_force=False)
    if view.disk_failure:
        return StopServing(f"the local disk has failed: {view.disk_failure}", by_force=False, disk_failed=True)
    return ServeOn(view.confirmed_us + UNCONFIRMED_US)


class FollowerReport(NamedTuple):
    """How far a follower is, as it last said."""

    node: str
    position: Position
    heard_us: int
    drained: bool = False
    format_max: int = 0
    is_able: bool = True
    """Whether its copy is whole and its disk works."""


def rank_of(node: str, position: Position, others: Iterable[FollowerReport]) -> int:
    """How many of the others come before a node: those that are farther, and of equal ones those of earlier names."""
    return sum((-other.position.epoch, -other.position.objects, other.node) < (
        -position.epoch, -position.objects, node
    ) for other in others if other.node != node and not other.drained)  # fmt: skip


def best_successor(
    reports: Iterable[FollowerReport], shard_format: int, now_us: int, *, without: str = ""
) -> FollowerReport | None:
    """The follower to hand over to: one that has reported lately and knows the format, the farthest of them."""
    able = [
        one
        for one in reports
        if not one.drained
        and one.is_able
        and one.node != without
        and one.format_max >= shard_format
        and now_us - one.heard_us < ANSWER_US
    ]
    return min(able, key=lambda one: (-one.position.epoch, -one.position.objects, one.node), default=None)


def may_release(successor: FollowerReport | None, lag_us: int, asked: Position, asked_us: int, now_us: int) -> bool:
    """Whether an owner that is to hand over does so now, rather than to serve on until its successor has caught up.

    :param successor: the last report of the successor, or of a follower that may become one; None if there is none.
    :param lag_us: how long ago the first change was committed that it lacks.
    :param asked: how far the owner had committed when the hand-over was asked for.
    :param asked_us: when that was.
    """
    if successor is None or now_us - successor.heard_us >= ANSWER_US or now_us - asked_us >= CATCH_UP_US:
        return True
    return successor.is_able and successor.position >= asked and lag_us < CAUGHT_UP_US
