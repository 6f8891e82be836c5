"""Offsets in the order of a key: what a subscription waits for, and what it hands out next.

Most come in batches that are in order or soon are, so they are kept as sorted runs, in arrays or, where keys follow
each other, as mere ranges; a heap of the runs' first entries tells which is next. An entry takes 16 bytes at most.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import chain

_LOOSE_MAX = 512
"""Single entries that are kept in a heap before they become a run."""
_SMALL = 2048
"""Runs with fewer entries are small."""
_SMALL_RUNS_MAX = 32
"""When there are more small runs than this, they become one."""


class _Run:
    """Entries in order. `place` is the first one that was not taken yet."""

    __slots__ = ("keys", "offsets", "place")

    def __init__(self, keys: Sequence[int], offsets: Sequence[int]) -> None:
        self.keys = keys
        self.offsets = offsets
        self.place = 0


Head = tuple[int, int, int, _Run]
"""Key, offset and serial number of a run's first entry."""


class Runs:
    """Pairs of key and offset; the one with the smallest key is taken first.

    >>> runs = Runs()
    >>> runs.add([10, 20], [1, 2])
    >>> runs.push(15, 3)
    >>> runs.take(10, until=15)
    ([10, 15], [1, 3])
    """

    def __init__(self) -> None:
        self._heads: list[Head] = []
        self._loose: list[tuple[int, int]] = []
        self._serial = 0
        self._small = 0
        self._last: _Run | None = None

    def __bool__(self) -> bool:
        return bool(self._heads or self._loose)

    def __len__(self) -> int:
        return len(self._loose) + sum(len(run.keys) - run.place for *_, run in self._heads)

    @property
    def first_key(self) -> int | None:
        """The smallest key."""
        loose, heads = self._loose, self._heads
        if not heads:
            return loose[0][0] if loose else None
        return min(heads[0][0], loose[0][0]) if loose else heads[0][0]

    def push(self, key: int, offset: int) -> None:
        """Add one."""
        heappush(self._loose, (key, offset))
        if len(self._loose) > _LOOSE_MAX:
            loose, self._loose = sorted(self._loose), []
            self.add(array("q", [key for key, _ in loose]), array("q", [offset for _, offset in loose]))

    def add(self, keys: Sequence[int], offsets: Sequence[int]) -> None:
        """Add many in the order of keys and offsets. What is given is kept: nobody else may change it."""
        if not keys:
            return
        last = self._last
        if (
            last is not None
            and type(keys) is range
            and type(last.keys) is range
            and type(offsets) is range
            and type(last.offsets) is range
            and last.keys.stop == keys.start
            and last.offsets.stop == offsets.start
            and last.offsets.step == offsets.step
            and last.place < len(last.keys)
        ):
            last.keys = range(last.keys.start, keys.stop)
            last.offsets = range(last.offsets.start, offsets.stop, offsets.step)
            return
        run = self._last = _Run(keys, offsets)
        self._serial += 1
        heappush(self._heads, (keys[0], offsets[0], self._serial, run))
        if len(keys) < _SMALL:
            self._small += 1
            if self._small > _SMALL_RUNS_MAX:
                self._merge()

    def take(self, count: int, until: int | None = None) -> tuple[Sequence[int], Sequence[int]]:
        """Take out up to so many, in order, none with a key beyond `until`: their keys, and their offsets."""
        heads, loose = self._heads, self._loose
        if len(heads) == 1 and not loose and (until is None or heads[0][0] <= until):
            return self._take_run(count, until)  # parts of ranges are ranges
        keys: list[int] = []
        offsets: list[int] = []
        while len(keys) < count and (heads or loose):
            if loose and (not heads or loose[0] < heads[0]):
                if until is not None and loose[0][0] > until:
                    break
                key, offset = heappop(loose)
                keys.append(key)
                offsets.append(offset)
            elif until is not None and heads[0][0] > until:
                break
            else:
                more_keys, more_offsets = self._take_run(count - len(keys), until)
                keys += more_keys
                offsets += more_offsets
        return keys, offsets

    def _take_run(self, count: int, until: int | None) -> tuple[Sequence[int], Sequence[int]]:
        """Take from the first run what comes before the first of all others."""
        heads = self._heads
        serial, run = heads[0][2:]
        place, end = run.place, min(run.place + count, len(run.keys))
        others = [head[:2] for head in heads[1:3]]
        if self._loose:
            others.append(self._loose[0])
        if others and end > place + 1:
            key, offset = min(others)
            equal = bisect_left(run.keys, key, place + 1, end)
            if equal < end and run.keys[equal] == key:  # of very many that are due together all have the same
                equal = bisect_left(run.offsets, offset, equal, bisect_right(run.keys, key, equal, end))
            end = equal
        if until is not None:
            end = bisect_right(run.keys, until, place, end)
        taken = run.keys[place:end], run.offsets[place:end]
        run.place = end
        if end < len(run.keys):
            heapreplace(heads, (run.keys[end], run.offsets[end], serial, run))
        else:
            heappop(heads)
            self._small -= len(run.keys) < _SMALL
            if run is self._last:
                self._last = None
        return taken

    def between(self, least: int, beyond: int, after: int = -1) -> Iterator[tuple[int, int]]:
        """Key and offset of all with a key in these bounds, in order, without taking them: all there are now.

        Of those with the least key only the ones after an offset.
        """
        loose = sorted(one for one in self._loose if (least, after) < one < (beyond, -1))
        parts: list[Iterator[tuple[int, int]]] = [iter(loose)]
        for *_, run in self._heads:
            begin = bisect_left(run.keys, least, run.place)
            begin = bisect_right(run.offsets, after, begin, bisect_right(run.keys, least, begin))
            end = bisect_left(run.keys, beyond, begin)
            if begin < end:
                parts.append(zip(_part(run.keys, begin, end), _part(run.offsets, begin, end), strict=True))
        return merge(*parts)

    def keys(self) -> list[Sequence[int]]:
        """The keys of all that was not taken yet, in several parts with the keys of each in order."""
        parts: list[Sequence[int]] = [_part(run.keys, run.place, len(run.keys)) for *_, run in self._heads]
        return [*parts, sorted(key for key, _ in self._loose)]

    def _merge(self) -> None:
        """Make one run of the small ones."""
        small = [head for head in self._heads if len(head[3].keys) < _SMALL]
        self._heads = [head for head in self._heads if len(head[3].keys) >= _SMALL]
        # Equal keys in the order of offsets: pages of a search continue behind a key and an offset.
        parts = (zip(run.keys[run.place :], run.offsets[run.place :], strict=True) for *_, run in small)
        entries = sorted(chain.from_iterable(parts))
        merged = _Run(array("q", [key for key, _ in entries]), array("q", [offset for _, offset in entries]))
        self._serial += 1
        self._heads.append((merged.keys[0], merged.offsets[0], self._serial, merged))
        heapify(self._heads)
        self._small = len(merged.keys) < _SMALL
        self._last = None


def _part(entries: Sequence[int], begin: int, end: int) -> Sequence[int]:
    """A part of a run's entries without a copy, if that can be."""
    return memoryview(entries)[begin:end] if type(entries) is array else entries[begin:end]
