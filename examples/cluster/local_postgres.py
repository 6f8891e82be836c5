"""A PostgreSQL server for the example: found on this machine, never run as root, and gone afterwards."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

HOST = "127.0.0.1"
_USER = "headrace"
_READY_S = 30.0
_SETTINGS = {"listen_addresses": HOST, "unix_socket_directories": "", "dynamic_shared_memory_type": "mmap"}


class PostgresMissing(Exception):
    """There is no PostgreSQL here that could be started."""


class LocalPostgres:
    """A server with an empty database, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._programs = find_programs()
        self._as_user = _not_as_root()
        self._data = directory / "postgres"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of the database, for `--store`."""
        return f"postgresql://{_USER}@{HOST}:{self._port}/postgres"

    def __enter__(self) -> "LocalPostgres":
        self._data.mkdir()
        if self._as_user:
            user = _unprivileged()
            os.chown(self._data, user.pw_uid, user.pw_gid)
        made = self._run("initdb", "--no-sync", "-A", "trust", "-U", _USER, "-E", "UTF8", "--locale=C")
        if made.returncode:
            raise PostgresMissing(f"initdb failed: {made.stderr.decode(errors='replace')[-300:].strip()}")
        command = [*self._as_user, str(self._programs / "postgres"), "-D", str(self._data), "-p", str(self._port)]
        for name, value in _SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        with (self._data / "server.log").open("wb") as log, interrupted_later():
            # A session of its own: Ctrl-C is for the example, which stops the server last.
            self._process = subprocess.Popen(
                command, cwd=self._data, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            with interrupted_later():
                self._process.send_signal(signal.SIGINT)  # SIGTERM would wait until the last client has gone
                self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _READY_S
        ready = [str(self._programs / "pg_isready"), "-q", "-h", HOST, "-p", str(self._port), "-d", "postgres"]
        while subprocess.run(ready, check=False).returncode:
            if self._process is not None and self._process.poll() is not None:
                raise PostgresMissing(f"postgres ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise PostgresMissing(f"postgres is not ready after {_READY_S:g} s")
            time.sleep(0.05)

    def _run(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
        command = [*self._as_user, str(self._programs / name), "-D", str(self._data), *arguments]
        return subprocess.run(command, cwd=self._data, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def find_programs() -> Path:
    """The directory of the server's programs; Debian keeps them out of the path."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: int(each.parent.name), reverse=True)
    on_path = shutil.which("postgres")
    folders += [Path(on_path).parent] if on_path else []
    for folder in folders:
        if all((folder / name).exists() for name in ("postgres", "initdb", "pg_isready")):
            return folder
    raise PostgresMissing("PostgreSQL is not installed (Debian, Ubuntu: apt-get install postgresql)")


def _not_as_root() -> list[str]:
    """What to write before a command so that it does not run as root, which the server refuses."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        raise PostgresMissing("PostgreSQL does not run as root, and there is no setpriv to start it as somebody else")
    user = _unprivileged()
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--"]


def _unprivileged() -> pwd.struct_passwd:
    names = {user.pw_name for user in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """Have Ctrl-C wait for the end of the block, so that no process is started that nobody knows of."""
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        raise KeyboardInterrupt


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as trial:
        trial.bind((HOST, 0))
        port: int = trial.getsockname()[1]
        return port
