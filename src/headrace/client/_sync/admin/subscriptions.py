"""Administration of leased subscriptions: each method sends one request."""

from typing import Any

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.times import Start, spot_at
from headrace.model.leasing import (
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionInfo,
    SubscriptionList,
    SubscriptionReset,
)
from headrace.model.subscription import plain_settings
from headrace.model.webhook_requests import WebhookSet


class SubscriptionAdmin:
    """Creates, alters, resets, lists and deletes leased subscriptions."""

    def __init__(self, broker: ReconnectingConnection) -> None:
        self._broker = broker

    def create(
        self, topic: str, subscription: str, settings: dict[str, Any], start: Start, exist_ok: bool, create_topic: bool
    ) -> SubscriptionInfo:
        """Create a leased subscription of a topic, which begins at a point of the log."""
        head = SubscriptionCreate(topic, subscription, plain_settings(settings))
        head.exist_ok, head.create_topic = exist_ok, create_topic
        set_start(head, start)
        return self._broker.request(head, repeat=exist_ok)

    def alter(self, topic: str, subscription: str, settings: dict[str, Any]) -> SubscriptionInfo:
        """Change settings of a leased subscription."""
        head = SubscriptionAlter(topic, plain_settings(settings), subscription)
        return self._broker.request(head)

    def reset(self, topic: str, subscription: str, start: Start | None) -> SubscriptionInfo:
        """Build a leased subscription anew, from a point of the log if one is given."""
        head = SubscriptionReset(topic, subscription)
        if start is not None:
            set_start(head, start)
        return self._broker.request(head, repeat=False)

    def delete(self, topic: str, subscription: str) -> None:
        """Delete a leased subscription; the topic keeps its messages."""
        self._broker.request(SubscriptionDelete(topic, subscription), repeat=False)

    def list_all(self, topic: str | None) -> list[SubscriptionInfo]:
        """List the leased subscriptions of a topic, or of all topics."""
        answer = self._broker.request(SubscriptionList(topic or ""))
        return answer.subscriptions

    def describe(self, topic: str, subscription: str) -> SubscriptionInfo:
        """Describe a leased subscription."""
        return self._broker.request(SubscriptionDescribe(topic, subscription))


def set_start(head: SubscriptionCreate | SubscriptionReset | WebhookSet, start: Start) -> None:
    """Write the point of the log at which the subscription begins into the request."""
    spot = spot_at(start)
    head.start = spot.kind
    if spot.kind == "time":
        head.start_us = spot.value
    else:
        head.start_offset = spot.value
