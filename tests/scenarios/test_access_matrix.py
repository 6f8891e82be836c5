"""Roles × requests × tenants × gateways: the answers are those of a naive oracle, and a refusal tells nothing.

Each test is one gateway, one actor and one tenant, and asks every request there; a failure lists the requests.
"""

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.access_oracle import Actor, hidden, is_allowed, may, may_enter, needs
from tests.access_stage import ACTORS, NAMES, TENANTS, HttpLine, Outcome, SocketRefused, Stage, error_outcome, renamed
from tests.http_client import needs_http
from tests.request_examples import EXAMPLES
from tests.route_examples import OPEN_TO_ALL, ROUTE_EXAMPLES, RouteExample

from headrace.errors import HeadraceError
from headrace.model.leasing import SubscriptionList
from headrace.model.request import Request
from headrace.model.requests import TopicList
from headrace.model.route_requests import RouteList
from headrace.model.schedule_requests import ScheduleList
from headrace.model.service_requests import ErrorList, ServiceList
from headrace.model.webhook_requests import WebhookList

pytestmark = needs_http

GATEWAYS = ("tcp", "unix", "upgraded", "websocket-json", "websocket-msgpack")
MISSING = "-zz"
"""Behind the names of things that never exist."""
SPARE = "-yy"
"""Behind the names of things that allowed requests make, change and delete."""
_CHANGING = {"create", "alter", "delete", "route", "schedule", "administer", "edit-own"}
MALFORMED = {"malformed_request", "invalid_json", "invalid_field", "path_not_found", "unsupported_media_type"}
"""Codes of examples that never reached the broker."""
ASKED = [example for example in EXAMPLES if type(example).declared.permissions]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    place: Path = tmp_path_factory.mktemp("matrix")
    staged = Stage(place)
    yield staged
    staged.close()


def entry_refusal(actor: Actor, tenant: str) -> str:
    """The code of the error for somebody who may not open a session in a tenant."""
    if actor.is_anonymous:
        return "not_authenticated"
    return "invalid_argument" if actor.tenant not in ("", tenant) else "forbidden"


def is_changing(request: Request[Any]) -> bool:
    return any(permission.verb.value in _CHANGING for permission in type(request).declared.permissions)


@pytest.mark.parametrize("tenant", TENANTS)
@pytest.mark.parametrize("who", ACTORS)
@pytest.mark.parametrize("gateway", GATEWAYS)
def test_every_request_is_answered_as_the_roles_say(stage: Stage, gateway: str, who: str, tenant: str) -> None:
    actor, wrong = ACTORS[who], []
    if gateway == "unix" and actor.is_anonymous:
        return  # the user's own socket, who is the administrator
    try:
        line = stage.open(gateway, who, tenant)
    except (HeadraceError, SocketRefused) as refused:
        outcome = refused.outcome if isinstance(refused, SocketRefused) else error_outcome(refused)
        assert not may_enter(actor, tenant), outcome
        assert outcome.code == entry_refusal(actor, tenant), outcome
        return
    assert may_enter(actor, tenant)
    for example in ASKED:
        if gateway.startswith("websocket") and not line.offers(example):
            continue
        name = type(example).__name__
        if is_allowed(actor, example, tenant):
            asked = renamed(example, SPARE) if is_changing(example) else example
            expected = is_allowed(actor, asked, tenant, exists=not is_changing(example))
            outcome = line.ask(asked)
            if outcome.is_refused == expected:
                wrong.append(f"{name}: allowed, and answered {outcome}")
            continue
        there, missing = line.ask(example), line.ask(renamed(example, MISSING))
        if there.code != "forbidden":
            wrong.append(f"{name}: not allowed, and answered {there}")
        elif there.without(MISSING) != missing.without(MISSING):
            wrong.append(f"{name}: {there} tells what exists from {missing}")
    line.close()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("who", ACTORS)
def test_the_default_tenants_sessions_reach_other_tenants_by_their_roles_there(stage: Stage, who: str) -> None:
    """Names such as `acme/orders` in a session of the default tenant."""
    actor, wrong = ACTORS[who], []
    if not may_enter(actor, "default"):
        return
    line = stage.open("tcp", who, "default")
    for example in ASKED:
        asked = renamed(example, "", "acme/")
        if asked == example or type(example).__name__.startswith(("Tenant", "Role", "Transaction")):
            continue
        if {tenant for _, resource, tenant, _ in needs(asked, "default") if resource != "broker"} != {"acme"}:
            continue
        if is_allowed(actor, asked, "default"):
            if not is_changing(example) and line.ask(asked).is_refused:
                wrong.append(f"{type(example).__name__}: allowed, and refused")
            continue
        there, missing = line.ask(asked), line.ask(renamed(example, MISSING, "acme/"))
        nowhere = line.ask(renamed(example, "", "nobody/"))
        if there.code != "forbidden":
            wrong.append(f"{type(example).__name__}: not allowed, and answered {there}")
        elif there.without(MISSING) != missing.without(MISSING):
            wrong.append(f"{type(example).__name__}: {there} tells what exists from {missing}")
        elif (there.code, there.text.replace("acme/", "nobody/")) != (nowhere.code, nowhere.text):
            wrong.append(f"{type(example).__name__}: {there} tells which tenants exist from {nowhere}")
    line.close()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("example", ASKED, ids=lambda example: type(example).__name__)
def test_the_matrix_has_both_answers_to_each_request(example: Request[Any]) -> None:
    answers = {is_allowed(actor, example, "default") for actor in ACTORS.values()}
    is_list = not needs(example, "default")
    assert answers == ({True} if is_list else {True, False})


def test_every_route_has_an_example() -> None:
    from headrace.gateways.http.resource_table import ROUTES

    assert {f"{route.method} {route.path}" for route in ROUTES} == ROUTE_EXAMPLES.keys() | OPEN_TO_ALL.keys()


@pytest.mark.parametrize("tenant", TENANTS)
@pytest.mark.parametrize("who", ACTORS)
def test_every_route_is_answered_as_the_roles_say(stage: Stage, who: str, tenant: str) -> None:
    with stage.http_client(who, tenant) as client:
        wrong = [
            f"{route} {example.query}: {told}"
            for route, examples in ROUTE_EXAMPLES.items()
            for example in examples
            if (told := wrong_answer(client, route, example, ACTORS[who], tenant))
        ]
    assert not wrong, "\n".join(wrong)


def wrong_answer(client: HttpLine, route: str, example: RouteExample, actor: Actor, tenant: str) -> str:
    """What is wrong with the answers to a route; empty if nothing is."""

    def ask(suffix: str, names: Collection[str] = NAMES) -> Outcome:
        body, headers = example.encoded(suffix, client.url, names)
        path = example.path(suffix, names)
        return client.ask(route.partition(" ")[0], path, body, headers, streams="Accept" in headers)

    may_all = partial(_may_all, actor, example.asks, tenant)
    if may_enter(actor, tenant) and may_all():
        changes = any(is_changing(request) for request in example.asks)
        suffix = SPARE if changes else ""
        outcome = ask(suffix)
        if outcome.is_refused == may_all(suffix, exists=not changes):
            return f"allowed, and answered {outcome}"
        return f"the example is wrong: {outcome}" if outcome.code in MALFORMED else ""
    refusal = "forbidden" if may_enter(actor, tenant) else entry_refusal(actor, tenant)
    unseen = {name for request in example.asks for name in hidden(actor, request, tenant)}
    unseen |= set() if may_enter(actor, tenant) else NAMES
    there, missing = ask(""), ask(MISSING, unseen)
    is_seen = not unseen and there.code.endswith("_not_found")
    if there.code != refusal and not is_seen and not is_empty_list(there, example):
        return f"not allowed, and answered {there}"
    if there.without(MISSING) != missing.without(MISSING):
        return f"{there} tells what exists from {missing}"
    return ""


def _may_all(actor: Actor, asks: list[Request[Any]], tenant: str, suffix: str = "", *, exists: bool = True) -> bool:
    return all(is_allowed(actor, renamed(request, suffix), tenant, exists=exists) for request in asks)


def is_empty_list(outcome: Outcome, example: RouteExample) -> bool:
    """Whether it is a list, or an entry of one that is not seen: lists are empty for who is not authenticated."""
    is_list = not any(needs(request, "default") for request in example.asks)
    return is_list and (not outcome.code or outcome.code.endswith("_not_found"))


LISTS: list[Request[Any]] = [
    TopicList("orders"), SubscriptionList("orders"), ScheduleList("orders"), RouteList("orders"),
    WebhookList("orders"), ServiceList("shop"), ServiceList(consumes="orders"), ErrorList("shop"),
]  # fmt: skip


@pytest.mark.parametrize("listed", LISTS, ids=lambda request: type(request).__name__)
def test_a_list_of_one_name_does_not_tell_whether_there_is_such_a_thing(stage: Stage, listed: Request[Any]) -> None:
    for tenant in TENANTS:
        for who, actor in ACTORS.items():
            if not may_enter(actor, tenant) or may(actor, ("describe", "topic", tenant, "orders")):
                continue
            if isinstance(listed, ServiceList | ErrorList) and may(actor, ("describe", "service", tenant, "shop")):
                continue
            line = stage.open("tcp", who, tenant)
            there, missing = line.ask(listed), line.ask(renamed(listed, MISSING))
            line.close()
            assert (there.without(MISSING), there.answer) == (missing.without(MISSING), missing.answer), who
