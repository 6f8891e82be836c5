"""A broker inside a program as a node of a cluster: `headrace.open(path, store=..., cluster=...)`."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.known import ENVIRONMENT
from tests.node_process import CLUSTER, NodeProcess, connect, eventually

import headrace
from headrace.errors import LogInUse
from headrace.storage.disk import LocalDisk
from headrace.storage.replicated.epochs import read_manifest
from headrace.storage.replicated.keys import ShardKeys
from headrace.storage.stores.directory import DirectoryStore

_PROGRAM = """
import sys, time, headrace
bus = headrace.open(sys.argv[1], store=sys.argv[2], cluster=sys.argv[3])
for number in range(5):
    bus.publish("orders", b"%d" % number)
print("published", flush=True)
time.sleep(600)
"""


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"directory://{tmp_path}/store"


class OtherProgram:
    """Another program that has the cluster open, and has published five messages."""

    def __init__(self, data: Path, store: str) -> None:
        command = [sys.executable, "-c", _PROGRAM, str(data), store, CLUSTER]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"published\n"

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def other(tmp_path: Path, store: str) -> Iterator[OtherProgram]:
    program = OtherProgram(tmp_path / "other", store)
    yield program
    program.kill()


def all_values(bus: headrace.Bus) -> list[bytes]:
    with bus.subscribe("orders", start="earliest", timeout=1) as messages:
        return [message.value for message in messages]


def test_what_was_published_is_there_when_it_is_opened_elsewhere(tmp_path: Path, store: str) -> None:
    with headrace.open(tmp_path / "one", store=store, cluster=CLUSTER) as bus:
        assert bus.publish("orders", b"1").durability is headrace.Durability.REPLICATED
        status = bus.cluster.describe()
        assert (status.cluster, status.shards[0].epoch) == (CLUSTER, 1)
    with headrace.open(tmp_path / "two", store=store, cluster=CLUSTER) as bus:
        assert all_values(bus) == [b"1"]
        assert bus.publish("orders", b"2").offset == 1
    with headrace.open(tmp_path / "one", store=store, cluster=CLUSTER) as bus:
        assert all_values(bus) == [b"1", b"2"]


def test_open_async_is_a_node_too(tmp_path: Path, store: str) -> None:
    async def use() -> int:
        async with await headrace.open_async(tmp_path / "one", store=store, cluster=CLUSTER) as bus:
            receipt = await bus.publish("orders", b"1")
            assert receipt.durability is headrace.Durability.REPLICATED
        async with await headrace.open_async(tmp_path / "two", store=store, cluster=CLUSTER) as bus:
            return (await bus.publish("orders", b"2")).offset

    assert asyncio.run(use()) == 1


def test_a_program_that_does_not_close_its_node_ends_in_order(tmp_path: Path, store: str) -> None:
    program = f"""
import headrace
bus = headrace.open({str(tmp_path / "one")!r}, store={store!r}, cluster={CLUSTER!r})
print(bus.publish("orders", b"1").durability.name)
"""
    ended = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "REPLICATED\n")
    assert "Traceback" not in ended.stderr, ended.stderr
    found = read_manifest(DirectoryStore(LocalDisk(), store.removeprefix("directory://")), ShardKeys(CLUSTER, 0))
    assert found is not None
    assert found.manifest.released


def test_a_second_program_is_refused_until_the_first_is_gone(tmp_path: Path, store: str, other: OtherProgram) -> None:
    with pytest.raises(LogInUse, match=r"is served by .*, inside a program"):
        headrace.open(tmp_path / "mine", store=store, cluster=CLUSTER)
    other.kill()
    with headrace.open(tmp_path / "mine", store=store, cluster=CLUSTER) as bus:
        assert all_values(bus) == [b"0", b"1", b"2", b"3", b"4"]
        assert bus.publish("orders", b"5").offset == 5


def test_a_program_is_refused_while_a_node_serves(tmp_path: Path, store: str) -> None:
    node = NodeProcess(tmp_path, "a")
    try:
        with pytest.raises(LogInUse, match=f"is served by a at {node.url}: connect to it"):
            headrace.open(tmp_path / "mine", store=store, cluster=CLUSTER)
        with connect([node]) as bus:
            bus.publish("orders", b"1")
        assert node.terminate() == 0
        with headrace.open(tmp_path / "mine", store=store, cluster=CLUSTER) as bus:
            assert all_values(bus) == [b"1"]
    finally:
        node.end()


def test_a_node_takes_over_from_a_program(tmp_path: Path, other: OtherProgram) -> None:
    node = NodeProcess(tmp_path, "a")  # it follows: a program is followed by the store alone
    try:
        other.kill()
        with connect([node]) as bus:
            assert eventually(lambda: all_values(bus)) == [b"0", b"1", b"2", b"3", b"4"]
    finally:
        node.end()


def test_without_a_store_or_with_memory_it_is_refused(tmp_path: Path, store: str) -> None:
    with pytest.raises(headrace.errors.InvalidArgument, match="cluster needs store"):
        headrace.open(tmp_path / "one", cluster=CLUSTER)
    with pytest.raises(headrace.errors.InvalidArgument, match="store needs cluster"):
        headrace.open(tmp_path / "one", store=store)
    with pytest.raises(headrace.errors.InvalidArgument, match="not :memory:"):
        headrace.open(":memory:", store=store, cluster=CLUSTER)
