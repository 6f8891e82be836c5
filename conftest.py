"""The names that the examples in docstrings may use."""

from pathlib import Path

import pytest

import headrace


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, object], tmp_path: Path) -> None:
    doctest_namespace["Log"] = headrace.Log
    doctest_namespace["directory"] = tmp_path / "log"
