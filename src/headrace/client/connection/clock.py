"""The broker's clock, as far as a client can know it."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from headrace.model.representation import described, state_of

logger = logging.getLogger("headrace.client")

SAMPLES_MAX = 8
"""How many of the last measurements count."""
DRIFT_PPM = 20
"""How much faster or slower the broker's clock may go than ours, in millionths."""
FAR_US = 1_000_000
"""A difference that somebody should look at."""
UNKNOWN_ERROR_US = 1_000_000
"""The bound of the error before anything was measured."""


def monotonic_us() -> int:
    """A clock that is never set, in microseconds."""
    return time.monotonic_ns() // 1000


def wall_us() -> int:
    """This machine's time, in microseconds since 1970."""
    return time.time_ns() // 1000


class _Sample(NamedTuple):
    """Between what the broker's clock was ahead of our monotonic one, and when that was measured."""

    low_us: int
    high_us: int
    at_us: int


class Clock:
    """Estimates the broker's time, and how wrong the estimate can be.

    Each answer of the broker contains its time. The broker read its clock after the client asked and before the client
    got the answer, so every answer bounds the difference of the two clocks; several answers together bound it more
    narrowly.

    Example:
        >>> info = bus.info()
        >>> bus.clock.now_us() > 0
        True
    """

    def __init__(
        self, monotonic: Callable[[], int] = monotonic_us, wall: Callable[[], int] = wall_us, in_use: bool = False
    ) -> None:
        self.in_use = in_use
        """Somebody goes by it: it should be measured often."""
        self.monotonic = monotonic
        self._wall = wall
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._ahead_us = wall() - monotonic()
        """By how much the broker's time is ahead of our monotonic clock."""
        self._error_us = UNKNOWN_ERROR_US
        self._measured_us = monotonic()
        self._far = False

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield f"offset_us={self.offset_us} error_us={self.error_us} age_s={self.age_s:.3g}"
        yield state_of(not_compared=not self._samples)

    @property
    def offset_us(self) -> int:
        """By how much the broker's clock is ahead of this machine's."""
        return self.now_us() - self._wall()

    @property
    def error_us(self) -> int:
        """What `now_us` and `offset_us` are wrong by at most. It grows until the clocks are compared again."""
        return self._error_us + (self.monotonic() - self._measured_us) * DRIFT_PPM // 1_000_000

    @property
    def age_s(self) -> float:
        """How many seconds ago the clocks were compared."""
        return (self.monotonic() - self._measured_us) / 1e6

    def now_us(self) -> int:
        """Estimate the broker's time.

        Returns:
            Microseconds since 1970.
        """
        return self.monotonic() + self._ahead_us

    def surely_us(self) -> int:
        """The time that the broker's clock has reached for sure."""
        now_us = self.monotonic()
        drift_us = (now_us - self._measured_us) * DRIFT_PPM // 1_000_000
        return now_us + self._ahead_us - self._error_us - drift_us

    def sample(self, asked_us: int, told_us: int, heard_us: int) -> None:
        """The broker told its time between these two readings of our monotonic clock."""
        newest = _Sample(told_us - heard_us, told_us - asked_us, heard_us)
        before_us, known = self._ahead_us, bool(self._samples)
        self._samples.append(newest)
        low_us, high_us = self._bounds(heard_us)
        if low_us > high_us:  # they contradict each other: one of the clocks was set
            self._samples.clear()
            self._samples.append(newest)
            low_us, high_us = newest.low_us, newest.high_us
        self._ahead_us = (low_us + high_us) // 2
        self._error_us = (high_us - low_us) // 2 + 1
        self._measured_us = heard_us
        if known and len(self._samples) == 1:
            logger.warning("the broker's clock has jumped by %.6f s", (self._ahead_us - before_us) / 1e6)
        self._report_distance()

    def _bounds(self, now_us: int) -> tuple[int, int]:
        """Between what all measurements together say the difference is."""
        low_us, high_us = self._samples[-1][:2]
        for sample in self._samples:
            drift_us = (now_us - sample.at_us) * DRIFT_PPM // 1_000_000
            low_us = max(low_us, sample.low_us - drift_us)
            high_us = min(high_us, sample.high_us + drift_us)
        return low_us, high_us

    def _report_distance(self) -> None:
        offset_us = self.offset_us
        far = abs(offset_us) > FAR_US + self._error_us
        if far and not self._far:
            logger.warning("the broker's clock and this machine's are %.3f s apart", offset_us / 1e6)
        self._far = far
