"""Supervised pipelines: start, stop, restart and remove them, and run the supervisor."""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.connection import broker_url, confirmed, connected
from headrace.cli.spark.pipeline_run import name_of, reset_checkpoints, with_spark
from headrace.cli.spark.pipeline_status import folder_of, found, home
from headrace.cli.spark.pipeline_wait import has_begun, has_ended, wait_until
from headrace.cli.terminal.interrupts import Interrupted, Interrupts
from headrace.cli.terminal.log_format import log_to_stderr
from headrace.cli.terminal.output import EXIT_ERROR, Output, ProgressLine
from headrace.model.errors import InvalidArgument

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.spark.pipelines.paths import Folder
    from headrace.spark.pipelines.records import PipelineRecord, PipelineSettings
    from headrace.spark.pipelines.registry import Registry

_LOOK_EVERY_S = 0.2
_JAVA_S = 30.0
_BROKER_S = 3.0
"""How long a supervisor waits for the broker's answer before it checks its drivers again."""
_SUPERVISE = ("-P", "-m", "headrace", "pipeline", "supervise")
_ENVIRONMENT = (
    "HADOOP_CONF_DIR",
    "HEADRACE_SPARK_PYTHON",
    "JAVA_HOME",
    "PATH",
    "PYSPARK_PYTHON",
    "PYTHONPATH",
    "SPARK_CONF_DIR",
    "SPARK_HOME",
    "SPARK_LOCAL_IP",
    "YARN_CONF_DIR",
)


def start(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Start a supervised pipeline."""
    return with_spark(out, _start, given, out, interrupts)


def _start(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    file = given.what if os.path.splitext(given.what)[1].lower() in (".py", ".sql") else None
    if file is None and os.path.exists(given.what):
        raise InvalidArgument(f"{given.what} is neither a Python file (.py) nor an SQL file (.sql)")
    with connected(given, out) as bus:
        registry = _registry(bus)
        registry.look()
        name = given.what if file is None else name_of(given, file)
        wanted = (
            _as_before(given, registry.get(name).definition)
            if file is None
            else _definition(given, file, str(home(given, bus)))
        )
        if given.reset_checkpoint and not _reset(given, out, bus, registry, name, wanted):
            return EXIT_ERROR
        record = registry.change(name, lambda before: _started(name, before, wanted, out))
        assert record is not None
        _see_to_supervisor(given, out, bus, record)
        return wait_until(has_begun, given, out, interrupts, bus, registry, name)


def _reset(
    given: argparse.Namespace, out: Output, bus: "Bus", registry: "Registry", name: str, wanted: "PipelineSettings"
) -> bool:
    """Rename the checkpoints of a stopped pipeline, if the user confirms."""
    from headrace.spark.errors import PipelineInUse
    from headrace.spark.pipelines.paths import Folder
    from headrace.spark.pipelines.supervisor import host_name

    record, folder = registry.records.get(name), Folder(Path(wanted.home or home(given, bus)) / name)
    if wanted.host != host_name():
        raise InvalidArgument(f"the checkpoints of {name} are on {wanted.host}: reset them there")
    if (record is not None and not record.settled) or not _is_free(folder, out):
        raise PipelineInUse(f"{name} is wanted: first, headrace pipeline stop {name}")
    lock = folder.lock()
    try:
        return reset_checkpoints(given, out, folder, wanted.file, wanted.checkpoints)
    finally:
        lock.release()


def stop(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Stop a pipeline."""
    from headrace.spark.pipelines.records import FAILED, STOPPED

    def change(record: "PipelineRecord | None") -> "PipelineRecord | None":
        if record is None or (record.wanted == STOPPED and record.state != FAILED):
            return None
        # A pipeline that failed permanently has no driver: it is stopped as soon as the broker stores that.
        over = record.state == FAILED and record.settled
        return _with(record, wanted=STOPPED, state=STOPPED if over else record.state)

    with connected(given, out) as bus:
        registry = found(bus, given.name)
        record = registry.change(given.name, change)
        assert record is not None
        if not record.settled:
            _see_to_supervisor(given, out, bus, record)  # otherwise no supervisor would stop it
        return wait_until(has_ended, given, out, interrupts, bus, registry, given.name)


def restart(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Stop a pipeline's driver and start a new one."""
    return with_spark(out, _restart, given, out, interrupts)


def _restart(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    with connected(given, out) as bus:
        registry = found(bus, given.name)
        wanted = registry.get(given.name).definition
        definition = msgspec.structs.replace(wanted, sha256=_checked(wanted.file, wanted.master))
        record = registry.change(given.name, lambda each: each and _begun_anew(each, definition))
        assert record is not None
        _see_to_supervisor(given, out, bus, record)
        return wait_until(has_begun, given, out, interrupts, bus, registry, given.name)


def remove(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Remove a pipeline, if the user confirms."""
    from headrace.spark.errors import PipelineInUse

    with connected(given, out) as bus:
        registry = found(bus, given.name)
        record = registry.get(given.name)
        folder = folder_of(given, bus, record)
        if not record.settled or not _is_free(folder, out):
            raise PipelineInUse(f"{given.name} is {record.state}: first, headrace pipeline stop {given.name}")
        what = f"Forget pipeline {given.name}" + (f", and delete {folder.path}" if given.files else "")
        if not confirmed(given, f"{what}?"):
            out.note("nothing was removed")
            return EXIT_ERROR
        registry.remove(given.name)
        folder.forget_record()
        if given.files:
            shutil.rmtree(folder.path, ignore_errors=True)
    left = "" if given.files or not folder.path.exists() else f"; its checkpoints and log stay in {folder.path}"
    out.tell({"removed": given.name, "files_removed": given.files}, f"removed pipeline {given.name}{left}")
    return 0


def _is_free(folder: "Folder", out: Output) -> bool:
    """Return whether the driver's processes have ended, after waiting a while for Java to exit."""
    end = time.monotonic() + _JAVA_S
    if not folder.locked():
        return True
    with ProgressLine("waiting until the Java process of the last driver has ended", shown=not out.json):
        while folder.locked():
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_EVERY_S)
    return True


def supervise(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Run the supervisor of this host."""
    from headrace.client._sync.connecting import connect
    from headrace.spark.pipelines.supervisor import Supervisor

    log_to_stderr("info", "text")
    with interrupts.held(once=True), _patient_bus(given, interrupts, connect) as bus:
        _registry(bus)
        supervisor = Supervisor(
            bus, home(given, bus), broker_url(given), stay=given.stay, should_stop=lambda: _is_asked(interrupts)
        )
        if not supervisor.run():
            out.note("another supervisor runs on this host")
    return 0


def _patient_bus(given: argparse.Namespace, interrupts: Interrupts, connect: Callable[..., "Bus"]) -> "Bus":
    """Connect as soon as the broker is reachable."""
    from headrace.model.errors import ConnectionFailed

    while True:
        try:
            return connect(broker_url(given), name="pipeline supervisor", timeout=min(given.timeout, _BROKER_S))
        except ConnectionFailed:
            interrupts.check()
            time.sleep(_LOOK_EVERY_S)


def _is_asked(interrupts: Interrupts) -> bool:
    try:
        interrupts.check()
    except Interrupted:
        return True
    return False


def _registry(bus: "Bus") -> "Registry":
    from headrace.spark.pipelines.registry import Registry

    registry = Registry(bus)
    registry.prepare()
    return registry


def _checked(file: str, master: str) -> str:
    """Check the pipelines of a file, and return its hash."""
    from headrace.spark.errors import SessionNeeded
    from headrace.spark.pipelines.loader import load, settings_of
    from headrace.spark.pipelines.sessions import checked_master, need_spark

    need_spark(checked_master(master))
    with suppress(SessionNeeded):  # then only the driver can check it
        settings_of(load(file))
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _definition(given: argparse.Namespace, file: str, place: str) -> "PipelineSettings":
    from headrace.spark.pipelines.records import PipelineSettings
    from headrace.spark.pipelines.supervisor import host_name

    master = given.master or "local[*]"
    return PipelineSettings(
        file=os.path.abspath(file),
        sha256=_checked(file, master),
        master=master,
        host=host_name(),
        home=place,
        conf=dict(given.conf),
        checkpoints=_place(given.checkpoints or ""),
        once=given.once,
        quick=given.quick,
        restart=given.restart or "on-failure",
        restarts_max=given.max_restarts,
        python=sys.executable,
        directory=os.getcwd(),
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )


def _as_before(given: argparse.Namespace, before: "PipelineSettings") -> "PipelineSettings":
    """Return the stored definition of a pipeline, with the options that were given."""
    changes: dict[str, Any] = {"conf": {**before.conf, **dict(given.conf)}}
    for name, value in (("master", given.master), ("restart", given.restart), ("restarts_max", given.max_restarts)):
        if value is not None:
            changes[name] = value
    if given.checkpoints:
        changes["checkpoints"] = _place(given.checkpoints)
    changes |= {name: True for name in ("once", "quick") if getattr(given, name)}
    changes["sha256"] = _checked(before.file, changes.get("master", before.master))
    return msgspec.structs.replace(before, **changes)


def _place(checkpoints: str) -> str:
    return os.path.abspath(checkpoints) if checkpoints and "://" not in checkpoints else checkpoints


def _started(
    name: str, before: "PipelineRecord | None", definition: "PipelineSettings", out: Output
) -> "PipelineRecord | None":
    """Return a pipeline's record after a request to run it."""
    from headrace.spark.errors import PipelineInUse
    from headrace.spark.pipelines.records import RUNNING, PipelineRecord

    if before is None:
        return PipelineRecord(name=name, definition=definition, changed_us=_now_us())
    if before.wanted == RUNNING and not before.settled:
        if _is_abandoned(before):
            return _begun_anew(before, definition)
        where = {"python": "", "directory": "", "environment": {}}
        same = [msgspec.structs.replace(each, **where) for each in (before.definition, definition)]
        if same[0] != same[1]:
            raise PipelineInUse(
                f"{name} is wanted already, in another way: headrace pipeline stop {name} first, or for a file that "
                f"has changed, headrace pipeline restart {name}"
            )
        out.note(f"{name} is wanted already")
        return None
    return _begun_anew(before, definition)


def _is_abandoned(record: "PipelineRecord") -> bool:
    """Return whether this host runs neither the driver nor a supervisor, as after a reboot."""
    from headrace.spark.pipelines.processes import is_alive
    from headrace.spark.pipelines.supervisor import host_name, supervised

    if record.definition.host != host_name() or not record.definition.home or not record.pid:
        return False
    return not is_alive(record.pid, record.started) and not supervised(Path(record.definition.home))


def _begun_anew(before: "PipelineRecord", definition: "PipelineSettings") -> "PipelineRecord":
    from headrace.spark.pipelines.records import RUNNING

    return _with(before, definition=definition, wanted=RUNNING, generation=before.generation + 1, next_start_us=0)


def _with(record: "PipelineRecord", **changes: Any) -> "PipelineRecord":
    return msgspec.structs.replace(record, changed_us=_now_us(), **changes)


def _now_us() -> int:
    return time.time_ns() // 1000


def _see_to_supervisor(given: argparse.Namespace, out: Output, bus: "Bus", record: "PipelineRecord") -> None:
    """Start a supervisor if this host has none; it reads its pipelines from the broker."""
    from headrace.spark.pipelines.supervisor import host_name, supervised

    if record.definition.host != host_name():
        out.note(f"{record.name} belongs to {record.definition.host}, whose supervisor sees to it")
        return
    place = home(given, bus)
    if supervised(Path(record.definition.home or place)):
        return
    if not record.belongs_to(host_name(), str(place)):
        out.note(f"the supervisor of {record.definition.home} is another user's, and must be started by that user")
        return
    place.mkdir(parents=True, exist_ok=True)
    with (place / "supervisor.log").open("ab") as log:
        # The shell exits at once: the supervisor is reparented, and outlives this command.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, *_SUPERVISE, "--connect", broker_url(given)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )
