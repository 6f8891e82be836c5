"""Dead letters: messages that could not be processed go to a topic of their own, and can be put back from there."""

from collections.abc import Generator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import msgspec

from headrace.broker.failure_log import FailureLog
from headrace.broker.leased_facts import MessagesSettled
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.result_topics import JobFailure, ResultTopics
from headrace.broker.signal import Signal
from headrace.broker.slices import Steps
from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.broker.turns import Turns
from headrace.broker.views import check_stores
from headrace.engines.api import LeasedPartition, ReleaseNote, as_headrace_error, packed
from headrace.model.batch import Batch, Columns, encode, message_bytes
from headrace.model.errors import HeadraceError, SubscriptionNotFound
from headrace.model.headers import Headers, header_text, replaced_headers, without_headers
from headrace.model.job_requests import REPLY_HEADER
from headrace.model.leasing import SUBSCRIPTION_HEADER, Redriven
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.model.names import derived_topic
from headrace.model.requests import Done, PartitionOffset, TopicCreate
from headrace.model.subscription import DEAD_SUFFIX, SubscriptionSettings

REDRIVE = "redrive"
"""The subscription of a dead letter topic that knows which messages were not put back yet."""
PREFIX = "headrace-dead-"
LOST_HEADER = f"{PREFIX}lost"
"""Of a dead letter without a value: how many messages, from its offset on, are damaged in the log."""
_LOST_AGAIN_US = 1_000_000
_BATCH_COUNT = 1000
_BATCH_BYTES = 8 << 20
_BURIED_BYTES = 8 << 20
_BURIED_TOGETHER = 250
"""What is read and sent at a time: so many bytes and messages."""
_LEARNT_TOGETHER = 200
_LOOKED_AT_TOGETHER = 1000


class BuriedMessages(NamedTuple):
    """Messages of a partition that have become dead letters together."""

    subscription: Subscription
    partition: int
    offsets: Sequence[int]
    reason: str
    """Why the first of them did."""
    holder: str
    """The client that had the first of them last; empty if none had."""
    time_us: int


class DeadLetters:
    """Sends messages to dead letter topics, and back. Each is in exactly one place, whatever happens."""

    def __init__(
        self,
        topics: TopicRegistry,
        registry: SubscriptionRegistry,
        transactions: Transactions,
        results: ResultTopics,
        failures: FailureLog,
        turns: Turns,
    ) -> None:
        self._topics = topics
        self._registry = registry
        self._transactions = transactions
        self._results = results
        self._failures = failures
        self._turns = turns
        self.buried: Signal[BuriedMessages] = Signal()
        """Messages have become dead letters."""
        self.refused: Signal[Topic, int, str, Sequence[str], int] = Signal()
        """Middleware has refused messages of a topic and partition, which are dead letters: its name, reasons, time."""
        self.redriven: Signal[Subscription, int] = Signal()
        """So many dead letters were put back."""
        self._origins: dict[tuple[int, int], _Origins] = {}
        """Whose the dead messages are, by the subscription that has them and partition."""

    def count(self, subscription: Subscription, now_us: int) -> Generator[None, int, int]:
        """How many of a subscription's messages are dead: as many as a search for them finds; in slices."""
        dead = self._found(subscription)
        if dead is not None and dead.failure:
            return 0  # nobody knows
        if dead is None:
            return 0
        self._registry.refresh(dead, now_us)
        yield from self._learn(dead)
        whose = str(subscription.topic).encode(), subscription.name.encode()
        total = 0
        for number, index in dead.indexes.items():
            origins = self._origins.get((dead.id, number))  # none of a partition that was opened since
            total += index.count_marked(origins.marks.get(whose, {})) if origins is not None else 0
        return total

    def learn(self) -> Steps:
        """Learn in slices whose the dead messages are, so that counting them does not have to."""
        dead = []
        for at, one in enumerate(self._registry, 1):
            if one.name == REDRIVE:
                dead.append(one)
            if not at % _LOOKED_AT_TOGETHER:
                yield
        known = {one.id for one in dead}
        self._origins = {key: found for key, found in self._origins.items() if key[0] in known}
        for at, one in enumerate(dead, 1):
            yield from self._learn(one)
            if not at % _LEARNT_TOGETHER:
                yield

    def _learn(self, dead: Subscription) -> Steps:
        """Read the headers of dead messages that are new; of all if any was edited."""
        for number, index in list(dead.indexes.items()):
            origins = self._origins.get((dead.id, number))
            if origins is None or index.is_edited:
                origins = self._origins[dead.id, number] = _Origins()
            while origins.end < index.end:
                offsets = list(islice(index.offsets("", origins.end), _LEARNT_TOGETHER))
                for columns, there in index.parts(offsets):
                    for offset, headers in zip(there, columns.headers or (), strict=False):
                        given = headers or {}
                        whose = header_text(given, f"{PREFIX}topic"), header_text(given, f"{PREFIX}subscription")
                        index.mark(origins.marks.setdefault(whose, {}), offset)
                origins.end = offsets[-1] + 1 if len(offsets) == _LEARNT_TOGETHER else index.end
                yield

    def subscription(self, subscription: Subscription) -> Subscription | None:
        """The subscription that has a subscription's dead messages, if there ever were any."""
        found = self._found(subscription)
        if found is not None:
            found.check()
        return found

    def _found(self, subscription: Subscription) -> Subscription | None:
        topic = self._topics.find(dead_topic(subscription))
        return self._registry.find(topic, REDRIVE) if topic is not None else None

    def bury(
        self,
        subscription: Subscription,
        partition: int,
        offsets: list[int],
        reason: str,
        now_us: int,
        *,
        code: str,
        counted: bool,
    ) -> PendingAnswer[Done]:
        """Send messages to the dead letter topic; resolves when they are there and nowhere else.

        `code`: the error that those are told who wait for the results of jobs among them.
        `counted`: their last delivery is among those in vain already.
        """
        index = subscription.indexes[partition]
        holders = index.last_holders(offsets)
        index.leave(offsets)
        about = {offset: _About(reason, holder, counted, code) for offset, holder in zip(offsets, holders, strict=True)}
        burial = _Burial(subscription, partition, index, about, now_us, PendingAnswer())
        self._bury(burial, offsets)
        return burial.pending_answer

    def _bury(self, burial: "_Burial", offsets: Sequence[int]) -> None:
        """Send messages in portions, each small enough for memory and for a slice."""
        if not offsets:
            burial.pending_answer.resolve(Done())
            self._registry.serve_soon(burial.subscription)  # the next ones of their keys can be had
            return
        try:
            committed, rest = self._commit_letters(burial, offsets)
        except (HeadraceError, OSError) as error:
            self._stay(burial, offsets, error if isinstance(error, HeadraceError) else as_headrace_error(error))
            return
        committed.then(partial(self._go_on, burial, offsets, rest))

    def _go_on(self, burial: "_Burial", offsets: Sequence[int], rest: Sequence[int], outcome: object) -> None:
        """The first of these have been sent, or not: send the rest."""
        if isinstance(outcome, HeadraceError):
            self._stay(burial, offsets, outcome)
            return
        left = set(rest[:_BURIED_TOGETHER])
        sent = [offset for offset in offsets[:_BURIED_TOGETHER] if offset not in left]
        if sent:
            reason, holder, *_ = burial.about[sent[0]]
            self.buried(BuriedMessages(burial.subscription, burial.partition, sent, reason, holder, burial.now_us))
        if rest and self._is_there(burial.subscription):
            self._turns.call_at_turn_end(lambda _: self._bury(burial, rest))
        else:
            self._bury(burial, ())

    def _commit_letters(
        self, burial: "_Burial", offsets: Sequence[int]
    ) -> tuple[PendingAnswer[list[PartitionOffset]], Sequence[int]]:
        """Send the first of them; returns what becomes of that, and which are left."""
        subscription, partition, index, about, now_us, _ = burial
        topic = self._dead_topic(subscription, now_us)
        offsets, pending_answer = offsets[:_BURIED_TOGETHER], offsets[_BURIED_TOGETHER:]
        columns, there, rest = index.read_some(offsets, _BURIED_BYTES)
        batches, failed = self._letters(subscription, partition, index, columns, there, about, now_us)
        for damaged in index.damaged_among([one for one in offsets if one not in {*there, *rest}]):
            batches.append(self._lost_letter(subscription, partition, damaged, now_us))
        target, left = partition % topic.settings.partitions, set(rest)
        finished = MessagesSettled(subscription.id, partition, packed([one for one in offsets if one not in left]))
        told = self._results.failures(subscription, partition, failed, now_us)
        committed = self._transactions.commit_internal(
            [*((topic, target, batch) for batch in batches), *told], [finished], now_us
        )
        return committed, [*rest, *pending_answer]

    def drop(
        self, subscription: Subscription, partition: int, offsets: Sequence[int], code: str, reason: str, now_us: int
    ) -> PendingAnswer[Done] | None:
        """Settle messages without a dead letter, and tell those who wait for their results.

        Returns None if nobody waits: nothing was done.
        """
        if not self._results.exists(subscription.topic.name.tenant):
            return None
        index = subscription.indexes[partition]
        failed = []
        for columns, there in index.parts(offsets):
            deliveries = index.failures(there)
            for offset, headers, count in zip(there, columns.headers or (), deliveries, strict=False):
                failed.append(JobFailure(headers, offset, code, reason, count))
        told = self._results.failures(subscription, partition, failed, now_us)
        if not told:
            return None
        index.leave(offsets)
        burial = _Burial(subscription, partition, index, {}, now_us, PendingAnswer())
        finished = MessagesSettled(subscription.id, partition, packed(offsets))
        self._transactions.commit_internal(told, [finished], now_us).then(partial(self._dropped, burial, offsets))
        return burial.pending_answer

    def _dropped(self, burial: "_Burial", offsets: Sequence[int], outcome: object) -> None:
        if isinstance(outcome, HeadraceError):
            self._stay(burial, offsets, outcome)
        else:
            self._bury(burial, ())

    def bury_lost(self, subscription: Subscription, partition: int, damaged: range, now_us: int) -> None:
        """Send a dead letter that stands for messages which are damaged in the log; tried again if that fails."""
        index = subscription.indexes[partition]

        def sent(outcome: object) -> None:
            if isinstance(outcome, HeadraceError) and self._is_there(subscription):
                text = "dead letter of damaged messages not written; trying again  subscription=%s"
                self._failures.note(("lost", subscription.id, damaged.start), outcome, text, subscription)
                index.lose_later(damaged, now_us + _LOST_AGAIN_US)
            if not isinstance(outcome, HeadraceError):
                reason = f"lost: {offsets_text(damaged)} are damaged in the log"
                self.buried(BuriedMessages(subscription, partition, damaged, reason, "", now_us))
            self._registry.ready(subscription, now_us)  # others of their keys can be had, or the next try is planned

        try:
            topic = self._dead_topic(subscription, now_us)
            letter = self._lost_letter(subscription, partition, damaged, now_us)
            finished = MessagesSettled(subscription.id, partition, packed(damaged))
            place = topic, partition % topic.settings.partitions
            self._transactions.commit_internal([(*place, letter)], [finished], now_us).then(sent)
        except (HeadraceError, OSError) as error:
            sent(error if isinstance(error, HeadraceError) else as_headrace_error(error))

    def _lost_letter(self, subscription: Subscription, partition: int, damaged: range, now_us: int) -> Batch:
        """A message without a value that tells which others are lost."""
        reason = f"lost: {offsets_text(damaged)} are damaged in the log"
        about = _about(subscription, partition, damaged.start, reason, 0, [], now_us)
        return encode(Columns([None], headers=[{**about, LOST_HEADER: b"%d" % len(damaged)}]), now_us)

    def _stay(self, burial: "_Burial", offsets: Sequence[int], error: HeadraceError) -> None:
        if self._is_there(burial.subscription):
            text = "dead messages not moved; they can be leased again  subscription=%s"
            self._failures.note(("dead", burial.subscription.id, burial.now_us), error, text, burial.subscription)
            burial.leased.stay(offsets, burial.now_us)
            self._registry.ready(burial.subscription, burial.now_us)
        burial.pending_answer.resolve(error)

    def _is_there(self, subscription: Subscription) -> bool:
        """Whether it was not deleted since."""
        return self._registry.find(subscription.topic, subscription.name) is subscription

    def redrive(
        self, subscription: Subscription, dead: Subscription, found: dict[int, list[int]], now_us: int
    ) -> Generator[None, int, PendingAnswer[Redriven]]:
        """Put dead messages back, by partition of the dead letter topic, in slices; resolves with their number."""
        indexes = dict(dead.indexes)  # as they are now: it may be reset meanwhile
        for partition, offsets in found.items():
            indexes[partition].leave(offsets)
        try:
            batches: list[tuple[Topic, int, Batch]] = []
            for partition, offsets in found.items():
                for start in range(0, len(offsets), _BURIED_TOGETHER):
                    if batches:
                        yield
                    columns, there = indexes[partition].read(offsets[start : start + _BURIED_TOGETHER])
                    if there:
                        batches += self._revived(subscription, columns, now_us)
            if not self._is_there(subscription) or any(dead.indexes.get(at) is not indexes[at] for at in found):
                raise SubscriptionNotFound(f"{subscription} or {dead} was deleted or reset; nothing was put back")
        except (HeadraceError, OSError):
            self._stay_dead(indexes, found, now_us)
            raise
        pending_answer: PendingAnswer[Redriven] = PendingAnswer()

        def done(outcome: object) -> None:
            if isinstance(outcome, HeadraceError):
                self._stay_dead(indexes, found, now_us)
                pending_answer.resolve(outcome)
            else:
                count = sum(map(len, found.values()))
                self.redriven(subscription, count)
                pending_answer.resolve(Redriven(count))

        facts = [MessagesSettled(dead.id, partition, packed(offsets)) for partition, offsets in found.items()]
        self._transactions.commit_internal(batches, list(facts), now_us).then(done)
        return pending_answer

    def _stay_dead(self, indexes: dict[int, LeasedPartition], found: dict[int, list[int]], now_us: int) -> None:
        """These could not be put back."""
        for partition, offsets in found.items():
            indexes[partition].stay(offsets, now_us)

    def _revived(self, subscription: Subscription, columns: Columns, now_us: int) -> list[tuple[Topic, int, Batch]]:
        """The messages as they were before they died, by the partition where that was."""
        topic = self._topics.source_of(subscription.topic)
        by_partition: dict[int, list[int]] = {}
        headers: list[Headers | None] = []
        last = subscription.topic.settings.partitions - 1
        for index, each in enumerate(columns.headers or ()):
            given = each or {}
            own = without_headers(given, lambda name: name.startswith(PREFIX))
            headers.append(replaced_headers(own, {SUBSCRIPTION_HEADER: subscription.address.encode()}))
            text = header_text(given, f"{PREFIX}partition")  # anybody can publish there
            partition = min(int(text), last) if text.isdigit() and len(text) < 10 else 0
            by_partition.setdefault(partition, []).append(index)
        revived = msgspec.structs.replace(columns, headers=headers, dues=None, places=None)
        if columns.expires is not None:
            revived.expires = [end if end is not None and end > now_us else None for end in columns.expires]
        batches = []
        for partition, indices in by_partition.items():
            chosen = revived.picked(indices, indices)
            chosen.places = None
            batches += [(topic, partition, batch) for batch in divided_batches(chosen, now_us)]
        return batches

    def _dead_topic(self, subscription: Subscription, now_us: int) -> Topic:
        """The dead letter topic of a subscription."""
        return self.open_topic(dead_topic(subscription), subscription.topic.settings.partitions, now_us)

    def open_topic(self, name: str, partitions: int, now_us: int) -> Topic:
        """The dead letter topic, made if there is none, with the subscription that counts what is in it."""
        settings = {"partitions": partitions}
        topic = self._topics.create(TopicCreate(name, settings, exist_ok=True), now_us)
        check_stores(str(topic), topic.settings, "put dead letters into")
        if self._registry.find(topic, REDRIVE) is None:
            self._registry.make(topic, REDRIVE, SubscriptionSettings(), {}, now_us)
        return topic

    def _letters(
        self,
        subscription: Subscription,
        partition: int,
        index: LeasedPartition,
        columns: Columns,
        offsets: Sequence[int],
        about: "dict[int, _About]",
        now_us: int,
    ) -> tuple[list[Batch], list[JobFailure]]:
        """The messages with headers that tell what happened to them, and the jobs among them that are answered."""
        if not offsets:
            return [], []
        failures = index.failures(offsets)
        headers: list[Headers | None] = []
        failed: list[JobFailure] = []
        for place, offset in enumerate(offsets):
            own = columns.headers[place] if columns.headers is not None else None
            if own and SUBSCRIPTION_HEADER in own:  # it was redriven before
                own = without_headers(own, lambda name: name == SUBSCRIPTION_HEADER)
            reason, holder, counted, code = about[offset]
            notes = [*index.release_notes(offset), ReleaseNote(now_us, holder, reason)]
            deliveries = failures[place] + (bool(holder) and not counted)
            told = _about(subscription, partition, offset, reason, deliveries, notes, now_us)
            if own and REPLY_HEADER in own:
                failed.append(JobFailure(own, offset, code, reason, deliveries))
                told[f"{PREFIX}reply"] = header_text(own, REPLY_HEADER)  # a job that is put back is not answered again
                own = without_headers(own, lambda name: name == REPLY_HEADER)
            headers.append(replaced_headers(own, told))
        changed = msgspec.structs.replace(columns, headers=headers, dues=None, expires=None)
        return divided_batches(changed, now_us), failed


class _Origins:
    """Whose the dead messages of a partition are, as far as they were looked at."""

    def __init__(self) -> None:
        self.end = 0
        self.marks: dict[tuple[bytes, bytes], dict[int, bytearray]] = {}
        """By topic and subscription."""


class _About(NamedTuple):
    """Why a message became a dead letter."""

    reason: str
    holder: str
    counted: bool
    code: str


class _Burial(NamedTuple):
    """Messages of a partition on their way to the dead letter topic."""

    subscription: Subscription
    partition: int
    leased: LeasedPartition
    about: dict[int, _About]
    now_us: int
    pending_answer: PendingAnswer[Done]


def dead_topic(subscription: Subscription) -> str:
    """The name of a subscription's dead letter topic."""
    return subscription.settings.dead_letter_topic or derived_topic(str(subscription.topic), DEAD_SUFFIX)


def has_foreign_dead_letters(subscription: Subscription) -> bool:
    """Whether the dead letters of a subscription go to another topic than the one that its own topic has for them."""
    return dead_topic(subscription) != derived_topic(str(subscription.topic), DEAD_SUFFIX)


def _about(
    subscription: Subscription,
    partition: int,
    offset: int,
    reason: str,
    deliveries: int,
    notes: list[ReleaseNote],
    now_us: int,
) -> dict[str, bytes | None]:
    """The headers that tell what happened to a message."""
    return {
        f"{PREFIX}reason": reason.encode(),
        f"{PREFIX}topic": str(subscription.topic).encode(),
        f"{PREFIX}partition": b"%d" % partition,
        f"{PREFIX}offset": b"%d" % offset,
        f"{PREFIX}subscription": subscription.name.encode(),
        f"{PREFIX}deliveries": b"%d" % deliveries,
        f"{PREFIX}time": b"%d" % now_us,
        f"{PREFIX}history": _history(notes),
    }


def offsets_text(offsets: range) -> str:
    """A range of offsets as text."""
    return f"message {offsets.start}" if len(offsets) == 1 else f"messages {offsets.start} to {offsets.stop - 1}"


def _history(notes: list[ReleaseNote]) -> bytes:
    return msgspec.json.encode(
        [{"time": note.time_us, "holder": note.holder, "reason": note.reason[-200:]} for note in notes]
    )


def divided_batches(columns: Columns, now_us: int) -> list[Batch]:
    """Messages in batches that are not too large."""
    batches: list[Batch] = []
    begin = size = 0
    for index in range(len(columns.values)):
        size += message_bytes(columns, index)
        if index + 1 == len(columns.values) or index + 1 - begin == _BATCH_COUNT or size > _BATCH_BYTES:
            chosen = columns.picked(range(begin, index + 1), range(len(columns.values)))
            chosen.places = None
            chosen.origins = None
            batches.append(encode(chosen, now_us, message_bytes_max=BATCH_BYTES_MAX))
            begin, size = index + 1, 0
    return batches
