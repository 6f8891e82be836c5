"""Local Spark: chooses its Python interpreter, regardless of the PATH, and the address that it listens on."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.spark.fork_server import ForkServer, can_fork

LOOPBACK = "127.0.0.1"
_LOCAL_IP = "SPARK_LOCAL_IP"

LAUNCHER = str(Path(__file__).with_name("python.sh"))
"""The script that Spark runs as Python."""


_server: ForkServer | None = None


def choose_python(*, preloaded: bool = False) -> None:
    """Make new sessions use this Python, unless PYSPARK_PYTHON is set.

    With `preloaded`, for long sessions, workers are forked from a process with preloaded modules.
    """
    if os.environ.get("PYSPARK_PYTHON", LAUNCHER) != LAUNCHER:
        return
    # With SPARK_HOME, workers use the pyspark of that Spark, not the installed one.
    if "SPARK_HOME" in os.environ or not os.access(LAUNCHER, os.X_OK):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        return
    os.environ |= {"PYSPARK_PYTHON": LAUNCHER, "HEADRACE_SPARK_PYTHON": sys.executable}
    if preloaded and can_fork():
        os.environ["HEADRACE_SPARK_FORKS"] = _fork_server().path


def _fork_server() -> ForkServer:
    """Return the fork server of this process, which ends with it."""
    global _server  # one for all sessions, as the environment is
    if _server is None:
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make a Java that starts in the block listen on the loopback only, unless SPARK_LOCAL_IP is set.

    Spark's own settings do not apply to its web UI, which otherwise listens on every address.
    """
    if _LOCAL_IP in os.environ:
        yield
        return
    os.environ[_LOCAL_IP] = LOOPBACK
    try:
        yield
    finally:
        del os.environ[_LOCAL_IP]
