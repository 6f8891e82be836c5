"""A subscription's part in a group: joining, and heeding what the broker says about partitions."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from headrace.client._async.concurrency import Outcome, Timers, now
from headrace.client._async.intake import AsyncIntake
from headrace.client._async.link import Link
from headrace.client.backoff import Backoff
from headrace.client.exchange import Bytes
from headrace.client.reading import Reader
from headrace.model.errors import ConnectionFailed, HeadraceError, MemberFenced, Timeout, UnknownMember
from headrace.model.requests import (
    Assignment,
    Commit,
    GroupJoin,
    GroupJoined,
    GroupLeave,
    GroupRelease,
    Place,
)
from headrace.wire.native import Kind

logger = logging.getLogger("headrace.client")

Done = Callable[[HeadraceError | None], None]


class AsyncMembership:
    """One member of a group. Everything here happens without waiting, when frames come and go."""

    def __init__(self, intake: AsyncIntake, timers: Timers, wish: GroupJoin, auto_commit: bool) -> None:
        self.group = wish.group
        self.member = wish.member
        self.joined: Outcome[None] = Outcome()
        """The broker has told which partitions are ours, for the first time."""
        self._wish = wish
        self._intake = intake
        self._timers = timers
        self._auto_commit = auto_commit
        self._guard = intake.monitor.guard
        self._link: Link | None = None
        self._revoked: list[Reader] = []
        """Those to be let go as soon as nobody is using them."""
        self._backoff = Backoff()
        self._left = False
        self._ready = False
        """Whether we have joined over the present connection, and know of no reason to join again."""

    def link_up(self, link: Link) -> None:
        """There is a new connection: take part over this one."""
        with self._guard:
            self._link = link
            self._ready = False
        link.members[self.group, self.member] = self._told
        self._join(link)

    def link_drains(self) -> None:
        """The broker is going: let it know how far we are, so that nothing is delivered twice."""
        if self._auto_commit:
            self.commit_nowait(_heed)

    def held(self) -> list[Reader]:
        """What is ours, and what we have been told to let go and have not yet."""
        with self._guard:
            return [*self._intake.readers.values(), *self._revoked]

    def commit_nowait(self, done: Done, readers: Iterable[Reader] | None = None, surely: bool = False) -> None:
        """Commit what is processed and not committed; then `done` is told.

        If it must be sure, what has been said and not been confirmed is said again.
        """
        with self._guard:
            link = self._link
            moved = [
                reader
                for reader in (self.held() if readers is None else readers)
                if reader.done > (reader.committed if surely else reader.committing)
            ]
            places = [Place(reader.topic, reader.partition, reader.done, reader.epoch) for reader in moved]
            for reader in moved:
                reader.committing = reader.done
            ready = self._ready
        if not places:
            done(None)
        elif link is None or not ready:
            self._committed(moved, places, done, ConnectionFailed("not joined again yet"), b"")
        else:
            head = Commit(self.group, places, self.member)
            link.request_nowait(Kind.COMMIT, head, b"", partial(self._committed, moved, places, done))

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

    def leave(self, done: Callable[[Any, Bytes], None]) -> None:
        """Take part no longer."""
        with self._guard:
            before, self._left = self._left, True
            link = self._link
        if before or link is None or link.closed:
            done(None, b"")
            return
        link.members.pop((self.group, self.member), None)
        link.request_nowait(Kind.GROUP_LEAVE, GroupLeave(self.group, self.member), b"", done)

    async def rejoined(self, deadline: float) -> None:
        """Wait until we have joined over the present connection."""
        with self._guard:
            while not self._ready or self._link is None or self._link.closed:
                if not await self._intake.monitor.wait(deadline - now()):
                    raise Timeout(f"the group {self.group} could not be joined again in time")

    def _join(self, link: Link) -> None:
        with self._guard:
            self._ready = False
            current = self._link is link and not link.closed and not self._left
        if current:
            link.request_nowait(Kind.GROUP_JOIN, self._wish, b"", partial(self._answered, link))

    def _answered(self, link: Link, answer: Any, _body: Bytes) -> None:
        if isinstance(answer, GroupJoined):
            self._backoff.reset()
            self._wish.missing = "wait"  # a topic that is deleted later may be made again
            self._begin(link, answer)
            self.joined.settle(None)
        elif isinstance(answer, ConnectionFailed):
            return  # joined again over the next connection
        elif answer.retryable:
            self._timers.later(self._backoff.next_s(), partial(self._join, link))
        elif self.joined.done:
            self._intake.fail(answer)
        else:
            self.joined.fail(answer)

    def _begin(self, link: Link, joined: GroupJoined) -> None:
        """What is ours now: keep what we have of it, drop the rest, begin with what is new."""
        with self._guard:
            if self._link is not link or self._left:
                return
            ours = {(place.topic, place.partition): place for place in joined.assigned}
            for reader in list(self._intake.readers.values()):
                place = ours.get(reader.place)
                if place is not None and _same(reader, place):
                    reader.epoch = place.epoch
                    reader.committed = reader.committing = place.offset
                    del ours[reader.place]
                else:
                    self._intake.drop(reader)
            self._revoked.clear()
            self._intake.link_up(link)
            for place in ours.values():
                self._intake.add(place.topic, place.partition, place.offset, place.epoch, optional=True)
            self._ready = True
            self._intake.monitor.notify()

    def _told(self, assignment: Assignment) -> None:
        readers = self._intake.readers
        with self._guard:
            lost = {(place.topic, place.partition) for place in assignment.lost}
            for place in [*assignment.lost, *assignment.revoked]:
                reader = readers.get((place.topic, place.partition))
                if reader is None or reader.epoch != place.epoch:
                    reader = Reader(self._intake, place.topic, place.partition, 0, place.epoch)
                self._intake.drop(reader)
                if reader.place not in lost:
                    self._revoked.append(reader)
            self._revoked = [reader for reader in self._revoked if reader.place not in lost]
            for place in assignment.assigned:
                self._intake.add(place.topic, place.partition, place.offset, place.epoch, optional=True)
        self.let_go()
        again = {(place.topic, place.partition) for place in assignment.assigned}
        given_up = lost - again or not (assignment.revoked or again or lost)
        if given_up and self._link is not None:
            self._join(self._link)  # out of touch for too long, perhaps: make sure that we are a member

    def _release(self, reader: Reader, error: HeadraceError | None) -> None:
        link = self._link
        if error is not None:
            logger.warning("%s[%s] is released uncommitted: %s", reader.topic, reader.partition, error)
        if link is not None:
            head = GroupRelease(self.group, self.member, [Place(reader.topic, reader.partition, 0, reader.epoch)])
            link.request_nowait(Kind.GROUP_RELEASE, head, b"", self._released)

    def _released(self, answer: Any, _body: Bytes) -> None:
        if isinstance(answer, UnknownMember) and self._link is not None:
            self._join(self._link)

    def _committed(self, moved: list[Reader], places: list[Place], done: Done, answer: Any, _body: Bytes) -> None:
        error = answer if isinstance(answer, HeadraceError) else None
        for reader, place in zip(moved, places, strict=True):
            if error is None:
                reader.committed = max(reader.committed, place.offset)
            elif reader.committing == place.offset:
                reader.committing = reader.committed
        if isinstance(error, MemberFenced | UnknownMember):
            logger.warning("a commit of group %s was refused: %s", self.group, error)
            if self._link is not None:
                self._join(self._link)
        done(error)


def _same(reader: Reader, place: Place) -> bool:
    """Whether what we have of a partition can be gone on with under an assignment.

    After the broker was restarted it is another assignment. If the group's position is one that we left there, all
    before it is processed, and what comes behind it is with us.
    """
    return reader.epoch == place.epoch or reader.committed <= place.offset <= reader.done


def _heed(error: HeadraceError | None) -> None:
    if error is not None:
        logger.warning("positions could not be committed: %s", error)
