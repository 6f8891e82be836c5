"""Files of a running broker that somebody cuts: readers are told what is damaged, and get what follows."""

import os
from pathlib import Path

import pytest

import headrace
from headrace.errors import CorruptBatch
from headrace.model.batch import Columns, encode
from headrace.model.errors import InvalidBatch
from headrace.storage.scan import Damage, scan

TOPIC = "orders"
VALUES = [b"%06d" % number * 200 for number in range(4000)]
BATCH = 100


def publish(bus: headrace.Bus) -> None:
    """Publish to several segments, of which no reader has mapped any."""
    bus.create_topic(TOPIC, segment_bytes=1 << 20)
    for at in range(0, len(VALUES), BATCH):
        bus.publish_many(TOPIC, VALUES[at : at + BATCH])


def segments(data: Path) -> list[Path]:
    return sorted(data.glob("topics/*/0/*.seg"))


@pytest.mark.parametrize("number", [0, 1, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("share", [0, 0.4], ids=["empty", "cut"])
def test_readers_are_told_of_a_cut_segment_and_go_on_behind_it(tmp_path: Path, number: int, share: float) -> None:
    with headrace.open(tmp_path / "data") as bus:
        publish(bus)
        files = segments(tmp_path / "data")
        cut, bases = files[number], [int(path.stem) for path in files] + [len(VALUES)]
        os.truncate(cut, int(cut.stat().st_size * share))
        behind = bases[bases.index(int(cut.stem)) + 1]
        found: list[bytes] = []
        with bus.subscribe(TOPIC, start="earliest", timeout=10) as orders:
            with pytest.raises(CorruptBatch) as raised:
                found.extend(message.value for message in orders)
            assert found == VALUES[: raised.value.first_offset]
            assert int(cut.stem) <= raised.value.first_offset < raised.value.next_offset == behind
            for expected in VALUES[behind:]:
                assert next(iter(orders)).value == expected
        with pytest.raises(CorruptBatch):
            bus.fetch(TOPIC, 0, raised.value.first_offset)
        with bus.subscribe(TOPIC, start="earliest", timeout=1, on_corrupt="skip") as orders:
            assert [message.value for message in orders] == VALUES[: raised.value.first_offset] + VALUES[behind:]
        assert bus.publish(TOPIC, b"more").offset == len(VALUES)


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_readers_are_told_of_a_segment_that_has_the_bytes_of_another(tmp_path: Path, on_corrupt: str) -> None:
    with headrace.open(tmp_path / "data") as bus:
        publish(bus)
        with bus.subscribe(TOPIC, start="earliest", timeout=1) as orders:  # it maps all, and the broker notes where
            assert [message.value for message in orders] == VALUES
        first, second, third, *_ = segments(tmp_path / "data")
        with second.open("r+b") as file:
            file.write(first.read_bytes()[: second.stat().st_size])
        begin, end = int(second.stem), int(third.stem)
        with bus.subscribe(TOPIC, start="earliest", timeout=1, on_corrupt=on_corrupt) as orders:
            found: list[bytes] = []
            if on_corrupt == "raise":
                with pytest.raises(CorruptBatch) as raised:
                    found.extend(message.value for message in orders)
                assert (raised.value.first_offset, raised.value.next_offset) == (begin, end)
            found.extend(message.value for message in orders)
            assert orders.skipped == (0 if on_corrupt == "raise" else end - begin)
        assert found == VALUES[:begin] + VALUES[end:]


class CutFile:
    """A file that is much shorter than it should be."""

    log_id = 1

    def __init__(self, content: bytes) -> None:
        self.content = content

    def view(self, end: int) -> memoryview:
        if end > len(self.content):
            raise InvalidBatch("the file ends inside the batch")
        return memoryview(self.content)

    def read(self, position: int, length: int) -> bytes:
        return self.content[position : position + length]


@pytest.mark.parametrize("length", [0, 1, 100, 2000])
def test_a_scan_does_not_look_for_batches_behind_the_end_of_the_file(length: int) -> None:
    batch = encode(Columns([b"x" * 1500]), 0)
    batch.place(0, 0, CutFile.log_id)
    data = bytes(batch.data)
    assert len(data) < 2000
    file = CutFile((data + data)[:length])
    ((position, item),) = [one for one in scan(file, 0, 0, 1 << 60, stop=2) if isinstance(one[1], Damage)]
    assert (position, item.next_offset) == (len(data) if length > len(data) else 0, 2)
