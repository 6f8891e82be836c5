"""Single messages out of a stored batch, without decoding the others: for what is due one by one, in no order."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from headrace.model.batch import Batch, Columns, Priority, Time
from headrace.model.errors import InvalidBatch
from headrace.model.headers import Headers

_elements = msgspec.msgpack.Decoder(list[msgspec.Raw])
_bytes = msgspec.msgpack.Decoder(bytes | None)
_time = msgspec.msgpack.Decoder(Time | None)
_priority = msgspec.msgpack.Decoder(Priority | None)
_headers = msgspec.msgpack.Decoder(Headers | None)
_KINDS = {
    "values": _bytes,
    "keys": _bytes,
    "timestamps": _time,
    "headers": _headers,
    "dues": _time,
    "priorities": _priority,
    "expires": _time,
}


class BatchFields:
    """Knows where in a batch each field of each message is: 4 bytes each, for the columns that there are."""

    def __init__(self, batch: Batch) -> None:
        self.base = batch.base_offset
        self.end = batch.next_offset
        self.bytes = 0
        """How much memory it takes, about."""
        self.raw_bytes = batch.raw_bytes
        """More than all its messages have."""
        self._time_us = batch.time_max
        self._columns: dict[str, tuple[memoryview, array[int], Any]] = {}
        raw = batch.raw_columns()
        self.places: Sequence[int] | None = raw.places
        for name, decoder in _KINDS.items():
            view = memoryview(getattr(raw, name))
            if bytes(view[:1]) != b"\xc0":
                lengths = list(map(len, _entries(view)))
                if len(lengths) != batch.count:
                    raise InvalidBatch(f"a column has {len(lengths)} entries for {batch.count} messages")
                starts = array("I", accumulate(lengths, initial=len(view) - sum(lengths)))
                self._columns[name] = view, starts, decoder
                self.bytes += 4 * len(starts) + (len(view) if batch.codec else 0)
        if "values" not in self._columns:
            raise InvalidBatch("there are no values")

    def pick(self, indices: Sequence[int]) -> Columns:
        """The messages at these places of the batch, with a timestamp each."""
        try:
            found = {
                name: [decoder.decode(view[starts[at] : starts[at + 1]]) for at in indices]
                for name, (view, starts, decoder) in self._columns.items()
            }
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidBatch(f"a message cannot be decoded: {error}") from error
        if "timestamps" not in found:
            found["timestamps"] = [self._time_us] * len(indices)
        return Columns(**found)


def _entries(column: memoryview) -> list[msgspec.Raw]:
    try:
        return _elements.decode(column)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidBatch(f"a column is no array: {error}") from error
