"""Bits that flip on a node's own disk, which is only a cache of the store: nothing is lost, and nothing follows."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from random import Random

import pytest
from tests.http_client import HttpClient
from tests.node_process import CLUSTER, NodeProcess, caught_up, connect, describe, eventually, owner_of

import headrace
from headrace.server.cluster_transfer import import_directory

Start = Callable[..., NodeProcess]
DAMAGED = "local copy damaged; restoring it from the store"
OFTEN = ("--checkpoint-seconds", "1s")
SELDOM = ("--checkpoint-seconds", "1h")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    nodes: list[NodeProcess] = []

    def started(name: str, *more: str) -> NodeProcess:
        nodes.append(NodeProcess(tmp_path, name, *more))
        return nodes[-1]

    yield started
    for node in nodes:
        node.end()


def fill(node: NodeProcess, topic: str, numbers: range) -> list[bytes]:
    """Publish messages in batches, each committed before the next."""
    randbytes = Random(numbers.start).randbytes  # they do not compress
    values = [b"%06d " % number + randbytes(100) for number in numbers]
    with connect([node]) as bus:
        for at in range(0, len(values), 100):
            bus.publish_many(topic, values[at : at + 100])
    return values


def flip(node: NodeProcess, folder: str = "topics") -> int:
    """Flip one bit in every segment of topics that has data; returns how many."""
    return sum(flip_file(path) for path in (node.data / "shards/000" / folder).rglob("*.seg"))


def flip_file(path: Path) -> bool:
    """Flip one bit of a file, unless it has little data."""
    size = len(path.read_bytes().rstrip(b"\0"))
    if size < 2000:
        return False
    with path.open("r+b") as file:
        file.seek(size // 3)
        (byte,) = file.read(1)
        file.seek(size // 3)
        file.write(bytes([byte ^ 0x40]))
    return True


def has_all(node: NodeProcess, values: list[bytes]) -> bool:
    """Whether the copy of a node has the last of these messages."""
    files = (node.data / "shards/000/topics").rglob("*.seg")
    return any(values[-1][-50:] in path.read_bytes() for path in files)


def owner_among(nodes: list[NodeProcess]) -> NodeProcess | None:
    """The node that serves, if one does."""
    name = owner_of(nodes)
    return next((node for node in nodes if node.name == name), None)


def values_of(nodes: list[NodeProcess], topic: str) -> list[bytes]:
    with connect(nodes) as bus, bus.subscribe(topic, start="earliest", timeout=3) as messages:
        return [message.value for message in messages]


def test_damage_on_the_owner_does_not_get_into_a_checkpoint(start: Start) -> None:
    a = start("a", *SELDOM)
    values = fill(a, "orders", range(3000))
    assert flip(a)
    a.kill()  # the next process compares its copy with the log: bring the damage in behind that
    a.more = OFTEN
    a.start()
    assert flip(a)
    values += fill(a, "orders", range(3000, 3100))
    eventually(lambda: DAMAGED in a.log.read_text())
    eventually(lambda: a.log.read_text().rfind("checkpoint stored") > a.log.read_text().rfind(DAMAGED))
    a.kill()
    a.start()
    assert values_of([a], "orders") == values
    values += fill(a, "orders", range(3100, 3200))
    assert values_of([a], "orders") == values
    assert "torn bytes" not in a.log.read_text()
    assert "messages lost" not in a.log.read_text()


def test_a_queue_on_a_damaged_owner_delivers_everything(start: Start) -> None:
    a = start("a", *SELDOM)
    values = fill(a, "jobs", range(1000))
    assert flip(a)
    found: list[bytes] = []
    with connect([a]) as bus:
        queue = bus.queue("jobs")
        while jobs := queue.lease(max=300, wait=3):
            found += [job.value for job in jobs]
            queue.ack(jobs)
        assert queue.stats().dead == 0
    assert sorted(found) == values
    assert a.log.read_text().count(DAMAGED) == 1


def test_readers_of_a_damaged_owner_get_every_message(start: Start) -> None:
    a = start("a", *SELDOM)
    values = fill(a, "orders", range(1000))
    assert flip(a)
    with connect([a]) as bus:
        with bus.subscribe("orders", start="earliest", timeout=5, on_corrupt="skip") as messages:
            assert [message.value for message in messages] == values
            assert messages.skipped == 0
        assert a.log.read_text().count(DAMAGED) == 1
        assert flip(a)
        found: list[bytes | None] = []
        while batches := bus.fetch("orders", 0, len(found)):
            for batch in batches:
                found += batch.columns().values
        assert found == values
    assert a.log.read_text().count(DAMAGED) == 2
    assert "damaged messages" not in a.log.read_text()


@pytest.mark.parametrize("share", [0.4, 0], ids=["cut", "empty"])
def test_readers_of_an_owner_whose_files_are_cut_get_every_message(start: Start, share: float) -> None:
    a = start("a", *SELDOM)
    values = fill(a, "orders", range(1000))
    for path in (a.data / "shards/000/topics").rglob("*.seg"):
        os.truncate(path, int(len(path.read_bytes().rstrip(b"\0")) * share))
    assert values_of([a], "orders") == values
    assert a.log.read_text().count(DAMAGED) == 1


def test_readers_over_http_of_a_damaged_owner_are_told_nothing_wrong(start: Start) -> None:
    a = start("a", *SELDOM)
    count = len(fill(a, "orders", range(1000)))
    assert flip(a)
    client = HttpClient(a.http)
    page = "/v1/topics/orders/partitions/0/messages"
    offset, refused = 0, set()
    deadline = time.monotonic() + 30
    while offset < count:
        assert time.monotonic() < deadline, f"stuck at {offset}: {refused}"
        try:
            answer = client.get(f"{page}?offset={offset}&limit=1000")
        except (OSError, HTTPException):  # the node has closed its connections
            client.close()
            continue
        if answer.status == 200:
            found = answer.json["messages"]
            assert [one["offset"] for one in found] == list(range(offset, offset + len(found)))
            offset += len(found)
        else:
            refused.add(answer.code)
            time.sleep(0.05)
    client.close()
    assert refused <= {"fenced", "not_serving"}
    assert a.log.read_text().count(DAMAGED) == 1


def test_a_follower_whose_copy_is_damaged_takes_over(start: Start) -> None:
    a, b = start("a", *SELDOM), start("b", *SELDOM)
    values = fill(a, "orders", range(3000))
    eventually(lambda: caught_up([a, b], "b"))
    eventually(lambda: has_all(b, values))
    assert flip(b)
    a.kill()
    eventually(lambda: describe([b]).shards[0].owner == "b")
    values += fill(b, "orders", range(3000, 3100))
    assert values_of([b], "orders") == values
    assert DAMAGED in b.log.read_text()
    assert b.process.poll() is None


def test_a_follower_whose_format_file_is_damaged_takes_over(start: Start) -> None:
    a, b = start("a", *SELDOM), start("b", *SELDOM)
    values = fill(a, "orders", range(100))
    eventually(lambda: caught_up([a, b], "b"))
    with (b.data / "shards/000/format").open("r+b") as file:
        for slot in (0, 4096):
            file.seek(slot + 20)
            file.write(b"damage")
    a.kill()
    eventually(lambda: describe([b]).shards[0].owner == "b")
    assert values_of([b], "orders") == values
    assert "comparing it with the store" in b.log.read_text()


@pytest.mark.parametrize("way", ["move", "kill", "terminate"])
def test_nodes_whose_directories_are_removed_while_they_run_lose_nothing(start: Start, way: str) -> None:
    a, b = start("a", *SELDOM), start("b", *SELDOM)
    values = fill(a, "orders", range(1000))
    eventually(lambda: caught_up([a, b], "b"))
    for node in (a, b):
        shutil.rmtree(node.data)
    if way == "move":  # also if `a` cannot close its broker in order without its directory, and serves again
        with connect([a, b]) as bus:
            bus.cluster.move(0, "b", timeout=0)
    elif way == "kill":
        a.kill()
        a.start()
    else:
        a.terminate()
        a.start()
    assert values_of([a, b], "orders") == values
    values += fill(eventually(lambda: owner_among([a, b])), "orders", range(1000, 1100))
    eventually(lambda: describe([a, b]).shards[0].epoch > 1)
    owner = eventually(lambda: owner_among([a, b]))
    other = b if owner is a else a
    eventually(lambda: caught_up([a, b], other.name))
    owner.kill()
    assert values_of([other], "orders") == values


def test_damage_that_was_imported_is_what_it_is(start: Start, tmp_path: Path) -> None:
    randbytes = Random(1).randbytes
    with headrace.open(tmp_path / "plain") as bus:
        for number in range(30):
            bus.publish_many("orders", [b"%d-%d" % (number, at) + randbytes(100) for at in range(20)])
    (path,) = (found for found in (tmp_path / "plain").rglob("*.seg") if "topics" in str(found))
    assert flip_file(path)
    import_directory(
        str(tmp_path / "plain"), f"directory://{tmp_path}/store", CLUSTER, "", lambda *_: None, damaged=True
    )
    a = start("a", *OFTEN)
    with connect([a]) as bus, bus.subscribe("orders", start="earliest", timeout=5, on_corrupt="skip") as messages:
        assert len([message.value for message in messages]) == 29 * 20
    values = fill(a, "orders", range(100))
    eventually(lambda: "checkpoint stored" in a.log.read_text())
    a.kill()
    a.start()
    with connect([a]) as bus, bus.subscribe("orders", start="earliest", timeout=5, on_corrupt="skip") as messages:
        found = [message.value for message in messages]
    assert (len(found), found[-100:]) == (29 * 20 + 100, values)
    assert a.log.read_text().count(DAMAGED) <= 4
