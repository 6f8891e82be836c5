"""What a bus has for services and their operators: each a group of methods of its own."""

from headrace.client._sync.admin.log_levels import LogLevelAdmin
from headrace.client._sync.admin.services import Services
from headrace.client._sync.bus_parts import BusParts


class BusObservation(BusParts):
    """The properties of a bus that lead to services and logging levels."""

    @property
    def services(self) -> Services:
        """Registers this program as a service, and finds others."""
        return Services(self._registrations)

    @property
    def logging(self) -> LogLevelAdmin:
        """Sets how much the broker logs about topics, producers and consumers."""
        return LogLevelAdmin(self._broker)
