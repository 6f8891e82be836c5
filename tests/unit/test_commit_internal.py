"""What the broker publishes by itself, together with facts: everything or nothing, once, whatever ends the broker."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from headrace.broker import transactions
from headrace.broker.facts import AnyFact, OffsetsCommitted
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.engines import store
from headrace.model.errors import DiskFull, HeadraceError, InvalidArgument, LogFailed, TransactionNotFound
from headrace.model.requests import (
    Commit,
    GroupDescribe,
    PartitionOffset,
    Publish,
    TopicCreate,
    TopicDelete,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def begin(
    bench: Workbench, *batches: tuple[str, bytes], moved: int | None = None
) -> PendingAnswer[list[PartitionOffset]]:
    """Carry a batch of one message to each topic, and let the group `billing` move."""
    topics = bench.broker._topics
    facts: list[AnyFact] = []
    if moved is not None:
        facts.append(OffsetsCommitted("billing", [(topics.get("bills").id, 0, moved)]))
    internal = [(topics.get_or_create(topic, bench.now_us), 0, bench.batch([value])) for topic, value in batches]
    return bench.broker._transactions.commit_internal(internal, facts, bench.now_us)


def commit_internal(bench: Workbench, *batches: tuple[str, bytes], moved: int | None = None) -> list[PartitionOffset]:
    later = begin(bench, *batches, moved=moved)
    bench.run()
    assert later.outcome is not None
    if isinstance(later.outcome, HeadraceError):
        raise later.outcome
    return later.outcome


def position(bench: Workbench) -> int | None:
    """How far the group has come; None before it has moved."""
    groups = bench.broker._ledger.state.groups
    return bench.ask(GroupDescribe("billing")).places[0].offset if "billing" in groups else None


def test_batches_and_facts_count_together(data: str) -> None:
    bench = Workbench(data)
    bench.publish("bills", [b"1"])
    bench.syncing_later = True
    later = begin(bench, ("orders", b"a"), ("bills", b"2"), ("orders", b"b"), moved=1)
    assert later.outcome is None
    assert not bench.broker.idle
    assert (bench.values("orders"), position(bench)) == ([], None)
    bench.run()
    assert later.outcome == [
        PartitionOffset("orders", 0, 0),
        PartitionOffset("bills", 0, 1),
        PartitionOffset("orders", 0, 1),
    ]
    assert bench.broker.idle
    for _ in range(2):
        assert (bench.values("orders"), bench.values("bills"), position(bench)) == ([b"a", b"b"], [b"1", b"2"], 1)
        bench = Workbench(data)


def test_facts_alone_are_only_recorded(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("bills", [b"1", b"2"])
    assert commit_internal(bench, moved=2) == []
    assert bench.broker._ledger.state.commits == 0
    disk.power_loss(Unsynced.LOST)
    assert position(Workbench(data, disk=disk)) == 2


def test_in_memory_too() -> None:
    bench = Workbench()
    bench.publish("bills", [b"1"])
    assert commit_internal(bench, ("bills", b"2"), moved=1) == [PartitionOffset("bills", 0, 1)]
    assert (bench.values("bills"), position(bench)) == ([b"1", b"2"], 1)


def test_nobody_can_ask_for_one_by_its_empty_name(data: str) -> None:
    bench = Workbench(data)
    commit_internal(bench, ("orders", b"a"))
    with pytest.raises(InvalidArgument):
        bench.ask(TransactionBegin(""))
    with pytest.raises(TransactionNotFound):
        bench.ask(TransactionCommit("", 0))


@pytest.mark.parametrize("operations", range(1, 24))
@pytest.mark.parametrize("unsynced", [Unsynced.RANDOM, Unsynced.LOST])
def test_a_power_loss_at_any_moment_leaves_all_or_nothing(data: str, operations: int, unsynced: Unsynced) -> None:
    disk = FaultyDisk(operations)
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("orders"))
    bench.publish("bills", [b"1"])
    disk.crash_after(operations)
    acknowledged = False
    try:
        commit_internal(bench, ("orders", b"a"), ("bills", b"2"), moved=1)
        acknowledged = True
        bench.tick(10)
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    for _ in range(2):
        disk.power_loss(unsynced)
        bench = Workbench(data, disk=disk)
        found = (bench.values("orders"), bench.values("bills"), position(bench))
        assert found in [([], [b"1"], None), ([b"a"], [b"1", b"2"], 1)]
        assert found[0] or not acknowledged
    commit_internal(bench, ("orders", b"next"))
    assert bench.values("orders") == [*found[0], b"next"]


def test_snapshots_between_many_of_them_repeat_and_lose_nothing(data: str) -> None:
    settings = BrokerSettings(journal_bytes=1, transactions_kept_seconds=1.0)
    disk = FaultyDisk(7)
    bench = Workbench(data, disk=disk, settings=settings)
    expected = []
    for round_ in range(30):
        value = b"%d" % round_
        if round_ % 3 == 0:  # the names of others are remembered among them
            begun = bench.ask(TransactionBegin("nightly"))
            stage = TransactionStage("nightly", begun.epoch, "orders", 0)
            bench.ask(stage, bench.batch([b"nightly"]).data)
            bench.ask(TransactionCommit("nightly", begun.epoch))
            expected.append(b"nightly")
        commit_internal(bench, ("orders", value))
        expected.append(value)
        bench.tick(2)
        if round_ % 4 == 0:
            disk.power_loss()
            bench = Workbench(data, disk=disk, settings=settings, now_us=bench.now_us)
        assert bench.values("orders") == expected


def test_a_full_disk_commits_nothing_and_later_it_works(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("bills", [b"1"])
    disk.capacity_bytes = disk.used_bytes
    with pytest.raises(DiskFull):
        [commit_internal(bench, ("bills", b"x" * 1000), moved=1) for _ in range(10**6)]
    count = len(bench.values("bills"))
    disk.capacity_bytes = None
    bench.tick(1)
    assert len(bench.values("bills")) >= count
    assert commit_internal(bench, ("bills", b"2"), moved=1) != []
    bench = Workbench(data, disk=disk)
    assert bench.values("bills")[-1] == b"2"


def test_when_the_journal_is_full_the_facts_do_not_count(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("bills", [b"1", b"2"])
    disk.capacity_bytes = disk.used_bytes
    answers: list[Any] = [None]
    while not isinstance(answers[-1], DiskFull):
        later = bench.begin(Commit("billing", [PartitionOffset("bills", 0, 1)]))
        bench.run()
        answers.append(getattr(later, "outcome", later))
    with pytest.raises(DiskFull):
        commit_internal(bench, ("bills", b"3"), moved=2)
    disk.capacity_bytes = None
    bench.tick(1)
    assert (bench.values("bills"), position(bench)) == ([b"1", b"2"], 1)


def test_a_failing_disk_is_told(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("bills", [b"1"])
    disk.fail_sync()
    with pytest.raises(LogFailed):
        commit_internal(bench, ("bills", b"2"), moved=1)
    assert (bench.values("bills"), position(bench)) == ([b"1"], None)
    bench = Workbench(data, disk=disk)
    assert (bench.values("bills"), position(bench)) == ([b"1"], None)


def test_a_topic_that_is_deleted_on_the_way_takes_its_messages_along(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("gone"))
    bench.syncing_later = True
    later = begin(bench, ("gone", b"a"), ("kept", b"b"))
    bench.begin(TopicDelete("gone"))
    bench.run()
    assert later.outcome == [PartitionOffset("kept", 0, 0)]
    assert Workbench(data).values("kept") == [b"b"]


def test_what_waits_in_the_staging_log_is_not_trimmed(data: str) -> None:
    small = LogSettings(segment_bytes=4096)
    with patch.object(store, "_STAGING_SETTINGS", small), patch.object(transactions, "_TRIM_BYTES", 100):
        bench = Workbench(data)
        bench.publish("orders", [b"."])
        for _ in range(10):
            commit_internal(bench, ("orders", b"x" * 1000))
        bench.syncing_later = True
        later = begin(bench, ("orders", b"last"))
        for _ in range(10):  # others fill the staging log meanwhile
            begin(bench, ("orders", b"y" * 1000))
        bench.broker.tick(bench.now_us)
        bench.run()
        assert later.outcome == [PartitionOffset("orders", 0, 11)]
        bench.tick(1)
        assert sum(path.stat().st_size for path in Path(data, "broker", "staging").glob("*.seg")) < 100_000
        assert bench.values("orders")[11] == b"last"


def test_internal_batches_and_publishers_are_in_the_order_in_which_they_came(data: str) -> None:
    bench = Workbench(data)
    gathered = bench.begin(Publish("orders", 0), bench.batch([b"1"]).data)
    begin(bench, ("orders", b"2"))
    bench.run()
    bench.publish("orders", [b"3"])
    assert gathered.outcome.base_offset == 0
    assert bench.values("orders") == [b"1", b"2", b"3"]
