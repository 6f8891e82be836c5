"""Logs work that fails and is retried once per failure, not at every attempt."""

import logging
from collections.abc import Hashable

from headrace.model.errors import DiskFull, Fenced, HeadraceError, NotServing

logger = logging.getLogger("headrace.broker")

_KNOWN_MAX = 10_000
"""Maximum failures tracked; beyond it, some are logged again."""


class FailureLog:
    """Tracks the work that currently fails. A full disk counts as one failure, whatever work it affects, and so
    does a lost shard.
    """

    def __init__(self) -> None:
        self._failing: set[Hashable] = set()
        self._full = False
        self._lost = False
        """Whether another node of the cluster has taken over, after which all work fails."""
        self._met_full = False
        """Whether any work met a full disk since the last check."""

    def note(self, work: Hashable, error: BaseException, message: str, *arguments: object) -> None:
        """Record that work failed and will be retried; logs it unless it was failing already."""
        if isinstance(error, DiskFull):
            self._met_full = True
            if not self._full:
                self._full = True
                logger.error("disk full; logged once until there is room: free some, or trim topics  reason=%s", error)
            return
        if isinstance(error, Fenced | NotServing):
            if not self._lost:
                self._lost = True
                logger.warning("broker has lost its shard; logged once until the node stops it  reason=%s", error)
            return
        if work in self._failing:
            return
        if len(self._failing) >= _KNOWN_MAX:
            self._failing.clear()
        self._failing.add(work)
        unexpected = not isinstance(error, HeadraceError | OSError)
        logger.warning(message + "  reason=%s", *arguments, error, exc_info=error if unexpected else None)

    def worked(self, work: Hashable) -> None:
        """Record that work succeeded."""
        self._failing.discard(work)

    def look_at_disk(self) -> None:
        """Log that the disk has room again, if no work has met a full disk since the last check."""
        if self._full and not self._met_full:
            self._full = False
            logger.warning("disk has room again")
        self._met_full = False
