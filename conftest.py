"""The names that the examples in docstrings may use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace

collect_ignore_glob = ["src/headrace/client/_async/*"]
"""Their examples await; those generated from them for threads are run."""


@pytest.fixture(autouse=True)
def _example_names(
    request: pytest.FixtureRequest, doctest_namespace: dict[str, object], tmp_path: Path
) -> Iterator[None]:
    doctest_namespace["headrace"] = headrace
    doctest_namespace["Log"] = headrace.Log
    doctest_namespace["directory"] = tmp_path / "log"
    if isinstance(request.node, pytest.DoctestItem) and "/headrace/client/" in request.node.path.as_posix():
        with headrace.open(":memory:") as bus:
            doctest_namespace["bus"] = bus
            yield
    else:
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests that take long be asked for."""
    parser.addoption("--long", action="store_true", help="run the tests that take long, too")
