"""Python processes for Spark, forked from one that has their modules loaded already.

Spark starts Python for each kind of planning, for tasks and for every stream, and has it import pyspark from an archive
without compiled code: two seconds each. Run as: pythons.py SOCKET, to be the process that forks. What Spark is told to
be Python asks it on that socket, and lives for as long as what it has asked for.
"""

import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.known import ENVIRONMENT

_LOADED = (
    "pandas",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pyspark.daemon",
    "pyspark.worker",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.streaming.stateful_processor_api_client",
    *(
        f"pyspark.sql.worker.{name}"
        for name in (
            "commit_data_source_write",
            "create_data_source",
            "data_source_pushdown_filters",
            "lookup_data_sources",
            "plan_data_source_read",
            "python_streaming_sink_runner",
            "write_into_data_source",
        )
    ),
    "headrace.client._sync.bus",
    *(f"headrace.spark.{name}" for name in ("datasource", "reading", "streaming", "views", "writing")),
    *(f"headrace.spark.archive.{name}" for name in ("origin", "parquet", "serving", "tasks")),
    "headrace.storage.files",
)
_ASKING = """#!{python} -IS
import os, signal, socket, sys

if sys.argv[1:2] != ["-m"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asking.connect({path!r})
signal.signal(signal.SIGTERM, lambda number, _: asking.send(b"%d" % number))
socket.send_fds(asking, [b"?"], [0, 1, 2])
sys.exit(int(asking.recv(100) or b"1"))
"""
"""What Spark is told to be Python. Who asks is known by the number of its process."""


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
    """Have Python forked for a while."""
    program, path = directory / "python", directory / "asking"
    program.write_text(_ASKING.format(python=sys.executable, path=str(path)))
    program.chmod(0o755)
    environment = {**ENVIRONMENT, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(100)
        number = str(listening.fileno())
        process = subprocess.Popen(
            [sys.executable, "-u", __file__, number],
            pass_fds=[listening.fileno()],
            env=environment,
            stdin=subprocess.PIPE,
        )
    try:
        yield Pythons(str(program), process.pid)
    finally:
        process.communicate()


def main() -> None:
    """Fork whenever it is asked for, until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as all that Java starts for PySpark
    for name in _LOADED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = socket.socket(fileno=int(sys.argv[1]))
    while True:
        ready, _, _ = select.select([0, listening], [], [])
        if listening not in ready:
            return
        asking, _ = listening.accept()
        if not os.fork():
            listening.close()
            _answer(asking)
            return
        asking.close()


def _answer(asking: socket.socket) -> None:
    """Fork, and stand between the one who asks and the one who is forked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asker, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    _, descriptors, *_ = socket.recv_fds(asking, 1, 3)
    child = os.fork()
    if not child:
        asking.close()
        _be_python(Path(f"/proc/{asker}"), descriptors)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([asking, ended], [], [])
        if ended in ready:
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(OSError):
                asking.send(b"%d" % (os.waitstatus_to_exitcode(status) & 255))
            os._exit(0)
        said = asking.recv(100)
        os.kill(child, int(said or signal.SIGKILL))
        if not said:
            os._exit(0)


def _be_python(asker: Path, descriptors: list[int]) -> None:
    """Do as Python does that is started with the asker's arguments, environment, directory and files."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(line.split("=", 1) for line in os.fsdecode((asker / "environ").read_bytes()).split("\0") if line)
    time.tzset()
    os.chdir((asker / "cwd").readlink())
    words = os.fsdecode((asker / "cmdline").read_bytes()).split("\0")[:-1]
    module, sys.argv = words[words.index("-m") + 1], words[words.index("-m") + 1 :]
    # Spark's own archives are left out: what is in them is loaded.
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and "/pyspark/" not in path]
    sys.path[:] = [os.getcwd(), *given, *sys.path[1:]]
    sys.modules.pop(module, None)
    Path("/proc/self/comm").write_text(module)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
