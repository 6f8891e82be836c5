"""The names that the examples in docstrings may use."""

from pathlib import Path

import pytest

import headrace


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, object], tmp_path: Path) -> None:
    doctest_namespace["Log"] = headrace.Log
    doctest_namespace["directory"] = tmp_path / "log"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests that take long be asked for."""
    parser.addoption("--long", action="store_true", help="run the tests that take long, too")
