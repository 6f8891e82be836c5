"""Webhooks of a bus: defines, alters, tests, pauses and deletes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.client._sync.admin.subscriptions import set_start
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.times import Start
from headrace.model.subscription import plain_settings
from headrace.model.webhook_requests import (
    WebhookAlter,
    WebhookDefinition,
    WebhookDelete,
    WebhookDeliveries,
    WebhookDelivery,
    WebhookDescribe,
    WebhookInfo,
    WebhookList,
    WebhookPause,
    WebhookSet,
    WebhookTest,
)

WebhookInfos = list[WebhookInfo]
WebhookDeliveryList = list[WebhookDelivery]


class Webhooks:
    """Sends the messages of topics to URLs, signed by Standard Webhooks. It is `bus.webhooks`.

    A webhook is a durable definition with a leased subscription of its own, `webhook.NAME`. The broker sends each
    message until the receiver answers 2xx, at least once; after the last attempt it is a dead letter.

    Example:
        >>> info = bus.webhooks.set("billing", "orders", "https://receiver.invalid/hook")
        >>> info.secrets[0][:6], info.state, info.circuit
        ('whsec_', 'active', 'closed')
    """

    def __init__(self, bus: object, broker: ReconnectingConnection) -> None:
        self._bus = bus  # it closes its connections when nobody holds it
        self._broker = broker

    def set(
        self,
        name: str,
        topic: str,
        url: str,
        *,
        format: str = "envelope",
        headers: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        batch_max: int = 1,
        concurrency: int = 4,
        ordered_by_key: bool = False,
        timeout_seconds: float = 20.0,
        validate: bool = False,
        origin: str = "",
        start: Start = "latest",
        replace: bool = False,
        **settings: Any,
    ) -> WebhookInfo:
        """Define a webhook, which sends the messages of a topic to a URL.

        Parameters:
            name: the webhook's name.
            topic: the topic, or a virtual topic if only some messages are wanted. The broker creates it if it permits
                that (`auto_create_topics`).
            url: where to, http:// or https://. Addresses that are not of the public internet are refused, unless the
                broker's setting `webhook_networks` has them.
            format: `envelope`, `raw`, `cloudevents-binary`, `cloudevents-structured` or `cloudevents-batch`.
            headers: headers that each request has besides, such as `authorization`.
            secrets: one or two secrets, `whsec_` and base64; by default the broker makes one.
            batch_max: the most messages in one request; with more than 1 the body is an array.
            concurrency: the most requests at once.
            ordered_by_key: have at most one request at a time with messages of a key, in order.
            timeout_seconds: how long the receiver has for its answer.
            validate: ask the receiver for permission first, by OPTIONS, as CloudEvents' HTTP webhooks do.
            origin: the DNS name in whose name that is asked.
            start: which messages a new webhook sends: only new ones (`latest`), all (`earliest`), or those from a
                datetime or an offset on.
            replace: replace the definition of the webhook of that name, if there is one.
            settings: of its leased subscription, such as `deliveries_max`, `retry_seconds` and `dead_letter_topic`; by
                default 16 attempts in about a day.

        Returns:
            The webhook. `secrets` has the secret that the broker made: it is told only here.

        Raises:
            InvalidArgument: if an argument is wrong.
            AddressRefused: if the URL leads to an address that the broker does not connect to.
            WebhookExists: if there is a webhook of that name.
            TopicNotFound: if the topic does not exist and the broker does not create topics.
            PluginUnavailable: if the broker runs without the extra `http`.
            LimitExceeded: if there are as many webhooks as there may be.

        Example:
            >>> info = bus.webhooks.set("slow", "orders", "https://receiver.invalid/", deliveries_max=3)
            >>> info.definition.settings
            {'deliveries_max': 3}
        """
        definition = WebhookDefinition(
            name,
            topic,
            url,
            format,
            dict(headers or {}),
            batch_max,
            concurrency,
            ordered_by_key,
            timeout_seconds,
            plain_settings(settings),
            validate,
            origin,
        )
        request = WebhookSet(definition, list(secrets), replace)
        set_start(request, start)
        return self._broker.request(request, repeat=False)

    def alter(
        self,
        name: str,
        *,
        headers: Mapping[str, str | None] | None = None,
        settings: Mapping[str, Any] | None = None,
        secrets: Sequence[str] = (),
        rotate: bool = False,
        **changes: Any,
    ) -> WebhookInfo:
        """Change parts of a webhook while it is in use. Requests that wait for their answers are not affected.

        Parameters:
            name: the webhook's name.
            headers: headers to set; None removes one.
            settings: settings of its leased subscription to change; None means the default.
            secrets: secrets to use instead of those there are.
            rotate: have the broker make a new secret. Requests are signed with it and with the newest one before, so
                that the receiver can be changed in between.
            changes: other parts of the definition by name, such as `url` or `concurrency`.

        Returns:
            The webhook, with the new secret if one was made.

        Raises:
            WebhookNotFound: if there is no such webhook.
            InvalidArgument: if a change is wrong; the topic cannot be changed.
            AddressRefused: if the URL leads to an address that the broker does not connect to.

        Example:
            >>> info = bus.webhooks.set("billing", "orders", "https://receiver.invalid/hook")
            >>> info = bus.webhooks.alter("billing", concurrency=8, rotate=True)
            >>> info.definition.concurrency, info.secret_count, len(info.secrets)
            (8, 2, 1)
        """
        given = dict(changes)
        if headers is not None:
            given["headers"] = dict(headers)
        if settings is not None:
            given["settings"] = plain_settings(settings)
        return self._broker.request(WebhookAlter(name, given, list(secrets), rotate), repeat=False)

    def list(self, topic: str | None = None) -> WebhookInfos:
        """List webhooks by name.

        Parameters:
            topic: only those of this topic; by default all.

        Returns:
            The webhooks; what `describe` counts is 0 here.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> info = bus.webhooks.set("billing", "orders", "https://receiver.invalid/hook")
            >>> [info.definition.name for info in bus.webhooks.list("orders")]
            ['billing']
        """
        return (self._broker.request(WebhookList(topic or ""))).webhooks

    def describe(self, name: str) -> WebhookInfo:
        """Describe a webhook: its definition, its state, its circuit breaker, and how far it is behind.

        Parameters:
            name: the webhook's name.

        Returns:
            The webhook. Its secrets, and the values of its headers, are not told.

        Raises:
            WebhookNotFound: if there is no such webhook.

        Example:
            >>> info = bus.webhooks.set("billing", "orders", "https://receiver.invalid/hook")
            >>> (bus.webhooks.describe("billing")).ready
            0
        """
        return self._broker.request(WebhookDescribe(name))

    def pause(self, name: str, reason: str = "") -> WebhookInfo:
        """Send nothing more until the webhook is resumed; what is published meanwhile waits.

        Parameters:
            name: the webhook's name.
            reason: told to whoever looks at it.

        Returns:
            The webhook.

        Raises:
            WebhookNotFound: if there is no such webhook.

        Example:
            >>> info = bus.webhooks.set("billing", "orders", "https://receiver.invalid/hook")
            >>> (bus.webhooks.pause("billing", "maintenance")).state
            'paused'
        """
        return self._broker.request(WebhookPause(name, True, reason))

    def resume(self, name: str) -> WebhookInfo:
        """Let a webhook go on that was paused, or that the broker disabled.

        Parameters:
            name: the webhook's name.

        Returns:
            The webhook.

        Raises:
            WebhookNotFound: if there is no such webhook.

        Example:
            >>> info = bus.webhooks.set("billing", "orders", "https://receiver.invalid/hook")
            >>> info = bus.webhooks.pause("billing")
            >>> (bus.webhooks.resume("billing")).state
            'active'
        """
        return self._broker.request(WebhookPause(name, False))

    def test(self, name: str) -> WebhookDelivery:
        """Send a ping to the receiver now, signed as all requests are; the webhook may be paused.

        Parameters:
            name: the webhook's name.

        Returns:
            What the receiver answered; `error` is empty if it took the ping.

        Raises:
            WebhookNotFound: if there is no such webhook.
            Busy: if too many webhooks are being tested.

        Example:
            >>> info = bus.webhooks.set("billing", "orders", "https://receiver.invalid/hook")
            >>> (bus.webhooks.test("billing")).outcome
            'refused'
        """
        return self._broker.request(WebhookTest(name), repeat=False)

    def deliveries(self, name: str, *, limit: int = 50, failed: bool = False) -> WebhookDeliveryList:
        """List the last requests of a webhook, the newest first, as far as they are in the broker's memory.

        Parameters:
            name: the webhook's name.
            limit: the most to list.
            failed: list only those that failed.

        Returns:
            The requests, and what became of them.

        Raises:
            WebhookNotFound: if there is no such webhook.

        Example:
            >>> info = bus.webhooks.set("billing", "orders", "https://receiver.invalid/hook")
            >>> bus.webhooks.deliveries("billing")
            []
        """
        return (self._broker.request(WebhookDeliveries(name, limit, failed))).deliveries

    def delete(self, name: str) -> None:
        """Delete a webhook and its leased subscription, with what was not delivered. The topic keeps its messages.

        Parameters:
            name: the webhook's name.

        Raises:
            WebhookNotFound: if there is no such webhook.

        Example:
            >>> info = bus.webhooks.set("billing", "orders", "https://receiver.invalid/hook")
            >>> bus.webhooks.delete("billing")
        """
        self._broker.request(WebhookDelete(name), repeat=False)
