"""What a bus has for services and observers: each a group of methods of its own."""

from headrace.client._async.admin.events import AsyncEventFeed
from headrace.client._async.admin.log_levels import AsyncLogLevelAdmin
from headrace.client._async.admin.services import AsyncServices
from headrace.client._async.bus_parts import AsyncBusParts


class AsyncBusObservation(AsyncBusParts):
    """The properties of a bus that lead to services, events and logging levels."""

    @property
    def services(self) -> AsyncServices:
        """Registers this program as a service, and finds others."""
        return AsyncServices(self._registrations)

    @property
    def events(self) -> AsyncEventFeed:
        """Reads the events about the bus itself: topics created, members that come and go, dead letters."""
        return AsyncEventFeed(self, self._broker)  # type: ignore[arg-type]  # every such object is an AsyncBus

    @property
    def logging(self) -> AsyncLogLevelAdmin:
        """Sets how much the broker logs about topics, producers and consumers."""
        return AsyncLogLevelAdmin(self._broker)
