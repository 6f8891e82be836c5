"""How long to wait before trying again."""

import random

FIRST_S = 0.05
LAST_S = 5.0


class Backoff:
    """Waits that grow from try to try, each shortened by chance so that clients do not come back all at once."""

    def __init__(self, first_s: float = FIRST_S, last_s: float = LAST_S) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._next_s = first_s

    def next_s(self) -> float:
        """How many seconds to wait now: between half of what it may be and all of it."""
        wait_s = self._next_s
        self._next_s = min(max(2 * wait_s, FIRST_S), self._last_s)
        return wait_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the shortest wait again, after a success."""
        self._next_s = self._first_s
