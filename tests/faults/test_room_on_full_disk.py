"""A broker on a full disk: topics can be trimmed, retention makes room, and the log says once what is the matter."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.faults.test_disk_full import SmallDisk
from tests.known import quick_place

from headrace.engines.ballast import BALLAST_BYTES
from headrace.model.batch import Producer
from headrace.model.errors import DiskFull
from headrace.model.leasing import Lease, SubscriptionCreate, SubscriptionDescribe
from headrace.model.requests import (
    Commit,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDescribe,
    TopicTrim,
    TransactionBegin,
    TransactionStage,
)
from headrace.testing.workbench import Workbench

MESSAGE = [b"x" * 200_000]
LARGE = [b"large"] * 20
"""So many messages are not gathered with others."""


@pytest.fixture
def data() -> Iterator[Path]:
    with quick_place() as path:
        yield path / "data"


@pytest.fixture
def disk() -> SmallDisk:
    return SmallDisk()


def produced(data: Path, disk: SmallDisk, **settings: Any) -> Workbench:
    """A broker with a topic in several segments, of a producer that may repeat itself."""
    bench = Workbench(str(data), disk=disk)
    bench.ask(TopicCreate("orders", {"segment_bytes": 500_000, **settings}))
    for sequence in range(20):
        bench.publish("orders", MESSAGE, producer=Producer(99, 0, sequence))
    return bench


def fill(bench: Workbench, disk: SmallDisk) -> None:
    """Take all room, with what was prepared for the journal and the topic."""
    disk.capacity_bytes = disk.used_bytes
    for request, body in ((Commit("filler", [PartitionOffset("orders", 0, 1)]), b""), (Publish("orders", 0), None)):
        with suppress(DiskFull):
            for _ in range(100_000):
                bench.ask(request, bench.batch(LARGE).data if body is None else body)
            pytest.fail("the disk is full and nobody noticed")


def first_offset(bench: Workbench, topic: str = "orders") -> int:
    return bench.ask(TopicDescribe(topic)).partitions[0].first_offset


def end_offset(bench: Workbench) -> int:
    return bench.ask(TopicDescribe("orders")).partitions[0].next_offset


def is_full(bench: Workbench) -> bool:
    try:
        bench.publish("orders", MESSAGE)
    except DiskFull:
        return True
    return False


@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_topic_can_be_trimmed_on_a_full_disk(data: Path, disk: SmallDisk, all_of_it: bool) -> None:
    """A part of it, or all of it, for which a new file has to say which offset comes next."""
    bench = produced(data, disk)
    bench.tick(10)  # which makes the ballast
    fill(bench, disk)
    assert is_full(bench)
    end = end_offset(bench)
    bound = end if all_of_it else 15
    assert bench.ask(TopicTrim("orders", {0: bound}, unread=True)).offsets == {0: bound}
    assert not bench.failures
    bench.tick(10)
    assert not is_full(bench)
    disk.capacity_bytes = None
    bench.tick(10)
    assert (data / "broker/ballast").stat().st_size == BALLAST_BYTES
    bench = Workbench(str(data), disk=disk)
    assert first_offset(bench) == bound
    assert bench.publish("orders", MESSAGE, producer=Producer(99, 0, 19)).duplicate
    assert bench.publish("orders", MESSAGE, producer=Producer(99, 0, 20)).base_offset == end + 1


def test_retention_makes_room_on_a_full_disk(data: Path, disk: SmallDisk) -> None:
    bench = produced(data, disk)
    bench.tick(10)
    bench.ask(TopicAlter("orders", {"retain_bytes": 1_000_000}))
    fill(bench, disk)
    assert is_full(bench)
    bench.tick(10)
    bench.tick(10)
    assert first_offset(bench) >= 10
    assert not is_full(bench)


def test_what_room_the_ballast_leaves_is_for_who_makes_more(data: Path, disk: SmallDisk) -> None:
    """Publishers do not take it; who publishes to a topic in memory is not concerned."""
    bench = produced(data, disk)
    bench.ask(TopicCreate("remembered", {"storage": "memory"}))
    epoch = bench.ask(TransactionBegin("import")).epoch
    bench.tick(10)
    fill(bench, disk)
    end = end_offset(bench)
    waiting = bench.begin(TopicTrim("orders", {0: end}, unread=True))
    while not bench.broker._store.ballast.dropped:
        assert bench.step()
    body = bench.batch(LARGE).data
    for request in (Publish("orders", 0), TransactionStage("import", epoch, "orders", 0)):
        assert isinstance(bench.begin(request, body), DiskFull)
    bench.begin(Publish("remembered", 0), body)
    bench.run()
    assert waiting.outcome.offsets == {0: end}
    assert bench.values("remembered") == LARGE
    disk.capacity_bytes = None
    bench.tick(10)
    assert not is_full(bench)


def test_producers_that_could_not_be_kept_are_kept_with_the_next_try(data: Path, disk: SmallDisk) -> None:
    bench = produced(data, disk)  # without ballast
    fill(bench, disk)
    for _ in range(3):
        with pytest.raises(DiskFull):
            bench.ask(TopicTrim("orders", {0: 10}, unread=True))
        assert first_offset(bench) == 0
    disk.capacity_bytes = None
    end = end_offset(bench)
    assert bench.ask(TopicTrim("orders", {0: end}, unread=True)).offsets == {0: end}
    bench = Workbench(str(data), disk=disk)
    assert bench.publish("orders", MESSAGE, producer=Producer(99, 0, 19)).duplicate


def test_who_trims_too_little_can_trim_more(data: Path, disk: SmallDisk) -> None:
    bench = produced(data, disk)
    bench.tick(10)
    fill(bench, disk)
    assert bench.ask(TopicTrim("orders", {0: 1}, unread=True)).offsets == {0: 1}  # which frees no segment
    bench.tick(10)
    with pytest.raises(DiskFull, match="trim topics"):
        bench.publish("orders", MESSAGE)
    assert bench.ask(TopicTrim("orders", {0: 15}, unread=True)).offsets == {0: 15}
    bench.tick(10)
    assert not is_full(bench)


def test_a_broker_without_room_for_ballast_works_and_leaves_nothing_of_it(data: Path, disk: SmallDisk) -> None:
    bench = produced(data, disk)
    disk.capacity_bytes = disk.used_bytes + BALLAST_BYTES // 2
    bench.tick(10)
    assert not (data / "broker/ballast").exists()
    assert not is_full(bench)
    disk.capacity_bytes = None
    bench.tick(10)
    assert (data / "broker/ballast").stat().st_size == BALLAST_BYTES


def test_a_full_disk_is_logged_once_until_there_is_room(
    data: Path, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the broker tries in vain meanwhile, and however often."""
    bench = produced(data, disk)  # without ballast
    for number in range(5):
        bench.ask(TopicCreate(f"other-{number}", {"validity": "until_consumed"}))
        bench.publish(f"other-{number}", LARGE, producer=Producer(99, 0, 0))
        bench.ask(Commit("readers", [PartitionOffset(f"other-{number}", 0, 20)]))
        bench.ask(TransactionBegin(f"import-{number}", join=True, timeout_ms=1000))
    bench.ask(SubscriptionCreate("jobs", "workers", {"lease_seconds": 1, "deliveries_max": 1}))
    bench.publish("jobs", LARGE)
    bench.ask(Lease("jobs", "workers", messages_max=20))
    fill(bench, disk)

    def logged() -> list[str]:
        lines = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
        return [line.partition(";")[0] for line in lines]

    for _ in range(40):
        bench.tick(2)
    assert first_offset(bench, "other-4") == 0
    assert logged() == ["disk full"]
    disk.capacity_bytes = None
    for _ in range(5):
        bench.tick(10)
    assert first_offset(bench, "other-4") == 20
    assert bench.ask(SubscriptionDescribe("jobs", "workers")).ready == 20  # they could not be moved, and can be leased
    assert logged() == ["disk full", "disk has room again"]
    bench.ask(TransactionBegin("late", join=True, timeout_ms=1000))
    fill(bench, disk)
    for _ in range(5):
        bench.tick(2)
    assert logged() == ["disk full", "disk has room again", "disk full"]
