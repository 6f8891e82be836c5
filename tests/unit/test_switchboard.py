"""Live subscriptions: who receives what is published to a subject, what a slow one loses, what a session ends."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.broker import switchboard as switchboard_module
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.switchboard import Switchboard
from headrace.errors import Busy, Draining, InvalidArgument, InvalidBatch, LimitExceeded
from headrace.model.batch import Batch, Columns, parse
from headrace.model.errors import DiskFull
from headrace.model.subject_requests import (
    SubjectDelivery,
    SubjectPublish,
    SubjectSubscribe,
    SubjectUnsubscribe,
    SwitchboardDescribe,
)
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


class Listener:
    """A session, and what live subscriptions have brought it."""

    def __init__(self, bench: Workbench, *patterns: str, queue: str = "", tenant: str = "") -> None:
        self.bench = bench
        self.pushed: list[AnswerWithBody[SubjectDelivery]] = []
        self.session = bench.broker.connect(self.pushed.append, "listener", bench.now_us, tenant=tenant)
        self.numbers = [self.subscribe(pattern, queue) for pattern in patterns]

    def subscribe(self, pattern: str, queue: str = "") -> int:
        number: int = self.bench.ask(SubjectSubscribe(pattern, queue), session=self.session).subscription
        return number

    @property
    def received(self) -> list[tuple[str, bytes | None]]:
        """The subjects and values, in order."""
        found = []
        for delivery, body in self.pushed:
            batch = parse(memoryview(body))
            batch.verify()
            found += [(delivery.subject, value) for value in batch.columns().values]
        return found

    @property
    def values(self) -> list[bytes | None]:
        return [value for _, value in self.received]


def publish(bench: Workbench, subject: str, *values: bytes, session: Any = None) -> int:
    receivers: int = bench.ask(SubjectPublish(subject), bench.batch(list(values)).data, session).receivers
    return receivers


def test_a_subscriber_gets_what_matches_from_now_on(bench: Workbench) -> None:
    assert publish(bench, "orders.eu", b"before") == 0
    listener = Listener(bench, "orders.*")
    assert publish(bench, "orders.eu", b"1", b"2") == 1
    assert publish(bench, "orders", b"no") == 0
    assert publish(bench, "orders.us", b"3") == 1
    assert listener.received == [("orders.eu", b"1"), ("orders.eu", b"2"), ("orders.us", b"3")]


def test_every_subscription_gets_its_own_copy(bench: Workbench) -> None:
    ann, bob = Listener(bench, "a.#", "a.b"), Listener(bench, ">")
    assert publish(bench, "a.b", b"x") == 3
    assert len(ann.values) == 2
    assert bob.values == [b"x"]
    assert {one.answer.subscription for one in ann.pushed} == set(ann.numbers)


def test_headers_keys_and_times_come_through(bench: Workbench) -> None:
    listener = Listener(bench, "a")
    batch = bench.batch([b"x"], keys=[b"k"], headers=[{"h": b"1"}], timestamps=[5])
    bench.ask(SubjectPublish("a"), batch.data)
    (message,) = parse(memoryview(listener.pushed[0].body)).messages()
    assert (message.key, message.headers, message.timestamp) == (b"k", {"h": b"1"}, 5)


def test_members_of_a_queue_share_the_load(bench: Workbench) -> None:
    members = [Listener(bench, "jobs.>", queue="workers") for _ in range(3)]
    audit = Listener(bench, "jobs.>")
    for number in range(30):
        assert publish(bench, "jobs.a", b"%d" % number) == 2
    assert [len(member.values) for member in members] == [10, 10, 10]
    assert len(audit.values) == 30


def test_a_queue_is_one_across_patterns(bench: Workbench) -> None:
    wide, narrow = Listener(bench, "jobs.>", queue="workers"), Listener(bench, "jobs.a", queue="workers")
    other = Listener(bench, "jobs.a", queue="others")
    for _ in range(10):
        assert publish(bench, "jobs.a", b"x") == 2
    assert len(wide.values) + len(narrow.values) == 10
    assert len(other.values) == 10


def test_a_queue_passes_over_a_slow_member(bench: Workbench) -> None:
    slow, quick = Listener(bench, "jobs", queue="q"), Listener(bench, "jobs", queue="q")
    bench.broker.pause(slow.session)
    for _ in range(4):
        assert publish(bench, "jobs", b"x") == 1
    assert (len(slow.values), len(quick.values)) == (0, 4)


def test_a_slow_subscriber_loses_messages_and_is_told_how_many(bench: Workbench) -> None:
    slow, quick = Listener(bench, "a"), Listener(bench, "a")
    bench.broker.pause(slow.session)
    assert publish(bench, "a", b"1", b"2") == 1
    assert publish(bench, "a", b"3") == 1
    bench.broker.resume(slow.session)
    publish(bench, "a", b"4")
    publish(bench, "a", b"5")
    assert slow.values == [b"4", b"5"]
    assert [one.answer.dropped for one in slow.pushed] == [3, 0]
    assert quick.values == [b"1", b"2", b"3", b"4", b"5"]
    assert bench.ask(SwitchboardDescribe()).dropped == 3


def test_an_ended_subscription_gets_nothing(bench: Workbench) -> None:
    listener = Listener(bench, "a", "a")
    bench.ask(SubjectUnsubscribe(listener.numbers[0]), session=listener.session)
    bench.ask(SubjectUnsubscribe(listener.numbers[0]), session=listener.session)
    bench.ask(SubjectUnsubscribe(12345), session=listener.session)
    assert publish(bench, "a", b"x") == 1
    stranger = Listener(bench)
    bench.ask(SubjectUnsubscribe(listener.numbers[1]), session=stranger.session)
    assert publish(bench, "a", b"x") == 1, "only its own session can end it"


def test_subscriptions_end_with_their_session(bench: Workbench) -> None:
    listener = Listener(bench, *[f"a.{number}" for number in range(1000)])
    queued = Listener(bench, "a.1", queue="q")
    bench.broker.disconnect(listener.session, bench.now_us)
    bench.broker.disconnect(queued.session, bench.now_us)
    assert publish(bench, "a.999", b"x") == publish(bench, "a.1", b"x") == 0, "also of those not removed yet"
    bench.run()
    assert bench.ask(SwitchboardDescribe()).subscriptions == 0
    assert listener.pushed == []


def test_a_message_with_many_subscribers_goes_out_in_slices_and_in_order(bench: Workbench) -> None:
    many = Listener(bench, *["a"] * 1000)
    late, other = Listener(bench, "b"), Listener(bench, "b", tenant="other")
    first = bench.begin(SubjectPublish("a"), bench.batch([b"1"]).data)
    bench.begin(SubjectPublish("b"), bench.batch([b"2"]).data)
    bench.begin(SubjectPublish("a"), bench.batch([b"3"]).data)
    bench.begin(SubjectPublish("b"), bench.batch([b"4"]).data, other.session)
    assert other.values == [b"4"], "another tenant does not wait"
    assert 0 < len(many.pushed) < 1000
    assert late.pushed == [], "it waits behind those who were first"
    assert not first.resolved
    bench.run()
    assert first.outcome.receivers == 1000
    assert many.values == [b"1"] * 1000 + [b"3"] * 1000
    assert late.values == [b"2"]


def test_too_much_that_waits_is_refused(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard_module, "LIVE_BACKLOG_BYTES_MAX", 100)
    Listener(bench, *["a"] * 1000)
    bench.begin(SubjectPublish("a"), bench.batch([b"x" * 200]).data)
    refused = bench.begin(SubjectPublish("a"), bench.batch([b"x"]).data)
    assert isinstance(refused, Busy)
    assert bench.broker._switchboard.emit("a", Columns([b"x"]), bench.now_us) == 0
    bench.run()
    assert publish(bench, "a", b"x") == 1000


def test_tenants_have_their_own_subjects(bench: Workbench) -> None:
    acme, other, default = (Listener(bench, "orders.*", tenant=tenant) for tenant in ("acme", "other", ""))
    assert publish(bench, "orders.eu", b"acme's", session=acme.session) == 1
    assert publish(bench, "orders.eu", b"default's") == 1
    assert acme.received == [("orders.eu", b"acme's")]
    assert other.received == []
    assert default.received == [("orders.eu", b"default's")]
    assert bench.ask(SwitchboardDescribe(), session=acme.session).published == 1
    with pytest.raises(InvalidArgument, match="not a name of the tenant"):
        publish(bench, "other/orders.eu", b"x", session=acme.session)


def test_the_default_tenant_can_name_another(bench: Workbench) -> None:
    acme, default = Listener(bench, "orders", tenant="acme"), Listener(bench, "acme/orders")
    assert publish(bench, "acme/orders", b"x") == 2
    assert acme.received == [("orders", b"x")]
    assert default.received == [("acme/orders", b"x")]


def test_the_brokers_own_subjects(bench: Workbench) -> None:
    listener, everything = Listener(bench, "$events.>"), Listener(bench, "#")
    with pytest.raises(InvalidArgument, match="broker's own"):
        publish(bench, "$events.topic", b"x")
    switchboard: Switchboard = bench.broker._switchboard
    assert switchboard.has_receivers("$events.topic.created")
    assert not switchboard.has_receivers("acme/$events.topic.created")
    assert switchboard.emit("$events.topic.created", Columns([b"{}"]), bench.now_us) == 1
    assert switchboard.emit("acme/$events.topic.created", Columns([b"{}"]), bench.now_us) == 0
    assert listener.received == [("$events.topic.created", b"{}")]
    assert everything.received == []


@pytest.mark.parametrize("subject", ["", "a..b", "a.*", "a b", "/a", "a/", "x" * 250])
def test_bad_subjects_are_refused(bench: Workbench, subject: str) -> None:
    with pytest.raises(InvalidArgument):
        publish(bench, subject, b"x")
    if subject != "a.*":
        with pytest.raises(InvalidArgument):
            bench.ask(SubjectSubscribe(subject))


def test_bad_batches_and_queues_are_refused(bench: Workbench) -> None:
    listener = Listener(bench, "a")
    with pytest.raises(InvalidBatch):
        bench.ask(SubjectPublish("a"), b"no batch")
    with pytest.raises(InvalidArgument):
        listener.subscribe("a", queue="a/b")
    assert listener.pushed == []


def test_the_number_of_subscriptions_is_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard_module, "LIVE_SUBSCRIPTIONS_MAX", 2)
    listener = Listener(bench, "a", "b")
    with pytest.raises(LimitExceeded, match="the connection has"):
        listener.subscribe("c")
    monkeypatch.setattr(switchboard_module, "LIVE_SUBSCRIPTIONS_IN_ALL_MAX", 3)
    other = Listener(bench, "a")
    with pytest.raises(LimitExceeded, match="the broker has"):
        other.subscribe("c")
    bench.ask(SubjectUnsubscribe(other.numbers[0]), session=other.session)
    other.subscribe("c")


def test_a_draining_broker_takes_nothing_new(bench: Workbench) -> None:
    listener = Listener(bench, "a")
    bench.broker.drain()
    with pytest.raises(Draining):
        publish(bench, "a", b"x")
    with pytest.raises(Draining):
        listener.subscribe("b")


class FakeIngress:
    """Stores batches of some subjects, when it is told to."""

    def __init__(self) -> None:
        self.appended: list[tuple[str, Batch, PendingAnswer[Any]]] = []

    def takes(self, subject: str) -> bool:
        return "stored" in subject

    def append(
        self,
        session: Session,  # noqa: ARG002
        subject: str,
        batch: Batch,
        now_us: int,  # noqa: ARG002
    ) -> PendingAnswer[Any]:
        answer: PendingAnswer[Any] = PendingAnswer()
        self.appended.append((subject, batch, answer))
        return answer


def test_what_a_durable_route_takes_is_answered_when_it_is_stored(bench: Workbench) -> None:
    ingress = bench.broker._switchboard._ingress = FakeIngress()
    listener = Listener(bench, "#")
    acme = Listener(bench, tenant="acme")
    assert publish(bench, "live", b"x") == 1
    pending = bench.begin(SubjectPublish("stored.a"), bench.batch([b"1"]).data)
    theirs = bench.begin(SubjectPublish("stored.b"), bench.batch([b"2"]).data, acme.session)
    assert isinstance(pending, PendingAnswer)
    assert not pending.resolved
    assert listener.values == [b"x", b"1"], "live subscribers do not wait for the disk"
    assert [(subject, batch.columns().values) for subject, batch, _ in ingress.appended] == [
        ("stored.a", [b"1"]),
        ("acme/stored.b", [b"2"]),
    ]
    ingress.appended[0][2].resolve(None)
    ingress.appended[1][2].resolve(DiskFull())
    assert pending.outcome.stored
    assert pending.outcome.receivers == 1
    assert isinstance(theirs.outcome, DiskFull)


def test_patterns_that_fit_in_too_many_ways_are_refused(bench: Workbench) -> None:
    """The bound is a tenant's; subscriptions to a pattern that is there, and to plain subjects, cost nothing."""
    patterns = [".".join(["#", *("a*"[number >> bit & 1] for bit in range(9)), "z"]) for number in range(400)]
    listener, taken = Listener(bench), []
    for queue in ("", "q"):
        for pattern in patterns:
            try:
                listener.subscribe(pattern, queue)
                taken.append(pattern)
            except LimitExceeded as error:
                assert "too many ways" in str(error)  # noqa: PT017 only some are refused
    assert 0 < len(set(taken)) < 400
    assert len(taken) == 2 * len(set(taken)), "also in queues"
    assert bench.ask(SwitchboardDescribe(), session=listener.session).subscriptions == len(taken)
    assert listener.subscribe("plain.subject")
    assert Listener(bench, *patterns[:10], tenant="").numbers
    bench.broker.disconnect(listener.session, bench.now_us)
    bench.run()
    assert Listener(bench, patterns[-1]).numbers, "what is gone leaves room"
