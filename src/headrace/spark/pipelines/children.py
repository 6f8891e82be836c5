"""The driver processes of a host: started by this supervisor, or left running by a killed one."""

import os
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from headrace.spark.pipelines.logs import last_lines
from headrace.spark.pipelines.paths import Folder
from headrace.spark.pipelines.processes import is_alive, send, start_mark
from headrace.spark.pipelines.records import FAILED, FINISHED, STARTING, STOPPED, PipelineRecord
from headrace.spark.pipelines.supervisor_decisions import ObservedDriver

_LOG_LINE_CHARS_MAX = 500


class Drivers:
    """The drivers of one host."""

    def __init__(self, home: Path, address: str) -> None:
        self._home = home
        self._address = address
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._refused: dict[str, str] = {}

    def folder(self, name: str) -> Folder:
        """Return a pipeline's directory."""
        return Folder(self._home / name)

    def observe(self, record: PipelineRecord) -> ObservedDriver:
        """Return the state of a pipeline's driver process."""
        name, folder = record.name, self.folder(record.name)
        child, driver = self._children.get(name), folder.driver()
        if driver is not None and not driver.supervised:
            driver = None  # a user runs it in the foreground; not supervised, but it holds the lock
        if child is not None and child.poll() is None:
            phase = driver.phase if driver is not None and driver.pid == child.pid else STARTING
            return ObservedDriver(True, child.pid, start_mark(child.pid) or "", phase)
        if driver is not None and is_alive(driver.pid, driver.started):
            return ObservedDriver(True, driver.pid, driver.started, driver.phase)
        if record.pid and is_alive(record.pid, record.started):
            return ObservedDriver(True, record.pid, record.started, STARTING)
        ended = driver.phase if driver is not None and driver.phase in (FINISHED, STOPPED, FAILED) else FAILED
        error = self._refused.get(name) or (driver.error if driver is not None else "") or self._exit_text(name)
        if ended == STOPPED:
            error = "the driver was asked to end, by a signal that the supervisor did not send"
        permanent = driver is not None and driver.permanent
        return ObservedDriver(phase=ended, error=error, locked=folder.locked(), permanent=permanent)

    def start(self, record: PipelineRecord) -> None:
        """Start a driver; if that fails, the next observation has the error."""
        name, folder = record.name, self.folder(record.name)
        folder.make()
        folder.forget_driver()
        self._refused.pop(name, None)
        fd = os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            begun = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            os.write(fd, f"--- {begun} the supervisor starts {name}, restarts so far: {record.restarts}\n".encode())
            self._children[name] = subprocess.Popen(
                command(record, self._address, folder),
                cwd=record.definition.directory or "/",
                env={**os.environ, **record.definition.environment},
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                start_new_session=True,
            )
        except OSError as error:
            self._children.pop(name, None)
            self._refused[name] = f"the driver could not be started: {error}"
        finally:
            os.close(fd)

    def terminate(self, observed: ObservedDriver) -> None:
        """Send SIGTERM to a driver."""
        send(observed.pid, observed.started, signal.SIGTERM)

    def kill(self, observed: ObservedDriver) -> None:
        """Kill a driver and its Java process."""
        if is_alive(observed.pid, observed.started) and os.getpgid(observed.pid) == observed.pid:
            os.killpg(observed.pid, signal.SIGKILL)
        send(observed.pid, observed.started, signal.SIGKILL)

    def _exit_text(self, name: str) -> str:
        """Return how a driver exited, with the last line of its log."""
        child = self._children.get(name)
        if child is None or child.returncode is None:
            return ""
        code = child.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        line, _ = last_lines(self.folder(name).log, 1)
        said = line.decode("utf-8", "replace").strip()[:_LOG_LINE_CHARS_MAX]
        return f"the driver {how}" + (f"; the log ends with: {said}" if said else "")


def command(record: PipelineRecord, address: str, folder: Folder) -> list[str]:
    """Return the command line of a pipeline's driver."""
    wanted = record.definition
    # -P keeps the working directory off the path; the driver adds the file's folder, as Python does for a script.
    words = [wanted.python, "-P", "-m", "headrace", "pipeline", "run", wanted.file, "--name", record.name]
    words += ["--connect", address, "--supervised", str(folder.path), "--master", wanted.master]
    for name, value in wanted.conf.items():
        words += ["--conf", f"{name}={value}"]
    if wanted.checkpoints:
        words += ["--checkpoints", wanted.checkpoints]
    return words + ["--once"] * wanted.once + ["--quick"] * wanted.quick
