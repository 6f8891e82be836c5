"""Finishes jobs whose publishers wait: acknowledges a job and stores its result, both or neither."""

from functools import partial

from headrace.broker.leased_facts import MessagesSettled
from headrace.broker.leasing import LeaseDispatcher
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.result_topics import ResultTopics
from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.transactions import Transactions
from headrace.engines.api import LeasedPartition, packed
from headrace.model.batch import Batch, check_messages
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.job_requests import RESULTS_TOPIC, JobFinish, JobId, parse_job_id
from headrace.model.leasing import Refusal, Settlement


class JobFinisher:
    """Stores the results that holders of jobs send, in the same commit that settles the jobs."""

    def __init__(
        self,
        registry: SubscriptionRegistry,
        leasing: LeaseDispatcher,
        results: ResultTopics,
        transactions: Transactions,
    ) -> None:
        self._registry = registry
        self._leasing = leasing
        self._results = results
        self._transactions = transactions

    def finish(self, request: JobFinish, batch: Batch, now_us: int) -> Settlement | PendingAnswer[Settlement]:
        """Acknowledge a job and store its result; a job that is not the holder's any more gets none from it."""
        subscription = self._registry.get(request.topic, request.subscription)
        if len(request.holding.all_offsets) != 1:
            raise InvalidArgument("a result belongs to one job: send a request for each")
        id = _id_of(batch)
        topic = self._results.create(subscription.topic.name.tenant, now_us)
        if batch.raw_bytes > topic.settings.message_bytes_max:
            check_messages(batch.columns(), topic.settings.message_bytes_max, RESULTS_TOPIC)
        refused: list[Refusal] = []
        accepted = list(self._leasing.accepted(subscription, [request.holding], refused, now_us, late=True))
        if not accepted:
            return Settlement(refused)
        ((index, holding, offsets),) = accepted
        index.leave(offsets)
        fact = MessagesSettled(subscription.id, holding.partition, packed(offsets))
        target = id.partition % topic.settings.partitions
        committed = self._transactions.commit_internal([(topic, target, batch)], [fact], now_us)
        pending: PendingAnswer[Settlement] = PendingAnswer()
        committed.then(partial(self._committed, subscription, index, offsets[0], now_us, pending))
        return pending

    def _committed(
        self,
        subscription: Subscription,
        index: LeasedPartition,
        offset: int,
        now_us: int,
        pending: PendingAnswer[Settlement],
        outcome: object,
    ) -> None:
        if isinstance(outcome, HeadraceError):
            if self._registry.find(subscription.topic, subscription.name) is subscription:
                index.stay([offset], now_us)
                self._registry.ready(subscription, now_us)
            pending.resolve(outcome)
            return
        subscription.acked += 1
        self._registry.serve_soon(subscription)  # the next message of its key is available now
        pending.resolve(Settlement([]))


def _id_of(batch: Batch) -> JobId:
    """The job's id that a result has as its key."""
    if batch.producer_id or batch.count != 1:
        raise InvalidArgument("a result is a batch of one message, without a producer id")
    (key,) = batch.columns().keys or [None]
    if key is None:
        raise InvalidArgument("the key of a result is the job's id: this one has no key")
    return parse_job_id(bytes(key).decode("utf-8", "replace"))
