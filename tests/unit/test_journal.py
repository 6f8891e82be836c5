"""The journal: facts in order, and snapshots that keep everything that counts and nothing else."""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from headrace.broker.facts import (
    BrokerState,
    Committed,
    OffsetsCommitted,
    ProducersCheckpointed,
    TopicDeleted,
    TopicSet,
    TransactionApplied,
    encode_fact,
)
from headrace.broker.settings import BrokerSettings
from headrace.engines import journal as journals
from headrace.engines import store
from headrace.engines.journal import Journal
from headrace.model.batch import Producer
from headrace.model.errors import DiskFull, HeadraceError, InvalidArgument
from headrace.model.requests import (
    Commit,
    GroupDelete,
    GroupDescribe,
    GroupJoin,
    GroupList,
    Info,
    PartitionOffset,
    TopicCreate,
    TopicDelete,
    TopicList,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, InlineWorker, Unsynced
from headrace.testing.workbench import Workbench

SMALL = LogSettings(segment_bytes=4096)
TINY = BrokerSettings(journal_bytes=1)
NOW = 1_000


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def opened(data: str, disk: FaultyDisk) -> Journal:
    return Journal(FileLog(StorageRuntime(disk, flusher=InlineWorker(), preparer=InlineWorker()), data, SMALL))


def replayed(journal: Journal) -> list[bytes]:
    """What counts."""
    facts: list[bytes] = []
    for fact in journal.facts():
        if fact is None:
            facts.clear()
        else:
            facts.append(fact)
    return facts


# The engine.


def test_facts_come_back_in_order(data: str, disk: FaultyDisk) -> None:
    journal = opened(data, disk)
    ends = [journal.write([b"a", b"b"], NOW), journal.write([b"c"], NOW)]
    assert ends == [2, 3]
    assert replayed(opened(data, disk)) == [b"a", b"b", b"c"]


def test_a_snapshot_takes_the_place_of_what_came_before(data: str, disk: FaultyDisk) -> None:
    journal = opened(data, disk)
    journal.write([b"a", b"b"], NOW)
    begin = journal.write_snapshot([b"both"], NOW)
    journal.write([b"c"], NOW)
    assert replayed(opened(data, disk)) == [b"both", b"c"]
    journal.forget_before(begin)
    assert replayed(opened(data, disk)) == [b"both", b"c"]


def test_a_large_snapshot_is_written_in_parts(data: str, disk: FaultyDisk) -> None:
    journal = opened(data, disk)
    facts = [b"%d" % number for number in range(2500)]
    journal.write_snapshot(iter(facts), NOW)
    assert replayed(opened(data, disk)) == facts
    with patch.object(journals, "_SNAPSHOT_BYTES", 500):
        journal.write_snapshot(iter(facts), NOW)
    assert replayed(opened(data, disk)) == facts


@pytest.mark.parametrize("operations", range(1, 12))
def test_a_snapshot_that_was_cut_short_does_not_count(data: str, operations: int) -> None:
    disk = FaultyDisk(operations)
    journal = opened(data, disk)
    journal.write([b"a", b"b"], NOW)
    journal.sync()
    disk.crash_after(operations)
    try:
        with patch.object(journals, "_SNAPSHOT_RECORDS", 1):
            journal.write_snapshot([b"A", b"B"], NOW)
        journal.write([b"c"], NOW)
        journal.forget_before(2)
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    disk.power_loss(Unsynced.RANDOM)
    journal = opened(data, disk)
    assert replayed(journal) in ([b"a", b"b"], [b"A", b"B"], [b"A", b"B", b"c"])
    journal.write([b"d"], NOW)
    assert replayed(opened(data, disk))[-1] == b"d"


def test_a_part_of_a_snapshot_is_forgotten_when_facts_follow(data: str, disk: FaultyDisk) -> None:
    journal = opened(data, disk)
    journal.write([b"a"], NOW)
    disk.capacity_bytes = disk.used_bytes
    with pytest.raises(DiskFull):
        journal.write_snapshot([b"A" * 3000] * 100, NOW)
    disk.capacity_bytes = None
    journal.write([b"b"], NOW)
    assert replayed(opened(data, disk)) == [b"a", b"b"]


# All facts together.


def state_of(*facts: Any) -> BrokerState:
    state = BrokerState()
    for fact in facts:
        state.apply_bytes(encode_fact(fact))
    return state


def snapshot_of(state: BrokerState) -> BrokerState:
    return state_of(*state.facts())


ORDERS = TopicSet(1, "orders", 0, {"partitions": 2})


def commit(number: int, name: str = "nightly", **more: Any) -> Committed:
    facts: dict[str, Any] = {"stages": [(number, 1, 0)], "group": "", "places": [], **more}
    return Committed(number, name, number, number, number, **facts)


def test_a_snapshot_does_not_move_groups_back() -> None:
    """The group has moved on since the transaction, which is not settled yet."""
    moving = commit(1, group="billing", places=[(1, 0, 5)])
    state = state_of(ORDERS, moving, OffsetsCommitted("billing", [(1, 0, 9)]))
    for settled in ([], [TransactionApplied(1)]):
        assert snapshot_of(state_of(*state.facts(), *settled)).groups == {"billing": {(1, 0): 9}}


def test_a_snapshot_does_not_bring_deleted_groups_back(data: str) -> None:
    bench = Workbench(data, settings=TINY)
    bench.publish("orders", [b"a"])
    begun = bench.ask(TransactionBegin("nightly"))
    places = [PartitionOffset("orders", 0, 1)]
    bench.ask(TransactionCommit("nightly", begun.epoch, None, "billing", "", places))
    bench.ask(GroupDelete("billing"))
    for _ in range(20):
        bench.ask(Commit("other", [PartitionOffset("orders", 0, 1)]))
    assert [group.group for group in Workbench(data, settings=TINY).ask(GroupList()).groups] == ["other"]


def test_a_snapshot_has_every_transaction_that_is_not_settled() -> None:
    state = state_of(ORDERS, commit(1), commit(2), commit(3, "hourly"), TransactionApplied(2))
    state.forget_transactions(10**9)
    again = snapshot_of(state)
    assert {number: fact.stages for number, fact in again.unsettled.items()} == {1: [(1, 1, 0)], 3: [(3, 1, 0)]}
    assert again.commits == 3


def test_a_snapshot_knows_the_number_of_the_last_commit_though_its_name_is_old() -> None:
    state = state_of(commit(1), commit(2, "hourly"), TransactionApplied(1), TransactionApplied(2))
    state.forget_transactions(10**9)
    again = snapshot_of(state)
    assert list(again.transactions) == ["hourly"]
    assert (again.commits, again.unsettled) == (2, {})


def test_what_is_known_of_producers_goes_with_their_topic() -> None:
    kept = [ProducersCheckpointed(f"1/{number}", b"x") for number in (0, 1)]
    other = ProducersCheckpointed("11/0", b"y")
    state = state_of(ORDERS, *kept, other, TopicDeleted(1))
    assert state.producers == snapshot_of(state).producers == {"11/0": b"y"}


def test_the_last_id_is_known_though_its_topic_is_gone() -> None:
    state = state_of(ORDERS, TopicSet(2, "acme/bills", 0, {}), TopicDeleted(2))
    assert snapshot_of(state).topic_id == 2
    assert list(snapshot_of(state).topics) == [1]


# At work.


def test_nothing_is_lost_by_snapshots(data: str) -> None:
    with patch.object(store, "_JOURNAL_SETTINGS", SMALL):
        bench = Workbench(data, settings=TINY)
        for number in range(40):
            bench.publish(f"topic-{number % 5}", [b"%d" % number], producer=Producer(99, 0, number // 5))
            bench.ask(Commit(f"group-{number % 3}", [PartitionOffset(f"topic-{number % 5}", 0, number // 5)]))
            begun = bench.ask(TransactionBegin(f"name-{number % 4}"))
            body = bench.batch([b"from %d" % number]).data
            bench.ask(TransactionStage(f"name-{number % 4}", begun.epoch, "all", 0), body)
            bench.ask(TransactionCommit(f"name-{number % 4}", begun.epoch))
            if number % 10 == 9:
                before = {group: bench.ask(GroupDescribe(f"group-{group}")).places for group in range(3)}
                if number % 20 == 9:
                    bench.close()
                bench = Workbench(data, settings=TINY)
                assert {group: bench.ask(GroupDescribe(f"group-{group}")).places for group in range(3)} == before
        assert bench.values("all") == [b"from %d" % number for number in range(40)]
        assert [len(bench.values(f"topic-{number}")) for number in range(5)] == [8] * 5
        assert bench.ask(TransactionBegin("name-3")).sequence == 10
        size = sum(path.stat().st_size for path in Path(data, "broker", "journal").glob("*.seg"))
        assert size < 200_000


def test_a_snapshot_comes_only_when_much_was_written_since_the_last(data: str, disk: FaultyDisk) -> None:
    """It does not come again and again because the file in which it is cannot be removed yet."""
    bench = Workbench(data, disk=disk, settings=BrokerSettings(journal_bytes=2000))
    bench.publish("orders", [b"a"])
    for number in range(50):
        bench.ask(Commit(f"group-{number}", [PartitionOffset("orders", 0, 1)]))
    before = disk.bytes_written
    for _ in range(20):
        bench.ask(Commit("group-1", [PartitionOffset("orders", 0, 1)]))
    assert disk.bytes_written - before < 20 * 1000


def test_a_snapshot_that_does_not_fit_on_the_disk_is_no_error_of_who_asked(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk, settings=BrokerSettings(journal_bytes=10_000))
    for number in range(20):
        bench.ask(TopicCreate(f"topic-{number}" + "x" * 80))
    disk.capacity_bytes = 0
    done = refused = 0
    while refused < 3:
        try:
            bench.ask(TopicCreate(f"more-{done}" + "x" * 80))
            done += 1
        except DiskFull:
            refused += 1
    disk.capacity_bytes = None
    assert len(bench.ask(TopicList()).topics) == 20 + done
    bench = Workbench(data, disk=disk)
    assert len(bench.ask(TopicList()).topics) == 20 + done
    bench.ask(TopicDelete("more-0" + "x" * 80))


def test_the_journal_is_synced_though_nobody_waits_for_it(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.ask(GroupJoin("billing", "anna", ["orders"], missing="create"))
    bench.tick(10)
    disk.power_loss(Unsynced.LOST)
    assert Workbench(data, disk=disk).ask(Info()).topics == 1


def test_a_broker_keeps_its_name(data: str) -> None:
    bench = Workbench(data)
    assert bench.broker.broker_id == "workbench"
    bench.close()
    assert Workbench(data).ask(Info()).broker_id == "workbench"


def test_a_damaged_journal_is_no_reason_to_begin_anew(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    for number in range(10):
        bench.ask(TopicCreate(f"topic-{number}"))
    bench.close()
    path = next(Path(data, "broker", "journal").glob("*.seg"))
    disk.flip_bit(str(path), 600)
    with pytest.raises(HeadraceError):
        Workbench(data, disk=disk)


SECONDS = [name for name, kind in BrokerSettings.__annotations__.items() if kind is float]


@pytest.mark.parametrize(
    "wrong",
    [
        {"topics_max": 0},
        {"maintenance_seconds": 0.0},
        {"compact_seconds": -1.0},
        {"journal_bytes": 0},
        {"transactions_kept_seconds": -1.0},
        *({name: number} for name in SECONDS for number in (math.nan, math.inf, -math.inf, 1e308)),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        BrokerSettings(**wrong)
