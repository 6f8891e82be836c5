"""Every example is run by a test, or is listed here with how else it is checked; every command that is shown exists."""

import configparser
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from tests.known import ENVIRONMENT
from tests.pages import ROOT, Block, blocks, is_output, is_run

from headrace.cli import main as command_line
from headrace.cli.command_list import whole_parser
from headrace.cli.command_tree import command_tree
from headrace.cli.configuration import configure

PAGES = [
    ROOT / "README.md",
    ROOT / "pipelines" / "README.md",
    *(ROOT / "docs" / page for page in ("index.md", "tutorial.md", "concepts.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted(page for page in (ROOT / "docs" / "reference").glob("*.md") if page.name != "command-line.md"),
]
NOT_RUN = {
    "README.md": {
        "large_orders.py": "tests/spark/test_spark_pages.py loads it",
        "bin/headrace ": "tests/spark/test_spark_pages.py runs it",
    },
    "pipelines/README.md": {"pip install": "installs; tests/spark/test_ready_samples.py checks the commands"},
    "docs/index.md": {"bin/headrace serve": "a list of commands"},
    "docs/how-to/install.md": {
        "bin/headrace serve": "a list of commands; tests/acceptance/test_setup.py and test_cli_terminal.py run them",
        "python3 -m venv env": "installs; tests/acceptance/test_setup.py does the same in a checkout",
    },
    "docs/how-to/archive.md": {
        "export AWS_ACCESS_KEY_ID": "needs a bucket; tests/spark/test_archive_s3.py does the same",
        "archive/topic=orders": "a list of files",
        "headrace archive restore": "needs a bucket; tests/spark/test_archive.py does the same",
    },
    "docs/how-to/cluster.md": {
        "createuser headrace": "needs PostgreSQL; tests/acceptance/test_cli_cluster.py does the same",
        "export AWS_ACCESS_KEY_ID": "needs a bucket; tests/conformance/test_stores.py uses such a store",
        "headrace serve --data /var/lib/headrace": "tests/scenarios/test_cluster_security.py does that",
    },
    "docs/how-to/cluster-clients.md": {
        "headrace.connect(": "needs several machines; tests/scenarios/test_moving_broker.py connects to such lists"
    },
    "docs/how-to/http.md": {
        "location /headrace/": "settings of nginx; tests/scenarios/test_http_upgrade.py has a proxy"
    },
    "docs/how-to/observe.md": {"scrape_configs:": "settings of Prometheus; tests parse the metrics with its parser"},
    "docs/how-to/websocket.md": {
        "<script>": "a page; tests/scenarios/test_http_browser.py opens a WebSocket from one",
        "new WebSocket(url": "a line of a page; tests/scenarios/test_websocket.py sends the same subprotocols",
    },
    "docs/how-to/middleware.md": {
        "[project.entry-points": "a part of pyproject.toml; tests/acceptance/test_plugin_example.py installs one"
    },
    "docs/how-to/plug-ins.md": {
        "[project.entry-points": "a part of pyproject.toml; tests/acceptance/test_plugin_example.py installs one"
    },
    "docs/how-to/spark.md": {
        "pip install": "installs",
        "python -m venv": "installs; tests/spark/test_cluster.py does the same",
        "spark.read.format": "needs a cluster; tests/spark/test_failover.py reads from one",
    },
    "docs/how-to/stream-processing.md": {
        "pip install": "goes on for ever; tests/spark/test_ready_samples.py checks the commands, as of those below",
        "python pipelines/samples.py": "the same; tests/spark/test_ready_pipelines.py and its like run the pipelines",
        "python pipelines/orders_projection.py": "tests/spark/test_ready_projection.py does the same",
        '{"': "what comes out, as an example",
    },
}
"""Blocks that are shown and not run as they stand, by the page and how they begin, with the reason."""
USED_BY = {
    "shop_middleware.py": "docs/how-to/middleware.md",  # whose try_limit.py imports it
    "verify.py": "tests/scenarios/test_webhook_verifiers.py",
    "spark-pipeline.yml": "tests/spark/test_pipelines.py",
    "refunds_flow.py": "tests/spark/test_pipelines.py",
    "act_on_alerts.py": "tests/spark/test_ready_trades.py",
    "large_orders.py": "tests/spark/test_spark_pages.py",
    "headrace.service": "tests/acceptance/test_examples.py",
    "headrace-pipelines.service": "tests/acceptance/test_examples.py",
}
"""Files that a page shows and does not use itself, with the test that does."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def shown(page: Path) -> list[Block]:
    return blocks(page.read_text(encoding="utf-8"))


def reason(page: Path, block: Block) -> str | None:
    """Why a block is not run; None if there is none."""
    known = NOT_RUN.get(name_of(page), {})
    return next((why for begin, why in known.items() if block.text.startswith(begin)), None)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_accounted_for(page: Path) -> None:
    found = shown(page)
    for block, before in zip(found, [None, *found], strict=False):
        if is_run(block) or is_output(block, before) or reason(page, block):
            continue
        where = f"{name_of(page)}, line {block.line}"
        if block.title:
            used = [one for one in found if is_run(one) and Path(block.title).stem in one.text]
            assert used or block.title in USED_BY, f"{where}: nothing uses {block.title}"
        else:
            assert block.language == "toml", f"{where}: this {block.language} block is neither run nor listed"


def test_what_is_listed_is_there() -> None:
    for page, known in NOT_RUN.items():
        if page == "README.md":
            continue  # which changes most often
        text = (ROOT / page).read_text(encoding="utf-8")
        for begin in known:
            assert begin in text, f"{page} has no {begin} any more"
    for title, test in USED_BY.items():
        assert (ROOT / test).exists(), title


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_shown_is_well_formed(page: Path, tmp_path: Path) -> None:
    for block in shown(page):
        if block.language == "json":
            assert json.loads(block.text)
        elif block.language == "toml":
            if "project" in tomllib.loads(block.text):
                continue  # a part of pyproject.toml
            file = tmp_path / "headrace.toml"
            file.write_text(block.text)
            configure({}, {}, str(file), {})
        elif block.language == "ini":
            unit = configparser.ConfigParser(strict=False)
            unit.read_string(block.text)
            check_command(unit["Service"]["ExecStart"], block.title or "")


def check_command(line: str, where: str) -> None:
    """See that a command has a parser, which takes its arguments; others than ours are left alone."""
    words = shlex.split(line.removesuffix("&").rstrip(), comments=True)
    while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or Path(words[0]).name in ("env", "exec", "export")):
        words.pop(0)
    if not words or Path(words[0]).name != "headrace":
        return
    until = next((at for at, word in enumerate(words) if word in ("|", ">", "<", "&&", ";", "2>")), len(words))
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            command_line._parse(words[1:until])
        except SystemExit as end:
            code = end.code
        else:
            code = 0
    assert not code, f"{where}: {line}\n{said.getvalue()}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_shown_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in shown(page):
        if block.language in ("bash", "text", "sh") and not (block.language == "text" and block.follows):
            for line in block.text.replace("\\\n", " ").splitlines():
                if re.match(r"\s*(?:[A-Z_]+=\S+ )*(?:bin/)?headrace ", line) and not re.search(r"  \S", line):
                    check_command(line.strip(), f"{name_of(page)}, line {block.line}")


@pytest.mark.timeout(180)
def test_the_cluster_of_the_example_survives_its_killer() -> None:
    command = [sys.executable, str(ROOT / "examples" / "cluster" / "demo.py"), "--seconds", "4", "--kill-every", "2"]
    with tempfile.TemporaryDirectory(prefix="headrace-example-") as directory:  # PostgreSQL's user may enter it
        done = subprocess.run(
            [*command, "--directory", directory],
            capture_output=True,
            text=True,
            timeout=150,
            env=ENVIRONMENT,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["store", "nodes"]
    assert any(line.startswith("failover  node-") for line in lines)
    assert lines[-1] == "OK        nothing lost, nothing doubled"


def helps() -> list[tuple[str, str]]:
    """The examples of every command's help."""
    parser = whole_parser()
    found = []
    for node in command_tree(parser).walk():
        at = parser
        for word in node.path:
            at.fill()
            (below,) = [one for one in at._actions if hasattr(one, "_name_parser_map")]
            at = below._name_parser_map[word]
        examples = (at.epilog or "").partition("examples:\n")[2].partition("\n\n")[0]
        found += [(" ".join(node.path), line.strip()) for line in examples.splitlines()]
    return found


def test_the_examples_of_help_can_be_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [(where, line) for where, line in helps() if line.startswith("headrace ")]
    assert len(lines) > 60
    for where, line in lines:
        check_command(line, f"headrace {where} --help")
