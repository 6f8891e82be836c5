"""Plans a read: divides offsets into ranges and assigns these to tasks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil
from typing import NamedTuple

TASK_OFFSETS = 2_000_000
TASK_BYTES = 256 << 20
"""Maximum size of a range; larger ones are split, so that several cores read one partition."""


SMALL_OFFSETS = 100_000
SMALL_BYTES = 8 << 20
"""Maximum size of a small range, which takes less time than the start of a task, and may share one."""
SMALL_TASKS = 16
"""Number of tasks that small ranges share when there are more of them than this."""
_RANGE_OFFSETS = 1000
"""Cost of requesting a range, as a number of messages read."""


class OffsetSpan(NamedTuple):
    """The available offsets of a partition."""

    first: int
    end: int
    bytes: int = 0


@dataclass(frozen=True)
class TopicState:
    """The state of a topic when a read is planned."""

    name: str
    id: int
    """A topic that is deleted and created again gets another id."""
    spans: Mapping[int, OffsetSpan]


class Range(NamedTuple):
    """Offsets of one partition that one task reads."""

    topic: str
    partition: int
    start: int
    end: int
    """Exclusive."""

    @property
    def size(self) -> int:
        """The number of offsets."""
        return max(self.end - self.start, 0)


@dataclass
class Window:
    """The bounds of a read from pushed-down filters; each filter narrows it."""

    partitions: frozenset[int] | None = None
    offset_min: int = 0
    offset_max: int | None = None
    """Inclusive."""
    time_min_us: int | None = None
    time_max_us: int | None = None
    """Inclusive."""

    def only_partitions(self, numbers: Iterable[int]) -> None:
        """Read only these partitions."""
        wanted = frozenset(numbers)
        self.partitions = wanted if self.partitions is None else self.partitions & wanted

    def from_offset(self, offset: int) -> None:
        """Read from this offset on."""
        self.offset_min = max(self.offset_min, offset)

    def to_offset(self, offset: int) -> None:
        """Read up to and including this offset."""
        self.offset_max = offset if self.offset_max is None else min(self.offset_max, offset)

    def from_time(self, time_us: int) -> None:
        """Read messages from this time on."""
        self.time_min_us = time_us if self.time_min_us is None else max(self.time_min_us, time_us)

    def to_time(self, time_us: int) -> None:
        """Read messages up to and including this time."""
        self.time_max_us = time_us if self.time_max_us is None else min(self.time_max_us, time_us)

    def narrowed(self, one: Range) -> Range:
        """Return the part of a range within the bounds, which may be empty."""
        if self.partitions is not None and one.partition not in self.partitions:
            return one._replace(end=one.start)
        start = max(one.start, self.offset_min)
        end = one.end if self.offset_max is None else min(one.end, self.offset_max + 1)
        return one._replace(start=start, end=max(start, end))


def split_ranges(
    ranges: Sequence[Range], spans: Mapping[tuple[str, int], OffsetSpan], at_least: int | None
) -> list[Range]:
    """Split large ranges, and all of them into `at_least` parts if there are enough messages."""
    ranges = [one for one in ranges if one.size]
    total = sum(one.size for one in ranges)
    divisions = []
    for one in ranges:
        parts = max(ceil(one.size / TASK_OFFSETS), ceil(_bytes(one, spans) / TASK_BYTES))
        if at_least is not None and len(ranges) < at_least:
            parts = max(parts, ceil(one.size / total * at_least))
        divisions += _cut(one, min(parts, one.size))
    return divisions


def assign_to_tasks(
    ranges: Sequence[Range], spans: Mapping[tuple[str, int], OffsetSpan], at_least: int | None
) -> list[tuple[Range, ...]]:
    """Return the ranges of each task; many small ranges share tasks."""
    small = [one for one in ranges if one.size <= SMALL_OFFSETS and _bytes(one, spans) <= SMALL_BYTES]
    few = set(small)
    large = [(one,) for one in ranges if one not in few]
    tasks = max(SMALL_TASKS, (at_least or 0) - len(large))
    if len(small) <= tasks:
        return [(one,) for one in ranges]
    loads: list[tuple[int, int, list[Range]]] = [(0, number, []) for number in range(tasks)]
    for one in sorted(small, key=lambda each: -each.size):
        load, number, share = heappop(loads)
        share.append(one)
        heappush(loads, (load + one.size + _RANGE_OFFSETS, number, share))
    return [*large, *(tuple(share) for _, _, share in loads)]


def _bytes(one: Range, spans: Mapping[tuple[str, int], OffsetSpan]) -> float:
    """Return the estimated size of a range."""
    span = spans.get((one.topic, one.partition), OffsetSpan(0, 0))
    return one.size / max(span.end - span.first, one.size, 1) * span.bytes


def _cut(one: Range, parts: int) -> list[Range]:
    edges = [one.start + one.size * at // parts for at in range(parts + 1)]
    return [one._replace(start=edges[at], end=edges[at + 1]) for at in range(parts)]


def limit_rows(ranges: Sequence[Range], rows_max: int) -> dict[tuple[str, int], int]:
    """Return the end offsets of a trigger with a row limit, which partitions share by their sizes."""
    total = sum(one.size for one in ranges)
    ends = {}
    left = rows_max
    for one in sorted(ranges, key=lambda each: each.size):
        share = one.size if total <= left else min(max(left * one.size // max(total, 1), min(one.size, left, 1)), left)
        ends[one.topic, one.partition] = one.start + share
        total -= one.size
        left -= share
    return ends
