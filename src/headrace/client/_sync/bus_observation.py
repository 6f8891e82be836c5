"""What a bus has for services and observers: each a group of methods of its own."""

from headrace.client._sync.admin.events import EventFeed
from headrace.client._sync.admin.log_levels import LogLevelAdmin
from headrace.client._sync.admin.services import Services
from headrace.client._sync.bus_parts import BusParts


class BusObservation(BusParts):
    """The properties of a bus that lead to services, events and logging levels."""

    @property
    def services(self) -> Services:
        """Registers this program as a service, and finds others."""
        return Services(self._registrations)

    @property
    def events(self) -> EventFeed:
        """Reads the events about the bus itself: topics created, members that come and go, dead letters."""
        return EventFeed(self, self._broker)  # type: ignore[arg-type]  # every such object is an Bus

    @property
    def logging(self) -> LogLevelAdmin:
        """Sets how much the broker logs about topics, producers and consumers."""
        return LogLevelAdmin(self._broker)
