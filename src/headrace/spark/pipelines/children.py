"""The drivers of a host as processes: started by this supervisor, or found running after another was killed."""

import os
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from headrace.spark.pipelines.logs import last_lines
from headrace.spark.pipelines.paths import Folder
from headrace.spark.pipelines.processes import is_alive, send, start_mark
from headrace.spark.pipelines.records import FAILED, FINISHED, STARTING, STOPPED, PipelineRecord
from headrace.spark.pipelines.supervisor_decisions import Seen

_WORDS_MAX = 500


class Drivers:
    """The drivers of one host."""

    def __init__(self, home: Path, address: str) -> None:
        self._home = home
        self._address = address
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._refused: dict[str, str] = {}

    def folder(self, name: str) -> Folder:
        """Where a pipeline's files are."""
        return Folder(self._home / name)

    def see(self, record: PipelineRecord) -> Seen:
        """What there is of a pipeline's driver."""
        name, folder = record.name, self.folder(record.name)
        child, driver = self._children.get(name), folder.driver()
        if driver is not None and not driver.supervised:
            driver = None  # somebody runs it by hand, and that is no business of ours; but it has the lock
        if child is not None and child.poll() is None:
            phase = driver.phase if driver is not None and driver.pid == child.pid else STARTING
            return Seen(True, child.pid, start_mark(child.pid) or "", phase)
        if driver is not None and is_alive(driver.pid, driver.started):
            return Seen(True, driver.pid, driver.started, driver.phase)
        if record.pid and is_alive(record.pid, record.started):
            return Seen(True, record.pid, record.started, STARTING)
        ended = driver.phase if driver is not None and driver.phase in (FINISHED, STOPPED, FAILED) else FAILED
        error = self._refused.get(name) or (driver.error if driver is not None else "") or self._last_words(name)
        if ended == STOPPED:
            error = "the driver was asked to end, by a signal that the supervisor did not send"
        permanent = driver is not None and driver.permanent
        return Seen(phase=ended, error=error, locked=folder.locked(), permanent=permanent)

    def start(self, record: PipelineRecord) -> None:
        """Start a driver; if that does not work, the next look tells why."""
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

    def terminate(self, seen: Seen) -> None:
        """Ask a driver to end."""
        send(seen.pid, seen.started, signal.SIGTERM)

    def kill(self, seen: Seen) -> None:
        """End a driver, and the Java process that it has started, at once."""
        if is_alive(seen.pid, seen.started) and os.getpgid(seen.pid) == seen.pid:
            os.killpg(seen.pid, signal.SIGKILL)
        send(seen.pid, seen.started, signal.SIGKILL)

    def _last_words(self, name: str) -> str:
        """What is known of a driver that has not said why it ended."""
        child = self._children.get(name)
        if child is None or child.returncode is None:
            return ""
        code = child.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        line, _ = last_lines(self.folder(name).log, 1)
        said = line.decode("utf-8", "replace").strip()[:_WORDS_MAX]
        return f"the driver {how}" + (f"; the log ends with: {said}" if said else "")


def command(record: PipelineRecord, address: str, folder: Folder) -> list[str]:
    """How the driver of a pipeline is started."""
    wanted = record.definition
    # -P: the file's own folder is on the path, as if Python ran the file, and not the current directory.
    words = [wanted.python, "-P", "-m", "headrace", "pipeline", "run", wanted.file, "--name", record.name]
    words += ["--connect", address, "--supervised", str(folder.path), "--master", wanted.master]
    for name, value in wanted.conf.items():
        words += ["--conf", f"{name}={value}"]
    if wanted.checkpoints:
        words += ["--checkpoints", wanted.checkpoints]
    return words + ["--once"] * wanted.once + ["--quick"] * wanted.quick
