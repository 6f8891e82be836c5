"""The one Spark session of a run: local, on two cores, and ended when Python ends."""

import atexit
import contextlib
import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import installing, spark_connector
from headrace.bench.measure import Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CORES = 2
_SETTINGS = {
    "spark.master": f"local[{CORES}]",
    "spark.app.name": "headrace-benchmarks",
    "spark.driver.memory": "3g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": str(CORES),
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
}
_WORDS = f"local[{CORES}], 3 GB for the driver, spark.python.unix.domain.socket.enabled, all else as Spark has it"
_PATIENCE_S = 30.0


def session() -> "SparkSession":
    """The session that there is, or a new one; raises Unavailable, with the reason, where Spark does not run."""
    installing.need("pyspark", "pyspark")
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or _started()


@functools.cache
def _started() -> "SparkSession":
    from pyspark.sql import SparkSession

    java = f"{os.environ['JAVA_HOME']}/bin/java" if os.environ.get("JAVA_HOME") else "java"
    if shutil.which(java) is None:
        raise Unavailable("there is no java (Debian: apt-get install openjdk-17-jre-headless)")
    # Spark's workers are to be this Python, and to find what it finds.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    home = tempfile.mkdtemp(prefix="headrace-benchmarks-spark-")
    settings = {**_SETTINGS, "spark.local.dir": home, "spark.sql.warehouse.dir": f"{home}/warehouse"}
    with contextlib.suppress(Unavailable):  # told by the subjects that need it
        settings["spark.jars"] = ",".join(map(str, spark_connector.jars()))
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    atexit.register(_end, home)
    return builder.getOrCreate()


def _end(home: str) -> None:
    """Stop Spark, and wait until its processes are gone."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is not None:
        process: Any = getattr(SparkContext._gateway, "proc", None)
        context.stop()
        if process is not None:
            process.stdin.close()  # which tells it that nobody needs it any more
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    shutil.rmtree(home, ignore_errors=True)


def words() -> str:
    """What runs queries, in words."""
    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        version = "is not installed"
    return f"Spark {version}, {_WORDS}"


def connector() -> str:
    """The files of the connector for Kafka that the session has; raises Unavailable if it has none."""
    given = session().conf.get("spark.jars", "") or ""
    names = sorted(Path(name).stem for name in given.split(",") if name)
    if not any(name.startswith(spark_connector.ARTIFACT) for name in names):
        spark_connector.jars()  # which knows why not
        raise Unavailable("the session was started without Spark's connector for Kafka")
    return ", ".join(names)
