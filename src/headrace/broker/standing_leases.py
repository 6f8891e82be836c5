"""Standing lease requests: the broker leases and pushes messages to a session with credit as they become ready.

A standing request with credit waits in the same queue as one-shot leases, and moves to its end after each delivery, so
that no consumer starves. While a session's client receives too slowly, its requests leave the queue.
"""

import logging
from collections.abc import Iterator
from functools import partial

from headrace.broker.lease_checks import check_lease_credit, check_lease_open
from headrace.broker.leasing import LeaseDispatcher
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.streams import OpenedReading
from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.turns import Turns
from headrace.broker.waiters import PendingLease
from headrace.model.errors import Draining, HeadraceError, LimitExceeded
from headrace.model.leasing import Holding, Lease, Leased, LeasedPortion, Release, Settlement
from headrace.model.limits import STANDING_LEASES_MAX
from headrace.model.requests import Done
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseDelivery, LeaseEnd, LeaseOpen, LeaseOpened

logger = logging.getLogger("headrace.broker")

_NEVER_US = 1 << 62
_DELIVERY_MESSAGES = 1000
_DELIVERY_BYTES = 1 << 20
"""Maximum messages and bytes per delivery, so that other consumers get their share."""
_RELEASED_TOGETHER = 1000
"""Messages of an ended session that are released at a time."""
_TRACKED_MIN = 64
_LOST_REASON = "connection ended without acknowledgement"


class StandingLease:
    """A standing request: its credit, and its leases that are bound to the session."""

    __slots__ = (
        "bound",
        "credit_bytes",
        "credit_messages",
        "delivery",
        "ended",
        "number",
        "pending_lease",
        "queued",
        "session",
        "subscription",
        "tracked_max",
    )

    def __init__(self, number: int, session: Session, subscription: Subscription, request: LeaseOpen) -> None:
        self.number = number
        self.session = session
        self.subscription = subscription
        self.credit_messages = request.credit_messages
        self.credit_bytes = request.credit_bytes
        lease = Lease(request.topic, subscription.name, lease_ms=request.lease_ms, ahead_ms=request.ahead_ms)
        self.pending_lease = PendingLease(session, lease, _NEVER_US, PendingAnswer(), request.session_bound)
        self.queued = False
        """Whether it waits for messages, or for the journal to record a grant."""
        self.ended = False
        self.bound: list[Holding] = []
        """Delivered leases that are bound to the session; some may be settled."""
        self.tracked_max = _TRACKED_MIN
        self.delivery = 0
        """The number of its last delivery; 0: it had none."""

    @property
    def wants(self) -> bool:
        """Whether it may be granted messages now."""
        has_credit = self.credit_messages > 0 and self.credit_bytes > 0
        active = self.subscription.active
        return (
            has_credit
            and not self.ended
            and not self.session.blocked
            and (active is None or active is self.pending_lease)
        )

    def limit(self) -> None:
        """Limit the next grant to the credit and the maximum of a delivery."""
        lease = self.pending_lease.request
        lease.messages_max = min(self.credit_messages, _DELIVERY_MESSAGES)
        lease.bytes_max = min(self.credit_bytes, _DELIVERY_BYTES)

    def track(self, portions: list[LeasedPortion]) -> None:
        """Track delivered leases, to release them when the session ends; drops settled ones now and then."""
        self.bound += map(_holding, portions)
        if len(self.bound) > self.tracked_max:
            self.bound = [holding for holding in self.bound if self._is_held(holding)]
            self.tracked_max = max(2 * len(self.bound), _TRACKED_MIN)

    def _is_held(self, holding: Holding) -> bool:
        index = self.subscription.indexes.get(holding.partition)
        return index is not None and bool(index.checked(holding.lease, holding.all_offsets, 0, late=True)[0])


class StandingLeases:
    """All standing requests of a broker."""

    def __init__(
        self, registry: SubscriptionRegistry, dispatcher: LeaseDispatcher, ledger: Ledger, turns: Turns
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._turns = turns
        self._number = 0
        self._deliveries = 0
        self._sessions: dict[Session, dict[int, StandingLease]] = {}
        """Open requests by session and number, and closed ones whose leases stay with the session."""
        self._subscriptions: dict[int, dict[int, StandingLease]] = {}
        """Open requests by subscription id and number."""
        self._unreleased: list[tuple[Session, Release]] = []
        """Releases that failed because the journal could not be written; the next tick retries them."""
        registry.ended.connect(self._end_all)

    def open(self, session: Session, request: LeaseOpen, now_us: int) -> LeaseOpened:
        """Open a standing request."""
        check_lease_open(request)
        mine = self._sessions.get(session, {})
        if len(mine) >= STANDING_LEASES_MAX:
            raise LimitExceeded(
                f"the connection has {STANDING_LEASES_MAX} standing lease requests, which is the maximum; close some"
            )
        subscription = self._registry.get_or_create(request, now_us)
        self._number += 1
        standing = StandingLease(self._number, session, subscription, request)
        self._sessions.setdefault(session, mine)[standing.number] = standing
        self._subscriptions.setdefault(subscription.id, {})[standing.number] = standing
        self._choose_active(subscription)
        self._wait(standing)
        return LeaseOpened(standing.number)

    def credit(self, session: Session, request: LeaseCredit) -> Done:
        """Add credit to a standing request."""
        check_lease_credit(request)
        standing = self._sessions.get(session, {}).get(request.standing)
        if standing is None or standing.ended:
            return Done()  # it has ended, and the client has not heard yet
        standing.credit_messages += request.messages
        standing.credit_bytes += request.bytes
        lease = standing.pending_lease.request
        if request.ahead_ms is not None and request.ahead_ms != lease.ahead_ms:
            self._withdraw(standing)
            lease.ahead_ms = request.ahead_ms
        if standing.queued:
            standing.limit()
        else:
            self._wait(standing)
        return Done()

    def close(self, session: Session, request: LeaseClose, now_us: int) -> Done | PendingAnswer[Done]:
        """Close a standing request; pending grants are delivered before the answer."""
        self._ledger.flush()
        standing = self._sessions.get(session, {}).get(request.standing)
        if standing is None:
            return Done()
        self._forget(standing)
        if request.keep_leases and standing.bound:
            return Done()
        self._leave(standing)
        return self._release_all(session, standing, now_us, undelivered=True)

    def disconnect(self, session: Session, now_us: int) -> None:
        """Close the requests of an ended session, and release the leases that are bound to it."""
        for standing in self._sessions.pop(session, {}).values():
            self._forget(standing)
            self._release_all(session, standing, now_us, undelivered=False)

    def pause(self, session: Session) -> None:
        """Stop leasing to a session whose client receives too slowly."""
        session.receives_slowly = True
        for standing in self._sessions.get(session, {}).values():
            self._withdraw(standing)

    def resume(self, session: Session) -> None:
        """Lease to a session again, as its client has caught up."""
        session.receives_slowly = False
        self.wake({session})

    def wake(self, sessions: set[Session]) -> None:
        """Serve the requests of sessions to which messages may be leased again, first those that got some long ago."""
        standings = [one for session in sessions for one in self._sessions.get(session, {}).values()]
        for standing in sorted(standings, key=lambda one: one.delivery):
            if standing.queued:
                self._dispatcher.serve_soon(standing.subscription)
            else:
                self._wait(standing)

    def opened(self) -> Iterator[OpenedReading]:
        """All open requests."""
        for session, standings in self._sessions.items():
            for standing in standings.values():
                yield session, standing.pending_lease.request, partial(self._end, standing)

    def drain(self) -> None:
        """End all standing requests; delivered messages stay leased."""
        for standings in list(self._subscriptions.values()):
            for standing in list(standings.values()):
                self._end(standing, Draining())

    def tick(self, now_us: int) -> None:
        """Retry releases that failed."""
        unreleased, self._unreleased = self._unreleased, []
        for session, request in unreleased:
            self._release(session, request, now_us)

    def are_open(self, subscription: Subscription) -> bool:
        """Whether a subscription has open standing requests."""
        return subscription.id in self._subscriptions

    def settings_changed(self, subscription: Subscription) -> None:
        """Queue the requests that may have messages after single_active_consumer was changed."""
        before = subscription.active
        self._choose_active(subscription)
        if subscription.active is not before:
            for standing in self._subscriptions.get(subscription.id, {}).values():
                if not standing.wants:
                    self._withdraw(standing)
                self._wait(standing)

    def _choose_active(self, subscription: Subscription) -> None:
        """With single_active_consumer, make the consumer with the oldest standing request the active one."""
        first = next(iter(self._subscriptions.get(subscription.id, {}).values()), None)
        if first is None or not subscription.settings.single_active_consumer:
            if subscription.active is not None:
                subscription.active = None
                self._dispatcher.serve_soon(subscription)
        elif subscription.active is not first.pending_lease:
            subscription.active = first.pending_lease
            self._wait(first)

    # Waiting and delivering.

    def _wait(self, standing: StandingLease) -> None:
        """Queue a request behind all others, if it may be granted messages."""
        if standing.queued or not standing.wants:
            return
        standing.queued = True
        standing.limit()
        standing.pending_lease.pending_answer = PendingAnswer()
        standing.pending_lease.pending_answer.then(partial(self._granted, standing))
        standing.subscription.pending_leases.add(standing.pending_lease)
        self._dispatcher.serve_soon(standing.subscription)

    def _withdraw(self, standing: StandingLease) -> None:
        """Remove a request from the queue; grants already made are still delivered."""
        if standing.subscription.pending_leases.discard(standing.pending_lease):
            standing.queued = False

    def _granted(self, standing: StandingLease, outcome: AnswerWithBody[Leased] | Leased | HeadraceError) -> None:
        """Deliver leased messages, now that the journal has recorded the lease."""
        standing.queued = False
        if isinstance(outcome, HeadraceError):
            self._end(standing, outcome)
        elif isinstance(outcome, AnswerWithBody):
            self._deliver(standing, outcome)
        self._wait(standing)

    def _deliver(self, standing: StandingLease, outcome: AnswerWithBody[Leased]) -> None:
        portions = outcome.answer.portions
        if standing.ended:  # closed while the journal was written: the client never gets them
            self._release_some(standing.session, standing, list(map(_holding, portions)), undelivered=True)
            return
        self._deliveries += 1
        standing.delivery = self._deliveries
        size_bytes = standing.pending_lease.taken_bytes
        standing.credit_bytes -= size_bytes
        for portion in portions:
            standing.credit_messages -= len(portion.offsets) + portion.following
        if standing.pending_lease.session_bound:
            standing.track(portions)
        standing.session.push(AnswerWithBody(LeaseDelivery(standing.number, portions, size_bytes), outcome.body))

    # Ending.

    def _end_all(self, subscription: Subscription, error: HeadraceError) -> None:
        """End the requests of a subscription that was deleted, failed or was reset."""
        for standing in list(self._subscriptions.get(subscription.id, {}).values()):
            self._end(standing, error)

    def _end(self, standing: StandingLease, error: HeadraceError) -> None:
        """End a request, and push the reason to its session; leases stay bound to the session."""
        if standing.ended:
            return
        self._forget(standing)
        if not standing.bound:
            self._leave(standing)
        end = LeaseEnd(standing.number, error.code, str(error), error.retryable, error.details)
        self._turns.call_soon(lambda _: standing.session.push(end))

    def _forget(self, standing: StandingLease) -> None:
        """Remove a request from its subscription and the queue."""
        standing.ended = True
        standing.subscription.use(self._turns.now_us)
        self._withdraw(standing)
        others = self._subscriptions.get(standing.subscription.id)
        if others is not None:
            others.pop(standing.number, None)
            if not others:
                del self._subscriptions[standing.subscription.id]
        self._choose_active(standing.subscription)

    def _leave(self, standing: StandingLease) -> None:
        """Remove a request from its session."""
        others = self._sessions.get(standing.session)
        if others is not None:
            others.pop(standing.number, None)
            if not others:
                del self._sessions[standing.session]

    # Releasing.

    def _release_all(
        self, session: Session, standing: StandingLease, now_us: int, *, undelivered: bool
    ) -> Done | PendingAnswer[Done]:
        """Release a request's leases that are bound to its session, in portions; resolves after the last one."""
        bound, standing.bound = standing.bound, []
        if not bound:
            return Done()
        done: PendingAnswer[Done] = PendingAnswer()
        parts = list(_parts(bound))

        def go_on(now_us: int) -> None:
            if parts:
                part = parts.pop(0)
                request = self._request(standing, part, undelivered=undelivered)
                released = self._release(session, request, now_us)
                released.then(lambda _: self._turns.call_at_turn_end(go_on))
            else:
                done.resolve(Done())

        go_on(now_us)
        return done

    def _release_some(
        self, session: Session, standing: StandingLease, holdings: list[Holding], *, undelivered: bool
    ) -> None:
        self._release(session, self._request(standing, holdings, undelivered=undelivered), self._turns.now_us)

    def _request(self, standing: StandingLease, holdings: list[Holding], *, undelivered: bool) -> Release:
        subscription = standing.subscription
        reason = "" if undelivered else _LOST_REASON
        return Release(
            str(subscription.topic),
            holdings,
            0,
            reason=reason,
            undelivered=undelivered,
            subscription=subscription.name,
        )

    def _release(self, session: Session, request: Release, now_us: int) -> PendingAnswer[Done]:
        """Release messages; the dispatcher refuses those that were settled meanwhile."""
        done: PendingAnswer[Done] = PendingAnswer()

        def released(outcome: Settlement | HeadraceError) -> None:
            if isinstance(outcome, HeadraceError):
                text = "messages of ended sessions not released; retrying  topic=%s"
                self._ledger.failures.note(("release", request.topic), outcome, text, request.topic)
                self._unreleased.append((session, request))
            else:
                self._ledger.failures.worked(("release", request.topic))
            done.resolve(Done())

        try:
            answer = self._dispatcher.release(session, request, now_us)
        except HeadraceError as error:  # the subscription was deleted, or a reset ends its leases
            logger.info("messages of an ended session not released  topic=%s reason=%s", request.topic, error)
            done.resolve(Done())
            return done
        if isinstance(answer, PendingAnswer):
            answer.then(released)
        else:
            done.resolve(Done())
        return done


def _holding(portion: LeasedPortion) -> Holding:
    return Holding(portion.partition, portion.lease, portion.offsets, portion.following)


def _parts(holdings: list[Holding]) -> Iterator[list[Holding]]:
    """Split holdings into parts of a bounded number of messages."""
    part: list[Holding] = []
    count = 0
    for holding in holdings:
        part.append(holding)
        count += len(holding.offsets) + holding.following
        if count >= _RELEASED_TOGETHER:
            yield part
            part, count = [], 0
    if part:
        yield part
