"""The commands of routes, used as a person or a script uses them."""

# Fixtures that come from another file are used by their names only.
# ruff: noqa: F401, F811

import json
from typing import NamedTuple

from tests.acceptance.test_cli_broker import broker, serving, topic
from tests.acceptance.test_cli_leasing import run as run_bytes


class Said(NamedTuple):
    """What a command printed."""

    stdout: str
    stderr: str


def run(*arguments: str, code: int = 0) -> Said:
    """Run a command, which must end with this exit code."""
    finished = run_bytes(*arguments, code=code)
    return Said(finished.stdout.decode(), finished.stderr.decode())


def test_a_route_from_its_making_to_its_end(broker: str, topic: str) -> None:
    out, large = f"{topic}-out", f"{topic}-large"
    at = ("--connect", broker)
    added = run("route", "add", f"{topic}-eu", "--from", topic, "--pattern", "eu.#", "--to", out, "--to", large, *at)
    assert added.stdout == f"{topic}-eu: from {topic} to {out}, {large}\n"
    run("route", "add", f"{topic}-n", "--from", topic, "--jsonpath", "$[?@ > 10]", "--to", large, *at)
    run("publish", topic, "--key", "eu.1", '{"n": 1}', *at)
    run("publish", topic, "--subject", "us.1", '{"n": 11}', *at)
    assert run("tail", out, "--from", "earliest", "-n", "1", "--values", *at).stdout.strip() == '{"n": 1}'
    listed = run("route", "list", "--topic", topic, *at).stdout.splitlines()
    assert listed[0].split() == ["name", "from", "condition", "to", "behind"]
    assert [line.split()[0] for line in listed[1:]] == [f"{topic}-eu", f"{topic}-n"]
    found = [json.loads(line) for line in run("route", "list", "--topic", topic, "--json", *at).stdout.splitlines()]
    assert [one["content"] for one in found] == [None, {"jsonpath": "$[?@ > 10]"}]
    assert found[0]["targets"] == [out, large]
    assert run("route", "list", "--topic", out, "--names", *at).stdout == f"{topic}-eu\n"
    told = run("route", "explain", "--from", topic, "--key", "us.1", '{"n": 11}', *at).stdout.splitlines()
    assert told[1].startswith("no     ")
    assert told[2].startswith("yes    ")
    assert told[3] == f"to {large}"
    explained = json.loads(run("route", "explain", "--from", topic, "--subject", "eu.2", "--json", *at).stdout)
    assert explained["targets"] == [out, large]
    assert [one["is_taken"] for one in explained["routes"]] == [True, False]
    assert run("route", "remove", f"{topic}-eu", *at).stdout == f"removed {topic}-eu\n"


def test_what_is_wrong_is_told(broker: str, topic: str) -> None:
    at = ("--connect", broker)
    name = f"{topic}-copy"
    run("route", "add", name, "--from", topic, "--all", "--to", f"{topic}-2", *at)
    assert (
        "--replace puts the new one in its place"
        in run("route", "add", name, "--from", topic, "--key", "a", "--to", f"{topic}-2", *at, code=1).stderr
    )
    assert (
        "route_loop" in run("route", "add", "back", "--from", f"{topic}-2", "--all", "--to", topic, *at, code=1).stderr
    )
    assert f"did you mean {name}?" in run("route", "remove", f"{topic}-cop", *at, code=1).stderr
    assert "give one condition" in run("route", "add", "x", "--to", "y", *at, code=2).stderr
    assert "--any needs --header" in run("route", "add", "x", "--all", "--any", "--to", "y", *at, code=2).stderr
    assert "is not JSON" in run("route", "add", "x", "--partial", "{", "--to", "y", *at, code=2).stderr
    wrong = run("route", "add", "x", "--jsonpath", "no", "--to", "y", "--json", *at, code=1).stderr
    assert json.loads(wrong)["error"]["code"] == "invalid_content_query"


def test_headers_and_the_ingress(broker: str, topic: str) -> None:
    at = ("--connect", broker)
    run("route", "add", f"{topic}-h", "--header", f"h={topic}", "--header", "x", "--any", "--to", topic, *at)
    run("publish", "headrace.ingress", "--header", f"h={topic}", "1", *at)
    assert run("tail", topic, "--from", "earliest", "-n", "1", "--values", *at).stdout.strip() == "1"
    listed = run("route", "list", "--topic", topic, *at).stdout
    assert f"any of the headers h={topic}, x" in listed
    run("route", "remove", f"{topic}-h", *at)
