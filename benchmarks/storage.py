"""The group `storage`: the log in its own process, beside a bare file, SQLite and queues from PyPI."""

from benchmarks import storage_peers as peers
from headrace.bench import log_workloads
from headrace.bench.measure import Benchmark, Subject
from headrace.bench.payload import Payload

_LOG_BYTES = (1 << 30) + (128 << 20)
"""Two full segments and a third: at least 1 GiB to recover."""


def benchmarks(
    *, visibility_s: float = 1.0, log_bytes: int = _LOG_BYTES, segment_bytes: int | None = None
) -> list[Benchmark]:
    """All of the group."""
    payload = Payload()
    beside: dict[str, list[Subject]] = {
        "append_written": peers.append_written(payload),
        "append_synced": peers.append_synced(payload),
        "append_single": peers.append_single(payload),
        "read_list": [peers.sqlite_reading(payload)],
        "append_synced_latency": peers.append_synced_latency(payload),
    }
    ours = {
        **log_workloads.benchmarks(payload, visibility_s=visibility_s),
        **log_workloads.more_benchmarks(payload, log_bytes=log_bytes, segment_bytes=segment_bytes),
    }
    return [
        benchmark._replace(subjects=[*benchmark.subjects, *beside.get(name, [])]) for name, benchmark in ours.items()
    ]
