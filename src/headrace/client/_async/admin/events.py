"""Events about the bus itself: what was created, changed and removed, who came and went."""

import logging
from typing import TYPE_CHECKING

from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.times import Start
from headrace.model.bus_event import BusEvent, EventsRecord, decode_event
from headrace.model.errors import InvalidArgument
from headrace.model.system_topics import EVENTS_TOPIC

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus
    from headrace.client._async.consumer.subscription import AsyncSubscription

logger = logging.getLogger("headrace.client")

_LIMIT_MAX = 100_000


class AsyncEventFeed:
    """Reads the events about the bus itself; `bus.events`.

    The first use makes the broker record the tenant's events in the topic `headrace.events`, beginning with the newest
    ones that it has in memory.

    Example:
        >>> info = await bus.create_topic("orders")
        >>> [(event.subject, event.name) for event in await bus.events.history()][:1]
        [('$events.topic.created', 'orders')]
    """

    def __init__(self, bus: "AsyncBus", broker: AsyncReconnectingConnection) -> None:
        self._bus = bus
        self._broker = broker

    async def record(self) -> None:
        """Make the broker record the events of this tenant from now on; without effect if it does.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> await bus.events.record()
        """
        await self._broker.request(EventsRecord())

    async def history(self, limit: int = 1000) -> list[BusEvent]:
        """Return the newest recorded events.

        Parameters:
            limit: how many at most, up to 100,000.

        Returns:
            The events, the oldest first.

        Raises:
            InvalidArgument: if the limit is wrong.
            Timeout: if the broker does not answer in time.

        Example:
            >>> info = await bus.create_topic("orders")
            >>> (await bus.events.history())[0].details["settings"]["partitions"]
            1
        """
        if not 0 < limit <= _LIMIT_MAX:
            raise InvalidArgument(f"limit is 1 to {_LIMIT_MAX}, not {limit}")
        await self.record()
        end = (await self._bus.offsets(EVENTS_TOPIC, at="latest"))[0]
        first = (await self._bus.offsets(EVENTS_TOPIC, at="earliest"))[0]
        offset, events = max(first, end - limit), []
        while offset < end:
            batches = await self._bus.fetch(EVENTS_TOPIC, 0, offset)
            if not batches:
                break
            for batch in batches:
                for at, value in enumerate(batch.columns().values, batch.base_offset):
                    if offset <= at < end and value is not None:
                        events += _decoded(value, at)
                offset = max(offset, batch.base_offset + batch.span)
        return events

    async def follow(self, start: Start = "latest", *, timeout: float | None = None) -> "AsyncSubscription":
        """Receive events as they happen.

        Parameters:
            start: where to start: `earliest`, `latest`, a datetime, or an offset.
            timeout: end the iteration after so many seconds without an event; by default never.

        Returns:
            A subscription, for use in `with`: the value of each message is a BusEvent.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> async with await bus.events.follow("earliest", timeout=10) as events:
            ...     info = await bus.create_topic("orders")
            ...     async for message in events:
            ...         if message.value.name == "orders":
            ...             break
            >>> message.value.action
            'created'
        """
        await self.record()
        return self._bus.subscribe(
            EVENTS_TOPIC, start=start, deserializer=decode_event, on_error="skip", timeout=timeout
        )


def _decoded(value: bytes, offset: int) -> list[BusEvent]:
    """The event of a message; none if it is no event, as of a topic that others have written to."""
    try:
        return [decode_event(value)]
    except InvalidArgument as error:
        logger.warning("skipped: %s  topic=%s offset=%s", error, EVENTS_TOPIC, offset)
        return []
