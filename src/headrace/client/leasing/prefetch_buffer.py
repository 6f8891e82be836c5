"""Messages that were leased ahead and not handed over yet: some of them are not due."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable

from headrace.client.leasing.jobs import Job


class PrefetchBuffer:
    """Hands over what is due, in the order in which it came; keeps back what is not, and then goes by when it is."""

    def __init__(self) -> None:
        self._ready: deque[Job] = deque()
        self._kept_back: list[tuple[int, int, Job]] = []
        self._numbers = itertools.count()

    @property
    def ready(self) -> int:
        """How many can be handed over, as far as was looked."""
        return len(self._ready)

    @property
    def kept_back(self) -> int:
        """How many are not due yet."""
        return len(self._kept_back)

    def add(self, jobs: Iterable[Job], now_us: int) -> int:
        """Take these in, at this time; returns how many of them are kept back."""
        before = len(self._kept_back)
        for job in jobs:
            due = job.due
            if due is None or due <= now_us:
                self._ready.append(job)
            else:
                heapq.heappush(self._kept_back, (due, next(self._numbers), job))
        return len(self._kept_back) - before

    def next(self, now_us: int) -> Job | None:
        """The next one that can be handed over, at this time."""
        kept_back = self._kept_back
        while kept_back and kept_back[0][0] <= now_us:
            self._ready.append(heapq.heappop(kept_back)[2])
        return self._ready.popleft() if self._ready else None

    def wait_s(self, now_us: int) -> float | None:
        """How long until the next is due; None when there is none."""
        return max(self._kept_back[0][0] - now_us, 0) / 1e6 if self._kept_back else None

    def empty(self) -> list[Job]:
        """All there are, which are forgotten."""
        jobs = [*self._ready, *(job for _, _, job in sorted(self._kept_back, key=lambda kept: kept[:2]))]
        self._ready.clear()
        self._kept_back.clear()
        return jobs
