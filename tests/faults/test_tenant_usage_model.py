"""What is counted of tenants as they change is what a recount finds, whatever they do, and after a restart."""

import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.silent_sender import SilentSender

from headrace.broker.broker import Broker
from headrace.model.errors import HeadraceError, QuotaExceeded
from headrace.model.leasing import SubscriptionCreate, SubscriptionDelete
from headrace.model.requests import (
    Commit,
    GroupDelete,
    GroupJoin,
    GroupLeave,
    PartitionOffset,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.model.route_requests import RouteDefinition, RouteRemove, RouteSet
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleRemove, ScheduleSet
from headrace.model.tenant import COUNTED, TenantUsage
from headrace.model.tenant_requests import TenantCreate, TenantDelete
from headrace.model.topic import tenant_of
from headrace.model.webhook_requests import WebhookDefinition, WebhookDelete, WebhookSet
from headrace.testing.workbench import Workbench

TENANTS = st.sampled_from(["default", "acme", "zeta"])
NAMES = st.sampled_from(["a", "b", "c"])


def opened(directory: str, **more: Any) -> Workbench:
    """A broker whose webhooks send nothing."""
    bench = Workbench(directory, **more)
    bench.broker.webhooks.attach(SilentSender())
    return bench


def recount(broker: Broker) -> dict[str, TenantUsage]:
    """What tenants have, found by looking at everything."""
    counts: dict[str, Counter[str]] = {}

    def count(tenant: str, what: str, more: int = 1) -> None:
        counts.setdefault(tenant, Counter())[what] += more

    state = broker._ledger.state
    for topic in broker._topics:
        count(topic.name.tenant, "topics")
        count(topic.name.tenant, "partitions", topic.settings.partitions)
    for subscription in broker._subscriptions:
        count(subscription.topic.name.tenant, "subscriptions")
    for name in {*state.groups, *broker._groups._groups}:
        count(tenant_of(name), "groups")
    for name, opened in broker._transactions._open.items():
        count(tenant_of(name), "transactions")
        count(tenant_of(name), "staged_bytes", sum(stage.bytes for stage in opened.all_stages()))
    for name in state.schedules:
        count(tenant_of(name), "schedules")
    for name in state.routes.by_name:
        count(tenant_of(name), "routes")
    for stored in broker.webhooks.stored():
        count(tenant_of(stored.definition.name), "webhooks")
    for session in broker._sessions:
        count(session.tenant, "connections")
    return {tenant: TenantUsage(**{what: found[what] for what in COUNTED}) for tenant, found in counts.items()}


class TenantUsageModel(RuleBasedStateMachine):
    """Tenants make and remove all that is counted, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.bench = opened(self.directory)
        self.sessions: dict[str, list[Any]] = {}
        self.epochs: dict[tuple[str, str], int] = {}

    def teardown(self) -> None:
        self.bench.close()
        shutil.rmtree(self.directory)

    def ask(self, tenant: str, request: Any, body: Any = b"") -> Any:
        """The answer; None if the broker refuses."""
        own = self.sessions.setdefault(tenant, [])
        try:
            if not own:
                own.append(self.bench.connect(tenant=tenant))
            return self.bench.ask(request, body, own[0])
        except HeadraceError:
            return None

    @rule(tenant=TENANTS)
    def connect(self, tenant: str) -> None:
        with suppress(QuotaExceeded):
            self.sessions.setdefault(tenant, []).append(self.bench.connect(tenant=tenant))

    @rule(tenant=TENANTS)
    def disconnect(self, tenant: str) -> None:
        if self.sessions.get(tenant):
            self.bench.broker.disconnect(self.sessions[tenant].pop(), self.bench.now_us)

    @rule(tenant=TENANTS, name=NAMES, partitions=st.integers(1, 3))
    def create_topic(self, tenant: str, name: str, partitions: int) -> None:
        self.ask(tenant, TopicCreate(name, {"partitions": partitions}))

    @rule(tenant=TENANTS, name=NAMES, source=NAMES)
    def create_view(self, tenant: str, name: str, source: str) -> None:
        self.ask(tenant, TopicCreate(f"view-{name}", {"view_of": source, "view_query": {"regex": "x"}}))

    @rule(tenant=TENANTS, name=NAMES)
    def grow(self, tenant: str, name: str) -> None:
        self.ask(tenant, TopicAlter(name, {"partitions": 4}))

    @rule(tenant=TENANTS, name=NAMES, is_view=st.booleans())
    def delete_topic(self, tenant: str, name: str, is_view: bool) -> None:
        self.ask(tenant, TopicDelete(f"view-{name}" if is_view else name))

    @rule(tenant=TENANTS, topic=NAMES, name=NAMES)
    def subscribe(self, tenant: str, topic: str, name: str) -> None:
        self.ask(tenant, SubscriptionCreate(topic, name))

    @rule(tenant=TENANTS, topic=NAMES, name=NAMES)
    def unsubscribe(self, tenant: str, topic: str, name: str) -> None:
        self.ask(tenant, SubscriptionDelete(topic, name))

    @rule(tenant=TENANTS, group=NAMES, topic=NAMES, missing=st.sampled_from(["refuse", "create", "wait"]))
    def join(self, tenant: str, group: str, topic: str, missing: str) -> None:
        self.ask(tenant, GroupJoin(group, "m", [topic], session_ms=10_000, missing=missing))

    @rule(tenant=TENANTS, group=NAMES)
    def leave(self, tenant: str, group: str) -> None:
        self.ask(tenant, GroupLeave(group, "m"))

    @rule(tenant=TENANTS, group=NAMES, topic=NAMES)
    def commit(self, tenant: str, group: str, topic: str) -> None:
        self.ask(tenant, Commit(group, [PartitionOffset(topic, 0, 0)]))

    @rule(tenant=TENANTS, group=NAMES)
    def delete_group(self, tenant: str, group: str) -> None:
        self.ask(tenant, GroupDelete(group))

    @rule(tenant=TENANTS, name=NAMES, join=st.booleans())
    def begin(self, tenant: str, name: str, join: bool) -> None:
        begun = self.ask(tenant, TransactionBegin(name, join=join, timeout_ms=60_000))
        if begun is not None:
            self.epochs[tenant, name] = begun.epoch

    @rule(tenant=TENANTS, name=NAMES, topic=NAMES)
    def stage(self, tenant: str, name: str, topic: str) -> None:
        batch = self.bench.batch([b"staged"]).data
        self.ask(tenant, TransactionStage(name, self.epochs.get((tenant, name), 0), topic, 0), batch)

    @rule(tenant=TENANTS, name=NAMES, group=NAMES, topic=NAMES)
    def end(self, tenant: str, name: str, group: str, topic: str) -> None:
        epoch = self.epochs.get((tenant, name), 0)
        request = TransactionCommit(name, epoch, group=group, places=[PartitionOffset(topic, 0, 0)])
        if self.ask(tenant, request) is None:
            self.ask(tenant, TransactionAbort(name, epoch))

    @rule(tenant=TENANTS, name=NAMES, topic=NAMES)
    def schedule(self, tenant: str, name: str, topic: str) -> None:
        self.ask(tenant, ScheduleSet(ScheduleDefinition(name, topic, "every 1h", b"x")))

    @rule(tenant=TENANTS, name=NAMES)
    def unschedule(self, tenant: str, name: str) -> None:
        self.ask(tenant, ScheduleRemove(name))

    @rule(tenant=TENANTS, name=NAMES, source=NAMES, to=NAMES)
    def route(self, tenant: str, name: str, source: str, to: str) -> None:
        self.ask(tenant, RouteSet(RouteDefinition(name, [f"to-{to}"], source, all=True)))

    @rule(tenant=TENANTS, name=NAMES, topic=NAMES)
    def hook(self, tenant: str, name: str, topic: str) -> None:
        self.ask(tenant, WebhookSet(WebhookDefinition(name, topic, "https://receiver.invalid/hook")))

    @rule(tenant=TENANTS, name=NAMES)
    def unhook(self, tenant: str, name: str) -> None:
        self.ask(tenant, WebhookDelete(name))

    @rule(tenant=TENANTS, name=NAMES)
    def unroute(self, tenant: str, name: str) -> None:
        self.ask(tenant, RouteRemove(name))

    @rule(quota=st.integers(0, 3), what=st.sampled_from(["topics", "groups", "schedules", "connections"]))
    def limit(self, quota: int, what: str) -> None:
        self.ask("default", TenantCreate("zeta", quotas={what: quota}))
        self.sessions.setdefault("zeta", [])

    @rule(tenant=st.sampled_from(["acme", "zeta"]))
    def delete_tenant(self, tenant: str) -> None:
        self.ask("default", TenantDelete(tenant, cascade=True))
        left = recount(self.bench.broker).get(tenant, TenantUsage())
        # A tenant that has connections and nothing else does not exist: it cannot be deleted, and they stay.
        assert left == TenantUsage(connections=left.connections), "nothing is left"
        self.sessions[tenant] = []

    @rule()
    def wait(self) -> None:
        self.bench.tick(20)

    @rule()
    def restart(self) -> None:
        self.bench.close()
        self.bench = opened(self.directory, now_us=self.bench.now_us)
        self.sessions.clear()

    @invariant()
    def counts_are_right(self) -> None:
        found = recount(self.bench.broker)
        for tenant in ("default", "acme", "zeta"):
            assert self.bench.broker._accounts.usage(tenant) == found.get(tenant, TenantUsage())


TestTenantUsage = TenantUsageModel.TestCase
TestTenantUsage.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
