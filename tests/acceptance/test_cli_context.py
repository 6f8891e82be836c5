"""Contexts: names for brokers, and which of all addresses a command uses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cluster_nodes import ScriptedNode
from tests.commands import Finished, run_command

from headrace.server import EmbeddedServer

A, B, C, D = (f"headrace://127.0.0.1:{number}" for number in range(1, 5))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where contexts are kept; nothing is said in the environment."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("HEADRACE_URL", "HEADRACE_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "config" / "headrace"


def run(*arguments: str, code: int = 0) -> Finished:
    done = run_command(arguments, timeout_s=60)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == code, done.stderr.decode()
    return done


def shown(*arguments: str) -> dict[str, str]:
    """Which broker a command would talk to."""
    told = json.loads(run("context", "show", "--json", *arguments).stdout)
    assert isinstance(told, dict)
    return told


def test_the_first_that_names_a_broker_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown() == {"context": None, "address": "headrace://127.0.0.1:7390", "source": "default"}
    for name, address in (("a", A), ("b", B), ("c", C)):
        run("context", "add", name, address)
    assert shown()["source"] == "default"  # to have a name is not to be used
    run("context", "use", "a")
    assert (shown()["address"], shown()["context"]) == (A, "a")
    monkeypatch.setenv("HEADRACE_CONTEXT", "b")
    assert (shown()["address"], shown()["context"]) == (B, "b")
    monkeypatch.setenv("HEADRACE_URL", D)
    assert shown() == {"context": None, "address": D, "source": "$HEADRACE_URL"}
    assert shown("--context", "c")["address"] == C
    assert shown("--context", "c", "--connect", A) == {"context": None, "address": A, "source": "--connect"}
    # Commands go where it says.
    assert f"cannot reach a broker at {C}" in run("ping", "--context", "c", code=1).stderr.decode()
    assert f"cannot reach a broker at {D}" in run("topic", "list", code=1).stderr.decode()


def test_life_of_a_context(home: Path) -> None:
    assert b"there are no contexts" in run("context", "list").stderr
    run("context", "add", "prod", A, "--use")
    run("context", "add", "dev.local-1", B)
    assert run("context", "list", "--names").stdout == b"dev.local-1\nprod\n"
    assert [json.loads(line) for line in run("context", "list", "--json").stdout.splitlines()] == [
        {"context": "dev.local-1", "address": B, "current": False},
        {"context": "prod", "address": A, "current": True},
    ]
    assert f"*  prod         {A}" in run("context", "list").stdout.decode()
    assert b"--replace" in run("context", "add", "prod", C, code=1).stderr
    run("context", "add", "prod", A)  # nothing changes
    run("context", "add", "prod", C, "--replace")
    assert run("context", "show", "prod").stdout.decode() == f"{C}\n"
    run("context", "remove", "prod")
    assert shown()["source"] == "default"
    assert run("context", "list", "--names").stdout == b"dev.local-1\n"
    assert (home / "contexts.toml").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.iterdir()] == ["contexts.toml"]


def test_contexts_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    run("context", "add", "production", A)
    assert b"did you mean production?" in run("topic", "list", "--context", "prodution", code=1).stderr
    assert b"did you mean production?" in run("context", "use", "prodution", code=1).stderr
    monkeypatch.setenv("HEADRACE_CONTEXT", "other")
    assert b"$HEADRACE_CONTEXT" in run("topic", "list", code=1).stderr


def test_addresses_that_cannot_be_one_are_blamed_on_who_said_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("context", "add", "a", A, "--use")
    file = home / "contexts.toml"
    file.write_text(file.read_text().replace(A, "somewhere"))
    assert f"context a in {file}: 'somewhere' is no address" in run("ping", code=1).stderr.decode()
    monkeypatch.setenv("HEADRACE_URL", "elsewhere")
    assert b"$HEADRACE_URL: 'elsewhere' is no address" in run("ping", code=1).stderr


def test_what_the_environment_overrides_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", B)
    assert b"$HEADRACE_URL is set" in run("context", "add", "prod", A, "--use").stderr
    assert b"$HEADRACE_URL is set" in run("context", "use", "prod").stderr


@pytest.mark.parametrize("content", ["contexts = 1", "current = 5", "[contexts]\na = 1", "not toml", "\xff"])
def test_a_file_that_cannot_be_understood_is_named(home: Path, content: str) -> None:
    home.mkdir(parents=True)
    (home / "contexts.toml").write_bytes(content.encode("latin-1"))
    for words in (["topic", "list"], ["context", "list"], ["context", "add", "a", A]):
        assert str(home / "contexts.toml") in run(*words, code=1).stderr.decode()
    assert (home / "contexts.toml").read_bytes() == content.encode("latin-1")


def test_names_and_addresses_are_checked() -> None:
    assert b"is not a name" in run("context", "add", "a b", A, code=2).stderr
    assert b"is no address" in run("context", "add", "a", "somewhere", code=2).stderr


def test_several_hosts_of_a_cluster_are_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = "headrace://127.0.0.1:1,127.0.0.1:2"
    run("context", "add", "cluster", hosts, "--use")
    assert shown()["address"] == hosts
    assert f"no node of {hosts} can be reached" in run("ping", code=1).stderr.decode()
    assert f"no node of {hosts}?tenant=acme can be" in run("ping", "--tenant", "acme", code=1).stderr.decode()
    refused = run("context", "add", "other", "headrace://a,,b", code=2).stderr.decode()
    assert "several hosts of a cluster are one list" in refused
    with headrace_node() as (follower, owner):
        monkeypatch.setenv("HEADRACE_URL", f"{follower},127.0.0.1:3")
        run("topic", "create", "orders")
        assert b"orders" in run("topic", "list", "--connect", owner).stdout


@contextmanager
def headrace_node() -> Iterator[tuple[str, str]]:
    """The addresses of a node that follows, and of the broker to which it sends clients."""
    server, follower = EmbeddedServer(":memory:", listen=["headrace://127.0.0.1:0"]), ScriptedNode()
    owner = server._server.listening[0]
    follower.follow(owner)
    try:
        yield follower.url, owner
    finally:
        follower.close()
        server.close()
