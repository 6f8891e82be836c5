"""Who holds which messages, under which token, and until when."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, groupby, islice, repeat
from operator import itemgetter

from headrace.model.offsets import common

_ENDS_MIN = 1024
_SAVED_TOGETHER = 1000
SESSION_BOUND_US = 1 << 62
"""The end of a lease that lasts as long as its holder's connection."""
WHOLE_MIN = 16
"""A lease of fewer messages has an entry for each from the beginning."""


class LeaseRecord:
    """Messages that were leased together. When it is over it is still known, until somebody else takes them."""

    __slots__ = ("holder", "number", "offsets", "over", "until_us")

    def __init__(self, number: int, holder: str, until_us: int, offsets: Sequence[int]) -> None:
        self.number = number
        self.holder = holder
        self.until_us = until_us
        self.offsets = offsets
        """Those that were leased; some may have been settled since."""
        self.over = False

    def part(self, offsets: Sequence[int]) -> "LeaseRecord":
        """The same for some of its messages, as it is now."""
        part = LeaseRecord(self.number, self.holder, self.until_us, offsets)
        part.over = self.over
        return part

    def is_same(self, other: "LeaseRecord") -> bool:
        """Whether it is the same lease to the same time, and not over."""
        return self.number == other.number and self.until_us == other.until_us and not self.over


def _grouped(by_offset: dict[int, LeaseRecord]) -> Iterator[tuple[LeaseRecord, Sequence[int]]]:
    """Messages that follow each other and are of the same lease, not too many together."""
    for held, entries in groupby(by_offset.items(), key=itemgetter(1)):
        while some := [offset for offset, _ in islice(entries, _SAVED_TOGETHER)]:
            yield held, some


class LeaseTable:
    """All leases of a subscription in a partition.

    Most leases of many messages are of a range, and are settled whole: those take one entry. Of all others, and once
    something is said about a part of one, each message has its own.
    """

    def __init__(self) -> None:
        self._by_offset: dict[int, LeaseRecord] = {}
        self._whole: dict[int, LeaseRecord] = {}
        """By the first offset; none of their messages is among those that have entries of their own."""
        self._starts: list[int] = []
        """Of the whole ones, in order."""
        self._leaving: dict[int, LeaseRecord] = {}
        """Who had those that are on their way out: as long as they may come back that has to be remembered."""
        self._ends: list[tuple[int, int, LeaseRecord]] = []
        self._ends_max = _ENDS_MIN
        self._serial = 0

    def hold(self, number: int, holder: str, until_us: int, offsets: Sequence[int]) -> LeaseRecord:
        """Record a lease of messages."""
        held = LeaseRecord(number, holder, until_us, offsets)
        if type(offsets) is range and len(offsets) >= WHOLE_MIN:
            self._release(offsets)
            self._whole[offsets.start] = held
            insort(self._starts, offsets.start)
        else:
            self._divide(offsets)
            self._by_offset.update(zip(offsets, repeat(held)))
        self._expect_end(held)
        return held

    def remember(self, number: int, holder: str, until_us: int, offsets: Sequence[int]) -> None:
        """Record a lease that is over, whose messages nobody has taken since."""
        held = LeaseRecord(number, holder, until_us, ())
        held.over = True
        self._divide(offsets)
        self._by_offset.update(zip(offsets, repeat(held)))

    def end_early(self, offset: int) -> None:
        """A message's lease is over, as what happened to it later shows."""
        held = self.get(offset)
        if held is not None:
            self.remember(held.number, held.holder, held.until_us, [offset])

    def reserve(self, offsets: Sequence[int]) -> list[LeaseRecord]:
        """Remove messages from their leases while a settlement is written; returns what `restore` needs."""
        parts = self.parts(offsets)
        self._release(offsets)
        return parts

    def parts(self, offsets: Sequence[int]) -> list[LeaseRecord]:
        """The leases that these are under, each with those of them that it has."""
        held = self.common(offsets)
        if held is not None:
            return [held.part(offsets)]
        parts: dict[LeaseRecord, list[int]] = {}
        for offset in offsets:
            held = self._by_offset.get(offset)
            if held is not None:
                parts.setdefault(held, []).append(offset)
        return [held.part(some) for held, some in parts.items()]

    def restore(self, reserved: Sequence[LeaseRecord]) -> None:
        """Undo `reserve`."""
        for held in reserved:
            hold = self.remember if held.over else self.hold
            hold(held.number, held.holder, held.until_us, held.offsets)

    def leave(self, offsets: Sequence[int]) -> None:
        """Remove leaving messages from their leases, and remember who held them."""
        self._divide(offsets)
        for offset in offsets:
            held = self._by_offset.pop(offset, None)
            if held is not None:
                self._leaving[offset] = held

    def stay(self, offsets: Sequence[int]) -> None:
        """Undo `leave`: the last holder is known again, and its lease is over."""
        for offset in offsets if self._leaving else ():
            held = self._leaving.pop(offset, None)
            if held is not None:
                self.remember(held.number, held.holder, held.until_us, [offset])

    def extend(self, number: int, until_us: int, offsets: Sequence[int]) -> None:
        """Extend those of the messages that this lease holds."""
        held = self.common(offsets)
        if held is not None and held.number == number:
            self.hold(number, held.holder, until_us, offsets)
            return
        by_offset = self._by_offset
        kept = [offset for offset in offsets if (held := by_offset.get(offset)) is not None and held.number == number]
        if kept:
            self.hold(number, by_offset[kept[0]].holder, until_us, kept)

    def get(self, offset: int) -> LeaseRecord | None:
        """The lease of a message, or the last one it had."""
        return self._by_offset.get(offset) or self._whole_with(offset)

    def common(self, offsets: Sequence[int]) -> LeaseRecord | None:
        """The lease that all of these are under, if there is one."""
        held = self._whole_of(offsets)
        if held is not None:
            return held
        self._divide(offsets)
        if len(offsets) == 1:
            return self._by_offset.get(offsets[0])
        found = set(map(self._by_offset.get, offsets))
        return found.pop() if len(found) == 1 else None

    def forget(self, offsets: Sequence[int]) -> None:
        """Forget messages that were settled or released."""
        self._release(offsets)
        for offset in common(self._leaving, offsets) if self._leaving else ():
            del self._leaving[offset]

    def end(self, now_us: int, most: int) -> list[int]:
        """End leases whose time is over, of so many messages at most; returns the messages that were not settled."""
        ended: list[int] = []
        while most > 0 and self._ends and self._ends[0][0] <= now_us:
            held = self._ends[0][2]
            self._divide(held.offsets)
            some, held.offsets = held.offsets[:most], held.offsets[most:]
            most -= max(len(some), 1)
            if not held.offsets:
                heappop(self._ends)
            offsets = [offset for offset in some if self._by_offset.get(offset) is held]
            if offsets:
                over = held.part(())
                over.over = True
                self._by_offset.update(zip(offsets, repeat(over)))
                ended += offsets
        return ended

    @property
    def first_end_us(self) -> int | None:
        """When the next lease ends, or one that was settled would have."""
        return self._ends[0][0] if self._ends else None

    @property
    def next_end_us(self) -> int | None:
        """When the next lease ends."""
        while self._ends and not self._is_alive(self._ends[0][2]):
            heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def frozen(self) -> Iterator[tuple[LeaseRecord, Sequence[int]]]:
        """All that are not over, or over and not taken by others, with their messages, as of now; in parts."""
        whole = [(held, held.offsets) for held in self._whole.values()]
        return chain(whole, _grouped(dict(self._by_offset)), _grouped(dict(self._leaving)))

    # Leases that are whole.

    def _whole_of(self, offsets: Sequence[int]) -> LeaseRecord | None:
        """The whole lease of just these."""
        held = self._whole.get(offsets[0]) if self._whole and offsets else None
        return held if held is not None and held.offsets == offsets else None

    def _whole_with(self, offset: int) -> LeaseRecord | None:
        """The whole lease that a message is in."""
        if not self._starts or (at := bisect_right(self._starts, offset) - 1) < 0:
            return None
        held = self._whole[self._starts[at]]
        return held if offset in held.offsets else None

    def _divide(self, offsets: Sequence[int]) -> None:
        """Give an entry to each message of the whole leases that these are in."""
        if not self._whole:
            return
        if type(offsets) is range and offsets:  # a look at the ends is enough, and at what begins between them
            begun = self._starts[bisect_right(self._starts, offsets[0]) : bisect_right(self._starts, offsets[-1])]
            offsets = [offsets[0], *begun]
        for offset in offsets:
            held = self._whole_with(offset)
            if held is not None:
                self._drop_whole(held)
                self._by_offset.update(zip(held.offsets, repeat(held)))

    def _release(self, offsets: Sequence[int]) -> None:
        """Remove messages from their leases."""
        held = self._whole_of(offsets)
        if held is not None:
            self._drop_whole(held)
            held.offsets = ()
            return
        self._divide(offsets)
        if len(offsets) == 1:
            self._by_offset.pop(offsets[0], None)
        elif type(offsets) is range and len(offsets) > len(self._by_offset):
            self._by_offset = {offset: held for offset, held in self._by_offset.items() if offset not in offsets}
        elif self._by_offset:
            deque(map(self._by_offset.pop, offsets, repeat(None)), maxlen=0)

    def _drop_whole(self, held: LeaseRecord) -> None:
        start = held.offsets[0]
        del self._whole[start]
        del self._starts[bisect_left(self._starts, start)]

    def _is_alive(self, held: LeaseRecord) -> bool:
        """Whether it has any messages."""
        if held.offsets and self._whole.get(held.offsets[0]) is held:
            return True
        return held in map(self._by_offset.get, held.offsets)

    def _expect_end(self, held: LeaseRecord) -> None:
        if held.until_us == SESSION_BOUND_US:
            return
        self._serial += 1
        heappush(self._ends, (held.until_us, self._serial, held))
        if len(self._ends) > self._ends_max:
            # Most were settled long before their time: do not keep them until it comes.
            alive = {*self._by_offset.values(), *self._whole.values()}
            self._ends = [end for end in self._ends if end[2] in alive]
            heapify(self._ends)
            self._ends_max = max(2 * len(self._ends), _ENDS_MIN)
