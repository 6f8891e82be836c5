"""Stores that fail half of their requests, are slow, fill up, lie, or go back in time: no promise is broken on them."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest
from tests.faults.cluster_history import now_us
from tests.faults.cluster_network import LoopbackCluster
from tests.faults.cluster_processes import FOLLOWING, SERVING, ClusterNode, ClusterProcesses
from tests.faults.cluster_stage import ClusterClients
from tests.faults.fork_server import Nursery
from tests.faults.steered_node import STEERING, steer
from tests.faults.store_processes import DirectoryOnly

import headrace

STEERED = "tests.faults.steered_node:serve_steered"
HALF = {"lost_requests": 0.2, "lost_answers": 0.2, "late": 0.1}


class _Stage:
    """A cluster of two nodes on a store in a directory, whose faults the test steers."""

    def __init__(self, nursery: Nursery, directory: Path, store: DirectoryOnly) -> None:
        self.steering = directory / "steering.json"
        self.store = store
        store.environment = {STEERING: str(self.steering)}
        self.steer()
        self.cluster = ClusterProcesses(nursery, directory, LoopbackCluster(["n1", "n2"]), store, function=STEERED)

    def steer(self, **faults: Any) -> None:
        """Switch these faults of the store on, and all others off."""
        steer(self.steering, **faults)

    def ended(self, node: ClusterNode) -> str:
        """Start a node that must end by itself, with an error; returns what it said."""
        node.start()
        assert os.waitstatus_to_exitcode(node.process.wait()) == 1, node.process.said()
        return node.process.said()


@contextmanager
def stage_of(directory: Path) -> Iterator[_Stage]:
    """The stage, with nothing started."""
    with DirectoryOnly() as store, Nursery(directory) as nursery:
        assert isinstance(store, DirectoryOnly)
        yield _Stage(nursery, directory, store)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(HALF, id="fails half", marks=pytest.mark.long),
        pytest.param({"delay_s": (0.02, 0.3)}, id="slow", marks=pytest.mark.long),
        pytest.param({**HALF, "doubled": 0.2, "delay_s": (0, 0.05)}, id="all of it", marks=pytest.mark.long),
    ],
)
def test_clients_get_on_with_a_store_that_is_hardly_there(tmp_path: Path, faults: dict[str, Any]) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    with stage_of(tmp_path) as stage:
        cluster = stage.cluster
        cluster.start()
        cluster.serving()
        cluster.wait_until(
            lambda: {node.role() for node in cluster.nodes.values()} == {SERVING, FOLLOWING}, "no node follows"
        )
        clients = ClusterClients(cluster.nursery, tmp_path, seed, cluster.url, cluster.addresses)
        clients.start()
        clients.wait_for_progress(now_us(), cluster.check)
        stage.steer(**faults)
        clients.wait_for_progress(now_us(), cluster.check)
        owner = cluster.serving()
        owner.kill()
        clients.wait_for_progress(now_us(), cluster.check)
        stage.steer()
        owner.start()
        clients.wait_for_progress(now_us(), cluster.check)
        final = clients.finish()
        assert not (found := clients.mistakes(final)), "\n".join(found[:20])


def test_nothing_is_acknowledged_while_the_store_is_full(tmp_path: Path) -> None:
    with stage_of(tmp_path) as stage:
        stage.cluster.start()
        stage.cluster.serving()
        with headrace.connect(stage.cluster.url, timeout=60, wait=60) as bus:
            bus.publish("orders", b"before")
            stage.steer(full=True)
            time.sleep(0.1)
            with bus.producer("orders") as producer:
                told: list[float] = []
                producer.send(b"while", callback=lambda *_: told.append(time.monotonic()))
                time.sleep(3)
                assert not told, "a message was acknowledged that the store could not take"
                freed = time.monotonic()
                stage.steer()
                producer.flush()
            assert told[0] > freed
            values = [value for batch in bus.fetch("orders", 0, 0) for value in batch.columns().values]
        assert values == [b"before", b"while"]


def test_a_node_waits_for_a_store_that_starts_later(tmp_path: Path) -> None:
    with stage_of(tmp_path) as stage:
        node = stage.cluster.nodes["n1"]
        stage.steer(down=True)
        node.start()
        stage.cluster.wait_until(lambda: "store not reached at the start" in node.process.said(), "it does not say so")
        stage.steer()
        assert stage.cluster.serving() is node


def test_a_node_refuses_a_store_that_ignores_conditions(tmp_path: Path) -> None:
    with stage_of(tmp_path) as stage:
        stage.steer(ignores_conditions=True)
        said = stage.ended(stage.cluster.nodes["n1"])
        assert "[store_unqualified]" in said
        assert "creates an object that exists" in said


def test_a_node_refuses_a_store_that_went_back_in_time(tmp_path: Path) -> None:
    with stage_of(tmp_path) as stage:
        node, store = stage.cluster.nodes["n1"], stage.store.directory / "store"
        node.start()
        stage.cluster.serving()
        with headrace.connect(stage.cluster.url, timeout=60, wait=60) as bus:
            bus.publish("orders", b"in the backup")
            backup = shutil.copytree(store, tmp_path / "backup")
            bus.publish("orders", b"after the backup")
        node.stop()
        shutil.rmtree(store)
        shutil.copytree(backup, store)
        assert "[store_went_back]" in stage.ended(node)
