"""Which partitions of a leased subscription have messages that are ready, and when something happens in the others.

Only partitions that have changed are looked at: what a lease costs does not depend on how many there are.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from headrace.engines.api import RANK_BITS, LeasedPartition
from headrace.model.subscription import Discipline

_OUTDATED_MAX = 64


class Choice(NamedTuple):
    """The partition whose messages come first, and the last key that comes before those of all others."""

    partition: int
    until_key: int | None


class PartitionSchedule:
    """What is known of the partitions of a subscription; those in `changed` have to be looked at again."""

    def __init__(self, indexes: Mapping[int, LeasedPartition]) -> None:
        self._indexes = indexes
        self._by_key = False
        """Whether the keys of messages mean the same in all partitions."""
        self._shift = 0
        self.changed: set[int] = set()
        self.looked = 0
        """How often a partition was looked at."""
        self._ready = _Ranks()
        self._waiting, self._resting, self._ends = _Times(), _Times(), _Times()

    def order_by(self, discipline: Discipline) -> None:
        """Messages are handed out in this order."""
        self._by_key = discipline in (Discipline.PRIORITY, Discipline.DEADLINE)
        self._shift = RANK_BITS if discipline is Discipline.PRIORITY else 0
        self.changed.update(self._indexes)

    def first(self, turn: int, now_us: int, ahead_us: int, passed_over: Collection[int]) -> Choice | None:
        """Where the next message comes from: one that is ready, else one that is due soonest within a time.

        Where messages of several partitions come first the one is chosen that follows next on `turn`.
        """
        self._look()
        found = self._ready.first(turn, passed_over)
        if found is not None:
            partition, following = found
            until_key = ((following + 1) << self._shift) - 1 if self._by_key and following is not None else None
            return Choice(partition, until_key)
        if ahead_us:
            for partition in self._waiting.due(now_us + ahead_us, len(passed_over) + 1):
                if partition not in passed_over:
                    return Choice(partition, None)
        return None

    def advance(self, now_us: int, most: int) -> bool:
        """Have messages that are due made ready, about so many at most; whether there are more."""
        for times in (self._waiting, self._resting):
            while (due := self._due(times, now_us)) and most > 0:
                for partition in due:
                    most -= self._indexes[partition].make_due_ready(now_us)
                    self.changed.add(partition)
                    if most <= 0:
                        break
        return self.is_due(now_us)

    def is_due(self, now_us: int) -> bool:
        """Whether messages are due that were not made ready."""
        return self._is_due(self._waiting, now_us) or self._is_due(self._resting, now_us)

    def over(self, now_us: int, most: int) -> list[int]:
        """So many partitions at most in which the time of a lease or of a message may be over."""
        self._look()
        return self._ends.due(now_us, most)

    def is_over(self, now_us: int) -> bool:
        """Whether the time of a lease or of a message may be over."""
        if self.changed:
            self._look()
        first = self._ends.first
        return first is not None and first[0] <= now_us

    def has_expired(self, now_us: int) -> bool:
        """Whether there are messages whose time is over and that nobody has dealt with."""
        return self.is_over(now_us) and any(index.has_expired(now_us) for index in self._indexes.values())

    def next_us(self, *, wanted: bool, ahead_us: int) -> int | None:
        """When there is something to do: a time is over, or a message will be ready that is `wanted`."""
        self._look()
        while (first := self._ends.first) is not None:
            end_us = self._indexes[first[1]].next_end_us
            if end_us == first[0]:
                break
            self._ends.set(first[1], end_us)  # of leases that were settled meanwhile
        firsts = [self._ends.first, self._resting.first if wanted else None]
        times = [first[0] for first in firsts if first is not None]
        if wanted and self._waiting.first is not None:
            times.append(self._waiting.first[0] - ahead_us)
        return min(times, default=None)

    def _is_due(self, times: "_Times", now_us: int) -> bool:
        if self.changed:
            self._look()
        first = times.first
        return first is not None and first[0] <= now_us

    def _due(self, times: "_Times", now_us: int) -> list[int]:
        self._look()
        return times.due(now_us, _OUTDATED_MAX)

    def _look(self) -> None:
        """Look at the partitions that have changed."""
        while self.changed:
            number = self.changed.pop()
            index = self._indexes.get(number)
            self.looked += 1
            if index is None:
                for table in (self._ready, self._waiting, self._resting, self._ends):
                    table.set(number, None)
                continue
            key, waiting_us, resting_us, end_us = index.next_times()
            self._ready.set(number, None if key is None else key >> self._shift if self._by_key else 0)
            self._waiting.set(number, waiting_us)
            self._resting.set(number, resting_us)
            self._ends.set(number, end_us)


class _Ranks:
    """Partitions by the rank of their first message."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._partitions: dict[int, list[int]] = {}
        """By rank, in order."""
        self._heap: list[int] = []
        """The ranks, each once; has some that no partition has any more."""
        self._in_heap: set[int] = set()

    def set(self, partition: int, rank: int | None) -> None:
        """This is the rank of a partition from now on; None: it has nothing that is ready."""
        before = self._of.get(partition)
        if before == rank:
            return
        if before is not None:
            others = self._partitions[before]
            del others[bisect_left(others, partition)]
            if not others:
                del self._partitions[before]
        if rank is None:
            del self._of[partition]
            return
        self._of[partition] = rank
        if rank in self._partitions:
            insort(self._partitions[rank], partition)
        else:
            self._partitions[rank] = [partition]
            if rank not in self._in_heap:
                self._in_heap.add(rank)
                heappush(self._heap, rank)
            if len(self._heap) > 2 * len(self._partitions) + _OUTDATED_MAX:
                self._heap, self._in_heap = list(self._partitions), set(self._partitions)
                heapify(self._heap)

    def first(self, turn: int, passed_over: Collection[int]) -> tuple[int, int | None] | None:
        """The partition that comes first, from `turn` on, and the rank of the one that follows it."""
        ranks: list[int] = []
        found: int | None = None
        following: int | None = None
        while following is None and (rank := self._first_rank()) is not None:
            for partition in _from(
                turn,
                [one for one in self._partitions[rank] if one not in passed_over]
                if passed_over
                else self._partitions[rank],
            ):
                if found is None:
                    found = partition
                else:
                    following = rank
            ranks.append(heappop(self._heap))
        for rank in ranks:
            heappush(self._heap, rank)
        return None if found is None else (found, following)

    def _first_rank(self) -> int | None:
        while self._heap and self._heap[0] not in self._partitions:
            self._in_heap.discard(heappop(self._heap))
        return self._heap[0] if self._heap else None


def _from(turn: int, partitions: list[int]) -> list[int]:
    """The first two partitions from `turn` on, with the last one followed by the first."""
    at = bisect_left(partitions, turn)
    return [*partitions[at : at + 2], *partitions[: min(at, 2)]][:2]


class _Times:
    """Partitions by a time."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        """Times and partitions; has some that do not count any more."""

    @property
    def first(self) -> tuple[int, int] | None:
        """The earliest time, and whose it is."""
        heap = self._heap
        while heap and self._of.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None

    def set(self, partition: int, time_us: int | None) -> None:
        """This is the time of a partition from now on; None: it has none."""
        before = self._of.get(partition)
        if before == time_us:
            return
        if time_us is None:
            del self._of[partition]
            return
        self._of[partition] = time_us
        heappush(self._heap, (time_us, partition))
        if len(self._heap) > 2 * len(self._of) + _OUTDATED_MAX:
            self._heap = [(time, one) for one, time in self._of.items()]
            heapify(self._heap)

    def due(self, now_us: int, most: int) -> list[int]:
        """So many partitions at most whose time has come, the earliest first."""
        found: list[tuple[int, int]] = []
        while len(found) < most and (first := self.first) is not None and first[0] <= now_us:
            if first not in found:
                found.append(first)
            heappop(self._heap)
        for one in found:
            heappush(self._heap, one)
        return [partition for _, partition in found]
