"""Python processes for Spark's tests, forked from one that has their modules loaded already."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.known import ENVIRONMENT

from headrace.spark.fork_server import ForkServer
from headrace.spark.local_python import LAUNCHER

_ASKING = """#!/bin/sh
export HEADRACE_SPARK_FORKS={path} HEADRACE_SPARK_PYTHON={python}
exec {launcher} "$@"
"""


class Pythons(NamedTuple):
    """Where to ask for Python."""

    program: str
    """What Spark is to start instead of Python."""
    pid: int
    """The process that forks: all others are below it. Each is called as the module that it runs."""

    @property
    def environment(self) -> dict[str, str]:
        """What tells Spark so."""
        return {"PYSPARK_PYTHON": self.program, "PYSPARK_DRIVER_PYTHON": self.program}


@contextlib.contextmanager
def forked_pythons(directory: Path) -> Iterator[Pythons]:
    """Have Python forked for a while, by one process for all sessions of a run."""
    server = ForkServer({**ENVIRONMENT, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"})
    program = directory / "python"
    program.write_text(_ASKING.format(path=server.path, python=sys.executable, launcher=LAUNCHER))
    program.chmod(0o755)
    try:
        yield Pythons(str(program), server.pid)
    finally:
        server.close()
