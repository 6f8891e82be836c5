"""Two revisions are measured in turn, each with its own code, and their ratios are told."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks import against, harness

ROOT = Path(__file__).parents[2]
MAIN = """
import json, os, sys
from headrace import FIGURES
with open(os.environ["SEEN"], "a") as seen:
    print(os.getcwd(), *sys.argv[1:], file=seen)
for name, n, median in FIGURES:
    line = {"name": name, "subject": "headrace", "unit": "msg/s", "median": median, "samples": [median]}
    print(json.dumps({**line, "higher_is_better": True, "params": {"n": n}}))
if not FIGURES:
    sys.exit("nothing can be measured")
"""

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.com"]
    subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True)


def commit(root: Path, figures: list[tuple[str, int, float | None]]) -> None:
    (root / "src" / "headrace" / "__init__.py").write_text(f"FIGURES = {figures}")
    git(root, "add", ".")
    git(root, "commit", "-m", "figures")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose benchmarks print what the code says."""
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "repository"
    (path / "src" / "headrace").mkdir(parents=True)
    (path / "benchmarks").mkdir()
    (path / "benchmarks" / "__init__.py").touch()
    (path / "benchmarks" / "__main__.py").write_text(MAIN)
    git(path, "init")
    commit(path, [("a.one", 1, 100.0), ("a.one", 2, 50.0), ("a.gone", 1, 1.0)])
    commit(path, [("a.one", 1, 110.0), ("a.one", 2, 50.0), ("a.new", 1, 1.0)])
    return path


def compared(root: Path, revision: str = "HEAD~1", runs: int = 3) -> list[dict[str, Any]]:
    work = root.parent / "work"
    work.mkdir(exist_ok=True)
    return list(against.compare(root, revision, ["a", "--seconds", "1"], runs, str(work), lambda _: None))


def test_the_ratio_of_each_name_and_point_is_told(root: Path) -> None:
    first, second, new = compared(root)
    assert (first["name"], first["params"]["n"], first["median"], first["samples"]) == ("a.one", 1, 1.1, [1.1] * 3)
    assert (first["params"]["old"], first["params"]["new"], first["params"]["quartiles"]) == (100, 110, [1.1, 1.1])
    assert first["unit"] == "new/old (msg/s)"
    assert (second["params"]["n"], second["median"]) == (2, 1.0)
    assert (new["name"], new["median"], new["why"]) == ("a.new", None, "the old revision has no such benchmark")
    table = harness.ratios([first, new]).splitlines()
    assert table[2] == "| a.one, n = 1 | 100.0 | 110.0 | 1.1 | 1.1 to 1.1 | more |"
    assert "no such benchmark" in table[3]


def test_both_take_turns_with_their_own_code_and_nothing_is_left(root: Path) -> None:
    compared(root)
    seen = (root.parent / "seen").read_text().splitlines()
    assert [line.split()[0] == str(root) for line in seen] == [False, True, True, False, False, True]
    assert all(" a --seconds 1 --subject headrace --samples 1 " in line for line in seen)
    assert list((root.parent / "work").iterdir()) == []
    listed = subprocess.run(["git", "-C", str(root), "worktree", "list"], check=True, capture_output=True, text=True)
    assert len(listed.stdout.splitlines()) == 1


def test_a_revision_that_does_not_exist_is_told(root: Path) -> None:
    with pytest.raises(against.CannotCompare, match="there is no such commit"):
        compared(root, "nonsense")


def test_benchmarks_that_fail_are_told(root: Path) -> None:
    commit(root, [])
    with pytest.raises(against.CannotCompare, match="nothing can be measured"):
        compared(root)
    assert list((root.parent / "work").iterdir()) == []


def test_code_from_elsewhere_is_not_measured(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "_environment", lambda _: {**os.environ, "PYTHONPATH": str(ROOT / "src")})
    with pytest.raises(against.CannotCompare, match="would be measured with"):
        compared(root)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout")
def test_this_checkout_can_be_compared_with_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    what = ["storage", "--only", "append_written", "--against", "HEAD", "--runs", "1", "--seconds", "0.001"]
    assert harness.main([*what, "--directory", str(tmp_path)]) == 0
    [line] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (line["name"], line["subject"]) == ("storage.append_written", "headrace")
    assert line["median"] > 0
    assert list(tmp_path.iterdir()) == []
