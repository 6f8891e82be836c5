"""Messages as Arrow record batches: columns to columns, never a row at a time."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headrace.model.batch import FLAG_LOST, Batch
from headrace.model.errors import CorruptBatch, InvalidBatch
from headrace.spark.planning import Range, Window

_ROWS = 50_000
_BYTES = 16 << 20
"""A record batch has about so many rows or bytes."""

Values = Callable[[pa.Array], dict[str, pa.Array]]
"""Makes the column `value`, and what goes with it, of the messages' bytes."""

_BIN8_BYTES = 2
_TIME = pa.timestamp("us", "UTC")
_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_TEXTS = msgspec.msgpack.Decoder(list[bytes | None] | None)
_NUMBERS = msgspec.msgpack.Decoder(list[int | None] | None)
_HEADERS = msgspec.msgpack.Decoder(list[dict[str, bytes] | None] | None)


class Decoder:
    """Makes record batches of the batches of a range."""

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
        """The messages of a range, in record batches of a good size."""
        pieces: list[_Piece] = []
        rows = size = 0
        for batch in batches:
            if not self._is_wanted(batch, wanted):
                continue
            piece = _Piece(batch, wanted, self._expired_too)
            if piece.count:
                pieces.append(piece)
                rows += piece.count
                size += batch.raw_bytes
            if rows >= _ROWS or size >= _BYTES:
                yield self._joined(wanted, pieces, rows)
                pieces, rows, size = [], 0, 0
        if rows:
            yield self._joined(wanted, pieces, rows)

    def _is_wanted(self, batch: Batch, wanted: Range) -> bool:
        if batch.flags & FLAG_LOST and self._fail:
            where = f"{wanted.topic}[{wanted.partition}]"
            raise CorruptBatch(batch.base_offset, batch.next_offset, where, 0, "lost, as an earlier repair found")
        window = self._window
        too_old = window.time_min_us is not None and batch.time_max < window.time_min_us
        too_new = window.time_max_us is not None and batch.time_min > window.time_max_us
        return bool(batch.count) and not too_old and not too_new

    def _joined(self, wanted: Range, pieces: list["_Piece"], rows: int) -> pa.RecordBatch:
        arrays: dict[str, pa.Array] = {}
        for name in self._schema.names:
            if name in arrays:
                continue
            if name in ("value", "_corrupt"):
                arrays |= self._values(_binary(pieces, "values"))
            else:
                arrays[name] = _COLUMNS[name](wanted, pieces, rows)
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)


class _Piece:
    """What is wanted of one batch. Its columns are decoded when they are asked for: most reads need few of them."""

    __slots__ = ("_raw", "batch", "count", "indices", "places")

    def __init__(self, batch: Batch, wanted: Range, expired_too: bool) -> None:
        self.batch = batch
        self._raw = batch.raw_columns()
        self.places: Sequence[int] | None = self._raw.places
        """Each message's offset less the batch's, if there are holes."""
        self.indices: Sequence[int] | None = None
        """Of the messages that are wanted, if not all are."""
        self.count = batch.count
        outside = batch.base_offset < wanted.start or batch.next_offset > wanted.end
        expires = None if expired_too else _NUMBERS.decode(self._raw.expires)
        if outside or expires is not None:
            self._pick(wanted, expires)

    def _pick(self, wanted: Range, expires: Sequence[int | None] | None) -> None:
        """Leave out what is not of the range, and what has expired."""
        now_us, base = time.time_ns() // 1000, self.batch.base_offset
        places = range(self.count) if self.places is None else self.places
        indices = [
            index
            for index, place in enumerate(places)
            if wanted.start <= base + place < wanted.end
            and (expires is None or (ends := expires[index]) is None or ends > now_us)
        ]
        if len(indices) < self.count:
            self.indices, self.count = indices, len(indices)
            self.places = [places[index] for index in indices]

    def even(self, name: str) -> np.ndarray | None:
        """A column of bytes, a row for each message that is wanted, if all of them are of one length."""
        table = _even(memoryview(getattr(self._raw, name)), self.batch.count)
        return table if table is None or self.indices is None else table[self.indices]

    def column(self, name: str, decoder: Any) -> list[Any] | None:
        """A column of the messages that are wanted; None if no message has it."""
        column: list[Any] | None = decoder.decode(getattr(self._raw, name))
        if column is None:
            return None
        if len(column) != self.batch.count:
            raise InvalidBatch(f"a column has {len(column)} entries for {self.batch.count} messages")
        return column if self.indices is None else [column[index] for index in self.indices]


def _chained(pieces: list[_Piece], name: str, decoder: Any) -> list[Any]:
    """A column of all pieces, None where a piece has nothing."""
    chained: list[Any] = []
    for piece in pieces:
        column = piece.column(name, decoder)
        chained += [None] * piece.count if column is None else column
    return chained


def _binary(pieces: list[_Piece], name: str) -> pa.Array:
    """A column of bytes of all pieces."""
    tables = []
    for piece in pieces:
        table = piece.even(name)
        if table is None:
            return pa.array(_chained(pieces, name, _TEXTS), pa.binary())
        tables.append(table)
    # Messages of one length need no object each: what lies side by side in the batch does so in Arrow.
    widths = np.repeat([table.shape[1] for table in tables], [len(table) for table in tables])
    edges = np.zeros(len(widths) + 1, np.int32)
    np.cumsum(widths, out=edges[1:])
    content = np.concatenate([table.reshape(-1) for table in tables])
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.binary(), len(widths), buffers)


def _even(packed: memoryview, count: int) -> np.ndarray | None:
    """The contents of a packed array of bytes that are all of one length; None if they are not."""
    kind = packed[0]
    begin = 1 if kind >> 4 == 9 else {0xDC: 3, 0xDD: 5}.get(kind, len(packed))
    width, rest = divmod(len(packed) - begin, count)
    if rest or width < _BIN8_BYTES:
        return None
    head = {0xC4: 2, 0xC5: 3, 0xC6: 5}.get(packed[begin])  # how many bytes say which and how many bytes follow
    if head is None or int.from_bytes(packed[begin + 1 : begin + head]) != width - head:
        return None
    table = np.frombuffer(packed, np.uint8, offset=begin).reshape(count, width)
    return table[:, head:] if (table[:, :head] == table[0, :head]).all() else None


def _topics(wanted: Range, _pieces: list[_Piece], rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(wanted.topic, pa.string()), rows)


def _partitions(wanted: Range, _pieces: list[_Piece], rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(wanted.partition, pa.int32()), rows)


def _offsets(_wanted: Range, pieces: list[_Piece], _rows: int) -> pa.Array:
    parts = []
    for piece in pieces:
        base, places = piece.batch.base_offset, piece.places
        parts.append(np.arange(base, base + piece.count) if places is None else np.asarray(places, np.int64) + base)
    return pa.array(np.concatenate(parts), pa.int64())


def _timestamps(_wanted: Range, pieces: list[_Piece], _rows: int) -> pa.Array:
    parts = []
    for piece in pieces:
        times = piece.column("timestamps", _NUMBERS)
        parts.append(np.full(piece.count, piece.batch.time_max) if times is None else np.asarray(times, np.int64))
    return pa.array(np.concatenate(parts), pa.int64()).view(_TIME)


def _keys(_wanted: Range, pieces: list[_Piece], _rows: int) -> pa.Array:
    return _binary(pieces, "keys")


def _dues(_wanted: Range, pieces: list[_Piece], _rows: int) -> pa.Array:
    return pa.array(_chained(pieces, "dues", _NUMBERS), pa.int64()).view(_TIME)


def _expires(_wanted: Range, pieces: list[_Piece], _rows: int) -> pa.Array:
    return pa.array(_chained(pieces, "expires", _NUMBERS), pa.int64()).view(_TIME)


def _priorities(_wanted: Range, pieces: list[_Piece], _rows: int) -> pa.Array:
    return pa.array(_chained(pieces, "priorities", _NUMBERS), pa.int32())


def _headers(_wanted: Range, pieces: list[_Piece], rows: int) -> pa.Array:
    given = _chained(pieces, "headers", _HEADERS)
    if given.count(None) == rows:
        return pa.nulls(rows, pa.list_(_HEADER))
    edges = [0, *accumulate(len(headers or ()) for headers in given)]
    names = pa.array([name for headers in given if headers for name in headers], pa.string())
    texts = pa.array([text for headers in given if headers for text in headers.values()], pa.binary())
    absent = pa.array([headers is None for headers in given])
    pairs = pa.StructArray.from_arrays([names, texts], fields=list(_HEADER))
    return pa.ListArray.from_arrays(pa.array(edges, pa.int32()), pairs, mask=absent)


_COLUMNS: dict[str, Callable[[Range, list[_Piece], int], pa.Array]] = {
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
