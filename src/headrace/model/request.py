"""Requests and answers: what each request declares of itself, in one place.

A request class names its answer as its type parameter, and the decorator `declare` adds its kind on the wire, the
permissions that it needs, and whether a broker that is shutting down still takes it. The broker, the gateways and the
client read these declarations; nothing about a request is said a second time.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_args

import msgspec


class WireStruct(msgspec.Struct, omit_defaults=True):
    """A request, an answer, or a part of one. On the wire it is a map with the names of its fields."""

    tenant_fields: ClassVar[tuple[str, ...]] = ()
    """Its fields that name something of a tenant, or a pattern of such names, beside those that permissions name."""


class Answer(WireStruct):
    """An answer of the broker, or what it tells a client unasked."""

    awaits_commit: ClassVar[bool] = True
    """Pushed to a client of a cluster only when all that was decided before is committed; False: it tells nothing of
    what the journal records.
    """


AnswerType = TypeVar("AnswerType", bound=Answer)


class Verb(Enum):
    """What a permission allows."""

    DESCRIBE = "describe"
    PUBLISH = "publish"
    CONSUME = "consume"
    LEASE = "lease"
    EDIT_OWN = "edit-own"
    """Editing messages whose owner is the identity."""
    EDIT_ANY = "edit-any"
    CREATE = "create"
    ALTER = "alter"
    DELETE = "delete"
    SCHEDULE = "schedule"
    ROUTE = "route"
    SERVE = "serve"
    REQUEST = "request"
    ADMINISTER = "administer"
    FOLLOW = "follow"
    """Following a shard of the cluster, as a node of it."""


class Resource(Enum):
    """What a permission is about."""

    BROKER = "broker"
    TOPIC = "topic"
    GROUP = "group"
    SUBSCRIPTION = "subscription"
    TRANSACTION = "transaction"
    SCHEDULE = "schedule"
    SUBJECT = "subject"
    ROUTE = "route"
    SERVICE = "service"
    WEBHOOK = "webhook"
    SECURITY = "security"
    """Roles, bindings, tokens and tenants, of the whole broker."""
    CLUSTER = "cluster"
    """The nodes and shards of the cluster that the broker is part of."""


class Permission(NamedTuple):
    """A verb, a kind of resource, and the fields of the request that name the resource.

    Without a field the request is about all of them: its answer has those that the verb allows.
    """

    verb: Verb
    resource: Resource
    field: str = ""
    second_field: str = ""
    """Of a subscription: its name, which belongs to the topic that the first field names."""

    def names(self, request: "Request[Any]") -> Iterator[tuple[str, ...]]:
        """Yield the name of every resource that the request is about."""
        if not self.field:
            return
        second = (attrgetter(self.second_field)(request),) if self.second_field else ()
        for name in _named(request, self.field.split(".")):
            if name and isinstance(name, str):
                yield name, *second


def _named(part: Any, fields: list[str]) -> Iterator[Any]:
    """What stands below these fields of a struct, of a mapping, or of each in a list."""
    if isinstance(part, list):
        for one in part:
            yield from _named(one, fields)
    elif not fields:
        yield part
    elif isinstance(part, dict):
        yield from _named(part.get(fields[0]), fields[1:])
    elif part is not None:
        yield from _named(getattr(part, fields[0], None), fields[1:])  # what is malformed, its handler refuses


class Declaration(NamedTuple):
    """What a request class declares."""

    kind: int
    """The kind of its frames in the native protocol."""
    name: str
    answer: type[Answer] | None
    """None: there is no answer."""
    permissions: tuple[Permission, ...]
    while_draining: bool
    """Whether a broker that is shutting down takes it."""
    by_gateway: bool
    """Whether the gateway answers it: it is about the connection, and the broker does not see it."""
    awaits_commit: bool
    """Whether its answer leaves a node of a cluster only when all that was decided before is committed."""


class Request(WireStruct, Generic[AnswerType]):
    """A request to a broker; the type parameter is the class of its answer."""

    declared: ClassVar[Declaration]


RequestClass = TypeVar("RequestClass", bound=type[Request[Any]])

REQUESTS: dict[int, type[Request[Any]]] = {}
"""Every request class by its kind."""


def declare(
    kind: int,
    *permissions: Permission,
    while_draining: bool = True,
    answered: bool = True,
    by_gateway: bool = False,
    awaits_commit: bool = True,
) -> Callable[[RequestClass], RequestClass]:
    """Declare a request class; its answer is read from its base, `Request[TheAnswer]`.

    `awaits_commit` is False only of a request whose answer tells nothing that the journal records, or whose answer
    waits by a rule of its own, such as the durability of messages.
    """

    def apply(request: RequestClass) -> RequestClass:
        assert kind not in REQUESTS, f"two requests of kind {kind}"
        (answer,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
        request.declared = Declaration(
            kind,
            request.__name__,
            answer if answered else None,
            permissions,
            while_draining,
            by_gateway,
            awaits_commit and answered,
        )
        REQUESTS[kind] = request
        return request

    return apply
