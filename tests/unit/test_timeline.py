"""Queries and edits of leased subscriptions do what they say: each message once, in slices, remembered for good."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.engines.leased import contents, inspection
from headrace.model.batch import Columns, encode, parse
from headrace.model.errors import DiskFull, SubscriptionNotFound, TopicNotFound
from headrace.model.leasing import (
    Ack,
    Edit,
    EditMatching,
    EditOutcome,
    Find,
    Forecast,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Redrive,
    Reject,
    Release,
    Selection,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
)
from headrace.model.requests import Publish, TopicCreate, TopicDelete, TopicTrim
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleSet
from headrace.testing import FaultyDisk
from headrace.testing.workbench import Workbench

MEMORY = Path("/dev/shm")
HOUR_US = 3_600_000_000


@pytest.fixture
def data() -> Iterator[str]:
    with TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        yield f"{directory}/data"


def publish(bench: Workbench, values: list[bytes], partition: int = 0, topic: str = "jobs", **columns: Any) -> Any:
    return bench.ask(Publish(topic, partition), encode(Columns(values, **columns), bench.now_us).data)


def find(bench: Workbench, page: int = 1000, subscription: str = "default", **selection: Any) -> list[tuple[Any, Any]]:
    """All messages that match, with their values."""
    found: list[tuple[Any, Any]] = []
    after = ""
    while True:
        answer = bench.ask(Find("jobs", Selection(**selection), subscription, page, after))
        if isinstance(answer, AnswerWithBody):
            found += zip(answer.answer.messages, parse(memoryview(answer.body)).columns().values, strict=True)
            answer = answer.answer
        after = answer.after
        if not after:
            return found


def places(found: list[tuple[Any, Any]]) -> list[tuple[int, int]]:
    return [(one.partition, one.offset) for one, _ in found]


def edit_all(
    bench: Workbench, change: MessageChange, page: int = 1000, owner: str = "", **selection: Any
) -> list[EditOutcome]:
    """What a client does: page by page, but not for ever."""
    outcomes: list[EditOutcome] = []
    after = ""
    for _ in range(100):
        answer = bench.ask(EditMatching("jobs", Selection(**selection), change, "default", owner, page, after))
        outcomes += answer.outcomes
        after = answer.after
        if not after:
            return outcomes
    raise AssertionError("the bulk edit does not end")


def edit(bench: Workbench, offset: int, change: MessageChange, version: int | None = None, **more: Any) -> EditOutcome:
    body = encode(Columns([b"new"]), bench.now_us).data if change.replace else b""
    (outcome,) = bench.ask(Edit("jobs", [MessageId(0, offset, version)], change, **more), body).outcomes
    return outcome


def lease(bench: Workbench, count: int = 1000, subscription: str = "default") -> tuple[list[Any], list[Holding]]:
    answer = bench.ask(Lease("jobs", subscription, messages_max=count))
    values: list[Any] = []
    if not isinstance(answer, AnswerWithBody):
        return values, []
    view, position = memoryview(answer.body), 0
    while position < len(view):
        batch = parse(view, position)
        values += batch.columns().values
        position += batch.length
    return values, [Holding(one.partition, one.lease, one.offsets, one.following) for one in answer.answer.portions]


def stats(bench: Workbench, subscription: str = "default") -> Any:
    return bench.ask(SubscriptionDescribe("jobs", subscription))


# Pages.


def test_pages_over_equal_times_have_each_message_once() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {"partitions": 2}))
    bench.ask(SubscriptionCreate("jobs"))
    due_us = bench.now_us + HOUR_US
    for partition in (0, 1):
        for _ in range(62):
            publish(bench, [b"x"] * 10, partition, dues=[due_us + HOUR_US] * 10)
    # Moved in an order of their own: to one time, some twice.
    for offset in [*reversed(range(620)), *range(0, 620, 3)]:
        for partition in (0, 1):
            bench.ask(Edit("jobs", [MessageId(partition, offset)], MessageChange(due_us=due_us)))
    found = places(find(bench, page=37, status="waiting"))
    assert len(found) == len(set(found)) == 1240
    assert found == sorted(found)


def test_a_bulk_shift_over_several_pages_sees_each_message_once() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {"partitions": 2}))
    bench.ask(SubscriptionCreate("jobs"))
    for partition in (0, 1):
        publish(bench, [b"x"] * 50, partition, dues=[bench.now_us + HOUR_US + at for at in range(50)])
    outcomes = edit_all(bench, MessageChange(shift_us=25), page=7, status="waiting")
    assert [(one.outcome, one.version) for one in outcomes] == [("applied", 2)] * 100
    times = [one.ready_us for one, _ in find(bench, status="waiting")]
    assert times == sorted(bench.now_us + HOUR_US + at + 25 for at in range(50) for _ in (0, 1))


def test_a_bulk_edit_within_bounds_of_time_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (1, 1000):  # by looking at all, or only at those in time
        monkeypatch.setattr("headrace.broker.search._CANDIDATES_MAX", most)
        bench = Workbench()
        bench.ask(SubscriptionCreate("jobs"))
        begin_us = bench.now_us + HOUR_US
        publish(bench, [b"x"] * 100, dues=[begin_us + at for at in range(100)])
        bounds = {"due_from_us": begin_us + 10, "due_to_us": begin_us + 40}
        outcomes = edit_all(bench, MessageChange(shift_us=5), page=4, status="waiting", **bounds)
        assert [one.offset for one in outcomes] == list(range(10, 40))
        assert {one.offset for one, _ in find(bench) if one.version == 2} == set(range(10, 40))


def test_a_bulk_edit_in_somebodys_name_changes_only_what_is_theirs() -> None:
    bench = Workbench()
    bench.ask(SubscriptionCreate("jobs"))
    publish(bench, [b"anns", b"bobs", b"free"], headers=[{"headrace-owner": b"ann"}, {"headrace-owner": b"bob"}, None])
    outcomes = edit_all(bench, MessageChange(priority=5), owner="ann")
    assert [(one.offset, one.outcome) for one in outcomes] == [(0, "applied")]
    assert edit(bench, 2, MessageChange(priority=1), owner="ann").outcome == "applied"  # whoever names it may change it


def test_redriving_goes_on_behind_dead_messages_of_others() -> None:
    bench = Workbench()
    for name in ("default", "other"):
        bench.ask(SubscriptionCreate("jobs", name))
    publish(bench, [b"%d" % at for at in range(50)])
    for name, count in (("other", 50), ("default", 3)):
        _, holdings = lease(bench, count, name)
        bench.ask(Reject("jobs", holdings, subscription=name))
    answer = bench.ask(Redrive("jobs", messages_max=2))
    assert (answer.messages, answer.more) == (2, True)
    answer = bench.ask(Redrive("jobs", messages_max=2, after=answer.after))
    assert (answer.messages, answer.more) == (1, False)


# Moving what rests, cancelling twice, and topics that are made again.


def test_shifting_a_message_that_rests_counts_from_when_it_would_be_ready() -> None:
    bench = Workbench()
    publish(bench, [b"a"])
    _, holdings = lease(bench)
    bench.ask(Release("jobs", holdings, delay_ms=60_000))
    rests_us = bench.now_us + 60_000_000
    assert edit(bench, 0, MessageChange(shift_us=HOUR_US)).outcome == "applied"
    ((message, _),) = find(bench, status="waiting")
    assert message.ready_us == rests_us + HOUR_US
    bench.tick(61)
    assert lease(bench) == ([], [])
    bench.tick(3600)
    assert lease(bench)[0] == [b"a"]


def test_a_cancel_that_is_repeated_says_that_it_was_cancelled(data: str) -> None:
    bench = Workbench(data)
    bench.ask(SubscriptionCreate("jobs"))
    publish(bench, [b"a", b"b"], headers=[{"headrace-owner": b"ann"}, None])
    for _ in range(2):
        assert edit(bench, 0, MessageChange(delete=True), 1, owner="ann") == EditOutcome(0, 0, "applied", 2)
    assert edit(bench, 0, MessageChange(delete=True), owner="ann").outcome == "applied"
    assert (
        edit(bench, 0, MessageChange(delete=True), 2, owner="ann").outcome == "applied"
    )  # of whoever heard of the first
    assert edit(bench, 0, MessageChange(delete=True), owner="bob").outcome == "message_gone"
    assert edit(bench, 0, MessageChange(due_us=1), 1, owner="ann").outcome == "message_gone"
    _, holdings = lease(bench)
    bench.ask(Ack("jobs", holdings))
    bench.tick(10)
    bench = Workbench(data, now_us=bench.now_us)
    assert edit(bench, 0, MessageChange(delete=True), 1, owner="ann") == EditOutcome(0, 0, "applied", 2)
    assert edit(bench, 1, MessageChange(delete=True)).outcome == "message_gone"  # it was done, not cancelled


def test_a_handle_of_a_deleted_topic_reaches_no_message_of_the_next_one() -> None:
    bench = Workbench()
    former = publish(bench, [b"mine"]).topic_id
    bench.ask(TopicDelete("jobs"))
    with pytest.raises(TopicNotFound):
        edit(bench, 0, MessageChange(delete=True), topic_id=former)
    latter = publish(bench, [b"yours"]).topic_id
    assert latter != former
    assert edit(bench, 0, MessageChange(delete=True), topic_id=former).outcome == "message_gone"
    assert bench.ask(Find("jobs", Selection(messages=[MessageId(0, 0)]), topic_id=former)).messages == []
    assert [value for _, value in find(bench)] == [b"yours"]
    assert edit(bench, 0, MessageChange(delete=True), topic_id=latter).outcome == "applied"


# Edits are remembered as long as their messages are there.


def settle_all(bench: Workbench) -> None:
    while True:
        _, holdings = lease(bench)
        if not holdings:
            return
        bench.ask(Ack("jobs", holdings))


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_new_subscription_gets_what_was_edited_before_others_settled_it(data: str, snapshot: bool) -> None:
    bench = Workbench(data, settings=BrokerSettings(journal_bytes=4096 if snapshot else 1 << 20))
    bench.ask(SubscriptionCreate("jobs"))
    publish(bench, [b"%d" % at for at in range(600)])
    for offset in range(0, 600, 2):
        assert edit(bench, offset, MessageChange(replace=True)).version == 2
    assert edit(bench, 1, MessageChange(delete=True)).version == 2
    settle_all(bench)
    bench.tick(10)
    assert not any(bench.broker._ledger.state.leased.edits.values())  # they are packed
    if snapshot:
        publish(bench, [b"later"], topic="other")
        for _ in range(100):
            bench.ask(SubscriptionCreate("other", exist_ok=True))
            bench.ask(SubscriptionDelete("other"))
    for _ in range(2):
        bench = Workbench(data, now_us=bench.now_us)
        bench.tick(10)
    bench.ask(SubscriptionCreate("jobs", "second"))
    found = find(bench, subscription="second")
    assert [one.offset for one, _ in found] == [0, *range(2, 600)]
    assert all(
        (one.version, value) == ((2, b"new") if one.offset % 2 == 0 else (1, b"%d" % one.offset))
        for one, value in found
    )
    assert edit(bench, 0, MessageChange(due_us=1), version=1).outcome == "stale_version"
    assert edit(bench, 0, MessageChange(due_us=1), version=2).version == 3


def test_edits_go_when_their_messages_do(data: str) -> None:
    bench = Workbench(data)
    bench.ask(SubscriptionCreate("jobs"))
    for _ in range(3):
        publish(bench, [b"x"] * 100)
    edit_all(bench, MessageChange(priority=3))
    settle_all(bench)
    bench.tick(10)
    bench.ask(TopicTrim("jobs", {0: 250}))
    bench.tick(10)
    leased = bench.broker._ledger.state.leased
    assert not any(leased.edits.values())
    bench.ask(SubscriptionDelete("jobs"))
    bench.ask(SubscriptionCreate("jobs"))
    assert {one.version for one, _ in find(bench)} <= {2}
    bench.ask(TopicTrim("jobs", {0: 300}, unread=True))
    bench.tick(10)
    assert find(bench) == []


def test_messages_that_get_the_offsets_of_lost_ones_have_none_of_their_edits(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", {"storage": "memory"}))
    bench.ask(SubscriptionCreate("jobs"))
    publish(bench, [b"a", b"b"])
    assert edit(bench, 0, MessageChange(delete=True)).outcome == "applied"
    assert edit(bench, 1, MessageChange(replace=True)).outcome == "applied"
    for _ in range(2):
        bench.close()
        bench = Workbench(data, now_us=bench.now_us)
        publish(bench, [b"c", b"d"])
        assert [(value, one.version) for one, value in find(bench)] == [(b"c", 1), (b"d", 1)]


# Before there is a subscription.


def test_a_topic_without_a_subscription_answers_what_is_there() -> None:
    bench = Workbench()
    due_us = bench.now_us + HOUR_US
    publish(bench, [b"now", b"later", b"gone"], dues=[None, due_us, None], expires=[None, None, bench.now_us + 5])
    bench.tick(1)
    assert [(one.status, value) for one, value in find(bench)] == [("ready", b"now"), ("waiting", b"later")]
    forecast = bench.ask(Forecast("jobs", bench.now_us, HOUR_US, 2))
    assert (forecast.before, forecast.counts, forecast.after) == (1, [1, 0], 0)
    assert [one.outcome for one in edit_all(bench, MessageChange(shift_us=HOUR_US), status="waiting")] == ["applied"]
    assert [one.ready_us for one, _ in find(bench, status="waiting")] == [due_us + HOUR_US]
    assert edit(bench, 0, MessageChange(delete=True)).outcome == "applied"
    publish(bench, [b"more"])
    assert [value for _, value in find(bench)] == [b"later", b"more"]
    with pytest.raises(SubscriptionNotFound):
        stats(bench)
    bench.ask(SubscriptionCreate("jobs", "first"))
    assert [value for _, value in find(bench, subscription="first")] == [b"later", b"more"]
    with pytest.raises(SubscriptionNotFound):
        find(bench)
    bench.tick(60)
    assert not bench.broker._ledger.state.leased.unsubscribed
    with pytest.raises(TopicNotFound):
        bench.ask(Find("nowhere"))


# Nothing holds the broker for long.


class Meter:
    """Counts what the broker does in one turn: messages that it reads, and batches that it takes apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = self.batches = self.most_read = self.turns = 0
        read, keep = contents.Contents.read, contents.Contents._keep

        def counted_read(this: Any, offsets: Any, *more: Any) -> Any:
            self.read += len(offsets)
            return read(this, offsets, *more)

        def counted_keep(this: Any, known: Any) -> None:
            self.batches += 1
            keep(this, known)

        monkeypatch.setattr(contents.Contents, "read", counted_read)
        monkeypatch.setattr(contents.Contents, "_keep", counted_keep)

    def run(self, bench: Workbench, answer: Any) -> Any:
        """Do what is to be done, call by call."""
        while True:
            self.most_read, self.read = max(self.most_read, self.read), 0
            if not bench.step():
                break
            self.turns += 1
        return answer.outcome if isinstance(answer, PendingAnswer) else answer


@pytest.mark.parametrize("subscribed", [False, True])
def test_thousands_of_edits_in_a_large_batch_are_made_in_slices_and_decode_it_once(
    subscribed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Workbench()
    if subscribed:
        bench.ask(SubscriptionCreate("jobs"))
    publish(bench, [b"%d" % at for at in range(50_000)], dues=[bench.now_us + HOUR_US + at for at in range(50_000)])
    find(bench, page=1, messages=[MessageId(0, 0)])  # the index, if there is none yet, is there now
    meter = Meter(monkeypatch)
    ids = [MessageId(0, offset) for offset in range(0, 50_000, 10)]
    answer = meter.run(bench, bench.begin(Edit("jobs", ids, MessageChange(shift_us=1))))
    assert [one.outcome for one in answer.outcomes] == ["applied"] * 5000
    assert meter.batches <= 2
    assert meter.most_read <= 100
    request = EditMatching("jobs", Selection(), MessageChange(shift_us=1), messages_max=5000)
    answer = meter.run(bench, bench.begin(request))
    assert len(answer.outcomes) == 5000
    assert meter.batches <= 3
    assert meter.most_read <= 100
    answer = meter.run(bench, bench.begin(Find("jobs", Selection(key=b"none"))))
    assert answer.messages == []
    assert meter.most_read <= 500


def test_a_forecast_over_many_moved_messages_is_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench()
    bench.ask(SubscriptionCreate("jobs"))
    begin_us = bench.now_us + HOUR_US
    publish(bench, [b""] * 30_000, dues=[begin_us + at for at in range(30_000)])
    bench.ask(Edit("jobs", [MessageId(0, offset) for offset in range(5000)], MessageChange(shift_us=HOUR_US)))
    counted: list[int] = []
    waits = inspection._waits
    monkeypatch.setattr(inspection, "_waits", lambda *entry: counted.append(1) or waits(*entry))
    answer = bench.begin(Forecast("jobs", begin_us, HOUR_US, 2))
    # What happens meanwhile does not count: the answer is about the moment of the question.
    bench.begin(Publish("jobs", 0), encode(Columns([b""], dues=[begin_us]), bench.now_us).data)
    slices = [0]
    while bench.step():
        slices.append(len(counted))
        counted.clear()
    assert (answer.outcome.before, answer.outcome.counts) == (0, [25_000, 5000])
    assert max(slices) <= 2000


def test_edits_of_messages_that_compaction_removes_are_forgotten(data: str) -> None:
    bench = Workbench(data, settings=BrokerSettings(compact_seconds=1))
    bench.ask(TopicCreate("jobs", {"compact_by_key": True, "segment_bytes": 4096}))
    bench.ask(SubscriptionCreate("jobs"))
    for _ in range(40):
        publish(bench, [b"x" * 100] * 10, keys=[b"%d" % at for at in range(10)])
    edit_all(bench, MessageChange(priority=1), messages=[MessageId(0, at) for at in range(0, 390, 13)])
    settle_all(bench)
    leased = bench.broker._ledger.state.leased
    publish(bench, [b"x" * 100] * 10, keys=[b"%d" % at for at in range(10)])
    assert len(leased.edited_offsets(1, 0)) == 30
    bench.tick(10)
    bench.tick(10)
    assert not bench.failures
    there = {message.offset for batch in bench.batches("jobs") for message in batch.messages()}
    assert len(there) < 100
    assert leased.edited_offsets(1, 0) == there.intersection(range(0, 390, 13))


def test_a_disk_that_is_full_in_the_middle_of_many_edits_leaves_no_doubt(data: str) -> None:
    partly = 0
    body = encode(Columns([b"y" * 10_000]), 0).data
    request = Edit("jobs", [MessageId(0, at) for at in range(100)], MessageChange(replace=True))
    for room in range(0, 1_200_000, 200_000):
        disk = FaultyDisk()
        bench = Workbench(f"{data}{room}", disk=disk)
        bench.ask(SubscriptionCreate("jobs"))
        publish(bench, [b"x"] * 100)
        disk.capacity_bytes = disk.used_bytes + room
        try:
            outcomes = bench.ask(request, body).outcomes
        except DiskFull:
            outcomes = [EditOutcome(0, at, "disk_full") for at in range(100)]
        disk.capacity_bytes = None
        codes = {one.offset: one.outcome for one in outcomes}
        assert {one.offset: "applied" if one.version == 2 else "disk_full" for one, _ in find(bench)} == codes
        partly += len(set(codes.values())) == 2
    assert partly


# The time of day.


def test_schedules_follow_the_time_of_day_and_leases_the_brokers_time() -> None:
    bench = Workbench()
    publish(bench, [b"a"])
    bench.ask(ScheduleSet(ScheduleDefinition("often", "ticks", "every 20m")))
    bench.tick(1201)
    assert len(bench.values("ticks")) == 1
    assert lease(bench)[0] == [b"a"]
    bench.broker.wall_offset_us = -HOUR_US  # the system's clock was put back, the broker's was not
    for _ in range(4):
        bench.tick(20)
    assert lease(bench)[0] == [b"a"]
    for _ in range(20):
        bench.tick(60)
    assert len(bench.values("ticks")) == 2
