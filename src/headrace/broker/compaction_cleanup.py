"""Removes compacted messages from subscriptions and edits, so that their counts stay correct."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain

from headrace.broker.active_partition import ActivePartition
from headrace.broker.leased_facts import LeasedSubscriptionsState
from headrace.broker.slices import Steps
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic
from headrace.model.batch import Batch
from headrace.model.errors import InvalidBatch

_OFFSETS_AT_ONCE = 1000
"""Offsets examined per slice."""


def forget_compacted(
    topic: Topic, active: ActivePartition, registry: SubscriptionRegistry, leased: LeasedSubscriptionsState
) -> Steps:
    """Walk over a partition, some offsets in a slice, and forget the messages that are missing.

    Messages that somebody holds are left alone: their holders say what becomes of them.
    """
    edited = leased.edited_offsets(topic.id, active.number)
    reading = registry.reading(topic)
    if not edited and not reading:
        return
    lost: set[int] = set()
    position, end = active.partition.first_offset, active.end_offset
    if not edited:
        topics = {one.topic.id for one in reading}
        position = max(position, min(leased.settled_offset(each, active.number) for each in topics))
    while position < end and active.gone is None:
        batch = next(iter(active.partition.batches(position, end)), None)
        base, following = (end, end) if batch is None else (batch.base_offset, batch.next_offset)
        for missing in chain(_portions(position, base), _missing(batch, position)):
            for subscription in registry.reading(topic):
                if active.number in subscription.indexes:
                    subscription.indexes[active.number].forget_missing(missing)
            lost.update(edited.intersection(missing))
            yield
        position = following
        yield
    if lost:
        leased.forget_messages(topic.id, active.number, lost)


def _missing(batch: Batch | None, position: int) -> Iterator[Sequence[int]]:
    """The offsets of a batch, from a position on, that have no message; in portions."""
    try:
        places = None if batch is None else batch.outline().places
    except InvalidBatch:
        return  # subscriptions have passed over it
    if batch is not None and (places is not None or not batch.count):
        yield from _portions(max(position, batch.base_offset), batch.next_offset, batch.base_offset, places or ())


def _portions(start: int, end: int, base: int = 0, places: Sequence[int] = ()) -> Iterator[Sequence[int]]:
    """The offsets from one to another, without those at these places, rising, from the base on; in portions."""
    for first in range(start, end, _OFFSETS_AT_ONCE):
        portion = range(first, min(first + _OFFSETS_AT_ONCE, end))
        there = places[bisect_left(places, first - base) : bisect_left(places, portion.stop - base)]
        yield sorted(set(portion).difference(base + place for place in there)) if there else portion
