"""Topics as DataFrames: what a batch read sees."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.spark.conftest import SparkBroker
from tests.spark.tables import table

import headrace
from headrace.model.errors import InvalidArgument
from headrace.spark.source.options import source_options

BASE_US = 1_760_000_000_000_000
SECOND_US = 1_000_000


def moment(us: int) -> datetime:
    """As Spark hands out timestamps: in the session's time zone, which is UTC."""
    return datetime.fromtimestamp(us / 1e6, UTC).replace(tzinfo=None)


@pytest.fixture(scope="module")
def orders(shared_broker: SparkBroker) -> str:
    """Three partitions with 100 messages each, a second apart."""
    bus = shared_broker.bus
    bus.create_topic("orders", partitions=3)
    for partition in range(3):
        bus.publish_many(
            "orders",
            [b"%d-%d" % (partition, at) for at in range(100)],
            keys=[f"k{at % 5}" for at in range(100)],
            timestamps=[BASE_US + at * SECOND_US for at in range(100)],
            partition=partition,
        )
    return "orders"


def places(frame: DataFrame) -> list[tuple[int, int]]:
    return [(row.partition, row.offset) for row in frame.select("partition", "offset").collect()]


class TestColumns:
    def test_default_ones(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        rows = table(spark, broker, subscribe=orders).orderBy("partition", "offset").collect()
        assert len(rows) == 300
        assert rows[142].asDict() == {
            "topic": "orders",
            "partition": 1,
            "offset": 42,
            "timestamp": moment(BASE_US + 42 * SECOND_US),
            "key": b"k2",
            "value": b"1-42",
        }

    def test_all_there_are(self, spark: SparkSession, broker: SparkBroker, topic: str) -> None:
        due, ends = BASE_US * 2, BASE_US * 3
        bus = broker.bus
        bus.publish(topic, b"plain")
        bus.publish(topic, None, key=b"\xff", headers={"a": "1", "ü": b"\0\xff"}, due=due, priority=200, expires=ends)
        bus.publish(topic, "größe ✓".encode(), headers={})
        wanted = "offset,headers,due,priority,expires,value,key"
        plain, full, text = table(spark, broker, subscribe=topic, columns=wanted).orderBy("offset").collect()
        assert tuple(plain) == (0, None, None, None, None, b"plain", None)
        headers = [tuple(pair) for pair in full.headers]
        assert headers == [("a", b"1"), ("ü", b"\0\xff")]
        assert tuple(full)[2:] == (moment(due), 200, moment(ends), None, b"\xff")
        assert text.value.decode() == "größe ✓"

    def test_headers_as_kafka_has_them(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        frame = table(spark, broker, subscribe=orders, includeHeaders="true")
        assert frame.schema["headers"].dataType.simpleString() == "array<struct<key:string,value:binary>>"
        assert frame.first().headers is None

    def test_headers_that_repeat_and_hold_null(self, spark: SparkSession, broker: SparkBroker, topic: str) -> None:
        given = [("a", b"1"), ("b", None), ("a", None)]
        broker.bus.publish_many(topic, [b"", b"", b""], headers=[given, {"a": None}, None])
        rows = table(spark, broker, subscribe=topic, includeHeaders="true").orderBy("offset").collect()
        found = [None if row.headers is None else [tuple(pair) for pair in row.headers] for row in rows]
        assert found == [given, [("a", None)], None]

    def test_text(self, spark: SparkSession, broker: SparkBroker, topic: str) -> None:
        broker.bus.publish_many(topic, ["ä".encode(), b"\xff!", b""])
        broker.bus.publish(topic, None)
        frame = table(spark, broker, subscribe=topic, value__format="string", columns="offset,value")
        assert [row.value for row in frame.orderBy("offset").collect()] == ["ä", "\ufffd!", "", None]

    def test_one_that_is_not_there(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        with pytest.raises(PySparkException, match="columns has no colour; there are topic, partition"):
            table(spark, broker, subscribe=orders, columns="offset,colour")

    def test_expired_messages_are_left_out(self, spark: SparkSession, broker: SparkBroker, topic: str) -> None:
        broker.bus.publish_many(topic, [b"a", b"b", b"c"], expires=[None, 1, None])
        assert places(table(spark, broker, subscribe=topic)) == [(0, 0), (0, 2)]


class TestWhichTopics:
    def test_several(self, spark: SparkSession, broker: SparkBroker, topic: str) -> None:
        for name in ("a", "b", "c"):
            broker.bus.publish(f"{topic}.{name}", name.encode())
        both = table(spark, broker, subscribe=f"{topic}.a, {topic}.b")
        assert sorted(row.value for row in both.collect()) == [b"a", b"b"]
        matching = table(spark, broker, subscribePattern=f"{topic}\\.[bc]")
        assert sorted(row.value for row in matching.collect()) == [b"b", b"c"]

    def test_some_partitions(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        frame = table(spark, broker, assign=json.dumps({orders: [2, 0]}))
        assert {partition for partition, _ in places(frame)} == {0, 2}

    def test_partition_that_is_not_there(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        with pytest.raises(PySparkException, match="orders has no partition 7"):
            table(spark, broker, assign=json.dumps({orders: [7]})).count()

    def test_topic_that_is_not_there(self, spark: SparkSession, broker: SparkBroker) -> None:
        with pytest.raises(PySparkException, match="there is no topic nowhere"):
            table(spark, broker, subscribe="nowhere").count()

    def test_pattern_that_matches_nothing(self, spark: SparkSession, broker: SparkBroker) -> None:
        assert table(spark, broker, subscribePattern="nobody-.*").count() == 0

    def test_empty_topic(self, spark: SparkSession, broker: SparkBroker, topic: str) -> None:
        broker.bus.create_topic(topic, partitions=2)
        assert table(spark, broker, subscribe=topic).count() == 0

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({}, "give one of the options subscribe"),
            ({"subscribe": "a", "assign": "{}"}, "give one of the options subscribe"),
            ({"subscribe": " , "}, "names no topic"),
            ({"subscribePattern": "("}, "no regular expression"),
            ({"assign": '{"a": 1}'}, "the option assign is like"),
            ({"subscribe": "a", "startingOffset": "earliest"}, "is startingOffsets meant"),
            ({"subscribe": "a", "kafka__bootstrap__servers": "x"}, "instead of kafka.bootstrap.servers"),
            ({"subscribe": "a", "failOnDataLoss": "maybe"}, "true or false"),
            ({"subscribe": "a", "minPartitions": "0"}, "greater than 0"),
            ({"subscribe": "a", "startingOffsets": "{"}, "the option startingOffsets is like"),
            ({"subscribe": "a", "startingOffsets": '{"a": {"0": -3}}'}, "-2 stands for earliest"),
            ({"subscribe": "a", "startingTimestamp": "now"}, "milliseconds since 1970"),
            ({"subscribe": "a", "startingTimestamp": "1", "startingOffsets": "latest"}, "only one of the options"),
            ({"subscribe": "a", "value__format": "avro"}, "one of bytes, string, json"),
            ({"subscribe": "a", "path": "/x", "address": "headrace://x"}, "not both"),
        ],
    )
    def test_mistakes(self, options: dict[str, str], text: str) -> None:
        with pytest.raises(InvalidArgument, match=text):
            source_options({name.replace("__", "."): value for name, value in options.items()})


class TestBounds:
    def test_offsets(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        frame = table(
            spark,
            broker,
            subscribe=orders,
            startingOffsets=json.dumps({orders: {"0": 98, "1": -1, "2": -2}}),
            endingOffsets=json.dumps({orders: {"0": -1, "1": 100, "2": 1}}),
        )
        assert sorted(places(frame)) == [(0, 98), (0, 99), (2, 0)]

    def test_times(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        start, end = BASE_US // 1000 + 10_000, BASE_US // 1000 + 12_000
        frame = table(spark, broker, subscribe=orders, startingTimestamp=start, endingTimestamp=end)
        assert sorted(places(frame)) == [(partition, at) for partition in range(3) for at in (10, 11)]
        by_partition = {orders: {"0": end, "1": start, "2": end * 2}}
        frame = table(
            spark, broker, subscribe=orders, startingOffsetsByTimestamp=json.dumps(by_partition), endingTimestamp=end
        )
        assert sorted(places(frame)) == [(1, 10), (1, 11)]

    def test_places_for_some_partitions_only(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        with pytest.raises(PySparkException, match="give one for each"):
            table(spark, broker, subscribe=orders, startingOffsets=json.dumps({orders: {"0": 1}})).count()

    def test_what_is_gone(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        beyond = json.dumps({orders: {"0": 100, "1": 100, "2": 150}})
        with pytest.raises(PySparkException, match=r"orders\[2\] cannot all be read.*failOnDataLoss"):
            table(spark, broker, subscribe=orders, endingOffsets=beyond).count()
        assert table(spark, broker, subscribe=orders, endingOffsets=beyond, failOnDataLoss="false").count() == 300


class TestFilters:
    @pytest.mark.parametrize(
        ("where", "rows"),
        [
            ("partition = 1 and offset >= 95", 5),
            ("partition in (0, 2) and offset < 3", 6),
            ("offset = 7", 3),
            ("offset > 97 and offset <= 98", 3),
            (f"timestamp >= timestamp_micros({BASE_US + 97 * SECOND_US})", 9),
            (f"timestamp < timestamp_micros({BASE_US + 2 * SECOND_US})", 6),
            (f"timestamp = timestamp_micros({BASE_US + 2 * SECOND_US})", 3),
            ("partition = 1 and not offset = 3", 99),
            ("partition is null", 0),
            ("partition <> 1 and cast(value as string) like '%-9'", 2),
        ],
    )
    def test_pushed_down(self, spark: SparkSession, broker: SparkBroker, orders: str, where: str, rows: int) -> None:
        assert table(spark, broker, subscribe=orders).where(where).count() == rows

    def test_only_what_is_needed_is_read(self, orders: str, broker: SparkBroker) -> None:
        from pyspark.sql.datasource import EqualTo, GreaterThan, In

        from headrace.spark.datasource import HeadraceDataSource

        source = HeadraceDataSource({"address": broker.address, "subscribe": orders})
        schema = source.schema()
        assert not isinstance(schema, str)
        reader: Any = source.reader(schema)
        left = reader.pushFilters([In(("partition",), (1, 2)), GreaterThan(("offset",), 89), EqualTo(("key",), b"k1")])
        assert left == [EqualTo(("key",), b"k1")]
        wanted = [part.wanted for task in reader.partitions() for part in task.parts]
        assert [(one.partition, one.start, one.end) for one in wanted] == [(1, 90, 100), (2, 90, 100)]

    def test_works_where_spark_does_not_push(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        name = "spark.sql.python.filterPushdown.enabled"
        spark.conf.set(name, "false")
        try:
            assert table(spark, broker, subscribe=orders).where("partition = 1 and offset < 10").count() == 10
        finally:
            spark.conf.set(name, "true")

    def test_times_out_of_order(self, spark: SparkSession, broker: SparkBroker, topic: str) -> None:
        times = [50, 10, 90, 20, 70, 30]
        for at in times:
            broker.bus.publish(topic, b"%d" % at, timestamp=BASE_US + at * SECOND_US)
        for low, high in ((0, 100), (20, 70), (30, 30), (60, 95)):
            where = f"timestamp between timestamp_micros({BASE_US + low * SECOND_US})"
            where += f" and timestamp_micros({BASE_US + high * SECOND_US})"
            found = [int(row.value) for row in table(spark, broker, subscribe=topic).where(where).collect()]
            assert found == [at for at in times if low <= at <= high]


class TestTasks:
    def test_ranges_are_divided(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        frame = table(spark, broker, subscribe=orders, minPartitions="7")
        assert frame.rdd.getNumPartitions() >= 7
        assert sorted(places(frame)) == [(partition, at) for partition in range(3) for at in range(100)]

    def test_one_for_each_partition(self, spark: SparkSession, broker: SparkBroker, orders: str) -> None:
        assert table(spark, broker, subscribe=orders).rdd.getNumPartitions() == 3


class TestFiles:
    def test_read_like_the_broker(self, spark: SparkSession, own_broker: SparkBroker, topic: str) -> None:
        bus = own_broker.bus
        bus.create_topic(topic, partitions=2)
        for at in range(50):
            bus.publish(topic, b"%d" % at, key=b"%d" % (at % 7), timestamp=BASE_US + at * SECOND_US)
        by_broker = sorted(map(tuple, table(spark, own_broker, subscribe=topic).collect()))
        data = str(own_broker.data)
        assert sorted(map(tuple, table(spark, own_broker, path=data, subscribe=topic).collect())) == by_broker
        own_broker.kill()
        assert sorted(map(tuple, table(spark, own_broker, path=data, subscribe=topic).collect())) == by_broker
        late = table(spark, own_broker, path=data, subscribe=topic, startingTimestamp=BASE_US // 1000 + 40_000)
        assert late.count() == 10
        with pytest.raises(PySparkException, match="there is no topic other in"):
            table(spark, own_broker, path=data, subscribe="other").count()
        own_broker.start()

    def test_embedded_log(self, spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> None:
        with headrace.Log(tmp_path / "events") as log:
            log.append_many([b"a", b"b", b"c"])
        rows = table(spark, broker, path=str(tmp_path / "events"), subscribe="events").orderBy("offset").collect()
        assert [(row.topic, row.offset, row.value) for row in rows] == [
            ("events", 0, b"a"),
            ("events", 1, b"b"),
            ("events", 2, b"c"),
        ]

    def test_no_data_directory(self, spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> None:
        with pytest.raises(PySparkException, match="is no data directory"):
            table(spark, broker, path=str(tmp_path), subscribe="a").count()


class TestSizes:
    def test_huge_messages(self, spark: SparkSession, broker: SparkBroker, topic: str) -> None:
        broker.bus.create_topic(topic, message_bytes_max=8 << 20)
        for letter in (b"a", b"b", b"c"):
            broker.bus.publish(topic, letter * (7 << 20))
        sizes = table(spark, broker, subscribe=topic).selectExpr("length(value) as size").collect()
        assert [row.size for row in sizes] == [7 << 20] * 3

    def test_many_tiny_batches(self, spark: SparkSession, broker: SparkBroker, topic: str) -> None:
        with broker.bus.producer(topic, batch_count=1, linger=0.0) as producer:
            for at in range(5000):
                producer.send(b"%d" % at)
        assert table(spark, broker, subscribe=topic).selectExpr(
            "sum(cast(cast(value as string) as int)) s"
        ).first().s == sum(range(5000))
