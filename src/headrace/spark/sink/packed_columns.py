"""Encodes Arrow columns as MessagePack columns of a batch, without a Python object per message where possible."""

import time
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.model.batch import Batch, RawColumns, encode_raw
from headrace.model.codec import Codec
from headrace.model.errors import InvalidArgument
from headrace.model.headers import Headers, headers_from_pairs

_NIL = msgspec.Raw(b"\xc0")
_UINT64 = b"\xcf"
_pack = msgspec.msgpack.Encoder().encode


def packed(rows: pa.RecordBatch, codec: Codec) -> Batch:
    """Encode rows with normalized columns as a batch."""
    given = dict(zip(rows.schema.names, rows.columns, strict=True))
    now_us = time.time_ns() // 1000
    times_us = now_us, now_us
    if "timestamp" in given:
        given["timestamp"] = given["timestamp"].fill_null(now_us)
        bounds = pc.min_max(given["timestamp"])
        times_us = bounds["min"].as_py(), bounds["max"].as_py()

    def numbers(name: str) -> msgspec.Raw:
        return _numbers(given[name]) if name in given else _NIL

    columns = RawColumns(
        values=_bytes(given["value"]),
        keys=_bytes(given["key"]) if "key" in given else _NIL,
        timestamps=numbers("timestamp"),
        headers=_listed(_headers(given["headers"])) if "headers" in given else _NIL,
        dues=numbers("due"),
        priorities=_listed(given["priority"].to_pylist()) if "priority" in given else _NIL,
        expires=numbers("expires"),
    )
    return encode_raw(columns, len(rows), times_us, codec=codec)


def _listed(column: list[Any]) -> msgspec.Raw:
    return msgspec.Raw(_pack(column))


def _bytes(column: pa.Array) -> msgspec.Raw:
    """Encode byte strings; strings of one length are copied from Arrow's memory as a block."""
    if column.null_count:
        return _listed(column.to_pylist())
    count, kind = len(column), np.int64 if pa.types.is_large_binary(column.type) else np.int32
    _, edges_at, content = column.buffers()
    edges = np.frombuffer(edges_at, kind)[column.offset : column.offset + count + 1]
    widths = np.diff(edges)
    width = int(widths[0])
    if not width or (widths != width).any():
        return _listed(column.to_pylist())
    table = np.frombuffer(content, np.uint8)[edges[0] : edges[-1]].reshape(count, width)
    return _rows(_bytes_head(width), table)


def _numbers(column: pa.Array) -> msgspec.Raw:
    """Encode 64-bit integers, such as times."""
    if column.null_count or pc.min(column).as_py() < 0:
        return _listed(column.to_pylist())
    return _rows(_UINT64, column.to_numpy().astype(">i8").view(np.uint8).reshape(len(column), 8))


def _rows(head: bytes, table: np.ndarray) -> msgspec.Raw:
    """Encode an array whose entries are the head followed by a row of the table."""
    count, width = table.shape
    begin = _array_head(count)
    whole = np.empty(len(begin) + count * (len(head) + width), np.uint8)
    whole[: len(begin)] = np.frombuffer(begin, np.uint8)
    entries = whole[len(begin) :].reshape(count, len(head) + width)
    entries[:, : len(head)] = np.frombuffer(head, np.uint8)
    entries[:, len(head) :] = table
    return msgspec.Raw(whole.data)


def _array_head(count: int) -> bytes:
    """Return the MessagePack head of an array."""
    if count < 1 << 4:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2) if count < 1 << 16 else b"\xdd" + count.to_bytes(4)


def _bytes_head(width: int) -> bytes:
    """Return the MessagePack head of a byte string."""
    if width < 1 << 8:
        return b"\xc4" + width.to_bytes(1)
    return b"\xc5" + width.to_bytes(2) if width < 1 << 16 else b"\xc6" + width.to_bytes(4)


def _headers(column: pa.Array) -> list[Headers | None]:
    """Convert Arrow headers to message headers."""
    flat = column.flatten()
    names, texts = flat.field(0).to_pylist(), flat.field(1).to_pylist()
    if None in names:
        raise InvalidArgument("a header has no name: the key of an entry of the column headers is null")
    pairs = zip(names, texts, strict=True)
    lengths = pc.list_value_length(column).to_pylist()
    return [headers_from_pairs(islice(pairs, length)) if length else None for length in lengths]
