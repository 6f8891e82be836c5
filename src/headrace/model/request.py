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
    """An answer of the broker."""


AnswerType = TypeVar("AnswerType", bound=Answer)


class Verb(Enum):
    """What a permission allows."""

    DESCRIBE = "describe"
    PUBLISH = "publish"
    CONSUME = "consume"
    LEASE = "lease"
    EDIT = "edit"
    CREATE = "create"
    ALTER = "alter"
    DELETE = "delete"
    SCHEDULE = "schedule"
    ROUTE = "route"
    SERVE = "serve"
    REQUEST = "request"
    ADMINISTER = "administer"


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
        named = attrgetter(self.field)(request)
        second = (attrgetter(self.second_field)(request),) if self.second_field else ()
        for name in named if isinstance(named, list) else [named]:
            if name:
                yield name, *second


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
) -> Callable[[RequestClass], RequestClass]:
    """Declare a request class; its answer is read from its base, `Request[TheAnswer]`."""

    def apply(request: RequestClass) -> RequestClass:
        assert kind not in REQUESTS, f"two requests of kind {kind}"
        (answer,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
        request.declared = Declaration(
            kind, request.__name__, answer if answered else None, permissions, while_draining, by_gateway
        )
        REQUESTS[kind] = request
        return request

    return apply
