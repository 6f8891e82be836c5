"""The faulty disk: each fault can happen, and what the real disk promises holds all the same."""

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.errors import DiskFull, LogNotFound
from headrace.storage.disk import Disk, LocalDisk
from headrace.testing import FaultyDisk, Flip, PowerLoss, Unsynced

SEEDS = range(200)
SECTOR = 512
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


@pytest.fixture
def place() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="headrace-", dir=MEMORY)
    yield path
    shutil.rmtree(path)


def listed(place: str) -> set[str]:
    return {path.relative_to(place).as_posix() for path in Path(place).rglob("*")}


def content(place: str, name: str = "file") -> bytes:
    return Path(place, name).read_bytes()


def saved(disk: FaultyDisk, place: str, data: bytes, name: str = "file") -> None:
    """A file whose content and name are durable."""
    file = disk.open(f"{place}/{name}", create=True)
    disk.write(file, 0, data)
    disk.sync(file)
    disk.sync_directory(place)


def outcomes(script: Callable[[FaultyDisk, str], None], look: Callable[[str], object]) -> list[object]:
    """What power losses with different seeds leave of a script's work."""
    found = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory(dir=MEMORY) as place:
            disk = FaultyDisk(seed)
            script(disk, place)
            disk.power_loss()
            found.append(look(place))
    return found


# Without faults it is the real disk.


def whole_life(disk: Disk, place: str) -> list[object]:
    """A little of everything, and what came of it."""
    disk.make_directory(f"{place}/a/b")
    file = disk.open(f"{place}/a/one", create=True)
    disk.write(file, 3, b"hello")
    disk.zero(file, 8, 2000)
    disk.truncate(file, 1000)
    disk.sync(file)
    seen: list[object] = [disk.size(file), disk.read(file, 0, 10), bytes(disk.map(file, 1000)[:8]), disk.lock(file)]
    disk.unlock(file)
    disk.rename(f"{place}/a/one", f"{place}/a/two")
    disk.make_directory(f"{place}/a/b/c", sync=False)
    disk.open(f"{place}/a/b/c/three", create=True)
    seen += [disk.names(f"{place}/a"), disk.names(f"{place}/none"), disk.exists(f"{place}/a/one")]
    disk.remove_directory(f"{place}/a/b")
    disk.remove(f"{place}/a/none")
    for bad in (f"{place}/none", f"{place}/none/file"):
        with pytest.raises(LogNotFound):
            disk.open(bad)
    with pytest.raises(FileExistsError):
        disk.open(f"{place}/a/two", create=True)
    with pytest.raises(OSError, match="descriptor"):
        disk.write(disk.open(f"{place}/a/two"), 0, b"x")
    with pytest.raises(FileNotFoundError):
        disk.rename(f"{place}/a/none", f"{place}/a/two")
    return [*seen, sorted(listed(place)), content(place, "a/two")]


def test_it_does_what_the_real_disk_does(place: str) -> None:
    os.mkdir(f"{place}/real")
    os.mkdir(f"{place}/faulty")
    disk = FaultyDisk()
    seen = whole_life(disk, f"{place}/faulty")
    assert seen == whole_life(LocalDisk(), f"{place}/real")
    disk.power_loss(Unsynced.KEPT)
    assert [sorted(listed(f"{place}/faulty")), content(place, "faulty/a/two")] == seen[-2:]


def test_every_public_method_of_the_disk_is_known_here() -> None:
    """A method added to Disk changes real files behind the books until FaultyDisk has it too."""
    methods = {name for name, value in vars(Disk).items() if callable(value) and not name.startswith("_")}
    assert methods - vars(FaultyDisk).keys() == {
        "zero",  # which writes by `write`
        "begin_sync",  # which waits
        "close_some",  # its host's
        "on_failure",  # its node's
        "kept_order_since",  # which compares boots
        "is_current",  # which only looks
        "length",
        "report_damage",  # a replicated disk's
        "descriptors_max",
    }


# Files.


@given(seed=st.integers(0, 2**32), data=st.binary(min_size=1, max_size=2000), later=st.binary(max_size=2000))
def test_synced_data_always_survives(seed: int, data: bytes, later: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        disk = FaultyDisk(seed)
        saved(disk, place, data)
        disk.write(disk.open(f"{place}/file", write=True), len(data), later)
        disk.power_loss()
        assert content(place)[: len(data)] == data


def test_unsynced_write_may_vanish_or_stay() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"old")
        disk.write(disk.open(f"{place}/file", write=True), 0, b"new")

    assert set(outcomes(script, content)) == {b"old", b"new"}


def test_write_is_torn_at_sectors_in_any_order() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, bytes(3 * SECTOR))
        file = disk.open(f"{place}/file", write=True)
        disk.write(file, 100, b"a" * (3 * SECTOR - 100))

    def sectors(place: str) -> tuple[bool, ...]:
        data = content(place)
        pieces = [data[:SECTOR], data[SECTOR : 2 * SECTOR], data[2 * SECTOR :]]
        assert data[:100] == bytes(100)
        pieces[0] = pieces[0][100:]
        assert all(piece.count(piece[0]) == len(piece) for piece in pieces), "a sector is torn"
        return tuple(piece[:1] == b"a" for piece in pieces)

    assert len(set(outcomes(script, sectors))) == 8


def test_second_write_survives_without_the_first() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"")
        file = disk.open(f"{place}/file", write=True)
        disk.write(file, 0, b"1" * SECTOR)
        disk.write(file, SECTOR, b"2" * SECTOR)

    assert bytes(SECTOR) + b"2" * SECTOR in outcomes(script, content)


def test_second_write_to_a_sector_never_survives_without_the_first() -> None:
    """The cache holds the sector with both."""

    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"--")
        file = disk.open(f"{place}/file", write=True)
        disk.write(file, 0, b"1")
        disk.write(file, 1, b"2")

    assert set(outcomes(script, content)) == {b"--", b"1-", b"12"}


def test_length_lies_between_durable_and_latest_with_zeros_in_holes() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"x" * 10)
        disk.write(disk.open(f"{place}/file", write=True), 10, b"y" * 1000)

    found = [bytes(data) for data in outcomes(script, content) if isinstance(data, bytes)]
    assert all(10 <= len(data) <= 1010 and set(data[10:]) <= {0, ord("y")} for data in found)
    assert {10, 1010} < {len(data) for data in found}
    assert any(0 in data for data in found)


def test_unsynced_truncation_may_vanish_or_stay() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"x" * 2 * SECTOR)
        file = disk.open(f"{place}/file", write=True)
        disk.truncate(file, 100)
        disk.write(file, 100, b"y")

    short, zeroed = b"x" * 100, b"x" * 100 + bytes(SECTOR - 100) + b"x" * SECTOR
    written = b"x" * 100 + b"y"
    possible = {b"x" * 2 * SECTOR, short, short + b"\0", zeroed, written, written + zeroed[101:]}
    assert set(outcomes(script, content)) == possible


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 1200), st.booleans()), max_size=12),
)
def test_each_sector_is_one_that_the_file_had_since_its_sync(seed: int, steps: list[tuple[int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        disk = FaultyDisk(seed)
        saved(disk, place, b"")
        file = disk.open(f"{place}/file", write=True)
        versions = [b""]
        for number, (position, length, sync) in enumerate(steps, 1):
            disk.write(file, position, bytes([number]) * length)
            if sync:
                disk.sync(file)
                versions.clear()
            versions.append(content(place))
        disk.power_loss()
        left = content(place)
        assert len(versions[0]) <= len(left) <= len(versions[-1])
        for start in range(0, len(left), SECTOR):
            stop = min(start + SECTOR, len(left))
            assert left[start:stop] in {version[start:stop].ljust(stop - start, b"\0") for version in versions}


def test_modes_keep_all_or_nothing_unsynced(place: str) -> None:
    for unsynced, data, names in ((Unsynced.KEPT, b"new", {"file", "more"}), (Unsynced.LOST, b"old", {"file"})):
        disk = FaultyDisk()
        saved(disk, place, b"old")
        disk.write(disk.open(f"{place}/file", write=True), 0, b"new")
        disk.open(f"{place}/more", create=True)
        disk.power_loss(unsynced)
        assert (content(place), listed(place)) == (data, names)
        for name in names:
            disk.remove(f"{place}/{name}")


def test_write_during_a_sync_is_not_synced_by_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    saved(disk, place, b"--")
    file = disk.open(f"{place}/file", write=True)
    disk.write(file, 0, b"1")
    monkeypatch.setattr(LocalDisk, "sync", lambda *_: disk.write(file, 1, b"2"))
    disk.sync(file)
    assert content(place) == b"12"
    disk.power_loss(Unsynced.LOST)
    assert content(place) == b"1-"


def test_stores_through_a_mapping_are_durable_once_synced(place: str) -> None:
    disk = FaultyDisk()
    saved(disk, place, b"----")
    file = disk.open(f"{place}/file", write=True)
    page = disk.map(file, 4, write=True)
    page[0:1] = b"1"
    disk.sync(file)
    page[1:2] = b"2"
    disk.power_loss(Unsynced.LOST)
    page[2:3] = b"3"  # the old process lives on in a test, but reaches nothing
    assert content(place) == b"1---"


def test_stores_through_a_mapping_may_stay_unsynced() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"-")
        disk.map(disk.open(f"{place}/file", write=True), 1, write=True)[0:1] = b"1"

    assert set(outcomes(script, content)) == {b"-", b"1"}


# Names.


def test_synced_file_without_a_synced_name_may_vanish() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        file = disk.open(f"{place}/file", create=True)
        disk.write(file, 0, b"data")
        disk.sync(file)

    found = outcomes(script, lambda place: content(place) if listed(place) else None)
    assert set(found) == {None, b"data"}


def test_named_file_without_synced_data_may_be_empty() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        disk.write(disk.open(f"{place}/file", create=True), 0, b"data")
        disk.sync_directory(place)

    assert {b"", b"data"} <= set(outcomes(script, content))


def test_names_are_lost_from_the_latest_on() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        for name in ("a", "b", "c"):
            disk.open(f"{place}/{name}", create=True)
        disk.remove(f"{place}/a", sync=False)

    found = {frozenset(names) for names in outcomes(script, listed) if isinstance(names, set)}
    assert found == {frozenset(names) for names in ("", "a", "ab", "abc", "bc")}


def test_removed_file_may_come_back_with_its_content() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"data")
        disk.remove(f"{place}/file", sync=False)

    found = outcomes(script, lambda place: content(place) if listed(place) else None)
    assert set(found) == {None, b"data"}


def test_files_found_on_the_disk_come_back_too(place: str) -> None:
    for name in ("removed", "replaced", "new"):
        Path(place, name).write_text(name)
    disk = FaultyDisk()
    disk.remove(f"{place}/removed", sync=False)
    disk.rename(f"{place}/new", f"{place}/replaced", sync=False)
    assert listed(place) == {"replaced"}
    disk.power_loss(Unsynced.LOST)
    assert {name: content(place, name).decode() for name in listed(place)} == {
        name: name for name in ("removed", "replaced", "new")
    }


def test_file_changed_behind_its_back_counts_as_durable_when_opened(place: str) -> None:
    disk = FaultyDisk()
    saved(disk, place, b"old")
    Path(place, "file").write_bytes(b"by hand")
    disk.write(disk.open(f"{place}/file", write=True), 0, b"new")
    disk.power_loss(Unsynced.LOST)
    assert content(place) == b"by hand"


def test_file_removed_while_open_comes_back_as_it_was_written_since(place: str) -> None:
    disk = FaultyDisk()
    saved(disk, place, b"old")
    file = disk.open(f"{place}/file", write=True)
    disk.remove(f"{place}/file", sync=False)
    disk.write(file, 0, b"new")
    disk.sync(file)
    disk.power_loss(Unsynced.LOST)
    assert content(place) == b"new"


def test_renamed_over_file_is_the_old_or_the_new_one() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"old")
        file = disk.open(f"{place}/file.tmp", create=True)
        disk.write(file, 0, b"new")
        disk.sync(file)
        disk.rename(f"{place}/file.tmp", f"{place}/file", sync=False)

    found = outcomes(script, lambda place: (content(place), *sorted(listed(place))))
    assert set(found) == {(b"old", "file"), (b"old", "file", "file.tmp"), (b"new", "file")}


def test_synced_rename_of_an_unsynced_file_may_leave_it_empty() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"old")
        disk.write(disk.open(f"{place}/file.tmp", create=True), 0, b"new")
        disk.rename(f"{place}/file.tmp", f"{place}/file")

    found = set(outcomes(script, content))
    assert b"" in found
    assert b"old" not in found


def test_directory_without_a_synced_name_takes_its_files_with_it() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        disk.make_directory(f"{place}/d", sync=False)
        saved(disk, f"{place}/d", b"data")

    found = {frozenset(names) for names in outcomes(script, listed) if isinstance(names, set)}
    assert found == {frozenset(), frozenset({"d", "d/file"})}


def test_removed_directory_is_gone_and_a_half_removed_one_is_not(place: str) -> None:
    disk = FaultyDisk()
    disk.make_directory(f"{place}/d/e")
    saved(disk, f"{place}/d/e", b"data")
    disk.crash_after(3)  # the file and e are removed, but not the name of e for good
    with pytest.raises(PowerLoss):
        disk.remove_directory(f"{place}/d")
    assert listed(place) == {"d"}
    disk.power_loss(Unsynced.LOST)
    assert listed(place) == {"d", "d/e", "d/e/file"}
    assert content(place, "d/e/file") == b"data"
    disk.remove_directory(f"{place}/d")
    disk.power_loss(Unsynced.LOST)
    assert listed(place) == set()


def test_renamed_directory_keeps_what_is_in_it(place: str) -> None:
    disk = FaultyDisk()
    disk.make_directory(f"{place}/d")
    Path(place, "d", "stranger").write_bytes(b"never seen by the disk")
    disk.rename(f"{place}/d", f"{place}/e", sync=False)
    disk.power_loss(Unsynced.LOST)
    assert listed(place) == {"d", "d/stranger"}


def test_rename_between_directories_is_durable_at_once(place: str) -> None:
    disk = FaultyDisk()
    disk.make_directory(f"{place}/d")
    saved(disk, place, b"data")
    disk.rename(f"{place}/file", f"{place}/d/file", sync=False)
    disk.make_directory(f"{place}/e", sync=False)
    disk.rename(f"{place}/e", f"{place}/d/e", sync=False)
    disk.power_loss(Unsynced.LOST)
    assert listed(place) == {"d", "d/file", "d/e"}
    assert Path(place, "d", "file").read_bytes() == b"data"


# The end of a process, and the next one.


def test_nothing_opened_before_a_power_loss_can_be_used(place: str) -> None:
    disk = FaultyDisk()
    saved(disk, place, b"data")
    file = disk.open(f"{place}/file", write=True)
    mapped = disk.map(file, 4)
    assert disk.lock(file)
    disk.power_loss()
    uses: list[Callable[[], object]] = [
        lambda: disk.read(file, 0, 1),
        lambda: disk.write(file, 0, b"x"),
        lambda: disk.size(file),
        lambda: disk.truncate(file, 0),
        lambda: disk.sync(file),
        lambda: disk.map(file, 1),
        lambda: disk.lock(file),
    ]
    for use in uses:
        with pytest.raises(PowerLoss):
            use()
    disk.unlock(file)  # does nothing: the lock went with the process
    again = disk.open(f"{place}/file", write=True)
    assert disk.lock(again), "the old process still has the lock"
    disk.truncate(again, 0)
    assert mapped[:] == b"data", "reading it would kill the process"


def test_disk_goes_on_after_a_power_loss_as_a_new_one() -> None:
    def script(disk: FaultyDisk, place: str) -> None:
        saved(disk, place, b"old")
        disk.power_loss()
        file = disk.open(f"{place}/file", write=True)
        disk.write(file, 0, b"new")
        disk.sync(file)
        disk.write(file, 0, b"???")

    assert set(outcomes(script, content)) == {b"new", b"???"}


def test_same_seed_same_loss_wherever_it_is() -> None:
    def script(disk: FaultyDisk, place: str, below: str = "") -> None:
        os.makedirs(place + below, exist_ok=True)
        disk.write(disk.open(f"{place}{below}/file", create=True), 0, b"x" * 9000)

    def look(place: str) -> list[bytes]:
        return [path.read_bytes() for path in Path(place).rglob("file")]

    found = outcomes(script, look)
    assert found == outcomes(lambda disk, place: script(disk, place, "/d/e"), look)
    assert [] in found
    assert len({str(left) for left in found}) > 20


def small_script(disk: FaultyDisk, place: str, done: list[str]) -> None:
    """Replaces a file's content safely; says how far it came."""
    disk.make_directory(f"{place}/d")
    file = disk.open(f"{place}/d/new", create=True)
    disk.write(file, 0, b"data" * 300)
    disk.zero(file, 1200, 100)
    disk.truncate(file, 1200)
    disk.sync(file)
    disk.rename(f"{place}/d/new", f"{place}/d/file")
    done.append("saved")
    disk.remove(f"{place}/d/file", sync=False)
    disk.sync_directory(f"{place}/d")
    done.append("removed")


@pytest.mark.parametrize("unsynced", Unsynced)
def test_crash_at_every_operation(unsynced: Unsynced) -> None:
    trial = FaultyDisk()
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        small_script(trial, place, [])
    assert trial.operations == 11
    for crash_at in range(1, trial.operations + 2):
        with tempfile.TemporaryDirectory(dir=MEMORY) as place:
            disk = FaultyDisk(seed=crash_at)
            disk.crash_after(crash_at)
            done: list[str] = []
            if crash_at <= trial.operations:
                with pytest.raises(PowerLoss):
                    small_script(disk, place, done)
                assert disk.operations == crash_at
                assert disk.crashed
                with pytest.raises(PowerLoss):
                    disk.exists(place)
                with pytest.raises(PowerLoss):
                    disk.names(place)
            else:
                small_script(disk, place, done)
            disk.power_loss(unsynced)
            left = listed(place)
            assert disk.exists(place)
            if "removed" in done:
                assert left == {"d"}
            elif "saved" in done:
                assert left <= {"d", "d/file"}
            if "d/file" in left:
                assert content(place, "d/file") == b"data" * 300


def test_crash_leaves_a_part_of_the_last_write() -> None:
    lengths = set()
    for seed in SEEDS:
        with tempfile.TemporaryDirectory(dir=MEMORY) as place:
            disk = FaultyDisk(seed)
            file = disk.open(f"{place}/file", create=True)
            disk.crash_after(2)
            disk.write(file, 0, b"done")
            with pytest.raises(PowerLoss):
                disk.write(file, 4, b"12345678")
            disk.power_loss(Unsynced.KEPT)
            assert b"done12345678".startswith(content(place))
            lengths.add(len(content(place)))
    assert lengths == set(range(4, 13))


def test_crash_not_reached_is_off_after_a_power_loss(place: str) -> None:
    disk = FaultyDisk()
    disk.crash_after(2)
    disk.sync_directory(place)
    disk.power_loss()
    saved(disk, place, b"data")
    assert not disk.crashed


def test_crash_at_once_and_power_loss_is_no_os_error(place: str) -> None:
    disk = FaultyDisk()
    disk.crash_after(0)
    with pytest.raises(PowerLoss) as caught:
        disk.exists(place)
    assert not isinstance(caught.value, OSError)


# Other faults.


def test_a_file_that_was_only_made_longer_uses_no_space(place: str) -> None:
    disk = FaultyDisk(capacity_bytes=100)
    file = disk.open(f"{place}/a", create=True)
    disk.truncate(file, 1000)
    assert disk.used_bytes == 0
    disk.write(file, 0, b"x" * 100)
    with pytest.raises(DiskFull):
        disk.write(file, 100, b"x")


def test_full_disk_takes_what_fits_and_frees_by_truncating_and_removing(place: str) -> None:
    disk = FaultyDisk(capacity_bytes=100)
    saved(disk, place, b"x" * 60, "a")
    file = disk.open(f"{place}/b", create=True)
    with pytest.raises(DiskFull) as caught:
        disk.write(file, 0, b"y" * 50)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert content(place, "b") == b"y" * 40
    assert disk.used_bytes == 100
    disk.write(file, 0, b"z" * 40)  # in place it needs no room
    with pytest.raises(DiskFull):
        disk.zero(file, 40, 1)
    disk.truncate(file, 30)
    disk.write(file, 30, b"y" * 10)
    disk.remove(f"{place}/a")
    disk.write(file, 40, b"y" * 60)
    disk.capacity_bytes = 101
    disk.write(file, 100, b"y")
    with pytest.raises(DiskFull):
        disk.write(file, 200, b"y")
    assert disk.size(file) == 101
    disk.capacity_bytes = None
    disk.write(file, 200, b"y")


def test_full_disk_says_what_the_real_one_says(place: str) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with pytest.raises(DiskFull) as real:
        LocalDisk().write(LocalDisk().open("/dev/full", write=True), 0, b"x")
    disk = FaultyDisk(capacity_bytes=0)
    with pytest.raises(DiskFull) as faulty:
        disk.write(disk.open(f"{place}/file", create=True), 0, b"x")
    assert str(faulty.value) == str(real.value).replace("/dev/full", f"{place}/file")


def test_files_found_count_once_they_are_listed(place: str) -> None:
    Path(place, "found").write_bytes(b"x" * 10)
    disk = FaultyDisk()
    assert disk.used_bytes == 0
    disk.names(place)
    assert disk.used_bytes == 10


@given(seed=st.integers(0, 2**32), unsynced=st.sampled_from([Unsynced.LOST, Unsynced.RANDOM]))
def test_failed_sync_loses_the_data_though_later_syncs_succeed(seed: int, unsynced: Unsynced) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        disk = FaultyDisk(seed)
        saved(disk, place, b"old")
        file = disk.open(f"{place}/file", write=True)
        disk.write(file, 0, b"new")
        disk.fail_sync(times=2)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output") as caught:
                disk.sync(file)
            assert caught.value.errno == errno.EIO
        disk.sync(file)
        disk.write(file, SECTOR, b"more")
        disk.sync(file)
        assert content(place)[:3] == b"new"
        disk.power_loss(unsynced)
        assert content(place) == b"old".ljust(SECTOR, b"\0") + b"more"


def test_failed_sync_is_forgotten_by_a_mere_process_crash(place: str) -> None:
    disk = FaultyDisk()
    saved(disk, place, b"old")
    file = disk.open(f"{place}/file", write=True)
    disk.write(file, 0, b"new")
    disk.fail_sync(error=errno.ENOSPC)
    with pytest.raises(OSError, match="space"):
        disk.sync(file)
    disk.power_loss(Unsynced.KEPT)
    assert content(place) == b"new"


def test_failed_directory_sync_leaves_names_unsynced(place: str) -> None:
    disk = FaultyDisk()
    disk.open(f"{place}/file", create=True)
    disk.fail_sync()
    with pytest.raises(OSError, match="Input/output"):
        disk.sync_directory(place)
    disk.power_loss(Unsynced.LOST)
    assert listed(place) == set()


def test_reads_fail_as_often_as_told(place: str) -> None:
    disk = FaultyDisk()
    saved(disk, place, b"data")
    file = disk.open(f"{place}/file")
    disk.fail_reads(times=2)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            disk.read(file, 0, 4)
    assert disk.read(file, 0, 4) == b"data"


def test_flipped_bit_is_told_and_survives(place: str) -> None:
    disk = FaultyDisk(seed=1)
    saved(disk, place, b"data" * 100)
    flips = {disk.flip_bit(f"{place}/file") for _ in range(20)}
    assert len(flips) == 20
    expected = bytearray(b"data" * 100)
    for flip in flips:
        expected[flip.position] ^= 1 << flip.bit
    assert content(place) == expected
    disk.power_loss()
    assert content(place) == expected


def test_flip_of_a_chosen_bit_in_a_file_being_written(place: str) -> None:
    for unsynced, left in ((Unsynced.KEPT, b"newx"), (Unsynced.LOST, b"oldx")):
        disk = FaultyDisk()
        saved(disk, place, b"old-")
        file = disk.open(f"{place}/file", write=True)
        disk.write(file, 0, b"new")
        path = f"{place}/file"
        for bit in (0, 2, 4, 6):
            assert disk.flip_bit(path, 3, bit) == Flip(path, 3, bit)
        assert disk.map(file, 4)[:] == b"newx"
        disk.power_loss(unsynced)
        assert content(place) == left
        disk.remove(path)


def test_counters_count(place: str) -> None:
    disk = FaultyDisk()
    file = disk.open(f"{place}/file", create=True)
    disk.write(file, 0, b"data")
    disk.zero(file, 4, 6)
    disk.sync(file)
    disk.sync(file)
    disk.sync_directory(place)
    assert (disk.writes, disk.bytes_written, disk.syncs, disk.directory_syncs) == (2, 10, 2, 1)
    assert disk.operations == 6


def test_threads_share_the_disk(place: str) -> None:
    disk = FaultyDisk()
    saved(disk, place, b"", "common")
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            own = disk.open(f"{place}/{number}", create=True)
            common = disk.open(f"{place}/common", write=True)
            for step in range(100):
                disk.write(own, step, b"x")
                disk.write(common, number * 100 + step, b"y")
                disk.sync(own if step % 2 else common)
            disk.sync(common)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    disk.sync_directory(place)
    assert (disk.writes, disk.bytes_written) == (801, 800)
    disk.power_loss(Unsynced.LOST)
    assert content(place, "common") == b"y" * 400
    assert [content(place, str(number)) for number in range(4)] == [b"x" * 100] * 4
