"""Consumers that wait for messages of a subscription, the first one first."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from headrace.broker.later import Later
from headrace.broker.membership import Session
from headrace.model.leasing import Lease

_OUTDATED_MAX = 64


class Want:
    """A consumer that waits for messages."""

    __slots__ = ("deadline_us", "later", "request", "serial", "session")

    def __init__(self, session: Session, request: Lease, deadline_us: int, later: Later[Any]) -> None:
        self.session = session
        self.request = request
        self.deadline_us = deadline_us
        self.later = later
        self.serial = 0
        """Its place among those that wait at the same subscription."""


class Waiters:
    """A queue of consumers.

    What can be handed out to a consumer depends only on how long before it is due it takes a message: so the first
    consumer of each such time is all that ever has to be looked at.
    """

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, Want]] = {}
        """By `ahead_ms`, and by serial number."""
        self._deadlines: list[tuple[int, int, Want]] = []
        """A heap; has some that do not wait any more."""
        self._sessions: dict[Session, dict[int, Want]] = {}
        self._count = 0
        self._serial = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Want]:
        return iter(sorted((one for queue in self._queues.values() for one in queue.values()), key=_serial))

    def add(self, want: Want) -> None:
        """This one waits from now on, behind all others."""
        self._serial += 1
        self._count += 1
        want.serial = self._serial
        self._queues.setdefault(want.request.ahead_ms, OrderedDict())[want.serial] = want
        self._sessions.setdefault(want.session, {})[want.serial] = want
        heappush(self._deadlines, (want.deadline_us, want.serial, want))
        if len(self._deadlines) > 2 * self._count + _OUTDATED_MAX:
            self._deadlines = [one for one in self._deadlines if self._waits(one[2])]
            heapify(self._deadlines)

    def remove(self, want: Want) -> None:
        """This one does not wait any more."""
        queue = self._queues[want.request.ahead_ms]
        del queue[want.serial]
        if not queue:
            del self._queues[want.request.ahead_ms]
        others = self._sessions[want.session]
        del others[want.serial]
        if not others:
            del self._sessions[want.session]
        self._count -= 1

    def clear(self) -> list[Want]:
        """Nobody waits any more; returns those who did."""
        wants = list(self)
        self._queues.clear()
        self._sessions.clear()
        self._deadlines.clear()
        self._count = 0
        return wants

    def first(self, beyond_ms: int) -> Want | None:
        """The first of those who take messages longer before they are due than this."""
        heads = [next(iter(queue.values())) for ahead_ms, queue in self._queues.items() if ahead_ms > beyond_ms]
        return min(heads, key=_serial, default=None)

    def of(self, session: Session) -> list[Want]:
        """Those who wait on a connection, the first one first."""
        return list(self._sessions.get(session, {}).values())

    @property
    def ahead_us(self) -> int:
        """How long before they are due messages are taken at most."""
        return max(self._queues, default=0) * 1000

    @property
    def deadline_us(self) -> int | None:
        """When the first of them has waited long enough."""
        while self._deadlines and not self._waits(self._deadlines[0][2]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def take_late(self, now_us: int, most: int) -> list[Want]:
        """Take out those who have waited long enough, so many at most."""
        late: list[Want] = []
        while len(late) < most and (deadline_us := self.deadline_us) is not None and deadline_us <= now_us:
            want = heappop(self._deadlines)[2]
            self.remove(want)
            late.append(want)
        return late

    def _waits(self, want: Want) -> bool:
        queue = self._queues.get(want.request.ahead_ms)
        return queue is not None and want.serial in queue


def _serial(want: Want) -> int:
    return want.serial
