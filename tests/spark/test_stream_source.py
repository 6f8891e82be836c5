"""Topics as streams: each message once, from where the query was, whatever happens to the broker and the topic."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.spark.conftest import SparkBroker
from tests.spark.tables import drain, drained, finish, stream


def numbers(broker: SparkBroker, topic: str, first: int, count: int, partition: int = 0) -> None:
    broker.bus.publish_many(topic, [b"%d" % at for at in range(first, first + count)], partition=partition)


def read(spark: SparkSession, out: Path) -> list[int]:
    return [int(row.value) for row in drained(spark, out)]


def test_goes_on_where_it_was(spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path) -> None:
    broker.bus.create_topic(topic, partitions=2)
    source = stream(spark, broker, subscribe=topic, startingOffsets="earliest")
    numbers(broker, topic, 0, 10)
    numbers(broker, topic, 10, 5, partition=1)
    drain(source, tmp_path)
    assert read(spark, tmp_path) == list(range(15))
    numbers(broker, topic, 15, 5, partition=1)
    drain(source, tmp_path)
    drain(source, tmp_path)
    assert read(spark, tmp_path) == list(range(20))


def test_limit_of_a_trigger(spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path) -> None:
    broker.bus.create_topic(topic, partitions=2)
    numbers(broker, topic, 0, 90)
    numbers(broker, topic, 90, 10, partition=1)
    batches: list[int] = []
    drain(
        stream(spark, broker, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="40"),
        tmp_path,
        batches=batches,
    )
    assert sum(batches) == 100
    assert max(batches) <= 40
    assert len(batches) == 3
    assert read(spark, tmp_path) == list(range(100))


@pytest.mark.parametrize("where", ["latest", "offsets", "time"])
def test_where_it_begins(spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path, where: str) -> None:
    for at in range(10):
        broker.bus.publish(topic, b"%d" % at, timestamp=1_000_000 * (at + 1))
    start: dict[str, Any] = {
        "latest": {},
        "offsets": {"startingOffsets": json.dumps({topic: {"0": 7}})},
        "time": {"startingTimestamp": 8000},
    }[where]
    source = stream(spark, broker, subscribe=topic, **start)
    drain(source, tmp_path)
    numbers(broker, topic, 10, 3)
    drain(source, tmp_path)
    assert read(spark, tmp_path) == list(range(10 if where == "latest" else 7, 13))


def test_new_topics_and_partitions(spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path) -> None:
    numbers(broker, f"{topic}.a", 0, 3)
    source = stream(spark, broker, subscribePattern=f"{topic}\\..*", startingOffsets="latest")
    drain(source, tmp_path)
    broker.bus.alter_topic(f"{topic}.a", partitions=3)
    numbers(broker, f"{topic}.a", 10, 2, partition=2)
    numbers(broker, f"{topic}.b", 20, 2)
    drain(source, tmp_path)
    assert sorted(read(spark, tmp_path)) == [10, 11, 20, 21]


def test_while_the_broker_restarts(spark: SparkSession, own_broker: SparkBroker, topic: str, tmp_path: Path) -> None:
    """The query lives on, and has each message once."""
    bus = own_broker.bus
    bus.create_topic(topic, partitions=2)
    query = (
        stream(spark, own_broker, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="500")
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "rows"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    for at in range(0, 4000, 100):
        numbers(own_broker, topic, at, 100, partition=at // 100 % 2)
        if at % 1000 == 500:
            own_broker.restart()
            time.sleep(0.3)  # in the middle of whatever Spark is doing
    query.processAllAvailable()
    query.stop()
    assert own_broker.starts == 5
    assert sorted(read(spark, tmp_path)) == list(range(4000))


def test_progress_is_seen_by_the_broker(spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path) -> None:
    numbers(broker, topic, 0, 10)
    options = {"subscribe": topic, "startingOffsets": "earliest", "group__id": f"{topic}-query"}
    drain(stream(spark, broker, maxOffsetsPerTrigger="4", **options), tmp_path)
    # Spark tells of a batch that is done when it plans the next one.
    place = broker.bus.describe_group(f"{topic}-query").places[0]
    assert (place.topic, place.partition, place.end_offset) == (topic, 0, 10)
    assert place.offset in (8, 10)


class TestLoss:
    def source(self, spark: SparkSession, broker: SparkBroker, topic: str, fail: bool) -> Any:
        loss = {} if fail else {"failOnDataLoss": "false"}
        return stream(spark, broker, subscribe=topic, startingOffsets="earliest", **loss)

    @pytest.mark.parametrize("fail", [True, False])
    def test_topic_made_again(
        self, spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path, fail: bool
    ) -> None:
        numbers(broker, topic, 0, 5)
        drain(self.source(spark, broker, topic, fail), tmp_path)
        broker.bus.delete_topic(topic)
        numbers(broker, topic, 100, 8)
        if fail:
            with pytest.raises(PySparkException, match=r"was deleted and made again.*failOnDataLoss"):
                drain(self.source(spark, broker, topic, fail), tmp_path)
        else:
            drain(self.source(spark, broker, topic, fail), tmp_path)
            assert sorted(read(spark, tmp_path)) == [*range(5), *range(100, 108)]

    @pytest.mark.parametrize("fail", [True, False])
    def test_topic_gone(self, spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path, fail: bool) -> None:
        numbers(broker, topic, 0, 5)
        drain(self.source(spark, broker, topic, fail), tmp_path)
        broker.bus.delete_topic(topic)
        if fail:
            with pytest.raises(PySparkException, match=r"there is no topic.*failOnDataLoss"):
                drain(self.source(spark, broker, topic, fail), tmp_path)
        else:
            drain(self.source(spark, broker, topic, fail), tmp_path)


def test_no_end(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    broker.bus.create_topic(topic)
    frame = stream(spark, broker, subscribe=topic, endingOffsets="latest")
    assert frame.isStreaming
    with pytest.raises(PySparkException, match="a stream has no end"):
        finish(
            stream(spark, broker, subscribe=topic, endingTimestamp="5")
            .writeStream.format("noop")
            .trigger(availableNow=True)
            .start()
        )
