"""What `GET /metrics` tells, as OpenMetrics: the broker's metrics, and those of this gateway."""

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from headrace.gateways.http.call import Call, Reply
from headrace.gateways.http.route import Route
from headrace.model.metric_requests import MetricFamily, MetricSample, MetricsCollect, gauge

if TYPE_CHECKING:
    from headrace.broker.metrics import CollectorSteps
    from headrace.gateways.http.gateway import HttpGateway

METRICS_TYPE = "application/openmetrics-text"
_CONTENT_TYPE = b"application/openmetrics-text; version=1.0.0; charset=utf-8"
_PREFIX = "headrace_"
_SLICE_SAMPLES = 500


class RequestCounts:
    """How many requests were answered, by path of the route, method and status."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def add(self, path: str, method: str, status: int) -> None:
        """Count a request."""
        self._counts[path, method if path != "unknown" else "", status] += 1

    def samples(self) -> list[MetricSample]:
        """The counts as samples."""
        return [
            MetricSample(count, {"path": path, "method": method, "status": str(status)}, "_total")
            for (path, method, status), count in sorted(self._counts.items())
        ]


def collect_http(gateway: "HttpGateway", tenant: str | None) -> "CollectorSteps":
    """Collect the metrics of this gateway."""
    if tenant is not None:
        return  # it serves all tenants
    yield MetricFamily("http_requests", "counter", "Requests answered.", gateway.application.counts.samples())
    yield gauge("http_requests_in_progress", "Requests that wait for their answers.", gateway.requests)
    yield gauge("http_connections", "Open connections of HTTP.", len(gateway.state.connections))
    yield gauge("http_streams", "Streams of messages that are open.", gateway.streams)
    yield gauge("http_received_bytes", "Bodies that have arrived in part.", gateway.received_bytes, "bytes")


async def tell_metrics(call: Call) -> Reply:
    """Answer the metrics of the broker, as the session's tenant sees it."""
    found = await call.ask(MetricsCollect())
    parts: list[str] = []
    samples = 0
    for family in found.families:
        parts.append(family_text(family))
        samples += len(family.samples)
        if samples >= _SLICE_SAMPLES:
            samples = 0
            await asyncio.sleep(0)
    parts.append("# EOF\n")
    return Reply(200, "".join(parts).encode(), _CONTENT_TYPE)


def family_text(family: MetricFamily) -> str:
    """A family as OpenMetrics writes it.

    >>> print(family_text(gauge("topics", "Topics.", 3)), end="")
    # TYPE headrace_topics gauge
    # HELP headrace_topics Topics.
    headrace_topics 3
    """
    name = _PREFIX + family.name
    lines = [f"# TYPE {name} {family.kind}"]
    if family.unit:
        lines.append(f"# UNIT {name} {family.unit}")
    lines.append(f"# HELP {name} {_escaped(family.help)}")
    for sample in family.samples:
        labels = ",".join(f'{label}="{_escaped(text)}"' for label, text in sample.labels.items())
        lines.append(f"{name}{sample.suffix}{'{' + labels + '}' if labels else ''} {_number(sample.value)}")
    lines.append("")
    return "\n".join(lines)


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
