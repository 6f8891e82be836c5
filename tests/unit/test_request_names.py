"""Every field of a request that names something is authorised and belongs to a tenant, or there is a reason why not."""

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec
import pytest

from headrace.broker.broker import Broker
from headrace.broker.tenant_names import name_paths
from headrace.model.leasing import SubscriptionAlter, SubscriptionCreate
from headrace.model.request import REQUESTS, Request, WireStruct
from headrace.model.requests import TopicAlter, TopicCreate
from headrace.model.subscription import SubscriptionSettings
from headrace.model.topic import TopicSettings
from headrace.model.webhook_requests import WebhookAlter, WebhookDefinition

Struct = type[msgspec.Struct]

NAMING = re.compile(
    r"topic|target|(?<!re)source|view_of|subject|group|subscription|produces|consumes|serves|queue|pattern"
)
"""What a field is called that names something, or a pattern of names."""
CONTENT: dict[tuple[Struct, str], Struct] = {
    (TopicCreate, "settings"): TopicSettings,
    (TopicAlter, "settings"): TopicSettings,
    (SubscriptionCreate, "settings"): SubscriptionSettings,
    (SubscriptionAlter, "settings"): SubscriptionSettings,
    (WebhookDefinition, "settings"): SubscriptionSettings,
    (WebhookAlter, "changes"): WebhookDefinition,
}
"""What the mappings of plain values in requests stand for: their names, too, have to be declared."""

WITHOUT_NAMES = {"ServiceError.details", "ErrorObject.details", "TenantCreate.quotas", "TenantAlter.quotas"}
"""Mappings of plain values that name nothing: what happened, and numbers."""

INFORMATIONAL = "only told to others who may see the errors of the service; nothing is looked up by it"
FILTERED = "selects entries of a list whose every entry is authorised by itself"
ADMINISTRATORS = "only an administrator sends it"
NOTHING_BY_NAME = "a number, a time or a switch, no name"
REASONS: dict[str, str] = {
    "TopicTrim.topic_id": NOTHING_BY_NAME,
    "Find.topic_id": NOTHING_BY_NAME,
    "Edit.topic_id": NOTHING_BY_NAME,
    "SubscriptionCreate.create_topic": NOTHING_BY_NAME,
    "Lease.create_topic": NOTHING_BY_NAME,
    "LeaseOpen.create_topic": NOTHING_BY_NAME,
    "SubjectUnsubscribe.subscription": NOTHING_BY_NAME,
    "TopicList.pattern": FILTERED,
    "SubscriptionList.topic": FILTERED,
    "ScheduleList.topic": FILTERED,
    "RouteList.topic": FILTERED,
    "WebhookList.topic": FILTERED,
    "ServiceList.produces": FILTERED,
    "ServiceList.consumes": FILTERED,
    "ServiceList.serves": FILTERED,
    "EditMatching.subscription": "selects messages of the topic, which the request needs edit-own on",
    "ErrorReport.errors.topic": INFORMATIONAL,
    "ErrorReport.errors.subject": INFORMATIONAL,
    "LogLevelSet.rule.pattern": ADMINISTRATORS,
    "LogLevelReset.pattern": ADMINISTRATORS,
    "RoleSet.grants.patterns": ADMINISTRATORS,
    "TokenCreate.scopes.patterns": ADMINISTRATORS,
    "RouteSet.definition.pattern": "a condition on messages of the source, which the request needs consume on",
    "ScheduleNext.definition.topic": "a schedule that is only tried out: nothing is published",
    "ServiceRegister.definition.consumes": "the handler requires consume on the topic, or lease on one of its "
    "subscriptions",
    "SubjectSubscribe.queue": "divides messages among subscriptions of the same pattern, which consume is needed on",
    "WebhookAlter.changes.topic": "cannot be changed",
    "WebhookSet.definition.websub.topic_url": "the URL that a subscriber used; WebhookSet is refused with such terms",
    "WebhookAlter.changes.websub.topic_url": "WebhookAlter is refused with such terms",
    "WebSubSubscribe.topic_url": "the URL by which the subscriber names the topic, which is declared",
}
"""By path: why a field that could name something is not declared."""


def named_fields(kind: Struct, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields of a struct, and of what is in it, that are called like names."""
    for field in msgspec.structs.fields(kind):
        here = (*path, field.name)
        content = CONTENT.get((kind, field.name))
        structs = [content] if content is not None else list(structs_in(field.type))
        if NAMING.search(field.name) and not structs:
            yield here
        for one in structs:
            yield from named_fields(one, here)


def structs_in(of: Any) -> Iterator[Struct]:
    if isinstance(of, type) and issubclass(of, msgspec.Struct) and of.__module__ != "headrace.model.content.query":
        yield of
    for argument in get_args(of):
        yield from structs_in(argument)


def mappings(kind: Struct) -> Iterator[tuple[Struct, str]]:
    """Fields that have anything by name."""
    for field in msgspec.structs.fields(kind):
        if get_origin(field.type) is dict and get_args(field.type) == (str, Any):
            yield kind, field.name
        for one in structs_in(field.type):
            yield from mappings(one)


def declared(kind: type[Request[Any]]) -> set[str]:
    permissions = kind.declared.permissions
    return {field for one in permissions for field in (one.field, one.second_field) if field}


assert Broker, "it imports all requests"
ASKED = sorted((one for one in REQUESTS.values() if not one.declared.by_gateway), key=lambda one: one.__name__)


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_every_name_in_a_request_is_authorised_or_there_is_a_reason(kind: type[Request[Any]]) -> None:
    found = {".".join(path) for path in named_fields(kind)}
    open_to_all = {path for path in found - declared(kind) if f"{kind.__name__}.{path}" not in REASONS}
    assert open_to_all == set(), "declare a permission, or say in REASONS why none is needed"


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_every_authorised_name_belongs_to_the_sessions_tenant(kind: type[Request[Any]]) -> None:
    of: type[WireStruct] = kind
    qualified = {".".join(one.fields) for one in name_paths(of)}
    named = {one.field for one in kind.declared.permissions if one.field}
    assert named <= qualified


def test_every_mapping_of_a_request_is_known() -> None:
    found = {one for kind in ASKED for one in mappings(kind)}
    told = {f"{kind.__name__}.{field}" for kind, field in found - CONTENT.keys()}
    assert told == WITHOUT_NAMES, "say in CONTENT what is in it"


def test_reasons_are_about_fields_that_there_are() -> None:
    paths = {f"{kind.__name__}.{'.'.join(path)}" for kind in ASKED for path in named_fields(kind)}
    names = {f"{kind.__name__}.{path}" for kind in ASKED for path in declared(kind)}
    assert set(REASONS) - paths == set()
    assert set(REASONS) & names == set()
