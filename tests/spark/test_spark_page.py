"""What the page about Spark shows is what happens."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests import pages

PATIENCE_S = 300


def test_the_page_is_true(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spark is SparkSession.getActiveSession()  # the one that the page's programs use
    monkeypatch.setattr(pages, "COMMAND_S", PATIENCE_S)
    page = pages.ROOT / "docs" / "how-to" / "spark.md"
    with pages.reader(tmp_path) as reading:
        reading.read("how-to/spark.md", page.read_text(encoding="utf-8"))
