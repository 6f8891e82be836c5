"""DataFrames into topics: what is written, what is refused, and that nothing is written twice."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType
from tests.spark.conftest import SparkBroker

import headrace
from headrace.model.errors import InvalidArgument, TransactionFenced
from headrace.model.message import Message
from headrace.model.partitioning import by_key
from headrace.spark.sink.options import checked_columns, sink_options
from headrace.spark.sink.writer import HeadraceArrowWriter, HeadraceStreamArrowWriter

MIB = 1 << 20


def write(frame: DataFrame, broker: SparkBroker, **options: str) -> None:
    frame.write.format("headrace").option("address", broker.address).options(**options).mode("append").save()


def messages(broker: SparkBroker, topic: str, partition: int = 0) -> list[Message]:
    found: list[Message] = []
    while batches := broker.bus.fetch(topic, partition, len(found), bytes_max=8 * MIB):
        for batch in batches:
            found += batch.messages()
    return found


def values(broker: SparkBroker, topic: str, partition: int = 0) -> list[bytes | None]:
    return [message.value for message in messages(broker, topic, partition)]


# What is written.


def test_values_are_bytes_or_text_or_nothing(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    texts = ["", "größe ✓", "\U0001f600" * 3, None, "a\0b"]
    write(spark.createDataFrame([(text,) for text in texts], "value string").coalesce(1), broker, topic=topic)
    assert values(broker, topic) == [None if text is None else text.encode() for text in texts]
    raw = [bytes(range(256)), None, b"", b"x" * 70_000]
    write(spark.createDataFrame([(one,) for one in raw], "value binary").coalesce(1), broker, topic=topic)
    assert values(broker, topic)[len(texts) :] == raw


def test_all_columns(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    time_us, due_us = 1_700_000_000_123_456, 4_000_000_000_000_001
    frame = spark.sql(
        f"""
        select 'a' as value, 'k' as key, 7 as priority, timestamp_micros({time_us}) as timestamp,
            timestamp_micros({due_us}) as due, timestamp_micros({due_us + 1}) as expires,
            array(named_struct('key', 'h', 'value', cast('1' as binary)),
                  named_struct('key', 'ü', 'value', cast(null as binary))) as headers, 1 as partition
        union all
        select null, null, null, null, null, null, null, 1
        """
    )
    broker.bus.create_topic(topic, partitions=3)
    before_us = time.time_ns() // 1000
    write(frame.coalesce(1), broker, topic=topic)
    full, empty = messages(broker, topic, 1)
    assert (full.value, full.key, full.priority) == (b"a", b"k", 7)
    assert (full.timestamp, full.due, full.expires) == (time_us, due_us, due_us + 1)
    assert full.headers == {"h": b"1", "ü": None}
    assert (empty.value, empty.key, empty.priority, empty.due, empty.expires, empty.headers) == (None,) * 6
    assert before_us <= empty.timestamp <= time.time_ns() // 1000


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("map('a', 'x', 'b', '')", [("a", b"x"), ("b", b"")]),
        ("cast(map() as map<string,string>)", []),
        (
            "array(named_struct('key', 'a', 'value', 'x'), named_struct('key', 'a', 'value', null))",
            [("a", b"x"), ("a", None)],
        ),
    ],
)
def test_headers_in_all_their_forms(
    spark: SparkSession, broker: SparkBroker, topic: str, kind: str, expected: list[tuple[str, bytes | None]]
) -> None:
    write(spark.sql(f"select 'a' as value, {kind} as headers"), broker, topic=topic)
    assert messages(broker, topic)[0].header_list == expected


def test_times_without_a_zone_are_utc(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        frame = spark.sql(
            "select 'a' as value, timestamp_ntz'2030-01-01 00:00:00.000001' as due,"
            " timestamp'2030-01-01 09:00:00.000001' as expires, null as priority"
        )
        write(frame, broker, topic=topic)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    (message,) = messages(broker, topic)
    expected = datetime(2030, 1, 1, tzinfo=UTC).timestamp() * 1e6 + 1
    assert (message.due, message.expires, message.priority) == (expected, expected, None)


def test_keys_choose_the_partition_and_keep_their_order(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    broker.bus.create_topic(topic, partitions=4)
    frame = spark.range(5000, numPartitions=1).selectExpr(
        "cast(id as string) as value", "if(id % 10 = 0, null, concat('k', id % 37)) as key"
    )
    write(frame, broker, topic=topic)
    found = [messages(broker, topic, number) for number in range(4)]
    assert sorted(int(one.value or b"") for part in found for one in part) == list(range(5000))
    for number, part in enumerate(found):
        keyed = [one for one in part if one.key is not None]
        assert all(by_key(one.key or b"", 4) == number for one in keyed)
        by_value: dict[bytes, list[int]] = {}
        for one in keyed:
            by_value.setdefault(one.key or b"", []).append(int(one.value or b""))
        assert all(numbers == sorted(numbers) for numbers in by_value.values())


def test_rows_without_a_key_are_spread_in_batches(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    broker.bus.create_topic(topic, partitions=3)
    write(
        spark.range(20_000, numPartitions=2).selectExpr("repeat(cast(id as string), 50) as value"), broker, topic=topic
    )
    counts = list(broker.bus.offsets(topic).values())
    assert sum(counts) == 20_000
    assert min(counts) > 1000
    batches = broker.bus.fetch(topic, 0, 0, bytes_max=MIB)
    assert max(batch.count for batch in batches) > 100


def test_many_topics(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    frame = spark.range(3000, numPartitions=2).selectExpr(
        f"concat('{topic}-', id % 50) as topic", "cast(id as string) as value", "if(id % 50 = 7, 'k', null) as key"
    )
    write(frame, broker)
    for number in range(50):
        found = messages(broker, f"{topic}-{number}")
        assert sorted(int(one.value or b"") for one in found) == list(range(number, 3000, 50))
        assert {one.key for one in found} == {b"k" if number == 7 else None}


def test_an_option_says_the_topic_for_all(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    write(spark.sql("select 'elsewhere' as topic, 'a' as value"), broker, topic=topic)
    assert values(broker, topic) == [b"a"]


def test_large_messages_up_to_the_limit(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    """And one that is larger: then nothing of the job is visible."""
    broker.bus.create_topic(topic, message_bytes_max=4 * MIB)
    sizes = spark.createDataFrame([(size,) for size in (1, 4 * MIB - 1, 4 * MIB, 10, 3 * MIB)], "size int").coalesce(1)
    write(sizes.selectExpr("repeat('x', size - 1) as value", "'k' as key"), broker, topic=topic)
    assert [len(value or b"") for value in values(broker, topic)] == [0, 4 * MIB - 2, 4 * MIB - 1, 9, 3 * MIB - 1]
    small = spark.range(1000, numPartitions=2).selectExpr("cast(id as string) as value")
    too_large = small.union(spark.sql(f"select repeat('x', {4 * MIB + 1}) as value"))
    with pytest.raises(PySparkException, match=f"a message for {topic} has {4 * MIB + 1} bytes.*{4 * MIB} at most"):
        write(too_large, broker, topic=topic)
    assert len(values(broker, topic)) == 5


def test_nothing(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    write(spark.sql("select 'a' as value where false"), broker, topic=topic)
    assert topic not in [info.topic for info in broker.bus.topics()]


def test_what_is_due_is_leased_at_its_time(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=2)
    frame = spark.createDataFrame(
        [("later", moment, 0), ("low", None, 1), ("high", None, 9), ("far", moment + timedelta(days=1), 0)],
        "value string, due timestamp, priority int",
    )
    broker.bus.create_topic(topic)
    broker.bus.create_subscription(topic, discipline="priority")
    write(frame.coalesce(1), broker, topic=topic)
    queue = broker.bus.queue(topic)
    assert [job.value for job in queue.lease(10)] == [b"high", b"low"]
    (job,) = queue.lease(10, wait=20)
    assert job.value == b"later"
    assert datetime.now(UTC) >= moment
    assert queue.lease(10) == []


# What is refused.


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("select 'a' as payload", "no column payload.*there are value"),
        ("select 'a' as value, 1L as offset", "no column offset"),
        ("select 1 as value", "column value is binary or string, not int"),
        ("select 'a' as key", "column value is missing"),
        ("select 'a' as value, '7' as priority", "column priority is int, not string"),
        ("select 'a' as value, 5L as due", "column due is timestamp, not bigint"),
        ("select 'a' as value, 'x' as headers", "column headers is array"),
        ("select 'a' as value, map('a', 1) as headers", "column headers is array"),
        ("select 'a' as value, 1.5D as partition", "column partition is int"),
    ],
)
def test_columns_that_do_not_fit(spark: SparkSession, query: str, complaint: str) -> None:
    options = sink_options({"topic": "refused"})
    with pytest.raises(InvalidArgument, match=complaint):
        checked_columns(spark.sql(query).schema, options)


def test_a_query_is_refused_when_it_is_planned(spark: SparkSession, broker: SparkBroker) -> None:
    with pytest.raises(PySparkException, match="the sink has no column payload"):
        write(spark.sql("select 'a' as payload"), broker, topic="refused")
    with pytest.raises(PySparkException, match="nothing says where to write"):
        write(spark.sql("select 'a' as value"), broker)
    writer = spark.sql("select 'a' as value").write.format("headrace").options(address=broker.address, topic="refused")
    with pytest.raises(PySparkException, match="only appended to"):
        writer.mode("overwrite").save()
    assert "refused" not in [info.topic for info in broker.bus.topics()]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"topik": "a"}, "no option topik; is topic meant"),
        ({"kafka.bootstrap.servers": "a"}, "headrace://host:port"),
        ({"path": "/tmp/x"}, "no path"),
        ({"topic": "a*b"}, "a*b"),
        ({"topic": ""}, "topic"),
        ({"address": "kafka://x"}, "kafka"),
        ({"timeout": "soon"}, "timeout is a number"),
        ({"timeout": "-1"}, "timeout is a number"),
        ({"txnAppId": "x"}, "go together"),
        ({"txnVersion": "1"}, "go together"),
        ({"txnAppId": "x", "txnVersion": "-1"}, "txnVersion is a whole number"),
        ({"txnAppId": "", "txnVersion": "1"}, "txnAppId has 1 to"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        sink_options(options)


def test_names_of_options_and_columns_are_as_spark_likes_them() -> None:
    assert sink_options({"TOPIC": "a", "TxnAppId": "x", "txnversion": "3", "checkpointLocation": "/x"}).version == 3
    schema = StructType([StructField("Value", StringType()), StructField("PARTITION", IntegerType())])
    assert checked_columns(schema, sink_options({"topic": "a"})) == {"value": 0, "partition": 1}
    with pytest.raises(InvalidArgument, match="twice"):
        checked_columns(StructType([*schema.fields, StructField("value", StringType())]), sink_options({"topic": "a"}))


def test_a_row_that_cannot_be_written(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    broker.bus.create_topic(topic, partitions=2)
    rows = [("fine", 0)] * 100 + [("a", 5)]
    with pytest.raises(PySparkException, match="has partitions 0 to 1, not 5"):
        write(spark.createDataFrame(rows, "value string, partition bigint"), broker, topic=topic)
    assert broker.bus.offsets(topic) == {0: 0, 1: 0}


# Once.


def test_a_batch_write_with_a_version_is_done_once(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    frame = spark.range(100, numPartitions=2).selectExpr("cast(id as string) as value")
    for version in ("5", "5", "6"):
        write(frame, broker, topic=topic, txnAppId=f"nightly {topic}", txnVersion=version)
    assert sorted(int(value or b"") for value in values(broker, topic)) == sorted([*range(100)] * 2)


def test_a_write_that_fails_leaves_nothing_and_can_be_repeated(
    spark: SparkSession, broker: SparkBroker, topic: str
) -> None:
    good = spark.range(1000, numPartitions=2).selectExpr("cast(id as string) as value")
    bad = good.selectExpr("if(value = '700', raise_error('not this one'), value) as value")
    options = {"topic": topic, "txnAppId": topic, "txnVersion": "1"}
    with pytest.raises(PySparkException, match="not this one"):
        write(bad, broker, **options)
    write(good, broker, **options)
    assert len(values(broker, topic)) == 1000


# Streams.


def test_a_stream_goes_on_where_it_was(spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()
    for life in range(3):
        (source / f"{life}.txt").write_text("".join(f"{life}.{number}\n" for number in range(50)))
        stream = spark.readStream.format("text").load(str(source)).writeStream.format("headrace")
        stream = stream.option("address", broker.address).option("topic", topic)
        query = stream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()
        if life == 1:
            # As if Spark had died after the broker's commit, and before its own.
            for path in (checkpoint / "commits").glob("*1*"):
                path.unlink()
    expected = [b"%d.%d" % (life, number) for life in range(3) for number in range(50)]
    assert sorted(value or b"" for value in values(broker, topic)) == sorted(expected)


def test_a_stream_survives_a_restart_of_the_broker(
    spark: SparkSession, own_broker: SparkBroker, tmp_path: Path
) -> None:
    own_broker.bus.create_topic("out", partitions=2)
    rows = spark.readStream.format("rate").option("rowsPerSecond", 400).option("numPartitions", 2).load()
    stream = rows.selectExpr("cast(value as string) as value", "cast(value % 7 as string) as key").writeStream
    stream = stream.format("headrace").option("address", own_broker.address).option("topic", "out")
    query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        for _ in range(2):
            _wait_for_more(own_broker)
            own_broker.restart()
        _wait_for_more(own_broker)
        assert query.isActive, query.exception()
    finally:
        query.stop()
    found = [values(own_broker, "out", number) for number in range(2)]
    numbers = sorted(int(value or b"") for part in found for value in part)
    assert numbers == list(range(len(numbers)))


def _wait_for_more(broker: SparkBroker) -> None:
    before = sum(broker.bus.offsets("out").values())
    deadline = time.monotonic() + 60
    while sum(broker.bus.offsets("out").values()) <= before:
        assert time.monotonic() < deadline, "nothing more is written"
        time.sleep(0.05)


def test_streams_number_their_batches_themselves() -> None:
    schema = StructType([StructField("value", StringType())])
    with pytest.raises(InvalidArgument, match="for batch writes"):
        HeadraceStreamArrowWriter({"topic": "a", "txnAppId": "x", "txnVersion": "1"}, schema)


# The writer by itself, as Spark's tasks and driver call it.


def writer_of(broker: SparkBroker, topic: str, **options: str) -> HeadraceArrowWriter:
    schema = StructType([StructField("value", StringType())])
    return HeadraceArrowWriter({"topic": topic, "address": broker.address, **options}, schema)


def test_rows_without_a_topic(broker: SparkBroker, topic: str) -> None:
    schema = StructType([StructField("value", StringType()), StructField("topic", StringType())])
    writer = HeadraceArrowWriter({"address": broker.address}, schema)
    before = broker.bus.info().transactions_open
    batch = pa.record_batch([pa.array(["a", "b"]), pa.array([topic, None])], names=["value", "topic"])
    with pytest.raises(InvalidArgument, match="a row has no topic"):
        writer.write(iter([batch]))
    writer.abort([])
    assert broker.bus.info().transactions_open == before


def test_a_broker_that_is_not_there() -> None:
    schema = StructType([StructField("value", StringType())])
    options = {"topic": "a", "address": "headrace://127.0.0.1:1", "timeout": "0.2"}
    writer = HeadraceArrowWriter(options, schema)
    with pytest.raises(headrace.HeadraceError, match=r"127\.0\.0\.1:1"):
        writer.write(rows("a"))
    writer.abort([])


def rows(*texts: str) -> Iterator[pa.RecordBatch]:
    return iter([pa.record_batch([pa.array(texts)], names=["value"])])


def test_only_the_attempts_that_spark_counts_are_committed(broker: SparkBroker, topic: str) -> None:
    writer = writer_of(broker, topic)
    zombie, first, second = (writer.write(rows(text)) for text in ("zombie", "a", "b"))
    assert zombie.epoch == first.epoch == second.epoch
    writer.commit([first, second])
    writer.commit([first, second])
    assert values(broker, topic) == [b"a", b"b"]
    late = writer.write(rows("late"))
    assert late.committed
    writer.commit([first, late])
    assert values(broker, topic) == [b"a", b"b"]


def test_what_was_begun_anew_meanwhile_is_not_committed(broker: SparkBroker, topic: str) -> None:
    """A task staged its rows, the transaction was ended, and another task staged its rows in the next one."""
    writer = writer_of(broker, topic, txnAppId=topic, txnVersion="1")
    first = writer.write(rows("a"))
    writer.abort([first])
    second = writer.write(rows("b"))
    with pytest.raises(headrace.HeadraceError, match="begun anew"):
        writer.commit([first, second])
    with pytest.raises(TransactionFenced):
        writer.commit([first])
    writer.commit([second])
    assert values(broker, topic) == [b"b"]


def test_a_task_that_comes_too_late_does_nothing(broker: SparkBroker, topic: str) -> None:
    writer = writer_of(broker, topic)
    before = broker.bus.info().transactions_open
    writer.abort([writer.write(rows("a"))])
    assert writer.write(rows("b")).committed
    assert broker.bus.info().transactions_open == before
    assert values(broker, topic) == []


def test_a_broker_that_is_killed_while_tasks_write(own_broker: SparkBroker) -> None:
    """Its end is no end of the transaction: what was staged counts, and what was on its way is staged again."""
    writer = writer_of(own_broker, "out")
    first = writer.write(rows("a"))

    def more() -> Iterator[pa.RecordBatch]:
        for number in range(40):
            if number in (10, 30):
                own_broker.restart()
            yield next(rows(*(f"{number}.{at}" + "x" * 1000 for at in range(1000))))

    second = writer.write(more())
    own_broker.restart()
    writer.commit([first, second])
    own_broker.restart()
    writer.commit([first, second])
    found = [(value or b"").rstrip(b"x") for value in values(own_broker, "out")]
    assert found == [b"a", *(b"%d.%d" % (number, at) for number in range(40) for at in range(1000))]
