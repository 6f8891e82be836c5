"""A slice of a source: some messages of a partition, decoded once for all routes, whatever batches they are in."""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.engines.api import Partition
from headrace.model.batch import Batch, Columns
from headrace.model.codec import Codec
from headrace.model.errors import InvalidBatch

logger = logging.getLogger("headrace.broker")

_OTHERS = ("keys", "headers", "dues", "priorities", "expires")


class SourceSlice:
    """Consecutive messages of a partition as columns, and their offsets."""

    __slots__ = ("codec", "columns", "end", "offsets", "raw_bytes")

    def __init__(self, end: int) -> None:
        self.offsets: list[int] = []
        self.columns = Columns([], timestamps=[])
        self.end = end
        """The offset after the last one that it covers."""
        self.codec = Codec.NONE
        """How the last batch was compressed."""
        self.raw_bytes = 0
        """No message has more bytes."""

    def add(self, batch: Batch, columns: Columns, places: Sequence[int], begin: int, end: int) -> None:
        """Add the messages of a batch between two indexes."""
        before, count = len(self.offsets), end - begin
        base = batch.base_offset
        self.offsets += [base + place for place in places[begin:end]]
        mine: Any = self.columns
        mine.values += columns.values[begin:end]
        mine.timestamps += columns.timestamps[begin:end] if columns.timestamps else [batch.time_max] * count
        for name in _OTHERS:
            column, own = getattr(columns, name), getattr(mine, name)
            if column is not None:
                if own is None:
                    own = [None] * before
                    setattr(mine, name, own)
                own += column[begin:end]
            elif own is not None:
                own += [None] * count
        self.codec = Codec(batch.codec)
        self.raw_bytes += batch.raw_bytes

    def cut(self, count: int) -> None:
        """Keep only so many messages, less than it has; it then ends after the last one of them."""
        self.end = self.offsets[count - 1] + 1
        del self.offsets[count:]
        mine: Any = self.columns
        for name in ("values", "timestamps", *_OTHERS):
            column = getattr(mine, name)
            if column is not None:
                del column[count:]


class SliceReader:
    """Reads a partition in slices; a large batch is decoded once, although it is read in several."""

    def __init__(self, partition: Partition, name: str) -> None:
        self.partition = partition
        self._name = name
        self._last: tuple[Batch, Columns, Sequence[int]] | None = None
        """The last batch that was read, as only a part of it may have been needed."""

    def read(self, position: int, end: int, count_max: int, bytes_max: int) -> SourceSlice:
        """Some messages from an offset on and before `end`; none if there are only gaps."""
        found = SourceSlice(end)
        for batch, columns, places in self._decoded(position, end):
            base, count = batch.base_offset, batch.count
            begin = bisect_left(places, position - base) if position > base else 0
            stop = bisect_left(places, end - base) if end < batch.next_offset else count
            room = min(count_max - len(found.offsets), bytes_max * count // max(batch.raw_bytes, 1))
            if found.offsets and room <= 0:
                found.end = base
                return found
            if stop - begin > max(room, 1):
                stop = begin + max(room, 1)
                found.add(batch, columns, places, begin, stop)
                found.end = found.offsets[-1] + 1
                return found
            found.add(batch, columns, places, begin, stop)
            bytes_max -= batch.raw_bytes
            if len(found.offsets) >= count_max or bytes_max <= 0:
                found.end = min(batch.next_offset, end)
                return found
        return found

    def release(self, position: int) -> None:
        """Forget the last batch, if all of it was read."""
        if self._last is not None and position >= self._last[0].next_offset:
            self._last = None

    def _decoded(self, position: int, end: int) -> Iterator[tuple[Batch, Columns, Sequence[int]]]:
        last = self._last
        if last is not None and last[0].base_offset <= position < last[0].next_offset:
            yield last
            position = last[0].next_offset
        if position >= end:
            return
        for batch in self.partition.batches(position, end):
            try:
                columns = batch.columns()
            except InvalidBatch as error:
                offsets = f"{batch.base_offset} to {batch.next_offset - 1}"
                logger.warning("invalid batch not forwarded  %s offsets=%s reason=%s", self._name, offsets, error)
                continue
            self._last = batch, columns, batch.places(columns)
            yield self._last
