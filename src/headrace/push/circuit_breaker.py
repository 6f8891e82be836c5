"""The circuit breaker of a webhook: stops sending to a receiver that fails again and again, and probes it."""

from enum import Enum

FAILURES_MAX = 5
"""Failures in a row after which the circuit opens."""
OPEN_US_MIN = 1_000_000
OPEN_US_MAX = 300_000_000
"""How long it is open: twice as long after each probe that fails."""


class Circuit(Enum):
    """Whether requests are sent."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Decides whether the next request may be sent. It does no I/O and reads no clock.

    >>> breaker = CircuitBreaker()
    >>> for _ in range(FAILURES_MAX):
    ...     opened = breaker.failed(0)
    >>> breaker.circuit, breaker.may_send(0, in_flight=0), breaker.may_send(OPEN_US_MIN, in_flight=0)
    (<Circuit.OPEN: 'open'>, False, True)
    """

    def __init__(self) -> None:
        self.circuit = Circuit.CLOSED
        self.failures = 0
        """In a row."""
        self.until_us = 0
        """Nothing is sent before."""
        self._open_us = 0

    def may_send(self, now_us: int, in_flight: int) -> bool:
        """Whether one more request may be sent while so many wait for their answers; may half-open the circuit."""
        if now_us < self.until_us:
            return False
        if self.circuit is Circuit.OPEN:
            self.circuit = Circuit.HALF_OPEN
        return self.circuit is Circuit.CLOSED or in_flight == 0

    def succeeded(self) -> bool:
        """Note a request that the receiver took; whether the circuit was closed by it."""
        was_closed = self.circuit is Circuit.CLOSED
        if self.circuit is Circuit.OPEN:
            return False  # a request that was sent before it opened: the probe decides
        self.circuit, self.failures, self._open_us = Circuit.CLOSED, 0, 0
        return not was_closed

    def failed(self, now_us: int) -> bool:
        """Note a request that failed; whether the circuit was opened by it."""
        self.failures += 1
        if self.circuit is Circuit.HALF_OPEN:
            self._open(now_us)
            return False  # it was open before
        if self.circuit is Circuit.CLOSED and self.failures >= FAILURES_MAX:
            self._open(now_us)
            return True
        return False

    def hold_until(self, time_us: int) -> None:
        """Send nothing before a time that the receiver asked for."""
        self.until_us = max(self.until_us, time_us)

    def _open(self, now_us: int) -> None:
        self._open_us = min(max(2 * self._open_us, OPEN_US_MIN), OPEN_US_MAX)
        self.circuit = Circuit.OPEN
        self.hold_until(now_us + self._open_us)
