"""Views for queries of topics without a leased subscription: what a new subscription would contain."""

from collections.abc import Iterator

from headrace.broker.leased_facts import LeasedSubscriptionsState, SubscriptionSet
from headrace.broker.slices import Steps
from headrace.broker.subscription import Subscription
from headrace.broker.topics import Topic, TopicRegistry
from headrace.engines.api import new_replayed_partition, open_leased_partition
from headrace.model.errors import TopicNotFound
from headrace.model.subscription import SubscriptionSettings
from headrace.model.topic import Validity

_OFFSETS_TOGETHER = 1000
"""Offsets read per slice; at least one batch."""
_KEPT_US = 30_000_000
"""How long a view is cached after its last use, for the queries of further pages."""


class TopicView(Subscription):
    """The unsettled messages that a subscription from the beginning would have; leases nothing."""

    used_us = 0

    def steps(self, topics: TopicRegistry, state: LeasedSubscriptionsState, now_us: int) -> Steps:
        """Index messages published since the last update, and remove expired and deleted ones."""
        for number in range(self.topic.settings.partitions):
            active = topics.active(self.topic, number)
            index = self.indexes.get(number)
            if index is None:
                first_offset = active.partition.first_offset
                ttl = self.topic.settings.ttl_seconds if self.topic.settings.validity is Validity.TTL else None
                ttl_us = None if ttl is None else round(ttl * 1e6)
                index = open_leased_partition(
                    new_replayed_partition(0),
                    active.partition,
                    self.name,
                    self.settings,
                    ttl_us,
                    state.edits_of(self.topic.id, number),
                    active.delivered,
                )
                self.indexes[number] = state.unsubscribed[self.topic.id, number] = index
                yield from index.load(first_offset, now_us)
            while index.end < active.end_offset:
                index.catch_up(min(index.end + _OFFSETS_TOGETHER, active.end_offset), now_us)
                yield
                if topics.by_id.get(self.topic.id) is not self.topic:
                    raise TopicNotFound(f"the topic {self.topic} was deleted")
        self.refresh(topics, now_us)

    def refresh(self, topics: TopicRegistry, now_us: int) -> None:
        """Remove expired and deleted messages."""
        for number, index in self.indexes.items():
            index.forget_before(topics.active(self.topic, number).partition.first_offset)
            index.apply_settled(index.expired(now_us))
            for damaged in index.take_lost(now_us):
                index.apply_settled(damaged)


class TopicViews:
    """The cached views."""

    def __init__(self, topics: TopicRegistry, state: LeasedSubscriptionsState) -> None:
        self._topics = topics
        self._state = state
        self._views: dict[int, TopicView] = {}
        topics.altered.connect(self._topic_altered)

    def of(self, topic: Topic, name: str, now_us: int) -> TopicView:
        """The view of a topic, created if there is none."""
        view = self._views.get(topic.id)
        if view is None:
            self._state.recall_edits(topic.id)
            fact = SubscriptionSet(0, topic.id, name, now_us, {}, {})
            view = self._views[topic.id] = TopicView(fact, topic, SubscriptionSettings())
        view.used_us = now_us
        return view

    def _topic_altered(self, topic: Topic, _: int) -> None:
        """Read from the partitions as consumers see them now."""
        view = self._views.get(topic.id)
        for number, index in view.indexes.items() if view is not None else ():
            index.read_contents_from(self._topics.active(topic, number).delivered)

    def forget(self, now_us: int) -> None:
        """Drop unused views, and views of topics that were deleted or have a subscription now."""
        for view in list(self._outdated(now_us)):
            del self._views[view.topic.id]
            for number in view.indexes:
                self._state.unsubscribed.pop((view.topic.id, number), None)

    def _outdated(self, now_us: int) -> Iterator[TopicView]:
        for view in self._views.values():
            unused = not view.used_us <= now_us < view.used_us + _KEPT_US
            if unused or view.topic.id not in self._topics.by_id or self._state.has_subscriptions(view.topic.id):
                yield view
