"""A broker as a process of its own, always on the same data and at the same place, however often it is killed."""

import os
import re
import signal
import socket
import time
from pathlib import Path
from random import Random

from tests.faults.fork_server import PATIENCE_S, Child, Nursery

import headrace
from headrace.storage.owner import read_owner
from headrace.storage.runtime import StorageRuntime

SMALL_JOURNAL = ("--journal-bytes", str(32 << 10))
"""Lets the broker replace its journal by a snapshot all the time."""
_PORTS = range(20_000, 32_000)
"""Below those that the system gives to whoever connects: one of these is nobody's while the broker is dead."""


class BrokerProcess:
    """The broker; started, killed and started again."""

    def __init__(self, nursery: Nursery, data: Path, *options: str) -> None:
        self.data = data
        self.port = free_port()
        self.tcp_url = f"headrace://127.0.0.1:{self.port}"
        self.unix_url = f"headrace+unix://{data}/headrace.sock"
        self._options = options
        self._nursery = nursery
        self._process: Child | None = None
        self.starts = 0

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and do not wait."""
        self.starts += 1
        arguments = ["serve", "--data", str(self.data), "--port", str(self.port), *self._options]
        self._process = self._nursery.start("broker", "tests.faults.broker_process:serve", arguments)

    def kill(self) -> None:
        """Kill it."""
        assert self._process is not None
        self._process.kill()

    def check(self) -> None:
        """It must be alive."""
        assert self._process is not None
        self._process.check()

    def doing(self) -> str:
        """What it is just doing."""
        assert self._process is not None
        return self._process.doing()

    def stop(self) -> None:
        """End it in peace, which must work; one that is not ready yet just ends."""
        assert self._process is not None
        ready = f"process {self.pid}\n" in self._process.said()
        self._process.signal(signal.SIGTERM)
        code = os.waitstatus_to_exitcode(self._process.wait())
        allowed = (0,) if ready else (0, 128 + signal.SIGTERM, -signal.SIGTERM)
        assert code in allowed, f"{code}: {self._process.said()}"

    def connect(self) -> headrace.Bus:
        """A client of it, as soon as it is ready."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return headrace.connect(self.tcp_url, timeout=PATIENCE_S)
            except headrace.HeadraceError as error:
                self.check()
                if time.monotonic() > deadline:
                    raise AssertionError(f"the broker cannot be reached:\n{self.doing()}") from error
                time.sleep(0.005)

    def logs(self) -> dict[tuple[str, int], Path]:
        """The directories of topics' partitions."""
        found = {}
        host = StorageRuntime()
        for path in (self.data / "topics").glob("*/*"):
            owner = read_owner(host, str(path)).owner
            assert owner, path
            found[owner.topic, owner.partition] = path
        return found

    def memory_bytes(self) -> int:
        """The memory of its own: without files that it has mapped."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"RssAnon:\s*(\d+) kB", status)
        assert found, status
        return int(found[1]) * 1024

    def descriptors(self) -> int:
        """How many files and sockets it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def serve(arguments: list[str]) -> None:
    """In the broker's process: be it."""
    from headrace.cli.main import main

    raise SystemExit(main(arguments))


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who connects."""
    dice = Random()
    while True:
        port = dice.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
