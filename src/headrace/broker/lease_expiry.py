"""Expires leases and messages: makes messages ready again, dead-letters them, or drops them."""

import logging
from collections.abc import Callable
from functools import partial

from headrace.broker.dead_letters import DeadLetters
from headrace.broker.leased_facts import MessagesSettled
from headrace.broker.ledger import Ledger
from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.engines.api import LeasedPartition, packed
from headrace.model.errors import HeadraceError, LeaseExpired
from headrace.model.job_requests import MESSAGE_EXPIRED
from headrace.model.subscription import Expired

logger = logging.getLogger("headrace.broker")

_ENDED_TOGETHER = 256
"""Maximum leases and messages expired per slice."""
_OVER_TOGETHER = 64
"""Maximum partitions checked per slice."""
_RETRY_US = 1_000_000
"""The delay before a failed drop of expired messages is retried."""


class LeaseExpiry:
    """Expires leases and messages in all partitions of a subscription."""

    def __init__(
        self,
        registry: SubscriptionRegistry,
        dead_letters: DeadLetters,
        ledger: Ledger,
        serve_soon: Callable[[Subscription], None],
    ) -> None:
        self._registry = registry
        self._dead_letters = dead_letters
        self._ledger = ledger
        self._serve_soon = serve_soon

    def end_some(self, subscription: Subscription, now_us: int) -> None:
        """Expire leases and messages that are due, a bounded number now and the rest in later slices."""
        schedule, left = subscription.schedule, _ENDED_TOGETHER
        if not schedule.is_over(now_us):
            return
        for partition in schedule.over(now_us, _OVER_TOGETHER):
            left -= self._end_in_partition(subscription, partition, now_us, left)
            if left <= 0:
                break
        if schedule.is_over(now_us):
            self._serve_soon(subscription)

    def _end_in_partition(self, subscription: Subscription, partition: int, now_us: int, most: int) -> int:
        """Expire a bounded number in a partition; returns about how many there were."""
        index = subscription.indexes.get(partition)
        if index is None:
            return 0  # the partition has failed meanwhile
        ended = index.ended(now_us, most)
        if ended:
            subscription.expired_leases += len(ended)
            self._come_back(subscription, partition, index, ended, now_us)
        for damaged in index.take_lost(now_us):
            self._dead_letters.bury_lost(subscription, partition, damaged, now_us)
        expired = index.expired(now_us, most)
        if expired and subscription.settings.expired is Expired.DEAD:
            self._dead_letters.bury(
                subscription, partition, expired, "expired", now_us, code=MESSAGE_EXPIRED, counted=True
            )
        elif expired and self._tell_dropped(subscription, partition, expired, now_us):
            pass  # they are dropped when those who wait for their results have been told
        elif expired:
            facts = [MessagesSettled(subscription.id, partition, packed(expired))]
            self._ledger.gather(now_us, facts, partial(self._dropped, index, expired, now_us))
        if expired and subscription.settings.ordered_by_key:
            self._registry.serve_soon(subscription)  # the next messages of their keys are available now
        return len(ended) + len(expired) + 1

    def _tell_dropped(self, subscription: Subscription, partition: int, expired: list[int], now_us: int) -> bool:
        """Drop messages of which some have publishers that wait for results; returns whether there are any."""
        reason = "the message expired before it was handled"
        return self._dead_letters.drop(subscription, partition, expired, MESSAGE_EXPIRED, reason, now_us) is not None

    def _dropped(self, index: LeasedPartition, offsets: list[int], now_us: int, error: HeadraceError | None) -> None:
        if error is not None:
            logger.warning("expired messages not dropped; retrying in 1 s  reason=%s", error)
            index.expire_later(offsets, now_us + _RETRY_US)

    def _come_back(
        self, subscription: Subscription, partition: int, index: LeasedPartition, ended: list[int], now_us: int
    ) -> None:
        """Make messages of expired leases ready again, and dead-letter those with the maximum of deliveries."""
        most = subscription.settings.deliveries_max
        failures = index.failures(ended)
        dead = [offset for offset, failed in zip(ended, failures, strict=True) if most and failed >= most]
        gone = set(dead)
        index.stay([offset for offset in ended if offset not in gone], now_us)
        if dead:
            reason = "lease expired without acknowledgement"
            self._dead_letters.bury(subscription, partition, dead, reason, now_us, code=LeaseExpired.code, counted=True)
