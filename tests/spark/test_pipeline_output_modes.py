"""Aggregations that go to topics: each batch of theirs is written once, whatever is killed."""

import json
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.spark.conftest import SparkBroker, java_problem

import headrace
from headrace.cli.main import main
from headrace.model.errors import InvalidArgument
from headrace.spark.pipelines.application import Application
from headrace.spark.pipelines.loader import load
from headrace.spark.pipelines.paths import Folder

SOON_S = 200.0
COUNTS = """
-- source: {topic} as words {{"startingOffsets": "earliest", "value.format": "string", "maxOffsetsPerTrigger": {rows}}}
-- sink: {out}
-- output mode: {mode}
-- trigger: as fast as possible
select value as key, to_json(struct(value as word, count(*) as number)) as value from words group by value
"""


def eventually(look: Callable[[], Any], why: Callable[[], object] = lambda: "") -> Any:
    """What a look gives at last."""
    end = time.monotonic() + SOON_S
    while not (found := look()):
        assert time.monotonic() < end, why()
        time.sleep(0.05)
    return found


def counts(bus: headrace.Bus, topic: str) -> list[tuple[str, int]]:
    """What a topic holds, in order."""
    end, found = bus.offsets(topic, at="latest")[0], []
    with bus.subscribe(topic) as messages:
        for message in messages if end else ():
            said = json.loads(message.value or b"")
            found.append((said["word"], said["number"]))
            if message.offset == end - 1:
                break
    return found


@pytest.fixture
def run(spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Runs a file until it has read all that there is."""
    made: list[Application] = []

    def do(mode: str) -> None:
        file = tmp_path / "counts.sql"
        file.write_text(COUNTS.format(topic=topic, out=f"{topic}-out", mode=mode, rows=1000))
        made.append(Application(spark, "app", lambda _: None))
        made[-1].start(load(str(file)), address=broker.address, checkpoints=str(tmp_path / "c"), once=True)
        eventually(lambda: not made[-1].running())

    yield do
    for application in made:
        application.close()


def test_update_writes_what_has_changed_and_a_repeated_batch_writes_nothing(
    run: Callable[[str], None], broker: SparkBroker, topic: str, tmp_path: Path
) -> None:
    bus = broker.bus
    bus.publish_many(topic, [b"a", b"b", b"a"])
    run("update")
    assert sorted(counts(bus, f"{topic}-out")) == [("a", 2), ("b", 1)]
    bus.publish_many(topic, [b"b"])
    run("update")
    assert counts(bus, f"{topic}-out")[2:] == [("b", 2)]
    commits = tmp_path / "c" / "counts" / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    last.unlink()  # as if the driver had died when the batch was written, and not yet noted as done
    (commits / f".{last.name}.crc").unlink(missing_ok=True)
    run("update")
    assert last.exists()
    assert counts(bus, f"{topic}-out")[2:] == [("b", 2)]


def test_complete_writes_all_of_the_result_with_every_batch(
    run: Callable[[str], None], broker: SparkBroker, topic: str
) -> None:
    bus = broker.bus
    bus.publish_many(topic, [b"a", b"b"])
    run("complete")
    bus.publish_many(topic, [b"b"])
    run("complete")
    found = counts(bus, f"{topic}-out")
    assert (sorted(found[:2]), sorted(found[2:])) == ([("a", 1), ("b", 1)], [("a", 1), ("b", 2)])


def test_columns_that_a_topic_has_not_are_refused_before_the_first_batch(
    spark: SparkSession, broker: SparkBroker, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.sql"
    file.write_text(
        '-- source: a {"format": "rate"}\n-- sink: b\n-- output mode: update\nselect value as colour from a\n'
    )
    application = Application(spark, "app", lambda _: None)
    with pytest.raises(InvalidArgument, match="the sink has no column colour"):
        application.start(load(str(file)), address=broker.address, checkpoints=str(tmp_path / "c"), once=True)
    application.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_batches_of_an_aggregation_are_written_once_though_the_driver_is_killed(
    tidy: SparkBroker, quickly: dict[str, str], topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem := java_problem():
        pytest.skip(problem)
    for name, value in quickly.items():
        monkeypatch.setenv(name, value)
    bus, out, rows, batches = tidy.bus, f"{topic}-out", 20, 60
    bus.create_topic(out)
    bus.publish_many(topic, [b"a"] * rows * batches)
    file = tmp_path / "kills.sql"
    file.write_text(textwrap.dedent(COUNTS).format(topic=topic, out=out, mode="update", rows=rows))
    folder = Folder(tidy.data / "pipelines" / "kills")
    here = ("--connect", tidy.address)

    def written() -> int:
        return sum(bus.offsets(out, at="latest").values())

    def why() -> str:
        return folder.log.read_text()[-8000:]

    assert main(["pipeline", "start", str(file), "--master", "local[2]", "--wait", "5m", *here]) == 0, why()
    for share in (1 / 6, 1 / 3, 1 / 2):
        eventually(lambda: written() >= batches * share, why)  # noqa: B023 asked at once
        driver = folder.driver()
        assert driver is not None
        os.kill(driver.pid, signal.SIGKILL)
        eventually(lambda: (now := folder.driver()) and now.pid != driver.pid and now.phase == "running", why)  # noqa: B023
    eventually(lambda: written() >= batches, why)
    assert main(["pipeline", "stop", "kills", *here]) == 0
    assert counts(bus, out) == [("a", rows * number) for number in range(1, batches + 1)]
    assert main(["pipeline", "remove", "kills", "--yes", "--files", *here]) == 0
