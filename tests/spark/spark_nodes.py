"""A cluster for Spark's tests: its nodes are real processes, and the one that serves is killed or hands over."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from tests.cluster_processes import SOON_S, ClusterProcesses

import headrace
from headrace.errors import InvalidArgument

NODES = 3
LOOK_EVERY_S = 0.02


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that happens soon."""
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, f"it does not happen that {what}"
        time.sleep(LOOK_EVERY_S)


class SparkNodes(ClusterProcesses):
    """Nodes with a client; to Spark they are one address, and what a broker is to other tests."""

    def __init__(self, directory: Path, store: str = "", environment: Mapping[str, str] | None = None) -> None:
        """The store is a directory beside those of the nodes, unless another one is given, with its credentials."""
        super().__init__(directory, store or f"directory://{directory}/store", NODES, environment)
        self._bus: headrace.Bus | None = None

    @property
    def address(self) -> str:
        """What the option `address` is given."""
        return self.url

    @property
    def bus(self) -> headrace.Bus:
        """A client, which finds whoever serves."""
        if self._bus is None:
            self._bus = headrace.connect(self.url, timeout=SOON_S, wait=SOON_S)
        return self._bus

    def owner(self) -> str:
        """The node that serves, which may take a moment to be there."""
        return self.bus.cluster.describe().shards[0].owner

    def kill_owner(self) -> str:
        """Kill the node that serves, as kill -9 does; returns its name."""
        name = self.owner()
        self.kill(name)
        return name

    def restart(self) -> None:
        """Kill the node that serves, wait until another one does, and start it again: it follows."""
        killed = self.kill_owner()
        until(lambda: self.owner() != killed, "another node takes over")
        self.start(killed)

    def start_killed(self) -> None:
        """Start those that were killed again."""
        for name in self.names:
            if name not in self.running:
                self.start(name)

    def hand_over(self) -> None:
        """Let another node serve, as an operator does before the machine is restarted."""

        def move() -> bool:
            nodes = self.bus.cluster.describe().nodes
            able = [one.node for one in nodes if one.role == "following" and not one.lag_objects]
            try:
                return bool(able) and bool(self.bus.cluster.move(0, able[0]))
            except InvalidArgument:  # it has not reported to this owner yet
                return False

        until(move, "a node follows, has everything and takes over")

    def close(self) -> None:
        """End the client."""
        if self._bus is not None:
            self._bus.close()
            self._bus = None


class Barrier:
    """Stops tasks of Spark in the middle of their rows, until something was done to the cluster."""

    def __init__(self, directory: Path, rows: int) -> None:
        """Each task stops after so many rows."""
        directory.mkdir()
        self._directory = str(directory)
        self._rows = rows

    def __enter__(self) -> "Barrier":
        return self

    def __exit__(self, *_: object) -> None:
        self.open()  # nobody stands there for ever

    def before(self, rows: DataFrame) -> DataFrame:
        """The same rows, which stop here."""
        return rows.mapInArrow(self._passing(), rows.schema)

    def _passing(self) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        directory, rows = Path(self._directory), self._rows

        def passed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            seen = 0
            for batch in batches:
                yield batch
                seen += batch.num_rows
                if seen >= rows and not (directory / "open").exists():
                    (directory / f"reached-{TaskContext.get().partitionId()}").touch()
                    deadline = time.monotonic() + 2 * SOON_S
                    while not (directory / "open").exists():
                        assert time.monotonic() < deadline, "nobody opens the barrier"
                        time.sleep(LOOK_EVERY_S)

        return passed

    def wait_for(self, tasks: int) -> None:
        """Wait until so many tasks stand before it."""
        until(lambda: len(list(Path(self._directory).glob("reached-*"))) >= tasks, "all tasks are at the barrier")

    def open(self) -> None:
        """Let all tasks go on, and all later ones."""
        (Path(self._directory) / "open").touch()
