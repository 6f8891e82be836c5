"""Nodes of a cluster as real processes, for tests: started, killed, stopped and started again."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from tests.known import ENVIRONMENT

import headrace
from headrace.errors import HeadraceError

CLUSTER = "trading"
SOON_S = 60.0


class ClusterProcesses:
    """Some nodes of one cluster on this machine."""

    def __init__(
        self, directory: Path, store: str, nodes: int = 2, environment: Mapping[str, str] | None = None, *more: str
    ) -> None:
        self.directory = directory
        self.store = store
        self.names = [f"node-{number}" for number in range(1, nodes + 1)]
        self.ports = {name: free_port() for name in self.names}
        self._more = more
        clean = {name: text for name, text in ENVIRONMENT.items() if not name.startswith("HEADRACE_")}
        self.environment = {**clean, "XDG_CONFIG_HOME": str(directory), **(environment or {})}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """The address of all nodes."""
        return "headrace://" + ",".join(f"127.0.0.1:{port}" for port in self.ports.values())

    def __enter__(self) -> "ClusterProcesses":
        for name in self.names:
            self.start(name)
            self.wait_until(lambda: self.roles().get(name) in ("serving", "following"), name)  # noqa: B023
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        if error is not None:
            for name in self.names:
                print(f"--- {name}\n{self.log(name)}")

    def start(self, name: str) -> None:
        """Start a node, in its directory and on its port."""
        home = self.directory / name
        home.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "headrace", "serve", "--data", str(home / "data"), "--node", name]
        command += ["--port", str(self.ports[name]), "--http-address", "127.0.0.1:0", "--cluster", CLUSTER]
        command += ["--store", self.store, *self._more]
        with (home / "log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """End a node as kill -9 does."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str) -> int:
        """End a node with SIGTERM; returns its exit code."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(SOON_S)

    def roles(self) -> dict[str, str]:
        """The role of each node, by whoever serves; none while nobody does."""
        try:
            with headrace.connect(self.url, timeout=5) as bus:
                return {node.node: node.role for node in bus.cluster.describe().nodes}
        except HeadraceError as error:
            if not error.retryable:
                raise
            return {}

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for something that happens soon; fails when a node ends meanwhile."""
        deadline = time.monotonic() + SOON_S
        while not holds():
            for name, process in self.running.items():
                assert process.poll() is None, f"{name} ended: {self.log(name)}"
            assert time.monotonic() < deadline, f"{what} does not happen: {self.roles()}"
            time.sleep(0.1)

    def log(self, name: str) -> str:
        """What a node has said."""
        return (self.directory / name / "log").read_text(errors="replace")[-5000:]


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
