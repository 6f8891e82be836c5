"""Middleware and Spark: DataFrames have what is delivered, and files that have something else are not read."""

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.spark.conftest import SparkBroker
from tests.spark.tables import table

import headrace
from headrace.model.errors import InvalidArgument
from headrace.spark.source.message_source import FileSource

HIDE = {"name": "redact", "fields": ["$.card"]}


def test_a_table_has_what_is_delivered(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    broker.bus.create_topic(topic, middleware=[{**HIDE, "when": "deliver"}])
    broker.bus.publish_many(topic, [b'{"card":1}'] * 3000 + [b"no JSON"])
    rows = table(spark, broker, subscribe=topic).orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(3001))
    assert {bytes(row.value) for row in rows[:3000]} == {b'{"card":"***"}'}
    assert rows[3000].value is None


def test_files_of_such_a_topic_are_not_read(spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with headrace.open(data) as bus:
        bus.create_topic("open", middleware=[HIDE])
        bus.create_topic("hidden", middleware=[{**HIDE, "when": "deliver"}])
        for name in ("open", "hidden"):
            bus.publish(name, b'{"card":1}')
    assert [row.value for row in table(spark, broker, path=data, subscribe="open").collect()] == [b'{"card":"***"}']
    with pytest.raises(PySparkException, match="cannot be read directly"):
        table(spark, broker, path=data, subscribe="hidden").count()
    source = FileSource(data)
    assert source.names() == ["hidden", "open"]
    with pytest.raises(InvalidArgument, match="leave the option path out"):
        source.topic("hidden")
    source.close()
