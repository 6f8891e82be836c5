"""Requests that append messages: each is checked for its topic, for space on the disk and for room in subscriptions."""

from typing import TypeVar

from msgspec.structs import replace

from headrace.broker.idempotency import IdempotentPublisher
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.publish_pipeline import PublishPipeline
from headrace.broker.routes import RouteRegistry
from headrace.broker.subscription_policies import SubscriptionPolicies
from headrace.broker.tenant_names import check_plain
from headrace.broker.topics import TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.engines.api import FORWARDER_MIN, PRODUCER_MIN, Ballast
from headrace.model.batch import Batch, received
from headrace.model.errors import DiskFull, Draining, InvalidArgument
from headrace.model.idempotency import PublishedOnce, PublishOnce, own_key_hash
from headrace.model.partition_count import PartitionCount, PartitionsCounted
from headrace.model.requests import (
    Publish,
    Published,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
    TransactionStaged,
)
from headrace.model.system_topics import check_clients_topic

T = TypeVar("T", TransactionBegin, TransactionStage, TransactionCommit, TransactionAbort)

_FULL_DISK = (
    "the disk is full, and the remaining space is reserved for freeing more; nothing was appended: trim topics "
    "(headrace topic trim), or free some space"
)


class Publisher:
    """Appends messages of clients, alone, once per key, or in transactions."""

    def __init__(
        self,
        topics: TopicRegistry,
        policies: SubscriptionPolicies,
        transactions: Transactions,
        pipeline: PublishPipeline,
        idempotency: IdempotentPublisher,
        routes: RouteRegistry,
        ballast: Ballast,
    ) -> None:
        self._topics = topics
        self._policies = policies
        self._transactions = transactions
        self._pipeline = pipeline
        self._idempotency = idempotency
        self._routes = routes
        self._ballast = ballast
        self.draining = False

    def publish(
        self, session: Session, request: Publish, body: memoryview, now_us: int
    ) -> Published | PendingAnswer[Published]:
        """Append a batch to a partition of its topic, or to the ingress topic if it names none."""
        batch = received(body)
        if batch.producer_id and not PRODUCER_MIN <= batch.producer_id < FORWARDER_MIN:
            raise InvalidArgument(f"producers' ids below {PRODUCER_MIN} and from {FORWARDER_MIN} on are the broker's")
        if not request.topic:
            request.topic = self._routes.ingress(session.tenant)
        return self.publish_batch(session, request, batch, now_us)

    def publish_batch(
        self, session: Session, request: Publish, batch: Batch, now_us: int
    ) -> Published | PendingAnswer[Published]:
        """Append a batch whose producer is known to be good."""
        topics = self._topics
        if request.expected_offset:
            topics.check_begun(request.topic, request.expected_offset)  # before a topic is made
        if topics.find(request.topic) is None:
            check_clients_topic(request.topic)  # before a topic is made
            topics.check_new_partition(request.topic, request.partition)
        topic = topics.get_or_create(request.topic, now_us)
        if topic.is_brokers:
            check_clients_topic(request.topic)
        active = topics.active(topic, request.partition)
        if self._ballast.dropped and active.partition.durable:
            raise DiskFull(_FULL_DISK)
        if topic.id in self._policies.refusing:
            active.flush()  # what was gathered counts
            self._policies.check(topic)
        if topic.middleware is not None:
            return self._pipeline.publish(session, topic, active, request, batch, now_us)
        return active.publish(request, batch, now_us)

    def publish_once(
        self, session: Session, request: PublishOnce, body: memoryview, now_us: int
    ) -> PublishedOnce | PendingAnswer[PublishedOnce]:
        """Append batches under an idempotency key."""
        check_clients_topic(request.topic)
        if self._topics.find(request.topic) is None:
            for batch in request.batches:
                self._topics.check_new_partition(request.topic, batch.partition)
        topic = self._topics.get_or_create(request.topic, now_us)
        self.check_disk()
        if topic.id in self._policies.refusing:
            for active in topic.active_partitions.values():
                active.flush()  # what was gathered counts
            self._policies.check(topic)
        if session.access is not None:
            request = replace(request, key_hash=own_key_hash(request.key_hash, session.identity))
        return self._idempotency.publish(request, topic, body, now_us, session.client)

    def count_partitions(
        self, _: Session, request: PartitionCount, __: memoryview, now_us: int
    ) -> PartitionsCounted | PendingAnswer[PartitionsCounted]:
        """Answer how many partitions a topic has; it is made if there is none and the broker may."""
        if self._topics.find(request.topic) is None:  # it would make the topic
            if self.draining:
                raise Draining
            check_clients_topic(request.topic)
        topic = self._topics.get_or_create(request.topic, now_us)
        return PartitionsCounted(topic.settings.partitions, topic.id)

    def stage(
        self, session: Session, request: TransactionStage, body: memoryview, now_us: int
    ) -> TransactionStaged | PendingAnswer[TransactionStaged]:
        """Add a batch to an open transaction."""
        check_clients_topic(request.topic)
        self.check_disk()
        if self._policies.refusing:
            topic = self._topics.find(request.topic)
            if topic is not None and topic.id in self._policies.refusing:
                self._policies.check(topic)  # here, because a commit is never refused
        request, batch = own_transaction(session, request), received(body)
        self._transactions.check_open(request, now_us)  # before a topic is made
        self._topics.check_new_partition(request.topic, request.partition)
        topic = self._topics.get_or_create(request.topic, now_us)
        if topic.middleware is not None:
            self._topics.active(topic, request.partition)  # first what may go wrong
            return self._pipeline.stage(session, topic, request, batch, now_us)
        return self._transactions.stage(request, batch, now_us)

    def check_disk(self) -> None:
        """Raise if the disk is so full that only the removal of messages is allowed."""
        if self._ballast.dropped:
            raise DiskFull(_FULL_DISK)


def own_transaction(session: Session, request: T) -> T:
    """A request about a transaction of the session's tenant; where that has a prefix, it was checked before."""
    if session.names is None:
        check_plain(request.transaction)
    return request
