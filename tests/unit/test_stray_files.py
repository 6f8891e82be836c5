"""Files in a log's directory whose names are not a segment's are left alone, and cost no message."""

from pathlib import Path

import pytest

from headrace.embedded.log import Log
from headrace.embedded.repair import repair
from headrace.server import repair_data, verify_data
from headrace.storage import index as indexes
from headrace.storage.segment import offset_in_name
from headrace.testing.workbench import Workbench

NAMES = [
    "0.seg",
    "000.seg",
    "5.seg",
    "11.seg",
    "1000.seg",
    "000000000000000000000.seg",
    "٣.seg",
    "\u0660" * 20 + ".seg",
    "²" * 20 + ".seg",
    "9" * 20 + ".seg",
    "+0000000000000000005.seg",
    "0.idx",
    "1.seg.new",
    f"{0:020d}.seg.new",
    f"{0:020d}.SEG",
    "notes.tmp",
    "0.seg.tmp",
]
JUNK = b"HRSEGMT2 is how a segment begins, and this is none" * 9


def scatter(directory: str | Path, content: bytes) -> None:
    for name in NAMES:
        Path(directory, name).write_bytes(content)


def check_untouched(directory: str | Path, content: bytes) -> None:
    for name in NAMES:
        assert Path(directory, name).read_bytes() == content, name


def segments(directory: str | Path) -> dict[str, bytes]:
    """The real segments, and their content without the zeros prepared for more."""
    found = Path(directory).glob(f"{'[0-9]' * 20}.seg")
    return {path.name: path.read_bytes().rstrip(b"\0") for path in found if path.name not in NAMES}


def test_only_twenty_ascii_digits_name_a_segment() -> None:
    assert [offset_in_name(name) for name in NAMES] == [None] * len(NAMES)
    assert [offset_in_name(name, indexes.SUFFIX) for name in NAMES] == [None] * len(NAMES)
    assert (offset_in_name(f"{7:020d}.seg"), offset_in_name(f"{7:020d}.idx")) == (7, None)
    assert offset_in_name(f"{7:020d}.idx", indexes.SUFFIX) == 7


@pytest.mark.parametrize("content", [b"", JUNK])
def test_a_log_keeps_its_messages_beside_stray_files(tmp_path: Path, content: bytes) -> None:
    with Log(tmp_path, create=True) as log:
        log.append_many([b"%d" % number for number in range(1000)])
    before = segments(tmp_path)
    scatter(tmp_path, content)
    with Log(tmp_path, readonly=True) as log:
        assert log.verify().sound
        assert len(list(log)) == 1000
    assert repair(str(tmp_path)).sound
    with Log(tmp_path) as log:
        assert [message.value for message in log] == [b"%d" % number for number in range(1000)]
    assert segments(tmp_path) == before
    check_untouched(tmp_path, content)


@pytest.mark.parametrize("content", [b"", JUNK])
def test_a_broker_keeps_its_partitions_and_its_journal_beside_stray_files(tmp_path: Path, content: bytes) -> None:
    data = str(tmp_path / "data")
    bench = Workbench(data)
    bench.publish("orders", [b"x"] * 1000)
    bench.close()
    logs = [f"{data}/topics/1/0", f"{data}/broker/journal"]
    for log in logs:
        scatter(log, content)
    before = [segments(log) for log in logs]
    assert verify_data(data, lambda _: None).sound
    assert not repair_data(data, lambda _: None).changed
    assert [segments(log) for log in logs] == before
    bench = Workbench(data)
    assert bench.values("orders") == [b"x"] * 1000
    bench.close()
    assert segments(logs[0]) == before[0]
    for log in logs:
        check_untouched(log, content)
