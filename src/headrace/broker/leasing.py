"""Leases messages to consumers, and takes their acknowledgements, extensions, releases and rejections."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from msgspec.structs import replace

from headrace.broker.dead_letters import DeadLetters
from headrace.broker.deadlines import Deadlines
from headrace.broker.lease_checks import check_holdings, check_lease, check_lease_ms, check_release
from headrace.broker.lease_expiry import LeaseExpiry
from headrace.broker.leased_facts import LeaseExtended, MessagesLeased, MessagesReleased, MessagesSettled
from headrace.broker.ledger import Ledger
from headrace.broker.message_taker import give_back, take_messages
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer, encode_detached_batch
from headrace.broker.ports import Ports, Session
from headrace.broker.settlement_rules import all_of, divided, rest_until
from headrace.broker.streams import OpenedReading
from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.turns import Turns
from headrace.broker.waiters import PendingLease, PendingLeased
from headrace.engines.api import SESSION_BOUND_US, LeasedPartition, as_headrace_error, packed
from headrace.model.errors import HeadraceError, MessageGone, NotLeaseHolder
from headrace.model.job_requests import DELIVERIES_EXHAUSTED, JOB_REJECTED
from headrace.model.leasing import (
    Ack,
    Extend,
    Holding,
    Lease,
    Leased,
    LeasedPortion,
    LeaseStop,
    Refusal,
    Reject,
    Release,
    Settlement,
    cut_reason,
)
from headrace.model.offsets import gathered
from headrace.model.requests import Done
from headrace.model.subscription import Rejected

logger = logging.getLogger("headrace.broker")

_NEVER_US = 1 << 62
_UNREAD_US = 1_000_000
"""The delay before an unreadable partition is retried, if a consumer waits."""
_GRANTED_TOGETHER = 16
"""Maximum consumers served in one slice."""
_LOOKED_AFTER_TOGETHER = 32
"""Maximum subscriptions served in one tick."""
_LATE_TOGETHER = 200
"""Maximum waiting consumers answered with no message in one slice."""

SettlementFact = MessagesSettled | MessagesReleased | LeaseExtended
Undo = Callable[[], None]
"""Undoes a decision about messages, because the journal could not be written."""


class LeaseDispatcher:
    """Leases messages of all leased subscriptions, and settles them."""

    def __init__(
        self, registry: SubscriptionRegistry, dead_letters: DeadLetters, ledger: Ledger, ports: Ports, turns: Turns
    ) -> None:
        self._registry = registry
        self._dead_letters = dead_letters
        self._ledger = ledger
        self._ports = ports
        self._turns = turns
        self._number = ledger.state.session << 32
        """The last lease token given out."""
        self.trace: Callable[[Subscription, str, list[MessagesLeased]], None] | None = None
        """Logs leased messages, if any are to be: the subscription, the client and the leases."""
        self._now_us = 0
        self._expiry = LeaseExpiry(registry, dead_letters, ledger, self.serve_soon)
        self._deadlines: Deadlines[int] = Deadlines()
        """When each subscription is to be served next, by id."""
        self._planned: dict[int, Subscription] = {}
        self._waited_at: dict[Session, WeakSet[Subscription]] = {}
        """The subscriptions at which a session has waited."""
        for subscription in registry:
            self._plan(subscription, 0)
        registry.ready.connect(self._serve)
        registry.overdue.connect(self._expiry.end_some)
        registry.prepared.connect(self.serve_soon)

    @property
    def next_tick_us(self) -> int | None:
        """When the next tick is due; None when nothing is planned."""
        return self._deadlines.next_us()

    # Leasing.

    def lease(self, session: Session, request: Lease, now_us: int) -> Leased | PendingLeased:
        """Lease messages, now or when there are some."""
        check_lease(request)
        subscription = self._registry.get_or_create(request, now_us)
        subscription.use(now_us)
        self._registry.catch_up(subscription, now_us)
        self._expiry.end_some(subscription, now_us)
        pending_lease = PendingLease(session, request, now_us + request.wait_ms * 1000, PendingAnswer())
        over = subscription.schedule.has_expired(now_us)
        free = not over and not _may_be_served(subscription) and subscription.active is None
        if free and self._grant(subscription, pending_lease, now_us):
            return pending_lease.pending_answer
        behind = self._is_behind(subscription, now_us, wanted=True)
        served_soon = subscription.preparing or subscription.goes_on
        if not request.wait_ms and not behind and not served_soon:
            return Leased([])
        subscription.pending_leases.add(pending_lease)
        self._waited_at.setdefault(session, WeakSet()).add(subscription)
        if behind:
            self.serve_soon(subscription)
        self._plan(subscription, min(pending_lease.deadline_us, self._due_us(subscription, now_us)))
        return pending_lease.pending_answer

    def stop(self, session: Session, request: LeaseStop) -> Done:
        """End a session's waiting lease requests with no message; leases granted before are answered first."""
        subscription = self._registry.get(request.topic, request.subscription)
        self._ledger.flush()
        for pending_lease in subscription.pending_leases.of(session):
            subscription.pending_leases.remove(pending_lease)
            pending_lease.pending_answer.resolve(Leased([]))
        return Done()

    def disconnect(self, session: Session) -> None:
        """Lease nothing more to a session whose connection is gone."""
        for subscription in self._waited_at.pop(session, ()):
            for pending_lease in subscription.pending_leases.of(session):
                subscription.pending_leases.remove(pending_lease)

    def wake(self, session: Session) -> None:
        """Serve a session's waiting requests again, as its tenant is no longer beyond its rate."""
        for subscription in self._waited_at.get(session, ()):
            if subscription.pending_leases.of(session):
                self.serve_soon(subscription)

    def waiting(self) -> Iterator[OpenedReading]:
        """All requests that wait for messages."""
        for session, subscriptions in self._waited_at.items():
            for subscription in subscriptions:
                for pending_lease in subscription.pending_leases.of(session):
                    yield session, pending_lease.request, partial(_refuse, subscription, pending_lease)

    def tick(self, now_us: int) -> None:
        """Serve the subscriptions that are due, some at a time; the others follow in the next tick."""
        if now_us < self._now_us:  # the clock was set back
            for subscription in self._registry:
                self._plan(subscription, now_us)
        self._now_us = now_us
        for number in self._deadlines.pop_due(now_us, _LOOKED_AFTER_TOGETHER):
            self._attend(self._planned.pop(number), now_us)

    def drain(self) -> None:
        """Lease nothing more, and answer all waiting consumers with no message."""
        for subscription in self._registry:
            for pending_lease in subscription.pending_leases.clear():
                pending_lease.pending_answer.resolve(Leased([]))

    def _serve(self, subscription: Subscription, now_us: int) -> None:
        """Lease messages to waiting consumers in the order of their requests, as far as there are messages."""
        tried_ms, left = -1, _GRANTED_TOGETHER
        self._expiry.end_some(subscription, now_us)
        if subscription.schedule.has_expired(now_us):
            return  # expired messages come first; serving continues when they are done
        pending_leases = subscription.pending_leases
        while (pending_lease := pending_leases.first(tried_ms, subscription.active)) is not None:
            if not left:
                self.serve_soon(subscription)
                break
            try:
                if not self._grant(subscription, pending_lease, now_us):
                    tried_ms = pending_lease.request.ahead_ms
                    continue
            except (HeadraceError, OSError) as error:
                pending_leases.remove(pending_lease)
                pending_lease.pending_answer.resolve(
                    error if isinstance(error, HeadraceError) else as_headrace_error(error)
                )
            else:
                pending_leases.remove(pending_lease)
            left -= 1
        self._plan(subscription, self._due_us(subscription, now_us))

    def _grant(self, subscription: Subscription, pending_lease: PendingLease, now_us: int) -> bool:
        """Lease the messages that are ready to a consumer; returns whether there were any."""
        if subscription.settings.paused or subscription.preparing:
            return False
        request, meter = pending_lease.request, pending_lease.session.meter
        wanted = request
        if meter is not None:
            if meter.is_over:
                return False
            messages, size_bytes = meter.room(now_us)
            most = {"messages_max": min(request.messages_max, messages)}
            wanted = replace(request, **most, bytes_max=min(request.bytes_max, size_bytes))
        portions = take_messages(self._registry, subscription, wanted, now_us)
        if not portions:
            return False
        self._number += 1
        number, holder = self._number, pending_lease.session.client
        lease_us = request.lease_ms * 1000 or round(subscription.settings.lease_seconds * 1e6)
        facts: list[MessagesLeased] = []
        told: list[LeasedPortion] = []
        bodies: list[bytes | bytearray | memoryview] = []
        ends_us = _NEVER_US
        for partition, taken in portions:
            until_us = SESSION_BOUND_US if pending_lease.session_bound else taken.begins_us + lease_us
            ends_us = min(ends_us, until_us)
            offsets, following = gathered(taken.offsets)
            facts.append(MessagesLeased(subscription.id, partition, number, holder, until_us, packed(taken.offsets)))
            about = taken.deliveries, taken.versions, taken.states
            until_told_us = 0 if pending_lease.session_bound else until_us
            told.append(LeasedPortion(partition, number, until_told_us, offsets, *about, following))
            bodies += [batch.data for batch in taken.stored]
            if taken.columns.values:
                bodies.append(encode_detached_batch(taken.columns, now_us))
            subscription.delivered += len(taken.offsets)
        if self.trace is not None:
            self.trace(subscription, holder, facts)
        pending_lease.taken_bytes = sum(taken.size_bytes for _, taken in portions)
        answer = AnswerWithBody(Leased(told), bodies[0] if len(bodies) == 1 else b"".join(bodies))
        if meter is not None:  # now, and not when it is delivered: the next grant may come before
            meter.delivered(sum(len(taken.offsets) for _, taken in portions), len(answer.body), now_us)

        def written(error: HeadraceError | None) -> None:
            if error is None:
                pending_lease.pending_answer.resolve(answer)
                self._plan(subscription, ends_us)  # only now: an earlier tick would not have seen the lease
                return
            give_back(subscription, portions, now_us)
            self._undone(subscription, now_us)
            pending_lease.pending_answer.resolve(error)

        self._ledger.gather(now_us, facts, written)
        return True

    # Settlements.

    def ack(self, request: Ack, now_us: int, *, late: bool = True) -> Settlement | PendingAnswer[Settlement]:
        """Settle acknowledged messages."""
        subscription = self._registry.get(request.topic, request.subscription)
        facts: list[SettlementFact] = []
        refused: list[Refusal] = []
        undo: list[Undo] = []
        for index, holding, accepted in self.accepted(subscription, request.holdings, refused, now_us, late=late):
            facts.append(MessagesSettled(subscription.id, holding.partition, packed(accepted)))
            undo.append(partial(index.restore, index.reserve(accepted), now_us))
            subscription.acked += len(accepted) if late else 0
        for late_us in request.late_us:
            if late_us < 0:
                subscription.timing.early += 1
            else:
                subscription.timing.counts[bisect_left(subscription.timing.bounds_us, late_us)] += 1
        frees = subscription.settings.ordered_by_key  # the next messages of their keys are available now
        return self._settle(subscription, facts, Settlement(refused), now_us, undo, frees=frees)

    def extend(self, request: Extend, now_us: int) -> Settlement | PendingAnswer[Settlement]:
        """Extend leases."""
        check_lease_ms(request.lease_ms)
        subscription = self._registry.get(request.topic, request.subscription)
        until_us = now_us + (request.lease_ms * 1000 or round(subscription.settings.lease_seconds * 1e6))
        facts: list[SettlementFact] = []
        refused: list[Refusal] = []
        undo: list[Undo] = []
        for index, holding, accepted in self.accepted(subscription, request.holdings, refused, now_us):
            extended = index.extend(accepted, until_us)
            if not extended:
                continue  # they last as long as the connection
            undo.append(partial(index.shorten, extended))
            facts.append(LeaseExtended(subscription.id, holding.partition, holding.lease, until_us, packed(accepted)))
        if facts:
            self._plan(subscription, until_us)
        return self._settle(subscription, facts, Settlement(refused, until_us), now_us, undo, durably=False)

    def release(self, session: Session, request: Release, now_us: int) -> Settlement | PendingAnswer[Settlement]:
        """Make released messages available again, or send them to the dead letter topic after too many deliveries."""
        check_release(request)
        subscription = self._registry.get(request.topic, request.subscription)
        facts: list[SettlementFact] = []
        refused: list[Refusal] = []
        buried: list[PendingAnswer[Done]] = []
        undo: list[Undo] = []
        counted, reason = not request.undelivered, cut_reason(request.reason)
        for index, holding, named in self.accepted(subscription, request.holdings, refused, now_us):
            accepted = list(dict.fromkeys(named))  # a message named twice is released once
            back, out = divided(subscription.settings, index, accepted) if counted else (accepted, [])
            if out:
                why = reason or "given up after too many deliveries"
                buried.append(
                    self._dead_letters.bury(
                        subscription, holding.partition, out, why, now_us, code=DELIVERIES_EXHAUSTED, counted=False
                    )
                )
            if back:
                wanted = rest_until(subscription.settings, index, back, request, now_us)
                ready_us = index.ready_times(back, wanted)
                states = {offset: request.states[offset] for offset in back if offset in request.states}
                undo.append(partial(index.restore, index.reserve(back), now_us))
                about = (session.client, reason, states) if reason else ("", "", states)
                facts.append(
                    MessagesReleased(
                        subscription.id, holding.partition, packed(back), ready_us, counted, now_us, *about
                    )
                )
            subscription.released += len(accepted)
        return all_of(self._settle(subscription, facts, Settlement(refused), now_us, undo), buried)

    def reject(self, request: Reject, now_us: int) -> Settlement | PendingAnswer[Settlement]:
        """Send rejected messages to the dead letter topic."""
        subscription = self._registry.get(request.topic, request.subscription)
        refused: list[Refusal] = []
        reason = cut_reason(request.reason) or "rejected"
        if subscription.settings.rejected is Rejected.DROP:
            return self._drop(subscription, request, reason, now_us)
        buried = [
            self._dead_letters.bury(
                subscription,
                holding.partition,
                list(dict.fromkeys(named)),
                reason,
                now_us,
                code=JOB_REJECTED,
                counted=False,
            )
            for _, holding, named in self.accepted(subscription, request.holdings, refused, now_us)
        ]
        return all_of(Settlement(refused), buried)

    def _drop(
        self, subscription: Subscription, request: Reject, reason: str, now_us: int
    ) -> Settlement | PendingAnswer[Settlement]:
        """Settle rejected messages without a dead letter; those who wait for their results are told."""
        refused: list[Refusal] = []
        dropped: list[PendingAnswer[Any]] = []
        others: list[Holding] = []
        for _, holding, named in self.accepted(subscription, request.holdings, refused, now_us):
            offsets = list(dict.fromkeys(named))
            told = self._dead_letters.drop(subscription, holding.partition, offsets, JOB_REJECTED, reason, now_us)
            if told is None:
                others.append(Holding(holding.partition, holding.lease, offsets))
            else:
                dropped.append(told)
        if others:
            acked = self.ack(Ack(request.topic, others, request.subscription), now_us, late=False)
            dropped += [acked] if isinstance(acked, PendingAnswer) else []
        return all_of(Settlement(refused), dropped)

    def accepted(
        self,
        subscription: Subscription,
        holdings: list[Holding],
        refused: list[Refusal],
        now_us: int,
        *,
        late: bool = False,
    ) -> Iterator[tuple[LeasedPartition, Holding, Sequence[int]]]:
        """Yield the messages that the lease really holds; adds the others to `refused`.

        Each holding is checked after the ones before it were settled, so that no message is settled twice.
        """
        check_holdings(holdings)
        subscription.use(now_us)
        for holding in holdings:
            index, offsets = subscription.indexes.get(holding.partition), holding.all_offsets
            if index is None:
                code = NotLeaseHolder.code if subscription.preparing else MessageGone.code
                refused += [Refusal(holding.partition, offset, code) for offset in offsets]
                continue
            accepted, wrong = index.checked(holding.lease, offsets, now_us, late=late)
            refused += [Refusal(holding.partition, offset, code) for offset, code in wrong]
            if accepted:
                yield index, holding, accepted

    def _settle(
        self,
        subscription: Subscription,
        facts: Sequence[SettlementFact],
        answer: Settlement,
        now_us: int,
        undo: list[Undo],
        *,
        durably: bool = True,
        frees: bool = True,
    ) -> Settlement | PendingAnswer[Settlement]:
        """Write facts to the journal, and answer when they are durable."""
        if not facts:
            return answer
        pending_answer: PendingAnswer[Settlement] = PendingAnswer(is_committed=durably)

        def written(error: HeadraceError | None) -> None:
            if error is not None:
                for take_back in reversed(undo):
                    take_back()
                self._undone(subscription, now_us)
                pending_answer.resolve(error)
                return
            if (frees and subscription.pending_leases) or subscription.schedule.is_over(now_us):
                self._turns.call_soon(partial(self._serve, subscription))
            if durably:
                self._ledger.durably(answer).then(pending_answer.resolve)
            else:
                pending_answer.resolve(answer)

        self._ledger.gather(now_us, facts, written)
        return pending_answer

    def _undone(self, subscription: Subscription, now_us: int) -> None:
        """Plan the next serving after a failed journal write: leases may have ended and messages be ready meanwhile."""
        self._plan(subscription, self._due_us(subscription, now_us))
        if subscription.pending_leases:
            self._turns.call_soon(partial(self._serve, subscription))

    # Timed work.

    def _serve_due(self, subscription: Subscription, now_us: int, *, again: bool = True) -> None:
        """End leases and messages that are over, serve consumers, and answer those that have waited long enough."""
        self._registry.catch_up(subscription, now_us, again=again)
        self._serve(subscription, now_us)
        if subscription.preparing:
            pass  # waiting consumers are served when that is done
        elif self._is_behind(subscription, now_us, wanted=_may_be_served(subscription)):
            self.serve_soon(subscription)  # consumers whose wait ends may still get messages
        else:
            late = subscription.pending_leases.take_late(now_us, _LATE_TOGETHER)
            for pending_lease in late:
                pending_lease.pending_answer.resolve(Leased([]))
            if len(late) == _LATE_TOGETHER:
                self.serve_soon(subscription)
        self._plan(subscription, self._due_us(subscription, now_us))

    def _is_behind(self, subscription: Subscription, now_us: int, *, wanted: bool) -> bool:
        """Whether expirations, or due messages that are `wanted`, are left from an earlier slice."""
        schedule = subscription.schedule
        wanted = wanted and not subscription.settings.paused
        return schedule.is_over(now_us) or (wanted and schedule.is_due(now_us))

    def serve_soon(self, subscription: Subscription) -> None:
        """Serve a subscription's consumers and go on with its expirations, at the end of the loop turn."""
        if not subscription.goes_on:
            subscription.goes_on = True
            self._turns.call_at_turn_end(partial(self._go_on, subscription))

    def _go_on(self, subscription: Subscription, now_us: int) -> None:
        subscription.goes_on = False
        self._attend(subscription, now_us, again=False)

    def _attend(self, subscription: Subscription, now_us: int, *, again: bool = True) -> None:
        """Serve a subscription, if it still exists and works; one that fails is set aside."""
        if subscription.failure or self._registry.find(subscription.topic, subscription.name) is not subscription:
            return
        try:
            self._serve_due(subscription, now_us, again=again)
        except Exception as error:  # noqa: BLE001 logged; all other subscriptions continue
            self._registry.fail(subscription, error)

    def _due_us(self, subscription: Subscription, now_us: int) -> int:
        """When a subscription is to be served next."""
        pending_leases = subscription.pending_leases
        wanted = _may_be_served(subscription) and not subscription.settings.paused
        times = [
            pending_leases.deadline_us,
            subscription.schedule.next_us(wanted=wanted, ahead_us=pending_leases.ahead_us),
        ]
        if subscription.stale and pending_leases:
            times.append(now_us + _UNREAD_US)
        return min((time for time in times if time is not None), default=_NEVER_US)

    def _plan(self, subscription: Subscription, time_us: int) -> None:
        """Plan to serve a subscription at this time, unless it is planned earlier."""
        number = subscription.id
        if time_us >= _NEVER_US or time_us >= self._deadlines.get(number, _NEVER_US):
            return
        next_us = self._deadlines.next_us()
        self._planned[number] = subscription
        self._deadlines.set(number, time_us)
        if next_us is None or time_us < next_us:
            self._ports.wake_at(time_us)


def _may_be_served(subscription: Subscription) -> bool:
    """Whether a consumer waits whose tenant is not beyond its rate."""
    pending_leases = subscription.pending_leases
    return bool(pending_leases) and pending_leases.first(-1, subscription.active) is not None


def _refuse(subscription: Subscription, pending_lease: PendingLease, error: HeadraceError) -> None:
    """Answer a request with an error, if it still waits."""
    if subscription.pending_leases.discard(pending_lease):
        pending_lease.pending_answer.resolve(error)
