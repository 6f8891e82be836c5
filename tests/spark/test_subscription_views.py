"""Leased subscriptions as DataFrames: pending, leased, waiting and dead messages."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.spark.conftest import SparkBroker

from headrace.model.errors import SubscriptionNotFound
from headrace.spark.source.options import source_options
from headrace.spark.sql.subscription_views import ViewReader, view_schema

SOON = datetime(2040, 6, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def jobs(shared_broker: SparkBroker) -> str:
    """Two ready, two waiting, one leased, two dead."""
    bus = shared_broker.bus
    bus.create_topic("view-jobs", partitions=2)
    bus.publish_many("view-jobs", [b'{"n": 1}', b'{"n": 2}', b"\xff"], keys=["a", "b", "c"], partition=1)
    bus.schedule("view-jobs", b'{"n": 3}', at=SOON, partition=0, headers={"lang": b"en"}, owner="shop")
    bus.schedule("view-jobs", b'{"n": 4}', at=SOON - timedelta(hours=1), partition=0, priority=7)
    queue = bus.queue("view-jobs", "work")
    bus.publish_many("view-jobs", [b"poison", b"bad"], keys=["p", "q"], headers=[{"try": b"1"}, None], partition=0)
    held = {job.value: job for job in queue.lease(10, lease=3600)}
    queue.reject(held[b"poison"], "it burns")
    queue.reject(held[b"bad"], "")
    queue.release([held[b'{"n": 1}'], held[b'{"n": 2}']], 0, reason="not now")
    return "view-jobs"


def view(spark: SparkSession, broker: SparkBroker, topic: str, name: str, **options: Any) -> DataFrame:
    reader = spark.read.format("headrace").option("address", broker.address).option("subscribe", topic)
    return reader.options(view=name, subscription="work", **options).load()


def test_pending(spark: SparkSession, broker: SparkBroker, jobs: str) -> None:
    rows = view(spark, broker, jobs, "pending").orderBy("partition", "offset").collect()
    assert [(row.partition, row.offset, row.status) for row in rows] == [
        (0, 0, "waiting"),
        (0, 1, "waiting"),
        (1, 0, "ready"),
        (1, 1, "ready"),
        (1, 2, "leased"),
    ]
    assert {(row.topic, row.subscription) for row in rows} == {(jobs, "work")}
    assert (rows[0].owner, rows[0].due, rows[0].ready) == ("shop", SOON.replace(tzinfo=None), rows[0].due)
    assert (rows[1].priority, rows[1].owner, rows[1].deliveries, rows[1].version) == (7, None, 0, 1)
    assert (rows[2].key, rows[2].value, rows[2].deliveries, rows[2].reason) == (b"a", b'{"n": 1}', 1, "not now")
    assert rows[4].until > rows[4].timestamp
    assert rows[4].holder
    assert not hasattr(rows[4], "headers")


def test_leases(spark: SparkSession, broker: SparkBroker, jobs: str) -> None:
    [row] = view(spark, broker, jobs, "leases", includeHeaders="true").collect()
    assert (row.partition, row.offset, row.value, row.deliveries, row.headers) == (1, 2, b"\xff", 1, None)
    assert row.holder
    assert row.until


def test_timeline_comes_in_the_order_of_time(spark: SparkSession, broker: SparkBroker, jobs: str) -> None:
    options = {"value.format": "json", "includeHeaders": "true"}
    rows = view(spark, broker, jobs, "timeline", **options).collect()
    assert [row.value.n for row in rows] == [4, 3]
    assert {header.key: bytes(header.value) for header in rows[1].headers}["lang"] == b"en"
    by_hour = view(spark, broker, jobs, "timeline").selectExpr("date_trunc('hour', due) as hour").groupBy("hour")
    assert sorted(by_hour.count().collect()) == [
        (SOON.replace(tzinfo=None) - timedelta(hours=1), 1),
        (SOON.replace(tzinfo=None), 1),
    ]


def test_dead(spark: SparkSession, broker: SparkBroker, jobs: str) -> None:
    options = {"value.format": "string", "includeHeaders": "true"}
    first, second = view(spark, broker, jobs, "dead", **options).orderBy("offset").collect()
    assert (first.topic, first.partition, first.offset, first.value) == (jobs, 0, 2, "poison")
    assert (first.reason, first.deliveries) == ("it burns", 1)
    assert (first.dead_topic, first.dead_partition, first.dead_offset) == (f"{jobs}.dead", 0, 0)
    assert [(header.key, bytes(header.value)) for header in first.headers] == [("try", b"1")]
    assert first.died >= first.timestamp
    assert first.holder
    assert (second.offset, second.key, second.reason) == (3, b"q", "rejected")


def test_json_with_a_schema(spark: SparkSession, broker: SparkBroker, jobs: str) -> None:
    options = {"value.format": "json", "value.schema": "n int"}
    rows = view(spark, broker, jobs, "pending", **options).where("status <> 'waiting'").orderBy("offset").collect()
    assert [(row.value and row.value.n, row._corrupt) for row in rows] == [(1, None), (2, None), (None, "�")]


def test_missing_subscription(spark: SparkSession, broker: SparkBroker, jobs: str) -> None:
    options = {"address": broker.address, "subscribe": jobs, "view": "dead", "subscription": "nobody"}
    with pytest.raises(PySparkException, match=r"SubscriptionNotFound: .*nobody"):
        spark.read.format("headrace").options(**options).load().collect()


def test_page_by_page(broker: SparkBroker, topic: str) -> None:
    """Without Spark: what there is comes in many record batches, none of them large."""
    broker.bus.create_topic(topic)
    broker.bus.queue(topic, "work").lease(1)
    broker.bus.publish_many(topic, [b"%d" % at for at in range(5000)])
    options = source_options({"address": broker.address, "subscribe": topic, "view": "pending", "subscription": "work"})
    schema = view_schema(options)
    assert not isinstance(schema, str)
    reader = ViewReader(options, schema)
    [part] = reader.partitions()
    batches = list(reader.read(part))
    assert [batch.num_rows for batch in batches] == [1000] * 5
    assert [offset for batch in batches for offset in batch.column("offset").to_pylist()] == list(range(5000))


def test_errors_before_anything_runs(broker: SparkBroker, jobs: str) -> None:
    given = {"address": broker.address, "subscribe": jobs, "view": "pending", "subscription": "nobody"}
    options = source_options(given)
    schema = view_schema(options)
    assert not isinstance(schema, str)
    with pytest.raises(SubscriptionNotFound, match="nobody"):
        ViewReader(options, schema).partitions()
    with pytest.raises(Exception, match="columns of its own"):
        view_schema(source_options({**given, "columns": "key"}))
    with pytest.raises(Exception, match="timeline has no column status"):
        ViewReader(source_options({**given, "view": "timeline"}), schema)
