"""Converts Arrow record batches to batches of topics: groups rows by topic and partition, and stages them."""

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
"""Target size of a batch: large enough for low overhead per message, small enough to decode for a single one."""
_BATCH_COUNT = 10_000
_BUFFERED_BYTES_MAX = 32 << 20
"""Maximum size of rows that wait for a full batch, for all partitions together."""
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ANY = -1
"""Stands for the next partition in round-robin order."""

_Target = tuple[str, int]


class TopicBatches:
    """Accumulates rows for each partition, and stages them in a transaction as full batches."""

    def __init__(self, transaction: Transaction, column_indexes: Mapping[str, int], topic: str, turn: int) -> None:
        """`column_indexes` locate the sink's columns, `topic` gets all rows unless empty, `turn` begins round-robin."""
        self._transaction = transaction
        self._column_indexes = column_indexes
        self._topic = topic
        self._turn = turn
        self._buffered: dict[_Target, list[pa.RecordBatch]] = {}
        self._target_bytes: dict[_Target, int] = {}
        self._buffered_bytes = 0
        self.rows = 0
        self.bytes = 0
        """Size of all staged messages."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows, and stage partitions with a full batch."""
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        rows = normalized(batch, self._column_indexes)
        if self._topic:
            self._add(self._topic, rows)
            return
        topics = batch.column(self._column_indexes["topic"])
        if topics.null_count:
            raise InvalidArgument('a row has no topic: fill the column topic, or give option("topic", ...)')
        names = topics.dictionary_encode()
        for number, some in grouped(rows, names.indices):
            self._add(names.dictionary[number].as_py(), some)

    def flush(self) -> None:
        """Stage all accumulated rows."""
        for target in list(self._buffered):
            self._send(target)

    def _add(self, topic: str, rows: pa.RecordBatch) -> None:
        numbers = partitions(topic, rows, self._transaction.metadata(topic))
        for number, some in [(_ANY, rows)] if numbers is None else grouped(rows, numbers):
            target = topic, number
            size = some.nbytes
            if target in self._buffered and self._buffered[target][0].schema != some.schema:
                self._send(target)  # schemas differ where a column is all null, and cannot share a batch
            self._buffered.setdefault(target, []).append(some)
            self._target_bytes[target] = self._target_bytes.get(target, 0) + size
            self._buffered_bytes += size
            if self._target_bytes[target] >= _BATCH_BYTES:
                self._send(target)
        if self._buffered_bytes > _BUFFERED_BYTES_MAX:
            self.flush()

    def _send(self, target: _Target) -> None:
        topic, number = target
        pieces = self._buffered.pop(target)
        self._buffered_bytes -= self._target_bytes.pop(target)
        rows = pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)
        metadata = self._transaction.metadata(topic)
        for portion, size in portions(topic, rows, metadata):
            partition = number
            if number == _ANY:
                partition = self._turn % metadata.partitions
                self._turn += 1
            self._transaction.stage(topic, partition, packed(portion, metadata.codec))
            self.bytes += size


def normalized(batch: pa.RecordBatch, column_indexes: Mapping[str, int]) -> pa.RecordBatch:
    """Return the columns that are present and not all null, cast to the types of message fields."""
    names, arrays = ["value"], [_CONVERT["value"](batch.column(column_indexes["value"]))]
    for name, index in column_indexes.items():
        column = batch.column(index)
        if name not in ("value", "topic") and column.null_count < len(column):
            names.append(name)
            try:
                arrays.append(_CONVERT[name](column))
            except pa.ArrowInvalid as error:
                raise InvalidArgument(f"the column {name} has a value that does not fit: {error}") from error
    return pa.RecordBatch.from_arrays(arrays, names=names)


def grouped(rows: pa.RecordBatch, numbers: pa.Array) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield each distinct number with its rows, in their order."""
    bounds = pc.min_max(numbers)
    if bounds["min"] == bounds["max"]:
        yield bounds["min"].as_py(), rows
        return
    order = pc.array_sort_indices(numbers)  # a stable sort
    runs = pc.run_end_encode(numbers.take(order))
    start = 0
    for number, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        yield number, rows.take(order.slice(start, end - start))
        start = end


def partitions(topic: str, rows: pa.RecordBatch, metadata: TopicMetadata) -> pa.Array | None:
    """Return the partition of each row; None if no row has a key or a partition."""
    names = rows.schema.names
    keyed = "key" in names and metadata.partitions > 1
    if "partition" not in names and not keyed:
        return None
    chosen = pa.nulls(len(rows), pa.int32())
    if "partition" in names:
        chosen = rows.column("partition")
        least = pc.min(chosen).as_py()
        if least is not None and least < 0:
            raise PartitionNotFound(f"{topic} has partitions 0 to {metadata.partitions - 1}, not {least}")
    if keyed and chosen.null_count:
        keys = rows.column("key").dictionary_encode()  # hash each distinct key once
        own = pa.array([by_key(key, metadata.partitions) for key in keys.dictionary.to_pylist()], pa.int32())
        chosen = pc.coalesce(chosen, own.take(keys.indices))
    return chosen.fill_null(_ANY) if chosen.null_count else chosen


def portions(topic: str, rows: pa.RecordBatch, metadata: TopicMetadata) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Divide rows into batches of about the target size; yields each with the size of its messages."""
    sizes = _sizes(rows)
    largest = pc.max(sizes).as_py()
    check_message_bytes(largest, metadata.message_bytes_max, topic)
    ends = memoryview(pc.cumulative_sum(sizes).buffers()[1]).cast("q")
    # Batches of equal size rather than a small last one.
    share = min(ceil(ends[-1] / max(ceil(ends[-1] / _BATCH_BYTES), 1)) + largest, _BATCH_BYTES)
    start = before = 0
    while start < len(rows):
        end = bisect_right(ends, before + share, start, min(start + _BATCH_COUNT, len(rows)))
        end = max(end, start + 1)
        yield rows.slice(start, end - start), ends[end - 1] - before
        start, before = end, ends[end - 1]


def _sizes(rows: pa.RecordBatch) -> pa.Array:
    """Return the size of each message."""
    sizes = _lengths(rows.column("value"))
    if "key" in rows.schema.names:
        sizes = pc.add(sizes, _lengths(rows.column("key")))
    if "headers" in rows.schema.names:
        sizes = pc.add(sizes, _header_sizes(rows.column("headers")))
    return sizes


def _header_sizes(column: pa.Array) -> pa.Array:
    """Return the size of each message's headers."""
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
    """Convert times to microseconds since 1970; times without a zone are UTC."""
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
