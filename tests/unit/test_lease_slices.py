"""What happens to very many messages or partitions at once is done in slices, and requests in between are answered."""

from typing import Any

import pytest

from headrace.broker import lease_expiry, ledger, subscriptions
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.broker.subscription import Subscription
from headrace.engines.leased.index import LeasedIndex
from headrace.model.batch import Columns, encode
from headrace.model.errors import SubscriptionExists, SubscriptionNotFound, TopicNotFound
from headrace.model.leasing import (
    Ack,
    Extend,
    Holding,
    Lease,
    Leased,
    Redrive,
    Reject,
    Release,
    Settlement,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionList,
    SubscriptionReset,
)
from headrace.model.requests import Publish, TopicAlter, TopicCreate, TopicDelete
from headrace.testing.workbench import Workbench

SECOND_US = 1_000_000


def publish(bench: Workbench, count: int, partition: int = 0, **columns: Any) -> None:
    values = [b"%d" % number for number in range(count)]
    shared = {name: [value] * count for name, value in columns.items()}
    bench.ask(Publish("jobs", partition), encode(Columns(values, **shared), bench.now_us).data)


def leased(answer: Any) -> int:
    """How many messages were handed out."""
    words = answer.answer if isinstance(answer, AnswerWithBody) else answer
    return sum(len(portion.all_offsets) for portion in words.portions)


def held(answer: Any) -> list[Holding]:
    return [Holding(one.partition, one.lease, one.offsets, one.following) for one in answer.answer.portions]


def subscription(bench: Workbench, name: str = "default") -> Subscription:
    return next(one for one in bench.broker._subscriptions if one.name == name)


def counts(bench: Workbench) -> tuple[int, int, int]:
    info = bench.ask(SubscriptionDescribe("jobs"))
    return info.waiting, info.ready, info.leased


# Very many leases end at once.


def test_leases_that_end_together_are_dealt_with_some_at_a_time() -> None:
    bench = Workbench()
    publish(bench, 3000)
    bench.ask(SubscriptionCreate("jobs", settings={"deliveries_max": 0}))
    answers = [bench.ask(Lease("jobs", messages_max=1000, lease_ms=1000)) for _ in range(3)]
    bench.now_us += 2 * SECOND_US
    bench.broker.tick(bench.now_us)  # only what is done at once
    statuses = subscription(bench).indexes[0].statuses
    assert 2000 < len(list(statuses.with_status(3))) < 3000
    holding = held(answers[2])[0]
    late = Holding(0, holding.lease, [2999])
    assert [one.code for one in bench.begin(Extend("jobs", [late])).refused] == ["lease_expired"]
    assert [one.code for one in bench.begin(Release("jobs", [late])).refused] == ["lease_expired"]
    acked = bench.begin(Ack("jobs", [late]))
    assert leased(bench.ask(Lease("jobs", messages_max=10, lease_ms=60_000))) == 10
    assert acked.outcome.refused == []  # nobody has taken it since
    assert counts(bench) == (0, 2989, 10)
    assert bench.ask(SubscriptionDescribe("jobs")).expired_leases == 2999


def test_each_step_ends_no_more_than_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {"partitions": 4}))
    for partition in range(4):
        publish(bench, 1000, partition)
    bench.ask(Lease("jobs", messages_max=4000, lease_ms=1000))
    ended: list[int] = []
    end = LeasedIndex.ended

    def counted(index: LeasedIndex, now_us: int, most: int) -> list[int]:
        found = end(index, now_us, most)
        ended.append(len(found))
        return found

    monkeypatch.setattr(LeasedIndex, "ended", counted)
    bench.tick(2)
    assert sum(ended) == 4000
    assert max(ended) <= lease_expiry._ENDED_TOGETHER
    assert counts(bench) == (0, 4000, 0)


def test_a_lease_without_waiting_is_not_told_that_there_is_nothing_while_leases_end() -> None:
    bench = Workbench()
    publish(bench, 2000)
    bench.ask(SubscriptionCreate("jobs", settings={"deliveries_max": 1, "dead_letter_topic": "gone"}))
    assert leased(bench.ask(Lease("jobs", messages_max=1999, lease_ms=1000))) == 1999
    bench.ask(SubscriptionAlter("jobs", settings={"deliveries_max": 2}))
    last = bench.ask(Lease("jobs", messages_max=1, lease_ms=1001))
    bench.ask(Release("jobs", held(last), undelivered=True, delay_ms=1500))
    bench.ask(SubscriptionAlter("jobs", settings={"deliveries_max": 1}))
    bench.now_us += 2 * SECOND_US
    answer = bench.ask(Lease("jobs", messages_max=10, lease_ms=1000))
    assert leased(answer) == 1  # all others are dead
    assert counts(bench) == (0, 0, 1)


def test_messages_that_are_due_or_expire_together_are_counted_right_at_once() -> None:
    bench = Workbench()
    bench.ask(SubscriptionCreate("jobs", settings={"discipline": "priority"}))
    publish(bench, 5000, dues=bench.now_us + SECOND_US, expires=bench.now_us + 3 * SECOND_US)
    bench.now_us += SECOND_US
    assert counts(bench) == (0, 5000, 0)
    bench.now_us += SECOND_US
    assert leased(bench.ask(Lease("jobs", messages_max=3000))) == 3000
    bench.tick(1)
    assert counts(bench) == (0, 0, 3000)


def test_very_many_rejected_messages_go_to_the_dead_and_come_back() -> None:
    bench = Workbench()
    publish(bench, 2500)
    answer = bench.ask(Lease("jobs", messages_max=2500))
    assert bench.ask(Reject("jobs", held(answer))).refused == []
    assert bench.ask(SubscriptionDescribe("jobs")).dead == 2500
    redriving = bench.begin(Redrive("jobs", messages_max=2500))
    assert redriving.outcome is None
    bench.run()
    assert redriving.outcome.messages == 2500
    assert counts(bench) == (0, 2500, 0)
    assert bench.ask(SubscriptionDescribe("jobs")).dead == 0


def test_a_time_to_live_that_is_changed_holds_for_what_is_there() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {"validity": "ttl", "ttl_seconds": 60}))
    for _ in range(20):
        publish(bench, 1000)
    bench.ask(SubscriptionCreate("jobs"))
    altering = bench.begin(TopicAlter("jobs", {"ttl_seconds": 1}))
    assert not isinstance(altering, Exception)
    bench.tick(2)
    assert counts(bench) == (0, 0, 0)


# Subscriptions over many partitions.


def many(partitions: int = 64, messages: int = 2) -> Workbench:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {"partitions": partitions, "storage": "memory"}))
    for partition in range(partitions):
        publish(bench, messages, partition)
    return bench


def test_a_subscription_is_opened_in_slices_and_a_lease_in_between_waits() -> None:
    bench = many()
    creating = bench.begin(SubscriptionCreate("jobs"))
    assert isinstance(creating, PendingAnswer)
    assert creating.outcome is None
    assert 0 < len(subscription(bench).indexes) <= subscriptions.SLICE_WORK
    asked = bench.begin(Lease("jobs", messages_max=1000))
    assert creating.outcome is None
    again = bench.begin(SubscriptionCreate("jobs", exist_ok=True))
    refused = bench.begin(SubscriptionCreate("jobs"))
    bench.run()
    assert creating.outcome.ready == 128
    assert leased(asked.outcome) == 128
    assert again.outcome.subscription == "default"
    assert isinstance(refused.outcome, SubscriptionExists)


def test_a_lease_that_makes_its_subscription_gets_all_there_is() -> None:
    bench = many()
    asked = bench.begin(Lease("jobs", messages_max=1000))
    assert asked.outcome is None
    bench.run()
    assert leased(asked.outcome) == 128


def test_what_is_published_while_a_subscription_is_opened_is_not_missed() -> None:
    bench = many()
    creating = bench.begin(SubscriptionCreate("jobs"))
    for partition in range(64):
        bench.begin(Publish("jobs", partition), encode(Columns([b"new"]), bench.now_us).data)
        bench.step()
    bench.run()
    assert creating.outcome is not None
    assert leased(bench.ask(Lease("jobs", messages_max=1000))) == 192


def test_one_that_is_deleted_while_it_is_opened_is_gone() -> None:
    bench = many()
    creating, asked = bench.begin(SubscriptionCreate("jobs")), bench.begin(Lease("jobs", wait_ms=1000))
    bench.begin(SubscriptionDelete("jobs"))
    bench.run()
    assert isinstance(creating.outcome, SubscriptionNotFound)
    assert isinstance(asked.outcome, SubscriptionNotFound)
    assert bench.ask(SubscriptionCreate("jobs")).ready == 128


def test_one_whose_topic_is_deleted_while_it_is_made_is_not_made() -> None:
    bench = many()
    creating = bench.begin(SubscriptionCreate("jobs", start="latest"))
    assert creating.outcome is None
    bench.begin(TopicDelete("jobs"))
    bench.begin(TopicCreate("jobs"))
    bench.run()
    assert isinstance(creating.outcome, TopicNotFound)
    assert bench.ask(SubscriptionList("jobs")).subscriptions == []


def test_one_that_is_altered_keeps_its_messages_and_takes_the_new_order() -> None:
    bench = many(32, 20)
    bench.ask(SubscriptionCreate("jobs"))
    first = bench.ask(Lease("jobs", messages_max=10))
    altering = bench.begin(SubscriptionAlter("jobs", settings={"discipline": "lifo"}))
    again = bench.begin(SubscriptionAlter("jobs", settings={"lease_seconds": 5}))
    asked = bench.begin(Lease("jobs", messages_max=3))
    acked = bench.begin(Ack("jobs", held(first)))
    assert altering.outcome is None
    bench.run()
    assert acked.outcome.refused == []
    assert (altering.outcome.settings["discipline"], again.outcome.settings["discipline"]) == ("lifo", "lifo")
    assert again.outcome.settings["lease_seconds"] == 5
    (portion,) = asked.outcome.answer.portions
    assert portion.all_offsets == [19, 18, 17]
    assert leased(bench.ask(Lease("jobs", messages_max=1000))) == 640 - 13


def test_one_that_is_reset_knows_what_was_acknowledged_while_that_was_found(tmp_path: Any) -> None:
    directory = str(tmp_path / "data")
    bench = Workbench(directory)
    bench.ask(TopicCreate("jobs", {"partitions": 3}))
    for partition in range(3):
        for _ in range(10):
            publish(bench, 5000, partition)
    bench.ask(SubscriptionCreate("jobs"))
    first = bench.ask(Lease("jobs", messages_max=100))
    second = bench.ask(Lease("jobs", messages_max=100))
    resetting = bench.begin(SubscriptionReset("jobs"))
    assert resetting.outcome is None
    acked = bench.begin(Ack("jobs", held(first)))
    bench.run()
    assert acked.outcome.refused == []
    assert {one.code for one in bench.ask(Ack("jobs", held(second))).refused} == {"not_lease_holder"}
    assert counts(bench) == (0, 150_000 - 100, 0)
    again = Workbench(directory, now_us=bench.now_us)
    assert counts(again) == (0, 150_000 - 100, 0)


def test_a_broker_that_dies_while_a_subscription_is_opened_has_it_whole(tmp_path: Any) -> None:
    directory = str(tmp_path / "data")
    bench = Workbench(directory)
    bench.ask(TopicCreate("jobs", {"partitions": 40}))
    for partition in range(40):
        publish(bench, 3, partition)
    creating = bench.begin(SubscriptionCreate("jobs"))
    assert creating.outcome is None
    again = Workbench(directory, now_us=bench.now_us)
    assert counts(again) == (0, 120, 0)


# Snapshots.


def test_a_snapshot_is_made_in_slices_and_what_happens_meanwhile_counts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_SLICE_WORK", 1)
    directory = str(tmp_path / "data")
    bench = Workbench(directory, settings=BrokerSettings(journal_bytes=1 << 20))
    for _ in range(200):
        publish(bench, 5000)
    bench.ask(SubscriptionCreate("jobs", settings={"deliveries_max": 0}))
    first = bench.ask(Lease("jobs", messages_max=1000))
    second = bench.ask(Lease("jobs", messages_max=1000, lease_ms=1000))
    third = bench.ask(Lease("jobs", messages_max=1000))
    journal = bench.broker._ledger
    journal._begin_snapshot(bench.now_us)
    steps = 0
    acked = bench.begin(Ack("jobs", held(first)))
    released = bench.begin(Release("jobs", held(third), delay_ms=60_000))
    bench.now_us += 2 * SECOND_US
    bench.broker.tick(bench.now_us)
    fourth = bench.begin(Lease("jobs", messages_max=1000))
    while journal._since is not None:
        steps += 1
        assert bench.step()
    assert steps > 10
    bench.run()
    assert (acked.outcome.refused, released.outcome.refused) == ([], [])
    assert leased(fourth.outcome) == 1000
    before = counts(bench)
    again = Workbench(directory, now_us=bench.now_us)
    assert again.broker._ledger._snapshot_at is not None
    assert counts(again) == before == (1000, 997_000, 1000)
    assert again.ask(Ack("jobs", held(fourth.outcome))).refused == []
    assert held(second)
    assert again.ask(Lease("jobs", messages_max=1)) != Leased([])


def test_a_snapshot_tells_how_it_was_when_it_began(tmp_path: Any) -> None:
    bench = Workbench(str(tmp_path / "data"))
    for _ in range(10):
        publish(bench, 1000)
    answer = bench.ask(Lease("jobs", messages_max=5000, lease_ms=1000))
    facts = bench.broker._ledger.state.facts()
    bench.ask(Ack("jobs", held(answer)))
    bench.tick(2)
    index = subscription(bench).indexes[0]
    told = [fact for fact in facts if type(fact).__name__ in ("IndexSnapshotChunks", "IndexSnapshotRest")]
    chunks = [chunk for fact in told if hasattr(fact, "chunks") for chunk in fact.chunks]
    leases = [lease for fact in told if hasattr(fact, "rest") for lease in fact.rest.leases]
    assert index.statuses.floor == 5000
    assert [chunk.number for chunk in chunks] == [0, 1, 2]
    assert not any(chunk.settled for chunk in chunks)
    assert [lease.over for lease in leases] == [False]


@pytest.mark.parametrize("partitions", [1, 3])
def test_nothing_that_has_expired_is_handed_out_however_much_of_it_there_is(partitions: int) -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {"partitions": partitions, "storage": "memory"}))
    for partition in range(partitions):
        columns = Columns([b"old"] * 1000, expires=[bench.now_us + 20_000_000] * 1000)
        bench.ask(Publish("jobs", partition), encode(columns, bench.now_us).data)
    bench.now_us += 30_000_000
    bench.ask(Publish("jobs", partitions - 1), encode(Columns([b"new"]), bench.now_us).data)
    answer = bench.ask(Lease("jobs", messages_max=100))
    assert [(one.partition, list(one.all_offsets)) for one in answer.answer.portions] == [(partitions - 1, [1000])]
    waiting = bench.begin(Lease("jobs", "other", messages_max=100, wait_ms=1000))
    bench.run()
    assert [(one.partition, list(one.all_offsets)) for one in waiting.outcome.answer.portions] == [
        (partitions - 1, [1000])
    ]


@pytest.mark.parametrize("partitions", [1, 8])
def test_an_acknowledgement_that_is_on_its_way_when_a_subscription_is_reset_counts(partitions: int) -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {"partitions": partitions}))
    for partition in range(partitions):
        bench.ask(Publish("jobs", partition), encode(Columns([b"a"] * 10), bench.now_us).data)
    answer = bench.ask(Lease("jobs", messages_max=5 * partitions, lease_ms=600_000))
    held = [Holding(one.partition, one.lease, one.offsets, one.following) for one in answer.answer.portions]
    acked, reset = bench.begin(Ack("jobs", held)), bench.begin(SubscriptionReset("jobs"))
    bench.run()
    assert acked.outcome == Settlement()
    assert reset.outcome.ready == 5 * partitions
    again = bench.ask(Lease("jobs", messages_max=100))
    done = {(one.partition, offset) for one in held for offset in one.all_offsets}
    found = {(one.partition, offset) for one in again.answer.portions for offset in one.all_offsets}
    assert (len(found), found & done) == (5 * partitions, set())


def test_who_waits_for_a_topic_that_is_deleted_is_told_so() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {}))
    bench.ask(SubscriptionCreate("jobs"))
    waiting = bench.begin(Lease("jobs", wait_ms=60_000))
    bench.ask(TopicDelete("jobs"))
    bench.run()
    assert isinstance(waiting.outcome, TopicNotFound)
