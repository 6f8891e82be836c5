"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

from tests.commands import run_command
from tests.known import ENVIRONMENT
from tests.pages import ROOT, USUAL_HTTP_ADDRESS, blocks, links, reader

README = (ROOT / "README.md").read_text(encoding="utf-8")
ON_SPARK = README.partition("## On Spark\n")[2].partition("\n## ")[0]
"""Needs Java: tests/spark/test_readme_on_spark.py does what it shows."""


def test_the_tour(tmp_path: Path) -> None:
    """All that it shows, in order, from the broker of the first block on."""
    first = blocks(README)[0]
    serve, test = first.text.splitlines()
    assert serve.startswith("bin/headrace serve")
    assert test.split()[0] == "bin/test"
    with reader(tmp_path) as reading:
        command = f"{serve.partition('#')[0]} --http-address {USUAL_HTTP_ADDRESS}"  # the default without HEADRACE_PORT
        reading.start(serve, reading.here(command))
        reading.read("README.md", README.replace(first.text, "").replace(ON_SPARK, ""))


def test_the_log_without_a_broker(tmp_path: Path) -> None:
    (example,) = (
        block.text for block in blocks(README) if block.language == "python" and "headrace.Log(" in block.text
    )
    run = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    lines = [line.split(" ", 2) for line in run.stdout.splitlines()]
    assert [(offset, value) for offset, _, value in lines] == [
        ("0", """b'{"id": 1}'"""),
        ("1", """b'{"id": 2}'"""),
        ("2", "b'a'"),
        ("3", "b'b'"),
        ("4", "b'c'"),
    ]


def test_the_commands_it_names_are_there() -> None:
    (commands,) = re.findall(r"^\| \*\*Command line\*\* \| (.*) \|$", README, re.MULTILINE)
    for command in re.findall(r"`(\w+)`", commands):
        assert run_command([command, "--help"], timeout_s=30).returncode == 0


def test_the_pages_it_links_to_are_there() -> None:
    for target in links(README):
        assert (ROOT / target.partition("#")[0]).exists(), target
