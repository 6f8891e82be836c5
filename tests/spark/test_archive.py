"""The archive: old messages in Parquet files, and reads that go on over files and log as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import ParquetFile
from tests.spark.conftest import SparkBroker

from headrace.engines.store import Store
from headrace.model.errors import CorruptFile, HeadraceError, InvalidArgument, OffsetOutOfRange, TopicNotFound
from headrace.model.topic import topic_settings
from headrace.spark.archive import archiver, bounds, copier
from headrace.spark.archive.archiver import Archiver, ArchiveRequest, ArchiveResult
from headrace.spark.archive.manifest import MANIFEST_TOPIC, Chunk, Manifest
from headrace.spark.archive.restorer import Restorer, RestoreResult, archived_chunks, chosen_parts
from headrace.spark.archive.status import archive_status
from headrace.spark.datasource import HeadraceDataSource
from headrace.spark.source.message_source import BrokerSource
from headrace.storage.runtime import StorageRuntime

ALL = "topic,partition,offset,timestamp,key,value,headers,due,priority,expires"
DAY = timedelta(days=1)
NOW = datetime.now(UTC)
SOON_S = 120.0

Row = tuple[Any, ...]

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "an archive")


def fill(broker: SparkBroker, topic: str, count: int, *, partition: int = 0, days: float = 3.0) -> None:
    """Messages with everything that a message can have, over the last days."""
    now = datetime.now(UTC)
    ages = [timedelta(days=days) * (1 - (at + 0.5) / count) for at in range(count)]
    values: Any = [b"%d/%d" % (partition, at) if at % 7 else None for at in range(count)]
    broker.bus.publish_many(
        topic,
        values,
        keys=[b"key-%d" % (at % 5) if at % 3 else None for at in range(count)],
        headers=[[("a", str(at)), ("b", b""), ("a", None)] if at % 4 == 0 else None for at in range(count)],
        timestamps=[now - age for age in ages],
        dues=[NOW + DAY if at % 11 == 0 else None for at in range(count)],
        priorities=[at % 3 - 1 if at % 2 else None for at in range(count)],
        expires=[NOW + 30 * DAY if at % 13 == 0 else None for at in range(count)],
        partition=partition,
    )


def rows(spark: Any, broker: SparkBroker, topic: str, **options: str) -> list[Row]:
    """All that a batch read of a topic finds, with all columns."""
    chosen = {"address": broker.address, "subscribe": topic, "columns": ALL, **options}
    found = spark.read.format("headrace").options(**chosen).load().collect()
    return sorted((tuple(row) for row in found), key=lambda row: row[1:3])


def archive(spark: Any, broker: SparkBroker, topic: str, url: str, **wishes: Any) -> ArchiveResult:
    on_step = wishes.pop("on_step", lambda _step, _topic: None)
    chosen = ArchiveRequest(url, **{"older_than_s": DAY.total_seconds(), **wishes})
    with Archiver(spark, broker.address, chosen, on_step) as run:
        return run.run(topic)


def firsts(broker: SparkBroker, topic: str) -> list[int]:
    return [each.first_offset for each in broker.bus.describe_topic(topic).partitions]


def chunks_of(broker: SparkBroker, topic: str) -> list[Chunk]:
    """The archive of the topic that there is now."""
    origin = BrokerSource(broker.address, SOON_S)
    manifest = Manifest(origin)
    manifest.refresh()
    origin.close()
    return manifest.chunks(broker.bus.describe_topic(topic).id)


def files_at(url: str) -> set[str]:
    return {path.relative_to(url).as_posix() for path in Path(url).rglob("*.parquet")}


# Reading over files and log.


def test_reads_are_the_same_when_old_messages_are_files(spark: Any, broker: SparkBroker, topic: str, url: str) -> None:
    broker.bus.create_topic(topic, partitions=2)
    fill(broker, topic, 300)
    fill(broker, topic, 150, partition=1)
    before = rows(spark, broker, topic)
    outcome = archive(spark, broker, topic, url)
    assert (outcome.messages, outcome.dropped) == (300, 300)
    assert firsts(broker, topic) == [200, 100]
    assert rows(spark, broker, topic, minPartitions="5") == before
    assert len(rows(spark, broker, topic, archive="false")) == 150
    # From the middle of the files, over their end.
    starts, ends = {0: 150, 1: 99}, {0: 250, 1: 101}
    some = {"startingOffsets": json.dumps({topic: starts}), "endingOffsets": json.dumps({topic: ends})}
    assert rows(spark, broker, topic, **some) == [row for row in before if starts[row[1]] <= row[2] < ends[row[1]]]
    # By time, in the files.
    time_ms = int((NOW - 2.5 * DAY).timestamp() * 1000)
    late = [row for row in before if row[3].timestamp() * 1000 >= time_ms]
    assert rows(spark, broker, topic, startingTimestamp=str(time_ms)) == late
    # Without the broker, by its data directory.
    chosen = {"path": str(broker.data), "subscribe": topic}
    assert spark.read.format("headrace").options(**chosen).load().count() == 450


def test_the_files_are_what_the_manifest_says(
    spark: Any, broker: SparkBroker, topic: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "_TASKS_MAX", 2)
    fill(broker, topic, 100)
    archive(spark, broker, topic, url, keep=True)
    assert firsts(broker, topic) == [0]
    (chunk,) = chunks_of(broker, topic)
    assert (chunk.rows, chunk.ranges) == (67, {0: (0, 67)})
    found = files_at(url)
    assert found == {file.path for file in chunk.files}
    assert all(
        path.startswith(f"topic={topic}/id={chunk.broker_id}-{chunk.topic_id}/run={chunk.run}/date=") for path in found
    )
    native = spark.read.parquet(url).where(f"topic = '{topic}'")
    assert native.count() == 67
    assert native.select("date").distinct().count() == len({path.split("/")[3] for path in found})
    assert len(found) in (2, 3)  # a file for each day
    # What was kept goes with the next run, but only if the files are still there.
    moved = Path(url).rename(f"{url}.elsewhere")
    with pytest.raises(CorruptFile, match="nothing was dropped"):
        archive(spark, broker, topic, url)
    assert firsts(broker, topic) == [0]
    shutil.rmtree(url, ignore_errors=True)
    moved.rename(url)
    assert archive(spark, broker, topic, url).dropped == 67
    # And when they are lost after that, reads say so, or go on with what there is.
    shutil.rmtree(url)
    with pytest.raises(Exception, match="archived file cannot be read"):
        rows(spark, broker, topic)
    assert len(rows(spark, broker, topic, failOnDataLoss="false")) == 33


def test_a_stream_goes_on_while_its_messages_become_files(
    spark: Any, broker: SparkBroker, topic: str, url: str, tmp_path: Path
) -> None:
    broker.bus.create_topic(topic, partitions=2)
    for number in range(2):
        fill(broker, topic, 300, partition=number)
    seen: list[tuple[int, int]] = []
    first, go_on = threading.Event(), threading.Event()

    def take(batch: Any, number: int) -> None:
        seen.extend((row[0], row[1]) for row in batch.select("partition", "offset").collect())
        if number == 0:
            first.set()
            assert go_on.wait(SOON_S)

    chosen = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "200"}
    stream = spark.readStream.format("headrace").options(address=broker.address, **chosen).load()
    query = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        assert first.wait(SOON_S)
        assert len(seen) == 200
        assert archive(spark, broker, topic, url, older_than_s=0).dropped == 600
        assert firsts(broker, topic) == [300, 300]
        fill(broker, topic, 50)
        go_on.set()
        query.processAllAvailable()
    finally:
        query.stop()
    assert sorted(seen) == [(0, at) for at in range(350)] + [(1, at) for at in range(300)]


def test_what_is_dropped_after_a_read_was_planned_is_found(
    spark: Any, broker: SparkBroker, topic: str, url: str
) -> None:
    fill(broker, topic, 300)
    before = rows(spark, broker, topic)
    lossy = HeadraceDataSource(
        {"address": broker.address, "subscribe": topic, "columns": ALL, "failOnDataLoss": "false"}
    )
    strict = HeadraceDataSource({"address": broker.address, "subscribe": topic, "columns": ALL})
    readers = [source.reader(source.schema()) for source in (strict, lossy)]  # type: ignore[arg-type]
    planned = [reader.partitions() for reader in readers]
    archive(spark, broker, topic, url)
    assert firsts(broker, topic) == [200]
    for reader, parts in zip(readers, planned, strict=True):
        offsets = [at for part in parts for batch in reader.read(part) for at in batch.column("offset").to_pylist()]
        assert offsets == [row[2] for row in before]
    # What is neither in the log nor in the archive is lost.
    parts = readers[0].partitions()
    broker.bus.trim_topic(topic, {0: 250})
    with pytest.raises(OffsetOutOfRange, match="failOnDataLoss"):
        list(readers[0].read(parts[0]))
    kept = [at for batch in readers[1].read(parts[0]) for at in batch.column("offset").to_pylist()]
    assert kept == [*range(200), *range(250, 300)]
    # The next run says so, and reads begin behind the gap.
    outcome = archive(spark, broker, topic, url, older_than_s=0)
    assert [note for note in outcome.notes if "offsets 200 to 249 were removed" in note]
    assert [row[2] for row in rows(spark, broker, topic)] == list(range(250, 300))


# Runs that are cut short.


class Killed(BaseException):
    """Stands for kill -9: nothing is tidied up."""


def test_a_run_may_end_at_any_point(
    spark: Any, broker: SparkBroker, topic: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiver, "remove_attempt", lambda _url, _directory: None)
    broker.bus.create_topic(topic, partitions=2)
    for step in ("planned", "written", "checked", "committed", "copied", "dropped"):
        for number in range(2):
            fill(broker, topic, 30, partition=number)

        def kill(at: str, _topic: str, step: str = step) -> None:
            if at == step:
                raise Killed(step)

        with pytest.raises(Killed, match=step):
            archive(spark, broker, topic, url, older_than_s=0, on_step=kill)
    assert archive(spark, broker, topic, url, older_than_s=0).archived_to == {0: 180, 1: 180}
    assert firsts(broker, topic) == [180, 180]
    found = rows(spark, broker, topic)
    assert [row[1:3] for row in found] == [(number, at) for number in range(2) for at in range(180)]
    assert [row[5] for row in found[::30]] == [None] * 12
    chunks = chunks_of(broker, topic)
    assert [chunk.ranges[0] for chunk in chunks] == [(0, 120), (120, 150), (150, 180)]
    counting = {file.path for chunk in chunks for file in chunk.files}
    assert counting < files_at(url)  # those of the runs that were killed do not count
    copies = sorted(Path(url).glob("topic=*/id=*/_manifest/*.json"))
    assert [json.loads(copy.read_bytes())["number"] for copy in copies] == [0, 1, 2]


def test_what_a_failed_run_has_written_is_removed(spark: Any, broker: SparkBroker, topic: str, url: str) -> None:
    fill(broker, topic, 30)

    def spoil(step: str, _topic: str) -> None:
        if step == "written":
            for path in Path(url).rglob("*.parquet"):
                content = bytearray(path.read_bytes())
                content[_end_of(path, "value") - 1] ^= 1
                path.write_bytes(content)

    with pytest.raises(HeadraceError, match="the Spark job failed"):
        archive(spark, broker, topic, url, older_than_s=0, on_step=spoil)
    assert files_at(url) == set()
    assert firsts(broker, topic) == [0]
    assert chunks_of(broker, topic) == []


def _end_of(path: Path, column: str) -> int:
    """Where the contents of a column end in a file of one row group."""
    group = ParquetFile(path).metadata.row_group(0)
    (found,) = (each for each in map(group.column, range(group.num_columns)) if each.path_in_schema == column)
    first: int = found.dictionary_page_offset or found.data_page_offset
    return first + int(found.total_compressed_size)


def test_two_runs_at_once_archive_everything_once(spark: Any, broker: SparkBroker, topic: str, url: str) -> None:
    fill(broker, topic, 40)
    both = threading.Barrier(2)
    outcomes: list[ArchiveResult] = []

    def wait(step: str, _topic: str) -> None:
        if step == "checked":
            both.wait(SOON_S)

    def work() -> None:
        outcomes.append(archive(spark, broker, topic, url, older_than_s=0, on_step=wait))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert sorted(outcome.messages for outcome in outcomes) == [0, 40]
    (chunk,) = chunks_of(broker, topic)
    assert files_at(url) == {file.path for file in chunk.files}
    assert [row[2] for row in rows(spark, broker, topic)] == list(range(40))


@pytest.mark.parametrize("step", ["planned", "written"])
def test_a_run_leaves_alone_what_another_has_archived_and_dropped(
    spark: Any, broker: SparkBroker, topic: str, url: str, step: str
) -> None:
    fill(broker, topic, 40)
    others: list[ArchiveResult] = []

    def overtake(at: str, _topic: str) -> None:
        if at == step and not others:
            others.append(archive(spark, broker, topic, url, older_than_s=DAY.total_seconds()))

    outcome = archive(spark, broker, topic, url, older_than_s=0, on_step=overtake)
    assert others[0].messages == others[0].dropped > 0
    assert [note for note in outcome.notes if "another run was quicker" in note] == outcome.notes
    assert outcome.messages + others[0].messages == 40
    assert files_at(url) == {file.path for chunk in chunks_of(broker, topic) for file in chunk.files}
    assert [row[2] for row in rows(spark, broker, topic)] == list(range(40))


# Topics of every kind.


def test_a_topic_made_again_has_nothing_to_do_with_the_old_ones_archive(
    spark: Any, broker: SparkBroker, topic: str, url: str
) -> None:
    fill(broker, topic, 20)
    archive(spark, broker, topic, url, older_than_s=0)
    old = chunks_of(broker, topic)
    broker.bus.delete_topic(topic)
    with pytest.raises(TopicNotFound):
        archive(spark, broker, topic, url)
    broker.bus.create_topic(topic)
    broker.bus.publish_many(topic, [b"new"] * 5)
    assert [row[5] for row in rows(spark, broker, topic)] == [b"new"] * 5
    archive(spark, broker, topic, url, older_than_s=0)
    assert [row[5] for row in rows(spark, broker, topic)] == [b"new"] * 5
    assert [chunk.number for chunk in chunks_of(broker, topic)] == [0]
    origin = BrokerSource(broker.address, SOON_S)
    statuses = archive_status(origin, [topic], 0)
    assert [(each.topic_id, each.deleted, each.messages) for each in statuses] == [
        (old[0].topic_id, True, 20),
        (chunks_of(broker, topic)[0].topic_id, False, 5),
    ]
    assert archived_chunks(origin, topic, archive_id=f"{old[0].broker_id}-{old[0].topic_id}") == old
    origin.close()


def test_there_may_be_nothing_to_archive(spark: Any, broker: SparkBroker, topic: str, url: str) -> None:
    broker.bus.create_topic(topic, partitions=3)
    outcome = archive(spark, broker, topic, url)
    assert (outcome.messages, outcome.files, outcome.archived_to) == (0, 0, {})
    assert rows(spark, broker, topic) == []
    fill(broker, topic, 5, partition=1, days=0.1)
    assert archive(spark, broker, topic, url).files == 0
    broker.bus.create_topic(f"{topic}-memory", storage="memory")
    for refused, why in ((f"{topic}-memory", "in memory"), (MANIFEST_TOPIC, "a system topic")):
        with pytest.raises(InvalidArgument, match=why):
            archive(spark, broker, refused, url)
    with pytest.raises(InvalidArgument, match="pyarrow"):
        archive(spark, broker, topic, "nowhere://a/b")
    with Archiver(spark, broker.address, ArchiveRequest(url)) as run:
        assert topic in run.topics()
        assert f"{topic}-memory" not in run.topics()
        assert MANIFEST_TOPIC not in run.topics()


def test_a_group_keeps_in_the_log_what_it_has_still_to_read(
    spark: Any, broker: SparkBroker, topic: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "CHUNK_OFFSETS", 15)
    fill(broker, topic, 20)
    broker.bus.commit(topic, {(topic, 0): 8})
    outcome = archive(spark, broker, topic, url, older_than_s=0)
    assert (outcome.dropped, firsts(broker, topic)) == (8, [8])
    assert [chunk.ranges for chunk in chunks_of(broker, topic)] == [{0: (0, 15)}, {0: (15, 20)}]
    assert outcome.notes == [f"{topic}: what groups or leased subscriptions have still to read stays in the log, too"]
    assert [row[2] for row in rows(spark, broker, topic)] == list(range(20))
    broker.bus.commit(topic, {(topic, 0): 20})
    assert archive(spark, broker, topic, url, older_than_s=0).dropped == 12


# Bringing messages back.


def restored(spark: Any, broker: SparkBroker, chunks: list[Chunk], target: str, **bounds: Any) -> RestoreResult:
    origin = BrokerSource(broker.address, SOON_S)
    try:
        parts = chosen_parts(chunks, bounds.get("begin"), bounds.get("until"))
        return Restorer(spark, origin, broker.address, target).restore(chunks, parts)
    finally:
        origin.close()


def contents(found: list[Row]) -> list[Row]:
    """What messages are, without where they are."""
    return [(row[1], *row[3:]) for row in found]


def test_what_is_restored_is_what_was_archived(
    spark: Any, broker: SparkBroker, own_broker: SparkBroker, topic: str, url: str
) -> None:
    """Compacted before, with holes; restored beside it, and, by the files alone, to a broker that knows of nothing."""
    own_broker.bus.create_topic(topic, partitions=2, compact_by_key=True, segment_bytes=4096)
    for at in range(4):
        fill(own_broker, topic, 100, partition=at % 2, days=4 - at)
    _compact(own_broker, topic)
    with pytest.raises(InvalidArgument, match="compacted by key"):
        archive(spark, own_broker, topic, url, older_than_s=0)
    with own_broker.connect() as bus:
        bus.alter_topic(topic, compact_by_key=False)
    before = rows(spark, own_broker, topic)
    assert 100 < len(before) < 350
    archive(spark, own_broker, topic, url, older_than_s=0)
    assert firsts(own_broker, topic) == [200, 200]
    assert rows(spark, own_broker, topic) == before
    chunks = chunks_of(own_broker, topic)
    for _ in range(2):
        assert restored(spark, own_broker, chunks, "again") == RestoreResult("again", len(before), len(chunks[0].files))
    assert contents(rows(spark, own_broker, "again")) == contents(before)
    late = NOW - 2 * DAY
    part = restored(spark, own_broker, chunks, "part", begin=late, until=180)
    wanted = [row for number in range(2) for row in _since(before, number, late) if row[2] < 180]
    assert part.messages == len(wanted)
    assert contents(rows(spark, own_broker, "part")) == contents(wanted)
    own_broker.bus.create_topic("narrow")
    with pytest.raises(InvalidArgument, match="--partitions 2"):
        restored(spark, own_broker, chunks, "narrow")
    origin = BrokerSource(broker.address, SOON_S)
    copies = archived_chunks(origin, topic, url)
    with pytest.raises(TopicNotFound):
        archived_chunks(origin, topic)
    origin.close()
    assert copies == chunks
    restored(spark, broker, copies, topic)
    assert contents(rows(spark, broker, topic)) == contents(before)


def _compact(broker: SparkBroker, topic: str) -> None:
    """Have a topic's log compacted, without waiting until the broker does it by itself."""
    settings = topic_settings(broker.bus.describe_topic(topic).settings)
    broker.stop()
    store = Store(StorageRuntime(), str(broker.data))
    assert store.data is not None
    for place in list(store.data.partitions()):
        owner = store.data.owner(place.path).owner
        if owner is not None and owner.topic == topic:
            partition = store.open_partition(f"{place.topic_id}/{place.number}", settings, None)
            partition.compact_by_key()
            partition.close()
    store.close()
    broker.start()
    broker.connect().close()


def _since(found: list[Row], number: int, moment: datetime) -> list[Row]:
    """The messages of a partition from the first one of a time on."""
    of_partition = [row for row in found if row[1] == number]
    first = min(row[2] for row in of_partition if row[3].replace(tzinfo=UTC) >= moment)
    return [row for row in of_partition if row[2] >= first]


# As a person uses it.


def headrace(broker: SparkBroker, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headrace", "archive", *arguments, "--connect", broker.address, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def told(process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    out, errors = process.communicate(timeout=SOON_S)
    assert process.returncode == 0, errors.decode()
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.long
def test_a_command_that_is_killed_is_simply_given_again(spark: Any, broker: SparkBroker, topic: str, url: str) -> None:
    fill(broker, topic, 150)
    before = rows(spark, broker, topic)
    run = ("run", topic, "--to", url, "--older-than", "1d", "--master", "local[2]")
    first = headrace(broker, *run)
    deadline = time.monotonic() + SOON_S
    while not list(Path(url).rglob("run=*")):
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert chunks_of(broker, topic) == []
    assert rows(spark, broker, topic) == before
    (outcome,) = told(headrace(broker, *run))
    assert outcome == {
        **outcome,
        "topic": topic,
        "messages": 100,
        "dropped": 100,
        "archived_to": {"0": 100},
        "notes": [],
    }
    assert rows(spark, broker, topic) == before
    (status,) = told(headrace(broker, "status", topic, "--older-than", "12h"))
    assert (status["messages"], status["files"], status["urls"]) == (100, outcome["files"], [f"file://{url}"])
    assert status["partitions"] == [
        {"partition": 0, "archived_from": 0, "archived_to": 100, "log_first": 100, "log_end": 150, "open": 25}
    ]
    assert status["bytes"] == outcome["bytes"]


def test_status_in_words(broker: SparkBroker, topic: str, capfd: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.main import main

    fill(broker, topic, 100)
    assert main(["archive", "status", topic, "--connect", broker.address]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines[1] == [topic, "0", "0", "0", "B", "-", "100", "0"]
    assert lines[-1] == ["0", "-", "-", "0", "100", "0"]
    assert main(["archive", "status", "nothing", "--connect", broker.address]) == 1
    assert main(["archive", "run", "--to", "x"]) == 2
