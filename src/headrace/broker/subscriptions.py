"""The registry of leased subscriptions: finds them, opens their partitions, and follows what is published."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from headrace.broker.active_partition import ActivePartition
from headrace.broker.facts import AnyFact
from headrace.broker.leased_facts import SubscriptionSet
from headrace.broker.ledger import Ledger
from headrace.broker.signal import Signal
from headrace.broker.slices import TimedSteps, run_at_once
from headrace.broker.subscription import Subscription
from headrace.broker.subscription_settings import check_dead_letters, right_settings, ttl_us
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.turns import Turns
from headrace.engines.api import LeasedPartition
from headrace.model.errors import (
    Closed,
    Fenced,
    HeadraceError,
    InvalidArgument,
    NotServing,
    SubscriptionFailed,
    SubscriptionNotFound,
    TopicNotFound,
)
from headrace.model.leasing import (
    Lease,
    SubscriptionCreate,
)
from headrace.model.requests import Done
from headrace.model.standing_lease import LeaseOpen
from headrace.model.subscription import SubscriptionSettings, checked_subscription, subscription_settings

logger = logging.getLogger("headrace.broker")

SLICE_WORK = 8
OPENING_WORK = 4
"""Units of work in a slice: reading a part of an open partition is one unit, opening a partition is several."""


VIEW_OFFSETS = 1000
"""Offsets of a view's partition that are filtered in one turn."""


class SubscriptionRegistry:
    """All leased subscriptions, by topic and name."""

    def __init__(self, topics: TopicRegistry, ledger: Ledger, turns: Turns, now_us: int) -> None:
        self._topics = topics
        self._ledger = ledger
        self._turns = turns
        self.making: Signal[Topic] = Signal()
        """Emitted before a topic gets a subscription; a listener refuses by raising."""
        self.ready: Signal[Subscription, int] = Signal()
        """A subscription may have messages for consumers that wait."""
        self.overdue: Signal[Subscription, int] = Signal()
        """The time of leases or messages may be over."""
        self.prepared: Signal[Subscription] = Signal()
        """A subscription that was opened or altered can be used."""
        self.ended: Signal[Subscription, HeadraceError] = Signal()
        """A subscription was deleted, failed or was reset: standing lease requests end with this error."""
        self.settings_changed: Signal[Subscription] = Signal()
        """A subscription was added, altered or removed."""
        self.structure_changed: Signal[Subscription, str] = Signal()
        """A subscription was `created`, `altered`, `reset` or `deleted`, or `failed`: what observers are told."""
        self.scanned: Signal[Subscription, int] = Signal()
        """A subscription has read messages that were published."""
        self._by_name: dict[tuple[int, str], Subscription] = {}
        self._by_topic: dict[int, list[Subscription]] = {}
        ledger.state.leased.broke.connect(self._broken)
        topics.changed.connect(self._topic_changed)
        topics.altered.connect(self._topic_altered)
        for fact in list(ledger.state.leased.subscriptions.values()):
            topic = topics.by_id.get(fact.topic_id)
            if topic is None:
                logger.error("leased subscription without topic ignored  name=%s topic_id=%s", fact.name, fact.topic_id)
            else:
                run_at_once(self.opening(self._add(fact, topic), now_us), now_us)

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(list(self._by_name.values()))

    def of_topic(self, topic: Topic) -> list[Subscription]:
        """The subscriptions of a topic."""
        return list(self._by_topic.get(topic.id, ()))

    def reading(self, topic: Topic) -> list[Subscription]:
        """The subscriptions of a topic and of the virtual topics that read from it."""
        return [one for each in self._topics.with_views(topic) for one in self.of_topic(each)]

    def source_of(self, subscription: Subscription) -> Topic:
        """The topic that stores a subscription's messages."""
        return self._topics.source_of(subscription.topic)

    def find(self, topic: Topic, name: str) -> Subscription | None:
        """The subscription of that name, if there is one."""
        return self._by_name.get((topic.id, name))

    def get(self, topic: str, name: str) -> Subscription:
        """The subscription of that name; one that failed is refused."""
        found_topic = self._topics.find(topic)
        found = self._by_name.get((found_topic.id, name)) if found_topic is not None else None
        if found is None:
            return self.known(topic, name)
        if found.topic.failure or found.failure:
            self._check(found)
        return found

    def _check(self, found: Subscription) -> None:
        """Refuse a subscription that failed, or whose topic did."""
        self._topics.check(found.topic)
        found.check()

    def known(self, topic: str, name: str) -> Subscription:
        """The subscription of that name, whether it could be opened or not."""
        found = self.find(self._topics.known(topic), name)
        if found is None:
            raise SubscriptionNotFound(f"the topic {topic} has no leased subscription {name}")
        return found

    def get_or_create(self, request: Lease | LeaseOpen, now_us: int) -> Subscription:
        """The subscription of a lease request, created if the request says so."""
        topic = self._topics.find(request.topic)
        found = self._by_name.get((topic.id, request.subscription)) if topic is not None else None
        if found is not None:
            if found.topic.failure or found.failure:
                self._check(found)
            return found
        if not request.create:
            return self.get(request.topic, request.subscription)
        topic = self.topic_of(request, now_us)
        return self.make(topic, request.subscription, SubscriptionSettings(), {}, now_us)

    def topic_of(self, request: Lease | LeaseOpen | SubscriptionCreate, now_us: int) -> Topic:
        """The topic of a subscription to create; it is created as well only if the request says so."""
        topics = self._topics
        return topics.get_or_create(request.topic, now_us) if request.create_topic else topics.get(request.topic)

    def make(
        self, topic: Topic, name: str, settings: SubscriptionSettings, starts: dict[int, int], now_us: int
    ) -> Subscription:
        """Create a subscription; its partitions may not be open yet."""
        made = self.record(topic, name, settings, starts, now_us)
        self._open(made, now_us)
        return made

    def record(
        self,
        topic: Topic,
        name: str,
        settings: SubscriptionSettings,
        starts: dict[int, int],
        now_us: int,
        companion: Callable[[int], AnyFact] | None = None,
    ) -> Subscription:
        """Write a new subscription to the journal; it is not open yet.

        `companion` gets its id, and returns a fact that is written together with it.
        """
        check_dead_letters(self._topics, topic, settings)
        self.making(topic)
        number = self._ledger.state.leased.subscription_id + 1
        fact = SubscriptionSet(number, topic.id, checked_subscription(name), now_us, settings.as_dict(), starts)
        self._ledger.record(now_us, fact, *(() if companion is None else (companion(number),)))
        made = self._add(fact, topic)
        self.structure_changed(made, "created")
        return made

    def prepare(self, subscription: Subscription, steps: TimedSteps) -> TimedSteps:
        """Open or alter a subscription; no message is leased meanwhile, and waiting consumers are served afterwards."""
        subscription.preparing = True
        try:
            yield from steps
        except Exception:
            subscription.preparing = False
            self.prepared(subscription)
            raise
        subscription.preparing = False
        self.prepared(subscription)

    def _topic_changed(self, topic: Topic, now_us: int) -> None:
        """Follow a topic that was deleted, or got more partitions."""
        for subscription in self.of_topic(topic):
            if subscription.topic.id not in self._topics.by_id:
                self.remove(subscription, TopicNotFound(f"the topic {subscription.topic} was deleted"))
            elif len(subscription.indexes) < subscription.topic.settings.partitions:
                self._open(subscription, now_us)

    def _topic_altered(self, topic: Topic, now_us: int) -> None:
        """Apply a topic's new settings to its open subscriptions."""
        for subscription in self.of_topic(topic):
            for number, index in subscription.indexes.items():
                index.read_contents_from(self._topics.active(topic, number).delivered)
            self._turns.in_slices(self._expiring_after(subscription, ttl_us(topic), now_us))
            self._open(subscription, now_us)  # of a topic that could not be opened
            self._turns.call_soon(partial(self.ready, subscription))

    def _expiring_after(self, subscription: Subscription, lives_us: int | None, now_us: int) -> TimedSteps:
        """Find the messages' expiry anew, in slices."""
        try:
            for number, index in list(subscription.indexes.items()):
                for _ in index.expire_after(lives_us):
                    now_us = yield
                    if subscription.indexes.get(number) is not index:
                        return Done()
        except Exception as error:  # noqa: BLE001 it is told
            self.fail(subscription, error)
        self.ready(subscription, now_us)
        return Done()

    def refresh(self, subscription: Subscription, now_us: int) -> None:
        """Bring a subscription up to date: read what was published, and end leases and messages that are over."""
        self.catch_up(subscription, now_us)
        for number in subscription.indexes:
            self.forget_removed(subscription, number)
        self.overdue(subscription, now_us)

    def forget_removed(self, subscription: Subscription, partition: int) -> None:
        """Forget the messages of a partition that retention has removed."""
        first_offset = subscription.topic.active_partitions[partition].partition.first_offset
        subscription.indexes[partition].forget_before(first_offset)

    def catch_up(self, subscription: Subscription, now_us: int, *, again: bool = True) -> None:
        """Read what was published since; with `again` also try to open partitions that could not be opened."""
        if again and len(subscription.indexes) < subscription.topic.settings.partitions:
            self._open(subscription, now_us)
        stale = list(subscription.stale)
        for number in stale:
            try:
                active, index = self._topics.active(subscription.topic, number), subscription.indexes[number]
                end_offset = active.end_offset
                if subscription.topic.is_view:  # whose messages are filtered now
                    end_offset = min(end_offset, index.end + VIEW_OFFSETS)
                index.catch_up(end_offset, now_us)
            except (HeadraceError, OSError) as error:
                logger.warning(
                    "published messages not read; trying again  subscription=%s partition=%s reason=%s",
                    subscription,
                    number,
                    error,
                )
                continue  # it is tried again with the next request, or tick
            if index.end < active.end_offset:
                self._scan_later(subscription)
                continue
            subscription.stale.discard(number)
            active.listen(subscription.listeners[number])
        if stale:
            self.scanned(subscription, now_us)

    def serve_soon(self, subscription: Subscription) -> None:
        """Serve waiting consumers soon: messages may be available."""
        if subscription.pending_leases:
            self._turns.call_soon(partial(self.ready, subscription))

    def consumed_offset(self, topic: Topic, partition: int) -> int | None:
        """The offset before which all leased subscriptions have settled everything; None when the topic has none."""
        leased = self._ledger.state.leased
        floors = [leased.partition(one.id, partition).floor for one in self.reading(topic)]
        return min(floors, default=None)

    def settled_rules(self, topic: Topic, partition: int) -> list[Callable[[int], bool]]:
        """For each leased subscription a function that tells which messages are settled; none unless most are."""
        found = [one.indexes.get(partition) for one in self.reading(topic)]
        indexes = [index for index in found if index is not None]
        active = topic.active_partitions[partition]
        stored = active.partition.next_offset - active.partition.first_offset
        pending = sum(index.unsettled_count for index in indexes)
        if not indexes or len(indexes) < len(found) or 2 * pending > stored:
            return []
        return [index.settled_rule() for index in indexes]

    def _add(self, fact: SubscriptionSet, topic: Topic) -> Subscription:
        subscription = Subscription(fact, topic, SubscriptionSettings())
        self._by_name[topic.id, fact.name] = subscription
        self._by_topic.setdefault(topic.id, []).append(subscription)
        try:
            subscription.settings = subscription_settings(fact.settings)
        except InvalidArgument as error:
            subscription.settings = right_settings(fact.settings)
            self.fail(subscription, error)
        subscription.schedule.order_by(subscription.settings.discipline)
        if fact.id in self._ledger.state.leased.broken:
            self._broken(fact.id)
        self.settings_changed(subscription)
        return subscription

    def remove(self, subscription: Subscription, why: HeadraceError) -> None:
        """Forget a subscription that was deleted, and tell its consumers why."""
        del self._by_name[subscription.topic.id, subscription.name]
        self._by_topic[subscription.topic.id].remove(subscription)
        if not self._by_topic[subscription.topic.id]:
            del self._by_topic[subscription.topic.id]
        self.detach(subscription)
        self._refuse(subscription, why)
        self.settings_changed(subscription)
        self.structure_changed(subscription, "deleted")

    def detach(self, subscription: Subscription) -> None:
        """Close all partitions."""
        subscription.closings += 1
        for number, listener in subscription.listeners.items():
            if number in subscription.topic.active_partitions:
                subscription.topic.active_partitions[number].forget(listener)
        subscription.listeners.clear()
        subscription.schedule.changed.update(subscription.indexes)
        subscription.indexes.clear()
        subscription.stale.clear()

    def _refuse(self, subscription: Subscription, error: HeadraceError) -> None:
        """Fail all waiting and standing lease requests with an error."""
        self.ended(subscription, error)
        for pending_lease in subscription.pending_leases.clear():
            pending_lease.pending_answer.resolve(error)

    def fail(self, subscription: Subscription, error: Exception) -> None:
        """Set a subscription aside until it is reset; all others go on."""
        if isinstance(error, Fenced | NotServing):  # the next owner of the shard opens it anew
            logger.debug("leased subscription not served  subscription=%s reason=%s", subscription, error)
        else:
            text = "leased subscription failed; reset or delete it  subscription=%s"
            logger.error(text, subscription, exc_info=error)
        self._stop(subscription, f"{type(error).__name__}: {error}")

    def _broken(self, number: int) -> None:
        """Set a subscription aside whose facts cannot be applied."""
        for subscription in self:
            if subscription.id == number:
                self._stop(subscription, self._ledger.state.leased.broken[number])

    def _stop(self, subscription: Subscription, why: str) -> None:
        if not subscription.failure:
            subscription.failure = why
            self.structure_changed(subscription, "failed")
        self.detach(subscription)
        try:
            subscription.check()
        except SubscriptionFailed as error:
            self._refuse(subscription, error)

    def _open(self, subscription: Subscription, now_us: int) -> None:
        """Open the partitions that are not open yet, in slices."""
        is_there = self.find(subscription.topic, subscription.name) is subscription
        if is_there and not subscription.preparing and not subscription.failure:
            self._turns.in_slices(self.prepare(subscription, self.opening(subscription, now_us)))

    def opening(self, subscription: Subscription, now_us: int) -> TimedSteps:
        """Open the partitions that are not open yet; stops when the subscription is closed or deleted meanwhile."""
        topic, closings, work = subscription.topic, subscription.closings, 0
        for number in range(topic.settings.partitions):
            if number in subscription.indexes or subscription.failure:
                continue
            work += 1 if number in topic.active_partitions else OPENING_WORK
            try:
                active = self._topics.active(topic, number)
            except (HeadraceError, OSError) as error:
                logger.warning(
                    "partition not opened for leasing; trying again  subscription=%s partition=%s reason=%s",
                    subscription,
                    number,
                    error,
                )
                continue
            try:
                index, steps = self._opened(subscription, number, active, now_us)
                for _ in steps:
                    work += 1
                    if work >= SLICE_WORK:
                        work = 0
                        now_us = yield
                        if subscription.closings != closings:
                            return
                if not topic.is_view:
                    index.catch_up(active.end_offset, now_us)
            except Exception as error:  # noqa: BLE001 it is told
                self.fail(subscription, error)
                return
            subscription.indexes[number] = index
            index.watch(partial(subscription.schedule.changed.add, number))
            subscription.listeners[number] = partial(self._more, subscription, number)
            active.listen(subscription.listeners[number])
            if topic.is_view:
                self._more(subscription, number)  # in turns, what was published while the partition was opened

    def _opened(
        self, subscription: Subscription, number: int, active: ActivePartition, now_us: int
    ) -> tuple[LeasedPartition, Iterator[None]]:
        """A partition's index, and the steps in which it reads the log; a last step marks the end."""
        state = self._ledger.state.leased
        settings, lives_us = subscription.settings, ttl_us(subscription.topic)
        index = state.open_partition(
            subscription.id, number, active.partition, settings, lives_us, subscription.address, active.delivered
        )
        return index, chain(index.load(active.end_offset, now_us), [None])

    def _more(self, subscription: Subscription, number: int) -> None:
        """Read a partition soon in which something was published; a request may be under way now."""
        if not subscription.takes_in:
            subscription.takes_in = True
            self._turns.call_soon(partial(self._scan_published, subscription))
        subscription.stale.add(number)

    def _scan_later(self, subscription: Subscription) -> None:
        """Read more of what was published in the next turn."""
        if not subscription.takes_in:
            subscription.takes_in = True
            self._turns.call_at_turn_end(partial(self._scan_published, subscription))

    def _scan_published(self, subscription: Subscription, now_us: int) -> None:
        subscription.takes_in = False
        if self._by_name.get((subscription.topic.id, subscription.name)) is subscription:
            self.catch_up(subscription, now_us)
            self.ready(subscription, now_us)

    def close(self) -> None:
        """Fail all waiting lease requests with an error."""
        for subscription in self:
            self._refuse(subscription, Closed("the broker is closing"))
