"""How many messages of which kind a leased subscription has, over all its partitions."""

from collections.abc import Generator

from headrace.engines.api import LeasedPartition, MessageCounts

_COUNTED_TOGETHER = 128
"""Partitions that are counted in one slice."""


def counted(indexes: list[LeasedPartition], now_us: int) -> Generator[None, None, MessageCounts]:
    """The counts of all these partitions together; in slices."""
    waiting = ready = leased = 0
    since: list[int] = []
    following: list[int] = []
    for place, index in enumerate(indexes):
        if place % _COUNTED_TOGETHER == _COUNTED_TOGETHER - 1:
            yield
        while index.is_behind(now_us):
            index.make_due_ready(now_us)
            if index.is_behind(now_us):
                yield
        counts = index.counts()
        waiting, ready, leased = waiting + counts.waiting, ready + counts.ready, leased + counts.leased
        since += [counts.ready_since_us] if counts.ready_since_us else []
        following += [counts.next_ready_us] if counts.next_ready_us else []
    return MessageCounts(waiting, ready, leased, min(since, default=0), min(following, default=0))
