"""The Spark session of a pipeline: local, on a cluster, or on a Spark Connect server."""

import importlib.util
import os
import re
import shutil
import signal
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from headrace.model.errors import InvalidArgument
from headrace.spark.errors import SparkMissing
from headrace.spark.local_python import LOOPBACK, choose_python, on_loopback

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[*]"
_LOCAL_CORES = re.compile(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?")
_MASTERS = "local[*], spark://host:7077, yarn, k8s://..., or sc://host:15002 for Spark Connect"

ALWAYS = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.streaming.stopTimeout": "20s",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings that speed up micro-batches without a drawback; Spark's web UI, which has no access control, is off."""
_ON_LOOPBACK = {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}

_LOCAL_FILES = "spark.hadoop.fs.file.impl"
_STATE_STORE = "spark.sql.streaming.stateStore.providerClass"
QUICK = {
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    _LOCAL_FILES: "org.apache.hadoop.fs.RawLocalFileSystem",
}
"""Settings that speed up micro-batches further, without checksums of local files."""


def local_cores(master: str) -> int | None:
    """Return the number of local cores of a master; None if it is not local.

    >>> local_cores("local[2]"), local_cores("yarn")
    (2, None)
    """
    found = _LOCAL_CORES.fullmatch(master)
    if found is None:
        return None
    return (os.cpu_count() or 1) if found[1] == "*" else int(found[1] or 1)


def is_connect(master: str) -> bool:
    """Return whether a master is the address of a Spark Connect server."""
    return master.startswith("sc://")


def checked_master(master: str) -> str:
    """Return the master; raises InvalidArgument if Spark has no such master."""
    if local_cores(master) is None and not re.match(r"(sc|spark|k8s|yarn|mesos)\b", master):
        raise InvalidArgument(f"{master!r} is no master of Spark's; it is {_MASTERS}")
    return master


def session_settings(name: str, master: str, conf: Mapping[str, str], *, quick: bool, quiet: bool) -> dict[str, str]:
    """Return all settings of an application; the user's take precedence."""
    settings = {"spark.app.name": name} if is_connect(master) else {"spark.app.name": name, **ALWAYS}
    cores = local_cores(master)
    if cores is not None:
        settings |= _ON_LOOPBACK | {"spark.sql.shuffle.partitions": str(max(cores, 2))}
    if quick:
        settings |= QUICK
        if "RocksDB" in conf.get(_STATE_STORE, ""):
            del settings[_LOCAL_FILES]  # RocksDB's files need the checksums
    if quiet and not is_connect(master):
        settings["spark.log.level"] = "ERROR"
    return settings | dict(conf)


def need_spark(master: str) -> None:
    """Raise SparkMissing with what to install unless PySpark and Java are installed."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkMissing(
            "pyspark is not installed; "
            "in a checkout, `bin/setup spark` installs it; elsewhere `pip install '/path/to/headrace[spark]'`"
        )
    if is_connect(master):
        if importlib.util.find_spec("grpc") is None:
            raise SparkMissing("Spark Connect needs more of pyspark: pip install 'pyspark[connect]'")
        return
    home = os.environ.get("JAVA_HOME")
    if shutil.which(os.path.join(home, "bin", "java") if home else "java") is None:
        where = f"there is no bin/java in JAVA_HOME ({home})" if home else "there is no java on the PATH"
        raise SparkMissing(
            f"Spark needs Java 17 or later, and {where}: install openjdk-17-jre-headless (Debian, Ubuntu), "
            "java-17-openjdk-headless (Fedora) or openjdk@17 (Homebrew), or set JAVA_HOME"
        )


def has_session() -> bool:
    """Return whether this process has an active session, as in a notebook; it is then used and not stopped."""
    if importlib.util.find_spec("pyspark") is None:
        return False
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


def open_session(
    master: str, settings: Mapping[str, str], *, lock_fd: int, folder: str, log_fd: int | None = None
) -> "SparkSession":
    """Return the active session or start one, whose Java process holds the driver's lock too.

    Parameters:
        master: the Spark master.
        settings: the Spark settings.
        lock_fd: the file descriptor of the driver's lock.
        folder: the folder of the pipeline's file, from which local workers may import.
        log_fd: the file descriptor for Java's standard error; by default that of this process.
    """
    need_spark(master)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    try:
        if has_session():
            return builder.getOrCreate()  # type: ignore[no-any-return]
        if is_connect(master):
            return builder.remote(master).config(map=dict(settings)).getOrCreate()  # type: ignore[no-any-return]
        if local_cores(master) is not None:
            choose_python(preloaded=True)
            path = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
        with on_loopback() if local_cores(master) is not None else nullcontext():
            _begin_context(master, settings, lock_fd, log_fd)
        return builder.getOrCreate()  # type: ignore[no-any-return]
    except PySparkException as error:
        if error.getCondition() == "JAVA_GATEWAY_EXITED":
            raise SparkMissing(
                "Java exited before Spark started; its output is above. Spark needs Java 17 or later"
            ) from error
        raise InvalidArgument(f"Spark could not start: {error}") from error


def _begin_context(master: str, settings: Mapping[str, str], lock_fd: int, log_fd: int | None) -> None:
    """Start Java with the lock's file descriptor, as Java may outlive this process when it is killed."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    conf = SparkConf().setMaster(master).setAll(list(settings.items()))
    started: dict[str, Any] = {"pass_fds": (lock_fd,)}
    if log_fd is not None:
        started["stderr"] = log_fd
    launch: Any = launch_gateway
    before = signal.getsignal(signal.SIGINT)
    SparkContext(conf=conf, gateway=launch(conf, started))
    # Spark installs a SIGINT handler that would cancel batches which should finish.
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, before)
