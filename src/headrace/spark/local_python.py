"""Spark on this machine: which Python it runs, whatever is on the PATH, and where it listens."""

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
"""What Spark takes for Python."""


_server: ForkServer | None = None


def choose_python(*, preloaded: bool = False) -> None:
    """Have a session that begins now use this Python, unless the user has said which.

    With `preloaded`, which is for sessions that last, its processes are forked from one that has all modules loaded.
    """
    if os.environ.get("PYSPARK_PYTHON", LAUNCHER) != LAUNCHER:
        return
    # With a Spark of the user's own its archive of pyspark counts, not what is installed here.
    if "SPARK_HOME" in os.environ or not os.access(LAUNCHER, os.X_OK):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        return
    os.environ |= {"PYSPARK_PYTHON": LAUNCHER, "HEADRACE_SPARK_PYTHON": sys.executable}
    if preloaded and can_fork():
        os.environ["HEADRACE_SPARK_FORKS"] = _fork_server().path


def _fork_server() -> ForkServer:
    """The server of this process, which ends with it."""
    global _server  # one for all sessions, as the environment is
    if _server is None:
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


@contextmanager
def on_loopback() -> Iterator[None]:
    """Have a Java that begins now listen on this machine only, unless the user has said where.

    The settings of Spark do not reach its pages, which are on every address of the machine.
    """
    if _LOCAL_IP in os.environ:
        yield
        return
    os.environ[_LOCAL_IP] = LOOPBACK
    try:
        yield
    finally:
        del os.environ[_LOCAL_IP]
