"""What the broker tells of itself: events, registered services, their errors, and logging levels, wired together."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.broker.audit_trail import AuditTrail
from headrace.broker.bus_events import BusEvents, bare_name
from headrace.broker.dead_letters import BuriedMessages, DeadLetters
from headrace.broker.group_coordinator import GroupCoordinator
from headrace.broker.leasing import LeaseDispatcher
from headrace.broker.ledger import Ledger
from headrace.broker.live_instance import LiveInstance
from headrace.broker.log_levels import LogLevels
from headrace.broker.ports import Ports, Session
from headrace.broker.routes import RouteRegistry
from headrace.broker.schedules import ScheduleRunner
from headrace.broker.service_errors import ServiceErrorLog
from headrace.broker.services import ServiceRegistry
from headrace.broker.settings import BrokerSettings
from headrace.broker.streams import Readers
from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.switchboard import Switchboard
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.turns import Turns
from headrace.broker.webhooks import WebhookRegistry
from headrace.model.bus_event import EventsRecord
from headrace.model.log_level_requests import LogLevelList, LogLevelReset, LogLevelRule, LogLevelSet
from headrace.model.request import Request, Resource, Verb
from headrace.model.requests import GroupJoin, GroupLeave, TopicDescribe
from headrace.model.route_requests import RouteDefinition
from headrace.model.service_requests import (
    ErrorList,
    ErrorReport,
    ServiceDeregister,
    ServiceDescribe,
    ServiceError,
    ServiceList,
    ServicePolicyAlter,
    ServiceRegister,
)
from headrace.model.subscription import SubscriptionSettings
from headrace.model.topic import TopicName
from headrace.security.definitions import DefinitionsStore

Handler = Callable[[Session, Any, memoryview, int], Any]
Handlers = dict[type[Request[Any]], Handler]

_SUBSCRIPTION_DEFAULTS = SubscriptionSettings().as_dict()
_REASON_CHARS = 500
"""Of a dead letter's reason, in events and errors; the dead letter itself has all of it."""
_STRUCTURAL_VERBS = frozenset(
    {Verb.CREATE, Verb.ALTER, Verb.DELETE, Verb.SCHEDULE, Verb.ROUTE, Verb.SERVE, Verb.ADMINISTER}
)
_STRUCTURAL = frozenset({EventsRecord, GroupJoin, GroupLeave, TopicDescribe})
"""Requests that change structures although their permissions do not say so."""


class ObservedParts(NamedTuple):
    """The components whose changes observers are told of."""

    topics: TopicRegistry
    groups: GroupCoordinator
    subscriptions: SubscriptionRegistry
    dead_letters: DeadLetters
    schedules: ScheduleRunner
    routes: RouteRegistry
    webhooks: WebhookRegistry
    readers: Readers
    leasing: LeaseDispatcher
    switchboard: Switchboard


class Observability:
    """Connects the broker's components to the events, and answers the requests about all of this."""

    def __init__(
        self,
        parts: ObservedParts,
        ledger: Ledger,
        ports: Ports,
        turns: Turns,
        definitions: DefinitionsStore,
        settings: BrokerSettings,
    ) -> None:
        self._parts = parts
        self._turns = turns
        self.events = BusEvents(parts.topics, ledger, turns, parts.switchboard.emit, always=settings.record_events)
        self.audit = AuditTrail(parts.topics, ledger, turns, definitions, always=settings.audit)
        self.errors = ServiceErrorLog(parts.topics, ledger)
        self.services = ServiceRegistry(ledger, ports, self.errors)
        self.levels = LogLevels(ledger)
        parts.subscriptions.structure_changed.connect(self._subscription_changed)
        parts.groups.group_changed.connect(lambda name, action, now: self.events.record("group", action, name, now))
        parts.groups.member_changed.connect(self._member_changed)
        parts.schedules.changed.connect(lambda name, action, now: self.events.record("schedule", action, name, now))
        parts.routes.changed.connect(self._route_changed)
        parts.webhooks.told.connect(self._webhook_changed)
        parts.dead_letters.buried.connect(self._buried)
        parts.dead_letters.refused.connect(self._refused)
        parts.dead_letters.redriven.connect(self._redriven)
        self.services.changed.connect(self._service_changed)
        self.services.policy_changed.connect(self._policy_changed)
        self.levels.changed.connect(self._level_changed)
        self._set_tracing()

    def begin_erasing(self, tenant: str) -> None:
        """Tell of nothing that happens to a tenant which is being deleted."""
        self.events.mute(tenant)
        self.audit.mute(tenant)

    def forget_tenant(self, tenant: str, now_us: int) -> None:
        """Forget the services and errors of a tenant, of which nothing else is left."""
        self.services.forget_tenant(tenant, now_us)
        self.errors.forget_tenant(tenant)
        self.audit.forget_tenant(tenant)
        self._parts.switchboard.forget_tenant(tenant)

    def end_erasing(self, tenant: str) -> None:
        """Begin anew with a tenant that was deleted: its facts are forgotten, too."""
        self.services.restricted.discard(tenant)
        self.levels.reload()
        self.events.unmute(tenant)
        self.audit.unmute(tenant)

    def requests(self) -> Handlers:
        """The handlers of its requests."""
        services, errors, levels = self.services, self.errors, self.levels
        return {
            ServiceRegister: lambda session, ask, _, now: services.register(session, ask, now),
            ServiceDeregister: lambda session, ask, _, now: services.deregister(session, ask, now),
            ServiceList: lambda session, ask, _, __: services.listed(session, ask),
            ServiceDescribe: lambda _, ask, __, ___: services.describe(ask),
            ServicePolicyAlter: lambda session, ask, _, now: services.alter_policy(session, ask, now),
            ErrorReport: lambda session, ask, _, now: errors.report(session, ask, now),
            ErrorList: lambda session, ask, _, __: errors.listed(session, ask),
            EventsRecord: lambda session, _, __, now: self.events.open(session.tenant, now),
            LogLevelSet: lambda session, ask, _, now: levels.set(session, ask, now),
            LogLevelReset: lambda session, ask, _, now: levels.reset(session, ask, now),
            LogLevelList: lambda session, _, __, ___: levels.listed(session),
            **self.audit.requests(),
        }

    def attributed(self, handlers: Handlers) -> Handlers:
        """The handlers, of which those that change structures name the client in their events and are audited."""
        attributed = {
            kind: self._attributed(handler) if _is_structural(kind) else handler for kind, handler in handlers.items()
        }
        return self.audit.audited(attributed)

    def _attributed(self, handler: Handler) -> Handler:
        events = self.events

        def handle(session: Session, request: Any, body: memoryview, now_us: int) -> Any:
            with events.asked_by(session.client):
                return handler(session, request, body, now_us)

        return handle

    def _set_tracing(self) -> None:
        """Have deliveries and leases logged while a level is set."""
        is_on = self.levels.active
        self._parts.readers.trace = self.levels.trace_delivery if is_on else None
        self._parts.leasing.trace = self.levels.trace_lease if is_on else None

    # Signals.

    def _subscription_changed(self, subscription: Subscription, action: str) -> None:
        details: dict[str, Any] = {"topic": bare_name(str(subscription.topic))}
        if action in ("created", "altered"):
            given = subscription.settings.as_dict()
            details["settings"] = {name: one for name, one in given.items() if one != _SUBSCRIPTION_DEFAULTS[name]}
        if action == "failed":
            details["reason"] = subscription.failure[:_REASON_CHARS]
        name = str(TopicName(subscription.topic.name.tenant, subscription.name))
        self.events.record("subscription", action, name, self._turns.now_us, details)

    def _member_changed(self, group: str, action: str, member: str, client: str, now_us: int) -> None:
        self.events.record("member", action, group, now_us, {"member": member, "client": client}, durable=False)

    def _route_changed(self, route: RouteDefinition, action: str, now_us: int) -> None:
        details = {"source": bare_name(route.source), "targets": [bare_name(target) for target in route.targets]}
        self.events.record("route", action, route.name, now_us, details)

    def _webhook_changed(self, name: str, action: str, details: dict[str, Any], now_us: int) -> None:
        self.events.record("webhook", action, name, now_us, details, durable=action not in ("opened", "closed"))

    def _buried(self, dead: BuriedMessages) -> None:
        topic, subscription = dead.subscription.topic, dead.subscription.name
        reason = dead.reason[-_REASON_CHARS:]
        details = {
            "subscription": subscription,
            "partition": dead.partition,
            "first_offset": dead.offsets[0],
            "count": len(dead.offsets),
            "reason": reason,
            "client": dead.holder,
        }
        self.events.record("dead_letter", "added", str(topic), dead.time_us, details)
        live = self.services.service_of(topic.name.tenant, dead.holder) if dead.holder else None
        error = ServiceError(
            code="dead_letter",
            message=reason,
            instance=dead.holder if live is None else live.definition.instance,
            topic=topic.name.topic,
            partition=dead.partition,
            offset=dead.offsets[0],
            details={"subscription": subscription, "count": len(dead.offsets)},
        )
        self.errors.note(topic.name.tenant, "" if live is None else live.definition.name, error, dead.time_us)

    def _refused(self, topic: Topic, partition: int, middleware: str, reasons: Sequence[str], now_us: int) -> None:
        reason = reasons[0][:_REASON_CHARS]
        details = {"middleware": middleware, "partition": partition, "count": len(reasons), "reason": reason}
        self.events.record("dead_letter", "added", str(topic), now_us, details)

    def _redriven(self, subscription: Subscription, count: int) -> None:
        details = {"subscription": subscription.name, "count": count}
        self.events.record("dead_letter", "redriven", str(subscription.topic), self._turns.now_us, details)

    def _service_changed(self, live: LiveInstance, action: str, now_us: int) -> None:
        definition = live.definition
        details = {"instance": definition.instance, "version": definition.version, "client": live.client}
        self.events.record("service", action, definition.name, now_us, details, durable=False)

    def _policy_changed(self, tenant: str, required: bool, now_us: int) -> None:
        name = str(TopicName(tenant, "services"))
        self.events.record("policy", "altered", name, now_us, {"require_registration": required})

    def _level_changed(self, tenant: str, action: str, rules: list[LogLevelRule], now_us: int) -> None:
        self._set_tracing()
        for rule in rules:
            name = str(TopicName(tenant, rule.scope))
            self.events.record("log_level", action, name, now_us, {"pattern": rule.pattern, "level": rule.level})


def _is_structural(kind: type[Request[Any]]) -> bool:
    return kind in _STRUCTURAL or any(
        permission.verb in _STRUCTURAL_VERBS and permission.resource is not Resource.SUBJECT
        for permission in kind.declared.permissions
    )
