"""The commands of subjects and requests, used as a person or a script uses them."""

# Fixtures that come from another file are used by their names only.
# ruff: noqa: F401, F811

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.acceptance.test_cli_broker import Finished, broker, line_of, run, started, told, topic

import headrace


@pytest.fixture
def bus(broker: str) -> Iterator[headrace.Bus]:
    with headrace.connect(broker, name="worker") as bus:
        yield bus


def until(found: Callable[[], bool]) -> None:
    while not found():
        time.sleep(0.01)


def error_of(done: Finished) -> dict[str, Any]:
    """The error object on stderr."""
    error: dict[str, Any] = json.loads(done.stderr)["error"]
    return error


def listening(bus: headrace.Bus, count: int = 1) -> None:
    until(lambda: bus.subjects.info().subscriptions == count)


def serving(bus: headrace.Bus, count: int = 1) -> None:
    until(lambda: bus.subjects.info().responders == count)


def test_listen_prints_what_is_published(bus: headrace.Bus, topic: str) -> None:
    with (
        started("subject", "listen", f"{topic}.*", "-n", "3") as listen,
        started("subject", "listen", f"{topic}.#", "--json", "-n", "3") as as_json,
    ):
        listening(bus, 2)
        done = told("subject", "publish", f"{topic}.eu", "first", "--key", "k", "--header", "lang=en")
        assert done == [{"subject": f"{topic}.eu", "published": 1, "receivers": 2, "stored": False}]
        assert run("subject", "publish", f"{topic}.us", stdin=b"a\n\xff\n").stdout == (
            f"published 2 messages to {topic}.us: 2 receivers\n".encode()
        )
        lines = listen.communicate(timeout=20)[0].decode().splitlines()
        first, _, last = [json.loads(line) for line in as_json.communicate(timeout=20)[0].splitlines()]
    assert listen.returncode == as_json.returncode == 0
    subject, _, key, value, header = lines[0].split("\t")
    assert (subject, key, value, header) == (f"{topic}.eu", "k", "first", "lang=en")
    assert lines[2].split("\t")[2:] == ["-", "\\xff"]
    assert first["timestamp"] > 0
    del first["timestamp"]
    assert first == {"subject": f"{topic}.eu", "key": "k", "value": "first", "headers": {"lang": "en"}}
    assert last["value_base64"] == "/w=="


def test_listen_ends_by_wait_and_signal_and_shares_a_queue(bus: headrace.Bus, topic: str) -> None:
    assert run("subject", "listen", topic, "--wait", "0.3s").stdout == b""
    with started("subject", "listen", topic, "--values", "-0", "--queue", "q") as listen:
        listening(bus)
        bus.subjects.publish(topic, b"x")
        assert listen.stdout is not None
        assert listen.stdout.read(2) == b"x\0"
        listen.send_signal(signal.SIGINT)
        assert listen.wait(20) == 130


def test_nobody_listens(topic: str) -> None:
    (done,) = told("subject", "publish", topic, "x")
    assert done["receivers"] == 0
    (info,) = told("subject", "info")
    assert info["published"] > 0
    assert "responders" in run("subject", "info").stdout.decode()


def test_request_and_respond(bus: headrace.Bus, topic: str) -> None:
    with started("respond", topic, "--value", "3.50", "--header", "currency=eur", "-n", "4") as respond:
        serving(bus)
        assert run("request", topic, "plum", "--header", "lang=en").stdout == b"3.50\n"
        assert run("request", topic, "--headers").stdout == b"currency=eur\n3.50\n"
        assert told("request", topic) == [{"subject": topic, "value": "3.50", "headers": {"currency": "eur"}}]
        assert run("request", topic, "-", stdin=b"from\nstdin").stdout == b"3.50\n"
        lines = respond.communicate(timeout=20)[0].decode().splitlines()
    assert respond.returncode == 0
    assert lines == [f"{topic}\tplum\tlang=en", f"{topic}\t", f"{topic}\t", f"{topic}\tfrom\\nstdin"]


def test_respond_echoes_and_prints_json(bus: headrace.Bus, topic: str) -> None:
    with started("respond", f"{topic}.>", "--echo", "--json") as respond:
        serving(bus)
        assert bus.request(f"{topic}.a", b"\xff\n").value == b"\xff\n"
        assert json.loads(line_of(respond)) == {"subject": f"{topic}.a", "value_base64": "/wo="}
        respond.terminate()
        assert respond.wait(20) == 143
    serving(bus, 0)


def test_respond_runs_a_command(bus: headrace.Bus, topic: str) -> None:
    command = 'read value; [ "$value" = bad ] && { echo oops >&2; exit 3; }; '
    command += 'printf "%s %s %s" "$HEADRACE_SUBJECT" "$HEADRACE_HEADER_X_A" "$value"'
    with started("respond", topic, "--exec", command, "--concurrency", "2", "--quiet") as respond:
        serving(bus)
        assert bus.request(topic, b"good\n", headers={"x-a": "1"}).value == f"{topic} 1 good".encode()
        failed = run("request", topic, "bad\n", "--json", code=1)
        error = error_of(failed)
        respond.terminate()
        out, errors = respond.communicate(timeout=20)
    assert out == b""
    assert b"handler failed" in errors
    assert (error["code"], error["message"]) == ("service_failed", "CommandFailed: oops")
    assert (error["error_code"], error["error_details"]) == ("command_failed", {"exit_code": 3})


def test_errors_of_requests(bus: headrace.Bus, topic: str) -> None:
    nobody = run("request", topic, code=1)
    assert b"nobody serves" in nobody.stderr
    assert b"headrace respond starts one" in nobody.stderr
    assert error_of(run("request", topic, "--json", code=1))["code"] == "no_responders"
    with started("respond", topic, "--exec", "sleep 5"):
        serving(bus)
        assert error_of(run("request", topic, "--timeout", "0.1s", "--json", code=1))["code"] == "timeout"
    assert b"no subject" in run("request", "a..b", code=1).stderr
    assert b"no pattern" in run("subject", "listen", "a.>.b", code=1).stderr
    assert b"one of the arguments" in run("respond", topic, code=2).stderr
    assert b"-0 goes with --values" in run("subject", "listen", topic, "-0", code=2).stderr
