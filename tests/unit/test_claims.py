"""What a node decides about a shard: every rule, at its edges."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.claims import (
    ANSWER_US,
    CATCH_UP_US,
    CAUGHT_UP_US,
    DRAINED_RANKS,
    LOOK_US,
    LOST_US,
    RANK_US,
    SUCCESSOR_US,
    UNCONFIRMED_US,
    Claim,
    FollowerReport,
    FollowerView,
    OwnerConnection,
    OwnerView,
    ServeOn,
    StopServing,
    Wait,
    best_successor,
    decide_follower,
    decide_owner,
    may_release,
    rank_of,
)
from headrace.storage.replicated.keys import Position
from headrace.storage.replicated.manifest import Manifest

BEAT = 1_000_000
NOW = 1_000 * BEAT
OWNED = Manifest(epoch=3, owner="a")


def view(**given: Any) -> FollowerView:
    """A follower, b, of an owner, a, with whom all is well at NOW."""
    fine = {
        "node": "b", "heartbeat_us": BEAT, "format_max": 1, "manifest": OWNED, "manifest_us": NOW - 60 * BEAT,
        "connection": OwnerConnection.OPEN, "answered_us": NOW - BEAT // 2, "beat_changed_us": NOW - BEAT,
        "beat_read_us": NOW - BEAT // 2, "owner_owns": 3,
    }  # fmt: skip
    return FollowerView(**{**fine, **given})


def claims(**given: Any) -> bool:
    return isinstance(decide_follower(view(**given), NOW), Claim)


def test_a_follower_of_a_live_owner_waits() -> None:
    assert decide_follower(view(), NOW) == Wait(NOW + BEAT // 2, "owner is alive")


@pytest.mark.parametrize(
    "given",
    [
        {"manifest": None},
        {"manifest": Manifest(epoch=3, owner="a", released=True)},
        {"manifest": Manifest(epoch=3, owner="a", released=True, successor="b")},
        {"manifest": Manifest(epoch=3, owner="b")},
        {"connection": OwnerConnection.REFUSED},
    ],
    ids=["no owner yet", "released", "handed over", "owned before", "refused"],
)
def test_a_follower_with_much_to_apply_catches_up_before_it_claims(given: dict[str, Any]) -> None:
    assert claims(**given)
    assert decide_follower(view(**given, lags=True), NOW) == Wait(NOW + LOOK_US, "catching up")


@given(
    connection=st.sampled_from([OwnerConnection.NONE, OwnerConnection.OPEN]),
    answered_us=st.integers(0, NOW),
    changed_ago_us=st.integers(0, 2 * BEAT - 1),
    rank=st.integers(0, 5),
    lost_us=st.sampled_from([0, NOW - BEAT]),
)
def test_nobody_claims_from_an_owner_whose_record_changes(
    connection: OwnerConnection, answered_us: int, changed_ago_us: int, rank: int, lost_us: int
) -> None:
    given = {"beat_read_us": NOW, "beat_changed_us": NOW - changed_ago_us}
    assert not claims(connection=connection, answered_us=answered_us, rank=rank, lost_us=lost_us, **given)


@given(st.integers(0, 10 * BEAT), st.integers(0, ANSWER_US - 1))
def test_nobody_claims_from_an_owner_that_answers_before_its_record_is_stale_for_long(
    stale_us: int, unanswered_us: int
) -> None:
    found = claims(beat_read_us=NOW, beat_changed_us=NOW - stale_us, answered_us=NOW - unanswered_us)
    assert found == (stale_us >= 5 * BEAT)


def test_a_dead_process_is_succeeded_at_once_by_the_first_in_rank() -> None:
    gone = {"connection": OwnerConnection.REFUSED, "answered_us": NOW - 100_000}
    assert decide_follower(view(**gone), NOW) == Claim(3, "owner's process is gone")
    assert decide_follower(view(**gone, rank=1), NOW) == Wait(NOW - 100_000 + RANK_US, "owner's process is gone")
    assert claims(**{**gone, "answered_us": NOW - RANK_US}, rank=1)


def test_a_silent_owner_is_succeeded_when_its_record_is_silent_too() -> None:
    silent = {"connection": OwnerConnection.NONE, "answered_us": NOW - ANSWER_US, "beat_read_us": NOW}
    assert claims(**silent, beat_changed_us=NOW - 2 * BEAT)
    assert not claims(**silent, beat_changed_us=NOW - 2 * BEAT + 1)
    assert not claims(**silent, beat_changed_us=NOW - 2 * BEAT, rank=1)
    assert claims(**silent, beat_changed_us=NOW - 2 * BEAT - RANK_US, rank=1)


def test_a_follower_without_the_store_concludes_nothing() -> None:
    read_us = NOW - 100 * BEAT
    assert not claims(
        connection=OwnerConnection.NONE, answered_us=read_us, beat_changed_us=read_us - BEAT, beat_read_us=read_us
    )


def test_an_owner_that_does_not_say_that_it_owns_is_succeeded() -> None:
    silent = {"connection": OwnerConnection.NONE, "answered_us": 0, "owner_owns": 0}
    assert claims(**silent)
    assert not claims(**silent, manifest_us=NOW - 3 * BEAT + 1, beat_changed_us=NOW - BEAT)
    assert not claims(**{**silent, "owner_owns": 3})


@pytest.mark.parametrize("successor", ["", "b"])
def test_a_released_shard_is_claimed_at_once(successor: str) -> None:
    released = Manifest(epoch=3, owner="a", released=True, successor=successor)
    assert claims(manifest=released, manifest_us=NOW)


def test_a_shard_released_to_another_is_left_to_it_for_a_while() -> None:
    released = Manifest(epoch=3, owner="a", released=True, successor="c")
    assert not claims(manifest=released, manifest_us=NOW - SUCCESSOR_US + 1)
    assert claims(manifest=released, manifest_us=NOW - SUCCESSOR_US)


def test_a_new_cluster_is_claimed_in_the_order_of_ranks() -> None:
    assert decide_follower(view(manifest=None, manifest_us=NOW), NOW) == Claim(0, "no owner yet")
    assert not claims(manifest=None, manifest_us=NOW, rank=1)


def test_a_node_takes_up_what_it_owned_before() -> None:
    assert decide_follower(view(node="a"), NOW) == Claim(3, "owned before")


@pytest.mark.parametrize(
    "given",
    [{"restored": False}, {"manifest": Manifest(epoch=3, owner="a", released=True, format=2)}],
)
def test_some_never_claim(given: dict[str, Any]) -> None:
    assert not claims(**{"connection": OwnerConnection.REFUSED, **given})


def test_a_drained_node_takes_over_only_when_no_other_does() -> None:
    released = Manifest(epoch=3, owner="a", released=True)
    assert not claims(drained=True, connection=OwnerConnection.REFUSED)
    assert not claims(drained=True, manifest=released, manifest_us=NOW - DRAINED_RANKS * RANK_US + 1)
    assert claims(drained=True, manifest=released, manifest_us=NOW - DRAINED_RANKS * RANK_US)
    assert claims(drained=True, manifest=Manifest(epoch=3, owner="a", released=True, successor="b"), manifest_us=NOW)


def test_a_node_that_lost_a_shard_by_force_needs_the_store_to_say_that_nobody_serves() -> None:
    gone = {"connection": OwnerConnection.REFUSED, "lost_us": NOW - LOST_US + 1}
    assert not claims(**gone)
    assert claims(**{**gone, "lost_us": NOW - LOST_US})
    assert claims(**gone, answered_us=NOW - ANSWER_US, beat_changed_us=NOW - 3 * BEAT, beat_read_us=NOW)


def test_an_owner_serves_until_it_is_fenced_or_cannot_confirm() -> None:
    fine = OwnerView("a", 3, confirmed_us=NOW, manifest_epoch=3)
    assert decide_owner(fine, NOW + UNCONFIRMED_US - 1) == ServeOn(NOW + UNCONFIRMED_US)
    late = decide_owner(fine, NOW + UNCONFIRMED_US)
    assert isinstance(late, StopServing)
    assert not late.by_force
    for lost in (fine._replace(fenced=True), fine._replace(manifest_epoch=4)):
        decision = decide_owner(lost, NOW)
        assert isinstance(decision, StopServing)
        assert decision.by_force


def report(node: str, epoch: int, objects: int, **given: Any) -> FollowerReport:
    return FollowerReport(node, Position(epoch, objects), **{"heard_us": NOW, "format_max": 1, **given})


def test_ranks_go_by_position_then_name_and_leave_out_the_drained() -> None:
    others = [report("a", 3, 7), report("c", 3, 9), report("d", 2, 99), report("e", 4, 0, drained=True)]
    assert rank_of("b", Position(3, 7), others) == 2
    assert rank_of("b", Position(3, 8), others) == 1
    assert rank_of("b", Position(3, 10), others) == 0


@given(st.permutations([("a", 3, 7), ("b", 3, 7), ("c", 3, 9), ("d", 2, 0)]))
def test_ranks_are_a_total_order(nodes: list[tuple[str, int, int]]) -> None:
    reports = [report(*one) for one in nodes]
    ranks = sorted(rank_of(one.node, one.position, reports) for one in reports)
    assert ranks == [0, 1, 2, 3]


def test_the_successor_is_the_farthest_that_is_able() -> None:
    able = report("b", 3, 7)
    unable = [
        report("c", 3, 9, drained=True), report("d", 3, 9, heard_us=NOW - ANSWER_US), report("e", 3, 9, format_max=0),
    ]  # fmt: skip
    assert best_successor([*unable, able], 1, NOW) == able
    assert best_successor(unable, 1, NOW) is None
    assert best_successor([able], 1, NOW, without="b") is None


def test_a_node_whose_disk_has_failed_claims_nothing_for_a_while() -> None:
    released = {"manifest": Manifest(epoch=3, owner="a", released=True, successor="b")}
    assert decide_follower(view(**released, held_until_us=NOW + 1), NOW) == Wait(NOW + 1, "its disk has failed")
    assert claims(**released, held_until_us=NOW)


def test_an_owner_whose_disk_has_failed_stops_and_releases_the_shard() -> None:
    fine = OwnerView("a", 3, confirmed_us=NOW, manifest_epoch=3)
    found = decide_owner(fine._replace(disk_failure="EIO"), NOW)
    assert found == StopServing("the local disk has failed: EIO", by_force=False, disk_failed=True)
    taken = decide_owner(fine._replace(disk_failure="EIO", manifest_epoch=4), NOW)
    assert isinstance(taken, StopServing)
    assert not taken.disk_failed  # there is nothing to release


def test_an_owner_of_the_same_name_elsewhere_has_time_to_object() -> None:
    own = Manifest(epoch=3, owner="b", addresses=("headrace://b:1", "http://b:2"))
    seen = {"manifest": own, "manifest_us": NOW - BEAT}
    assert claims(**seen, addresses=("headrace://b:1",))
    assert claims(**seen)  # a program that listens nowhere
    elsewhere = {**seen, "addresses": ("headrace://c:1",)}
    assert not claims(**elsewhere)
    assert claims(**{**elsewhere, "manifest_us": NOW - 4 * BEAT})


def test_a_follower_that_is_being_restored_is_no_successor() -> None:
    report = FollowerReport("b", Position(3, 7), NOW, format_max=1)
    assert best_successor([report], 1, NOW) == report
    assert best_successor([report._replace(is_able=False)], 1, NOW) is None


def test_a_copy_or_a_manifest_that_the_store_has_damaged_is_not_claimed() -> None:
    released = Manifest(epoch=3, owner="a", released=True, successor="b")
    assert claims(manifest=released)
    assert decide_follower(view(manifest=released, problem="a hole"), NOW) == Wait(NOW + BEAT // 2, "a hole")


def test_a_claim_that_failed_is_not_repeated_at_once() -> None:
    held = view(manifest=None, manifest_us=NOW - BEAT, held_until_us=NOW + 1, held_reason="its last claim has failed")
    assert decide_follower(held, NOW) == Wait(NOW + 1, "its last claim has failed")


def test_an_owner_whose_manifest_is_gone_stops() -> None:
    owner = OwnerView("a", 3, NOW, 3, store_problem="the manifest is missing")
    assert decide_owner(owner, NOW) == StopServing("the manifest is missing", by_force=False)


def test_a_hand_over_waits_for_a_successor_that_is_behind_or_restored() -> None:
    near = FollowerReport("b", Position(3, 9), NOW)
    asked = Position(3, 9)
    assert may_release(near, CAUGHT_UP_US - 1, asked, NOW, NOW)
    assert not may_release(near, CAUGHT_UP_US, asked, NOW, NOW)
    assert not may_release(near, 0, Position(3, 10), NOW, NOW)
    assert not may_release(near._replace(is_able=False), 0, asked, NOW, NOW)


def test_a_hand_over_waits_neither_for_long_nor_for_who_is_gone() -> None:
    behind = FollowerReport("b", Position(3, 1), NOW)
    asked = Position(3, 9)
    assert may_release(behind, 60 * BEAT, asked, NOW - CATCH_UP_US, NOW)
    assert may_release(behind._replace(heard_us=NOW - ANSWER_US), 60 * BEAT, asked, NOW, NOW)
    assert may_release(None, 0, asked, NOW, NOW)
