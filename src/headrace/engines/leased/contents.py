"""The contents of messages by offset, out of the batches they are stored in."""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any

from headrace.engines.leased.batch_fields import BatchFields
from headrace.engines.leased.edits import EditRecord
from headrace.engines.partition import Partition
from headrace.model.batch import Batch, Columns, message_bytes
from headrace.model.errors import CorruptBatch, InvalidBatch, OffsetOutOfRange
from headrace.model.headers import header_count

_CACHED_BYTES = 32 << 20
_FEW = 8
"""When less than one of so many messages of a batch is wanted, it is picked out; else all are decoded."""
_SMALL = 32
READ_BYTES = 8 << 20
"""What is read at a time of messages of which only a little is to be known."""
STORED_MIN = 32
"""Batches with fewer messages are not handed out as they are stored: one that is made of many costs less than those."""
_NO_EDITS: Mapping[int, EditRecord] = MappingProxyType({})
_UNBOUNDED = 1 << 62
_FIELDS = ("keys", "headers", "dues", "priorities", "expires")


class _Decoded:
    """A batch with all its messages decoded."""

    def __init__(self, batch: Batch) -> None:
        self.base = batch.base_offset
        self.end = batch.next_offset
        self.columns = batch.columns()
        if self.columns.timestamps is None:
            self.columns.timestamps = [batch.time_max] * batch.count
        self.places = self.columns.places
        self.raw_bytes = batch.raw_bytes
        """More than all its messages have."""
        headers = sum(header_count(each) for each in self.columns.headers or ())
        self.bytes = self.raw_bytes + 100 * batch.count + 150 * headers

    def pick(self, indices: Sequence[int]) -> Columns:
        """The messages at these places."""
        if type(indices) is not range:
            return self.columns.picked(indices, range(len(self.columns.values)))
        part = slice(indices.start, indices.stop)
        given = self.columns
        picked = Columns(given.values[part], timestamps=given.timestamps[part])  # type: ignore[index]
        for name in _FIELDS:
            column = getattr(given, name)
            if column is not None:
                setattr(picked, name, column[part])
        return picked


class Contents:
    """Reads messages of a partition; what is known of batches stays for a while, for neighbours are often next."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._cache: OrderedDict[int, _Decoded | BatchFields] = OrderedDict()
        self._bases: list[int] = []
        self._bytes = 0

    def read(
        self, offsets: Sequence[int], edits: Mapping[int, EditRecord] = _NO_EDITS
    ) -> tuple[Columns, list[int], list[int]]:
        """The messages in this order, edited, as columns; the offsets of those there are, and of those gone."""
        columns, there, gone, _ = self.read_some(offsets, _UNBOUNDED, edits)
        return columns, there, gone

    def read_stored(self, offsets: Sequence[int]) -> tuple[Columns, list[int]]:
        """The messages as they were published, without edits, and the offsets of those there are."""
        columns, there, _ = self.read(offsets)
        return columns, there

    def read_some(
        self, offsets: Sequence[int], bytes_max: int, edits: Mapping[int, EditRecord] = _NO_EDITS
    ) -> tuple[Columns, list[int], list[int], Sequence[int]]:
        """As `read`, up to the batch whose messages go beyond so many bytes; tells also which offsets were left out."""
        if type(offsets) is range or len(offsets) < 2 or all(map(int.__lt__, offsets, offsets[1:])):
            return self._read_rising(offsets, bytes_max, edits)
        columns, there, gone, unread = self._read_rising(sorted(set(offsets)), bytes_max, edits)
        if unread:  # what comes first in the order that is wanted may be among these
            return self._read_each(offsets, bytes_max, edits)
        place = {offset: index for index, offset in enumerate(there)}
        wanted = [offset for offset in offsets if offset in place]
        picked = columns.picked([place[offset] for offset in wanted], there)
        picked.places = None
        return picked, wanted, gone, ()

    def parts(
        self, offsets: Sequence[int], edits: Mapping[int, EditRecord] = _NO_EDITS
    ) -> Iterator[tuple[Columns, list[int], list[int]]]:
        """As `read`, some of the messages at a time: all of them may not fit into memory."""
        while offsets:
            columns, there, gone, offsets = self.read_some(offsets, READ_BYTES, edits)
            yield columns, there, gone

    def _read_each(
        self, offsets: Sequence[int], bytes_max: int, edits: Mapping[int, EditRecord]
    ) -> tuple[Columns, list[int], list[int], Sequence[int]]:
        """The same for offsets in any order, a message at a time."""
        found = Columns([], timestamps=[])
        there: list[int] = []
        gone: list[int] = []
        size = 0
        for index, offset in enumerate(offsets):
            columns, is_there, is_gone, _ = self._read_rising([offset], bytes_max, edits)
            gone += is_gone
            if is_there:
                there.append(offset)
                _append(found, columns)
                size += message_bytes(columns, 0)
            if size > bytes_max:
                return found, there, gone, offsets[index + 1 :]
        return found, there, gone, ()

    def _read_rising(
        self, offsets: Sequence[int], bytes_max: int, edits: Mapping[int, EditRecord]
    ) -> tuple[Columns, list[int], list[int], Sequence[int]]:
        found = Columns([], timestamps=[])
        there: list[int] = []
        gone: list[int] = []
        place = size = exact = measured = 0
        while place < len(offsets) and size <= bytes_max:
            known = self._find(offsets, place)
            if known is None:
                gone.append(offsets[place])
                place += 1
                continue
            wanted = offsets[place : bisect_left(offsets, known.end, place)]
            place += len(wanted)
            indices = _indices(known, wanted, gone)
            if indices:
                try:
                    picked = known.pick(indices)
                except InvalidBatch:
                    gone += [one for one in wanted if one not in gone]
                    continue
                if there:
                    _append(found, picked)
                else:
                    found, picked.places, picked.origins = picked, None, None
                there += wanted if len(indices) == len(wanted) else [one for one in wanted if one not in gone]
                size += known.raw_bytes
                if size > bytes_max:  # perhaps: what was not wanted of the batches is in it
                    exact += sum(message_bytes(found, index) for index in range(measured, len(there)))
                    size, measured = exact, len(there)
        if edits and not edits.keys().isdisjoint(there):
            _edit(found, there, edits)
            if self._partition.is_derived:
                self._deliver_edited(found, there, edits)
        return found, there, gone, offsets[place:]

    def stored(self, offsets: range, bytes_max: int) -> list[Batch]:
        """The batches, as they are stored, that have the first of these messages and no others; no small ones."""
        found: list[Batch] = []
        offset = offsets.start
        while offsets.stop - offset >= STORED_MIN:
            known = self._known(offset)
            if known is not None and not (known.base == offset and known.end <= offsets.stop):
                break  # it need not be looked for
            try:
                batch = self._partition.batch_at(offset)
            except (OffsetOutOfRange, CorruptBatch):
                break
            bytes_max -= batch.raw_bytes
            whole = batch.base_offset == offset and STORED_MIN <= batch.count == batch.span <= offsets.stop - offset
            if not whole or bytes_max < 0:
                break
            found.append(batch)
            offset = batch.next_offset
        return found

    def _known(self, offset: int) -> _Decoded | BatchFields | None:
        at = bisect_right(self._bases, offset) - 1
        known = self._cache[self._bases[at]] if at >= 0 else None
        return known if known is not None and offset < known.end else None

    def _find(self, offsets: Sequence[int], place: int) -> _Decoded | BatchFields | None:
        offset = offsets[place]
        known = self._known(offset)
        if known is not None:
            self._cache.move_to_end(known.base)
            return known
        try:
            batch = self._partition.batch_at(offset)
            if not batch.base_offset <= offset < batch.next_offset or not batch.count:
                return None
            wanted = bisect_left(offsets, batch.next_offset, place) - place
            few = batch.count > _SMALL and wanted * _FEW < batch.count
            known = BatchFields(batch) if few else _Decoded(batch)
        except (OffsetOutOfRange, CorruptBatch, InvalidBatch):
            return None
        self._keep(known)
        return known

    def _keep(self, known: _Decoded | BatchFields) -> None:
        bases = self._bases
        # Compaction may have made other batches of the same messages.
        for base in bases[bisect_left(bases, known.base) : bisect_left(bases, known.end)]:
            self._forget(base)
        self._cache[known.base] = known
        bases.insert(bisect_left(bases, known.base), known.base)
        self._bytes += known.bytes
        while self._bytes > _CACHED_BYTES and len(self._cache) > 1:
            self._forget(next(iter(self._cache)))

    def _deliver_edited(self, columns: Columns, offsets: list[int], edits: Mapping[int, EditRecord]) -> None:
        """Show edited contents as consumers see those of the partition."""
        edited = [at for at, offset in enumerate(offsets) if offset in edits and edits[offset].content is not None]
        if not edited:
            return
        given = columns.picked(edited, offsets)
        given.places = None
        made = self._partition.delivered(given)
        values, headers = list(columns.values), list(columns.headers or [None] * len(offsets))
        for index, at in enumerate(edited):
            values[at], headers[at] = made.values[index], None if made.headers is None else made.headers[index]
        columns.values, columns.headers = values, headers

    def use(self, partition: Partition) -> None:
        """Read from another view of the same partition."""
        self._partition = partition
        self.clear()

    def clear(self) -> None:
        """Keep nothing: there are no messages that could be wanted soon."""
        self._cache.clear()
        self._bases.clear()
        self._bytes = 0

    def _forget(self, base: int) -> None:
        self._bytes -= self._cache.pop(base).bytes
        del self._bases[bisect_left(self._bases, base)]


def _indices(known: _Decoded | BatchFields, offsets: Sequence[int], gone: list[int]) -> Sequence[int]:
    """Where messages are in a batch; adds those that are not there to those that are gone."""
    base, places = known.base, known.places
    if places is None:
        first, last = offsets[0] - base, offsets[-1] - base
        return range(first, last + 1) if last - first == len(offsets) - 1 else [offset - base for offset in offsets]
    found = []
    for offset in offsets:
        index = bisect_left(places, offset - base)
        if index < len(places) and places[index] == offset - base:
            found.append(index)
        else:
            gone.append(offset)
    return found


def _append(whole: Columns, part: Columns) -> None:
    """Add messages to others; a column that only one of them has is filled up."""
    before, more = len(whole.values), len(part.values)
    whole.values += part.values  # type: ignore[operator]
    whole.timestamps += part.timestamps  # type: ignore[operator]
    for name in _FIELDS:
        column: list[Any] | None = getattr(whole, name)
        added = getattr(part, name)
        if added is not None or column is not None:
            column = [None] * before if column is None else column
            column += repeat(None, more) if added is None else added
            setattr(whole, name, column)


def _edit(columns: Columns, offsets: list[int], edits: Mapping[int, EditRecord]) -> None:
    """Put what was changed in its place; the columns' lists belong to the caller."""
    nothing = [None] * len(offsets)
    dues, priorities = list(columns.dues or nothing), list(columns.priorities or nothing)
    headers, values = list(columns.headers or nothing), list(columns.values)
    for index, offset in enumerate(offsets):
        edit = edits.get(offset)
        if edit is None:
            continue
        if edit.due is not None:
            dues[index] = edit.due
        if edit.priority is not None:
            priorities[index] = edit.priority
        if edit.content is not None:
            values[index], headers[index] = edit.content
    columns.values, columns.headers, columns.dues, columns.priorities = values, headers, dues, priorities
