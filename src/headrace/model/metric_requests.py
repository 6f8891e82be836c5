"""Metrics: families of samples as OpenMetrics has them, and the request that collects them."""

import msgspec

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare


class MetricSample(WireStruct):
    """One number."""

    value: float
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    suffix: str = ""
    """Behind the family's name: of a counter `_total`, of a histogram `_bucket`, of an info `_info`."""


class MetricFamily(WireStruct):
    """Samples of one kind."""

    name: str
    """Without the prefix `headrace_`."""
    kind: str
    """`counter`, `gauge`, `histogram` or `info`."""
    help: str
    """What is measured."""
    samples: list[MetricSample] = msgspec.field(default_factory=list)
    unit: str = ""
    """The last part of the name, such as `bytes`."""


class MetricsFound(Answer):
    """The answer to MetricsCollect."""

    families: list[MetricFamily]


@declare(Kind.METRICS_COLLECT, Permission(Verb.DESCRIBE, Resource.BROKER), awaits_commit=False)
class MetricsCollect(Request[MetricsFound]):
    """Collect the broker's metrics: of all tenants in the default one, else of what the session's tenant has."""


def counter(name: str, help: str, value: float, unit: str = "") -> MetricFamily:
    """A family with one number that only rises."""
    return MetricFamily(name, "counter", help, [MetricSample(value, suffix="_total")], unit)


def gauge(name: str, help: str, value: float, unit: str = "") -> MetricFamily:
    """A family with one number that rises and falls."""
    return MetricFamily(name, "gauge", help, [MetricSample(value)], unit)
