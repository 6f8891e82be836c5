"""Tenants are made, altered and deleted while the broker runs, and none can take what is for others."""

from pathlib import Path
from typing import Any

import pytest
from tests.definitions_stores import definitions_store as definitions_store
from tests.silent_sender import SilentSender

from headrace.broker import idempotency, log_levels, request_dispatcher, services, switchboard
from headrace.broker.ports import Session
from headrace.broker.settings import BrokerSettings
from headrace.model.errors import (
    Busy,
    Forbidden,
    HeadraceError,
    IdempotencyTableFull,
    InvalidArgument,
    LimitExceeded,
    QuotaExceeded,
    TenantExists,
    TenantNotEmpty,
    TenantNotFound,
)
from headrace.model.idempotency import PartitionBatch, PublishOnce
from headrace.model.identity import Identity
from headrace.model.leasing import SubscriptionCreate
from headrace.model.log_level_requests import LogLevelRule, LogLevelSet
from headrace.model.requests import (
    Commit,
    GroupJoin,
    Info,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicList,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.model.route_requests import RouteDefinition, RouteSet
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleList, ScheduleSet
from headrace.model.security_requests import (
    Binding,
    BindingAdd,
    SecurityAlter,
    SecurityDescribe,
    TokenCreate,
    TokenList,
    WhoAmI,
)
from headrace.model.service_requests import (
    ErrorList,
    ErrorReport,
    ServiceDefinition,
    ServiceError,
    ServiceList,
    ServicePolicyAlter,
    ServiceRegister,
)
from headrace.model.subject_requests import (
    ServeOpen,
    SubjectPublish,
    SubjectSubscribe,
    SwitchboardDescribe,
)
from headrace.model.tenant import TenantQuotas
from headrace.model.tenant_requests import (
    TenantAlter,
    TenantCreate,
    TenantDelete,
    TenantDescribe,
    TenantList,
    TenantUsageDescribe,
)
from headrace.model.webhook_requests import WebhookDefinition, WebhookSet
from headrace.security.definitions import DefinitionsChange
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    """A broker with files."""
    bench = Workbench(str(tmp_path))
    bench.broker.webhooks.attach(SilentSender())
    return bench


def names(bench: Workbench) -> list[str]:
    """The tenants that are listed."""
    return [one.tenant for one in bench.ask(TenantList()).tenants]


def fill(bench: Workbench, session: Session) -> None:
    """Let a tenant have one of everything."""
    bench.ask(TopicCreate("orders", {"partitions": 2}), session=session)
    bench.ask(TopicCreate("eu", {"view_of": "orders", "view_query": {"regex": "eu"}}), session=session)
    bench.ask(Publish("orders", 0), bench.batch([b"x"] * 5).data, session)
    bench.ask(SubscriptionCreate("orders"), session=session)
    bench.ask(GroupJoin("g", "m", ["orders"], session_ms=10_000), session=session)
    bench.ask(Commit("h", [PartitionOffset("orders", 0, 3)]), session=session)
    bench.ask(ScheduleSet(ScheduleDefinition("nightly", "orders", "every 1h", b"x")), session=session)
    bench.ask(RouteSet(RouteDefinition("copy", ["copies"], "orders", all=True)), session=session)
    epoch = bench.ask(TransactionBegin("load", join=True), session=session).epoch
    bench.ask(TransactionStage("load", epoch, "orders", 1), bench.batch([b"y"]).data, session)
    done = bench.ask(TransactionBegin("done", sequence=7), session=session).epoch
    bench.ask(TransactionCommit("done", done), session=session)
    bench.ask(EACH["webhooks"](0), session=session)
    bench.ask(ServiceRegister(ServiceDefinition("billing", "i1")), session=session)
    bench.ask(ErrorReport("billing", "i1", [ServiceError("broken", "it broke")]), session=session)
    bench.ask(ServicePolicyAlter(True), session=session)
    bench.ask(LogLevelSet(LogLevelRule("topic", "orders", "debug")), session=session)
    bench.ask(SubjectSubscribe("orders.*"), session=session)
    bench.ask(SubjectPublish("orders.paid"), bench.batch([b"z"]).data, session)


def test_a_tenant_is_made_described_altered_and_deleted(bench: Workbench) -> None:
    made = bench.ask(TenantCreate("acme", "A customer", {"topics": 2}))
    assert (made.tenant, made.description, made.quotas) == ("acme", "A customer", TenantQuotas(topics=2))
    with pytest.raises(TenantExists):
        bench.ask(TenantCreate("acme"))
    assert bench.ask(TenantCreate("acme", exist_ok=True)).description == "A customer"
    assert names(bench) == ["acme", "default"]
    altered = bench.ask(TenantAlter("acme", quotas={"topics": None, "groups": 3}))
    assert (altered.quotas, altered.description) == (TenantQuotas(groups=3), "A customer")
    bench.ask(TenantDelete("acme"))
    assert names(bench) == ["default"]
    for request in (TenantDescribe("acme"), TenantAlter("acme"), TenantDelete("acme"), TenantUsageDescribe("acme")):
        with pytest.raises(TenantNotFound):
            bench.ask(request)


def test_tenants_and_quotas_outlive_a_restart(bench: Workbench, tmp_path: Path) -> None:
    bench.ask(TenantCreate("acme", "A customer", {"topics": 1}))
    bench.ask(TopicCreate("orders"), session=bench.connect(tenant="acme"))
    bench.close()
    bench = Workbench(str(tmp_path))
    with pytest.raises(QuotaExceeded):
        bench.ask(TopicCreate("more"), session=bench.connect(tenant="acme"))
    info = bench.ask(TenantDescribe("acme"))
    assert (info.description, info.usage.topics) == ("A customer", 1)


@pytest.mark.parametrize(
    ("quotas", "text"),
    [
        ({"topcis": 1}, "topcis"),
        ({"topics": -1}, "topics"),
        ({"topics": "many"}, "topics"),
        ({"bytes_in": 0}, "bytes_in"),
    ],
)
def test_wrong_quotas_are_refused(bench: Workbench, quotas: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        bench.ask(TenantCreate("acme", quotas=quotas))
    assert names(bench) == ["default"]


EACH = {
    "topics": lambda number: TopicCreate(f"t{number}"),
    "partitions": lambda number: TopicCreate(f"t{number}"),
    "subscriptions": lambda number: SubscriptionCreate("orders", f"s{number}"),
    "groups": lambda number: Commit(f"g{number}", [PartitionOffset("orders", 0, 0)]),
    "transactions": lambda number: TransactionBegin(f"x{number}"),
    "schedules": lambda number: ScheduleSet(ScheduleDefinition(f"s{number}", "orders", "every 1h", b"")),
    "webhooks": lambda number: WebhookSet(WebhookDefinition(f"w{number}", "orders", "https://receiver.invalid/hook")),
    "routes": lambda number: RouteSet(RouteDefinition(f"r{number}", ["copies"], "orders", key=f"k{number}")),
}


@pytest.mark.parametrize("quota", EACH)
def test_each_quota_is_checked_where_the_thing_is_made(bench: Workbench, quota: str) -> None:
    bench.ask(TenantCreate("acme"))
    acme = bench.connect(tenant="acme")
    bench.ask(TopicCreate("orders"), session=acme)
    bench.ask(TopicCreate("copies"), session=acme)
    used = getattr(bench.ask(TenantUsageDescribe(), session=acme).usage, quota)
    bench.ask(TenantAlter("acme", quotas={quota: used + 2}))
    for number in range(2):
        bench.ask(EACH[quota](number), session=acme)
    with pytest.raises(QuotaExceeded) as refused:
        bench.ask(EACH[quota](2), session=acme)
    assert refused.value.details == {"quota": quota, "limit": used + 2, "usage": used + 2}
    assert "acme/" not in str(refused.value)
    bench.ask(TopicCreate("orders"))
    bench.ask(EACH[quota](2))  # others are not concerned


def test_partitions_count_when_a_topic_grows(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme", quotas={"partitions": 4}))
    acme = bench.connect(tenant="acme")
    bench.ask(TopicCreate("orders", {"partitions": 2}), session=acme)
    with pytest.raises(QuotaExceeded):
        bench.ask(TopicAlter("orders", {"partitions": 5}), session=acme)
    bench.ask(TopicAlter("orders", {"partitions": 4}), session=acme)


def test_connections_and_staged_bytes_are_limited(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme", quotas={"connections": 2, "staged_bytes": 500}))
    acme, other = bench.connect(tenant="acme"), bench.connect(tenant="acme")
    with pytest.raises(QuotaExceeded) as refused:
        bench.connect(tenant="acme")
    assert refused.value.details["quota"] == "connections"
    bench.broker.disconnect(other, bench.now_us)
    bench.connect(tenant="acme")
    epoch = bench.ask(TransactionBegin("t"), session=acme).epoch
    bench.ask(TransactionStage("t", epoch, "orders", 0), bench.batch([b"x" * 300]).data, acme)
    with pytest.raises(QuotaExceeded, match="staged bytes"):
        bench.ask(TransactionStage("t", epoch, "orders", 0), bench.batch([b"x" * 300]).data, acme)
    bench.ask(TransactionCommit("t", epoch), session=acme)
    assert bench.ask(TenantUsageDescribe(), session=acme).usage.staged_bytes == 0


def test_the_brokers_defaults_count_where_a_tenant_has_no_quota() -> None:
    bench = Workbench(settings=BrokerSettings(tenant_quotas=["topics=1", "groups=5"]))
    bench.ask(TenantCreate("acme", quotas={"topics": 2}))
    assert bench.ask(TenantDescribe("acme")).limits == TenantQuotas(topics=2, groups=5)
    zeta = bench.connect(tenant="zeta")
    bench.ask(TopicCreate("a"), session=zeta)
    with pytest.raises(QuotaExceeded):
        bench.ask(TopicCreate("b"), session=zeta)
    for name in ("a", "b", "c"):
        bench.ask(TopicCreate(name))  # the default tenant has the broker's own limits only


# Deleting.


def test_a_tenant_that_has_something_is_deleted_only_with_all_of_it(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme"))
    acme = bench.connect(tenant="acme")
    bench.ask(TopicCreate("orders"), session=acme)
    with pytest.raises(TenantNotEmpty) as refused:
        bench.ask(TenantDelete("acme"))
    assert refused.value.details["usage"] == {"topics": 1, "partitions": 1, "connections": 1}
    ended: list[HeadraceError] = []
    acme.end = ended.append
    bench.ask(TenantDelete("acme", cascade=True))
    assert [error.code for error in ended] == ["tenant_not_found"]
    with pytest.raises(TenantNotFound):
        bench.ask(Info(), session=acme)
    assert bench.ask(TopicList("acme/*")).topics == []


def test_nothing_is_left_of_a_deleted_tenant(bench: Workbench, tmp_path: Path) -> None:
    bench.ask(TenantCreate("acme"))
    fill(bench, bench.connect("app", tenant="acme"))
    fill(bench, bench.connect("app", tenant="zeta"))
    bench.ask(TenantDelete("acme", cascade=True))
    for restart in (False, True):
        if restart:
            bench.close()
            bench = Workbench(str(tmp_path))
        acme = bench.connect("app", tenant="acme")  # while security is off, it begins anew when it is used
        usage = bench.ask(TenantUsageDescribe(), session=acme).usage
        assert {name: count for name in usage.__struct_fields__ if (count := getattr(usage, name))} == {
            "connections": 1
        }
        assert bench.ask(TransactionBegin("done"), session=acme).sequence == 0, "its transactions begin anew"
        assert bench.ask(ServiceList(), session=acme).services == []
        assert not bench.ask(ServiceList(), session=acme).require_registration
        assert bench.ask(ErrorList(), session=acme).services == []
        assert bench.ask(SwitchboardDescribe(), session=acme).published == 0
        assert bench.ask(ScheduleList(), session=acme).schedules == []
        assert bench.broker._ledger.state.log_levels.keys() == {("zeta", "topic", "orders")}
        zeta = bench.connect("app", tenant="zeta")
        assert bench.ask(TenantUsageDescribe(), session=zeta).usage.topics == 4
        bench.broker.disconnect(acme, bench.now_us)


def test_a_deletion_goes_on_after_a_crash(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    bench.ask(TenantCreate("acme"))
    acme = bench.connect(tenant="acme")
    for number in range(50):
        bench.ask(TopicCreate(f"t{number}"), session=acme)
    bench.begin(TenantDelete("acme", cascade=True))
    left = set()
    for _ in range(200):
        bench.step()
        left.add(len(bench.broker._topics))
        if 0 < len(bench.broker._topics) < 40:
            break
    assert len(left) > 1, "it is done in slices"
    bench = Workbench(str(tmp_path))  # the former was killed
    assert names(bench) == ["default"]
    bench.run()
    assert len(bench.broker._topics) == 0
    assert bench.broker.definitions.load().tenants == {}


def test_a_tenant_that_is_being_deleted_is_gone_for_everybody(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme"))
    acme = bench.connect(tenant="acme")
    for number in range(50):
        bench.ask(TopicCreate(f"t{number}"), session=acme)
    deleting = bench.begin(TenantDelete("acme", cascade=True))
    bench.step()
    while not bench.broker.definitions.load().tenants["acme"].deleting:  # a store takes some steps
        bench.step()
    assert not deleting.resolved
    with pytest.raises(TenantNotFound):
        bench.connect(tenant="acme")
    assert isinstance(bench.begin(TopicCreate("acme/new")), TenantNotFound)
    assert isinstance(bench.begin(TenantCreate("acme")), Busy)
    assert isinstance(bench.begin(TenantDescribe("acme")), TenantNotFound)
    bench.run()
    assert deleting.resolved
    bench.ask(TenantCreate("acme"))


def test_the_default_tenant_stays(bench: Workbench) -> None:
    with pytest.raises(InvalidArgument):
        bench.ask(TenantDelete("default", cascade=True))
    bench.ask(TenantAlter("default", quotas={"topics": 0}))
    with pytest.raises(QuotaExceeded):
        bench.ask(TopicCreate("orders"))


# Isolation.


def secured(bench: Workbench) -> None:
    """Turn security on: ann administers everything, bob publishes in acme."""
    bound = [Binding("administrator", "ann", tenant="*"), Binding("publisher", "bob", tenant="acme")]
    change = DefinitionsChange(enabled=True, bound=bound)
    bench.broker.definitions.compare_and_set(
        change, bench.broker.definitions.load().version, bench.now_us, lambda _: None
    )
    bench.run()


def enter(bench: Workbench, who: str, tenant: str) -> Session:
    """Open a session of somebody."""
    return bench.broker.connect(lambda _: None, "app", bench.now_us, identity=Identity(who), tenant=tenant)


def test_only_tenants_that_were_made_can_be_used_while_security_is_on(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme"))
    secured(bench)
    assert enter(bench, "bob", "acme").is_counted
    with pytest.raises(TenantNotFound):
        enter(bench, "ann", "other")


def test_who_may_not_use_a_tenant_is_not_told_whether_there_is_one(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme"))
    bench.ask(TenantCreate("zeta", quotas={"connections": 0}))
    secured(bench)
    told = set()
    for tenant in ("zeta", "ghost"):
        with pytest.raises(Forbidden) as refused:
            enter(bench, "bob", tenant)
        told.add(str(refused.value).replace(tenant, "T"))
        nobody = bench.connect(tenant=tenant)  # may authenticate nobody, and ask for nothing
        assert not nobody.is_counted
        told.add(bench.begin(Info(), session=nobody).code)
    assert len(told) == 2
    bob = enter(bench, "bob", "acme")
    for request in (TenantDescribe("zeta"), TenantDescribe("ghost"), TenantList(), TenantDelete("zeta")):
        assert isinstance(bench.begin(request, session=bob), Forbidden)


def test_an_administrator_of_the_broker_administers_tenants_from_any_session(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme"))
    secured(bench)
    ann = enter(bench, "ann", "acme")
    bench.ask(TenantCreate("zeta"), session=ann)
    assert bench.ask(TenantDescribe("zeta"), session=ann).tenant == "zeta"
    bench.ask(TenantDelete("acme", cascade=True), session=enter(bench, "ann", "default"))
    document = bench.broker.definitions.load()
    assert [binding.identity for binding in document.bindings] == ["ann"], "bob's role in acme went with acme"


def test_a_session_of_a_tenant_sees_no_other(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme", "A customer"))
    bench.ask(TenantCreate("zeta", "Another one"))
    acme = bench.connect(tenant="acme")
    assert bench.ask(TenantDescribe(), session=acme).tenant == "acme"
    assert bench.ask(TenantDescribe("acme"), session=acme).description == "A customer"
    texts = []
    for tenant in ("zeta", "ghost", "default"):
        with pytest.raises(TenantNotFound) as refused:
            bench.ask(TenantDescribe(tenant), session=acme)
        assert "tenant list" not in str(refused.value), "which it may not ask for"
        texts.append(str(refused.value).replace(tenant, "T"))
    assert len(set(texts)) == 1, "whether there is such a tenant is not told"
    for request in (TenantList(), TenantCreate("new"), TenantAlter("acme"), TenantDelete("acme"), TenantDelete("zeta")):
        with pytest.raises(Forbidden):
            bench.ask(request, session=acme)


def test_no_tenant_takes_all_topics_once_tenants_are_made() -> None:
    bench = Workbench(settings=BrokerSettings(topics_max=12))
    bench.ask(TenantCreate("acme"))
    counts = {}
    for tenant in ("acme", "zeta", "default"):
        session, counts[tenant] = bench.connect(tenant=tenant), 0
        while not isinstance(bench.begin(TopicCreate(f"t{counts[tenant]}"), session=session), LimitExceeded):
            counts[tenant] += 1
    assert counts == {"acme": 6, "zeta": 3, "default": 2}
    bench.ask(TopicCreate("first"), session=bench.connect(tenant="new"))


@pytest.mark.parametrize(
    ("module", "limit", "request_of"),
    [
        (switchboard, "LIVE_SUBSCRIPTIONS_IN_ALL_MAX", lambda number: SubjectSubscribe(f"s{number}")),
        (request_dispatcher, "LIVE_SUBSCRIPTIONS_IN_ALL_MAX", lambda number: ServeOpen(f"s{number}")),
        (services, "SERVICE_INSTANCES_MAX", lambda number: ServiceRegister(ServiceDefinition("s", f"i{number}"))),
        (log_levels, "LOG_RULES_MAX", lambda number: LogLevelSet(LogLevelRule("topic", f"t{number}", "debug"))),
    ],
)
def test_no_tenant_takes_all_of_what_the_broker_has(
    module: Any, limit: str, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, 8)
    bench = Workbench()
    for tenant, most in (("acme", 8), ("zeta", 4)):
        bench = Workbench()
        if tenant == "zeta":
            bench.ask(TenantCreate("acme"))
        session, count = bench.connect(tenant=tenant), 0
        while not isinstance(bench.begin(request_of(count), session=session), LimitExceeded):
            count += 1
        assert count == most, "with tenants that were made, half of it"
        if tenant == "zeta":
            bench.ask(request_of(99), session=bench.connect(tenant="acme"))


def test_no_tenant_takes_all_idempotency_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "IDEMPOTENCY_KEYS_TOTAL_MAX", 8)
    bench = Workbench()
    bench.ask(TenantCreate("acme"))
    batch = bench.batch([b"x"]).data

    def publish(session: Session, number: int) -> Any:
        request = PublishOnce("orders", b"%016d" % number, b"r" * 16, [PartitionBatch(0, len(batch))])
        return bench.ask(request, batch, session)

    zeta = bench.connect(tenant="zeta")
    for number in range(4):
        publish(zeta, number)
    with pytest.raises(IdempotencyTableFull):
        publish(zeta, 4)
    publish(bench.connect(tenant="acme"), 0)


def test_a_tenant_that_nobody_made_exists_once_something_is_in_it(bench: Workbench) -> None:
    """Who only connects, such as a client that reconnects after the deletion, does not make it come back."""
    bench.ask(TenantCreate("acme"))
    bench.ask(TenantDelete("acme", cascade=True))
    acme = bench.connect(tenant="acme")
    assert [one.tenant for one in bench.ask(TenantList()).tenants] == ["default"]
    for request in (TenantDescribe("acme"), TenantDelete("acme"), TenantAlter("acme")):
        with pytest.raises(TenantNotFound, match="headrace tenant list"):
            bench.ask(request)
    bench.ask(TopicCreate("orders"), session=acme)
    assert [one.tenant for one in bench.ask(TenantList()).tenants] == ["acme", "default"]


def test_security_is_administered_by_the_default_tenant_also_while_it_is_off(bench: Workbench) -> None:
    acme = bench.connect(tenant="acme")
    binding = Binding("administrator", "ada")
    for request in (
        TokenCreate("ada"),
        TokenList(),
        BindingAdd(binding),
        SecurityDescribe(),
        SecurityAlter(enabled=True),
    ):
        with pytest.raises(Forbidden, match="connect without a tenant"):
            bench.ask(request, session=acme)
    assert not bench.ask(WhoAmI(), session=acme).is_authenticated
    assert not bench.ask(SecurityDescribe()).bindings
