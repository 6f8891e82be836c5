"""Spark on a cluster: the serving node is killed, relieved or paused in the middle of a batch; each row counts once."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructField, StructType
from tests.faults.broker_process import BrokerProcess
from tests.faults.fork_server import Nursery
from tests.spark.spark_nodes import Barrier, SparkNodes, until
from tests.spark.tables import finish

from headrace.model.errors import HeadraceError, OffsetOutOfRange
from headrace.spark.archive.archiver import Archiver, ArchiveRequest
from headrace.spark.sink.writer import HeadraceArrowWriter
from headrace.spark.source import message_source
from headrace.spark.source.message_source import BrokerSource
from headrace.spark.source.options import source_options
from headrace.spark.source.stream_reader import HeadraceStreamReader

PARTITIONS = 2
"""As many as Spark has cores: all their tasks are under way at once, and none is tried twice."""
ROWS = 3500
"""Of each partition: more than what fits into the buffers between a reader and a task that stands still."""
VALUE_BYTES = 12_000
COLUMNS = "partition,offset,value"
NUMBER = "int(string(substring(value, 1, 8)))"
SOON_S = 120.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkNodes]:
    with SparkNodes(tmp_path_factory.mktemp("cluster")) as started:
        yield started
        started.close()


@pytest.fixture
def nodes(cluster: SparkNodes) -> Iterator[SparkNodes]:
    """Three nodes, of which a test may kill one."""
    yield cluster
    cluster.start_killed()


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Rows go from process to process as they come, and not in thousands."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "100")
    yield
    spark.conf.set(name, before)


def fill(nodes: SparkNodes, topic: str, rows: int = ROWS) -> None:
    """Numbered messages that cannot be compressed: partition p has the numbers p * rows to p * rows + rows - 1."""
    dice = Random(topic)
    nodes.bus.create_topic(topic, partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        values = [b"%08d" % (partition * rows + at) + dice.randbytes(VALUE_BYTES) for at in range(rows)]
        for start in range(0, rows, 1000):
            nodes.bus.publish_many(topic, values[start : start + 1000], partition=partition)


def numbers(nodes: SparkNodes, topic: str) -> list[int]:
    """The numbers of all messages of a topic, sorted."""
    found: list[int] = []
    for partition in range(PARTITIONS):
        offset = 0
        while batches := nodes.bus.fetch(topic, partition, offset):
            found += [int((value or b"")[:8]) for batch in batches for value in batch.columns().values]
            offset = batches[-1].next_offset
    return sorted(found)


class Aside:
    """Runs something in a thread; `result` is what it returned, or raises what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._work())
        except BaseException as error:  # noqa: BLE001 whoever waits for it gets it
            self._error.append(error)

    def result(self) -> Any:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive(), "it does not end"
        if self._error:
            raise self._error[0]
        return self._outcome[0]


MOVED = pytest.param("hand_over", marks=pytest.mark.long)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("strike", ["kill_owner", MOVED])
def test_a_batch_read_goes_on_with_the_node_that_takes_over(
    spark: SparkSession, nodes: SparkNodes, topic: str, tmp_path: Path, strike: str
) -> None:
    fill(nodes, topic)
    rows = spark.read.format("headrace").options(address=nodes.address, subscribe=topic, columns=COLUMNS).load()
    with Barrier(tmp_path / "barrier", 500) as barrier:
        owner, before = nodes.owner(), nodes.bus.info().connections
        reading = Aside(lambda: barrier.before(rows).selectExpr("partition", "offset", NUMBER).collect())
        barrier.wait_for(PARTITIONS)
        assert nodes.bus.info().connections == before + PARTITIONS, "all tasks are in the middle of their reading"
        getattr(nodes, strike)()
    found = sorted(tuple(row) for row in reading.result())
    assert nodes.owner() != owner
    assert found == [(part, at, part * ROWS + at) for part in range(PARTITIONS) for at in range(ROWS)]


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("strike", ["kill_owner", MOVED])
def test_a_stream_from_topic_to_topic_goes_on_with_the_node_that_takes_over(
    spark: SparkSession, nodes: SparkNodes, topic: str, tmp_path: Path, strike: str
) -> None:
    fill(nodes, topic, 800)
    target = f"{topic}-out"
    nodes.bus.create_topic(target, partitions=PARTITIONS)
    options = {"address": nodes.address, "subscribe": topic, "startingOffsets": "earliest", "columns": COLUMNS}
    rows = spark.readStream.format("headrace").options(**options, maxOffsetsPerTrigger="800").load()
    with Barrier(tmp_path / "barrier", 200) as barrier:
        writer = barrier.before(rows).select("value").writeStream.format("headrace")
        writer = writer.options(address=nodes.address, topic=target, checkpointLocation=str(tmp_path / "checkpoint"))
        owner, query = nodes.owner(), writer.trigger(availableNow=True).start()
        barrier.wait_for(PARTITIONS)
        until(lambda: nodes.bus.tenants.usage().usage.staged_bytes > 0, "rows of the batch are staged")
        getattr(nodes, strike)()
    finish(query)
    assert nodes.owner() != owner
    assert len([one for one in query.recentProgress if one["numInputRows"]]) == 2, "no batch was done twice"
    assert numbers(nodes, target) == list(range(PARTITIONS * 800))


# The writer by itself, as Spark's tasks and driver call it.


def numbered(first: int, end: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array([b"%08d" % at for at in range(first, end)])], names=["value"])


@pytest.mark.parametrize("strike", ["restart", MOVED])
def test_each_phase_of_a_write_survives_a_failover(nodes: SparkNodes, topic: str, strike: str) -> None:
    """What a task reports as staged can be committed by the driver on another node, also if it was little."""
    nodes.bus.create_topic(topic, partitions=PARTITIONS)
    schema = StructType([StructField("value", BinaryType())])
    writer = HeadraceArrowWriter({"topic": topic, "address": nodes.address}, schema)
    fail_over = getattr(nodes, strike)

    def interrupted() -> Iterator[pa.RecordBatch]:
        yield numbered(2, 50_000)  # some of it is on its way
        fail_over()
        yield numbered(50_000, 100_000)

    staged = [writer.write(iter([numbered(0, 1)])), writer.write(iter([numbered(1, 2)]))]
    fail_over()
    staged.append(writer.write(interrupted()))
    fail_over()
    writer.commit(staged)
    fail_over()
    writer.commit(staged)  # its answer may have been lost
    assert numbers(nodes, topic) == list(range(100_000))
    writer.abort(staged)
    assert numbers(nodes, topic) == list(range(100_000))


def test_a_commit_that_a_paused_node_was_sent_happens_once(nodes: SparkNodes, topic: str) -> None:
    nodes.bus.create_topic(topic, partitions=PARTITIONS)
    schema = StructType([StructField("value", BinaryType())])
    writer = HeadraceArrowWriter({"topic": topic, "address": nodes.address}, schema)
    staged = [writer.write(iter([numbered(at * 1000, at * 1000 + 1000)])) for at in range(4)]
    paused = nodes.running[nodes.owner()]
    paused.send_signal(signal.SIGSTOP)
    try:
        Aside(lambda: writer.commit(staged)).result()
    finally:
        paused.send_signal(signal.SIGCONT)
    until(lambda: bool(numbers(nodes, topic)), "the paused node finds out that it serves no more")
    assert numbers(nodes, topic) == list(range(4000))
    nodes.restart()
    assert numbers(nodes, topic) == list(range(4000))


# A node that was replaced while it was paused, and serves an earlier state until it finds out.


class StaleNode:
    """Two brokers stand for two nodes: one of them has only the first messages of a topic."""

    def __init__(self, nursery: Nursery, directory: Path) -> None:
        self.stale = BrokerProcess(nursery, directory / "stale")
        self.stale.start()
        with self.stale.connect() as bus:
            bus.publish_many("orders", [b"%d" % at for at in range(900)], partition=0)
        self.stale.stop()
        shutil.copytree(self.stale.data, directory / "fresh")
        self.fresh = BrokerProcess(nursery, directory / "fresh")
        self.fresh.start()
        with self.fresh.connect() as bus:
            bus.publish_many("orders", [b"%d" % at for at in range(900, 1000)], partition=0)
            self.topic_id = bus.describe_topic("orders").id
        self.fresh.stop()
        self.stale.start()
        self.stale.connect().close()
        self.address = f"{self.stale.tcp_url},127.0.0.1:{self.fresh.port}"

    def find_out(self) -> None:
        """The first one finds out that the other one serves."""
        self.stale.kill()
        self.fresh.start()


@pytest.fixture
def stale_node(tmp_path: Path) -> Iterator[StaleNode]:
    with Nursery(tmp_path) as nursery:
        yield StaleNode(nursery, tmp_path)


def offsets(source: BrokerSource, start: int, found: list[int]) -> list[int]:
    """Read up to the end that was planned; returns the offsets, and adds them to a list as they come."""
    for batch in source.batches("orders", 0, start, 1000):
        found += [batch.base_offset + place for place in batch.places(batch.columns())]
    return found


def test_readers_wait_for_what_was_planned_with_another_node(
    stale_node: StaleNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, found = BrokerSource(stale_node.address, SOON_S), list[int]()
    schema = StructType([StructField("value", BinaryType())])
    options = source_options({"address": stale_node.address, "subscribe": "orders", "timeout": str(SOON_S)})
    query = HeadraceStreamReader(options, schema)
    read = {"orders": {"id": stale_node.topic_id, "offsets": {"0": 1000}}}
    with monkeypatch.context() as patched:
        patched.setattr(message_source, "_STALE_S", 0.3)
        for start in (0, 950):
            with pytest.raises(OffsetOutOfRange):
                offsets(source, start, [])
        with pytest.raises(OffsetOutOfRange, match="ends at offset 900"):
            query.latestOffset(read, ReadAllAvailable())
    task, other_task = Aside(lambda: offsets(source, 0, found)), Aside(lambda: offsets(source, 950, []))
    asking = Aside(lambda: query.latestOffset(read, ReadAllAvailable()))
    until(lambda: len(found) == 900, "all is read that the node has")
    stale_node.find_out()
    assert task.result() == list(range(1000))
    assert [at for at in other_task.result() if at >= 950] == list(range(950, 1000))
    assert asking.result() == read
    query.stop()
    source.close()


# The archive.


@pytest.mark.long
def test_an_archiving_run_is_repeated_after_an_outage_and_survives_failovers(
    spark: SparkSession, nodes: SparkNodes, topic: str, tmp_path: Path
) -> None:
    nodes.bus.create_topic(topic, partitions=PARTITIONS)
    long_ago = datetime.now(UTC) - timedelta(days=3)
    for partition in range(PARTITIONS):
        values = [b"%08d" % (partition * 300 + at) for at in range(300)]
        nodes.bus.publish_many(topic, values, partition=partition, timestamps=[long_ago] * 300)
        nodes.bus.publish_many(topic, [b"%08d" % (600 + partition)], partition=partition)
    before = archived_rows(spark, nodes, topic)
    assert len(before) == 602
    url, steps = str(tmp_path / "archive"), list[str]()

    def kill_all(step: str, _topic: str) -> None:
        if step == "written":
            for name in list(nodes.running):
                nodes.kill(name)

    impatient = ArchiveRequest(url, older_than_s=86400, timeout=2.0)
    with Archiver(spark, nodes.address, impatient, kill_all) as archiver, pytest.raises(HeadraceError):
        archiver.run(topic)
    nodes.start_killed()

    def on_step(step: str, _topic: str) -> None:
        steps.append(step)
        nodes.restart()

    request = ArchiveRequest(url, older_than_s=86400)
    with Archiver(spark, nodes.address, request, on_step) as archiver:
        outcome = archiver.run(topic)
    assert steps == ["planned", "written", "checked", "committed", "copied", "dropped"]
    assert (outcome.messages, outcome.dropped, outcome.notes) == (600, 600, [])
    assert [one.first_offset for one in nodes.bus.describe_topic(topic).partitions] == [300, 300]
    assert archived_rows(spark, nodes, topic) == before
    with Archiver(spark, nodes.address, request) as archiver:
        assert archiver.run(topic).messages == 0, "everything was archived once"


def archived_rows(spark: SparkSession, nodes: SparkNodes, topic: str) -> list[tuple[int, int, bytes]]:
    """All messages of a topic, from the archive and the log."""
    rows = spark.read.format("headrace").options(address=nodes.address, subscribe=topic, columns=COLUMNS).load()
    return sorted((row.partition, row.offset, bytes(row.value)) for row in rows.collect())
