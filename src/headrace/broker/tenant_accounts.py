"""What each tenant has, counted whenever it changes, and the checks where something more is made."""

from collections import Counter
from collections.abc import Iterator

from headrace.broker.group_coordinator import GroupCoordinator
from headrace.broker.ports import Session
from headrace.broker.routes import RouteRegistry
from headrace.broker.schedules import ScheduleRunner
from headrace.broker.signal import TakenShare
from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.broker.webhooks import WebhookRegistry
from headrace.model.errors import LimitExceeded, QuotaExceeded, TenantNotFound
from headrace.model.route_requests import RouteDefinition
from headrace.model.system_topics import AUDIT_TOPIC
from headrace.model.tenant import COUNTED, TenantQuotas, TenantUsage
from headrace.model.topic import DEFAULT_TENANT, tenant_of


class TenantAccounts:
    """Counts what tenants have, and refuses what a quota, or a tenant's share of a limit of the broker, does not allow.

    It listens to the registries: before something is made they tell it, and a refusal is raised through them.
    """

    def __init__(self, defaults: TenantQuotas, maximums: dict[str, int]) -> None:
        self._counts: dict[str, Counter[str]] = {}
        """By tenant, then by what is counted."""
        self._totals: Counter[str] = Counter()
        self._connected: Counter[str] = Counter()
        """Sessions by whose turns they have."""
        self._partitions: dict[int, int] = {}
        """The number of partitions that was counted last, by topic id."""
        self.limits: dict[str, TenantQuotas] = {}
        """The quotas that count, by tenant."""
        self.defaults = defaults
        """The quotas of tenants other than the default one that have none of their own."""
        self.maximums = maximums
        """The broker's own limits, which all tenants share."""
        self.shared = False
        """Whether no tenant may take more of the broker's limits than it leaves free."""
        self.known: frozenset[str] | None = None
        """The tenants that can be used; None: all."""
        self.deleting: set[str] = set()
        """Tenants that are being deleted: to sessions they do not exist."""

    # What there is.

    def tenants(self) -> Iterator[str]:
        """The tenants that have something; being connected to is not enough to exist."""
        has = [(tenant, sum(counts.values()) - counts["connections"]) for tenant, counts in self._counts.items()]
        return iter([tenant for tenant, count in has if count])

    def count(self, tenant: str, what: str) -> int:
        """How many of something a tenant has."""
        counts = self._counts.get(tenant)
        return 0 if counts is None else counts[what]

    def usage(self, tenant: str) -> TenantUsage:
        """What a tenant has; what has to be measured is 0."""
        return TenantUsage(**{what: self.count(tenant, what) for what in COUNTED})

    def limits_of(self, tenant: str) -> TenantQuotas:
        """The quotas that count for a tenant."""
        found = self.limits.get(tenant)
        if found is not None:
            return found
        return TenantQuotas() if tenant == DEFAULT_TENANT else self.defaults

    @property
    def are_several_connected(self) -> bool:
        """Whether sessions of more than one tenant are open."""
        return len(self._connected) > 1

    # Checks.

    def check_exists(self, tenant: str) -> None:
        """Refuse a tenant that cannot be used; one that is being deleted is refused as one that never was."""
        unknown = self.known is not None and tenant not in self.known
        if tenant in self.deleting or unknown:
            raise TenantNotFound(
                f"there is no tenant {tenant} that you may use: check the name, or let an administrator make it "
                f"(headrace tenant create {tenant})"
            )

    def check(self, tenant: str, what: str, more: int = 1) -> None:
        """Refuse what would be more than a tenant may have."""
        self.check_exists(tenant)
        used = self.count(tenant, what)
        limit = getattr(self.limits_of(tenant), what)
        if limit is not None and used + more > limit:
            raise QuotaExceeded.of(tenant, what, limit, used, more)
        maximum = self.maximums.get(what)
        if maximum is not None:
            self.check_share(TakenShare(tenant, what, used, self._totals[what], maximum, more))

    def check_share(self, taken: TakenShare) -> None:
        """Refuse what would leave others less of a limit of the broker than the tenant has of it itself.

        So one tenant alone gets half of it, two get a third each, and there is always some left for another.
        """
        if self.shared and taken.used + taken.more > taken.maximum - taken.total:
            raise LimitExceeded(
                f"the tenant {taken.tenant} has {taken.used} {taken.what.replace('_', ' ')}, and no more is its share "
                "of what the broker has for all tenants: remove some, or let an administrator raise the broker's limit",
                usage=taken.used,
            )

    # Counting.

    def add(self, tenant: str, what: str, more: int) -> None:
        """Count something that was made, or with a negative number what is gone."""
        if not more:
            return
        counts = self._counts.get(tenant)
        if counts is None:
            counts = self._counts[tenant] = Counter()
        counts[what] += more
        self._totals[what] += more
        if more < 0 and not any(counts.values()):
            del self._counts[tenant]

    def connected(self, session: Session, more: int) -> None:
        """Count a session that was opened, or with -1 one that is closed."""
        if session.is_counted:
            self.add(session.tenant, "connections", more)
        if not session.is_internal:
            self._connected[session.turn_key] += more
            if not self._connected[session.turn_key]:
                del self._connected[session.turn_key]

    def follow(
        self,
        topics: TopicRegistry,
        groups: GroupCoordinator,
        transactions: Transactions,
        subscriptions: SubscriptionRegistry,
        schedules: ScheduleRunner,
        routes: RouteRegistry,
        webhooks: WebhookRegistry,
    ) -> None:
        """Count what there is, and follow what changes."""
        self._topics = topics
        for topic in topics:
            self._topic_changed(topic, 0)
        for name in groups.names():
            self.add(tenant_of(name), "groups", 1)
        for name, size_bytes in transactions.opened():
            self._transaction_changed(name, 1, size_bytes)
        for subscription in subscriptions:
            self.add(subscription.topic.name.tenant, "subscriptions", 1)
        for name in schedules.names():
            self.add(tenant_of(name), "schedules", 1)
        for name in routes.names():
            self.add(tenant_of(name), "routes", 1)
        for stored in webhooks.stored():
            self.add(tenant_of(stored.definition.name), "webhooks", 1)
        topics.making.connect(self._check_topic)
        topics.changed.connect(self._topic_changed)
        groups.making.connect(lambda name: self.check(tenant_of(name), "groups"))
        groups.group_changed.connect(lambda name, action, _: self._changed(tenant_of(name), "groups", action))
        transactions.making.connect(self._check_transaction)
        transactions.changed.connect(self._transaction_changed)
        subscriptions.making.connect(lambda topic: self.check(topic.name.tenant, "subscriptions"))
        subscriptions.structure_changed.connect(self._subscription_changed)
        schedules.making.connect(lambda name: self.check(tenant_of(name), "schedules"))
        schedules.changed.connect(lambda name, action, _: self._changed(tenant_of(name), "schedules", action))
        routes.making.connect(lambda name: self.check(tenant_of(name), "routes"))
        routes.changed.connect(self._route_changed)
        webhooks.making.connect(lambda name: self.check(tenant_of(name), "webhooks"))
        webhooks.told.connect(lambda name, action, _, __: self._changed(tenant_of(name), "webhooks", action))

    def _check_topic(self, tenant: str, new: int, partitions: int) -> None:
        if new:
            self.check(tenant, "topics")
        self.check(tenant, "partitions", partitions)

    def _topic_changed(self, topic: Topic, _: int) -> None:
        if topic.name.topic == AUDIT_TOPIC:  # nobody's choice: it takes nothing of a quota
            return
        before = self._partitions.pop(topic.id, None)
        tenant, there = topic.name.tenant, topic.id in self._topics.by_id
        if there:
            self._partitions[topic.id] = topic.settings.partitions
        after = self._partitions.get(topic.id, 0)
        self.add(tenant, "partitions", after - (before or 0))
        self.add(tenant, "topics", there - (before is not None))

    def _check_transaction(self, name: str, new: int, size_bytes: int) -> None:
        if new:
            self.check(tenant_of(name), "transactions")
        if size_bytes:
            self.check(tenant_of(name), "staged_bytes", size_bytes)

    def _transaction_changed(self, name: str, more: int, more_bytes: int) -> None:
        self.add(tenant_of(name), "transactions", more)
        self.add(tenant_of(name), "staged_bytes", more_bytes)

    def _subscription_changed(self, subscription: Subscription, action: str) -> None:
        self._changed(subscription.topic.name.tenant, "subscriptions", action)

    def _route_changed(self, route: RouteDefinition, action: str, _: int) -> None:
        self._changed(tenant_of(route.name), "routes", action)

    def _changed(self, tenant: str, what: str, action: str) -> None:
        if action in ("created", "deleted"):
            self.add(tenant, what, 1 if action == "created" else -1)
