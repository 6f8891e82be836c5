"""Waits until a pipeline has started or stopped, and shows its state meanwhile."""

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.cli.spark.pipeline_status import folder_of, state_text
from headrace.cli.terminal.histogram import span_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import EXIT_ERROR, Output, ProgressLine

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.spark.pipelines.paths import Folder
    from headrace.spark.pipelines.records import PipelineRecord
    from headrace.spark.pipelines.registry import Registry

_LOOK_EVERY_S = 0.2


def has_begun(record: "PipelineRecord") -> bool:
    """Return whether a pipeline runs, or has failed to start."""
    from headrace.spark.pipelines.processes import is_alive
    from headrace.spark.pipelines.records import FAILED, FINISHED, RUNNING, WAITING
    from headrace.spark.pipelines.supervisor import host_name

    if record.state_generation != record.generation:
        return False
    if record.state == RUNNING:
        # After a reboot the broker still has the state that a supervisor wrote before.
        return record.definition.host != host_name() or is_alive(record.pid, record.started)
    return record.state in (FINISHED, FAILED) or (record.state == WAITING and bool(record.error))


def has_ended(record: "PipelineRecord") -> bool:
    """Return whether a pipeline has stopped completely."""
    return record.settled


def wait_until(
    until: "Callable[[PipelineRecord], bool]",
    given: argparse.Namespace,
    out: Output,
    interrupts: Interrupts,
    bus: "Bus",
    registry: "Registry",
    name: str,
) -> int:
    """Wait until a pipeline reaches the state, or --wait expires, and print its state."""
    from headrace.spark.pipelines.records import FAILED, RUNNING, WAITING

    begun_s = time.monotonic()
    record = registry.get(name)
    folder = folder_of(given, bus, record)
    with ProgressLine(name, shown=not out.json) as progress:
        while not until(record) and time.monotonic() < begun_s + given.wait:
            waited = span_text(round((time.monotonic() - begun_s) * 1e6))
            progress.say(f"{name}: {_doing(record, folder)} ({waited})")
            interrupts.check()
            registry.look(wait=_LOOK_EVERY_S)
            record = registry.get(name)
    out.tell(record.whole(), f"{name}: {state_text(record)}")
    if not given.wait:
        return 0
    if not until(record):
        what = "start" if record.wanted == RUNNING else "end"
        out.note(
            f"{name} did not {what} within {span_text(round(given.wait * 1e6))}: {_doing(record, folder)}. "
            f"The supervisor keeps trying; headrace pipeline status {name} and headrace pipeline logs {name} show "
            "more, and --wait TIME waits longer"
        )
        return EXIT_ERROR
    return EXIT_ERROR if record.state in (FAILED, WAITING) and record.error else 0


def _doing(record: "PipelineRecord", folder: "Folder") -> str:
    """Return a pipeline's current activity: from its driver if that runs on this host, else from the broker."""
    driver = folder.driver()
    if driver is not None and driver.pid == record.pid and driver.doing:
        return driver.doing
    return record.state if record.state_generation == record.generation else "waiting for the supervisor"
