"""What a stream says when it is to go on from a checkpoint and its topics are others; and tasks for many partitions."""

import json
import logging
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.spark.conftest import SparkBroker
from tests.spark.tables import table

from headrace.model.errors import OffsetOutOfRange
from headrace.spark.datasource import HeadraceDataSource
from headrace.spark.source.planning import SMALL_BYTES, SMALL_OFFSETS, SMALL_TASKS, OffsetSpan, Range, assign_to_tasks
from headrace.spark.source.stream_reader import HeadraceStreamReader

ALL = ReadAllAvailable()


def reader(broker: SparkBroker, **options: str) -> HeadraceStreamReader:
    source = HeadraceDataSource({"address": broker.address, "startingOffsets": "earliest", **options})
    made = source.streamReader(source.schema())  # type: ignore[arg-type]
    assert isinstance(made, HeadraceStreamReader)
    return made


def offsets(topics: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {name: known["offsets"] for name, known in topics.items()}


def went_on(
    broker: SparkBroker, caplog: pytest.LogCaptureFixture, begun: dict[str, str], after: dict[str, str], text: str
) -> dict[str, Any]:
    """Go on from where one query was with other options: an error, or else a warning, that has the text."""
    first = reader(broker, **begun)
    place = first.latestOffset(first.initialOffset(), ALL)
    first.stop()
    strict = reader(broker, **after)
    with pytest.raises(OffsetOutOfRange, match=text):
        strict.latestOffset(place, ALL)
    strict.stop()
    lossy = reader(broker, **after, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "headrace.spark"):
        found = lossy.latestOffset(place, ALL)
        said = len(caplog.records)
        assert lossy.latestOffset(found, ALL) == found
    lossy.stop()
    assert len(caplog.records) == said  # it is told once
    assert any(re.search(text.split(".*")[0], record.getMessage()) for record in caplog.records)
    return found


class TestOtherTopics:
    def test_one_that_a_pattern_matched_is_deleted(
        self, broker: SparkBroker, topic: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        broker.bus.publish(f"{topic}.a", b"1")
        broker.bus.publish(f"{topic}.b", b"2")
        pattern = {"subscribePattern": f"{topic}\\..*"}
        first = reader(broker, **pattern)
        place = first.latestOffset(first.initialOffset(), ALL)
        broker.bus.publish(f"{topic}.b", b"never read")
        broker.bus.delete_topic(f"{topic}.b")
        with pytest.raises(
            OffsetOutOfRange, match=rf"{topic}\.b, which the query has read, was deleted.*failOnDataLoss"
        ):
            first.latestOffset(place, ALL)
        first.stop()
        lossy = reader(broker, **pattern, failOnDataLoss="false")
        with caplog.at_level(logging.WARNING, "headrace.spark"):
            left = lossy.latestOffset(place, ALL)
        lossy.stop()
        assert "was deleted" in caplog.text
        assert list(left) == [f"{topic}.a"]

    def test_one_that_matches_later_is_read_from_its_beginning(self, broker: SparkBroker, topic: str) -> None:
        broker.bus.publish(f"{topic}.a", b"1")
        source = reader(broker, subscribePattern=f"{topic}\\..*")
        place = source.initialOffset()
        broker.bus.publish(f"{topic}.b", b"2")
        assert offsets(source.latestOffset(place, ALL)) == {f"{topic}.a": {"0": 1}, f"{topic}.b": {"0": 1}}
        source.stop()

    def test_another_pattern(self, broker: SparkBroker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
        for name in "abc":
            broker.bus.publish(f"{topic}.{name}", b"1")
        before, after = {"subscribePattern": f"{topic}\\.[ab]"}, {"subscribePattern": f"{topic}\\.[bc]"}
        found = went_on(
            broker, caplog, before, after, f"of a query that reads {topic}.a, and this one does not.*checkpointLocation"
        )
        assert sorted(found) == [f"{topic}.b", f"{topic}.c"]

    def test_subscribed_to_another(self, broker: SparkBroker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
        for name in "ab":
            broker.bus.publish(f"{topic}.{name}", b"1")
        before, after = {"subscribe": f"{topic}.a"}, {"subscribe": f"{topic}.b"}
        went_on(broker, caplog, before, after, f"of a query that reads {topic}.a, and this one does not.*left out")

    def test_subscribed_to_one_more(self, broker: SparkBroker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
        for name in "ab":
            broker.bus.publish(f"{topic}.{name}", b"1")
        before, after = {"subscribe": f"{topic}.a"}, {"subscribe": f"{topic}.a,{topic}.b"}
        text = f"knows nothing of the topic {topic}.b.*read {topic}.a. It would be read from its first message"
        assert offsets(went_on(broker, caplog, before, after, text))[f"{topic}.b"] == {"0": 1}

    def test_other_partitions(self, broker: SparkBroker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
        broker.bus.create_topic(topic, partitions=3)
        before, after = ({"assign": json.dumps({topic: numbers})} for numbers in ([0, 1], [1, 2]))
        went_on(broker, caplog, before, after, r"has read the partitions \[0, 1\].*names \[1, 2\]")

    def test_more_partitions_of_the_topic_are_no_change(self, broker: SparkBroker, topic: str) -> None:
        broker.bus.create_topic(topic)
        source = reader(broker, subscribe=topic)
        place = source.initialOffset()
        broker.bus.alter_topic(topic, partitions=2)
        assert offsets(source.latestOffset(place, ALL)) == {topic: {"0": 0, "1": 0}}
        source.stop()


@pytest.fixture(scope="module")
def wide(shared_broker: SparkBroker) -> str:
    """A topic of many partitions, each with little in it."""
    shared_broker.bus.create_topic("wide", partitions=300)
    for number in range(300):
        shared_broker.bus.publish_many("wide", [b"%d/%d" % (number, at) for at in range(5)], partition=number)
    return "wide"


class TestManyPartitions:
    """Each of them has little to read: they share tasks."""

    def read(self, source: DataSourceReader | HeadraceStreamReader, parts: Any) -> list[tuple[int, int]]:
        found = []
        for part in parts:
            for batch in source.read(part):
                found += zip(batch.column("partition").to_pylist(), batch.column("offset").to_pylist(), strict=True)
        return found

    def test_a_batch(self, broker: SparkBroker, wide: str) -> None:
        source = HeadraceDataSource({"address": broker.address, "subscribe": wide})
        batch = source.reader(source.schema())  # type: ignore[arg-type]
        parts = batch.partitions()
        assert len(parts) == SMALL_TASKS
        found = self.read(batch, parts)
        assert sorted(found) == [(number, at) for number in range(300) for at in range(5)]
        assert [at for number, at in found if number == 7] == list(range(5))
        more = HeadraceDataSource({"address": broker.address, "subscribe": wide, "minPartitions": "40"})
        assert len(more.reader(more.schema()).partitions()) == 40  # type: ignore[arg-type]

    def test_a_stream(self, broker: SparkBroker, wide: str) -> None:
        source = reader(broker, subscribe=wide)
        start = source.initialOffset()
        parts = source.partitions(start, source.latestOffset(start, ALL))
        assert len(parts) == SMALL_TASKS
        assert len(set(self.read(source, parts))) == 1500
        source.stop()

    def test_as_spark_has_it(self, spark: SparkSession, broker: SparkBroker, wide: str) -> None:
        frame = table(spark, broker, subscribe=wide)
        assert frame.rdd.getNumPartitions() == SMALL_TASKS
        assert frame.select("partition", "offset").distinct().count() == 1500

    @given(
        st.lists(st.sampled_from([1, 20, 5000, SMALL_OFFSETS, SMALL_OFFSETS + 1]), max_size=60),
        st.one_of(st.none(), st.integers(1, 50)),
    )
    def test_every_range_is_read_once(self, sizes: list[int], at_least: int | None) -> None:
        ranges = [Range("t", number, 3, 3 + size) for number, size in enumerate(sizes)]
        spans = {("t", one.partition): OffsetSpan(one.start, one.end, one.size) for one in ranges}
        tasks = assign_to_tasks(ranges, spans, at_least)
        assert sorted(one for task in tasks for one in task) == ranges
        assert all(tasks)
        assert all(len(task) == 1 for task in tasks for one in task if one.size > SMALL_OFFSETS)
        assert len(tasks) >= min(at_least or 0, len(ranges))
        if len(ranges) <= SMALL_TASKS:
            assert len(tasks) == len(ranges)

    def test_large_messages_have_tasks_of_their_own(self) -> None:
        ranges = [Range("t", number, 0, 10) for number in range(40)]
        spans = {("t", number): OffsetSpan(0, 10, SMALL_BYTES + 1) for number in range(40)}
        assert len(assign_to_tasks(ranges, spans, None)) == 40
