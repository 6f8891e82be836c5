"""What a bus has for services, observers and receivers: each a group of methods of its own."""

from headrace.client._sync.admin.audit import Audit
from headrace.client._sync.admin.auth import Auth
from headrace.client._sync.admin.cluster import ClusterAdmin
from headrace.client._sync.admin.events import EventFeed
from headrace.client._sync.admin.log_levels import LogLevelAdmin
from headrace.client._sync.admin.services import Services
from headrace.client._sync.admin.tenants import Tenants
from headrace.client._sync.admin.webhooks import Webhooks
from headrace.client._sync.bus_parts import BusParts


class BusObservation(BusParts):
    """The properties of a bus that lead to services, events, security, tenants, clusters, log levels and webhooks."""

    @property
    def services(self) -> Services:
        """Registers this program as a service, and finds others."""
        return Services(self, self._registrations)

    @property
    def auth(self) -> Auth:
        """Administers security: roles, bindings and tokens."""
        return Auth(self, self._broker)

    @property
    def audit(self) -> Audit:
        """Reads and verifies the audit trail: administrative actions, refused attempts and logins."""
        return Audit(self, self._broker)  # type: ignore[arg-type]  # every such object is an Bus

    @property
    def tenants(self) -> Tenants:
        """Tenants, which share the broker without seeing each other: create, describe, alter and delete them."""
        return Tenants(self, self._broker)

    @property
    def cluster(self) -> ClusterAdmin:
        """The cluster that the broker is part of: describes it, drains nodes and hands its shard over."""
        return ClusterAdmin(self, self._broker)

    @property
    def events(self) -> EventFeed:
        """Reads the events about the bus itself: topics created, members that come and go, dead letters."""
        return EventFeed(self, self._broker)  # type: ignore[arg-type]  # every such object is an Bus

    @property
    def logging(self) -> LogLevelAdmin:
        """Sets how much the broker logs about topics, producers and consumers."""
        return LogLevelAdmin(self, self._broker)

    @property
    def webhooks(self) -> Webhooks:
        """Webhooks, which send the messages of topics to URLs: define, alter, test, pause and delete them."""
        return Webhooks(self, self._broker)
