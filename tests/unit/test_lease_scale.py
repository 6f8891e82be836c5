"""What a lease costs does not grow with partitions that have nothing to hand out, nor with consumers that wait."""

from pathlib import Path
from typing import Any

import pytest

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.subscription import Subscription
from headrace.broker.waiters import LeaseWaiters, PendingLease
from headrace.model.batch import Columns, encode
from headrace.model.leasing import Ack, Holding, Lease, Leased, LeaseStop, SubscriptionCreate
from headrace.model.requests import Publish, TopicCreate
from headrace.testing.workbench import Workbench

PARTITIONS = 256


def bench_over(partitions: int, **settings: Any) -> Workbench:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {"partitions": partitions, "storage": "memory"}))
    bench.ask(SubscriptionCreate("jobs", settings=settings))
    return bench


def subscription(bench: Workbench) -> Subscription:
    return next(iter(bench.broker._subscriptions))


def publish(bench: Workbench, partition: int, *values: bytes, **columns: Any) -> None:
    bench.ask(Publish("jobs", partition), encode(Columns(list(values), **columns), bench.now_us).data)


def places(answer: Any) -> list[tuple[int, int]]:
    """Partitions and offsets, in the order in which they were handed out."""
    words = answer.answer if isinstance(answer, AnswerWithBody) else answer
    return [(portion.partition, offset) for portion in words.portions for offset in portion.all_offsets]


def holdings(answer: Any) -> list[Holding]:
    return [Holding(one.partition, one.lease, one.offsets, one.following) for one in answer.answer.portions]


def test_a_lease_looks_at_no_partition_in_which_nothing_has_changed() -> None:
    for discipline in ("fifo", "lifo", "priority", "deadline"):
        bench = bench_over(PARTITIONS, discipline=discipline)
        for partition in range(PARTITIONS):
            publish(bench, partition, b"a", b"b")
        bench.ask(Lease("jobs"))
        schedule = subscription(bench).schedule
        before = schedule.looked
        for _ in range(10):
            answer = bench.ask(Lease("jobs", messages_max=1, ahead_ms=500))
            assert len(places(answer)) == 1
            bench.ask(Ack("jobs", holdings(answer)))
            assert places(bench.ask(Lease("jobs", messages_max=1))) != []
        assert schedule.looked - before <= 20 * 3


def test_waiting_consumers_look_only_at_the_partition_that_has_something() -> None:
    bench = bench_over(PARTITIONS)
    schedule = subscription(bench).schedule
    bench.begin(Lease("jobs", wait_ms=1000))
    bench.run()
    before = schedule.looked
    publish(bench, 77, b"a")
    bench.tick(1)
    assert schedule.looked - before <= 5


def test_partitions_take_turns_and_none_is_passed_over() -> None:
    bench = bench_over(5)
    for partition in (0, 2, 3):
        publish(bench, partition, b"a", b"b")
    one = Lease("jobs", messages_max=1)
    assert [places(bench.ask(one))[0][0] for _ in range(4)] == [0, 2, 3, 0]
    publish(bench, 1, b"new")
    assert [places(bench.ask(one))[0][0] for _ in range(3)] == [1, 2, 3]
    assert places(bench.ask(one)) == []


def test_priorities_and_deadlines_hold_over_partitions() -> None:
    bench = bench_over(64, discipline="priority")
    for partition in range(64):
        publish(bench, partition, b"a", b"b", priorities=[partition % 7, 3])
    seen: list[int] = []
    for _ in range(8):
        for partition, offset in places(bench.ask(Lease("jobs", messages_max=16))):
            seen.append(partition % 7 if offset == 0 else 3)
    assert len(seen) == 128
    assert seen == sorted(seen, reverse=True)
    bench = bench_over(64, discipline="deadline")
    dues = {partition: bench.now_us - 1000 * (partition * 37 % 64) for partition in range(64)}
    for partition, due in dues.items():
        publish(bench, partition, b"a", dues=[due])
    order = [partition for partition, _ in places(bench.ask(Lease("jobs", messages_max=64)))]
    assert order == sorted(dues, key=lambda partition: dues[partition])


def test_those_who_wait_are_served_in_turn_and_nobody_else_is_looked_at(monkeypatch: Any) -> None:
    bench = bench_over(1)
    first = bench.begin(Lease("jobs", messages_max=1, wait_ms=60_000))
    ahead = bench.begin(Lease("jobs", messages_max=1, wait_ms=60_000, ahead_ms=500))
    others = [bench.begin(Lease("jobs", messages_max=1, wait_ms=60_000)) for _ in range(1000)]
    bench.run()
    visited: list[PendingLease] = []
    look = LeaseWaiters.first

    def counted(waiters: LeaseWaiters, beyond_ms: int, only: PendingLease | None = None) -> PendingLease | None:
        found = look(waiters, beyond_ms, only)
        if found is not None:
            visited.append(found)
        return found

    monkeypatch.setattr(LeaseWaiters, "first", counted)
    publish(bench, 0, b"a", b"b", b"c")
    assert [places(one.outcome) for one in (first, ahead, others[0])] == [[(0, 0)], [(0, 1)], [(0, 2)]]
    assert others[1].outcome is None
    publish(bench, 0, b"later", dues=[bench.now_us + 200_000])
    late = bench.begin(Lease("jobs", messages_max=1, wait_ms=60_000, ahead_ms=500))
    bench.tick()
    assert places(late.outcome) == [(0, 3)]  # the others take it only when it is due
    assert len(visited) < 20


def test_those_who_have_waited_long_enough_are_told_and_those_who_left_get_nothing() -> None:
    bench = bench_over(2)
    leaving, stopping = bench.connect("leaving"), bench.connect("stopping")
    gone = bench.begin(Lease("jobs", wait_ms=60_000), session=leaving)
    stopped = bench.begin(Lease("jobs", wait_ms=60_000), session=stopping)
    short = [bench.begin(Lease("jobs", wait_ms=1000 + number)) for number in range(500)]
    long = bench.begin(Lease("jobs", wait_ms=60_000))
    bench.broker.disconnect(leaving, bench.now_us)
    bench.ask(LeaseStop("jobs"), session=stopping)
    assert stopped.outcome == Leased([])
    bench.tick(2)
    assert [one.outcome for one in short] == [Leased([])] * 500
    assert len(subscription(bench).pending_leases) == 1
    publish(bench, 1, b"a")
    assert gone.outcome is None
    assert places(long.outcome) == [(1, 0)]


def test_deadlines_of_those_who_were_served_do_not_pile_up() -> None:
    bench = bench_over(1)
    waiters = LeaseWaiters()
    request = Lease("jobs", wait_ms=60_000)
    for number in range(1000):
        want = PendingLease(bench.session, request, number, PendingAnswer())
        waiters.add(want)
        waiters.remove(want)
    assert len(waiters._deadlines) < 100
    assert waiters.deadline_us is None


def test_a_tick_looks_only_at_subscriptions_for_which_something_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench()
    for number in range(100):
        bench.ask(TopicCreate(f"jobs-{number}", {"storage": "memory"}))
        bench.ask(SubscriptionCreate(f"jobs-{number}"))
    bench.tick(1)
    leasing, looked = bench.broker._leasing, []
    attend = leasing._attend
    monkeypatch.setattr(
        leasing, "_attend", lambda one, *at, **how: (looked.append(str(one.topic)), attend(one, *at, **how))
    )
    waiting = bench.begin(Lease("jobs-7", wait_ms=500))
    bench.tick(0.2)
    assert looked == []
    bench.tick(1)
    assert set(looked) == {"jobs-7"}
    assert waiting.outcome == Leased([])


def test_many_subscriptions_have_their_turns_after_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench(tmp_path)
    topics = {f"jobs-{number}" for number in range(100)}
    for topic in sorted(topics):
        bench.ask(TopicCreate(topic, {}))
        bench.ask(SubscriptionCreate(topic))
    bench.close()
    bench = Workbench(tmp_path)
    leasing, looked = bench.broker._leasing, []
    attend = leasing._attend
    monkeypatch.setattr(
        leasing, "_attend", lambda one, *at, **how: (looked.append(str(one.topic)), attend(one, *at, **how))
    )
    while len(looked) < len(topics):
        before = len(looked)
        leasing.tick(bench.now_us)
        assert before < len(looked) <= before + 32
    assert set(looked) == topics
    bench.close()


def test_a_connection_that_is_gone_waits_nowhere() -> None:
    bench = bench_over(2)
    bench.ask(TopicCreate("others", {"storage": "memory"}))
    bench.ask(SubscriptionCreate("others"))
    session, other = bench.connect(), bench.connect()
    for topic in ("jobs", "others"):
        for one in (session, other):
            bench.begin(Lease(topic, wait_ms=60_000), session=one)
    bench.run()
    bench.broker.disconnect(session, bench.now_us)
    assert [[want.session for want in one.pending_leases] for one in bench.broker._subscriptions] == [[other], [other]]
    assert list(bench.broker._leasing._waited_at) == [other]
