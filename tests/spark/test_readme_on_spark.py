"""What the README shows of pipelines is what happens."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import pages
from tests.spark.conftest import java_problem

from headrace.spark.pipelines.paths import Folder
from headrace.spark.pipelines.processes import is_alive

README = (pages.ROOT / "README.md").read_text(encoding="utf-8")
ON_SPARK = README.partition("## On Spark\n")[2].partition("\n## ")[0]
PATIENCE_S = 280


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, quickly: dict[str, str]) -> None:
    """Commands that start Spark take their time."""
    if problem := java_problem():
        pytest.skip(problem)
    monkeypatch.setattr(pages, "COMMAND_S", PATIENCE_S)
    monkeypatch.setattr(pages, "ENVIRONMENT", {**pages.ENVIRONMENT, **quickly})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory; a driver that a broken page has left is ended."""
    yield tmp_path
    driver = Folder(tmp_path / "headrace" / "pipelines" / "large_orders").driver()
    if driver is not None and is_alive(driver.pid, driver.started):
        os.killpg(driver.pid, signal.SIGKILL)


@pytest.mark.usefixtures("patient")
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_pipeline_of_the_readme_gets_the_messages_that_are_published_when_it_runs(place: Path) -> None:
    with pages.reader(place) as reading:
        reading.start("serve", "bin/headrace serve")
        reading.read("README.md", ON_SPARK)
