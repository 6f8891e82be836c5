"""The broker's clock: the system's time, except that it never runs backwards."""

import time
from collections.abc import Callable

_DAY_US = 86_400_000_000


class BrokerClock:
    """Tells the time in microseconds since 1970.

    When the system's clock is put ahead, this one follows at once. When that is put back, this one goes on at half
    speed until the other has caught up: leases, waits and retries last at most twice as long as they should, and none
    ends early.
    """

    def __init__(
        self, wall_ns: Callable[[], int] = time.time_ns, steady_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._wall_ns = wall_ns
        self._steady_ns = steady_ns
        self._last_us = 0
        self._slowed: tuple[int, int] | None = None
        """When it began to run at half speed: by the steady clock, and by its own."""

    def go_on_from(self, time_us: int) -> None:
        """Go on from a time that the broker has had, at half speed if that is to come: the clock was put back since.

        A time that is more than a day away was told by a clock that was quite wrong, and does not count.
        """
        if time_us - self._wall_ns() // 1000 <= _DAY_US:
            self._last_us = max(self._last_us, time_us)

    def now_us(self) -> int:
        """The broker's time."""
        now_us = self._wall_ns() // 1000
        if now_us < self._last_us or self._slowed is not None:
            now_us = self._slow_us(now_us)
        self._last_us = now_us
        return now_us

    def _slow_us(self, wall_us: int) -> int:
        """The time at half speed, or the system's if that has caught up."""
        steady_us = self._steady_ns() // 1000
        if self._slowed is None:
            self._slowed = steady_us, self._last_us
        since_us, begin_us = self._slowed
        slow_us = max(begin_us + (steady_us - since_us) // 2, self._last_us)
        if wall_us < slow_us:
            return slow_us
        self._slowed = None
        return wall_us

    def wall_offset_us(self) -> int:
        """How far the system's clock is ahead of this one: 0, or less while it is waited for."""
        return min(self._wall_ns() // 1000 - self._last_us, 0) if self._slowed is not None else 0
