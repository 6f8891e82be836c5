"""Arrow's record batches as topics' batches, with neither Spark nor a broker at work."""

import time
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.client.producer.topic_metadata import TopicMetadata
from headrace.model.batch import Batch, Columns, received
from headrace.model.codec import Codec
from headrace.model.errors import InvalidArgument, MessageTooLarge, PartitionNotFound
from headrace.model.headers import header_bytes, header_pairs
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.model.partitioning import by_key
from headrace.spark.sink import topic_batches
from headrace.spark.sink.topic_batches import TopicBatches

TYPES = {
    "topic": pa.string(),
    "value": pa.binary(),
    "key": pa.string(),
    "headers": pa.map_(pa.string(), pa.string()),
    "partition": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "due": pa.timestamp("us"),
    "priority": pa.int64(),
    "expires": pa.timestamp("ns", "Asia/Tokyo"),
}


class Staged:
    """Takes what a transaction would."""

    def __init__(self, partitions: int = 1, message_bytes_max: int = 1 << 20) -> None:
        self._shape = TopicMetadata(partitions, Codec.NONE, message_bytes_max)
        self.batches: list[tuple[str, int, Columns, int]] = []

    def metadata(self, _topic: str) -> TopicMetadata:
        return self._shape

    def stage(self, topic: str, partition: int, batch: Batch) -> None:
        if not 0 <= partition < self._shape.partitions:
            raise PartitionNotFound(f"{topic} has no {partition}")
        columns = received(batch.data).columns()  # as the broker checks it
        self.batches.append((topic, partition, columns, size_of(columns)))

    def values(self, topic: str = "t") -> dict[int, list[Any]]:
        """By partition."""
        found: dict[int, list[Any]] = {}
        for name, partition, columns, _ in self.batches:
            if name == topic:
                found.setdefault(partition, []).extend(columns.values)
        return found


def size_of(columns: Columns) -> int:
    texts = [*columns.values, *(columns.keys or ())]
    return sum(len(text or b"") for text in texts) + sum(map(header_bytes, columns.headers or ()))


def table(**columns: list[Any]) -> Any:
    return pa.record_batch([pa.array(column, TYPES[name]) for name, column in columns.items()], names=[*columns])


def sent(*batches: Any, staged: Staged | None = None, topic: str = "t") -> Staged:
    staged = staged or Staged()
    places = {name: at for at, name in enumerate(batches[0].schema.names)}
    out = TopicBatches(staged, places, topic, 0)  # type: ignore[arg-type]
    for batch in batches:
        out.add(batch)
    out.flush()
    assert out.rows == sum(len(batch) for batch in batches)
    assert out.bytes == sum(size for _, _, _, size in staged.batches)
    return staged


def test_columns_that_nobody_uses_are_not_sent() -> None:
    ((_, _, columns, size),) = sent(table(value=[b"a", None, b"ccc"], key=[None, None, None])).batches
    assert columns == Columns([b"a", None, b"ccc"])
    assert size == 4


def test_times_are_microseconds_whatever_they_were() -> None:
    moment = 1_700_000_000_000_123
    batch = pa.record_batch(
        [
            pa.array([b"a"], pa.binary()),
            pa.array([moment], pa.timestamp("us", "America/New_York")),
            pa.array([moment // 1000], pa.timestamp("ms")),
            pa.array([moment * 1000], pa.timestamp("ns", "UTC")),
        ],
        names=["value", "timestamp", "due", "expires"],
    )
    ((_, _, columns, _),) = sent(batch).batches
    assert (columns.timestamps, columns.dues, columns.expires) == ([moment], [moment // 1000 * 1000], [moment])


def test_large_types_and_slices() -> None:
    whole = pa.record_batch(
        [
            pa.array(["skipped", "a", "b", "skipped"], pa.large_string()),
            pa.array([[], [("x", "1"), ("y", None)], None, [("z", "2")]], pa.map_(pa.string(), pa.string())),
        ],
        names=["value", "headers"],
    )
    ((_, _, columns, size),) = sent(whole.slice(1, 2)).batches
    assert columns.values == [b"a", b"b"]
    assert columns.headers == [{"x": b"1", "y": None}, None]
    assert size == 5


def test_headers_repeat_names_and_hold_null() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    given = [[("a", b"1"), ("ü", None), ("a", None)], None, [("a", None)], []]
    pairs = [None if one is None else [{"key": name, "value": text} for name, text in one] for one in given]
    batch = pa.record_batch([pa.array([b""] * 4), pa.array(pairs, kind)], names=["value", "headers"])
    ((_, _, columns, size),) = sent(batch).batches
    assert [header_pairs(headers) for headers in columns.headers or ()] == [one or [] for one in given]
    assert size == 6


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
def test_messages_of_one_length(size: int, count: int) -> None:
    count = min(count, (4 << 20) // (size + 1))
    values = [(b"%d " % at * size)[:size] for at in range(count)]
    times = [1_700_000_000_000_000 + at for at in range(count)]
    staged = sent(table(value=values, timestamp=times, due=times))
    assert staged.values() == {0: values}
    assert [at for _, _, columns, _ in staged.batches for at in columns.timestamps or ()] == times
    assert [at for _, _, columns, _ in staged.batches for at in columns.dues or ()] == times


def test_a_small_rest_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_batches, "_BATCH_BYTES", 10_000)
    staged = sent(table(value=[b"x" * 100] * 101))
    assert [len(columns.values) for _, _, columns, _ in staged.batches] == [51, 50]


def test_messages_without_a_time_of_their_own() -> None:
    ((_, _, columns, _),) = sent(table(value=[b"a", b"b"], timestamp=[5, None])).batches
    assert columns.timestamps is not None
    assert columns.timestamps[0] == 5
    assert abs(columns.timestamps[1] - time.time_ns() // 1000) < 60_000_000


def test_batches_have_a_good_size_and_small_ones_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_batches, "_BATCH_BYTES", 1000)
    staged = sent(table(value=[b"x" * 100] * 55))
    assert [len(columns.values) for _, _, columns, _ in staged.batches] == [10, 10, 10, 10, 10, 5]
    staged = sent(*[table(value=[b"x" * 10])] * 250)
    assert all(len(columns.values) >= 50 for _, _, columns, _ in staged.batches[:-1])
    staged = sent(table(value=[b"x" * size for size in (999, 1, 1, 5000, 1, 1001)]))
    assert [size for _, _, _, size in staged.batches] == [1000, 1, 5000, 1, 1001]
    monkeypatch.setattr(topic_batches, "_BATCH_COUNT", 7)
    assert [len(columns.values) for _, _, columns, _ in sent(table(value=[b""] * 20)).batches] == [7, 7, 6]


def test_what_is_held_for_many_partitions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_batches, "_BUFFERED_BYTES_MAX", 10_000)
    staged = Staged(100)
    places = {"value": 0, "partition": 1}
    out = TopicBatches(staged, places, "t", 0)  # type: ignore[arg-type]
    for number in range(100):
        out.add(table(value=[b"x" * 1000], partition=[number]))
    assert len(staged.batches) > 80


def test_rows_whose_columns_differ_do_not_mix() -> None:
    staged = sent(table(value=[b"a"], key=["k"]), table(value=[b"b"], key=[None]), table(value=[b"c"], key=["k"]))
    assert staged.values() == {0: [b"a", b"b", b"c"]}


def test_without_a_key_partitions_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_batches, "_BATCH_BYTES", 100)
    staged = sent(table(value=[b"x" * 100] * 6), staged=Staged(3))
    assert [partition for _, partition, _, _ in staged.batches] == [0, 1, 2, 0, 1, 2]


def test_a_partition_that_is_said_counts_more_than_a_key() -> None:
    batch = table(value=[b"a", b"b", b"c"], key=["k", "k", None], partition=[2, None, 1])
    staged = sent(batch, staged=Staged(4))
    assert staged.values() == {2: [b"a"], 1: [b"c"], by_key(b"k", 4): [b"b"]}


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"value": [b"a"], "partition": [-1]}, PartitionNotFound),
        ({"value": [b"a"], "partition": [4]}, PartitionNotFound),
        ({"value": [b"a"], "partition": [1 << 35]}, InvalidArgument),
        ({"value": [b"a"], "priority": [1 << 40]}, InvalidArgument),
        ({"value": [b"a"], "due": [1 << 62 | 1]}, InvalidArgument),
        ({"value": [b"a"], "due": [TIMESTAMP_US_MAX + 1]}, InvalidArgument),
        ({"value": [b"a"], "timestamp": [TIMESTAMP_US_MIN - 1]}, InvalidArgument),
        ({"value": [b"a" * 101]}, MessageTooLarge),
        ({"value": [b"a" * 50], "key": ["k" * 51]}, MessageTooLarge),
        ({"value": [b"a" * 50], "headers": [[("h", "x" * 50)]]}, MessageTooLarge),
        ({"value": [b"a"], "topic": [None]}, InvalidArgument),
    ],
)
def test_what_cannot_be_sent(columns: dict[str, list[Any]], error: type[Exception]) -> None:
    with pytest.raises(error):
        sent(table(**columns), staged=Staged(4, 100), topic="" if "topic" in columns else "t")


def test_headers_without_a_name() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch([pa.array([b"a"]), pa.array([[(None, b"x")]], kind)], names=["value", "headers"])
    with pytest.raises(InvalidArgument, match="no name"):
        sent(batch)


ROW = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.none() | st.binary(max_size=20),
    st.none() | st.text(max_size=3),
    st.none() | st.integers(0, 3),
    st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
    st.none() | st.integers(-(1 << 50), 1 << 50),
    st.none() | st.integers(-(1 << 15), (1 << 15) - 1),
)


@settings(max_examples=40)
@given(batches=st.lists(st.lists(ROW, max_size=12), min_size=1, max_size=6), batch_bytes=st.integers(1, 200))
def test_every_row_arrives_as_it_is_in_the_order_of_its_partition(
    batches: list[list[tuple[Any, ...]]], batch_bytes: int
) -> None:
    names = ("topic", "value", "key", "partition", "headers", "due", "priority")
    arrow = [
        pa.record_batch(
            [pa.array([row[at] for row in rows], TYPES[name]) for at, name in enumerate(names)], names=[*names]
        )
        for rows in (
            [(*row[:4], list(row[4].items()) if row[4] is not None else None, *row[5:]) for row in batch]
            for batch in batches
        )
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topic_batches, "_BATCH_BYTES", batch_bytes)
        staged = sent(*arrow, staged=Staged(4), topic="")
    wanted: dict[tuple[str, int | None], list[Any]] = {}
    for topic, value, key, partition, headers, due, priority in (row for batch in batches for row in batch):
        number = by_key(key.encode(), 4) if partition is None and key is not None else partition
        plain = {name: text.encode() for name, text in headers.items()} if headers else None
        message = (value, None if key is None else key.encode(), plain, due, priority)
        wanted.setdefault((topic, number), []).append(message)
    found: dict[tuple[str, int], list[Any]] = {}
    for topic, partition, columns, _ in staged.batches:
        nothing = [None] * len(columns.values)
        found.setdefault((topic, partition), []).extend(
            zip(
                columns.values,
                columns.keys or nothing,
                columns.headers or nothing,
                columns.dues or nothing,
                columns.priorities or nothing,
                strict=True,
            )
        )
    for (topic, number), messages in wanted.items():
        if number is not None:
            assert _is_within(messages, found.get((topic, number), []))
        else:
            anywhere = [one for place in range(4) for one in found.get((topic, place), [])]
            assert all(one in anywhere for one in messages)
    assert sum(map(len, found.values())) == sum(map(len, wanted.values()))


def _is_within(some: list[Any], all_of_them: list[Any]) -> bool:
    """Whether these are there in this order, perhaps with others between."""
    rest = iter(all_of_them)
    return all(one in rest for one in some)
