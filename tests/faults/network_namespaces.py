"""Network namespaces, one for each node, joined by a bridge whose links a test cuts with traffic filters.

A cut link drops packets silently, in one direction or both, which is what a switch that fails or a wrong firewall rule
does. It needs root, `ip` and `tc`.
"""

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from functools import cache
from types import TracebackType

CLIENTS, STORE = "clients", "store"
"""The ends outside of the nodes' namespaces; both are in the namespace of the test."""
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


class NamespaceError(Exception):
    """The system refused a command about its network."""


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NamespaceError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@cache
def why_not() -> str:
    """The reason why namespaces cannot be had here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    if missing:
        return f"network namespaces need {' and '.join(missing)}"
    try:
        with NamespaceNetwork(["probe"]) as network:
            network.cut("probe", STORE)
    except NamespaceError as error:
        return str(error)
    return ""


def _remove_left_over() -> None:
    """Remove the networks of tests that were killed before they could."""
    for words, pattern in (
        (("ip", "-o", "link"), r"hr(\d+)[a-z][bsv]\w*"),
        (("ip", "netns", "list"), r"hr(\d+)[a-z]n\d+"),
    ):
        for found in re.finditer(rf"\b{pattern}", _run(*words)):
            if not os.path.exists(f"/proc/{found[1]}"):
                kind = "link" if words[-1] == "link" else "netns"
                subprocess.run(["ip", kind, "del", found[0]], capture_output=True, check=False)


def enter(namespace: str) -> None:
    """Move this process, which must have one thread only, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


class NamespaceNetwork:
    """A bridge with an address for clients and one for the store, and a namespace with an address for each node."""

    def __init__(self, nodes: list[str]) -> None:
        number = next(_numbers)
        # Several runs of the tests share the machine: the process id tells them apart.
        self._prefix = f"hr{os.getpid()}{chr(97 + number % 26)}"
        third = (os.getpid() + 64 * number) % 250
        self._net = f"10.{200 + os.getpid() // 250 % 50}.{third}"
        self._bridge = f"{self._prefix}b"
        self._sink = f"{self._prefix}s"
        self._action: list[str] = []
        self.addresses = {CLIENTS: f"{self._net}.1", STORE: f"{self._net}.2"}
        self.namespaces: dict[str, str] = {}
        self._links: dict[str, str] = {}
        self._filters = 0
        _remove_left_over()
        try:
            self._build(nodes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "NamespaceNetwork":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cut(self, one: str, other: str, *, both: bool = True) -> None:
        """Drop all packets from one end to the other, and back unless only one direction is cut."""
        self._drop(one, other)
        if both:
            self._drop(other, one)

    def heal(self) -> None:
        """Let all packets through again."""
        self._filters = 0
        for link in self._links.values():
            for hook in ("ingress", "egress"):
                _run("tc", "filter", "del", "dev", link, hook)

    def close(self) -> None:
        """Remove all of it."""
        for link in (*self._links.values(), self._sink, self._bridge):
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
        for namespace in self.namespaces.values():
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def _build(self, nodes: list[str]) -> None:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        for host in (1, 2):
            _run("ip", "addr", "add", f"{self._net}.{host}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for number, node in enumerate(nodes):
            namespace, link = f"{self._prefix}n{number}", f"{self._prefix}v{number}"
            _run("ip", "netns", "add", namespace)
            self.namespaces[node] = namespace
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            self._links[node] = link
            self.addresses[node] = address = f"{self._net}.{11 + number}"
            inside = ("ip", "-n", namespace)
            _run(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            _run(*inside, "link", "set", "lo", "up")
            _run("ip", "link", "set", link, "master", self._bridge, "up")
            _run("tc", "qdisc", "add", "dev", link, "clsact")
        # Kernels without the action `drop` redirect to an interface that nobody listens to instead.
        _run("ip", "link", "add", self._sink, "type", "veth", "peer", "name", f"{self._sink}x")
        _run("ip", "link", "set", self._sink, "up")

    def _drop(self, source: str, target: str) -> None:
        link, hook = (self._links[source], "ingress") if source in self._links else (self._links[target], "egress")
        self._filters += 1
        match = [f"match ip src {self.addresses[source]}/32", f"match ip dst {self.addresses[target]}/32"]
        words = f"tc filter add dev {link} {hook} protocol ip pref {self._filters} u32 {' '.join(match)}".split()
        actions = [self._action] if self._action else [["drop"], f"mirred egress redirect dev {self._sink}".split()]
        for action in actions:
            try:
                _run(*words, "action", *action)
            except NamespaceError:
                if action is actions[-1]:
                    raise
            else:
                self._action = action
                return
