"""Collects the metrics of the process around a broker: memory, files, disk, the event loop, and connections."""

import os
import resource
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace.model.metric_requests import MetricFamily, MetricSample, counter, gauge
from headrace.runtime.process_info import memory_bytes

if TYPE_CHECKING:
    from headrace.broker.metrics import Collector, CollectorSteps
    from headrace.gateways.gateway import Gateway
    from headrace.runtime.broker_ticker import BrokerTicker


def process_collector(
    gateways: "Sequence[Gateway]", ticker: "BrokerTicker", directory: str | None, connections_max: int
) -> "Collector":
    """A collector of the process; `directory` has the data, None if it is in memory."""

    def collect(tenant: str | None, _: int) -> "CollectorSteps":
        if tenant is not None:
            return  # the process belongs to all tenants
        samples = [
            MetricSample(gateway.statistics().connections, {"gateway": gateway_name(gateway)}) for gateway in gateways
        ]
        yield MetricFamily("connections", "gauge", "Open connections.", samples)
        yield gauge("connections_max", "The most connections of all gateways.", connections_max)
        yield from _process_families()
        if directory is not None:
            yield from _disk_families(directory)
        text = "How late the event loop ran a timer, at most, since the last scrape."
        yield gauge("loop_lag_seconds", text, ticker.take_lag_us() / 1e6, "seconds")

    return collect


def gateway_name(gateway: object) -> str:
    """The label of a gateway: its class without `Gateway`, in lower case."""
    return type(gateway).__name__.removesuffix("Gateway").lower()


def _process_families() -> Iterator[MetricFamily]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield counter("cpu_seconds", "Processor time of the process.", used.ru_utime + used.ru_stime, "seconds")
    yield gauge("memory_bytes", "Memory of the process.", memory_bytes(), "bytes")
    files = open_files()
    if files is not None:
        yield gauge("open_files", "Open files and sockets.", files)
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files_max != resource.RLIM_INFINITY:
        yield gauge("open_files_max", "The most files and sockets that the process may open.", files_max)


def open_files() -> int | None:
    """How many files and sockets the process has open; None where the system does not tell."""
    for folder, tell in (("/proc/self/fd", _entries_or_size), ("/dev/fd", _entries)):
        try:
            return tell(folder)
        except OSError:
            continue
    return None


def _entries(folder: str) -> int:
    return len(os.listdir(folder))


def _entries_or_size(folder: str) -> int:
    """Newer kernels tell the number as the size of the folder, which takes no time."""
    return os.stat(folder).st_size or _entries(folder)


def _disk_families(directory: str) -> Iterator[MetricFamily]:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return  # the scrape tells the rest; what happened to the disk is in the log
    yield gauge("disk_free_bytes", "Free space where the data is.", disk.f_bavail * disk.f_frsize, "bytes")
    yield gauge("disk_size_bytes", "Space where the data is.", disk.f_blocks * disk.f_frsize, "bytes")
