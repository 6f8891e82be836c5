"""Who may do what, said a second time and as simply as possible: nothing here uses the code that decides it.

Roles are plain sets of (verb, resource, pattern); what a request needs is read from its declaration. The matrix
compares every gateway's answer with this.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.model.audit import AuditDescribe
from headrace.model.idempotency import PublishOnce
from headrace.model.job_requests import ResultsOpen
from headrace.model.leasing import Lease
from headrace.model.partition_count import PartitionCount
from headrace.model.request import Request
from headrace.model.requests import Publish, TransactionStage
from headrace.model.route_requests import RouteSet
from headrace.model.schedule_requests import ScheduleSet
from headrace.model.standing_lease import LeaseOpen
from headrace.model.webhook_requests import WebhookSet

Rule = tuple[str, str, str]
"""A verb, a kind of resource and a pattern of names."""
Need = tuple[str, str, str, str]
"""A verb, a kind of resource, the tenant, and the name in it."""

TENANT_RESOURCES = [
    "topic", "group", "subscription", "transaction", "schedule", "subject", "route", "service", "webhook",
]  # fmt: skip
STRUCTURE = ["describe", "create", "alter", "delete", "route", "schedule"]
MESSAGES = ["publish", "consume", "lease", "edit-own", "edit-any", "serve", "request"]
EVENTS = {("consume", "topic", "headrace.events"), ("consume", "topic", "headrace.errors")}
EVENTS |= {("consume", "subject", "$events.*")}


def _all(verbs: list[str], resources: list[str], patterns: list[str]) -> set[Rule]:
    return {(verb, resource, pattern) for verb in verbs for resource in resources for pattern in patterns}


ROLES: dict[str, set[Rule]] = {
    "administrator": _all(["*"], ["*"], ["*", "headrace.*", "$*"]),
    "operator": _all(STRUCTURE, TENANT_RESOURCES, ["*"])
    | _all(["describe", "administer"], ["broker", "cluster"], ["*"])
    | EVENTS,
    "developer": _all(STRUCTURE + MESSAGES, TENANT_RESOURCES, ["*", "headrace.ingress"])
    | {("describe", "broker", "*"), *_all(["consume"], ["topic"], ["headrace.results", "headrace.archive"])}
    | EVENTS,
    "publisher": _all(["publish", "edit-own"], ["topic"], ["*", "headrace.ingress"])
    | {("consume", "topic", "headrace.results"), ("publish", "transaction", "*")}
    | _all(["publish", "request"], ["subject"], ["*"]),
    "consumer": _all(["consume"], ["topic", "group", "subject"], ["*"]) | {("consume", "topic", "headrace.archive")},
    "worker": {("describe", "topic", "*"), ("lease", "subscription", "*"), ("serve", "service", "*")},
    "service": {("serve", "service", "*")} | _all(["serve", "request", "publish", "consume"], ["subject"], ["*"]),
    "observer": _all(["describe"], ["*"], ["*", "headrace.*", "$*"]) | EVENTS,
    "auditor": _all(["describe"], ["*"], ["*", "headrace.*", "$*"]) | {("consume", "topic", "headrace.audit")},
    "node": _all(["describe", "follow"], ["cluster"], ["*"]),
    # Roles of the tests' own.
    "narrow": _all(["publish", "consume", "lease", "alter"], ["*"], ["orders*"]),
    "counter": {("describe", "broker", "*")},
    "bystander": {("publish", "topic", "elsewhere")},
}
OWN_ROLES = ("narrow", "counter", "bystander")

CREATES_TOPIC: dict[type[Request[Any]], str] = {
    Publish: "topic",
    PublishOnce: "topic",
    PartitionCount: "topic",
    TransactionStage: "topic",
    ScheduleSet: "definition.topic",
    WebhookSet: "definition.topic",
    RouteSet: "definition.targets",
}
"""Requests that make a topic which does not exist, and the field that names it."""
NAMED_BY_OMISSION: dict[type[Request[Any]], list[str]] = {
    ResultsOpen: ["headrace.results"],
    AuditDescribe: ["headrace.audit"],
}
"""Requests about a topic that they do not name."""
CREATES_SUBSCRIPTION = (Lease, LeaseOpen)
OF_THE_WHOLE_BROKER = ("security", "cluster")
_WITHOUT_NAMES = ("broker", *OF_THE_WHOLE_BROKER)


class Actor(NamedTuple):
    """Somebody who connects."""

    name: str
    roles: dict[str, list[str]]
    """Names of roles by tenant; `*`: in all."""
    tenant: str = ""
    """The tenant that its token belongs to."""
    scopes: frozenset[Rule] = frozenset()
    """What its token can be used for; empty: everything."""

    @property
    def is_anonymous(self) -> bool:
        return self.name == "anonymous"


def _covers(pattern: str, name: str) -> bool:
    if pattern[:1] in ("*", "?") and name.startswith(("headrace.", "$")):
        return False
    wanted = "".join(".*" if one == "*" else "." if one == "?" else re.escape(one) for one in pattern)
    return re.fullmatch(wanted, name) is not None


def _is_allowed_by(rule: Rule, verb: str, resource: str, name: str) -> bool:
    its_verb, its_resource, pattern = rule
    if its_resource not in ("*", resource):
        return False
    if not (its_verb in ("*", verb) or verb == "describe" or (verb, its_verb) == ("edit-own", "edit-any")):
        return False
    return _covers(pattern, name.partition("/")[0] if resource == "subscription" else name)


def may(actor: Actor, need: Need) -> bool:
    """Whether somebody may do something."""
    verb, resource, tenant, name = need
    if resource in OF_THE_WHOLE_BROKER:
        if actor.tenant:
            return False
        roles = actor.roles.get("*", [])
    else:
        if actor.tenant not in ("", tenant):
            return False
        roles = [*actor.roles.get("*", []), *actor.roles.get(tenant, [])]
    rules = {rule for role in roles for rule in ROLES[role]}
    if actor.scopes and not any(_is_allowed_by(scope, verb, resource, name) for scope in actor.scopes):
        return False
    return any(_is_allowed_by(rule, verb, resource, name) for rule in rules)


def may_enter(actor: Actor, tenant: str) -> bool:
    """Whether somebody has any role in a tenant."""
    return actor.tenant in ("", tenant) and bool(actor.roles.get("*") or actor.roles.get(tenant))


def _found(part: Any, fields: list[str]) -> Iterator[str]:
    if isinstance(part, list):
        for one in part:
            yield from _found(one, fields)
    elif not fields:
        if part:
            yield part
    elif isinstance(part, dict):
        if fields[0] in part:
            yield from _found(part[fields[0]], fields[1:])
    elif part is not None:
        yield from _found(getattr(part, fields[0]), fields[1:])


def needs(request: Request[Any], tenant: str) -> list[Need]:
    """What a request needs that is sent in a session of a tenant; lists need nothing, and are filtered."""
    found: list[Need] = []
    for permission in type(request).declared.permissions:
        verb, resource = permission.verb.value, permission.resource.value
        if resource in _WITHOUT_NAMES:
            found.append((verb, resource, tenant, ""))
            continue
        names = list(_found(request, permission.field.split("."))) if permission.field else []
        names = names or NAMED_BY_OMISSION.get(type(request), [])
        second = "".join(_found(request, permission.second_field.split("."))) if permission.second_field else ""
        for name in names:
            where, slash, bare = name.rpartition("/")
            found.append((verb, resource, where if slash else tenant, f"{bare}/{second}" if second else bare))
    return found


def creations(request: Request[Any], tenant: str) -> list[Need]:
    """What a request needs besides where what it names does not exist."""
    if isinstance(request, CREATES_SUBSCRIPTION):
        return [("create", "subscription", tenant, f"{request.topic}/{request.subscription}")]
    field = CREATES_TOPIC.get(type(request))
    names = _found(request, field.split(".")) if field else ()
    return [("create", "topic", tenant, name) for name in names]


def is_allowed(actor: Actor, request: Request[Any], tenant: str, *, exists: bool = True) -> bool:
    """Whether a request of somebody is allowed in a session of a tenant that it may open."""
    wanted = needs(request, tenant) + ([] if exists else creations(request, tenant))
    return all(may(actor, need) for need in wanted)


def hidden(actor: Actor, request: Request[Any], tenant: str) -> set[str]:
    """The names in a request of things that somebody may not see."""
    found = set()
    for _, resource, where, name in needs(request, tenant):
        if not may(actor, ("describe", resource, where, name)):
            topic, _, subscription = name.partition("/")
            is_seen = subscription and may(actor, ("describe", "topic", where, topic))
            found |= {subscription} if is_seen else {topic, subscription}
    return found - {""}
