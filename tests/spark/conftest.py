"""What Spark's tests share: one session for all of them, and real brokers."""

import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.broker_process import BrokerProcess
from tests.faults.fork_server import Nursery
from tests.spark.pythons import Pythons, forked_pythons

import headrace
from headrace.spark.pipelines.paths import Folder
from headrace.spark.pipelines.processes import is_alive
from headrace.spark.pipelines.registry import Registry
from headrace.spark.pipelines.supervisor import supervised

pytest.importorskip("pyspark", reason="Spark is not installed: pip install headrace[spark]")


JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
"""For processes that live for seconds: compile quickly rather than well."""
TIDY_S = 120.0
MANY = 300
"""So many tests load most of what is ever loaded."""


def java_problem() -> str | None:
    """Why Spark cannot run here; None when it can."""
    said = java_version()
    if not said:
        return "Spark's tests need Java 17: apt-get install openjdk-17-jre-headless"
    version = re.search(r'version "(\d+)', said)
    return None if version and int(version[1]) >= 17 else f"Spark's tests need Java 17, and this is another: {said}"


@functools.cache
def java_version() -> str:
    """What Java says it is; nothing if there is none."""
    java = f"{os.environ['JAVA_HOME']}/bin/java" if os.environ.get("JAVA_HOME") else shutil.which("java")
    return subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr if java else ""


def spark_settings() -> dict[str, str]:
    """Settings for a small machine and short jobs: what a query does is interpreted, not compiled to be run once."""
    return {
        "spark.master": "local[2]",
        "spark.app.name": "headrace-tests",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.streaming.pollingDelay": "1ms",
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.streaming.stopTimeout": "60s",
        "spark.driver.memory": "1g",
    }


@pytest.fixture(scope="session")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pythons]:
    """What Spark takes for Python."""
    with forked_pythons(tmp_path_factory.mktemp("python")) as started:
        yield started


@pytest.fixture(scope="session")
def classes(request: pytest.FixtureRequest) -> Path:
    """A file that Java takes Spark's classes from in half the time: a run of all tests leaves it to the next one."""
    import pyspark

    made_of = f"{java_version()} {pyspark.__file__} {pyspark.__version__}"
    cache = request.config.cache.mkdir("spark-classes")
    return cache / f"{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.jsa"


@pytest.fixture(scope="session")
def quickly(pythons: Pythons, classes: Path) -> dict[str, str]:
    """Variables of the environment with which Spark begins quickly."""
    options = f"{JAVA} -XX:SharedArchiveFile={classes}" if classes.exists() else JAVA
    # Tasks take credentials from the environment that Spark was begun in.
    credentials = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret"}
    return {**pythons.environment, **credentials, "SPARK_LAUNCHER_OPTS": JAVA, "SPARK_SUBMIT_OPTS": options}


@pytest.fixture(scope="session")
def spark(
    request: pytest.FixtureRequest, quickly: dict[str, str], classes: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["object"]:
    """The one Spark session."""
    if problem := java_problem():
        pytest.skip(problem)
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    os.environ.update(quickly)
    home = tmp_path_factory.mktemp("spark")
    settings = {**spark_settings(), "spark.sql.warehouse.dir": f"{home}/warehouse"}
    many = request.session.testscollected >= MANY and not os.environ.get("CI")
    kept = home / "classes" if many and not classes.exists() else None
    if kept:
        settings["spark.driver.extraJavaOptions"] = f"-XX:ArchiveClassesAtExit={kept}"
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
    if kept:
        java = SparkContext._gateway.proc
        java.stdin.close()  # it ends when it is alone
        java.wait()
        shutil.move(kept, classes)


class SparkBroker(BrokerProcess):
    """A broker for Spark's tests, with a client."""

    _bus: headrace.Bus | None = None

    @property
    def address(self) -> str:
        """What the option `address` is given."""
        return self.tcp_url

    @property
    def bus(self) -> headrace.Bus:
        """A client."""
        if self._bus is None:
            self._bus = self.connect()
        return self._bus

    def restart(self) -> None:
        """Kill it, and start it again."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End the client and the broker."""
        if self._bus is not None:
            self._bus.close()
        self.stop()


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkBroker]:
    """One broker for all tests that do no harm to it; use topics of your own."""
    yield from _running(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def broker(shared_broker: SparkBroker) -> SparkBroker:
    """The shared broker: do not stop it."""
    return shared_broker


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[SparkBroker]:
    """A broker for one test, which may do with it what it likes."""
    yield from _running(tmp_path)


@pytest.fixture
def tidy(own_broker: SparkBroker) -> Iterator[SparkBroker]:
    """A broker that may be killed, with no pipelines afterwards, however a test has ended."""
    yield own_broker
    registry, home = Registry(own_broker.bus), own_broker.data / "pipelines"
    registry.prepare()
    registry.look()
    for name in list(registry.records):
        registry.remove(name)
        driver = Folder(home / name).driver()
        if driver is not None and is_alive(driver.pid, driver.started):
            os.killpg(driver.pid, signal.SIGKILL)
    end = time.monotonic() + TIDY_S
    while supervised(home):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name for a topic that no other test uses."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name).strip("-")[:100]


def _running(path: Path) -> Iterator[SparkBroker]:
    with Nursery(path) as nursery:
        started = SparkBroker(nursery, path / "data")
        started.start()
        started.connect().close()
        yield started
        started.close()
