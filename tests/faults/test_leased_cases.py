"""Corners of leased subscriptions, each told in a few lines; the model in test_leased_model.py walks into them all."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.faults.broker_model import MEMORY
from tests.faults.leased_queue import SECOND_US, Queue

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.model.leasing import (
    Ack,
    Extend,
    Forecast,
    Redrive,
    Reject,
    Release,
    SubscriptionAlter,
    SubscriptionCreate,
)
from headrace.testing.workbench import START_US


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        yield Path(directory)


# What is handed out, and in which order.


def test_an_expired_message_is_never_handed_out(place: Path) -> None:
    queue = Queue(place)
    queue.publish("held")
    assert list(queue.lease(lease_ms=60_000)) == ["held"]
    queue.bench.tick()
    queue.publish("a", expires=1)
    queue.publish("b")
    queue.bench.tick(5)
    assert list(queue.lease(10)) == ["b"]


def test_an_expired_message_is_not_handed_out_before_the_broker_has_looked(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a", expires=1)
    queue.publish("b")
    queue.bench.now_us += 5 * SECOND_US
    assert list(queue.lease(10)) == ["b"]


def test_a_message_given_back_keeps_its_place_by_due(place: Path) -> None:
    queue = Queue(place, discipline="deadline")
    queue.publish("first", dues=-10)
    queue.publish("second", dues=-5)
    queue.settle(Release, queue.lease()["first"], delay_ms=0)
    assert list(queue.lease(2)) == ["first", "second"]


def test_a_message_that_rested_keeps_its_place_by_due(place: Path) -> None:
    queue = Queue(place, discipline="deadline")
    queue.publish("first", dues=-10)
    queue.publish("second", dues=-5)
    queue.settle(Release, queue.lease()["first"], delay_ms=1000)
    queue.bench.tick(2)
    assert list(queue.lease(2)) == ["first", "second"]


def test_a_lease_that_ended_leaves_its_place_by_due(place: Path) -> None:
    queue = Queue(place, discipline="deadline", lease_seconds=1)
    queue.publish("first", dues=-10)
    queue.publish("second", dues=-5)
    queue.lease()
    queue.bench.tick(2)
    assert list(queue.lease(2)) == ["first", "second"]


def test_a_busy_key_does_not_keep_others_back(place: Path) -> None:
    queue = Queue(place, ordered_by_key=True)
    queue.publish("red1", "red2", keys=b"red")
    queue.publish("blue1", keys=b"blue")
    assert list(queue.lease()) == ["red1"]
    assert list(queue.lease()) == ["blue1"]


def test_as_many_are_handed_out_as_asked_for_though_some_are_blocked(place: Path) -> None:
    queue = Queue(place, ordered_by_key=True)
    queue.publish("red1", "red2", keys=b"red")
    queue.publish("plain")
    assert list(queue.lease(2)) == ["red1", "plain"]


def test_what_is_leased_ahead_waits_for_its_key_too(place: Path) -> None:
    queue = Queue(place, ordered_by_key=True)
    queue.publish("red1", keys=b"red")
    queue.publish("red2", keys=b"red", dues=1)
    held = queue.lease(2, ahead_ms=2000)
    assert list(held) == ["red1"]
    assert not queue.lease(2, ahead_ms=2000)
    queue.settle(Ack, *held.values())
    assert list(queue.lease(2, ahead_ms=2000)) == ["red2"]


def test_two_leases_of_a_key_from_before_both_keep_it_busy(place: Path) -> None:
    queue = Queue(place)
    queue.publish("red1", "red2", "red3", keys=b"red")
    held = queue.lease(2)
    queue.bench.ask(SubscriptionAlter("jobs", {"ordered_by_key": True}))
    queue.settle(Ack, held["red2"])
    assert list(queue.lease()) == []
    queue.settle(Ack, held["red1"])
    assert list(queue.lease()) == ["red3"]


def test_a_moved_message_takes_up_one_place_only(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a", "b")
    queue.edit(0, due_us=queue.in_seconds(-5))
    assert list(queue.lease(2)) == ["a", "b"]


def test_a_ready_message_that_is_moved_has_its_new_place_by_due(place: Path) -> None:
    queue = Queue(place)
    queue.bench.ask(SubscriptionAlter("jobs", {"discipline": "deadline"}))
    queue.publish("a", "b", dues=-5)
    queue.edit(0, due_us=queue.in_seconds(-1))
    assert list(queue.lease(1)) == ["b"]
    assert list(queue.lease(2)) == ["a"]


def test_bytes_are_bounded_over_all_partitions(place: Path) -> None:
    queue = Queue(place, partitions=2)
    queue.publish("a" * 500)
    queue.publish("b" * 500, partition=1)
    assert len(queue.lease(10, bytes_max=900)) == 1


def test_nothing_passes_a_message_that_is_too_large(place: Path) -> None:
    queue = Queue(place, partitions=2, discipline="deadline")
    queue.publish("a", dues=-9)
    queue.publish("b" * 900, dues=-8)
    queue.publish("c", dues=-7, partition=1)
    queue.publish("d", dues=1, partition=1)
    assert list(queue.lease(10, bytes_max=100, ahead_ms=2000)) == ["a"]


def test_what_was_leased_and_moved_leaves_the_order_of_partitions_alone(place: Path) -> None:
    queue = Queue(place, partitions=2, discipline="deadline")
    queue.publish("a", dues=-9)
    queue.publish("d", dues=-6)
    queue.publish("b", dues=-8, partition=1)
    queue.publish("e", dues=-5, partition=1)
    assert queue.edit(0, due_us=queue.in_seconds(-10)) == "applied"  # its first place is still in the order
    assert list(queue.lease()) == ["a"]
    assert list(queue.lease(10)) == ["b", "d", "e"]


def test_what_was_not_handed_out_does_not_make_a_lease_longer(place: Path) -> None:
    queue = Queue(place, lease_seconds=30)
    queue.publish("a")
    queue.publish("b", dues=1)
    ((_, until_us),) = queue.lease(2, bytes_max=1, ahead_ms=2000).values()
    assert until_us == queue.in_seconds(30)


def test_what_is_ready_comes_before_what_is_not_in_all_partitions(place: Path) -> None:
    queue = Queue(place, partitions=2)
    for partition in (0, 1):
        queue.publish(f"ready{partition}", partition=partition)
        queue.publish(f"soon{partition}", partition=partition, dues=1)
    assert sorted(queue.lease(2, ahead_ms=2000)) == ["ready0", "ready1"]


def test_a_deleted_message_does_not_come_back_to_a_new_subscription(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a", "b")
    assert queue.edit(0, delete=True) == "applied"
    for _ in range(3):
        queue.bench.tick(10)
    assert list(queue.lease(10, "other")) == ["b"]


@pytest.mark.parametrize(("first_s", "second_s"), [(60, 5), (5, 60), (5, 5)])
def test_a_message_that_was_moved_out_of_its_rest_rests_as_long_as_it_is_told_then(
    place: Path, first_s: int, second_s: int
) -> None:
    queue = Queue(place)
    queue.publish("a")
    queue.settle(Release, queue.lease()["a"], delay_ms=1000 * first_s)
    assert queue.edit(0, due_us=queue.bench.now_us) == "applied"
    queue.settle(Release, queue.lease()["a"], delay_ms=1000 * second_s)
    assert queue.find()["a"].ready_us == queue.in_seconds(second_s)
    queue.bench.tick(second_s - 1)
    assert not queue.lease()
    queue.bench.tick(2)
    assert list(queue.lease()) == ["a"]


def test_a_lease_ahead_that_ends_before_the_message_is_due_does_not_make_it_ready(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a", dues=3)
    queue.settle(Extend, queue.lease(ahead_ms=4000)["a"], lease_ms=500)
    queue.bench.tick(1)
    assert queue.find()["a"].status == "waiting"
    assert not queue.lease()
    queue.bench.tick(3)
    assert list(queue.lease()) == ["a"]


# After the broker's death.


def test_a_message_leased_ahead_and_given_back_after_a_restart_is_not_early(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a", dues=3)
    held = queue.lease(ahead_ms=4000)
    queue.restart()
    assert queue.settle(Release, held["a"], undelivered=True) == []
    assert queue.find()["a"].status == "waiting"
    queue.restart()
    assert not queue.lease()


def test_a_message_moved_after_its_lease_ended_is_not_early_after_a_restart(place: Path) -> None:
    queue = Queue(place, lease_seconds=1)
    queue.publish("a")
    queue.lease()
    queue.bench.tick(2)
    assert queue.edit(0, due_us=queue.in_seconds(60)) == "applied"
    assert queue.find()["a"].status == "waiting"
    queue.restart()
    assert queue.find()["a"].status == "waiting"
    assert not queue.lease()


def test_a_lease_that_ended_before_an_edit_counts_once_after_two_restarts(place: Path) -> None:
    queue = Queue(place, lease_seconds=1)
    queue.publish("a")
    queue.lease()
    queue.bench.tick(2)
    assert queue.edit(0, priority=3) == "applied"
    for _ in range(2):  # at each start the journal is replaced by a snapshot
        queue.broker_settings = BrokerSettings(journal_bytes=1)
        queue.restart()
        assert queue.find()["a"].deliveries == 1


def test_a_message_released_twice_rests_as_long_after_a_restart(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a")
    queue.settle(Release, queue.lease()["a"], delay_ms=1000)
    queue.bench.tick(2)
    queue.settle(Release, queue.lease()["a"], delay_ms=60_000)
    queue.restart()
    assert queue.find()["a"].status == "waiting"
    assert not queue.lease()


def test_a_late_ack_is_accepted_after_a_restart_too(place: Path) -> None:
    queue = Queue(place, lease_seconds=1)
    queue.publish("a", *(f"more{number}" for number in range(20)))
    held = queue.lease()
    queue.bench.tick(2)
    for _ in range(20):  # so much that the journal is replaced by a snapshot
        queue.bench.ask(SubscriptionAlter("jobs", {"lease_seconds": 1}))
    queue.restart()
    assert queue.settle(Ack, held["a"]) == []


def test_a_lease_that_ended_while_the_broker_was_away_is_over(place: Path) -> None:
    queue = Queue(place, lease_seconds=1)
    queue.publish("a")
    queue.lease()
    queue.bench = queue.started(queue.in_seconds(5))
    assert list(queue.lease()) == ["a"]


def test_a_message_on_its_way_to_the_dead_is_as_it_was_if_the_broker_dies_meanwhile(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a")
    held = queue.lease()
    queue.bench.syncing_later = True
    queue.bench.begin(Reject("jobs", [held["a"][0]]))
    for _ in range(5):  # so much that the journal is replaced by a snapshot
        queue.bench.begin(SubscriptionAlter("jobs", {"lease_seconds": 20}))
    queue.restart()
    assert list(queue.find("dead")) == []
    assert queue.find()["a"].deliveries == 1
    assert queue.settle(Reject, held["a"]) == []


# What is said about messages.


def test_a_resting_message_says_when_it_is_ready(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a")
    queue.settle(Release, queue.lease()["a"], delay_ms=60_000)
    assert queue.find()["a"].ready_us == queue.in_seconds(60)
    assert list(queue.find(due_from_us=queue.in_seconds(50))) == ["a"]
    assert list(queue.find(due_to_us=queue.in_seconds(50))) == []


def test_a_message_that_is_ready_is_due_before_now(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a")
    queue.publish("b", dues=15)
    queue.bench.tick(5)
    answer = queue.bench.ask(Forecast("jobs", queue.bench.now_us, 10 * SECOND_US, 2))
    assert (answer.before, answer.counts, answer.after) == (1, [0, 1], 0)


def test_a_message_with_a_busy_key_has_been_ready_for_as_long(place: Path) -> None:
    queue = Queue(place, ordered_by_key=True)
    queue.publish("red1", "red2", keys=b"red")
    queue.lease(2)
    assert queue.info().ready == 1
    assert queue.info().ready_since_us == START_US


# Dead letters.


def test_dead_messages_are_counted_for_the_subscription_they_died_in(place: Path) -> None:
    queue = Queue(place)
    queue.bench.ask(SubscriptionCreate("jobs", "other"))
    queue.publish("a")
    queue.settle(Reject, queue.lease()["a"])
    assert (queue.info().dead, queue.info("other").dead) == (1, 0)
    assert list(queue.find("dead", "other")) == []


def test_a_dead_message_says_how_often_it_was_delivered(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a")
    queue.settle(Reject, queue.lease()["a"])
    assert queue.find("dead")["a"].deliveries == 1


def test_the_history_of_a_dead_message_ends_with_its_last_holder(place: Path) -> None:
    queue = Queue(place, deliveries_max=2, lease_seconds=1)
    queue.publish("a")
    queue.settle(Release, queue.lease()["a"], delay_ms=0, reason="tired")
    queue.lease()
    queue.bench.tick(2)
    (batch,) = queue.bench.batches("jobs.dead")
    (headers,) = batch.columns().headers or ()
    history = json.loads((headers or {})["headrace-dead-history"])
    assert [one["holder"] for one in history] == ["workbench", "workbench"]


def test_a_message_can_die_and_be_redriven_again_and_again(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a")
    for _ in range(3):
        queue.settle(Reject, queue.lease()["a"])
        assert list(queue.find("dead")) == ["a"]
        assert queue.bench.ask(Redrive("jobs")).messages == 1
    assert list(queue.lease()) == ["a"]


# Edits.


def test_a_message_that_one_subscription_is_done_with_can_be_edited_for_the_other(place: Path) -> None:
    queue = Queue(place)
    queue.bench.ask(SubscriptionCreate("jobs", "other"))
    queue.publish("a")
    queue.settle(Ack, queue.lease()["a"])
    assert queue.edit(0, due_us=queue.in_seconds(60)) == "applied"


def test_nobody_gets_a_message_whose_late_ack_is_being_written_down(place: Path) -> None:
    queue = Queue(place, lease_seconds=1)
    queue.publish("a")
    holding, _ = queue.lease()["a"]
    queue.bench.tick(2)
    acked = queue.bench.begin(Ack("jobs", [holding]))
    assert not queue.lease()
    queue.bench.run()
    assert isinstance(acked, PendingAnswer)
    assert acked.outcome.refused == []
    assert not queue.find()


@pytest.mark.parametrize("first", [Ack, Release, Reject])
@pytest.mark.parametrize("second", [Ack, Release, Reject])
def test_a_holder_who_says_two_things_at_once_is_believed_once(place: Path, first: Any, second: Any) -> None:
    """The requests come before the first is answered; whatever is done, the message has one fate."""
    queue = Queue(place)
    queue.publish("a")
    queue.bench.syncing_later = True
    holding, _ = queue.lease()["a"]
    answers = [queue.bench.begin(kind("jobs", [holding])) for kind in (first, second)]
    queue.bench.run()
    refused = [(one.outcome if isinstance(one, PendingAnswer) else one).refused for one in answers]
    assert not refused[0]
    assert refused[1] or first is second
    queue.restart()
    dead, pending = "a" in queue.find("dead"), "a" in queue.find()
    assert (dead, pending) == (first is Reject, first is Release)
