"""Transactions that processes share: one epoch for all who join, and no end by the broker's end."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import headrace
from headrace.broker import commit_applier, staging, transactions
from headrace.broker.settings import BrokerSettings
from headrace.engines import store
from headrace.model.batch import Columns, encode
from headrace.model.errors import (
    Busy,
    DiskFull,
    InvalidArgument,
    PartitionNotFound,
    TransactionFenced,
    TransactionNotFound,
)
from headrace.model.requests import (
    Commit,
    Info,
    PartitionOffset,
    Publish,
    TopicCreate,
    TopicDelete,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

NAME = "spark:query"


def join(bench: Workbench, sequence: int | None = 0, **more: Any) -> Any:
    return bench.ask(TransactionBegin(NAME, sequence, join=True, **more))


def stage(bench: Workbench, begun: Any, topic: str, *values: bytes, partition: int = 0) -> int:
    request = TransactionStage(NAME, begun.epoch, topic, partition)
    number: int = bench.ask(request, bench.batch(list(values)).data).stage
    return number


def commit(bench: Workbench, begun: Any, *stages: int) -> Any:
    return bench.ask(TransactionCommit(NAME, begun.epoch, list(stages)))


def sync_journal(bench: Workbench) -> None:
    """Whoever commits anything has the journal synced."""
    bench.ask(Commit("somebody", []))


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


# Sharing.


def test_all_who_join_stage_into_one_and_one_of_them_commits(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    one, other = join(bench), join(bench)
    assert one.epoch == other.epoch
    stages = [stage(bench, one, "orders", b"a"), stage(bench, other, "orders", b"b", partition=1)]
    zombie = stage(bench, join(bench), "orders", b"zombie")
    stages.append(stage(bench, one, "orders", b"c"))
    assert len({*stages, zombie}) == 4
    assert commit(bench, other, *stages).places == [
        PartitionOffset("orders", 0, 0),
        PartitionOffset("orders", 1, 0),
        PartitionOffset("orders", 0, 1),
    ]
    assert [bench.values("orders"), bench.values("orders", 1)] == [[b"a", b"c"], [b"b"]]
    with pytest.raises(TransactionNotFound):
        stage(bench, one, "orders", b"late")


def test_without_a_sequence_one_joins_what_is_open_or_begins_the_next(data: str) -> None:
    bench = Workbench(data)
    first = join(bench, None)
    assert (first.sequence, join(bench, None).epoch) == (0, first.epoch)
    commit(bench, first)
    assert join(bench, None).sequence == 1


def test_what_was_committed_is_not_done_again(data: str) -> None:
    bench = Workbench(data)
    begun = join(bench, 3)
    number = stage(bench, begun, "orders", b"a")
    commit(bench, begun, number)
    for _ in range(2):
        assert join(bench, 3).committed
        assert join(bench, 2).committed
        assert commit(bench, begun, number).repeated
        bench = Workbench(data)
    assert bench.values("orders") == [b"a"]


def test_the_next_sequence_takes_over_and_an_older_one_is_refused(data: str) -> None:
    bench = Workbench(data)
    old = join(bench, 1)
    stage(bench, old, "orders", b"old")
    new = join(bench, 2)
    assert new.epoch > old.epoch
    for _ in range(2):
        with pytest.raises(TransactionFenced):
            join(bench, 1)
        with pytest.raises(TransactionFenced):
            stage(bench, old, "orders", b"old")
        with pytest.raises(TransactionFenced):
            commit(bench, old)
        bench = Workbench(data)
    commit(bench, new, stage(bench, new, "orders", b"new"))
    assert bench.values("orders") == [b"new"]


def test_only_who_shares_joins(data: str) -> None:
    bench = Workbench(data)
    alone = bench.ask(TransactionBegin(NAME, 0))
    shared = join(bench)
    assert shared.epoch > alone.epoch
    with pytest.raises(TransactionFenced):
        stage(bench, alone, "orders", b"a")
    alone = bench.ask(TransactionBegin(NAME, 0))
    assert alone.epoch > shared.epoch
    bench = Workbench(data)
    with pytest.raises(TransactionNotFound):
        commit(bench, shared)
    with pytest.raises(TransactionNotFound):
        commit(bench, alone)


def test_while_it_is_being_committed_nobody_joins(data: str) -> None:
    bench = Workbench(data)
    begun = join(bench)
    number = stage(bench, begun, "orders", b"a")
    bench.syncing_later = True
    later = bench.begin(TransactionCommit(NAME, begun.epoch, [number]))
    assert isinstance(bench.begin(TransactionBegin(NAME, 0, join=True)), Busy)
    bench.run()
    assert later.outcome.sequence == 0
    assert join(bench).committed


def test_in_memory_too() -> None:
    bench = Workbench()
    begun = join(bench)
    commit(bench, begun, stage(bench, join(bench), "orders", b"a"))
    assert bench.values("orders") == [b"a"]


# The end of the broker.


@pytest.mark.parametrize("journal_bytes", [1, 1 << 20])
def test_a_restart_does_not_end_it(data: str, journal_bytes: int) -> None:
    settings = BrokerSettings(journal_bytes=journal_bytes)
    bench = Workbench(data, settings=settings)
    begun = join(bench, 5)
    stages = []
    for number in range(4):
        stages.append(stage(bench, join(bench, 5), "orders", b"%d" % number))
        stages.append(stage(bench, begun, "bills", b"%d" % number))
        other = bench.ask(TransactionBegin("other"))
        bench.ask(TransactionStage("other", other.epoch, "orders", 0), bench.batch([b"never"]).data)
        for _ in range(3):
            sync_journal(bench)
        if number % 2:
            bench.close()
        bench = Workbench(data, settings=settings)
        assert bench.ask(Info()).transactions_open == 1
    assert join(bench, 5).epoch == begun.epoch
    del stages[2]
    commit(bench, begun, *stages)
    assert bench.values("orders") == [b"0", b"2", b"3"]
    assert bench.values("bills") == [b"0", b"1", b"2", b"3"]
    bench = Workbench(data, settings=settings)
    assert bench.ask(Info()).transactions_open == 0
    assert commit(bench, begun, *stages).repeated


def test_all_that_was_staged_is_committed_after_a_restart_when_nothing_is_named(data: str) -> None:
    bench = Workbench(data)
    begun = join(bench)
    for value in (b"a", b"b"):
        stage(bench, begun, "orders", value)
    alone = bench.ask(TransactionBegin("alone"))
    bench.ask(TransactionStage("alone", alone.epoch, "orders", 0), bench.batch([b"never"]).data)
    bench = Workbench(data)
    bench.ask(TransactionCommit(NAME, begun.epoch))
    assert bench.values("orders") == [b"a", b"b"]


def test_time_counts_anew_after_a_restart(data: str) -> None:
    bench = Workbench(data)
    begun = join(bench, timeout_ms=1000)
    number = stage(bench, begun, "orders", b"a")
    bench = Workbench(data, now_us=bench.now_us + 10_000_000)
    bench.tick(0.9)
    join(bench)
    bench.tick(0.9)
    stage(bench, begun, "orders", b"b")
    bench.tick(1.1)
    for _ in range(2):
        with pytest.raises(TransactionNotFound):
            commit(bench, begun, number)
        bench = Workbench(data, now_us=bench.now_us)
    assert join(bench).epoch > begun.epoch


def test_what_was_aborted_does_not_come_back(data: str) -> None:
    bench = Workbench(data)
    begun = join(bench)
    stage(bench, begun, "orders", b"a")
    bench.ask(TransactionAbort(NAME, begun.epoch))
    for _ in range(2):
        with pytest.raises(TransactionNotFound):
            commit(bench, begun)
        bench = Workbench(data)
    again = join(bench)
    assert again.epoch > begun.epoch
    bench.ask(TransactionCommit(NAME, again.epoch))
    assert bench.values("orders") == []


def test_topics_that_are_deleted_meanwhile(data: str) -> None:
    bench = Workbench(data)
    begun = join(bench)
    kept, gone = stage(bench, begun, "kept", b"a"), stage(bench, begun, "gone", b"b")
    bench.ask(TopicDelete("gone"))
    bench.ask(TopicCreate("gone"))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="deleted"):
            commit(bench, begun, kept, gone)
        bench = Workbench(data)
    commit(bench, begun, kept)
    assert [bench.values("kept"), bench.values("gone")] == [[b"a"], []]


def test_an_id_that_is_another_topics_by_now_is_not_believed(data: str) -> None:
    """A power loss may take back a topic, and the next one that is made then has its id."""
    bench = Workbench(data)
    begun = join(bench)
    with patch.object(transactions, "str", lambda _: "another", create=True):
        number = stage(bench, begun, "orders", b"a")
    bench = Workbench(data)
    with pytest.raises(InvalidArgument):
        commit(bench, begun, number)


# Power losses and full disks.


def test_what_a_power_loss_took_back_is_missed_and_nothing_else_is_taken_for_it(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    begun = join(bench)
    kept = stage(bench, begun, "orders", b"kept")
    commit_elsewhere(bench)  # which syncs the staging log
    lost = [stage(bench, begun, "orders", value) for value in (b"lost", b"lost too")]
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert join(bench).epoch == begun.epoch
    new = [stage(bench, begun, "orders", value) for value in (b"new", b"newer")]
    for _ in range(2):
        for stages in ([kept, lost[0]], [*lost, *new], [kept, lost[1], *new]):
            with pytest.raises(InvalidArgument, match="power loss"):
                commit(bench, begun, *stages)
        bench = Workbench(data, disk=disk)
    commit(bench, begun, kept, *new)
    assert bench.values("orders") == [b"kept", b"new", b"newer"]


def commit_elsewhere(bench: Workbench) -> None:
    other = bench.ask(TransactionBegin("other"))
    bench.ask(TransactionStage("other", other.epoch, "other", 0), bench.batch([b"x"]).data)
    bench.ask(TransactionCommit("other", other.epoch))


@pytest.mark.parametrize("operations", range(1, 24))
def test_a_power_loss_at_any_moment_of_a_commit_leaves_all_or_nothing(data: str, operations: int) -> None:
    """Also when the broker was killed after all was staged, and nothing but its files was left."""
    disk = FaultyDisk(operations)
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"0"])
    bench.publish("bills", [b"0"])
    begun = join(bench)
    stages = [stage(bench, begun, topic, b"1") for topic in ("orders", "bills")]
    bench = Workbench(data, disk=disk)
    disk.crash_after(operations)
    acknowledged = False
    try:
        commit(bench, begun, *stages)
        acknowledged = True
        bench.tick(10)
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    disk.power_loss(Unsynced.RANDOM)
    bench = Workbench(data, disk=disk)
    done = join(bench).committed
    assert [bench.values(topic) for topic in ("orders", "bills")] == [[b"0", b"1"] if done else [b"0"]] * 2
    assert done or not acknowledged


def test_a_full_disk_changes_nothing_and_later_it_works(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    begun = join(bench, timeout_ms=1000)
    number = stage(bench, begun, "orders", b"a")
    disk.capacity_bytes = disk.used_bytes
    fill_journal(bench)
    with pytest.raises(DiskFull):
        bench.ask(TransactionAbort(NAME, begun.epoch))
    bench.tick(2)
    disk.capacity_bytes = None
    assert commit(bench, begun, number).sequence == 0  # its time is up, but nobody could write that down
    assert bench.values("orders") == [b"a"]


def fill_journal(bench: Workbench) -> None:
    """On a full disk, use what room the journal has left in its file."""
    for number in range(1_000_000):
        if isinstance(bench.begin(TransactionBegin(f"{number}", join=True)), DiskFull):
            return
    raise AssertionError("the disk is never full")


def test_a_note_without_its_batch_is_nobodys(data: str) -> None:
    """The broker died in between, and what comes next is another's."""
    bench = Workbench(data)
    begun = join(bench)
    number = stage(bench, begun, "orders", b"a")
    append = staging.Partition.append

    def dies(self: Any, batch: Any, *rest: Any) -> Any:
        if batch.producer_id:
            return append(self, batch, *rest)
        raise KeyboardInterrupt

    with patch.object(staging.Partition, "append", dies), pytest.raises(KeyboardInterrupt):
        stage(bench, begun, "orders", b"b")
    bench = Workbench(data)
    commit_elsewhere(bench)
    bench = Workbench(data)
    bench.ask(TransactionCommit(NAME, begun.epoch))
    assert bench.values("orders") == [b"a"]
    assert number
    assert bench.values("other") == [b"x"]


# The staging log.


def test_what_a_shared_one_has_staged_stays_while_all_else_goes(data: str) -> None:
    small = LogSettings(segment_bytes=4096)
    with patch.object(store, "_STAGING_SETTINGS", small), patch.object(transactions, "_TRIM_BYTES", 5000):
        bench = Workbench(data)
        for _ in range(10):
            commit_elsewhere(bench)
        begun = join(bench)
        number = stage(bench, begun, "orders", b"x" * 2000)
        for _ in range(10):
            commit_elsewhere(bench)
            bench.tick(1)
        bench = Workbench(data)
        bench.tick(1)
        bench = Workbench(data)
        commit(bench, begun, number)
        assert bench.values("orders") == [b"x" * 2000]
        for _ in range(3):
            begun = join(bench, None)
            commit(bench, begun, *(stage(bench, begun, "orders", b"y" * 2000) for _ in range(5)))
            bench.tick(1)
        assert sum(path.stat().st_size for path in Path(data, "broker", "staging").glob("*.seg")) < 40_000


def test_what_memory_has_dropped_cannot_be_committed() -> None:
    with patch.object(store, "_MEMORY_JOURNAL_BYTES", 2 << 20):
        bench = Workbench()
        begun = join(bench)
        stages = [stage(bench, begun, "orders", b"x" * 900_000) for _ in range(6)]
        with pytest.raises(InvalidArgument, match="are missing"):
            commit(bench, begun, *stages)
        commit(bench, begun, stages[-1])
        assert bench.values("orders") == [b"x" * 900_000]


# A commit of much.


def test_a_large_commit_lets_others_have_their_turn(data: str) -> None:
    with patch.object(commit_applier, "_TURN_BYTES", 300):
        bench = Workbench(data)
        bench.ask(TopicCreate("orders", {"durability": "written"}))  # what can be seen before it is synced
        bench.publish("orders", [b"."])
        large, small, other = (bench.ask(TransactionBegin(name)) for name in ("large", "small", "other"))
        for value in range(20):
            bench.ask(TransactionStage("large", large.epoch, "orders", 0), bench.batch([b"%d" % value]).data)
        bench.ask(TransactionStage("small", small.epoch, "orders", 0), bench.batch([b"small"]).data)
        bench.ask(TransactionStage("other", other.epoch, "bills", 0), bench.batch([b"other"]).data)
        laters = [bench.begin(TransactionCommit("large", large.epoch))]
        while len(bench.values("orders")) < 3:
            assert bench.step()
        laters += [
            bench.begin(TransactionCommit(name, begun.epoch)) for name, begun in (("small", small), ("other", other))
        ]
        while not bench.values("bills"):
            assert bench.step()
        between = bench.begin(Publish("orders", 0), bench.batch([b"between"]).data)
        assert len(bench.values("orders")) < 15
        assert laters[0].outcome is None
        bench.run()
        values = [value for value in bench.values("orders") if value != b"between"]
        assert values == [b".", *(b"%d" % value for value in range(20)), b"small"]
        assert between.outcome.base_offset < 20
        assert [len(later.outcome.places) for later in laters] == [20, 1, 1]
        assert bench.broker.idle


def test_a_large_commit_that_is_cut_short_is_finished_after_a_restart(data: str) -> None:
    with patch.object(commit_applier, "_TURN_BYTES", 300):
        bench = Workbench(data)
        bench.ask(TopicCreate("orders", {"durability": "written"}))
        begun = join(bench)
        stages = [stage(bench, begun, "orders", b"%d" % value) for value in range(20)]
        bench.begin(TransactionCommit(NAME, begun.epoch, stages))
        while len(bench.values("orders")) < 5:
            assert bench.step()
        assert len(bench.values("orders")) < 20
        bench = Workbench(data)
        assert bench.values("orders") == [b"%d" % value for value in range(20)]
        assert commit(bench, begun, *stages).repeated


# The client.


def test_clients_share_one(data: str) -> None:
    with headrace.open(data) as bus:
        parts = [bus.transaction(NAME, sequence=4, timeout=60) for _ in range(2)]
        stages: list[int] = []
        for number, part in enumerate(parts):
            part.join()
            assert (part.already_committed, part.sequence, part.metadata("orders").partitions) == (False, 4, 1)
            part.publish("orders", b"%d" % number)
            part.stage("orders", 0, encode(Columns([b"a", b"b"]), 0))
            part.publish_many("orders", [b"c"])
            stages += part.staged()
        assert parts[0].epoch == parts[1].epoch > 0
        whole = bus.transaction(NAME, sequence=4)
        whole.adopt_stages(parts[0].epoch, stages)
        whole.commit(timeout=30)
        found = [value for batch in bus.fetch("orders", 0, 0) for value in batch.columns().values]
        assert found == [b"0", b"a", b"b", b"c", b"1", b"a", b"b", b"c"]
        late = bus.transaction(NAME, sequence=4)
        late.join()
        assert late.already_committed
        late.stage("orders", 0, encode(Columns([b"late"]), 0))
        assert late.staged() == []
        late.abort()


def test_clients_on_an_event_loop_share_one() -> None:
    async def story() -> list[bytes | None]:
        async with await headrace.open_async(":memory:") as bus:
            first, second = (bus.transaction(NAME, sequence=0) for _ in range(2))
            stages: list[int] = []
            for part in (first, second):
                await part.join()
                await part.stage("orders", 0, encode(Columns([b"a"]), 0))
                stages += await part.staged()
            with pytest.raises(PartitionNotFound):
                await first.stage("orders", 1, encode(Columns([b"a"]), 0))
            await bus.alter_topic("orders", partitions=2)
            await first.stage("orders", 1, encode(Columns([b"a"]), 0))  # which it did not know of
            whole = bus.transaction(NAME, sequence=0)
            whole.adopt_stages(second.epoch, stages)
            await whole.commit()
            return [value for batch in await bus.fetch("orders", 0, 0) for value in batch.columns().values]

    assert asyncio.run(story()) == [b"a", b"a"]
