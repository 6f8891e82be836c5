"""The registry of metrics: components add collectors, and a scrape runs all of them in slices."""

import logging
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.slices import TimedSteps
from headrace.broker.turns import Turns
from headrace.model.metric_requests import MetricFamily, MetricSample, MetricsFound, gauge
from headrace.model.request import Resource
from headrace.security.access import SessionAccess

logger = logging.getLogger("headrace.broker")

CollectorSteps: TypeAlias = Generator[MetricFamily | None, int, None]
"""Yields families, and None after each slice of about a millisecond; `yield` returns the broker's time."""
Collector: TypeAlias = Callable[[str | None, int], CollectorSteps]
"""Takes the tenant whose metrics are wanted, None for the whole broker, and the broker's time."""

OTHERS = "(others)"
"""The label of those that have no line of their own."""
_NAMED_RESOURCES = tuple(one.value for one in Resource)
"""Labels whose texts are names of things."""
_TOPIC, _SUBSCRIPTION = Resource.TOPIC.value, Resource.SUBSCRIPTION.value


class MetricsRegistry:
    """All collectors of a broker and what surrounds it. Nothing is collected unless somebody asks."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._collectors: list[Collector] = []

    def add(self, collector: Collector) -> None:
        """Add a collector. Its labels must be bounded, and its slices short."""
        self._collectors.append(collector)

    def collect(self, session: Session, now_us: int) -> PendingAnswer[MetricsFound]:
        """Run all collectors, in slices."""
        return self._turns.in_slices(self._steps(session.counted_tenant, session.access, now_us))

    def _steps(self, tenant: str | None, access: SessionAccess | None, now_us: int) -> TimedSteps:
        families: list[MetricFamily] = []
        failed = 0
        for collector in list(self._collectors):
            steps = collector(tenant, now_us)
            try:
                item = next(steps, None)
                while True:
                    if item is not None and access is not None:
                        item.samples = [sample for sample in item.samples if _is_seen(access, sample)]
                    if item is not None:
                        families.append(item if tenant is None else _as_seen_by(tenant, item))
                    now_us = yield
                    item = steps.send(now_us)
            except StopIteration:
                pass
            except Exception:
                failed += 1
                logger.exception("metrics collector failed  collector=%s", collector)
        families.append(
            gauge("metrics_failed_collectors", "Collectors that failed in this scrape; see the log.", failed)
        )
        return MetricsFound(families)


def _is_seen(access: SessionAccess, sample: MetricSample) -> bool:
    """Whether a session may see all that a sample is about; sums of others that have no name of their own, always."""
    named = {label: name for label in _NAMED_RESOURCES if (name := sample.labels.get(label, OTHERS)) != OTHERS}
    if _SUBSCRIPTION in named and _TOPIC in named:
        names = named.pop(_TOPIC), named.pop(_SUBSCRIPTION)
        if not access.describes(_SUBSCRIPTION, *names):
            return False
    return all(access.describes(resource, name) for resource, name in named.items())


def _as_seen_by(tenant: str, family: MetricFamily) -> MetricFamily:
    """A family whose labels have names as sessions of the tenant say them."""
    for sample in family.samples:
        sample.labels = {label: text.removeprefix(f"{tenant}/") for label, text in sample.labels.items()}
    return family


class RequestHandler:
    """What handles the requests of one class, and how many there were."""

    __slots__ = ("asked", "handle", "refused")

    def __init__(self, handle: Callable[..., Any]) -> None:
        self.handle = handle
        self.asked = 0
        self.refused = 0
        """Those that were refused at once; others may still fail after they were accepted."""
