"""What the documentation shows is what happens; pages about Spark have tests/spark/test_spark_pages.py."""

from pathlib import Path

import pytest
from tests.pages import ROOT, blocks, needs_spark, reader

DOCS = ROOT / "docs"
PAGES = [
    page.relative_to(DOCS).as_posix()
    for folder in ("", "how-to", "reference")
    for page in sorted((DOCS / folder).glob("*.md"))
    if any(block.language in ("python", "console", "sh") for block in blocks(page.read_text(encoding="utf-8")))
    and not needs_spark(page)
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_true(page: str, tmp_path: Path) -> None:
    with reader(tmp_path) as reading:
        reading.read(page, (DOCS / page).read_text(encoding="utf-8"))


def test_there_are_how_to_pages() -> None:
    assert len([page for page in PAGES if page.startswith("how-to/")]) >= 5
