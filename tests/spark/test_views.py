"""Virtual topics (views) as DataFrames, streams and SQL tables: only what matches, with the source's offsets."""

import json
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.spark.conftest import SparkBroker
from tests.spark.tables import drain, drained, stream, table

from headrace.spark.sql.tables import register


def publish(broker: SparkBroker, topic: str, amounts: range, partition: int = 0) -> None:
    broker.bus.publish_many(topic, [json.dumps({"amount": one}).encode() for one in amounts], partition=partition)


@pytest.fixture
def view(broker: SparkBroker, topic: str) -> str:
    """A view of a topic with two partitions, which shows every amount above 100."""
    broker.bus.create_topic(topic, partitions=2)
    name = f"{topic}-view"
    broker.bus.create_topic(name, view_of=topic, view_query={"jsonpath": "$[?$.amount > 100]"})
    return name


def test_a_view_as_a_frame(spark: SparkSession, broker: SparkBroker, topic: str, view: str) -> None:
    publish(broker, topic, range(3000))
    publish(broker, topic, range(50, 150), partition=1)
    rows = table(spark, broker, subscribe=view).orderBy("partition", "offset").collect()
    assert [(row.partition, row.offset) for row in rows] == [
        *((0, offset) for offset in range(101, 3000)),
        *((1, offset) for offset in range(51, 100)),
    ]
    assert {row.topic for row in rows} == {view}
    assert json.loads(rows[0].value) == {"amount": 101}
    late = table(spark, broker, subscribe=view, startingOffsets=json.dumps({view: {"0": 2990, "1": 100}}))
    assert [row.offset for row in late.orderBy("offset").collect()] == list(range(2990, 3000))


def test_a_view_as_a_stream(spark: SparkSession, broker: SparkBroker, topic: str, view: str, tmp_path: Path) -> None:
    publish(broker, topic, range(90, 110))
    source = stream(spark, broker, subscribe=view, startingOffsets="earliest", maxOffsetsPerTrigger="7")
    drain(source, tmp_path)
    publish(broker, topic, range(10))  # of which none matches
    drain(source, tmp_path)
    publish(broker, topic, range(200, 205), partition=1)
    drain(source, tmp_path)
    amounts = sorted(json.loads(row.value)["amount"] for row in drained(spark, tmp_path))
    assert amounts == [*range(101, 110), *range(200, 205)]


def test_a_view_has_no_files(spark: SparkSession, own_broker: SparkBroker, topic: str) -> None:
    own_broker.bus.create_topic(topic)
    own_broker.bus.create_topic("view", view_of=topic, view_query={"regex": "1"})
    with pytest.raises(PySparkException, match="read it through the broker"):
        table(spark, own_broker, path=str(own_broker.data), subscribe="view").count()


def test_a_view_in_sql(spark: SparkSession, broker: SparkBroker, topic: str, view: str) -> None:
    publish(broker, topic, range(90, 110))
    assert register(spark, broker.address, tables=[view], value_format="json") == [view]
    [row] = spark.sql(f"select count(*) as n, min(value.amount) as least from `{view}`").collect()
    assert (row.n, row.least) == (9, 101)
