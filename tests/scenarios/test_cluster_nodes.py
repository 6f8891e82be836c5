"""Nodes of a cluster as processes: one serves, the others follow, and take over when it is gone."""

import fcntl
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node_process import PATIENCE_S, NodeProcess, caught_up, connect, describe, eventually

import headrace
from headrace.model.cluster_requests import ClusterDrain, ClusterMove
from headrace.model.requests import TopicDescribe


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def nodes(place: Path) -> Iterator[list[NodeProcess]]:
    started = [NodeProcess(place, name) for name in "ab"]
    yield started
    for node in started:
        node.end()


def values(nodes: list[NodeProcess], topic: str = "orders") -> list[bytes]:
    with connect(nodes) as bus:
        end = bus._broker.request(TopicDescribe(topic)).partitions[0].next_offset
        if not end:
            return []
        found = []
        with bus.subscribe(topic, start="earliest", timeout=PATIENCE_S) as messages:
            for message in messages:
                found.append(message.value)
                if message.offset == end - 1:
                    break
        return found


class SteadyPublisher:
    """Publishes numbers one after the other, and remembers those that were acknowledged, and the longest pause."""

    def __init__(self, nodes: list[NodeProcess]) -> None:
        self.acknowledged: list[bytes] = []
        self.longest_s = 0.0
        self._ends = threading.Event()
        self._nodes = nodes
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self) -> "SteadyPublisher":
        self._thread.start()
        eventually(lambda: len(self.acknowledged) > 20)
        return self

    def __exit__(self, *_: object) -> None:
        count = len(self.acknowledged)
        eventually(lambda: len(self.acknowledged) > count + 20 or self._failure)
        self._ends.set()
        self._thread.join(PATIENCE_S)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with connect(self._nodes) as bus, bus.producer("orders") as producer:
                number = 0
                while not self._ends.wait(0.005):
                    began = time.monotonic()
                    producer.send(b"%d" % number).result()
                    self.longest_s = max(self.longest_s, time.monotonic() - began)
                    self.acknowledged.append(b"%d" % number)
                    number += 1
        except BaseException as error:  # noqa: BLE001 whoever waits for the thread gets it
            self._failure = error


def test_a_client_of_a_follower_is_sent_to_the_owner(nodes: list[NodeProcess]) -> None:
    a, b = nodes
    with connect([b]) as bus, bus.producer("orders") as producer:
        producer.send(b"1").result()
    assert values([a]) == [b"1"]
    with urllib.request.urlopen(f"{b.http}/v1/topics", timeout=10) as answer:  # urllib follows the redirection
        assert answer.geturl() == f"{a.http}/v1/topics"
    with urllib.request.urlopen(f"{b.http}/healthz", timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{b.http}/readyz", timeout=10)
    assert refused.value.code == 503
    assert refused.value.headers["Retry-After"] == "1"
    refused.value.close()
    eventually(lambda: caught_up(nodes, "b"))
    status = describe(nodes)
    assert [(one.node, one.role) for one in status.nodes] == [("a", "serving"), ("b", "following")]
    assert (status.shards[0].owner, status.shards[0].epoch) == ("a", 1)


def test_a_follower_takes_over_from_a_killed_owner_with_all_that_was_acknowledged(nodes: list[NodeProcess]) -> None:
    a, _ = nodes
    eventually(lambda: caught_up(nodes, "b"))
    with SteadyPublisher(nodes) as publisher:
        a.kill()
    assert publisher.longest_s < 10
    found = values(nodes)
    assert [one for one in found if one in set(publisher.acknowledged)] == publisher.acknowledged
    assert len(set(found)) == len(found)
    assert describe(nodes).shards[0].owner == "b"
    a.start()
    eventually(lambda: caught_up(nodes, "a"))
    assert describe(nodes).shards[0].owner == "b"  # it stays where it is


def pause(node: NodeProcess, place: Path) -> None:
    """Stop a process, though not while it holds the lock of the directory store, which would stop all others."""
    with (place / "store" / "#lock").open("rb") as lock:
        while True:
            node.send(signal.SIGSTOP)
            eventually(lambda: Path(f"/proc/{node.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                node.send(signal.SIGCONT)
                time.sleep(0.02)
            else:
                return


def test_an_owner_that_was_paused_acknowledges_nothing_more_and_follows(nodes: list[NodeProcess], place: Path) -> None:
    a, b = nodes
    eventually(lambda: caught_up(nodes, "b"))
    with SteadyPublisher(nodes) as publisher:
        pause(a, place)
        eventually(lambda: describe([b]).shards[0].owner == "b")
        a.send(signal.SIGCONT)
    assert values(nodes) == publisher.acknowledged
    eventually(lambda: caught_up(nodes, "a"))
    assert "stopped serving" in a.log.read_text()


def test_an_owner_that_was_paused_answers_nothing_from_its_earlier_state(nodes: list[NodeProcess], place: Path) -> None:
    a, b = nodes
    eventually(lambda: caught_up(nodes, "b"))
    with headrace.connect(a.url, timeout=PATIENCE_S) as before:
        pause(a, place)
        eventually(lambda: describe([b]).shards[0].owner == "b")
        with connect([b]) as bus:
            bus.create_topic("created-since")
        a.send(signal.SIGCONT)
        # Its connection is open still; what it says of the topic must be said by the node that serves now.
        assert before.describe_topic("created-since").topic == "created-since"


def test_a_terminated_owner_hands_over(nodes: list[NodeProcess]) -> None:
    a, b = nodes
    eventually(lambda: caught_up(nodes, "b"))
    with SteadyPublisher(nodes) as publisher:
        assert a.terminate() == 0
    assert values([b]) == publisher.acknowledged
    assert "claimed  node=b epoch=2" in b.log.read_text()
    assert publisher.longest_s < 5


def test_a_shard_is_moved_and_a_node_drained(nodes: list[NodeProcess]) -> None:
    eventually(lambda: caught_up(nodes, "b"))
    with SteadyPublisher(nodes) as publisher:
        with connect(nodes) as bus:
            begun = bus._broker.request(ClusterMove(0, "b"))
            assert (begun.node, begun.successor) == ("a", "b")
        eventually(lambda: describe(nodes).shards[0].owner == "b")
        eventually(lambda: caught_up(nodes, "a"))
        with connect(nodes) as bus:
            assert bus._broker.request(ClusterDrain("b")).successor == "a"
        status = eventually(lambda: (found := describe(nodes)).shards[0].owner == "a" and found)
        eventually(lambda: {one.node: one.drained for one in describe(nodes).nodes} == {"a": False, "b": True})
        with connect(nodes) as bus, pytest.raises(headrace.errors.InvalidArgument, match="drained"):
            bus._broker.request(ClusterMove(0, "b"))
        assert status.shards[0].epoch == 3
    assert values(nodes) == publisher.acknowledged


def test_a_cluster_of_one_is_started_again(place: Path) -> None:
    node = NodeProcess(place, "a")
    with connect([node]) as bus, bus.producer("orders") as producer:
        producer.send(b"1").result()
    assert node.terminate() == 0
    node.start()
    assert values([node]) == [b"1"]
    node.kill()
    node.start()
    assert values([node]) == [b"1"]
    assert node.terminate() == 0


def test_the_copy_of_a_node_can_be_lost(nodes: list[NodeProcess], place: Path) -> None:
    a, b = nodes
    with connect(nodes) as bus, bus.producer("orders") as producer:
        producer.send(b"1").result()
    b.kill()
    subprocess.run(["rm", "-r", str(place / "b")], check=True)
    b.start()
    eventually(lambda: caught_up(nodes, "b"))
    a.kill()
    assert values([b]) == [b"1"]
