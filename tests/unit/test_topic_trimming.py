"""Trimming a topic: old messages go when somebody asks for it, and for good."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.pending_answer import PendingAnswer
from headrace.model.batch import Producer
from headrace.model.errors import (
    DiskFull,
    Draining,
    HeadraceError,
    InvalidArgument,
    OffsetOutOfRange,
    PartitionNotFound,
    TopicNotFound,
)
from headrace.model.leasing import Ack, Holding, Lease, SubscriptionCreate, SubscriptionDescribe
from headrace.model.requests import (
    Commit,
    PartitionOffset,
    Publish,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicTrim,
)
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

LARGE = [b"large"] * 20
"""So many messages are not gathered with others."""


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def filled(data: str, disk: FaultyDisk | None = None, **settings: Any) -> Workbench:
    """A broker with a topic of a hundred messages."""
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("orders", settings))
    for _ in range(5):
        bench.publish("orders", LARGE)
    return bench


def trimmed(bench: Workbench, offset: int, *, unread: bool = False) -> int:
    """Trim partition 0; the first offset then."""
    first: int = bench.ask(TopicTrim("orders", {0: offset}, unread)).offsets[0]
    assert bench.ask(TopicDescribe("orders")).partitions[0].first_offset == first
    return first


@pytest.mark.parametrize("storage", ["disk", "memory", "spill"])
def test_messages_before_the_offset_go(data: str, storage: str) -> None:
    bench = filled(data, storage=storage)
    assert trimmed(bench, 33) == 33
    assert [batch.base_offset for batch in bench.batches("orders", offset=33)] == [20, 40, 60, 80]
    with pytest.raises(OffsetOutOfRange) as error:
        bench.batches("orders", offset=32)
    assert error.value.details == {"first_offset": 33, "next_offset": 100}
    assert trimmed(bench, 10) == 33
    assert bench.publish("orders", LARGE).base_offset == 100


def test_it_never_goes_beyond_the_end(data: str) -> None:
    bench = filled(data)
    assert trimmed(bench, 10**9) == 100
    assert bench.publish("orders", [b"next"]).base_offset == 100
    assert bench.values("orders", offset=100) == [b"next"]
    assert Workbench(data).values("orders", offset=100) == [b"next"]


def test_whole_segments_are_freed(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"segment_bytes": 4096}))
    for _ in range(10):
        bench.publish("orders", [b"x" * 3000])
    before = bench.ask(TopicDescribe("orders")).partitions[0].bytes
    assert trimmed(bench, 9) == 9
    assert bench.ask(TopicDescribe("orders")).partitions[0].bytes <= before / 9


def test_partitions_are_trimmed_each_by_its_own_offset(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"partitions": 3}))
    for number in range(3):
        bench.publish("orders", LARGE, partition=number)
    assert bench.ask(TopicTrim("orders", {2: 5, 0: 7})).offsets == {0: 7, 2: 5}
    assert [each.first_offset for each in bench.ask(TopicDescribe("orders")).partitions] == [7, 0, 5]
    assert bench.ask(TopicTrim("orders", {})).offsets == {}


def test_what_groups_have_still_to_read_stays_unless_it_is_asked_for(data: str) -> None:
    bench = filled(data)
    bench.ask(Commit("quick", [PartitionOffset("orders", 0, 90)]))
    bench.ask(Commit("slow", [PartitionOffset("orders", 0, 30)]))
    assert trimmed(bench, 50) == 30
    assert trimmed(bench, 50, unread=True) == 50
    with pytest.raises(OffsetOutOfRange):
        bench.batches("orders", offset=30)  # which is where the slow group goes on: its policy says what it does then


def held(bench: Workbench, count: int) -> list[Holding]:
    portions = bench.ask(Lease("orders", messages_max=count)).answer.portions
    return [Holding(one.partition, one.lease, one.offsets, one.following) for one in portions]


def test_what_a_leased_subscription_has_not_settled_stays_unless_it_is_asked_for(data: str) -> None:
    bench = filled(data)
    bench.ask(SubscriptionCreate("orders"))
    (first,) = held(bench, 40)
    bench.ask(Ack("orders", [Holding(0, first.lease, list(first.all_offsets[:25]))]))
    assert trimmed(bench, 60) == 25
    assert trimmed(bench, 60, unread=True) == 60
    for broker in (bench, Workbench(data, now_us=bench.now_us)):
        info = broker.ask(SubscriptionDescribe("orders"))
        assert (info.ready, info.leased, info.waiting) == (40, 0, 0)
    refused = bench.ask(Ack("orders", [Holding(0, first.lease, list(first.all_offsets[25:]))])).refused
    assert {each.code for each in refused} == {"message_gone"}
    assert held(bench, 100)[0].all_offsets == range(60, 100)


def test_a_leased_subscription_that_reads_nothing_yet_keeps_everything(data: str) -> None:
    bench = filled(data)
    bench.ask(SubscriptionCreate("orders"))
    assert trimmed(bench, 60) == 0
    bench.ask(SubscriptionCreate("orders", "other", start="latest"))
    assert trimmed(bench, 60) == 0


def test_the_answer_comes_when_it_lasts(data: str, disk: FaultyDisk) -> None:
    bench = filled(data, disk)
    assert trimmed(bench, 33) == 33
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert bench.ask(TopicDescribe("orders")).partitions[0].first_offset == 33


def test_nothing_goes_before_the_commit_that_allows_it_is_safe(data: str, disk: FaultyDisk) -> None:
    bench = filled(data, disk)
    bench.ask(Commit("group", [PartitionOffset("orders", 0, 5)]))
    bench.syncing_later = True
    bench.begin(Commit("group", [PartitionOffset("orders", 0, 60)]))
    waiting = bench.begin(TopicTrim("orders", {0: 60}))
    assert isinstance(waiting, PendingAnswer)
    assert waiting.outcome is None
    assert not bench.broker.idle
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert bench.ask(TopicDescribe("orders")).partitions[0].first_offset <= 5


def test_producers_are_remembered_when_their_messages_are_gone(data: str) -> None:
    bench = Workbench(data)
    for sequence in range(3):
        bench.publish("orders", LARGE, producer=Producer(99, 0, sequence))
    assert trimmed(bench, 60) == 60
    bench = Workbench(data)
    assert bench.publish("orders", LARGE, producer=Producer(99, 0, 2)).duplicate
    assert bench.publish("orders", LARGE, producer=Producer(99, 0, 3)).base_offset == 60


def test_a_disk_that_is_full_is_told_and_removing_works_later(data: str, disk: FaultyDisk) -> None:
    bench = filled(data, disk)
    disk.capacity_bytes = 0
    with pytest.raises(DiskFull):
        bench.ask(TopicTrim("orders", {0: 100}))  # all of it: a new file has to say which offset comes next
    assert bench.broker.idle
    disk.capacity_bytes = None
    assert trimmed(bench, 100) == 100


def test_a_topic_that_is_deleted_meanwhile_is_told(data: str) -> None:
    bench = filled(data)
    waiting = bench.begin(TopicTrim("orders", {0: 50}))
    bench.ask(TopicDelete("orders"))
    assert isinstance(waiting.outcome, TopicNotFound)
    assert bench.broker.idle


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (TopicTrim("nothing", {0: 1}), TopicNotFound),
        (TopicTrim("orders", {0: -1}), InvalidArgument),
        (TopicTrim("orders", {7: 1}), PartitionNotFound),
        (TopicTrim("orders", {0: 1}, topic_id=77), TopicNotFound),
    ],
)
def test_what_cannot_be_is_refused(data: str, request_: TopicTrim, error: type[HeadraceError]) -> None:
    bench = filled(data)
    with pytest.raises(error):
        bench.ask(request_)
    assert bench.broker.idle


def test_a_broker_that_drains_trims_no_more(data: str) -> None:
    bench = filled(data)
    bench.broker.drain()
    with pytest.raises(Draining):
        bench.ask(TopicTrim("orders", {0: 1}))


def test_publishing_goes_on_meanwhile(data: str) -> None:
    bench = filled(data)
    waiting = bench.begin(TopicTrim("orders", {0: 100}))
    published = bench.begin(Publish("orders", 0), bench.batch(LARGE).data)
    bench.run()
    assert waiting.outcome.offsets == {0: 100}
    assert published.outcome.base_offset == 100
    assert bench.values("orders", offset=100) == LARGE
