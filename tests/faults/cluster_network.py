"""The network of a cluster's processes, with partitions: network namespaces, or a TCP proxy where there are none."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from tests.faults.broker_process import free_port
from tests.faults.fork_server import Nursery
from tests.faults.network_namespaces import CLIENTS, STORE, NamespaceNetwork
from tests.faults.tcp_proxy import ANSWERS, BOTH, HOLD, PASS, REQUESTS, RESET, TcpProxy

ISOLATED, FROM_STORE, STORE_REQUESTS, STORE_ANSWERS = "isolated", "from store", "store requests", "store answers"
INBOUND, FROM_NODES, RESETTING = "inbound", "from nodes", "resetting"
"""What a partition cuts a node from: everything; the store, in both directions or one; whatever comes to it; the other
nodes; or its connections are reset."""


class NodePlace(NamedTuple):
    """Where a node listens, what others call it by, and where it finds the store."""

    namespace: str
    """Empty: that of the test."""
    host: str
    port: int
    address: str
    """Of the form HOST:PORT, for clients and other nodes."""
    store_host: str
    store_port: int


class ClusterNetwork(ABC):
    """The network: places of nodes, and partitions."""

    partitions: tuple[str, ...]
    """The kinds of partitions that it can make."""
    places: dict[str, NodePlace]

    @abstractmethod
    def cut(self, node: str, kind: str) -> None:
        """Make a partition of a kind around a node."""

    @abstractmethod
    def heal(self) -> None:
        """End all partitions."""

    @abstractmethod
    def close(self) -> None:
        """Remove the network."""


class ProxiedCluster(ClusterNetwork):
    """Proxies in front of each node, and between each node and the store."""

    partitions = (ISOLATED, FROM_STORE, STORE_REQUESTS, STORE_ANSWERS, INBOUND, RESETTING)

    def __init__(self, nursery: Nursery, directory: Path, nodes: list[str], store_port: int) -> None:
        self._proxy = TcpProxy(nursery, directory)
        self.places = {}
        self._fronts: dict[str, int] = {}
        for node in nodes:
            port, front, back = free_port(), free_port(), free_port()
            self._proxy.add(front, "127.0.0.1", port)
            self._proxy.add(back, "127.0.0.1", store_port)
            self._fronts[node] = front
            self.places[node] = NodePlace("", "127.0.0.1", port, f"127.0.0.1:{front}", "127.0.0.1", back)

    def cut(self, node: str, kind: str) -> None:
        """Make a partition of a kind around a node."""
        front, back = self._fronts[node], self.places[node].store_port
        cuts: dict[str, list[tuple[int, str, str]]] = {
            ISOLATED: [(front, HOLD, BOTH), (back, HOLD, BOTH)],
            FROM_STORE: [(back, HOLD, BOTH)],
            STORE_REQUESTS: [(back, HOLD, REQUESTS)],
            STORE_ANSWERS: [(back, HOLD, ANSWERS)],
            INBOUND: [(front, HOLD, REQUESTS)],
            RESETTING: [(front, RESET, BOTH), (back, RESET, BOTH)],
        }
        for port, mode, direction in cuts[kind]:
            self._proxy.change(port, mode, direction)

    def heal(self) -> None:
        """End all partitions."""
        for node, place in self.places.items():
            self._proxy.change(self._fronts[node], PASS)
            self._proxy.change(place.store_port, PASS)

    def close(self) -> None:
        """Hang up; the proxy ends with the nursery."""
        self._proxy.close()


class NamespacedCluster(ClusterNetwork):
    """A namespace for each node; the store and clients are outside."""

    partitions = (ISOLATED, FROM_STORE, STORE_REQUESTS, STORE_ANSWERS, INBOUND, FROM_NODES)

    def __init__(self, nodes: list[str], store_port: int) -> None:
        self._network = NamespaceNetwork(nodes)
        addresses = self._network.addresses
        self.places = {}
        for node in nodes:
            host, port = addresses[node], 7390
            namespace = self._network.namespaces[node]
            self.places[node] = NodePlace(namespace, host, port, f"{host}:{port}", addresses[STORE], store_port)

    def cut(self, node: str, kind: str) -> None:
        """Make a partition of a kind around a node."""
        others = [other for other in self.places if other != node]
        if kind == ISOLATED:
            for other in (*others, STORE, CLIENTS):
                self._network.cut(node, other)
        elif kind == FROM_STORE:
            self._network.cut(node, STORE)
        elif kind == STORE_REQUESTS:
            self._network.cut(node, STORE, both=False)
        elif kind == STORE_ANSWERS:
            self._network.cut(STORE, node, both=False)
        elif kind == INBOUND:
            for other in (*others, CLIENTS):
                self._network.cut(other, node, both=False)
        else:
            assert kind == FROM_NODES, kind
            for other in others:
                self._network.cut(node, other)

    def heal(self) -> None:
        """End all partitions."""
        self._network.heal()

    def close(self) -> None:
        """Remove the namespaces."""
        self._network.close()


class LoopbackCluster(ClusterNetwork):
    """Nodes on this machine's loopback address, without partitions, and with a store that has no address."""

    partitions = ()

    def __init__(self, nodes: list[str]) -> None:
        ports = {node: free_port() for node in nodes}
        self.places = {
            node: NodePlace("", "127.0.0.1", port, f"127.0.0.1:{port}", "127.0.0.1", 0) for node, port in ports.items()
        }

    def cut(self, node: str, kind: str) -> None:
        """Refuse: there are no partitions here."""
        raise AssertionError(f"{node} cannot be cut off ({kind}) on the loopback address")

    def heal(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
