"""Decodes batches of messages to Arrow record batches, column by column."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headrace.model.batch import FLAG_LOST, Batch, Priority, Time
from headrace.model.errors import CorruptBatch, InvalidBatch
from headrace.model.headers import Headers, header_count, name_value_lists
from headrace.model.limits import TIMESTAMP_US_MAX
from headrace.spark.source.planning import Range, Window

_ROWS = 50_000
_BYTES = 16 << 20
"""Approximate size of a record batch, in rows and bytes."""

Values = Callable[[pa.Array], dict[str, pa.Array]]
"""Converts message values to the column `value` and, for JSON, the column `_corrupt`."""

_NIL = b"\xc0"
_UINT64, _UINT64_BYTES = 0xCF, 8
_TIME = pa.timestamp("us", "UTC")
_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_TEXTS = msgspec.msgpack.Decoder(list[bytes | None] | None)
_TIMES = msgspec.msgpack.Decoder(list[Time | None] | None)
_PRIORITIES = msgspec.msgpack.Decoder(list[Priority | None] | None)
_HEADERS = msgspec.msgpack.Decoder(list[Headers | None] | None)


class Decoder:
    """Decodes the batches of a range to record batches."""

    def __init__(
        self,
        schema: pa.Schema,
        values: Values,
        window: Window,
        *,
        fail_on_data_loss: bool = True,
        expired_too: bool = False,
    ) -> None:
        self._schema = schema
        self._values = values
        self._window = window
        self._fail = fail_on_data_loss
        self._expired_too = expired_too

    def record_batches(self, wanted: Range, batches: Iterator[Batch]) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range, in record batches of about the target size."""
        pieces: list[_LazyBatch] = []
        rows = size = 0
        for batch in batches:
            if not self._is_wanted(batch, wanted):
                continue
            pieces.append(_LazyBatch(batch, wanted, self._expired_too))
            rows += batch.count
            size += batch.raw_bytes
            if rows >= _ROWS or size >= _BYTES:
                yield self._joined(wanted, pieces, rows)
                pieces, rows, size = [], 0, 0
        if rows:
            yield self._joined(wanted, pieces, rows)

    def _is_wanted(self, batch: Batch, wanted: Range) -> bool:
        if batch.flags & FLAG_LOST and self._fail:
            where = f"{wanted.topic}[{wanted.partition}]"
            reason = "lost, as an earlier repair or upgrade found"
            raise CorruptBatch(batch.base_offset, batch.next_offset, where, 0, reason)
        window = self._window
        too_old = window.time_min_us is not None and batch.time_max < window.time_min_us
        too_new = window.time_max_us is not None and batch.time_min > window.time_max_us
        return bool(batch.count) and not too_old and not too_new

    def _joined(self, wanted: Range, pieces: list["_LazyBatch"], rows: int) -> pa.RecordBatch:
        arrays: dict[str, pa.Array] = {}
        for name in self._schema.names:
            if name in arrays:
                continue
            if name in ("value", "_corrupt"):
                arrays |= self._values(_binary(pieces, "values", rows))
            else:
                arrays[name] = _COLUMNS[name](wanted, pieces, rows)
        whole = pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)
        if all(piece.wanted is None for piece in pieces):
            return whole
        wanted_ones = chain.from_iterable(piece.wanted or repeat(True, piece.count) for piece in pieces)
        return whole.filter(pa.array(wanted_ones, pa.bool_()))


class _LazyBatch:
    """A batch whose columns are decoded on demand, as most reads need few of them."""

    __slots__ = ("batch", "count", "raw", "wanted")

    def __init__(self, batch: Batch, wanted: Range, expired_too: bool) -> None:
        self.batch = batch
        self.raw = batch.raw_columns()
        self.count = batch.count
        self.wanted: list[bool] | None = None
        """For each message, whether it is wanted; None if all are."""
        outside = batch.base_offset < wanted.start or batch.next_offset > wanted.end
        expires = None if expired_too else self.column("expires", _TIMES)
        if outside or expires is not None:
            self.wanted = self._picked(wanted, expires)

    def _picked(self, wanted: Range, expires: Sequence[int | None] | None) -> list[bool] | None:
        """Return which messages are in the range and unexpired; None if all are."""
        now_us, base = time.time_ns() // 1000, self.batch.base_offset
        places = range(self.count) if self.raw.places is None else self.raw.places
        picked = [
            wanted.start <= base + place < wanted.end
            and (expires is None or (ends := expires[index]) is None or ends > now_us)
            for index, place in enumerate(places)
        ]
        return None if all(picked) else picked

    def column(self, name: str, decoder: Any) -> list[Any] | None:
        """Decode a column; returns None if no message has it."""
        try:
            column: list[Any] | None = decoder.decode(getattr(self.raw, name))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidBatch(f"{self._where}: the column {name} cannot be decoded: {error}") from error
        if column is not None and len(column) != self.count:
            raise InvalidBatch(f"{self._where}: a column has {len(column)} entries for {self.count} messages")
        return column

    @property
    def _where(self) -> str:
        return f"offsets {self.batch.base_offset} to {self.batch.next_offset - 1}"


def _chained(pieces: list[_LazyBatch], name: str, decoder: Any) -> list[Any]:
    """Decode a column of all batches, with None where a message has no entry."""
    chained: list[Any] = []
    for piece in pieces:
        column = piece.column(name, decoder)
        chained += [None] * piece.count if column is None else column
    return chained


def _is_nowhere(pieces: list[_LazyBatch], name: str) -> bool:
    return all(bytes(getattr(piece.raw, name)) == _NIL for piece in pieces)


def _binary(pieces: list[_LazyBatch], name: str, rows: int) -> pa.Array:
    """Decode a column of byte strings of all batches."""
    tables = _even(pieces, name, _bytes_head)
    if tables is None:
        return pa.array(_chained(pieces, name, _TEXTS), pa.binary())
    edges = np.zeros(rows + 1, np.int32)
    np.cumsum(np.repeat([table.shape[1] for table in tables], [len(table) for table in tables]), out=edges[1:])
    content = np.ascontiguousarray(_concatenated([table.reshape(-1) for table in tables]))
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(edges), pa.py_buffer(content)])


def _even(pieces: list[_LazyBatch], name: str, head_of: Callable[[np.ndarray], int | None]) -> list[np.ndarray] | None:
    """Return a column as byte tables with a row per message; None if messages of a batch differ in length.

    Entries of one length are contiguous in a batch as in Arrow, so they need no Python object each.
    """
    runs: list[tuple[int, list[memoryview]]] = []  # neighbours of one length, together
    for piece in pieces:
        packed = memoryview(getattr(piece.raw, name))
        kind = packed[0]
        begin = 1 if kind >> 4 == 9 else {0xDC: 3, 0xDD: 5}.get(kind, len(packed))
        width, rest = divmod(len(packed) - begin, piece.count)
        if rest or not width:
            return None
        if not runs or runs[-1][0] != width:
            runs.append((width, []))
        runs[-1][1].append(packed[begin:])
    tables = []
    for width, parts in runs:
        table = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, width)
        head = head_of(table)
        if head is None or any((table[:, at] != table[0, at]).any() for at in range(head)):
            return None
        tables.append(table[:, head:])
    return tables


def _concatenated(tables: list[np.ndarray]) -> np.ndarray:
    return tables[0] if len(tables) == 1 else np.concatenate(tables)


def _bytes_head(table: np.ndarray) -> int | None:
    """Return the length of the MessagePack head of a byte string that fills the row; None if there is none."""
    head = {0xC4: 2, 0xC5: 3, 0xC6: 5}.get(int(table[0, 0]))
    return head if head and int.from_bytes(table[0, 1:head].tobytes()) == table.shape[1] - head else None


def _number_head(table: np.ndarray) -> int | None:
    """Like `_bytes_head`, for unsigned 64-bit integers, the encoding of current times."""
    return 1 if table[0, 0] == _UINT64 and table.shape[1] == 1 + _UINT64_BYTES else None


def _topics(wanted: Range, _pieces: list[_LazyBatch], rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(wanted.topic, pa.string()), rows)


def _partitions(wanted: Range, _pieces: list[_LazyBatch], rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(wanted.partition, pa.int32()), rows)


def _offsets(_wanted: Range, pieces: list[_LazyBatch], _rows: int) -> pa.Array:
    parts = []
    for piece in pieces:
        base, places = piece.batch.base_offset, piece.raw.places
        parts.append(np.arange(base, base + piece.count) if places is None else np.asarray(places, np.int64) + base)
    return pa.array(np.concatenate(parts), pa.int64())


def _timestamps(_wanted: Range, pieces: list[_LazyBatch], _rows: int) -> pa.Array:
    tables = _even(pieces, "timestamps", _number_head)
    if tables is not None:
        numbers = np.ascontiguousarray(_concatenated(tables)).view(">i8").astype(np.int64).reshape(-1)
        if numbers.min() < 0 or numbers.max() > TIMESTAMP_US_MAX:
            raise InvalidBatch(f"a timestamp of offsets from {pieces[0].batch.base_offset} on is out of range")
        return pa.array(numbers, pa.int64()).view(_TIME)
    parts = []
    for piece in pieces:
        times = piece.column("timestamps", _TIMES)
        parts.append(np.full(piece.count, piece.batch.time_max) if times is None else np.asarray(times, np.int64))
    return pa.array(np.concatenate(parts), pa.int64()).view(_TIME)


def _keys(_wanted: Range, pieces: list[_LazyBatch], rows: int) -> pa.Array:
    return pa.nulls(rows, pa.binary()) if _is_nowhere(pieces, "keys") else _binary(pieces, "keys", rows)


def _dues(_wanted: Range, pieces: list[_LazyBatch], _rows: int) -> pa.Array:
    return pa.array(_chained(pieces, "dues", _TIMES), pa.int64()).view(_TIME)


def _expires(_wanted: Range, pieces: list[_LazyBatch], _rows: int) -> pa.Array:
    return pa.array(_chained(pieces, "expires", _TIMES), pa.int64()).view(_TIME)


def _priorities(_wanted: Range, pieces: list[_LazyBatch], _rows: int) -> pa.Array:
    return pa.array(_chained(pieces, "priorities", _PRIORITIES), pa.int32())


def _headers(_wanted: Range, pieces: list[_LazyBatch], rows: int) -> pa.Array:
    given = _chained(pieces, "headers", _HEADERS)
    if given.count(None) == rows:
        return pa.nulls(rows, pa.list_(_HEADER))
    edges = [0, *accumulate(map(header_count, given))]
    listed = [name_value_lists(headers) for headers in given if headers]
    names = pa.array(list(chain.from_iterable(names for names, _ in listed)), pa.string())
    texts = pa.array(list(chain.from_iterable(contents for _, contents in listed)), pa.binary())
    absent = pa.array([headers is None for headers in given])
    pairs = pa.StructArray.from_arrays([names, texts], fields=list(_HEADER))
    return pa.ListArray.from_arrays(pa.array(edges, pa.int32()), pairs, mask=absent)


_COLUMNS: dict[str, Callable[[Range, list[_LazyBatch], int], pa.Array]] = {
    "topic": _topics,
    "partition": _partitions,
    "offset": _offsets,
    "timestamp": _timestamps,
    "key": _keys,
    "headers": _headers,
    "due": _dues,
    "priority": _priorities,
    "expires": _expires,
}
