"""Files of partitions that are not there any more: verify sees it, and a repair makes the gap a known one."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_data_directory import contents, segments
from tests.unit.test_data_repair import repaired, verified

from headrace.broker.inspection import find_missing, inspect
from headrace.cli.main import main
from headrace.engines.data_directory import DataDirectory
from headrace.model.requests import TopicCreate, TopicDelete, TopicTrim
from headrace.storage.offline_reader import OfflineLogReader
from headrace.storage.runtime import StorageRuntime
from headrace.testing.workbench import Workbench

VALUES = [b"%04d" % number + bytes([number % 251]) * 1000 for number in range(400)]


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def filled(data: str, **settings: Any) -> Workbench:
    """A broker with a topic of several segments."""
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"segment_bytes": 1 << 16, **settings}))
    for at in range(0, len(VALUES), 20):
        bench.publish("orders", VALUES[at : at + 20])
    return bench


def partition(data: str) -> Path:
    return Path(data, "topics/1/0")


def bases(data: str) -> list[int]:
    return [int(path.stem) for path in segments(data, "topics/1/0")]


def kept(data: str) -> list[bytes | None]:
    """The values that are left."""
    reader = OfflineLogReader(StorageRuntime(), str(partition(data)))
    batches = reader.batches(reader.first_offset, skip_corrupt=True)
    return [value for batch in batches for value in batch.columns().values]


def missing(data: str) -> list[tuple[int, int]]:
    return [(one.first_offset, one.next_offset) for one in verified(data).missing]


def remove_first(data: str) -> tuple[int, int]:
    first, following = segments(data, "topics/1/0")[:2]
    first.unlink()
    return int(first.stem), int(following.stem)


def remove_last(data: str) -> tuple[int, int]:
    last = segments(data, "topics/1/0")[-1]
    last.unlink()
    return int(last.stem), len(VALUES)


def remove_segments(data: str) -> tuple[int, int]:
    for path in segments(data, "topics/1/0"):
        path.unlink()
    return 0, len(VALUES)


def remove_partition(data: str) -> tuple[int, int]:
    shutil.rmtree(partition(data))
    return 0, len(VALUES)


def empty_partition(data: str) -> tuple[int, int]:
    shutil.rmtree(partition(data))
    partition(data).mkdir()
    return 0, len(VALUES)


def remove_topic(data: str) -> tuple[int, int]:
    shutil.rmtree(partition(data).parent)
    return 0, len(VALUES)


REMOVED = [remove_first, remove_last, remove_segments, remove_partition, empty_partition, remove_topic]
Remove = Callable[[str], tuple[int, int]]


@pytest.mark.parametrize("remove", REMOVED)
def test_what_is_missing_is_seen_and_a_repair_makes_it_a_gap(data: str, remove: Remove) -> None:
    filled(data).close()
    assert verified(data).sound
    begin, end = remove(data)
    before = contents(Path(data))
    found = verified(data)
    assert (found.sound, found.problems) == (False, [])
    assert [(one.path, one.first_offset, one.next_offset) for one in found.missing] == [
        (str(partition(data)), begin, end)
    ]
    assert contents(Path(data)) == before
    done = repaired(data)
    assert (done.changed, done.problems) == (True, [])
    assert [(lost.first_offset, lost.next_offset) for log in done.logs for lost in log.findings.lost] == [(begin, end)]
    assert bool(done.not_restored) == (remove in (remove_partition, empty_partition, remove_topic))
    journal = {name: content for name, content in before.items() if name.startswith("broker/journal/")}
    assert {name: contents(Path(data))[name] for name in journal if name.endswith(".seg")} == {
        name: content for name, content in journal.items() if name.endswith(".seg")
    }
    after = verified(data)
    assert (after.sound, after.missing) == (True, [])
    assert not repaired(data).changed
    lost = [(lost.first_offset, lost.next_offset) for log in after.logs for lost in log.findings.lost if lost.repaired]
    if remove is not remove_first:  # or the log begins behind it
        assert lost == [(begin, end)]
    assert kept(data) == [*VALUES[:begin], *VALUES[end:]]
    bench = Workbench(data)
    assert bench.publish("orders", [b"next"]).base_offset == len(VALUES)
    bench.close()
    assert verified(data).sound


@pytest.mark.parametrize("remove", REMOVED)
def test_a_broker_that_starts_makes_it_a_gap_too(data: str, remove: Remove) -> None:
    filled(data).close()
    remove(data)
    bench = Workbench(data)
    assert bench.publish("orders", [b"next"]).base_offset == len(VALUES)
    bench.close()
    assert verified(data).sound


def test_a_segment_in_the_middle_is_missed(data: str) -> None:
    filled(data).close()
    paths = segments(data, "topics/1/0")
    paths[2].unlink()
    (log,) = [log for log in verified(data).logs if not log.sound]
    assert [(one.first_offset, one.next_offset) for one in log.findings.lost] == [
        (int(paths[2].stem), int(paths[3].stem))
    ]


def test_several_ranges_are_missed_at_once(data: str) -> None:
    filled(data).close()
    begin, end = remove_first(data), remove_last(data)
    assert missing(data) == [begin, end]


def test_a_segment_that_is_shorter_than_it_was_is_missed(data: str) -> None:
    filled(data).close()
    last = segments(data, "topics/1/0")[-1]
    last.with_suffix(".idx").unlink()
    last.write_bytes(last.read_bytes()[:64])
    assert missing(data) == [(int(last.stem), len(VALUES))]


@pytest.mark.parametrize("closed", [False, True])
def test_what_was_removed_in_order_is_not_missed(data: str, closed: bool) -> None:
    bench = filled(data)
    bench.ask(TopicTrim("orders", {0: 250}, unread=True))
    assert bases(data)[0] > 0
    assert verified(data).sound
    bench.ask(TopicTrim("orders", {0: len(VALUES)}, unread=True))
    assert bases(data) == [len(VALUES)]
    if closed:
        bench.close()
    assert verified(data).sound


def test_a_deleted_topic_is_not_missed(data: str) -> None:
    bench = filled(data)
    bench.ask(TopicDelete("orders"))
    assert not partition(data).exists()
    assert verified(data).sound
    bench.close()
    assert verified(data).sound


def test_messages_that_need_not_survive_are_not_missed(data: str) -> None:
    filled(data, durability="written").close()
    shutil.rmtree(partition(data))
    found = verified(data)
    assert found.sound
    assert any("a broker begins it anew" in note.problem for note in found.notes)


@pytest.mark.parametrize("change", [TopicDelete("orders"), TopicTrim("orders", {0: 300}, unread=True)])
def test_a_broker_that_removes_messages_meanwhile_alarms_nobody(data: str, change: Any) -> None:
    bench = filled(data)
    bench.ask(TopicTrim("orders", {0: 20}, unread=True))
    directory = DataDirectory(StorageRuntime(), data)
    state = inspect(directory).state
    assert state is not None
    assert state.producers
    bench.ask(change)
    assert find_missing(directory, state) == []
    bench.close()
    assert find_missing(directory, state) == []


def test_a_first_segment_that_retention_removes_just_now_is_not_missed(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = filled(data)
    directory = DataDirectory(StorageRuntime(), data)
    from headrace.storage import offline_reader

    read, calls = offline_reader.read_meta, [0]

    def reading(*given: Any) -> Any:
        found = read(*given)
        if not calls[0] and given[1] == str(partition(data)):
            calls[0] += 1
            bench.ask(TopicTrim("orders", {0: 300}, unread=True))
        return found

    monkeypatch.setattr(offline_reader, "read_meta", reading)
    extent = directory.log_extent(str(partition(data)))
    assert extent is not None
    assert (calls, extent.begin > 0, extent.first_offset) == ([1], True, 300)


def test_a_journal_that_is_damaged_too_is_repaired_with_the_gap(data: str) -> None:
    filled(data).close()
    begin, end = remove_last(data)
    Path(data, "format").unlink()
    done = repaired(data)
    assert done.problems
    after = verified(data)
    assert after.sound
    assert [
        (lost.first_offset, lost.next_offset) for log in after.logs for lost in log.findings.lost if lost.repaired
    ] == [(begin, end)]


def test_the_command_names_what_is_missing(data: str, capfd: pytest.CaptureFixture[str]) -> None:
    filled(data).close()
    begin, end = remove_last(data)
    assert main(["verify", data]) == 3
    lines = capfd.readouterr().out.splitlines()
    assert f"missing: offsets {begin} to {end - 1} of {partition(data)}: the log ends before them" in lines
    assert main(["verify", data, "--json"]) == 3
    found = json.loads(capfd.readouterr().out)
    assert found["missing"] == [
        {
            "path": str(partition(data)),
            "first_offset": begin,
            "next_offset": end,
            "reason": "the log ends before them",
            "messages": end - begin,
        }
    ]
    assert main(["repair", data]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "repaired"
    assert main(["verify", data]) == 0
    assert f"lost earlier: offsets {begin} to {end - 1}" in capfd.readouterr().out
