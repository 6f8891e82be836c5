"""Repairing a data directory: whatever became of the journal, no message is lost, and no number is given out twice."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from tests.unit.test_data_directory import DESTROYED, Destroy, contents, filled, remove, remove_own, segments

from headrace.broker.facts import BrokerState, encode_fact
from headrace.broker.repair import Repaired, Verified, repair, verify
from headrace.broker.settings import BrokerSettings
from headrace.engines.data_directory import FORMAT, DataDirectory, DataFormat
from headrace.model.errors import CorruptBatch, DataDirectoryDamaged, NotADataDirectory, UnsupportedFormat
from headrace.model.leasing import Ack, Holding, Lease, SubscriptionDescribe
from headrace.model.requests import (
    Commit,
    GroupDescribe,
    Info,
    PartitionOffset,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.storage.disk import LocalDisk
from headrace.storage.log import FileLog
from headrace.storage.owner import read_owner
from headrace.storage.runtime import StorageRuntime
from headrace.testing import FaultyDisk, InlineWorker, Unsynced
from headrace.testing.workbench import START_US, Workbench

ALL = [b"a"] * 20, [b"b"] * 20
"""The messages of a filled broker."""


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def host(disk: LocalDisk | None = None) -> StorageRuntime:
    return StorageRuntime(disk or LocalDisk(), flusher=InlineWorker(), preparer=InlineWorker())


def repaired(data: str, disk: LocalDisk | None = None) -> Repaired:
    return repair(DataDirectory(host(disk), data), "new", START_US, lambda _: None)


def verified(data: str, disk: LocalDisk | None = None) -> Verified:
    return verify(DataDirectory(host(disk), data), lambda _: None, running=False)


def all_values(bench: Workbench) -> tuple[list[Any], list[Any]]:
    return bench.values("orders", 1), bench.values("acme/bills")


def committed(bench: Workbench, name: str, value: bytes) -> Any:
    """A message that a transaction published."""
    begun = bench.ask(TransactionBegin(name))
    bench.ask(TransactionStage(name, begun.epoch, "orders", 1), bench.batch([value]).data)
    return bench.ask(TransactionCommit(name, begun.epoch))


# Looking.


def test_a_directory_that_is_sound_needs_no_repair(data: str) -> None:
    filled(data).close()
    found = verified(data)
    assert found.sound
    assert (found.identity, found.topics, len(found.logs)) == ("workbench", 2, 4)
    before = contents(Path(data))
    done = repaired(data)
    assert not done.changed
    assert done.topics == ["acme/bills", "orders"]
    assert contents(Path(data)).keys() == before.keys()
    assert {name: content for name, content in contents(Path(data, "topics")).items() if name.endswith(".seg")} == {
        name.removeprefix("topics/"): content
        for name, content in before.items()
        if name.startswith("topics/") and name.endswith(".seg")
    }


@pytest.mark.parametrize("destroy", DESTROYED)
def test_what_is_wrong_is_seen_and_nothing_is_changed(data: str, destroy: Destroy) -> None:
    filled(data).close()
    destroy(Path(data))
    before = contents(Path(data))
    found = verified(data)
    assert not found.sound
    assert found.problems
    assert contents(Path(data)) == before


def test_damaged_messages_are_seen_and_made_a_gap(data: str) -> None:
    filled(data).close()
    (path,) = segments(data, "topics/2/0")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    (log,) = [log for log in verified(data).logs if not log.sound]
    assert [(lost.first_offset, lost.next_offset) for lost in log.findings.lost] == [(0, 20)]
    done = repaired(data)
    assert (done.changed, done.problems) == (True, [])
    assert verified(data).sound
    assert Workbench(data).publish("acme/bills", [b"next"]).base_offset == 20


@pytest.mark.parametrize("what", [verified, repaired])
def test_a_directory_that_is_none_is_left_alone(data: str, what: Any) -> None:
    os.makedirs(f"{data}/broker")
    Path(data, "broker", "main.py").write_text("mine")
    before = contents(Path(data))
    with pytest.raises(NotADataDirectory):
        what(data)
    assert contents(Path(data)) == before


@pytest.mark.parametrize("what", [verified, repaired])
def test_what_a_newer_headrace_wrote_is_left_alone(data: str, what: Any) -> None:
    filled(data).close()
    DataDirectory(StorageRuntime(), data).write_format(DataFormat(FORMAT, 8, 0, "workbench", 1))
    before = contents(Path(data))
    with pytest.raises(UnsupportedFormat):
        what(data)
    assert contents(Path(data)) == before


# Repairing.


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("peace", [False, True])
@pytest.mark.parametrize("destroy", DESTROYED)
def test_every_message_is_there_after_a_repair(data: str, destroy: Destroy, peace: bool, started: bool) -> None:
    bench = filled(data)
    bench.ask(TopicAlter("orders", {"retain_seconds": 1000.0}))
    before = bench.ask(TopicDescribe("orders"))
    if peace:
        bench.close()
    destroy(Path(data))
    if started:
        with pytest.raises(DataDirectoryDamaged):
            Workbench(data)
    done = repaired(data)
    assert done.topics == ["acme/bills", "orders"]
    assert verified(data).sound
    for _ in range(2):
        bench = Workbench(data)
        after = bench.ask(TopicDescribe("orders"))
        assert (after.id, after.settings, after.created_us) == (before.id, before.settings, before.created_us)
        assert all_values(bench) == ALL
    assert not repaired(data).problems


@pytest.mark.parametrize("share", [number / 60 for number in range(60)])
def test_flipped_bits_in_the_journal_can_be_repaired(data: str, share: float) -> None:
    disk = FaultyDisk(round(share * 60))
    bench = filled(data, disk=disk)
    for offset in range(10):
        bench.ask(Commit("shipping", [PartitionOffset("acme/bills", 0, offset)]))
    (path,) = segments(data)
    disk.flip_bit(str(path), round(share * len(path.read_bytes().rstrip(b"\0"))))
    try:
        bench = Workbench(data, disk=disk)
    except DataDirectoryDamaged:
        assert repaired(data, disk).changed
        bench = Workbench(data, disk=disk)
        assert Path(data, "set-aside/broker-journal.1").exists()
    assert all_values(bench) == ALL
    assert bench.ask(TopicDescribe("orders")).settings["partitions"] == 2
    assert bench.ask(TopicCreate("more")).id > 2


def test_what_came_before_and_behind_the_damage_is_kept(data: str) -> None:
    disk = FaultyDisk()
    bench = filled(data, disk=disk)
    (path,) = segments(data)
    begin = len(path.read_bytes().rstrip(b"\0"))
    bench.ask(Commit("billing", [PartitionOffset("orders", 1, 12)]))
    end = len(path.read_bytes().rstrip(b"\0"))
    bench.ask(Commit("shipping", [PartitionOffset("acme/bills", 0, 9)]))
    disk.flip_bit(str(path), (begin + end) // 2)
    with pytest.raises(DataDirectoryDamaged, match="facts are lost"):
        Workbench(data, disk=disk)
    done = repaired(data, disk)
    assert done.groups == 2
    assert any("delivered again" in text for text in done.not_restored)
    bench = Workbench(data, disk=disk)
    assert bench.ask(GroupDescribe("billing")).places[0].offset == 7
    assert bench.ask(GroupDescribe("shipping")).places[0].offset == 9


def leased(bench: Workbench, topic: str = "jobs", count: int = 2) -> Any:
    """What is handed out of a queue."""
    return bench.ask(Lease(topic, messages_max=count)).answer.portions[0]


def ack(bench: Workbench, portion: Any) -> None:
    bench.ask(Ack("jobs", [Holding(portion.partition, portion.lease, portion.offsets, portion.following)]))


def test_acknowledgements_before_and_behind_the_damage_count_and_leases_behind_it_do_not(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("jobs", [b"%d" % number for number in range(20)])
    ack(bench, leased(bench))
    (path,) = segments(data)
    begin = len(path.read_bytes().rstrip(b"\0"))
    bench.ask(Commit("billing", [PartitionOffset("jobs", 0, 3)]))
    disk.flip_bit(str(path), begin + 20)
    ack(bench, leased(bench))
    last = leased(bench)
    done = repaired(data, disk)
    assert (done.subscriptions, any("2 facts that depend on lost ones" in text for text in done.not_restored)) == (
        1,
        True,
    )
    bench = Workbench(data, disk=disk)
    info = bench.ask(SubscriptionDescribe("jobs", "default"))
    assert (info.leased, info.ready) == (0, 16)
    again = leased(bench)
    assert list(again.all_offsets) == list(last.all_offsets)
    assert again.lease > last.lease
    ack(bench, last)  # which is not taken for the new lease
    assert bench.ask(SubscriptionDescribe("jobs", "default")).leased == 2
    ack(bench, again)
    assert bench.ask(SubscriptionDescribe("jobs", "default")).leased == 0


def test_a_topic_that_came_in_the_lost_part_is_found_by_its_partitions(data: str) -> None:
    disk = FaultyDisk()
    bench = filled(data, disk=disk)
    (path,) = segments(data)
    begin = len(path.read_bytes().rstrip(b"\0"))
    bench.ask(TopicCreate("late", {"message_bytes_max": 777}))
    bench.publish("late", [b"c"])
    end = len(path.read_bytes().rstrip(b"\0"))
    bench.ask(Commit("billing", [PartitionOffset("late", 0, 1)]))
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(end - begin))
    done = repaired(data, disk)
    assert done.topics_found == ["late"]
    bench = Workbench(data, disk=disk)
    assert bench.values("late") == [b"c"]
    assert bench.ask(TopicDescribe("late")).settings["message_bytes_max"] == 777
    assert [(at.topic, at.offset) for at in bench.ask(GroupDescribe("billing")).places] == [("orders", 7), ("late", 1)]


def test_settings_of_the_lost_part_come_from_the_partitions(data: str) -> None:
    bench = filled(data)
    (path,) = segments(data)
    end = len(path.read_bytes().rstrip(b"\0"))
    bench.ask(TopicAlter("orders", {"retain_bytes": 1 << 30, "partitions": 4}))
    bench.publish("orders", [b"c"], partition=3)
    os.truncate(path, end)
    assert repaired(data).settings_found == ["orders"]
    bench = Workbench(data)
    settings = bench.ask(TopicDescribe("orders")).settings
    assert (settings["partitions"], settings["retain_bytes"]) == (4, 1 << 30)
    assert bench.values("orders", 3) == [b"c"]


def test_a_topic_that_the_journal_knows_to_be_deleted_stays_so(data: str) -> None:
    bench = filled(data)
    shutil.copytree(f"{data}/topics/2", f"{data}/copy")
    bench.ask(TopicDelete("acme/bills"))
    bench.ask(TopicCreate("late"))
    shutil.move(f"{data}/copy", f"{data}/topics/2")
    (path,) = segments(data)
    content = bytearray(path.read_bytes())
    content[len(content.rstrip(b"\0")) - 1] ^= 1
    path.write_bytes(content)
    os.remove(f"{data}/format")
    assert repaired(data).topics == ["orders"]
    Workbench(data)
    assert Path(data, "set-aside/topics-2-0.1").exists()


def test_of_two_topics_with_one_name_the_older_must_have_been_deleted(data: str) -> None:
    bench = filled(data)
    shutil.copytree(f"{data}/topics/2", f"{data}/copy")
    bench.ask(TopicDelete("acme/bills"))
    bench.publish("acme/bills", [b"new"])
    shutil.move(f"{data}/copy", f"{data}/topics/2")
    remove_own(Path(data))
    done = repaired(data)
    assert done.topics == ["acme/bills", "orders"]
    assert [Path(one.path).name for one in done.set_aside] == ["topics-2-0.1"]
    assert Workbench(data).values("acme/bills") == [b"new"]


def test_messages_without_a_name_get_one(data: str) -> None:
    """Both the journal and a partition's record are lost."""
    filled(data)
    remove(Path(data))
    os.truncate(f"{data}/topics/2/0/meta", 0)
    assert repaired(data).topics == ["orders", "recovered-2"]
    assert Workbench(data).values("recovered-2") == [b"b"] * 20


def test_settings_that_cannot_be_are_told_and_replaced(data: str) -> None:
    filled(data).close()
    path = f"{data}/topics/2/0"
    owner = read_owner(StorageRuntime(), path).owner
    assert owner is not None
    log = FileLog(StorageRuntime(), path, owned=True)
    log.set_owner(msgspec.structs.replace(owner, topic="//", settings={"storage": "tape"}).encoded())
    log.close()
    remove_own(Path(data))
    done = repaired(data)
    assert done.topics == ["orders", "recovered-2"]
    assert "the name '//' of the topic 2; it is recovered-2 now" in done.not_restored
    assert any(text.startswith("the settings of the topic recovered-2") for text in done.not_restored)
    assert Workbench(data).values("recovered-2") == [b"b"] * 20


# Numbers.


@pytest.mark.parametrize("destroy", DESTROYED)
def test_no_number_is_given_out_twice(data: str, destroy: Destroy) -> None:
    bench = filled(data)
    for number in range(3):
        committed(bench, "nightly", b"%d" % number)
    epoch = bench.ask(TransactionBegin("nightly")).epoch
    bench.ask(TopicCreate("gone"))
    bench.ask(TopicDelete("gone"))
    subscriptions = bench.broker._ledger.state.leased
    last = leased(bench, "orders").lease
    subscription_id, session = subscriptions.subscription_id, bench.broker._ledger.state.session
    destroy(Path(data))
    repaired(data)
    bench = Workbench(data)
    state = bench.broker._ledger.state
    assert state.session > session
    assert bench.ask(TransactionBegin("nightly")).epoch > epoch
    assert bench.ask(TopicCreate("new")).id > 3
    assert leased(bench, "acme/bills").lease > last
    assert state.leased.subscription_id > subscription_id
    committed(bench, "hourly", b"not taken for one that was there before")
    assert bench.values("orders", 1)[-1] == b"not taken for one that was there before"
    assert len(bench.values("orders", 1)) == 24


def test_batches_that_may_have_been_committed_are_kept_and_told_of(data: str) -> None:
    bench = filled(data)
    begun = bench.ask(TransactionBegin("nightly"))
    bench.ask(TransactionStage("nightly", begun.epoch, "orders", 1), bench.batch([b"staged"] * 3).data)
    remove(Path(data))
    done = repaired(data)
    assert any("1 staged batches with 3 messages" in text for text in done.not_restored)
    assert b"staged" in segments(data, "set-aside/broker-staging.1")[0].read_bytes()


def test_a_transaction_that_was_committed_in_the_good_part_is_applied(data: str) -> None:
    """The journal has it, its partition does not; then the journal lost something else."""
    disk = FaultyDisk()
    bench = filled(data, disk=disk)
    begun = bench.ask(TransactionBegin("nightly"))
    bench.ask(TransactionStage("nightly", begun.epoch, "orders", 1), bench.batch([b"staged"]).data)
    bench.syncing_later = True
    bench.begin(TransactionCommit("nightly", begun.epoch))
    for _ in range(3):
        assert bench.step()  # as far as the fact
    (path,) = segments(data)
    content = path.read_bytes().rstrip(b"\0")
    if b"nightly" not in content:
        pytest.fail("the commit was not recorded")
    with path.open("r+b") as file:
        file.seek(64)
        file.write(bytes(50))  # the first fact
    done = repaired(data, disk)
    assert done.changed
    assert Workbench(data, disk=disk).values("orders", 1)[20:] == [b"staged"]


# Other brokers' things.


def another(data: str, identity: str = "another") -> str:
    """A broker's directory like a filled one, of another identity."""
    other = f"{data}-other"
    bench = Workbench(f"{other}")
    bench.close()
    shutil.rmtree(other)
    DataDirectory(StorageRuntime(), other).begin(identity)
    bench = Workbench(other)
    bench.publish("theirs", [b"x"] * 5)
    bench.publish("theirs-too", [b"y"] * 5)
    bench.close()
    return other


def test_another_brokers_journal_is_not_believed(data: str) -> None:
    filled(data).close()
    other = another(data)
    shutil.rmtree(f"{data}/broker")
    shutil.copytree(f"{other}/broker", f"{data}/broker")
    with pytest.raises(DataDirectoryDamaged):
        Workbench(data)
    done = repaired(data)
    assert (done.identity, done.topics) == ("workbench", ["acme/bills", "orders"])
    assert all_values(Workbench(data)) == ALL
    assert contents(Path(data, "set-aside")) != {}


@pytest.mark.parametrize("length", [0, 64, 200, 5000])
def test_a_journal_that_is_cut_after_a_snapshot_can_be_repaired(data: str, length: int) -> None:
    bench = Workbench(data, settings=BrokerSettings(journal_bytes=300))
    bench.publish("orders", [b"a"] * 20, 0)
    for number in range(200):
        bench.ask(Commit("billing", [PartitionOffset("orders", 0, number % 20)]))
    for path in segments(data, "broker/journal"):  # of a broker that was killed
        os.truncate(path, min(length, path.stat().st_size))
        path.with_suffix(".idx").unlink(missing_ok=True)
    with pytest.raises(DataDirectoryDamaged):
        Workbench(data)
    assert repaired(data).topics == ["orders"]
    assert verified(data).sound
    assert Workbench(data).values("orders", 0) == [b"a"] * 20


def test_a_format_file_of_another_broker_costs_nothing(data: str) -> None:
    filled(data).close()
    shutil.copy(f"{another(data)}/format", f"{data}/format")
    with pytest.raises(DataDirectoryDamaged):
        Workbench(data)
    done = repaired(data)
    assert (done.identity, done.topics, done.set_aside) == ("workbench", ["acme/bills", "orders"], [])
    assert all_values(Workbench(data)) == ALL


def test_missing_first_segments_are_seen(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"segment_bytes": 64 << 10}))
    for number in range(4):
        bench.publish("orders", [b"%d" % number * (40 << 10)], 0)
    bench.close()
    first, *_ = segments(data, "topics/1/0")
    first.unlink()
    [log] = [log for log in repaired(data).logs if log.path.endswith("topics/1/0")]
    [lost] = log.findings.lost
    assert lost.first_offset == 0
    assert verified(data).sound  # it is told once


def test_another_brokers_partitions_are_set_aside(data: str) -> None:
    filled(data).close()
    other = another(data)
    shutil.rmtree(f"{data}/topics/2")
    shutil.copytree(f"{other}/topics/1", f"{data}/topics/2")
    shutil.copytree(f"{other}/topics/2", f"{data}/topics/3")
    done = repaired(data)
    assert {Path(one.path).name for one in done.set_aside} == {"topics-2-0.1", "topics-3-0.1"}
    bench = Workbench(data)
    assert bench.values("orders", 1) == [b"a"] * 20
    with pytest.raises(CorruptBatch, match="messages 0 to 19"):  # which the journal knows to have been synced
        bench.values("acme/bills")


def test_without_format_and_journal_the_partitions_tell_whose_they_are(data: str) -> None:
    filled(data).close()
    shutil.copytree(f"{another(data)}/topics/2", f"{data}/topics/9")
    remove_own(Path(data))
    os.remove(f"{data}/format")
    done = repaired(data)
    assert (done.identity, done.topics) == ("workbench", ["acme/bills", "orders"])
    bench = Workbench(data)
    assert bench.ask(Info()).broker_id == "workbench"
    assert all_values(bench) == ALL


def test_another_brokers_journal_without_a_format_file_is_not_believed_either(data: str) -> None:
    filled(data).close()
    other = another(data)
    shutil.rmtree(f"{data}/broker")
    shutil.copytree(f"{other}/broker", f"{data}/broker")
    os.remove(f"{data}/format")
    done = repaired(data)
    assert (done.identity, done.topics) == ("workbench", ["acme/bills", "orders"])
    assert all_values(Workbench(data)) == ALL


@pytest.mark.parametrize("what", [verified, repaired])
def test_a_fact_that_only_a_newer_headrace_knows_is_not_lost_by_a_repair(data: str, what: Any) -> None:
    filled(data).close()
    journal = DataDirectory(host(), data).open_journal()
    journal.write([msgspec.msgpack.encode([9999, "what is this?"])], START_US)
    journal.close()
    os.remove(f"{data}/format")
    before = contents(Path(data))
    with pytest.raises(UnsupportedFormat, match="use the Headrace that wrote it"):
        what(data)
    assert contents(Path(data)) == before


@pytest.mark.parametrize("part", ["broker/journal", "topics/1/1", "broker/staging"])
def test_a_log_without_its_record_has_its_messages(data: str, part: str) -> None:
    filled(data).close()
    (messages,) = [log.findings.messages for log in verified(data).logs if log.path == f"{data}/{part}"]
    os.remove(f"{data}/{part}/meta")
    assert [log.findings.record for log in verified(data).logs if not log.sound] == [f"{data}/{part}/meta"] * bool(
        messages
    )
    repaired(data)
    assert verified(data).sound
    assert all_values(Workbench(data)) == ALL


def test_a_broker_restores_the_record_of_a_log(data: str) -> None:
    filled(data).close()
    os.remove(f"{data}/topics/1/1/meta")
    assert not verified(data).sound
    bench = Workbench(data)
    assert all_values(bench) == ALL
    bench.close()
    assert verified(data).sound


# Crashes.


@pytest.mark.parametrize("unsynced", list(Unsynced))
@pytest.mark.parametrize("destroy", [remove, remove_own])
def test_a_repair_can_be_ended_anywhere_and_begun_again(data: str, destroy: Destroy, unsynced: Unsynced) -> None:
    filled(data).close()
    destroy(Path(data))
    shutil.copytree(data, f"{data}-before")
    operations, finished = 0, False
    while not finished:
        operations += Random(operations).randint(1, 4)
        shutil.rmtree(data)
        shutil.copytree(f"{data}-before", data)
        disk = FaultyDisk(operations)
        disk.crash_after(operations)
        try:
            repaired(data, disk)
            finished = True
        except Exception:  # noqa: BLE001 the power is off
            assert disk.crashed
        disk.crash_after(0)
        disk.power_loss(unsynced)
        repaired(data, disk)
        assert verified(data, disk).sound
        assert all_values(Workbench(data, disk=disk)) == ALL


@pytest.mark.parametrize("operations", range(1, 40, 2))
def test_a_repair_of_a_damaged_journal_keeps_what_it_had_when_it_is_ended(data: str, operations: int) -> None:
    disk = FaultyDisk(operations)
    bench = filled(data, disk=disk, settings=BrokerSettings(journal_bytes=2000))
    for offset in range(30):
        bench.ask(Commit("shipping", [PartitionOffset("acme/bills", 0, offset % 19)]))
    bench.ask(Commit("shipping", [PartitionOffset("acme/bills", 0, 19)]))
    os.remove(f"{data}/format")
    disk.crash_after(operations)
    try:
        repaired(data, disk)
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    disk.crash_after(0)
    disk.power_loss(Unsynced.RANDOM)
    repaired(data, disk)
    bench = Workbench(data, disk=disk)
    assert all_values(bench) == ALL
    assert bench.ask(GroupDescribe("shipping")).places[0].offset == 19


def test_a_snapshot_tells_all_of_a_state_that_was_salvaged(data: str) -> None:
    bench = filled(data)
    state = bench.broker._ledger.state
    again = BrokerState()
    for fact in state.facts():
        again.apply_bytes(encode_fact(fact))
    assert [encode_fact(fact) for fact in again.facts()] == [encode_fact(fact) for fact in state.facts()]
