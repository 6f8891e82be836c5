"""Forks Python processes for local Spark from a process with preloaded modules.

Spark starts Python for each source of a stream, for planning and for tasks, and gives up on one that does not answer
within 10 s. Importing the modules takes a second of a free core, and many times that while queries start or the
machine is busy. Run as `fork_server.py FD` to be the server; `fork_client.py` sends it requests on a socket.
"""

import contextlib
import gc
import importlib
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

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
    "headrace.spark.datasource",
    "headrace.spark.source.reader",
    "headrace.spark.source.stream_reader",
    "headrace.spark.sink.writer",
    "headrace.spark.sql.subscription_views",
    *(f"headrace.spark.archive.{name}" for name in ("archived_source", "parquet", "query_rows", "tasks")),
    "headrace.storage.offline_reader",
)
_END_S = 5.0


def can_fork() -> bool:
    """Return whether the system has the `/proc` entries that the server reads about its clients."""
    return sys.platform == "linux" and Path("/proc/self/environ").exists()


class ForkServer:
    """Runs the fork server as a child process until it is closed or this process ends."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.path = os.path.join(tempfile.mkdtemp(prefix="headrace-forks-"), "asking")
        """The path of its socket."""
        self._owner = os.getpid()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.path)
            listening.listen(100)
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(listening.fileno())],  # not with the modules beside this file
                pass_fds=[listening.fileno()],
                env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **(environment or os.environ)},
                stdin=subprocess.PIPE,
            )

    @property
    def pid(self) -> int:
        """The id of the server's process, the parent of all workers; each worker is named after its module."""
        return self._process.pid

    def close(self) -> None:
        """End the server, but not the processes that it has forked."""
        if os.getpid() != self._owner:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it is still importing
            self._process.kill()
            self._process.wait()
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)


def main() -> None:
    """Fork on each request, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # like all processes that Java starts for PySpark
    for name in _LOADED:
        with contextlib.suppress(ImportError):  # the worker that needs it reports it
            importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = socket.socket(fileno=int(sys.argv[1]))
    while True:
        ready, _, _ = select.select([0, listening.fileno()], [], [])
        if listening.fileno() not in ready:  # the parent process has ended
            shutil.rmtree(os.path.dirname(listening.getsockname()), ignore_errors=True)
            return
        asking, _ = listening.accept()
        if not os.fork():
            listening.close()
            _answer(asking)
            return
        asking.close()


def _answer(asking: socket.socket) -> None:
    """Fork a worker, and relay signals to it and its exit code to the client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asker, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    _, descriptors, *_ = socket.recv_fds(asking, 1, 3)
    child = os.fork()
    if not child:
        asking.close()
        _run_worker(Path(f"/proc/{asker}"), descriptors)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([asking.fileno(), ended], [], [])
        if ended in ready:
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(OSError):
                asking.send(b"%d" % (os.waitstatus_to_exitcode(status) & 255))
            os._exit(0)
        said = asking.recv(100)
        os.kill(child, int(said or signal.SIGKILL))
        if not said:
            os._exit(0)


def _run_worker(asker: Path, descriptors: list[int]) -> None:
    """Run a module as if Python were started with the client's arguments, environment, directory and files."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    for line in os.fsdecode((asker / "environ").read_bytes()).split("\0"):
        name, equals, value = line.partition("=")
        if name and equals:
            os.environ[name] = value
    time.tzset()
    os.chdir((asker / "cwd").readlink())
    words = os.fsdecode((asker / "cmdline").read_bytes()).split("\0")[:-1]
    module, sys.argv = words[words.index("-m") + 1], words[words.index("-m") + 1 :]
    # Spark's own archives are left out, as their modules are loaded.
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and "/pyspark/" not in path]
    sys.path[:] = [os.getcwd(), *given, *sys.path]
    sys.modules.pop(module, None)
    Path("/proc/self/comm").write_text(module)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
