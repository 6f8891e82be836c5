"""Names at the door: every field that names something of a tenant is translated, on the way in and on the way out."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.broker.tenant_names import TenantNames, name_paths
from headrace.model.errors import InvalidArgument, TopicNotFound
from headrace.model.identity import Identity
from headrace.model.request import REQUESTS, Answer, WireStruct
from headrace.model.requests import (
    BrokerInfo,
    Info,
    TopicDescribe,
    TopicInfo,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.testing.workbench import Workbench
from headrace.wire import native

NAMING = {"topic", "topics", "group", "groups", "pattern", "patterns", "transaction", "name", "dead_letter_topic"}
NOT_NAMES = {
    ("Hello", "name"),  # the client's
    ("Topics", "topics"),  # whole answers, which have names in them
    ("Groups", "groups"),
    ("BrokerInfo", "topics"),  # numbers
    ("BrokerInfo", "groups"),
    ("RoleSet", "name"),  # roles are the broker's
    ("RoleRemove", "name"),
    ("AccessExplain", "name"),  # beside the tenant, which is a field of its own
    ("LogLevelReset", "pattern"),  # kept with the tenant that set it
}


def kinds() -> list[type[WireStruct]]:
    """Every request and answer."""
    answers = [request.declared.answer for request in REQUESTS.values() if request.declared.answer is not None]
    return sorted({*REQUESTS.values(), *answers, *native.PUSHES.values()}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_field_with_a_name_is_declared(kind: type[WireStruct]) -> None:
    declared = {path.fields[0] for path in name_paths(kind)}
    naming = {field.name for field in msgspec.structs.fields(kind)} & NAMING
    assert {name for name in naming if (kind.__name__, name) not in NOT_NAMES} <= declared


def test_a_request_is_copied_and_not_changed() -> None:
    request = TopicDescribe("orders")
    assert TenantNames("acme").qualified(request) == TopicDescribe("acme/orders")
    assert request == TopicDescribe("orders")


@pytest.mark.parametrize(("said", "meant"), [("orders", "acme/orders"), ("acme/orders", "acme/orders"), ("", "")])
def test_names_of_the_own_tenant(said: str, meant: str) -> None:
    assert TenantNames("acme").qualified_name(said) == meant


@pytest.mark.parametrize("name", ["zeta/orders", "default/orders", "*/orders", "/orders", "acmee/orders"])
def test_names_of_other_tenants_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="not a name of the tenant acme"):
        TenantNames("acme").qualified_name(name)


@pytest.mark.parametrize("tenant", ["default", "acme"])
@pytest.mark.parametrize(
    "ask",
    [
        TransactionBegin("acme/nightly"),
        TransactionStage("acme/nightly", 1, "orders", 0),
        TransactionCommit("acme/nightly", 1),
        TransactionAbort("acme/nightly", 1),
    ],
    ids=lambda ask: type(ask).__name__,
)
def test_a_transaction_cannot_be_named_with_a_tenant(tenant: str, ask: Any) -> None:
    bench = Workbench()
    theirs = bench.broker.connect(bench.pushed.append, "app", bench.now_us, tenant="acme")
    begun = bench.ask(TransactionBegin("nightly"), session=theirs)
    mine = bench.broker.connect(bench.pushed.append, "app", bench.now_us, tenant=tenant)
    with pytest.raises(InvalidArgument, match="`/` separates the tenant"):
        bench.ask(ask, session=mine)
    bench.ask(TransactionCommit("nightly", begun.epoch), session=theirs)


def test_groups_of_others_are_not_told() -> None:
    told = TenantNames("acme").translated(TopicInfo("acme/orders", 1, 0, {}, groups=["acme/billing", "watch"]))
    assert (told.topic, told.groups) == ("orders", ["billing"])


def test_errors_lose_the_tenant_but_paths_keep_it() -> None:
    error = TopicNotFound("there is no topic acme/a; see /data/acme/a", nearest=["acme/b"], partitions=3)
    told = TenantNames("acme").translated(error)
    assert type(told) is TopicNotFound
    assert (str(told), told.details) == ("there is no topic a; see /data/acme/a", {"nearest": ["b"], "partitions": 3})
    assert str(error) == "there is no topic acme/a; see /data/acme/a"


def test_an_identity_opens_sessions_of_its_tenant_only() -> None:
    bench = Workbench()
    ann = Identity("ann", "acme")

    def session(tenant: str) -> Any:
        return bench.broker.connect(bench.pushed.append, "app", bench.now_us, identity=ann, tenant=tenant)

    assert session("").tenant == session("acme").tenant == "acme"
    with pytest.raises(InvalidArgument, match="ann belongs to the tenant acme"):
        session("default")


def test_paths_are_told_on_the_brokers_machine_only(tmp_path: Path) -> None:
    data = str(tmp_path)
    bench = Workbench(data)
    bench.broker.surroundings = lambda: {"listening": ["headrace://h:1", "headrace+unix:///a/socket"]}

    def told(*, is_local: bool) -> BrokerInfo:
        session = bench.broker.connect(bench.pushed.append, "app", bench.now_us, is_local=is_local)
        answer: Answer = bench.ask(Info(), session=session)
        assert isinstance(answer, BrokerInfo)
        return answer

    assert (told(is_local=True).data, len(told(is_local=True).listening)) == (data, 2)
    assert (told(is_local=False).data, told(is_local=False).listening) == ("", ["headrace://h:1"])
