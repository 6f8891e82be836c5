"""Standing lease requests: what is pushed to whom, how far the credit reaches, and what ends with a session."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker import standing_leases
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.settings import BrokerSettings
from headrace.model.batch import Columns, encode, parse
from headrace.model.errors import Draining, InvalidArgument, LimitExceeded, ProtocolError, SubscriptionNotFound
from headrace.model.leasing import (
    Ack,
    Extend,
    Find,
    Holding,
    Lease,
    LeaseStop,
    Release,
    Selection,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionReset,
)
from headrace.model.requests import Done, Publish, TopicDelete
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseDelivery, LeaseEnd, LeaseOpen
from headrace.testing import FaultyDisk
from headrace.testing.workbench import Workbench

HOUR_S = 3600
MEGABYTE = 1 << 20


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    bench.ask(SubscriptionCreate("jobs", settings={"retry_jitter": 0, "deliveries_max": 0}))
    yield bench
    bench.close()


class Consumer:
    """A session with a standing request, and what was pushed to it."""

    def __init__(self, bench: Workbench, name: str = "ann", **given: Any) -> None:
        self.bench = bench
        self.pushed: list[Any] = []
        self.session: Session = bench.broker.connect(self.pushed.append, name, bench.now_us)
        self.number = bench.ask(LeaseOpen("jobs", **given), session=self.session).standing

    @property
    def portions(self) -> list[Any]:
        words = [one.answer for one in self.pushed if isinstance(one, AnswerWithBody)]
        assert all(isinstance(one, LeaseDelivery) and one.standing == self.number for one in words)
        return [portion for one in words for portion in one.portions]

    @property
    def holdings(self) -> list[Holding]:
        return [Holding(one.partition, one.lease, one.offsets, one.following) for one in self.portions]

    @property
    def offsets(self) -> list[int]:
        return [offset for portion in self.portions for offset in portion.all_offsets]

    @property
    def values(self) -> list[bytes | None]:
        bodies = [memoryview(one.body) for one in self.pushed if isinstance(one, AnswerWithBody)]
        found: list[bytes | None] = []
        for body in bodies:
            at = 0
            while at < len(body):
                batch = parse(body, at)
                found += batch.columns().values
                at += batch.length
        return found

    @property
    def ends(self) -> list[str]:
        return [one.code for one in self.pushed if isinstance(one, LeaseEnd)]

    def credit(self, messages: int = 0, size_bytes: int = 0, **more: Any) -> None:
        self.bench.ask(LeaseCredit(self.number, messages, size_bytes, **more), session=self.session)

    def close(self, **given: Any) -> None:
        assert isinstance(self.bench.ask(LeaseClose(self.number, **given), session=self.session), Done)

    def disconnect(self) -> None:
        self.bench.broker.disconnect(self.session, self.bench.now_us)
        self.bench.run()


def lease(bench: Workbench, count: int = 100, **given: Any) -> list[tuple[int, int]]:
    """Lease by hand; offsets, and how often each was handed out."""
    answer = bench.ask(Lease("jobs", messages_max=count, **given))
    portions = answer.answer.portions if isinstance(answer, AnswerWithBody) else []
    return [
        (offset, times)
        for one in portions
        for offset, times in zip(one.all_offsets, one.deliveries or [1] * len(one.all_offsets), strict=True)
    ]


# Credit.


def test_messages_are_pushed_as_they_come_as_far_as_the_credit_reaches(bench: Workbench) -> None:
    ann = Consumer(bench, credit_messages=3)
    assert ann.pushed == []
    bench.publish("jobs", [b"a"])
    assert ann.values == [b"a"]
    bench.publish("jobs", [b"b", b"c", b"d", b"e"])
    assert ann.values == [b"a", b"b", b"c"]
    ann.credit(1)
    assert ann.values == [b"a", b"b", b"c", b"d"]
    ann.credit(10)
    bench.publish("jobs", [b"f"])
    assert ann.offsets == [0, 1, 2, 3, 4, 5]
    bench.ask(Ack("jobs", ann.holdings))
    assert bench.ask(SubscriptionDescribe("jobs")).acked == 6


def test_bytes_are_credit_too_and_the_last_message_may_exceed_them(bench: Workbench) -> None:
    ann = Consumer(bench, credit_messages=100, credit_bytes=25)
    bench.publish("jobs", [b"x" * 10] * 6)
    assert sum(one.answer.size_bytes for one in ann.pushed) == 30
    assert ann.offsets == [0, 1, 2], "there were 5 bytes left for the last"
    ann.credit(0, 4)
    assert ann.offsets == [0, 1, 2], "it still owes 5"
    ann.credit(0, 2)
    assert ann.offsets == [0, 1, 2, 3]


def test_nothing_is_pushed_before_the_journal_has_the_lease(tmp_path: Path) -> None:
    disk = FaultyDisk()
    bench = Workbench(str(tmp_path), disk=disk)
    bench.ask(SubscriptionCreate("jobs"))
    bench.publish("jobs", [b"a"])
    disk.fail_writes(3)
    ann = Consumer(bench)
    assert ann.ends == ["disk_full"], "it may be opened again"
    assert ann.offsets == []
    disk.fail_writes(0)
    assert lease(bench) == [(0, 1)]
    bench.close()


def test_a_delivery_ends_where_it_gets_large_and_others_have_their_turn(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_leases, "_DELIVERY_MESSAGES", 2)
    bench.publish("jobs", [b"%d" % at for at in range(12)])
    bench.ask(SubscriptionAlter("jobs", {"paused": True}))
    ann, bob = (Consumer(bench, name, credit_messages=100) for name in ("ann", "bob"))
    by_hand = bench.begin(Lease("jobs", messages_max=2, wait_ms=1000))
    bench.ask(SubscriptionAlter("jobs", {"paused": False}))
    assert ann.offsets == [0, 1, 6, 7, 10, 11]
    assert bob.offsets == [2, 3, 8, 9]
    assert isinstance(by_hand, PendingAnswer)
    assert by_hand.outcome.answer.portions[0].all_offsets == range(4, 6)


def test_who_asks_by_hand_without_waiting_has_its_turn_too(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_leases, "_DELIVERY_MESSAGES", 1)
    ann = Consumer(bench, credit_messages=100)
    bench.publish("jobs", [b"a"])
    bench.begin(Publish("jobs", 0), bench.batch([b"b", b"c", b"d"]).data)
    for _ in range(100):
        if len(ann.offsets) == 2 or not bench.step():
            break
    assert [offset for offset, _ in lease(bench, 1)] != []


def test_a_client_that_does_not_read_is_leased_nothing_until_it_does(bench: Workbench) -> None:
    ann, bob = (Consumer(bench, name, credit_messages=10) for name in ("ann", "bob"))
    bench.broker.pause(ann.session)
    bench.publish("jobs", [b"a"])
    bench.publish("jobs", [b"b"])
    assert (ann.offsets, bob.offsets) == ([], [0, 1])
    bench.broker.pause(bob.session)
    bench.publish("jobs", [b"c"])
    ann.credit(1)
    assert ann.offsets == []
    bench.broker.resume(ann.session)
    bench.run()
    assert ann.offsets == [2]


def test_messages_can_be_leased_before_they_are_due_and_that_can_be_changed(bench: Workbench) -> None:
    ann = Consumer(bench, credit_messages=10, ahead_ms=500)
    dues = [bench.now_us + 400_000, bench.now_us + 5_000_000]
    bench.ask(Publish("jobs", 0), encode(Columns([b"soon", b"later"], dues=dues), bench.now_us).data)
    assert ann.values == [b"soon"]
    ann.credit(ahead_ms=0)
    bench.tick(4.8)
    assert ann.values == [b"soon"]
    ann.credit(ahead_ms=500)
    assert ann.values == [b"soon", b"later"]


@pytest.mark.parametrize("given", [{"credit_messages": -1}, {"credit_bytes": -1}, {"ahead_ms": -1}, {"lease_ms": -1}])
def test_what_cannot_be_is_refused(bench: Workbench, given: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        bench.ask(LeaseOpen("jobs", **given))
    ann = Consumer(bench)
    with pytest.raises(ProtocolError):
        ann.credit(-1)


def test_a_session_has_not_too_many(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_leases, "STANDING_LEASES_MAX", 2)
    numbers = [bench.ask(LeaseOpen("jobs")).standing for _ in range(2)]
    with pytest.raises(LimitExceeded):
        bench.ask(LeaseOpen("jobs"))
    bench.ask(LeaseClose(numbers[0]))
    bench.ask(LeaseOpen("jobs"))


def test_the_subscription_is_made_if_it_may_be(bench: Workbench) -> None:
    with pytest.raises(SubscriptionNotFound):
        bench.ask(LeaseOpen("jobs", "other", create=False))
    bench.publish("jobs", [b"a"])
    bench.ask(LeaseOpen("jobs", "other"))
    assert [one.answer.portions[0].all_offsets for one in bench.pushed] == [[0]]


# Leases that end by time.


def test_a_lease_that_ends_by_time_can_be_extended_and_outlives_its_session(bench: Workbench) -> None:
    bench.publish("jobs", [b"a"])
    ann = Consumer(bench, lease_ms=10_000)
    bench.tick(8)
    bench.ask(Extend("jobs", ann.holdings, 10_000))
    ann.disconnect()
    bench.tick(8)
    assert lease(bench) == []
    bench.tick(3)
    assert lease(bench) == [(0, 2)]


def test_what_was_granted_to_a_session_that_ended_before_it_was_told_is_given_back(bench: Workbench) -> None:
    ann = Consumer(bench)
    bench.begin(Publish("jobs", 0), bench.batch([b"a"]).data)
    subscription = next(iter(bench.broker._subscriptions))
    while not any(index.statuses.counts[3] for index in subscription.indexes.values()) and bench.step():
        if subscription.delivered:
            break
    assert subscription.delivered == 1
    assert ann.pushed == []
    ann.disconnect()
    assert ann.pushed == []
    assert lease(bench) == [(0, 1)], "nobody has seen it"


# Leases that last as long as a session.


def test_a_session_bound_lease_lasts_as_long_as_the_session(bench: Workbench) -> None:
    bench.publish("jobs", [b"a", b"b", b"c"])
    ann = Consumer(bench, credit_messages=10, session_bound=True)
    assert {one.until_us for one in ann.portions} == {0}
    for _ in range(3):
        bench.tick(HOUR_S)
    assert lease(bench) == []
    [found] = bench.ask(Find("jobs", Selection(status="leased"), messages_max=1)).answer.messages
    assert (found.holder, found.until_us) == ("ann", 0)
    [portion] = ann.portions
    bench.ask(Ack("jobs", [Holding(0, portion.lease, [1])]))
    ann.disconnect()
    assert lease(bench) == [(0, 2), (2, 2)], "at once, and it counts as an attempt"


def test_extending_a_session_bound_lease_changes_nothing(bench: Workbench) -> None:
    bench.publish("jobs", [b"a"])
    ann = Consumer(bench, session_bound=True)
    bench.ask(Extend("jobs", ann.holdings, 1000))
    bench.tick(HOUR_S)
    assert lease(bench) == []
    ann.disconnect()
    assert lease(bench) == [(0, 2)]


def test_closing_gives_back_what_is_bound_as_if_nobody_had_seen_it(bench: Workbench) -> None:
    bench.publish("jobs", [b"a", b"b"])
    ann = Consumer(bench, credit_messages=10, session_bound=True)
    [portion] = ann.portions
    bench.ask(Ack("jobs", [Holding(0, portion.lease, [0])]))
    ann.close()
    bench.publish("jobs", [b"c"])
    assert ann.offsets == [0, 1]
    assert lease(bench) == [(1, 1), (2, 1)]
    ann.close()


def test_closing_can_leave_what_was_delivered_with_the_session(bench: Workbench) -> None:
    bench.publish("jobs", [b"a", b"b"])
    ann = Consumer(bench, credit_messages=10, session_bound=True)
    ann.close(keep_leases=True)
    bench.publish("jobs", [b"c"])
    assert ann.offsets == [0, 1]
    assert lease(bench) == [(2, 1)]
    [portion] = ann.portions
    assert bench.ask(Ack("jobs", [Holding(0, portion.lease, [0])])).refused == []
    ann.disconnect()
    assert lease(bench) == [(1, 2)]


def test_ends_of_sessions_count_as_attempts_until_the_message_is_dead(bench: Workbench) -> None:
    bench.ask(SubscriptionAlter("jobs", {"deliveries_max": 2}))
    bench.publish("jobs", [b"a"])
    for name in ("ann", "bob"):
        Consumer(bench, name, session_bound=True).disconnect()
    assert lease(bench) == []
    [dead] = bench.batches("jobs.dead")
    headers = next(iter(dead.messages())).headers or {}
    assert headers["headrace-dead-reason"] == b"connection ended without acknowledgement"


@pytest.mark.parametrize("journal_bytes", [300, 1 << 20])
def test_a_restart_of_the_broker_ends_what_was_bound_to_its_sessions(tmp_path: Path, journal_bytes: int) -> None:
    settings = BrokerSettings(journal_bytes=journal_bytes)
    bench = Workbench(str(tmp_path), settings=settings)
    bench.publish("jobs", [b"%d" % at for at in range(40)])
    for name in ("ann", "bob"):
        ann = Consumer(bench, name, credit_messages=20, session_bound=True)
    bench.ask(Ack("jobs", [Holding(0, ann.portions[0].lease, [21, 25])]))
    for at in range(20):  # the journal may be replaced by a snapshot
        bench.ask(Ack("jobs", [Holding(0, ann.portions[0].lease, [25])]))
        bench.publish("other", [b"%d" % at])
        bench.ask(SubscriptionCreate("other", f"s{at}"))
    bench.ask(Lease("jobs", lease_ms=1000))
    bench.close()
    bench = Workbench(str(tmp_path), settings=settings, now_us=bench.now_us + 1)
    bench.tick()
    assert lease(bench) == [(at, 2) for at in range(40) if at not in (21, 25)]
    bench.close()


def test_what_could_not_be_written_when_a_session_ended_is_given_back_later(tmp_path: Path) -> None:
    disk = FaultyDisk()
    bench = Workbench(str(tmp_path), disk=disk)
    bench.publish("jobs", [b"a", b"b"])
    ann = Consumer(bench, credit_messages=10, session_bound=True)
    disk.fail_writes(5)
    ann.disconnect()
    assert bench.ask(SubscriptionDescribe("jobs")).leased == 2
    disk.fail_writes(0)
    bench.tick(1)
    assert [offset for offset, _ in lease(bench)] == [0, 1]
    bench.close()


def test_much_that_is_bound_is_given_back_some_at_a_time(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_leases, "_RELEASED_TOGETHER", 10)
    monkeypatch.setattr(standing_leases, "_DELIVERY_MESSAGES", 5)
    bench.publish("jobs", [b"x"] * 100)
    ann = Consumer(bench, credit_messages=100, session_bound=True)
    sizes: list[int] = []
    release = bench.broker._leasing.release

    def counted(session: Session, request: Release, now_us: int) -> Any:
        sizes.append(sum(len(one.all_offsets) for one in request.holdings))
        return release(session, request, now_us)

    monkeypatch.setattr(bench.broker._leasing, "release", counted)
    ann.disconnect()
    assert sizes == [10] * 10
    assert len(lease(bench)) == 100


def test_what_was_settled_is_not_remembered_for_ever(bench: Workbench) -> None:
    ann = Consumer(bench, credit_messages=10_000, session_bound=True)
    for _ in range(1000):
        bench.publish("jobs", [b"a"])
        bench.ask(Ack("jobs", ann.holdings[-1:]))
    [standing] = bench.broker._standing._sessions[ann.session].values()
    assert len(standing.bound) <= 2 * standing_leases._TRACKED_MIN


# Ends.


def test_what_is_closed_gets_nothing_any_more(bench: Workbench) -> None:
    ann = Consumer(bench, credit_messages=10)
    ann.close()
    bench.publish("jobs", [b"a"])
    ann.credit(10)
    assert ann.pushed == []
    assert lease(bench) == [(0, 1)]
    subscription = next(iter(bench.broker._subscriptions))
    assert not subscription.pending_leases


def test_what_was_granted_is_delivered_before_the_answer_to_its_closing(bench: Workbench) -> None:
    ann = Consumer(bench)
    bench.begin(Publish("jobs", 0), bench.batch([b"a"]).data)
    subscription = next(iter(bench.broker._subscriptions))
    while not subscription.delivered and bench.step():
        pass
    assert ann.pushed == []
    bench.begin(LeaseClose(ann.number), session=ann.session)
    assert ann.offsets == [0]


def test_another_session_cannot_close_or_credit_it(bench: Workbench) -> None:
    ann = Consumer(bench)
    bench.ask(LeaseClose(ann.number))
    bench.ask(LeaseCredit(ann.number, 10))
    bench.publish("jobs", [b"a"])
    bench.publish("jobs", [b"b"])
    assert ann.offsets == [0]


def test_a_lease_stop_of_the_session_leaves_it_alone(bench: Workbench) -> None:
    ann = Consumer(bench)
    bench.ask(LeaseStop("jobs"), session=ann.session)
    bench.publish("jobs", [b"a"])
    assert ann.offsets == [0]


@pytest.mark.parametrize("credit", [0, 1])
@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (SubscriptionDelete("jobs"), "subscription_not_found"),
        (SubscriptionReset("jobs"), "subscription_reopened"),
        (TopicDelete("jobs"), "topic_not_found"),
    ],
)
def test_it_ends_with_its_subscription(bench: Workbench, request_: Any, code: str, credit: int) -> None:
    ann = Consumer(bench, credit_messages=credit)
    bound = Consumer(bench, credit_messages=credit, session_bound=True)
    bench.ask(request_)
    assert (ann.ends, bound.ends) == ([code], [code])
    bench.publish("jobs", [b"a"])
    assert ann.offsets == []
    ann.disconnect()
    bound.disconnect()


def test_it_ends_when_the_subscription_fails(bench: Workbench) -> None:
    ann = Consumer(bench)
    registry = bench.broker._subscriptions
    registry.fail(next(iter(registry)), ValueError("broken"))
    bench.run()
    assert ann.ends == ["subscription_failed"]


def test_it_ends_when_the_broker_drains_and_what_is_held_can_be_settled(bench: Workbench) -> None:
    bench.publish("jobs", [b"a", b"b"])
    ann = Consumer(bench, session_bound=True)
    bench.broker.drain()
    bench.run()
    assert ann.ends == ["draining"]
    assert bench.ask(Ack("jobs", ann.holdings)).refused == []
    with pytest.raises(Draining):
        bench.ask(LeaseOpen("jobs"))


def test_a_paused_subscription_delivers_when_it_goes_on(bench: Workbench) -> None:
    bench.ask(SubscriptionAlter("jobs", {"paused": True}))
    bench.publish("jobs", [b"a"])
    ann = Consumer(bench)
    assert ann.offsets == []
    bench.ask(SubscriptionAlter("jobs", {"paused": False}))
    assert ann.offsets == [0]
