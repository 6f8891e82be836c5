"""Webhooks: keeps their definitions, secrets and states, each with its leased subscription.

What is sent, and to whom, the broker does not know: a `WebhookSender` outside does that, and is told of every change.
"""

import secrets as random_secrets
from collections.abc import Callable, Generator
from typing import Any, Protocol

import msgspec

from headrace.broker.leased_facts import SubscriptionDeleted
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.signal import Signal
from headrace.broker.slices import TimedSteps
from headrace.broker.subscription import Subscription
from headrace.broker.subscription_admin import SubscriptionAdmin
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.turns import Turns
from headrace.broker.webhook_facts import WebhookDeleted, WebhookStateSet, WebhookStored
from headrace.model.errors import (
    InvalidArgument,
    LimitExceeded,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicNotFound,
    UnsupportedOperation,
    WebhookExists,
    WebhookNotFound,
)
from headrace.model.leasing import SubscriptionAlter, SubscriptionDelete, cut_reason
from headrace.model.limits import WEBHOOK_LOG_MAX, WEBHOOKS_MAX
from headrace.model.receiver_url import parse_receiver_url
from headrace.model.request import Request, Resource, Verb
from headrace.model.requests import Done
from headrace.model.topic import DEFAULT_TENANT, tenant_of
from headrace.model.webhook import (
    altered_webhook,
    checked_secrets,
    checked_webhook,
    checked_webhook_name,
    secret_text,
    shown_webhook,
    webhook_settings,
    with_kept_headers,
)
from headrace.model.webhook_requests import (
    WebhookAlter,
    WebhookDefinition,
    WebhookDelete,
    WebhookDeliveries,
    WebhookDeliveriesFound,
    WebhookDelivery,
    WebhookDescribe,
    WebhookInfo,
    WebhookList,
    WebhookPause,
    WebhookSet,
    WebhooksFound,
    WebhookTest,
)

ACTIVE, PAUSED, DISABLED = "active", "paused", "disabled"
_SECRET_BYTES = 32
_LISTED_TOGETHER = 200
"""Webhooks listed per slice."""

Handler = Callable[[Session, Any, memoryview, int], Any]


class WebhookSender(Protocol):
    """Sends the messages of webhooks. All methods are called on the broker's thread."""

    def check(self, definition: WebhookDefinition) -> None:
        """Refuse a webhook to which nothing could be sent."""

    def changed(self, name: str, fact: WebhookStored | None) -> None:
        """Follow a webhook that was made, altered, paused or resumed; None: it was deleted."""

    def describe(self, info: WebhookInfo) -> None:
        """Fill in what only the sender knows."""

    def test(self, fact: WebhookStored) -> PendingAnswer[WebhookDelivery]:
        """Send a ping."""

    def deliveries(self, name: str) -> list[WebhookDelivery]:
        """The log of deliveries, the newest first."""


class WebhookRegistry:
    """All webhooks of a broker."""

    def __init__(
        self,
        topics: TopicRegistry,
        subscriptions: SubscriptionRegistry,
        admin: SubscriptionAdmin,
        ledger: Ledger,
        turns: Turns,
    ) -> None:
        self._topics = topics
        self._subscriptions = subscriptions
        self._admin = admin
        self._ledger = ledger
        self._turns = turns
        self._state = ledger.state.webhooks
        self._sender: WebhookSender | None = None
        self._of_topic: dict[int, set[str]] = {}
        """Names by topic id: facts of a deleted topic are forgotten before anybody is told."""
        self.making: Signal[str] = Signal()
        """Emitted before a webhook is made; a listener refuses by raising."""
        self.told: Signal[str, str, dict[str, Any], int] = Signal()
        """A webhook's name, what became of it (`created`, `altered`, `paused`, `disabled`, `resumed`, `opened`,
        `closed` or `deleted`), details, and the time."""
        for fact in list(self._state.by_name.values()):
            if fact.topic_id in topics.by_id:
                self._of_topic.setdefault(fact.topic_id, set()).add(fact.definition.name)
            else:
                self._state.forget_topic(fact.topic_id)
        topics.changed.connect(self._topic_changed)

    def attach(self, sender: WebhookSender) -> None:
        """Have this one send the messages."""
        self._sender = sender

    def stored(self) -> list[WebhookStored]:
        """All webhooks."""
        return list(self._state.by_name.values())

    def find(self, name: str) -> WebhookStored | None:
        """The webhook of that name, if there is one."""
        return self._state.by_name.get(name)

    # Requests.

    def requests(self) -> dict[type[Request[Any]], Handler]:
        """What handles each request about webhooks, and those about subscriptions that only webhooks may change."""
        return {
            WebhookSet: lambda _, ask, __, now: self._turns.in_slices(self._set(ask, now)),
            WebhookAlter: lambda session, ask, _, now: self._turns.in_slices(self._alter(session, ask, now)),
            WebhookDelete: lambda _, ask, __, now: self.delete(ask, now),
            WebhookDescribe: lambda _, ask, __, now: self._turns.in_slices(self._describe(ask, now)),
            WebhookList: lambda session, ask, _, __: self._turns.in_slices(self._listed(ask, session.tenant)),
            WebhookPause: lambda _, ask, __, now: self.pause(ask, now),
            WebhookTest: lambda _, ask, __, ___: self._connected().test(self._own(ask.name)),
            WebhookDeliveries: lambda _, ask, __, ___: self.deliveries(ask),
            SubscriptionAlter: lambda _, ask, __, now: self._admin.alter(self._free(ask), now),
            SubscriptionDelete: lambda _, ask, __, now: self._admin.delete(self._free(ask), now),
        }

    def _set(self, request: WebhookSet, now_us: int) -> TimedSteps:
        before = self._state.by_name.get(checked_webhook_name(request.definition.name))
        _check_own(request.definition)
        if before is not None:
            _check_own(before.definition)
        if before is not None and not request.replace:
            raise WebhookExists(
                f"there is already a webhook {request.definition.name}; replace it, or use another name"
            )
        definition = checked_webhook(
            with_kept_headers(request.definition, None if before is None else before.definition)
        )
        self._connected().check(definition)
        if before is not None:
            secrets = checked_secrets(request.secrets) if request.secrets else before.secrets
            return (yield from self._replace(before, definition, secrets, [], now_us))
        secrets = checked_secrets(request.secrets) if request.secrets else [_new_secret()]
        return (yield from self._create(definition, secrets, request, now_us))

    def store(self, definition: WebhookDefinition, secrets: list[str], now_us: int) -> TimedSteps:
        """Make the webhook of a WebSub subscription, or renew it; its secret, if it has one, is the subscriber's."""
        definition = checked_webhook(definition)
        before = self._state.by_name.get(definition.name)
        if before is not None:
            return (yield from self._replace(before, definition, secrets, [], now_us))
        return (yield from self._create(definition, secrets, WebhookSet(definition), now_us))

    def _create(
        self, definition: WebhookDefinition, secrets: list[str], request: WebhookSet, now_us: int
    ) -> TimedSteps:
        topic = self._topics.get_or_create(definition.topic, now_us)
        starts = yield from self._admin.starts(topic, request)
        self._check_free(definition, topic)

        def stored(subscription_id: int) -> WebhookStored:
            return WebhookStored(definition, topic.id, subscription_id, now_us, secrets)

        settings = webhook_settings(definition)
        made = self._subscriptions.record(topic, definition.subscription, settings, starts, now_us, stored)
        fact = self._state.by_name[definition.name]
        self._of_topic.setdefault(topic.id, set()).add(definition.name)
        self._tell(definition.name, "created", now_us, _details(fact))
        yield from self._subscriptions.prepare(made, self._subscriptions.opening(made, now_us))
        return self._ledger.durably(self._info(fact, [] if request.secrets else secrets))

    def _check_free(self, definition: WebhookDefinition, topic: Topic) -> None:
        """Look again after the slices in which other requests were answered."""
        if self._topics.by_id.get(topic.id) is not topic:
            raise TopicNotFound(f"the topic {topic} was deleted while the webhook was made; create the topic again")
        if definition.name in self._state.by_name:
            raise WebhookExists(f"there is already a webhook {definition.name}; replace it, or use another name")
        if len(self._state.by_name) >= WEBHOOKS_MAX:
            raise LimitExceeded(f"there are {WEBHOOKS_MAX} webhooks, which is the maximum; delete some")
        self.making(definition.name)
        if self._subscriptions.find(topic, definition.subscription) is not None:
            raise SubscriptionExists(
                f"the topic {topic} has a leased subscription {definition.subscription}, which is not of a webhook: "
                "delete it, or give the webhook another name"
            )

    def _alter(self, session: Session, request: WebhookAlter, now_us: int) -> TimedSteps:
        before = self._own(request.name)
        definition = altered_webhook(before.definition, request.changes)
        if session.access is not None and definition.url != before.definition.url:
            # Whoever has messages sent elsewhere could read them there.
            session.access.require(Verb.CONSUME.value, Resource.TOPIC.value, definition.topic)
        _check_own(definition)
        self._connected().check(definition)
        secrets, new = before.secrets, []
        if request.secrets:
            secrets = checked_secrets(request.secrets)
        if request.rotate:
            new = [_new_secret()]
            secrets = [*new, secrets[0]]
        return (yield from self._replace(before, definition, secrets, new, now_us))

    def _replace(
        self, before: WebhookStored, definition: WebhookDefinition, secrets: list[str], new: list[str], now_us: int
    ) -> TimedSteps:
        name = definition.name
        if definition.topic != before.definition.topic:
            raise InvalidArgument(
                f"the webhook {name} is of the topic {before.definition.topic}: its topic cannot be changed; delete "
                "it first, or use another name"
            )
        fact = msgspec.structs.replace(before, definition=definition, secrets=secrets)
        settings = webhook_settings(definition)
        found = self._subscription(before)
        if settings == found.settings:
            if fact != before:
                self._ledger.record(now_us, fact)
        else:
            while found.preparing:
                now_us = yield
            current = self._known(name)  # it may have been changed while another change was applied
            fact = msgspec.structs.replace(current, definition=definition, secrets=secrets)
            yield from self._admin.apply_settings(self._subscription(current), settings, now_us, fact)
        if fact != before:
            self._tell(name, "altered", now_us, _details(fact))
        return self._ledger.durably(self._info(self._known(name), new))

    def delete(self, request: WebhookDelete, now_us: int) -> PendingAnswer[Done]:
        """Delete a webhook and its subscription."""
        self._delete(self._known(request.name), {}, now_us)
        return self._ledger.durably(Done())

    def remove(self, name: str, reason: str, now_us: int) -> None:
        """Delete the webhook of a WebSub subscription that has ended."""
        fact = self._state.by_name.get(name)
        if fact is not None:
            self._delete(fact, {"reason": reason, "ended": True}, now_us)
            self._ledger.request_sync()

    def _delete(self, fact: WebhookStored, details: dict[str, Any], now_us: int) -> None:
        name = fact.definition.name
        topic = self._topics.by_id.get(fact.topic_id)
        found = None if topic is None else self._subscriptions.find(topic, fact.definition.subscription)
        ended = () if found is None else (SubscriptionDeleted(found.id),)
        self._ledger.record(now_us, WebhookDeleted(name), *ended)
        self._of_topic[fact.topic_id].discard(name)
        self._tell(name, "deleted", now_us, details)
        if found is not None:
            self._subscriptions.remove(found, SubscriptionNotFound(f"the webhook {name} was deleted"))

    def pause(self, request: WebhookPause, now_us: int) -> PendingAnswer[WebhookInfo]:
        """Pause a webhook, or let it go on."""
        fact = self._known(request.name)
        if request.paused and fact.state == ACTIVE:
            self._set_state(fact, PAUSED, cut_reason(request.reason), "paused", now_us)
        elif not request.paused and fact.state != ACTIVE:
            self._set_state(fact, ACTIVE, "", "resumed", now_us)
        return self._ledger.durably(self._info(self._known(request.name)))

    def deliveries(self, request: WebhookDeliveries) -> WebhookDeliveriesFound:
        """List the last requests of a webhook."""
        if not 1 <= request.deliveries_max <= WEBHOOK_LOG_MAX:
            raise InvalidArgument(f"deliveries_max is 1 to {WEBHOOK_LOG_MAX}, not {request.deliveries_max}")
        name = self._known(request.name).definition.name
        logged = [] if self._sender is None else self._sender.deliveries(name)
        found = [one for one in logged if one.error or not request.failed]
        return WebhookDeliveriesFound(found[: request.deliveries_max])

    def _describe(self, request: WebhookDescribe, now_us: int) -> TimedSteps:
        fact = self._known(request.name)
        found = self._subscription(fact)
        while found.preparing:
            now_us = yield
        counts = yield from self._admin.info(found, now_us)
        info = self._info(self._known(request.name))
        info.waiting, info.ready, info.leased, info.dead = counts.waiting, counts.ready, counts.leased, counts.dead
        info.error = info.error or counts.error
        return info

    def _listed(self, request: WebhookList, tenant: str) -> Generator[None, None, WebhooksFound]:
        names = sorted(name for name in self._state.by_name if tenant_of(name) == tenant)
        infos: list[WebhookInfo] = []
        for number, name in enumerate(names, 1):
            fact = self._state.by_name.get(name)
            if fact is not None and request.topic in ("", fact.definition.topic):
                infos.append(self._info(fact))
            if number % _LISTED_TOGETHER == 0:
                yield
        return WebhooksFound(infos)

    # The sender.

    def disable(self, name: str, reason: str, now_us: int) -> None:
        """Send nothing more, because the receiver wants no more; what is not delivered stays until it is resumed.

        A WebSub subscription is deleted.
        """
        fact = self._state.by_name.get(name)
        if fact is not None and fact.definition.websub is not None:
            self.remove(name, reason, now_us)
        elif fact is not None and fact.state != DISABLED:
            self._set_state(fact, DISABLED, cut_reason(reason), "disabled", now_us)

    def note(self, name: str, action: str, details: dict[str, Any], now_us: int) -> None:
        """Tell observers what happened to a webhook that is no change of its definition."""
        self.told(name, action, details, now_us)

    def _set_state(self, fact: WebhookStored, state: str, reason: str, action: str, now_us: int) -> None:
        name = fact.definition.name
        self._ledger.record(now_us, WebhookStateSet(name, state, reason))
        self._tell(name, action, now_us, {"reason": reason} if reason else {})

    def _tell(self, name: str, action: str, now_us: int, details: dict[str, Any]) -> None:
        self.told(name, action, details, now_us)
        if self._sender is not None:
            self._sender.changed(name, self._state.by_name.get(name))

    def _connected(self) -> WebhookSender:
        if self._sender is None:
            raise UnsupportedOperation("this broker sends no webhooks: it runs without a server")
        return self._sender

    def _topic_changed(self, topic: Topic, now_us: int) -> None:
        """A webhook is deleted with its topic, as the leased subscription is."""
        if topic.id not in self._topics.by_id:
            for name in sorted(self._of_topic.pop(topic.id, ())):
                self._tell(name, "deleted", now_us, {"reason": "its topic was deleted"})

    # Lookups.

    def _known(self, name: str) -> WebhookStored:
        fact = self._state.by_name.get(name.removeprefix(f"{DEFAULT_TENANT}/"))
        if fact is None:
            raise WebhookNotFound(f"there is no webhook {name}; `headrace webhook list` shows those that there are")
        return fact

    def _own(self, name: str) -> WebhookStored:
        """The webhook of that name, if it is not a subscriber's."""
        fact = self._known(name)
        _check_own(fact.definition)
        return fact

    def _subscription(self, fact: WebhookStored) -> Subscription:
        return self._subscriptions.known(fact.definition.topic, fact.definition.subscription)

    def _free(self, request: Any) -> Any:
        """The request about a subscription, unless that is a webhook's."""
        topic = self._topics.find(request.topic)
        for name in () if topic is None else self._of_topic.get(topic.id, ()):
            if self._state.by_name[name].definition.subscription == request.subscription:
                raise InvalidArgument(
                    f"the subscription {request.subscription} belongs to the webhook {name}: alter or delete that one"
                )
        return request

    def _info(self, fact: WebhookStored, new_secrets: list[str] | None = None) -> WebhookInfo:
        info = WebhookInfo(
            definition=shown_webhook(fact.definition),
            created_us=fact.created_us,
            state=fact.state,
            reason=fact.reason,
            secret_count=len(fact.secrets),
            secrets=new_secrets or [],
        )
        if self._sender is not None:
            self._sender.describe(info)
        return info


def _check_own(definition: WebhookDefinition) -> None:
    """Refuse to make, change or test what is a subscriber's."""
    if definition.websub is not None:
        raise InvalidArgument(
            f"{definition.name} is a WebSub subscription, which its subscriber makes and changes at the hub; it can be "
            "paused and deleted here"
        )


def _new_secret() -> str:
    return secret_text(random_secrets.token_bytes(_SECRET_BYTES))


def _details(fact: WebhookStored) -> dict[str, Any]:
    """What events tell; not the URL, whose path may be a credential."""
    definition = fact.definition
    host = parse_receiver_url(definition.url).authority
    return {"topic": definition.topic.rpartition("/")[2], "host": host, "format": definition.format}
