"""Administration of leased subscriptions: each method sends one request."""

from typing import Any

from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
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


class AsyncSubscriptionAdmin:
    """Creates, alters, resets, lists and deletes leased subscriptions."""

    def __init__(self, broker: AsyncReconnectingConnection) -> None:
        self._broker = broker

    async def create(
        self, topic: str, subscription: str, settings: dict[str, Any], start: Start, exist_ok: bool, create_topic: bool
    ) -> SubscriptionInfo:
        """Create a leased subscription of a topic, which begins at a point of the log."""
        head = SubscriptionCreate(topic, subscription, plain_settings(settings))
        head.exist_ok, head.create_topic = exist_ok, create_topic
        set_start(head, start)
        return await self._broker.request(head, repeat=exist_ok)

    async def alter(self, topic: str, subscription: str, settings: dict[str, Any]) -> SubscriptionInfo:
        """Change settings of a leased subscription."""
        head = SubscriptionAlter(topic, plain_settings(settings), subscription)
        return await self._broker.request(head)

    async def reset(self, topic: str, subscription: str, start: Start | None) -> SubscriptionInfo:
        """Build a leased subscription anew, from a point of the log if one is given."""
        head = SubscriptionReset(topic, subscription)
        if start is not None:
            set_start(head, start)
        return await self._broker.request(head, repeat=False)

    async def delete(self, topic: str, subscription: str) -> None:
        """Delete a leased subscription; the topic keeps its messages."""
        await self._broker.request(SubscriptionDelete(topic, subscription), repeat=False)

    async def list_all(self, topic: str | None) -> list[SubscriptionInfo]:
        """List the leased subscriptions of a topic, or of all topics."""
        answer = await self._broker.request(SubscriptionList(topic or ""))
        return answer.subscriptions

    async def describe(self, topic: str, subscription: str) -> SubscriptionInfo:
        """Describe a leased subscription."""
        return await self._broker.request(SubscriptionDescribe(topic, subscription))


def set_start(head: SubscriptionCreate | SubscriptionReset | WebhookSet, start: Start) -> None:
    """Write the point of the log at which the subscription begins into the request."""
    spot = spot_at(start)
    head.start = spot.kind
    if spot.kind == "time":
        head.start_us = spot.value
    else:
        head.start_offset = spot.value
