"""Requests about leased subscriptions: create, alter, reset, delete, describe and list them."""

import logging
from collections.abc import Generator
from itertools import chain
from typing import Any

from headrace.broker.dead_letters import DeadLetters
from headrace.broker.facts import AnyFact
from headrace.broker.group_coordinator import offset_at
from headrace.broker.leased_facts import SubscriptionDeleted, SubscriptionSet
from headrace.broker.leased_facts import SubscriptionStateReset as ResetFact
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.slices import TimedSteps
from headrace.broker.subscription import Subscription
from headrace.broker.subscription_counts import counted
from headrace.broker.subscription_settings import check_dead_letters
from headrace.broker.subscriptions import OPENING_WORK, SLICE_WORK, SubscriptionRegistry
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.turns import Turns
from headrace.model.errors import (
    InvalidArgument,
    SubscriptionExists,
    SubscriptionFailed,
    SubscriptionNotFound,
    SubscriptionReopened,
    TopicNotFound,
)
from headrace.model.leasing import (
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionInfo,
    SubscriptionList,
    SubscriptionReset,
    Subscriptions,
)
from headrace.model.request import Resource
from headrace.model.requests import Done
from headrace.model.subscription import SubscriptionSettings, checked_subscription, subscription_settings
from headrace.model.webhook_requests import WebhookSet

logger = logging.getLogger("headrace.broker")

_STARTS_TOGETHER = 2
_LISTED_TOGETHER = 16


class SubscriptionAdmin:
    """Carries out requests about leased subscriptions, in slices."""

    def __init__(
        self,
        topics: TopicRegistry,
        registry: SubscriptionRegistry,
        dead_letters: DeadLetters,
        ledger: Ledger,
        turns: Turns,
    ) -> None:
        self._topics = topics
        self._registry = registry
        self._dead_letters = dead_letters
        self._ledger = ledger
        self._turns = turns

    def create(self, request: SubscriptionCreate, now_us: int) -> PendingAnswer[Any]:
        """Create a subscription."""
        return self._turns.in_slices(self._create(request, now_us))

    def _create(self, request: SubscriptionCreate, now_us: int) -> TimedSteps:
        topic = self._registry.topic_of(request, now_us)
        name = checked_subscription(request.subscription)
        settings, starts = subscription_settings(request.settings), {}
        if self._registry.find(topic, name) is None:
            starts = yield from self.starts(topic, request)
            if self._topics.by_id.get(topic.id) is not topic:
                raise TopicNotFound(
                    f"the topic {topic} was deleted while the subscription was created; create the topic again"
                )
        found = self._registry.find(topic, name)
        if found is not None and not request.exist_ok:
            raise SubscriptionExists(f"the topic {topic} already has a leased subscription {request.subscription}")
        if found is None:
            found = self._registry.record(topic, name, settings, starts, now_us)
            yield from self._registry.prepare(found, self._registry.opening(found, now_us))
        return (yield from self._answer(found, now_us))

    def alter(self, request: SubscriptionAlter, now_us: int) -> PendingAnswer[Any]:
        """Change settings."""
        return self._turns.in_slices(self._alter(request, now_us))

    def _alter(self, request: SubscriptionAlter, now_us: int) -> TimedSteps:
        found = yield from self._idle(request.topic, request.subscription)
        yield from self.apply_settings(found, subscription_settings(request.settings, found.settings), now_us)
        return (yield from self._answer(found, now_us))

    def apply_settings(
        self, found: Subscription, settings: SubscriptionSettings, now_us: int, *companions: AnyFact
    ) -> TimedSteps:
        """Give a subscription other settings; facts that belong to the change are written together with it."""
        check_dead_letters(self._topics, found.topic, settings)
        before = found.fact
        fact = SubscriptionSet(
            before.id, before.topic_id, before.name, before.created_us, settings.as_dict(), before.starts
        )
        self._ledger.record(now_us, fact, *companions)
        found.fact, found.settings = fact, settings
        self._registry.settings_changed(found)
        self._registry.structure_changed(found, "altered")
        yield from self._registry.prepare(found, self._altering(found, settings, now_us))

    def _altering(self, subscription: Subscription, settings: SubscriptionSettings, now_us: int) -> TimedSteps:
        closings, work = subscription.closings, 0
        for index in list(subscription.indexes.values()):
            for weight in chain((OPENING_WORK for _ in index.alter(settings, now_us)), [1]):
                work += weight
                if work >= SLICE_WORK:
                    work = 0
                    now_us = yield
                if subscription.closings != closings:
                    return
        subscription.schedule.order_by(settings.discipline)

    def reset(self, request: SubscriptionReset, now_us: int) -> PendingAnswer[Any]:
        """Reset a subscription: keeps only which messages are settled, or nothing if a start is given."""
        return self._turns.in_slices(self._reset(request, now_us))

    def _reset(self, request: SubscriptionReset, now_us: int) -> TimedSteps:
        found = yield from self._idle(request.topic, request.subscription)
        yield from self._registry.prepare(found, self._resetting(found, request, now_us))
        found.check()
        return (yield from self._answer(found, now_us))

    def _resetting(self, found: Subscription, request: SubscriptionReset, now_us: int) -> TimedSteps:
        before, starts, settled = found.fact, found.fact.starts, []
        if request.start:
            starts = yield from self.starts(found.topic, request)
        else:
            try:
                settled = yield from self._ledger.state.leased.settled(found.id, self._ledger.flush)
            except Exception as error:
                logger.exception("settled messages unreadable  subscription=%s", found)
                raise SubscriptionFailed(
                    f"what {found} has settled cannot be read: {error}; reset it with a start, such as earliest"
                ) from error
        if self._registry.find(found.topic, found.name) is not found:
            raise SubscriptionNotFound(f"the subscription {found} was deleted while it was reset")
        settings = found.settings.as_dict()
        fact = SubscriptionSet(before.id, before.topic_id, before.name, before.created_us, settings, starts)
        self._ledger.record(now_us, fact, ResetFact(found.id), *settled)  # type: ignore[arg-type]
        found.fact, found.failure = fact, ""
        self._registry.detach(found)
        why = SubscriptionReopened(f"the leased subscription {found} was reset: its leases are over")
        self._registry.ended(found, why)
        self._registry.structure_changed(found, "reset")
        yield from self._registry.opening(found, now_us)

    def _idle(self, topic: str, name: str) -> Generator[None, None, Subscription]:
        """A subscription that is not being opened or altered."""
        while (found := self._registry.known(topic, name)).preparing:
            yield
        return found

    def _answer(self, subscription: Subscription, now_us: int) -> Generator[None, int, PendingAnswer[SubscriptionInfo]]:
        """Describe a subscription once the journal is synced."""
        return self._ledger.durably((yield from self.info(subscription, now_us)))

    def delete(self, request: SubscriptionDelete, now_us: int) -> PendingAnswer[Done]:
        """Delete a subscription."""
        found = self._registry.known(request.topic, request.subscription)
        self._ledger.record(now_us, SubscriptionDeleted(found.id))
        self._registry.remove(found, SubscriptionNotFound(f"the subscription {found} was deleted"))
        return self._ledger.durably(Done())

    def describe(self, request: SubscriptionDescribe, now_us: int) -> PendingAnswer[Any]:
        """Describe a subscription."""
        return self._turns.in_slices(self._describe(request, now_us))

    def _describe(self, request: SubscriptionDescribe, now_us: int) -> TimedSteps:
        found = yield from self._idle(request.topic, request.subscription)
        return (yield from self.info(found, now_us))

    def listed(self, session: Session, request: SubscriptionList, now_us: int) -> PendingAnswer[Any]:
        """List the subscriptions of a topic, or of all topics of the session's tenant, by name.

        A topic that the session may not see looks like one without subscriptions, also if it does not exist.
        """
        if request.topic:
            is_seen = session.access is None or session.access.describes(Resource.TOPIC.value, request.topic)
            topic = self._topics.known(request.topic) if is_seen else self._topics.find(request.topic)
            chosen = [] if topic is None else self._registry.of_topic(topic)
        else:
            chosen = [one for one in self._registry if one.topic.name.tenant == session.tenant]
        return self._turns.in_slices(self._listed(sorted(chosen, key=str), now_us))

    def _listed(self, chosen: list[Subscription], now_us: int) -> TimedSteps:
        infos: list[SubscriptionInfo] = []
        for place, one in enumerate(chosen):
            if place % _LISTED_TOGETHER == _LISTED_TOGETHER - 1:
                now_us = yield
            if self._registry.find(one.topic, one.name) is one:
                infos.append((yield from self.info(one, now_us)))
        return Subscriptions(infos)

    def info(self, subscription: Subscription, now_us: int) -> Generator[None, int, SubscriptionInfo]:
        """Describe a subscription, in slices."""
        if self._registry.find(subscription.topic, subscription.name) is not subscription:
            raise SubscriptionNotFound(f"the subscription {subscription} was deleted")
        self._registry.refresh(subscription, now_us)
        while subscription.schedule.is_over(now_us):
            now_us = yield
            self._registry.overdue(subscription, now_us)
        counts = yield from counted(list(subscription.indexes.values()), now_us)
        dead = yield from self._dead_letters.count(subscription, now_us)
        return SubscriptionInfo(
            topic=str(subscription.topic),
            subscription=subscription.name,
            created_us=subscription.fact.created_us,
            settings=subscription.settings.as_dict(),
            waiting=counts.waiting,
            ready=counts.ready,
            leased=counts.leased,
            dead=dead,
            ready_since_us=counts.ready_since_us,
            next_ready_us=counts.next_ready_us,
            delivered=subscription.delivered,
            acked=subscription.acked,
            released=subscription.released,
            expired_leases=subscription.expired_leases,
            timing=subscription.timing,
            dropped=subscription.dropped,
            error=subscription.failure or subscription.topic.failure,
        )

    def starts(
        self, topic: Topic, request: SubscriptionCreate | SubscriptionReset | WebhookSet
    ) -> Generator[None, None, dict[int, int]]:
        """Where a subscription begins in each partition; empty if it has all messages."""
        if request.start == "earliest":
            return {}
        if request.start not in ("latest", "time", "offset"):
            raise InvalidArgument(f"start must be earliest, latest, time or offset, not {request.start}")
        starts = {}
        self._topics.check(topic)
        for number in range(topic.settings.partitions):
            active = self._topics.active(topic, number)
            if request.start == "offset":
                active.check_offset(request.start_offset)
                starts[active.number] = request.start_offset
            else:
                starts[active.number] = offset_at(active, request.start, request.start_us)
            if number % _STARTS_TOGETHER == _STARTS_TOGETHER - 1:
                yield
        return starts
