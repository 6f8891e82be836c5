"""What has become of each message of a partition, for one subscription: a byte each, until all around is settled."""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from headrace.model.offsets import follow

UNKNOWN, WAITING, READY, LEASED, RESTING, BLOCKED, LEAVING, SETTLED = range(8)
"""Waiting for its `due`; resting before it is tried again; blocked by another one of its key; leaving for the dead."""

_BITS = 12
_CHUNK = 1 << _BITS
_MASK = _CHUNK - 1
_DONE = bytes([SETTLED])
_SETTLED_RUN = re.compile(_DONE + b"+")
_TABLES = [bytes([status]) * _CHUNK for status in range(8)]
_PENDING_MASK = bytes(255 if UNKNOWN < status < SETTLED else 0 for status in range(256))

Offsets = Sequence[int]


class Statuses:
    """The status of each offset. Everything before the first chunk that is left is settled.

    >>> statuses = Statuses(3)
    >>> statuses.begin(3, 10, READY)
    >>> statuses.change(range(3, 9), SETTLED)
    >>> statuses.floor, statuses.counts[READY]
    (9, 1)
    """

    def __init__(self, start: int) -> None:
        self.end = start
        """Nothing is known from here on."""
        self.counts = [0] * 8
        """How many messages have which status; those that are settled are not counted."""
        self._chunks: dict[int, bytearray] = {}
        """Those of which nothing is known yet share one that cannot be changed: `_chunk` gives it its own."""
        self._failed: dict[int, bytearray] = {}
        self._shared: set[int] = set()
        """Chunks that a frozen copy shares; they are copied before they are changed."""
        self._fill(start)

    def __getitem__(self, offset: int) -> int:
        chunk = self._chunks.get(offset >> _BITS)
        if chunk is None:
            return SETTLED if offset < self.end else UNKNOWN
        return chunk[offset & _MASK]

    @property
    def floor(self) -> int:
        """Everything before is settled."""
        if not self._chunks:
            return self.end
        number = min(self._chunks)
        chunk = self._chunks[number]
        return min((number << _BITS) + _CHUNK - len(chunk.lstrip(_DONE)), max(self.end, number << _BITS))

    def begin(self, start: int, end: int, status: int) -> None:
        """Offsets that were unknown so far have this status."""
        if status == SETTLED and start == self.end:
            self._skip_to(end)
            return
        self._reach(end)
        for number, low, high in _parts(start, end):
            chunk = self._chunk(number)
            chunk[low:high] = _TABLES[status][low:high]
        if status != SETTLED:
            self.counts[status] += end - start
        if status == SETTLED:
            self._drop({number for number, _, _ in _parts(start, end)})

    def _skip_to(self, end: int) -> None:
        """All that follow up to this offset are settled; however many they are, no chunks are made for them."""
        start = self.end
        if start & _MASK:
            stop = min((start | _MASK) + 1, end)
            low, high = start & _MASK, stop - (start & ~_MASK)
            self._chunk(start >> _BITS)[low:high] = _TABLES[SETTLED][low:high]
            self.end = stop
            self._drop([start >> _BITS])
        if self.end < end:
            self.end = end
            self._fill(end)

    def is_unknown(self, start: int, end: int) -> bool:
        """Whether nothing is known of any of these."""
        for number, low, high in _parts(start, end):
            chunk = self._chunks.get(number)
            if chunk is not None and chunk.count(UNKNOWN, low, high) != high - low:
                return False
            if chunk is None and (number << _BITS) + low < self.end:
                return False
        return True

    def change(self, offsets: Offsets, status: int) -> None:
        """Set the status of messages; settled messages stay settled."""
        if not offsets:
            return
        counts = self.counts
        chunks = self._chunks
        contiguous = type(offsets) is range and offsets.step == 1
        if self._shared:
            self._unshare(_numbers(offsets))
        self._reach(offsets[-1] + 1 if contiguous else max(offsets) + 1)
        if contiguous and len(offsets) > 1:
            self._change_range(offsets[0], offsets[-1] + 1, status)
        else:
            changed = 0
            for offset in offsets:
                chunk = chunks.get(offset >> _BITS)
                if chunk is None:
                    continue  # settled long ago
                before = chunk[offset & _MASK]
                if before != SETTLED:
                    counts[before] -= 1
                    try:
                        chunk[offset & _MASK] = status
                    except TypeError:  # shared; looking first would cost something for each
                        self._chunk(offset >> _BITS)[offset & _MASK] = status
                    changed += 1
            counts[status] += changed
        counts[UNKNOWN] = counts[SETTLED] = 0
        if status == SETTLED:
            self._drop(_numbers(offsets))

    def _change_range(self, start: int, stop: int, status: int) -> None:
        for number, low, high in _parts(start, stop):
            chunk = self._chunks.get(number)
            if chunk is None:
                continue  # settled long ago
            part = chunk[low:high]
            if part.count(part[0]) == high - low:  # nearly always
                if part[0] != SETTLED:
                    self.counts[part[0]] -= high - low
                    self.counts[status] += high - low
                    self._chunk(number)[low:high] = _TABLES[status][low:high]
            else:
                self.change([(number << _BITS) + at for at in range(low, high)], status)

    def all_have(self, offsets: Offsets, status: int) -> bool:
        """Whether all of them have this status."""
        if not offsets:
            return True
        if len(offsets) == 1:
            return self[offsets[0]] == status
        if not follow(offsets):
            return len(self.only(offsets, status)) == len(offsets)
        for number, low, high in _parts(offsets[0], offsets[-1] + 1):
            chunk = self._chunks.get(number)
            if chunk is None or chunk.count(status, low, high) != high - low:
                return False
        return True

    def only(self, offsets: Iterable[int], status: int) -> list[int]:
        """Those that have this status."""
        chunks = self._chunks
        found = []
        for offset in offsets:
            chunk = chunks.get(offset >> _BITS)
            if chunk is not None and chunk[offset & _MASK] == status:
                found.append(offset)
        return found

    def with_status(self, status: int, start: int = 0) -> Iterator[int]:
        """The offsets that have this status, in order; nothing may be changed meanwhile."""
        for number in sorted(self._chunks):
            base, chunk = number << _BITS, self._chunks[number]
            at = chunk.find(status, max(start - base, 0)) if start < base + _CHUNK else -1
            while at >= 0:
                yield base + at
                at = chunk.find(status, at + 1)

    def unsettled(self, start: int = 0) -> list[tuple[int, int]]:
        """Ranges of offsets below the end that may hold some that are not settled, in order.

        A list: whoever reads these messages settles some of them, and chunks go by that.
        """
        found = []
        for number in sorted(self._chunks):
            base = number << _BITS
            low, high = max(base, start), min(base + _CHUNK, self.end)
            if low < high and self._chunks[number].count(SETTLED, low - base, high - base) < high - low:
                found.append((low, high))
        return found

    def count_marked(self, marks: Mapping[int, bytes | bytearray]) -> int:
        """How many messages that are not settled are marked: with 255 in the bytes of their chunk, else with 0."""
        total = 0
        for number, marked in marks.items():
            chunk = self._chunks.get(number)
            if chunk is not None:
                pending = int.from_bytes(chunk.translate(_PENDING_MASK), "big")
                total += (pending & int.from_bytes(marked, "big")).bit_count() >> 3
        return total

    def mark(self, marks: dict[int, bytearray], offset: int) -> None:
        """Mark a message to be counted so."""
        chunk = marks.get(offset >> _BITS)
        if chunk is None:
            for number in [number for number in marks if number not in self._chunks]:
                del marks[number]  # all of them are settled
            chunk = marks[offset >> _BITS] = bytearray(_CHUNK)
        chunk[offset & _MASK] = 255

    def copied(self) -> "Statuses":
        """The statuses as of now, whatever becomes of the messages later."""
        copy = Statuses(0)
        copy.end, copy.counts = self.end, list(self.counts)
        copy._chunks = {number: bytearray(chunk) for number, chunk in self._chunks.items()}
        return copy

    def settled_now(self) -> Callable[[int], bool]:
        """Tells, on any thread and later too, which messages are settled as of now."""
        frozen = self.frozen()
        chunks, end = frozen.chunks, frozen.end

        def is_settled(offset: int) -> bool:
            chunk = chunks.get(offset >> _BITS)
            return offset < end if chunk is None else chunk[offset & _MASK] == SETTLED

        return is_settled

    # How often messages were handed out in vain.

    def fail(self, offsets: Sequence[int]) -> None:
        """Count a failed delivery of messages."""
        if self._shared:
            self._unshare({offset >> _BITS for offset in offsets})
        for offset in offsets:
            chunk = self._failed.get(offset >> _BITS)
            if chunk is None:
                chunk = self._failed[offset >> _BITS] = bytearray(_CHUNK)
            if chunk[offset & _MASK] < 255:
                chunk[offset & _MASK] += 1

    def failures(self, offsets: Offsets) -> list[int]:
        """How many deliveries of each failed; an empty list if none did."""
        if not self._failed or (type(offsets) is range and self._failed.keys().isdisjoint(_numbers(offsets))):
            return []
        found = []
        for offset in offsets:
            chunk = self._failed.get(offset >> _BITS)
            found.append(0 if chunk is None else chunk[offset & _MASK])
        return found if any(found) else []

    def failed(self) -> list[int]:
        """The messages with failed deliveries that are not settled."""
        return [
            offset
            for number, chunk in sorted(self._failed.items())
            for offset in ((number << _BITS) + at for at, times in enumerate(chunk) if times)
            if self[offset] not in (SETTLED, UNKNOWN)
        ]

    # For snapshots.

    def frozen(self) -> "FrozenStatuses":
        """The statuses as of now, whatever becomes of the messages later; costs as much as there are chunks."""
        self._shared = {*self._chunks, *self._failed}
        return FrozenStatuses(self.end, dict(self._chunks), dict(self._failed))

    def is_unchanged(self, number: int, frozen: "FrozenStatuses") -> bool:
        """Whether a chunk is as it was."""
        same = self._chunks.get(number) is frozen.chunks.get(number)
        return same and self._failed.get(number) is frozen.failed.get(number)

    def _unshare(self, numbers: Iterable[int]) -> None:
        """Copy shared chunks that are going to be changed."""
        for number in self._shared.intersection(numbers):
            self._shared.discard(number)
            for table in (self._chunks, self._failed):
                chunk = table.get(number)
                if type(chunk) is bytearray:
                    table[number] = chunk[:]

    def load(self, end: int) -> None:
        """Begin to take back what was saved of a subscription that had come to this end: all not told of is settled."""
        self.__init__(0)  # type: ignore[misc]
        self.end = end
        self._chunks.clear()

    def load_chunk(self, number: int, runs: bytes, failed: bytes) -> None:
        """Load a chunk."""
        chunk = self._chunks[number] = bytearray(_CHUNK)
        bounds = array("H", runs)
        for begin, last in zip(bounds[::2], bounds[1::2], strict=True):
            chunk[begin : last + 1] = _TABLES[SETTLED][begin : last + 1]
        if failed:
            self._failed[number] = bytearray(failed)

    def _fill(self, start: int) -> None:
        """Settle what comes before the start of the subscription."""
        if start & _MASK:
            chunk = self._chunk(start >> _BITS)
            chunk[: start & _MASK] = _TABLES[SETTLED][: start & _MASK]

    def _reach(self, end: int) -> None:
        """Know of offsets up to this one: a chunk that is missing would count as settled."""
        if end > self.end:
            unknown = _TABLES[UNKNOWN]
            for number in range(self.end >> _BITS, ((end - 1) >> _BITS) + 1):
                self._chunks.setdefault(number, unknown)  # type: ignore[arg-type]
            self.end = end

    def _chunk(self, number: int) -> bytearray:
        """A chunk, to be changed."""
        if self._shared:
            self._unshare((number,))
        chunk = self._chunks.get(number)
        if type(chunk) is not bytearray:
            chunk = self._chunks[number] = bytearray(_CHUNK)
        return chunk

    def _drop(self, numbers: Iterable[int]) -> None:
        """Forget chunks in which everything is settled."""
        for number in numbers:
            chunk = self._chunks.get(number)
            # A look at the ends spares counting most of the time.
            if chunk is not None and chunk[0] == chunk[-1] == SETTLED and chunk.count(SETTLED) == _CHUNK:
                del self._chunks[number]
                self._failed.pop(number, None)


class FrozenStatuses:
    """The statuses of a moment."""

    def __init__(self, end: int, chunks: dict[int, bytearray], failed: dict[int, bytearray]) -> None:
        self.end = end
        self.chunks = chunks
        self.failed = failed

    def saved(self, number: int) -> tuple[bytes, bytes]:
        """What has to be remembered of a chunk: its settled runs, and its failures."""
        runs = array("H")
        for found in _SETTLED_RUN.finditer(self.chunks[number]):
            runs.extend((found.start(), found.end() - 1))
        failed = self.failed.get(number)
        return runs.tobytes(), bytes(failed) if failed is not None and any(failed) else b""

    def with_status(self, status: int) -> Iterator[int]:
        """The offsets that have this status, in order."""
        for number, chunk in sorted(self.chunks.items()):
            at = chunk.find(status)
            while at >= 0:
                yield (number << _BITS) + at
                at = chunk.find(status, at + 1)


def _parts(start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The chunks of a range of offsets, with the part of each."""
    while start < end:
        number = start >> _BITS
        high = min(end - (number << _BITS), _CHUNK)
        yield number, start & _MASK, high
        start = (number << _BITS) + high


def _numbers(offsets: Offsets) -> Iterable[int]:
    """The chunks that have these."""
    if type(offsets) is range and offsets.step == 1:
        return range(offsets.start >> _BITS, ((offsets.stop - 1) >> _BITS) + 1) if offsets else ()
    return {offset >> _BITS for offset in offsets}
