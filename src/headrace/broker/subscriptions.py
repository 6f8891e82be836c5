"""The registry of leased subscriptions: made, changed, listed and deleted while the broker runs."""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from headrace.broker.lane import Lane
from headrace.broker.later import Later
from headrace.broker.leased_facts import SubscriptionGone, SubscriptionSet
from headrace.broker.leased_facts import SubscriptionReset as ResetFact
from headrace.broker.ledger import Ledger
from headrace.broker.membership import offset_at
from headrace.broker.partition_schedule import PartitionSchedule
from headrace.broker.ports import Ports
from headrace.broker.topics import Topic, Topics
from headrace.broker.waiters import Waiters
from headrace.engines.api import LeasedIndex, outlook
from headrace.model.errors import (
    Closed,
    HeadraceError,
    InvalidArgument,
    SubscriptionExists,
    SubscriptionFailed,
    SubscriptionNotFound,
)
from headrace.model.leasing import (
    Lease,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionInfo,
    SubscriptionList,
    SubscriptionReset,
    Subscriptions,
    Timing,
)
from headrace.model.requests import Done, Words
from headrace.model.subscription import SubscriptionSettings, checked_subscription, subscription_settings
from headrace.model.topic import DEFAULT_TENANT, Validity, parse_topic

logger = logging.getLogger("headrace.broker")

TIMING_BOUNDS_US = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 1_000_000, 10_000_000]


class Subscription:
    """A leased subscription at work."""

    def __init__(self, fact: SubscriptionSet, topic: Topic, settings: SubscriptionSettings) -> None:
        self.id = fact.id
        self.topic = topic
        self.name = fact.name
        self.settings = settings
        self.fact = fact
        self.indexes: dict[int, LeasedIndex] = {}
        """By partition; a partition that could not be opened is missing."""
        self.schedule = PartitionSchedule(self.indexes)
        self.wants = Waiters()
        self.next_us = 0
        """When there is something to do at the latest."""
        self.turn = 0
        """Which partition is asked first, where none comes before the others by itself."""
        self.delivered = self.acked = self.released = self.expired_leases = 0
        self.timing = Timing(TIMING_BOUNDS_US, [0] * (len(TIMING_BOUNDS_US) + 1))
        self.listeners: dict[int, Callable[[], None]] = {}
        self.stale: set[int] = set()
        """Partitions in which more was published, or that could not be read when it was."""
        self.takes_in = False
        """Whether what was published is going to be taken in."""
        self.goes_on = False
        """Whether more was to be done at once than can be, and is going to be done."""
        self.failure = ""
        """Why it could not be opened; empty when it is at work."""

    def __str__(self) -> str:
        return f"{self.topic}/{self.name}"

    def check(self) -> None:
        """Refuse to do anything with one that could not be opened."""
        if self.failure:
            raise SubscriptionFailed(
                f"the leased subscription {self} could not be opened: {self.failure}; reset it (headrace queue reset), "
                "which keeps what is settled, or delete it; the broker's log has the details"
            )

    def is_settled(self, partition: int, offset: int) -> bool:
        """Whether it is done with a message, as far as it knows of it."""
        index = self.indexes.get(partition)
        return index is not None and not outlook.status(index.pending, offset)


class SubscriptionRegistry:
    """All leased subscriptions. `served` is called when one may have something to hand out."""

    def __init__(
        self,
        topics: Topics,
        ledger: Ledger,
        ports: Ports,
        dead_count: Callable[[Subscription], int],
        now_us: int,
    ) -> None:
        self._topics = topics
        self._ledger = ledger
        self._ports = ports
        self._dead_count = dead_count
        self.now_us = now_us
        """The time when the broker was last asked something."""
        self.served: Callable[[Subscription], None] = lambda _: None
        self.overdue: Callable[[Subscription, int], None] = lambda _, __: None
        """Called when leases or messages' times may be over."""
        self._by_name: dict[tuple[int, str], Subscription] = {}
        ledger.state.leased.on_broken = self._broken
        for fact in list(ledger.state.leased.subscriptions.values()):
            topic = topics.by_id.get(fact.topic_id)
            if topic is None:
                logger.error("leased subscription without topic ignored  name=%s topic_id=%s", fact.name, fact.topic_id)
            else:
                self._add(fact, topic)

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(list(self._by_name.values()))

    def of_topic(self, topic: Topic) -> list[Subscription]:
        """The subscriptions of a topic."""
        return [one for one in self._by_name.values() if one.topic is topic]

    def find(self, topic: Topic, name: str) -> Subscription | None:
        """The subscription of that name, if there is one."""
        return self._by_name.get((topic.id, name))

    def get(self, topic: str, name: str) -> Subscription:
        """The subscription of that name, which is at work."""
        found = self.known(topic, name)
        self._topics.check(found.topic)
        found.check()
        return found

    def known(self, topic: str, name: str) -> Subscription:
        """The subscription of that name, whether it could be opened or not."""
        found = self.find(self._topics.known(topic), name)
        if found is None:
            raise SubscriptionNotFound(f"the topic {topic} has no leased subscription {name}; create it first")
        return found

    def get_or_create(self, request: Lease, now_us: int) -> Subscription:
        """The subscription that somebody wants to lease from."""
        topic = self._topics.find(request.topic)
        found = self.find(topic, request.subscription) if topic is not None else None
        if found is not None:
            self._topics.check(found.topic)
            found.check()
            return found
        if not request.create:
            return self.get(request.topic, request.subscription)
        topic = self._topics.get_or_create(request.topic, now_us)
        return self.make(topic, request.subscription, SubscriptionSettings(), {}, now_us)

    def create(self, request: SubscriptionCreate, now_us: int) -> Later[Words]:
        """Make a subscription."""
        topic = self._topics.get_or_create(request.topic, now_us)
        found = self.find(topic, checked_subscription(request.subscription))
        if found is not None and not request.exist_ok:
            raise SubscriptionExists(f"the topic {topic} already has a leased subscription {request.subscription}")
        if found is None:
            settings = subscription_settings(request.settings)
            starts = self._starts(topic, request)
            found = self.make(topic, request.subscription, settings, starts, now_us)
        return self._ledger.durably(self.info(found, now_us))

    def make(
        self, topic: Topic, name: str, settings: SubscriptionSettings, starts: dict[int, int], now_us: int
    ) -> Subscription:
        """Make a subscription that there is not."""
        _check_dead_letters(topic, settings)
        number = self._ledger.state.leased.subscription_id + 1
        fact = SubscriptionSet(number, topic.id, checked_subscription(name), now_us, settings.as_dict(), starts)
        self._ledger.record(now_us, fact)
        self.now_us = now_us
        return self._add(fact, topic)

    def alter(self, request: SubscriptionAlter, now_us: int) -> Later[Words]:
        """Change settings."""
        found = self.known(request.topic, request.subscription)
        settings = subscription_settings(request.settings, found.settings)
        _check_dead_letters(found.topic, settings)
        before = found.fact
        fact = SubscriptionSet(
            before.id, before.topic_id, before.name, before.created_us, settings.as_dict(), before.starts
        )
        self._ledger.record(now_us, fact)
        found.fact, found.settings = fact, settings
        for index in found.indexes.values():
            index.alter(settings, now_us)
        found.schedule.order_by(settings.discipline)
        self._ports.soon(partial(self.served, found))
        return self._ledger.durably(self.info(found, now_us))

    def reset(self, request: SubscriptionReset, now_us: int) -> Later[Words]:
        """Open a subscription anew; of what it knew only what is settled is kept, or, with a start, nothing."""
        found = self.known(request.topic, request.subscription)
        before, starts, settled = found.fact, found.fact.starts, []
        if request.start:
            starts = self._starts(found.topic, request)
        else:
            try:
                settled = self._ledger.state.leased.settled(found.id)
            except Exception as error:
                logger.exception("settled messages unreadable  subscription=%s", found)
                raise SubscriptionFailed(
                    f"what {found} has settled cannot be read: {error}; reset it with a start, such as earliest"
                ) from error
        settings = found.settings.as_dict()
        fact = SubscriptionSet(before.id, before.topic_id, before.name, before.created_us, settings, starts)
        self._ledger.record(now_us, fact, ResetFact(found.id), *settled)  # type: ignore[arg-type]
        self.now_us = now_us
        found.fact, found.failure = fact, ""
        self._detach(found)
        self._attach(found)
        found.check()
        self._ports.soon(partial(self.served, found))
        return self._ledger.durably(self.info(found, now_us))

    def delete(self, request: SubscriptionDelete, now_us: int) -> Later[Words]:
        """Forget a subscription."""
        found = self.known(request.topic, request.subscription)
        self._ledger.record(now_us, SubscriptionGone(found.id))
        self._remove(found, f"the subscription {found} was deleted")
        return self._ledger.durably(Done())

    def describe(self, request: SubscriptionDescribe, now_us: int) -> Words:
        """A subscription as it is now."""
        return self.info(self.known(request.topic, request.subscription), now_us)

    def listed(self, request: SubscriptionList, now_us: int) -> Words:
        """Subscriptions, by name."""
        if request.topic:
            chosen = self.of_topic(self._topics.known(request.topic))
        else:
            tenant = request.tenant or DEFAULT_TENANT
            chosen = [one for one in self if one.topic.name.tenant == tenant]
        return Subscriptions([self.info(one, now_us) for one in sorted(chosen, key=str)])

    def topics_changed(self, now_us: int) -> None:
        """Topics went, or got more partitions."""
        self.now_us = now_us
        for subscription in self:
            if subscription.topic.id not in self._topics.by_id:
                self._remove(subscription, f"the topic {subscription.topic} was deleted")
            else:
                self._attach(subscription)

    def topic_altered(self, topic: Topic, now_us: int) -> None:
        """A topic has other settings: they count for what is open too."""
        self.now_us = now_us
        for subscription in self.of_topic(topic):
            try:
                for index in subscription.indexes.values():
                    index.expire_after(_ttl_us(topic))
            except Exception as error:  # noqa: BLE001 it is told
                self.fail(subscription, error)
            self._attach(subscription)  # of a topic that could not be opened
            self._ports.soon(partial(self.served, subscription))

    def info(self, subscription: Subscription, now_us: int) -> SubscriptionInfo:
        """What is told of a subscription."""
        self.refresh(subscription, now_us)
        waiting = ready = leased = 0
        since: list[int] = []
        following: list[int] = []
        for index in subscription.indexes.values():
            index.pending.advance(now_us)
            counts = outlook.summary(index.pending)
            waiting, ready, leased = waiting + counts.waiting, ready + counts.ready, leased + counts.leased
            since += [counts.ready_since_us] if counts.ready_since_us else []
            following += [counts.next_ready_us] if counts.next_ready_us else []
        return SubscriptionInfo(
            topic=str(subscription.topic),
            subscription=subscription.name,
            created_us=subscription.fact.created_us,
            settings=subscription.settings.as_dict(),
            waiting=waiting,
            ready=ready,
            leased=leased,
            dead=self._dead_count(subscription),
            ready_since_us=min(since, default=0),
            next_ready_us=min(following, default=0),
            delivered=subscription.delivered,
            acked=subscription.acked,
            released=subscription.released,
            expired_leases=subscription.expired_leases,
            timing=subscription.timing,
            error=subscription.failure or subscription.topic.failure,
        )

    def refresh(self, subscription: Subscription, now_us: int) -> None:
        """Bring a subscription up to the moment: with all that was published, and what is over is over."""
        self.catch_up(subscription)
        for number in subscription.indexes:
            self.forget_removed(subscription, number)
        self.overdue(subscription, now_us)

    def forget_removed(self, subscription: Subscription, partition: int) -> None:
        """What retention has removed from a partition cannot be handed out."""
        first_offset = subscription.topic.lanes[partition].partition.first_offset
        subscription.indexes[partition].forget_before(first_offset)

    def catch_up(self, subscription: Subscription) -> None:
        """Take in what was published since."""
        if len(subscription.indexes) < subscription.topic.settings.partitions:
            self._attach(subscription)
        for number in list(subscription.stale):
            try:
                lane = self._topics.lane(subscription.topic, number)
                subscription.indexes[number].catch_up(lane.end_offset, self.now_us)
            except (HeadraceError, OSError) as error:
                logger.warning("%s cannot see what was published to partition %s: %s", subscription, number, error)
                continue  # it is tried again with the next request, or tick
            subscription.stale.discard(number)
            lane.listen(subscription.listeners[number])

    def serve_soon(self, subscription: Subscription) -> None:
        """Something may have become free for those who wait."""
        if subscription.wants:
            self._ports.soon(partial(self.served, subscription))

    def consumed_offset(self, topic: Topic, partition: int) -> int | None:
        """What every leased subscription has settled; None when the topic has none."""
        leased = self._ledger.state.leased
        floors = [leased.index(one.id, partition).statuses.floor for one in self.of_topic(topic)]
        return min(floors, default=None)

    def settled_rules(self, topic: Topic, partition: int) -> list[Callable[[int], bool]]:
        """If most messages of a partition are settled by all leased subscriptions: what tells which, for each."""
        found = [one.indexes.get(partition) for one in self.of_topic(topic)]
        indexes = [index for index in found if index is not None]
        lane = topic.lanes[partition]
        stored = lane.partition.next_offset - lane.partition.first_offset
        pending = sum(sum(index.statuses.counts) for index in indexes)
        if not indexes or len(indexes) < len(found) or 2 * pending > stored:
            return []
        return [index.statuses.settled_now() for index in indexes]

    def _starts(self, topic: Topic, request: SubscriptionCreate | SubscriptionReset) -> dict[int, int]:
        if request.start == "earliest":
            return {}
        if request.start not in ("latest", "time", "offset"):
            raise InvalidArgument(f"a subscription starts at earliest, latest, time or offset, not {request.start}")
        starts = {}
        for lane in self._topics.all_lanes(topic):
            if request.start == "offset":
                lane.check_offset(request.start_offset)
                starts[lane.number] = request.start_offset
            else:
                starts[lane.number] = offset_at(lane, request.start, request.start_us)
        return starts

    def _add(self, fact: SubscriptionSet, topic: Topic) -> Subscription:
        subscription = Subscription(fact, topic, SubscriptionSettings())
        self._by_name[topic.id, fact.name] = subscription
        try:
            subscription.settings = subscription_settings(fact.settings)
        except InvalidArgument as error:
            subscription.settings = _right_settings(fact.settings)
            self.fail(subscription, error)
        subscription.schedule.order_by(subscription.settings.discipline)
        if fact.id in self._ledger.state.leased.broken:
            self._broken(fact.id)
        self._attach(subscription)
        return subscription

    def _remove(self, subscription: Subscription, why: str) -> None:
        del self._by_name[subscription.topic.id, subscription.name]
        self._detach(subscription)
        self._refuse(subscription, SubscriptionNotFound(why))

    def _detach(self, subscription: Subscription) -> None:
        """Close all partitions."""
        for number, listener in subscription.listeners.items():
            if number in subscription.topic.lanes:
                subscription.topic.lanes[number].forget(listener)
        subscription.listeners.clear()
        subscription.schedule.changed.update(subscription.indexes)
        subscription.indexes.clear()
        subscription.stale.clear()

    def _refuse(self, subscription: Subscription, error: HeadraceError) -> None:
        """Tell those who wait that there is nothing to wait for."""
        for want in subscription.wants.clear():
            want.later.settle(error)

    def fail(self, subscription: Subscription, error: Exception) -> None:
        """It cannot be used until it is reset; all others can."""
        logger.error("leased subscription failed; reset or delete it  subscription=%s", subscription, exc_info=error)
        self._stop(subscription, f"{type(error).__name__}: {error}")

    def _broken(self, number: int) -> None:
        """What the journal says of a subscription could not be followed."""
        for subscription in self:
            if subscription.id == number:
                self._stop(subscription, self._ledger.state.leased.broken[number])

    def _stop(self, subscription: Subscription, why: str) -> None:
        subscription.failure = subscription.failure or why
        self._detach(subscription)
        try:
            subscription.check()
        except SubscriptionFailed as error:
            self._refuse(subscription, error)

    def _attach(self, subscription: Subscription) -> None:
        """Open the partitions that are not open yet."""
        topic = subscription.topic
        for number in range(topic.settings.partitions):
            if number in subscription.indexes or subscription.failure:
                continue
            try:
                lane = self._topics.lane(topic, number)
            except (HeadraceError, OSError) as error:
                logger.warning("%s cannot hand out messages of partition %s: %s", subscription, number, error)
                continue
            try:
                index = self._opened(subscription, number, lane)
            except Exception as error:  # noqa: BLE001 it is told
                self.fail(subscription, error)
                return
            subscription.indexes[number] = index
            index.pending.on_change = partial(subscription.schedule.changed.add, number)
            index.pending.on_change()
            subscription.listeners[number] = partial(self._more, subscription, number)
            lane.listen(subscription.listeners[number])

    def _opened(self, subscription: Subscription, number: int, lane: Lane) -> LeasedIndex:
        topic, state = subscription.topic, self._ledger.state.leased
        index = state.index(subscription.id, number)
        index.attach(
            lane.partition,
            subscription.name,
            subscription.settings,
            _ttl_us(topic),
            state.edits_of(topic.id, number),
            lane.end_offset,
            self.now_us,
        )
        return index

    def _more(self, subscription: Subscription, number: int) -> None:
        """Something was published, perhaps in the middle of a request."""
        if not subscription.takes_in:
            subscription.takes_in = True
            self._ports.soon(partial(self._take_in, subscription))
        subscription.stale.add(number)

    def _take_in(self, subscription: Subscription) -> None:
        subscription.takes_in = False
        if self._by_name.get((subscription.topic.id, subscription.name)) is subscription:
            self.catch_up(subscription)
            self.served(subscription)

    def close(self) -> None:
        """Tell those who wait that there is nothing to wait for."""
        for subscription in self:
            self._refuse(subscription, Closed("the broker is closing"))


def _check_dead_letters(topic: Topic, settings: SubscriptionSettings) -> None:
    """Refuse to put dead messages where they would be handed out again."""
    if settings.dead_letter_topic and parse_topic(settings.dead_letter_topic) == topic.name:
        raise InvalidArgument(f"dead_letter_topic cannot be {topic} itself: give another topic")


def _ttl_us(topic: Topic) -> int | None:
    """How long after they were appended messages of a topic are handed out."""
    seconds = topic.settings.ttl_seconds if topic.settings.validity is Validity.TTL else None
    return None if seconds is None else round(seconds * 1e6)


def _right_settings(given: dict[str, Any]) -> SubscriptionSettings:
    """What is right of settings that are wrong as a whole."""
    settings = SubscriptionSettings()
    for name, value in given.items():
        with suppress(InvalidArgument):  # the whole was told of
            settings = subscription_settings({name: value}, settings)
    return settings
