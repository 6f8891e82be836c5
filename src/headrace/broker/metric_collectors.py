"""Collects the metrics of the broker's components. Labels are bounded: names beyond a number are counted together."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import nlargest
from typing import Any, NamedTuple, TypeVar

from headrace.broker.group_coordinator import GroupCoordinator
from headrace.broker.ledger import Ledger
from headrace.broker.metrics import OTHERS, CollectorSteps, MetricsRegistry, RequestHandler
from headrace.broker.ports import Session
from headrace.broker.request_dispatcher import RequestDispatcher
from headrace.broker.routes import RouteRegistry
from headrace.broker.services import ServiceRegistry
from headrace.broker.streams import Readers
from headrace.broker.subscription_admin import SubscriptionAdmin
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.switchboard import Switchboard
from headrace.broker.tenant_names import count_names
from headrace.broker.topics import TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.engines.api import Store
from headrace.model.errors import HeadraceError
from headrace.model.leasing import SubscriptionInfo
from headrace.model.metric_requests import MetricFamily, MetricSample, counter, gauge
from headrace.model.request import Request
from headrace.model.topic import tenant_of

NAMES_MAX = 200
"""Groups, subscriptions, routes and topics that have lines of their own; the others are counted together."""
_PARTITIONS_TOGETHER = 500
_GROUPS_TOGETHER = 10
_STATES = ("waiting", "ready", "leased", "dead")
_EVENTS = ("delivered", "acked", "released", "expired_leases", "dropped")

T = TypeVar("T")


class MeasuredParts(NamedTuple):
    """The components that are measured."""

    store: Store
    ledger: Ledger
    topics: TopicRegistry
    groups: GroupCoordinator
    subscriptions: SubscriptionRegistry
    admin: SubscriptionAdmin
    routes: RouteRegistry
    transactions: Transactions
    readers: Readers
    switchboard: Switchboard
    requests: RequestDispatcher
    services: ServiceRegistry


class BrokerCollector:
    """The collectors of a broker's own components."""

    def __init__(
        self, parts: MeasuredParts, sessions: set[Session], handlers: Mapping[type[Request[Any]], RequestHandler]
    ) -> None:
        self._parts = parts
        self._sessions = sessions
        self._handlers = handlers

    def add_to(self, registry: MetricsRegistry, version: str, broker_id: str, started_us: int) -> None:
        """Add all collectors to a registry."""
        about = {"version": version, "broker_id": broker_id}

        def tell_broker(tenant: str | None, now_us: int) -> CollectorSteps:
            if tenant is not None:
                return  # it is the process's
            yield MetricFamily("broker", "info", "The broker.", [MetricSample(1, about, "_info")])
            yield gauge("start_time_seconds", "When the broker was started.", started_us / 1e6, "seconds")
            yield gauge("uptime_seconds", "How long it runs.", (now_us - started_us) / 1e6, "seconds")

        for collector in (
            tell_broker, self._counts, self._requests, self._topics, self._groups, self._subscriptions, self._routes,
            self._live, self._syncs,
        ):  # fmt: skip
            registry.add(collector)

    def _counts(self, tenant: str | None, _: int) -> CollectorSteps:
        """How many of everything there are."""
        parts, state = self._parts, self._parts.ledger.state
        sessions = sum(1 for one in self._sessions if tenant in (None, one.tenant))
        yield gauge("sessions", "Sessions of all gateways.", sessions)
        yield gauge("groups", "Groups.", count_names(state.groups, tenant))
        yield gauge("schedules", "Schedules.", count_names(state.schedules, tenant))
        yield gauge("routes", "Routes.", count_names(parts.routes.names(), tenant))
        yield gauge("transactions_open", "Transactions that are open.", count_names(parts.transactions, tenant))
        yield gauge("service_instances", "Registered instances of services.", parts.services.count(tenant))
        streams = Counter(
            type(request).__name__ for session, request, _ in parts.readers.opened() if tenant in (None, session.tenant)
        )
        yield gauge("streams", "Streams of messages that are open.", streams["StreamOpen"])
        yield gauge("fetches_waiting", "Fetches that wait for messages.", streams["Fetch"])

    def _requests(self, tenant: str | None, _: int) -> CollectorSteps:
        """Requests by class, of all gateways."""
        if tenant is not None:
            return
        samples = []
        for request, handler in sorted(self._handlers.items(), key=lambda pair: pair[0].__name__):
            if handler.asked:
                labels = {"request": request.__name__}
                accepted = handler.asked - handler.refused
                samples.append(MetricSample(accepted, {**labels, "outcome": "accepted"}, "_total"))
                samples.append(MetricSample(handler.refused, {**labels, "outcome": "refused"}, "_total"))
        yield MetricFamily("requests", "counter", "Requests to the broker, by class, through all gateways.", samples)

    def _topics(self, tenant: str | None, _: int) -> CollectorSteps:
        """Sizes of topics, of those partitions that are open: others were not used since the start."""
        sizes: list[tuple[int, int, str]] = []
        opened = failed = work = 0
        topics = [topic for topic in self._parts.topics if tenant in (None, topic.name.tenant)]
        for topic in topics:
            size_bytes = messages = 0
            failed += bool(topic.failure)
            for active in [] if topic.is_view else list(topic.active_partitions.values()):
                size_bytes += active.partition.size_bytes
                messages += max(active.end_offset - active.partition.first_offset, 0)
                opened += 1
                work += 1
                if not work % _PARTITIONS_TOGETHER:
                    yield None
            sizes.append((size_bytes, messages, str(topic)))
            work += 1
            if not work % _PARTITIONS_TOGETHER:
                yield None
        yield gauge("topics", "Topics.", len(topics))
        yield gauge("topics_failed", "Topics that could not be opened.", failed)
        yield gauge("partitions_open", "Partitions that are open.", opened)
        largest = nlargest(NAMES_MAX, sizes)
        yield None
        by_topic = {name: (size_bytes, messages) for size_bytes, messages, name in largest}
        if len(sizes) > len(largest):
            total_bytes, total_messages = sum(one[0] for one in sizes), sum(one[1] for one in sizes)
            named_bytes, named_messages = sum(one[0] for one in largest), sum(one[1] for one in largest)
            by_topic[OTHERS] = total_bytes - named_bytes, total_messages - named_messages
        help_bytes = f"Stored bytes of the {NAMES_MAX} largest topics, of partitions that are open."
        help_messages = "Messages by offsets, of partitions that are open; with those that compaction removed."
        yield _labelled("topic_bytes", help_bytes, "topic", {name: one[0] for name, one in by_topic.items()}, "bytes")
        yield _labelled("topic_messages", help_messages, "topic", {name: one[1] for name, one in by_topic.items()})

    def _groups(self, tenant: str | None, _: int) -> CollectorSteps:
        """Members and lags of groups."""
        groups, lags, members = self._parts.groups, Counter[str](), Counter[str]()
        names = [name for name in groups.names() if tenant in (None, tenant_of(name))]
        for number, (label, name) in enumerate(_named((name, name) for name in names), 1):
            lags[label] += yield from groups.lag(name)
            members[label] += groups.count_members(name)
            if not number % _GROUPS_TOGETHER:
                yield None
        yield _labelled("group_lag", "Messages that a group has yet to read.", "group", lags)
        yield _labelled("group_members", "Members of a group.", "group", members)

    def _subscriptions(self, tenant: str | None, now_us: int) -> CollectorSteps:
        """Leased subscriptions: messages by state, what happened to them, and how late they were handed over."""
        chosen = [one for one in self._parts.subscriptions if tenant in (None, one.topic.name.tenant)]
        yield gauge("subscriptions", "Leased subscriptions.", len(chosen))
        totals = _SubscriptionTotals()
        for label, one in _named((str(one), one) for one in chosen):
            if self._parts.subscriptions.find(one.topic, one.name) is not one:
                continue  # deleted meanwhile
            try:
                info = yield from self._parts.admin.info(one, now_us)
            except HeadraceError:
                totals.unreadable += 1
                continue
            totals.add(info, is_named=label != OTHERS)
            now_us = yield None
        yield from totals.families()

    def _routes(self, tenant: str | None, _: int) -> CollectorSteps:
        """How far routes are behind, and what they have lost."""
        behind, lost, failing = Counter[str](), Counter[str](), 0
        names = [name for name in self._parts.routes.names() if tenant in (None, tenant_of(name))]
        for number, (label, name) in enumerate(_named((name, name) for name in names), 1):
            info = self._parts.routes.describe(name)
            if info is not None:
                behind[label] += info.behind
                lost[label] += info.lost
                failing += bool(info.error)
            if not number % _GROUPS_TOGETHER:
                yield None
        yield _labelled("route_behind", "Messages that a route has yet to forward.", "route", behind)
        yield _labelled(
            "route_lost", "Messages removed before they were forwarded, since the start.", "route", lost, kind="counter"
        )
        yield gauge("routes_failing", "Routes that cannot forward at the moment.", failing)

    def _live(self, tenant: str | None, _: int) -> CollectorSteps:
        """Subjects, and requests with replies."""
        info = self._parts.requests.total(tenant, self._parts.switchboard.total(tenant))
        yield gauge("live_subscriptions", "Live subscriptions to subjects.", info.subscriptions)
        yield gauge("responders", "Responders that answer requests.", info.responders)
        yield gauge(
            "responder_requests_open", "Requests that a responder has and has not answered.", info.requests_open
        )
        yield gauge("responder_requests_waiting", "Requests that wait for a free responder.", info.requests_waiting)
        yield counter("subject_published", "Messages published to subjects.", info.published)
        yield counter("subject_delivered", "Messages sent to live subscriptions.", info.delivered)
        yield counter("subject_dropped", "Messages not sent to slow live subscriptions.", info.dropped)
        yield counter("responder_requests", "Requests that responders were found for.", info.requests)
        yield counter("responder_timeouts", "Requests that were not answered in time.", info.timeouts)

    def _syncs(self, tenant: str | None, _: int) -> CollectorSteps:
        """What the disk had to do."""
        if tenant is not None:
            return
        syncs = self._parts.store.sync_counts
        yield counter("syncs", "Syncs of logs.", syncs.count)
        yield counter("sync_seconds", "Time that syncs of logs took.", syncs.seconds, "seconds")
        yield counter("synced_bytes", "Bytes that were synced.", syncs.size_bytes, "bytes")


class _SubscriptionTotals:
    """Adds up leased subscriptions."""

    def __init__(self) -> None:
        self._states: Counter[tuple[str, str, str]] = Counter()
        self._events: Counter[tuple[str, str, str]] = Counter()
        self._late: Counter[int] = Counter()
        self._early = self._beyond = 0
        self.unreadable = 0

    def add(self, info: SubscriptionInfo, *, is_named: bool) -> None:
        """Add a subscription, by its own name or among the others."""
        names = (info.topic, info.subscription) if is_named else (OTHERS, OTHERS)
        for state in _STATES:
            self._states[*names, state] += getattr(info, state)
        for event in _EVENTS:
            self._events[*names, event] += getattr(info, event)
        timing = info.timing
        self._early += timing.early
        self._beyond += sum(timing.counts[len(timing.bounds_us) :])
        for bound_us, count in zip(timing.bounds_us, timing.counts, strict=False):
            self._late[bound_us] += count

    def families(self) -> Iterator[MetricFamily]:
        """The families, each in a slice of its own."""
        yield MetricFamily(
            "subscription_messages", "gauge", "Messages that a leased subscription has not settled, by state.",
            _by_subscription(self._states, "state", ""),
        )  # fmt: skip
        yield MetricFamily(
            "subscription_events", "counter", "What happened to messages since the broker was started.",
            _by_subscription(self._events, "event", "_total"),
        )  # fmt: skip
        yield gauge("subscriptions_unreadable", "Leased subscriptions that could not be looked at.", self.unreadable)
        buckets, total = [], self._early
        for bound_us, count in sorted(self._late.items()):
            total += count
            buckets.append(MetricSample(total, {"le": f"{bound_us / 1e6:g}"}, "_bucket"))
        buckets.append(MetricSample(total + self._beyond, {"le": "+Inf"}, "_bucket"))
        text = "How late messages with a due time were handed over."
        yield MetricFamily("delivery_late_seconds", "histogram", text, buckets)


def _by_subscription(counts: Counter[tuple[str, str, str]], last: str, suffix: str) -> list[MetricSample]:
    return [
        MetricSample(count, {"topic": topic, "subscription": subscription, last: one}, suffix)
        for (topic, subscription, one), count in sorted(counts.items())
    ]


def _named(items: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield the items by name; those beyond the most that may be named get a common name."""
    for number, (name, item) in enumerate(sorted(items, key=lambda pair: pair[0])):
        yield (name if number < NAMES_MAX else OTHERS), item


def _labelled(
    name: str, help: str, label: str, numbers: Mapping[str, float], unit: str = "", kind: str = "gauge"
) -> MetricFamily:
    """A family whose samples differ in one label."""
    suffix = "_total" if kind == "counter" else ""
    samples = [MetricSample(number, {label: one}, suffix) for one, number in numbers.items()]
    return MetricFamily(name, kind, help, samples, unit)
