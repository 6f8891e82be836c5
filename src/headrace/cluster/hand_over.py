"""The hand-over that was asked of an owner: to whom, and when it begins."""

import logging

from headrace.cluster.claims import CATCH_UP_US, CAUGHT_UP_US, FollowerReport, may_release
from headrace.cluster.peers import FollowerReports
from headrace.storage.replicated.keys import Position

logger = logging.getLogger("headrace.cluster")

CATCHING_UP_S = 0.1
"""How often an owner looks whether its successor has caught up."""


class HandOver:
    """Whether the shard is to be handed over, and whether the successor is ready. Used on the node's event loop."""

    def __init__(self) -> None:
        self.successor: str | None = None
        """To whom; empty: to anybody; None: nobody has asked."""
        self.is_disk_full = False
        """Whether that is why: requests would only meet the full disk."""
        self._asked = Position(0, 0)
        self._asked_us = 0

    @property
    def is_asked(self) -> bool:
        """Whether the shard is to be handed over."""
        return self.successor is not None

    def ask(self, successor: str, committed: Position, now_us: int) -> None:
        """Hand over to a node, or to anybody, as soon as it has what is committed now; the last who asks decides."""
        if self.successor and self.successor != successor:
            logger.info("hand-over to another node asked for  node=%s instead_of=%s", successor, self.successor)
        self.successor, self._asked, self._asked_us = successor, committed, now_us

    def end(self) -> None:
        """It was done, or the shard was lost."""
        self.successor, self.is_disk_full = None, False

    def may_begin(
        self, reports: FollowerReports, best: FollowerReport | None, now_us: int, *, expects: bool = False
    ) -> bool:
        """Whether to hand over now: the successor is as far as this node, or will not be soon.

        Where anybody may be the successor, it is the best one as soon as there is one. `expects`: there is none, but a
        node that begins to follow.
        """
        successor = reports.get(self.successor) if self.successor else best
        if successor is None:
            restoring = (one for one in reports.all() if not one.drained and not one.is_able)
            successor = None if self.successor else max(restoring, key=lambda one: one.heard_us, default=None)
            if successor is None and not self.successor and expects:
                return now_us - self._asked_us >= CATCH_UP_US
        elif not self.successor:
            self.successor = successor.node
        lag_us = 0 if successor is None else reports.lag_us(successor.node, now_us)
        begins = may_release(successor, lag_us, self._asked, self._asked_us, now_us)
        if begins and successor is not None and lag_us >= CAUGHT_UP_US:
            logger.warning("successor is behind: clients wait for it  node=%s lag_s=%.1f", successor.node, lag_us / 1e6)
        return begins
