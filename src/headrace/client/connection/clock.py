"""An estimate of the broker's clock, from the times in its answers."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from headrace.model.representation import described, state_of

logger = logging.getLogger("headrace.client")

SAMPLES_MAX = 8
"""How many of the last measurements are used."""
DRIFT_PPM = 20
"""The assumed maximum drift between the broker's clock and ours, in parts per million."""
FAR_US = 1_000_000
"""The difference of the clocks from which a warning is logged."""
UNKNOWN_ERROR_US = 1_000_000
"""The error bound before the first measurement."""


def monotonic_us() -> int:
    """Return the monotonic time, in microseconds."""
    return time.monotonic_ns() // 1000


def wall_us() -> int:
    """Return this machine's time, in microseconds since 1970."""
    return time.time_ns() // 1000


class _Sample(NamedTuple):
    """Bounds of the broker's clock minus our monotonic clock, and the time of the measurement."""

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
        """Whether callers rely on the estimate, so that it should be measured often."""
        self.monotonic = monotonic
        self._wall = wall
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._ahead_us = wall() - monotonic()
        """The broker's time minus our monotonic time."""
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
        """The broker's time minus this machine's time, in microseconds."""
        return self.now_us() - self._wall()

    @property
    def error_us(self) -> int:
        """The maximum error of `now_us` and `offset_us`. It grows until the clocks are compared again."""
        return self._error_us + (self.monotonic() - self._measured_us) * DRIFT_PPM // 1_000_000

    @property
    def age_s(self) -> float:
        """Seconds since the clocks were last compared."""
        return (self.monotonic() - self._measured_us) / 1e6

    def now_us(self) -> int:
        """Estimate the broker's time.

        Returns:
            Microseconds since 1970.
        """
        return self.monotonic() + self._ahead_us

    def surely_us(self) -> int:
        """Return a lower bound of the broker's time."""
        now_us = self.monotonic()
        drift_us = (now_us - self._measured_us) * DRIFT_PPM // 1_000_000
        return now_us + self._ahead_us - self._error_us - drift_us

    def sample(self, asked_us: int, told_us: int, heard_us: int) -> None:
        """Add a measurement: the broker read its clock between these two readings of our monotonic clock."""
        newest = _Sample(told_us - heard_us, told_us - asked_us, heard_us)
        before_us, known = self._ahead_us, bool(self._samples)
        self._samples.append(newest)
        low_us, high_us = self._bounds(heard_us)
        if low_us > high_us:  # the bounds contradict each other: one of the clocks was set
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
        """Return the bounds of the difference that all measurements have in common."""
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
