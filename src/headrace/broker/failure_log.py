"""What the log says of work that fails and is tried again: that it fails, once, and not at every try."""

import logging
from collections.abc import Hashable

from headrace.model.errors import DiskFull, HeadraceError

logger = logging.getLogger("headrace.broker")

_KNOWN_MAX = 10_000
"""Of more failures than this at the same time some are logged again."""


class FailureLog:
    """The work that fails at present. A full disk is one failure, whatever work meets it."""

    def __init__(self) -> None:
        self._failing: set[Hashable] = set()
        self._full = False
        self._met_full = False
        """Whether the disk was full for somebody since the last look."""

    def note(self, work: Hashable, error: BaseException, message: str, *arguments: object) -> None:
        """Some work failed and will be tried again: log it unless that was done, and it has not worked since."""
        if isinstance(error, DiskFull):
            self._met_full = True
            if not self._full:
                self._full = True
                logger.error("disk full; logged once until there is room: free some, or trim topics  reason=%s", error)
            return
        if work in self._failing:
            return
        if len(self._failing) >= _KNOWN_MAX:
            self._failing.clear()
        self._failing.add(work)
        unexpected = not isinstance(error, HeadraceError | OSError)
        logger.warning(message + "  reason=%s", *arguments, error, exc_info=error if unexpected else None)

    def worked(self, work: Hashable) -> None:
        """It does not fail any more."""
        self._failing.discard(work)

    def look_at_disk(self) -> None:
        """Called from time to time, after all work was tried: if none of it met a full disk, there is room."""
        if self._full and not self._met_full:
            self._full = False
            logger.warning("disk has room again")
        self._met_full = False
