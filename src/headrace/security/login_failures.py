"""Failed logins, counted by host: the more there are, the longer the next refusal is held back. Time is an argument."""

_FREE = 3
"""Failures of a host that are answered at once: a wrong token in a script, not an attack."""
_FIRST_S = 0.1
_HALF_LIFE_US = 30_000_000
"""Half of a host's failures are forgotten after so long."""
_HOSTS_MAX = 10_000
_ALL_FREE = 1000
"""Failures of all hosts, after which hosts that have not failed before wait, too."""


class _Failures:
    """A count that fades."""

    __slots__ = ("_count", "_since_us")

    def __init__(self, now_us: int) -> None:
        self._count = 0.0
        self._since_us = now_us

    def count(self, now_us: int) -> float:
        """How many there were, of which those long ago count for less."""
        passed_us = max(now_us - self._since_us, 0)
        return float(self._count * 0.5 ** (passed_us / _HALF_LIFE_US))

    def add(self, now_us: int) -> float:
        """Count one more."""
        self._count = self.count(now_us) + 1
        self._since_us = now_us
        return self._count


class LoginFailures:
    """How long to hold back the refusal of a login.

    >>> failures = LoginFailures(delay_s_max=1.0)
    >>> [failures.failed("192.0.2.1", 0) for _ in range(9)]
    [0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    >>> failures.failed("192.0.2.2", 0)
    0.0
    """

    def __init__(self, delay_s_max: float) -> None:
        self._delay_s_max = delay_s_max
        self._by_host: dict[str, _Failures] = {}
        self._all = _Failures(0)
        self.total = 0

    def failed(self, host: str, now_us: int) -> float:
        """Count a failed login, and return for how many seconds to hold back the refusal."""
        self.total += 1
        failures = self._by_host.pop(host, None)
        if failures is None:
            failures = _Failures(now_us)
            if len(self._by_host) >= _HOSTS_MAX:
                del self._by_host[next(iter(self._by_host))]  # the one that has not failed for the longest time
        self._by_host[host] = failures
        excess = failures.add(now_us) - _FREE
        if self._all.add(now_us) > _ALL_FREE:
            excess = max(excess, 1.0)
        if excess < 1:
            return 0.0
        return min(_FIRST_S * 2.0 ** min(round(excess) - 1, 30), self._delay_s_max)
