"""The cache of derived partitions: decoded source batches and the batches made of them, within a limit of bytes."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from headrace.model.batch import Batch, Columns

CACHED_BYTES = 64 << 20
"""What all derived partitions of a broker keep together."""
_MESSAGE_BYTES = 100
"""What a decoded message takes besides its contents."""


class DerivedCache:
    """Keeps what was used last; one cache serves all derived partitions, for they share sources."""

    def __init__(self, bytes_max: int = CACHED_BYTES) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def columns(self, source: Hashable, batch: Batch) -> Columns:
        """The decoded messages of a source's batch, which nobody may change; raises InvalidBatch."""
        if batch.decoded is not None:
            return batch.decoded
        key = (source, batch.base_offset, batch.crc)  # the object itself: another one may get its id
        found: Columns | None = self.get(key)
        if found is None:
            found = batch.columns()
            self.put(key, found, batch.raw_bytes + _MESSAGE_BYTES * batch.count)
        return found

    def get(self, key: Hashable) -> Any:
        """What is kept under a key; None if it is not, or not any more."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, value: object, size: int) -> None:
        """Keep something, and drop what was not used for longest; the newest is kept whatever its size."""
        before = self._entries.pop(key, None)
        self._bytes += size - (before[1] if before is not None else 0)
        self._entries[key] = value, size
        while self._bytes > self._bytes_max and len(self._entries) > 1:
            _, (_, dropped) = self._entries.popitem(last=False)
            self._bytes -= dropped
