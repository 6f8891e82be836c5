"""`headrace pipeline run`: runs the queries of a file in the foreground, or as a supervisor's child."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.cli.connection import broker_url, confirmed
from headrace.cli.spark.pipeline_display import Display
from headrace.cli.terminal.interrupts import Interrupted, Interrupts
from headrace.cli.terminal.log_format import log_to_stderr
from headrace.cli.terminal.output import EXIT_ERROR, EXIT_USAGE, Output, say

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.spark.pipelines.definition import Definition
    from headrace.spark.pipelines.driver import DriverRegistration, RunRequest
    from headrace.spark.pipelines.paths import DriverProcess, Folder

_PLAIN_EVERY_S = 1.0
_LOGGED_EVERY_S = 10.0
_BROKER_S = 30.0
"""How long a supervised driver waits for the broker, in seconds."""


def run(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Run a pipeline until it ends or a signal stops it."""
    with interrupts.held(once=True):
        return with_spark(out, _supervised if given.supervised else _in_foreground, given, out, interrupts)


def with_spark(out: Output, work: Callable[..., int], *arguments: object) -> int:
    """Call a function that needs Spark; if Spark is not installed, report wrong usage and how to install it."""
    from headrace.spark.errors import SparkMissing

    try:
        return work(*arguments)
    except SparkMissing as error:
        content = {"error": {"code": error.code, "message": str(error), "retryable": False}}
        say(content, f"headrace: {error} [{error.code}]", as_json=out.json)
        return EXIT_USAGE


def name_of(given: argparse.Namespace, file: str) -> str:
    """Return a pipeline's name: the given one, or its file's."""
    from headrace.model.topic import checked_plain_name

    stem = os.path.splitext(os.path.basename(file))[0]
    return checked_plain_name(given.name or re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-"), "pipeline")


def _in_foreground(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    from headrace.spark.pipelines.driver import DriverRegistration

    definitions = _loaded(given)
    with (
        _broker(given, 0.0) as bus,
        DriverRegistration(_folder(given, bus), supervised=False, check=interrupts.check) as registration,
    ):
        if given.reset_checkpoint and not reset_checkpoints(
            given, out, registration.folder, given.file, given.checkpoints or ""
        ):
            return EXIT_ERROR
        return _drive(given, out, interrupts, bus, registration, definitions)


def _supervised(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Run as a supervisor's child: write every error to the file that the supervisor reads."""
    from headrace.spark.pipelines.driver import DriverRegistration
    from headrace.spark.pipelines.paths import Folder

    log_to_stderr("info", "text")
    with DriverRegistration(Folder(given.supervised), supervised=True, check=interrupts.check) as registration:
        definitions = _loaded(given)
        with _broker(given, _BROKER_S) as bus:
            return _drive(given, out, interrupts, bus, registration, definitions)


def reset_checkpoints(given: argparse.Namespace, out: Output, folder: "Folder", file: str, checkpoints: str) -> bool:
    """Rename the checkpoints of a file's queries, if the user confirms; the caller holds the pipeline's lock."""
    from headrace.spark.errors import SessionNeeded
    from headrace.spark.pipelines.checkpoints import set_aside
    from headrace.spark.pipelines.loader import load

    try:
        queries = [definition.name for definition in load(file)]
    except SessionNeeded:  # the last run recorded them
        driver = folder.driver()
        queries = [] if driver is None else driver.queries
    what = (
        f"Have {', '.join(queries)} begin anew? The sources are read again from startingOffsets, and what was written"
    )
    if not confirmed(given, f"{what} is written again."):
        out.note("nothing was reset")
        return False
    for path in set_aside(folder, checkpoints, queries):
        out.note(f"the checkpoint is kept as {path}")
    return True


def _loaded(given: argparse.Namespace) -> "list[Definition] | None":
    from headrace.spark.pipelines.driver import definitions_of
    from headrace.spark.pipelines.sessions import checked_master, need_spark

    need_spark(checked_master(given.master))
    return definitions_of(_order(given))


def _broker(given: argparse.Namespace, wait: float) -> "Bus":
    from headrace.client._sync.connecting import connect

    return connect(broker_url(given), name=f"pipeline {name_of(given, given.file)}", timeout=given.timeout, wait=wait)


def _folder(given: argparse.Namespace, bus: "Bus") -> "Folder":
    from headrace.spark.pipelines.paths import Folder, home_of

    return Folder(home_of(bus.info(), broker_url(given), os.environ) / name_of(given, given.file))


def _drive(
    given: argparse.Namespace,
    out: Output,
    interrupts: Interrupts,
    bus: "Bus",
    registration: "DriverRegistration",
    definitions: "list[Definition] | None",
) -> int:
    from headrace.spark.pipelines.driver import drive, warnings_of
    from headrace.spark.pipelines.registry import Registry

    interrupts.check()
    order = _order(given)
    for warning in warnings_of(order):
        out.note(warning)
    Registry(bus).prepare()
    redrawn = not given.supervised and not out.json and sys.stderr is not None and sys.stderr.isatty()
    display = Display(out, every_s=_LOGGED_EVERY_S if given.supervised else _PLAIN_EVERY_S, redrawn=redrawn)
    asked = _Asked(interrupts, out)

    def tell_started(driver: "DriverProcess") -> None:
        if out.json:
            return
        ui = f", Spark's pages at {driver.ui}" if driver.ui else ""
        out.note(f"{order.name} runs {', '.join(driver.queries)} on {order.master}; process {driver.pid}{ui}")

    with _java_log(registration, redrawn) as log_fd:
        if log_fd is not None:
            out.note(f"starting Spark, whose log is {registration.folder.log}")
        try:
            drive(
                order,
                definitions,
                bus,
                registration,
                on_progress=display.show,
                on_started=tell_started,
                should_stop=asked,
                on_step=out.note if redrawn or given.supervised else lambda _: None,
                log_fd=log_fd,
            )
        finally:
            display.close()
    return 0


class _Asked:
    """Return whether a signal has arrived."""

    def __init__(self, interrupts: Interrupts, out: Output) -> None:
        self._interrupts = interrupts
        self._out = out
        self._told = False

    def __call__(self) -> bool:
        try:
            self._interrupts.check()
        except Interrupted:
            if not self._told:
                self._out.note("each query finishes its current batch")
            self._told = True
            return True
        return False


def _order(given: argparse.Namespace) -> "RunRequest":
    from headrace.spark.pipelines.driver import RunRequest

    return RunRequest(
        name=name_of(given, given.file),
        file=given.file,
        address=broker_url(given),
        master=given.master,
        conf=dict(given.conf),
        checkpoints=given.checkpoints or "",
        once=given.once,
        quick=given.quick,
        supervised=bool(given.supervised),
    )


@contextmanager
def _java_log(registration: "DriverRegistration", wanted: bool) -> Iterator[int | None]:
    """Open the file for Java's log, so that the log does not disturb the redrawn lines."""
    from headrace.spark.pipelines.logs import rotate

    if not wanted:
        yield None
        return
    rotate(registration.folder.log)
    fd = os.open(registration.folder.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)
