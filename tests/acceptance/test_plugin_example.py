"""The example of plug-ins, installed with pip: its own tests, and all four of its plug-ins at work."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.test_gateway_plugins import SOON_S, address, environment, serving
from tests.installed_plugins import EXAMPLE, install_example, write_package

import headrace


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example(tmp_path_factory.mktemp("example"))


def run(environ: dict[str, str], *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=SOON_S, env=environ, check=False, text=True)
    assert done.returncode == code, done.stderr
    return done


def test_its_own_tests_pass(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command += ["-c", "/dev/null", str(EXAMPLE / "tests")]
    done = subprocess.run(
        command, capture_output=True, timeout=SOON_S, env=environment(tmp_path, installed), check=False, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_middleware_sink_and_command_work_beside_those_of_headrace(installed: Path, tmp_path: Path) -> None:
    environ, database = environment(tmp_path, installed), tmp_path / "orders.db"
    with serving(environ, "--data", str(tmp_path / "data"), "--port", "0") as (ready, server):
        url = address(ready, "headrace")
        with headrace.connect(url) as bus:
            bus.create_topic("orders", middleware=[{"name": "uppercase"}])
            bus.publish("orders", b"3 apples", key="ann")
        command = [sys.executable, "-m", "headrace", "sink", "orders", f"sqlite://{database}", "--connect", url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=environ) as sink:
            try:
                assert rows_in(database, 1) == [("orders", 0, 0, b"ann", b"3 APPLES")]
                sink.send_signal(signal.SIGTERM)
                assert sink.wait(SOON_S) == 0, sink.stderr.read() if sink.stderr else ""
            finally:
                sink.kill()
        assert json.loads(run(environ, "sizes", "orders", "--connect", url, "--json").stdout) == {
            "topic": "orders",
            "messages": 1,
        }
        assert run(environ, "sizes", "orders", "--connect", url).stdout.split() == ["1", "orders"]
        server.terminate()
        assert server.wait(SOON_S) == 0


def rows_in(database: Path, count: int) -> list[Any]:
    deadline = time.monotonic() + SOON_S
    while True:
        assert time.monotonic() < deadline
        if database.exists():
            reading = sqlite3.connect(database)
            try:
                found = reading.execute("SELECT topic, partition, offset, key, value FROM messages").fetchall()
            except sqlite3.OperationalError:  # the table is not there yet
                found = []
            finally:
                reading.close()
            if len(found) >= count:
                return found
        time.sleep(0.05)


def test_plug_ins_are_listed_and_their_commands_are_in_the_help(installed: Path, tmp_path: Path) -> None:
    environ = environment(tmp_path, installed)
    listed = [json.loads(line) for line in run(environ, "plugins", "--check", "--json").stdout.splitlines()]
    of_example = {
        (one["group"], one["name"], one["version"], one["status"])
        for one in listed
        if one["distribution"] == "headrace-example"
    }
    assert of_example == {
        ("headrace.gateways", "text", "1.0", "loads"),
        ("headrace.middleware", "uppercase", "1.0", "loads"),
        ("headrace.sinks", "sqlite", "1.0", "loads"),
        ("headrace.commands", "sizes", "1.0", "loads"),
    }
    assert {"json", "file", "redact"} <= {one["name"] for one in listed if one["distribution"] == "headrace"}
    assert "plug-ins:\n  sizes" in run(environ, "--help").stdout
    assert "of headrace-example 1.0" in run(environ, "--help").stdout
    assert "which topics" in run(environ, "sizes", "--help").stdout
    assert "sizes" in run(environ, "sises", code=2).stderr, "and in suggestions"
    assert "plug-ins:" not in run(environment(tmp_path), "--help").stdout


BROKEN = """
class NoApi: pass
class Command:
    api = 1
    @staticmethod
    def add_arguments(parser):
        raise KeyError("what")
"""


def test_broken_plug_ins_are_told_of_and_keep_nobody_else_from_work(tmp_path: Path) -> None:
    groups = {
        "headrace.sinks": {"file": "broken_things:NoApi", "broken": "broken_things:NoApi"},
        "headrace.commands": {"broken": "broken_things:Command", "absent": "broken_things:Absent", "serve": "x"},
    }
    one = write_package(tmp_path / "1", "broken-things", groups, BROKEN)
    two = write_package(tmp_path / "2", "more-things", {"headrace.sinks": {"broken": "more_things:Sink"}})
    environ = environment(tmp_path, one, two)
    listed = [json.loads(line) for line in run(environ, "plugins", "--check", "--json", code=1).stdout.splitlines()]
    told = {(each["name"], each["distribution"]): each for each in listed if each["distribution"] != "headrace"}
    assert told["file", "broken-things"]["problem"] == "file is a name of Headrace itself"
    assert told["broken", "more-things"]["problem"] == "also in broken-things 1.0: uninstall all but one"
    assert "has no attribute 'Absent'" in told["absent", "broken-things"]["problem"]
    error = run(environ, "absent", code=1).stderr.splitlines()[-1]
    assert "the plug-in 'absent' of broken-things 1.0" in error
    assert "[plugin_unavailable]" in error
    failed = json.loads(run(environ, "broken", "--json", code=1).stderr.splitlines()[-1])["error"]
    assert failed["code"] == "plugin_unavailable"
    assert "cannot add its arguments: KeyError: 'what'" in failed["message"]
    assert "run a broker" in run(environ, "serve", "--help").stdout.lower()
