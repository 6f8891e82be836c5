"""`headrace pipeline list`, `status` and `logs`: pipelines, their states and their drivers' logs."""

import argparse
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.connection import broker_url, connected
from headrace.cli.message_formats import time_text
from headrace.cli.spark.pipeline_display import COLUMNS, row_of
from headrace.cli.terminal.colours import paint_state
from headrace.cli.terminal.histogram import span_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, counted, table
from headrace.model.errors import InvalidArgument

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.spark.pipelines.paths import Folder
    from headrace.spark.pipelines.progress import QueryProgress
    from headrace.spark.pipelines.records import PipelineRecord
    from headrace.spark.pipelines.registry import Registry


def found(bus: "Bus", name: str = "") -> "Registry":
    """Return the broker's records of pipelines, including the named one."""
    from headrace.spark.pipelines.registry import Registry

    registry = Registry(bus)
    if registry.exists():
        registry.look()
    if name:
        registry.get(name)
    return registry


def list_pipelines(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print pipelines, one per line."""
    with connected(given, out) as bus:
        registry = found(bus)
        records = [registry.records[name] for name in sorted(registry.records)]
        latest = registry.progress(*(() if given.names else registry.records))
    if out.json:
        for each in records:
            out.tell({**each.whole(), "progress": _plain(latest[each.name])})
        return 0
    if given.names:
        out.tell({}, *(each.name for each in records))
    elif not records:
        out.note("there are no pipelines")
    else:
        head = ("pipeline", "state", "restarts", "queries", "rows/s in", "rows/s out", "lag", "host")
        out.tell({}, *table(head, *(_row(each, latest[each.name]) for each in records)))
    return 0


def status(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the status of a pipeline."""
    with connected(given, out) as bus:
        registry = found(bus, given.name)
        record, latest = registry.get(given.name), registry.progress(given.name)[given.name]
        content = _whereabouts(given, bus, record)
    lines = _description(record, latest, content)
    out.tell({**record.whole(), **content, "progress": _plain(latest)}, *lines)
    return 0


def logs(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Print a driver's log."""
    from headrace.spark.pipelines.logs import follow, last_lines
    from headrace.spark.pipelines.supervisor import host_name

    with connected(given, out) as bus:
        record = found(bus, given.name).get(given.name)
        if record.definition.host != host_name():
            raise InvalidArgument(f"the log of {given.name} is on {record.definition.host}: ask there")
        path = folder_of(given, bus, record).log
    text, position = last_lines(path, given.lines)
    _print_log(out, text)
    if given.follow:
        for new in follow(path, position):
            interrupts.check()
            _print_log(out, new)
            if out.closed:
                break
    elif not text:
        out.note(f"the log, {path}, is empty")
    return 0


def state_text(record: "PipelineRecord") -> str:
    """Format the state of a pipeline for people."""
    from headrace.spark.pipelines.records import FAILED, RUNNING, WAITING

    text = record.state
    if record.pid:
        text += f", process {record.pid} on {record.definition.host}"
    if record.state == WAITING and record.next_start_us:
        text += f", next attempt at {time_text(record.next_start_us)[:19]}Z"
    if record.wanted != RUNNING and record.state == RUNNING:
        text += ", to be stopped"
    if record.error and record.state in (FAILED, WAITING):  # in other states the error is an old one
        text += f": {record.error}"
    return text


def _print_log(out: Output, text: bytes) -> None:
    if out.json:
        for line in text.decode("utf-8", "replace").splitlines():
            out.tell({"line": line})
    else:
        out.add(text)
        out.flush()


def home(given: argparse.Namespace, bus: "Bus") -> Path:
    """Return the base directory of pipelines started on this host."""
    from headrace.spark.pipelines.paths import home_of

    return home_of(bus.info(), broker_url(given), os.environ)


def folder_of(given: argparse.Namespace, bus: "Bus", record: "PipelineRecord") -> "Folder":
    """Return the directory of a pipeline, on its host."""
    from headrace.spark.pipelines.paths import Folder

    return Folder(Path(record.definition.home or home(given, bus)) / record.name)


def _row(record: "PipelineRecord", latest: "dict[str, QueryProgress]") -> tuple[object, ...]:
    from headrace.spark.pipelines.records import RUNNING

    fresh = list(latest.values()) if record.state == RUNNING else []
    lags = [each.lag for each in fresh if each.lag is not None]
    outs = [each.rows_out_per_s for each in fresh if each.rows_out_per_s is not None]
    return (
        record.name,
        paint_state(record.state),
        record.restarts,
        len(fresh) or "-",
        round(sum(each.rows_in_per_s for each in fresh)) if fresh else "-",
        round(sum(outs)) if outs else "-",
        sum(lags) if lags else "-",
        record.definition.host,
    )


def _whereabouts(given: argparse.Namespace, bus: "Bus", record: "PipelineRecord") -> dict[str, Any]:
    """Return the details known only on the host of a pipeline; empty elsewhere."""
    from headrace.spark.pipelines.supervisor import host_name, supervised

    if record.definition.host != host_name():
        return {"log": None, "checkpoints": record.definition.checkpoints or None, "supervised": None, "ui": None}
    folder = folder_of(given, bus, record)
    driver = folder.driver()
    return {
        "log": str(folder.log),
        "checkpoints": record.definition.checkpoints or str(folder.checkpoints),
        "supervised": supervised(folder.path.parent),
        "ui": (driver.ui if driver is not None and record.pid == driver.pid else "") or None,
        "file_changed": _has_changed(record),
    }


def _has_changed(record: "PipelineRecord") -> bool:
    """Return whether the file has changed since the pipeline was started."""
    try:
        content = Path(record.definition.file).read_bytes()
    except OSError:
        return True
    return hashlib.sha256(content).hexdigest() != record.definition.sha256


def _description(
    record: "PipelineRecord", latest: "dict[str, QueryProgress]", content: dict[str, Any]
) -> Iterator[str]:
    wanted = record.definition
    changed = ", which has changed since: headrace pipeline restart takes it" if content.get("file_changed") else ""
    yield f"pipeline     {record.name}"
    yield f"state        {paint_state(state_text(record))}"
    yield f"wanted       {record.wanted}, restart {wanted.restart}"
    yield f"file         {wanted.file}{changed}"
    yield f"master       {wanted.master}"
    if record.started_us and record.pid:
        yield f"since        {time_text(record.started_us)[:19]}Z, {counted(record.restarts, 'restart')}"
    if record.error and record.error_us:
        ago = span_text(max(time.time_ns() // 1000 - record.error_us, 0))
        yield f"last error   {ago} ago: {record.error}"
    for name in ("log", "checkpoints", "ui"):
        if content.get(name):
            yield f"{name:12} {content[name]}"
    if content.get("supervised") is False and not record.settled:
        yield f"supervisor   none is at work: headrace pipeline start {record.name}, or headrace pipeline supervise"
    if latest:
        yield ""
        yield from table(COLUMNS, *(row_of(each) for _, each in sorted(latest.items())))


def _plain(latest: "dict[str, QueryProgress]") -> list[dict[str, Any]]:
    return [msgspec.to_builtins(each) for _, each in sorted(latest.items())]
