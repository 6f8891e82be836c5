"""A gateway of another package: installed with pip, named by an address, and nothing of Headrace changed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.installed_plugins import install_example
from tests.known import ENVIRONMENT

import headrace

SOON_S = 120.0


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example of plug-ins, as pip installs it."""
    return install_example(tmp_path_factory.mktemp("plugins"))


def environment(tmp_path: Path, *folders: Path) -> dict[str, str]:
    """Nothing is configured; these folders hold packages."""
    clean = {name: text for name, text in ENVIRONMENT.items() if not name.startswith("HEADRACE_")}
    path = os.pathsep.join([*map(str, folders), clean["PYTHONPATH"]])
    homes = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "share")}
    return {**clean, **homes, "PYTHONPATH": path}


@contextmanager
def serving(environ: dict[str, str], *arguments: str) -> Iterator[tuple[dict[str, Any], "subprocess.Popen[bytes]"]]:
    """A server at work, and where it listens."""
    command = [sys.executable, "-m", "headrace", "serve", "--json", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environ) as process:
        watchdog = threading.Timer(SOON_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate(timeout=SOON_S)[1].decode()
            yield json.loads(line), process
        finally:
            watchdog.cancel()
            process.kill()


class Text:
    """Somebody who types."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("text://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=SOON_S)
        self._lines = self._socket.makefile("r", encoding="utf-8", newline="\n")

    def type(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def read(self) -> str:
        return self._lines.readline().rstrip("\n")

    def ask(self, line: str) -> str:
        self.type(line)
        return self.read()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextmanager
def typing(url: str) -> Iterator[Text]:
    text = Text(url)
    try:
        yield text
    finally:
        text.close()


def address(ready: dict[str, Any], scheme: str) -> str:
    (url,) = [url for url in ready["addresses"] if url.startswith(f"{scheme}://")]
    return str(url)


def test_a_gateway_of_another_package_serves_beside_the_native_one(installed: Path, tmp_path: Path) -> None:
    listening = ["--listen", "headrace://127.0.0.1:0", "--listen", "text://127.0.0.1:0"]
    environ = environment(tmp_path, installed)
    with serving(environ, "--data", str(tmp_path / "data"), *listening) as (ready, process):
        assert len(ready["addresses"]) == 2, "and no Unix socket, for nobody asked for it"
        with typing(address(ready, "text")) as one, typing(address(ready, "text")) as other:
            assert one.ask("PUBLISH jobs first") == "OK 0"
            other.type("STREAM jobs 0")
            assert other.read() == "MESSAGE 0 first"
            with headrace.connect(address(ready, "headrace")) as bus:
                bus.publish("jobs", b"second")
                assert any(url.startswith("text://") for url in bus.info().listening)
            assert other.read() == "MESSAGE 1 second"
            assert one.ask("FETCH jobs 1") == "MESSAGE 1 second"
            assert one.read() == "END"

            leased, lease, *message = one.ask("LEASE jobs 0").split()
            assert (leased, message) == ("LEASED", ["0", "0", "first"])
            assert one.ask(f"ACK jobs {lease} 0 0") == "OK"
            assert one.ask("LEASE jobs 0").endswith("1 second")
            one.type("LEASE jobs 60000")  # waits for the next one
            other.type("")
            assert other.read() == "END"
            assert other.ask("PUBLISH jobs third") == "OK 2"
            assert one.read().endswith("2 third")
            assert one.ask("FETCH nothing 0").startswith("ERROR topic_not_found")

            process.terminate()
            assert one.read() == "DRAINING"
            _, log = process.communicate(timeout=SOON_S)
            assert (process.returncode, one.read()) == (0, ""), log.decode()
            assert b"Traceback" not in log, log.decode()


def refused(environ: dict[str, str], tmp_path: Path, *arguments: str) -> str:
    """What a server says that does not start."""
    command = [sys.executable, "-m", "headrace", "serve", "--data", str(tmp_path / "data"), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=SOON_S, env=environ, check=False)
    assert done.returncode == 1, done.stderr.decode()
    *_, last = done.stderr.decode().splitlines()
    return last


def test_an_address_without_a_gateway_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    told = refused(environment(tmp_path), tmp_path, "--listen", "text://127.0.0.1:0")
    assert "text://127.0.0.1:0" in told
    assert "install the package" in told
    assert not (tmp_path / "data").exists()


def broken(tmp_path: Path, source: str) -> dict[str, str]:
    """An environment with the package headrace-broken, whose module has this source."""
    folder = tmp_path / "broken"
    metadata = folder / "headrace_broken-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "headrace_broken.py").write_text(source)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[headrace.gateways]\nbroken = headrace_broken:Gateway\n")
    return environment(tmp_path, folder)


def test_a_plug_in_that_exits_is_named(tmp_path: Path) -> None:
    told = refused(broken(tmp_path, "import sys; sys.exit(0)"), tmp_path, "--listen", "broken://127.0.0.1:0")
    assert "SystemExit: 0" in told
    assert "reinstall headrace-broken" in told
    assert "[gateway_unavailable]" in told


HANGING = """
import asyncio, pathlib, time

class Gateway:
    api = 1
    busy = False
    def __init__(self, context, addresses):
        self.path = pathlib.Path(addresses[0].path)
    async def start(self):
        asyncio.get_running_loop().call_soon(self.path.touch)
        await asyncio.get_running_loop().create_future()
    def close(self):
        self.path.with_suffix(".closed").touch()
    def statistics(self):
        return 0, 0
    stop_accepting = drain = ignore_requests = abort = lambda self: None
    descriptors = lambda self: []
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("wait", ["await asyncio.get_running_loop().create_future()", "time.sleep(600)"])
def test_a_signal_ends_a_server_whose_gateway_does_not_start(number: signal.Signals, wait: str, tmp_path: Path) -> None:
    source = HANGING.replace("await asyncio.get_running_loop().create_future()", wait)
    if "sleep" in wait:
        source = source.replace("asyncio.get_running_loop().call_soon(self.path.touch)", "self.path.touch()")
    environ, started, path = broken(tmp_path, source), tmp_path / "started", tmp_path / "socket"
    command = [sys.executable, "-m", "headrace", "serve", "--data", str(tmp_path / "data")]
    command += ["--listen", f"unix://{path}", "--listen", f"broken://{started}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environ) as process:
        try:
            deadline = time.monotonic() + SOON_S
            while not started.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert path.exists()
            process.send_signal(number)
            _, log = process.communicate(timeout=SOON_S)
        finally:
            process.kill()
    assert process.returncode == 128 + number, log.decode()
    assert b"Traceback" not in log, log.decode()
    assert b"Exception" not in log, log.decode()
    assert not path.exists()
    assert started.with_suffix(".closed").exists()


def test_a_broken_plug_in_matters_only_to_who_names_it(tmp_path: Path) -> None:
    environ = broken(tmp_path, "raise RuntimeError('out of order')")
    told = refused(environ, tmp_path, "--listen", "broken://127.0.0.1:0")
    assert "headrace-broken 1.0 (headrace_broken:Gateway) cannot be loaded: RuntimeError: out of order" in told
    assert "reinstall headrace-broken" in told
    with serving(environ, "--data", str(tmp_path / "data"), "--port", "0") as (ready, process):
        assert [url.partition("://")[0] for url in ready["addresses"]] == ["headrace", "headrace+unix"]
        process.terminate()
        assert process.wait(SOON_S) == 0
