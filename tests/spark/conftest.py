"""What Spark's tests share: one session for all of them, and real brokers."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.broker_nursery import Nursery
from tests.faults.broker_process import BrokerProcess

import headrace

pytest.importorskip("pyspark", reason="Spark is not installed: pip install headrace[spark]")


def java_problem() -> str | None:
    """Why Spark cannot run here; None when it can."""
    java = f"{os.environ['JAVA_HOME']}/bin/java" if os.environ.get("JAVA_HOME") else shutil.which("java")
    if not java:
        return "Spark's tests need Java 17: apt-get install openjdk-17-jre-headless"
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', said)
    return None if version and int(version[1]) >= 17 else f"Spark's tests need Java 17, which {java} is not: {said}"


def spark_settings() -> dict[str, str]:
    """Settings for a small machine and short jobs."""
    return {
        "spark.master": "local[2]",
        "spark.app.name": "headrace-tests",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.streaming.stopTimeout": "60s",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["object"]:
    """The one Spark session."""
    if problem := java_problem():
        pytest.skip(problem)
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder
    home = tmp_path_factory.mktemp("spark")
    for name, value in {**spark_settings(), "spark.sql.warehouse.dir": f"{home}/warehouse"}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


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
