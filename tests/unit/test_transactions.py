"""Transactions: everything or nothing, once, however often it is asked for and whatever ends the broker on the way."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from headrace.broker import transactions
from headrace.broker.settings import BrokerSettings
from headrace.engines import store
from headrace.model.batch import Producer
from headrace.model.errors import (
    Busy,
    DiskFull,
    GroupInUse,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    LogFailed,
    MemberFenced,
    MessageTooLarge,
    PartitionNotFound,
    TransactionFenced,
    TransactionNotFound,
)
from headrace.model.requests import (
    Commit,
    GroupDescribe,
    GroupJoin,
    GroupLeave,
    GroupSeek,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicList,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench


def begin(bench: Workbench, name: str = "nightly", **more: Any) -> Any:
    return bench.ask(TransactionBegin(name, **more))


def stage(bench: Workbench, begun: Any, topic: str, *values: bytes, partition: int = 0, name: str = "nightly") -> Any:
    request = TransactionStage(name, begun.epoch, topic, partition)
    return bench.ask(request, bench.batch(list(values)).data).stage


def commit(bench: Workbench, begun: Any, name: str = "nightly", **more: Any) -> Any:
    return bench.ask(TransactionCommit(name, begun.epoch, **more))


def position(bench: Workbench, group: str = "billing") -> int:
    return bench.ask(GroupDescribe(group)).places[0].offset


def fill(bench: Workbench, disk: FaultyDisk, topic: str) -> None:
    """Fill the disk, and what room a partition has left in its file."""
    disk.capacity_bytes = disk.used_bytes
    while not isinstance(bench.begin(Publish(topic, 0), bench.batch([b"."] * 20).data), DiskFull):
        bench.run()


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


# Committing.


def test_nobody_sees_anything_before_the_commit_and_everybody_all_of_it_after(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    begun = begin(bench)
    stage(bench, begun, "orders", b"a", b"b")
    stage(bench, begun, "orders", b"c", partition=1)
    stage(bench, begun, "bills", b"d")
    assert [bench.values("orders"), bench.values("orders", 1), bench.values("bills")] == [[], [], []]
    committed = commit(bench, begun)
    assert (committed.sequence, committed.repeated) == (0, False)
    assert committed.places == [
        PartitionOffset("orders", 0, 0),
        PartitionOffset("orders", 1, 0),
        PartitionOffset("bills", 0, 0),
    ]
    assert [bench.values("orders"), bench.values("orders", 1), bench.values("bills")] == [[b"a", b"b"], [b"c"], [b"d"]]


def test_a_commit_that_is_repeated_changes_nothing(data: str) -> None:
    bench = Workbench(data)
    begun = begin(bench)
    stage(bench, begun, "orders", b"a")
    commit(bench, begun)
    for _ in range(2):
        assert commit(bench, begun).repeated
        bench = Workbench(data)
    assert bench.values("orders") == [b"a"]


def test_a_sequence_is_done_once(data: str) -> None:
    bench = Workbench(data)
    first = begin(bench, sequence=7)
    stage(bench, first, "orders", b"a")
    commit(bench, first)
    bench = Workbench(data)
    for sequence in (7, 6, 0):
        again = begin(bench, sequence=sequence)
        assert (again.committed, again.sequence) == (True, sequence)
    following = begin(bench)
    assert (following.committed, following.sequence) == (False, 8)
    assert begin(bench, "other").sequence == 0


def test_only_some_of_what_was_staged_in_another_order(data: str) -> None:
    """As when a task was done twice: only the stages of one attempt are committed."""
    bench = Workbench(data)
    begun = begin(bench)
    stages = [stage(bench, begun, "orders", value) for value in (b"a", b"b", b"c")]
    committed = commit(bench, begun, stages=[stages[2], stages[0], stages[2]])
    assert bench.values("orders") == [b"c", b"a"]
    assert [place.offset for place in committed.places] == [0, 1]


def test_a_commit_of_nothing_counts_too(data: str) -> None:
    bench = Workbench(data)
    begun = begin(bench)
    stage(bench, begun, "orders", b"a")
    assert commit(bench, begun, stages=[]).places == []
    assert bench.values("orders") == []
    assert commit(bench, begun).repeated


def test_stages_of_others_are_refused(data: str) -> None:
    bench = Workbench(data)
    mine, other = begin(bench), begin(bench, "other")
    theirs = stage(bench, other, "orders", b"theirs", name="other")
    with pytest.raises(InvalidArgument):
        commit(bench, mine, stages=[theirs])
    with pytest.raises(InvalidArgument):
        commit(bench, mine, stages=[99])
    commit(bench, other, "other")


def test_transactions_and_publishers_are_in_the_order_in_which_they_came(data: str) -> None:
    bench = Workbench(data)
    begun = begin(bench)
    stage(bench, begun, "orders", b"2")
    gathered = bench.begin(Publish("orders", 0), bench.batch([b"1"]).data)
    bench.begin(TransactionCommit("nightly", begun.epoch))
    bench.run()
    bench.publish("orders", [b"3"])
    assert gathered.outcome.base_offset == 0
    assert bench.values("orders") == [b"1", b"2", b"3"]


def test_in_memory_too() -> None:
    bench = Workbench()
    begun = begin(bench)
    stage(bench, begun, "orders", b"a")
    assert commit(bench, begun).places == [PartitionOffset("orders", 0, 0)]
    assert bench.values("orders") == [b"a"]


# Not committing.


def test_an_aborted_transaction_has_never_been(data: str) -> None:
    bench = Workbench(data)
    begun = begin(bench)
    stage(bench, begun, "orders", b"a")
    bench.ask(TransactionAbort("nightly", begun.epoch))
    for request in (TransactionCommit("nightly", begun.epoch), TransactionAbort("nightly", begun.epoch)):
        with pytest.raises(TransactionNotFound):
            bench.ask(request)
    assert bench.values("orders") == []
    assert begin(bench).sequence == 0


def test_who_begins_anew_takes_over(data: str) -> None:
    bench = Workbench(data)
    zombie = begin(bench)
    stage(bench, zombie, "orders", b"zombie")
    begun = begin(bench)
    for request in (TransactionCommit("nightly", zombie.epoch), TransactionAbort("nightly", zombie.epoch)):
        with pytest.raises(TransactionFenced):
            bench.ask(request)
    with pytest.raises(TransactionFenced):
        stage(bench, zombie, "orders", b"zombie")
    stage(bench, begun, "orders", b"alive")
    commit(bench, begun)
    with pytest.raises(TransactionNotFound):
        commit(bench, zombie)
    assert bench.values("orders") == [b"alive"]


def test_a_transaction_of_which_nothing_is_heard_is_aborted(data: str) -> None:
    bench = Workbench(data)
    begun = begin(bench, timeout_ms=1000)
    for _ in range(3):
        stage(bench, begun, "orders", b"a")
        bench.tick(0.9)
    bench.tick(0.2)
    with pytest.raises(TransactionNotFound):
        commit(bench, begun)


def test_open_transactions_end_with_the_broker(data: str) -> None:
    bench = Workbench(data)
    before = begin(bench)
    stage(bench, before, "orders", b"a")
    bench = Workbench(data)
    with pytest.raises(TransactionNotFound):
        commit(bench, before)
    assert begin(bench).epoch > before.epoch


def test_no_power_loss_brings_an_epoch_back(data: str) -> None:
    disk = FaultyDisk()
    epochs = []
    for _ in range(3):
        bench = Workbench(data, disk=disk)
        epochs.append(begin(bench).epoch)
        disk.power_loss(Unsynced.LOST)
    assert sorted(set(epochs)) == epochs


@pytest.mark.parametrize("name", ["", "a" * 201, "a\nb"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(InvalidArgument):
        begin(Workbench(), name)


@pytest.mark.parametrize("timeout_ms", [0, -1, 3_600_001])
def test_times_that_cannot_be(timeout_ms: int) -> None:
    with pytest.raises(InvalidArgument):
        begin(Workbench(), timeout_ms=timeout_ms)


@pytest.mark.parametrize("sequence", [-1, 2**63, 2**64 - 1])
def test_sequences_that_cannot_be(sequence: int) -> None:
    with pytest.raises(InvalidArgument):
        begin(Workbench(), sequence=sequence)


def test_only_so_many_are_open_at_once() -> None:
    with patch.object(transactions, "TRANSACTIONS_MAX", 2):
        bench = Workbench()
        first, _ = begin(bench, "a"), begin(bench, "b")
        with pytest.raises(LimitExceeded):
            begin(bench, "c")
        assert begin(bench, "a").epoch > first.epoch
        bench.tick(100)
        begin(bench, "c")


def test_what_cannot_be_staged(data: str) -> None:
    bench = Workbench(data, settings=BrokerSettings(staged_bytes_max=2000))
    bench.ask(TopicCreate("orders", {"message_bytes_max": 100}))
    begun = begin(bench)
    with pytest.raises(InvalidArgument):
        bench.ask(TransactionStage("nightly", begun.epoch, "orders", 0), bench.batch([b"a"], Producer(99, 0, 0)).data)
    with pytest.raises(MessageTooLarge):
        stage(bench, begun, "orders", b"x" * 101)
    with pytest.raises(PartitionNotFound):
        stage(bench, begun, "orders", b"a", partition=1)
    with pytest.raises(LimitExceeded):
        [stage(bench, begun, "orders", b"x" * 100) for _ in range(20)]
    commit(bench, begun)
    stage(bench, begin(bench), "orders", b"there is room again")


# Positions of groups.


def test_a_group_moves_with_the_transaction(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", [b"a", b"b", b"c"])
    bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1)]))
    begun = begin(bench)
    stage(bench, begun, "bills", b"bill")
    move: dict[str, Any] = {"group": "billing", "places": [PartitionOffset("orders", 0, 3)]}
    with pytest.raises(InvalidArgument):
        commit(bench, begun, group="billing", places=[PartitionOffset("orders", 0, 4)])
    assert position(bench) == 1
    commit(bench, begun, **move)
    assert position(bench) == 3
    bench.ask(GroupSeek("billing", "orders", to="earliest"))
    assert commit(bench, begun, **move).repeated
    assert position(bench) == position(Workbench(data)) == 0


def test_a_member_that_was_thought_dead_cannot_commit(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", [b"a"])
    zombie = bench.ask(GroupJoin("billing", "zombie", ["orders"], session_ms=1000)).assigned[0]
    begun = begin(bench)
    stage(bench, begun, "bills", b"bill")
    bench.tick(2)
    bench.ask(GroupJoin("billing", "alive", ["orders"]))
    with pytest.raises(GroupInUse):
        commit(bench, begun, group="billing", places=[zombie])
    bench.ask(GroupJoin("billing", "zombie", ["orders"]))
    with pytest.raises(MemberFenced):
        commit(bench, begun, group="billing", member="zombie", places=[zombie])
    assert bench.values("bills") == []


def test_a_member_that_loses_its_partition_while_the_disk_is_slow_cannot_commit(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", [b"a"])
    place = bench.ask(GroupJoin("billing", "slow", ["orders"])).assigned[0]
    begun = begin(bench)
    stage(bench, begun, "bills", b"bill")
    stage(bench, begun, "bills", b"another")
    bench.syncing_later = True
    later = bench.begin(
        TransactionCommit(
            "nightly", begun.epoch, None, "billing", "slow", [PartitionOffset("orders", 0, 1, place.epoch)]
        )
    )
    bench.begin(GroupLeave("billing", "slow"))
    bench.run()
    assert isinstance(later.outcome, HeadraceError)
    assert position(bench) == 0
    assert bench.values("bills") == []


# When topics change.


def test_topics_that_are_deleted_before_the_commit(data: str) -> None:
    bench = Workbench(data)
    begun = begin(bench)
    kept, gone = stage(bench, begun, "kept", b"a"), stage(bench, begun, "gone", b"b")
    bench.ask(TopicDelete("gone"))
    with pytest.raises(InvalidArgument):
        commit(bench, begun)
    with pytest.raises(InvalidArgument):
        commit(bench, begun, stages=[gone])
    commit(bench, begun, stages=[kept])
    assert bench.values("kept") == [b"a"]
    assert [info.topic for info in bench.ask(TopicList()).topics] == ["kept"]


def test_topics_that_are_deleted_while_the_commit_is_on_its_way(data: str) -> None:
    bench = Workbench(data)
    begun = begin(bench)
    stage(bench, begun, "gone", b"a")
    stage(bench, begun, "kept", b"b")
    bench.syncing_later = True
    later = bench.begin(TransactionCommit("nightly", begun.epoch))
    bench.begin(TopicDelete("gone"))
    bench.run()
    assert later.outcome.places == [PartitionOffset("kept", 0, 0)]
    bench = Workbench(data)
    assert bench.values("kept") == [b"b"]
    assert [info.topic for info in bench.ask(TopicList()).topics] == ["kept"]


def test_a_topic_altered_meanwhile_is_no_hindrance(data: str) -> None:
    bench = Workbench(data)
    begun = begin(bench)
    stage(bench, begun, "orders", b"x" * 1000)
    bench.ask(TopicAlter("orders", {"message_bytes_max": 10, "partitions": 3}))
    commit(bench, begun)
    assert bench.values("orders") == [b"x" * 1000]


# When the disk fails.


@pytest.mark.parametrize("operations", range(1, 24))
def test_a_power_loss_at_any_moment_of_a_commit_leaves_all_or_nothing(data: str, operations: int) -> None:
    disk = FaultyDisk(operations)
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("orders"))
    bench.publish("bills", [b"1"])
    begun = begin(bench)
    stage(bench, begun, "orders", b"a")
    stage(bench, begun, "bills", b"2")
    disk.crash_after(operations)
    acknowledged = False
    try:
        commit(bench, begun, group="billing", places=[PartitionOffset("bills", 0, 1)])
        acknowledged = True
        bench.tick(10)
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    disk.power_loss(Unsynced.RANDOM)
    bench = Workbench(data, disk=disk)
    found = (bench.values("orders"), bench.values("bills"))
    done = bench.ask(TransactionBegin("nightly", 0)).committed
    assert found == (([b"a"], [b"1", b"2"]) if done else ([], [b"1"]))
    assert done or not acknowledged
    if done:
        assert position(bench) == 1
        assert commit(bench, begun).repeated


def test_a_transaction_that_is_told_to_be_committed_is(data: str) -> None:
    """Another process asks while the first one's commit is on its way to the disk."""
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    begun = begin(bench, sequence=0)
    bench.syncing_later = True
    bench.begin(TransactionCommit("nightly", begun.epoch))
    other = bench.begin(TransactionBegin("nightly", 0))
    again = bench.begin(TransactionCommit("nightly", begun.epoch))
    assert (other.outcome, again.outcome) == (None, None)
    bench.run()
    assert (other.outcome.committed, again.outcome.repeated) == (True, True)
    disk.power_loss(Unsynced.LOST)
    assert begin(Workbench(data, disk=disk), sequence=0).committed


def test_while_it_is_being_committed_nothing_else_is_done_to_it(data: str) -> None:
    bench = Workbench(data)
    begun = begin(bench)
    stage(bench, begun, "orders", b"a")
    stage(bench, begun, "orders", b"b")
    bench.syncing_later = True
    later = bench.begin(TransactionCommit("nightly", begun.epoch))
    for request in (
        TransactionCommit("nightly", begun.epoch),
        TransactionAbort("nightly", begun.epoch),
        TransactionBegin("nightly"),
    ):
        assert isinstance(bench.begin(request), Busy)
    bench.now_us += 10**9
    bench.broker.tick(bench.now_us)  # its time is up, but it was asked for in time
    bench.run()
    assert later.outcome.sequence == 0
    assert bench.values("orders") == [b"a", b"b"]


def test_a_full_disk_commits_nothing_and_later_it_works(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"a"])
    begun = begin(bench)
    stage(bench, begun, "orders", b"b")
    disk.capacity_bytes = disk.used_bytes
    refused: list[Any] = []
    while not any(isinstance(answer, DiskFull) for answer in refused[-1:]):
        later = bench.begin(Commit("somebody", [PartitionOffset("orders", 0, 0)]))
        bench.run()
        refused.append(getattr(later, "outcome", later))
    with pytest.raises(DiskFull):
        commit(bench, begun)
    assert bench.values("orders") == [b"a"]
    disk.capacity_bytes = None
    commit(bench, begun)
    assert bench.values("orders") == [b"a", b"b"]


def test_what_is_committed_on_a_full_disk_is_seen_when_there_is_room(data: str) -> None:
    """The facts of the commits fitted into the journal: they count, are answered, and hold up nobody else."""
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    begun = {}
    for name, topics in (("nightly", ["full", "other"]), ("hourly", ["other"]), ("daily", ["third"])):
        begun[name] = begin(bench, name)
        for topic in topics:
            bench.publish(topic, [b"."])
            stage(bench, begun[name], topic, b"x" * 1000, name.encode(), name=name)
    fill(bench, disk, "full")
    for name, places in (("nightly", []), ("hourly", []), ("daily", [PartitionOffset("third", 0, 1)])):
        assert commit(bench, begun[name], name).places == places
        assert commit(bench, begun[name], name).repeated
    assert bench.values("third")[-1] == b"daily"
    assert b"hourly" not in bench.values("other")  # not before the one that came before
    disk.capacity_bytes = None
    bench.tick(1)
    assert bench.values("other")[2:] == [b"x" * 1000, b"nightly", b"x" * 1000, b"hourly"]
    assert bench.values("full")[-1] == b"nightly"
    assert bench.broker.idle


def test_a_partition_that_failed_holds_up_only_what_goes_there(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("good", [b"."])
    bench.publish("bad", [b"."])
    disk.fail_sync()
    with pytest.raises(LogFailed):
        bench.publish("bad", [b"lost"])
    for name, topic in (("nightly", "bad"), ("hourly", "good")):
        begun = begin(bench, name)
        stage(bench, begun, topic, name.encode(), name=name)
        commit(bench, begun, name)
    assert bench.values("good") == [b".", b"hourly"]
    bench = Workbench(data, disk=disk)
    assert bench.values("bad")[-1:] == [b"nightly"]


def test_a_failing_disk_answers_everybody(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"."])
    first, second = begin(bench), begin(bench, "hourly")
    stage(bench, first, "orders", b"a")
    stage(bench, second, "orders", b"b", name="hourly")
    bench.syncing_later = True
    asked = [bench.begin(TransactionCommit("nightly", first.epoch))]
    asked += [bench.begin(TransactionCommit("hourly", second.epoch))]
    asked += [bench.begin(Publish("orders", 0), bench.batch([b"c"]).data)]
    disk.fail_sync(9)
    bench.run()
    assert all(isinstance(later.outcome, LogFailed) for later in asked)
    bench.tick(10)


# The staging log.


SMALL = LogSettings(segment_bytes=4096)


def many(bench: Workbench, count: int) -> Sequence[Any]:
    answers = []
    for _ in range(count):
        begun = begin(bench)
        stage(bench, begun, "orders", b"x" * 1000)
        answers.append(commit(bench, begun))
    return answers


def test_what_was_staged_is_removed_when_it_is_not_needed_any_more(data: str) -> None:
    with patch.object(store, "_STAGING_SETTINGS", SMALL), patch.object(transactions, "_TRIM_BYTES", 5000):
        bench = Workbench(data)
        many(bench, 20)
        bench.tick(1)
        assert sum(path.stat().st_size for path in Path(data, "broker", "staging").glob("*.seg")) < 100_000
        bench = Workbench(data)
        many(bench, 2)
        assert len(bench.values("orders")) == 22


def test_nothing_is_removed_that_a_power_loss_would_ask_for_again(data: str) -> None:
    disk = FaultyDisk()
    with patch.object(store, "_STAGING_SETTINGS", SMALL), patch.object(transactions, "_TRIM_BYTES", 100):
        bench = Workbench(data, disk=disk)
        bench.ask(TopicCreate("orders", {"durability": "written"}))
        many(bench, 3)
        bench.syncing_later = True
        bench.broker.tick(bench.now_us)
        disk.power_loss(Unsynced.LOST)
        bench = Workbench(data, disk=disk)
        assert len(bench.values("orders")) == 3
        many(bench, 1)
        assert len(bench.values("orders")) == 4


# Names.


def test_names_that_were_not_used_for_long_are_forgotten(data: str) -> None:
    settings = BrokerSettings(journal_bytes=1, transactions_kept_seconds=100.0)
    bench = Workbench(data, settings=settings)
    for name in ("old", "nightly"):
        begun = begin(bench, name)
        stage(bench, begun, "orders", name.encode(), name=name)
        commit(bench, begun, name)
        bench.now_us += 101_000_000
    for _ in range(20):
        bench.ask(Commit("somebody", [PartitionOffset("orders", 0, 0)]))
    for _ in range(2):
        assert begin(bench, "old", sequence=0).committed is False
        assert begin(bench, "nightly", sequence=0).committed  # the last of all tells how many there were
        bench = Workbench(data, settings=settings, now_us=bench.now_us)
    begun = begin(bench, "old")
    stage(bench, begun, "orders", b"new", name="old")
    commit(bench, begun, "old")
    assert bench.values("orders") == [b"old", b"nightly", b"new"]
