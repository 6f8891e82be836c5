"""Standing lease requests: messages are leased and pushed to a session as they become ready, while it has credit.

A standing request with credit waits in the same queue as one-shot leases do, and goes to the end of it after each
delivery: so nobody starves. One whose session does not take what is sent waits nowhere until it does.
"""

import logging
from collections.abc import Iterator
from functools import partial

from headrace.broker.lease_checks import check_lease_credit, check_lease_open
from headrace.broker.leasing import LeaseDispatcher
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
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
"""At most so much is delivered at once: then it is the turn of others."""
_RELEASED_TOGETHER = 1000
"""Messages of an ended session that are given back at a time."""
_TRACKED_MIN = 64
_LOST_REASON = "connection ended without acknowledgement"


class StandingLease:
    """A standing request: its credit, and what it has leased that is bound to its session."""

    __slots__ = (
        "bound",
        "credit_bytes",
        "credit_messages",
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
        """Whether it waits for messages, or for the journal to have those that it was granted."""
        self.ended = False
        self.bound: list[Holding] = []
        """What was delivered and is bound to the session; some of it may be settled."""
        self.tracked_max = _TRACKED_MIN

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
        """Let the next grant have no more than the credit and a delivery allow."""
        lease = self.pending_lease.request
        lease.messages_max = min(self.credit_messages, _DELIVERY_MESSAGES)
        lease.bytes_max = min(self.credit_bytes, _DELIVERY_BYTES)

    def track(self, portions: list[LeasedPortion]) -> None:
        """Remember what was delivered, to give it back when the session ends; forget what was settled meanwhile."""
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
        self._sessions: dict[Session, dict[int, StandingLease]] = {}
        """Those that are open, and those that were closed while what they delivered stays with the session."""
        self._subscriptions: dict[int, dict[int, StandingLease]] = {}
        """Those that are open, by the id of their subscription."""
        self._unreleased: list[tuple[Session, Release]] = []
        """What could not be given back because the journal could not be written; tried again with the next tick."""
        registry.ended.connect(self._end_all)

    def open(self, session: Session, request: LeaseOpen, now_us: int) -> LeaseOpened:
        """Begin to lease messages to a session."""
        check_lease_open(request)
        mine = self._sessions.get(session, {})
        if len(mine) >= STANDING_LEASES_MAX:
            raise LimitExceeded(f"a connection has at most {STANDING_LEASES_MAX} standing lease requests; close some")
        subscription = self._registry.get_or_create(request, now_us)
        self._number += 1
        standing = StandingLease(self._number, session, subscription, request)
        self._sessions.setdefault(session, mine)[standing.number] = standing
        self._subscriptions.setdefault(subscription.id, {})[standing.number] = standing
        self._choose_active(subscription)
        self._wait(standing)
        return LeaseOpened(standing.number)

    def credit(self, session: Session, request: LeaseCredit) -> Done:
        """Let a standing request have more."""
        check_lease_credit(request)
        standing = self._sessions.get(session, {}).get(request.standing)
        if standing is None or standing.ended:
            return Done()  # it has ended, and the client does not know yet
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
        """End a standing request; what it was granted is delivered before the answer."""
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
        """A session has ended: end its requests, and give back what is bound to it."""
        for standing in self._sessions.pop(session, {}).values():
            self._forget(standing)
            self._release_all(session, standing, now_us, undelivered=False)

    def pause(self, session: Session) -> None:
        """Lease nothing more to a session whose client does not take what is sent."""
        session.blocked = True
        for standing in self._sessions.get(session, {}).values():
            self._withdraw(standing)

    def resume(self, session: Session) -> None:
        """Go on: the client has taken what was sent."""
        session.blocked = False
        for standing in self._sessions.get(session, {}).values():
            self._wait(standing)

    def drain(self) -> None:
        """End all standing requests; what they delivered stays leased."""
        for standings in list(self._subscriptions.values()):
            for standing in list(standings.values()):
                self._end(standing, Draining())

    def tick(self, now_us: int) -> None:
        """Give back what could not be given back before."""
        unreleased, self._unreleased = self._unreleased, []
        for session, request in unreleased:
            self._release(session, request, now_us)

    def are_open(self, subscription: Subscription) -> bool:
        """Whether somebody has a standing request at a subscription."""
        return subscription.id in self._subscriptions

    def settings_changed(self, subscription: Subscription) -> None:
        """Let those wait that may, when it was changed whether one is active at a time."""
        before = subscription.active
        self._choose_active(subscription)
        if subscription.active is not before:
            for standing in self._subscriptions.get(subscription.id, {}).values():
                if not standing.wants:
                    self._withdraw(standing)
                self._wait(standing)

    def _choose_active(self, subscription: Subscription) -> None:
        """Where one consumer is active at a time, it is the one with the oldest standing request."""
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
        """Let a request wait for messages, behind all others, if it may have some."""
        if standing.queued or not standing.wants:
            return
        standing.queued = True
        standing.limit()
        standing.pending_lease.pending_answer = PendingAnswer()
        standing.pending_lease.pending_answer.then(partial(self._granted, standing))
        standing.subscription.pending_leases.add(standing.pending_lease)
        self._dispatcher.serve_soon(standing.subscription)

    def _withdraw(self, standing: StandingLease) -> None:
        """Let a request wait no more; what it was granted already comes."""
        if standing.subscription.pending_leases.discard(standing.pending_lease):
            standing.queued = False

    def _granted(self, standing: StandingLease, outcome: AnswerWithBody[Leased] | Leased | HeadraceError) -> None:
        """Deliver what was leased, now that the journal has it."""
        standing.queued = False
        if isinstance(outcome, HeadraceError):
            self._end(standing, outcome)
        elif isinstance(outcome, AnswerWithBody):
            self._deliver(standing, outcome)
        self._wait(standing)

    def _deliver(self, standing: StandingLease, outcome: AnswerWithBody[Leased]) -> None:
        portions = outcome.answer.portions
        if standing.ended:  # it ended while the journal was written: nobody has seen them
            self._release_some(standing.session, standing, list(map(_holding, portions)), undelivered=True)
            return
        size_bytes = standing.pending_lease.taken_bytes
        standing.credit_bytes -= size_bytes
        for portion in portions:
            standing.credit_messages -= len(portion.offsets) + portion.following
        if standing.pending_lease.session_bound:
            standing.track(portions)
        standing.session.push(AnswerWithBody(LeaseDelivery(standing.number, portions, size_bytes), outcome.body))

    # Ending.

    def _end_all(self, subscription: Subscription, error: HeadraceError) -> None:
        """End the requests at a subscription, because it was deleted, failed or was reset."""
        for standing in list(self._subscriptions.get(subscription.id, {}).values()):
            self._end(standing, error)

    def _end(self, standing: StandingLease, error: HeadraceError) -> None:
        """End a request, and tell its session why; what is bound to the session stays so."""
        if standing.ended:
            return
        self._forget(standing)
        if not standing.bound:
            self._leave(standing)
        end = LeaseEnd(standing.number, error.code, str(error), error.retryable, error.details)
        self._turns.call_soon(lambda _: standing.session.push(end))

    def _forget(self, standing: StandingLease) -> None:
        """Grant a request nothing any more."""
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
        """Forget what a session has to do with a request."""
        others = self._sessions.get(standing.session)
        if others is not None:
            others.pop(standing.number, None)
            if not others:
                del self._sessions[standing.session]

    # Giving back.

    def _release_all(
        self, session: Session, standing: StandingLease, now_us: int, *, undelivered: bool
    ) -> Done | PendingAnswer[Done]:
        """Give back what a request has bound to its session, some at a time; answers when all of it is done."""
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
        """Give messages back; what was settled meanwhile is refused, and left alone."""
        done: PendingAnswer[Done] = PendingAnswer()

        def released(outcome: Settlement | HeadraceError) -> None:
            if isinstance(outcome, HeadraceError):
                logger.warning("messages of an ended session not released; trying again  reason=%s", outcome)
                self._unreleased.append((session, request))
            done.resolve(Done())

        try:
            answer = self._dispatcher.release(session, request, now_us)
        except HeadraceError as error:  # the subscription is gone, and its leases with it, or ends them with its reset
            logger.info("messages of an ended session not released  reason=%s", error)
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
    """The holdings, not too many messages together."""
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
