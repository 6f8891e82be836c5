"""Commits the positions of a member of a group: now and then, or at once with the broker's answer."""

from headrace.client._sync.concurrency import Monitor, ResultCell, Timer, Timers, now
from headrace.client._sync.consumer.group_membership import GroupMembership
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.endpoints import CLUSTER_BACKOFF_S
from headrace.client.connection.retrying import REPEATED
from headrace.model.errors import ConnectionFailed, HeadraceError, MemberFenced, UnknownMember


class PositionCommitter:
    """Commits what the member has processed; with an interval also by itself, until it is stopped."""

    def __init__(self, membership: GroupMembership, timers: Timers) -> None:
        self._membership = membership
        self._timers = timers
        self._timer: Timer | None = None
        self._monitor = Monitor()
        self._stopped = False

    def start(self, interval_s: float) -> None:
        """Commit every so many seconds from now on."""

        def commit() -> None:
            if not self._stopped:
                self._membership.commit_nowait(lambda _error: None)
                self.start(interval_s)

        self._timer = self._timers.later(interval_s, commit)

    def stop(self) -> None:
        """Commit no more by itself."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def commit(self, deadline: float) -> None:
        """Commit what is processed, and wait for the answer; raises MemberFenced for what other members have by now."""
        membership = self._membership
        wanted = [reader for reader in membership.held() if reader.done > reader.committed]
        error: HeadraceError | None = ConnectionFailed()
        backoff = Backoff()
        while error is not None:
            outcome: ResultCell[HeadraceError | None] = ResultCell()
            membership.commit_nowait(outcome.resolve, surely=True)
            error = outcome.wait(max(deadline - now(), 0.001))
            if isinstance(error, ConnectionFailed | MemberFenced | UnknownMember) and now() < deadline:
                membership.rejoined(deadline)  # partitions that are still assigned then are committed again
            elif isinstance(error, REPEATED) and now() < deadline:
                with self._monitor.guard:
                    self._monitor.wait(min(backoff.next_s(), CLUSTER_BACKOFF_S, max(deadline - now(), 0.001)))
            elif error is not None:
                raise error
        lost = [f"{reader.topic}[{reader.partition}]" for reader in wanted if reader.committed < reader.done]
        if lost:
            raise MemberFenced(f"{', '.join(lost)} went to other members before it was committed")
