"""Metrics of tenants: what they have, their quotas, and how long they were made to wait."""

from collections import Counter

from headrace.broker.metric_collectors import NAMES_MAX
from headrace.broker.metrics import OTHERS, CollectorSteps
from headrace.broker.tenant_accounts import TenantAccounts
from headrace.broker.tenant_meters import TenantMeters
from headrace.model.metric_requests import MetricFamily, MetricSample
from headrace.model.tenant import COUNTED, given_quotas

_TOGETHER = 50
"""Tenants that are looked at per slice."""


class TenantCollector:
    """Collects the metrics of the tenants that have something; those beyond a number are added up."""

    def __init__(self, accounts: TenantAccounts, meters: TenantMeters) -> None:
        self._accounts = accounts
        self._meters = meters

    def collect(self, tenant: str | None, _: int) -> CollectorSteps:
        """Yield the families: of one tenant, or of all."""
        accounts = self._accounts
        names = sorted({*accounts.tenants(), *accounts.limits}) if tenant is None else [tenant]
        usage: Counter[tuple[str, str]] = Counter()
        throttled_us: Counter[str] = Counter()
        quotas: list[MetricSample] = []
        for number, name in enumerate(names):
            label = name if number < NAMES_MAX else OTHERS
            for what in COUNTED:
                usage[label, what] += accounts.count(name, what)
            throttled_us[label] += self._meters.throttled_us(name)
            if label is name:
                for what, limit in given_quotas(accounts.limits_of(name)).items():
                    quotas.append(MetricSample(limit, {"tenant": name, "quota": what}))
            if not (number + 1) % _TOGETHER:
                yield None
        samples = [MetricSample(count, {"tenant": name, "resource": what}) for (name, what), count in usage.items()]
        yield MetricFamily("tenant_usage", "gauge", "What a tenant has, by resource.", samples)
        yield MetricFamily("tenant_quota", "gauge", "The quotas that count for a tenant.", quotas)
        waits = [MetricSample(wait_us / 1e6, {"tenant": name}) for name, wait_us in throttled_us.items()]
        text = "How long sessions of a tenant were made to wait by its rates, added up, since they were last idle."
        yield MetricFamily("tenant_throttled_seconds", "gauge", text, waits, "seconds")
