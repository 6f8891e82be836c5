"""Nodes of two versions, which know two formats, in one cluster, which is upgraded node by node."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.faults.cluster_network import LoopbackCluster
from tests.faults.cluster_processes import FOLLOWING, ClusterProcesses
from tests.faults.fork_server import PATIENCE_S, Nursery
from tests.faults.store_processes import DirectoryOnly

import headrace
from headrace.model.errors import InvalidArgument

VERSION_1, VERSION_2 = "tests.faults.versioned_node:serve_version_1", "tests.faults.versioned_node:serve_version_2"
TOPIC = "orders"
_REPORTED_S = 1.2
"""Followers report to the node that serves twice a second."""


class _Upgrading:
    """A cluster whose nodes are replaced, and a client that publishes after each step."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        self.cluster = cluster
        self.bus = headrace.connect(cluster.url, timeout=PATIENCE_S, wait=PATIENCE_S)
        self.published: list[bytes] = []

    def publish(self) -> None:
        """Publish one more message, which somebody must take."""
        value = b"%d" % len(self.published)
        self.bus.publish(TOPIC, value)
        self.published.append(value)

    def replace(self, name: str, version: str) -> None:
        """End a node in peace, and start it with another version."""
        node = self.cluster.nodes[name]
        time.sleep(_REPORTED_S)  # or one that has just begun to serve knows no successor, and is the next one itself
        node.stop()
        node.function = version
        node.start()
        self.cluster.wait_until(lambda: node.role() == FOLLOWING, f"{name} does not follow")
        self.publish()

    def move(self, name: str) -> None:
        """Have the shard served by a node, as soon as that reports to the node that serves now."""

        def is_moved() -> bool:
            if self.cluster.serving().name != name:
                with suppress(InvalidArgument):
                    self.bus.cluster.move(0, name)
            return self.cluster.serving().name == name

        self.cluster.wait_until(is_moved, f"the shard is not moved to {name}")
        self.publish()

    def format(self) -> int:
        """The format of the shard."""
        return self.bus.cluster.describe().shards[0].format

    def formats_known(self) -> dict[str, int]:
        """Nodes to the highest format that each knows."""
        return {one.node: one.format_max for one in self.bus.cluster.describe().nodes}

    def check_values(self) -> None:
        """Everything published is there, in order."""
        [batches] = [self.bus.fetch(TOPIC, 0, 0)]
        values = [value for batch in batches for value in batch.columns().values]
        assert values == self.published


@contextmanager
def upgrading(directory: Path, versions: dict[str, str]) -> Iterator[_Upgrading]:
    """A cluster with nodes of these versions."""
    with DirectoryOnly() as store, Nursery(directory) as nursery:
        cluster = ClusterProcesses(nursery, directory, LoopbackCluster(list(versions)), store)
        for name, version in versions.items():
            cluster.nodes[name].function = version
        cluster.start()
        cluster.serving()
        stage = _Upgrading(cluster)
        with stage.bus:
            stage.publish()
            yield stage
            stage.check_values()


def test_a_cluster_is_upgraded_node_by_node(tmp_path: Path) -> None:
    with upgrading(tmp_path, dict.fromkeys(("n1", "n2", "n3"), VERSION_1)) as stage:
        stage.replace("n1", VERSION_2)
        stage.replace("n2", VERSION_2)
        stage.cluster.wait_until(
            lambda: stage.formats_known() == {"n1": 2, "n2": 2, "n3": 1}, "records of nodes do not tell their formats"
        )
        stage.move("n1")
        with pytest.raises(InvalidArgument, match="n3 cannot read format 2"):
            stage.bus.cluster.upgrade()
        assert stage.format() == 1
        stage.move("n3")  # the older version can still take over from the newer one
        stage.replace("n3", VERSION_2)
        stage.cluster.wait_until(lambda: set(stage.formats_known().values()) == {2}, "a node has the older version")
        assert stage.bus.cluster.upgrade().format == 2
        stage.cluster.wait_until(lambda: stage.format() == 2, "the manifest has the former format")
        stage.publish()
        _check_that_the_older_version_never_serves(stage)


def _check_that_the_older_version_never_serves(stage: _Upgrading) -> None:
    """A node that was left behind follows, and says why it claims nothing, even if it is the only one."""
    stage.replace("n3", VERSION_1)
    older, others = stage.cluster.nodes["n3"], [stage.cluster.nodes[name] for name in ("n1", "n2")]
    for node in others:
        node.kill()
    stage.cluster.wait_until(
        lambda: "newer than this software" in older.process.said(), "the older node does not say why it waits"
    )
    time.sleep(3)  # a node of the newer version would have claimed the shard by now
    assert older.role() == FOLLOWING
    for node in others:
        node.start()
    assert stage.cluster.serving() in others
    stage.publish()
