"""The networks of the cluster's fault tests do what they say: what is cut is silent, and what is healed flows."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.broker_process import free_port
from tests.faults.fork_server import PATIENCE_S, Nursery
from tests.faults.network_namespaces import CLIENTS, STORE, NamespaceNetwork, enter, why_not
from tests.faults.tcp_proxy import ANSWERS, HOLD, PASS, REQUESTS, RESET, TcpProxy

SILENCE_S = 0.3


def _echo(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_echo_one, args=(connection,), daemon=True).start()


def _echo_one(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(1000):
            connection.sendall(data.upper())


@contextlib.contextmanager
def echo_server(host: str = "127.0.0.1") -> Iterator[int]:
    """A server that answers in capitals; its port."""
    with socket.create_server((host, 0)) as server:
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def ask(connection: socket.socket, text: bytes) -> bytes:
    """Send a text, and wait a moment for the answer."""
    connection.settimeout(SILENCE_S)
    connection.sendall(text)
    return connection.recv(1000)


def serve_capitals(namespace: str, host: str, port: int) -> None:
    """In a process of its own: the server, in a namespace."""
    enter(namespace)
    _echo(socket.create_server((host, port)))


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[TcpProxy, int]]:
    """A proxy, and its port in front of the server."""
    with Nursery(tmp_path) as nursery, echo_server() as target:
        proxy, port = TcpProxy(nursery, tmp_path), free_port()
        proxy.add(port, "127.0.0.1", target)
        yield proxy, port
        proxy.close()


@pytest.mark.parametrize("direction", [REQUESTS, ANSWERS, "both"])
def test_a_held_link_is_silent_and_delivers_after_it_is_healed(proxied: tuple[TcpProxy, int], direction: str) -> None:
    proxy, port = proxied
    with socket.create_connection(("127.0.0.1", port)) as connection:
        assert ask(connection, b"one") == b"ONE"
        proxy.change(port, HOLD, direction)
        with pytest.raises(TimeoutError):
            ask(connection, b"two")
        with socket.create_connection(("127.0.0.1", port)) as late, pytest.raises(TimeoutError):
            ask(late, b"late")
        proxy.change(port, PASS)
        connection.settimeout(10)
        assert connection.recv(100) == b"TWO"
        assert ask(connection, b"three") == b"THREE"


def test_a_resetting_link_ends_connections_and_refuses_new_ones(proxied: tuple[TcpProxy, int]) -> None:
    proxy, port = proxied
    with socket.create_connection(("127.0.0.1", port)) as connection:
        assert ask(connection, b"one") == b"ONE"
        with proxy.cut(port, RESET):
            connection.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(100) == b""
            with socket.create_connection(("127.0.0.1", port)) as late, contextlib.suppress(ConnectionError):
                assert ask(late, b"late") == b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        assert ask(connection, b"two") == b"TWO"


@pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces: {why_not()}")
def test_a_namespace_is_cut_off_in_both_directions_or_one(tmp_path: Path) -> None:
    with NamespaceNetwork(["n1", "n2"]) as network, Nursery(tmp_path) as nursery:
        for node in ("n1", "n2"):
            function = "tests.faults.test_cluster_network:serve_capitals"
            nursery.start(node, function, network.namespaces[node], network.addresses[node], 7390)
        connection = _connected(network.addresses["n1"])
        other = _connected(network.addresses["n2"])
        with connection, other:
            assert ask(connection, b"one") == b"ONE"
            for source, target, both in ((CLIENTS, "n1", True), (CLIENTS, "n1", False), ("n1", CLIENTS, False)):
                network.cut(source, target, both=both)
                with pytest.raises(TimeoutError):
                    ask(connection, b"two")
                assert ask(other, b"beside") == b"BESIDE"
                network.heal()
                connection.settimeout(10)
                assert connection.recv(100) == b"TWO"
            network.cut("n1", STORE)
            network.cut("n1", "n2")
            assert ask(connection, b"three") == b"THREE", "only the store and the other node are cut off"


def _connected(host: str) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, 7390), timeout=1)
        assert time.monotonic() < deadline, f"{host} cannot be reached"
        time.sleep(0.01)
