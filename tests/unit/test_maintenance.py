"""How long messages are valid: time to live, consumption, retention, compaction, and what memory keeps."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from headrace.broker.reservation import BLOCK_MIN
from headrace.engines import partition
from headrace.model.batch import Producer
from headrace.model.durability import Durability
from headrace.model.requests import (
    Commit,
    GroupDelete,
    GroupDescribe,
    GroupJoin,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDescribe,
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


class Reader:
    """A stream that counts how often it was told that there is something."""

    def __init__(self, bench: Workbench, topic: str, offset: int = 0) -> None:
        self.bench, self.woken = bench, 0
        self.stream = bench.open_stream(topic, 0, offset, self._ready)

    def _ready(self) -> None:
        self.woken += 1

    def read(self, bytes_max: int = 1 << 20) -> Any:
        return self.stream.read(bytes_max, self.bench.now_us)


def position(bench: Workbench, group: str, topic: str = "orders", partition: int = 0) -> int:
    places = bench.ask(GroupDescribe(group)).places
    return next(place.offset for place in places if (place.topic, place.partition) == (topic, partition))


def first_offset(bench: Workbench, topic: str) -> int:
    return bench.ask(TopicDescribe(topic)).partitions[0].first_offset


# How long messages are valid.


def test_messages_with_a_time_to_live_are_not_delivered_after_it(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"validity": "ttl", "ttl_seconds": 10}))
    reader = Reader(bench, "orders")
    for at in range(3):
        bench.publish("orders", [b"%d" % at])
        bench.now_us += 6_000_000
    assert bench.values("orders") == [b"2"]
    assert reader.read().next_offset == 3
    bench.tick(100)
    assert bench.values("orders", offset=first_offset(bench, "orders")) == []
    bench.publish("orders", [b"3"])
    assert bench.values("orders", offset=first_offset(bench, "orders")) == [b"3"]


def test_what_has_expired_is_looked_at_once(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"validity": "ttl", "ttl_seconds": 10}))
    for _ in range(50):
        bench.publish("orders", [b"old"])
    bench.now_us += 20_000_000
    reader = Reader(bench, "orders")
    assert reader.read() is None
    with patch.object(partition, "parse", side_effect=partition.parse) as looked:
        assert reader.read() is None
        bench.publish("orders", [b"new"])
        assert reader.read().next_offset == 51
    assert looked.call_count <= 2


def test_a_longer_time_to_live_brings_messages_back(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"validity": "ttl", "ttl_seconds": 10}))
    bench.publish("orders", [b"a"])
    bench.now_us += 20_000_000
    assert bench.values("orders") == []
    bench.ask(TopicAlter("orders", {"ttl_seconds": 100}))
    assert bench.values("orders") == [b"a"]


def test_what_every_group_has_passed_goes(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"validity": "until_consumed", "retain_seconds": 1000.0}))
    bench.publish("orders", LARGE)
    bench.tick(10)
    assert first_offset(bench, "orders") == 0  # nobody has read it yet
    bench.ask(Commit("quick", [PartitionOffset("orders", 0, 20)]))
    bench.ask(Commit("slow", [PartitionOffset("orders", 0, 5)]))
    bench.tick(10)
    assert first_offset(bench, "orders") == 5
    bench.ask(GroupDelete("slow"))
    bench.tick(10)
    assert first_offset(bench, "orders") == 20
    assert bench.publish("orders", [b"a"]).base_offset == 20


def test_nothing_goes_before_the_commit_is_safe(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("orders", {"validity": "until_consumed"}))
    bench.publish("orders", LARGE)
    bench.ask(Commit("group", [PartitionOffset("orders", 0, 5)]))
    bench.syncing_later = True
    bench.begin(Commit("group", [PartitionOffset("orders", 0, 20)]))
    bench.now_us += 10_000_000
    bench.broker.tick(bench.now_us)
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert first_offset(bench, "orders") <= position(bench, "group") == 5


@pytest.mark.parametrize("settings", [{"retain_bytes": 70_000}, {"retain_seconds": 100.0}])
@pytest.mark.parametrize("storage", ["disk", "memory"])
def test_old_messages_go_by_size_or_age(data: str, storage: str, settings: dict[str, Any]) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"storage": storage, "segment_bytes": 20_000, **settings}))
    for _ in range(40):
        bench.publish("orders", [b"x" * 10_000] * 10)
        bench.tick(10)
    assert 0 < first_offset(bench, "orders") < 400
    assert len(bench.values("orders", offset=first_offset(bench, "orders"))) < 400


def test_retention_reaches_topics_that_nobody_uses(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"retain_seconds": 100.0, "segment_bytes": 4096}))
    for _ in range(10):
        bench.publish("orders", [b"x" * 3000])
    bench = Workbench(data)
    bench.tick(1000)
    bench.tick(10)
    assert first_offset(bench, "orders") == 9


def test_only_the_last_message_of_a_key_stays(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("states", {"compact_by_key": True, "segment_bytes": 4096, "retain_seconds": 10**6}))
    for number in range(40):
        columns = {"keys": [b"%d" % (number % 3), None]}
        bench.ask(Publish("states", 0), bench.batch([b"%d" % number + b"x" * 500, b"keyless"], **columns).data)
    bench.tick(100)
    messages = [message for batch in bench.batches("states") for message in batch.messages()]
    assert sum(message.key is None for message in messages) == 40
    keyed = [message for message in messages if message.key is not None]
    assert len(keyed) < 15
    assert [int(message.value.split(b"x")[0]) for message in keyed[-3:]] == [37, 38, 39]
    assert {message.offset for message in keyed[-3:]} == {74, 76, 78}


# Memory.


@pytest.mark.parametrize("storage", ["memory", "spill"])
def test_topics_in_memory_are_empty_when_the_broker_comes_back(data: str, storage: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"storage": storage}))
    assert bench.publish("orders", LARGE).durability == Durability.MEMORY
    bench.ask(Commit("group", [PartitionOffset("orders", 0, 20)]))
    bench.close()
    bench = Workbench(data)
    assert bench.publish("orders", [b"new"]).base_offset == 20
    assert bench.values("orders", offset=20) == [b"new"]
    assert position(bench, "group") == 20


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_group_of_a_topic_in_memory_begins_again_with_the_broker(data: str, asked_first: bool) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"storage": "memory"}))
    bench.publish("orders", LARGE)
    bench.ask(Commit("group", [PartitionOffset("orders", 0, 10)]))
    bench = Workbench(data)
    first = 20 + BLOCK_MIN
    if asked_first:
        assert position(bench, "group") == first
    (place,) = bench.ask(GroupJoin("group", "anna", ["orders"])).assigned
    assert place.offset == first
    assert position(Workbench(data), "group") == first


def test_a_spilling_topic_keeps_what_does_not_fit_into_memory(data: str) -> None:
    bench = Workbench(data)
    for storage in ("memory", "spill"):
        bench.ask(TopicCreate(storage, {"storage": storage, "memory_bytes": 64 << 20}))
        for _ in range(10):
            bench.publish(storage, [b"x" * 1_000_000] * 10)
    assert len(bench.values("memory", offset=first_offset(bench, "memory"))) < 70
    assert len(bench.values("spill")) == 100


def test_messages_that_a_power_loss_took_do_not_hide_the_next_ones(data: str, disk: FaultyDisk) -> None:
    """The group's position is safe, but the written messages before it are not."""
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("orders", {"durability": "written"}))
    bench.publish("orders", LARGE, durability=2)
    bench.syncing_later = True
    bench.begin(Publish("orders", 0), bench.batch(LARGE).data)
    bench.syncing_later = False
    bench.ask(Commit("group", [PartitionOffset("orders", 0, 40)]))
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert bench.publish("orders", LARGE).base_offset == 20 + BLOCK_MIN
    assert position(bench, "group") == 20 + BLOCK_MIN
    assert bench.values("orders") == 2 * LARGE


def test_maintenance_goes_on_when_the_disk_is_full(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    for number in range(3):
        bench.ask(TopicCreate(f"topic-{number}", {"retain_bytes": 5000, "segment_bytes": 4096}))
        for _ in range(5):
            bench.publish(f"topic-{number}", [b"x" * 3000], producer=Producer(99, 0, _))
    bench = Workbench(data, disk=disk)
    disk.capacity_bytes = 0
    for _ in range(3):
        bench.tick(10)
    disk.capacity_bytes = None
    bench.tick(10)
    bench.tick(10)
    assert [first_offset(bench, f"topic-{number}") for number in range(3)] == [4, 4, 4]
