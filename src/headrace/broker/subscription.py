"""A leased subscription: its settings, its index of each partition, and its waiting consumers."""

from collections.abc import Callable

from headrace.broker.leased_facts import SubscriptionSet
from headrace.broker.partition_schedule import PartitionSchedule
from headrace.broker.topics import Topic
from headrace.broker.waiters import LeaseWaiters, PendingLease
from headrace.engines.api import LeasedPartition
from headrace.model.errors import SubscriptionFailed
from headrace.model.leasing import Timing
from headrace.model.subscription import SubscriptionSettings

TIMING_BOUNDS_US = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 1_000_000, 10_000_000]


class Subscription:
    """A leased subscription: its settings, its index of each partition, and its waiting consumers."""

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
        """The partition to take from first, where the discipline does not decide."""
        self.delivered = self.acked = self.released = self.expired_leases = self.dropped = 0
        self.used_us = 0
        """When somebody last leased or settled something, or closed a standing request."""
        self.active: PendingLease | None = None
        """The one that may be served, where only one consumer is active at a time."""
        self.timing = Timing(TIMING_BOUNDS_US, [0] * (len(TIMING_BOUNDS_US) + 1))
        self.listeners: dict[int, Callable[[], None]] = {}
        self.stale: set[int] = set()
        """Partitions with published messages that were not read yet."""
        self.takes_in = False
        """Whether reading published messages is scheduled."""
        self.preparing = False
        """Whether it is being opened or altered in slices; no message is leased meanwhile."""
        self.closings = 0
        """How often its partitions were closed; an opening that notices a change stops."""
        self.goes_on = False
        """Whether another slice of serving is scheduled."""
        self.failure = ""
        """Why it failed; empty when it works."""

    def __str__(self) -> str:
        return f"{self.topic}/{self.name}"

    @property
    def address(self) -> str:
        """What the header of a message that is for this subscription alone says; views share a topic's messages."""
        return str(self) if self.topic.is_view else self.name

    def check(self) -> None:
        """Refuse a subscription that failed."""
        if self.failure:
            raise SubscriptionFailed(
                f"the leased subscription {self} could not be opened: {self.failure}; reset it (headrace queue reset), "
                "which keeps what is settled, or delete it; the broker's log has the details"
            )

    def use(self, now_us: int) -> None:
        """Note that a consumer uses it."""
        self.used_us = max(self.used_us, now_us)

    def is_settled(self, partition: int, offset: int) -> bool:
        """Whether it has settled a message, as far as it has read the partition."""
        index = self.indexes.get(partition)
        return index is not None and not index.status(offset)
