"""Collects the metrics of webhooks: messages by outcome, webhooks by state, open circuits, and requests at work."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.broker.metric_collectors import NAMES_MAX
from headrace.broker.metrics import OTHERS
from headrace.model.metric_requests import MetricFamily, MetricSample, gauge
from headrace.model.topic import tenant_of
from headrace.push.delivery_log import DeliveryLog

if TYPE_CHECKING:
    from headrace.broker.metrics import Collector, CollectorSteps
    from headrace.broker.webhooks import WebhookRegistry
    from headrace.push.webhook_worker import WebhookWorker

_TOGETHER = 500
"""Webhooks looked at per slice."""


def webhook_collector(
    registry: "WebhookRegistry", logs: Mapping[str, DeliveryLog], workers: "Mapping[str, WebhookWorker]"
) -> "Collector":
    """A collector of all webhooks; the first of them by name have lines of their own."""

    def collect(tenant: str | None, _: int) -> "CollectorSteps":
        stored = sorted(registry.stored(), key=lambda fact: fact.definition.name)
        chosen = [fact for fact in stored if tenant in (None, tenant_of(fact.definition.name))]
        if not chosen:
            return
        states, outcomes, requests, circuits = Counter[str](), Counter[tuple[str, str]](), 0, 0
        for number, fact in enumerate(chosen, 1):
            name = fact.definition.name
            label = name if number <= NAMES_MAX else OTHERS
            states[fact.state] += 1
            if (log := logs.get(name)) is not None:
                outcomes[label, "delivered"] += log.delivered
                outcomes[label, "failed"] += log.failed
            if (worker := workers.get(name)) is not None:
                requests += worker.in_flight
                circuits += not worker.is_closed_circuit
            if number % _TOGETHER == 0:
                yield None
        by_state = [MetricSample(count, {"state": state}) for state, count in sorted(states.items())]
        yield MetricFamily("webhooks", "gauge", "Webhooks by state.", by_state)
        samples = [
            MetricSample(count, {"webhook": label, "outcome": outcome}, "_total")
            for (label, outcome), count in outcomes.items()
        ]
        yield MetricFamily("webhook_messages", "counter", "Messages that receivers took, or did not take.", samples)
        yield gauge("webhook_requests", "Requests of webhooks that wait for their answers.", requests)
        yield gauge("webhook_circuits_open", "Webhooks whose receivers fail, and get only probes.", circuits)

    return collect
