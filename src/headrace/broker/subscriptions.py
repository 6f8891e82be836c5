"""The registry of leased subscriptions: made, changed, listed and deleted while the broker runs."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import chain
from typing import Any

from headrace.broker.active_partition import ActivePartition
from headrace.broker.group_coordinator import offset_at
from headrace.broker.leased_facts import SubscriptionDeleted, SubscriptionSet
from headrace.broker.leased_facts import SubscriptionStateReset as ResetFact
from headrace.broker.ledger import Ledger
from headrace.broker.partition_schedule import PartitionSchedule
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.slices import Steps, in_slices
from headrace.broker.subscription_counts import counted
from headrace.broker.subscription_settings import check_dead_letters, right_settings, ttl_us
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.waiters import LeaseWaiters
from headrace.engines.api import LeasedPartition
from headrace.model.errors import (
    Closed,
    HeadraceError,
    InvalidArgument,
    SubscriptionExists,
    SubscriptionFailed,
    SubscriptionNotFound,
    TopicNotFound,
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
from headrace.model.request import Answer
from headrace.model.requests import Done
from headrace.model.subscription import SubscriptionSettings, checked_subscription, subscription_settings
from headrace.model.topic import DEFAULT_TENANT

logger = logging.getLogger("headrace.broker")

_SLICE_WORK = 8
_LANE_WORK = 4
"""So many partitions are opened in a slice, or so many parts of them read; what takes longer counts as so many."""
_STARTS_TOGETHER = 2
_LISTED_TOGETHER = 16

TIMING_BOUNDS_US = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 1_000_000, 10_000_000]


class Subscription:
    """A leased subscription at work."""

    def __init__(self, fact: SubscriptionSet, topic: Topic, settings: SubscriptionSettings) -> None:
        self.id = fact.id
        self.topic = topic
        self.name = fact.name
        self.settings = settings
        self.fact = fact
        self.indexes: dict[int, LeasedPartition] = {}
        """By partition; a partition that could not be opened is missing."""
        self.schedule = PartitionSchedule(self.indexes)
        self.pending_leases = LeaseWaiters()
        self.turn = 0
        """Which partition is asked first, where none comes before the others by itself."""
        self.delivered = self.acked = self.released = self.expired_leases = 0
        self.timing = Timing(TIMING_BOUNDS_US, [0] * (len(TIMING_BOUNDS_US) + 1))
        self.listeners: dict[int, Callable[[], None]] = {}
        self.stale: set[int] = set()
        """Partitions in which more was published, or that could not be read when it was."""
        self.takes_in = False
        """Whether what was published is going to be taken in."""
        self.preparing = False
        """Whether it is being opened or altered, in slices: nothing is handed out before that is done."""
        self.closings = 0
        """How often its partitions were closed: whoever was opening them stops."""
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
        return index is not None and not index.status(offset)


class SubscriptionRegistry:
    """All leased subscriptions. `served` is called when one may have something to hand out."""

    def __init__(
        self,
        topics: TopicRegistry,
        ledger: Ledger,
        ports: Ports,
        dead_count: Callable[[Subscription], Generator[None, None, int]],
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
        self.prepared: Callable[[Subscription], None] = lambda _: None
        """Called when one can be used that was opened or altered."""
        self._by_name: dict[tuple[int, str], Subscription] = {}
        self._by_topic: dict[int, list[Subscription]] = {}
        ledger.state.leased.on_broken = self._broken
        for fact in list(ledger.state.leased.subscriptions.values()):
            topic = topics.by_id.get(fact.topic_id)
            if topic is None:
                logger.error("leased subscription without topic ignored  name=%s topic_id=%s", fact.name, fact.topic_id)
            else:
                deque(self._opening(self._add(fact, topic)), maxlen=0)

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(list(self._by_name.values()))

    def of_topic(self, topic: Topic) -> list[Subscription]:
        """The subscriptions of a topic."""
        return list(self._by_topic.get(topic.id, ()))

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
            raise SubscriptionNotFound(f"the topic {topic} has no leased subscription {name}")
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
        topic = self._topic(request, now_us)
        return self.make(topic, request.subscription, SubscriptionSettings(), {}, now_us)

    def create(self, request: SubscriptionCreate, now_us: int) -> PendingAnswer[Any]:
        """Make a subscription."""
        return in_slices(self._ports, self._create(request, now_us))

    def _create(self, request: SubscriptionCreate, now_us: int) -> Steps:
        topic = self._topic(request, now_us)
        name = checked_subscription(request.subscription)
        settings, starts = subscription_settings(request.settings), {}
        if self.find(topic, name) is None:
            starts = yield from self._starts(topic, request)
            if self._topics.by_id.get(topic.id) is not topic:
                raise TopicNotFound(f"the topic {topic} was deleted while the subscription was made; create it again")
        found = self.find(topic, name)
        if found is not None and not request.exist_ok:
            raise SubscriptionExists(f"the topic {topic} already has a leased subscription {request.subscription}")
        if found is None:
            found = self._record(topic, name, settings, starts, max(now_us, self.now_us))
            yield from self._prepare(found, self._opening(found))
        return (yield from self._answer(found, now_us))

    def _topic(self, request: Lease | SubscriptionCreate, now_us: int) -> Topic:
        """The topic of a subscription that is to be made; made as well only if the request says so."""
        topics = self._topics
        return topics.get_or_create(request.topic, now_us) if request.create_topic else topics.get(request.topic)

    def make(
        self, topic: Topic, name: str, settings: SubscriptionSettings, starts: dict[int, int], now_us: int
    ) -> Subscription:
        """Make a subscription that there is not; it may not be open yet."""
        made = self._record(topic, name, settings, starts, now_us)
        self._open(made)
        return made

    def _record(
        self, topic: Topic, name: str, settings: SubscriptionSettings, starts: dict[int, int], now_us: int
    ) -> Subscription:
        check_dead_letters(topic, settings)
        number = self._ledger.state.leased.subscription_id + 1
        fact = SubscriptionSet(number, topic.id, checked_subscription(name), now_us, settings.as_dict(), starts)
        self._ledger.record(now_us, fact)
        self.now_us = now_us
        return self._add(fact, topic)

    def alter(self, request: SubscriptionAlter, now_us: int) -> PendingAnswer[Any]:
        """Change settings."""
        return in_slices(self._ports, self._alter(request, now_us))

    def _alter(self, request: SubscriptionAlter, now_us: int) -> Steps:
        found = yield from self._idle(request.topic, request.subscription)
        settings = subscription_settings(request.settings, found.settings)
        check_dead_letters(found.topic, settings)
        before = found.fact
        fact = SubscriptionSet(
            before.id, before.topic_id, before.name, before.created_us, settings.as_dict(), before.starts
        )
        self._ledger.record(now_us, fact)
        found.fact, found.settings = fact, settings
        yield from self._prepare(found, self._altering(found, settings))
        return (yield from self._answer(found, now_us))

    def _altering(self, subscription: Subscription, settings: SubscriptionSettings) -> Steps:
        closings, work = subscription.closings, 0
        for index in list(subscription.indexes.values()):
            for weight in chain((_LANE_WORK for _ in index.alter(settings, self.now_us)), [1]):
                work += weight
                if work >= _SLICE_WORK:
                    work = 0
                    yield
                if subscription.closings != closings:
                    return
        subscription.schedule.order_by(settings.discipline)

    def reset(self, request: SubscriptionReset, now_us: int) -> PendingAnswer[Any]:
        """Open a subscription anew; of what it knew only what is settled is kept, or, with a start, nothing."""
        return in_slices(self._ports, self._reset(request, now_us))

    def _reset(self, request: SubscriptionReset, now_us: int) -> Steps:
        found = yield from self._idle(request.topic, request.subscription)
        yield from self._prepare(found, self._resetting(found, request))
        found.check()
        return (yield from self._answer(found, now_us))

    def _resetting(self, found: Subscription, request: SubscriptionReset) -> Steps:
        before, starts, settled = found.fact, found.fact.starts, []
        if request.start:
            starts = yield from self._starts(found.topic, request)
        else:
            try:
                settled = yield from self._ledger.state.leased.settled(found.id, self._ledger.flush)
            except Exception as error:
                logger.exception("settled messages unreadable  subscription=%s", found)
                raise SubscriptionFailed(
                    f"what {found} has settled cannot be read: {error}; reset it with a start, such as earliest"
                ) from error
        if self.find(found.topic, found.name) is not found:
            raise SubscriptionNotFound(f"the subscription {found} was deleted while it was reset")
        settings = found.settings.as_dict()
        fact = SubscriptionSet(before.id, before.topic_id, before.name, before.created_us, settings, starts)
        self._ledger.record(self.now_us, fact, ResetFact(found.id), *settled)  # type: ignore[arg-type]
        found.fact, found.failure = fact, ""
        self._detach(found)
        yield from self._opening(found)

    def _idle(self, topic: str, name: str) -> Generator[None, None, Subscription]:
        """A subscription that nobody is opening or altering."""
        while (found := self.known(topic, name)).preparing:
            yield
        return found

    def _prepare(self, subscription: Subscription, steps: Steps) -> Steps:
        """Open or alter a subscription; nothing is handed out meanwhile, and who waits is served then."""
        subscription.preparing = True
        try:
            yield from steps
        except Exception:
            subscription.preparing = False
            self.prepared(subscription)
            raise
        subscription.preparing = False
        self.prepared(subscription)

    def _answer(self, subscription: Subscription, now_us: int) -> Generator[None, None, PendingAnswer[Answer]]:
        """What is told of a subscription, when what was recorded is safe."""
        return self._ledger.durably((yield from self.info(subscription, max(now_us, self.now_us))))

    def delete(self, request: SubscriptionDelete, now_us: int) -> PendingAnswer[Answer]:
        """Forget a subscription."""
        found = self.known(request.topic, request.subscription)
        self._ledger.record(now_us, SubscriptionDeleted(found.id))
        self._remove(found, SubscriptionNotFound(f"the subscription {found} was deleted"))
        return self._ledger.durably(Done())

    def describe(self, request: SubscriptionDescribe, now_us: int) -> PendingAnswer[Any]:
        """A subscription as it is now."""
        return in_slices(self._ports, self._describe(request, now_us))

    def _describe(self, request: SubscriptionDescribe, now_us: int) -> Steps:
        found = yield from self._idle(request.topic, request.subscription)
        return (yield from self.info(found, max(now_us, self.now_us)))

    def listed(self, request: SubscriptionList, now_us: int) -> PendingAnswer[Any]:
        """Subscriptions, by name."""
        if request.topic:
            chosen = self.of_topic(self._topics.known(request.topic))
        else:
            tenant = request.tenant or DEFAULT_TENANT
            chosen = [one for one in self if one.topic.name.tenant == tenant]
        return in_slices(self._ports, self._listed(sorted(chosen, key=str), now_us))

    def _listed(self, chosen: list[Subscription], now_us: int) -> Steps:
        infos: list[SubscriptionInfo] = []
        for place, one in enumerate(chosen):
            if place % _LISTED_TOGETHER == _LISTED_TOGETHER - 1:
                yield
            if self.find(one.topic, one.name) is one:
                infos.append((yield from self.info(one, max(now_us, self.now_us))))
        return Subscriptions(infos)

    def topic_changed(self, topic: Topic, now_us: int) -> None:
        """A topic has gone, or got more partitions."""
        self.now_us = now_us
        for subscription in self.of_topic(topic):
            if subscription.topic.id not in self._topics.by_id:
                self._remove(subscription, TopicNotFound(f"the topic {subscription.topic} was deleted"))
            elif len(subscription.indexes) < subscription.topic.settings.partitions:
                self._open(subscription)

    def topic_altered(self, topic: Topic, now_us: int) -> None:
        """A topic has other settings: they count for what is open too."""
        self.now_us = now_us
        for subscription in self.of_topic(topic):
            in_slices(self._ports, self._expiring_after(subscription, ttl_us(topic)))
            self._open(subscription)  # of a topic that could not be opened
            self._ports.soon(partial(self.served, subscription))

    def _expiring_after(self, subscription: Subscription, lives_us: int | None) -> Steps:
        """Find anew when messages expire."""
        try:
            for number, index in list(subscription.indexes.items()):
                for _ in index.expire_after(lives_us):
                    yield
                    if subscription.indexes.get(number) is not index:
                        return Done()
        except Exception as error:  # noqa: BLE001 it is told
            self.fail(subscription, error)
        self.served(subscription)
        return Done()

    def info(self, subscription: Subscription, now_us: int) -> Generator[None, None, SubscriptionInfo]:
        """What is told of a subscription; in slices."""
        if self.find(subscription.topic, subscription.name) is not subscription:
            raise SubscriptionNotFound(f"the subscription {subscription} was deleted")
        self.refresh(subscription, now_us)
        while subscription.schedule.is_over(now_us):
            yield
            self.overdue(subscription, now_us)
        counts = yield from counted(list(subscription.indexes.values()), now_us)
        dead = yield from self._dead_count(subscription)
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
        first_offset = subscription.topic.active_partitions[partition].partition.first_offset
        subscription.indexes[partition].forget_before(first_offset)

    def catch_up(self, subscription: Subscription, *, again: bool = True) -> None:
        """Take in what was published since; try `again` to open partitions that could not be."""
        if again and len(subscription.indexes) < subscription.topic.settings.partitions:
            self._open(subscription)
        for number in list(subscription.stale):
            try:
                active = self._topics.active(subscription.topic, number)
                subscription.indexes[number].catch_up(active.end_offset, self.now_us)
            except (HeadraceError, OSError) as error:
                logger.warning("%s cannot see what was published to partition %s: %s", subscription, number, error)
                continue  # it is tried again with the next request, or tick
            subscription.stale.discard(number)
            active.listen(subscription.listeners[number])

    def serve_soon(self, subscription: Subscription) -> None:
        """Something may have become free for those who wait."""
        if subscription.pending_leases:
            self._ports.soon(partial(self.served, subscription))

    def consumed_offset(self, topic: Topic, partition: int) -> int | None:
        """What every leased subscription has settled; None when the topic has none."""
        leased = self._ledger.state.leased
        floors = [leased.partition(one.id, partition).floor for one in self.of_topic(topic)]
        return min(floors, default=None)

    def settled_rules(self, topic: Topic, partition: int) -> list[Callable[[int], bool]]:
        """If most messages of a partition are settled by all leased subscriptions: what tells which, for each."""
        found = [one.indexes.get(partition) for one in self.of_topic(topic)]
        indexes = [index for index in found if index is not None]
        active = topic.active_partitions[partition]
        stored = active.partition.next_offset - active.partition.first_offset
        pending = sum(index.unsettled_count for index in indexes)
        if not indexes or len(indexes) < len(found) or 2 * pending > stored:
            return []
        return [index.settled_rule() for index in indexes]

    def _starts(
        self, topic: Topic, request: SubscriptionCreate | SubscriptionReset
    ) -> Generator[None, None, dict[int, int]]:
        if request.start == "earliest":
            return {}
        if request.start not in ("latest", "time", "offset"):
            raise InvalidArgument(f"a subscription starts at earliest, latest, time or offset, not {request.start}")
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
        return subscription

    def _remove(self, subscription: Subscription, why: HeadraceError) -> None:
        del self._by_name[subscription.topic.id, subscription.name]
        self._by_topic[subscription.topic.id].remove(subscription)
        if not self._by_topic[subscription.topic.id]:
            del self._by_topic[subscription.topic.id]
        self._detach(subscription)
        self._refuse(subscription, why)

    def _detach(self, subscription: Subscription) -> None:
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
        """Tell those who wait that there is nothing to wait for."""
        for pending_lease in subscription.pending_leases.clear():
            pending_lease.pending_answer.resolve(error)

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

    def _open(self, subscription: Subscription) -> None:
        """Open the partitions that are not open yet, in slices."""
        is_there = self.find(subscription.topic, subscription.name) is subscription
        if is_there and not subscription.preparing and not subscription.failure:
            in_slices(self._ports, self._prepare(subscription, self._opening(subscription)))

    def _opening(self, subscription: Subscription) -> Steps:
        """Open the partitions that are not open yet; stops when the subscription is closed or deleted meanwhile."""
        topic, closings, work = subscription.topic, subscription.closings, 0
        for number in range(topic.settings.partitions):
            if number in subscription.indexes or subscription.failure:
                continue
            work += 1 if number in topic.active_partitions else _LANE_WORK
            try:
                active = self._topics.active(topic, number)
            except (HeadraceError, OSError) as error:
                logger.warning("%s cannot hand out messages of partition %s: %s", subscription, number, error)
                continue
            try:
                index, steps = self._opened(subscription, number, active)
                for _ in steps:
                    work += 1
                    if work >= _SLICE_WORK:
                        work = 0
                        yield
                        if subscription.closings != closings:
                            return
                index.catch_up(active.end_offset, self.now_us)
            except Exception as error:  # noqa: BLE001 it is told
                self.fail(subscription, error)
                return
            subscription.indexes[number] = index
            index.watch(partial(subscription.schedule.changed.add, number))
            subscription.listeners[number] = partial(self._more, subscription, number)
            active.listen(subscription.listeners[number])

    def _opened(
        self, subscription: Subscription, number: int, active: ActivePartition
    ) -> tuple[LeasedPartition, Iterator[None]]:
        """An index, and the steps in which it learns what is there; another one when it is there at the end."""
        state = self._ledger.state.leased
        settings, lives_us = subscription.settings, ttl_us(subscription.topic)
        index = state.open_partition(subscription.id, number, active.partition, settings, lives_us)
        return index, chain(index.load(active.end_offset, self.now_us), [None])

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
