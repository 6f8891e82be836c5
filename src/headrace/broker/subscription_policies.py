"""Enforces a subscription's settings: limits on its unsettled messages, and deletion when nobody uses it."""

import logging
from functools import partial

from headrace.broker.leased_facts import MessagesSettled
from headrace.broker.ledger import Ledger
from headrace.broker.standing_leases import StandingLeases
from headrace.broker.subscription import Subscription
from headrace.broker.subscription_admin import SubscriptionAdmin
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic
from headrace.broker.turns import Turns
from headrace.engines.api import LeasedPartition, packed
from headrace.model.errors import HeadraceError, SubscriptionFull
from headrace.model.leasing import SubscriptionDelete
from headrace.model.subscription import Overflow

logger = logging.getLogger("headrace.broker")

_DROPPED_TOGETHER = 1000
"""Maximum messages dropped per loop turn."""
_LOOK_US = 1_000_000
"""How often all partitions of a subscription are searched for leased messages."""


class SubscriptionPolicies:
    """Refuses publishes to full subscriptions or drops their oldest messages, and deletes unused subscriptions."""

    def __init__(
        self,
        registry: SubscriptionRegistry,
        admin: SubscriptionAdmin,
        standing: StandingLeases,
        ledger: Ledger,
        turns: Turns,
    ) -> None:
        self._registry = registry
        self._admin = admin
        self._standing = standing
        self._ledger = ledger
        self._turns = turns
        self.refusing: set[int] = set()
        """The ids of topics with a subscription that refuses messages when it is full: publishes check only these."""
        self._unused: dict[int, Subscription] = {}
        """Subscriptions, by id, that are deleted when nobody uses them."""
        self._untrimmed: dict[int, Subscription] = {}
        """Subscriptions, by id, that are over their limit because the journal could not be written."""
        self._looked_us = 0
        for subscription in registry:
            subscription.use(turns.now_us)  # nobody could have used it before
            self._changed(subscription)
        registry.settings_changed.connect(self._changed)
        registry.scanned.connect(self._trim)

    def check_room(self, topic: Topic) -> None:
        """Raise if a leased subscription of a topic has as many messages as it may have; quick if none is full."""
        if topic.id in self.refusing:
            self.check(topic)

    def check(self, topic: Topic) -> None:
        """Refuse a publish to a topic while one of its subscriptions is full."""
        for subscription in self._registry.reading(topic):
            if _refuses(subscription) and (limit := _reached(subscription)):
                raise SubscriptionFull(
                    f"the leased subscription {subscription} has as many unsettled messages as its {limit} allows; "
                    "nothing was appended: publish again when some are settled, or raise the limit"
                )

    def tick(self, now_us: int) -> None:
        """Delete unused subscriptions, and retry to drop messages where the journal could not be written."""
        untrimmed, self._untrimmed = self._untrimmed, {}
        for subscription in untrimmed.values():
            self._trim(subscription, now_us)
        looks = now_us - self._looked_us >= _LOOK_US
        if looks:
            self._looked_us = now_us
        for subscription in list(self._unused.values()):
            seconds = subscription.settings.delete_unused_seconds
            assert seconds is not None
            is_over = now_us - subscription.used_us >= seconds * 1e6
            if (
                self._standing.are_open(subscription)
                or subscription.pending_leases
                or ((looks or is_over) and any(index.leased_count for index in subscription.indexes.values()))
            ):
                subscription.use(now_us)
            elif is_over and not subscription.preparing:
                logger.info("unused leased subscription deleted  subscription=%s", subscription)
                self._admin.delete(SubscriptionDelete(str(subscription.topic), subscription.name), now_us)

    def _changed(self, subscription: Subscription) -> None:
        """Apply the settings of a subscription that was added, altered or removed."""
        topic, registry = self._registry.source_of(subscription), self._registry
        if any(_refuses(one) for one in registry.reading(topic)):
            self.refusing.add(topic.id)
        else:
            self.refusing.discard(topic.id)
        if self._is_registered(subscription) and subscription.settings.delete_unused_seconds is not None:
            subscription.use(self._turns.now_us)
            self._unused[subscription.id] = subscription
        else:
            self._unused.pop(subscription.id, None)
        self._standing.settings_changed(subscription)
        if _drops(subscription):
            self._turns.call_soon(partial(self._trim, subscription))

    def _is_registered(self, subscription: Subscription) -> bool:
        return self._registry.find(subscription.topic, subscription.name) is subscription

    # Dropping the oldest.

    def _trim(self, subscription: Subscription, now_us: int) -> None:
        """Drop the oldest ready messages until the limits hold, a bounded number per loop turn."""
        if not _drops(subscription) or not self._is_registered(subscription):
            return
        left = min(_excess(subscription), _DROPPED_TOGETHER)
        if left <= 0:
            return
        partitions = sorted(subscription.indexes.items(), key=lambda each: -each[1].staying_count)
        for number, index in partitions:  # the fullest partition first
            if left <= 0:
                break
            oldest = index.oldest_ready(left)
            left -= len(oldest)
            if oldest:
                self._drop(subscription, number, index, oldest, now_us)

    def _drop(
        self, subscription: Subscription, number: int, index: LeasedPartition, offsets: list[int], now_us: int
    ) -> None:
        key = ("drop", subscription.id)
        index.leave(offsets)
        subscription.dropped += len(offsets)

        def written(error: HeadraceError | None) -> None:
            if error is not None:
                text = "messages over the limit not dropped; retrying  subscription=%s"
                self._ledger.failures.note(key, error, text, subscription)
                subscription.dropped -= len(offsets)
                index.stay(offsets, now_us)
                self._untrimmed[subscription.id] = subscription  # not at once: the disk may be full for hours
            else:
                self._ledger.failures.worked(key)
                self._turns.call_at_turn_end(partial(self._trim, subscription))  # there may be more than one portion

        self._ledger.gather(now_us, [MessagesSettled(subscription.id, number, packed(offsets))], written)


def _is_limited(subscription: Subscription) -> bool:
    settings = subscription.settings
    return settings.messages_max is not None or settings.bytes_max is not None


def _refuses(subscription: Subscription) -> bool:
    return _is_limited(subscription) and subscription.settings.overflow is Overflow.REFUSE


def _drops(subscription: Subscription) -> bool:
    return _is_limited(subscription) and subscription.settings.overflow is Overflow.DROP_OLDEST


def _reached(subscription: Subscription) -> str:
    """The name of the limit that the subscription has reached; empty if none."""
    settings = subscription.settings
    messages, size_bytes = unsettled(subscription)
    if settings.messages_max is not None and messages >= settings.messages_max:
        return "messages_max"
    return "bytes_max" if settings.bytes_max is not None and size_bytes >= settings.bytes_max else ""


def _excess(subscription: Subscription) -> int:
    """How many messages exceed the limits; at least one if the bytes do."""
    settings = subscription.settings
    messages, size_bytes = unsettled(subscription)
    over = messages - settings.messages_max if settings.messages_max is not None else 0
    if settings.bytes_max is not None and size_bytes > settings.bytes_max:
        average = max(size_bytes / max(messages, 1), 1)
        over = max(over, round((size_bytes - settings.bytes_max) / average), 1)
    return over


def unsettled(subscription: Subscription) -> tuple[int, float]:
    """The number of unsettled messages, including those not scanned yet, and an estimate of their bytes."""
    messages, size_bytes = 0, 0.0
    for number, index in subscription.indexes.items():
        stored = subscription.topic.active_partitions[number].partition.stored
        count = index.staying_count + stored.next_offset - index.end
        messages += count
        size_bytes += count * stored.size_bytes / max(stored.next_offset - stored.first_offset, 1)
    return messages, size_bytes
