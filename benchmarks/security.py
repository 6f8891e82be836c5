"""What tenants and security cost: fairness between tenants, authorisation, and TLS."""

from benchmarks.security_cost import cost_benchmarks
from benchmarks.security_fairness import fairness_benchmarks
from headrace.bench.measure import Benchmark


def benchmarks() -> list[Benchmark]:
    """All benchmarks of the group."""
    return [*fairness_benchmarks(), *cost_benchmarks()]
