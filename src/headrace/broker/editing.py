"""Edits: messages that nobody has in hand can still be moved, changed and deleted by their owners."""

from collections.abc import Iterable

from headrace.broker.later import Later
from headrace.broker.leased_facts import Edited as EditedFact
from headrace.broker.ledger import Ledger
from headrace.broker.ports import Ports
from headrace.broker.subscriptions import Subscription, SubscriptionRegistry
from headrace.broker.topics import Topic, Topics
from headrace.engines.api import Content, Contents, EditRecord
from headrace.model.batch import Columns, check_messages, received
from headrace.model.errors import (
    InvalidArgument,
    MessageGone,
    MessageLeased,
    NotOwner,
    PartitionNotFound,
    StaleVersion,
)
from headrace.model.leasing import OWNER_HEADER, Change, Edit, Edited, MessageId, Outcome
from headrace.model.limits import LEASE_MESSAGES_MAX, PRIORITY_STORED_MAX, PRIORITY_STORED_MIN, TIMESTAMP_US_MAX
from headrace.model.requests import Words

APPLIED = "applied"


class Editing:
    """Changes messages; the answer for each is definite."""

    def __init__(self, topics: Topics, registry: SubscriptionRegistry, ledger: Ledger, ports: Ports) -> None:
        self._topics = topics
        self._registry = registry
        self._ledger = ledger
        self._ports = ports

    def edit(self, request: Edit, body: memoryview, now_us: int) -> Later[Words]:
        """Change messages that are named."""
        if len(request.messages) > LEASE_MESSAGES_MAX:
            raise InvalidArgument(f"at most {LEASE_MESSAGES_MAX} messages can be edited at once")
        topic = self._topics.get(request.topic)
        return self.change(topic, request.messages, request.change, request.owner, body, now_us)

    def change(
        self,
        topic: Topic,
        messages: Iterable[MessageId],
        change: Change,
        owner: str,
        body: memoryview,
        now_us: int,
        after: str = "",
    ) -> Later[Words]:
        """Change messages, and answer when that is safe."""
        content = _checked(topic, change, body)
        self._ledger.flush()  # what was decided about leases must count before this is decided
        subscriptions = self._registry.of_topic(topic)
        for subscription in subscriptions:
            self._registry.refresh(subscription, now_us)
        facts: dict[tuple[int, int], EditedFact] = {}
        outcomes: list[Outcome] = []
        for message in messages:
            place = message.partition, message.offset
            before = facts[place].edit if place in facts else None
            found = self._decide(topic, subscriptions, message, owner, before)
            if isinstance(found, EditRecord):
                edit = self._changed(topic, message, found, change, content)
                moved = change.due_us is not None or bool(change.shift_us)
                facts[place] = EditedFact(topic.id, *place, edit, moved, now_us)
                found = Outcome(*place, APPLIED, edit.version)
            outcomes.append(found)
        if facts:
            self._ledger.record(now_us, *facts.values())
            for subscription in subscriptions:
                if subscription.wants:
                    self._ports.soon(lambda each=subscription: self._registry.served(each))  # type: ignore[misc]
        return self._ledger.durably(Edited(outcomes, after))

    def _decide(
        self,
        topic: Topic,
        subscriptions: list[Subscription],
        message: MessageId,
        owner: str,
        before: EditRecord | None,
    ) -> EditRecord | Outcome:
        """The message's edits so far, if it may be edited, or what is said instead."""
        partition, offset = message.partition, message.offset
        try:
            lane = self._topics.lane(topic, partition)
        except PartitionNotFound:
            return Outcome(partition, offset, MessageGone.code)
        record = before or self._ledger.state.leased.edits_of(topic.id, partition).get(offset) or EditRecord(1)
        gone = not lane.partition.first_offset <= offset < lane.end_offset or record.deleted
        settled = [one.is_settled(partition, offset) for one in subscriptions]
        if gone or (settled and all(settled)):
            return Outcome(partition, offset, MessageGone.code)
        for one in subscriptions:
            holder = one.indexes[partition].holder(offset) if partition in one.indexes else None
            if holder is not None:
                return Outcome(partition, offset, MessageLeased.code, record.version, holder)
        theirs = self._owner(topic, partition, offset, record)
        if theirs is None:
            return Outcome(partition, offset, MessageGone.code)
        if theirs and theirs != owner.encode():
            return Outcome(partition, offset, NotOwner.code, record.version)
        if message.version is not None and message.version != record.version:
            return Outcome(partition, offset, StaleVersion.code, record.version)
        return record

    def _owner(self, topic: Topic, partition: int, offset: int, record: EditRecord) -> bytes | None:
        """Whom a message belongs to; empty: to nobody. None when there is no message."""
        if record.content is not None:
            return (record.content.headers or {}).get(OWNER_HEADER, b"")
        columns, there, _ = Contents(self._topics.lane(topic, partition).partition).read([offset])
        if not there:
            return None
        headers = columns.headers[0] if columns.headers is not None else None
        return (headers or {}).get(OWNER_HEADER, b"")

    def _changed(
        self, topic: Topic, message: MessageId, record: EditRecord, change: Change, content: Content | None
    ) -> EditRecord:
        due = record.due if change.due_us is None else change.due_us
        if change.shift_us:
            columns, _, _ = Contents(self._topics.lane(topic, message.partition).partition).read([message.offset])
            given = columns.dues[0] if columns.dues is not None else None
            base = next(time for time in (record.due, given, (columns.timestamps or [0])[0]) if time is not None)
            due = min(max(base + change.shift_us, 0), TIMESTAMP_US_MAX)
        if content is not None:
            owner = self._owner(topic, message.partition, message.offset, record)
            if owner:  # stays whoever's it is
                content = Content(content.value, {**(content.headers or {}), OWNER_HEADER: owner})
                check_messages(Columns([content.value], headers=[content.headers]), topic.settings.message_bytes_max)
        priority = record.priority if change.priority is None else change.priority
        return EditRecord(record.version + 1, due, priority, content or record.content, change.delete)


def _checked(topic: Topic, change: Change, body: memoryview) -> Content | None:
    """The new value and headers, if there are to be any."""
    if change.due_us is not None and change.shift_us:
        raise InvalidArgument("give either due_us or shift_us, not both")
    if change.due_us is not None and not 0 <= change.due_us <= TIMESTAMP_US_MAX:
        raise InvalidArgument(f"due_us cannot be {change.due_us}")
    if change.priority is not None and not PRIORITY_STORED_MIN <= change.priority <= PRIORITY_STORED_MAX:
        raise InvalidArgument(f"a priority is {PRIORITY_STORED_MIN} to {PRIORITY_STORED_MAX}, not {change.priority}")
    changes = (change.due_us is not None, change.shift_us, change.priority is not None, change.replace)
    if change.delete == any(changes):
        raise InvalidArgument(
            "say what to change: due_us or shift_us, priority, replace; or delete, which excludes them"
        )
    if not change.replace:
        return None
    batch = received(body)
    columns = batch.columns()
    if batch.count != 1:
        raise InvalidArgument(f"the new value comes as one message, not {batch.count}")
    check_messages(columns, topic.settings.message_bytes_max)
    return Content(columns.values[0], columns.headers[0] if columns.headers is not None else None)
