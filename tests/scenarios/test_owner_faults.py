"""Faults of the node that serves: its own disk fails or is full, or the store is silent."""

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.store_processes import PostgresProcess, postgres_binaries
from tests.node_process import NodeProcess, caught_up, connect, describe, eventually

import headrace
from headrace.errors import HeadraceError


class FaultyNodes:
    """Nodes whose disks can be told to fail."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.nodes: list[NodeProcess] = []

    def start(self, name: str, *more: str) -> NodeProcess:
        environment = {"TEST_FAULT_FILE": str(self._place / f"{name}.fault"), "PYTHONPATH": paths_of_tests()}
        program = ("-m", "tests.faulty_node")
        node = NodeProcess(self._place, name, *more, environment=environment, program=program)
        self.nodes.append(node)
        return node

    def fail(self, node: NodeProcess, error: str) -> None:
        (self._place / f"{node.name}.fault").write_text(error)

    def repair(self, node: NodeProcess) -> None:
        (self._place / f"{node.name}.fault").unlink()


def paths_of_tests() -> str:
    root = Path(__file__).parents[2]
    return os.pathsep.join([str(Path(headrace.__file__).parents[1]), str(root)])


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyNodes]:
    made = FaultyNodes(tmp_path)
    yield made
    for node in made.nodes:
        node.end()


def published(nodes: list[NodeProcess], value: bytes) -> bool:
    """Publish in one attempt; whether it was acknowledged."""
    with suppress(HeadraceError), connect(nodes, timeout=10) as bus:
        return bus.publish("orders", value).durability is headrace.Durability.REPLICATED
    return False


def values(nodes: list[NodeProcess]) -> list[bytes]:
    found = []
    with connect(nodes) as bus, bus.subscribe("orders", start="earliest", timeout=2) as messages:
        for message in messages:
            found.append(message.value)
    return found


def test_a_follower_takes_over_from_an_owner_whose_disk_fails(faulty: FaultyNodes) -> None:
    a, b = faulty.start("a"), faulty.start("b")
    assert published(faulty.nodes, b"1")
    eventually(lambda: caught_up(faulty.nodes, "b"))
    faulty.fail(a, "EIO")
    assert published(faulty.nodes, b"2")  # by b, after a was asked
    status = describe(faulty.nodes)
    assert status.shards[0].owner == "b"
    assert "stopped serving" in a.log.read_text()
    time.sleep(3)
    assert {one.node: one.role for one in describe(faulty.nodes).nodes} == {"a": "restoring", "b": "serving"}
    faulty.repair(a)
    eventually(lambda: caught_up(faulty.nodes, "a"))
    b.kill()
    assert published(faulty.nodes, b"3")
    assert values(faulty.nodes) == [b"1", b"2", b"3"]


def test_an_owner_with_a_full_disk_hands_over_in_order(faulty: FaultyNodes) -> None:
    a, b = faulty.start("a"), faulty.start("b")
    assert published(faulty.nodes, b"1")
    eventually(lambda: caught_up(faulty.nodes, "b"))
    faulty.fail(a, "ENOSPC")
    eventually(lambda: published(faulty.nodes, b"2"))
    assert describe(faulty.nodes).shards[0].owner == "b"
    assert "disk full; handing over" in a.log.read_text()
    assert values(faulty.nodes)[:2] == [b"1", b"2"]
    assert b.process.poll() is None
    faulty.repair(a)
    eventually(lambda: caught_up(faulty.nodes, "a"))


def test_the_only_node_serves_again_when_its_disk_works_again(faulty: FaultyNodes) -> None:
    a = faulty.start("a")
    assert published([a], b"1")
    faulty.fail(a, "EIO")
    assert not published([a], b"lost")
    eventually(lambda: a.log.read_text().count("disk failed") > 1)  # it tries again and again
    assert a.process.poll() is None
    faulty.repair(a)
    eventually(lambda: published([a], b"2"))
    assert values([a])[0] == b"1"
    assert b"2" in values([a])


def test_the_only_node_serves_what_it_has_on_a_full_disk(faulty: FaultyNodes) -> None:
    a = faulty.start("a")
    assert published([a], b"1")
    faulty.fail(a, "ENOSPC")
    with pytest.raises(headrace.errors.DiskFull), connect([a], timeout=3) as bus:
        bus.publish("orders", b"refused")
    assert values([a]) == [b"1"]
    assert "disk full, and no other node follows" in a.log.read_text()
    faulty.repair(a)
    assert published([a], b"2")
    assert values([a]) == [b"1", b"2"]


@pytest.mark.skipif(postgres_binaries() is None, reason="PostgreSQL (initdb) is not installed")
def test_an_owner_whose_store_is_silent_stops_serving_and_serves_again(tmp_path: Path) -> None:
    with PostgresProcess() as store:
        node = NodeProcess(tmp_path, "a", store=store.url("127.0.0.1", store.port))
        try:
            assert published([node], b"1")
            for number in postgres_processes(store):
                os.kill(number, signal.SIGSTOP)
            began = time.monotonic()
            eventually(lambda: ready_status(node) == 503)
            took_s = time.monotonic() - began
            assert 2 < took_s < 20, took_s
            assert "the store could not be reached to confirm the epoch" in node.log.read_text()
            for number in postgres_processes(store):
                os.kill(number, signal.SIGCONT)
            eventually(lambda: ready_status(node) == 200)
            assert published([node], b"2")
            assert values([node]) == [b"1", b"2"]
        finally:
            for number in postgres_processes(store):
                os.kill(number, signal.SIGCONT)
            node.end()


def postgres_processes(store: PostgresProcess) -> list[int]:
    """The server and the processes of its connections."""
    assert store._process is not None
    first = store._process.pid
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    return [first, *map(int, children)]


def ready_status(node: NodeProcess) -> int:
    """What /readyz answers; 0: nothing, as the event loop hangs or the address changes hands."""
    try:
        with urllib.request.urlopen(f"{node.http}/readyz", timeout=1) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0
