"""The example of a cluster, as its users run it: failovers in which nothing is lost, and an end that leaves nothing."""

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.known import ENVIRONMENT
from tests.pages import ROOT

SOON_S = 120.0


@pytest.fixture
def directory() -> Iterator[str]:
    """Where the example has its data; no process that works there may be left at the end."""
    with tempfile.TemporaryDirectory(prefix="headrace-example-") as found:  # of pytest's, PostgreSQL's user has none
        yield found
        assert not [one for one in Path("/proc").glob("[0-9]*/cmdline") if found.encode() in _content(one)]


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""  # it has ended meanwhile


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [ROOT / "examples" / "cluster" / "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)


def test_owners_are_killed_and_nothing_is_lost(directory: str) -> None:
    example = start("--directory", directory, "--seconds", "5", "--kill-every", "2")
    out, _ = example.communicate(timeout=SOON_S)
    assert example.returncode == 0, out
    lines = out.splitlines()
    assert lines[0].startswith("store     postgresql://"), out
    assert any(" acknowledges after " in line for line in lines), out
    assert lines[-1] == "OK        nothing lost, nothing doubled", out


def test_an_interrupted_example_ends_all_that_it_started(directory: str) -> None:
    example = start("--directory", directory, "--kill-every", "1")
    assert example.stdout is not None
    for line in example.stdout:
        if line.startswith("failover"):
            break
    example.send_signal(signal.SIGINT)
    out, _ = example.communicate(timeout=SOON_S)
    assert example.returncode == 130, out
