"""Which requests are recorded in the audit trail, and what of them: names and settings, never a secret."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from headrace.model.cluster_requests import ClusterDrain, ClusterMove
from headrace.model.log_level_requests import LogLevelReset, LogLevelSet
from headrace.model.request import Request, Resource, Verb
from headrace.model.requests import GroupSeek, TopicAlter, TopicCreate, TopicTrim
from headrace.model.route_requests import RouteSet
from headrace.model.schedule_requests import SchedulePause, ScheduleSet
from headrace.model.security_requests import (
    AccessExplain,
    BindingAdd,
    BindingRemove,
    RoleRemove,
    RoleSet,
    SecurityAlter,
    SecurityDescribe,
    TokenCreate,
    TokenCreated,
    TokenList,
    TokenRevoke,
)
from headrace.model.service_requests import ServicePolicyAlter
from headrace.model.tenant_requests import TenantAlter, TenantCreate, TenantDelete, TenantList
from headrace.model.webhook_requests import WebhookPause
from headrace.security.request_names import NamedResource, names_of

_ADMINISTRATIVE = frozenset(
    {Verb.EDIT_ANY, Verb.CREATE, Verb.ALTER, Verb.DELETE, Verb.SCHEDULE, Verb.ROUTE, Verb.ADMINISTER}
)
READING = frozenset({SecurityDescribe, TokenList, AccessExplain, TenantList})
"""Requests that need an administrator and change nothing: only refused ones are recorded."""
_RESOURCES_MAX = 20
_NAME_CHARS = 300
_DETAIL_BYTES = 4000
_encoder = msgspec.json.Encoder()


def is_audited(kind: type[Request[Any]]) -> bool:
    """Whether every request of this class is recorded, by the permissions that it declares."""
    return kind not in READING and any(
        permission.verb in _ADMINISTRATIVE and permission.resource is not Resource.SUBJECT
        for permission in kind.declared.permissions
    )


def named_resources(request: Request[Any]) -> list[NamedResource]:
    """What a request is about: the first ones, if they are many."""
    return list(islice(names_of(type(request)).named(request), _RESOURCES_MAX))


def resource_texts(named: list[NamedResource], tenant: str) -> list[str]:
    """What a request is about in words, with names as sessions of the tenant say them."""
    texts = []
    for verb, resource, names in named:
        told = "/".join(name for name in names if name).removeprefix(f"{tenant}/")
        texts.append(f"{verb} {resource} {told}".rstrip()[:_NAME_CHARS])
    return texts


def _grants(grants: Any) -> list[Any]:
    return [msgspec.to_builtins(grant) for grant in grants]


_DETAILS: dict[type[Request[Any]], Callable[[Any], dict[str, Any]]] = {
    SecurityAlter: lambda ask: {"enabled": ask.enabled},
    RoleSet: lambda ask: {"role": ask.name, "grants": _grants(ask.grants)},
    RoleRemove: lambda ask: {"role": ask.name},
    BindingAdd: lambda ask: {"binding": msgspec.to_builtins(ask.binding)},
    BindingRemove: lambda ask: {"binding": msgspec.to_builtins(ask.binding)},
    TokenCreate: lambda ask: {
        "identity": ask.identity,
        "tenant": ask.tenant,
        "scopes": _grants(ask.scopes),
        "expires_us": ask.expires_us,
    },
    TokenRevoke: lambda ask: {"token": ask.id},
    TenantCreate: lambda ask: {"tenant": ask.tenant, "quotas": ask.quotas},
    TenantAlter: lambda ask: {"tenant": ask.tenant, "quotas": ask.quotas},
    TenantDelete: lambda ask: {"tenant": ask.tenant, "cascade": ask.cascade},
    ServicePolicyAlter: lambda ask: {"require_registration": ask.require_registration},
    LogLevelSet: lambda ask: {"rule": msgspec.to_builtins(ask.rule)},
    LogLevelReset: lambda ask: {"scope": ask.scope, "pattern": ask.pattern},
    TopicCreate: lambda ask: {"settings": sorted(ask.settings)},
    TopicAlter: lambda ask: {"settings": sorted(ask.settings)},
    TopicTrim: lambda ask: {"offsets": {str(at): offset for at, offset in ask.offsets.items()}},
    GroupSeek: lambda ask: {"topic": ask.topic, "to": ask.to},
    ScheduleSet: lambda ask: {"topic": ask.definition.topic},
    SchedulePause: lambda ask: {"paused": ask.paused},
    RouteSet: lambda ask: {"source": ask.definition.source, "targets": list(ask.definition.targets)},
    WebhookPause: lambda ask: {"paused": ask.paused},
    ClusterMove: lambda ask: {"shard": ask.shard, "node": ask.node},
    ClusterDrain: lambda ask: {"node": ask.node, "drained": ask.drained},
}
"""What a record tells of a request beside its resources. Settings of topics by name only: middleware can have keys."""


def request_details(request: Request[Any], outcome: object = None) -> dict[str, Any]:
    """What a record tells of a request and its answer; only a remark if that is too much."""
    describe = _DETAILS.get(type(request))
    details = {} if describe is None else describe(request)
    if isinstance(outcome, TokenCreated):
        details["token"] = outcome.info.id
    size = len(_encoder.encode(details))
    return details if size <= _DETAIL_BYTES else {"too_large_bytes": size}
