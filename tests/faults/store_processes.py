"""Servers of shared stores for the cluster's processes: PostgreSQL and SeaweedFS, started from what is installed."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType

from tests.faults.broker_process import free_port
from tests.known import MEMORY

_START_S = 60.0
_BUCKET_S = 20.0
_WEED_ATTEMPTS = 3


class StoreProcess(ABC):
    """A server on this machine, on all its addresses; with it end its processes and its files."""

    _end = signal.SIGKILL
    """The signal that ends it, with all its processes."""

    def __init__(self) -> None:
        self.port = free_port()
        self.environment: dict[str, str] = {}
        """What a node needs to know, such as credentials."""
        self.directory = Path(tempfile.mkdtemp(prefix="headrace-store-", dir=MEMORY))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "StoreProcess":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def start(self) -> None:
        """Start the server, and wait until it answers."""

    @abstractmethod
    def url(self, host: str, port: int) -> str:
        """The address of the store at this host and port."""

    def close(self) -> None:
        """End the server, and remove its files."""
        self._kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def check(self) -> None:
        """It must be alive, if it has a process."""
        if self._process is not None:
            code, log = self._process.poll(), self.directory / "log"
            assert code is None, f"the store ended with {code}:\n{log.read_text(errors='replace')[-3000:]}"

    def _kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(self._end)
            self._process.wait(60)

    def _wait_for(self, ready: str) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self._process is not None
            log = self.directory / "log"
            said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            assert self._process.poll() is None, f"{ready} ended:\n{said}"
            assert time.monotonic() < deadline, f"{ready} does not start:\n{said}"
            time.sleep(0.05)

    def _run(self, words: list[str], environment: dict[str, str] | None = None) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})}
            )


def postgres_binaries() -> Path | None:
    """The folder with PostgreSQL's programs; None if it is not installed."""
    found = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")))
    program = found[-1] if found else shutil.which("initdb")
    return Path(program).resolve().parent if program else None


class PostgresProcess(StoreProcess):
    """PostgreSQL with its ordinary durability, in memory if there is such a folder."""

    _end = signal.SIGQUIT

    def start(self) -> None:
        """Create a database cluster and start the server."""
        binaries = postgres_binaries()
        assert binaries is not None
        prefix: list[str] = []
        if os.geteuid() == 0:  # it refuses to run as root
            prefix = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
            shutil.chown(self.directory, "nobody", "nogroup")
        data = str(self.directory / "data")
        create = [str(binaries / "initdb"), "-D", data, "-U", "headrace", "-A", "trust", "--no-sync"]
        subprocess.run([*prefix, *create], check=True, capture_output=True, cwd=self.directory)
        with (self.directory / "data" / "pg_hba.conf").open("a") as file:
            file.write("host all all 0.0.0.0/0 trust\n")
        options = [
            "-p",
            str(self.port),
            "-k",
            str(self.directory),
            "-c",
            "listen_addresses=*",
            "-c",
            "max_connections=200",
        ]
        self._run([*prefix, str(binaries / "postgres"), "-D", data, *options])
        self._wait_for("PostgreSQL")

    def url(self, host: str, port: int) -> str:
        """The address of its table at this host and port."""
        return f"postgresql://headrace@{host}:{port}/postgres"


class DirectoryOnly(StoreProcess):
    """A store in a directory of this machine, which needs no server."""

    def start(self) -> None:
        """Do nothing."""

    def url(self, host: str, port: int) -> str:
        """The address of the directory, whatever the host."""
        del host, port
        return f"directory://{self.directory}/store"


def weed_program() -> str | None:
    """SeaweedFS's program; None if it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class SeaweedProcess(StoreProcess):
    """SeaweedFS with its S3 gateway; it does not sync by itself, which is enough where only nodes are killed."""

    bucket = "headrace"

    def start(self) -> None:
        """Start all of it in one process, and create the bucket; again if somebody else has taken one of its ports."""
        for attempt in range(_WEED_ATTEMPTS):
            try:
                self._start(attempt)
                return
            except AssertionError:
                if attempt == _WEED_ATTEMPTS - 1:
                    raise
                self._kill()

    def _start(self, attempt: int) -> None:
        program = weed_program()
        assert program is not None
        names = ("master.port", "volume.port", "filer.port")
        self.port = free_port()
        ports = {name: free_port() for name in (*names, *(f"{name}.grpc" for name in (*names, "s3.port")))}
        self.environment = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
        files = self.directory / f"files-{attempt}"
        files.mkdir()
        words = [program, "server", f"-dir={files}", "-ip=127.0.0.1", "-ip.bind=0.0.0.0"]
        words += ["-s3", f"-s3.port={self.port}", "-volume.max=20", "-master.volumeSizeLimitMB=64"]
        words += [f"-{name}={port}" for name, port in ports.items()]
        self._run(words)
        self._wait_for("SeaweedFS")
        self._create_bucket()

    def url(self, host: str, port: int) -> str:
        """The address of its bucket at this host and port."""
        return f"s3://{self.bucket}/faults?endpoint=http://{host}:{port}&region=us-east-1"

    def _create_bucket(self) -> None:
        import http.client

        deadline = time.monotonic() + _BUCKET_S
        told = b""
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("PUT", f"/{self.bucket}")
                answer = connection.getresponse()
                told = answer.read()
                if answer.status in (200, 409):
                    return
            assert time.monotonic() < deadline, f"SeaweedFS creates no bucket: {told!r}"
            time.sleep(0.1)
