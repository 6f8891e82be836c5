"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_first_example(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    run = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line.split(" ", 2) for line in run.stdout.splitlines()]
    assert [(offset, value) for offset, _, value in lines] == [
        ("0", """b'{"id": 1}'"""),
        ("1", """b'{"id": 2}'"""),
        ("2", "b'a'"),
        ("3", "b'b'"),
        ("4", "b'c'"),
    ]


def test_the_commands_it_names_are_there() -> None:
    for command in re.findall(r"^bin/headrace log (\w+)", README, re.MULTILINE):
        subprocess.run(
            [sys.executable, "-m", "headrace.cli.main", "log", command, "--help"], check=True, capture_output=True
        )


def test_the_pages_it_links_to_are_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
