"""The switchboard: live subscriptions to subjects. They get what is published at most once, and nothing is stored."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer, encode_detached_batch
from headrace.broker.ports import Ports, Session
from headrace.broker.signal import Signal, TakenShare
from headrace.broker.slices import Steps, in_slices
from headrace.broker.streams import OpenedReading
from headrace.broker.subject_trie import SubjectTrie
from headrace.model.arguments import shown
from headrace.model.batch import Batch, Columns, received
from headrace.model.errors import Busy, HeadraceError, InvalidArgument, LimitExceeded
from headrace.model.limits import LIVE_BACKLOG_BYTES_MAX, LIVE_SUBSCRIPTIONS_IN_ALL_MAX, LIVE_SUBSCRIPTIONS_MAX
from headrace.model.requests import Done
from headrace.model.subject import checked_pattern, checked_subject, is_own
from headrace.model.subject_requests import (
    SubjectDelivery,
    SubjectEnd,
    SubjectPublish,
    SubjectPublished,
    SubjectSubscribe,
    SubjectSubscribed,
    SubjectUnsubscribe,
    SwitchboardInfo,
)
from headrace.model.topic import DEFAULT_TENANT, checked_name, checked_tenant

_AT_ONCE = 256
"""Deliveries, or removals of subscriptions, that are done in one slice."""


class SubjectIngress(Protocol):
    """Stores messages of subjects for durable routes. Subjects are given with their tenant."""

    def takes(self, subject: str) -> bool:
        """Whether a durable route takes messages of a subject."""

    def append(self, session: Session, subject: str, batch: Batch, now_us: int) -> PendingAnswer[Any]:
        """Store a producer's batch; resolves when it is as durable as it is to be."""


class QualifiedSubject(NamedTuple):
    """A subject or a pattern, and the tenant that it belongs to."""

    tenant: str
    subject: str

    def __str__(self) -> str:
        return self.subject if self.tenant == DEFAULT_TENANT else f"{self.tenant}/{self.subject}"


class LiveSubscriber:
    """A session's subscription to subjects."""

    __slots__ = ("closed", "dropped", "number", "pattern", "queue", "session", "tenant")

    def __init__(self, number: int, session: Session, place: QualifiedSubject, queue: str) -> None:
        self.number = number
        self.session = session
        self.tenant, self.pattern = place
        self.queue = queue
        self.dropped = 0
        """Messages that were not sent since the last delivery."""
        self.closed = False


class QueueMembers:
    """The subscriptions with one pattern and one queue name: one of them gets each batch."""

    __slots__ = ("members", "queue")

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.members: dict[LiveSubscriber, None] = {}


class TenantSubjects:
    """The live subscriptions of a tenant, and what is counted of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trie: SubjectTrie[LiveSubscriber | QueueMembers] = SubjectTrie()
        self.queues: dict[tuple[str, str], QueueMembers] = {}
        """By pattern and queue name."""
        self.subscriptions = 0
        self.turns = 0
        """Counts choices among the members of queues, so that they take turns."""
        self.published = 0
        self.delivered = 0
        self.dropped = 0
        self.backlog: deque[FanOut] = deque()
        """Batches that wait until those before them have been sent to all their receivers."""
        self.backlog_bytes = 0

    def add(self, subscription: LiveSubscriber) -> None:
        """Add a subscription."""
        if not subscription.queue:
            self.trie.add(subscription.pattern, subscription)
        else:
            key = subscription.pattern, subscription.queue
            members = self.queues.get(key)
            if members is None:
                members = QueueMembers(subscription.queue)
                self.trie.add(subscription.pattern, members)
                self.queues[key] = members
            members.members[subscription] = None
        self.subscriptions += 1

    def remove(self, subscription: LiveSubscriber) -> None:
        """Remove a subscription."""
        self.subscriptions -= 1
        if not subscription.queue:
            self.trie.remove(subscription.pattern, subscription)
            return
        key = subscription.pattern, subscription.queue
        members = self.queues[key]
        del members.members[subscription]
        if not members.members:
            del self.queues[key]
            self.trie.remove(subscription.pattern, members)

    def receivers(self, subject: str) -> list[LiveSubscriber]:
        """Who gets a batch of a subject: all subscriptions without a queue, and one of each queue."""
        found = self.trie.match(subject)
        if not self.queues:
            return found  # type: ignore[return-value]  # no others are there
        chosen: list[LiveSubscriber] = []
        queues: dict[str, list[LiveSubscriber]] = {}
        for one in found:
            if isinstance(one, LiveSubscriber):
                chosen.append(one)
            else:
                queues.setdefault(one.queue, []).extend(one.members)
        chosen += map(self._chosen, queues.values())
        return chosen

    def _chosen(self, members: list[LiveSubscriber]) -> LiveSubscriber:
        """One of the members of a queue, in turn; one that is too slow only if all are."""
        self.turns += 1
        start = self.turns % len(members)
        for index in range(start, start + len(members)):
            one = members[index % len(members)]
            if not one.session.blocked and not one.closed:
                return one
        return members[start]


class FanOut(NamedTuple):
    """A batch on its way to subscriptions."""

    subjects: TenantSubjects
    subject: str
    batch: bytes
    messages: int
    """How many the batch has."""
    receivers: Sequence[LiveSubscriber]
    answer: PendingAnswer[int]
    """To how many it was sent, when that is done in slices."""


class Switchboard:
    """Delivers what is published to subjects to the live subscriptions of the tenant."""

    def __init__(self, ports: Ports, ingress: SubjectIngress | None = None) -> None:
        """A switchboard; with an `ingress`, which stores what durable routes take."""
        self.taking: Signal[TakenShare] = Signal()
        """Emitted before a tenant takes more of what the broker has for all; a listener refuses by raising."""
        self._ingress = ingress
        self._ports = ports
        self._tenants: dict[str, TenantSubjects] = {}
        self._sessions: dict[Session, dict[int, LiveSubscriber]] = {}
        self._number = 0
        self._count = 0
        """Subscriptions of all tenants."""

    def publish(
        self, session: Session, request: SubjectPublish, body: memoryview, now_us: int
    ) -> SubjectPublished | PendingAnswer[SubjectPublished]:
        """Deliver a producer's batch, and store it if a durable route takes it."""
        tenant, subject = parse_subject(request.subject)
        if is_own(subject):
            raise InvalidArgument(f"{shown(subject)} is one of the broker's own subjects: publish to one without '$'")
        batch = received(body)
        subjects = self._of(tenant) if tenant == session.tenant else self._tenants.get(tenant)
        if subjects is not None and subjects.backlog_bytes > LIVE_BACKLOG_BYTES_MAX:
            raise Busy("too many messages to subjects wait for their delivery; publish again in a moment")
        stored = None
        if self._ingress is not None and self._ingress.takes(request.subject):
            stored = self._ingress.append(session, request.subject, batch.copied(), now_us)
        sent: PendingAnswer[int] | int = 0
        if subjects is not None:
            subjects.published += batch.count
            batch.place(0, now_us, 0)
            sent = self._deliver(subjects, subject, batch)
        if stored is None and isinstance(sent, int):
            return SubjectPublished(sent)
        return _published(sent, stored)

    def emit(self, subject: str, columns: Columns, now_us: int) -> int:
        """Deliver messages of the broker itself; returns how many subscriptions get them.

        The subject has its tenant, such as `acme/$events.topic.created`. If too much waits, nobody gets them.
        """
        tenant, bare = parse_subject(subject)
        subjects = self._tenants.get(tenant)
        if subjects is None:
            return 0
        receivers = subjects.receivers(bare)
        if not receivers:
            return 0
        count = len(columns.values)
        if subjects.backlog_bytes > LIVE_BACKLOG_BYTES_MAX:
            subjects.dropped += count * len(receivers)
            return 0
        batch = bytes(encode_detached_batch(columns, now_us))
        sent = self._send(FanOut(subjects, bare, batch, count, receivers, PendingAnswer()))
        return sent if isinstance(sent, int) else len(receivers)

    def has_receivers(self, subject: str) -> bool:
        """Whether somebody is subscribed to a subject, given with its tenant: else `emit` need not be called."""
        tenant, bare = parse_subject(subject)
        subjects = self._tenants.get(tenant)
        return subjects is not None and bool(subjects.trie.match(bare))

    def subscribe(self, session: Session, request: SubjectSubscribe) -> SubjectSubscribed:
        """Add a live subscription of a session."""
        place = parse_pattern(request.pattern)
        if request.queue:
            checked_name(request.queue, "queue of subscribers")
        mine = self._sessions.setdefault(session, {})
        if len(mine) >= LIVE_SUBSCRIPTIONS_MAX:
            raise LimitExceeded(
                f"the connection has {LIVE_SUBSCRIPTIONS_MAX} live subscriptions, which is the maximum; end some"
            )
        if self._count >= LIVE_SUBSCRIPTIONS_IN_ALL_MAX:
            raise LimitExceeded(
                f"the broker has {LIVE_SUBSCRIPTIONS_IN_ALL_MAX} live subscriptions, which is the maximum; end some"
            )
        used = self._tenants[place.tenant].subscriptions if place.tenant in self._tenants else 0
        limit = LIVE_SUBSCRIPTIONS_IN_ALL_MAX
        self.taking(TakenShare(place.tenant, "live_subscriptions", used, self._count, limit))
        self._number += 1
        subscription = LiveSubscriber(self._number, session, place, request.queue)
        self._of(place.tenant).add(subscription)
        self._count += 1
        mine[subscription.number] = subscription
        return SubjectSubscribed(subscription.number)

    def unsubscribe(self, session: Session, request: SubjectUnsubscribe) -> Done:
        """End a live subscription of a session; ignores one that is not there."""
        mine = self._sessions.get(session, {})
        subscription = mine.pop(request.subscription, None)
        if subscription is not None:
            self._remove(subscription)
            if not mine:
                del self._sessions[session]
        return Done()

    def opened(self) -> Iterator[OpenedReading]:
        """All live subscriptions."""
        for session, subscriptions in self._sessions.items():
            for one in subscriptions.values():
                yield session, SubjectSubscribe(f"{one.tenant}/{one.pattern}"), partial(self._end, one)

    def _end(self, subscription: LiveSubscriber, error: HeadraceError) -> None:
        """End a live subscription, and tell its session why."""
        if not subscription.closed:
            session, number = subscription.session, subscription.number
            self.unsubscribe(session, SubjectUnsubscribe(number))
            session.push(SubjectEnd(error.code, str(error), number, None, error.retryable, error.details))

    def disconnect(self, session: Session) -> None:
        """End all live subscriptions of a session, many of them in slices."""
        subscriptions = list(self._sessions.pop(session, {}).values())
        for subscription in subscriptions:
            subscription.closed = True

        def steps() -> Steps:
            for number, subscription in enumerate(subscriptions, 1):
                self._remove(subscription)
                if number % _AT_ONCE == 0:
                    yield

        if subscriptions:
            in_slices(self._ports, steps())

    def describe(self, session: Session) -> SwitchboardInfo:
        """Counts of the session's tenant."""
        return self.total(session.tenant)

    def total(self, tenant: str | None) -> SwitchboardInfo:
        """Counts of a tenant, or of all."""
        info = SwitchboardInfo()
        for name, subjects in self._tenants.items():
            if tenant in (None, name):
                info.subscriptions += subjects.subscriptions
                info.published += subjects.published
                info.delivered += subjects.delivered
                info.dropped += subjects.dropped
        return info

    def forget_tenant(self, tenant: str) -> None:
        """Forget what was counted of a tenant that was deleted."""
        subjects = self._tenants.get(tenant)
        if subjects is not None and not subjects.subscriptions:
            del self._tenants[tenant]

    def _of(self, tenant: str) -> TenantSubjects:
        subjects = self._tenants.get(tenant)
        if subjects is None:
            subjects = self._tenants[tenant] = TenantSubjects(tenant)
        return subjects

    def _remove(self, subscription: LiveSubscriber) -> None:
        subscription.closed = True
        subjects = self._tenants[subscription.tenant]
        subjects.remove(subscription)
        self._count -= 1
        if not subjects.subscriptions and not subjects.published:
            del self._tenants[subscription.tenant]

    # Delivering.

    def _deliver(self, subjects: TenantSubjects, subject: str, batch: Batch) -> PendingAnswer[int] | int:
        receivers = subjects.receivers(subject)
        if not receivers:
            return 0
        # A copy, as the bytes are received into again, and those of a large frame are sent later.
        return self._send(FanOut(subjects, subject, bytes(batch.data), batch.count, receivers, PendingAnswer()))

    def _send(self, fan_out: FanOut) -> PendingAnswer[int] | int:
        """Send a batch now, or in slices, in the order of the calls; returns to how many."""
        subjects, receivers = fan_out.subjects, fan_out.receivers
        if not subjects.backlog and len(receivers) <= _AT_ONCE:
            return _push_all(fan_out, receivers)
        subjects.backlog_bytes += len(fan_out.batch)
        subjects.backlog.append(fan_out)
        if len(subjects.backlog) == 1:
            in_slices(self._ports, _send_backlog(subjects))
        return fan_out.answer


def _send_backlog(subjects: TenantSubjects) -> Steps:
    """Send what waits, in order; other tenants have their turns between two slices."""
    while subjects.backlog:
        fan_out, sent = subjects.backlog[0], 0
        for receivers in _parts(fan_out.receivers):
            sent += _push_all(fan_out, receivers)
            yield
        subjects.backlog.popleft()
        subjects.backlog_bytes -= len(fan_out.batch)
        fan_out.answer.resolve(sent)


def _published(sent: PendingAnswer[int] | int, stored: PendingAnswer[Any] | None) -> PendingAnswer[SubjectPublished]:
    """The answer to a publisher once its batch is sent and stored."""
    answer: PendingAnswer[SubjectPublished] = PendingAnswer()

    def told(receivers: int | HeadraceError) -> None:
        if isinstance(receivers, HeadraceError):
            answer.resolve(receivers)
        elif stored is None:
            answer.resolve(SubjectPublished(receivers))
        else:
            stored.then(lambda outcome: answer.resolve(_stored_answer(receivers, outcome)))

    if isinstance(sent, int):
        told(sent)
    else:
        sent.then(told)
    return answer


def _stored_answer(receivers: int, outcome: object) -> SubjectPublished | HeadraceError:
    return outcome if isinstance(outcome, HeadraceError) else SubjectPublished(receivers, stored=True)


def parse_subject(text: str) -> QualifiedSubject:
    """The tenant and the subject of a name such as `acme/orders.paid`."""
    tenant, slash, subject = text.rpartition("/")
    return QualifiedSubject(checked_tenant(tenant) if slash else DEFAULT_TENANT, checked_subject(subject))


def parse_pattern(text: str) -> QualifiedSubject:
    """The tenant and the pattern of a text such as `acme/orders.*`."""
    tenant, slash, pattern = text.rpartition("/")
    return QualifiedSubject(checked_tenant(tenant) if slash else DEFAULT_TENANT, checked_pattern(pattern))


def name_for(session: Session, tenant: str, subject: str) -> str:
    """The name of a tenant's subject as a session sees it."""
    return subject if tenant in (session.tenant, DEFAULT_TENANT) else f"{tenant}/{subject}"


def _push_all(fan_out: FanOut, receivers: Sequence[LiveSubscriber]) -> int:
    """Push a batch to subscriptions, but for those that are too slow, whose loss is counted."""
    subjects, subject, batch, count, _, _ = fan_out
    sent = 0
    for subscription in receivers:
        session = subscription.session
        if session.blocked:
            subscription.dropped += count
            subjects.dropped += count
        elif not subscription.closed:
            name = name_for(session, subjects.name, subject)
            session.push(AnswerWithBody(SubjectDelivery(subscription.number, name, subscription.dropped), batch))
            subscription.dropped = 0
            sent += 1
    subjects.delivered += count * sent
    return sent


def _parts(receivers: Sequence[LiveSubscriber]) -> Iterator[Sequence[LiveSubscriber]]:
    for start in range(0, len(receivers), _AT_ONCE):
        yield receivers[start : start + _AT_ONCE]
