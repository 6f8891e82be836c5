"""Bounds on what others can make the broker record: refused attempts and logins. Time is an argument."""

from typing import Any

_WINDOW_US = 60_000_000
_SAMPLES_MAX = 10
_CODES_MAX = 50
_SEEN_MAX = 10_000


class RecordLimit:
    """So many records a minute one by one; the others are counted, and told of together when the minute is over.

    >>> limit = RecordLimit(1)
    >>> [limit.admit("forbidden", who, 0) for who in ("ada", "bob", "eve")]
    [True, False, False]
    >>> limit.summary(60_000_000)
    {'count': 2, 'outcomes': {'forbidden': 2}, 'who': ['bob', 'eve'], 'first_us': 0, 'last_us': 0}
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._begin_us: int | None = None
        self._admitted = 0
        self._count = 0
        self._first_us = self._last_us = 0
        self._outcomes: dict[str, int] = {}
        self._who: list[str] = []

    def admit(self, outcome: str, who: str, now_us: int) -> bool:
        """Whether to record this one by itself; else it is counted."""
        if self._begin_us is None or (now_us >= self._begin_us + _WINDOW_US and not self._count):
            self._begin_us, self._admitted = now_us, 0
        if self._admitted < self._per_minute and now_us < self._begin_us + _WINDOW_US:
            self._admitted += 1
            return True
        self.count(outcome, who, now_us)
        return False

    def count(self, outcome: str, who: str, now_us: int) -> None:
        """Count one that is not recorded by itself."""
        if self._begin_us is None:
            self._begin_us = now_us
        self._first_us = self._first_us if self._count else now_us
        self._last_us = now_us
        self._count += 1
        if outcome in self._outcomes or len(self._outcomes) < _CODES_MAX:
            self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        if len(self._who) < _SAMPLES_MAX and who not in self._who:
            self._who.append(who)

    def summary(self, now_us: int) -> dict[str, Any] | None:
        """What was counted since the last summary, once the minute is over; None if there is nothing to tell."""
        if self._begin_us is None or now_us < self._begin_us + _WINDOW_US:
            return None
        return self.take()

    def take(self) -> dict[str, Any] | None:
        """What was counted since the last summary, at once."""
        told = None
        if self._count:
            told = {
                "count": self._count,
                "outcomes": self._outcomes,
                "who": self._who,
                "first_us": self._first_us,
                "last_us": self._last_us,
            }
        self._begin_us, self._admitted, self._count, self._outcomes, self._who = None, 0, 0, {}, []
        return told


class RecentLogins:
    """Remembers who has logged in lately: the same client again and again is recorded once in a while.

    >>> recent = RecentLogins(300_000_000)
    >>> [recent.is_new("ada", now_us) for now_us in (0, 1_000_000, 300_000_000)]
    [True, False, True]
    """

    def __init__(self, period_us: int) -> None:
        self._period_us = period_us
        self._since_us: dict[object, int] = {}

    def is_new(self, who: object, now_us: int) -> bool:
        """Whether this one was not recorded within the period."""
        since_us = self._since_us.get(who)
        if since_us is not None and now_us < since_us + self._period_us:
            return False
        self._since_us.pop(who, None)  # so that the oldest comes first
        if len(self._since_us) >= _SEEN_MAX:
            del self._since_us[next(iter(self._since_us))]
        self._since_us[who] = now_us
        return True
