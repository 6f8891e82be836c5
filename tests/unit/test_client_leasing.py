"""The parts of leasing in the client that need no broker: the clock, keeping back, gathering, dividing."""

import copy
import logging
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import errors
from headrace.client.app.handler_results import Reject, Retry
from headrace.client.app.registration import registered
from headrace.client.connection.clock import DRIFT_PPM, Clock
from headrace.client.leasing.deserializing import JobDeserializer
from headrace.client.leasing.held_leases import NEVER_US, HeldLeases
from headrace.client.leasing.jobs import Job, found_messages, holdings_of, in_requests, leased_jobs, refusal_error
from headrace.client.leasing.message_selection import edition, selection, span_ms, span_us
from headrace.client.leasing.prefetch_buffer import PrefetchBuffer
from headrace.client.leasing.prefetch_window import PrefetchWindow
from headrace.client.leasing.scheduled_times import edit_error, moment_of, parse_id
from headrace.model.batch import Batch, Columns, encode, received
from headrace.model.leasing import (
    EditOutcome,
    Found,
    FoundMessage,
    Holding,
    Leased,
    LeasedPortion,
    MessageId,
    cut_reason,
)
from headrace.model.limits import LEASE_MESSAGES_MAX, REASON_CHARS_MAX


class Hands:
    """A wall clock and a monotonic one, turned by hand."""

    def __init__(self, wall_us: int = 1_000_000_000) -> None:
        self.monotonic_us = 0
        self.wall_us = wall_us

    def clock(self) -> Clock:
        return Clock(lambda: self.monotonic_us, lambda: self.wall_us)

    def turn(self, us: int) -> None:
        self.monotonic_us += us
        self.wall_us += us

    def ask(self, clock: Clock, ahead_us: int, there_us: int, back_us: int) -> None:
        """Ask a broker whose clock is ahead, over a way that takes so long there and back."""
        asked_us = self.monotonic_us
        self.turn(there_us)
        told_us = self.wall_us + ahead_us
        self.turn(back_us)
        clock.sample(asked_us, told_us, self.monotonic_us)


# The clock.


def test_one_answer_tells_the_time_to_half_of_its_way() -> None:
    hands = Hands()
    clock = hands.clock()
    assert clock.error_us == 1_000_000
    hands.ask(clock, 500, 100, 100)
    assert clock.offset_us == 500
    assert clock.error_us == 101
    assert clock.now_us() == hands.wall_us + 500
    assert clock.surely_us() == clock.now_us() - clock.error_us


def test_a_quick_answer_is_not_spoilt_by_slow_ones() -> None:
    hands = Hands()
    clock = hands.clock()
    hands.ask(clock, 500, 50, 50)
    hands.ask(clock, 500, 9000, 100)
    hands.ask(clock, 500, 100, 9000)
    assert abs(clock.offset_us - 500) <= clock.error_us <= 60


@given(
    st.integers(-10_000_000, 10_000_000),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 5_000_000)), min_size=1),
)
def test_the_true_time_is_always_within_the_bounds(ahead_us: int, ways: list[tuple[int, int, int]]) -> None:
    hands = Hands()
    clock = hands.clock()
    for there_us, back_us, pause_us in ways:
        hands.ask(clock, ahead_us, there_us, back_us)
        hands.turn(pause_us)
        assert clock.surely_us() <= hands.wall_us + ahead_us
        assert abs(clock.offset_us - ahead_us) <= clock.error_us


def test_what_is_known_gets_worse_with_time() -> None:
    hands = Hands()
    clock = hands.clock()
    hands.ask(clock, 0, 10, 10)
    known = clock.error_us
    hands.turn(100_000_000)
    assert clock.error_us == known + 100 * DRIFT_PPM
    assert clock.age_s == 100


def test_a_clock_that_is_set_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    hands = Hands()
    clock = hands.clock()
    for _ in range(3):
        hands.ask(clock, 0, 100, 100)
    with caplog.at_level(logging.WARNING):
        hands.ask(clock, 300_000, 100, 100)
    assert "jumped by 0.3" in caplog.text
    assert abs(clock.offset_us - 300_000) <= clock.error_us < 200


def test_clocks_far_apart_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    hands = Hands()
    clock = hands.clock()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            hands.ask(clock, 5_000_000, 100, 100)
    assert caplog.text.count("5.000 s apart") == 1


def test_setting_our_own_clock_changes_nothing_but_the_difference() -> None:
    hands = Hands()
    clock = hands.clock()
    hands.ask(clock, 0, 100, 100)
    before = clock.now_us()
    hands.wall_us += 60_000_000
    assert clock.now_us() == before
    assert clock.offset_us == -60_000_000


# Keeping back.


def job(offset: int, due: int | None = None, partition: int = 0, lease: int = 1, **fields: object) -> Job:
    return Job(offset, b"%d" % offset, 0, due=due, topic="t", partition=partition, lease=lease, **fields)  # type: ignore[arg-type]


def test_messages_without_a_time_come_in_their_order() -> None:
    stock = PrefetchBuffer()
    assert stock.add([job(3), job(1), job(2)], 0) == 0
    assert [stock.next(0), stock.next(0), stock.next(0), stock.next(0)] == [job(3), job(1), job(2), None]


def test_a_message_is_kept_back_until_it_is_due() -> None:
    stock = PrefetchBuffer()
    assert stock.add([job(1, due=300), job(2, due=200), job(3), job(4, due=100)], 100) == 2
    assert (stock.ready, stock.kept_back) == (2, 2)
    assert [stock.next(199), stock.next(199), stock.next(199)] == [job(3), job(4, due=100), None]
    assert stock.wait_s(199) == 1e-6
    assert stock.next(200) == job(2, due=200)
    assert stock.next(299) is None
    assert stock.empty() == [job(1, due=300)]
    assert stock.wait_s(0) is None


@given(st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 100)), st.integers(0, 100)), max_size=30))
def test_nothing_is_early_and_nothing_is_lost(plan: list[tuple[int | None, int]]) -> None:
    stock, seen = PrefetchBuffer(), []
    for offset, (due, now_us) in enumerate(sorted(plan, key=lambda each: each[1])):
        stock.add([job(offset, due)], now_us)
        while (found := stock.next(now_us)) is not None:
            assert found.due is None or found.due <= now_us
            seen.append(found.offset)
    kept_back = stock.empty()
    dues = [kept.due for kept in kept_back]
    assert sorted([*seen, *(kept.offset for kept in kept_back)]) == list(range(len(plan)))
    assert dues == sorted(dues)  # type: ignore[type-var]


# Answers.


def answered(columns: Columns, time_us: int) -> Batch:
    """A batch as it comes in an answer."""
    batch = encode(columns, time_us)
    batch.place(0, time_us, 0)
    return batch


def test_an_answer_becomes_jobs() -> None:
    first = answered(Columns([b"a", b"b"], keys=[b"k", None], dues=[None, 7], headers=[{"h": b"1"}, None]), 50)
    second = answered(Columns([b"c"], timestamps=[9]), 60)
    answer = Leased(
        [
            LeasedPortion(1, 70, 1000, [5, 3], [1, 4], [1, 2], {3: b"half"}),
            LeasedPortion(0, 70, 2000, [8]),
        ]
    )
    a, b, c = leased_jobs("t", "s", answer, bytes(first.data) + bytes(second.data))
    assert a == Job(5, b"a", 50, b"k", {"h": b"1"}, None, None, None, "t", 1, "s", 70, 1000, 1, 1, None)
    assert b == Job(3, b"b", 50, None, None, 7, None, None, "t", 1, "s", 70, 1000, 4, 2, b"half")
    assert c == Job(8, b"c", 9, None, None, None, None, None, "t", 0, "s", 70, 2000, 1, 1, None)


def test_an_answer_that_contradicts_itself_is_refused() -> None:
    batch = answered(Columns([b"a", b"b"]), 1)
    with pytest.raises(errors.ProtocolError, match="named 1 messages and sent 2"):
        leased_jobs("t", "s", Leased([LeasedPortion(0, 1, 1, [5])]), batch.data)
    with pytest.raises(errors.InvalidBatch):
        leased_jobs("t", "s", Leased([LeasedPortion(0, 1, 1, [5, 6])]), batch.data[:50])
    with pytest.raises(errors.InvalidBatch):
        leased_jobs("t", "s", Leased([LeasedPortion(0, 1, 1, [5, 6])]), batch.data[:-1])


def test_found_messages_have_their_contents() -> None:
    batch = answered(Columns([b"a"], keys=[b"k"], priorities=[3]), 50)
    found = Found([FoundMessage(2, 17, "leased", 5, 3, 2, "ann", 99, "why")])
    (message,) = found_messages("t", found, batch.data)
    assert (message.value, message.key, message.priority, message.topic, message.partition) == (b"a", b"k", 3, "t", 2)
    assert (message.offset, message.status, message.ready_us, message.deliveries) == (17, "leased", 5, 3)
    assert (message.version, message.holder, message.until_us, message.reason) == (2, "ann", 99, "why")
    assert found_messages("t", Found([]), b"") == []


# Holdings.


def test_holdings_go_by_partition_and_token() -> None:
    jobs = [job(1), job(2), job(3, partition=1), job(4, lease=2), job(5)]
    assert holdings_of(jobs) == [Holding(0, 1, [1, 2, 5]), Holding(1, 1, [3]), Holding(0, 2, [4])]
    assert holdings_of([]) == []


def leased_together(count: int) -> list[Job]:
    batch = answered(Columns([b"%d" % at for at in range(count)]), 50)
    return leased_jobs("t", "s", Leased([LeasedPortion(2, 7, 1000, [100], following=count - 1)]), batch.data)


@pytest.mark.parametrize("count", [1, 2, 16, 1000])
def test_what_was_leased_together_is_settled_as_one(count: int) -> None:
    jobs = leased_together(count)
    assert holdings_of(jobs) == [Holding(2, 7, [100], count - 1)]
    assert holdings_of(list(jobs)) == holdings_of(jobs)


@given(st.data())
def test_a_list_of_leased_messages_is_settled_as_it_is_now(data: st.DataObject) -> None:
    """Whatever was done to it since they were leased."""
    jobs = leased_together(20)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(jobs) - 1)) if jobs else 0
        change = data.draw(st.sampled_from(["pop", "insert", "swap", "replace", "reverse", "copy"]))
        if change == "pop" and jobs:
            jobs.pop(at)
        elif change == "insert":
            jobs.insert(at, job(3, partition=1))
        elif change == "swap" and jobs:
            jobs[0], jobs[at] = jobs[at], jobs[0]
        elif change == "replace" and jobs:
            jobs[at] = msgspec.structs.replace(jobs[at], lease=8)
        elif change == "reverse":
            jobs.reverse()
        elif change == "copy":
            jobs = copy.copy(jobs)
    found = [(each.partition, each.lease, offset) for each in holdings_of(jobs) for offset in each.all_offsets]
    assert sorted(found) == sorted((each.partition, each.lease, each.offset) for each in jobs)


@given(st.lists(st.integers(0, 25), max_size=6), st.integers(1, 10))
def test_requests_are_not_too_large_and_complete(sizes: list[int], most: int) -> None:
    holdings = [Holding(number, 7, list(range(size))) for number, size in enumerate(sizes)]
    requests = in_requests(holdings, most)
    assert all(0 < sum(len(holding.all_offsets) for holding in request) <= most for request in requests)
    parts = [holding for request in requests for holding in request]
    told = [(holding.partition, offset) for holding in parts for offset in holding.all_offsets]
    assert told == [(holding.partition, offset) for holding in holdings for offset in holding.all_offsets]


def test_refusals_become_errors() -> None:
    with pytest.raises(errors.LeaseExpired, match=r"message 4 of t\[0\]"):
        raise refusal_error(job(4), "lease_expired")
    assert type(refusal_error(job(4), "not_lease_holder")) is errors.NotLeaseHolder
    assert type(refusal_error(job(4), "message_gone")) is errors.MessageGone
    assert "whatever" in str(refusal_error(job(4), "whatever"))
    assert refusal_error(job(4), "message_gone").details == {"topic": "t", "partition": 0, "offset": 4}


def test_a_long_reason_loses_its_middle() -> None:
    assert cut_reason("short") == "short"
    cut = cut_reason("begin" + "x" * 20_000 + "end")
    assert len(cut) == REASON_CHARS_MAX
    assert cut.startswith("begin")
    assert cut.endswith("end")
    assert "[...]" in cut


# What is in hand.


def test_leases_are_extended_when_half_of_their_time_is_over() -> None:
    hand = HeldLeases()
    assert hand.renew_us == NEVER_US
    hand.take([LeasedPortion(0, 1, 1000, [1, 2]), LeasedPortion(1, 1, 3000, [7])], 500, 0)
    assert (len(hand), hand.renew_us) == (3, 500)
    assert hand.renewable(499) == []
    (grip,) = hand.renewable(500)
    assert (grip.partition, grip.lease, grip.lease_ms, grip.offsets) == (0, 1, 500, {1, 2})
    assert hand.renewable(500) == []  # an answer is awaited; asked again at three quarters
    assert hand.renew_us == 750
    grip.extended(2000, 510)
    assert grip.renew_us == 1255


def test_what_is_settled_is_not_extended() -> None:
    hand = HeldLeases()
    hand.take([LeasedPortion(0, 1, 1000, [1, 2, 3])], 0, 0)
    hand.drop_one(0, 1, 1)
    hand.drop(0, 1, [2])
    hand.drop(5, 5, [2])
    assert [hand.holds(job(offset)) for offset in (1, 2, 3)] == [False, False, True]
    assert hand.held([job(1), job(3), job(3, lease=2)]) == [job(3)]
    assert (hand.until_us(job(3)), hand.until_us(job(2))) == (1000, 0)
    hand.drop_one(0, 1, 3)
    assert hand.held_lease(0, 1) is None
    assert hand.renewable(10_000) == []


def test_portions_of_one_partition_and_token_are_one() -> None:
    hand = HeldLeases()
    hand.take([LeasedPortion(0, 1, 2000, [1]), LeasedPortion(0, 1, 1000, [5])], 0, 0)
    (grip,) = hand.renewable(500)
    assert (grip.offsets, grip.until_us) == ({1, 5}, 1000)


def test_what_could_not_be_extended_in_time_is_lost() -> None:
    hand = HeldLeases()
    hand.take([LeasedPortion(0, 1, 1000, [1, 2]), LeasedPortion(0, 2, 5000, [3])], 0, 0)
    assert hand.ended(999) == 0
    assert hand.ended(1000) == 2
    assert [hand.holds(job(1)), hand.holds(job(3, lease=2))] == [False, True]
    hand.forget([(0, 2), (9, 9)])
    assert len(hand) == 0


# How many.


def test_appetite_grows_with_quick_work_and_shrinks_with_slow() -> None:
    appetite = PrefetchWindow(4, 20)
    assert appetite.missing(0, 0.0) == 4
    for expected in (8, 16, 20, 20):
        appetite.served(True, 1.0)
        assert appetite.missing(0, 1.1) == expected
    appetite.served(False, 2.0)
    assert appetite.missing(0, 2.1) == 20  # there was no more: no reason for a larger stock
    for expected in (10, 5, 4, 4):
        appetite.served(True, 10.0)
        assert appetite.missing(0, 12.0) == expected
    assert PrefetchWindow(7).size == 7


@given(
    st.integers(1, 50),
    st.integers(0, 2000),
    st.lists(st.tuples(st.sampled_from(["fill", "take", "wait"]), st.floats(0, 3)), max_size=60),
)
def test_a_prefetch_window_asks_for_what_is_missing_and_never_for_nothing(
    least: int, more: int, steps: list[tuple[str, float]]
) -> None:
    appetite, ready, asked, now_s = PrefetchWindow(least, least + more), 0, 0, 0.0
    for step, seconds in steps:
        now_s += seconds
        if step == "take":
            ready -= ready > 0
        elif step == "fill" and asked:
            ready, asked = ready + asked, 0
            appetite.served(True, now_s)
        if not asked:
            asked = appetite.missing(ready, now_s)
        assert asked > 0 or ready > 0  # whoever waits is served
        assert 0 <= asked <= LEASE_MESSAGES_MAX


# Answer.


def test_a_selection_is_checked() -> None:
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    wanted = selection("waiting", noon, noon + timedelta(hours=1), "k", "ann", {"h": "ä"}, [job(3, partition=2)])
    assert (wanted.due_from_us, wanted.due_to_us) == (1893499200000000, 1893502800000000)
    assert (wanted.key, wanted.owner, wanted.headers) == (b"k", "ann", {"h": "ä".encode()})
    assert wanted.messages == [MessageId(2, 3)]
    with pytest.raises(errors.InvalidArgument, match="status"):
        selection("lost")
    with pytest.raises(errors.InvalidArgument, match="time zone"):
        selection(due_from=datetime(2030, 1, 1))


def test_an_edition_has_what_changes() -> None:
    change, body = edition(due=5, priority=3)
    assert (change.due_us, change.priority, change.replace, body) == (5, 3, False, b"")
    change, body = edition(value=b"v", headers={"a": "1"}, owner="ann")
    assert change.replace
    (message,) = received(bytearray(body)).messages()
    assert (message.value, message.headers) == (b"v", {"a": b"1", "headrace-owner": b"ann"})
    change, body = edition(value=None)
    assert next(received(bytearray(body)).messages()).value is None
    assert edition(shift=timedelta(seconds=-1)).change.shift_us == -1_000_000
    assert edition(delete=True).change.delete


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"delete": True, "priority": 1},
        {"due": 1, "shift": 1},
        {"priority": 1 << 40},
        {"value": "text"},
        {"headers": {"a": "1"}},
        {"headers": None, "priority": 1},
    ],
)
def test_an_edition_must_make_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidArgument):
        edition(**wrong)  # type: ignore[arg-type]


def test_spans_of_time() -> None:
    assert (span_us(0.5), span_us(timedelta(days=1))) == (500_000, 86_400_000_000)
    assert (span_ms(None, "x"), span_ms(0.0001, "x"), span_ms(2, "x")) == (0, 1, 2000)
    for wrong in (-1, "1", True, float("inf")):
        with pytest.raises(errors.InvalidArgument):
            span_ms(wrong, "x")  # type: ignore[arg-type]


def test_moments_are_given_or_counted() -> None:
    assert moment_of(7, None, 100) == 7
    assert moment_of(None, timedelta(milliseconds=1), 100) == 1100
    for at, in_ in ((None, None), (1, 1)):
        with pytest.raises(errors.InvalidArgument):
            moment_of(at, in_, 100)


@pytest.mark.parametrize("text", ["", "a/1", "a/b/1", "/0/1", "a/-1/2", "a/0/1x", "a/0/²", "a/0/1@", "a/0/1@x"])
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidArgument):
        parse_id(text)


def test_a_message_of_another_tenant_has_an_id_too() -> None:
    assert parse_id("acme/reminders/3/17") == ("acme/reminders", 3, 17, 0)
    assert parse_id("acme/reminders/3/17@9") == ("acme/reminders", 3, 17, 9)
    assert str(parse_id("acme/reminders/3/17@9")) == "acme/reminders/3/17@9"


def test_why_an_edit_was_not_made() -> None:
    def why(outcome: str, **fields: object) -> errors.HeadraceError:
        return edit_error("t/0/1", EditOutcome(0, 1, outcome, **fields))  # type: ignore[arg-type]

    stale = why("stale_version", version=4)
    assert (type(stale), stale.details["version"]) == (errors.StaleVersion, 4)
    leased = why("message_leased", holder="ann")
    assert (type(leased), leased.details["holder"]) == (errors.MessageLeased, "ann")
    assert type(why("not_owner")) is errors.NotOwner
    assert type(why("message_gone")) is errors.MessageGone
    assert "new_word" in str(why("new_word"))


# Handlers.


def test_a_message_that_cannot_be_unpacked_is_told_apart() -> None:
    unpacking = JobDeserializer(lambda raw: int(raw))
    assert unpacking.opened(job(4)) == msgspec.structs.replace(job(4), value=4)
    bad = Job(5, b"x", 0, topic="t")
    opened, failed = unpacking.opened_all([job(4), bad, Job(6, None, 0, topic="t")])
    assert [each.value for each in opened] == [4, None]
    ((message, reason),) = failed
    assert message is bad
    assert "ValueError" in reason
    assert JobDeserializer(None).opened_all([bad]) == ([bad], [])


def test_handlers_may_take_nothing() -> None:
    called: list[object] = []
    registered(lambda: called.append("nothing"), "t").handler(job(1))
    registered(lambda job: called.append(job.offset), "t").handler(job(1))
    registered(lambda *jobs: called.append(len(jobs)), "t").handler(job(1))
    registered(called.append, "t").handler(job(1))
    assert called == ["nothing", 1, 1, job(1)]


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 0}, {"prefetch": 0}, {"retry": {"colour": 1}}, {"lease": -1}, {"deserializer": "xml"}]
)
def test_wrong_settings_of_handlers_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidArgument):
        registered(print, "t", **wrong)  # type: ignore[arg-type]


def test_verdicts_say_what_they_are_told() -> None:
    assert (Reject("why").reason, str(Reject("why"))) == ("why", "why")
    verdict = Retry(5, state=b"half", reason="busy")
    assert (verdict.delay, verdict.until, verdict.state, verdict.reason) == (5, None, b"half", "busy")
