"""Server processes for benchmarks: each has its own directory and ports, and is always stopped."""

import abc
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from headrace.bench.measure import Unavailable, uses

HOST = "127.0.0.1"
_PATIENCE_S = 60.0
_STOP_PATIENCE_S = 10.0
_POLL_S = 0.002
_LOG_SHOWN = 500
"""How many characters of a server's log are reported if it does not start."""


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port: int = taken.getsockname()[1]
        return port


def answers(port: int, question: bytes, answer: bytes) -> bool:
    """Whether a server says this when asked that; with no question, what it says by itself."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1) as asking:
        asking.sendall(question)
        said = b""
        while len(said) < len(answer) and (more := asking.recv(4096)):
            said += more
        return said.startswith(answer)
    return False


class BenchServer:
    """A server process and those that it starts."""

    def __init__(self, command: Sequence[str], place: str, *, environment: Mapping[str, str] | None = None) -> None:
        self._log = Path(place) / f"{Path(command[0]).name}.log"
        with self._log.open("wb") as log:
            try:
                # A session of its own: Ctrl-C is for the benchmark, which then stops its servers in order.
                self._process = subprocess.Popen(
                    command,
                    cwd=place,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(f"{command[0]} does not start: {error}") from error

    def wait_until(self, ready: Callable[[], bool], patience_s: float = _PATIENCE_S) -> None:
        """Wait for the server to be ready; one that ends before, or takes too long, is unavailable."""
        deadline = time.monotonic() + patience_s
        while not ready():
            if self._process.poll() is not None:
                raise Unavailable(f"it ended with status {self._process.returncode}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise Unavailable(f"it did not answer in {patience_s:g} s: {self._last_words()}")
            time.sleep(_POLL_S)

    def _last_words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_SHOWN:].strip()

    @property
    def memory_bytes(self) -> int:
        """The resident memory of all its processes."""
        return sum(_resident_bytes(process) for process in self._processes())

    @property
    def cpu_s(self) -> float:
        """The processor time that all its processes have taken so far, in seconds."""
        return sum(map(_cpu_s, self._processes()))

    def sleep(self) -> None:
        """Suspend all its processes."""
        self._tell(signal.SIGSTOP)

    def wake(self) -> None:
        """Resume all its processes."""
        self._tell(signal.SIGCONT)

    def _tell(self, number: int) -> None:
        if self._process.poll() is None:
            for process in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def stop(self, *, gently: bool = False) -> None:
        """End all its processes; gently: give the server time to end by itself."""
        self.wake()
        children = self._processes()[1:]
        if gently:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_PATIENCE_S)
        self._process.kill()
        self._process.wait()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + _STOP_PATIENCE_S
        while any(map(_is_alive, children)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _processes(self) -> list[int]:
        """Return its process and all descendants."""
        parents = dict(_parents())
        found = [self._process.pid]
        for known in found:
            found += [process for process, parent in parents.items() if parent == known]
        return found


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").glob("[0-9]*"):
        if status := _status(int(folder.name)):
            yield int(folder.name), int(status[1])


def _is_alive(process: int) -> bool:
    return _status(process)[:1] not in ([], ["Z"])


def _status(process: int) -> list[str]:
    """The state, the parent and more; nothing if there is no such process."""
    with contextlib.suppress(OSError):
        # 123 (name that may hold spaces) S 1 ...
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _cpu_s(process: int) -> float:
    with contextlib.suppress(OSError):
        # Linux makes the number of a process's clock from its id: to the nanosecond, where /proc counts in 10 ms.
        return time.clock_gettime(~process << 3 | 2)
    return 0.0


def _resident_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class ServerNode(abc.ABC):
    """A server that several subjects of a benchmark may share: it starts with the first and stops with the last."""

    def __init__(self) -> None:
        self.ready_s = 0.0
        """What it took from the start of the process to the first answer."""
        self._servers: list[BenchServer] = []
        self._users = 0

    def start(self, place: str, *, synced: bool) -> None:
        """Start it, unless it is running."""
        if not self._users:
            self.find()
            try:
                self._start(place, synced=synced)
            except BaseException:
                self._stop()
                raise
        self._users += 1
        uses(self)

    def stop(self) -> None:
        """Stop it, unless another subject uses it."""
        if self._users:
            self._users -= 1
            if not self._users:
                self._stop()

    def sleep(self) -> None:
        """Suspend it until it is resumed."""
        for server in self._servers:
            server.sleep()

    def wake(self) -> None:
        """Go on."""
        for server in self._servers:
            server.wake()

    @property
    def memory_bytes(self) -> int:
        """The resident memory of all its processes."""
        return sum(server.memory_bytes for server in self._servers)

    @property
    def cpu_s(self) -> float:
        """The processor time that all its processes have taken so far, in seconds."""
        return sum(server.cpu_s for server in self._servers)

    @abc.abstractmethod
    def find(self) -> None:
        """Make sure that it can be started; raises Unavailable, with the reason, if it cannot."""

    @abc.abstractmethod
    def _start(self, place: str, *, synced: bool) -> None:
        """Make it ready, by `_launch`."""

    def _launch(
        self,
        command: Sequence[str],
        place: str,
        ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        begin = time.perf_counter()
        server = BenchServer(command, place, environment=environment)
        self._servers.append(server)
        server.wait_until(ready)
        self.ready_s = time.perf_counter() - begin

    def _stop(self) -> None:
        while self._servers:
            self._servers.pop().stop()
