"""How long the disk takes for little: where that is less than another thread would cost, it is waited for at once."""

import threading
from collections.abc import Callable

_QUICK_S = 0.001
_SHARE = 0.1
"""How much one sync counts towards what is usual."""


class InlineSyncPolicy:
    """What is usual for a sync of little, and whose thread may wait so long."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = lambda: 0.0
        """A clock, of seconds."""
        self._thread: int | None = None
        self._usual_s = 0.0
        self._not_before = 0.0

    def wait_here(self, clock: Callable[[], float]) -> None:
        """This thread may wait: those it would serve meanwhile come together, and are served together."""
        self.now = clock
        self._thread = threading.get_ident()

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that may wait, has not just done so, and the disk is quick enough for that."""
        if threading.get_ident() != self._thread or self._usual_s >= _QUICK_S:
            return False
        return self.now() >= self._not_before

    def waited(self, seconds: float) -> None:
        """Note how long the thread has waited just now: for half as long it does not wait again."""
        self._not_before = self.now() + seconds / 2

    def took(self, seconds: float) -> None:
        """Note how long a sync of little took, on whichever thread."""
        self._usual_s += (seconds - self._usual_s) * _SHARE
