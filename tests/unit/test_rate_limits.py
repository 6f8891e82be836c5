"""Rates of tenants: what is beyond them waits, deliveries pause, and only what would wait too long is refused."""

from collections import Counter
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.rate_limits import TokenBucket
from headrace.gateways.http.reading import batches_in
from headrace.model.errors import HeadraceError, NoResponders, QuotaExceeded, Throttled
from headrace.model.idempotency import PartitionBatch, PublishOnce
from headrace.model.leasing import Ack, Holding, Lease, SubscriptionCreate
from headrace.model.reading import Fetch, StreamOpen
from headrace.model.requests import (
    Info,
    Publish,
    Published,
    TopicCreate,
    TopicDelete,
    TransactionBegin,
    TransactionStage,
)
from headrace.model.standing_lease import LeaseDelivery, LeaseOpen
from headrace.model.subject_requests import RequestSend, SubjectPublish
from headrace.model.tenant_requests import TenantAlter, TenantCreate, TenantUsageDescribe
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Workbench:
    """A broker, and a tenant acme."""
    bench = Workbench()
    bench.ask(TenantCreate("acme"))
    return bench


def limited(bench: Workbench, **quotas: int) -> Session:
    """A session of acme, which has these quotas."""
    bench.ask(TenantAlter("acme", quotas=quotas))
    return bench.connect(tenant="acme")


def publish(bench: Workbench, session: Session, count: int, size: int = 1, topic: str = "orders") -> Any:
    """Begin to publish a batch of so many messages of a size."""
    return bench.begin(Publish(topic, 0), bench.batch([b"x" * size] * count).data, session)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 3_000_000)), min_size=1), st.integers(1, 1000))
def test_who_waits_as_told_keeps_the_rate(steps: list[tuple[int, int]], rate: int) -> None:
    bucket, now_us, taken, last = TokenBucket(rate, 0), 0, 0, 0
    for amount, pause_us in steps:
        now_us += max(bucket.wait_us(now_us), pause_us)
        assert taken <= rate + rate * now_us / 1e6 + 1, "after the wait, no more was taken than the rate allows"
        bucket.take(amount, now_us)
        taken, last = taken + amount, amount
    assert taken - last <= rate + rate * now_us / 1e6 + 1


def test_a_clock_that_is_put_back_fills_nothing() -> None:
    bucket = TokenBucket(100, now_us=5_000_000)
    bucket.take(200, now_us=5_000_000)
    assert bucket.wait_us(now_us=0) == 1_000_000
    assert bucket.wait_us(now_us=500_000) == 500_000


def test_sessions_without_rates_are_not_metered(bench: Workbench) -> None:
    assert bench.session.meter is None
    assert limited(bench, topics=5).meter is None
    assert limited(bench, messages_in=5).meter is not None


def test_publishing_faster_than_the_rate_waits_and_is_not_refused(bench: Workbench) -> None:
    acme = limited(bench, messages_in=100)
    bench.ask(TopicCreate("orders"), session=acme)
    answers = []
    for _ in range(30):
        answers.append(publish(bench, acme, 10))
        bench.run()
    assert all(isinstance(answer, PendingAnswer) for answer in answers)
    assert sum(answer.resolved for answer in answers) == 10, "a second's worth at once"
    bench.ask(Info(), session=acme)  # what carries no messages does not wait
    bench.tick(0.55)
    assert sum(answer.resolved for answer in answers) == 15
    bench.tick(1.5)
    assert all(answer.resolved for answer in answers)
    assert bench.ask(TenantUsageDescribe(), session=acme).throttled_us > 1_000_000
    assert len(bench.values("acme/orders")) == 300, "all of it was stored, once"


def test_bytes_count_as_well_as_messages(bench: Workbench) -> None:
    acme = limited(bench, bytes_in=10_000)
    bench.ask(TopicCreate("orders"), session=acme)
    assert isinstance(publish(bench, acme, 1, size=9_000), Published)
    second = publish(bench, acme, 1, size=9_000)
    bench.run()
    assert not second.resolved
    bench.tick(1)
    assert second.resolved


def test_what_would_wait_too_long_is_refused_with_the_time_to_wait(bench: Workbench) -> None:
    acme = limited(bench, messages_in=10)
    bench.ask(TopicCreate("orders"), session=acme)
    large = publish(bench, acme, 200)
    assert isinstance(large, PendingAnswer), "while nothing is owed one batch passes, however large"
    refused = publish(bench, acme, 1)
    assert isinstance(refused, Throttled)
    assert refused.retryable
    assert refused.details["retry_after_ms"] == 19_000
    assert isinstance(publish(bench, bench.connect(tenant="acme"), 1), Throttled), "another connection changes nothing"
    bench.tick(9.9)
    assert not large.resolved
    bench.tick(0.2)
    assert large.resolved, "nobody waits for longer than ten seconds"
    bench.tick(10)
    assert not isinstance(publish(bench, acme, 1), Throttled)


def test_what_would_be_answered_too_late_is_refused_and_not_stored(bench: Workbench) -> None:
    acme = limited(bench, messages_in=10)
    bench.ask(TopicCreate("orders"), session=acme)
    publish(bench, acme, 50)
    refused = publish(bench, acme, 70)
    assert isinstance(refused, Throttled)
    assert refused.details["retry_after_ms"] == 4_000
    assert isinstance(publish(bench, acme, 60), PendingAnswer), "ten seconds are allowed"
    bench.tick(10)
    assert len(bench.values("acme/orders")) == 110


def test_requests_that_nobody_gets_count_for_nothing(bench: Workbench) -> None:
    acme = limited(bench, messages_in=1)
    for _ in range(50):
        assert isinstance(bench.begin(RequestSend("prices.get", 1000), b"x", acme), NoResponders)
    bench.ask(TopicCreate("orders"), session=acme)
    assert bench.ask(Publish("orders", 0), bench.batch([b"x"]).data, acme).base_offset == 0, "without a wait"


def test_every_way_to_publish_counts(bench: Workbench) -> None:
    acme = limited(bench, messages_in=10)
    batch = bytes(bench.batch([b"x"] * 300).data)
    bench.ask(TopicCreate("orders"), session=acme)
    epoch = bench.ask(TransactionBegin("t"), session=acme).epoch
    for request in (
        Publish("orders", 0),
        PublishOnce("orders", b"k" * 16, b"r" * 16, [PartitionBatch(0, len(batch))]),
        TransactionStage("t", epoch, "orders", 0),
        SubjectPublish("orders.paid"),
    ):
        bench.begin(request, batch, acme)
        assert isinstance(publish(bench, acme, 1), Throttled), type(request).__name__
        bench.tick(60)


def test_streams_pause_until_more_may_be_delivered(bench: Workbench) -> None:
    acme = limited(bench, messages_out=100)
    for _ in range(5):
        bench.publish("acme/orders", [b"x" * 1000] * 100)
    woken: list[bool] = []
    stream = bench.begin(StreamOpen("orders", 0, 0, 1 << 30, 1), session=acme)
    stream.start(lambda: woken.append(True))
    counts = []
    while (found := stream.read(1, bench.now_us)) is not None:
        counts.append(found.next_offset)
    assert counts == [100, 200], "a second's worth, and one beyond it"
    assert not stream.has_more()
    bench.tick(0.9)
    assert not woken
    bench.tick(0.2)
    assert woken
    assert stream.read(1, bench.now_us).next_offset == 300


def test_many_small_batches_come_at_the_rate(bench: Workbench) -> None:
    acme = limited(bench, messages_out=100)
    for _ in range(300):
        bench.publish("acme/orders", [b"x"] * 10)
    stream = bench.begin(StreamOpen("orders", 0, 0, 1 << 30, 1), session=acme)
    read, values = 0, []
    for _ in range(100):
        while (found := stream.read(1 << 20, bench.now_us)) is not None:
            values += [message.value for batch in batches_in(found.view) for message in batch.messages()]
            read = found.next_offset
        assert read == len(values), "nothing is left out"
        bench.tick(0.1)
    assert 1000 <= read <= 1130, "a second's worth, and what came in ten seconds"


def test_one_delivery_does_not_lock_a_tenant_out(bench: Workbench) -> None:
    acme = limited(bench, messages_out=100)
    for _ in range(3):
        bench.publish("acme/orders", [b"x"] * 40_000)
    bench.publish("acme/jobs", [b"y"] * 5)
    bench.ask(SubscriptionCreate("jobs"), session=acme)
    stream = bench.begin(StreamOpen("orders", 0, 0, 1 << 30, 1), session=acme)
    assert stream.read(1 << 20, bench.now_us).next_offset == 40_000, "a batch is not divided"
    assert stream.read(1 << 20, bench.now_us) is None
    lease = bench.begin(Lease("jobs", messages_max=5), session=acme)
    bench.tick(10.01)
    assert [len(portion.all_offsets) for portion in lease.outcome.answer.portions] == [5]


def test_streams_of_a_tenant_take_turns(bench: Workbench) -> None:
    sessions = [limited(bench, messages_out=10), bench.connect(tenant="acme")]
    streams = []
    for number in range(4):
        for _ in range(20):
            bench.publish(f"acme/topic-{number}", [b"x"] * 20)
        streams.append(bench.begin(StreamOpen(f"topic-{number}", 0, 0, 1 << 30, number), session=sessions[number % 2]))
    read = dict.fromkeys(streams, 0)
    woken = list(streams)
    for one in streams:
        one.start(partial(woken.append, one))
    for _ in range(16):
        while woken:
            stream = woken.pop(0)
            if (found := stream.read(1 << 20, bench.now_us)) is not None:
                read[stream] = found.next_offset
        bench.tick(2.1)
    assert max(read.values()) - min(read.values()) <= 20
    assert min(read.values()) >= 80


def test_leases_that_wait_share_the_rate(bench: Workbench) -> None:
    acme = limited(bench, messages_out=100)
    bench.ask(SubscriptionCreate("jobs", create_topic=True), session=acme)
    leases = [bench.begin(Lease("jobs", messages_max=1000, wait_ms=60_000), session=acme) for _ in range(5)]
    bench.publish("acme/jobs", [b"x"] * 1000)
    bench.run()

    def leased() -> list[int]:
        answers = [one.outcome.answer for one in leases if one.resolved]
        return [len(portion.all_offsets) for answer in answers for portion in answer.portions]

    assert sum(leased()) <= 110
    for _ in range(40):
        bench.tick(0.1)
    assert len(leased()) == 5, "each got some when its turn came"
    assert sum(leased()) <= 510


def test_leases_of_a_tenant_that_waits_hold_nobody_else_up(bench: Workbench) -> None:
    acme = limited(bench, messages_out=10)
    bench.ask(SubscriptionCreate("jobs", create_topic=True), session=acme)
    bench.begin(Lease("jobs", messages_max=100, wait_ms=60_000), session=acme)
    waiting = bench.begin(Lease("jobs", messages_max=100, wait_ms=60_000), session=acme)
    bench.publish("acme/orders", [b"x"] * 100)
    bench.begin(Fetch("orders", 0, 0, 1), session=acme)
    bench.publish("acme/jobs", [b"x"] * 40)
    assert not waiting.resolved
    leased = bench.ask(Lease("acme/jobs", messages_max=20))
    assert len(leased.answer.portions[0].all_offsets) == 20, "the default tenant has no rate"
    bench.tick(9.5)
    assert waiting.resolved


def test_standing_leases_of_many_subscriptions_share_the_rate(bench: Workbench) -> None:
    acme = limited(bench, messages_out=100)
    for number in range(5):
        bench.ask(SubscriptionCreate(f"jobs-{number}", create_topic=True), session=acme)
        bench.ask(LeaseOpen(f"jobs-{number}", credit_messages=1000, credit_bytes=1 << 20), session=acme)
    for number in range(5):
        bench.publish(f"acme/jobs-{number}", [b"x"] * 900)

    def delivered() -> Counter[int]:
        counts: Counter[int] = Counter()
        for one in bench.pushed:
            if isinstance(one, AnswerWithBody):
                counts[one.answer.standing] += sum(len(portion.all_offsets) for portion in one.answer.portions)
        return counts

    assert delivered().total() <= 120
    for _ in range(100):
        bench.tick(0.1)
    assert 1000 <= delivered().total() <= 1130
    assert len(delivered()) == 5
    assert min(delivered().values()) >= 100


def test_a_fetch_that_may_wait_waits_for_the_rate(bench: Workbench) -> None:
    acme = limited(bench, messages_out=10)
    bench.publish("acme/orders", [b"x"] * 60)
    assert isinstance(bench.begin(Fetch("orders", 0, 0, 1), session=acme), AnswerWithBody)
    fetch = bench.begin(Fetch("orders", 0, 0, 1, wait_ms=100), session=acme)
    assert fetch.read(bench.now_us) is None
    bench.tick(1)
    assert fetch.read(bench.now_us) is None
    bench.tick(4.1)
    assert fetch.read(bench.now_us).answer.next_offset == 60


def test_a_time_that_was_read_earlier_fills_nothing() -> None:
    bucket = TokenBucket(100, now_us=0)
    bucket.take(1000, now_us=0)
    for _ in range(100):
        assert bucket.wait_us(now_us=1_000_000) == 8_000_000
        bucket.take(0, now_us=500_000)


def test_a_clock_that_is_set_back_holds_no_stream_up(bench: Workbench) -> None:
    acme = limited(bench, messages_out=10)
    for _ in range(2):
        bench.publish("acme/orders", [b"x"] * 60)
    stream = bench.begin(StreamOpen("orders", 0, 0, 1 << 30, 1), session=acme)
    assert stream.read(1, bench.now_us).next_offset == 60
    bench.now_us -= 3600 * 1_000_000
    for _ in range(2):
        assert stream.read(1, bench.now_us) is None
        bench.tick(5.1)
    assert stream.read(1, bench.now_us).next_offset == 120


def test_fetches_and_leases_wait(bench: Workbench) -> None:
    acme = limited(bench, messages_out=100)
    for _ in range(4):
        bench.publish("acme/jobs", [b"x"] * 100)
    bench.ask(SubscriptionCreate("jobs"), session=acme)
    for offset in (0, 100):
        assert isinstance(bench.begin(Fetch("jobs", 0, offset, 1), session=acme), AnswerWithBody)
    second = bench.begin(Fetch("jobs", 0, 200, 1), session=acme)
    assert isinstance(second, PendingAnswer)
    lease = bench.begin(Lease("jobs", messages_max=10), session=acme)
    bench.run()
    assert not second.resolved
    assert not lease.resolved, "messages are leased when they can be delivered, not before"
    for _ in range(3):
        bench.tick(1.01)
    assert second.resolved
    assert lease.outcome.answer.portions


def test_a_lease_request_that_waits_can_be_withdrawn(bench: Workbench) -> None:
    acme = limited(bench, messages_out=10)
    bench.publish("acme/jobs", [b"x"] * 30)
    bench.ask(SubscriptionCreate("jobs"), session=acme)
    bench.begin(Fetch("jobs", 0, 0, 1), session=acme)
    lease = bench.begin(Lease("jobs", messages_max=10), session=acme)
    lease.cancel()
    bench.tick(10)
    leased = bench.ask(Lease("acme/jobs", messages_max=30))
    assert len(leased.answer.portions[0].all_offsets) == 30


def test_standing_leases_pause(bench: Workbench) -> None:
    acme = limited(bench, messages_out=10)
    bench.ask(SubscriptionCreate("jobs", create_topic=True), session=acme)
    opened = bench.ask(LeaseOpen("jobs", credit_messages=1000, credit_bytes=1 << 20), session=acme)
    bench.publish("acme/jobs", [b"x"] * 25)
    delivered = [one.answer for one in bench.pushed if isinstance(one, AnswerWithBody)]
    assert all(isinstance(one, LeaseDelivery) for one in delivered)
    assert sum(len(one.portions[0].all_offsets) for one in delivered) == 11, "a second's worth, and one beyond it"
    assert acme.blocked
    bench.publish("acme/jobs", [b"y"])
    assert len([one for one in bench.pushed if isinstance(one, AnswerWithBody)]) == len(delivered)
    portion = delivered[0].portions[0]
    holding = Holding(portion.partition, portion.lease, list(portion.all_offsets))
    assert bench.ask(Ack("jobs", [holding]), session=acme).refused == [], "what was delivered can be settled meanwhile"
    bench.tick(2)
    assert len([one for one in bench.pushed if isinstance(one, AnswerWithBody)]) > len(delivered)
    assert opened.standing


def test_quotas_that_are_raised_count_at_once(bench: Workbench) -> None:
    acme = limited(bench, messages_in=10)
    bench.ask(TopicCreate("orders"), session=acme)
    waiting = publish(bench, acme, 50)
    bench.run()
    assert not waiting.resolved
    bench.ask(TenantAlter("acme", quotas={"messages_in": None}))
    assert waiting.resolved
    assert acme.meter is None


def test_other_tenants_do_not_wait(bench: Workbench) -> None:
    acme = limited(bench, messages_in=10)
    zeta = bench.connect(tenant="zeta")
    bench.ask(TopicCreate("orders"), session=acme)
    publish(bench, acme, 500)
    assert isinstance(publish(bench, acme, 1), Throttled)
    assert bench.ask(Publish("orders", 0), bench.batch([b"x"]).data, zeta).base_offset == 0


def test_stored_bytes_are_limited_and_free_again_when_a_topic_is_deleted(bench: Workbench) -> None:
    acme = limited(bench, stored_bytes=10_000)
    sent = 0
    while not isinstance(refused := publish(bench, acme, 1, size=1000), HeadraceError):
        sent += 1
    assert sent == 9
    assert isinstance(refused, QuotaExceeded)
    assert refused.details["quota"] == "stored_bytes"
    assert refused.details["limit"] == 10_000
    assert 9_000 <= refused.details["usage"] <= 10_000
    bench.ask(TopicDelete("orders"), session=acme)
    bench.tick(2)
    assert bench.ask(TenantUsageDescribe(), session=acme).usage.stored_bytes == 0
    bench.ask(Publish("orders", 0), bench.batch([b"x" * 1000]).data, acme)


def test_pending_messages_are_limited(bench: Workbench) -> None:
    acme = limited(bench, pending_messages=5)
    bench.ask(SubscriptionCreate("jobs", create_topic=True), session=acme)
    bench.ask(Publish("jobs", 0), bench.batch([b"x"] * 5).data, acme)
    bench.tick(2)
    with pytest.raises(QuotaExceeded, match="pending messages"):
        bench.ask(Publish("jobs", 0), bench.batch([b"x"]).data, acme)
    portion = bench.ask(Lease("jobs", messages_max=5), session=acme).answer.portions[0]
    bench.ask(Ack("jobs", [Holding(0, portion.lease, list(portion.all_offsets))]), session=acme)
    bench.tick(2)
    bench.ask(Publish("jobs", 0), bench.batch([b"x"]).data, acme)
