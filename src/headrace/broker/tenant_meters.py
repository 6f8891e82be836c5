"""The meters of tenants with rates or measured quotas, and the measuring of what is stored and pending."""

from collections.abc import Callable, Generator, Iterable

from headrace.broker.ports import Ports, Session
from headrace.broker.rate_limits import TenantMeter, is_metered
from headrace.broker.slices import TimedSteps
from headrace.broker.subscription_policies import unsettled
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.tenant_accounts import TenantAccounts
from headrace.broker.topics import TopicRegistry
from headrace.broker.turns import Turns
from headrace.model.errors import HeadraceError
from headrace.model.requests import Done

_MEASURE_US = 1_000_000
"""How often stored bytes and pending messages are measured, of tenants with a quota for them."""
_LOOKED_TOGETHER = 500
_OPENED_TOGETHER = 2
"""Topics looked at, and partitions opened, per slice."""


class TenantMeters:
    """A meter for each tenant that needs one and has sessions, or has taken more than its rate allows."""

    def __init__(
        self,
        accounts: TenantAccounts,
        topics: TopicRegistry,
        subscriptions: SubscriptionRegistry,
        ports: Ports,
        turns: Turns,
        sessions: Iterable[Session],
        woken: Callable[[set[Session]], None],
    ) -> None:
        """`woken` is called with sessions to which more may be delivered again."""
        self._accounts = accounts
        self._topics = topics
        self._subscriptions = subscriptions
        self._ports = ports
        self._turns = turns
        self._sessions = sessions
        self._woken = woken
        self._meters: dict[str, TenantMeter] = {}
        self._measured_us = 0
        self._measuring = False

    def attach(self, session: Session) -> None:
        """Meter a new session, if its tenant has rates or measured quotas."""
        limits = self._accounts.limits_of(session.tenant)
        if is_metered(limits):
            meter = self._meters.get(session.tenant)
            if meter is None:
                meter = self._meters[session.tenant] = self._made(session.tenant)
            session.set_meter(meter, lambda: self._turns.now_us)

    def _made(self, tenant: str) -> TenantMeter:
        made = TenantMeter(tenant, self._accounts.limits_of(tenant), self._ports.wake_at, lambda: self._turns.now_us)
        self._measured_us = 0
        return made

    def refresh(self, now_us: int) -> None:
        """Apply quotas that were changed to all sessions."""
        for tenant, meter in list(self._meters.items()):
            if meter.limits != self._accounts.limits_of(tenant):
                del self._meters[tenant]
                meter.release(now_us)
        for session in list(self._sessions):
            limits = self._accounts.limits_of(session.tenant)
            if session.meter is not None and session.meter.limits == limits:
                continue
            if session.meter is not None:
                session.set_meter(None, lambda: self._turns.now_us)
                self._woken({session})
            self.attach(session)

    def throttled_us(self, tenant: str) -> int:
        """How long sessions of a tenant were made to wait, added up."""
        meter = self._meters.get(tenant)
        return 0 if meter is None else meter.throttled_us

    # Time.

    def next_tick_us(self) -> int | None:
        """When a delayed answer is due, deliveries go on, or something is to be measured."""
        times = [time_us for meter in self._meters.values() if (time_us := meter.next_tick_us()) is not None]
        return min(times, default=None)

    def tick(self, now_us: int) -> None:
        """Pass on what has waited long enough, and measure what is due."""
        if not self._meters:
            return
        for meter in list(self._meters.values()):
            if meter.tick(now_us):
                self._woken({session for session in self._sessions if session.meter is meter})
        used = {session.tenant for session in self._sessions}
        for tenant, meter in list(self._meters.items()):
            if tenant not in used and meter.is_idle(now_us):
                del self._meters[tenant]
        if not self._measuring and now_us - self._measured_us >= _MEASURE_US:
            self._measured_us = now_us
            self._measuring = True
            self._turns.in_slices(self._measure_all())

    def _measure_all(self) -> TimedSteps:
        try:
            for tenant, meter in list(self._meters.items()):
                if meter.limits.stored_bytes is not None:
                    meter.stored_bytes = yield from self.stored_bytes(tenant)
                if meter.limits.pending_messages is not None:
                    meter.pending_messages = yield from self.pending_messages(tenant)
        finally:
            self._measuring = False
        return Done()

    def stored_bytes(self, tenant: str) -> Generator[None, int, int]:
        """Measure the bytes of all topics of a tenant, in slices; partitions that cannot be opened count as empty."""
        total = opened = 0
        for number, topic_id in enumerate(list(self._topics.by_id), 1):
            if not number % _LOOKED_TOGETHER:
                yield
            topic = self._topics.by_id.get(topic_id)
            if topic is None or topic.name.tenant != tenant or topic.is_view or topic.failure:
                continue
            for partition in range(topic.settings.partitions):
                if self._topics.by_id.get(topic_id) is not topic:
                    break
                if partition not in topic.active_partitions:
                    opened += 1
                    if not opened % _OPENED_TOGETHER:
                        yield
                try:
                    total += self._topics.active(topic, partition).partition.size_bytes
                except (HeadraceError, OSError):
                    continue  # whoever uses it is told why
        return total

    def pending_messages(self, tenant: str) -> Generator[None, int, int]:
        """Measure the messages that the leased subscriptions of a tenant have not settled, in slices."""
        total = 0
        for number, subscription in enumerate(self._subscriptions, 1):
            if not number % _LOOKED_TOGETHER:
                yield
            if subscription.topic.name.tenant == tenant:
                total += unsettled(subscription)[0]
        return total
