"""Spark's driver, its Python workers and the broker are killed while a stream is written: each row is there once."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random, SystemRandom

import pytest
from tests.known import ENVIRONMENT
from tests.spark import sink_driver
from tests.spark.conftest import SparkBroker
from tests.spark.pythons import Pythons, forked_pythons
from tests.spark.sink_driver import ROWS, TOPIC
from tests.spark.spark_nodes import SparkNodes
from tests.store_servers import PostgresServer, running

LIVES = int(os.environ.get("HEADRACE_DRIVERS", "2"))
STRIKES = 4
PARTITIONS = 2
PATIENCE_S = 180.0


class Driver:
    """A process with a stream in it, which begins when it is told to."""

    def __init__(self, number: int, directory: Path, address: str, environment: dict[str, str]) -> None:
        self._permission = directory / f"permission-{number}"
        self._output = directory / f"driver-{number}.log"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, sink_driver.__file__, address, str(directory / "checkpoint"), str(self._permission)],
                stdout=output,
                stderr=output,
                env={**ENVIRONMENT, **environment},
                start_new_session=True,
            )

    def begin(self) -> None:
        """Let it write."""
        self._permission.touch()

    def check(self) -> None:
        """It must be alive."""
        assert self.process.poll() is None, self._output.read_text(errors="replace")[-5000:]

    def kill(self) -> None:
        """Kill it, with its Java; Python workers that it leaves behind may go on for a moment."""
        self.check()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def kill_a_worker(pythons: Pythons, dice: Random) -> bool:
    """Kill a process that runs Python for Spark, if there is one just now."""
    workers = [pid for pid in _below(pythons.pid) if _name(pid) == "pyspark.daemon"]
    if not workers:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(dice.choice(workers), signal.SIGKILL)
    return True


def _below(parent: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, grown = {parent}, True
    while grown:
        more = {pid for pid, above in parents.items() if above in found} - found
        found, grown = found | more, bool(more)
    return sorted(found - {parent})


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


class Stage:
    """The broker, and the one who writes just now."""

    def __init__(
        self,
        broker: SparkBroker | SparkNodes,
        directory: Path,
        environment: dict[str, str],
        pythons: Pythons,
        dice: Random,
    ) -> None:
        self._broker = broker
        self._directory = directory
        self._environment = {**environment, **pythons.environment}
        self._pythons = pythons
        self._dice = dice
        self._started = 0
        self.struck: dict[str, int] = {"broker": 0, "worker": 0, "driver": 0}

    def start(self) -> Driver:
        """Another driver, which takes long to be ready."""
        self._started += 1
        return Driver(self._started, self._directory, self._broker.address, self._environment)

    def live(self, driver: Driver, more: int) -> None:
        """Wait until so many batches more were written."""
        wanted = self.written() + more * ROWS
        deadline = time.monotonic() + PATIENCE_S
        while self.written() < wanted:
            driver.check()
            assert time.monotonic() < deadline, "nothing more is written"
            time.sleep(0.02)

    def strike(self) -> None:
        """Kill the broker, or a worker, or both, at some moment."""
        time.sleep(self._dice.uniform(0, 0.7))
        what = self._dice.choice(["broker", "worker", "worker", "both"])
        if what != "broker":
            self.struck["worker"] += kill_a_worker(self._pythons, self._dice)
        if what != "worker":
            self._broker.restart()
            self.struck["broker"] += 1

    def end(self, driver: Driver) -> None:
        """Kill the driver, at some moment."""
        time.sleep(self._dice.uniform(0, 0.7))
        driver.kill()
        self.struck["driver"] += 1

    def written(self) -> int:
        """How many messages there are."""
        return sum(self._broker.bus.offsets(TOPIC).values())

    def check(self) -> int:
        """Every number is there once, and of each batch all; returns how many."""
        found: list[int] = []
        for partition in range(PARTITIONS):
            offset = 0
            while batches := self._broker.bus.fetch(TOPIC, partition, offset):
                found += [int(value or b"") for batch in batches for value in batch.columns().values]
                offset = batches[-1].next_offset
        twice = len(found) - len(set(found))
        assert not twice, f"{twice} of {len(found)} rows are there twice"
        assert sorted(found) == list(range(len(found))), "rows are missing"
        assert len(found) % ROWS == 0, "only a part of a batch is there"
        return len(found)


@pytest.fixture
def own_pythons(tmp_path: Path) -> Iterator[Pythons]:
    """No other test's workers are below it, and killed."""
    with forked_pythons(tmp_path) as started:
        yield started


def test_every_row_is_written_once_whoever_is_killed(
    own_broker: SparkBroker, own_pythons: Pythons, quickly: dict[str, str], tmp_path: Path
) -> None:
    write_and_strike(own_broker, own_pythons, quickly, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["directory", "PostgreSQL"])
def test_every_row_is_written_once_whichever_node_is_killed(
    own_pythons: Pythons, quickly: dict[str, str], tmp_path: Path, store: str
) -> None:
    place = tmp_path / "cluster"
    place.mkdir()
    with contextlib.ExitStack() as stack:
        nodes = SparkNodes(place)
        if store == "PostgreSQL":
            server = stack.enter_context(running(PostgresServer))
            nodes = SparkNodes(place, server.url, server.environment)
        stack.enter_context(nodes)
        stack.callback(nodes.close)
        write_and_strike(nodes, own_pythons, quickly, tmp_path, drivers=LIVES + 1)


def write_and_strike(
    broker: SparkBroker | SparkNodes,
    pythons: Pythons,
    environment: dict[str, str],
    directory: Path,
    drivers: int = LIVES,
) -> None:
    """Several drivers write one after the other, and are killed, with what they need; each row must be there once."""
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    broker.bus.create_topic(TOPIC, partitions=PARTITIONS)
    stage = Stage(broker, directory, environment, pythons, Random(seed))
    driver = following = stage.start()
    try:
        for _ in range(drivers - 1):
            driver, following = following, stage.start()  # beside this one: to start takes longer than all else
            driver.begin()
            stage.live(driver, 1)
            for number in range(STRIKES):
                stage.strike()
                if number % 2:
                    stage.live(driver, 1)
            stage.end(driver)
            stage.check()
        driver = following
        driver.begin()
        stage.live(driver, 3)
        driver.kill()
    finally:
        for each in (driver, following):
            if each.process.poll() is None:
                each.kill()
    broker.restart()
    print(f"{stage.check()} rows, struck: {stage.struck}")
    assert stage.struck["broker"] + stage.struck["worker"] > 0
