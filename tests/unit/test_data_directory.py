"""A data directory: where a broker begins, what it refuses, and that it deletes nothing that it does not understand."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from headrace.broker.facts import BrokerState, IdsReserved, TopicDeleted, TopicFilesRemoved, TopicSet, encode_fact
from headrace.broker.settings import BrokerSettings
from headrace.engines import store
from headrace.engines.data_directory import FORMAT, DataDirectory, DataFormat
from headrace.model.errors import DataDirectoryDamaged, NotADataDirectory, UnsupportedFormat
from headrace.model.requests import (
    Commit,
    GroupDescribe,
    Info,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
)
from headrace.storage.log import FileLog
from headrace.storage.owner import read_owner
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

Destroy = Callable[[Path], None]
"""Does something to a data directory."""


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def filled(data: str, **more: Any) -> Workbench:
    """A broker with two topics that have messages."""
    bench = Workbench(data, **more)
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    bench.publish("orders", [b"a"] * 20, partition=1)
    bench.publish("acme/bills", [b"b"] * 20)
    bench.ask(Commit("billing", [PartitionOffset("orders", 1, 7)]))
    return bench


def segments(data: str, part: str = "broker/journal") -> list[Path]:
    return sorted(Path(data, part).glob("*.seg"))


def contents(directory: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


# What a directory says of itself.


def test_a_directory_knows_whose_it_is_and_how_often_it_was_used(data: str) -> None:
    for start in (1, 2):
        Workbench(data)
        assert DataDirectory(StorageRuntime(), data).read_format() == DataFormat(FORMAT, 0, 0, "workbench", start)


def test_every_partition_says_whose_it_is(data: str) -> None:
    bench = filled(data)
    owner = read_owner(StorageRuntime(), f"{data}/topics/1/1").owner
    assert owner is not None
    assert (owner.identity, owner.topic_id, owner.topic, owner.partition) == ("workbench", 1, "orders", 1)
    assert owner.settings == bench.ask(TopicDescribe("orders")).settings
    bills = read_owner(StorageRuntime(), f"{data}/topics/2/0").owner
    assert bills is not None
    assert bills.topic == "acme/bills"


def test_altered_settings_are_stored_with_the_partitions(data: str) -> None:
    bench = filled(data)
    bench.ask(TopicAlter("orders", {"retain_seconds": 60.0, "partitions": 3}))
    altered = bench.ask(TopicDescribe("orders")).settings
    owners = [read_owner(StorageRuntime(), f"{data}/topics/1/{number}").owner for number in range(3)]
    assert [owner and (owner.revision, owner.settings) for owner in owners] == [(1, altered)] * 3


@pytest.mark.parametrize("unsynced", list(Unsynced))
@pytest.mark.parametrize("operations", range(1, 14))
def test_altered_settings_are_the_journals_after_a_crash(data: str, operations: int, unsynced: Unsynced) -> None:
    disk = FaultyDisk(operations)
    bench = filled(data, disk=disk)
    before = bench.ask(TopicDescribe("orders")).settings
    disk.crash_after(operations)
    answered = False
    try:
        bench.ask(TopicAlter("orders", {"retain_seconds": 60.0}))
        answered = True
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    disk.power_loss(unsynced)
    bench = Workbench(data, disk=disk)
    after = bench.ask(TopicDescribe("orders")).settings
    assert after["retain_seconds"] in ((60.0,) if answered else (60.0, before["retain_seconds"]))
    assert len(bench.values("orders", 1)) == 20
    owner = read_owner(StorageRuntime(disk), f"{data}/topics/1/1").owner
    assert owner is not None
    assert owner.settings == after


def test_a_log_of_a_topic_with_the_longest_name_can_be_made(data: str) -> None:
    name = "t" * 40 + "/" + "\U0001f600" * 249
    bench = Workbench(data)
    bench.publish(name, [b"a"])
    assert Workbench(data).values(name) == [b"a"]


# Formats.


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (DataFormat(FORMAT + 1, 0, 0, "later", 1), f"format {FORMAT + 1}"),
        (DataFormat(FORMAT, 1 << 40, 0, "later", 1), "0x10000000000"),
    ],
)
def test_what_a_newer_headrace_wrote_is_refused(data: str, found: DataFormat, text: str) -> None:
    DataDirectory(StorageRuntime(), data).write_format(found)
    before = contents(Path(data))
    with pytest.raises(UnsupportedFormat, match=text):
        Workbench(data)
    assert contents(Path(data)) == before


def test_a_format_with_more_in_it_can_be_read(data: str) -> None:
    """Whoever adds a field that matters also adds a required feature."""
    filled(data).close()
    directory = DataDirectory(StorageRuntime(), data)
    found = directory.read_format()
    assert found is not None
    directory.write_format(msgspec.structs.replace(found, optional=1 << 33))
    assert Workbench(data).ask(Info()).topics == 2
    after = DataDirectory(StorageRuntime(), data).read_format()
    assert after is not None
    assert after.optional == 1 << 33


# Directories that are not a broker's.


def test_other_peoples_files_are_left_alone(data: str) -> None:
    os.mkdir(data)
    for name in ("thesis.tex", ".bashrc", "format"):
        Path(data, name).write_text("mine")
    os.mkdir(f"{data}/topics")
    before = contents(Path(data))
    with pytest.raises(NotADataDirectory, match=r"\(format, thesis.tex\)"):
        Workbench(data)
    assert contents(Path(data)) == before


def test_a_log_is_not_a_brokers_directory(data: str) -> None:
    FileLog(StorageRuntime(), data).close()
    with pytest.raises(NotADataDirectory):
        Workbench(data)


def test_a_new_file_system_is_as_good_as_empty(data: str) -> None:
    os.makedirs(f"{data}/lost+found")
    Path(data, ".keep").touch()
    Path(data, "lock").touch()
    assert Workbench(data).ask(Info()).topics == 0


@pytest.mark.parametrize("unsynced", list(Unsynced))
@pytest.mark.parametrize("operations", range(1, 45))
def test_a_crash_while_a_directory_is_made_does_not_spoil_it(data: str, operations: int, unsynced: Unsynced) -> None:
    disk = FaultyDisk(operations)
    disk.crash_after(operations)
    try:
        filled(data, disk=disk)
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    disk.power_loss(unsynced)
    bench = Workbench(data, disk=disk)
    bench.publish("others", [b"a"])
    bench = Workbench(data, disk=disk)
    assert bench.values("others") == [b"a"]


# Journals that are not what they were.


def remove(data: Path) -> None:
    for path in segments(str(data)):
        path.unlink()


def empty(data: Path) -> None:
    for path in segments(str(data)):
        os.truncate(path, 0)


def cut(data: Path) -> None:
    for path in segments(str(data)):
        os.truncate(path, 100)


def zero(data: Path) -> None:
    for path in segments(str(data)):
        path.write_bytes(bytes(path.stat().st_size))


def remove_own(data: Path) -> None:
    shutil.rmtree(data / "broker")


def remove_journal(data: Path) -> None:
    shutil.rmtree(data / "broker" / "journal")


def remove_format(data: Path) -> None:
    (data / "format").unlink()


def empty_format(data: Path) -> None:
    os.truncate(data / "format", 0)


DESTROYED = [remove, empty, cut, zero, remove_own, remove_journal, remove_format, empty_format]


@pytest.mark.parametrize("peace", [False, True])
@pytest.mark.parametrize("destroy", DESTROYED)
def test_a_broker_without_its_journal_does_not_start_and_touches_nothing(
    data: str, destroy: Destroy, peace: bool
) -> None:
    bench = filled(data)
    if peace:
        bench.close()
    destroy(Path(data))
    before = contents(Path(data, "topics"))
    for _ in range(2):
        with pytest.raises(DataDirectoryDamaged) as refused:
            Workbench(data)
        assert f"headrace repair {data}" in str(refused.value)
        assert "2 partitions" in str(refused.value)
        assert contents(Path(data, "topics")) == before


@pytest.mark.parametrize("destroy", [remove, remove_own, empty, zero])
def test_a_journal_is_missed_though_there_are_no_partitions(data: str, destroy: Destroy) -> None:
    """Topics in memory, groups and schedules were in it."""
    Workbench(data).close()
    destroy(Path(data))
    with pytest.raises(DataDirectoryDamaged):
        Workbench(data)


def test_a_journal_of_another_broker_is_refused(data: str) -> None:
    other = f"{data}-other"
    filled(other).close()
    directory = DataDirectory(StorageRuntime(), other)
    found = directory.read_format()
    assert found is not None
    directory.write_format(msgspec.structs.replace(found, identity="another"))
    before = contents(Path(other))
    with pytest.raises(DataDirectoryDamaged, match="of the data directory workbench, not of this one, another"):
        Workbench(other)
    assert before.keys() == contents(Path(other)).keys()


def test_an_older_copy_of_the_journal_is_refused(data: str) -> None:
    filled(data).close()
    shutil.copytree(f"{data}/broker", f"{data}-copy")
    Workbench(data).close()
    shutil.rmtree(f"{data}/broker")
    shutil.move(f"{data}-copy", f"{data}/broker")
    with pytest.raises(DataDirectoryDamaged, match="knows of 1 starts of the broker, and there were 2"):
        Workbench(data)


def test_a_journal_that_lost_a_topic_since_the_last_start_is_refused(data: str) -> None:
    bench = Workbench(data)
    (path,) = segments(data)
    bench.ask(TopicCreate("orders"))
    end = len(path.read_bytes().rstrip(b"\0"))
    bench.ask(TopicCreate("bills"))
    bench.publish("bills", [b"a"])
    os.truncate(path, end + 30)  # torn, as if it had just been written
    with pytest.raises(DataDirectoryDamaged, match="does not know partition 0 of bills"):
        Workbench(data)
    assert Path(data, "topics/2/0").exists()


@pytest.mark.parametrize("quick", [False, True])
def test_a_topic_that_the_journal_lost_is_missed_after_a_reboot_too(data: str, quick: bool) -> None:
    """No power loss takes from a journal what was on the disk, whether the topic or its first message was so first."""
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    (path,) = segments(data)
    end = len(path.read_bytes().rstrip(b"\0"))
    bench.syncing_later = quick
    bench.ask(TopicCreate("orders"))
    bench.publish("orders", [b"a"])
    bench.publish("orders", [b"b"])
    disk.power_loss(Unsynced.LOST)
    os.truncate(path, end)
    with pytest.raises(DataDirectoryDamaged, match="does not know partition 0 of orders"):
        Workbench(data, disk=disk)


@pytest.mark.parametrize("share", [number / 40 for number in range(40)])
def test_flipped_bits_in_the_journal_cost_no_message(data: str, share: float) -> None:
    """The broker starts with all that it knew, or not at all; what it does not know is still there."""
    disk = FaultyDisk(round(share * 40))
    bench = filled(data, disk=disk)
    for _ in range(10):
        bench.ask(Commit("billing", [PartitionOffset("orders", 1, 7)]))
    (path,) = segments(data)
    disk.flip_bit(str(path), round(share * len(path.read_bytes().rstrip(b"\0"))))
    before = {name: len(content) for name, content in contents(Path(data, "topics")).items()}
    try:
        bench = Workbench(data, disk=disk)
    except DataDirectoryDamaged:
        assert {name: len(content) for name, content in contents(Path(data, "topics")).items()} == before
    else:
        assert (len(bench.values("orders", 1)), len(bench.values("acme/bills"))) == (20, 20)


# Snapshots.


def many_snapshots(data: str, disk: FaultyDisk) -> Workbench:
    bench = filled(data, disk=disk, settings=BrokerSettings(journal_bytes=4000))
    for number in range(150):
        bench.ask(Commit(f"group-{number % 40}", [PartitionOffset("orders", 1, number % 20)]))
    return bench


def test_a_damaged_snapshot_is_made_up_for_by_the_one_before(data: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk()
    bench = many_snapshots(data, disk)
    before = {number: bench.ask(GroupDescribe(f"group-{number}")).places for number in range(40)}
    bench.close()
    journal = DataDirectory(StorageRuntime(disk), data).read_journal()
    start = journal.survey().start
    (batch,) = journal._log.batches(start + 1, until=start + 2)  # the first part of the snapshot
    content = bytes(batch.data)
    (path,) = [path for path in segments(data) if content in path.read_bytes()]
    disk.flip_bit(str(path), path.read_bytes().index(content) + len(content) - 5)
    with caplog.at_level(logging.WARNING):
        bench = Workbench(data, disk=disk)
    assert "nothing depends on it" in caplog.text
    assert {number: bench.ask(GroupDescribe(f"group-{number}")).places for number in range(40)} == before


def test_a_journal_is_sound_though_its_beginning_was_forgotten(data: str, caplog: pytest.LogCaptureFixture) -> None:
    """Snapshots have taken its place, of which there are two."""
    with patch.object(store, "_JOURNAL_SETTINGS", LogSettings(segment_bytes=4096)):
        disk = FaultyDisk()
        many_snapshots(data, disk)
        journal = DataDirectory(StorageRuntime(disk), data).read_journal()
        survey = journal.survey()
        assert journal._log.first_offset > 0
        assert (survey.lost, survey.harmless) == ([], [])
        assert survey.start > journal._log.first_offset
        with caplog.at_level(logging.WARNING):
            Workbench(data, disk=disk)
        assert not caplog.text


def test_a_journal_whose_first_file_is_missing_is_refused(data: str) -> None:
    with patch.object(store, "_JOURNAL_SETTINGS", LogSettings(segment_bytes=4096)):
        bench = filled(data)
        for _ in range(60):
            bench.ask(Commit("billing", [PartitionOffset("orders", 1, 7)]))
        bench.close()
        segments(data)[0].unlink()
        with pytest.raises(DataDirectoryDamaged, match="their files are missing"):
            Workbench(data)


# Topics that are deleted.


def state_of(*facts: Any) -> BrokerState:
    state = BrokerState()
    for fact in facts:
        state.apply_bytes(encode_fact(fact))
    return state


def test_a_deleted_topic_is_remembered_until_its_files_are_gone() -> None:
    state = state_of(TopicSet(1, "orders", 0, {}), TopicDeleted(1), TopicSet(2, "bills", 0, {}))
    again = state_of(*state.facts())
    assert (again.gone, list(again.topics)) == ({1}, [2])
    again.apply(TopicFilesRemoved(1))
    assert state_of(*again.facts()).gone == set()


def test_ids_that_are_reserved_stay_so() -> None:
    state = state_of(IdsReserved(7, 8, 9))
    again = state_of(*state.facts())
    assert (again.topic_id, again.leased.subscription_id, again.commits) == (7, 8, 9)


@pytest.mark.parametrize("unsynced", list(Unsynced))
@pytest.mark.parametrize("operations", range(1, 22))
def test_what_a_crash_leaves_of_a_deleted_topic_goes_and_nothing_else(
    data: str, operations: int, unsynced: Unsynced
) -> None:
    disk = FaultyDisk(operations)
    bench = filled(data, disk=disk)
    disk.crash_after(operations)
    deleted = False
    try:
        bench.ask(TopicDelete("orders"))
        deleted = True
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    disk.power_loss(unsynced)
    for _ in range(2):
        bench = Workbench(data, disk=disk)
        assert len(bench.values("acme/bills")) == 20
        topics = bench.ask(Info()).topics
        assert topics == 1 or not deleted
        assert topics == 1 or len(bench.values("orders", 1)) == 20
        assert Path(data, "topics/1/1").exists() is (topics == 2)
        assert not Path(data, "set-aside").exists()


# What the journal knows nothing of.


def test_a_partition_that_a_power_loss_took_from_the_journal_is_set_aside(
    data: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.syncing_later = True
    bench.begin(TopicCreate("orders"))
    bench.syncing_later = False
    bench.begin(Publish("orders", 0), bench.batch([b"never acknowledged"] * 20).data)
    disk.power_loss(Unsynced.LOST)
    with caplog.at_level(logging.WARNING):
        bench = Workbench(data, disk=disk)
    assert "set aside: the journal knows no such partition" in caplog.text
    (aside,) = DataDirectory(StorageRuntime(), data).set_aside.entries()
    assert aside == (f"{data}/set-aside/topics-1-0.1", "the journal knows no such partition")
    assert b"never acknowledged" in segments(aside.path, "")[0].read_bytes()
    for _ in range(2):  # nor is its id given out when it is out of sight
        bench = Workbench(data, disk=disk)
    assert bench.ask(TopicCreate("orders")).id == 2


def test_files_that_somebody_put_there_are_set_aside_or_left_alone(data: str) -> None:
    filled(data).close()
    shutil.copytree(f"{data}/topics/1/1", f"{data}/topics/1/9")
    shutil.copytree(f"{data}/topics/2", f"{data}/topics/77")
    for path in ("topics/notes", "topics/1/README"):
        Path(data, path).write_text("mine")
    before = contents(Path(data, "topics"))
    bench = Workbench(data)
    assert (len(bench.values("orders", 1)), len(bench.values("acme/bills"))) == (20, 20)
    after = contents(Path(data, "topics"))
    assert {"notes", "1/README"} <= after.keys()
    assert not [name for name in after if name.startswith(("77/", "1/9/"))]
    aside = contents(Path(data, "set-aside"))
    assert aside["topics-77-0.1/00000000000000000000.seg"] == before["77/0/00000000000000000000.seg"]
    assert aside["topics-1-9.1/00000000000000000000.seg"] == before["1/9/00000000000000000000.seg"]
    assert bench.ask(TopicCreate("more")).id == 78


def test_another_brokers_partition_is_not_taken_for_ones_own(data: str) -> None:
    filled(data).close()
    other = f"{data}-other"
    filled(other).close()
    path = f"{other}/topics/1/1"
    log = FileLog(StorageRuntime(), path, owned=True)
    owner = read_owner(StorageRuntime(), path).owner
    assert owner is not None
    log.set_owner(msgspec.structs.replace(owner, identity="another").encoded())
    log.close()
    shutil.rmtree(f"{data}/topics/1/1")
    shutil.copytree(path, f"{data}/topics/1/1")
    bench = Workbench(data)
    with pytest.raises(DataDirectoryDamaged, match="of the data directory another, not partition 1 of orders"):
        bench.publish("orders", [b"a"], partition=1)
    assert len(bench.values("acme/bills")) == 20
    bench.ask(TopicDelete("orders"))
    assert [aside.path for aside in DataDirectory(StorageRuntime(), data).set_aside.entries()] == [
        f"{data}/set-aside/topics-1-1.1"
    ]
