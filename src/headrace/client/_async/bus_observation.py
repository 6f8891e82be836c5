"""What a bus has for services, observers and receivers: each a group of methods of its own."""

from headrace.client._async.admin.audit import AsyncAudit
from headrace.client._async.admin.auth import AsyncAuth
from headrace.client._async.admin.cluster import AsyncClusterAdmin
from headrace.client._async.admin.events import AsyncEventFeed
from headrace.client._async.admin.log_levels import AsyncLogLevelAdmin
from headrace.client._async.admin.services import AsyncServices
from headrace.client._async.admin.tenants import AsyncTenants
from headrace.client._async.admin.webhooks import AsyncWebhooks
from headrace.client._async.bus_parts import AsyncBusParts


class AsyncBusObservation(AsyncBusParts):
    """The properties of a bus that lead to services, events, security, tenants, clusters, log levels and webhooks."""

    @property
    def services(self) -> AsyncServices:
        """Registers this program as a service, and finds others."""
        return AsyncServices(self, self._registrations)

    @property
    def auth(self) -> AsyncAuth:
        """Administers security: roles, bindings and tokens."""
        return AsyncAuth(self, self._broker)

    @property
    def audit(self) -> AsyncAudit:
        """Reads and verifies the audit trail: administrative actions, refused attempts and logins."""
        return AsyncAudit(self, self._broker)  # type: ignore[arg-type]  # every such object is an AsyncBus

    @property
    def tenants(self) -> AsyncTenants:
        """Tenants, which share the broker without seeing each other: create, describe, alter and delete them."""
        return AsyncTenants(self, self._broker)

    @property
    def cluster(self) -> AsyncClusterAdmin:
        """The cluster that the broker is part of: describes it, drains nodes and hands its shard over."""
        return AsyncClusterAdmin(self, self._broker)

    @property
    def events(self) -> AsyncEventFeed:
        """Reads the events about the bus itself: topics created, members that come and go, dead letters."""
        return AsyncEventFeed(self, self._broker)  # type: ignore[arg-type]  # every such object is an AsyncBus

    @property
    def logging(self) -> AsyncLogLevelAdmin:
        """Sets how much the broker logs about topics, producers and consumers."""
        return AsyncLogLevelAdmin(self, self._broker)

    @property
    def webhooks(self) -> AsyncWebhooks:
        """Webhooks, which send the messages of topics to URLs: define, alter, test, pause and delete them."""
        return AsyncWebhooks(self, self._broker)
