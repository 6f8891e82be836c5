"""The group `cluster`: what replication to a shared store costs, and how long a failover takes."""

from benchmarks.cluster_failover import failover_benchmarks
from benchmarks.cluster_publish import publish_benchmarks
from headrace.bench.measure import Benchmark


def benchmarks() -> list[Benchmark]:
    """All benchmarks of the group."""
    return [*publish_benchmarks(), *failover_benchmarks()]
