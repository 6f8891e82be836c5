"""Derived partitions: every way of reading one gives the source's messages, filtered or changed, at their offsets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines import derived_partition
from headrace.engines.derived_cache import DerivedCache
from headrace.engines.derived_partition import PART_MESSAGES, DerivedPart, DerivedPartition
from headrace.engines.partition import Partition
from headrace.model.batch import Batch, Columns, Producer, encode, parse
from headrace.model.codec import Codec
from headrace.model.errors import CorruptBatch, LogReadOnly, OffsetOutOfRange
from headrace.model.message import Message
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import LogSettings
from headrace.testing.inline import InlineWorker
from headrace.testing.memory_disk import MemoryDisk

NOW_US = 1_800_000_000_000_000


class Evens:
    """Keeps values that are even numbers; fails on `bad`; looks at no more messages at once than it is told."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self.calls: list[tuple[int, int]] = []

    def derive(self, columns: Columns, start: int, stop: int) -> DerivedPart:
        stop = min(stop, start + self.most)
        self.calls.append((start, stop))
        part = range(start, stop)
        kept = [at for at in part if columns.values[at] not in (None, b"bad") and not int(columns.values[at][-9:]) % 2]
        return DerivedPart(kept, stop, [at for at in part if columns.values[at] == b"bad"])


class Louder:
    """Changes every value."""

    def derive(self, columns: Columns, start: int, stop: int) -> DerivedPart:
        indexes = range(start, stop)
        picked = columns.picked(indexes, indexes)
        picked.values = [None if value is None else value + b"!" for value in picked.values]
        return DerivedPart(indexes, stop, columns=picked)


def is_even(message: Message) -> bool:
    return message.value not in (None, b"bad") and not int((message.value or b"1")[-9:]) % 2


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def source(disk: MemoryDisk) -> Iterator[Partition]:
    host = StorageRuntime(disk, flusher=InlineWorker(), preparer=InlineWorker())
    partition = Partition(FileLog(host, "/log", LogSettings(segment_bytes=1 << 14)))
    yield partition
    partition.close()
    host.close()


def append(source: Partition, values: list[bytes | None], codec: Codec = Codec.NONE, **columns: Any) -> None:
    source.append(encode(Columns(values, **columns), NOW_US, codec=codec), NOW_US)


def numbers(first: int, count: int) -> list[bytes | None]:
    return [b"%d" % number for number in range(first, first + count)]


def derived_of(source: Partition, transform: Any = None, cache_bytes: int = 1 << 20) -> DerivedPartition:
    return DerivedPartition(source, transform or Evens(), DerivedCache(cache_bytes))


def read_all(partition: Partition, offset: int, bytes_max: int = 1 << 16) -> list[Message]:
    """Read as a stream does, and check each batch as a client does."""
    found: list[Message] = []
    end = partition.next_offset
    while offset < end:
        part = partition.read(offset, bytes_max, end)
        assert part is not None
        assert part.next_offset > offset
        position, view = 0, memoryview(bytes(part.view))
        while position < len(view):
            batch = parse(view, position)
            batch.verify()
            found += [message for message in batch.messages() if message.offset >= offset]
            position += batch.length
        offset = part.next_offset
    return found


def wanted(source: Partition, offset: int = 0) -> list[Message]:
    every = [one for batch in source.batches(offset, source.next_offset) for one in batch.messages()]
    return [message for message in every if message.offset >= offset and is_even(message)]


def test_reading_gives_what_the_transform_keeps(source: Partition) -> None:
    append(source, numbers(0, 10), keys=[b"k%d" % at for at in range(10)], timestamps=[NOW_US + at for at in range(10)])
    append(source, [b"1", b"3"])
    append(source, [b"2", b"4"])
    derived = derived_of(source)
    messages = read_all(derived, 0)
    assert messages == wanted(source)
    assert [message.offset for message in messages] == [0, 2, 4, 6, 8, 12, 13]
    assert messages[1].key == b"k2"
    assert messages[1].timestamp == NOW_US + 2
    assert (derived.first_offset, derived.next_offset, derived.size_bytes) == (0, 14, 0)


def test_batches_without_matches_become_one_gap(source: Partition) -> None:
    for _ in range(20):
        append(source, [b"1", b"3"])
    derived = derived_of(source)
    part = derived.read(0, 1 << 16, 40)
    assert part is not None
    gap = parse(part.view)
    assert (gap.base_offset, gap.span, gap.count, part.next_offset, len(part.view)) == (0, 40, 0, 40, gap.length)


def test_large_batches_are_divided(source: Partition) -> None:
    append(source, numbers(0, 5 * PART_MESSAGES + 7), Codec.LZ4)
    transform = Evens()
    derived = derived_of(source, transform)
    part = derived.read(0, 1 << 30, source.next_offset)
    assert part is not None
    assert part.next_offset == PART_MESSAGES
    assert part.cost_bytes >= 1 << 19
    assert read_all(derived, 0, 1 << 30) == wanted(source)
    assert max(stop - start for start, stop in transform.calls) == PART_MESSAGES
    assert [batch.span for batch in derived.batches(0, source.next_offset)] == [PART_MESSAGES] * 5 + [7]


def test_large_messages_are_derived_few_at_a_time(source: Partition) -> None:
    large = [b"%0300000d" % number for number in range(6)]
    append(source, large)
    transform = Evens()
    derived = derived_of(source, transform)
    assert [message.offset for message in read_all(derived, 0)] == [0, 2, 4]
    assert max(stop - start for start, stop in transform.calls) <= 2
    assert [batch.base_offset for batch in (derived.batch_at(offset) for offset in range(6))] == sorted(
        batch.base_offset for batch in (derived.batch_at(offset) for offset in range(6))
    )


def test_many_readers_derive_a_batch_once(source: Partition) -> None:
    append(source, numbers(0, 2000))
    transform = Evens()
    derived = derived_of(source, transform)
    first = read_all(derived, 0)
    calls = len(transform.calls)
    assert read_all(derived, 0) == first
    part = derived.read(0, 1 << 30, 2000)
    assert part is not None
    assert part.cost_bytes == 0
    assert len(transform.calls) == calls == 2


def test_the_cache_is_bounded(source: Partition) -> None:
    cache = DerivedCache(10_000)
    derived = DerivedPartition(source, Evens(), cache)
    for at in range(50):
        append(source, numbers(100 * at, 100))
    assert read_all(derived, 0) == wanted(source)
    assert cache._bytes <= 10_000


def test_a_transform_may_stop_early(source: Partition) -> None:
    append(source, numbers(0, 2500))
    transform = Evens(most=300)
    derived = derived_of(source, transform)
    assert read_all(derived, 0) == wanted(source)
    fresh = derived_of(source, Evens(most=300))
    batch = fresh.batch_at(999)  # not the first that the transform comes to
    assert batch.base_offset <= 999 < batch.next_offset
    assert read_all(fresh, 1234) == wanted(source, 1234)


def test_messages_that_fail_are_left_out_and_counted_once(source: Partition) -> None:
    append(source, [b"2", b"bad", b"4", b"bad"])
    told: list[int] = []
    derived = DerivedPartition(source, Evens(), DerivedCache(1), told.append)
    for _ in range(3):
        assert [message.offset for message in read_all(derived, 0)] == [0, 2]
        append(source, [b"1"])
    assert (derived.failed_count, told) == (2, [2])


def test_a_transform_may_change_messages(source: Partition) -> None:
    append(source, [b"a", None, b"c"], keys=[b"1", b"2", b"3"])
    derived = derived_of(source, Louder())
    assert [(one.offset, one.value, one.key) for one in read_all(derived, 0)] == [
        (0, b"a!", b"1"),
        (1, None, b"2"),
        (2, b"c!", b"3"),
    ]
    again = derived_of(derived, Louder())  # a derived partition can be the source of another
    assert [one.value for one in read_all(again, 0)] == [b"a!!", None, b"c!!"]


def test_gathered_batches_lose_their_origins(source: Partition) -> None:
    batches = [encode(Columns([b"%d" % at]), NOW_US, producer=Producer(1000 + at, 0, 0)) for at in range(4)]
    source.append_gathered(batches, Codec.NONE, NOW_US)
    derived = derived_of(source)
    assert [one.offset for one in read_all(derived, 0)] == [0, 2]
    assert derived.batch_at(0).columns().origins is None


def test_damage_of_the_source_is_told_and_passed(tmp_path: Path) -> None:
    host = StorageRuntime(flusher=InlineWorker(), preparer=InlineWorker())
    source = Partition(FileLog(host, str(tmp_path / "log")))
    for first in (0, 2, 4):
        append(source, numbers(first, 2))
    second = bytes(source.batch_at(2).data)
    [path] = [path for path in (tmp_path / "log").rglob("*") if path.is_file() and second in path.read_bytes()]
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(second) + len(second) - 1)
        file.write(b"X")
    derived = derived_of(source)
    part = derived.read(0, 1 << 16, 6)
    assert part is not None
    assert part.next_offset == 2
    with pytest.raises(CorruptBatch) as caught:
        derived.read(2, 1 << 16, 6)
    assert (caught.value.first_offset, caught.value.next_offset) == (2, 4)
    assert [one.offset for one in read_all(derived, 4)] == [4]
    assert [one.offset for batch in derived.batches(0, 6) for one in batch.messages()] == [0, 4]
    assert derived.damaged_ranges() == [(2, 4)]
    source.close()
    host.close()


def test_changing_is_refused(source: Partition) -> None:
    append(source, [b"0"])
    derived = derived_of(source)
    batch = encode(Columns([b"2"]), NOW_US)
    for change in (
        lambda: derived.append(batch, NOW_US),
        lambda: derived.append_gathered([batch], Codec.NONE, NOW_US),
        lambda: derived.append_committed(batch, 1, NOW_US),
        lambda: derived.truncate_before(1),
        lambda: derived.compact_by_key(),
        lambda: derived.compact_settled([]),
        lambda: derived.check_durability(0),
    ):
        with pytest.raises(LogReadOnly):
            change()
    assert source.next_offset == 1


def test_offsets_outside_are_refused(source: Partition) -> None:
    for _ in range(3):
        append(source, [b"%01000d" % 2] * 20)
    source.truncate_before(20)
    derived = derived_of(source)
    assert derived.first_offset == source.first_offset > 0
    with pytest.raises(OffsetOutOfRange):
        derived.read(0, 1 << 16, source.next_offset)
    assert derived.read(60, 1 << 16, 60) is None


def test_compaction_of_the_source_is_seen_despite_the_cache(source: Partition) -> None:
    for _ in range(40):
        append(source, [b"%0500d" % 2, b"%0500d" % 4], keys=[b"a", b"b"])
    derived = derived_of(source)
    before = read_all(derived, 0)
    assert len(before) == 80
    assert source.compact_by_key() > 0
    after = read_all(derived, 0)
    assert after == wanted(source)
    assert len(after) < 80


BATCHES = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.sampled_from([Codec.NONE, Codec.LZ4, Codec.ZSTD]),
        st.sampled_from(["plain", "keys", "gathered", "bad", "odd", "padded"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(BATCHES, st.integers(1, 40), st.integers(1, 50), st.booleans(), st.integers(0, 1 << 16), st.data())
def test_every_way_of_reading_gives_the_same(
    batches: list[Any], part_messages: int, most: int, compacting: bool, cache_bytes: int, data: st.DataObject
) -> None:
    host = StorageRuntime(MemoryDisk(), flusher=InlineWorker(), preparer=InlineWorker())
    source = Partition(FileLog(host, "/log", LogSettings(segment_bytes=1 << 12)))
    number = 0
    for count, codec, kind in batches:
        values: list[bytes | None] = [*numbers(number, count)]
        if kind == "bad":
            values[count // 2] = b"bad"
        if kind == "odd":
            values = [b"1"] * count
        if kind == "padded":
            values = [b"%0200d" % int(value or b"0") for value in values]
        number += count
        if kind == "gathered":
            each: list[Batch] = [encode(Columns([value]), NOW_US + number) for value in values]
            source.append_gathered(each, codec, NOW_US)
        else:
            keys = [b"k%d" % (at % 7) for at in range(count)] if kind in ("keys", "padded") else None
            source.append(encode(Columns(values, keys), NOW_US, codec=codec), NOW_US)
    if compacting:
        source.compact_by_key()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derived_partition, "PART_MESSAGES", part_messages)
        derived = derived_of(source, Evens(most), cache_bytes)
        start = data.draw(st.integers(0, source.next_offset))
        bytes_max = data.draw(st.sampled_from([1, 300, 1 << 20]))
        expected = wanted(source, start)
        assert read_all(derived, start, bytes_max) == expected
        every = [one for batch in derived.batches(start, source.next_offset) for one in batch.messages()]
        assert [one for one in every if one.offset >= start] == expected
        for message in data.draw(st.permutations(expected))[:20]:
            assert message in list(derived.batch_at(message.offset).messages())
        assert read_all(derived, start, bytes_max) == expected
    source.close()
    host.close()
