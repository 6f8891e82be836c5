"""What cannot be opened is listed with its error, refused, and put right or deleted, while all else goes on."""

import pickle
import queue
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec
import pytest

import headrace
from headrace.broker.facts import ScheduleStored, TopicSet
from headrace.broker.leased_facts import IndexSnapshotRest, SubscriptionSet
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.engines.api import SavedRest
from headrace.engines.leased.index import LeasedIndex
from headrace.model.batch import Columns, encode
from headrace.model.errors import SubscriptionExists, SubscriptionFailed, TopicFailed
from headrace.model.leasing import (
    Ack,
    EditMatching,
    Extend,
    Find,
    Forecast,
    Holding,
    Lease,
    LeaseStop,
    MessageChange,
    Redrive,
    Reject,
    Release,
    Selection,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionList,
    SubscriptionReset,
)
from headrace.model.requests import (
    Commit,
    GroupDescribe,
    GroupJoin,
    GroupList,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicList,
)
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleList, ScheduleSet
from headrace.testing.workbench import Workbench

MEMORY = Path("/dev/shm")


@pytest.fixture
def data() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        yield f"{directory}/data"


def started(data: str, now_us: int | None = None, **settings: Any) -> Workbench:
    more = {} if now_us is None else {"now_us": now_us}
    bench = Workbench(data, settings=BrokerSettings(**settings), **more)
    bench.tick()
    return bench


def restarted(bench: Workbench, data: str, **settings: Any) -> Workbench:
    return started(data, bench.now_us, **settings)


def filled(data: str, **settings: Any) -> tuple[Workbench, Holding]:
    """Two subscriptions of a topic with three messages, of which the first is acknowledged and the second leased."""
    bench = started(data, **settings)
    bench.publish("jobs", [b"0", b"1", b"2"])
    bench.ask(Lease("jobs", "good"))
    portion = bench.ask(Lease("jobs", "bad", 2)).answer.portions[0]
    assert bench.ask(Ack("jobs", [Holding(0, portion.lease, [0])], subscription="bad")).refused == []
    return bench, Holding(0, portion.lease, [1])


def spoil(bench: Workbench) -> None:
    """The journal says something of the subscription that cannot be."""
    [number] = [one.id for one in bench.broker._subscriptions if one.name == "bad"]
    rest = SavedRest(b"12345678", b"", [], {}, {})
    bench.broker._ledger.record(bench.now_us, IndexSnapshotRest(number, 0, rest))


def check_refused(bench: Workbench, holding: Holding) -> None:
    requests: list[Any] = [
        Lease("jobs", "bad"),
        LeaseStop("jobs", "bad"),
        *(kind("jobs", [holding], subscription="bad") for kind in (Ack, Extend, Release, Reject)),
        Find("jobs", Selection(), "bad"),
        Forecast("jobs", bench.now_us, 1000, 3, "bad"),
        EditMatching("jobs", Selection(), MessageChange(delete=True), "bad"),
        Redrive("jobs", "bad"),
    ]
    for request in requests:
        with pytest.raises(SubscriptionFailed, match="reset it"):
            bench.ask(request)
    listed = bench.ask(SubscriptionList("jobs")).subscriptions
    assert {one.subscription: bool(one.error) for one in listed} == {"bad": True, "good": False}
    assert bench.ask(SubscriptionDescribe("jobs", "bad")).error
    with pytest.raises(SubscriptionExists):
        bench.ask(SubscriptionCreate("jobs", "bad"))
    assert bench.ask(Lease("jobs", "good")).answer.portions  # all others work
    bench.publish("jobs", [b"3"])
    bench.tick(1)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A mistake in the broker: subscriptions that are called `bad` cannot be opened."""
    load = LeasedIndex.load

    def fail(self: LeasedIndex, *rest: Any) -> Iterator[None]:
        yield from load(self, *rest)
        if self._scanner._subscription == b"bad":
            raise KeyError(1)

    monkeypatch.setattr(LeasedIndex, "load", fail)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("failing")
def test_one_that_cannot_be_opened_stops_nothing_else(data: str) -> None:
    bench = started(data)
    bench.publish("jobs", [b"0", b"1", b"2"])
    bench.ask(Lease("jobs", "good"))
    bench.ask(SubscriptionCreate("jobs", "bad"))
    bench = restarted(bench, data)
    check_refused(bench, Holding(0, 1, [1]))
    with pytest.raises(SubscriptionFailed):
        bench.ask(SubscriptionReset("jobs", "bad"))  # it is no better
    bench.ask(SubscriptionDelete("jobs", "bad"))
    assert [one.subscription for one in bench.ask(SubscriptionList("jobs")).subscriptions] == ["good"]


def test_one_that_can_be_opened_again_after_a_restart_is_as_it_was(
    data: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    bench, holding = filled(data, journal_bytes=300)
    request.getfixturevalue("failing")
    bench = restarted(bench, data, journal_bytes=300)
    check_refused(bench, holding)
    monkeypatch.undo()
    bench = restarted(bench, data)
    info = bench.ask(SubscriptionDescribe("jobs", "bad"))
    assert (info.error, info.ready, info.leased) == ("", 2, 1)
    assert bench.ask(Ack("jobs", [holding], subscription="bad")).refused == []


@pytest.mark.parametrize("journal_bytes", [300, 1 << 20])
def test_a_journal_that_cannot_be_followed_breaks_one_subscription_until_it_is_reset(
    data: str, journal_bytes: int
) -> None:
    bench, holding = filled(data, journal_bytes=journal_bytes)
    waiting = bench.begin(Lease("jobs", "bad", wait_ms=60_000, messages_max=1))
    assert isinstance(waiting, PendingAnswer)
    bench.run()
    waiting = bench.begin(Lease("jobs", "bad", wait_ms=60_000))
    spoil(bench)
    bench.run()
    assert isinstance(waiting.outcome, SubscriptionFailed)
    check_refused(bench, holding)
    for _ in range(2):
        bench = restarted(bench, data, journal_bytes=journal_bytes)
        check_refused(bench, holding)
    info = bench.ask(SubscriptionReset("jobs", "bad"))
    messages = len(bench.values("jobs"))
    assert (info.error, info.ready, info.leased) == ("", messages - 1, 0)
    assert [one.code for one in bench.ask(Ack("jobs", [holding], subscription="bad")).refused] == ["not_lease_holder"]
    bench = restarted(bench, data)
    assert bench.ask(SubscriptionDescribe("jobs", "bad")).ready == messages - 1
    assert list(bench.ask(Lease("jobs", "bad", 100)).answer.portions[0].all_offsets) == list(range(1, messages))


def test_a_reset_with_a_start_forgets_what_is_settled(data: str) -> None:
    bench, _ = filled(data)
    bench.ask(SubscriptionAlter("jobs", {"lease_seconds": 7}, "bad"))
    assert bench.ask(SubscriptionReset("jobs", "bad", "earliest")).ready == 3
    assert bench.ask(SubscriptionReset("jobs", "bad", "offset", 2)).ready == 1
    bench = restarted(bench, data)
    info = bench.ask(SubscriptionDescribe("jobs", "bad"))
    assert (info.ready, info.settings["lease_seconds"]) == (1, 7)


def test_whoever_waits_is_served_after_a_reset(data: str) -> None:
    bench, _ = filled(data)
    bench.ask(Lease("jobs", "bad"))
    waiting = bench.begin(Lease("jobs", "bad", wait_ms=60_000))
    bench.run()
    assert waiting.outcome is None
    bench.ask(SubscriptionReset("jobs", "bad"))
    assert waiting.outcome is not None


def test_wrong_settings_fail_one_subscription_and_the_right_ones_of_them_stay(data: str) -> None:
    bench, holding = filled(data)
    [one] = [one for one in bench.broker._subscriptions if one.name == "bad"]
    wrong = {**one.fact.settings, "lease_seconds": 7, "discipline": "dice"}
    fact = SubscriptionSet(one.id, one.fact.topic_id, "bad", 0, wrong, {})
    bench.broker._ledger.record(bench.now_us, fact)
    bench = restarted(bench, data)
    check_refused(bench, holding)
    info = bench.ask(SubscriptionReset("jobs", "bad"))
    assert (info.settings["lease_seconds"], info.settings["discipline"]) == (7, "fifo")


def test_a_mistake_in_the_middle_of_work_stops_one_subscription(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, holding = filled(data)
    [bad] = [one for one in bench.broker._subscriptions if one.name == "bad"]
    monkeypatch.setattr(bad.indexes[0].leases, "end", lambda *_: 1 / 0)
    bench.tick(40)
    check_refused(bench, holding)
    assert bench.ask(SubscriptionReset("jobs", "bad")).ready == 3


def test_nothing_is_removed_that_a_failed_subscription_has_not_settled(data: str) -> None:
    bench, _ = filled(data)
    bench.ask(TopicAlter("jobs", {"validity": "until_consumed"}))
    spoil(bench)
    bench.ask(SubscriptionReset("jobs", "good", "latest"))
    for _ in range(3):
        bench.tick(100)
    assert bench.ask(TopicDescribe("jobs")).partitions[0].first_offset <= 1
    topic = bench.broker._topics.get("jobs")
    assert bench.broker._subscriptions.settled_rules(topic, 0) == []


# Topics, groups and schedules.


def test_a_topic_with_wrong_settings_stops_nothing_else(data: str) -> None:
    bench, holding = filled(data)
    bench.publish("others", [b"a"])
    bench.ask(Commit("group", [PartitionOffset("jobs", 0, 2), PartitionOffset("others", 0, 1)]))
    fact = bench.broker._ledger.state.topics[1]
    wrong = {**fact.settings, "retain_seconds": -1.0, "message_bytes_max": 77}
    bench.broker._ledger.record(bench.now_us, TopicSet(1, "jobs", fact.created_us, wrong))
    bench = restarted(bench, data)
    requests: list[Any] = [Lease("jobs", "good"), Lease("jobs", "new"), Ack("jobs", [holding], subscription="bad")]
    for request in (*requests, GroupJoin("g", "m", ["jobs"], [])):
        with pytest.raises(TopicFailed, match="retain_seconds"):
            bench.ask(request)
    with pytest.raises(TopicFailed):
        bench.ask(Publish("jobs", 0), encode(Columns([b"x"]), bench.now_us).data)
    with pytest.raises(TopicFailed):
        bench.values("jobs")
    assert {one.topic: bool(one.error) for one in bench.ask(TopicList()).topics} == {"jobs": True, "others": False}
    assert "retain_seconds" in bench.ask(TopicDescribe("jobs")).error
    assert "retain_seconds" in bench.ask(SubscriptionDescribe("jobs", "good")).error
    assert bench.values("others") == [b"a"]
    places = bench.ask(GroupDescribe("group")).places
    assert [(one.topic, one.offset, bool(one.error)) for one in places] == [("jobs", 2, True), ("others", 1, False)]
    assert [one.lag for one in bench.ask(GroupList()).groups] == [0]
    bench.ask(GroupJoin("g", "m", [], ["*"]))  # gets both, and is told by the one that cannot be read
    bench.tick(10)

    info = bench.ask(TopicAlter("jobs", {"retain_seconds": 1e6}))
    assert (info.error, info.settings["message_bytes_max"]) == ("", 77)
    assert bench.values("jobs") == [b"0", b"1", b"2"]
    assert bench.ask(Ack("jobs", [holding], subscription="bad")).refused == []
    assert bench.ask(Lease("jobs", "good", 9)).answer.portions
    assert bench.values("jobs") == restarted(bench, data).values("jobs")


def test_an_app_handles_other_topics_and_the_failed_one_when_it_is_mended(data: str) -> None:
    bench = started(data)
    bench.publish("jobs", [b"job"])
    bench.publish("others", [b"other"])
    bench.broker._ledger.record(bench.now_us, TopicSet(1, "jobs", 0, {"retain_seconds": -1.0}))
    bench.tick()
    bench.close()
    with headrace.open(data) as bus:
        seen: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        app = headrace.App(bus)
        app.on("jobs", retry={"deliveries_max": 3})(lambda job: seen.put(job.value))
        app.on("others")(lambda job: seen.put(job.value))
        running = threading.Thread(target=app.run)
        running.start()
        try:
            assert seen.get(timeout=60) == b"other"
            bus.alter_topic("jobs", retain_seconds=1e9)
            assert seen.get(timeout=60) == b"job"
        finally:
            app.stop()
            running.join()
        assert bus.describe_subscription("jobs").settings["deliveries_max"] == 3


def test_a_topic_with_wrong_settings_can_be_deleted(data: str) -> None:
    bench, _ = filled(data)
    bench.broker._ledger.record(bench.now_us, TopicSet(1, "jobs", 0, {"colour": "blue"}))
    bench = restarted(bench, data)
    assert Path(f"{data}/topics/1/0").exists()
    bench.ask(TopicDelete("jobs"))
    assert not Path(f"{data}/topics/1/0").exists()
    bench.ask(TopicCreate("jobs"))
    assert bench.values("jobs") == []


def test_a_partition_that_cannot_be_opened_hides_no_group(data: str) -> None:
    bench = started(data)
    bench.publish("jobs", [b"0"])
    bench.publish("others", [b"a", b"b"])
    bench.ask(Commit("group", [PartitionOffset("jobs", 0, 1), PartitionOffset("others", 0, 1)]))
    bench.close()
    rmtree(f"{data}/topics/1/0")
    Path(f"{data}/topics/1/0").write_bytes(b"no directory")
    bench = restarted(bench, data)
    places = bench.ask(GroupDescribe("group")).places
    assert [(one.topic, one.lag, bool(one.error)) for one in places] == [("jobs", 0, True), ("others", 1, False)]
    assert [one.lag for one in bench.ask(GroupList()).groups] == [1]


def test_a_schedule_that_cannot_be_followed_stops_no_other(data: str) -> None:
    bench = started(data)
    for name in ("bad", "good"):
        bench.ask(ScheduleSet(ScheduleDefinition(name, "jobs", "every 10s", value=name.encode())))
    kept = bench.broker._ledger.state.schedules["bad"]
    wrong = msgspec.structs.replace(kept.definition, when="now and then")
    bench.broker._ledger.record(bench.now_us, ScheduleStored(wrong, kept.id, kept.created_us, kept.done_us))
    bench = restarted(bench, data)
    bench.tick(10)
    assert bench.values("jobs") == [b"good"]
    assert {one.definition.name: bool(one.error) for one in bench.ask(ScheduleList()).schedules} == {
        "bad": True,
        "good": False,
    }
    bench.ask(ScheduleSet(ScheduleDefinition("bad", "jobs", "every 10s", value=b"bad")))
    bench.tick(10)
    assert sorted(bench.values("jobs")[1:]) == [b"bad", b"good"]
    assert not any(one.error for one in bench.ask(ScheduleList()).schedules)


def test_a_mistake_in_one_schedule_stops_no_other(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = started(data)
    for name in ("bad", "good"):
        bench.ask(ScheduleSet(ScheduleDefinition(name, "jobs", "every 10s", value=name.encode())))
    monkeypatch.setattr(bench.broker._schedules._entries["bad"], "due", lambda *_: 1 / 0)
    bench.tick(10)
    assert bench.values("jobs") == [b"good"]
    assert [one.error for one in bench.ask(ScheduleList()).schedules] == ["ZeroDivisionError: division by zero", ""]


@pytest.mark.parametrize("kind", [SubscriptionFailed, TopicFailed])
def test_the_errors_travel(kind: type[Exception]) -> None:
    assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"
