"""Tenants of a broker: creates, lists, describes, alters and deletes them."""

from collections.abc import Mapping

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.model.tenant_requests import (
    TenantAlter,
    TenantCreate,
    TenantDelete,
    TenantDescribe,
    TenantInfo,
    TenantList,
    TenantSummary,
    TenantUsageDescribe,
    TenantUsageFound,
)

TenantSummaries = list[TenantSummary]


class Tenants:
    """Manages tenants, which share a broker without seeing each other. It is `bus.tenants`.

    A connection of the default tenant manages all of them; one of another tenant can describe its own.

    Example:
        >>> info = bus.tenants.create("acme", description="A customer", quotas={"topics": 100})
        >>> (bus.tenants.describe("acme")).limits.topics
        100
    """

    def __init__(self, bus: object, broker: ReconnectingConnection) -> None:
        self._bus = bus  # it closes its connections when nobody holds it
        self._broker = broker

    def create(
        self, tenant: str, *, description: str = "", quotas: Mapping[str, int] | None = None, exist_ok: bool = False
    ) -> TenantInfo:
        """Create a tenant.

        Parameters:
            tenant: its name.
            description: one line about it.
            quotas: the most that it may use, by name: `topics`, `partitions`, `subscriptions`, `groups`,
                `connections`, `transactions`, `staged_bytes`, `schedules`, `routes`, `webhooks`, `stored_bytes`,
                `pending_messages`; and per second `messages_in`, `bytes_in`, `messages_out`, `bytes_out`. The
                broker's setting `tenant_quotas` counts for those that are not given.
            exist_ok: accept a tenant of that name that is there already, whatever it is like.

        Returns:
            The tenant.

        Raises:
            TenantExists: if there is a tenant of that name.
            InvalidArgument: if the name or a quota is wrong.
            Forbidden: if the connection is one of another tenant than the default one.

        Example:
            >>> info = bus.tenants.create("acme", quotas={"topics": 100, "bytes_in": 10_000_000})
            >>> info.usage.topics
            0
        """
        request = TenantCreate(tenant, description, dict(quotas or {}), exist_ok)
        return self._broker.request(request, repeat=exist_ok)

    def list(self) -> TenantSummaries:
        """List the tenants by name: those that were created, and while security is off those that have something.

        Returns:
            The tenants, with the numbers of their topics and connections.

        Raises:
            Forbidden: if the connection is one of another tenant than the default one.

        Example:
            >>> info = bus.tenants.create("acme")
            >>> [one.tenant for one in bus.tenants.list()]
            ['acme', 'default']
        """
        found: TenantSummaries = []
        after = ""
        while True:
            page = self._broker.request(TenantList(after))
            found += page.tenants
            after = page.next
            if not after:
                return found

    def describe(self, tenant: str | None = None) -> TenantInfo:
        """Describe a tenant: its quotas, and what it uses.

        Parameters:
            tenant: its name; by default the connection's own tenant.

        Returns:
            The tenant. `quotas` has its own, `limits` those that count, with the broker's defaults.

        Raises:
            TenantNotFound: if there is no such tenant, or the connection may not see it.

        Example:
            >>> (bus.tenants.describe()).tenant
            'default'
        """
        return self._broker.request(TenantDescribe(tenant or ""))

    def usage(self, tenant: str | None = None) -> TenantUsageFound:
        """Tell what a tenant uses.

        Parameters:
            tenant: its name; by default the connection's own tenant.

        Returns:
            What it uses, its limits, and how long it was made to wait by its rates.

        Raises:
            TenantNotFound: if there is no such tenant, or the connection may not see it.

        Example:
            >>> info = bus.create_topic("orders", partitions=4)
            >>> (bus.tenants.usage()).usage.partitions
            4
        """
        return self._broker.request(TenantUsageDescribe(tenant or ""))

    def alter(
        self, tenant: str, *, description: str | None = None, quotas: Mapping[str, int | None] | None = None
    ) -> TenantInfo:
        """Change the description or quotas of a tenant; sessions follow at once. What there is beyond a quota stays.

        Parameters:
            tenant: its name.
            description: one line about it; by default it stays.
            quotas: quotas to change, by name; None removes one. Others stay.

        Returns:
            The tenant.

        Raises:
            TenantNotFound: if there is no such tenant.
            InvalidArgument: if a quota is wrong.
            Forbidden: if the connection is one of another tenant than the default one.

        Example:
            >>> info = bus.tenants.create("acme", quotas={"topics": 100, "groups": 5})
            >>> (bus.tenants.alter("acme", quotas={"topics": 200, "groups": None})).quotas.topics
            200
        """
        return self._broker.request(TenantAlter(tenant, description, dict(quotas or {})))

    def delete(self, tenant: str, *, cascade: bool = False) -> None:
        """Delete a tenant; returns when nothing is left of it.

        Parameters:
            tenant: its name.
            cascade: end its connections, and delete its topics with their messages, groups, subscriptions, schedules,
                routes and transactions. A deletion that was begun goes on, also after a crash of the broker.

        Raises:
            TenantNotFound: if there is no such tenant.
            TenantNotEmpty: if it has something, and `cascade` is not given.
            InvalidArgument: if it is the default tenant.
            Forbidden: if the connection is one of another tenant than the default one.

        Example:
            >>> info = bus.tenants.create("acme")
            >>> bus.tenants.delete("acme")
        """
        self._broker.request(TenantDelete(tenant, cascade), repeat=False)
