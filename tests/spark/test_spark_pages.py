"""What the pages about Spark show is what happens."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests import pages

PATIENCE_S = 280
HOW_TO = pages.ROOT / "docs" / "how-to"
LONG = ("archive.md", "pipelines.md")
PAGES = [
    pytest.param(page.name, marks=[pytest.mark.long, pytest.mark.timeout(900)] if page.name in LONG else [])
    for page in sorted(HOW_TO.glob("*.md"))
    if pages.needs_spark(page)
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_true(
    spark: SparkSession, quickly: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    assert spark is SparkSession.getActiveSession()  # the one that the page's programs use
    monkeypatch.setattr(pages, "COMMAND_S", PATIENCE_S)
    monkeypatch.setattr(pages, "ENVIRONMENT", {**pages.ENVIRONMENT, **quickly})
    with pages.reader(tmp_path) as reading:
        reading.read(f"how-to/{page}", (HOW_TO / page).read_text(encoding="utf-8"))
