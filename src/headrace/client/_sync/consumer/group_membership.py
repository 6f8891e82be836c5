"""A member of a group: joins, and follows the broker's assignments of partitions."""

import logging
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial

from headrace.client._sync.concurrency import ResultCell, Timers, now
from headrace.client._sync.connection.connection import Connection
from headrace.client._sync.consumer.fetcher import Fetcher
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.request_router import Bytes, Callback
from headrace.client.consumer.partition_reader import PartitionReader
from headrace.model.errors import ConnectionFailed, HeadraceError, MemberFenced, Timeout, UnknownMember
from headrace.model.requests import (
    Assignment,
    Commit,
    Done,
    GroupJoin,
    GroupJoined,
    GroupLeave,
    GroupRelease,
    PartitionOffset,
)

logger = logging.getLogger("headrace.client")

CommitCallback = Callable[[HeadraceError | None], None]
"""Is called with the error of a commit, or None."""


class GroupMembership:
    """One member of a group. No method blocks, but for `rejoined` and `join_again`: answers arrive in callbacks."""

    def __init__(self, fetcher: Fetcher, timers: Timers, join_request: GroupJoin, auto_commit: bool) -> None:
        self.group = join_request.group
        self.member = join_request.member
        self.joined: ResultCell[None] = ResultCell()
        """Resolved with the first assignment."""
        self._join_request = join_request
        self._fetcher = fetcher
        self._timers = timers
        self._auto_commit = auto_commit
        self._guard = fetcher.monitor.guard
        self._connection: Connection | None = None
        self._revoked: list[PartitionReader] = []
        """Revoked partitions, released as soon as no batch of them is being processed."""
        self._backoff = Backoff()
        self._left = False
        self._ready = False
        """Whether the member has joined over the present connection."""

    def connection_up(self, connection: Connection) -> None:
        """On a new connection: join again."""
        with self._guard:
            self._connection = connection
            self._ready = False
        connection.members[self.group, self.member] = self._told
        self._join(connection)

    def connection_drains(self) -> None:
        """Before the broker goes: commit, so that nothing is delivered twice."""
        if self._auto_commit:
            self.commit_nowait(_heed)

    def connection_refused(self, error: HeadraceError) -> None:
        """The broker does not accept this client any more: whoever takes a batch, or commits, is told."""
        self.joined.fail(error)  # without effect once it has joined
        self._fetcher.connection_refused(error)

    def held(self) -> list[PartitionReader]:
        """Return the readers of partitions that are assigned, or revoked and not released yet."""
        with self._guard:
            return [*self._fetcher.readers.values(), *self._revoked]

    def commit_nowait(
        self, done: CommitCallback, readers: Iterable[PartitionReader] | None = None, surely: bool = False
    ) -> None:
        """Commit what is processed and not committed; then `done` is told.

        If it must be sure, what has been said and not been confirmed is said again.
        """
        with self._guard:
            connection = self._connection
            moved = [
                reader
                for reader in (self.held() if readers is None else readers)
                if reader.done > (reader.committed if surely else reader.committing)
            ]
            places = [PartitionOffset(reader.topic, reader.partition, reader.done, reader.epoch) for reader in moved]
            for reader in moved:
                reader.committing = reader.done
            ready = self._ready
        if not places:
            done(None)
        elif connection is None or not ready:
            self._committed(moved, places, done, ConnectionFailed("not joined again yet"), b"")
        else:
            head = Commit(self.group, places, self.member)
            connection.request_nowait(head, b"", partial(self._committed, moved, places, done))

    def let_go(self) -> None:
        """Commit and release what is to be released and is not used any more."""
        if not self._revoked:
            return
        with self._guard:
            free = [reader for reader in self._revoked if not reader.using]
            self._revoked = [reader for reader in self._revoked if reader.using]
        for reader in free:  # each by itself: one that is refused must not keep the others from being committed
            released = partial(self._release, reader)
            if self._auto_commit:
                self.commit_nowait(released, [reader])
            else:
                released(None)

    def leave(self, done: Callback[Done]) -> None:
        """Leave the group."""
        with self._guard:
            before, self._left = self._left, True
            connection = self._connection
        if before or connection is None or connection.closed:
            done(Done(), b"")
            return
        connection.members.pop((self.group, self.member), None)
        connection.request_nowait(GroupLeave(self.group, self.member), b"", done)

    def join_again(self, deadline: float) -> None:
        """Join over the present connection, and wait until that is done."""
        if self._connection is not None:
            self._join(self._connection)
        self.rejoined(deadline)

    def rejoined(self, deadline: float) -> None:
        """Wait until the member has joined over the present connection."""
        with self._guard:
            while not self._ready or self._connection is None or self._connection.closed:
                if self._fetcher.refusal is not None:
                    raise copy(self._fetcher.refusal)
                if not self._fetcher.monitor.wait(deadline - now()):
                    raise Timeout(f"the group {self.group} could not be joined again in time")

    def _join(self, connection: Connection) -> None:
        with self._guard:
            self._ready = False
            current = self._connection is connection and not connection.closed and not self._left
        if current:
            connection.request_nowait(self._join_request, b"", partial(self._answered, connection))

    def _answered(self, connection: Connection, answer: GroupJoined | HeadraceError, _body: Bytes) -> None:
        if isinstance(answer, GroupJoined):
            self._backoff.reset()
            self._join_request.missing = "wait"  # a topic that is deleted later may be made again
            self._begin(connection, answer)
            self.joined.resolve(None)
        elif isinstance(answer, ConnectionFailed):
            return  # joined again over the next connection
        elif answer.retryable:
            self._timers.later(self._backoff.next_s(), partial(self._join, connection))
        elif self.joined.done:
            self._fetcher.fail(answer)
        else:
            self.joined.fail(answer)

    def _begin(self, connection: Connection, joined: GroupJoined) -> None:
        """Apply an assignment: keep readers that it still has, drop the others, begin new ones."""
        with self._guard:
            if self._connection is not connection or self._left:
                return
            ours = {(place.topic, place.partition): place for place in joined.assigned}
            for reader in list(self._fetcher.readers.values()):
                place = ours.get(reader.place)
                if place is not None and _same(reader, place):
                    reader.epoch = place.epoch
                    reader.committed = reader.committing = place.offset
                    del ours[reader.place]
                else:
                    self._fetcher.drop(reader)
            self._revoked.clear()
            self._fetcher.connection_up(connection)
            for place in ours.values():
                self._fetcher.add(place.topic, place.partition, place.offset, place.epoch, optional=True)
            self._ready = True
            self._fetcher.monitor.notify()

    def _told(self, assignment: Assignment) -> None:
        readers = self._fetcher.readers
        with self._guard:
            lost = {(place.topic, place.partition) for place in assignment.lost}
            for place in [*assignment.lost, *assignment.revoked]:
                reader = readers.get((place.topic, place.partition))
                if reader is None or reader.epoch != place.epoch:
                    reader = PartitionReader(self._fetcher, place.topic, place.partition, 0, place.epoch)
                self._fetcher.drop(reader)
                if reader.place not in lost:
                    self._revoked.append(reader)
            self._revoked = [reader for reader in self._revoked if reader.place not in lost]
            for place in assignment.assigned:
                self._fetcher.add(place.topic, place.partition, place.offset, place.epoch, optional=True)
        self.let_go()
        again = {(place.topic, place.partition) for place in assignment.assigned}
        given_up = lost - again or not (assignment.revoked or again or lost)
        if given_up and self._connection is not None:
            self._join(self._connection)  # out of touch for too long, perhaps: make sure that we are a member

    def _release(self, reader: PartitionReader, error: HeadraceError | None) -> None:
        connection = self._connection
        if error is not None:
            logger.warning("%s[%s] is released uncommitted: %s", reader.topic, reader.partition, error)
        if connection is not None:
            head = GroupRelease(
                self.group, self.member, [PartitionOffset(reader.topic, reader.partition, 0, reader.epoch)]
            )
            connection.request_nowait(head, b"", self._released)

    def _released(self, answer: Done | HeadraceError, _body: Bytes) -> None:
        if isinstance(answer, UnknownMember) and self._connection is not None:
            self._join(self._connection)

    def _committed(
        self,
        moved: list[PartitionReader],
        places: list[PartitionOffset],
        done: CommitCallback,
        answer: Done | HeadraceError,
        _body: Bytes,
    ) -> None:
        error = answer if isinstance(answer, HeadraceError) else None
        for reader, place in zip(moved, places, strict=True):
            if error is None:
                reader.committed = max(reader.committed, place.offset)
            elif reader.committing == place.offset:
                reader.committing = reader.committed
        if isinstance(error, MemberFenced | UnknownMember):
            logger.warning("commit refused; joining again  group=%s error=%s", self.group, error)
            if self._connection is not None:
                self._join(self._connection)
        done(error)


def _same(reader: PartitionReader, place: PartitionOffset) -> bool:
    """Whether what we have of a partition can be gone on with under an assignment.

    After the broker was restarted it is another assignment. If the group's position is one that we left there, all
    before it is processed, and what comes behind it is with us.
    """
    return reader.epoch == place.epoch or reader.committed <= place.offset <= reader.done


def _heed(error: HeadraceError | None) -> None:
    if error is not None:
        logger.warning("commit of positions failed  error=%s", error)
