"""What can be told about a subscription's messages without touching them."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import groupby, islice, pairwise
from typing import NamedTuple

from headrace.engines.leased.pending import PendingMessages
from headrace.engines.leased.statuses import BLOCKED, LEASED, LEAVING, READY, RESTING, WAITING

_EVER_US = 1 << 62
_COUNTED_TOGETHER = 1000
_WORDS = {
    WAITING: "waiting",
    RESTING: "waiting",
    READY: "ready",
    BLOCKED: "ready",
    LEASED: "leased",
    LEAVING: "leased",
}


class MessageCounts(NamedTuple):
    """How many messages there are of which kind."""

    waiting: int
    ready: int
    leased: int
    ready_since_us: int
    """When the oldest of those that are ready was published; 0 if there is none."""
    next_ready_us: int
    """When the first of those that wait will be ready; 0 if there is none."""


def summary(pending: PendingMessages) -> MessageCounts:
    """How many there are, after `advance`."""
    counts = pending.statuses.counts
    since = 0
    codes = [code for code in (READY, BLOCKED) if counts[code]]
    oldest = min((next(pending.statuses.with_status(code), _EVER_US) for code in codes), default=_EVER_US)
    if oldest != _EVER_US and pending.contents is not None:
        columns, _, _ = pending.contents.read([oldest])
        since = columns.timestamps[0] if columns.timestamps else 0
    following = next(later(pending, 0, None), None)
    return MessageCounts(
        counts[WAITING] + counts[RESTING],
        counts[READY] + counts[BLOCKED],
        counts[LEASED] + counts[LEAVING],
        since,
        following[0] if following is not None else 0,
    )


def status(pending: PendingMessages, offset: int) -> str:
    """What is said of a message; nothing of one that is settled."""
    return _WORDS.get(pending.statuses[offset], "")


def offsets(pending: PendingMessages, wanted: str, start: int) -> Iterator[int]:
    """The messages with a status, or all of them, from an offset on, in order; nothing may be changed meanwhile."""
    codes = [code for code, word in _WORDS.items() if wanted in ("", word)]
    return merge(*(pending.statuses.with_status(code, start) for code in codes))


def entries_between(pending: PendingMessages, least_us: int, beyond_us: int | None) -> int:
    """How many messages wait for a time between bounds, or more: entries that do not count are among them."""
    beyond_us = _EVER_US if beyond_us is None else beyond_us
    parts = (*pending.waiting.keys(), *pending.resting.keys())
    return sum(bisect_left(keys, beyond_us) - bisect_left(keys, least_us) for keys in parts)


def later(pending: PendingMessages, least_us: int, beyond_us: int | None, after: int = -1) -> Iterator[tuple[int, int]]:
    """When messages will be ready, and which, in order; no status may be changed meanwhile.

    Of those with the least time only the ones after an offset.
    """
    beyond_us = _EVER_US if beyond_us is None else beyond_us
    waiting = (one for one in pending.waiting.between(least_us, beyond_us, after) if _waits(pending, one))
    resting = (one for one in pending.resting.between(least_us, beyond_us, after) if _rests(pending, one))
    # One that was moved away and back has two entries.
    return (entry for entry, _ in groupby(merge(waiting, resting)))


def _waits(pending: PendingMessages, entry: tuple[int, int]) -> bool:
    """Whether an entry among the waiting ones counts."""
    time_us, offset = entry
    return pending.statuses[offset] == WAITING and pending.due(offset, time_us) == time_us


def _rests(pending: PendingMessages, entry: tuple[int, int]) -> bool:
    """Whether an entry among the resting ones counts."""
    return pending.rests_until(entry[1], entry[0])


class ForecastCounter:
    """Counts how many messages will be ready before the first bound, from each to the next, and from the last one on.

    It counts what there was when it was made, after `advance`; `count_some` takes about a millisecond.
    """

    def __init__(self, pending: PendingMessages, bounds: Sequence[int]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.ready = pending.statuses.counts[READY] + pending.statuses.counts[BLOCKED]
        self._bounds = bounds
        self._parts: list[Sequence[int]] = []
        self._entries: list[tuple[Iterator[tuple[int, int]], Callable[[PendingMessages, tuple[int, int]], bool]]] = []
        self._last: tuple[int, int] | None = None
        waiting = pending.statuses.counts[WAITING] + pending.statuses.counts[RESTING]
        if waiting == len(pending.waiting) + len(pending.resting):  # all entries count
            self._parts = [part for part in (*pending.waiting.keys(), *pending.resting.keys()) if part]
        else:
            self._pending = pending.copied()
            self._entries = [
                (pending.waiting.between(0, _EVER_US), _waits),
                (pending.resting.between(0, _EVER_US), _rests),
            ]

    def count_some(self) -> bool:
        """Count some more; whether there are any left."""
        if self._parts:
            keys = self._parts.pop()
            ends = [0, *(bisect_left(keys, bound) for bound in self._bounds), len(keys)]
            self.counts = [count + end - begin for count, (begin, end) in zip(self.counts, pairwise(ends), strict=True)]
            return bool(self._parts)
        if self._entries:
            entries, counts = self._entries[-1]
            some = list(islice(entries, _COUNTED_TOGETHER))
            for entry in some:
                if entry != self._last and counts(self._pending, entry):
                    self.counts[bisect_right(self._bounds, entry[0])] += 1
                self._last = entry
            if len(some) < _COUNTED_TOGETHER:
                self._entries.pop()
        return bool(self._entries)
