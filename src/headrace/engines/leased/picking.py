"""Single messages out of a stored batch, without decoding the others: for what is due one by one, in no order."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from headrace.model.batch import Batch, Columns

_elements = msgspec.msgpack.Decoder(list[msgspec.Raw])
_bytes = msgspec.msgpack.Decoder(bytes | None)
_number = msgspec.msgpack.Decoder(int | None)
_headers = msgspec.msgpack.Decoder(dict[str, bytes] | None)
_KINDS = {
    "values": _bytes,
    "keys": _bytes,
    "timestamps": _number,
    "headers": _headers,
    "dues": _number,
    "priorities": _number,
    "expires": _number,
}


class Picker:
    """Knows where in a batch each field of each message is: 4 bytes each, for the columns that there are."""

    def __init__(self, batch: Batch) -> None:
        self.base = batch.base_offset
        self.end = batch.next_offset
        self.bytes = 0
        """How much memory it takes, about."""
        self._time_us = batch.time_max
        self._columns: dict[str, tuple[memoryview, array[int], Any]] = {}
        raw = batch.raw_columns()
        self.places: Sequence[int] | None = raw.places
        for name, decoder in _KINDS.items():
            view = memoryview(getattr(raw, name))
            if bytes(view[:1]) != b"\xc0":
                lengths = list(map(len, _elements.decode(view)))
                starts = array("I", accumulate(lengths, initial=len(view) - sum(lengths)))
                self._columns[name] = view, starts, decoder
                self.bytes += 4 * len(starts) + (len(view) if batch.codec else 0)

    def pick(self, indices: Sequence[int]) -> Columns:
        """The messages at these places of the batch, with a timestamp each."""
        found = {
            name: [decoder.decode(view[starts[at] : starts[at + 1]]) for at in indices]
            for name, (view, starts, decoder) in self._columns.items()
        }
        if "timestamps" not in found:
            found["timestamps"] = [self._time_us] * len(indices)
        return Columns(**found)
