"""What a bus has for services and their operators: each a group of methods of its own."""

from headrace.client._async.admin.log_levels import AsyncLogLevelAdmin
from headrace.client._async.admin.services import AsyncServices
from headrace.client._async.bus_parts import AsyncBusParts


class AsyncBusObservation(AsyncBusParts):
    """The properties of a bus that lead to services and logging levels."""

    @property
    def services(self) -> AsyncServices:
        """Registers this program as a service, and finds others."""
        return AsyncServices(self._registrations)

    @property
    def logging(self) -> AsyncLogLevelAdmin:
        """Sets how much the broker logs about topics, producers and consumers."""
        return AsyncLogLevelAdmin(self._broker)
