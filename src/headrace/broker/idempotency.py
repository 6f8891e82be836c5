"""Publishes under idempotency keys: each once, with a receipt that a repeated request gets again, also after a crash.

The batches are committed together with the fact that the key was used. The offsets are recorded when the commit is
applied; if a crash comes before that, a repeated request searches the partitions for the batches of the commit. A key
is reserved until the outcome of its commit is known, whether or not a client still waits for that.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

from headrace.broker.commit_applier import STAGES_BITS
from headrace.broker.facts import IdempotencyKeyUsed, IdempotencyReceiptStored
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.publish_pipeline import LocatedBatch, PublishPipeline
from headrace.broker.signal import Signal, TakenShare
from headrace.broker.slices import Steps, in_slices
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.broker.views import check_stores
from headrace.engines.api import marked
from headrace.model.arguments import shown
from headrace.model.batch import Batch, check_messages, received
from headrace.model.durability import Durability
from headrace.model.errors import (
    Busy,
    HeadraceError,
    IdempotencyKeyReused,
    IdempotencyTableFull,
    InvalidArgument,
    LimitExceeded,
)
from headrace.model.idempotency import HASH_BYTES, OFFSET_UNKNOWN, PublishedOnce, PublishOnce, PublishReceipt
from headrace.model.limits import (
    BATCH_BYTES_MAX,
    IDEMPOTENCY_KEYS_MAX,
    IDEMPOTENCY_KEYS_TOTAL_MAX,
    IDEMPOTENCY_SECONDS,
)
from headrace.model.requests import PartitionOffset
from headrace.model.topic import Storage

_KEPT_US = IDEMPOTENCY_SECONDS * 1_000_000
_FORGOTTEN_TOGETHER = 500
"""Maximum keys forgotten per publish or tick."""
_TICK_US = 10_000_000
_BATCHES_MAX = 1024
_SEARCHED_TOGETHER = 200
"""Batches looked at in a slice of a search."""

Answer = PendingAnswer[PublishedOnce]


class _InFlight(NamedTuple):
    """A publish whose commit is not applied yet. It keeps its key reserved, also when nobody waits for it any more."""

    request_hash: bytes
    receipt: Answer
    """Resolves with the outcome of the commit. No client is given this one, so that none can cancel it."""


class IdempotentPublisher:
    """The table of idempotency keys per topic. It is apart from the producers' tables of partitions."""

    def __init__(
        self, topics: TopicRegistry, transactions: Transactions, pipeline: PublishPipeline, ledger: Ledger, ports: Ports
    ) -> None:
        self._pipeline = pipeline
        self._topics = topics
        self._transactions = transactions
        self._ledger = ledger
        self._ports = ports
        self._in_flight: dict[tuple[int, bytes], _InFlight] = {}
        self.taking: Signal[TakenShare] = Signal()
        """Emitted before a tenant takes more of what the broker has for all; a listener refuses by raising."""
        self._tenant_totals: Counter[str] = Counter()
        self._total = 0
        self._recount()
        self._ticked_us = 0

    def publish(
        self, request: PublishOnce, topic: Topic, body: memoryview, now_us: int, client: str = ""
    ) -> Answer | PublishedOnce:
        """Commit the batches, or answer what was answered before."""
        _check_hashes(request)
        check_stores(str(topic), topic.settings, "publish to")
        state, key = self._ledger.state, (topic.id, request.key_hash)
        in_flight = self._in_flight.get(key)
        if in_flight is not None:
            _check_same(request, in_flight.request_hash)
            return _answer_with(in_flight.receipt, repeated=True)
        used = state.idempotency.get(topic.id, {}).get(request.key_hash)
        if used is not None and used.time_us > now_us - _KEPT_US:
            _check_same(request, used.request_hash)
            return self._repeated(topic, used, now_us)
        batches = self._checked_batches(request, topic, body)
        self._make_room(topic, now_us)
        receipt: Answer = PendingAnswer()
        self._in_flight[key] = _InFlight(request.request_hash, receipt)
        receipt.then(partial(self._release, key))
        try:
            self._process(request, topic, batches, used is None, receipt, now_us, client)
        except BaseException:  # nothing is committed: afterwards all errors go to `receipt`
            self._in_flight.pop(key, None)
            raise
        return _answer_with(receipt)

    def _release(self, key: tuple[int, bytes], _: object) -> None:
        """Reserve a key no longer: the outcome of its commit is known."""
        self._in_flight.pop(key, None)

    def _process(
        self,
        request: PublishOnce,
        topic: Topic,
        batches: list[tuple[int, Batch]],
        is_new: bool,
        receipt: Answer,
        now_us: int,
        client: str,
    ) -> None:
        """Commit the batches, after the middleware of the topic has seen them."""
        if topic.middleware is None:
            self._commit(request, topic, [(topic, number, batch) for number, batch in batches], is_new, receipt, now_us)
            return
        [(number, batch)] = batches

        def store(processed: list[LocatedBatch], now_us: int) -> Answer:
            return self._commit(request, topic, processed, is_new, receipt, now_us)

        # An error of the middleware comes here, all else to `receipt` itself.
        self._pipeline.process(topic, number, batch, now_us, store, client).then(partial(_pass_error, receipt))

    def _commit(
        self,
        request: PublishOnce,
        topic: Topic,
        located: list[LocatedBatch],
        is_new: bool,
        receipt: Answer,
        now_us: int,
    ) -> Answer:
        """Commit the batches of a topic, and the dead letters that follow them, with the fact of the key."""
        batches = [one for one in located if one[2].count]
        parts = [
            (number, batch.span, self._topics.active(topic, number).partition.next_offset)
            for of, number, batch in batches
            if of is topic
        ]
        fact = IdempotencyKeyUsed(topic.id, request.key_hash, request.request_hash, now_us, parts)
        committed = self._transactions.commit_internal(batches, [fact], now_us)
        committed.then(partial(self._committed, topic, fact, is_new, len(batches), receipt, now_us))
        return receipt

    def tick(self, now_us: int) -> None:
        """Forget expired keys of topics that nobody publishes to any more."""
        if now_us - self._ticked_us < _TICK_US:
            return
        self._ticked_us, left = now_us, _FORGOTTEN_TOGETHER
        state = self._ledger.state
        for topic_id in list(state.idempotency):
            left -= state.forget_keys(topic_id, now_us - _KEPT_US, left)
            if left <= 0:
                break
        self._recount()  # topics may have been deleted with theirs

    def _recount(self) -> None:
        self._total = 0
        self._tenant_totals.clear()
        for topic_id, keys in self._ledger.state.idempotency.items():
            topic = self._topics.by_id.get(topic_id)
            self._total += len(keys)
            if topic is not None:
                self._tenant_totals[topic.name.tenant] += len(keys)

    def _checked_batches(self, request: PublishOnce, topic: Topic, body: memoryview) -> list[tuple[int, Batch]]:
        """The batches in the body, each with its partition; copies, as they are needed for longer than the body."""
        if not 0 < len(request.batches) <= _BATCHES_MAX:
            raise LimitExceeded(
                f"a publish with an idempotency key has 1 to {_BATCHES_MAX} batches, not {len(request.batches)}; "
                "publish fewer messages at once"
            )
        if sum(one.size_bytes for one in request.batches) != len(body) or len(body) > BATCH_BYTES_MAX:
            raise InvalidArgument(
                f"the body has {len(body)} bytes: not those of the batches, or more than {BATCH_BYTES_MAX}"
            )
        if topic.middleware is not None and len(request.batches) > 1:
            raise InvalidArgument(
                f"{topic} has middleware, and takes one batch of one partition with an idempotency key; name the "
                "partition, and publish fewer messages at once"
            )
        found, position = [], 0
        for one in request.batches:
            batch = received(bytearray(body[position : position + one.size_bytes]))
            position += one.size_bytes
            if batch.producer_id:
                raise InvalidArgument("a batch that is published with an idempotency key must not have a producer id")
            active = self._topics.active(topic, one.partition)
            if active.gate is not None:
                active.gate.check_batch(batch, active.topic, one.partition, active.settings.partitions, None)
            if batch.raw_bytes > active.settings.message_bytes_max:
                check_messages(batch.columns(), active.settings.message_bytes_max, request.topic)
            found.append((one.partition, batch))
        return found

    def _make_room(self, topic: Topic, now_us: int) -> None:
        state = self._ledger.state
        forgotten = state.forget_keys(topic.id, now_us - _KEPT_US, _FORGOTTEN_TOGETHER)
        self._total -= forgotten
        self._tenant_totals[topic.name.tenant] -= forgotten
        waiting = sum(1 for topic_id, _ in self._in_flight if topic_id == topic.id)
        if len(state.idempotency.get(topic.id, ())) + waiting >= IDEMPOTENCY_KEYS_MAX:
            raise IdempotencyTableFull(
                f"{topic} remembers {IDEMPOTENCY_KEYS_MAX} idempotency keys, which is the maximum; publish without a "
                "key, or again when some have expired",
                keys_max=IDEMPOTENCY_KEYS_MAX,
            )
        if self._total + len(self._in_flight) >= IDEMPOTENCY_KEYS_TOTAL_MAX:
            raise IdempotencyTableFull(keys_max=IDEMPOTENCY_KEYS_TOTAL_MAX)
        used, total = self._tenant_totals[topic.name.tenant], self._total + len(self._in_flight)
        try:
            self.taking(TakenShare(topic.name.tenant, "idempotency_keys", used, total, IDEMPOTENCY_KEYS_TOTAL_MAX))
        except LimitExceeded as error:
            raise IdempotencyTableFull(str(error), **error.details) from error

    def _committed(
        self,
        topic: Topic,
        fact: IdempotencyKeyUsed,
        is_new: bool,
        stages: int,
        receipt: Answer,
        now_us: int,
        outcome: list[PartitionOffset] | HeadraceError,
    ) -> None:
        """Record the offsets, and answer all who asked."""
        if isinstance(outcome, HeadraceError):
            receipt.resolve(outcome)
            return
        self._total += is_new
        self._tenant_totals[topic.name.tenant] += is_new
        if len(outcome) != stages:  # the batches wait for disk space, and have no offsets yet
            receipt.resolve(
                Busy("the messages are committed, and become readable later; repeat the request for their offsets")
            )
            return
        offsets = [place.offset for place in outcome[: len(fact.parts)]]
        try:
            stored = IdempotencyReceiptStored(topic.id, fact.key_hash, offsets)
            self._ledger.record(now_us, stored)
        except (HeadraceError, OSError) as error:  # a repeated request searches for the offsets
            self._ledger.failures.note("receipt", error, "receipt of an idempotency key not recorded")
        receipt.resolve(_receipt(topic, fact, offsets, self._topics.durability_max))

    def _repeated(self, topic: Topic, used: IdempotencyKeyUsed, now_us: int) -> PublishedOnce | Answer:
        if used.number in self._ledger.state.unsettled and used.parts and not used.offsets:
            raise Busy(f"the messages published to {topic} under this idempotency key are not readable yet")
        if used.offsets or not used.parts:
            return self._ledger.durably(_as_repeated(_receipt(topic, used, used.offsets, self._topics.durability_max)))
        found: Answer = in_slices(self._ports, self._search(topic, used, now_us))
        return found

    def _search(self, topic: Topic, used: IdempotencyKeyUsed, now_us: int) -> Steps:
        """Find the offsets of the batches by the commit's mark in them."""
        offsets = []
        for index, (number, _, from_offset) in enumerate(used.parts):
            wanted = marked(used.number << STAGES_BITS | index)
            partition = self._topics.active(topic, number).partition
            offset = OFFSET_UNKNOWN
            begin = max(from_offset, partition.first_offset)
            for looked, batch in enumerate(partition.batches(begin, partition.next_offset), 1):
                if batch.producer == wanted:
                    offset = batch.base_offset
                    break
                if not looked % _SEARCHED_TOGETHER:
                    yield
            offsets.append(offset)
        self._ledger.record(now_us, IdempotencyReceiptStored(topic.id, used.key_hash, offsets))
        return _as_repeated(_receipt(topic, used, offsets, self._topics.durability_max))


def _receipt(topic: Topic, fact: IdempotencyKeyUsed, offsets: list[int], synced: Durability) -> PublishedOnce:
    receipts = [
        PublishReceipt(number, offset, count) for (number, count, _), offset in zip(fact.parts, offsets, strict=True)
    ]
    reached = synced if topic.settings.storage is Storage.DISK else Durability.MEMORY
    return PublishedOnce(receipts, int(reached))


def _answer_with(receipt: Answer, *, repeated: bool = False) -> Answer:
    """The answer to one request that waits for a receipt; whoever cancels it changes nothing for the others."""
    answer: Answer = PendingAnswer()
    receipt.then(lambda outcome: answer.resolve(_as_repeated(outcome) if repeated else outcome))
    return answer


def _as_repeated(outcome: PublishedOnce | HeadraceError) -> PublishedOnce:
    if isinstance(outcome, HeadraceError):
        return outcome  # type: ignore[return-value]  # a listener takes both
    return PublishedOnce(outcome.receipts, outcome.durability, repeated=True)


def _pass_error(receipt: Answer, outcome: object) -> None:
    if isinstance(outcome, HeadraceError):
        receipt.resolve(outcome)


def _check_hashes(request: PublishOnce) -> None:
    for name in ("key_hash", "request_hash"):
        content: bytes = getattr(request, name)
        if len(content) != HASH_BYTES:
            raise InvalidArgument(f"{name} has {HASH_BYTES} bytes, not {shown(content)}")


def _check_same(request: PublishOnce, request_hash: bytes) -> None:
    if request.request_hash != request_hash:
        raise IdempotencyKeyReused
