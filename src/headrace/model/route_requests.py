"""What can be asked about routes, and what is answered. See requests.py."""

from headrace.model.content.query import ContentQuery
from headrace.model.headers import Headers
from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare
from headrace.model.requests import Done

SUBJECT_HEADER = "headrace-subject"
"""The header with the subject that a message was published to; it is also a message's routing key."""
ROUTE_PREFIX = "headrace-route-"
"""Headers of messages in an error topic begin with it: `name`, `reason`, `target`, `topic`, `partition`, `offset`."""


class RouteDefinition(WireStruct):
    """Carry messages of a topic to other topics. Exactly one condition is given, from `key` to `unmatched`."""

    tenant_fields = ("name", "source", "targets", "error_topic")

    name: str
    targets: list[str]
    source: str = ""
    """The topic that messages come from; empty: the tenant's ingress, for messages published without a topic."""
    key: str | None = None
    """Messages with this subject: their header `headrace-subject`, or else their key."""
    pattern: str | None = None
    """Messages whose subject has this pattern: `*` one token, `#` any number, `>` at the end one or more."""
    all: bool = False
    """Every message."""
    headers: dict[str, bytes | None] | None = None
    """Messages with these headers; None stands for any value."""
    headers_match: str = "all"
    """Whether `all` of the headers must be there, or `any` of them."""
    content: ContentQuery | None = None
    """Messages whose value the query selects."""
    unmatched: bool = False
    """Messages that no other route of the source takes."""
    error_topic: str = ""
    """Where messages go that cannot be decided about or delivered; by default the source's name and `.errors`."""


class RouteInfo(Answer):
    """A route as it is now; the answer to RouteSet."""

    definition: RouteDefinition
    created_us: int
    behind: int = 0
    """Messages of the source that are not yet in all their targets, synced: those that are can be read there."""
    lost: int = 0
    """Messages that were removed from the source before they were forwarded, since the broker was started."""
    error: str = ""
    """Why messages of the source cannot be forwarded at the moment; empty when they can."""


@declare(
    Kind.ROUTE_SET,
    Permission(Verb.ROUTE, Resource.ROUTE, "definition.name"),
    Permission(Verb.CONSUME, Resource.TOPIC, "definition.source"),
    Permission(Verb.PUBLISH, Resource.TOPIC, "definition.targets"),
    Permission(Verb.PUBLISH, Resource.TOPIC, "definition.error_topic"),
    while_draining=False,
)
class RouteSet(Request[RouteInfo]):
    """Make a route, or replace the one of that name; it applies to messages published from now on."""

    definition: RouteDefinition
    replace: bool = False
    exist_ok: bool = False
    """Accept a route of that name that says the same."""


@declare(Kind.ROUTE_REMOVE, Permission(Verb.ROUTE, Resource.ROUTE, "name"))
class RouteRemove(Request[Done]):
    """Remove a route; messages published before are still forwarded."""

    name: str


class RoutesFound(Answer):
    """The answer to RouteList."""

    routes: list[RouteInfo]


@declare(Kind.ROUTE_LIST, Permission(Verb.DESCRIBE, Resource.ROUTE))
class RouteList(Request[RoutesFound]):
    """List the routes of the session's tenant by name."""

    tenant_fields = ("topic",)

    topic: str = ""
    """Only those from this topic or to it."""


class RouteVerdict(WireStruct):
    """What one route does with a message, and why."""

    tenant_fields = ("name", "targets")

    name: str
    is_taken: bool
    reason: str
    targets: list[str] = []


class RouteExplained(Answer):
    """The answer to RouteExplain."""

    tenant_fields = ("source", "targets")

    source: str
    routes: list[RouteVerdict]
    targets: list[str] = []
    """Where the message would be stored, each topic once."""


@declare(
    Kind.ROUTE_EXPLAIN,
    Permission(Verb.DESCRIBE, Resource.ROUTE),
    Permission(Verb.DESCRIBE, Resource.TOPIC, "source"),
)
class RouteExplain(Request[RouteExplained]):
    """Tell which routes of a topic a message would take, and why; nothing is published.

    The message is judged as it is given: as consumers of the topic see it, after the topic's middleware.
    """

    source: str = ""
    """Empty: the ingress."""
    value: bytes | None = b""
    key: bytes | None = None
    headers: Headers = {}
