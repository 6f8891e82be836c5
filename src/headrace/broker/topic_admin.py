"""Requests about topics: creating, altering, deleting, describing and trimming them."""

from collections.abc import Callable
from typing import Any

from headrace.broker.audit_trail import AuditTrail
from headrace.broker.ledger import Ledger
from headrace.broker.maintenance import Maintenance
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports, Session
from headrace.broker.slices import Steps, in_slices
from headrace.broker.topic_trimmer import TopicTrimmer
from headrace.broker.topics import TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.broker.version_gate import check_countable
from headrace.model.request import Request
from headrace.model.requests import (
    Done,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicInfo,
    TopicList,
    TopicTrim,
)
from headrace.model.requests import (
    Topics as TopicsFound,
)

Handler = Callable[[Session, Any, memoryview, int], Any]


class TopicAdmin:
    """Answers requests that change topics or tell of them."""

    def __init__(
        self,
        topics: TopicRegistry,
        ledger: Ledger,
        ports: Ports,
        trimmer: TopicTrimmer,
        maintenance: Maintenance,
        transactions: Transactions,
        audit: AuditTrail,
    ) -> None:
        self._topics = topics
        self._ledger = ledger
        self._ports = ports
        self._trimmer = trimmer
        self._maintenance = maintenance
        self._transactions = transactions
        self._audit = audit

    def requests(self) -> dict[type[Request[Any]], Handler]:
        """The handlers, by request."""
        return {
            TopicCreate: self._create,
            TopicAlter: self._alter,
            TopicDelete: self._delete,
            TopicDescribe: self._describe,
            TopicList: self._list,
            TopicTrim: lambda _, ask, __, now: self._trimmer.trim(ask, now),
        }

    def _create(self, _: Session, request: TopicCreate, __: memoryview, now_us: int) -> PendingAnswer[TopicInfo]:
        new = self._topics.find(request.topic) is None
        topic = self._topics.create(request, now_us)
        return self._ledger.durably(self._topics.info(topic, partitions=True, new=new))

    def _alter(self, _: Session, request: TopicAlter, __: memoryview, now_us: int) -> PendingAnswer[TopicInfo]:
        before = self._topics.known(request.topic)
        if not before.failure:
            self._topics.all_active(before)  # first what may go wrong
        if request.settings.get("key_versions") and not before.settings.key_versions:
            removing = self._maintenance.is_removing(before) or not self._trimmer.idle
            check_countable(committing=not self._transactions.idle, removing=removing)
        topic = self._topics.alter(request.topic, request.settings, now_us)
        return self._ledger.durably(self._topics.info(topic, partitions=True, new=True))

    def _delete(self, _: Session, request: TopicDelete, __: memoryview, now_us: int) -> PendingAnswer[Done]:
        self._audit.check_delete(request.topic)
        self._topics.delete(request.topic, now_us)
        return self._ledger.durably(Done())

    def _describe(
        self, _: Session, request: TopicDescribe, __: memoryview, now_us: int
    ) -> TopicInfo | PendingAnswer[TopicInfo]:
        if not request.create or self._topics.find(request.topic) is not None:
            return self._topics.info(self._topics.known(request.topic), partitions=True)
        topic = self._topics.get_or_create(request.topic, now_us)
        return self._ledger.durably(self._topics.info(topic, partitions=True, new=True))

    def _list(
        self, _: Session, request: TopicList, __: memoryview, ___: int
    ) -> TopicsFound | PendingAnswer[TopicsFound]:
        def steps() -> Steps:
            return TopicsFound((yield from self._topics.matching(request)))

        pending_answer: PendingAnswer[TopicsFound] = in_slices(self._ports, steps())
        found = pending_answer.outcome
        return found if isinstance(found, TopicsFound) else pending_answer  # few are there at once
