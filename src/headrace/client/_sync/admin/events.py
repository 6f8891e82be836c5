"""Events about the bus itself: what was created, changed and removed, who came and went."""

import logging
from typing import TYPE_CHECKING

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.times import Start
from headrace.model.bus_event import BusEvent, EventsRecord, decode_event
from headrace.model.errors import InvalidArgument
from headrace.model.system_topics import EVENTS_TOPIC

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.client._sync.consumer.subscription import Subscription

logger = logging.getLogger("headrace.client")

_LIMIT_MAX = 100_000


class EventFeed:
    """Reads the events about the bus itself; `bus.events`.

    The first use makes the broker record the tenant's events in the topic `headrace.events`, beginning with the newest
    ones that it has in memory.

    Example:
        >>> info = bus.create_topic("orders")
        >>> [(event.subject, event.name) for event in bus.events.history()][:1]
        [('$events.topic.created', 'orders')]
    """

    def __init__(self, bus: "Bus", broker: ReconnectingConnection) -> None:
        self._bus = bus
        self._broker = broker

    def record(self) -> None:
        """Make the broker record the events of this tenant from now on; without effect if it does.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> bus.events.record()
        """
        self._broker.request(EventsRecord())

    def history(self, limit: int = 1000) -> list[BusEvent]:
        """Return the newest recorded events.

        Parameters:
            limit: how many at most, up to 100,000.

        Returns:
            The events, the oldest first.

        Raises:
            InvalidArgument: if the limit is wrong.
            Timeout: if the broker does not answer in time.

        Example:
            >>> info = bus.create_topic("orders")
            >>> (bus.events.history())[0].details["settings"]["partitions"]
            1
        """
        if not 0 < limit <= _LIMIT_MAX:
            raise InvalidArgument(f"limit is 1 to {_LIMIT_MAX}, not {limit}")
        self.record()
        end = (self._bus.offsets(EVENTS_TOPIC, at="latest"))[0]
        first = (self._bus.offsets(EVENTS_TOPIC, at="earliest"))[0]
        offset, events = max(first, end - limit), []
        while offset < end:
            batches = self._bus.fetch(EVENTS_TOPIC, 0, offset)
            if not batches:
                break
            for batch in batches:
                for at, value in enumerate(batch.columns().values, batch.base_offset):
                    if offset <= at < end and value is not None:
                        events += _decoded(value, at)
                offset = max(offset, batch.base_offset + batch.span)
        return events

    def follow(self, start: Start = "latest", *, timeout: float | None = None) -> "Subscription":
        """Receive events as they happen.

        Parameters:
            start: where to start: `earliest`, `latest`, a datetime, or an offset.
            timeout: end the iteration after so many seconds without an event; by default never.

        Returns:
            A subscription, for use in `with`: the value of each message is a BusEvent.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> with bus.events.follow("earliest", timeout=10) as events:
            ...     info = bus.create_topic("orders")
            ...     for message in events:
            ...         if message.value.name == "orders":
            ...             break
            >>> message.value.action
            'created'
        """
        self.record()
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
