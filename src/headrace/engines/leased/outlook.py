"""What can be told about a subscription's messages without touching them."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import NamedTuple

from headrace.engines.leased.pending import Pending
from headrace.engines.leased.statuses import BLOCKED, LEASED, LEAVING, READY, RESTING, WAITING

_EVER_US = 1 << 62
_WORDS = {
    WAITING: "waiting",
    RESTING: "waiting",
    READY: "ready",
    BLOCKED: "ready",
    LEASED: "leased",
    LEAVING: "leased",
}


class Summary(NamedTuple):
    """How many messages there are of which kind."""

    waiting: int
    ready: int
    leased: int
    ready_since_us: int
    """When the oldest of those that are ready was published; 0 if there is none."""
    next_ready_us: int
    """When the first of those that wait will be ready; 0 if there is none."""


def summary(pending: Pending) -> Summary:
    """How many there are, after `advance`."""
    counts = pending.statuses.counts
    since = 0
    oldest = min(next(pending.statuses.with_status(code), _EVER_US) for code in (READY, BLOCKED))
    if oldest != _EVER_US and pending.contents is not None:
        columns, _, _ = pending.contents.read([oldest])
        since = columns.timestamps[0] if columns.timestamps else 0
    following = next(later(pending, 0, None), None)
    return Summary(
        counts[WAITING] + counts[RESTING],
        counts[READY] + counts[BLOCKED],
        counts[LEASED] + counts[LEAVING],
        since,
        following[0] if following is not None else 0,
    )


def status(pending: Pending, offset: int) -> str:
    """What is said of a message; nothing of one that is settled."""
    return _WORDS.get(pending.statuses[offset], "")


def offsets(pending: Pending, wanted: str, start: int) -> Iterator[int]:
    """The messages with a status, or all of them, from an offset on, in order; nothing may be changed meanwhile."""
    codes = [code for code, word in _WORDS.items() if wanted in ("", word)]
    return merge(*(pending.statuses.with_status(code, start) for code in codes))


def later(pending: Pending, least_us: int, beyond_us: int | None) -> Iterator[tuple[int, int]]:
    """When messages will be ready, and which, in order; nothing may be changed meanwhile."""
    beyond_us = _EVER_US if beyond_us is None else beyond_us
    waiting = (
        (time_us, offset)
        for time_us, offset in pending.waiting.between(least_us, beyond_us)
        if pending.statuses[offset] == WAITING and pending.due(offset, time_us) == time_us
    )
    resting = (
        (time_us, offset)
        for time_us, offset in pending.resting.between(least_us, beyond_us)
        if pending.rests_until(offset, time_us)
    )
    last = None
    for entry in merge(waiting, resting):
        if entry != last:  # one that was moved away and back has two entries
            yield entry
        last = entry


def forecast(pending: Pending, bounds: Sequence[int]) -> list[int]:
    """How many will be ready before the first bound, from each to the next, and from the last one on."""
    waiting = pending.statuses.counts[WAITING] + pending.statuses.counts[RESTING]
    if waiting == len(pending.waiting) + len(pending.resting):  # all entries count
        both = zip(pending.waiting.counts(bounds), pending.resting.counts(bounds), strict=True)
        return [each + other for each, other in both]
    found = [0] * (len(bounds) + 1)
    for time_us, _ in later(pending, 0, None):
        found[bisect_right(bounds, time_us)] += 1
    return found
