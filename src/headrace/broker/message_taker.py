"""Taking messages out of the partitions of a leased subscription, in the order of its discipline."""

from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.engines.api import TakenMessages
from headrace.model.errors import HeadraceError
from headrace.model.leasing import Lease
from headrace.model.limits import BATCH_BYTES_MAX

_BODY_BYTES_MAX = BATCH_BYTES_MAX - (1 << 20)
_DUE_TOGETHER = 2000
"""Messages of several partitions that are due and made ready at a time."""

Portion = tuple[int, TakenMessages]
"""A partition, and the messages taken out of it."""


def take_messages(
    registry: SubscriptionRegistry, subscription: Subscription, request: Lease, now_us: int
) -> list[Portion]:
    """Take messages out of all partitions, in the order of the discipline."""
    count, bytes_max, ahead_us = (
        request.messages_max,
        min(request.bytes_max, _BODY_BYTES_MAX),
        request.ahead_ms * 1000,
    )
    indexes = subscription.indexes
    if len(indexes) == 1 and not subscription.settings.ordered_by_key:  # else some may turn out to be blocked
        [(partition, index)] = indexes.items()
        registry.forget_removed(subscription, partition)
        taken = index.take(count, bytes_max, now_us, ahead_us)
        return [(partition, taken)] if taken is not None else []
    portions: list[Portion] = []
    try:
        _take_over_partitions(registry, subscription, portions, count, bytes_max, ahead_us, now_us)
    except (HeadraceError, OSError):
        give_back(subscription, portions, now_us)
        raise
    return portions


def _take_over_partitions(
    registry: SubscriptionRegistry,
    subscription: Subscription,
    portions: list[Portion],
    count: int,
    bytes_max: int,
    ahead_us: int,
    now_us: int,
) -> None:
    indexes, schedule = subscription.indexes, subscription.schedule
    schedule.advance(now_us, _DUE_TOGETHER)
    for early_us in (0, ahead_us) if ahead_us else (0,):  # in no partition before all are ready
        passed_over: set[int] = set()
        while count > 0 and bytes_max > 0:
            chosen = schedule.first(subscription.turn, now_us, early_us, passed_over)
            if chosen is None:
                break
            partition, until_key = chosen
            subscription.turn = partition + 1
            registry.forget_removed(subscription, partition)
            least, index = 0 if portions else 1, indexes[partition]
            first = index.first_keys
            taken = index.take(count, bytes_max, now_us, early_us, until_key, least)
            if taken is None:
                if index.first_keys != first:
                    continue  # what came first did not count, or is blocked
                if not early_us:
                    return  # what comes next is too large, and nothing may pass it
                passed_over.add(partition)
                continue
            portions.append((partition, taken))
            count -= len(taken.offsets)
            bytes_max -= taken.size_bytes


def give_back(subscription: Subscription, portions: list[Portion], now_us: int) -> None:
    """Put back messages that could not be leased after all."""
    for partition, taken in reversed(portions):
        if partition in subscription.indexes:  # else it has failed meanwhile
            subscription.indexes[partition].give_back(taken, now_us)
