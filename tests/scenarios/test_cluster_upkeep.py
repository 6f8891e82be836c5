"""The upkeep of a cluster: formats, a store that went back, names, addresses, what the status says, checkpoints."""

import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.node_process import CLUSTER, PATIENCE_S, NodeProcess, caught_up, connect, describe, eventually, owner_of
from tests.scenarios.test_cluster_nodes import pause
from tests.scenarios.test_owner_faults import paths_of_tests

from headrace.cluster.node_record import read_record
from headrace.errors import InvalidArgument
from headrace.storage.disk import PrivateDisk
from headrace.storage.replicated.epochs import read_manifest
from headrace.storage.replicated.keys import ShardKeys
from headrace.storage.stores.directory import DirectoryStore

Start = Callable[..., NodeProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[NodeProcess] = []

    def start_node(name: str, *more: str, knows: int = 0, place: Path = tmp_path, starts: bool = True) -> NodeProcess:
        environment = {"TEST_FORMAT": str(knows), "PYTHONPATH": paths_of_tests()} if knows else {}
        program = ("-m", "tests.faulty_node") if knows else ("-m", "headrace")
        store = f"directory://{tmp_path}/store"
        node = NodeProcess(place, name, *more, store=store, environment=environment, program=program, starts=False)
        made.append(node)
        if starts:
            node.start()
        return node

    yield start_node
    for node in made:
        node.end()


def store_at(place: Path) -> DirectoryStore:
    return DirectoryStore(PrivateDisk(), str(place / "store"))


def test_the_format_is_raised_when_all_nodes_know_it_and_older_ones_never_claim(start: Start, tmp_path: Path) -> None:
    a = start("a", knows=2)
    manifest = read_manifest(store_at(tmp_path), ShardKeys(CLUSTER, 0))
    assert manifest is not None
    before = manifest.manifest.format
    b = start("b")
    eventually(lambda: caught_up([a, b], "b"))
    with connect([a, b]) as bus:
        with pytest.raises(InvalidArgument, match="b cannot read format 2"):
            bus.cluster.upgrade()
        bus.publish("orders", b"1")
    b.terminate()
    b2 = start("b", knows=2)
    eventually(lambda: caught_up([a, b2], "b"))
    with connect([a, b2]) as bus:
        eventually(lambda: bus.cluster.describe().format_max == 2)  # the owner has read the new record of b
        upgraded = bus.cluster.upgrade()
    assert (before, upgraded.format) == (1, 2)
    assert b2.terminate() == 0
    old = start("c")
    eventually(lambda: "newer than this software" in old.log.read_text())
    a.kill()
    time.sleep(6)
    assert "claiming" not in old.log.read_text()
    again = start("b", knows=2)
    eventually(lambda: owner_of([again]) == "b")
    with connect([again]) as bus:
        assert bus.publish("orders", b"2").offset == 1


def test_a_store_that_was_put_back_is_refused(start: Start, tmp_path: Path) -> None:
    a = start("a")
    with connect([a]) as bus:
        bus.publish("orders", b"1")
    assert a.terminate() == 0
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    a.start()
    with connect([a]) as bus:
        bus.publish("orders", b"2")
    assert a.terminate() == 0
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "backup").rename(tmp_path / "store")
    said = a.fail()
    assert "store_went_back" in said or "when this node last saw it" in said
    other = start("b")  # one that has seen nothing serves what is there
    with connect([other]) as bus:
        assert bus.publish("orders", b"3").offset == 1


def test_a_second_process_with_the_same_name_ends_and_the_first_serves_on(start: Start, tmp_path: Path) -> None:
    a = start("a")
    with connect([a]) as bus:
        bus.publish("orders", b"1")
    time.sleep(1.5)
    (tmp_path / "elsewhere").mkdir()
    second = start("a", place=tmp_path / "elsewhere", starts=False)
    said = second.fail()
    assert "another process has the name a" in said
    assert "give this node another name with --node" in said
    assert "claiming" not in said
    status = describe([a])
    assert (status.shards[0].owner, status.shards[0].epoch) == ("a", 1)
    with connect([a]) as bus:
        assert bus.publish("orders", b"2").offset == 1
    assert a.process.poll() is None


def test_a_killed_node_starts_again_at_once_and_its_name_is_free_for_another_directory(
    start: Start, tmp_path: Path
) -> None:
    a = start("a", "--cluster-heartbeat-seconds", "4")
    with connect([a]) as bus:
        bus.publish("orders", b"1")
    a.kill()
    began = time.monotonic()
    a.start()
    assert time.monotonic() - began < 8  # it does not wait for heartbeats
    a.kill()
    (tmp_path / "elsewhere").mkdir()
    other = start("a", place=tmp_path / "elsewhere")
    with connect([other]) as bus:
        assert bus.publish("orders", b"2").offset == 1


def test_a_node_that_wakes_up_leaves_its_name_to_the_process_that_has_it(start: Start, tmp_path: Path) -> None:
    a = start("a")
    with connect([a]) as bus:
        bus.publish("orders", b"1")
    time.sleep(3)
    pause(a, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    other = start("a", place=tmp_path / "elsewhere")
    a.send(signal.SIGCONT)
    assert a.process.wait(PATIENCE_S)
    assert a.process.stdout is not None
    a.process.stdout.close()
    with connect([other]) as bus:
        assert bus.publish("orders", b"2").offset == 1


def test_a_node_refuses_a_token_file_without_a_token(start: Start, tmp_path: Path) -> None:
    (tmp_path / "table").write_text("name  created\ncluster-nodes  today\n")
    said = start("a", "--node-token-file", str(tmp_path / "table"), starts=False).fail()
    assert "--node-token-file" in said
    assert "no token" in said
    assert "none" in start("b", "--node-token-file", str(tmp_path / "none"), starts=False).fail()
    assert not (tmp_path / "store").exists()


def test_a_node_that_listens_on_all_addresses_advertises_the_name_of_its_host(start: Start, tmp_path: Path) -> None:
    node = start("a", "--host", "0.0.0.0", "--insecure")
    record = read_record(store_at(tmp_path), CLUSTER, "a")
    assert record is not None
    port = node.url.rpartition(":")[2]
    assert record.addresses == (f"headrace://{socket.gethostname()}:{port}",)
    manifest = read_manifest(store_at(tmp_path), ShardKeys(CLUSTER, 0))
    assert manifest is not None
    assert not any("0.0.0.0" in url for url in manifest.manifest.addresses)


def test_the_status_shows_who_is_silent_and_nobody_is_drained_to_nobody(start: Start) -> None:
    a, b = start("a"), start("b")
    eventually(lambda: caught_up([a, b], "b"))
    with connect([a, b]) as bus:
        bus.publish("orders", b"1")
    a.kill()
    eventually(lambda: owner_of([b]) == "b")
    roles = eventually(lambda: (found := {one.node: one.role for one in describe([b]).nodes}).get("b") and found)
    assert roles == {"a": "silent", "b": "serving"}
    with connect([b], timeout=20) as bus:
        began = time.monotonic()  # what has been silent for a moment only may follow soon
        with pytest.raises(InvalidArgument, match="no other node can take over"):
            bus.cluster.drain("b")
        with pytest.raises(InvalidArgument, match="a cannot take the shard over: it has been silent for"):
            bus.cluster.move(0, "a")
        assert time.monotonic() - began < 10
        assert bus.publish("orders", b"2").offset == 1


def test_metrics_of_the_cluster_and_a_node_that_restores_from_a_checkpoint(start: Start, tmp_path: Path) -> None:
    a = start("a", "--checkpoint-seconds", "1s", "--backup-seconds", "0")
    with connect([a]) as bus:
        bus.create_topic("orders", segment_bytes=1 << 20)
        bus.publish_many("orders", [b"x" * 1000] * 2000)
    shard = eventually(lambda: (found := describe([a]).shards[0]).checkpoint_objects > 1 and found)
    with connect([a]) as bus:
        bus.publish("orders", b"last")
    keys = ShardKeys(CLUSTER, 0)  # the owner deletes these after ten minutes
    store_at(tmp_path).delete([keys.wal(1, number) for number in range(shard.checkpoint_objects)])
    with urllib.request.urlopen(f"{a.http}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "\nheadrace_cluster_serving 1" in text
    for name in ("epoch", "committed_objects", "backlog_bytes", "puts_total", "checkpoints_total", "put_seconds_total"):
        assert f"\nheadrace_cluster_{name}" in text, name
    b = start("b")
    eventually(lambda: caught_up([a, b], "b"))
    assert "restored  position=1:0 " not in b.log.read_text()
    a.kill()
    with connect([b]) as bus:
        assert bus.publish("orders", b"after").offset == 2001
        with bus.subscribe("orders", start="earliest", timeout=2) as messages:
            found = [message.value for message in messages]
    assert found == [b"x" * 1000] * 2000 + [b"last", b"after"]
