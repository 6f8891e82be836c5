"""Many queries and sources in one application."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.spark.conftest import SparkBroker, java_problem
from tests.spark.listening import elsewhere, family, listening

from headrace.cli.main import main
from headrace.spark.pipelines.paths import Folder
from headrace.spark.pipelines.registry import Registry

SOON_S = 200.0
QUERIES, SOURCES = 7, 10
MANY = f"""
from headrace.spark import pipeline

TOPICS = [[n] if n < {2 * QUERIES - SOURCES} else [n, n + {SOURCES - QUERIES}] for n in range({QUERIES})]
for number, topics in enumerate(TOPICS):
    @pipeline(source=[f"in-{{each}}" for each in topics], sink="out", name=f"query-{{number}}")
    def copied(first, *more):
        for each in more:
            first = first.union(each)
        return first.select("value")
"""


def eventually(look: Callable[[], Any], why: Callable[[], object] = lambda: "") -> Any:
    """What a look gives at last."""
    end = time.monotonic() + SOON_S
    while not (found := look()):
        assert time.monotonic() < end, why()
        time.sleep(0.1)
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_seven_queries_with_ten_sources_start_and_run(
    tidy: SparkBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem := java_problem():
        pytest.skip(problem)
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "HEADRACE_SPARK_PYTHON"):  # as for a user
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "many.py"
    file.write_text(MANY)
    folder = Folder(tidy.data / "pipelines" / "many")
    here = ("--connect", tidy.address)

    def why() -> str:
        return folder.log.read_text()[-8000:]

    assert main(["pipeline", "start", str(file), "--master", "local[2]", "--wait", "10m", *here]) == 0, why()
    driver = folder.driver()
    assert driver is not None
    assert len(driver.queries) == QUERIES
    assert not elsewhere(listening(family(driver.pid)))
    for number in range(SOURCES):
        tidy.bus.publish(f"in-{number}", b"%d" % number)
    eventually(lambda: sum(tidy.bus.offsets("out", at="latest").values()) >= SOURCES, why)
    with tidy.bus.subscribe("out", timeout=30) as messages:
        found = sorted(message.value or b"" for message, _ in zip(messages, range(SOURCES), strict=False))
    assert found == [b"%d" % number for number in range(SOURCES)]
    registry = Registry(tidy.bus)
    registry.look()
    assert (registry.get("many").state, registry.get("many").restarts) == ("running", 0)
    assert main(["pipeline", "stop", "many", "--wait", "5m", *here]) == 0
