"""How long to wait before something that failed is tried again, and how often that is logged."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.model.errors import HeadraceError

logger = logging.getLogger("headrace.cluster")

_PAUSE_S, _PAUSE_S_MAX = 0.5, 10.0
_TOLD_S = 60.0


class RetryPause:
    """The pauses of one loop: they double from 0.5 s to 10 s, and each cause is logged once, then every minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` measures durations in seconds."""
        self._clock = clock
        self._next_s = _PAUSE_S
        self._cause = ""
        self._told_s = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt has failed."""
        return self._next_s > _PAUSE_S

    def failed(self) -> float:
        """Count a failure; returns the seconds to wait before the next attempt."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, _PAUSE_S_MAX)
        return pause_s

    def is_news(self, cause: object) -> bool:
        """Whether the cause of a failure is to be logged: it is another one than before, or a minute has passed."""
        now_s = self._clock()
        if str(cause) == self._cause and now_s - self._told_s < _TOLD_S:
            return False
        self._cause, self._told_s = str(cause), now_s
        return True

    def reset(self) -> None:
        """Begin again with the shortest pause: what was tried has succeeded."""
        self._next_s, self._cause = _PAUSE_S, ""


@contextmanager
def log_failure(event: str) -> Iterator[None]:
    """Log that something failed which the node can go on without; `event` says what, and what follows."""
    try:
        yield
    except (HeadraceError, OSError) as error:
        logger.info("%s  reason=%s", event, error)
