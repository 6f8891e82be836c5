"""The benchmarks of security: one tenant under the flood of another beside a control, and what authorisation costs."""

import json
from pathlib import Path

import pytest
from benchmarks import harness, security

FAIRNESS = {f"fairness_{flood}_{percent}_ms" for flood in ("batches", "singles") for percent in ("p50", "p99")}


def test_each_figure_has_a_control_in_the_same_run() -> None:
    found = {name: {one.name for one in each.subjects} for each in security.benchmarks() for name in each.figures}
    assert {name: found[name] for name in FAIRNESS} == {name: {"headrace", "control"} for name in FAIRNESS}


def test_a_flood_runs_and_prints_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    only = ["--only", "fairness_singles_p99_ms", "--samples", "1", "--seconds", "0.001", "--directory", str(tmp_path)]
    assert harness.main(["security", *only]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["subject"] for line in lines} == {"headrace", "control"}
    assert all(line["median"] > 0 and line["unit"] == "ms" for line in lines)


def test_authorised_clients_publish(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    only = ["--only", "authorised_publish", "--samples", "1", "--seconds", "0.001", "--directory", str(tmp_path)]
    assert harness.main(["security", *only]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["subject"] for line in lines} == {"headrace", "headrace_plain"}
    assert all(line["median"] > 0 and line["unit"] == "msg/s" for line in lines)
