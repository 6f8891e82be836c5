"""The nodes of a cluster as processes of their own: started, killed, stopped for a while, cut off from each other."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.cluster_network import ClusterNetwork, NodePlace
from tests.faults.fork_server import PATIENCE_S, Child, Nursery
from tests.faults.network_namespaces import enter
from tests.faults.store_processes import StoreProcess
from tests.native_client import NativeClient

from headrace.model.errors import HeadraceError, NotServing

SERVING, FOLLOWING, DOWN = "serving", "following", "down"
CLUSTER = "faults"
_ANSWER_S = 1.0


class ClusterNode:
    """One node: always the same name, address and data directory, however often it is killed."""

    def __init__(
        self, nursery: Nursery, directory: Path, name: str, place: NodePlace, store: StoreProcess, *options: str
    ) -> None:
        self.name = name
        self.place = place
        self.data = directory / name
        self.function = "tests.faults.cluster_processes:serve_node"
        """What the process does, given its namespace, environment and arguments."""
        self._nursery = nursery
        self._environment = store.environment
        self._arguments = ["serve", "--cluster", CLUSTER, "--store", store.url(place.store_host, place.store_port)]
        self._arguments += ["--node", name, "--data", str(self.data), "--host", place.host, "--port", str(place.port)]
        self._arguments += ["--advertise", f"headrace://{place.address}", "--insecure", *options]
        self._process: Child | None = None
        self.starts = 0

    def start(self) -> None:
        """Start it, and do not wait."""
        assert self._process is None, f"{self.name} is running"
        self.starts += 1
        self._process = self._nursery.start(
            self.name, self.function, self.place.namespace, self._environment, self._arguments
        )

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self._process = None

    def stop(self) -> None:
        """End it in peace, which must work."""
        self.process.signal(signal.SIGTERM)
        code = os.waitstatus_to_exitcode(self.process.wait())
        assert code in (0, 128 + signal.SIGTERM), f"{self.name} ended with {code}:\n{self.process.said()}"
        self._process = None

    def pause(self) -> None:
        """Stop it where it is, as a machine that swaps or a virtual one that is moved."""
        self.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.process.signal(signal.SIGCONT)

    @property
    def process(self) -> Child:
        """Its process, which must have been started."""
        assert self._process is not None, f"{self.name} is not running"
        return self._process

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not killed since."""
        return self._process is not None

    def role(self) -> str:
        """What a client that connects to it is told: that it serves, that it follows, or nothing."""
        host, _, port = self.place.address.rpartition(":")
        try:
            with NativeClient(socket.create_connection((host, int(port)), _ANSWER_S), _ANSWER_S) as client:
                client.hello("fault test")
        except NotServing:
            return FOLLOWING
        except (OSError, EOFError, HeadraceError):
            return DOWN
        return SERVING


class ClusterProcesses:
    """All nodes of a cluster, and the network between them."""

    def __init__(
        self,
        nursery: Nursery,
        directory: Path,
        network: ClusterNetwork,
        store: StoreProcess,
        *options: str,
        function: str = "",
    ) -> None:
        """`function` is what the processes do instead of `serve_node`."""
        self.nursery = nursery
        self.store = store
        self.network = network
        self.nodes = {
            name: ClusterNode(nursery, directory, name, place, store, *options)
            for name, place in network.places.items()
        }
        if function:
            for node in self.nodes.values():
                node.function = function

    @property
    def url(self) -> str:
        """The address of all nodes together."""
        return "headrace://" + ",".join(node.place.address for node in self.nodes.values())

    @property
    def addresses(self) -> dict[str, str]:
        """Nodes to their own addresses."""
        return {name: node.place.address for name, node in self.nodes.items()}

    def start(self) -> None:
        """Start all nodes."""
        for node in self.nodes.values():
            node.start()

    def check(self) -> None:
        """The store and all nodes that were started must be alive."""
        self.store.check()
        for node in self.nodes.values():
            if node.is_running:
                node.process.check()

    def serving(self, *, but: ClusterNode | None = None) -> ClusterNode:
        """The node that serves, other than a given one; waits until there is one."""
        found: list[ClusterNode] = []

        def look() -> bool:
            found[:] = [node for node in self.nodes.values() if node is not but and node.role() == SERVING]
            return bool(found)

        self.wait_until(look, f"no node serves{f' but {but.name}' if but else ''}")
        return found[0]

    def owner(self) -> ClusterNode:
        """The only node that serves; waits until nodes that have been replaced know it."""
        found: list[ClusterNode] = []

        def look() -> bool:
            found[:] = [node for node in self.nodes.values() if node.role() == SERVING]
            return len(found) == 1

        self.wait_until(look, "not one node serves")
        return found[0]

    def wait_until(self, condition: Callable[[], bool], complaint: str) -> None:
        """Wait until something is so; nodes must not end meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.check()
            assert time.monotonic() < deadline, f"{complaint}:\n{self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        """The end of each node's log."""
        return "\n".join(
            f"--- {name}, {node.role()}:\n{node.process.said()}" for name, node in self.nodes.items() if node.is_running
        )


def serve_node(namespace: str, environment: dict[str, str], arguments: list[str]) -> None:
    """In the node's process: be it."""
    if namespace:
        enter(namespace)
    os.environ.update(environment)
    from headrace.cli.main import main

    raise SystemExit(main(arguments))
