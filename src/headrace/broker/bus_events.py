"""Events about the bus itself: gathered per loop turn, published live, and recorded in a topic of each tenant."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.turns import Turns
from headrace.engines.api import as_headrace_error
from headrace.model.batch import Columns, encode
from headrace.model.bus_event import BusEvent, encode_event
from headrace.model.errors import DiskFull, HeadraceError
from headrace.model.limits import EVENTS_PENDING_MAX
from headrace.model.requests import Done, Publish, Published, TopicCreate
from headrace.model.system_topics import EVENTS_TOPIC
from headrace.model.topic import DEFAULT_TENANT, TopicName, TopicSettings, tenant_of

Emit = Callable[[str, Columns, int], object]
"""Publishes messages live: gets the subject, which begins with its tenant and a slash, the messages and the time."""

_DEFAULTS = TopicSettings().as_dict()
_TOGETHER = 500
"""Maximum events recorded per loop turn."""
_BACKLOG = 1000
"""Newest events of a tenant that are kept in memory while the tenant has no topic for them."""
_BACKLOGS_MAX = 1000
"""Tenants with such a backlog."""


class BusEvents:
    """Tells observers of every change of the bus's structures, once the journal has it.

    A component calls `record`, or emits a signal that is connected to it. Nothing that goes wrong here reaches the
    caller. While nobody observes a tenant, its newest events are only kept in memory: the topic is created when the
    first observer asks for it (`open`), or at the first event if the broker's setting `record_events` says so.
    """

    def __init__(self, topics: TopicRegistry, ledger: Ledger, turns: Turns, emit: Emit, *, always: bool) -> None:
        self._topics = topics
        self._ledger = ledger
        self._turns = turns
        self._always = always
        self.emit = emit
        """Publishes each event on its subject."""
        self._by = ""
        self._number = 0
        self._dropped = 0
        self._pending: list[tuple[str, BusEvent, bool]] = []
        """Tenant, event, and whether the journal must have synced it, the oldest first."""
        self._waiting: Counter[str] = Counter()
        """How many of them there are, by tenant."""
        self._is_scheduled = False
        self._backlogs: dict[str, deque[BusEvent]] = {}
        self._muted: set[str] = set()
        """Tenants that are being deleted, of which nobody is told."""
        topics.changed.connect(self._topic_changed)
        topics.altered.connect(self._topic_altered)

    @contextmanager
    def asked_by(self, client: str) -> Iterator[None]:
        """In the block, events are due to a request of this client."""
        before, self._by = self._by, client
        try:
            yield
        finally:
            self._by = before

    def record(
        self,
        kind: str,
        action: str,
        name: str,
        now_us: int,
        details: dict[str, Any] | None = None,
        *,
        durable: bool = True,
    ) -> None:
        """Tell of a change of what has this name, which may begin with its tenant; it never fails.

        `durable`: the change is in the journal, and observers hear of it when the journal is synced.
        """
        if len(self._pending) >= EVENTS_PENDING_MAX:
            self._dropped += 1
            return
        tenant = tenant_of(name)
        if tenant in self._muted:
            return
        if tenant != DEFAULT_TENANT and self._waiting[tenant] >= EVENTS_PENDING_MAX // 2:  # some are for others
            self._dropped += 1
            return
        self._add(tenant, kind, action, bare_name(name), now_us, details or {}, durable=durable)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._turns.call_at_turn_end(self._flush)

    def mute(self, tenant: str) -> None:
        """Tell of nothing that happens to a tenant which is being deleted."""
        self._muted.add(tenant)

    def unmute(self, tenant: str) -> None:
        """Begin anew with a tenant that was deleted."""
        self._muted.discard(tenant)
        self._backlogs.pop(tenant, None)

    def open(self, tenant: str, now_us: int) -> Done | PendingAnswer[Done]:
        """Record a tenant's events from now on; answers when those in memory can be read."""
        name = _topic_name(tenant)
        if self._topics.find(name) is not None:
            return Done()
        backlog = self._backlogs.pop(tenant, None)
        topic = self._topics.create(TopicCreate(name), now_us)
        synced = self._ledger.durably(Done())
        if not backlog:
            return synced
        done: PendingAnswer[Done] = PendingAnswer()

        def appended(outcome: object) -> None:
            if isinstance(outcome, HeadraceError):
                done.resolve(outcome)
            else:
                synced.then(done.resolve)

        self._append(topic, list(backlog), now_us).then(appended)
        return done

    def _add(
        self, tenant: str, kind: str, action: str, name: str, now_us: int, details: dict[str, Any], *, durable: bool
    ) -> None:
        self._number += 1
        event = BusEvent(
            id=f"{self._ledger.state.session:x}-{self._number:x}",
            time_us=now_us,
            kind=kind,
            action=action,
            name=name,
            details=details,
            by=self._by,
        )
        self._pending.append((tenant, event, durable))
        self._waiting[tenant] += 1

    def _flush(self, now_us: int) -> None:
        """Deliver the oldest pending events, after the journal is synced if one of them needs it."""
        if self._dropped and len(self._pending) < EVENTS_PENDING_MAX:
            self._add(DEFAULT_TENANT, "event", "dropped", "", now_us, {"count": self._dropped}, durable=False)
            self._dropped = 0
        batch, self._pending = self._pending[:_TOGETHER], self._pending[_TOGETHER:]
        self._waiting -= Counter(tenant for tenant, _, _ in batch)  # which keeps none of 0
        if any(durable for _, _, durable in batch):
            self._ledger.durably(Done()).then(partial(self._deliver, batch))
        else:
            self._deliver(batch, None)

    def _deliver(self, batch: list[tuple[str, BusEvent, bool]], outcome: object) -> None:
        by_tenant: dict[str, list[BusEvent]] = {}
        for tenant, event, _ in batch:
            by_tenant.setdefault(tenant, []).append(event)
        for tenant, events in by_tenant.items():
            if isinstance(outcome, HeadraceError):
                self._fail(tenant, outcome)
            else:
                self._tell(tenant, events)
        self._is_scheduled = bool(self._pending)  # not before: later events must not overtake these
        if self._is_scheduled:
            self._turns.call_at_turn_end(self._flush)

    def _tell(self, tenant: str, events: list[BusEvent]) -> None:
        if tenant in self._muted:
            return
        now_us = self._turns.now_us
        try:
            topic = self._topic(tenant, now_us)
        except (HeadraceError, OSError) as error:
            topic = None
            self._fail(tenant, error)
        if topic is not None:
            self._append(topic, events, now_us)
        else:
            self._keep(tenant, events)
        for event in events:
            try:
                self.emit(f"{tenant}/{event.subject}", Columns([encode_event(event)]), now_us)
            except HeadraceError as error:
                self._fail(tenant, error)

    def _topic(self, tenant: str, now_us: int) -> Topic | None:
        name = _topic_name(tenant)
        topic = self._topics.find(name)
        return self._topics.create(TopicCreate(name), now_us) if topic is None and self._always else topic

    def _keep(self, tenant: str, events: list[BusEvent]) -> None:
        """Keep events in memory, until somebody wants them."""
        backlog = self._backlogs.get(tenant)
        if backlog is None:
            if len(self._backlogs) >= _BACKLOGS_MAX:
                del self._backlogs[next(iter(self._backlogs))]
            backlog = self._backlogs[tenant] = deque(maxlen=_BACKLOG)
        backlog.extend(events)

    def _append(self, topic: Topic, events: list[BusEvent], now_us: int) -> PendingAnswer[Published]:
        """Append events to a topic, with their names as keys; resolves when they can be read, or could not be."""
        pending: PendingAnswer[Published] = PendingAnswer()
        pending.then(partial(self._appended, topic.name.tenant))
        columns = Columns(
            [encode_event(event) for event in events],
            keys=[event.name.encode() for event in events],
            timestamps=[event.time_us for event in events],
        )
        try:
            active = self._topics.active(topic, 0)
            if active.partition.durable and self._topics.ballast.dropped:
                raise DiskFull("the disk is full")
            answer = active.publish(Publish(str(topic), 0, durability=0), encode(columns, now_us), now_us)
        except HeadraceError as error:
            pending.resolve(error)
        except OSError as error:
            pending.resolve(as_headrace_error(error))
        else:
            if isinstance(answer, PendingAnswer):
                answer.then(pending.resolve)
            else:
                pending.resolve(answer)
        return pending

    def _appended(self, tenant: str, outcome: object) -> None:
        if isinstance(outcome, HeadraceError):
            self._fail(tenant, outcome)
        else:
            self._ledger.failures.worked(("events", tenant))

    def _fail(self, tenant: str, error: Exception) -> None:
        self._ledger.failures.note(("events", tenant), error, "events not recorded  tenant=%s", tenant)

    # Topics.

    def _topic_changed(self, topic: Topic, now_us: int) -> None:
        if topic.id not in self._topics.by_id:
            self.record("topic", "deleted", str(topic), now_us)
            if topic.name.topic == EVENTS_TOPIC:
                self._backlogs.pop(topic.name.tenant, None)
        elif topic.revision == 0:
            self.record("topic", "created", str(topic), now_us, _settings(topic))
            backlog = self._backlogs.pop(topic.name.tenant, None) if topic.name.topic == EVENTS_TOPIC else None
            if backlog:  # somebody created it otherwise than by `open`
                self._append(topic, list(backlog), now_us)

    def _topic_altered(self, topic: Topic, now_us: int) -> None:
        self.record("topic", "altered", str(topic), now_us, _settings(topic))


def bare_name(name: str) -> str:
    """A name as sessions of its tenant say it: without the tenant.

    >>> bare_name("acme/orders"), bare_name("orders")
    ('orders', 'orders')
    """
    return name.rpartition("/")[2]


def _settings(topic: Topic) -> dict[str, Any]:
    """Details of a topic: its number of partitions, and the settings that are not the default ones."""
    given = topic.settings.as_dict()
    changed = {name: setting for name, setting in given.items() if setting != _DEFAULTS.get(name)}
    return {"settings": {"partitions": topic.settings.partitions, **changed}}


def _topic_name(tenant: str) -> str:
    return str(TopicName(tenant, EVENTS_TOPIC))
