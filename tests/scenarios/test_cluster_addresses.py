"""The addresses of nodes while the shard moves: nobody is refused, and all who ask are answered."""

import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.http_client import needs_http
from tests.node_process import NodeProcess, caught_up, connect, describe, eventually, owner_of
from tests.socket_client import SocketClient

ConnectionClosed = pytest.importorskip("websockets.exceptions").ConnectionClosed
pytestmark = needs_http

_MOVES = ["b", "a"] * 3
_ANSWERS = {201, 202, 307, 503}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    started = [NodeProcess(tmp_path, name, "--unix-socket", str(tmp_path / f"{name}.sock")) for name in "ab"]
    yield started
    for node in started:
        node.end()


class Repeatedly:
    """Does something again and again on a thread, and counts what came of it."""

    def __init__(self, attempt: Callable[[], object]) -> None:
        self.seen: Counter[object] = Counter()
        self._attempt = attempt
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> Counter[object]:
        self._ends.set()
        self._thread.join(60)
        return self.seen

    def _run(self) -> None:
        while not self._ends.wait(0.001):
            try:
                self.seen[self._attempt()] += 1
            except (AssertionError, OSError, http.client.HTTPException) as error:
                self.seen[f"{type(error).__name__}: {error}"] += 1


def host_of(url: str) -> tuple[str, int]:
    host, _, port = url.partition("://")[2].rpartition(":")
    return host, int(port)


def connects(family: int, address: tuple[str, int] | str) -> str:
    with socket.socket(family) as client:
        client.settimeout(20)
        client.connect(address)
    return "connected"


def publishes(node: NodeProcess) -> int:
    """Publish over a connection of its own."""
    client = http.client.HTTPConnection(*host_of(node.http), timeout=20)
    try:
        client.request("POST", "/v1/topics/orders/messages", b'{"value": 1}', {"Content-Type": "application/json"})
        answer = client.getresponse()
        body = answer.read()
        assert answer.status in _ANSWERS, body
        if answer.status == 503:
            assert json.loads(body)["code"] != "fenced" or not answer.headers["Retry-After"], body
            assert json.loads(body)["code"] == "fenced" or answer.headers["Retry-After"], body
        return answer.status
    finally:
        client.close()


def move(nodes: list[NodeProcess], target: str) -> None:
    eventually(lambda: caught_up(nodes, target))
    with connect(nodes) as bus:
        bus.cluster.move(0, target)
    eventually(lambda: describe(nodes).shards[0].owner == target)


def test_a_node_refuses_no_connection_while_it_changes_its_role(nodes: list[NodeProcess], tmp_path: Path) -> None:
    addresses: list[tuple[int, tuple[str, int] | str]] = []
    for node in nodes:
        addresses += [(socket.AF_INET, host_of(node.url)), (socket.AF_INET, host_of(node.http))]
        addresses.append((socket.AF_UNIX, str(tmp_path / f"{node.name}.sock")))
    probes = [Repeatedly(lambda one=one: connects(*one)) for one in addresses]
    for target in _MOVES:
        move(nodes, target)
    for probe in probes[:3]:  # of a, which serves now
        assert set(probe.stop()) == {"connected"}
    nodes[0].kill()
    eventually(lambda: owner_of(nodes[1:]) == "b")
    for probe in probes[3:]:
        assert set(probe.stop()) == {"connected"}


def test_every_request_of_http_is_answered_in_a_hand_over(nodes: list[NodeProcess]) -> None:
    with connect(nodes) as bus:
        bus.create_topic("orders")
    askers = [Repeatedly(lambda node=node: publishes(node)) for node in nodes for _ in range(2)]
    for target in _MOVES:
        move(nodes, target)
    for asker in askers:
        seen = asker.stop()
        assert set(seen) <= _ANSWERS, seen
        assert len(seen) > 1, "it has met both roles"


def test_a_node_that_ends_refuses_connections(nodes: list[NodeProcess]) -> None:
    a, b = nodes
    eventually(lambda: caught_up(nodes, "b"))
    b.kill()
    with pytest.raises(ConnectionRefusedError):
        connects(socket.AF_INET, host_of(b.url))
    assert a.terminate() == 0
    for url in (a.url, a.http):
        with pytest.raises(ConnectionRefusedError):
            connects(socket.AF_INET, host_of(url))
    with pytest.raises(FileNotFoundError):
        connects(socket.AF_UNIX, str(a.data.parent / "a.sock"))


def test_a_websocket_of_a_node_that_hands_over_is_told_to_connect_again(nodes: list[NodeProcess]) -> None:
    a, b = nodes
    with SocketClient(a.http) as client:
        client.ask("Info")
        move(nodes, "b")
        assert client.receive()["push"] == "Drain"
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        assert closed.value.rcvd.reason.startswith("not_serving: ")
    with SocketClient(a.http) as client:  # the library follows the redirection
        assert client.ask("Info")["answer"]
        assert client.connection.remote_address[1] == host_of(b.http)[1]


def test_the_answer_to_an_opened_lease_comes_before_its_messages(nodes: list[NodeProcess]) -> None:
    with connect(nodes) as bus:
        bus.publish_many("orders", [b"1", b"2", b"3"])
    for number in range(20):
        with SocketClient(nodes[0].http) as client:
            opening = {"topic": "orders", "subscription": f"s{number}", "credit_messages": 1, "session_bound": True}
            asked = client.send("LeaseOpen", **opening)
            answer, delivery = client.receive(), client.receive()
            assert answer.get("id") == asked, answer
            assert (delivery["push"], delivery["fields"]["standing"]) == ("LeaseDelivery", answer["answer"]["standing"])
