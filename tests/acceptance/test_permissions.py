"""Who may reach a broker's Unix socket and read its files, whatever the directory and the umask allow."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.known import ENVIRONMENT

import headrace
from headrace.gateways.unix_socket import bind
from headrace.server import EmbeddedServer

NOBODY = 65534
SOON_S = 120.0


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that everybody may look into, as pytest's own are not, with a short path."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def data(shared: Path) -> Path:
    """A data directory that was there before the broker."""
    path = shared / "data"
    path.mkdir()
    path.chmod(0o755)
    return path


@contextmanager
def serving(data: Path, *arguments: str, umask: int = 0) -> Iterator[None]:
    """A broker in a process of its own that everybody may have what it makes of."""
    command = [sys.executable, "-m", "headrace", "serve", "--data", str(data), "--port", "0", *arguments]
    pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=pipe, stderr=quiet, env=ENVIRONMENT, umask=umask) as process:
        watchdog = threading.Timer(SOON_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            assert b"ready" in process.stdout.readline()
            yield
            process.terminate()
            assert process.wait(SOON_S) == 0
        finally:
            watchdog.cancel()
            process.kill()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Files are looked at as a user without rights sees them."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SOON_S)
        client.connect(str(path))


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_socket_and_files_of_a_data_directory_that_was_there_are_for_the_brokers_user(data: Path, umask: int) -> None:
    with serving(data, umask=umask), headrace.connect(f"headrace+unix://{data}/headrace.sock") as bus:
        bus.publish("orders", b"3 apples")
        plain = {path.name: mode(path) for path in data.iterdir() if not path.is_dir()}
        assert plain == dict.fromkeys(("format", "lock", "headrace.sock"), 0o600)
        assert [path for path in data.rglob("*") if path.is_file() and mode(path) & 0o077] == []
    assert not (data / "headrace.sock").exists()


def test_socket_elsewhere_is_for_the_brokers_user_too(data: Path, shared: Path) -> None:
    with serving(data, "--unix-socket", str(shared / "own.sock")):
        assert mode(shared / "own.sock") == 0o600


def test_embedded_broker_leaves_the_umask_of_the_program_alone(data: Path) -> None:
    before = os.umask(0)
    try:
        server = EmbeddedServer(data, unix_socket=str(data / "own.sock"))
        assert os.umask(0) == 0
        assert mode(data / "own.sock") == 0o600
        server.close()
    finally:
        os.umask(before)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is closed before it listens, not before it exists")
def test_socket_is_made_with_its_mode_and_not_changed_afterwards(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the mode was changed after the file was made")

    monkeypatch.setattr(os, "chmod", refuse)
    before = os.umask(0)
    try:
        with bind(str(data / "own.sock")):
            assert mode(data / "own.sock") == 0o600
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nowhere(data: Path) -> None:
    with serving(data), headrace.connect(f"headrace+unix://{data}/headrace.sock") as bus:
        bus.publish("orders", b"3 apples")
        with as_nobody():
            assert "headrace.sock" in os.listdir(data)
            with pytest.raises(PermissionError):
                connect(data / "headrace.sock")
            for name in ("format", "lock"):
                with pytest.raises(PermissionError):
                    (data / name).read_bytes()
            for name in ("topics", "broker"):
                with pytest.raises(PermissionError):
                    os.listdir(data / name)
        (data / "headrace.sock").chmod(0o666)  # as an operator may, once it is there
        with as_nobody():
            connect(data / "headrace.sock")
