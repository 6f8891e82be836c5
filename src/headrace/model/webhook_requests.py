"""What can be asked about webhooks, and what is answered. See requests.py.

A webhook is a leased subscription whose messages the broker sends to a URL. Secrets are in no representation: neither
of a request nor of an answer, so that no log shows them.
"""

from typing import Any

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare
from headrace.model.requests import Done
from headrace.model.type_info import build_type_info
from headrace.model.websub import WebSubTerms

SUBSCRIPTION_PREFIX = "webhook."
"""What the names of webhooks' leased subscriptions begin with."""
HIDDEN = "(hidden)"
"""Stands for the value of a header, which may be a credential; given back, it keeps the value that there is."""


class WebhookDefinition(WireStruct):
    """Sends the messages of a topic to a URL."""

    tenant_fields = ("name", "topic", "settings.dead_letter_topic")

    name: str
    topic: str
    """The topic, or the virtual topic (view) if only some messages are wanted. It cannot be changed."""
    url: str
    """Where to, by http or https, without credentials."""
    format: str = "envelope"
    """`envelope` (JSON), `raw` (the value itself), `cloudevents-binary`, `cloudevents-structured` or
    `cloudevents-batch`."""
    headers: dict[str, str] = {}
    """Headers that are added to each request, such as `authorization`."""
    batch_max: int = 1
    """So many messages at most in one request; with more than 1 the body is always an array."""
    concurrency: int = 4
    """So many requests at once."""
    ordered_by_key: bool = False
    """At most one request at a time has messages of a key, in their order, and none overtakes a retry."""
    timeout_seconds: float = 20.0
    """How long the receiver has for its answer."""
    settings: dict[str, Any] = {}
    """Of the leased subscription, by the names of SubscriptionSettings: the retries, the dead letter topic, limits."""
    validate: bool = False
    """Ask the receiver for permission first, as CloudEvents' HTTP webhooks do, and send no faster than it allows."""
    origin: str = ""
    """Who asks for that permission: a DNS name; by default one made of the broker's id."""
    websub: WebSubTerms | None = None
    """The terms of a WebSub subscription, which only a subscriber can make; None for a webhook."""

    @property
    def subscription(self) -> str:
        """The name of its leased subscription."""
        return subscription_name(self.name)

    def __repr__(self) -> str:
        return f"WebhookDefinition(name={self.name!r}, topic={self.topic!r}, url={self.url!r}, format={self.format!r})"


build_type_info(WebhookDefinition)


def subscription_name(name: str) -> str:
    """The name of a webhook's leased subscription.

    >>> subscription_name("acme/billing")
    'webhook.billing'
    """
    return SUBSCRIPTION_PREFIX + name.rpartition("/")[2]


class WebhookInfo(Answer):
    """A webhook as it is now; values of headers are hidden."""

    definition: WebhookDefinition
    created_us: int
    state: str = "active"
    """`active`; `paused` by an operator; `disabled` by the broker, because the receiver wants no more."""
    reason: str = ""
    """Why it is paused or disabled."""
    secret_count: int = 0
    secrets: list[str] = []
    """Those that were made by this request, if it made some: they are told once."""
    circuit: str = "closed"
    """`closed`: requests are sent; `open`: none are, after failures in a row; `half_open`: one is, to try."""
    circuit_until_us: int = 0
    """When the next request may be sent, if none may now."""
    failures: int = 0
    """Failed requests in a row."""
    in_flight: int = 0
    """Requests that wait for their answers."""
    delivered: int = 0
    """Messages that the receiver took."""
    failed: int = 0
    """Messages in requests that failed. Both count since the webhook was last started."""
    last_error: str = ""
    """Why a request last failed; empty after one that did not."""
    error: str = ""
    """Why nothing can be sent at all; empty if something can."""
    waiting: int = 0
    """Messages that wait for a retry or for their time. This and the next three are told by WebhookDescribe only."""
    ready: int = 0
    leased: int = 0
    dead: int = 0
    """Dead letters; `headrace queue redrive` delivers them again."""
    waits_for: str = ""
    """`requests` or `memory`: what all webhooks share, if nothing of it is left for this one; empty if there is."""

    def __repr__(self) -> str:
        return f"WebhookInfo({self.definition!r}, state={self.state!r}, circuit={self.circuit!r})"


@declare(
    Kind.WEBHOOK_SET,
    Permission(Verb.CREATE, Resource.WEBHOOK, "definition.name"),
    Permission(Verb.ALTER, Resource.WEBHOOK, "definition.name"),
    Permission(Verb.CONSUME, Resource.TOPIC, "definition.topic"),
    Permission(Verb.LEASE, Resource.SUBSCRIPTION, "definition.topic", "definition.subscription"),
    Permission(Verb.PUBLISH, Resource.TOPIC, "definition.settings.dead_letter_topic"),
    while_draining=False,
)
class WebhookSet(Request[WebhookInfo]):
    """Make a webhook, or replace the definition of the one of that name; its leased subscription stays."""

    definition: WebhookDefinition
    secrets: list[str] = []
    """One or two, `whsec_` and base64: each request is signed with all. By default one is made, or they stay."""
    replace: bool = False
    """Replace the one of that name, if there is one."""
    start: str = "latest"
    """Which messages a new one sends: those to come (`latest`), all there are (`earliest`), from an `offset` or a
    `time` on."""
    start_offset: int = 0
    start_us: int = 0

    def __repr__(self) -> str:
        return f"WebhookSet({self.definition!r}, replace={self.replace})"


@declare(
    Kind.WEBHOOK_ALTER,
    Permission(Verb.ALTER, Resource.WEBHOOK, "name"),
    Permission(Verb.PUBLISH, Resource.TOPIC, "changes.settings.dead_letter_topic"),
    while_draining=False,
)
class WebhookAlter(Request[WebhookInfo]):
    """Change parts of a webhook while it is in use."""

    tenant_fields = ("changes.settings.dead_letter_topic",)

    name: str
    changes: dict[str, Any] = {}
    """By the names of WebhookDefinition; `headers` and `settings` are merged, and null in them removes."""
    secrets: list[str] = []
    """Replaces the secrets, if there are some."""
    rotate: bool = False
    """Make a new secret; the newest one there is stays beside it until the next rotation."""

    def __repr__(self) -> str:
        return f"WebhookAlter(name={self.name!r}, changes={sorted(self.changes)}, rotate={self.rotate})"


@declare(Kind.WEBHOOK_DELETE, Permission(Verb.DELETE, Resource.WEBHOOK, "name"))
class WebhookDelete(Request[Done]):
    """Delete a webhook and its leased subscription, with what was not delivered; the topic keeps its messages."""

    name: str


@declare(Kind.WEBHOOK_DESCRIBE, Permission(Verb.DESCRIBE, Resource.WEBHOOK, "name"))
class WebhookDescribe(Request[WebhookInfo]):
    """Describe a webhook: its definition, its state, and how far it is behind."""

    name: str


class WebhooksFound(Answer):
    """The answer to WebhookList."""

    webhooks: list[WebhookInfo]


@declare(Kind.WEBHOOK_LIST, Permission(Verb.DESCRIBE, Resource.WEBHOOK))
class WebhookList(Request[WebhooksFound]):
    """List the webhooks of the session's tenant by name."""

    tenant_fields = ("topic",)

    topic: str = ""
    """Only those of this topic."""


@declare(Kind.WEBHOOK_PAUSE, Permission(Verb.ALTER, Resource.WEBHOOK, "name"))
class WebhookPause(Request[WebhookInfo]):
    """Send nothing more until it is resumed, or go on; what is published meanwhile waits."""

    name: str
    paused: bool = True
    """False: go on, also after the broker disabled it."""
    reason: str = ""
    """Told to whoever looks at it."""


class WebhookDelivery(Answer):
    """One request of a webhook, and what became of it."""

    time_us: int
    id: str
    """The header `webhook-id`, the same in every attempt."""
    partition: int = -1
    offset: int = -1
    """Of the first message; -1 in a test."""
    messages: int = 1
    attempt: int = 1
    status: int = 0
    """The status of the answer; 0 if there was none."""
    error: str = ""
    """Why it failed; empty if it did not."""
    duration_us: int = 0
    bytes: int = 0
    """The size of the body that was sent."""
    outcome: str = ""
    """`delivered`; `retry`, later; `dead`: it was the last attempt; `disabled`: the receiver wants no more; `refused`:
    a test failed."""


@declare(
    Kind.WEBHOOK_TEST,
    Permission(Verb.ALTER, Resource.WEBHOOK, "name"),
    while_draining=False,
)
class WebhookTest(Request[WebhookDelivery]):
    """Send a ping to the receiver now, signed as all requests are, and tell what it answers."""

    name: str


class WebhookDeliveriesFound(Answer):
    """The answer to WebhookDeliveries, the newest first."""

    deliveries: list[WebhookDelivery]


@declare(Kind.WEBHOOK_DELIVERIES, Permission(Verb.DESCRIBE, Resource.WEBHOOK, "name"))
class WebhookDeliveries(Request[WebhookDeliveriesFound]):
    """List the last requests of a webhook, as far as they are in the broker's memory."""

    name: str
    deliveries_max: int = 50
    failed: bool = False
    """Only those that failed."""
