"""What a subscriber asks a WebSub hub for. See requests.py.

The hub answers before it knows: it asks the subscriber's callback whether the request was meant. Secrets are in no
representation, so that no log shows them.
"""

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, declare


class WebSubAccepted(Answer):
    """The hub verifies the request now, by asking the callback."""

    lease_seconds: int = 0
    """How long the subscription will last; 0 for one that is to end."""


@declare(
    Kind.WEBSUB_SUBSCRIBE,
    Permission(Verb.CREATE, Resource.WEBHOOK, "name"),
    Permission(Verb.CONSUME, Resource.TOPIC, "topic"),
    while_draining=False,
)
class WebSubSubscribe(Request[WebSubAccepted]):
    """Send messages of a topic to a callback, or go on doing so, after the callback has confirmed it."""

    name: str
    """Of its webhook: `subscription_name` of the callback and the topic's URL."""
    topic: str
    callback: str
    """The URL of the subscriber."""
    topic_url: str
    """The URL by which the subscriber names the topic."""
    hub_url: str
    """The URL of the hub that the subscriber used."""
    lease_seconds: int | None = None
    """How long; the hub may grant less or more."""
    secret: str = ""
    """The hub signs what it sends with it."""

    def __repr__(self) -> str:
        return f"WebSubSubscribe(topic={self.topic!r}, callback={self.callback!r})"


@declare(Kind.WEBSUB_UNSUBSCRIBE, Permission(Verb.DELETE, Resource.WEBHOOK, "name"), while_draining=False)
class WebSubUnsubscribe(Request[WebSubAccepted]):
    """End a subscription, after its callback has confirmed it."""

    name: str
