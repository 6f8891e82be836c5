"""What the tests of the ready pipelines share: they run whole files, and compare with plain Python."""

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from tests.faults.fork_server import Nursery
from tests.spark.conftest import SparkBroker

import headrace
from headrace.spark.pipelines.loader import load, settings_of
from headrace.spark.pipelines.query_builder import start_query
from headrace.spark.sessions import temporary_settings

PIPELINES = Path(__file__).parents[2] / "pipelines"
sys.path.insert(0, str(PIPELINES))

import samples  # noqa: E402  # beside the pipelines, from where they import as well

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
FAULTS = samples.Faults(late=0.05, late_s=20.0, lost=0.01, lost_s=(1200.0, 1500.0), twice=0.02, broken=0.01)
Body = dict[str, Any]


def running(path: Path) -> Iterator[SparkBroker]:
    """A broker for the tests of a file: the pipelines say the names of their topics, so they cannot share one."""
    with Nursery(path) as nursery:
        started = SparkBroker(nursery, path / "data")
        started.start()
        yield started
        started.close()


def made(kind: str, count: int, spacing_s: float, faults: samples.Faults = FAULTS) -> list[samples.Message]:
    """Messages as they arrive."""
    found = samples.messages(kind, start=START, spacing_s=spacing_s, faults=faults)
    return list(itertools.islice(found, count))


def halves(messages: Sequence[samples.Message]) -> list[list[samples.Message]]:
    """What comes before a restart, and after it."""
    middle = len(messages) // 2
    return [list(messages[:middle]), list(messages[middle:])]


def publish(bus: headrace.Bus, topic: str, messages: Iterable[samples.Message]) -> None:
    """Publish without a pause."""
    samples.publish(bus, topic, iter(messages), 1e9)


def run(spark: SparkSession, broker: SparkBroker, file: str, checkpoints: Path, *names: str) -> None:
    """Run the pipelines of a file, or some of them, until all that is there is done; they go on where they were."""
    definitions = [each for each in load(str(PIPELINES / file)) if not names or each.name in names]
    with temporary_settings(spark, settings_of(definitions)):
        for each in definitions:
            query = start_query(spark, each, address=broker.address, checkpoints=str(checkpoints), once=True)
            query.awaitTermination()


def forget_last_commit(checkpoints: Path, pipeline: str) -> None:
    """As if the driver had been killed when the last batch was written, and Spark had not noted it yet."""
    commits = checkpoints / pipeline / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for path in (commits / str(last), commits / f".{last}.crc"):
        path.unlink(missing_ok=True)


def values(bus: headrace.Bus, topic: str) -> list[bytes]:
    """All that is in a topic."""
    end = bus.offsets(topic, at="latest")
    count = sum(end.values())
    with bus.subscribe(topic) as messages:
        return [message.value for message in itertools.islice(messages, count)]


def bodies(bus: headrace.Bus, topic: str) -> list[Body]:
    """The same, read; times are datetimes."""
    return [read(value) for value in values(bus, topic)]


def read(value: bytes) -> Body:
    """A JSON object; the fields that are times by their names are datetimes."""
    body = json.loads(value)
    for name in ("ts", "start", "end"):
        if name in body:
            body[name] = datetime.fromisoformat(body[name])
    return body


def readable(message: samples.Message) -> Body | None:
    """The object that a message has; None if it cannot be used."""
    try:
        body = read(message.value)
    except ValueError:
        return None
    return body if "ts" in body else None


class Lateness:
    """Which messages Spark does not count because they are too late, and what has been closed.

    A run is one batch. The watermark that its messages meet is that of the runs before.
    """

    def __init__(self, late_max_s: float, runs: Iterable[Iterable[samples.Message]]) -> None:
        self.watermark = datetime.min.replace(tzinfo=UTC)
        self._late_max_s = late_max_s
        self._runs: list[tuple[datetime, list[Body]]] = []
        for messages in runs:
            found = [body for body in map(readable, messages) if body is not None]
            self._runs.append((self.watermark, found))
            newest = max(body["ts"].timestamp() for body in found) - late_max_s
            self.watermark = max(self.watermark, datetime.fromtimestamp(newest, UTC))

    def counted(self, end: Callable[[datetime], datetime] = lambda ts: ts) -> list[Body]:
        """The messages whose windows were open when they came; `end` is when a window ends that a time is in."""
        return [body for watermark, found in self._runs for body in found if end(body["ts"]) > watermark]


def minute_of(ts: datetime) -> datetime:
    """The minute's beginning."""
    return ts.replace(second=0, microsecond=0)


def plain(rows: DataFrame) -> list[Body]:
    """The rows of a DataFrame, with times in UTC."""
    return [
        {name: value.replace(tzinfo=UTC) if isinstance(value, datetime) else value for name, value in row.items()}
        for row in (row.asDict() for row in rows.collect())
    ]


def check_dead(broker: SparkBroker, topic: str, messages: list[samples.Message]) -> None:
    """What cannot be used is in the dead topic, as it came."""
    expected = [message.value.decode("utf-8", "replace") for message in messages if readable(message) is None]
    assert expected
    found = [value.decode() for value in values(broker.bus, topic)]
    assert len(found) == len(expected)
    # What is JSON but lacks a field comes with its fields in the schema's order.
    assert sorted(map(_canonical, found)) == sorted(map(_canonical, expected))


def _canonical(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text
