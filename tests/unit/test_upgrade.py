"""A data directory of format 1, as an earlier Headrace left it when it was killed, is brought over whole."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.broker.upgrade import upgrade
from headrace.cli.main import main
from headrace.embedded.log import Log
from headrace.engines.api import FORMAT, DataDirectory, DataFormat
from headrace.engines.data_directory import UPGRADING
from headrace.model.batch import Producer
from headrace.model.errors import CorruptBatch, LogInUse, NotADataDirectory, UnsupportedFormat
from headrace.model.leasing import Lease, SubscriptionDescribe
from headrace.model.requests import (
    GroupDescribe,
    Publish,
    TransactionBegin,
    TransactionCommit,
)
from headrace.model.schedule_requests import ScheduleList
from headrace.offline import upgrade_data
from headrace.server import DirectoryLock, repair_data, verify_data
from headrace.storage.disk import Disk, PrivateDisk
from headrace.storage.runtime import StorageRuntime
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.faulty_disk import PowerLoss
from headrace.testing.workbench import START_US, Workbench

FORMER = Path(__file__).parent / "format1.tar.xz"
"""Two topics of the default tenant and one of acme, a queue with an acknowledged and a rejected message, two groups, a
schedule, a committed transaction, and a shared one with a staged batch; some of it was not closed."""
MINUTE_US = 60_000_000


@pytest.fixture
def data(tmp_path: Path) -> str:
    return unpacked(tmp_path / "data")


def unpacked(path: Path) -> str:
    with tarfile.open(FORMER) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                target = path / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    return str(path)


def upgraded(data: str, disk: Disk | None = None) -> None:
    upgrade(DataDirectory(StorageRuntime(disk), data), lambda _: None)


def check_contents(data: str) -> None:
    """All that was in the directory is there, and can be used."""
    bench = Workbench(data, now_us=START_US + 2 * MINUTE_US)
    assert bench.values("orders") == [b"a", b"b", *[b"x" * 40] * 50]
    assert bench.values("orders", 1) == [b"second", b"committed"]
    first = next(bench.batches("orders")[0].messages())
    assert (first.key, dict(first.headers or ())) == (b"k", {"h": b"1"})
    assert bench.values("acme/orders") == [b"acme 1", b"acme 2"]
    assert bench.ask(GroupDescribe("billing")).places[0].offset == 2
    in_acme = bench.connect(tenant="acme")
    assert bench.ask(GroupDescribe("billing"), session=in_acme).places[0].offset == 1
    queue = bench.ask(SubscriptionDescribe("jobs"))
    assert (queue.ready, queue.dead) == (1, 1)
    assert bench.ask(Lease("jobs")).answer.portions[0].offsets == [2]
    assert [info.definition.name for info in bench.ask(ScheduleList()).schedules] == ["nightly"]
    again = bench.batch([b"x"], Producer(100, 1, 1)).data
    assert bench.ask(Publish("orders", 0), again).duplicate
    assert bench.ask(TransactionBegin("copy", 7)).committed
    shared = bench.ask(TransactionBegin("shared", 3, join=True))
    bench.ask(TransactionCommit("shared", shared.epoch))
    assert bench.values("orders", 1) == [b"second", b"committed", b"staged"]


@pytest.mark.parametrize(
    "use",
    [
        Workbench,
        lambda data: verify_data(data, lambda _: None),
        lambda data: repair_data(data, lambda _: None),
        lambda data: Log(f"{data}/topics/2/0", readonly=True),
    ],
)
def test_the_former_format_is_refused_with_the_way_out(data: str, use: Callable[[str], object]) -> None:
    with pytest.raises(UnsupportedFormat, match="headrace upgrade"):
        use(data)


def test_everything_is_brought_over(data: str) -> None:
    done = upgrade_data(data, lambda _: None)
    assert (done.changed, done.from_format, done.format, done.logs, done.segments) == (True, 1, FORMAT, 7, 7)
    assert verify_data(data, lambda _: None).sound
    assert not upgrade_data(data, lambda _: None).changed
    check_contents(data)


def test_it_can_be_killed_at_any_moment(tmp_path: Path) -> None:
    counted = FaultyDisk()
    upgraded(unpacked(tmp_path / "counted"), counted)
    for moment in range(0, counted.operations, 5):
        data = unpacked(tmp_path / "killed")
        disk = FaultyDisk(moment)
        disk.crash_after(moment)
        with pytest.raises(PowerLoss):
            upgraded(data, disk)
        disk.power_loss(Unsynced.RANDOM)
        found = DataDirectory(StorageRuntime(), data).stored_format()
        assert found is not None
        if (found.number, found.required) != (FORMAT, 0):  # else only its last sync was missing
            with pytest.raises(UnsupportedFormat):
                Workbench(data)
        upgraded(data)
        check_contents(data)
        shutil.rmtree(data)


def test_one_that_was_begun_is_finished_before_a_broker_works_there(data: str) -> None:
    directory = DataDirectory(StorageRuntime(), data)
    found = directory.stored_format()
    assert found is not None
    directory.write_format(DataFormat(FORMAT, UPGRADING, 0, found.identity, found.session))
    with pytest.raises(UnsupportedFormat, match="begun and not finished; `headrace upgrade"):
        Workbench(data)
    assert upgrade_data(data, lambda _: None).changed
    check_contents(data)


@pytest.mark.parametrize("content", [b"", b"junk" * 99])
def test_files_that_are_no_segments_are_left_alone(data: str, content: bytes) -> None:
    names = ["0.seg", "000.seg", "5.seg", "11.seg", "٣.seg", "0.idx", "1.seg.new", "0.seg.tmp"]
    stray = [Path(data, log, name) for log in ("topics/1/0", "broker/journal") for name in names]
    for path in stray:
        path.write_bytes(content)
    assert upgrade_data(data, lambda _: None).segments == 7
    check_contents(data)
    assert [path.read_bytes() for path in stray] == [content] * len(stray)


def test_damage_stays_where_it_is(data: str) -> None:
    segment = Path(data, "topics", "1", "0", f"{0:020d}.seg")
    content = bytearray(segment.read_bytes())
    content[64 + 90] ^= 0xFF  # in the body of the first batch
    segment.write_bytes(content)
    upgrade_data(data, lambda _: None)
    bench = Workbench(data)
    with pytest.raises(CorruptBatch, match="messages 0 to 1 are damaged"):
        bench.values("orders")
    assert bench.values("orders", offset=2) == [b"x" * 40] * 50
    assert content[64:179] in segment.read_bytes()


def test_the_commands_tell_of_damage(data: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = f"{data}/topics/1/0/{0:020d}.seg"
    content = bytearray(Path(path).read_bytes())
    content[153] ^= 0xFF
    Path(path).write_bytes(content)
    again = shutil.copytree(data, f"{data}-again")
    lone = shutil.copytree(f"{data}/topics/1/0", f"{data}-log")

    assert main(["upgrade", data, "--json"]) == 0
    damaged = {"path": path, "first_offset": 0, "next_offset": 2, "messages": 2}
    assert json.loads(capfd.readouterr().out)["damaged"] == [damaged]
    for _ in range(2):  # before and after a broker has opened it
        assert main(["verify", data, "--json"]) == 0
        lost = json.loads(capfd.readouterr().out)["lost_earlier"]
        assert [{name: one[name] for name in damaged} for one in lost] == [damaged]
        Workbench(data).close()

    assert main(["upgrade", again]) == 0
    told = capfd.readouterr().out
    assert f"damaged: offsets 0 to 1 ({again}/topics/1/0/" in told
    assert "2 damaged messages became gaps" in told
    assert main(["verify", again]) == 0
    assert f"lost earlier: offsets 0 to 1 ({again}/topics/1/0/" in capfd.readouterr().out
    assert [one[1:] for one in upgrade_data(lone, lambda _: None).damaged] == [(0, 2)]


def test_torn_bytes_at_the_end_are_set_aside_when_the_log_is_opened(data: str) -> None:
    segment = Path(data, "topics", "2", "0", f"{0:020d}.seg")
    content = segment.read_bytes()
    segment.write_bytes(content + content[64:140])
    upgrade_data(data, lambda _: None)
    assert not verify_data(data, lambda _: None).sound
    bench = Workbench(data)
    assert bench.values("acme/orders") == [b"acme 1", b"acme 2"]
    assert bench.publish("acme/orders", [b"acme 3"]).base_offset == 2


def test_a_log_without_a_broker(data: str, tmp_path: Path) -> None:
    log = shutil.copytree(f"{data}/topics/2/0", tmp_path / "log")
    assert upgrade_data(str(log), lambda _: None).segments == 1
    assert not upgrade_data(str(log), lambda _: None).changed
    assert [message.value for message in Log(log, readonly=True)] == [b"acme 1", b"acme 2"]


def test_a_directory_in_use_is_left_alone(data: str) -> None:
    before = Path(data, "format").read_bytes()
    lock = DirectoryLock(PrivateDisk(), data)
    with pytest.raises(LogInUse):
        upgrade_data(data, lambda _: None)
    lock.release()
    assert Path(data, "format").read_bytes() == before


def test_what_is_not_known_is_left_alone(data: str, tmp_path: Path) -> None:
    with pytest.raises(NotADataDirectory):
        upgrade_data(str(tmp_path), lambda _: None)
    DataDirectory(StorageRuntime(), data).write_format(DataFormat(FORMAT + 1, 0, 0, "later", 1))
    with pytest.raises(UnsupportedFormat, match=f"format {FORMAT + 1}"):
        upgrade_data(data, lambda _: None)


def test_a_log_without_segments_is_passed_over(data: str) -> None:
    Path(data, "topics", "1", "1", f"{0:020d}.seg").unlink()
    assert upgrade_data(data, lambda _: None).segments == 6


def files(directory: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 99])
def test_a_directory_without_its_format_is_refused_and_repair_brings_it_over(
    data: str, capfd: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    Path(data, "format").unlink()
    if content is not None:
        Path(data, "format").write_bytes(content)
    before = files(data)
    assert main(["upgrade", data]) == 1
    told = capfd.readouterr().err
    assert "data_directory_damaged" in told
    assert f"headrace repair {data}" in told
    assert files(data) == before
    assert main(["repair", data]) == 0
    assert verify_data(data, lambda _: None).sound
    check_contents(data)


def test_a_damaged_header_of_the_present_format_is_not_taken_for_the_former(tmp_path: Path) -> None:
    with Log(tmp_path, create=True, segment_bytes=1 << 20) as log:
        for _ in range(3):
            log.append_many([b"x" * 1000] * 900)
            log.flush()
    segment = min(tmp_path.glob("*.seg"))
    content = bytearray(segment.read_bytes())
    content[20] ^= 0xFF
    segment.write_bytes(content)
    assert len(list(tmp_path.glob("*.seg"))) > 1
    assert not upgrade_data(str(tmp_path), lambda _: None).changed
    assert segment.read_bytes() == content


def test_the_command_tells_what_it_did(data: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["upgrade", data, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told == {
        "path": data,
        "changed": True,
        "from_format": 1,
        "format": FORMAT,
        "logs": 7,
        "segments": 7,
        "damaged": [],
    }
    assert main(["upgrade", data]) == 0
    assert "nothing to do" in capfd.readouterr().out
    assert main(["upgrade", f"{data}/nowhere"]) == 1
    assert "not_a_data_directory" in capfd.readouterr().err
