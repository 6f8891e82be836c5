"""Rewrites batches: decodes the columns that somebody needs, and encodes the batch again with what was changed."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from headrace.model.batch import (
    FLAG_COMPACTED,
    FLAG_GATHERED,
    Batch,
    Columns,
    Priority,
    RawColumns,
    Time,
    encode,
    encode_raw,
    gap,
)
from headrace.model.codec import Codec
from headrace.model.errors import InvalidBatch
from headrace.model.headers import Headers
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.model.middleware import COLUMNS, UnreadColumn

_PAYLOAD = frozenset({"values", "keys"})
"""The columns that are worth not decoding."""
_encode = msgspec.msgpack.Encoder().encode
_columns_decoder = msgspec.msgpack.Decoder(Columns)
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "values": msgspec.msgpack.Decoder(list[bytes | None]),
    "keys": msgspec.msgpack.Decoder(list[bytes | None] | None),
    "timestamps": msgspec.msgpack.Decoder(list[Time] | None),
    "headers": msgspec.msgpack.Decoder(list[Headers | None] | None),
    "dues": msgspec.msgpack.Decoder(list[Time | None] | None),
    "priorities": msgspec.msgpack.Decoder(list[Priority | None] | None),
    "expires": msgspec.msgpack.Decoder(list[Time | None] | None),
}


def checked_columns(columns: Columns) -> Columns:
    """The same columns as a reader of the batch would decode them; raises InvalidBatch for anything that is none."""
    try:
        checked = _columns_decoder.decode(_encode(columns))
    except (TypeError, OverflowError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidBatch(f"these are not columns of messages: {error}") from error
    count = len(checked.values)
    for name in COLUMNS:
        column = getattr(checked, name)
        if column is not None and len(column) != count:
            raise InvalidBatch(f"the column {name} has {len(column)} entries for {count} messages")
    return checked


class BatchRewriter:
    """A published batch on its way through changes; decodes values and keys only if they are needed."""

    def __init__(self, batch: Batch, needs: Collection[str]) -> None:
        self._batch = batch
        self._raw: RawColumns | None = None
        """The columns as they are stored, while some of them are not decoded."""
        if batch.decoded is not None or set(needs) >= _PAYLOAD:
            self.columns = batch.columns()
            return
        raw = self._raw = batch.raw_columns()
        read = {name: _DECODERS[name].decode(getattr(raw, name)) for name in COLUMNS if self._is_read(name, needs)}
        read.setdefault("values", UnreadColumn(batch.count))
        self._unread = [name for name in COLUMNS if not self._is_read(name, needs)]
        self.columns = Columns(**read)

    @staticmethod
    def _is_read(name: str, needs: Collection[str]) -> bool:
        return name in needs or name not in _PAYLOAD

    def decode_all(self) -> Columns:
        """All columns, those that were changed as they are now."""
        if self._raw is not None:
            raw, self._raw = self._raw, None
            unread = {name: _DECODERS[name].decode(getattr(raw, name)) for name in self._unread}
            self.columns = msgspec.structs.replace(self.columns, **unread)
        return self.columns

    def encoded(self, codec: Codec) -> Batch:
        """The batch with its columns as they are now, of the same producer."""
        batch, columns = self._batch, self.columns
        if self._raw is None:
            return encode_like(batch, columns, codec)
        changed = {name: msgspec.Raw(_encode(getattr(columns, name))) for name in COLUMNS if name not in self._unread}
        raw = msgspec.structs.replace(self._raw, **changed)
        times = batch.time_min, batch.time_max
        if columns.timestamps:
            times = min(columns.timestamps), max(columns.timestamps)
        made = encode_raw(raw, batch.count, times, codec=codec)
        made.stamp(batch.producer)
        return made


def encode_like(batch: Batch, columns: Columns, codec: Codec = Codec.NONE) -> Batch:
    """Other messages as a batch of the same producer."""
    return encode(columns, batch.time_max, codec=codec, producer=batch.producer, message_bytes_max=BATCH_BYTES_MAX)


def joined_columns(parts: Sequence[Columns]) -> Columns:
    """The messages of all parts one after the other, which have timestamps."""
    found: dict[str, list[Any] | None] = {}
    for name in COLUMNS:
        if any(getattr(part, name) is not None for part in parts):
            found[name] = [one for part in parts for one in getattr(part, name) or [None] * len(part.values)]
    return Columns(**found)  # type: ignore[arg-type]


def recompressed(batch: Batch, codec: Codec) -> Batch:
    """The same messages of the same producer with another compression; nothing is decoded."""
    made = encode_raw(batch.raw_columns(), batch.count, (batch.time_min, batch.time_max), codec=codec)
    made.stamp(batch.producer)
    return made


def encode_with_holes(batch: Batch, columns: Columns, places: Sequence[int], span: int, codec: Codec) -> Batch:
    """What is left of a batch: messages at these places of its span; `origins` names its producer, if it has one.

    The header's fields of the producer are free for the mark of a commit.
    """
    origins = [(0, *batch.producer)] if batch.producer_id else None
    if not places:
        body = _encode(Columns([], origins=origins)) if origins else b""
        return gap(span, FLAG_COMPACTED | (FLAG_GATHERED if origins else 0), batch.time_max, body)
    left = msgspec.structs.replace(columns, places=list(places), origins=origins)
    flags = FLAG_GATHERED if origins else 0
    return encode(left, batch.time_max, codec=codec, span=span, flags=flags, message_bytes_max=BATCH_BYTES_MAX)
