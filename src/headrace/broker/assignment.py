"""Which member of a group reads which partition: evenly, and with as few moves as that takes."""

import fnmatch
import heapq
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

Partition = tuple[str, int]
"""A topic's name and the partition's number in it."""


def wanted_topics(topics: Iterable[str], patterns: Iterable[str], available: Collection[str]) -> frozenset[str]:
    """Those of the available topics that are named or that match a pattern: `*` is any characters, `?` is one.

    A pattern without a tenant is about topics of the default tenant.

    >>> sorted(wanted_topics(["audit"], ["orders-?", "[*"], ["audit", "orders-1", "orders-10", "acme/orders-1"]))
    ['audit', 'orders-1']
    """
    found = {topic for topic in topics if topic in available}
    for pattern in patterns:
        # fnmatch makes an expression that takes no longer for hostile patterns; to it, brackets mean something.
        matches = re.compile(fnmatch.translate(pattern.replace("[", "[[]"))).match
        found.update(topic for topic in available if matches(topic) and ("/" in topic) == ("/" in pattern))
    return frozenset(found)


def divide(
    wishes: Mapping[str, frozenset[str]],
    counts: Mapping[str, int],
    placed: Mapping[Partition, str],
    kept: AbstractSet[Partition],
) -> dict[Partition, str]:
    """A member for each partition that somebody wants, such that no move to a member with less would even things out.

    A partition stays where it is `placed` unless that member does not want it or has too many. Those `kept` are being
    read: they move last. `wishes` are members to the topics they want; the order of members decides between equals.
    """
    division = _Division(wishes)
    for partition, member in placed.items():
        if partition[1] < counts.get(partition[0], 0) and partition[0] in wishes.get(member, ()):
            division.place(partition, member)
    division.fill(counts)
    division.even_out(leave=kept)
    division.even_out(leave=frozenset())
    return division.members


class _Division:
    """A division of partitions among members while it is worked out."""

    def __init__(self, wishes: Mapping[str, frozenset[str]]) -> None:
        self.members: dict[Partition, str] = {}
        self._wishes = wishes
        self._order = {member: index for index, member in enumerate(wishes)}
        self._loads = dict.fromkeys(wishes, 0)
        self._numbers: dict[str, dict[str, set[int]]] = {member: defaultdict(set) for member in wishes}
        self._disjoint: dict[tuple[frozenset[str], frozenset[str]], bool] = {}

    def place(self, partition: Partition, member: str) -> None:
        """Give it to this member, taking it from the one who has it."""
        topic, number = partition
        before = self.members.get(partition)
        if before is not None:
            self._loads[before] -= 1
            self._numbers[before][topic].remove(number)
        self.members[partition] = member
        self._loads[member] += 1
        self._numbers[member][topic].add(number)

    def fill(self, counts: Mapping[str, int]) -> None:
        """Place what has no member yet: each with who has least, then least of that topic."""
        missing: list[tuple[int, str, list[int], list[str]]] = []
        for topic, count in counts.items():
            numbers = [number for number in range(count) if (topic, number) not in self.members]
            if numbers:
                candidates = [member for member, topics in self._wishes.items() if topic in topics]
                missing.append((len(candidates), topic, numbers, candidates))
        # Topics that few want come first: the others can still make up for them.
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
        """Move partitions to members that have at least two less until there is none to move; never those to `leave`.

        It ends: each move makes the sum of the squares of loads smaller.
        """
        moved = bool(self._loads)
        while moved:
            moved = False
            for taker in sorted(self._loads, key=lambda member: (self._loads[member], self._order[member])):
                if max(self._loads.values()) - self._loads[taker] < 2:
                    break
                moved |= self._take(taker, leave)

    def _take(self, taker: str, leave: AbstractSet[Partition]) -> bool:
        """Take partitions for one member, each from who has most at that moment: so nobody gives more than needed."""
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
        wishes = (self._wishes[one], self._wishes[other])  # few different ones; some have thousands of topics
        if wishes not in self._disjoint:
            self._disjoint[wishes] = wishes[0].isdisjoint(wishes[1])
        return not self._disjoint[wishes]

    def _offers(self, giver: str, taker: str, leave: AbstractSet[Partition]) -> list[Partition]:
        """What one member could give another, best at the end: of those topics that it has most of, compared."""
        ranked = []
        for topic, numbers in self._numbers[giver].items():
            if numbers and topic in self._wishes[taker]:
                surplus = len(numbers) - len(self._numbers[taker].get(topic, ()))
                free = sorted((number for number in numbers if (topic, number) not in leave), reverse=True)
                # Each one that is given makes the surplus smaller by two.
                ranked += [(2 * index - surplus, topic, number) for index, number in enumerate(free)]
        ranked.sort(reverse=True)
        return [(topic, number) for _, topic, number in ranked]
