"""An offset, once given out, never names another message: whatever a restart or a power loss takes back."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import Log
from headrace.broker import reservation
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.reservation import BLOCK_MAX, BLOCK_MIN
from headrace.broker.settings import BrokerSettings
from headrace.engines.leased.statuses import LEASED, READY, SETTLED, UNKNOWN, Statuses
from headrace.model.batch import SPAN_MAX, Producer, parse
from headrace.model.errors import DiskFull, LogFailed, MessageGone
from headrace.model.leasing import (
    Ack,
    Edit,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Reject,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.requests import (
    Commit,
    GroupDescribe,
    GroupJoin,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime
from headrace.testing import FaultyDisk, PowerLoss, Unsynced
from headrace.testing.inline import InlineWorker
from headrace.testing.workbench import Workbench

MANY = 20
"""So many messages are not gathered with others."""
KINDS: dict[str, dict[str, Any]] = {
    "memory": {"storage": "memory"},
    "spill": {"storage": "spill"},
    "written": {"durability": "written"},
}
Answer = tuple[list[tuple[int, bytes | None]], list[Holding]]


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of topics whose messages may be seen before they are safe."""
    return KINDS[request.param]


def values(life: int, count: int = MANY) -> list[bytes]:
    return [b"%d.%d" % (life, at) for at in range(count)]


def leased(bench: Workbench, most: int = 1000) -> Answer:
    """The offsets and values that the default subscription hands out, and what is held."""
    answer = bench.ask(Lease("jobs", messages_max=most))
    if not isinstance(answer, AnswerWithBody):
        return [], []
    found: list[bytes | None] = []
    view, position = memoryview(answer.body), 0
    while position < len(view):
        batch = parse(view, position)
        found += batch.columns().values
        position += batch.length
    held = [Holding(one.partition, one.lease, one.offsets, one.following) for one in answer.answer.portions]
    offsets = [at for one in answer.answer.portions for at in one.all_offsets]
    return list(zip(offsets, found, strict=True)), held


def use(bench: Workbench) -> int:
    """Edit, acknowledge, reject and hold some of the messages there are; returns the first offset."""
    got, held = leased(bench, 6)
    first = got[0][0]
    offsets = [at for at, _ in got]
    number = held[0].lease
    bench.ask(Ack("jobs", [Holding(0, number, offsets[:2])]))
    bench.ask(Reject("jobs", [Holding(0, number, offsets[2:4])], "unfit"))
    changed = bench.batch([b"of another message"]).data
    bench.ask(Edit("jobs", [MessageId(0, first + 10), MessageId(0, first + 11)], MessageChange(replace=True)), changed)
    bench.ask(Edit("jobs", [MessageId(0, first + 12)], MessageChange(delete=True)))
    bench.ask(Edit("jobs", [MessageId(0, first + 13)], MessageChange(due_us=bench.now_us + 10**12)))
    return first


def test_what_was_said_about_lost_messages_says_nothing_about_new_ones(
    data: str, disk: FaultyDisk, kind: dict[str, Any]
) -> None:
    seen: dict[int, bytes | None] = {}
    for life in range(3):
        bench = Workbench(data, disk=disk)
        if not life:
            bench.ask(TopicCreate("jobs", kind))
        receipt = bench.publish("jobs", values(life))
        got, _ = leased(bench)
        assert [value for _, value in got] == values(life)
        assert got[0][0] == receipt.base_offset
        assert seen.keys().isdisjoint(at for at, _ in got)
        seen.update(got)
        bench.publish("jobs", values(life + 10))
        first = use(bench)
        seen.update((first + at, b"") for at in range(MANY))
        disk.power_loss(Unsynced.LOST)


def test_groups_go_on_behind_what_was_lost(data: str, disk: FaultyDisk, kind: dict[str, Any]) -> None:
    """Wherever they were among the lost messages; nothing is said about messages that never were."""
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", kind))
    bench.publish("jobs", values(0), durability=2 if "durability" in kind else 0)
    bench.publish("jobs", values(1))
    groups = {"all": 2 * MANY, "some": MANY + 5, "none": MANY}
    for group, offset in groups.items():
        bench.ask(Commit(group, [PartitionOffset("jobs", 0, offset)]))
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assigned = [bench.ask(GroupJoin(group, "anna", ["jobs"])).assigned[0] for group in groups]
    assert [bench.ask(GroupDescribe(group)).places[0].lag for group in groups] == [0, 0, 0]
    bench.publish("jobs", values(2))
    for place in assigned:
        assert bench.values("jobs", offset=place.offset) == values(2)


def test_a_reader_inside_the_gap_reads_on(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", KINDS["written"]))
    bench.publish("jobs", values(0), durability=2)
    bench.publish("jobs", values(1))
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    first = bench.publish("jobs", values(2)).base_offset
    for offset in (0, MANY, MANY + 3, first - 1, first):
        assert bench.values("jobs", offset=offset) == (values(0) if offset < MANY else []) + values(2)


def test_clients_read_over_the_gap(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", KINDS["written"]))
    bench.publish("jobs", values(0), durability=2)
    bench.publish("jobs", values(1))
    bench.ask(Commit("ahead", [PartitionOffset("jobs", 0, MANY + 5)]))
    disk.power_loss(Unsynced.LOST)
    with headrace.open(data) as bus:
        (receipt, *_) = bus.publish_many("jobs", values(2))
        assert receipt.offset >= 2 * MANY
        for group, expected in (("new", values(0) + values(2)), ("ahead", values(2))):
            with bus.subscribe("jobs", group=group, start="earliest", timeout=1) as reader:
                assert [message.value for message in reader] == expected
        assert bus.describe_group("new").places[0].lag == 0
        offset, found = MANY - 1, list[bytes | None]()
        while batches := bus.fetch("jobs", 0, offset):
            found += [value for batch in batches for value in batch.columns().values]
            offset = batches[-1].next_offset
        assert found[-MANY:] == values(2)
        info = bus.describe_topic("jobs").partitions[0]
        assert (info.first_offset, info.next_offset) == (0, receipt.offset + MANY)


# Reserving.


def test_nobody_sees_an_offset_before_it_is_reserved(data: str, kind: dict[str, Any]) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", kind))
    bench.syncing_later = True
    for number in range(2):
        published = [
            bench.begin(Publish("jobs", 0), bench.batch(values(number)).data),
            bench.begin(Publish("jobs", 0), bench.batch([b"small"]).data),
        ]
        end = number * (MANY + 1)
        if not number:
            assert [one.outcome for one in published] == [None, None]
            assert bench.values("jobs") == []
        bench.run()
        assert [getattr(one, "outcome", one).base_offset for one in published] == [end, end + MANY]
        assert len(bench.values("jobs")) == end + MANY + 1


def test_publishing_does_not_wait_while_reserved_offsets_last(data: str, kind: dict[str, Any]) -> None:
    """The next block is asked for when half of one is used: the disk has time."""
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", kind))
    bench.publish("jobs", values(0))
    bench.syncing_later = True
    body = bench.batch([b"x"] * 100).data
    for _ in range(BLOCK_MIN // 100):
        assert not isinstance(bench.begin(Publish("jobs", 0), body), PendingAnswer)
    assert isinstance(bench.begin(Publish("jobs", 0), body), PendingAnswer)
    assert len(bench.values("jobs")) == MANY + BLOCK_MIN // 100 * 100
    bench.run()
    for _ in range(BLOCK_MIN // 100):
        assert not isinstance(bench.begin(Publish("jobs", 0), body), PendingAnswer)


def test_batches_larger_than_what_is_reserved(data: str, disk: FaultyDisk, kind: dict[str, Any]) -> None:
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", kind))
    bench.syncing_later = True
    body = bench.batch([b"x"] * 60_000).data
    later = [bench.begin(Publish("jobs", 0), body) for _ in range(3)]
    assert bench.values("jobs") == []
    bench.run()
    assert [getattr(one, "outcome", one).base_offset for one in later] == [0, 60_000, 120_000]
    assert len(bench.values("jobs")) == 180_000
    bench.syncing_later = False
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert 180_000 <= bench.publish("jobs", [b"y"]).base_offset <= 180_000 + BLOCK_MAX


def test_what_the_journal_cannot_reserve_is_not_published(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", KINDS["memory"]))
    disk.fail_sync()
    asked = [bench.begin(Publish("jobs", 0), bench.batch(values(0)).data)]
    bench.run()
    asked += [bench.begin(Publish("jobs", 0), bench.batch(values(0)).data) for _ in range(2)]
    bench.run()
    assert [type(getattr(one, "outcome", one)) for one in asked] == [LogFailed] * 3
    assert bench.values("jobs") == []
    assert bench.broker.idle


def test_what_a_full_disk_kept_from_being_reserved_is_reserved_later(
    data: str, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is published again, and recognised, or when the broker looks after its topics."""
    for name in ("BLOCK_MIN", "BLOCK_MAX"):
        monkeypatch.setattr(reservation, name, 100)  # the disk is full sooner
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", KINDS["memory"]))
    disk.capacity_bytes = disk.used_bytes
    sequence = fill(bench, 0)
    before = len(bench.values("jobs"))
    with pytest.raises(DiskFull):
        bench.publish("jobs", [b"x"] * 100, producer=Producer(99, 0, sequence))
    with pytest.raises(DiskFull):
        bench.publish("jobs", [b"y"] * 100)
    assert len(bench.values("jobs")) == before
    disk.capacity_bytes = None
    again = bench.publish("jobs", [b"x"] * 100, producer=Producer(99, 0, sequence))
    assert (again.duplicate, again.base_offset) == (True, before)
    assert len(bench.values("jobs")) == before + 200
    disk.capacity_bytes = disk.used_bytes
    sequence = fill(bench, sequence + 1)
    disk.capacity_bytes = None
    bench.tick(60)
    assert len(bench.values("jobs")) == (sequence + 2) * 100


def fill(bench: Workbench, sequence: int) -> int:
    """Publish until nothing more can be reserved; returns the sequence of the first batch that failed."""
    while True:
        try:
            bench.publish("jobs", [b"x"] * 100, producer=Producer(99, 0, sequence))
        except DiskFull:
            return sequence
        sequence += 1


@pytest.mark.parametrize("journal_bytes", [200, 1 << 20])
def test_a_killed_broker_and_one_that_was_stopped_skip_nothing_in_files(
    data: str, disk: FaultyDisk, journal_bytes: int
) -> None:
    settings = BrokerSettings(journal_bytes=journal_bytes)
    next_offset = 0
    for life, how in enumerate(["stopped", "killed", "stopped", "lost after a stop", "killed", "lost"]):
        bench = Workbench(data, disk=disk, settings=settings)
        if not life:
            bench.ask(TopicCreate("jobs", KINDS["written"]))
        assert bench.publish("jobs", values(life)).base_offset == next_offset
        next_offset += MANY
        if "stop" in how:
            bench.close()
        disk.power_loss(Unsynced.LOST if "lost" in how else Unsynced.KEPT)
    bench = Workbench(data, disk=disk, settings=settings)
    assert bench.publish("jobs", values(9)).base_offset >= next_offset


def test_a_topic_in_memory_goes_on_where_it_was_stopped(data: str) -> None:
    for life in range(3):
        bench = Workbench(data)
        bench.ask(TopicCreate("jobs", KINDS["memory"], exist_ok=True))
        assert bench.publish("jobs", values(life)).base_offset == life * MANY
        assert bench.values("jobs", offset=life * MANY) == values(life)
        bench.close()


def test_a_broker_in_memory_has_nothing_to_reserve() -> None:
    bench = Workbench()
    bench.syncing_later = True
    assert not isinstance(bench.begin(Publish("jobs", 0), bench.batch(values(0)).data), PendingAnswer)


@pytest.mark.parametrize("operations", range(1, 30))
def test_a_crash_while_the_gap_is_made(data: str, disk: FaultyDisk, operations: int) -> None:
    """Killed right after the power came back: the next start must not take it for a mere kill."""
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", KINDS["written"]))
    bench.publish("jobs", values(0), durability=2)
    bench.publish("jobs", values(1))
    disk.power_loss(Unsynced.LOST)
    disk.crash_after(operations)
    try:
        Workbench(data, disk=disk).ask(TopicDescribe("jobs"))
    except (PowerLoss, LogFailed):
        assert disk.crashed
    disk.power_loss(Unsynced.KEPT)
    bench = Workbench(data, disk=disk)
    assert bench.publish("jobs", values(2)).base_offset >= 2 * MANY
    assert bench.values("jobs") == values(0) + values(2)


def test_somebody_looks_at_the_files_before_the_broker_does(data: str, disk: FaultyDisk) -> None:
    """A repair, for instance: the files then say that they were opened since the power came back."""
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", KINDS["written"]))
    bench.publish("jobs", values(0), durability=2)
    bench.publish("jobs", values(1))
    disk.power_loss(Unsynced.LOST)
    for files in Path(data, "topics").iterdir():
        files_log(str(files), disk).close()
    bench = Workbench(data, disk=disk)
    assert bench.publish("jobs", values(2)).base_offset >= 2 * MANY


def test_topics_whose_durability_changes(data: str, disk: FaultyDisk) -> None:
    """What can be seen at once from now on has to be reserved; what was seen stays reserved."""
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs"))
    bench.publish("jobs", values(0))
    bench.syncing_later = True
    bench.begin(Publish("jobs", 0), bench.batch(values(1)).data)
    bench.begin(TopicAlter("jobs", {"durability": "written"}))
    assert bench.values("jobs") == values(0)
    bench.run()
    assert bench.values("jobs") == values(0) + values(1)
    seen = bench.begin(Publish("jobs", 0), bench.batch(values(2)).data)
    assert seen.base_offset == 2 * MANY
    bench.begin(TopicAlter("jobs", {"durability": "synced"}))
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert bench.publish("jobs", values(3)).base_offset >= 3 * MANY
    assert bench.values("jobs") == values(0) + values(1) + values(3)


def test_a_topic_that_is_not_safe_has_no_offsets_yet(data: str, disk: FaultyDisk, kind: dict[str, Any]) -> None:
    bench = Workbench(data, disk=disk)
    bench.syncing_later = True
    bench.begin(TopicCreate("jobs", kind))
    published = bench.begin(Publish("jobs", 0), bench.batch(values(0)).data)
    assert isinstance(published, PendingAnswer)
    assert published.outcome is None
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", kind))
    bench.publish("jobs", values(1))
    assert bench.values("jobs") == values(1)


@pytest.mark.parametrize("count", [1, MANY])
def test_written_messages_are_not_seen_before_their_topic_is_safe(data: str, count: int) -> None:
    """The journal is slow, the partition is quick: it is synced, but its topic may never have been."""
    bench = Workbench(data)
    bench.syncing_later = True
    bench.begin(TopicCreate("jobs", KINDS["written"]))
    bench.syncing_later = False
    published = bench.begin(Publish("jobs", 0), bench.batch(values(0, count)).data)
    stream = bench.open_stream("jobs")
    stream._active.flush()
    assert (published.outcome, bench.values("jobs")) == (None, [])
    bench.run()
    assert (published.outcome.base_offset, bench.values("jobs")) == (0, values(0, count))


def test_who_waits_for_offsets_gets_an_answer_though_the_durability_changes(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLOCK_MIN", "BLOCK_MAX"):
        monkeypatch.setattr(reservation, name, 4)
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", KINDS["written"]))
    bench.syncing_later = True
    asked = [bench.begin(Publish("jobs", 0), bench.batch(values(at)).data) for at in range(3)]
    bench.begin(TopicAlter("jobs", {"durability": "synced"}))
    bench.run()
    assert [one.outcome.base_offset for one in asked] == [0, MANY, 2 * MANY]
    assert bench.values("jobs") == values(0) + values(1) + values(2)


def test_a_topic_that_is_made_again_begins_anew(data: str, kind: dict[str, Any]) -> None:
    bench = Workbench(data)
    for life in range(2):
        bench.ask(TopicCreate("jobs", kind))
        assert bench.publish("jobs", values(life)).base_offset == 0
        bench.ask(TopicDelete("jobs"))
        bench = Workbench(data)


# Who refers to offsets.


def test_a_lost_batch_is_stored_again_and_one_that_is_there_is_not(data: str, disk: FaultyDisk) -> None:
    by = [Producer(99, 0, sequence) for sequence in range(3)]
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", KINDS["written"]))
    bench.publish("jobs", values(0), producer=by[0], durability=2)
    bench.publish("jobs", values(1), producer=by[1])
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert bench.publish("jobs", values(0), producer=by[0]).duplicate
    lost = bench.publish("jobs", values(1), producer=by[1])
    assert (lost.duplicate, lost.base_offset >= 2 * MANY) == (False, True)
    assert bench.publish("jobs", values(1), producer=by[1]).duplicate
    bench.close()
    bench = Workbench(data, disk=disk)
    assert bench.publish("jobs", values(1), producer=by[1]).base_offset == lost.base_offset
    assert not bench.publish("jobs", values(2), producer=by[2]).duplicate
    assert bench.values("jobs") == values(0) + values(1) + values(2)


def test_where_a_transaction_put_its_messages_is_told_when_that_is_reserved(data: str, kind: dict[str, Any]) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs", kind))
    epoch = bench.ask(TransactionBegin("t")).epoch
    bench.ask(TransactionStage("t", epoch, "jobs", 0), bench.batch(values(0)).data)
    committed = bench.ask(TransactionCommit("t", epoch))
    assert [(place.topic, place.offset) for place in committed.places] == [("jobs", 0)]
    assert bench.values("jobs") == values(0)
    if "storage" in kind:
        bench = Workbench(data)
        assert bench.publish("jobs", values(1)).base_offset >= MANY


def test_files_that_somebody_removed_do_not_bring_offsets_back(data: str) -> None:
    """Not even of a synced topic: whatever the journal refers to is not given out again."""
    bench = Workbench(data)
    bench.publish("jobs", values(0))
    bench.ask(Commit("group", [PartitionOffset("jobs", 0, 7)]))
    got, _ = leased(bench, 3)
    bench.ask(Edit("jobs", [MessageId(0, 11)], MessageChange(priority=3)))
    bench.close()
    for files in Path(data, "topics").iterdir():
        shutil.rmtree(files)
    bench = Workbench(data)
    first = bench.publish("jobs", values(1)).base_offset
    assert first >= MANY
    assert leased(bench)[0] == [(first + at, value) for at, value in enumerate(values(1))]
    assert len(got) == 3


def test_a_subscription_has_settled_the_offsets_of_a_gap(data: str, disk: FaultyDisk) -> None:
    """Or messages that are kept until they are consumed would be kept for ever; after another restart too."""
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs", {**KINDS["written"], "validity": "until_consumed"}))
    bench.ask(SubscriptionCreate("jobs"))
    bench.publish("jobs", values(0), durability=2)
    bench.publish("jobs", values(1))
    leased(bench, 30)
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    first = bench.publish("jobs", values(2), durability=2).base_offset
    bench.tick(60)
    assert (
        bench.ask(Edit("jobs", [MessageId(0, 25)], MessageChange(priority=3))).outcomes[0].outcome == MessageGone.code
    )
    got, held = leased(bench)
    assert [value for _, value in got] == values(0) + values(2)
    bench.ask(Ack("jobs", held))
    for _ in range(2):
        bench = Workbench(data, disk=disk)
        info = bench.ask(SubscriptionDescribe("jobs"))
        assert (info.ready, info.leased, info.waiting) == (0, 0, 0)
    bench.tick(10)
    assert bench.ask(TopicDescribe("jobs")).partitions[0].first_offset == first + MANY


def test_a_large_gap_takes_no_memory() -> None:
    statuses = Statuses(3)
    statuses.begin(3, 10, READY)
    statuses.begin(10, 10**12 + 5, SETTLED)
    statuses.begin(10**12 + 5, 10**12 + 9, READY)
    assert [statuses[at] for at in (2, 3, 10, 10**9, 10**12 + 4, 10**12 + 5, 10**12 + 9)] == [
        SETTLED, READY, SETTLED, SETTLED, SETTLED, READY, UNKNOWN,
    ]  # fmt: skip
    assert len(statuses.frozen().chunks) == 2
    statuses.change(range(3, 10), SETTLED)
    assert statuses.floor == 10**12 + 5


def test_offsets_of_which_nothing_is_known_take_hardly_any_memory() -> None:
    """A journal speaks of a message far behind those that it spoke of before."""
    statuses = Statuses(0)
    statuses.change([5 << 20], LEASED)
    made = {id(chunk) for chunk in statuses._chunks.values()}
    assert len(made) == 2
    statuses.change(range(5 << 20), SETTLED)
    assert (statuses.floor, statuses.counts[LEASED]) == (5 << 20, 1)


# Logs without a broker.


def files_log(data: str, disk: FaultyDisk, floor: int = 0) -> FileLog:
    return FileLog(StorageRuntime(disk, flusher=InlineWorker(), preparer=InlineWorker()), data, floor=floor)


def test_a_log_goes_on_at_the_floor_and_not_before(data: str, disk: FaultyDisk) -> None:
    log = files_log(data, disk, 7)
    assert (log.first_offset, log.next_offset, log.survived_offset) == (0, 7, 0)
    bench = Workbench()
    log.append(bench.batch(values(0)), 1)
    log.close()
    log = files_log(data, disk, 10)
    assert (log.first_offset, log.next_offset) == (0, 7 + MANY)
    log.close()
    log = files_log(data, disk, 2 * SPAN_MAX)
    assert (log.first_offset, log.next_offset, log.survived_offset) == (0, 2 * SPAN_MAX, 7 + MANY)
    log.append(bench.batch(values(1)), 1)
    assert [batch.base_offset for batch in log.batches(0)] == [7, 2 * SPAN_MAX]
    assert [batch.base_offset for batch in log.batches(SPAN_MAX)] == [2 * SPAN_MAX]
    log.close()
    log = files_log(data, disk)
    assert log.next_offset == 2 * SPAN_MAX + MANY
    log.close()


def test_a_cursor_that_passed_lost_messages_passes_over_no_new_ones(data: str, disk: FaultyDisk) -> None:
    def opened() -> Log:
        host = StorageRuntime(disk, flusher=InlineWorker(), preparer=InlineWorker())
        return Log(data, host=host, sync_every=None)

    log = opened()
    log.append_many(values(0))
    log.flush()
    log.append_many(values(1))
    log.flush(sync=False)
    with log.cursor("reader") as cursor:
        assert len(list(cursor)) == 2 * MANY
        cursor.commit()
    assert len(log.consume(30)) == 30
    disk.power_loss(Unsynced.LOST)
    with pytest.raises(LogFailed):
        log.close()
    log = opened()
    assert log.append_many(values(2)) == range(2 * MANY, 3 * MANY)
    assert [message.value for message in log] == values(0) + values(2)
    with log.cursor("reader") as cursor:
        assert [message.value for message in cursor] == values(2)
    assert [message.value for message in log.consume(MANY)] == values(2)
    log.close()
