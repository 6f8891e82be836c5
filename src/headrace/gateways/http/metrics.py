"""What `GET /metrics` tells, as OpenMetrics. Labels are bounded: names beyond a number are counted together."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from headrace.gateways.http.call import Call, Reply
from headrace.gateways.http.route import Route
from headrace.model.leasing import SubscriptionInfo, SubscriptionList
from headrace.model.requests import BrokerInfo, GroupList, GroupSummary, Info

METRICS_TYPE = "application/openmetrics-text"
_CONTENT_TYPE = b"application/openmetrics-text; version=1.0.0; charset=utf-8"
_NAMES_MAX = 200
"""Groups, and subscriptions, that have lines of their own; the others are counted together."""
_OTHERS = "(others)"

T = TypeVar("T")
Labels = dict[str, str]
Sample = tuple[str, Labels, float]


class RequestCounts:
    """How many requests were answered, by path of the route, method and status."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def add(self, path: str, method: str, status: int) -> None:
        """Count a request."""
        self._counts[path, method if path != "unknown" else "", status] += 1

    def samples(self) -> list[Sample]:
        """The counts as samples."""
        return [
            ("_total", {"path": path, "method": method, "status": str(status)}, count)
            for (path, method, status), count in sorted(self._counts.items())
        ]


class MetricsText:
    """Collects families of metrics."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, explanation: str, samples: Iterable[Sample], unit: str = "") -> None:
        """Add a family: its samples have a suffix of the name, labels and a value."""
        name = f"headrace_{name}"
        self._lines.append(f"# TYPE {name} {kind}")
        if unit:
            self._lines.append(f"# UNIT {name} {unit}")
        self._lines.append(f"# HELP {name} {_escaped(explanation)}")
        for suffix, labels, value in samples:
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            self._lines.append(f"{name}{suffix}{'{' + inside + '}' if inside else ''} {_number(value)}")

    def gauge(self, name: str, explanation: str, value: float, unit: str = "") -> None:
        """Add a family with one value."""
        self.add(name, "gauge", explanation, [("", {}, value)], unit)

    def encoded(self) -> bytes:
        """The text."""
        return "\n".join([*self._lines, "# EOF", ""]).encode()


async def tell_metrics(call: Call) -> Reply:
    """Answer the metrics of the broker, as the session's tenant sees it."""
    info = await call.ask(Info())
    groups = (await call.ask(GroupList())).groups
    subscriptions = (await call.ask(SubscriptionList())).subscriptions
    text = MetricsText()
    gateway = call.gateway
    text.add("http_requests", "counter", "Requests answered.", gateway.application.counts.samples())
    text.gauge("http_requests_in_progress", "Requests that wait for their answers.", gateway.requests)
    text.gauge("http_connections", "Open connections of HTTP.", len(gateway.state.connections))
    text.gauge("http_streams", "Streams of messages that are open.", gateway.streams)
    text.gauge("http_received_bytes", "Bodies that have arrived in part.", gateway.received_bytes, "bytes")
    text.gauge("loop_lag_seconds", "How late the event loop ran a timer.", gateway.loop_lag_s, "seconds")
    _add_broker(text, info)
    _add_groups(text, groups)
    _add_subscriptions(text, subscriptions)
    return Reply(200, text.encoded(), _CONTENT_TYPE)


def _add_broker(text: MetricsText, info: BrokerInfo) -> None:
    text.add("broker", "info", "The broker.", [("_info", {"version": info.version, "broker_id": info.broker_id}, 1)])
    text.gauge("start_time_seconds", "When the broker was started.", info.started_us / 1e6, "seconds")
    text.gauge("sessions", "Sessions of all gateways.", info.connections)
    text.gauge("topics", "Topics.", info.topics)
    text.gauge("partitions_open", "Partitions that are open.", info.partitions_open)
    text.gauge("groups", "Groups.", info.groups)
    text.gauge("subscriptions", "Leased subscriptions.", info.subscriptions)
    text.gauge("schedules", "Schedules.", info.schedules)
    text.gauge("transactions_open", "Transactions that are open.", info.transactions_open)
    text.gauge("memory_bytes", "Memory of the process.", info.memory_bytes, "bytes")


def _add_groups(text: MetricsText, groups: Sequence[GroupSummary]) -> None:
    lags: Counter[str] = Counter()
    members: Counter[str] = Counter()
    for name, group in _named((group.group, group) for group in groups):
        lags[name] += group.lag
        members[name] += group.members
    text.add("group_lag", "gauge", "Messages that a group has yet to read.", _labelled(lags, "group"))
    text.add("group_members", "gauge", "Members of a group.", _labelled(members, "group"))


def _add_subscriptions(text: MetricsText, subscriptions: Sequence[SubscriptionInfo]) -> None:
    states: Counter[tuple[str, str, str]] = Counter()
    events: Counter[tuple[str, str, str]] = Counter()
    late: Counter[int] = Counter()
    early = beyond = 0
    for name, one in _named((f"{one.topic}/{one.subscription}", one) for one in subscriptions):
        topic, subscription = (one.topic, one.subscription) if name != _OTHERS else (_OTHERS, _OTHERS)
        for state in ("waiting", "ready", "leased", "dead"):
            states[topic, subscription, state] += getattr(one, state)
        for event in ("delivered", "acked", "released", "expired_leases", "dropped"):
            events[topic, subscription, event] += getattr(one, event)
        early += one.timing.early
        beyond += sum(one.timing.counts[len(one.timing.bounds_us) :])
        for bound_us, count in zip(one.timing.bounds_us, one.timing.counts, strict=False):
            late[bound_us] += count
    names = ("topic", "subscription")
    text.add(
        "subscription_messages", "gauge", "Messages that a leased subscription has not settled, by state.",
        [("", dict(zip((*names, "state"), key, strict=True)), count) for key, count in sorted(states.items())],
    )  # fmt: skip
    text.add(
        "subscription_events", "counter", "What happened to messages since the broker was started.",
        [("_total", dict(zip((*names, "event"), key, strict=True)), count) for key, count in sorted(events.items())],
    )  # fmt: skip
    buckets, total = [], early
    for bound_us, count in sorted(late.items()):
        total += count
        buckets.append(("_bucket", {"le": f"{bound_us / 1e6:g}"}, float(total)))
    buckets.append(("_bucket", {"le": "+Inf"}, float(total + beyond)))
    text.add("delivery_late_seconds", "histogram", "How late messages with a due time were handed over.", buckets)


def _named(items: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield the items by name; those beyond the most that may be named get a common name."""
    for number, (name, item) in enumerate(sorted(items, key=lambda pair: pair[0])):
        yield (name if number < _NAMES_MAX else _OTHERS), item


def _labelled(counts: Counter[str], label: str) -> list[Sample]:
    return [("", {label: name}, count) for name, count in counts.items()]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


METRICS_ROUTES = [
    Route(
        "GET", "/metrics", tell_metrics, "Tell the metrics, in the format of OpenMetrics", "broker",
        answer=str, answer_types=(METRICS_TYPE,),
    ),
]  # fmt: skip
"""The route of the metrics."""
