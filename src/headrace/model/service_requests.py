"""Registered services: what one says of itself, and the requests and answers about them."""

from typing import Any

import msgspec

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare
from headrace.model.requests import Done

OTHER_CODES = "other"
"""Counts the errors of a service that have more codes than are counted apart."""
OTHER_SERVICES = "others"
"""Counts the errors of services beyond those that are counted apart."""


class ServiceDefinition(WireStruct):
    """What an instance of a service says of itself."""

    tenant_fields = ("name", "produces", "consumes", "serves")

    name: str
    instance: str
    """Unique among the instances of the service; the same after a reconnect."""
    version: str = ""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    """Anything that others may want to know, such as a region."""
    produces: list[str] = msgspec.field(default_factory=list)
    """Topics that it publishes to."""
    consumes: list[str] = msgspec.field(default_factory=list)
    """Topics that it reads."""
    serves: list[str] = msgspec.field(default_factory=list)
    """Subjects on which it answers requests, or patterns of them."""
    schemas: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """JSON Schemas of messages, by topic or subject."""


class ServiceRegistered(Answer):
    """The answer to ServiceRegister."""

    ttl_ms: int
    """The instance expires after so long without a sign of life."""


@declare(
    Kind.SERVICE_REGISTER,
    Permission(Verb.SERVE, Resource.SERVICE, "definition.name"),
    Permission(Verb.PUBLISH, Resource.TOPIC, "definition.produces"),
    Permission(Verb.SERVE, Resource.SUBJECT, "definition.serves"),
)
class ServiceRegister(Request[ServiceRegistered]):
    """Register an instance of a service, or say the same instance's definition anew.

    It says only what its identity may do: it may publish to what it `produces`, read what it `consumes` or lease
    messages of it, and answer what it `serves`.

    All sessions that register the same instance keep it alive with whatever they send. It expires `ttl_ms` after the
    last of it, connected or not.
    """

    definition: ServiceDefinition
    ttl_ms: int = 30_000


@declare(Kind.SERVICE_DEREGISTER, Permission(Verb.SERVE, Resource.SERVICE, "name"))
class ServiceDeregister(Request[Done]):
    """Forget an instance of a service; without effect if it is not registered."""

    name: str
    instance: str
    any_session: bool = False
    """Also an instance that another session of the same identity has registered, not only this one."""


class ServiceInstance(WireStruct):
    """A registered instance of a service as it is now."""

    instance: str
    version: str
    client: str
    """What its client calls itself."""
    address: str = ""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    registered_us: int = 0
    seen_us: int = 0
    """When it last gave a sign of life."""
    ttl_ms: int = 0
    connected: bool = True
    """Whether it has a connection now; without one it stays for its time to live."""


class ServiceInfo(Answer):
    """A service: its instances, and what all of them together say of it; the answer to ServiceDescribe."""

    tenant_fields = ("name", "produces", "consumes", "serves")

    name: str
    instances: list[ServiceInstance] = msgspec.field(default_factory=list)
    produces: list[str] = msgspec.field(default_factory=list)
    consumes: list[str] = msgspec.field(default_factory=list)
    serves: list[str] = msgspec.field(default_factory=list)
    schemas: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """By topic or subject, as the instance says that registered last; ServiceList leaves them out."""
    errors: int = 0
    """How many errors it has reported since the broker was started."""
    instances_total: int = 0
    """How many instances it has."""
    truncated: bool = False
    """Whether there are more instances, topics, subjects or schemas than are told here."""


class ServicesFound(Answer):
    """The answer to ServiceList."""

    tenant_fields = ("next",)

    services: list[ServiceInfo]
    """With up to 100 instances each, without their metadata."""
    require_registration: bool = False
    """The tenant's policy."""
    next: str = ""
    """If there are more: ask again with this as `after`."""


@declare(Kind.SERVICE_LIST, Permission(Verb.DESCRIBE, Resource.SERVICE))
class ServiceList(Request[ServicesFound]):
    """Which services are registered? Those that match all that is given."""

    tenant_fields = ("name", "produces", "consumes", "serves", "after")

    name: str = ""
    produces: str = ""
    """Publishes to this topic."""
    consumes: str = ""
    """Reads this topic."""
    serves: str = ""
    """Answers requests on this subject."""
    after: str = ""
    """Only services with later names: what an answer before has as `next`."""


@declare(Kind.SERVICE_DESCRIBE, Permission(Verb.DESCRIBE, Resource.SERVICE, "name"))
class ServiceDescribe(Request[ServiceInfo]):
    """What is known of a service?"""

    name: str


class ServicePolicy(Answer):
    """A tenant's policy about services; the answer to ServicePolicyAlter."""

    require_registration: bool = False


@declare(Kind.SERVICE_POLICY_ALTER, Permission(Verb.ADMINISTER, Resource.BROKER))
class ServicePolicyAlter(Request[ServicePolicy]):
    """Say whether sessions of the tenant that are no registered service may use the bus."""

    require_registration: bool


class ServiceError(WireStruct):
    """A failure of a service: the one schema of errors, in requests and as JSON in the topic `headrace.errors`."""

    code: str
    message: str
    id: str = ""
    """Unique; the broker makes one where there is none."""
    time_us: int = 0
    """When it happened; by default when the broker heard of it."""
    service: str = ""
    """The service's name; empty for a client that is no registered service."""
    instance: str = ""
    """Of the service; or the client's name."""
    topic: str = ""
    subject: str = ""
    partition: int | None = None
    offset: int | None = None
    key: str = ""
    """The message's key as text."""
    retryable: bool = False
    details: dict[str, Any] = msgspec.field(default_factory=dict)
    traceback: str = ""


@declare(Kind.ERROR_REPORT, Permission(Verb.SERVE, Resource.SERVICE, "service"))
class ErrorReport(Request[Done]):
    """Report failures of a service. The broker counts them and appends them to the topic `headrace.errors`."""

    service: str
    instance: str
    errors: list[ServiceError]


class ErrorSummary(WireStruct):
    """The errors of one service since the broker was started."""

    tenant_fields = ("service",)

    service: str
    """Empty: of clients that are no registered service."""
    total: int
    codes: dict[str, int]
    """How many, by code, of which the first 100 characters count; beyond 100 codes the rest counts as `other`."""
    last_us: int
    last: list[ServiceError] = msgspec.field(default_factory=list)
    """The newest ones, the last one first; of large ones excerpts, whose details have `truncated`."""


class ErrorsFound(Answer):
    """The answer to ErrorList."""

    services: list[ErrorSummary]
    truncated: bool = False
    """Whether fewer of the newest errors are there than were asked for, because memory for them is bounded."""


@declare(Kind.ERROR_LIST, Permission(Verb.DESCRIBE, Resource.SERVICE, "service"))
class ErrorList(Request[ErrorsFound]):
    """Which errors did services report since the broker was started?"""

    service: str = ""
    """Of this service; empty: of all of the session's tenant."""
    last_max: int = 10
    """How many of the newest errors of each service to return."""
