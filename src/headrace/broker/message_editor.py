"""Edits: owners can move, change and delete messages that no consumer holds."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from headrace.broker.leased_facts import MessageEdited as EditedFact
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.slices import TimedSteps
from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.turns import Turns
from headrace.broker.views import check_stores
from headrace.engines.api import Content, EditRecord, StoredMessages, stored_messages
from headrace.model.batch import check_messages, received
from headrace.model.errors import (
    HeadraceError,
    InvalidArgument,
    MessageGone,
    MessageLeased,
    MessageTooLarge,
    NotOwner,
    PartitionNotFound,
    StaleVersion,
    TopicNotFound,
)
from headrace.model.headers import header_text, replaced_headers
from headrace.model.leasing import OWNER_HEADER, Edit, Edited, EditOutcome, MessageChange, MessageId
from headrace.model.limits import LEASE_MESSAGES_MAX, PRIORITY_STORED_MAX, PRIORITY_STORED_MIN, TIMESTAMP_US_MAX
from headrace.model.message import message_size

APPLIED = "applied"
EDITS_TOGETHER = 32
"""Messages edited per slice."""


class MessageEdit(NamedTuple):
    """A change to messages, and the owner that asks for it."""

    change: MessageChange
    content: Content | None
    owner: str
    owned_only: bool = False
    """Whether messages without an owner are refused, too."""


class _Stored(NamedTuple):
    """The stored fields of a message that edits need."""

    owner: bytes
    """Empty if the message has no owner."""
    ready_us: int
    """The due time at publishing."""


_Places = dict[tuple[int, int], _Stored]


class MessageEditor:
    """Edits messages; the outcome of each is final."""

    def __init__(self, topics: TopicRegistry, registry: SubscriptionRegistry, ledger: Ledger, turns: Turns) -> None:
        self._topics = topics
        self._registry = registry
        self._ledger = ledger
        self._turns = turns
        self._contents: tuple[tuple[int, int], StoredMessages] | None = None
        """Caches batches of the partition edited last without a subscription, to decode each once."""

    def edit(self, request: Edit, body: memoryview, now_us: int, *, owned_only: bool = False) -> PendingAnswer[Edited]:
        """Edit the given messages; with `owned_only` none but those of the request's owner."""
        if len(request.messages) > LEASE_MESSAGES_MAX:
            raise InvalidArgument(f"at most {LEASE_MESSAGES_MAX} messages can be edited at once")
        topic = self._topics.get(request.topic)
        check_stores(str(topic), topic.settings, "edit messages of")
        edition = checked_edit(topic, request.change, request.owner, body, owned_only=owned_only)
        if request.topic_id not in (0, topic.id):  # the offsets belong to a deleted topic of that name
            return self.answer([EditOutcome(one.partition, one.offset, MessageGone.code) for one in request.messages])
        return self._turns.in_slices(self._edit(topic, request.messages, edition, now_us))

    def _edit(self, topic: Topic, messages: Sequence[MessageId], edition: MessageEdit, now_us: int) -> TimedSteps:
        outcomes: list[EditOutcome] = []
        for start in range(0, len(messages), EDITS_TOGETHER):
            if start:
                now_us = yield
            try:
                outcomes += self.apply(topic, messages[start : start + EDITS_TOGETHER], edition, now_us)
            except HeadraceError as error:
                if not outcomes:
                    raise
                outcomes += [EditOutcome(one.partition, one.offset, error.code) for one in messages[start:]]
                break
        return self.answer(outcomes)

    def answer(self, outcomes: list[EditOutcome], after: str = "") -> PendingAnswer[Edited]:
        """Answer with the outcomes once the journal is synced."""
        return self._ledger.durably(Edited(outcomes, after))

    def apply(
        self, topic: Topic, messages: Sequence[MessageId], edition: MessageEdit, now_us: int
    ) -> list[EditOutcome]:
        """Edit a portion of the messages; the editable ones atomically."""
        if self._topics.by_id.get(topic.id) is not topic:
            raise TopicNotFound(f"the topic {topic} was deleted")
        self._ledger.flush()  # decisions about leases must be applied first
        subscriptions = self._registry.of_topic(topic)
        for subscription in subscriptions:
            self._registry.refresh(subscription, now_us)
        stored = self._read(topic, subscriptions, messages)
        facts: dict[tuple[int, int], EditedFact] = {}
        outcomes: list[EditOutcome] = []
        for message in messages:
            place = message.partition, message.offset
            record = facts[place].edit if place in facts else self._ledger.state.leased.edit_of(topic.id, *place)
            refused = _refusal(subscriptions, message, record, stored, edition)
            if refused is None:
                edit = _changed(subscriptions, place, record, stored[place], edition)
                if _is_too_large(edit, edition, topic.settings.message_bytes_max):
                    outcomes.append(EditOutcome(*place, MessageTooLarge.code, record.version))
                    continue
                moved = edition.change.due_us is not None or bool(edition.change.shift_us)
                facts[place] = EditedFact(topic.id, *place, edit, moved, now_us)
                refused = EditOutcome(*place, APPLIED, edit.version)
            outcomes.append(refused)
        if facts:
            self._ledger.record(now_us, *facts.values())
            for subscription in subscriptions:
                if subscription.pending_leases:
                    self._turns.call_soon(partial(self._registry.ready, subscription))
        return outcomes

    def _read(self, topic: Topic, subscriptions: list[Subscription], messages: Iterable[MessageId]) -> _Places:
        """The messages that exist; decodes each batch at most once."""
        offsets: dict[int, set[int]] = {}
        for message in messages:
            offsets.setdefault(message.partition, set()).add(message.offset)
        found: _Places = {}
        for number, wanted in offsets.items():
            try:
                active = self._topics.active(topic, number)
            except PartitionNotFound:
                continue
            first, end = active.partition.first_offset, active.end_offset
            within = sorted(offset for offset in wanted if first <= offset < end)
            columns, there = self._contents_of(topic, number, subscriptions).read_stored(within)
            for at, offset in enumerate(there):
                headers = (columns.headers[at] if columns.headers is not None else None) or {}
                due = columns.dues[at] if columns.dues is not None else None
                ready_us = due if due is not None else (columns.timestamps or [0])[at]
                found[number, offset] = _Stored(header_text(headers, OWNER_HEADER), ready_us)
        return found

    def _contents_of(self, topic: Topic, number: int, subscriptions: list[Subscription]) -> StoredMessages:
        for subscription in subscriptions:
            index = subscription.indexes.get(number)
            if index is not None:
                return index
        if self._contents is None or self._contents[0] != (topic.id, number):
            self._contents = (topic.id, number), stored_messages(self._topics.active(topic, number).partition)
        return self._contents[1]


def _refusal(
    subscriptions: list[Subscription], message: MessageId, record: EditRecord, stored: _Places, edition: MessageEdit
) -> EditOutcome | None:
    """Why a message may not be edited; None if it may."""
    place = message.partition, message.offset
    if place not in stored:
        return EditOutcome(*place, MessageGone.code)
    owner = _owner(record, stored[place])
    stranger = owner != edition.owner.encode() and (bool(owner) or edition.owned_only)
    if record.deleted:
        # A client that lost the answer repeats the request.
        again = edition.change.delete and not stranger and message.version in (None, record.version - 1, record.version)
        return EditOutcome(*place, APPLIED if again else MessageGone.code, record.version if again else 0)
    settled = [one.is_settled(*place) for one in subscriptions]
    if settled and all(settled):
        return EditOutcome(*place, MessageGone.code)
    for one in subscriptions:
        holder = one.indexes[place[0]].holder(place[1]) if place[0] in one.indexes else None
        if holder is not None:
            return EditOutcome(*place, MessageLeased.code, record.version, holder)
    if stranger:
        return EditOutcome(*place, NotOwner.code, record.version)
    if message.version not in (None, record.version):
        return EditOutcome(*place, StaleVersion.code, record.version)
    return None


def _owner(record: EditRecord, stored: _Stored) -> bytes:
    """The owner of a message; empty if it has none."""
    if record.content is None:
        return stored.owner
    return header_text(record.content.headers or {}, OWNER_HEADER)


def _changed(
    subscriptions: list[Subscription],
    place: tuple[int, int],
    record: EditRecord,
    stored: _Stored,
    edition: MessageEdit,
) -> EditRecord:
    """The message's edits, merged with this one."""
    change, content, owner = edition.change, edition.content, _owner(record, stored)
    if change.delete:
        left = Content(None, {OWNER_HEADER: owner}) if record.content is not None else None
        return EditRecord(record.version + 1, content=left, deleted=True)
    due = record.due if change.due_us is None else change.due_us
    if change.shift_us:
        indexes = [one.indexes[place[0]] for one in subscriptions if place[0] in one.indexes]
        rests = [rest_us for index in indexes if (rest_us := index.rests_until(place[1])) is not None]
        base_us = max(rests, default=stored.ready_us if record.due is None else record.due)
        due = min(max(base_us + change.shift_us, 0), TIMESTAMP_US_MAX)
    if content is not None and owner:  # the owner stays
        content = Content(content.value, replaced_headers(content.headers, {OWNER_HEADER: owner}))
    priority = record.priority if change.priority is None else change.priority
    return EditRecord(record.version + 1, due, priority, content or record.content)


def _is_too_large(edit: EditRecord, edition: MessageEdit, bytes_max: int) -> bool:
    """Whether a new value is too large together with the header that names its owner."""
    if edition.content is None or edit.content is None:
        return False
    return message_size(edit.content.value, None, edit.content.headers) > bytes_max


def checked_edit(
    topic: Topic, change: MessageChange, owner: str, body: memoryview, *, owned_only: bool = False
) -> MessageEdit:
    """The edit that a request asks for; raises if it is invalid."""
    if change.due_us is not None and change.shift_us:
        raise InvalidArgument("give either due_us or shift_us, not both")
    if change.due_us is not None and not 0 <= change.due_us <= TIMESTAMP_US_MAX:
        raise InvalidArgument(f"due_us must be a timestamp, not {change.due_us}")
    if change.priority is not None and not PRIORITY_STORED_MIN <= change.priority <= PRIORITY_STORED_MAX:
        raise InvalidArgument(f"priority must be {PRIORITY_STORED_MIN} to {PRIORITY_STORED_MAX}, not {change.priority}")
    changes = (change.due_us is not None, change.shift_us, change.priority is not None, change.replace)
    if change.delete == any(changes):
        raise InvalidArgument(
            "say what to change: due_us or shift_us, priority, replace; or delete, which excludes them"
        )
    if not change.replace:
        return MessageEdit(change, None, owner, owned_only)
    batch = received(body)
    columns = batch.columns()
    if batch.count != 1:
        raise InvalidArgument(f"the new value must be a batch of one message, not {batch.count}")
    check_messages(columns, topic.settings.message_bytes_max, str(topic))
    headers = columns.headers[0] if columns.headers is not None else None
    return MessageEdit(change, Content(columns.values[0], headers), owner, owned_only)
