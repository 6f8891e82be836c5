"""After a compaction: subscriptions and edits forget the messages that it removed, so that all counts agree."""

from headrace.broker.lane import Lane
from headrace.broker.leased_facts import LeasedState
from headrace.broker.slices import Steps
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic
from headrace.model.errors import InvalidBatch


def forget_compacted(topic: Topic, lane: Lane, registry: SubscriptionRegistry, leased: LeasedState) -> Steps:
    """Walk over a partition's batches, one in a slice, and forget what is missing.

    Messages that somebody holds are left alone: their holders say what becomes of them.
    """
    edited = leased.edited_offsets(topic.id, lane.number)
    lost: set[int] = set()
    position, end = lane.partition.first_offset, lane.end_offset
    while position < end and lane.gone is None:
        batch = next(iter(lane.partition.batches(position, end)), None)
        base, following = (end, end) if batch is None else (batch.base_offset, batch.next_offset)
        missing = list(range(position, base))
        try:
            places = None if batch is None else batch.outline().places
        except InvalidBatch:
            places = None  # subscriptions have passed over it
        if batch is not None and (places is not None or not batch.count):
            missing += sorted(set(range(base, following)).difference(base + place for place in places or ()))
        for subscription in registry.of_topic(topic) if missing else ():
            if lane.number in subscription.indexes:
                subscription.indexes[lane.number].forget_missing(missing)
        lost.update(edited.intersection(missing))
        position = following
        yield
    if lost:
        leased.forget_messages(topic.id, lane.number, lost)
