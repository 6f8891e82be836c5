"""What `headrace cluster move` and `drain` say of the node that serves in the end."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli.commands import cluster
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.cluster_requests import ClusterStatus, ShardStatus


class ScriptedCluster:
    """A cluster whose shard has these owners one after the other, each in an epoch of its own."""

    def __init__(self, *owners: str) -> None:
        self._owners = list(owners)
        self._epoch = 0

    def describe(self) -> ClusterStatus:
        """The next state."""
        self._epoch += 1
        owner = self._owners[min(self._epoch, len(self._owners)) - 1]
        return ClusterStatus("t", "memory:t", owner, [ShardStatus(0, self._epoch, owner)], [])

    def move(self, *_: object, **__: object) -> None:
        """Begin to move."""

    def drain(self, *_: object, **__: object) -> None:
        """Begin to drain."""


def run(
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *owners: str,
    as_json: bool = False,
) -> tuple[int, str]:
    """Run a command about node b; returns the exit code and what it printed."""

    @contextmanager
    def connected(*_: object, **__: object) -> Iterator[Any]:
        yield SimpleNamespace(cluster=ScriptedCluster(*owners))

    monkeypatch.setattr(cluster, "connected", connected)
    given = argparse.Namespace(node="b", shard=0, timeout=5.0, undo=False)
    out = Output(as_json=as_json)
    code = command(given, out, Interrupts())
    out.flush()
    return code, capfd.readouterr().out


def test_a_move_to_the_node_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = run(cluster.move, monkeypatch, capfd, "a", "b")
    assert (code, text.startswith("b serves shard 0 instead of a, epoch 2 (")) == (0, True)


@pytest.mark.parametrize(("owner", "line"), [("c", "instead of a"), ("a", "again, as no other node took over")])
def test_a_move_that_ends_elsewhere_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], owner: str, line: str
) -> None:
    code, text = run(cluster.move, monkeypatch, capfd, "a", owner)
    assert code == 1
    assert f"{owner} serves shard 0 {line}" in text
    assert "b did not take over" in text
    code, text = run(cluster.move, monkeypatch, capfd, "a", owner, as_json=True)
    assert (code, json.loads(text)["moved"], json.loads(text)["node"]) == (1, False, owner)


def test_a_drained_node_that_serves_on_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(cluster.drain, monkeypatch, capfd, "b", "a")[0] == 0
    code, text = run(cluster.drain, monkeypatch, capfd, "b", "b")
    assert code == 1
    assert "b serves shard 0 again" in text
