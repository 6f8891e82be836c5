"""Writes audit trails: a topic of each tenant, in which each record has the digest of the one before."""

import logging
from collections import deque
from functools import partial
from typing import Any

from headrace.broker.active_partition import ActivePartition
from headrace.broker.audit_facts import AuditCheckpointed
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.topics import TopicRegistry
from headrace.broker.turns import Turns
from headrace.engines.api import as_headrace_error
from headrace.model.audit import (
    BROKEN,
    SUMMARY,
    AuditHead,
    AuditRecord,
    decode_record,
    encode_record,
    record_digest,
)
from headrace.model.batch import Columns, encode
from headrace.model.errors import DiskFull, HeadraceError, InvalidArgument
from headrace.model.limits import AUDIT_PENDING_MAX
from headrace.model.requests import Done, Publish, Published, TopicCreate
from headrace.model.system_topics import AUDIT_TOPIC
from headrace.model.topic import TopicName

logger = logging.getLogger("headrace.security")

_TOGETHER = 200
"""Maximum records of a batch."""
_CHECKPOINT_US = 10_000_000
"""How often the end of a trail is noted in the journal, while records come."""


class _Trail:
    """The trail of one tenant."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.waiting: deque[tuple[dict[str, Any], PendingAnswer[Done]]] = deque()
        self.head: AuditHead | None = None
        """The last stored record; None: not known before the topic is read."""
        self.is_writing = False
        self.lost = 0
        """Records that could not be stored, and that no record tells of yet."""


class AuditWriter:
    """Appends records to the trails, one batch after the other. Nothing that goes wrong here reaches the caller."""

    def __init__(self, topics: TopicRegistry, ledger: Ledger, turns: Turns) -> None:
        self._topics = topics
        self._ledger = ledger
        self._turns = turns
        self._trails: dict[str, _Trail] = {}
        self._muted: set[str] = set()
        """Tenants that are being deleted."""
        self._is_scheduled = False
        self._checkpoint_us = 0

    @property
    def idle(self) -> bool:
        """Whether all records are stored."""
        return not any(trail.waiting or trail.is_writing for trail in self._trails.values())

    def write(self, tenant: str, fields: dict[str, Any]) -> PendingAnswer[Done]:
        """Append a record to the trail of a tenant; resolves when it is stored, or cannot be."""
        stored: PendingAnswer[Done] = PendingAnswer()
        trail = self._trail(tenant)
        if tenant in self._muted:
            stored.resolve(Done())
        elif len(trail.waiting) >= AUDIT_PENDING_MAX:
            trail.lost += 1
            stored.resolve(Done())
        else:
            trail.waiting.append((fields, stored))
            if not self._is_scheduled:
                self._is_scheduled = True
                self._turns.call_at_turn_end(self.flush)
        return stored

    def head(self, tenant: str) -> tuple[AuditHead, int]:
        """The last stored record of a trail, and how many were lost; raises if the topic cannot be read."""
        trail = self._trail(tenant)
        topic = self._topics.find(_topic_name(tenant))
        if trail.head is None and topic is not None:
            active, known = self._topics.active(topic, 0), self._ledger.state.audit.head(tenant)
            content, offset = _content_before(active, active.end_offset)  # what others can read
            return known if content is None else _head_of(content, offset, known), trail.lost
        return trail.head or AuditHead(), trail.lost

    def mute(self, tenant: str) -> None:
        """Record nothing for a tenant which is being deleted."""
        self._muted.add(tenant)
        trail = self._trails.pop(tenant, None)
        for _, stored in trail.waiting if trail is not None else ():
            stored.resolve(Done())

    def unmute(self, tenant: str) -> None:
        """Begin anew with a tenant that was deleted."""
        self._muted.discard(tenant)
        self._trails.pop(tenant, None)

    def forget_head(self, tenant: str) -> None:
        """Read the end of a trail anew: its topic was deleted."""
        if tenant in self._trails:
            self._trails[tenant].head = None

    def tick(self, now_us: int) -> None:
        """Note the ends of trails in the journal now and then."""
        if now_us >= self._checkpoint_us:
            self._checkpoint_us = now_us + _CHECKPOINT_US
            self.checkpoint(now_us)

    def checkpoint(self, now_us: int) -> None:
        """Note the ends of trails that have grown in the journal."""
        known = self._ledger.state.audit
        facts = [
            AuditCheckpointed(trail.tenant, trail.head.number, trail.head.digest, trail.head.offset)
            for trail in self._trails.values()
            if trail.head is not None and trail.head.number and trail.head != known.head(trail.tenant)
        ]
        if facts:
            self._ledger.record(now_us, *facts)

    def flush(self, now_us: int) -> None:
        """Append what is pending."""
        self._is_scheduled = False
        for trail in list(self._trails.values()):
            if trail.waiting and not trail.is_writing:
                self._write(trail, now_us)

    def _trail(self, tenant: str) -> _Trail:
        found = self._trails.get(tenant)
        if found is None:
            found = self._trails[tenant] = _Trail(tenant)
        return found

    def _write(self, trail: _Trail, now_us: int) -> None:
        trail.is_writing = True
        batch = [trail.waiting.popleft() for _ in range(min(len(trail.waiting), _TOGETHER))]
        written: PendingAnswer[Published] = PendingAnswer()
        head, count, lost = AuditHead(), 0, trail.lost
        try:
            active = self._active(trail.tenant, now_us)
            head, extra = (trail.head, []) if trail.head is not None else self._stored_head(trail, active)
            if lost:
                extra = [*extra, {"time_us": now_us, "action": SUMMARY, "details": {"lost": lost}}]
            columns, head = _chained([*extra, *(fields for fields, _ in batch)], head)
            count = len(columns.values)
            if active.partition.durable and self._topics.ballast.dropped:
                raise DiskFull("the disk is full")
            request = Publish(_topic_name(trail.tenant), 0)
            answer = active.publish(request, encode(columns, now_us), now_us, alone=True)
        except HeadraceError as error:
            written.resolve(error)
        except OSError as error:
            written.resolve(as_headrace_error(error))
        else:
            if isinstance(answer, PendingAnswer):
                answer.then(written.resolve)
            else:
                written.resolve(answer)
        written.then(partial(self._written, trail, batch, head, count, lost))

    def _written(
        self,
        trail: _Trail,
        batch: list[tuple[dict[str, Any], PendingAnswer[Done]]],
        head: AuditHead,
        count: int,
        lost: int,
        outcome: Published | HeadraceError,
    ) -> None:
        key = "audit", trail.tenant
        if isinstance(outcome, HeadraceError):
            trail.head = None  # what is stored is read again
            trail.lost += len(batch)
            self._ledger.failures.note(key, outcome, "audit records not stored  tenant=%s", trail.tenant)
        else:
            trail.head = AuditHead(head.number, head.digest, outcome.base_offset + count - 1)
            trail.lost -= lost
            self._ledger.failures.worked(key)
        trail.is_writing = False
        for _, stored in batch:
            stored.resolve(Done())
        if trail.waiting and not self._is_scheduled:
            self._is_scheduled = True
            self._turns.call_at_turn_end(self.flush)

    def _active(self, tenant: str, now_us: int) -> ActivePartition:
        name = _topic_name(tenant)
        topic = self._topics.find(name) or self._topics.create(TopicCreate(name), now_us)
        return self._topics.active(topic, 0)

    def _stored_head(self, trail: _Trail, active: ActivePartition) -> tuple[AuditHead, list[dict[str, Any]]]:
        """The last record that is stored, and a record to write if it is not what the journal says."""
        known = self._ledger.state.audit.head(trail.tenant)
        first, end = active.partition.first_offset, active.partition.next_offset
        content, offset = _content_before(active, end)
        if content is None:  # nothing is left: retention may have removed all
            head = known
            broken = 0 <= known.offset < end and known.offset != end - 1
        else:
            head = _head_of(content, offset, known)
            broken = known.number > 0 and first <= known.offset and not _has(active, known)
        if content is None and known.offset >= end:
            broken = True
        if not broken:
            return head, []
        logger.error("audit trail broken: stored records are missing or altered  tenant=%s", trail.tenant)
        expected = {"number": known.number, "digest": known.digest, "offset": known.offset}
        fields = {"time_us": self._turns.now_us, "action": BROKEN, "details": {"expected": expected, "end_offset": end}}
        return head, [fields]


def _chained(records: list[dict[str, Any]], head: AuditHead) -> tuple[Columns, AuditHead]:
    """Records as messages, each with the digest of the one before; and the last of them."""
    values, number, digest = [], head.number, head.digest
    for fields in records:
        number += 1
        values.append(encode_record(AuditRecord(number=number, previous=digest, **fields)))
        digest = record_digest(values[-1])
    columns = Columns(list(values), timestamps=[fields["time_us"] for fields in records])
    return columns, AuditHead(number, digest)


def _content_before(active: ActivePartition, end: int) -> tuple[bytes | None, int]:
    """The last message before an offset that can be read; None if there is none."""
    first, back = active.partition.first_offset, 1
    while first < end:
        start = max(first, end - back)
        content, offset = None, -1
        for batch in active.partition.batches(start, end):
            values = batch.columns().values
            content, offset = values[-1], batch.base_offset + len(values) - 1
        if content is not None or start == first:
            return (None, -1) if content is None else (bytes(content), offset)
        back *= 8
    return None, -1


def _has(active: ActivePartition, known: AuditHead) -> bool:
    """Whether a record is stored where it was."""
    if known.offset >= active.partition.next_offset:
        return False
    for batch in active.partition.batches(known.offset, known.offset + 1):
        at = known.offset - batch.base_offset
        values = batch.columns().values
        return 0 <= at < len(values) and record_digest(bytes(values[at] or b"")) == known.digest
    return False


def _head_of(content: bytes, offset: int, known: AuditHead) -> AuditHead:
    try:
        number = decode_record(content).number
    except InvalidArgument:
        number = known.number
    return AuditHead(number, record_digest(content), offset)


def _topic_name(tenant: str) -> str:
    return str(TopicName(tenant, AUDIT_TOPIC))
