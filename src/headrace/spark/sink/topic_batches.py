"""From Arrow's record batches to a topic's batches: divided by topic and partition, and staged, column by column."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from math import ceil

import pyarrow as pa
import pyarrow.compute as pc

from headrace.client._sync.producer.transaction import Transaction
from headrace.client.producer.topic_metadata import TopicMetadata
from headrace.model.errors import InvalidArgument, PartitionNotFound
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.model.message import check_message_bytes
from headrace.model.partitioning import by_key
from headrace.spark.sink.packed_columns import packed

_BATCH_BYTES = 256 << 10
"""A batch of this size costs little for each message, and whoever looks for one of them has not much to decode."""
_BATCH_COUNT = 10_000
_HELD_BYTES_MAX = 32 << 20
"""Of batches that are not full yet, for all partitions together."""
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ANY = -1
"""Stands for a partition: whichever has its turn."""

_Lane = tuple[str, int]


class TopicBatches:
    """Rows on their way into a transaction: gathered for each partition until they are worth a batch."""

    def __init__(self, transaction: Transaction, places: Mapping[str, int], topic: str, turn: int) -> None:
        """`places` are the columns', `topic` that of all rows if it is not empty, `turn` the first partition's."""
        self._transaction = transaction
        self._places = places
        self._topic = topic
        self._turn = turn
        self._held: dict[_Lane, list[pa.RecordBatch]] = {}
        self._lane_bytes: dict[_Lane, int] = {}
        self._held_bytes = 0
        self.rows = 0
        self.bytes = 0
        """Of all messages that were staged."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Stage rows, soon."""
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        rows = normalized(batch, self._places)
        if self._topic:
            self._add(self._topic, rows)
            return
        topics = batch.column(self._places["topic"])
        if topics.null_count:
            raise InvalidArgument('a row has no topic: fill the column topic, or give option("topic", ...)')
        names = topics.dictionary_encode()
        for number, some in grouped(rows, names.indices):
            self._add(names.dictionary[number].as_py(), some)

    def flush(self) -> None:
        """Stage all that is held."""
        for lane in list(self._held):
            self._send(lane)

    def _add(self, topic: str, rows: pa.RecordBatch) -> None:
        numbers = partitions(topic, rows, self._transaction.metadata(topic))
        for number, some in [(_ANY, rows)] if numbers is None else grouped(rows, numbers):
            lane = topic, number
            size = some.nbytes
            if lane in self._held and self._held[lane][0].schema != some.schema:
                self._send(lane)  # a column is all null here and not there: these do not go together
            self._held.setdefault(lane, []).append(some)
            self._lane_bytes[lane] = self._lane_bytes.get(lane, 0) + size
            self._held_bytes += size
            if self._lane_bytes[lane] >= _BATCH_BYTES:
                self._send(lane)
        if self._held_bytes > _HELD_BYTES_MAX:
            self.flush()

    def _send(self, lane: _Lane) -> None:
        topic, number = lane
        pieces = self._held.pop(lane)
        self._held_bytes -= self._lane_bytes.pop(lane)
        rows = pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)
        shape = self._transaction.metadata(topic)
        for portion, size in portions(topic, rows, shape):
            partition = number
            if number == _ANY:
                partition = self._turn % shape.partitions
                self._turn += 1
            self._transaction.stage(topic, partition, packed(portion, shape.codec))
            self.bytes += size


def normalized(batch: pa.RecordBatch, places: Mapping[str, int]) -> pa.RecordBatch:
    """The columns of messages that are there and not all null, in the types that messages have."""
    names, arrays = ["value"], [_CONVERT["value"](batch.column(places["value"]))]
    for name, place in places.items():
        column = batch.column(place)
        if name not in ("value", "topic") and column.null_count < len(column):
            names.append(name)
            try:
                arrays.append(_CONVERT[name](column))
            except pa.ArrowInvalid as error:
                raise InvalidArgument(f"the column {name} has a value that does not fit: {error}") from error
    return pa.RecordBatch.from_arrays(arrays, names=names)


def grouped(rows: pa.RecordBatch, numbers: pa.Array) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows that have the same number, in their order, for each number there is."""
    bounds = pc.min_max(numbers)
    if bounds["min"] == bounds["max"]:
        yield bounds["min"].as_py(), rows
        return
    order = pc.array_sort_indices(numbers)  # which leaves equal ones in their order
    runs = pc.run_end_encode(numbers.take(order))
    start = 0
    for number, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        yield number, rows.take(order.slice(start, end - start))
        start = end


def partitions(topic: str, rows: pa.RecordBatch, shape: TopicMetadata) -> pa.Array | None:
    """The partition of each row; None if none of them has a say in it."""
    names = rows.schema.names
    keyed = "key" in names and shape.partitions > 1
    if "partition" not in names and not keyed:
        return None
    chosen = pa.nulls(len(rows), pa.int32())
    if "partition" in names:
        chosen = rows.column("partition")
        least = pc.min(chosen).as_py()
        if least is not None and least < 0:
            raise PartitionNotFound(f"{topic} has partitions 0 to {shape.partitions - 1}, not {least}")
    if keyed and chosen.null_count:
        keys = rows.column("key").dictionary_encode()  # the same key is looked at once
        own = pa.array([by_key(key, shape.partitions) for key in keys.dictionary.to_pylist()], pa.int32())
        chosen = pc.coalesce(chosen, own.take(keys.indices))
    return chosen.fill_null(_ANY) if chosen.null_count else chosen


def portions(topic: str, rows: pa.RecordBatch, shape: TopicMetadata) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The rows divided into batches of a good size, with how many bytes their messages have."""
    sizes = _sizes(rows)
    largest = pc.max(sizes).as_py()
    check_message_bytes(largest, shape.message_bytes_max, topic)
    ends = memoryview(pc.cumulative_sum(sizes).buffers()[1]).cast("q")
    # Rather some that are equal than a small one in the end.
    share = min(ceil(ends[-1] / max(ceil(ends[-1] / _BATCH_BYTES), 1)) + largest, _BATCH_BYTES)
    start = before = 0
    while start < len(rows):
        end = bisect_right(ends, before + share, start, min(start + _BATCH_COUNT, len(rows)))
        end = max(end, start + 1)
        yield rows.slice(start, end - start), ends[end - 1] - before
        start, before = end, ends[end - 1]


def _sizes(rows: pa.RecordBatch) -> pa.Array:
    """How many bytes each message has."""
    sizes = _lengths(rows.column("value"))
    if "key" in rows.schema.names:
        sizes = pc.add(sizes, _lengths(rows.column("key")))
    if "headers" in rows.schema.names:
        sizes = pc.add(sizes, _header_sizes(rows.column("headers")))
    return sizes


def _header_sizes(column: pa.Array) -> pa.Array:
    """How many bytes each message's headers have."""
    flat = column.flatten()
    each = pc.add(_lengths(flat.field(0)), _lengths(flat.field(1)))
    so_far = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(each)])
    counts = pc.list_value_length(column).cast(pa.int64()).fill_null(0)
    ends = so_far.take(pc.cumulative_sum(counts))
    return pc.subtract(ends, pa.concat_arrays([pa.array([0], pa.int64()), ends.slice(0, len(ends) - 1)]))


def _lengths(column: pa.Array) -> pa.Array:
    lengths = pc.binary_length(column).cast(pa.int64())
    return lengths.fill_null(0) if lengths.null_count else lengths


def _to_bytes(column: pa.Array) -> pa.Array:
    if pa.types.is_null(column.type):
        return column.cast(pa.binary())
    if pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary())
    return column.cast(pa.binary()) if pa.types.is_string(column.type) else column


def _to_time(column: pa.Array) -> pa.Array:
    """Microseconds since 1970; what has no time zone is taken as UTC."""
    times = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    bounds = pc.min_max(times)
    for bound in (bounds["min"].as_py(), bounds["max"].as_py()):
        if not TIMESTAMP_US_MIN <= bound <= TIMESTAMP_US_MAX:
            raise InvalidArgument(f"a time is {bound} microseconds from 1970, which is too far away")
    return times


def _to_headers(column: pa.Array) -> pa.Array:
    if pa.types.is_map(column.type):
        column = column.cast(pa.list_(pa.struct([("key", column.type.key_type), ("value", column.type.item_type)])))
    return column.cast(_HEADERS)


def _to_int(column: pa.Array) -> pa.Array:
    return column.cast(pa.int32())


_CONVERT: dict[str, Callable[[pa.Array], pa.Array]] = {
    "value": _to_bytes,
    "key": _to_bytes,
    "headers": _to_headers,
    "partition": _to_int,
    "timestamp": _to_time,
    "due": _to_time,
    "priority": _to_int,
    "expires": _to_time,
}
