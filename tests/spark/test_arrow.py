"""Batches as record batches: the same messages, whatever they look like."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from headrace.model.batch import Batch, Columns, RawColumns, encode, encode_raw, parse
from headrace.model.codec import Codec
from headrace.model.errors import InvalidBatch
from headrace.model.headers import Headers, headers_from_pairs
from headrace.spark.datasource import table_schema
from headrace.spark.source.arrow import Decoder
from headrace.spark.source.options import MORE_COLUMNS, source_options
from headrace.spark.source.planning import OffsetSpan, Range, Window, limit_rows, split_ranges
from headrace.spark.source.values import value_columns

TIMES = st.integers(0, 4_000_000_000_000_000)
LATER = st.integers(3_000_000_000_000_000, 4_000_000_000_000_000)
SCHEMA = table_schema(
    source_options(
        {"subscribe": "t", "columns": ",".join(("topic,partition,offset,timestamp,key,value", *MORE_COLUMNS))}
    )
)
assert not isinstance(SCHEMA, str)


def some(entries: Any, count: int) -> Any:
    """A column: entries for each message, all of them alike perhaps, or none."""
    entry = st.one_of(st.none(), entries)
    return st.one_of(st.none(), st.lists(entry, min_size=count, max_size=count), entries.map(lambda one: [one] * count))


@st.composite
def columns(draw: Any, count: int) -> Columns:
    """Messages of every kind."""
    width = draw(st.sampled_from([0, 1, 3, 255, 256, 300]))
    even = st.lists(st.binary(min_size=width, max_size=width), min_size=count, max_size=count)
    uneven = st.lists(st.one_of(st.none(), st.binary(max_size=9)), min_size=count, max_size=count)
    names, contents = st.text(max_size=3), st.one_of(st.none(), st.binary(max_size=3))
    headers: st.SearchStrategy[Headers] = st.one_of(
        st.dictionaries(names, contents, max_size=3),
        st.lists(st.tuples(st.one_of(names, st.just("a")), contents), min_size=1, max_size=4).map(
            lambda pairs: headers_from_pairs(pairs) or {}
        ),
    )
    timestamps = draw(st.one_of(st.none(), st.lists(TIMES, min_size=count, max_size=count)))
    return Columns(
        draw(st.one_of(even, uneven)),
        draw(some(st.binary(max_size=4), count)),
        timestamps,
        draw(some(headers, count)),
        draw(some(TIMES, count)),
        draw(some(st.integers(0, 255), count)),
        draw(some(LATER, count)),
    )


@st.composite
def stored(draw: Any) -> list[Batch]:
    """Some batches one after the other, as a log has them."""
    batches, offset = [], draw(st.integers(0, 1 << 40))
    for count in draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)):
        batch = encode(draw(columns(count)), draw(TIMES), codec=draw(st.sampled_from([Codec.NONE, Codec.LZ4])))
        batch.place(offset, 0, 1)
        offset = batch.next_offset
        batches.append(parse(memoryview(batch.data)))
    return batches


def decoded(batches: Sequence[Batch], wanted: Range, window: Window | None = None) -> list[dict[str, Any]]:
    assert not isinstance(SCHEMA, str)
    decoder = Decoder(to_arrow_schema(SCHEMA, timezone="UTC"), value_columns(SCHEMA), window or Window())
    found: Iterator[pa.RecordBatch] = decoder.record_batches(wanted, iter(batches))
    rows = []
    for one in found:
        one.validate(full=True)
        rows += one.to_pylist()
    return rows


def micros(value: Any) -> int | None:
    return None if value is None else round(value.timestamp() * 1_000_000)


@settings(max_examples=100)
@given(stored(), st.data())
def test_same_messages(batches: list[Batch], data: st.DataObject) -> None:
    first, end = batches[0].base_offset, batches[-1].next_offset
    start = data.draw(st.integers(first, end))
    stop = data.draw(st.integers(start, end))
    rows = decoded(batches, Range("t", 3, start, stop))
    messages = [one for batch in batches for one in batch.messages() if start <= one.offset < stop]
    assert [row["offset"] for row in rows] == [one.offset for one in messages]
    for row, one in zip(rows, messages, strict=True):
        assert (row["topic"], row["partition"]) == ("t", 3)
        assert (row["key"], row["value"], row["priority"]) == (one.key, one.value, one.priority)
        assert micros(row["timestamp"]) == one.timestamp
        assert (micros(row["due"]), micros(row["expires"])) == (one.due, one.expires)
        headers = None if one.headers is None else one.header_list
        assert headers == (
            None if row["headers"] is None else [(pair["key"], pair["value"]) for pair in row["headers"]]
        )


FAR = 1 << 63


@pytest.mark.parametrize(
    "column",
    [{"timestamps": [FAR] * 2}, {"dues": [FAR, 1]}, {"expires": [1, FAR]}, {"priorities": [FAR] * 2}, {"keys": [1, 2]}],
)
def test_column_that_an_earlier_version_stored(column: dict[str, Any]) -> None:
    packed = {name: msgspec.Raw(msgspec.msgpack.encode(entries)) for name, entries in column.items()}
    values = msgspec.Raw(msgspec.msgpack.encode([b"a", b"b"]))
    batch = encode_raw(RawColumns(values, **packed), 2, (5, 5))
    batch.place(0, 0, 1)
    with pytest.raises(InvalidBatch):
        decoded([parse(memoryview(batch.data))], Range("t", 0, 0, 2))


def test_column_that_is_too_short() -> None:
    batch = encode(Columns([b"a", b"b"], keys=[b"k"]), 5)
    batch.place(0, 0, 1)
    with pytest.raises(InvalidBatch, match="1 entries for 2 messages"):
        decoded([parse(memoryview(batch.data))], Range("t", 0, 0, 2))


class TestPlanning:
    @given(
        st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5_000_000)), min_size=1, max_size=5),
        st.one_of(st.none(), st.integers(1, 20)),
    )
    def test_division_keeps_every_offset(self, spans: list[tuple[int, int]], at_least: int | None) -> None:
        ranges = [Range("t", number, start, start + size) for number, (start, size) in enumerate(spans)]
        known = {("t", one.partition): OffsetSpan(one.start, one.end, one.size * 100) for one in ranges}
        parts = split_ranges(ranges, known, at_least)
        for one in ranges:
            own = sorted(part[2:] for part in parts if part.partition == one.partition)
            begins, ends = [start for start, _ in own], [end for _, end in own]
            assert begins + [one.end] * bool(own) == [one.start] * bool(own) + ends
            assert bool(own) == bool(one.size)
        assert all(part.size for part in parts)
        total = sum(one.size for one in ranges)
        assert at_least is None or len(parts) >= min(at_least, total) or len(parts) >= at_least

    @given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.integers(1, 2000))
    def test_a_trigger_takes_its_share(self, sizes: list[int], rows_max: int) -> None:
        ranges = [Range("t", number, 10, 10 + size) for number, size in enumerate(sizes)]
        ends = limit_rows(ranges, rows_max)
        taken = [ends["t", one.partition] - one.start for one in ranges]
        assert all(0 <= got <= one.size for got, one in zip(taken, ranges, strict=True))
        assert sum(taken) <= rows_max
        assert sum(taken) >= min(rows_max, sum(sizes)) - len(sizes)
        assert any(taken) or not any(sizes)
