"""Lists, counts, metrics and documents: they show what the session may describe, and nothing of another tenant."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.access_oracle import may, may_enter
from tests.access_stage import ACTORS, TENANTS, Stage
from tests.http_client import needs_http
from tests.request_examples import EXAMPLES

from headrace.model.metric_requests import MetricsCollect
from headrace.model.request import Request
from headrace.model.requests import GroupDescribe, Info
from headrace.model.service_requests import ServiceDescribe

pytestmark = needs_http

LIST_NAMES = [
    "TopicList", "GroupList", "SubscriptionList", "ScheduleList", "RouteList", "RouteExplain", "WebhookList",
    "ServiceList", "ErrorList", "LogLevelList", "MetricsCollect", "SwitchboardDescribe", "Info", "TenantUsageDescribe",
    "TenantDescribe", "TopicDescribe", "GroupDescribe", "ServiceDescribe",
]  # fmt: skip
LISTS = [example for example in EXAMPLES if type(example).__name__ in LIST_NAMES]
PAGES = [
    "/v1/topics", "/v1/groups", "/v1/subscriptions", "/v1/schedules", "/v1/routes", "/v1/webhooks", "/v1/services",
    "/v1/errors", "/metrics", "/v1/asyncapi.json", "/v1/asyncapi", "/v1/broker", "/v1/configuration", "/v1/subjects",
    "/v1/openapi.json", "/v1/docs", "/healthz", "/readyz", "/v1/groups/billing", "/v1/topics/orders",
]  # fmt: skip
KINDS = ["topic", "group", "subscription", "schedule", "route", "service", "webhook"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    staged = Stage(tmp_path_factory.mktemp("lists"))
    yield staged
    staged.close()


def is_secret_hidden(who: str, tenant: str, owner: str) -> bool:
    """Whether somebody may see nothing of all that is called `secret-` in the tenant of its owner."""
    name, actor = f"secret-{owner}", ACTORS[who]
    if owner != tenant and tenant != "default":
        return True  # sessions of other tenants than the default one see only their own
    return not any(may(actor, ("describe", kind, owner, name)) for kind in KINDS)


def cells() -> list[Any]:
    return [
        pytest.param(who, tenant, id=f"{who}-{tenant}")
        for who, actor in ACTORS.items()
        for tenant in TENANTS
        if may_enter(actor, tenant) or actor.is_anonymous
    ]


@pytest.mark.parametrize(("who", "tenant"), cells())
def test_nothing_shows_what_the_identity_may_not_describe(stage: Stage, who: str, tenant: str) -> None:
    unseen = [f"secret-{owner}" for owner in TENANTS if is_secret_hidden(who, tenant, owner)]
    told: dict[str, str] = {}
    with stage.http_client(who, tenant) as client:
        for path in PAGES:
            told[path] = str(client.ask("GET", path, None, {}))
    if not ACTORS[who].is_anonymous:
        for gateway in ("tcp", "websocket-json"):
            line = stage.open(gateway, who, tenant)
            for request in LISTS:
                told[f"{gateway} {type(request).__name__}"] = shown(line.ask(request))
            line.close()
    wrong = [f"{where} shows {name}" for where, text in told.items() for name in unseen if name in text]
    assert not wrong, "\n".join(wrong)


def shown(outcome: Any) -> str:
    """Everything that was told: no representation, which may leave things out."""
    answer = outcome.answer
    told = msgspec.to_builtins(answer) if isinstance(answer, msgspec.Struct) else answer
    return f"{outcome.code} {outcome.text} {outcome.details} {told}"


def test_each_kind_of_thing_is_hidden_by_itself(stage: Stage) -> None:
    """Who may describe groups, services and the broker sees no topics there."""
    line = stage.open("tcp", "counter", "default")
    families = line.ask(MetricsCollect()).answer.families
    labels = [label for family in families for sample in family.samples for label in sample.labels]
    assert not {"topic", "group", "route", "subscription", "webhook"} & set(labels)
    assert "tenant_usage" in {family.name for family in families}
    assert {one.labels["tenant"] for family in families for one in family.samples if "tenant" in one.labels} == {
        "default"
    }
    line.close()


def test_the_default_tenants_sessions_count_other_tenants_only_if_they_may_see_all(stage: Stage) -> None:
    def topics(who: str) -> int:
        line = stage.open("tcp", who, "default")
        try:
            return int(line.ask(Info()).answer.topics)
        finally:
            line.close()

    assert topics("administrator") > topics("counter") == topics("observer")


@pytest.mark.parametrize("request_", [GroupDescribe("billing"), ServiceDescribe("shop")])
def test_whoever_may_see_all_sees_all(stage: Stage, request_: Request[Any]) -> None:
    line = stage.open("tcp", "administrator", "default")
    told = shown(line.ask(request_))
    line.close()
    assert "secret-default" in told
