"""A broker's logs are the broker's: an embedded log reads them, and writes nothing there."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import main
from headrace.embedded.repair import repair
from headrace.errors import LogInUse, LogNotFound, LogOwned
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def bus(data: Path) -> Iterator[headrace.Bus]:
    with headrace.open(data) as bus:
        bus.publish_many("orders", [b"%d" % number for number in range(100)])
        yield bus


def partition(data: Path) -> Path:
    """The one directory with messages in it."""
    (segment,) = (data / "topics").rglob("*.seg")
    return segment.parent


def content(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


WRITES: list[Callable[[Path], object]] = [
    lambda path: headrace.Log(path),
    lambda path: headrace.Log(path, create=False),
    lambda path: headrace.Log(path, until_consumed=True),
    lambda path: FileLog(StorageRuntime(), str(path)),
    lambda path: headrace.Log(path, readonly=True).cursor("mine"),
    lambda path: headrace.Log(path, readonly=True).consume(1),
]


def check_refused(directory: Path) -> None:
    before = content(directory)
    for write in WRITES:
        with pytest.raises(LogOwned) as refused:
            write(directory)
        assert refused.value.code == "log_owned"
    assert content(directory) == before
    with headrace.Log(directory, readonly=True) as log:
        assert [message.value for message in log] == [b"%d" % number for number in range(100)]
        assert log.read(7).value == b"7"
        assert log.verify().sound
        assert log.info()["owner"] == "broker"
        assert log.cursors() == {}
    assert content(directory) == before


def test_a_running_brokers_partition_is_read_and_never_written(data: Path, bus: headrace.Bus) -> None:
    check_refused(partition(data))
    assert bus.publish("orders", b"more").offset == 100
    with bus.subscribe("orders", start="earliest", timeout=1) as orders:
        assert len([*orders]) == 101


def test_it_is_the_brokers_when_the_broker_is_gone(data: Path, bus: headrace.Bus) -> None:
    bus.close()
    check_refused(partition(data))
    for own in ("journal", "staging"):
        with pytest.raises(LogOwned):
            headrace.Log(data / "broker" / own)


def test_it_is_the_brokers_wherever_it_is_copied_to(data: Path, bus: headrace.Bus, tmp_path: Path) -> None:
    bus.close()
    copied = tmp_path / "elsewhere" / "copy"
    shutil.copytree(partition(data), copied)
    check_refused(copied)


def test_it_is_the_brokers_though_its_record_is_damaged(data: Path, bus: headrace.Bus) -> None:
    bus.close()
    directory = partition(data)
    (directory / "meta").write_bytes(b"damaged")
    with pytest.raises(LogOwned):
        headrace.Log(directory)
    (directory / "meta").unlink()
    with pytest.raises(LogOwned):
        headrace.Log(directory)
    with headrace.open(data) as again, again.subscribe("orders", start="earliest", timeout=1) as orders:
        assert len([*orders]) == 100


def test_who_reads_a_partition_sees_it_grow_roll_and_shrink(data: Path, bus: headrace.Bus) -> None:
    other = partition(data)
    bus.create_topic("small", segment_bytes=64 << 10)
    bus.publish("small", b"first")
    directory = next(path.parent for path in (data / "topics").rglob("*.seg") if path.parent != other)
    seen: list[int] = []
    with headrace.Log(directory, readonly=True) as log:

        def follow() -> None:
            for message in log.tail(0):
                seen.append(message.offset)
                if message.value == b"last":
                    return

        thread = threading.Thread(target=follow)
        thread.start()
        for number in range(30):
            bus.publish("small", b"%d" % number * 5000)
        bus.publish("small", b"last")
        thread.join(60)
        assert seen == [*range(32)]
        assert log.info()["segments"] > 1
        bus.trim_topic("small", {0: 32})
        with pytest.raises(headrace.errors.OffsetOutOfRange):
            log.read(0)
        assert log.first_offset == 32


def test_a_repair_waits_until_the_broker_is_gone(data: Path, bus: headrace.Bus) -> None:
    directory = partition(data)
    with pytest.raises(LogInUse, match="stop the broker"):
        repair(directory)
    bus.close()
    (segment,) = directory.glob("*.seg")
    damaged = bytearray(segment.read_bytes())
    damaged[200] ^= 1
    segment.write_bytes(damaged)
    assert not repair(directory).sound
    with pytest.raises(LogOwned):
        headrace.Log(directory)
    headrace.open(data).close()


def test_the_command_line_says_what_to_do(data: Path, bus: headrace.Bus, capfd: pytest.CaptureFixture[str]) -> None:
    advice = {
        "append": "headrace publish",
        "read": "headrace tail",
        "tail": "headrace tail",
        "info": "headrace topic describe",
        "verify": f"headrace verify {data}",
        "repair": f"headrace repair {data}",
        "bench": "another directory",
    }
    inside = partition(data)
    for directory in (inside, inside.parent, inside.parent.parent, data, data / "broker" / "journal"):
        before = content(data)
        for command, wanted in advice.items():
            assert main(["log", command, str(directory), *(["x"] if command == "append" else [])]) == 1
            out, said = capfd.readouterr()
            assert out == ""
            assert wanted in said
            assert "[log_owned]" in said
        assert content(data) == before
    assert bus.publish("orders", b"more").offset == 100


def test_the_command_line_reads_a_copy_of_a_brokers_log(
    data: Path, bus: headrace.Bus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(partition(data), tmp_path / "copy")
    bus.close()
    copy = str(tmp_path / "copy")
    assert main(["log", "append", copy, "x"]) == 1
    assert "is a copy of a broker's log" in capfd.readouterr().err
    assert main(["log", "read", copy, "--values", "--limit", "2"]) == 0
    assert capfd.readouterr() == ("0\n1\n", "")
    assert main(["log", "info", copy]) == 0
    assert "a broker, and nobody else" in capfd.readouterr().out
    assert main(["log", "verify", copy]) == 0


def test_a_log_beside_a_broker_is_ones_own(data: Path, bus: headrace.Bus) -> None:
    with headrace.Log(data / "mine") as log:
        assert log.append(b"x") == 0
    with pytest.raises(LogNotFound):
        headrace.Log(data / "none", readonly=True)
    assert bus.publish("orders", b"more").offset == 100
