"""Assigns partitions to the members of a group: evenly, and with as few moves as possible."""

import fnmatch
import heapq
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

Partition = tuple[str, int]
"""A topic's name and the partition's number in it."""


def wanted_topics(topics: Iterable[str], patterns: Iterable[str], available: Collection[str]) -> frozenset[str]:
    """The available topics that are named or match a pattern: `*` stands for any characters, `?` for one.

    A pattern without a tenant matches topics of the default tenant.

    >>> sorted(wanted_topics(["audit"], ["orders-?", "[*"], ["audit", "orders-1", "orders-10", "acme/orders-1"]))
    ['audit', 'orders-1']
    """
    found = {topic for topic in topics if topic in available}
    for pattern in patterns:
        # fnmatch builds expressions that resist hostile patterns; brackets, which it interprets, are escaped.
        matches = re.compile(fnmatch.translate(pattern.replace("[", "[[]"))).match
        found.update(topic for topic in available if matches(topic) and ("/" in topic) == ("/" in pattern))
    return frozenset(found)


def divide(
    wanted: Mapping[str, frozenset[str]],
    counts: Mapping[str, int],
    placed: Mapping[Partition, str],
    kept: AbstractSet[Partition],
) -> dict[Partition, str]:
    """Choose a member for each wanted partition, so that no further move would balance the members better.

    A partition stays where it is `placed` unless that member does not want it or has too many. Partitions in `kept` are
    being read, and move last. `wanted` maps members to their topics; the order of members breaks ties.
    """
    division = _Division(wanted)
    for partition, member in placed.items():
        if partition[1] < counts.get(partition[0], 0) and partition[0] in wanted.get(member, ()):
            division.place(partition, member)
    division.fill(counts)
    division.even_out(leave=kept)
    division.even_out(leave=frozenset())
    return division.members


class _Division:
    """A division of partitions among members, in progress."""

    def __init__(self, wanted: Mapping[str, frozenset[str]]) -> None:
        self.members: dict[Partition, str] = {}
        self._wanted = wanted
        self._order = {member: index for index, member in enumerate(wanted)}
        self._loads = dict.fromkeys(wanted, 0)
        self._numbers: dict[str, dict[str, set[int]]] = {member: defaultdict(set) for member in wanted}
        self._disjoint: dict[tuple[frozenset[str], frozenset[str]], bool] = {}

    def place(self, partition: Partition, member: str) -> None:
        """Give a partition to a member, and take it from its previous one."""
        topic, number = partition
        before = self.members.get(partition)
        if before is not None:
            self._loads[before] -= 1
            self._numbers[before][topic].remove(number)
        self.members[partition] = member
        self._loads[member] += 1
        self._numbers[member][topic].add(number)

    def fill(self, counts: Mapping[str, int]) -> None:
        """Give each partition without a member to the one with the fewest partitions, then the fewest of its topic."""
        missing: list[tuple[int, str, list[int], list[str]]] = []
        for topic, count in counts.items():
            numbers = [number for number in range(count) if (topic, number) not in self.members]
            if numbers:
                candidates = [member for member, topics in self._wanted.items() if topic in topics]
                missing.append((len(candidates), topic, numbers, candidates))
        # Topics with few candidates come first: the other topics can balance them.
        for _, topic, numbers, candidates in sorted(missing):
            if candidates:
                self._fill_topic(topic, numbers, candidates)

    def _fill_topic(self, topic: str, numbers: Iterable[int], candidates: Iterable[str]) -> None:
        heap = [(self._loads[one], len(self._numbers[one][topic]), self._order[one], one) for one in candidates]
        heapq.heapify(heap)
        for number in numbers:
            load, of_topic, order, member = heap[0]
            self.place((topic, number), member)
            heapq.heapreplace(heap, (load + 1, of_topic + 1, order, member))

    def even_out(self, leave: AbstractSet[Partition]) -> None:
        """Move partitions, except those to `leave`, to members with at least two fewer until no such move is left.

        It terminates, because each move reduces the sum of the squared loads.
        """
        moved = bool(self._loads)
        while moved:
            moved = False
            for taker in sorted(self._loads, key=lambda member: (self._loads[member], self._order[member])):
                if max(self._loads.values()) - self._loads[taker] < 2:
                    break
                moved |= self._take(taker, leave)

    def _take(self, taker: str, leave: AbstractSet[Partition]) -> bool:
        """Move partitions to one member, each from the member with the most, so that none gives more than needed."""
        givers = [
            (-load, self._order[member], member)
            for member, load in self._loads.items()
            if load - self._loads[taker] >= 2 and self._share_topics(member, taker)
        ]
        heapq.heapify(givers)
        offers: dict[str, list[Partition]] = {}
        moved = False
        while givers and -givers[0][0] - self._loads[taker] >= 2:
            load, order, giver = givers[0]
            if giver not in offers:
                offers[giver] = self._offers(giver, taker, leave)
            if offers[giver]:
                self.place(offers[giver].pop(), taker)
                heapq.heapreplace(givers, (load + 1, order, giver))
                moved = True
            else:
                heapq.heappop(givers)
        return moved

    def _share_topics(self, one: str, other: str) -> bool:
        wanted = (self._wanted[one], self._wanted[other])  # cached: few combinations, some with thousands of topics
        if wanted not in self._disjoint:
            self._disjoint[wanted] = wanted[0].isdisjoint(wanted[1])
        return not self._disjoint[wanted]

    def _offers(self, giver: str, taker: str, leave: AbstractSet[Partition]) -> list[Partition]:
        """The partitions that one member can give another, best last: those of topics with the largest surplus."""
        ranked = []
        for topic, numbers in self._numbers[giver].items():
            if numbers and topic in self._wanted[taker]:
                surplus = len(numbers) - len(self._numbers[taker].get(topic, ()))
                free = sorted((number for number in numbers if (topic, number) not in leave), reverse=True)
                # Each move reduces the surplus by two.
                ranked += [(2 * index - surplus, topic, number) for index, number in enumerate(free)]
        ranked.sort(reverse=True)
        return [(topic, number) for _, topic, number in ranked]
