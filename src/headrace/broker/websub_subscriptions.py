"""WebSub subscriptions: webhooks that a subscriber makes and renews itself, and that end with their lease.

The broker decides, and keeps what was decided; an `IntentVerification` outside asks the callbacks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from headrace.broker.deadlines import Deadlines
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.slices import TimedSteps
from headrace.broker.topics import TopicRegistry
from headrace.broker.turns import Turns
from headrace.broker.webhook_facts import WebhookStored
from headrace.broker.webhooks import WebhookRegistry
from headrace.model.errors import InvalidArgument, LimitExceeded, UnsupportedOperation, WebhookExists, WebhookNotFound
from headrace.model.limits import WEBSUB_SUBSCRIPTIONS_MAX, WEBSUB_TOPIC_SUBSCRIPTIONS_MAX
from headrace.model.receiver_url import parse_receiver_url
from headrace.model.request import Request
from headrace.model.webhook import checked_webhook_name
from headrace.model.webhook_requests import WebhookDefinition, WebhookInfo
from headrace.model.websub import WebSubTerms, checked_link, checked_secret, granted_lease, subscription_name
from headrace.model.websub_requests import WebSubAccepted, WebSubSubscribe, WebSubUnsubscribe

SUBSCRIBE, UNSUBSCRIBE = "subscribe", "unsubscribe"
LEASE_ENDED = "its lease ended"
UNSUBSCRIBED = "its subscriber unsubscribed"
_EXPIRED_TOGETHER = 100
"""Maximum subscriptions that end per tick."""
_RETRY_US = 1_000_000
"""When to try again to end a subscription."""

Handler = Callable[[Session, Any, memoryview, int], Any]


class WebSubIntent(NamedTuple):
    """What somebody asks for in the name of a callback, which has to confirm it."""

    mode: str
    name: str
    topic: str
    callback: str
    topic_url: str
    hub_url: str = ""
    lease_seconds: int = 0
    secret: str = ""

    def __repr__(self) -> str:
        return f"WebSubIntent(mode={self.mode!r}, name={self.name!r}, callback={self.callback!r})"


class IntentVerification(Protocol):
    """Asks callbacks. All methods are called on the broker's thread, and return at once."""

    def check(self, callback: str) -> None:
        """Refuse a callback to which nothing could be sent."""

    def verify(self, intent: WebSubIntent) -> None:
        """Ask the callback, and then `WebSubSubscriptions.confirm` if it agrees; refuses if there is too much to do."""

    def deny(self, callback: str, topic_url: str, reason: str) -> None:
        """Tell a callback that its subscription is refused, or has ended before its time."""


class WebSubSubscriptions:
    """All WebSub subscriptions of a broker, over its webhooks."""

    def __init__(self, topics: TopicRegistry, webhooks: WebhookRegistry, turns: Turns) -> None:
        self._topics = topics
        self._webhooks = webhooks
        self._turns = turns
        self._verifier: IntentVerification | None = None
        self._known: dict[str, WebhookStored] = {}
        """By name, as they were last told of."""
        self._topic_counts: dict[int, int] = {}
        """Subscriptions by topic id."""
        self._leases = Deadlines[str]()
        for fact in webhooks.stored():
            self._learn(fact)
        webhooks.told.connect(self._webhook_told)

    def attach(self, verifier: IntentVerification) -> None:
        """Have this one ask the callbacks."""
        self._verifier = verifier

    def requests(self) -> dict[type[Request[Any]], Handler]:
        """What handles each request of subscribers."""
        return {
            WebSubSubscribe: lambda _, ask, __, ___: self.subscribe(ask),
            WebSubUnsubscribe: lambda _, ask, __, ___: self.unsubscribe(ask),
        }

    def subscribe(self, request: WebSubSubscribe) -> WebSubAccepted:
        """Check a subscription, and have its callback asked; there is none before that has agreed."""
        verifier = self._connected()
        topic = self._topics.get(request.topic)
        callback = parse_receiver_url(request.callback).text
        verifier.check(callback)
        name = checked_webhook_name(request.name)
        expected = subscription_name(callback, checked_link(request.topic_url))
        if name.rpartition("/")[2] != expected:
            raise InvalidArgument(f"the name of this subscription is {expected}, not {request.name}")
        self._check_room(name, topic.id)
        lease_seconds = granted_lease(request.lease_seconds)
        intent = WebSubIntent(
            SUBSCRIBE,
            name,
            str(topic),
            callback,
            request.topic_url,
            checked_link(request.hub_url),
            lease_seconds,
            checked_secret(request.secret),
        )
        verifier.verify(intent)
        return WebSubAccepted(lease_seconds)

    def unsubscribe(self, request: WebSubUnsubscribe) -> WebSubAccepted:
        """Have the callback of a subscription asked whether it is to end."""
        name = checked_webhook_name(request.name)
        fact = self._known.get(name)
        if fact is None:
            raise WebhookNotFound(
                "this callback has no subscription to this topic: it ended, or hub.callback or hub.topic is written "
                "in another way than it was"
            )
        definition, terms = fact.definition, _terms(fact)
        intent = WebSubIntent(UNSUBSCRIBE, name, definition.topic, definition.url, terms.topic_url)
        self._connected().verify(intent)
        return WebSubAccepted()

    def confirm(self, intent: WebSubIntent, now_us: int) -> PendingAnswer[WebhookInfo] | None:
        """Do what a callback has confirmed; the answer of a subscription says that it is durable."""
        if intent.mode == UNSUBSCRIBE:
            if intent.name in self._known:
                self._webhooks.remove(intent.name, UNSUBSCRIBED, now_us)
            return None
        return self._turns.in_slices(self._store(intent, now_us))

    def tick(self, now_us: int) -> None:
        """End the subscriptions whose lease is over."""
        due = self._leases.pop_due(now_us, _EXPIRED_TOGETHER)
        for name in due:
            self._leases.set(name, now_us + _RETRY_US)  # until it is deleted: the journal may not take it
        for name in due:
            self._webhooks.remove(name, LEASE_ENDED, now_us)

    def next_tick_us(self) -> int | None:
        """When the next lease ends."""
        return self._leases.next_us()

    def _store(self, intent: WebSubIntent, now_us: int) -> TimedSteps:
        topic = self._topics.get(intent.topic)
        self._check_room(intent.name, topic.id)
        terms = WebSubTerms(
            intent.topic_url, intent.hub_url, intent.lease_seconds, now_us + intent.lease_seconds * 1_000_000
        )
        definition = WebhookDefinition(intent.name, intent.topic, intent.callback, format="raw", websub=terms)
        secrets = [intent.secret] if intent.secret else []
        return (yield from self._webhooks.store(definition, secrets, now_us))

    def _check_room(self, name: str, topic_id: int) -> None:
        if name in self._known:
            return
        if self._webhooks.find(name) is not None:
            raise WebhookExists(f"there is a webhook {name} that is no WebSub subscription; rename it")
        if len(self._known) >= WEBSUB_SUBSCRIPTIONS_MAX:
            raise LimitExceeded(f"there are {WEBSUB_SUBSCRIPTIONS_MAX} WebSub subscriptions, which is the maximum")
        if self._topic_counts.get(topic_id, 0) >= WEBSUB_TOPIC_SUBSCRIPTIONS_MAX:
            raise LimitExceeded(
                f"the topic has {WEBSUB_TOPIC_SUBSCRIPTIONS_MAX} WebSub subscriptions, which is the maximum"
            )

    def _connected(self) -> IntentVerification:
        if self._verifier is None:
            raise UnsupportedOperation("this broker is no WebSub hub: it runs without a server")
        return self._verifier

    def _learn(self, fact: WebhookStored) -> None:
        terms = fact.definition.websub
        if terms is None:
            return
        name = fact.definition.name
        if name not in self._known:
            self._topic_counts[fact.topic_id] = self._topic_counts.get(fact.topic_id, 0) + 1
        self._known[name] = fact
        self._leases.set(name, terms.lease_end_us)

    def _webhook_told(self, name: str, action: str, details: dict[str, Any], now_us: int) -> None:  # noqa: ARG002
        """Follow the webhooks of subscriptions, and tell the subscriber when one is deleted that it did not end."""
        fact = self._webhooks.find(name)
        if fact is not None:
            self._learn(fact)
            return
        known = self._known.pop(name, None)
        if known is None:
            return
        self._leases.remove(name)
        self._topic_counts[known.topic_id] -= 1
        if not self._topic_counts[known.topic_id]:
            del self._topic_counts[known.topic_id]
        if "ended" not in details and self._verifier is not None:
            reason = details.get("reason") or "an administrator deleted it"
            self._verifier.deny(known.definition.url, _terms(known).topic_url, reason)


def _terms(fact: WebhookStored) -> WebSubTerms:
    terms = fact.definition.websub
    assert terms is not None
    return terms
