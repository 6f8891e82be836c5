"""Requests about subjects: live publishing and subscribing, and request/reply."""

from typing import Any

import msgspec

from headrace.model.error_object import ErrorObject
from headrace.model.headers import Headers
from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, declare
from headrace.model.requests import Done

# Publishing and subscribing.


class SubjectPublished(Answer):
    """The answer to SubjectPublish."""

    receivers: int = 0
    """To how many live subscriptions the messages were sent."""
    stored: bool = False
    """Whether a durable route takes messages of the subject, and they are stored for it."""


@declare(
    Kind.SUBJECT_PUBLISH,
    Permission(Verb.PUBLISH, Resource.SUBJECT, "subject"),
    while_draining=False,
    awaits_commit=False,
)
class SubjectPublish(Request[SubjectPublished]):
    """Publish messages to a subject. The body is one batch."""

    subject: str


class SubjectSubscribed(Answer):
    """The answer to SubjectSubscribe. Deliveries follow it."""

    subscription: int
    """The number of the live subscription."""


@declare(
    Kind.SUBJECT_SUBSCRIBE,
    Permission(Verb.CONSUME, Resource.SUBJECT, "pattern"),
    while_draining=False,
    awaits_commit=False,
)
class SubjectSubscribe(Request[SubjectSubscribed]):
    """Receive what is published to subjects from now on, as long as the connection lasts, at most once."""

    pattern: str
    queue: str = ""
    """Of all subscriptions with the same queue name, one gets each batch; empty: this one gets all."""


@declare(Kind.SUBJECT_UNSUBSCRIBE, awaits_commit=False)
class SubjectUnsubscribe(Request[Done]):
    """End a live subscription. After the answer nothing more is delivered."""

    subscription: int


class SubjectDelivery(Answer):
    """Pushed: messages of a live subscription. The body is one batch."""

    awaits_commit = False

    subscription: int
    subject: str
    dropped: int = 0
    """So many messages were not sent since the last delivery, because the client did not receive fast enough."""


class SwitchboardInfo(Answer):
    """The answer to SwitchboardDescribe. The counts are of the tenant, since the broker's start."""

    subscriptions: int = 0
    """Live subscriptions."""
    responders: int = 0
    published: int = 0
    """Messages that were published to subjects."""
    delivered: int = 0
    """Messages that were sent to live subscriptions, each time that they were."""
    dropped: int = 0
    """Messages that were not sent to a slow subscriber."""
    requests: int = 0
    """Requests that responders were found for."""
    requests_open: int = 0
    """Requests that a responder has and that are not answered."""
    requests_waiting: int = 0
    """Requests that wait for a responder, as all are busy."""
    timeouts: int = 0
    """Requests that were not answered in time."""
    late_replies: int = 0
    """Replies to requests that nobody waited for any more."""
    unknown_replies: int = 0
    """Replies to requests that were answered before, or that the responder never had."""


@declare(Kind.SWITCHBOARD_DESCRIBE, Permission(Verb.DESCRIBE, Resource.BROKER), awaits_commit=False)
class SwitchboardDescribe(Request[SwitchboardInfo]):
    """Counts of live subscriptions, responders and requests."""


# Request and reply.


class RequestReply(Answer):
    """The answer to RequestSend. The body is the reply's value."""

    headers: Headers = msgspec.field(default_factory=dict)


@declare(
    Kind.REQUEST_SEND, Permission(Verb.REQUEST, Resource.SUBJECT, "subject"), while_draining=False, awaits_commit=False
)
class RequestSend(Request[RequestReply]):
    """Ask one of those who serve a subject. The body is the request's value."""

    subject: str
    timeout_ms: int
    """The broker gives up after so long."""
    headers: Headers = msgspec.field(default_factory=dict)


class ServeOpened(Answer):
    """The answer to ServeOpen. Requests follow it."""

    responder: int
    """The number of the responder."""


@declare(
    Kind.SERVE_OPEN, Permission(Verb.SERVE, Resource.SUBJECT, "subject"), while_draining=False, awaits_commit=False
)
class ServeOpen(Request[ServeOpened]):
    """Answer requests to a subject, or to subjects by pattern, as long as the connection lasts."""

    subject: str
    concurrency: int = 1
    """So many requests may be unanswered at once."""


@declare(Kind.SERVE_CLOSE, awaits_commit=False)
class ServeClose(Request[Done]):
    """Deliver no more requests. Those that were delivered can still be answered."""

    responder: int


class RequestDelivery(Answer):
    """Pushed: a request to a responder. The body is its value."""

    awaits_commit = False

    responder: int
    request: int
    """The number that the broker gave the request; the reply names it."""
    subject: str
    timeout_ms: int
    """So long somebody still waits for the reply."""
    headers: Headers = msgspec.field(default_factory=dict)


class SubjectEnd(Answer):
    """Pushed: the broker has ended a live subscription or a responder, and this is why."""

    awaits_commit = False

    code: str
    text: str
    subscription: int | None = None
    responder: int | None = None
    retryable: bool = False
    details: dict[str, Any] = msgspec.field(default_factory=dict)


@declare(Kind.REPLY_SEND, answered=False)
class ReplySend(Request[Done]):
    """Answer a request. The body is the reply's value. Without effect if nobody waits for it any more."""

    request: int
    headers: Headers = msgspec.field(default_factory=dict)
    error: ErrorObject | None = None
    """In place of a value."""
