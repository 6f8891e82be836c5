"""How many messages to lease ahead."""

from headrace.model.limits import LEASE_MESSAGES_MAX

_QUICK_S = 0.25
_SLOW_S = 1.0


class PrefetchWindow:
    """Grows while messages are processed quickly, and shrinks when they are not, for others may have time for them."""

    def __init__(self, least: int, most: int | None = None) -> None:
        self._least = min(least, LEASE_MESSAGES_MAX)
        self._most = min(max(most or least, least), LEASE_MESSAGES_MAX)
        self.size = self._least
        """How many messages there should be in stock."""
        self._served_s: float | None = None
        self._full = False

    @property
    def can_grow(self) -> bool:
        """Whether it has not always the same size."""
        return self._most > self._least

    @property
    def is_grown(self) -> bool:
        """Whether it is larger than it was in the beginning."""
        return self.size > self._least

    def served(self, full: bool, now_s: float) -> None:
        """Messages came; as many as were asked for?"""
        self._full = full
        self._served_s = now_s

    def missing(self, ready: int, now_s: float) -> int:
        """How many to ask for when so many are there: 0, which is nothing to ask for, while there are enough."""
        if ready > self.size // 2:
            return 0
        # The window may just have shrunk to what is there.
        return max(self._adapted(now_s) - ready, 0)

    def _adapted(self, now_s: float) -> int:
        """How many there should be, now that most of them are used up."""
        if self._served_s is not None:
            took_s = now_s - self._served_s
            if self._full and took_s < _QUICK_S:
                self.size = min(2 * self.size, self._most)
            elif took_s > _SLOW_S:
                self.size = max(self.size // 2, self._least)
        return self.size
