"""The broker's façade: every gateway calls `Broker.ask`."""

import errno
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias, TypeVar

from headrace.broker.access_control import AccessControl
from headrace.broker.access_filters import FILTERS, filtered
from headrace.broker.cluster_handlers import ClusterPort, cluster_handlers
from headrace.broker.commit_gate import CommitGate
from headrace.broker.dead_letters import DeadLetters
from headrace.broker.definitions_mirror import SharedDefinitionsStore, opened_definitions
from headrace.broker.group_coordinator import GroupCoordinator, find_offsets
from headrace.broker.idempotency import IdempotentPublisher
from headrace.broker.job_finisher import JobFinisher
from headrace.broker.key_history import KeyHistory
from headrace.broker.leased_handlers import job_handlers, leased_handlers
from headrace.broker.leasing import LeaseDispatcher
from headrace.broker.ledger import Ledger
from headrace.broker.maintenance import Maintenance
from headrace.broker.message_editor import MessageEditor
from headrace.broker.message_queries import MessageQueries
from headrace.broker.metric_collectors import BrokerCollector, MeasuredParts
from headrace.broker.metrics import MetricsRegistry, RequestHandler
from headrace.broker.middleware_runner import MiddlewareRunner
from headrace.broker.observability import Observability, ObservedParts
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Ports, Session
from headrace.broker.publish_pipeline import PublishPipeline
from headrace.broker.publisher import Publisher, own_transaction
from headrace.broker.rate_limits import EndedMeter
from headrace.broker.request_dispatcher import RequestDispatcher
from headrace.broker.result_topics import ResultTopics
from headrace.broker.route_ingress import RouteIngress
from headrace.broker.routes import RouteRegistry
from headrace.broker.schedules import ScheduleRunner
from headrace.broker.security_admin import SecurityAdmin
from headrace.broker.settings import BrokerSettings
from headrace.broker.standing_leases import StandingLeases
from headrace.broker.streams import Readers, Stream, WaitingFetch
from headrace.broker.subject_handlers import subject_handlers
from headrace.broker.subscription_admin import SubscriptionAdmin
from headrace.broker.subscription_policies import SubscriptionPolicies
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.switchboard import Switchboard
from headrace.broker.tenant_accounts import TenantAccounts
from headrace.broker.tenant_eraser import ErasedParts, TenantEraser
from headrace.broker.tenant_meters import TenantMeters
from headrace.broker.tenant_metrics import TenantCollector
from headrace.broker.tenant_names import count_names
from headrace.broker.tenants import TenantRegistry
from headrace.broker.topic_admin import TopicAdmin
from headrace.broker.topic_middleware import load_nothing
from headrace.broker.topic_trimmer import TopicTrimmer
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.broker.turns import Turns
from headrace.broker.webhooks import WebhookRegistry
from headrace.broker.websub_subscriptions import WebSubSubscriptions
from headrace.engines.api import Store, as_headrace_error
from headrace.model.errors import Draining, Forbidden, HeadraceError, InvalidArgument, UnsupportedOperation
from headrace.model.idempotency import PublishOnce
from headrace.model.identity import ANONYMOUS, Identity
from headrace.model.key_versions import History
from headrace.model.limits import ROUTES_MAX, SCHEDULES_MAX, TRANSACTIONS_MAX, WEBHOOKS_MAX
from headrace.model.metric_requests import MetricsCollect
from headrace.model.middleware import LoadMiddleware
from headrace.model.partition_count import PartitionCount
from headrace.model.reading import Fetch, StreamClose, StreamCredit, StreamOpen
from headrace.model.request import REQUESTS, Answer, Request, Resource
from headrace.model.requests import (
    BrokerInfo,
    Commit,
    GroupDelete,
    GroupDescribe,
    GroupJoin,
    GroupLeave,
    GroupList,
    GroupRelease,
    GroupSeek,
    Info,
    Offsets,
    Publish,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.model.schedule_requests import (
    ScheduleList,
    ScheduleNext,
    SchedulePause,
    ScheduleRemove,
    ScheduleRun,
    ScheduleSet,
)
from headrace.model.tenant import quotas_of
from headrace.model.topic import DEFAULT_TENANT, checked_tenant

A = TypeVar("A", bound=Answer)
T = TypeVar("T", TransactionBegin, TransactionStage, TransactionCommit, TransactionAbort)
Outcome: TypeAlias = A | AnswerWithBody[A] | PendingAnswer[A | AnswerWithBody[A]] | Stream | WaitingFetch
"""An answer, with a body or without; an answer to come; or a reader, which produces batches when there is room."""

Handler = Callable[[Session, Any, memoryview, int], Any]

UNIX_SCHEME = "headrace+unix:"
"""What addresses of Unix sockets begin with: they are paths."""


_SECURITY_REQUESTS = frozenset(
    request
    for request in REQUESTS.values()
    if any(one.resource in (Resource.SECURITY, Resource.CLUSTER) for one in request.declared.permissions)
)
"""While security is off, for sessions of the default tenant only: what they make counts once it is enabled."""


class Broker:
    """Topics, groups and transactions over a store. Everything is called on one thread, and nothing here waits."""

    def __init__(
        self,
        store: Store,
        ports: Ports,
        settings: BrokerSettings,
        *,
        new_id: str,
        version: str,
        now_us: int,
        load_middleware: LoadMiddleware = load_nothing,
        definitions: SharedDefinitionsStore | None = None,
    ) -> None:
        """Open what is in the store, or begin anew: `new_id` then names the broker for good.

        The security definitions are in `definitions`, which nodes of a cluster share; by default in the journal.
        """
        self._store = store
        self._ports = ports
        self._version = version
        self._ledger = Ledger(store, ports, settings, new_id, now_us)
        self._started_us = now_us
        now_us = self.start_us = self._ledger.start_us
        """The broker's time at its start: never before what was recorded, on whichever machine."""
        self.definitions = opened_definitions(definitions, self._ledger)
        """The security definitions."""
        self._gate = CommitGate(self._ledger) if store.is_replicated else None
        """Holds back what is not committed, in a cluster."""
        self._sessions: set[Session] = set()
        self._access = AccessControl(
            self.definitions, self._ledger, ports, self._sessions, settings.connections_per_identity_max
        )
        self.security = SecurityAdmin(self.definitions, self._access.used_us)
        self._topics = TopicRegistry(store, self._ledger, self.definitions, ports, settings, load_middleware)
        self._turns = Turns(ports, now_us)
        self._groups = GroupCoordinator(self._topics, self._ledger, ports)
        self._transactions = Transactions(
            store.open_staging("staging"), self._topics, self._groups, self._ledger, ports, settings, now_us
        )
        self._subscriptions = SubscriptionRegistry(self._topics, self._ledger, self._turns, now_us)
        leased = self._topics, self._subscriptions
        self._results = ResultTopics(self._topics, settings.result_seconds)
        dead_letters = DeadLetters(*leased, self._transactions, self._results, self._ledger.failures, self._turns)
        self._middleware = MiddlewareRunner(ports, self._turns)
        self._pipeline = PublishPipeline(self._middleware, dead_letters, self._transactions)
        self._idempotency = IdempotentPublisher(self._topics, self._transactions, self._pipeline, self._ledger, ports)
        self._admin = SubscriptionAdmin(*leased, dead_letters, self._ledger, self._turns)
        self._leasing = LeaseDispatcher(self._subscriptions, dead_letters, self._ledger, ports, self._turns)
        self._finisher = JobFinisher(self._subscriptions, self._leasing, self._results, self._transactions)
        self._standing = StandingLeases(self._subscriptions, self._leasing, self._ledger, self._turns)
        self._policies = SubscriptionPolicies(
            self._subscriptions, self._admin, self._standing, self._ledger, self._turns
        )
        self._editor = MessageEditor(*leased, self._ledger, self._turns)
        self._queries = MessageQueries(*leased, dead_letters, self._editor, self._ledger, self._turns)
        self._schedules = ScheduleRunner(
            self._topics, self._transactions, self._ledger, ports, self._waited_for, self._pipeline.process, now_us
        )
        self._routes = RouteRegistry(
            self._topics, self._ledger, ports, self._turns, self._policies.check_room, self._pipeline.sift
        )
        publishing = self._transactions, self._pipeline, self._idempotency, self._routes, store.ballast
        self._publisher = Publisher(self._topics, self._policies, *publishing)
        readers = self._groups, self._subscriptions, self._routes
        self._trimmer = TopicTrimmer(self._topics, *readers, ports)
        self._history = KeyHistory(self._topics, self._turns)
        self._maintenance = Maintenance(self._topics, *readers, self._ledger, ports, settings, dead_letters.learn)
        self._readers = Readers(self._topics, ports)
        self._switchboard = Switchboard(ports, RouteIngress(self._routes, self._topics, self._publisher.publish_batch))
        self._requests = RequestDispatcher(ports)
        self.webhooks = WebhookRegistry(*leased, self._admin, self._ledger, self._turns)
        self.websub = WebSubSubscriptions(self._topics, self.webhooks, self._turns)
        parts = (self._topics, self._groups, self._subscriptions, dead_letters, self._schedules, self._routes)
        observed = ObservedParts(*parts, self.webhooks, self._readers, self._leasing, self._switchboard)
        surrounding = self._ledger, ports, self._turns, self.definitions, settings
        self._observability = Observability(observed, *surrounding)
        self.audit = self._observability.audit
        """Gateways tell it of clients that they have not let in."""
        changing = self._maintenance, self._transactions, self.audit
        self._topic_admin = TopicAdmin(self._topics, self._ledger, ports, self._trimmer, *changing)
        self._services = self._observability.services
        self._restricted = self._services.restricted
        for part in (self._services, self._access):
            part.add_openings(self._readers.opened, self._standing.opened, self._leasing.waiting)
            part.add_openings(self._switchboard.opened, self._requests.opened)
        self.is_shared = False
        """Whether sessions of several tenants are open, which gateways then serve in turns."""
        self._open_tenants(settings)
        self._draining = False
        self.wall_offset_us = 0
        """How far the time of day is ahead of the broker's time: less than 0 after the system's clock was put back."""
        self.surroundings: Callable[[], dict[str, Any]] = dict
        """Returns the fields of BrokerInfo that only the process around the broker knows."""
        self.cluster: ClusterPort | None = None
        """The node of a cluster that serves with this broker; None: it is not part of one."""
        self.metrics = MetricsRegistry(self._turns)
        """What surrounds the broker adds its own collectors here."""
        self._plain_handlers = self._by_request()
        self._handlers = {kind: RequestHandler(handle) for kind, handle in self._plain_handlers.items()}
        """They handle requests themselves, or log them first, while a logging level is set."""
        self._measure(now_us)
        self._observability.levels.changed.connect(self._log_levels_changed)
        self._log_levels_changed()

    def _measure(self, now_us: int) -> None:
        """Add what is measured of the broker to its metrics."""
        measured = MeasuredParts(
            self._store, self._ledger, self._topics, self._groups, self._subscriptions, self._admin, self._routes,
            self._transactions, self._readers, self._switchboard, self._requests, self._services,
        )  # fmt: skip
        collector = BrokerCollector(measured, self._sessions, self._handlers)
        collector.add_to(self.metrics, self._version, self.broker_id, now_us)
        self.metrics.add(TenantCollector(self._accounts, self._meters).collect)

    def _open_tenants(self, settings: BrokerSettings) -> None:
        """Count what tenants have, and go on deleting those that were being deleted."""
        topics, groups, transactions, schedules = self._topics, self._groups, self._transactions, self._schedules
        maximums = {
            "topics": settings.topics_max,
            "schedules": SCHEDULES_MAX,
            "routes": ROUTES_MAX,
            "webhooks": WEBHOOKS_MAX,
            "transactions": TRANSACTIONS_MAX,
            "staged_bytes": settings.staged_bytes_max,
        }
        self._accounts = accounts = TenantAccounts(quotas_of(settings.tenant_quotas), maximums)
        accounts.follow(topics, groups, transactions, self._subscriptions, schedules, self._routes, self.webhooks)
        leased = self._subscriptions, self._ports, self._turns, self._sessions
        self._meters = TenantMeters(accounts, topics, *leased, self._rate_kept)
        others = self._routes, self.webhooks, self._observability
        parts = ErasedParts(topics, groups, transactions, schedules, *others)
        taken = self._switchboard, self._requests, self._services, self._observability.levels, self._idempotency
        for each in taken:
            each.taking.connect(accounts.check_share)
        endings = self._ledger, self._turns, self._sessions, self._end_session
        self._eraser = TenantEraser(self.definitions, accounts, parts, *endings)
        registered = accounts, self._meters, self._eraser, self._services, self._turns
        self._tenants = TenantRegistry(self.definitions, *registered)

    def share_connections(self, connections_max: int) -> None:
        """Let no tenant take all connections that the gateways admit, once tenants are made."""
        self._accounts.maximums["connections"] = connections_max

    @property
    def broker_id(self) -> str:
        """The name that the broker got when its store was made."""
        return self._ledger.state.broker_id

    @property
    def last_us(self) -> int:
        """The broker's time when it last recorded something before its start; 0 if it never did."""
        return self._ledger.last_us

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to answer."""
        at_rest = self._ledger.idle and self._transactions.idle and self._trimmer.idle and self._middleware.idle
        return at_rest and self.audit.idle and all(active.idle for active in self._topics.active_partitions())

    def connect(
        self,
        push: Callable[[Any], None],
        client: str,
        now_us: int,
        *,
        identity: Identity = ANONYMOUS,
        tenant: str = "",
        address: str = "",
        gateway: str = "",
        is_local: bool = False,
        is_internal: bool = False,
        end: Callable[[HeadraceError], None] | None = None,
    ) -> Session:
        """Open a session; the broker calls `push` with what it tells the client unasked, and `end` to end it.

        The tenant is the one that the client asks for, by default its identity's own, and else the default one.
        """
        tenant = checked_tenant(tenant or identity.tenant or DEFAULT_TENANT)
        if identity.tenant and tenant != identity.tenant:
            raise InvalidArgument(
                f"{identity.name} belongs to the tenant {identity.tenant} and cannot open a session of {tenant}: "
                "leave the tenant out"
            )
        session = Session(
            push if self._gate is None else self._gate.pushing(push),
            identity=identity,
            tenant=tenant,
            client=client,
            address=address,
            gateway=gateway,
            is_local=is_local,
            is_internal=is_internal,
            end=end,
        )
        try:
            self._access.opened(session, now_us)
            session.is_counted = not is_internal and (session.access is None or not session.access.is_empty)
            if session.is_counted:  # else it may do nothing there: it is not told whether there is such a tenant
                self._accounts.check(tenant, "connections")
            self._access.check_identity(session)
        except HeadraceError as error:
            self.audit.session_refused(session, error, now_us)
            raise
        self._accounts.connected(session, 1)
        self.is_shared = self._accounts.are_several_connected
        self._sessions.add(session)
        self._access.counted(session)
        self._meters.attach(session)
        self.audit.opened(session, now_us)
        return session

    def _end_session(self, session: Session, error: HeadraceError) -> None:
        """Refuse all that a session asks for, and close its connection."""
        session.set_meter(EndedMeter(session.tenant, error), lambda: self._turns.now_us)
        session.end(error)
        self.disconnect(session, self._turns.now_us)

    def end_sessions(self, error: HeadraceError, kept: str) -> None:
        """End all sessions of clients but those whose names begin with `kept`."""
        for session in [one for one in self._sessions if not (one.is_internal or one.client.startswith(kept))]:
            session.end(error)

    def _rate_kept(self, sessions: set[Session]) -> None:
        """Deliver to sessions again, whose tenant was beyond its rate."""
        self._readers.wake(sessions)
        self._standing.wake(sessions)
        for session in sessions:
            self._leasing.wake(session)
            self._requests.resume(session, self._turns.now_us)

    def touch(self, session: Session, now_us: int) -> None:
        """Keep the group memberships and services of a session alive."""
        self._groups.touch(session, now_us)
        if session.services:
            self._services.touch(session, now_us)

    def share_services(self, session: Session, other: Session) -> None:
        """Let another session of the same client count as the registered services that a session is."""
        if session.services:
            self._services.share(session, other)

    def pause(self, session: Session) -> None:
        """Lease nothing more to a session: its client does not take what is sent as fast as it comes."""
        self._standing.pause(session)

    def resume(self, session: Session) -> None:
        """Lease to a session again."""
        self._standing.resume(session)
        self._requests.resume(session, self._turns.now_us)

    def sending_failed(self, error: Exception | None) -> None:
        """A connection was lost by this error, which may be the only sign of a stored file that cannot be read."""
        if isinstance(error, OSError) and error.errno == errno.EFAULT:
            self._store.map_again()
            text = "stored messages could not be sent: a file was cut, or the disk cannot read it; try headrace verify"
            self._ledger.failures.note("sending", error, text)

    def disconnect(self, session: Session, now_us: int) -> None:
        """The connection is gone; members of groups that were reached through it have time to come back."""
        if session not in self._sessions:
            return
        self._sessions.discard(session)
        self._accounts.connected(session, -1)
        self.is_shared = self._accounts.are_several_connected
        self._access.closed(session)
        self._readers.disconnect(session)
        self._groups.disconnect(session)
        self._leasing.disconnect(session)
        self._standing.disconnect(session, now_us)
        self._switchboard.disconnect(session)
        self._requests.disconnect(session)
        self._services.disconnect(session)

    def ask(self, session: Session, request: Request[A], body: memoryview, now_us: int) -> Outcome[A]:
        """Answer a request: every gateway calls this and nothing else. The body is not used after it returns."""
        if session.meter is not None:
            return session.meter.ask(self._ask, session, request, body, now_us)  # type: ignore[no-any-return]
        return self._ask(session, request, body, now_us)

    def _ask(self, session: Session, request: Request[A], body: memoryview, now_us: int) -> Outcome[A]:
        names = session.names
        if names is None:
            return self._answer(session, request, body, now_us)
        try:
            outcome: Outcome[A] = names.translated_outcome(
                self._answer(session, names.qualified(request), body, now_us)
            )
            return outcome
        except HeadraceError as error:
            raise names.translated(error) from error

    def _answer(self, session: Session, request: Request[A], body: memoryview, now_us: int) -> Outcome[A]:
        self._turns.begin(now_us)
        handler = self._handlers.get(type(request))
        if handler is None:
            raise UnsupportedOperation(f"the broker cannot answer {type(request).__name__}")
        handler.asked += 1
        gate = None
        try:
            self._admit(session, request)
            gate = self._gate
            outcome: Outcome[A] = handler.handle(session, request, body, now_us)
        except HeadraceError as error:
            handler.refused += 1
            self.audit.refused(session, request, error, now_us)
            if gate is None:
                raise
            return gate.refuse(request, error)  # type: ignore[no-any-return]
        except OSError as error:
            handler.refused += 1
            raise as_headrace_error(error) from error
        if gate is not None and request.declared.awaits_commit:
            outcome = gate.answer(outcome)
        if session.access is not None and request.declared.answer in FILTERS:
            outcome = filtered(self._ports, session.access, outcome)
        return outcome

    def _admit(self, session: Session, request: Request[Any]) -> None:
        """Refuse a request that its declaration does not allow to this session now."""
        if self.cluster is not None and request.declared.permissions:
            # Those without continue or end what the session has open: credit that is refused would never come again.
            self.cluster.check_current()
        if self._draining and not request.declared.while_draining:
            raise Draining
        if session.access is not None:
            for names in session.access.check(request):
                if not self._exists(*names):
                    raise session.access.may_not_create(*names)
        elif session.names is not None and type(request) in _SECURITY_REQUESTS:
            raise Forbidden(
                f"a session of the tenant {session.tenant} cannot administer security, tenants or the cluster: "
                "connect without a tenant"
            )
        if self._restricted:
            self._services.check(session, request)

    def _exists(self, topic: str, subscription: str = "") -> bool:
        found = self._topics.find(topic)
        return found is not None and (not subscription or self._subscriptions.find(found, subscription) is not None)

    def _log_levels_changed(self, *_: object) -> None:
        levels = self._observability.levels
        handles = levels.traced(self._plain_handlers) if levels.active else self._plain_handlers
        for kind, handle in handles.items():
            self._handlers[kind].handle = handle

    def tick(self, now_us: int) -> int:
        """Run what is due; returns when to call it again at the latest."""
        self._turns.begin(now_us)
        self._tick("groups", self._groups.tick, now_us)
        self._tick("transactions", self._transactions.tick, now_us)
        self._tick("maintenance", self._maintenance.tick, now_us)
        self._tick("leasing", self._leasing.tick, now_us)
        self._tick("standing leases", self._standing.tick, now_us)
        self._tick("subscription policies", self._policies.tick, now_us)
        self._tick("readers", self._readers.tick, now_us)
        self._tick("queries", self._queries.tick, now_us)
        self._tick("idempotency keys", self._idempotency.tick, now_us)
        self._tick("middleware", self._middleware.tick, now_us)
        self._tick("routes", self._routes.tick, now_us)
        self._tick("requests", self._requests.tick, now_us)
        self._tick("services", self._services.tick, now_us)
        self._tick("rates of tenants", self._meters.tick, now_us)
        self._tick("deletion of tenants", self._eraser.tick, now_us)
        self._tick("WebSub subscriptions", self.websub.tick, now_us)
        self._tick("access", self._access.tick, now_us)
        self._tick("audit trail", self.audit.tick, now_us)
        if not self._draining:
            self._tick("schedules", self._schedules.tick, now_us + self.wall_offset_us)  # about the time of day
        cron_us = None if self._draining else self._schedules.next_tick_us()
        cron_us = None if cron_us is None else cron_us - self.wall_offset_us
        times = [self._maintenance.next_tick_us, self._leasing.next_tick_us, self._readers.next_tick_us, cron_us]
        times += [self._groups.next_tick_us(), self._middleware.next_tick_us, self._requests.next_tick_us]
        times += [self._services.next_tick_us(), self.websub.next_tick_us(), self._meters.next_tick_us()]
        return min(time_us for time_us in (*times, now_us + 1_000_000) if time_us is not None)

    def _tick(self, component: str, tick: Callable[[int], None], now_us: int) -> None:
        """Run one component's tick; its failure is logged and does not stop the others."""
        try:
            tick(now_us)
        except Exception as error:  # noqa: BLE001 it is told, and tried again at the next tick
            text = "broker tick failed; trying again  component=%s"
            self._ledger.failures.note(("tick", component), error, text, component)
        else:
            self._ledger.failures.worked(("tick", component))

    def drain(self) -> None:
        """Refuse new work from now on; work that was begun can be finished."""
        self._draining = self._publisher.draining = True
        self._standing.drain()
        self._leasing.drain()

    def close(self, now_us: int) -> None:
        """Sync and close everything; waits for the disk."""
        self.audit.flush(now_us)
        self._maintenance.close()
        self._middleware.close()
        self._observability.levels.close()
        with ExitStack() as closing:  # all of it, whatever goes wrong on the way; the last one first
            closing.callback(self._store.close)
            closing.callback(self._ledger.close)
            closing.callback(self._access.flush, now_us)
            closing.callback(self.audit.close, now_us)
            closing.callback(self._routes.record_positions, now_us)
            closing.callback(self._subscriptions.close)
            closing.callback(self._transactions.close)
            closing.callback(self._topics.close, now_us)

    def _by_request(self) -> dict[type[Request[Any]], Handler]:
        parts = (
            self._topic_requests(),
            self._group_requests(),
            leased_handlers(self._admin, self._leasing, self._standing, self._queries, self._editor),
            job_handlers(self._finisher, self._results, self._publisher, self._ledger),
            self._schedule_requests(),
            self._routes.requests(),
            self.webhooks.requests(),
            self.websub.requests(),
            subject_handlers(self._switchboard, self._requests),
            self._observability.requests(),
            self.security.requests(),
            self._tenants.requests(),
            cluster_handlers(lambda: self.cluster),
        )
        handlers = {request: handler for part in parts for request, handler in part.items()}
        declared = {request for request in REQUESTS.values() if not request.declared.by_gateway}
        assert handlers.keys() == declared, f"without a handler: {declared - handlers.keys()}"
        handlers = self._observability.attributed(handlers)
        return {**handlers, **{kind: self._access.answering(handlers[kind]) for kind in self.security.requests()}}

    def _schedule_requests(self) -> dict[type[Request[Any]], Handler]:
        schedules = self._schedules
        return {
            ScheduleSet: lambda _, ask, __, now: schedules.set(ask, now + self.wall_offset_us),
            ScheduleRemove: lambda _, ask, __, now: schedules.remove(ask, now + self.wall_offset_us),
            ScheduleList: lambda session, ask, _, __: schedules.listed(ask, session.tenant),
            SchedulePause: lambda _, ask, __, now: schedules.pause(ask, now + self.wall_offset_us),
            ScheduleRun: lambda _, ask, __, now: schedules.run(ask, now + self.wall_offset_us),
            ScheduleNext: lambda _, ask, __, now: schedules.next_runs(ask, now + self.wall_offset_us),
        }

    def _topic_requests(self) -> dict[type[Request[Any]], Handler]:
        publisher, readers = self._publisher, self._readers
        return {
            Publish: publisher.publish,
            PublishOnce: publisher.publish_once,
            PartitionCount: publisher.count_partitions,
            Fetch: lambda session, ask, _, now: readers.fetch(session, ask, now),
            StreamOpen: lambda session, ask, _, __: readers.open(session, ask),
            StreamCredit: lambda session, ask, _, __: readers.credit(session, ask),
            StreamClose: lambda session, ask, _, __: readers.close(session, ask),
            Offsets: lambda _, ask, __, ___: find_offsets(self._topics, ask),
            **self._topic_admin.requests(),
            History: lambda _, ask, __, now: self._history.page(ask, now),
            Info: self._info,
            MetricsCollect: lambda session, _, __, now: self.metrics.collect(session, now),
        }

    def _group_requests(self) -> dict[type[Request[Any]], Handler]:
        groups, transactions = self._groups, self._transactions
        return {
            TransactionStage: self._publisher.stage,
            TransactionBegin: lambda session, ask, __, now: transactions.begin(own_transaction(session, ask), now),
            TransactionCommit: lambda session, ask, __, now: transactions.commit(own_transaction(session, ask), now),
            TransactionAbort: lambda session, ask, __, now: transactions.abort(own_transaction(session, ask), now),
            Commit: lambda session, ask, _, now: groups.commit(session, ask, now),
            GroupJoin: lambda session, ask, _, now: groups.join(session, ask, now),
            GroupRelease: lambda session, ask, _, now: groups.release(session, ask, now),
            GroupLeave: lambda session, ask, _, now: groups.leave(session, ask, now),
            GroupList: lambda session, ask, _, now: groups.listed(session, ask, now),
            GroupDescribe: lambda session, ask, _, now: groups.describe(session, ask, now),
            GroupSeek: lambda session, ask, _, now: groups.seek(session, ask, now),
            GroupDelete: lambda session, ask, _, now: groups.delete(session, ask, now),
        }

    def _waited_for(self, topic: Topic, partition: int, offset: int, time_of_day_us: int) -> bool:
        """Whether some leased subscription has not settled a message."""
        now_us = time_of_day_us - self.wall_offset_us
        leased = self._subscriptions.of_topic(topic)
        for one in leased:
            self._subscriptions.refresh(one, now_us)  # else a new message counts as settled
        return any(not one.is_settled(partition, offset) for one in leased)

    def _info(self, session: Session, _: Info, __: memoryview, now_us: int) -> BrokerInfo:
        tenant = session.counted_tenant
        topics = [topic for topic in self._topics if tenant in (None, topic.name.tenant)]
        info = BrokerInfo(
            broker_id=self.broker_id,
            version=self._version,
            started_us=self._started_us,
            time_us=now_us,
            topics=len(topics),
            partitions_open=sum(len(topic.active_partitions) for topic in topics),
            groups=count_names(self._ledger.state.groups, tenant),
            subscriptions=count_names((str(one.topic) for one in self._subscriptions), tenant),
            schedules=count_names(self._ledger.state.schedules, tenant),
            connections=sum(1 for one in self._sessions if tenant in (None, one.tenant) and not one.is_internal),
            transactions_open=count_names(self._transactions, tenant),
            data=self._store.directory or ":memory:",
            **self.surroundings(),
        )
        if not session.is_local:
            info.data = ""
            info.listening = [address for address in info.listening if not address.startswith(UNIX_SCHEME)]
        return info
