"""What each request is about, where its declared fields alone do not say it."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, get_origin, get_type_hints

from headrace.model.audit import AuditDescribe
from headrace.model.idempotency import PublishOnce
from headrace.model.job_requests import RESULTS_TOPIC, ResultsOpen
from headrace.model.leasing import Lease, SubscriptionCreate
from headrace.model.partition_count import PartitionCount
from headrace.model.request import Permission, Request, Resource, Verb
from headrace.model.requests import GroupJoin, Publish, TopicDescribe, TransactionStage
from headrace.model.route_requests import RouteExplain, RouteSet
from headrace.model.schedule_requests import ScheduleSet
from headrace.model.standing_lease import LeaseOpen
from headrace.model.system_topics import AUDIT_TOPIC, INGRESS_TOPIC
from headrace.model.webhook_requests import WebhookSet

RequestKind = type[Request[Any]]

NAMED_BY_OMISSION: dict[tuple[RequestKind, str], str] = {
    (Publish, "topic"): INGRESS_TOPIC,
    (RouteSet, "definition.source"): INGRESS_TOPIC,
    (RouteExplain, "source"): INGRESS_TOPIC,
    (ResultsOpen, ""): RESULTS_TOPIC,
    (AuditDescribe, ""): AUDIT_TOPIC,
}
"""The topic of the session's tenant that a request means if it leaves a field empty, or has none."""

TOPICS_CREATED: dict[RequestKind, Callable[[Any], Iterator[str]]] = {
    Publish: lambda ask: iter((ask.topic,)),
    PublishOnce: lambda ask: iter((ask.topic,)),
    PartitionCount: lambda ask: iter((ask.topic,)),
    TransactionStage: lambda ask: iter((ask.topic,)),
    TopicDescribe: lambda ask: iter((ask.topic,) if ask.create else ()),
    SubscriptionCreate: lambda ask: iter((ask.topic,) if ask.create_topic else ()),
    Lease: lambda ask: iter((ask.topic,) if ask.create and ask.create_topic else ()),
    LeaseOpen: lambda ask: iter((ask.topic,) if ask.create and ask.create_topic else ()),
    GroupJoin: lambda ask: iter(ask.topics if ask.missing == "create" else ()),
    ScheduleSet: lambda ask: iter((ask.definition.topic,)),
    WebhookSet: lambda ask: iter((ask.definition.topic,)),
    RouteSet: lambda ask: iter((ask.definition.source, *ask.definition.targets, ask.definition.error_topic)),
}
"""The topics that a request creates where there are none: that needs `create`, too. The ingress, which belongs to the
broker, is made for everybody who may use it."""

SUBSCRIPTIONS_CREATED: frozenset[RequestKind] = frozenset({Lease, LeaseOpen})
"""Requests that create the leased subscription which they name where there is none, if they say so."""


class NamedResource(NamedTuple):
    """A verb and what a request wants to use it on."""

    verb: str
    resource: str
    names: tuple[str, ...]
    """The broker's name of it; of a subscription the topic's and its own. Empty: something of the session's tenant."""


class RequestNames:
    """What requests of one class are about."""

    def __init__(self, kind: RequestKind) -> None:
        self._kind = kind
        self._permissions = kind.declared.permissions
        fields = {field for one in self._permissions for field in (one.field, one.second_field) if field}
        self._topics_created = TOPICS_CREATED.get(kind)
        if self._topics_created is not None:
            fields |= {name for name in ("create", "create_topic", "missing") if name in kind.__struct_fields__}
        self.key: Callable[[Any], Any] | None = None
        """What decisions about a request can be remembered by; None if it names many things."""
        if all("." not in field and not _is_list(kind, field) for field in fields):
            self.key = attrgetter(*sorted(fields)) if fields else lambda _: None

    def named(self, request: Request[Any]) -> Iterator[NamedResource]:
        """Everything that the request is about. Lists are not: their answers are filtered."""
        for permission in self._permissions:
            yield from self._named(permission, request)

    def created(self, request: Any) -> Iterator[tuple[str, ...]]:
        """What the request creates where it does not exist: a topic's name, or a topic's and a subscription's."""
        if self._topics_created is None:
            return
        for topic in self._topics_created(request):
            if topic and topic.rpartition("/")[2] != INGRESS_TOPIC:
                yield (topic,)
        if self._kind in SUBSCRIPTIONS_CREATED and request.create and request.topic:
            yield request.topic, request.subscription

    def _named(self, permission: Permission, request: Request[Any]) -> Iterator[NamedResource]:
        verb, resource = permission.verb.value, permission.resource.value
        is_empty = True
        for names in permission.names(request):
            is_empty = False
            yield NamedResource(verb, resource, names)
        if not is_empty:
            return
        topic = NAMED_BY_OMISSION.get((self._kind, permission.field))
        if topic is not None:
            yield NamedResource(verb, resource, ("", topic))
        elif not permission.field and (permission.resource in _WHOLE or permission.verb is not Verb.DESCRIBE):
            yield NamedResource(verb, resource, ())


_WHOLE = frozenset({Resource.BROKER, Resource.SECURITY, Resource.CLUSTER})


def _is_list(kind: RequestKind, field: str) -> bool:
    return get_origin(get_type_hints(kind)[field]) is list


_known: dict[RequestKind, RequestNames] = {}


def names_of(kind: RequestKind) -> RequestNames:
    """What requests of a class are about; made once."""
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = RequestNames(kind)
    return found
