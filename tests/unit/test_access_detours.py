"""What a role does not allow cannot be reached by a detour: through settings, claims, metrics or another's keys."""

from typing import Any

import pytest
from msgspec.structs import replace
from tests.definitions_stores import definitions_store as definitions_store
from tests.request_examples import EXAMPLES
from tests.silent_sender import SilentSender

from headrace.broker.access_filters import FILTERS
from headrace.model.errors import Forbidden, HeadraceError, InvalidArgument, SubscriptionNotFound, TenantNotFound
from headrace.model.idempotency import PartitionBatch, PublishOnce
from headrace.model.identity import ANONYMOUS, LOCAL, Identity
from headrace.model.leasing import (
    Holding,
    Lease,
    Redrive,
    Reject,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.metric_requests import MetricsCollect
from headrace.model.partition_count import PartitionCount
from headrace.model.request import Request
from headrace.model.requests import Commit, PartitionOffset, Publish
from headrace.model.security_requests import (
    Binding,
    BindingAdd,
    Grant,
    RoleSet,
    SecurityAlter,
    TokenCreate,
)
from headrace.model.service_requests import ServiceDefinition, ServiceList, ServiceRegister
from headrace.model.standing_lease import LeaseOpen
from headrace.model.system_topics import INGRESS_TOPIC
from headrace.model.tenant_requests import TenantCreate
from headrace.model.webhook_requests import WebhookAlter, WebhookDefinition, WebhookSet
from headrace.testing.workbench import Workbench

ADA, BOB = Identity("ada"), Identity("bob")
URL = "https://receiver.invalid/"


@pytest.fixture
def bench() -> Workbench:
    """A broker with security; `grant` gives ada what a test says."""
    bench = Workbench()
    bench.session = bench.connect("administrator", identity=LOCAL)
    bench.broker.webhooks.attach(SilentSender())
    bench.ask(TenantCreate("acme"))
    bench.publish("jobs", [b"a"])
    bench.publish("secrets", [b"s"])
    bench.ask(RoleSet("own", [Grant(["publish"], "topic", ["nothing"])]))
    for who in ("ada", "bob"):
        bench.ask(BindingAdd(Binding("own", who, tenant="default")))
    bench.ask(SecurityAlter(True))
    return bench


def grant(bench: Workbench, *grants: tuple[list[str], str, str]) -> Any:
    """Give ada these grants, and no others; returns a session of hers."""
    bench.ask(RoleSet("own", [Grant(verbs, resource, [pattern]) for verbs, resource, pattern in grants]))
    return bench.connect("ada", identity=ADA)


def refused(bench: Workbench, request: Request[Any], session: Any, body: bytes = b"") -> tuple[str, str, str]:
    with pytest.raises(Forbidden) as error:
        bench.ask(request, body, session=session)
    return error.value.details["verb"], error.value.details["resource"], error.value.details["name"]


def bury(bench: Workbench) -> None:
    """Let the message in jobs die."""
    portions = bench.ask(Lease("jobs", "mine")).answer.portions
    holdings = [Holding(one.partition, one.lease, list(one.all_offsets)) for one in portions]
    bench.ask(Reject("jobs", holdings, subscription="mine"))


@pytest.mark.parametrize("elsewhere", ["secrets", "acme/secrets"])
def test_dead_letters_go_only_where_the_session_may_publish(bench: Workbench, elsewhere: str) -> None:
    everything = (["create", "alter", "consume", "lease", "publish"], "*", "jobs*")
    session = grant(bench, everything, (["create", "alter"], "webhook", "*"))
    settings = {"dead_letter_topic": elsewhere}
    bench.ask(SubscriptionCreate("jobs", "mine"), session=session)
    bench.ask(WebhookSet(WebhookDefinition("mine", "jobs", URL)), session=session)
    for request in (
        SubscriptionCreate("jobs", "other", settings),
        SubscriptionAlter("jobs", settings, "mine"),
        WebhookSet(WebhookDefinition("other", "jobs", URL, settings=settings)),
        WebhookSet(WebhookDefinition("mine", "jobs", URL, settings=settings), replace=True),
        WebhookAlter("mine", {"settings": settings}),
    ):
        assert refused(bench, request, session) == ("publish", "topic", elsewhere)


def test_names_in_settings_belong_to_the_tenant_of_the_session(bench: Workbench) -> None:
    session = bench.connect("administrator", "acme", identity=LOCAL)
    settings = {"dead_letter_topic": "dead"}
    made = bench.ask(WebhookSet(WebhookDefinition("hook", "jobs", URL, settings=settings)), session=session)
    assert made.definition.settings["dead_letter_topic"] == "dead"
    stored = bench.broker.webhooks.find("acme/hook")
    assert stored is not None
    assert stored.definition.settings["dead_letter_topic"] == "acme/dead"
    with pytest.raises(InvalidArgument, match="not a name of the tenant acme"):
        bench.ask(WebhookAlter("hook", {"settings": {"dead_letter_topic": "other/dead"}}), session=session)


def test_a_redrive_from_a_topic_of_others_needs_the_right_to_lease_there(bench: Workbench) -> None:
    bench.ask(SubscriptionCreate("jobs", "mine", {"dead_letter_topic": "secrets"}))
    bury(bench)
    session = grant(bench, (["alter"], "subscription", "jobs"))
    assert refused(bench, Redrive("jobs", "mine"), session) == ("lease", "subscription", "secrets/redrive")
    session = grant(bench, (["alter"], "subscription", "jobs"), (["lease"], "subscription", "secrets/redrive"))
    assert bench.ask(Redrive("jobs", "mine"), session=session).messages == 1


def test_who_alters_a_subscription_redrives_from_the_topics_own_dead_letters(bench: Workbench) -> None:
    bench.ask(SubscriptionCreate("jobs", "mine"))
    bury(bench)
    session = grant(bench, (["alter"], "subscription", "jobs"))
    assert bench.ask(Redrive("jobs", "mine"), session=session).messages == 1


def test_a_service_claims_only_what_it_may_do(bench: Workbench) -> None:
    session = grant(bench, (["serve"], "service", "mine"), (["serve"], "subject", "prices.*"))
    for claims, need in (
        ({"produces": ["secrets"]}, ("publish", "topic", "secrets")),
        ({"consumes": ["secrets"]}, ("consume", "topic", "secrets")),
        ({"serves": ["logins.*"]}, ("serve", "subject", "logins.*")),
        ({"serves": ["acme/prices.get"]}, ("serve", "subject", "acme/prices.get")),
    ):
        assert refused(bench, ServiceRegister(ServiceDefinition("mine", "1", **claims)), session) == need
    bench.ask(ServiceRegister(ServiceDefinition("mine", "1", serves=["prices.>"])), session=session)
    for verb, resource, pattern in (("consume", "topic", "jobs"), ("lease", "subscription", "jobs/lea?e-*")):
        session = grant(bench, (["serve"], "service", "mine"), ([verb], resource, pattern))
        bench.ask(ServiceRegister(ServiceDefinition("mine", verb, consumes=["jobs"])), session=session)
        assert refused(bench, ServiceRegister(ServiceDefinition("mine", "2", consumes=["secrets"])), session)
    scoped = bench.ask(TokenCreate("ada", scopes=[Grant(["serve"], "service", ["*"])]))
    session = bench.connect("scoped", identity=Identity("ada", token_id=scoped.info.id))
    assert refused(bench, ServiceRegister(ServiceDefinition("mine", "3", consumes=["jobs"])), session)


def test_subjects_of_services_belong_to_their_tenant(bench: Workbench) -> None:
    bench.ask(BindingAdd(Binding("developer", "ann", tenant="acme")))
    session = bench.connect("ann", "acme", identity=Identity("ann"))
    bench.ask(ServiceRegister(ServiceDefinition("shop", "1", serves=["prices.*"])), session=session)
    (found,) = bench.ask(ServiceList(serves="prices.get"), session=session).services
    assert (found.name, found.serves) == ("shop", ["prices.*"])
    assert bench.ask(ServiceList(serves="orders.get"), session=session).services == []


def test_idempotency_keys_belong_to_an_identity(bench: Workbench) -> None:
    session, other = grant(bench, (["publish"], "topic", "jobs")), bench.connect("bob", identity=BOB)
    batch = bytes(bench.batch([b"x"]).data)
    first, second = (PublishOnce("jobs", b"k" * 16, one * 16, [PartitionBatch(0, len(batch))]) for one in (b"1", b"2"))
    assert not bench.ask(first, batch, session=session).repeated
    assert not bench.ask(second, batch, session=other).repeated
    assert bench.ask(first, batch, session=session).repeated
    assert first.key_hash == b"k" * 16
    assert bench.values("jobs") == [b"a", b"x", b"x"]


def test_idempotency_keys_are_recognised_after_a_restart(tmp_path: Any) -> None:
    for is_repeated in (False, True):
        bench = Workbench(str(tmp_path))
        bench.session = bench.connect("administrator", identity=LOCAL)
        bench.ask(SecurityAlter(True))
        batch = bytes(bench.batch([b"x"]).data)
        request = PublishOnce("jobs", b"k" * 16, b"r" * 16, [PartitionBatch(0, len(batch))])
        assert bench.ask(request, batch).repeated is is_repeated
        bench.broker.close(bench.now_us)


def test_metrics_name_only_what_the_session_may_describe(bench: Workbench) -> None:
    bench.ask(SubscriptionCreate("jobs", "hidden"))
    bench.ask(SubscriptionCreate("jobs", "mine"))
    bench.ask(Commit("hidden", [PartitionOffset("jobs", 0, 0)]))
    bench.publish("acme/orders", [b"x"])
    session = grant(
        bench, (["describe"], "broker", "*"), (["consume"], "topic", "jobs"), (["lease"], "subscription", "jobs/mine")
    )
    families = bench.ask(MetricsCollect(), session=session).families
    labels = {(label, text) for one in families for sample in one.samples for label, text in sample.labels.items()}
    assert {("topic", "jobs"), ("subscription", "mine")} <= labels
    for label, text in labels:
        assert label not in ("topic", "subscription", "group", "tenant") or text in ("jobs", "mine", "default"), text
        assert "acme" not in text


@pytest.mark.parametrize("kind", [Lease, LeaseOpen])
def test_leasing_creates_no_subscription_without_the_right_to(bench: Workbench, kind: Any) -> None:
    session = grant(bench, (["lease"], "subscription", "jobs/lease-*"))
    assert refused(bench, kind("jobs", "lease-1"), session) == ("create", "subscription", "jobs/lease-1")
    assert refused(bench, kind("missing", "lease-1"), session) == ("lease", "subscription", "missing/lease-1")
    with pytest.raises(SubscriptionNotFound):
        bench.ask(kind("jobs", "lease-1", create=False), session=session)
    with pytest.raises(SubscriptionNotFound):
        bench.ask(SubscriptionDescribe("jobs", "lease-1"))
    bench.ask(SubscriptionCreate("jobs", "lease-1"))
    assert bench.ask(kind("jobs", "lease-1"), session=session)
    session = grant(bench, (["lease", "create"], "subscription", "jobs/lease-*"))
    assert bench.ask(kind("jobs", "lease-2"), session=session)


def test_the_ingress_is_made_for_everybody_who_may_publish_to_it(bench: Workbench) -> None:
    bench.ask(BindingAdd(Binding("publisher", "pat", tenant="default")))
    session = bench.connect("pat", identity=Identity("pat"))
    assert bench.ask(PartitionCount(INGRESS_TOPIC), session=session).partitions == 1
    assert bench.ask(Publish("", 0), bytes(bench.batch([b"x"]).data), session=session).base_offset == 0
    assert refused(bench, PartitionCount("new"), session) == ("create", "topic", "new")


def test_a_refusal_by_scopes_says_so(bench: Workbench) -> None:
    bench.ask(BindingAdd(Binding("developer", "dev", tenant="default")))
    token = bench.ask(TokenCreate("dev", scopes=[Grant(["publish"], "topic", ["jobs"])]))
    session = bench.connect("dev", identity=Identity("dev", token_id=token.info.id))
    with pytest.raises(Forbidden, match="with this token, whose scopes do not include it"):
        bench.ask(PartitionCount("secrets"), session=session)
    session = bench.connect("dev", identity=Identity("dev"))
    with pytest.raises(Forbidden, match="an administrator can bind a role"):
        bench.ask(PartitionCount("headrace.x"), session=session)


@pytest.mark.parametrize(
    ("resource", "pattern"), [("topic", "acme/*"), ("subject", "a/b"), ("subscription", "acme/jobs/mine")]
)
def test_a_pattern_that_matches_nothing_is_refused(bench: Workbench, resource: str, pattern: str) -> None:
    with pytest.raises(InvalidArgument, match=r"without a tenant|leave the tenant out"):
        bench.ask(RoleSet("other", [Grant(["describe"], resource, [pattern])]))
    with pytest.raises(InvalidArgument, match=r"without a tenant|leave the tenant out"):
        bench.ask(TokenCreate("ada", scopes=[Grant(["describe"], resource, [pattern])]))


def test_tokens_are_for_tenants_that_there_are(bench: Workbench) -> None:
    with pytest.raises(TenantNotFound, match="headrace tenant create future"):
        bench.ask(TokenCreate("ada", "future"))
    for tenant in ("acme", "default"):
        assert bench.ask(TokenCreate("ada", tenant)).info.tenant == tenant
    bench.ask(SecurityAlter(False))
    assert bench.ask(TokenCreate("ada", "future")).info.tenant == "future"


def blanked(part: Any, fields: list[str]) -> Any:
    """A copy of a request, or of a part of it, in which what stands below these fields is empty."""
    if isinstance(part, list):
        return [blanked(one, fields) for one in part]
    if not fields or part is None:
        return None if part is None else ""
    if isinstance(part, dict):
        return {name: blanked(one, fields[1:]) if name == fields[0] else one for name, one in part.items()}
    return replace(part, **{fields[0]: blanked(getattr(part, fields[0]), fields[1:])})


@pytest.mark.parametrize(
    "example",
    [one for one in EXAMPLES if any(permission.field for permission in one.declared.permissions)],
    ids=lambda example: type(example).__name__,
)
def test_a_request_without_names_reaches_nothing(bench: Workbench, example: Request[Any]) -> None:
    for permission in example.declared.permissions:
        if permission.field:
            example = blanked(example, permission.field.split("."))
    answer = bench.begin(example, bench.batch([b"x"]).data, bench.connect("nobody", identity=ANONYMOUS))
    bench.run()
    answer = getattr(answer, "outcome", answer)
    if not isinstance(answer, HeadraceError):
        assert type(answer) in FILTERS
        assert getattr(answer, answer.__struct_fields__[0]) == []
