"""The broker's façade: every gateway calls `Broker.ask`."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias, TypeVar

from headrace.broker.dead_letters import DeadLetters
from headrace.broker.group_coordinator import GroupCoordinator, find_offsets
from headrace.broker.idempotency import IdempotentPublisher
from headrace.broker.job_finisher import JobFinisher
from headrace.broker.key_history import KeyHistory
from headrace.broker.leasing import LeaseDispatcher
from headrace.broker.ledger import Ledger
from headrace.broker.maintenance import Maintenance
from headrace.broker.message_editor import MessageEditor
from headrace.broker.message_queries import MessageQueries
from headrace.broker.middleware_runner import MiddlewareRunner
from headrace.broker.observability import Observability, ObservedParts
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Ports, Session
from headrace.broker.publish_pipeline import PublishPipeline
from headrace.broker.request_dispatcher import RequestDispatcher
from headrace.broker.result_topics import ResultTopics
from headrace.broker.route_ingress import RouteIngress
from headrace.broker.routes import RouteRegistry
from headrace.broker.schedules import ScheduleRunner
from headrace.broker.settings import BrokerSettings
from headrace.broker.slices import Steps, in_slices
from headrace.broker.standing_leases import StandingLeases
from headrace.broker.streams import Readers, Stream, WaitingFetch
from headrace.broker.subject_handlers import subject_handlers
from headrace.broker.subscription_admin import SubscriptionAdmin
from headrace.broker.subscription_policies import SubscriptionPolicies
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.switchboard import Switchboard
from headrace.broker.tenant_names import check_plain, count_names
from headrace.broker.topic_middleware import load_nothing
from headrace.broker.topic_trimmer import TopicTrimmer
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.broker.turns import Turns
from headrace.broker.version_gate import check_countable
from headrace.engines.api import FORWARDER_MIN, PRODUCER_MIN, Store, as_headrace_error
from headrace.model.batch import Batch, received
from headrace.model.errors import DiskFull, Draining, HeadraceError, InvalidArgument, UnsupportedOperation
from headrace.model.idempotency import PublishedOnce, PublishOnce
from headrace.model.identity import ANONYMOUS, Identity
from headrace.model.job_requests import JobFinish, ResultsOpen
from headrace.model.key_versions import History
from headrace.model.leasing import (
    Ack,
    Edit,
    EditMatching,
    Extend,
    Find,
    Forecast,
    Lease,
    LeaseStop,
    Redrive,
    Reject,
    Release,
    Settlement,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionList,
    SubscriptionReset,
)
from headrace.model.middleware import LoadMiddleware
from headrace.model.partition_count import PartitionCount, PartitionsCounted
from headrace.model.reading import Fetch, StreamClose, StreamCredit, StreamOpen
from headrace.model.request import REQUESTS, Answer, Request
from headrace.model.requests import (
    BrokerInfo,
    Commit,
    Done,
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
    Published,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicInfo,
    TopicList,
    TopicTrim,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
    TransactionStaged,
)
from headrace.model.requests import (
    Topics as TopicsFound,
)
from headrace.model.schedule_requests import (
    ScheduleList,
    ScheduleNext,
    SchedulePause,
    ScheduleRemove,
    ScheduleRun,
    ScheduleSet,
)
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseOpen
from headrace.model.system_topics import check_clients_topic
from headrace.model.topic import DEFAULT_TENANT, checked_tenant

A = TypeVar("A", bound=Answer)
T = TypeVar("T", TransactionBegin, TransactionStage, TransactionCommit, TransactionAbort)
Outcome: TypeAlias = A | AnswerWithBody[A] | PendingAnswer[A | AnswerWithBody[A]] | Stream | WaitingFetch
"""An answer, with a body or without; an answer to come; or a reader, which produces batches when there is room."""

Handler = Callable[[Session, Any, memoryview, int], Any]

UNIX_SCHEME = "headrace+unix:"
"""What addresses of Unix sockets begin with: they are paths."""
_FULL_DISK = (
    "the disk is full, and the remaining space is reserved for freeing more; nothing was appended: trim topics "
    "(headrace topic trim), or free some space"
)


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
    ) -> None:
        """Open what is in the store, or begin anew: `new_id` then names the broker for good."""
        self._store = store
        self._ports = ports
        self._ballast = store.ballast
        self._version = version
        self._started_us = now_us
        self._ledger = Ledger(store, ports, settings, new_id, now_us)
        self._topics = TopicRegistry(store, self._ledger, ports, settings, load_middleware)
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
            self._topics, self._ledger, ports, self._turns, self._check_room, self._pipeline.sift
        )
        readers = self._groups, self._subscriptions, self._routes
        self._trimmer = TopicTrimmer(self._topics, *readers, ports)
        self._history = KeyHistory(self._topics, self._turns)
        self._maintenance = Maintenance(self._topics, *readers, self._ledger, ports, settings, dead_letters.learn)
        self._readers = Readers(self._topics, ports)
        self._switchboard = Switchboard(ports, RouteIngress(self._routes, self._topics, self._publish_batch))
        self._requests = RequestDispatcher(ports)
        parts = (self._topics, self._groups, self._subscriptions, dead_letters, self._schedules, self._routes)
        observed = ObservedParts(*parts, self._readers, self._leasing, self._switchboard)
        self._observability = Observability(observed, self._ledger, ports, self._turns, always=settings.record_events)
        self._services = self._observability.services
        self._restricted = self._services.restricted
        self._services.add_openings(self._readers.opened, self._standing.opened, self._leasing.waiting)
        self._services.add_openings(self._switchboard.opened, self._requests.opened)
        self._sessions: set[Session] = set()
        self._draining = False
        self.wall_offset_us = 0
        """How far the time of day is ahead of the broker's time: less than 0 after the system's clock was put back."""
        self.surroundings: Callable[[], dict[str, Any]] = dict
        """Returns the fields of BrokerInfo that only the process around the broker knows."""
        self._plain_handlers = self._by_request()
        self._handlers = self._plain_handlers
        """The same, or such that log what they do, while a logging level is set."""
        self._observability.levels.changed.connect(self._log_levels_changed)
        self._log_levels_changed()

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
        return at_rest and all(active.idle for active in self._topics.active_partitions())

    def connect(
        self,
        push: Callable[[Any], None],
        client: str,
        now_us: int,  # noqa: ARG002
        *,
        identity: Identity = ANONYMOUS,
        tenant: str = "",
        address: str = "",
        gateway: str = "",
        is_local: bool = False,
    ) -> Session:
        """Open a session; the broker calls `push` with what it tells the client unasked.

        The tenant is the one that the client asks for, by default its identity's own, and else the default one.
        """
        tenant = checked_tenant(tenant or identity.tenant or DEFAULT_TENANT)
        if identity.tenant and tenant != identity.tenant:
            raise InvalidArgument(
                f"{identity.name} belongs to the tenant {identity.tenant} and cannot open a session of {tenant}: "
                "leave the tenant out"
            )
        session = Session(
            push,
            identity=identity,
            tenant=tenant,
            client=client,
            address=address,
            gateway=gateway,
            is_local=is_local,
        )
        self._sessions.add(session)
        return session

    def touch(self, session: Session, now_us: int) -> None:
        """Keep the group memberships and services of a session alive."""
        self._groups.touch(session, now_us)
        if session.services:
            self._services.touch(session, now_us)

    def pause(self, session: Session) -> None:
        """Lease nothing more to a session: its client does not take what is sent as fast as it comes."""
        self._standing.pause(session)

    def resume(self, session: Session) -> None:
        """Lease to a session again."""
        self._standing.resume(session)
        self._requests.resume(session, self._turns.now_us)

    def disconnect(self, session: Session, now_us: int) -> None:
        """The connection is gone; members of groups that were reached through it have time to come back."""
        self._sessions.discard(session)
        self._readers.disconnect(session)
        self._groups.disconnect(session)
        self._leasing.disconnect(session)
        self._standing.disconnect(session, now_us)
        self._switchboard.disconnect(session)
        self._requests.disconnect(session)
        self._services.disconnect(session)

    def ask(self, session: Session, request: Request[A], body: memoryview, now_us: int) -> Outcome[A]:
        """Answer a request: every gateway calls this and nothing else. The body is not used after it returns."""
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
        handler = self._admit(session, request)
        try:
            outcome: Outcome[A] = handler(session, request, body, now_us)
        except OSError as error:
            raise as_headrace_error(error) from error
        return outcome

    def _admit(self, session: Session, request: Request[Any]) -> Handler:
        """What handles a request; one that its declaration does not allow to this session now is refused."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise UnsupportedOperation(f"the broker cannot answer {type(request).__name__}")
        if self._draining and not request.declared.while_draining:
            raise Draining
        if self._restricted:
            self._services.check(session, request)
        return handler

    def _log_levels_changed(self, *_: object) -> None:
        levels = self._observability.levels
        self._handlers = levels.traced(self._plain_handlers) if levels.active else self._plain_handlers

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
        if not self._draining:
            self._tick("schedules", self._schedules.tick, now_us + self.wall_offset_us)  # about the time of day
        cron_us = None if self._draining else self._schedules.next_tick_us()
        cron_us = None if cron_us is None else cron_us - self.wall_offset_us
        times = [self._maintenance.next_tick_us, self._leasing.next_tick_us, self._readers.next_tick_us, cron_us]
        times += [self._groups.next_tick_us(), self._middleware.next_tick_us, self._requests.next_tick_us]
        times.append(self._services.next_tick_us())
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
        self._draining = True
        self._standing.drain()
        self._leasing.drain()

    def close(self, now_us: int) -> None:
        """Sync and close everything; waits for the disk."""
        self._maintenance.close()
        self._middleware.close()
        self._observability.levels.close()
        with ExitStack() as closing:  # all of it, whatever goes wrong on the way; the last one first
            closing.callback(self._store.close)
            closing.callback(self._ledger.close)
            closing.callback(self._routes.record_positions, now_us)
            closing.callback(self._subscriptions.close)
            closing.callback(self._transactions.close)
            closing.callback(self._topics.close, now_us)

    def _by_request(self) -> dict[type[Request[Any]], Handler]:
        parts = (
            self._topic_requests(),
            self._group_requests(),
            self._leased_requests(),
            self._schedule_requests(),
            self._routes.requests(),
            subject_handlers(self._switchboard, self._requests),
            self._observability.requests(),
        )
        handlers = {request: handler for part in parts for request, handler in part.items()}
        declared = {request for request in REQUESTS.values() if not request.declared.by_gateway}
        assert handlers.keys() == declared, f"without a handler: {declared - handlers.keys()}"
        return self._observability.attributed(handlers)

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

    def _leased_requests(self) -> dict[type[Request[Any]], Handler]:
        admin, leasing, editing, finding = self._admin, self._leasing, self._editor, self._queries
        standing = self._standing
        return {
            SubscriptionCreate: lambda _, ask, __, now: admin.create(ask, now),
            SubscriptionAlter: lambda _, ask, __, now: admin.alter(ask, now),
            SubscriptionReset: lambda _, ask, __, now: admin.reset(ask, now),
            SubscriptionDelete: lambda _, ask, __, now: admin.delete(ask, now),
            SubscriptionDescribe: lambda _, ask, __, now: admin.describe(ask, now),
            SubscriptionList: lambda session, ask, _, now: admin.listed(ask, session.tenant, now),
            Lease: lambda session, ask, _, now: leasing.lease(session, ask, now),
            LeaseOpen: lambda session, ask, _, now: standing.open(session, ask, now),
            LeaseCredit: lambda session, ask, _, __: standing.credit(session, ask),
            LeaseClose: lambda session, ask, _, now: standing.close(session, ask, now),
            LeaseStop: lambda session, ask, _, __: leasing.stop(session, ask),
            Ack: lambda _, ask, __, now: leasing.ack(ask, now),
            Extend: lambda _, ask, __, now: leasing.extend(ask, now),
            Release: lambda session, ask, _, now: leasing.release(session, ask, now),
            Reject: lambda _, ask, __, now: leasing.reject(ask, now),
            Find: lambda _, ask, __, now: finding.find(ask, now),
            Forecast: lambda _, ask, __, now: finding.forecast(ask, now),
            Edit: lambda _, ask, body, now: editing.edit(ask, body, now),
            EditMatching: lambda _, ask, body, now: finding.edit_matching(ask, body, now),
            Redrive: lambda _, ask, __, now: finding.redrive(ask, now),
            ResultsOpen: lambda session, _, __, now: self._ledger.durably(self._results.open(session.tenant, now)),
            JobFinish: self._finish_job,
        }

    def _topic_requests(self) -> dict[type[Request[Any]], Handler]:
        readers = self._readers
        return {
            Publish: self._publish,
            PublishOnce: self._publish_once,
            PartitionCount: self._count_partitions,
            Fetch: lambda session, ask, _, now: readers.fetch(session, ask, now),
            StreamOpen: lambda session, ask, _, __: readers.open(session, ask),
            StreamCredit: lambda session, ask, _, __: readers.credit(session, ask),
            StreamClose: lambda session, ask, _, __: readers.close(session, ask),
            Offsets: lambda _, ask, __, ___: find_offsets(self._topics, ask),
            TopicCreate: self._create_topic,
            TopicAlter: self._alter_topic,
            TopicDelete: self._delete_topic,
            TopicDescribe: self._describe_topic,
            TopicList: self._list_topics,
            TopicTrim: lambda _, ask, __, now: self._trimmer.trim(ask, now),
            History: lambda _, ask, __, now: self._history.page(ask, now),
            Info: self._info,
        }

    def _group_requests(self) -> dict[type[Request[Any]], Handler]:
        groups, transactions = self._groups, self._transactions
        return {
            TransactionStage: self._stage,
            TransactionBegin: lambda session, ask, __, now: transactions.begin(_own(session, ask), now),
            TransactionCommit: lambda session, ask, __, now: transactions.commit(_own(session, ask), now),
            TransactionAbort: lambda session, ask, __, now: transactions.abort(_own(session, ask), now),
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

    def _check_room(self, topic: Topic) -> None:
        """Raise if a leased subscription of a topic has as many messages as it may have."""
        if topic.id in self._policies.refusing:
            self._policies.check(topic)

    def _publish(
        self, session: Session, request: Publish, body: memoryview, now_us: int
    ) -> Published | PendingAnswer[Published]:
        batch = received(body)
        if batch.producer_id and not PRODUCER_MIN <= batch.producer_id < FORWARDER_MIN:
            raise InvalidArgument(f"producers' ids below {PRODUCER_MIN} and from {FORWARDER_MIN} on are the broker's")
        if not request.topic:
            request.topic = self._routes.ingress(session.tenant)
        return self._publish_batch(session, request, batch, now_us)

    def _publish_batch(
        self, session: Session, request: Publish, batch: Batch, now_us: int
    ) -> Published | PendingAnswer[Published]:
        topics = self._topics
        if request.expected_offset:
            topics.check_begun(request.topic, request.expected_offset)  # before a topic is made
        if topics.find(request.topic) is None:
            check_clients_topic(request.topic)  # before a topic is made
        topic = topics.get_or_create(request.topic, now_us)
        if topic.is_brokers:
            check_clients_topic(request.topic)
        active = topics.active(topic, request.partition)
        if self._ballast.dropped and active.partition.durable:
            raise DiskFull(_FULL_DISK)
        if topic.id in self._policies.refusing:
            active.flush()  # what was gathered counts
            self._policies.check(topic)
        if topic.middleware is not None:
            return self._pipeline.publish(session, topic, active, request, batch, now_us)
        return active.publish(request, batch, now_us)

    def _publish_once(
        self, session: Session, request: PublishOnce, body: memoryview, now_us: int
    ) -> PublishedOnce | PendingAnswer[PublishedOnce]:
        check_clients_topic(request.topic)
        topic = self._topics.get_or_create(request.topic, now_us)
        if self._ballast.dropped:
            raise DiskFull(_FULL_DISK)
        if topic.id in self._policies.refusing:
            for active in topic.active_partitions.values():
                active.flush()  # what was gathered counts
            self._policies.check(topic)
        return self._idempotency.publish(request, topic, body, now_us, session.client)

    def _count_partitions(
        self, _: Session, request: PartitionCount, __: memoryview, now_us: int
    ) -> PartitionsCounted | PendingAnswer[PartitionsCounted]:
        if self._draining and self._topics.find(request.topic) is None:
            raise Draining  # it would make the topic
        topic = self._topics.get_or_create(request.topic, now_us)
        return PartitionsCounted(topic.settings.partitions, topic.id)

    def _stage(
        self, session: Session, request: TransactionStage, body: memoryview, now_us: int
    ) -> TransactionStaged | PendingAnswer[TransactionStaged]:
        check_clients_topic(request.topic)
        if self._ballast.dropped:
            raise DiskFull(_FULL_DISK)
        if self._policies.refusing:
            topic = self._topics.find(request.topic)
            if topic is not None and topic.id in self._policies.refusing:
                self._policies.check(topic)  # here, because a commit is never refused
        request, batch = _own(session, request), received(body)
        self._transactions.check_open(request, now_us)  # before a topic is made
        topic = self._topics.get_or_create(request.topic, now_us)
        if topic.middleware is not None:
            self._topics.active(topic, request.partition)  # first what may go wrong
            return self._pipeline.stage(session, topic, request, batch, now_us)
        return self._transactions.stage(request, batch, now_us)

    def _finish_job(
        self, _: Session, request: JobFinish, body: memoryview, now_us: int
    ) -> Settlement | PendingAnswer[Settlement]:
        if self._ballast.dropped:
            raise DiskFull(_FULL_DISK)
        return self._finisher.finish(request, received(body).copied(), now_us)  # it outlives this call

    def _create_topic(self, _: Session, request: TopicCreate, __: memoryview, now_us: int) -> PendingAnswer[TopicInfo]:
        new = self._topics.find(request.topic) is None
        topic = self._topics.create(request, now_us)
        return self._ledger.durably(self._topics.info(topic, partitions=True, new=new))

    def _alter_topic(self, _: Session, request: TopicAlter, __: memoryview, now_us: int) -> PendingAnswer[TopicInfo]:
        before = self._topics.known(request.topic)
        if not before.failure:
            self._topics.all_active(before)  # first what may go wrong
        if request.settings.get("key_versions") and not before.settings.key_versions:
            removing = self._maintenance.is_removing(before) or not self._trimmer.idle
            check_countable(committing=not self._transactions.idle, removing=removing)
        topic = self._topics.alter(request.topic, request.settings, now_us)
        return self._ledger.durably(self._topics.info(topic, partitions=True, new=True))

    def _delete_topic(self, _: Session, request: TopicDelete, __: memoryview, now_us: int) -> PendingAnswer[Done]:
        self._topics.delete(request.topic, now_us)
        return self._ledger.durably(Done())

    def _describe_topic(
        self, _: Session, request: TopicDescribe, __: memoryview, now_us: int
    ) -> TopicInfo | PendingAnswer[TopicInfo]:
        if not request.create or self._topics.find(request.topic) is not None:
            return self._topics.info(self._topics.known(request.topic), partitions=True)
        topic = self._topics.get_or_create(request.topic, now_us)
        return self._ledger.durably(self._topics.info(topic, partitions=True, new=True))

    def _list_topics(
        self, _: Session, request: TopicList, __: memoryview, ___: int
    ) -> TopicsFound | PendingAnswer[TopicsFound]:
        def steps() -> Steps:
            return TopicsFound((yield from self._topics.matching(request)))

        pending_answer: PendingAnswer[TopicsFound] = in_slices(self._ports, steps())
        found = pending_answer.outcome
        return found if isinstance(found, TopicsFound) else pending_answer  # few are there at once

    def _info(self, session: Session, _: Info, __: memoryview, now_us: int) -> BrokerInfo:
        tenant = None if session.names is None else session.tenant
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
            connections=sum(1 for one in self._sessions if tenant in (None, one.tenant)),
            transactions_open=count_names(self._transactions, tenant),
            data=self._store.directory or ":memory:",
            **self.surroundings(),
        )
        if not session.is_local:
            info.data = ""
            info.listening = [address for address in info.listening if not address.startswith(UNIX_SCHEME)]
        return info


def _own(session: Session, request: T) -> T:
    """A request about a transaction of the session's tenant; where that has a prefix, it was checked before."""
    if session.names is None:
        check_plain(request.transaction)
    return request
