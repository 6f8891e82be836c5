"""Nodes whose store somebody has damaged: they say so, serve nothing that is wrong, and go on when it is repaired."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.node_process import CLUSTER, NodeProcess, caught_up, connect, describe, eventually

from headrace.storage.disk import PrivateDisk
from headrace.storage.replicated.keys import ShardKeys, node_key
from headrace.storage.stores.directory import DirectoryStore

KEYS = ShardKeys(CLUSTER, 0)
BLOCKED = "copy blocked by a fault of the store"
Make = Callable[[str], NodeProcess]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[NodeProcess] = []

    def make_node(name: str) -> NodeProcess:
        made.append(NodeProcess(tmp_path, name, starts=False))
        return made[-1]

    yield make_node
    for node in made:
        node.end()


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(PrivateDisk(), str(tmp_path / "store"))


def started(make: Make, name: str) -> NodeProcess:
    node = make(name)
    node.start()
    return node


def publish(nodes: list[NodeProcess], count: int) -> None:
    with connect(nodes) as bus:
        for number in range(count):
            bus.publish("orders", str(number).encode())


def contents(nodes: list[NodeProcess], count: int) -> list[bytes]:
    with connect(nodes) as bus, bus.subscribe("orders", start="earliest", timeout=30) as messages:
        return [message.value for _, message in zip(range(count), messages, strict=False)]


def lose(store: DirectoryStore, key: str) -> bytes:
    found = store.get(key)
    assert found is not None
    store.delete([key])
    return found.data


def test_an_empty_node_never_serves_past_a_hole(make: Make, store: DirectoryStore) -> None:
    a = started(make, "a")
    publish([a], 60)
    a.kill()
    gone = lose(store, KEYS.wal(1, 30))
    c = make("c")
    c.launch()
    eventually(lambda: BLOCKED in c.log.read_text())
    time.sleep(5)
    said = c.log.read_text()
    assert KEYS.wal(1, 30) in said
    assert said.count(BLOCKED) == 1
    assert "claimed  " not in said
    assert store.get(KEYS.wal(1, 30)) is None
    assert store.get(KEYS.wal(2, 0)) is None
    store.put_new(KEYS.wal(1, 30), gone)
    c.wait_ready()
    assert contents([c], 60) == [str(number).encode() for number in range(60)]


def test_a_node_beyond_the_hole_leads_the_others_past_it(make: Make, store: DirectoryStore) -> None:
    a, b = started(make, "a"), started(make, "b")
    publish([a, b], 60)
    eventually(lambda: {one.node: one.objects for one in describe([a, b]).nodes}.get("b", 0) > 60)
    lose(store, KEYS.wal(1, 30))
    a.kill()
    c = make("c")
    c.start()
    eventually(lambda: describe([b]).shards[0].owner == "b")
    eventually(lambda: caught_up([b], "c"))
    said = c.log.read_text()
    assert said.count(BLOCKED) <= 1
    assert describe([b]).shards[0].checkpoint, "b has stored no checkpoint for the node that was blocked"
    b.kill()
    eventually(lambda: describe([c]).shards[0].owner == "c")
    assert contents([c], 60) == [str(number).encode() for number in range(60)]


@pytest.mark.parametrize("forged", [b"", b"\xff\x00 garbage"], ids=["missing", "garbage"])
def test_without_a_readable_manifest_nobody_serves_and_nobody_spins(
    make: Make, store: DirectoryStore, forged: bytes
) -> None:
    a, b = started(make, "a"), started(make, "b")
    publish([a, b], 10)
    eventually(lambda: caught_up([a, b], "b"))
    right = lose(store, KEYS.manifest)
    if forged:
        store.put_new(KEYS.manifest, forged)
    eventually(lambda: "stopped serving" in a.log.read_text())
    time.sleep(5)
    for node in (a, b):
        said = node.log.read_text()
        assert node.process.poll() is None, said
        assert said.count("manifest cannot be used") == 1
        assert len(said.splitlines()) < 60, said
    store.delete([KEYS.manifest])
    store.put_new(KEYS.manifest, right)
    assert contents([a, b], 10) == [str(number).encode() for number in range(10)]


def test_a_forged_record_ends_no_node(make: Make, store: DirectoryStore) -> None:
    a, b = started(make, "a"), started(make, "b")
    store.put_new(node_key(CLUSTER, "evil"), b"garbage")
    store.put_new(node_key(CLUSTER, "empty"), b"{}")
    eventually(lambda: "node record cannot be read; ignored" in a.log.read_text())
    publish([a, b], 3)
    time.sleep(6)
    for node in (a, b):
        said = node.log.read_text()
        assert node.process.poll() is None, said
        assert said.count("nodes/evil") <= 1
    assert contents([a, b], 3) == [b"0", b"1", b"2"]
