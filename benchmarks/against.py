"""Compares this checkout with another revision: both are measured in turn, and the ratio of each pair counts."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HOT: Mapping[str, Sequence[str]] = {
    "broker": ("publish_synced", "publish_written", "consume"),
    "leased": ("enqueue_synced", "lease_ack_batch1000"),
}
"""What is compared when no group is named: the names that no change may make slower."""
RUNS = 15
_SUBJECT = "headrace"
_STOP_S = 30.0

Line = dict[str, Any]
Key = tuple[str, Any, Any]
"""The name of a benchmark, and what tells lines of one name apart: `n` and `under`."""


class CannotCompare(Exception):
    """There is nothing to compare with, and why."""


def compare(
    root: Path, revision: str, arguments: Sequence[str], runs: int, directory: str, say: Callable[[str], None]
) -> Iterator[Line]:
    """Measure the revision and the checkout at `root`, each once a run; a line for each name with new/old.

    `arguments` are those of `benchmarks/run`: groups, names, and how long a sample lasts.
    """
    commit = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    found: dict[str, dict[Key, list[Line]]] = {"old": {}, "new": {}}
    with _worktree(root, commit, directory) as old:
        checkouts = {"old": old, "new": root}
        for checkout in checkouts.values():
            _check_import(checkout)
        for number in range(1, runs + 1):
            # Whoever comes second may find a warmer machine: they take turns in that, too.
            for side in ("old", "new") if number % 2 else ("new", "old"):
                say(f"run {number} of {runs}: {side}")
                for line in _measured(checkouts[side], arguments, directory):
                    found[side].setdefault(_key(line), []).append(line)
    for key, lines in found["new"].items():
        yield _ratio_line(found["old"].get(key, []), lines, commit)


def _ratio_line(old: Sequence[Line], new: Sequence[Line], commit: str) -> Line:
    """What is told of a name: the ratios of the pairs, their median and their spread."""
    line = {key: new[0][key] for key in ("name", "subject", "higher_is_better", "params")}
    line["unit"] = f"new/old ({new[0]['unit']})"
    pairs = [(before["median"], after["median"]) for before, after in zip(old, new, strict=False)]
    ratios = [after / before for before, after in pairs if before and after is not None]
    line["params"] = {**line["params"], "against": commit[:12]}
    if not ratios:
        why = "the old revision has no such benchmark" if not old else "there are no two figures of one run"
        return {**line, "median": None, "samples": [], "why": why}
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    told = {
        "old": statistics.median(before for before, _ in pairs),
        "new": statistics.median(after for _, after in pairs),
        "quartiles": [round(low, 4), round(high, 4)],
    }
    line["params"].update(told)
    return {**line, "median": round(statistics.median(ratios), 4), "samples": [round(ratio, 4) for ratio in ratios]}


def _key(line: Line) -> Key:
    return line["name"], line["params"].get("n"), line["params"].get("under")


@contextlib.contextmanager
def _worktree(root: Path, commit: str, directory: str) -> Iterator[Path]:
    """A checkout of a commit, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="headrace-against-", dir=directory) as place:
        path = Path(place, "old")
        _git(root, "worktree", "add", "--detach", "--force", str(path), commit)
        try:
            yield path
        finally:
            _git(root, "worktree", "remove", "--force", str(path))


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise CannotCompare("git is not installed") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or "there is no such commit"
        raise CannotCompare(f"git {' '.join(arguments)} failed: {said}") from error
    return done.stdout


def _environment(checkout: Path) -> dict[str, str]:
    """The packages of this Python, but the checkout's own code."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(checkout)])}


def _check_import(checkout: Path) -> None:
    """Fail unless the code that is going to be measured is the checkout's."""
    command = [sys.executable, "-c", "import headrace; print(headrace.__file__)"]
    done = subprocess.run(
        command, env=_environment(checkout), cwd=checkout, capture_output=True, text=True, check=False
    )
    if not Path(done.stdout.strip()).is_relative_to(checkout):
        raise CannotCompare(f"{checkout} would be measured with {done.stdout.strip() or done.stderr.strip()}")


def _measured(checkout: Path, arguments: Sequence[str], directory: str) -> list[Line]:
    """One sample of each name."""
    fixed = ["--subject", _SUBJECT, "--samples", "1", "--directory", directory]
    command = [sys.executable, "-m", "benchmarks", *arguments, *fixed]
    process = subprocess.Popen(
        command, env=_environment(checkout), cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        told, said = process.communicate()
    except BaseException:
        process.terminate()  # not killed: it stops the servers that it has started
        process.communicate(timeout=_STOP_S)
        raise
    if process.returncode:
        raise CannotCompare(f"benchmarks of {checkout} failed: {said.strip()[-500:]}")
    return [json.loads(line) for line in told.splitlines()]
