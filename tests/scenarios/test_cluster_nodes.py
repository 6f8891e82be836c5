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
from typing import Any

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


def test_a_terminated_owner_serves_on_while_its_successor_catches_up(place: Path) -> None:
    slow: Any = {"program": ("-m", "tests.faulty_node"), "environment": {"TEST_WAL_DELAY": "0.1"}}
    a, b = NodeProcess(place, "a"), NodeProcess(place, "b", **slow)
    try:
        eventually(lambda: caught_up([a, b], "b"))
        with connect([a]) as bus:
            for number in range(40):  # each is an object of its own
                bus.publish("orders", b"%d" % number)
            assert next(one for one in describe([a]).nodes if one.node == "b").lag_objects > 20
            a.send(signal.SIGTERM)
            shard = eventually(lambda: (found := describe([a]).shards[0]).releasing and found)
            assert (shard.owner, shard.successor) == ("a", "b")
            bus.publish("orders", b"40")
        assert a.wait_ended() == 0
        assert values([b]) == [b"%d" % number for number in range(41)]
        assert "claimed  node=b epoch=2" in b.log.read_text()
        assert "successor is behind" not in a.log.read_text()
    finally:
        a.end()
        b.end()


def test_an_owner_that_is_terminated_right_after_its_claim_waits_until_a_node_follows_it(
    nodes: list[NodeProcess],
) -> None:
    _, b = nodes
    eventually(lambda: caught_up(nodes, "b"))
    with connect(nodes) as bus:
        bus._broker.request(ClusterMove(0, "b"))
    eventually(lambda: "claimed  node=b epoch=2" in b.log.read_text())
    assert b.terminate() == 0
    assert "handing over  node=b epoch=2 successor=a" in b.log.read_text()


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


def test_no_call_fails_in_a_hand_over_even_if_it_must_not_happen_twice(nodes: list[NodeProcess]) -> None:
    eventually(lambda: caught_up(nodes, "b"))
    ends, done, failed = threading.Event(), [0], list[BaseException]()

    def work() -> None:
        try:
            with connect(nodes) as bus:
                bus.create_topic("jobs")
                while not ends.is_set():
                    bus.create_subscription("jobs", f"s{done[0]}")
                    bus.delete_subscription("jobs", f"s{done[0]}")
                    done[0] += 1
        except BaseException as error:  # noqa: BLE001 whoever waits for the thread gets it
            failed.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    with connect(nodes) as bus:
        for target in "baba":
            count = done[0]
            eventually(lambda count=count: done[0] > count + 5 or failed)
            bus.cluster.move(0, target)
    ends.set()
    worker.join(PATIENCE_S)
    assert not failed, failed


def test_a_shard_goes_to_the_node_that_it_is_moved_to(nodes: list[NodeProcess], place: Path) -> None:
    """Also when others see that the owner closes its connections before they hear of the hand-over."""
    nodes.append(NodeProcess(place, "c"))
    targets = ["b", "c", "a"] * 3
    for target in targets:
        eventually(lambda target=target: caught_up(nodes, target))
        with connect(nodes) as bus:
            bus.cluster.move(0, target)
        assert describe(nodes).shards[0].owner == target
    assert describe(nodes).shards[0].epoch == 1 + len(targets)


def test_a_shard_is_moved_and_a_node_drained_right_after_a_move(nodes: list[NodeProcess]) -> None:
    """The client repeats the request until the former owner follows, which takes it a moment."""
    eventually(lambda: caught_up(nodes, "b"))
    with connect(nodes) as bus:
        for target in "baba":
            bus.cluster.move(0, target)
        assert bus.cluster.drain("a").shards[0].owner == "b"
        with pytest.raises(headrace.errors.InvalidArgument, match=r"a cannot .*: it was drained; .* no other node can"):
            bus.cluster.move(0, "a")
        bus.cluster.drain("a", drained=False)
        assert bus.cluster.drain("b").shards[0].owner == "a"


def test_a_follower_knows_that_it_was_drained_when_the_command_says_so(nodes: list[NodeProcess]) -> None:
    a, b = nodes
    eventually(lambda: caught_up(nodes, "b"))
    with connect(nodes, timeout=PATIENCE_S) as bus:
        bus.cluster.drain("b")
        a.kill()
        began = time.monotonic()
        bus.publish("orders", b"1")
    assert time.monotonic() - began > 8  # it waits for another node to take over
    assert "node drained" in b.log.read_text()


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
