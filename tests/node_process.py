"""A node of a cluster as a process, on free ports that it keeps when it is started again."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.known import ENVIRONMENT

import headrace
from headrace.errors import HeadraceError
from headrace.model.cluster_requests import ClusterDescribe, ClusterStatus, NodeStatus

PATIENCE_S = 30.0
CLUSTER = "t"


class NodeProcess:
    """A node that is started, killed, stopped and started again."""

    def __init__(
        self,
        place: Path,
        name: str,
        *more: str,
        store: str = "",
        environment: Mapping[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "headrace"),
        starts: bool = True,
    ) -> None:
        """`more` are further arguments, `program` is what Python runs."""
        self.name = name
        self.data = place / name
        self.more = more
        self.program = program
        self._store = store or f"directory://{place}/store"
        self._environment = {**ENVIRONMENT, **(environment or {})}
        self._addresses = ["--port", "0", "--http-address", "127.0.0.1:0"]
        self.log = place / f"{name}.log"
        if starts:
            self.start()

    def launch(self) -> None:
        """Start the process, without waiting until it is ready."""
        given = ["--cluster", CLUSTER, "--store", self._store, "--node", self.name, "--json"]
        given += ["--data", str(self.data), *self._addresses, *self.more]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, "serve", *given],
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
            )

    def start(self) -> None:
        """Start it, and wait until it serves or follows."""
        self.launch()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until it serves or follows."""
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline() or "{}")
        assert ready.get("ready"), self.log.read_text()
        self.url = next(url for url in ready["addresses"] if url.startswith(("headrace://", "headraces://")))
        self.http = next(url for url in ready["addresses"] if url.startswith(("http://", "https://")))
        self._addresses = ["--port", str(ready["port"]), "--http-address", self.http.partition("://")[2]]

    def fail(self) -> str:
        """Start it, which must not work; returns what it said."""
        self.launch()
        assert self.process.stdout is not None
        said = self.process.stdout.read().decode()
        self.process.stdout.close()
        assert self.process.wait(PATIENCE_S), "it has started"
        return said + self.log.read_text()

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as kill -9 does."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def terminate(self) -> int:
        """End it with SIGTERM; returns the exit code."""
        self.send(signal.SIGTERM)
        return self.wait_ended()

    def wait_ended(self) -> int:
        """Wait until it has ended by itself; returns the exit code."""
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def end(self) -> None:
        """Kill it if it runs, also when it is stopped."""
        if hasattr(self, "process") and self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.kill()


def hosts_of(nodes: list[NodeProcess]) -> str:
    """The address of all nodes."""
    scheme = nodes[0].url.partition("://")[0]
    return f"{scheme}://" + ",".join(node.url.partition("://")[2] for node in nodes)


def connect(nodes: list[NodeProcess], **options: Any) -> headrace.Bus:
    """A client of all nodes."""
    return headrace.connect(hosts_of(nodes), **{"timeout": PATIENCE_S, "wait": 10.0, **options})


def describe(nodes: list[NodeProcess], **options: Any) -> ClusterStatus:
    """The state of the cluster, by whoever serves."""
    with connect(nodes, **options) as bus:
        return bus._broker.request(ClusterDescribe())


def owner_of(nodes: list[NodeProcess], **options: Any) -> str:
    """Who serves; empty while nobody can be asked, such as when a node takes its addresses over from itself."""
    try:
        return describe(nodes, **options).shards[0].owner
    except HeadraceError as error:
        if not error.retryable:
            raise
        return ""


def eventually(holds: Callable[[], Any]) -> Any:
    """Wait for something that happens soon; returns it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)
    return found


def caught_up(nodes: list[NodeProcess], name: str, **options: Any) -> bool:
    """Whether a node follows, and is near the owner."""
    status = describe(nodes, **options)
    found = {one.node: one for one in status.nodes}.get(name)
    return found is not None and (found.role, found.epoch) == ("following", status.shards[0].epoch) and is_near(found)


def is_near(node: NodeStatus) -> bool:
    """Whether a follower is up to date."""
    return node.lag_us < 2_000_000 and node.beat_age_us < 3_000_000
