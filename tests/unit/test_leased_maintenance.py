"""Leased subscriptions and the life of their topics: retention, consumption, compaction, growth, deletion."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.model.batch import Columns, encode, parse
from headrace.model.errors import Draining, SubscriptionNotFound, TopicNotFound
from headrace.model.leasing import (
    Ack,
    Holding,
    Lease,
    Leased,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionList,
)
from headrace.model.requests import (
    Commit,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
)
from headrace.testing.workbench import Workbench

MEMORY = Path("/dev/shm")


@pytest.fixture
def data() -> Iterator[str]:
    with TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        yield f"{directory}/data"


def publish(bench: Workbench, *values: bytes, partition: int = 0, topic: str = "jobs", **columns: Any) -> None:
    made = encode(Columns(list(values), **columns), bench.now_us)
    bench.ask(Publish(topic, partition), made.data)


def lease(bench: Workbench, count: int = 1000, topic: str = "jobs", **more: Any) -> tuple[list[bytes], list[Holding]]:
    """Values, and what is held."""
    answer = bench.ask(Lease(topic, messages_max=count, **more))
    if not isinstance(answer, AnswerWithBody):
        assert answer == Leased([])
        return [], []
    values: list[bytes] = []
    view, position = memoryview(answer.body), 0
    while position < len(view):
        batch = parse(view, position)
        values += [value or b"" for value in batch.columns().values]
        position += batch.length
    return values, [Holding(one.partition, one.lease, one.offsets, one.following) for one in answer.answer.portions]


def ack(bench: Workbench, holdings: list[Holding], topic: str = "jobs") -> None:
    assert bench.ask(Ack(topic, holdings)).refused == []


def first_offset(bench: Workbench) -> int:
    first: int = bench.ask(TopicDescribe("jobs")).partitions[0].first_offset
    return first


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%06d" % at for at in range(start, start + count)]


def test_messages_until_consumed_go_when_all_have_settled_them(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", {"validity": "until_consumed"}))
    bench.ask(SubscriptionCreate("jobs", "other"))
    publish(bench, *numbered(100))
    _, held = lease(bench, 60)
    ack(bench, held)
    bench.tick(10)
    assert first_offset(bench) == 0  # the other one has not seen them
    _, held = lease(bench, 30, subscription="other")
    assert bench.ask(Ack("jobs", held, "other")).refused == []
    bench.tick(10)
    assert first_offset(bench) == 30
    assert lease(bench, 1)[0] == [b"000060"]


def test_a_group_and_a_lease_both_keep_messages(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", {"validity": "until_consumed"}))
    publish(bench, *numbered(50))
    ack(bench, lease(bench, 50)[1])
    bench.ask(Commit("readers", [PartitionOffset("jobs", 0, 20)]))
    bench.tick(10)
    assert first_offset(bench) == 20


def test_what_retention_removes_is_not_handed_out_and_not_counted(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", {"retain_seconds": 60, "segment_bytes": 4096}))
    publish(bench, *numbered(400))
    bench.ask(SubscriptionCreate("jobs"))
    bench.now_us += 3_600_000_000
    publish(bench, b"new")
    bench.tick(10)
    bench.tick(10)
    assert first_offset(bench) > 0
    values, _ = lease(bench)
    assert values[-1] == b"new"
    assert set(values) <= {*numbered(400, first_offset(bench)), b"new"}
    again = Workbench(data, now_us=bench.now_us)
    info = again.ask(SubscriptionDescribe("jobs"))
    assert (info.ready, info.leased) == (0, len(values))


def test_a_time_to_live_holds_for_leases_too(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", {"validity": "ttl", "ttl_seconds": 10}))
    publish(bench, b"old")
    bench.now_us += 6_000_000
    publish(bench, b"new")
    bench.now_us += 6_000_000
    assert lease(bench)[0] == [b"new"]
    assert bench.ask(SubscriptionDescribe("jobs")).ready == 0


def test_segments_that_are_mostly_settled_are_compacted_and_the_rest_is_handed_out(data: str) -> None:
    bench = Workbench(data, settings=BrokerSettings(compact_seconds=1))
    bench.ask(TopicCreate("jobs", {"validity": "until_consumed", "segment_bytes": 8192}))
    bench.ask(SubscriptionCreate("jobs", settings={"discipline": "deadline"}))
    late_us = bench.now_us + 10**12
    for start in range(0, 3000, 100):  # the first of each hundred is for much later
        values = [value * 20 for value in numbered(100, start)]
        publish(bench, *values, dues=[late_us, *[bench.now_us] * 99])
    size = bench.ask(TopicDescribe("jobs")).partitions[0].bytes
    while held := lease(bench)[1]:
        ack(bench, held)
    for _ in range(5):
        bench.tick(10)
    info = bench.ask(TopicDescribe("jobs")).partitions[0]
    assert (info.first_offset, info.next_offset) == (0, 3000)
    assert info.bytes < size / 5
    bench = Workbench(data, now_us=late_us)
    assert sorted(lease(bench, bytes_max=1 << 24)[0]) == [b"%06d" % start * 20 for start in range(0, 3000, 100)]
    assert not bench.failures


def test_new_partitions_are_handed_out_too(data: str) -> None:
    bench = Workbench(data)
    bench.ask(SubscriptionCreate("jobs", settings={"discipline": "priority"}))
    bench.ask(TopicAlter("jobs", {"partitions": 3}))
    publish(bench, b"low", partition=0, priorities=[1])
    publish(bench, b"high", partition=2, priorities=[9])
    publish(bench, b"middle", partition=1, priorities=[5])
    values, held = lease(bench)
    assert values == [b"high", b"middle", b"low"]
    ack(bench, held)
    bench = Workbench(data, now_us=bench.now_us)
    assert lease(bench)[0] == []


def test_who_waits_is_told_when_the_topic_or_the_subscription_goes(data: str) -> None:
    bench = Workbench(data)
    for topic, remove, error in (
        ("jobs", SubscriptionDelete("jobs"), SubscriptionNotFound),
        ("tasks", TopicDelete("tasks"), TopicNotFound),
    ):
        bench.ask(SubscriptionCreate(topic))
        waiting = bench.begin(Lease(topic, wait_ms=60_000))
        assert isinstance(waiting, PendingAnswer)
        bench.ask(remove)
        assert isinstance(waiting.outcome, error)
    with pytest.raises(TopicNotFound):
        bench.ask(SubscriptionDescribe("tasks"))
    assert bench.ask(SubscriptionList()).subscriptions == []
    again = Workbench(data, now_us=bench.now_us)
    assert again.ask(SubscriptionList()).subscriptions == []


def test_a_subscription_made_again_has_everything_again(data: str) -> None:
    bench = Workbench(data)
    publish(bench, b"a", b"b")
    ack(bench, lease(bench, 1)[1])
    bench.ask(SubscriptionDelete("jobs"))
    bench = Workbench(data, now_us=bench.now_us)
    assert lease(bench)[0] == [b"a", b"b"]


def test_who_waits_when_the_broker_is_about_to_end_need_not(data: str) -> None:
    bench = Workbench(data)
    waiting = bench.begin(Lease("jobs", wait_ms=60_000, create_topic=True))
    bench.broker.drain()
    assert waiting.outcome == Leased([])
    with pytest.raises(Draining):
        bench.ask(Lease("jobs"))


def test_a_topic_in_memory_begins_anew_and_so_do_its_leases(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", {"storage": "memory"}))
    publish(bench, *numbered(10))
    _, held = lease(bench, 5)
    ack(bench, held)
    lease(bench, 2)
    bench = Workbench(data, now_us=bench.now_us)
    assert lease(bench)[0] == []
    publish(bench, b"first of a new life", b"second")
    assert lease(bench)[0] == [b"first of a new life", b"second"]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ({"start": "latest"}, [b"later"]),
        ({"start": "offset", "start_offset": 2}, [b"c", b"later"]),
        ({"start": "time", "start_us": 1_800_000_000_000_002}, [b"b", b"c", b"later"]),
        ({}, [b"a", b"b", b"c", b"later"]),
    ],
)
def test_a_subscription_begins_where_it_was_told_to(data: str, start: dict[str, Any], expected: list[bytes]) -> None:
    bench = Workbench(data)
    times = [bench.now_us + at for at in (1, 2, 3)]
    publish(bench, b"a", b"b", b"c", timestamps=times)
    bench.ask(SubscriptionCreate("jobs", **start))
    bench = Workbench(data, now_us=bench.now_us)
    publish(bench, b"later")
    assert lease(bench)[0] == expected


def test_the_broker_wants_to_be_woken_when_the_next_message_is_due_for_one_who_waits(data: str) -> None:
    bench = Workbench(data)
    bench.tick()
    bench.begin(Lease("jobs", wait_ms=60_000, ahead_ms=500, create_topic=True))
    bench.run()
    due_us = bench.now_us + 5_000_000
    publish(bench, b"x", dues=[due_us])
    assert bench.wakes_us[-1] == due_us - 500_000
