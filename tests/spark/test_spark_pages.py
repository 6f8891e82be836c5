"""What the pages about Spark show is what happens."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests import pages

from headrace.spark.pipelines.loader import load

PATIENCE_S = 280
HOW_TO = pages.ROOT / "docs" / "how-to"
LONG = ("archive.md", "pipelines.md")
PAGES = [
    pytest.param(page.name, marks=[pytest.mark.long, pytest.mark.timeout(900)] if page.name in LONG else [])
    for page in sorted(HOW_TO.glob("*.md"))
    if pages.needs_spark(page)
]


@pytest.mark.long
def test_what_the_readme_shows_of_spark(
    quickly: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipeline can be loaded, and its queries are answered."""
    monkeypatch.setattr(pages, "COMMAND_S", PATIENCE_S)
    monkeypatch.setattr(pages, "ENVIRONMENT", {**pages.ENVIRONMENT, **quickly})
    shown = pages.blocks((pages.ROOT / "README.md").read_text(encoding="utf-8"))
    with pages.reader(tmp_path) as reading:
        reading.start("serve", "bin/headrace serve")
        reading.read(
            "README.md", """```console\n$ bin/headrace publish sales '{"who": "bob", "amount": 5000}'\n```\n"""
        )
        for block in shown:
            if block.title and "headrace.spark" in block.text:
                (tmp_path / block.title).write_text(block.text)
                assert load(str(tmp_path / block.title))
            elif block.language == "bash":
                script = "".join(f"$ {line.partition('  #')[0]}\n" for line in block.text.splitlines())
                reading.read("README.md", f"```console\n{script}```\n")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_true(
    spark: SparkSession, quickly: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    assert spark is SparkSession.getActiveSession()  # the one that the page's programs use
    monkeypatch.setattr(pages, "COMMAND_S", PATIENCE_S)
    monkeypatch.setattr(pages, "ENVIRONMENT", {**pages.ENVIRONMENT, **quickly})
    with pages.reader(tmp_path) as reading:
        reading.read(f"how-to/{page}", (HOW_TO / page).read_text(encoding="utf-8"))
