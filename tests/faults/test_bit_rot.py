"""Files decay: flipped bits, lost pages, lost files, files and batches in the wrong place.

Whatever happens to them, a message that is read is the right one, a damaged one is reported, and the others are there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random, SystemRandom
from typing import NamedTuple

import pytest
from tests.faults import builder
from tests.known import ENVIRONMENT, content, quick_place, said

import headrace
from headrace import repair
from headrace.model.batch import parse
from headrace.model.errors import CorruptBatch, CorruptFile, InvalidBatch
from headrace.storage.recovery import LostRange
from headrace.storage.segment import DATA_AT

FLIPS = 85
"""Of every kind of log; there are four."""
PAGE_BYTES = 4096
SHAPES = {"small": (8 << 10, 300), "large": (150 << 10, 9000)}
ENDINGS = ("closed", "killed")


class Place(NamedTuple):
    """Where a batch stands, and the offsets it covers."""

    path: str
    position: int
    end: int
    first_offset: int
    next_offset: int

    @property
    def offsets(self) -> set[int]:
        return set(range(self.first_offset, self.next_offset))


class Original:
    """A log in good order, of which damaged copies are made."""

    def __init__(self, path: Path, expected: Callable[[int], object], *, killed: bool) -> None:
        self.path = path
        self.killed = killed
        self._expected = expected
        self.batches = list(batches(path))
        with headrace.Log(path, readonly=True) as log:
            self.first_offset, self.next_offset = log.first_offset, log.next_offset
            self._times = {message.offset: message.timestamp for message in log}
        self._copies = 0

    def copy(self) -> Path:
        """A copy, which takes the place of the last one."""
        shutil.rmtree(self.path.with_name(f"copy-{self._copies}"), ignore_errors=True)
        self._copies += 1
        return Path(shutil.copytree(self.path, self.path.with_name(f"copy-{self._copies}")))

    def files(self, pattern: str = "**/*") -> list[str]:
        return sorted(str(file.relative_to(self.path)) for file in self.path.glob(pattern) if file.is_file())

    def damaged(self, path: str, position: int, end: int) -> set[int]:
        """The offsets of the messages that have a byte in a range of a file."""
        hit = [batch for batch in self.batches if batch.path == path and batch.position < end and position < batch.end]
        return {offset for batch in hit for offset in batch.offsets}

    def unlike(self, message: headrace.Message) -> bool:
        """Whether a message is not the one that was appended."""
        time = self._times.get(message.offset, message.timestamp)
        return said(message) != self._expected(message.offset) or message.timestamp != time


def batches(path: Path) -> Iterator[Place]:
    """Where the batches of a log in good order stand."""
    for file in sorted(path.glob("*.seg")):
        view, position = memoryview(file.read_bytes()), DATA_AT
        while position < len(view):
            try:
                batch = parse(view, position)
            except InvalidBatch:
                assert not any(view[position:]), "the original is damaged"
                break
            yield Place(file.name, position, position + batch.length, batch.base_offset, batch.next_offset)
            position += batch.length


@pytest.fixture(scope="module", params=[(shape, ending) for shape in SHAPES for ending in ENDINGS], ids=" ".join)
def original(request: pytest.FixtureRequest) -> Iterator[Original]:
    """Logs of several segments, compressed and not, that were closed or whose writer was killed."""
    shape, ending = request.param
    segment_bytes, size_max = SHAPES[shape]
    with quick_place() as place:
        arguments = [str(place / "original"), "1", str(segment_bytes), str(size_max), ending]
        script = str(Path(__file__).with_name("builder.py"))
        subprocess.run([sys.executable, script, *arguments], env=ENVIRONMENT, check=ending == "closed")
        made = Original(place / "original", lambda offset: content(1, offset, size_max), killed=ending == "killed")
        assert len(made.files("*.seg")) > 3
        assert made.first_offset == builder.TRUNCATED
        yield made


@pytest.fixture
def place() -> Iterator[Path]:
    """Somewhere else."""
    with quick_place() as path:
        yield path


def even_log(path: Path, letter: str) -> Original:
    """A log whose batches are all alike, one message each, all of the same length."""
    with headrace.Log(path, segment_bytes=8 << 10) as log:
        for offset in range(100):
            log.append(letter.encode() * 100 + b"%04d" % offset)
            log.flush(sync=False)
    return Original(path, lambda offset: (letter.encode() * 100 + b"%04d" % offset, None, None), killed=False)


# What is to be seen of a damaged log.


class Seen(NamedTuple):
    """What reading all of a log came to."""

    offsets: set[int]
    reported: set[int]
    """What was said to be damaged."""
    next_offset: int


def read_all(log: headrace.Log, original: Original) -> Seen:
    """Read everything, going on after damage as the error says; once more, skipping it, and compare."""
    offsets: list[int] = []
    reported: set[int] = set()
    start = log.first_offset
    while start < log.next_offset:
        try:
            for message in log.messages(start):
                assert not original.unlike(message), f"a wrong message: {message}"
                offsets.append(message.offset)
            break
        except CorruptBatch as error:
            found = range(error.first_offset, error.next_offset)
            reported |= set(found)
            start = check_progress(start, found)
    assert offsets == sorted(set(offsets)), "messages are out of order, or come twice"
    skipping = list(log.messages(skip_corrupt=True))
    assert not any(map(original.unlike, skipping)), "skip_corrupt gives a wrong message"
    assert [message.offset for message in skipping] == offsets, "skip_corrupt gives other messages"
    return Seen(set(offsets), reported, log.next_offset)


def check_progress(start: int, damaged: range) -> int:
    assert damaged, "nothing is said to be damaged"
    assert start < damaged.stop, "reading cannot go on"
    return damaged.stop


def ranges(lost: Iterable[LostRange]) -> set[int]:
    return {offset for one in lost for offset in range(one.first_offset, one.next_offset)}


def check(log: headrace.Log, original: Original, damaged: set[int], *, after_repair: bool = False) -> None:
    """What is damaged is reported, and nothing else; all the rest is there.

    If the writer was killed, damage at the very end looks like the write that the kill interrupted, and is cut off.
    """
    seen = read_all(log, original)
    everything = set(range(log.first_offset, original.next_offset))
    if original.killed and original.next_offset - 1 in damaged and seen.next_offset < original.next_offset:
        assert seen.next_offset == min(
            offset for offset in damaged if {*range(offset, original.next_offset)} <= damaged
        )
        everything -= set(range(seen.next_offset, original.next_offset))
    else:
        assert seen.next_offset == original.next_offset, "the log has another end"
    assert seen.offsets == everything - damaged, "messages that are not damaged are missing"
    for reported in (seen.reported, ranges(log.verify().lost)):
        # Truncated messages count too, where they share a batch or a file with others.
        assert reported <= damaged, "messages are said to be damaged that are not"
        assert reported & everything == damaged & everything, "damaged messages are not reported"
    if after_repair:
        assert not log.verify().headers


def check_cursors(log: headrace.Log, damaged: set[int]) -> None:
    """A cursor never skips a message: it stands where it was committed last, or earlier."""
    with log.cursor("reader") as cursor:
        assert 0 <= cursor.committed <= builder.COMMITTED[-1]
    try:
        assert log.consume()[0].offset <= builder.CONSUMED
    except CorruptBatch as error:
        assert error.first_offset in damaged  # noqa: PT017


def check_everywhere(path: Path, original: Original, damaged: set[int], *, cursors: bool = False) -> None:
    """The log opened for reading, for writing, and after a repair."""
    hurt = bytes_of(path, original, damaged)
    with headrace.Log(path, readonly=True) as log:
        check(log, original, damaged)
    spare = Path(shutil.copytree(path, path.with_name("spare")))
    try:
        with headrace.Log(path) as log:
            assert ranges(log.recovery.lost) <= damaged
            check(log, original, damaged)
            if cursors:
                check_cursors(log, damaged)
            check_appending(log)
        repair(spare)
        with headrace.Log(spare, readonly=True) as log:
            check(log, original, damaged, after_repair=True)
        with headrace.Log(spare) as log:
            check(log, original, damaged, after_repair=True)
            check_appending(log)
        kept = [file.read_bytes() for file in spare.glob("quarantine/*")]
        assert all(any(part in whole for whole in kept) for part in hurt), "damaged bytes were not set aside"
    finally:
        shutil.rmtree(spare)


def check_appending(log: headrace.Log) -> None:
    offset = log.append(b"new")
    log.flush()
    assert log.read(offset).value == b"new"
    assert log.next_offset == offset + 1


def bytes_of(path: Path, original: Original, damaged: set[int]) -> list[bytes]:
    """What stands where the damaged batches stood, as far as it is more than zeros."""
    found = []
    for batch in original.batches:
        file = path / batch.path
        if batch.first_offset in damaged and file.exists():
            part = file.read_bytes()[batch.position : batch.end]
            if any(part):
                found.append(part.rstrip(b"\0"))
    return found


# Flipped bits.


def flip(file: Path, position: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def test_a_flipped_bit_never_makes_a_wrong_message(original: Original) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")
    dice, failures = Random(seed), []
    for _ in range(FLIPS):
        name = dice.choice(original.files())
        size = (original.path / name).stat().st_size
        # Much of some files is room not used: that is hit often enough.
        position = dice.randrange(size if dice.random() < 0.6 else min(size, PAGE_BYTES))
        bit = dice.randrange(8)
        path = original.copy()
        flip(path / name, position, bit)
        try:
            check_everywhere(path, original, original.damaged(name, position, position + 1), cursors=True)
        except Exception as error:  # noqa: BLE001 to see all that goes wrong, not only the first
            failures.append(f"bit {bit} of byte {position} of {name}: {type(error).__name__} {error}")
    assert not failures, "\n".join([f"{len(failures)} of {FLIPS} flips", *failures])


@pytest.mark.parametrize("which", [0, -2, -1], ids=["first", "next to last", "last"])
def test_a_flip_in_the_last_segment(original: Original, which: int) -> None:
    last = original.files("*.seg")[-1]
    batch = [batch for batch in original.batches if batch.path == last][which]
    for position in (batch.position + 1, batch.end - 1):  # in the header, in the body
        path = original.copy()
        flip(path / last, position, 0)
        check_everywhere(path, original, batch.offsets)


def test_a_flip_in_any_segments_header_is_healed(original: Original) -> None:
    for name in original.files("*.seg"):
        path = original.copy()
        flip(path / name, 9, 3)
        check_everywhere(path, original, set())


def test_consumers_get_past_damaged_messages(place: Path) -> None:
    original = even_log(place / "a", "a")
    path = original.copy()
    hurt = [original.batches[number] for number in (0, 30, 31, 99)]
    for batch in hurt:
        flip(path / batch.path, batch.end - 1, 5)
    taken, errors = [], 0
    with headrace.Log(path, readonly=True) as log:
        while errors <= len(hurt):
            try:
                messages = log.consume(7)
            except CorruptBatch:
                errors += 1
                continue
            if not messages:
                break
            taken += [message.offset for message in messages]
    assert taken == [offset for offset in range(100) if not any(offset in batch.offsets for batch in hurt)]


# Pages and files.


def test_lost_pages(original: Original) -> None:
    pages = [
        (name, position)
        for name in original.files("*.seg")
        for position in range(0, (original.path / name).stat().st_size, PAGE_BYTES)
    ]
    for name, position in Random(1).sample(pages, min(len(pages), 25)):
        path = original.copy()
        data = bytearray((path / name).read_bytes())
        data[position : position + PAGE_BYTES] = bytes(len(data[position : position + PAGE_BYTES]))
        (path / name).write_bytes(data)
        check_everywhere(path, original, original.damaged(name, position, position + PAGE_BYTES))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.99])
def test_a_sealed_segment_that_was_cut_short(original: Original, share: float) -> None:
    sealed = original.files("*.seg")[: -1 if original.killed else None]
    for name in sealed:
        path = original.copy()
        size = (path / name).stat().st_size
        os.truncate(path / name, int(size * share))
        damaged = original.damaged(name, int(size * share), size)
        check_everywhere(path, original, damaged)


def test_a_message_in_the_missing_part_of_a_segment_is_reported_when_it_is_read_by_its_offset(
    original: Original,
) -> None:
    name = original.files("*.seg")[1]
    path = original.copy()
    os.truncate(path / name, 1000)
    for readonly in (True, False):
        with headrace.Log(path, readonly=readonly) as log:
            for offset in sorted(original.damaged(name, 1000, 1 << 60)):
                with pytest.raises(CorruptBatch) as raised:
                    log.read(offset)
                assert raised.value.first_offset <= offset < raised.value.next_offset


def test_a_segment_in_the_middle_is_gone(original: Original) -> None:
    for name in original.files("*.seg")[1:-1]:
        for index_too in (False, True):
            path = original.copy()
            (path / name).unlink()
            if index_too:
                (path / name).with_suffix(".idx").unlink()
            check_everywhere(path, original, original.damaged(name, 0, 1 << 60))


@pytest.mark.parametrize("garbage", [None, b"", b"HRINDEX1", b"\xff" * 64, b"\0" * 500, os.urandom(3000)])
def test_an_index_is_gone_or_garbage(original: Original, garbage: bytes | None) -> None:
    path = original.copy()
    for name in original.files("*.idx"):
        (path / name).unlink()
        if garbage is not None:
            (path / name).write_bytes(garbage)
    with headrace.Log(path, readonly=True) as log:
        assert_found_by_time_and_offset(log, original)
    check_everywhere(path, original, set())
    path = original.copy()
    for name in original.files("*.idx"):
        (path / name).unlink()
    with headrace.Log(path) as log:
        assert_found_by_time_and_offset(log, original)


def assert_found_by_time_and_offset(log: headrace.Log, original: Original) -> None:
    for message in log:
        assert log.read(message.offset) == message
        assert log.find_time(message.timestamp) <= message.offset
        assert not original.unlike(message)


def test_an_index_of_another_segment_is_not_believed(original: Original) -> None:
    indexes = original.files("*.idx")
    path = original.copy()
    for name, other in zip(indexes, indexes[1:] + indexes[:1], strict=True):
        shutil.copy(original.path / other, path / name)
    check_everywhere(path, original, set())


@pytest.mark.parametrize("content", [None, b"", bytes(8192), os.urandom(8192)])
def test_the_record_of_the_log_itself_is_lost(original: Original, content: bytes | None) -> None:
    path = original.copy()
    (path / "meta").unlink()
    if content is not None:
        (path / "meta").write_bytes(content)
    if content is None:
        with headrace.Log(path) as log:  # who reads finds no log there, who writes makes the record up
            check(log, original, set())
    else:
        check_everywhere(path, original, set())


@pytest.mark.parametrize("content", [None, b"", b"damaged"])
def test_verify_reports_the_record_of_the_log_and_repair_restores_it(place: Path, content: bytes | None) -> None:
    path = place / "log"
    with headrace.Log(path) as log:
        log.append_many([b"x"] * 10)
        log.truncate_before(5)
    (path / "meta").unlink()
    if content is not None:
        (path / "meta").write_bytes(content)
    with headrace.Log(path, readonly=True) as log:
        findings = log.verify()
    assert not findings.sound
    assert findings.record == str(path / "meta")
    assert repair(path).record == str(path / "meta")
    with headrace.Log(path) as log:
        assert log.verify().sound
        assert log.next_offset == 10


@pytest.mark.parametrize("position", [20, PAGE_BYTES + 20], ids=["one slot", "the other slot"])
def test_no_offset_is_used_twice_though_all_messages_were_truncated(place: Path, position: int) -> None:
    path = place / "log"
    with headrace.Log(path) as log:
        log.append_many([b"x"] * 100)
        log.truncate_before(50)
        log.truncate_before(100)
    if position < (path / "meta").stat().st_size:
        flip(path / "meta", position, 1)
    with headrace.Log(path, readonly=True) as log:
        assert log.next_offset == 100
    with headrace.Log(path) as log:
        assert log.next_offset == 100
        assert log.append(b"y") == 100


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100, b"\xff" * 4096, os.urandom(9000)])
def test_the_live_page_is_lost(original: Original, content: bytes | None) -> None:
    path = original.copy()
    (path / "live").unlink()
    if content is not None:
        (path / "live").write_bytes(content)
    with headrace.Log(path) as log:
        check(log, original, set())
        check_cursors(log, set())
    if content is not None and len(content) >= PAGE_BYTES:
        path = original.copy()
        (path / "live").write_bytes(content)
        check_everywhere(path, original, set())


@pytest.mark.parametrize("content", [b"", b"\0" * 8192, os.urandom(8192)])
def test_a_lost_cursor_begins_anew(original: Original, content: bytes) -> None:
    path = original.copy()
    for name in original.files("cursors/*") + original.files("cursors/.*"):
        (path / name).write_bytes(content)
    with headrace.Log(path) as log:
        check_cursors(log, set())


# Things in the wrong place.


@pytest.mark.parametrize("index_too", [False, True])
def test_a_segment_of_another_log_is_found_out(place: Path, index_too: bool) -> None:
    original, other = even_log(place / "a", "a"), even_log(place / "b", "b")
    assert original.files("*.seg") == other.files("*.seg")
    for name in original.files("*.seg")[:-1]:
        path = original.copy()
        shutil.copy(other.path / name, path / name)
        if index_too:
            index = name.replace(".seg", ".idx")
            shutil.copy(other.path / index, path / index)
        check_everywhere(path, original, original.damaged(name, 0, 1 << 60))


def test_segments_of_the_same_log_that_were_swapped_are_found_out(place: Path) -> None:
    original = even_log(place / "a", "a")
    first, second, *_ = original.files("*.seg")[1:]
    path = original.copy()
    shutil.copy(original.path / first, path / second)
    shutil.copy(original.path / second, path / first)
    damaged = original.damaged(first, 0, 1 << 60) | original.damaged(second, 0, 1 << 60)
    check_everywhere(path, original, damaged)


@pytest.mark.parametrize("distance", [-1, 1])
def test_a_copy_of_another_segment_is_found_out(place: Path, distance: int) -> None:
    original = even_log(place / "a", "a")
    names = original.files("*.seg")
    path = original.copy()
    shutil.copy(original.path / names[1 + distance], path / names[1])
    check_everywhere(path, original, original.damaged(names[1], 0, 1 << 60))


@pytest.mark.parametrize("distance", [1, 2, 15, 60])
def test_batches_that_were_swapped_are_found_out(place: Path, distance: int) -> None:
    original = even_log(place / "a", "a")
    first, second = original.batches[5], original.batches[5 + distance]
    path = original.copy()
    put(path, first, take(original.path, second))
    put(path, second, take(original.path, first))
    check_everywhere(path, original, first.offsets | second.offsets)


@pytest.mark.parametrize("distance", [-2, -1, 1, 2, 60])
def test_a_batch_that_stands_there_twice_is_found_out(place: Path, distance: int) -> None:
    """A write that the disk lost, or put in the wrong place."""
    original = even_log(place / "a", "a")
    path = original.copy()
    put(path, original.batches[5], take(original.path, original.batches[5 + distance]))
    damaged = original.batches[5].offsets
    check_everywhere(path, original, damaged)


def test_a_message_that_looks_like_a_batch_is_not_taken_for_one(place: Path) -> None:
    """Somebody keeps a log's own batches as messages in it; then the batch around one is damaged."""
    with headrace.Log(place / "log") as log:
        log.append(b"first")
        log.flush()
        inner = bytes(next(log.batches()).data)
        log.append(b"before" + inner + b"after")
        log.flush()
        log.append(b"last")
    expected = {0: b"first", 1: b"before" + inner + b"after", 2: b"last"}
    original = Original(place / "log", lambda offset: (expected[offset], None, None), killed=False)
    path = original.copy()
    flip(path / original.batches[1].path, original.batches[1].position, 0)
    check_everywhere(path, original, {1})


def take(path: Path, place: Place) -> bytes:
    return (path / place.path).read_bytes()[place.position : place.end]


def put(path: Path, place: Place, content: bytes) -> None:
    assert len(content) == place.end - place.position
    data = bytearray((path / place.path).read_bytes())
    data[place.position : place.end] = content
    (path / place.path).write_bytes(data)


def test_a_log_that_cannot_be_opened_can_be_repaired_on_the_spot(place: Path) -> None:
    original = even_log(place / "a", "a")
    path = original.copy()
    (path / "meta").write_bytes(b"")
    for name in original.files("*.seg"):
        flip(path / name, 9, 3)
    try:
        headrace.Log(path).close()
    except CorruptFile:
        with pytest.raises(CorruptFile):  # and not that the log is in use
            repair(path)
