"""A real cluster: a master and two workers whose Python lacks Headrace; it is sent along as the how-to page says."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from tests.known import ENVIRONMENT
from tests.pages import ROOT, blocks
from tests.spark.conftest import JAVA, SparkBroker, java_problem

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

HOME = Path(pyspark.__file__).parent
PAGE = ROOT / "docs" / "how-to" / "spark.md"
SOON_S = 300.0
PATIENCE_S = 900.0
WORKERS = 2
PROGRAM = """
import sys
import headrace.spark

address, master = sys.argv[1:]
conf = {
    "spark.archives": "environment.tar.gz#environment",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.cores.max": "2",
}
spark = headrace.spark.session(address, tables=["numbers"], master=master, conf=conf)
rows = spark.sql("select partition, count(*) as n from numbers group by 1 order by 1").collect()
print([tuple(row) for row in rows])
doubled = spark.sql("select key, cast(cast(value as int) * 2 as string) as value from numbers")
doubled.write.format("headrace").option("address", address).option("topic", "doubled").mode("append").save()
"""


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


class Cluster:
    """A standalone cluster on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"spark://127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        # Nothing of the tests' own environment: no PYTHONPATH, no Python with Headrace.
        kept = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG") if name in os.environ}
        daemons = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{JAVA} -Dspark.master.rest.enabled=false",
        }
        self._environment = {**kept, **daemons}

    def start(self) -> None:
        """Start the master and the workers, and wait until they know each other."""
        host, port = "127.0.0.1", self.address.rpartition(":")[2]
        master = self._run("master", "master.Master", "--host", host, "--port", port, "--webui-port", str(free_port()))
        self._wait(master, r"I have been elected leader|New state: ALIVE", 1)
        for number in range(WORKERS):
            work = self.directory / f"work-{number}"
            options = ("--host", host, "--cores", "1", "--memory", "1g", "--work-dir", str(work))
            self._run(f"worker-{number}", "worker.Worker", *options, "--webui-port", str(free_port()), self.address)
        self._wait(master, r"Registering worker", WORKERS)

    def executors(self) -> list[Path]:
        """Where executors have unpacked what was sent to them."""
        return sorted(self.directory.glob("work-*/app-*/*/environment"))

    def stop(self) -> None:
        """End all of it."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(SOON_S)

    def _run(self, name: str, what: str, *arguments: str) -> Path:
        log = self.directory / f"{name}.log"
        with log.open("wb") as file:
            command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{what}", *arguments]
            process = subprocess.Popen(command, env=self._environment, stdout=file, stderr=file, cwd=self.directory)
        self._processes.append(process)
        return log

    def _wait(self, log: Path, pattern: str, count: int) -> None:
        deadline = time.monotonic() + SOON_S
        while len(re.findall(pattern, log.read_text())) < count:
            assert time.monotonic() < deadline, log.read_text()
            assert all(process.poll() is None for process in self._processes), log.read_text()
            time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if problem := java_problem():
        pytest.skip(problem)
    made = Cluster(tmp_path / "cluster")
    made.directory.mkdir()
    try:
        made.start()
        yield made
    finally:
        made.stop()


def pack(directory: Path) -> None:
    """Make the environment that is sent along, as the page says; the project stands for the released package."""
    (recipe,) = (block.text for block in blocks(PAGE.read_text(encoding="utf-8")) if "python -m venv" in block.text)
    for line in recipe.splitlines():
        if line.startswith("PYSPARK_PYTHON"):
            continue  # which is how programs are started
        command = line.replace("python -m venv", f"{sys.executable} -m venv").replace("/path/to/headrace", str(ROOT))
        done = subprocess.run(
            ["bash", "-c", command], cwd=directory, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_executors_are_sent_what_they_lack(cluster: Cluster, own_broker: SparkBroker, tmp_path: Path) -> None:
    bus = own_broker.bus
    bus.create_topic("numbers", partitions=4)
    for partition in range(4):
        bus.publish_many("numbers", [b"%d" % at for at in range(100)], partition=partition)
    pack(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, own_broker.address, cluster.address],
        env={
            **ENVIRONMENT,
            "PYSPARK_PYTHON": "./environment/bin/python",
            "SPARK_LAUNCHER_OPTS": JAVA,
            "SPARK_SUBMIT_OPTS": JAVA,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert done.stdout.split("\n")[0] == "[(0, 100), (1, 100), (2, 100), (3, 100)]"
    values = sorted(int(message.value or b"") for message in bus.subscribe("doubled", timeout=5))
    assert values == sorted(at * 2 for at in range(100) for _ in range(4))
    assert {path.parents[2].name for path in cluster.executors()} == {"work-0", "work-1"}
