"""What goes wrong on the command line: one JSON object with --json, the right exit code, and a remedy in the text."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.commands import Finished, run_command

from headrace.cli.command_list import whole_parser
from headrace.cli.command_tree import CommandNode, command_tree
from headrace.server import EmbeddedServer

SOON_S = 60.0
LEAVES = [node for node in command_tree(whole_parser()).walk() if not node.below and node.path[0] != "python"]
BY_PATH = [" ".join(node.path) for node in LEAVES]


def run(*arguments: str, code: int) -> Finished:
    """Run a command to its end, which must have this exit code and no traceback."""
    done = run_command(arguments, timeout_s=SOON_S)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == code, done.stderr.decode()
    return done


def error_of(done: Finished) -> dict[str, Any]:
    """The one JSON object on stderr, while stdout is empty."""
    (line,) = done.stderr.splitlines()
    assert done.stdout == b""
    error = json.loads(line)["error"]
    assert isinstance(error["code"], str)
    assert error["message"]
    assert isinstance(error["retryable"], bool)
    return dict(error)


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    """The address of a broker with a topic."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = EmbeddedServer(":memory:", host="127.0.0.1", port=port)
    url = f"headrace://127.0.0.1:{port}"
    run("topic", "create", "orders", "--message-bytes-max", "1kB", "--connect", url, code=0)
    yield url
    server.close()


@pytest.mark.parametrize("node", LEAVES, ids=BY_PATH)
def test_wrong_usage_of_every_command_is_one_object_and_exit_code_2(node: CommandNode) -> None:
    error = error_of(run(*node.path, "--no-such-option", "--json", code=2))
    assert error["code"] == "usage_error"
    assert "--no-such-option" in error["message"] or "required" in error["message"]
    assert error["help"] == f"headrace {' '.join(node.path)} --help"
    said = run(*node.path, "--no-such-option", code=2).stderr.decode()
    assert said.startswith("usage: headrace")
    assert said.endswith("\n")


@pytest.mark.parametrize(
    "words", [["nosuch", "--json"], ["topic", "nosuch", "--json"], ["--json"], ["topic", "--json"]], ids=" ".join
)
def test_wrong_commands_are_one_object_as_well(words: list[str]) -> None:
    assert error_of(run(*words, code=2))["code"] == "usage_error"


_OTHERS = {"sql", "pipeline", "archive", "bench", "context", "shell"}
"""What needs Spark, a broker of its own, or none."""
NEEDS_BROKER = [
    node
    for node in LEAVES
    if node.path[0] not in _OTHERS and any("--connect" in option.names for option in node.options)
]
_GIVEN = {
    "when": "@daily",
    "level": "debug",
    "id": "orders/0/0",
    "query": "select 1",
    "file": "pipeline.py",
    "address": "headrace://127.0.0.1:1",
    "grant": "publish:topic:orders",
    "shard": "0",
}
_REQUIRED = {
    "topic alter": ["--partitions", "2"],
    "topic trim": ["--before-offset", "1"],
    "group seek": ["--to", "0"],
    "queue alter": ["--lease-seconds", "5"],
    "timeline add": ["--in", "1h"],
    "timeline move": ["--in", "1h"],
    "respond": ["--value", "x"],
    "route add": ["--all", "--to", "y"],
}


@pytest.mark.parametrize("node", NEEDS_BROKER, ids=lambda node: " ".join(node.path))
def test_a_broker_that_is_not_there_is_one_object_and_exit_code_1(node: CommandNode) -> None:
    values = [_GIVEN.get(value.name, "x") for value in node.values]
    more = _REQUIRED.get(" ".join(node.path), [])
    if node.path == ("cron", "next"):
        values = ["x"]
    error = error_of(run(*node.path, *values, *more, "--json", "--connect", "headrace://127.0.0.1:1", code=1))
    assert (error["code"], error["retryable"]) == ("connection_failed", True)
    assert "headrace serve" in error["message"]


def test_unknown_names_come_with_those_that_are_like_them(broker: str) -> None:
    for words in (["topic", "describe", "ordesr"], ["tail", "order", "--no-follow"], ["queue", "stats", "0rders"]):
        error = error_of(run(*words, "--json", "--connect", broker, code=1))
        assert error["code"] == "topic_not_found"
        assert error["message"].count("did you mean orders?") == 1
        assert "create it first" not in error["message"]
    far = error_of(run("topic", "describe", "zzzz", "--json", "--connect", broker, code=1))
    assert "did you mean" not in far["message"]


@pytest.mark.parametrize("words", [["tail", "s5", "--no-follow"], ["tail", "s5"], ["queue", "stats", "s5"]])
def test_advice_about_a_topic_that_there_is_not_is_given_once(broker: str, words: list[str]) -> None:
    error = error_of(run(*words, "--json", "--connect", broker, code=1))
    assert error["message"] == (
        "there is no topic s5; `headrace topic create s5` makes it; headrace topic list shows those there are"
    )


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["tpoic", "list"], "did you mean topic?"),
        (["topic", "lst"], "did you mean list?"),
        (["topic", "create", "t", "--partition", "4"], "did you mean --partitions?"),
        (["topic", "create", "t", "--storage", "dsk"], "did you mean disk?"),
        (["completion", "bsh"], "did you mean bash"),
        (["topic", "create", "t", "--storage", "qqqq"], "choose from disk"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_slips_of_the_pen_are_understood(words: list[str], meant: str) -> None:
    assert meant in run(*words, code=2).stderr.decode()


def test_a_message_that_is_too_large_names_the_limit_and_how_to_raise_it(broker: str) -> None:
    error = error_of(run("publish", "orders", "x" * 2000, "--json", "--connect", broker, code=1))
    assert error["code"] == "message_too_large"
    for part in ("takes 1000 at most", "2000 bytes", "headrace topic alter", "--message-bytes-max 2000"):
        assert part in error["message"]


def test_ports_and_hosts_that_cannot_be_listened_on(broker: str, tmp_path: Path) -> None:
    port = broker.rpartition(":")[2]
    data = ["--data", str(tmp_path / "data")]
    error = error_of(run("serve", *data, "--port", port, "--json", "--log-level", "error", code=1))
    assert error["code"] == "listen_failed"
    assert f"process {os.getpid()}" in error["message"]
    assert "--port" in error["message"]
    error = error_of(
        run("serve", *data, "--host", "no.such.invalid", "--insecure", "--json", "--log-level", "error", code=1)
    )
    assert error["code"] == "listen_failed"
    assert "no.such.invalid" in error["message"]
    assert error_of(run("serve", *data, "--port", "80000", "--json", code=2))["code"] == "usage_error"


def test_a_directory_that_is_in_use_says_by_whom_and_what_to_do(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data")
    for words, advice in (
        (["serve", "--port", "0", "--log-level", "error", "--data"], "--data"),
        (["repair"], "end the broker first"),
    ):
        error = error_of(run(*words, str(tmp_path / "data"), "--json", code=1))
        assert error["code"] == "log_in_use"
        assert f"process {os.getpid()}" in error["message"]
        assert advice in error["message"]
    server.close()


def test_paths_that_cannot_be_used_name_what_is_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for words in (["serve", "--data", str(file)], ["log", "append", str(file), "x"], ["verify", str(file / "data")]):
        error = error_of(run(*words, "--json", code=1))
        assert error["code"] == "disk_failed"
        assert f"{file} is a file, not a directory" in error["message"]
    if sys.platform == "linux":
        error = error_of(run("log", "append", "/proc/x", "x", "--json", code=1))
        assert error["code"] == "disk_failed"
        assert "give another path" in error["message"]
        assert "log append" not in error["message"]


def test_a_limit_on_open_files_that_is_too_low_is_named(tmp_path: Path) -> None:
    command = f"ulimit -n 20; exec {sys.executable} -m headrace serve --port 0 --data {tmp_path}/data --json"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=SOON_S, check=False)
    assert done.returncode == 1
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "too_many_files"
    assert "ulimit -n" in error["message"]


def test_a_data_directory_is_for_its_user_alone(tmp_path: Path) -> None:
    made = tmp_path / "mine"
    made.mkdir(mode=0o755)
    for data in (tmp_path / "new" / "data", made):
        EmbeddedServer(data).close()
        for path in (data / "topics", data / "broker"):
            assert path.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "data").stat().st_mode & 0o777 == 0o700
    assert made.stat().st_mode & 0o777 == 0o755  # what was there is left as it is
