"""Publishes to topics with middleware: processed batches are stored, and refused messages with them as dead letters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from headrace.broker.active_partition import ActivePartition
from headrace.broker.dead_letters import PREFIX, DeadLetters, divided_batches
from headrace.broker.middleware_chain import DeadMessages, ProcessedBatch, SiftedBatch
from headrace.broker.middleware_runner import Held, MiddlewareRunner
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.topics import Topic
from headrace.broker.transactions import Transactions
from headrace.engines.api import FORGOTTEN, Appended
from headrace.model.batch import Batch, Columns, check_messages
from headrace.model.errors import Busy, HeadraceError, TopicNotFound
from headrace.model.headers import Headers, replaced_headers
from headrace.model.middleware import MiddlewareContext
from headrace.model.names import derived_topic
from headrace.model.requests import PartitionOffset, Publish, Published, TransactionStage, TransactionStaged
from headrace.model.subscription import DEAD_SUFFIX

LocatedBatch = tuple[Topic, int, Batch]
"""A batch, and the topic and partition where it goes."""
StoreProcessed = Callable[[list[LocatedBatch], int], PendingAnswer[Any]]
"""Stores a processed batch and its dead letters, at this time."""


class PublishPipeline:
    """What is between a publisher and a partition of a topic with middleware."""

    def __init__(self, runner: MiddlewareRunner, dead_letters: DeadLetters, transactions: Transactions) -> None:
        self._runner = runner
        self._dead_letters = dead_letters
        self._transactions = transactions

    def publish(
        self,
        session: Session | None,
        topic: Topic,
        active: ActivePartition,
        request: Publish,
        batch: Batch,
        now_us: int,
    ) -> Published | PendingAnswer[Published]:
        """Process and append a batch; one that was appended before is not processed again."""
        assert topic.middleware is not None
        active.check_publish(request)
        self._await_commits(topic, request.partition)
        context = publish_context(topic, request.partition, now_us, session)
        finish = partial(self._append, topic, active, request, batch)
        check = partial(self._find_repeated, topic, active, request, batch) if batch.producer_id else None
        published: Published | PendingAnswer[Published] = self._runner.run(
            topic.middleware, topic.id, batch, context, finish, check
        )
        return published

    def stage(
        self, session: Session, topic: Topic, request: TransactionStage, batch: Batch, now_us: int
    ) -> TransactionStaged | PendingAnswer[TransactionStaged]:
        """Process a batch of a transaction and stage it, with its dead letters."""
        assert topic.middleware is not None
        end = self._transactions.expect_stage(request, batch, now_us)

        def finish(processed: ProcessedBatch, now_us: int) -> TransactionStaged | PendingAnswer[TransactionStaged]:
            end()
            if processed.dead and (topic.settings.key_versions or request.expected_version is not None):
                raise processed.refusal(topic.name.topic)
            letters = self._letters(topic, request.partition, processed, now_us)
            return self._transactions.stage(request, processed.batch, now_us, letters)

        context = publish_context(topic, request.partition, now_us, session)
        try:
            outcome: Any = self._runner.run(topic.middleware, topic.id, batch, context, finish)
        except BaseException:
            end()
            raise
        if not isinstance(outcome, PendingAnswer):
            staged: TransactionStaged = outcome
            return staged
        answer: PendingAnswer[TransactionStaged] = PendingAnswer()
        outcome.then(lambda _: end())  # not when `answer` is cancelled: the middleware goes on
        outcome.then(answer.resolve)
        return answer

    def process(
        self,
        topic: Topic,
        partition: int,
        batch: Batch,
        now_us: int,
        store: StoreProcessed,
        client: str = "",
    ) -> PendingAnswer[Any]:
        """Process a batch of the broker itself, then call `store` with it, its dead letters and the time.

        Resolves with what `store` returns, or with the error of the middleware.
        """
        assert topic.middleware is not None

        def finish(processed: ProcessedBatch, now_us: int) -> Any:
            made = processed.batch
            if processed.dead and topic.settings.key_versions:
                raise processed.refusal(topic.name.topic)
            if made.count:
                check_messages(made.columns(), topic.settings.message_bytes_max, str(topic))
            stored = store([(topic, partition, made), *self._letters(topic, partition, processed, now_us)], now_us)
            stored.then(lambda outcome: self._tell(topic, partition, processed, outcome, now_us))
            return stored

        context = msgspec.structs.replace(publish_context(topic, partition, now_us), client=client)
        answer: PendingAnswer[Any] = PendingAnswer()
        try:
            outcome = self._runner.run(topic.middleware, topic.id, batch, context, finish)
        except HeadraceError as error:
            answer.resolve(error)
            return answer
        if isinstance(outcome, PendingAnswer):
            return outcome
        answer.resolve(outcome)
        return answer

    def sift(
        self, topic: Topic, partition: int, batch: Batch, now_us: int, client: str = ""
    ) -> PendingAnswer[SiftedBatch]:
        """Process a forwarded batch, after those of its partition that came before.

        Resolves with what is left of it and what is refused, or with an error: then it may be tried again.
        """
        assert topic.middleware is not None
        answer: PendingAnswer[SiftedBatch] = PendingAnswer()
        context = msgspec.structs.replace(publish_context(topic, partition, now_us), client=client)
        try:
            outcome = self._runner.run(topic.middleware, topic.id, batch, context, lambda sifted, _: sifted, sifts=True)
        except HeadraceError as error:
            outcome = error
        if isinstance(outcome, PendingAnswer):
            return outcome
        answer.resolve(outcome)
        return answer

    def _await_commits(self, topic: Topic, partition: int) -> None:
        """After a restart: a batch whose commit is not applied yet must be found when it is sent again."""
        if self._transactions.is_applying(topic.id, partition):
            self._runner.hold(topic.id, partition, self._applied(topic, partition))

    def _applied(self, topic: Topic, partition: int) -> PendingAnswer[None]:
        """Resolves when no commit is left to be applied to a partition."""
        applied: PendingAnswer[None] = PendingAnswer()
        self._transactions.when_applied(topic.id, partition, lambda: applied.resolve(None))
        return applied

    def _find_repeated(self, topic: Topic, active: ActivePartition, request: Publish, batch: Batch) -> Any:
        repeated = active.partition.find_repeated(batch)
        return None if repeated is None else self._answer(topic, active, request, repeated)

    def _answer(self, topic: Topic, active: ActivePartition, request: Publish, repeated: Appended) -> Any:
        """The answer to a batch that was appended before."""
        stored = None
        if topic.middleware is not None and topic.middleware.changes_count:
            stored = 0 if repeated.base_offset == FORGOTTEN else active.partition.count_at(repeated.base_offset)
        return _counted(active.answer(repeated, active.check_publish(request)), stored)

    def _append(
        self, topic: Topic, active: ActivePartition, request: Publish, batch: Batch, processed: ProcessedBatch, now: int
    ) -> Any:
        """Append a processed batch, or commit it together with its dead letters."""
        if not processed.dead:
            alone = processed.stored is not None
            return _counted(active.publish(request, processed.batch, now, alone=alone), processed.stored)
        active.check_publish(request)
        conditions = request.expected_offset, request.expected_version
        if topic.settings.key_versions or conditions != (None, None):  # would have to hold when the commit is applied
            raise processed.refusal(topic.name.topic)
        active.flush()
        repeated = active.partition.admit(batch)
        if repeated is not None:
            return self._answer(topic, active, request, repeated)
        if processed.batch.count:
            check_messages(processed.batch.columns(), active.settings.message_bytes_max, request.topic)
        return self._commit(topic, active, processed, now)

    def _commit(self, topic: Topic, active: ActivePartition, processed: ProcessedBatch, now_us: int) -> Held:
        letters = self._letters(topic, active.number, processed, now_us)
        answer: PendingAnswer[Published] = PendingAnswer()
        until: PendingAnswer[None] = PendingAnswer()

        def committed(outcome: list[PartitionOffset] | HeadraceError) -> None:
            answer.resolve(_published(topic, active, processed, outcome, now_us))
            self._tell(topic, active.number, processed, outcome, now_us)
            self._applied(topic, active.number).then(until.resolve)

        batches = [(topic, active.number, processed.batch), *letters]
        self._transactions.commit_internal(batches, [], now_us).then(committed)
        return Held(answer, until)

    def _tell(self, topic: Topic, partition: int, processed: ProcessedBatch, outcome: object, now_us: int) -> None:
        """Tell observers of dead letters, if they are stored."""
        for part in processed.dead if not isinstance(outcome, HeadraceError) else ():
            self._dead_letters.refused(topic, partition, part.middleware, part.reasons, now_us)

    def _letters(self, topic: Topic, partition: int, processed: ProcessedBatch, now_us: int) -> list[LocatedBatch]:
        """The dead letters of a batch, and where they go."""
        if not processed.dead:
            return []
        name, partitions = derived_topic(str(topic), DEAD_SUFFIX), topic.settings.partitions
        dead_topic = self._dead_letters.open_topic(name, partitions, now_us)
        target = partition % dead_topic.settings.partitions
        return [
            (dead_topic, target, batch)
            for part in processed.dead
            for batch in divided_batches(_letter_columns(topic, partition, part, now_us), now_us)
        ]


def publish_context(topic: Topic, partition: int, now_us: int, session: Session | None = None) -> MiddlewareContext:
    """What middleware is told about a batch."""
    where = topic.name.topic, topic.name.tenant, partition, now_us
    if session is None:
        return MiddlewareContext(*where)
    return MiddlewareContext(*where, session.identity.name, session.client, session.address, session.gateway)


def _published(
    topic: Topic,
    active: ActivePartition,
    processed: ProcessedBatch,
    outcome: list[PartitionOffset] | HeadraceError,
    now_us: int,
) -> Published | HeadraceError:
    """The answer to a batch that was committed with its dead letters."""
    if isinstance(outcome, HeadraceError):
        return outcome
    if active.gone is not None:
        return TopicNotFound(str(active.gone))
    place = next((one for one in outcome if (one.topic, one.partition) == (str(topic), active.number)), None)
    if place is None:
        return Busy("the batch is stored, and becomes readable later: publish it again to learn its offset")
    reached = active.partition.reached(place.offset + processed.batch.span)
    return Published(place.offset, reached, now_us, False, topic.id, processed.stored)


def _counted(published: Any, stored: int | None) -> Any:
    """The answer, with the number of messages that were stored."""
    if stored is None:
        return published
    if not isinstance(published, PendingAnswer):
        return msgspec.structs.replace(published, stored=stored)
    answer: PendingAnswer[Published] = PendingAnswer()
    published.then(lambda outcome: answer.resolve(_counted(outcome, stored) if _is_published(outcome) else outcome))
    return answer


def _is_published(outcome: object) -> bool:
    return isinstance(outcome, Published)


def _letter_columns(topic: Topic, partition: int, dead: DeadMessages, now_us: int) -> Columns:
    """Refused messages with headers that tell why."""
    own = dead.columns.headers or [None] * len(dead.indexes)
    headers: list[Headers | None] = []
    for index, reason, each in zip(dead.indexes, dead.reasons, own, strict=True):
        told: dict[str, bytes | None] = {
            f"{PREFIX}reason": reason.encode(),
            f"{PREFIX}topic": str(topic).encode(),
            f"{PREFIX}partition": b"%d" % partition,
            f"{PREFIX}index": b"%d" % index,
            f"{PREFIX}middleware": dead.middleware.encode(),
            f"{PREFIX}time": b"%d" % now_us,
        }
        headers.append(replaced_headers(each, told))
    return msgspec.structs.replace(dead.columns, headers=headers, dues=None, expires=None)
