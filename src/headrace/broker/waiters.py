"""The queue of consumers that wait for messages of a subscription."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from heapq import heapify, heappop, heappush

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.model.errors import Cancelled
from headrace.model.leasing import Lease, Leased

_OUTDATED_MAX = 64


PendingLeased = PendingAnswer[Leased | AnswerWithBody[Leased]]


class PendingLease:
    """A lease request that waits for messages."""

    __slots__ = ("deadline_us", "pending_answer", "request", "serial", "session", "session_bound", "taken_bytes")

    def __init__(
        self,
        session: Session,
        request: Lease,
        deadline_us: int,
        pending_answer: PendingLeased,
        session_bound: bool = False,
    ) -> None:
        self.session = session
        self.request = request
        self.deadline_us = deadline_us
        self.pending_answer = pending_answer
        self.session_bound = session_bound
        """Whether its leases last as long as the session."""
        self.taken_bytes = 0
        """Bytes of the messages that it was granted last."""
        self.serial = 0
        """Its position in the subscription's queue."""


class LeaseWaiters:
    """A queue of consumers.

    What can be handed out to a consumer depends only on how long before it is due it takes a message: so the first
    consumer of each such time is all that ever has to be looked at.
    """

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, PendingLease]] = {}
        """By `ahead_ms`, and by serial number."""
        self._deadlines: list[tuple[int, int, PendingLease]] = []
        """A heap; includes requests that do not wait any more."""
        self._sessions: dict[Session, dict[int, PendingLease]] = {}
        self._count = 0
        self._serial = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PendingLease]:
        return iter(sorted((one for queue in self._queues.values() for one in queue.values()), key=_serial))

    def add(self, pending_lease: PendingLease) -> None:
        """Add a request at the end of the queue."""
        self._serial += 1
        self._count += 1
        pending_lease.serial = self._serial
        self._queues.setdefault(pending_lease.request.ahead_ms, OrderedDict())[pending_lease.serial] = pending_lease
        self._sessions.setdefault(pending_lease.session, {})[pending_lease.serial] = pending_lease
        heappush(self._deadlines, (pending_lease.deadline_us, pending_lease.serial, pending_lease))
        if len(self._deadlines) > 2 * self._count + _OUTDATED_MAX:
            self._deadlines = [one for one in self._deadlines if self._waits(one[2])]
            heapify(self._deadlines)
        pending_lease.pending_answer.then(partial(self._answered, pending_lease))

    def _answered(self, pending_lease: PendingLease, outcome: object) -> None:
        """Hand out nothing to a consumer that has cancelled its request."""
        if isinstance(outcome, Cancelled) and self._waits(pending_lease):
            self.remove(pending_lease)

    def remove(self, pending_lease: PendingLease) -> None:
        """Remove a request from the queue."""
        queue = self._queues[pending_lease.request.ahead_ms]
        del queue[pending_lease.serial]
        if not queue:
            del self._queues[pending_lease.request.ahead_ms]
        others = self._sessions[pending_lease.session]
        del others[pending_lease.serial]
        if not others:
            del self._sessions[pending_lease.session]
        self._count -= 1

    def discard(self, pending_lease: PendingLease) -> bool:
        """Remove this one if it waits; whether it did."""
        waits = self._waits(pending_lease)
        if waits:
            self.remove(pending_lease)
        return waits

    def clear(self) -> list[PendingLease]:
        """Remove and return all requests."""
        pending_leases = list(self)
        self._queues.clear()
        self._sessions.clear()
        self._deadlines.clear()
        self._count = 0
        return pending_leases

    def first(self, beyond_ms: int, only: PendingLease | None = None) -> PendingLease | None:
        """The first request that takes messages longer before they are due than this; if given, `only` this one.

        Passes over those of tenants that are beyond their rate.
        """
        if only is not None:
            waits = only.request.ahead_ms > beyond_ms and self._waits(only) and not only.session.is_over_rate
            return only if waits else None
        first: PendingLease | None = None
        for ahead_ms, queue in self._queues.items():
            if ahead_ms <= beyond_ms:
                continue
            for one in queue.values():
                if not one.session.is_over_rate:
                    if first is None or one.serial < first.serial:
                        first = one
                    break
        return first

    def of(self, session: Session) -> list[PendingLease]:
        """The waiting requests of a session, in order."""
        return list(self._sessions.get(session, {}).values())

    @property
    def ahead_us(self) -> int:
        """The longest time before they are due at which a waiting request takes messages."""
        return max(self._queues, default=0) * 1000

    @property
    def deadline_us(self) -> int | None:
        """The earliest deadline."""
        while self._deadlines and not self._waits(self._deadlines[0][2]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def take_late(self, now_us: int, most: int) -> list[PendingLease]:
        """Remove and return requests whose deadline is over, so many at most."""
        late: list[PendingLease] = []
        while len(late) < most and (deadline_us := self.deadline_us) is not None and deadline_us <= now_us:
            pending_lease = heappop(self._deadlines)[2]
            self.remove(pending_lease)
            late.append(pending_lease)
        return late

    def _waits(self, pending_lease: PendingLease) -> bool:
        queue = self._queues.get(pending_lease.request.ahead_ms)
        return queue is not None and pending_lease.serial in queue


def _serial(pending_lease: PendingLease) -> int:
    return pending_lease.serial
