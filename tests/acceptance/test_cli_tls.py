"""TLS on the command line: certificates for development, a broker with them, contexts, and a reload by signal."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.commands import Finished, run_command
from tests.known import ENVIRONMENT

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where contexts and certificates are kept; nothing is said in the environment."""
    pytest.importorskip("cryptography", reason="the extra security is not installed: there is no cryptography")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("HEADRACE_URL", "HEADRACE_CONTEXT", "HEADRACE_CA", "HEADRACE_CERTIFICATE", "HEADRACE_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "config" / "headrace" / "certificates"


def run(*arguments: str, code: int = 0) -> Finished:
    done = run_command(arguments, timeout_s=WAIT_S)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == code, done.stderr.decode()
    return done


def made(*arguments: str) -> dict[str, str]:
    content: dict[str, str] = json.loads(run("auth", "certificate", *arguments, "--json").stdout)
    return content


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str, Path]]:
    """A broker with a certificate for this machine: its process, its address and its log."""
    files = made("server")
    log = tmp_path / "log"
    words = ["--port", "0", "--data", ":memory:", "--tls-certificate", files["certificate"], "--tls-key", files["key"]]
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", "--json", *words],
            env={**ENVIRONMENT, **{name: os.environ[name] for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME")}},
            stdout=subprocess.PIPE,
            stderr=written,
        )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline() or "{}")
    assert ready, log.read_text()
    yield process, ready["addresses"][0], log
    process.terminate()
    process.communicate(timeout=WAIT_S)


def test_certificates_are_made_once_and_for_their_owner_alone(home: Path) -> None:
    first = made("server", "broker.example.org")
    assert first["ca_created"]
    assert {"localhost", "127.0.0.1", "::1", "broker.example.org"} <= set(first["names"])
    ca = Path(first["ca"]).read_bytes()
    second = made("client", "billing")
    assert not second["ca_created"]
    assert Path(second["ca"]).read_bytes() == ca
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}
    assert b"give one NAME" in run("auth", "certificate", "client", code=1).stderr
    assert b"neither an address nor a name" in run("auth", "certificate", "server", "a b", code=1).stderr
    (home / "ca-key.pem").write_text("broken")
    assert b"no development CA that can be used" in run("auth", "certificate", "server", code=1).stderr


def test_commands_connect_by_options_environment_and_context(
    broker: tuple["subprocess.Popen[bytes]", str, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url, _ = broker
    assert url.startswith("headraces://")
    ca = str(home / "ca.pem")
    refused = json.loads(run("ping", "--count", "1", "--connect", url, "--json", code=1).stderr)["error"]
    assert refused["code"] == "tls_failed"
    assert "give its CA" in refused["message"]
    monkeypatch.chdir(home)
    assert (
        json.loads(run("ping", "--count", "1", "--connect", url, "--ca", "ca.pem", "--json").stdout)["address"] == url
    )
    run("context", "add", "secure", url, "--ca", "ca.pem", "--use")
    monkeypatch.chdir("/")  # the context knows the whole path
    assert json.loads(run("context", "show", "--json").stdout)["address"] == f"{url}?ca={ca}"
    run("publish", "orders", "3 apples")
    assert run("tail", "orders", "--from", "earliest", "--no-follow").stdout
    run("context", "remove", "secure")
    monkeypatch.setenv("HEADRACE_CA", ca)
    run("info", "--connect", url)
    plain = url.replace("headraces", "headrace")
    assert b"headraces:// instead of headrace://" in run("info", "--connect", plain, code=1).stderr
    assert b"cannot have ca" in run("info", "--connect", plain, "--ca", ca, code=1).stderr


def test_sighup_reloads_certificates(broker: tuple["subprocess.Popen[bytes]", str, Path], home: Path) -> None:
    process, url, log = broker
    ca = str(home / "ca.pem")
    run("ping", "--count", "1", "--connect", url, "--ca", ca)
    other = made("server", "--directory", str(home.parent / "other"))
    for name in ("certificate", "key"):
        shutil.copy(other[name], home / Path(other[name]).name)
    process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + WAIT_S
    while "certificates reloaded" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.poll() is None
    run("ping", "--count", "1", "--connect", url, "--ca", other["ca"])
    assert b"no CA trusted here" in run("ping", "--count", "1", "--connect", url, "--ca", ca, code=1).stderr
