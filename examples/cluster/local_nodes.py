"""The nodes of the example: `headrace serve` processes of one cluster, which are killed and started again."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import headrace
from headrace.errors import HeadraceError
from local_postgres import HOST, free_port, interrupted_later

CLUSTER = "example"
_READY_S = 60.0


class LocalNodes:
    """Several nodes on this machine, each with its own directory, port and log file."""

    def __init__(self, directory: Path, store: str, count: int) -> None:
        self._directory = directory
        self._store = store
        self._ports = {f"node-{number}": free_port() for number in range(1, count + 1)}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """The address of all nodes, for clients."""
        return "headrace://" + ",".join(f"{HOST}:{port}" for port in self._ports.values())

    def __enter__(self) -> "LocalNodes":
        try:
            for name in self._ports:
                self.start(name)
            self.wait_until_followed()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        with interrupted_later():
            for process in self._running.values():
                process.terminate()
            for process in self._running.values():
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def start(self, name: str) -> None:
        """Start a node, in the directory that it had before."""
        home = self._directory / name
        home.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "headrace", "serve", "--data", str(home / "data"), "--node", name]
        command += ["--host", HOST, "--port", str(self._ports[name]), "--http-address", f"{HOST}:0"]
        command += ["--cluster", CLUSTER, "--store", self._store]
        with (home / "log").open("ab") as log, interrupted_later():
            self._running[name] = subprocess.Popen(
                command, env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """End a node as a power failure does: nothing is written, nobody is told."""
        process = self._running[name]
        process.kill()
        process.wait()
        del self._running[name]

    def wait_until_followed(self) -> None:
        """Wait until one node serves, and all others follow it."""
        deadline = time.monotonic() + _READY_S
        while True:
            for name, process in self._running.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended: {self.log_of(name)}")
            try:
                with headrace.connect(self.url, timeout=5) as bus:
                    roles = [node.role for node in bus.cluster.describe().nodes]
                if roles.count("serving") == 1 and roles.count("following") == len(self._running) - 1:
                    return
            except HeadraceError as error:
                roles = [error.code]
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes are not ready after {_READY_S:g} s: {roles}; logs in {self._directory}")
            time.sleep(0.1)

    def log_of(self, name: str) -> str:
        """The last lines of a node's log."""
        return (self._directory / name / "log").read_text(errors="replace")[-1000:]


def _environment() -> dict[str, str]:
    """The variables of a node: those of this process, but for settings of brokers."""
    return {name: text for name, text in os.environ.items() if not name.startswith("HEADRACE_")}
