"""The archive's parts by themselves, without Spark."""

import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("pyspark", reason="pip install headrace[spark]")

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

import headrace
from headrace.model.batch import Batch, Columns, encode
from headrace.model.content.query import ContentQuery
from headrace.model.errors import (
    CorruptBatch,
    CorruptFile,
    Forbidden,
    InvalidArgument,
    OffsetOutOfRange,
    TopicNotFound,
    UnsupportedFormat,
)
from headrace.model.requests import PartitionInfo, TopicInfo
from headrace.model.topic import TopicSettings
from headrace.server import EmbeddedServer
from headrace.spark.archive import bounds, commit, paths
from headrace.spark.archive.archived_source import ArchivedSource
from headrace.spark.archive.manifest import (
    MANIFEST_TOPIC,
    ArchivedFile,
    Chunk,
    Manifest,
    PartitionArchive,
    StoredFile,
    chunk_of,
    partition_archives_of,
)
from headrace.spark.archive.parquet import SCHEMA, MessageChecksum, find_time, rows_of
from headrace.spark.archive.query_rows import ArchivedRowReader, batches_of, unexpired
from headrace.spark.archive.tasks import LogReadSettings, compare
from headrace.spark.source.planning import OffsetSpan, Range, TopicState
from headrace.spark.source.values import value_columns

NOW_US = time.time_ns() // 1000
DAY_US = 86_400_000_000


def table(offsets: range | list[int], **columns: list[Any]) -> pa.RecordBatch:
    """Messages as an archive has them."""
    count = len(offsets)
    filled: dict[str, list[Any]] = {
        "partition": [0] * count,
        "offset": list(offsets),
        "timestamp": [NOW_US + at for at in offsets],
        "key": [None] * count,
        "value": [b"%d" % at for at in offsets],
        **{name: [None] * count for name in ("headers", "due", "priority", "expires")},
        **columns,
    }
    return pa.RecordBatch.from_pydict(filled, SCHEMA)


def stored(directory: Path, rows: pa.RecordBatch, start: int, end: int) -> StoredFile:
    """A file with these messages."""
    path = f"{start}.parquet"
    pq.write_table(pa.Table.from_batches([rows]), directory / path, row_group_size=7)
    total = MessageChecksum()
    total.add(rows)
    size = (directory / path).stat().st_size
    times = total.time_min_us, total.time_max_us
    return StoredFile(
        f"file://{directory}", ArchivedFile(path, 0, start, end, rows.num_rows, size, 1, *times, total.checksum)
    )


def chunk(number: int, *files: StoredFile, start: int, end: int, **more: Any) -> Chunk:
    fields = {"topic": "orders", "topic_id": 7, "broker_id": "b", "run": f"run-{number}", "created_us": NOW_US, **more}
    url = files[0].url if files else "file:///nowhere"
    return Chunk(number=number, url=url, ranges={0: (start, end)}, files=tuple(one.file for one in files), **fields)


class Log:
    """A log that has some messages of one topic, and a manifest."""

    def __init__(self, first: int, end: int, topic_id: int = 7) -> None:
        self.first, self.end, self.topic_id = first, end, topic_id
        self.entries: list[Chunk] = []

    def topic(self, name: str) -> TopicState:
        if name == MANIFEST_TOPIC:
            if not self.entries:
                raise TopicNotFound
            return TopicState(name, 1, {0: OffsetSpan(0, len(self.entries))})
        return TopicState(name, self.topic_id, {0: OffsetSpan(self.first, self.end, 100)})

    def at_time(self, _name: str, time_us: int) -> dict[int, int]:
        return {0: min(max(time_us - NOW_US, self.first), self.end)}

    def batches(self, name: str, _partition: int, start: int, _end: int) -> Iterator[Batch]:
        if name == MANIFEST_TOPIC:
            for at, one in enumerate(self.entries[start:], start):
                batch = encode(Columns([msgspec.json.encode(one)], [one.key]), 0)
                batch.place(at, 0, 0)
                yield batch
            return
        if start < self.first:
            raise OffsetOutOfRange
        base = start - start % 10  # batches are of ten messages
        while base < self.end:
            batch = encode(Columns([b"%d" % at for at in range(base, base + 10)]), NOW_US)
            batch.place(base, 0, 0)
            yield batch
            base += 10

    def names(self) -> list[str]:
        return ["orders", MANIFEST_TOPIC]

    def commit(self, group: str, positions: dict[tuple[str, int], int]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


# What is archived.


def test_a_shelf_is_the_last_stretch_without_gaps() -> None:
    files = [StoredFile("", ArchivedFile("", 0, at, at + 10, 10, 1, 1, 0, 0, "")) for at in (0, 20, 30)]
    partition_archive = PartitionArchive([(0, 10), (20, 30), (30, 45)], files)
    assert (partition_archive.first, partition_archive.end) == (20, 45)
    assert [partition_archive.covers(at) for at in (0, 19, 20, 44, 45)] == [False, False, True, True, False]
    assert [one.file.start for one in partition_archive.between(25, 31)] == [20, 30]
    assert [one.file.start for one in partition_archive.between(30, 100)] == [30]
    assert partition_archive.between(40, 45) == ()
    assert partition_archive.bytes_before(30) == 1


def test_a_manifest_that_may_not_be_read_is_not_taken_for_no_archive() -> None:
    class Refusing(Log):
        def topic(self, name: str) -> TopicState:
            if name == MANIFEST_TOPIC:
                raise Forbidden("ada may not describe the topic headrace.archive")
            return super().topic(name)

    with pytest.raises(Forbidden, match=r"consume:topic:headrace\.archive.*archive=false"):
        ArchivedSource(Refusing(30, 50)).topic("orders")


def test_the_manifest_is_read_on_and_topics_do_not_mix() -> None:
    log = Log(0, 100)
    manifest = Manifest(log)
    manifest.refresh()
    assert manifest.chunks(7) == []
    log.entries = [chunk(0, start=0, end=10), chunk(0, start=0, end=50, topic_id=8)]
    manifest.refresh()
    log.entries.append(chunk(1, start=10, end=20))
    manifest.refresh()
    assert [one.ranges for one in manifest.chunks(7)] == [{0: (0, 10)}, {0: (10, 20)}]
    assert (
        manifest.partition_archives(7)[0].end,
        manifest.partition_archives(8)[0].end,
        manifest.partition_archives(9),
    ) == (20, 50, {})
    assert manifest.topic_ids() == [7, 8]
    assert manifest.next_offset == 3


def test_an_entry_that_makes_no_sense_is_told() -> None:
    entry = chunk(0, start=0, end=10)
    assert chunk_of(msgspec.json.encode(entry)) == entry
    with pytest.raises(CorruptFile):
        chunk_of(b"{}")
    with pytest.raises(CorruptFile):
        chunk_of(b"\xff")
    with pytest.raises(UnsupportedFormat, match="newer"):
        chunk_of(msgspec.json.encode(msgspec.structs.replace(entry, format=2)))


# Files.


def test_only_the_offsets_that_are_wanted_are_read(tmp_path: Path) -> None:
    one = stored(tmp_path, table([*range(20), *range(30, 50)]), 0, 60)
    for start, end in ((0, 60), (5, 6), (19, 31), (20, 30), (45, 100)):
        found = [at for rows in rows_of(one, start, end, ["offset"]) for at in rows.column(0).to_pylist()]
        assert found == [at for at in [*range(20), *range(30, 50)] if start <= at < end]
    assert find_time(one, NOW_US + 20) == 30
    assert find_time(one, NOW_US + 50) is None
    other = StoredFile(one.url, msgspec.structs.replace(one.file, rows=39))
    with pytest.raises(CorruptFile, match="40 messages, not 39"):
        list(rows_of(other, 0, 60, ["offset"]))
    (tmp_path / one.file.path).unlink()
    with pytest.raises(CorruptFile, match="cannot be read"):
        list(rows_of(one, 0, 60, ["offset"]))


def test_sums_tell_messages_apart_however_they_are_divided() -> None:
    rows = table(range(10), key=[b"a", None] * 5)
    whole, parts = MessageChecksum(), MessageChecksum()
    whole.add(rows)
    for at in range(10):
        parts.add(rows.slice(at, 1))
    assert whole.checksum == parts.checksum
    assert (whole.rows, whole.time_min_us, whole.time_max_us) == (10, NOW_US, NOW_US + 9)
    for changed in (
        table(range(1, 11), key=[b"a", None] * 5, value=[b"%d" % at for at in range(10)]),
        table(range(10), key=[b"a", b""] * 5),
        table(range(10), key=[b"a", None] * 5, value=[b"x", *(b"%d" % at for at in range(1, 10))]),
    ):
        other = MessageChecksum()
        other.add(changed)
        assert other.checksum != whole.checksum
    with pytest.raises(CorruptFile, match="order"):
        whole.add(rows)


def test_what_has_expired_is_not_served(tmp_path: Path) -> None:
    rows = table(range(4), expires=[None, NOW_US - 1, NOW_US + DAY_US, NOW_US - DAY_US])
    assert unexpired(rows).column("offset").to_pylist() == [0, 2]
    schema = pa.schema([("topic", pa.string()), ("offset", pa.int64()), ("partition", pa.int32())])
    archived_rows = ArchivedRowReader(schema, lambda values: {"value": values})
    found = list(archived_rows.record_batches(Range("orders", 3, 0, 3), [stored(tmp_path, rows, 0, 4)]))
    assert [batch.to_pydict() for batch in found] == [{"topic": ["orders"] * 2, "offset": [0, 2], "partition": [3] * 2}]


def test_values_are_served_as_the_query_wants_them(tmp_path: Path) -> None:
    rows = table(range(3), value=[b'{"a": 1}', None, b"no JSON"])
    one = stored(tmp_path, rows, 0, 3)
    for kind, wanted in (
        (BinaryType(), [b'{"a": 1}', None, b"no JSON"]),
        (StringType(), ['{"a": 1}', None, "no JSON"]),
        (StructType([StructField("a", IntegerType())]), [{"a": 1}, None, None]),
    ):
        corrupt = [StructField("_corrupt", StringType())] if isinstance(kind, StructType) else []
        schema = StructType([StructField("value", kind), *corrupt])
        archived_rows = ArchivedRowReader(to_arrow_schema(schema, timezone="UTC"), value_columns(schema))
        (batch,) = archived_rows.record_batches(Range("orders", 0, 0, 3), [one])
        assert batch.column("value").to_pylist() == wanted
        if corrupt:
            assert batch.column("_corrupt").to_pylist() == [None, None, "no JSON"]


def test_archived_messages_as_batches(tmp_path: Path) -> None:
    again = [{"key": "a", "value": b"b"}, {"key": "a", "value": None}]
    headers = [[{"key": "a", "value": b"b"}], None, [], again]
    rows = table([3, 5, 6, 7], headers=headers, priority=[1, None, -1, None], due=[NOW_US, None, None, None])
    (batch,) = batches_of([stored(tmp_path, rows, 0, 10)], 0, 10)
    assert (batch.base_offset, batch.next_offset, batch.count) == (3, 8, 4)
    messages = list(batch.messages())
    assert messages.pop().header_list == [("a", b"b"), ("a", None)]
    assert [(one.offset, one.value, one.headers) for one in messages] == [
        (3, b"3", {"a": b"b"}),
        (5, b"5", None),
        (6, b"6", {}),
    ]
    assert [(one.timestamp - NOW_US, one.priority, one.due) for one in messages] == [
        (3, 1, NOW_US),
        (5, None, None),
        (6, -1, None),
    ]


# Archive and log as one.


def test_the_archive_comes_before_the_log(tmp_path: Path) -> None:
    log = Log(0, 50)
    origin = ArchivedSource(log)
    assert origin.topic("orders").spans[0] == OffsetSpan(0, 50, 100)
    one, other = stored(tmp_path, table(range(20)), 0, 20), stored(tmp_path, table(range(20, 35)), 20, 35)
    log.entries = [chunk(0, one, start=0, end=20), chunk(1, other, start=20, end=35)]
    log.first = 33
    assert origin.topic("orders").spans[0] == OffsetSpan(0, 50, 102)
    assert origin.names() == ["orders"]
    batches = list(origin.batches("orders", 0, 15, 50))
    assert [message.offset for batch in batches for message in batch.messages()] == list(range(15, 50))
    assert [int(value or 0) for batch in batches for value in batch.columns().values] == list(range(15, 50))
    assert [origin.at_time("orders", NOW_US + at)[0] for at in (-5, 0, 17, 25, 33, 40, 99)] == [
        0,
        0,
        17,
        25,
        33,
        40,
        50,
    ]
    archived_range = origin.archived_range(Range("orders", 0, 10, 50))
    assert archived_range is not None
    assert (archived_range.topic_id, archived_range.log_first) == (7, 33)
    assert [each.file.start for each in archived_range.files] == [0, 20]
    assert origin.archived_range(Range("orders", 0, 40, 50)) == (7, 40, ())


def test_a_gap_before_the_log_is_a_beginning(tmp_path: Path) -> None:
    log = Log(30, 50)
    log.entries = [chunk(0, stored(tmp_path, table(range(20)), 0, 20), start=0, end=20)]
    origin = ArchivedSource(log)
    assert origin.topic("orders").spans[0].first == 30
    assert origin.at_time("orders", NOW_US)[0] == 30
    with pytest.raises(OffsetOutOfRange):
        list(origin.batches("orders", 0, 25, 50))
    other = ArchivedSource(Log(30, 50, topic_id=8))
    assert other.topic("orders").spans[0].first == 30


# Copies are compared with the log.


def halves(rows: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    for at in range(0, rows.num_rows, size):
        yield rows.slice(at, size)


WANTED = Range("orders", 0, 0, 100)


def test_what_is_damaged_is_told_or_left_out(tmp_path: Path) -> None:
    server = EmbeddedServer(str(tmp_path), host="127.0.0.1", port=0)
    try:
        host, port = server._server.addresses[0]
        address = f"headrace://{host}:{port}"
        with headrace.connect(address) as bus:
            for each in (b"first", b"second", b"third"):
                bus.publish_many("orders", [each] * 20, expires=[1] * 20)  # which is long ago
        (segment,) = (tmp_path / "topics").glob("*/0/*.seg")
        content = segment.read_bytes()
        with segment.open("r+b") as file:
            file.seek(content.index(b"second"))
            file.write(b"s3cond")
        wanted = Range("orders", 0, 0, 60)
        with pytest.raises(CorruptBatch):
            list(LogReadSettings(address, 10, may_have_gaps=False, skip_damaged=False).record_batches(wanted))
        found = list(LogReadSettings(address, 10, may_have_gaps=False, skip_damaged=True).record_batches(wanted))
        assert [at for rows in found for at in rows.column("offset").to_pylist()] == [*range(20), *range(40, 60)]
        with pytest.raises(OffsetOutOfRange, match="had 61 when this was planned"):
            list(
                LogReadSettings(address, 10, may_have_gaps=False, skip_damaged=False).record_batches(
                    Range("orders", 0, 40, 61)
                )
            )
    finally:
        server.close()


@pytest.mark.parametrize("vanish", [False, True])
@pytest.mark.parametrize("sizes", [(3, 100), (100, 3), (7, 5), (10, 10)])
def test_a_copy_is_compared_however_it_is_divided(sizes: tuple[int, int], vanish: bool) -> None:
    rows = table(range(10, 60))
    compare(WANTED, halves(rows, sizes[0]), halves(rows, sizes[1]), vanish)
    with pytest.raises(CorruptFile, match="it was not committed"):
        compare(WANTED, halves(rows, sizes[0]), halves(rows.slice(0, 49), sizes[1]), vanish)
    with pytest.raises(CorruptFile):
        compare(WANTED, halves(rows, sizes[0]), iter([]), vanish)
    changed = table(range(10, 60), priority=[None] * 30 + [5] + [None] * 19)
    with pytest.raises(CorruptFile):
        compare(WANTED, halves(rows, sizes[0]), halves(changed, sizes[1]), vanish)


def test_a_copy_may_have_more_only_if_messages_may_vanish() -> None:
    compacted, rows = table([10, 15, 40]), table(range(10, 60))
    compare(WANTED, iter([compacted]), halves(rows, 7), True)
    compare(WANTED, iter([]), halves(rows, 7), True)
    for log in ([compacted], [rows.slice(0, 10)], []):
        with pytest.raises(CorruptFile):
            compare(WANTED, iter(log), halves(rows, 7), False)


# What is to be archived.


def info(first: int, end: int, size: int = 1000, **settings: Any) -> TopicInfo:
    told = msgspec.to_builtins(msgspec.structs.replace(TopicSettings(), **settings))
    return TopicInfo("orders", 7, 0, told, [PartitionInfo(0, first, end, size)])


def test_what_is_old_and_not_archived_is_open() -> None:
    partition_archives = partition_archives_of([chunk(0, start=0, end=40)])
    assert bounds.open_ranges(info(0, 100), {}, {0: 70}) == {0: (0, 70)}
    assert bounds.open_ranges(info(0, 100), partition_archives, {0: 70}) == {0: (40, 70)}
    assert bounds.open_ranges(info(50, 100), partition_archives, {0: 70}) == {0: (50, 70)}
    assert bounds.open_ranges(info(0, 100), partition_archives, {0: 40}) == {}
    with pytest.raises(InvalidArgument, match="has lost messages"):
        bounds.open_ranges(info(0, 30), partition_archives, {0: 30})


def test_views_are_not_archived() -> None:
    view = TopicSettings(view_of="source", view_query=ContentQuery(regex="a"))
    assert bounds.archive_refusal(TopicInfo("orders", 7, 0, TopicSettings().as_dict())) is None
    assert "archive its source, source" in (bounds.archive_refusal(TopicInfo("view", 8, 0, view.as_dict())) or "")


def test_much_is_archived_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bounds.chunk_ranges(info(0, 100), {0: (0, 70)}) == {0: (0, 70)}
    monkeypatch.setattr(bounds, "CHUNK_BYTES", 300)
    assert bounds.chunk_ranges(info(0, 100), {0: (20, 70)}) == {0: (20, 50)}
    monkeypatch.setattr(bounds, "CHUNK_OFFSETS", 4)
    assert bounds.chunk_ranges(info(0, 100), {0: (20, 70)}) == {0: (20, 24)}


@given(
    st.lists(st.integers(-3, 40), min_size=1, max_size=30),
    st.integers(0, 29),
    st.integers(1, 30),
)
def test_days_follow_each_other_and_none_is_left_out(days: list[int], start: int, length: int) -> None:
    start %= len(days)
    end = min(start + length, len(days))
    asked = 0

    def at_time(time_us: int) -> dict[int, int]:
        nonlocal asked
        asked += 1
        return {0: next((at for at, day in enumerate(days) if day * DAY_US + 5 >= time_us), len(days))}

    cuts = bounds.day_cuts({0: (start, end)}, at_time, days[start] * DAY_US + 5, 41 * DAY_US)
    found = bounds.pieces(info(0, len(days)), {0: (start, end)}, cuts)
    assert [at for piece in found for at in range(piece.wanted.start, piece.wanted.end)] == list(range(start, end))
    assert [piece.day for piece in found] == sorted(piece.day for piece in found)
    for piece in found:
        latest = {max(days[: at + 1]) for at in range(piece.wanted.start, piece.wanted.end)}
        assert [(date(1970, 1, 1) + timedelta(days=day)).isoformat() for day in latest] == [piece.day]
    assert asked <= 8 * len(found) + 2  # not every day there is


def test_a_day_is_that_of_its_messages() -> None:
    days = [100, 100, 103, 101, 103, 200]

    def at_time(time_us: int) -> dict[int, int]:
        return {0: next((at for at, day in enumerate(days) if day * DAY_US >= time_us), len(days))}

    cuts = bounds.day_cuts({0: (0, 6)}, at_time, 100 * DAY_US, 300 * DAY_US)
    found = bounds.pieces(info(0, 6), {0: (0, 6)}, cuts)
    assert [(piece.day, piece.wanted.start, piece.wanted.end) for piece in found] == [
        ("1970-04-11", 0, 2),
        ("1970-04-14", 2, 5),
        ("1970-07-20", 5, 6),
    ]


# Places.


def test_paths_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.archive_url("a b/%20") == f"file://{tmp_path}/a b/%20"
    assert paths.archive_url("file:/a/") == paths.archive_url("file:///a") == "file:///a"
    assert paths.archive_url("s3a://bucket/a/") == "s3a://bucket/a"
    assert paths.resolve_url("file:///a b").path == "/a b"
    with pytest.raises(InvalidArgument, match="cannot read nothing: URLs"):
        paths.resolve_url("nothing://a")
    with pytest.raises(InvalidArgument):
        paths.archive_url("")
    base = paths.resolve_url(f"file://{tmp_path}")
    assert paths.names_below(base.below("none")) == []
    paths.write_whole(base.below("a", "b.json"), b"content")
    assert paths.read_whole(base.below("a", "b.json")) == b"content"
    assert paths.names_below(base.below("a")) == ["b.json"]
    assert paths.topic_folder("acme/orders", "b", 7) == "topic=acme%2Forders/id=b-7"
    assert paths.topic_folder("größe 1~", "b", 7) == "topic=gr%C3%B6%C3%9Fe%201%7E/id=b-7"
    long = {paths.topic_folder("ß" * 248 + end, "b", 7).partition("/")[0] for end in "ßs"}
    assert [len(folder) < 255 for folder in long] == [True, True]


def test_only_old_leftovers_are_removed(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    names = {
        "old": commit.run_name(now - timedelta(hours=30), "a"),
        "new": commit.run_name(now - timedelta(hours=20), "b"),
        "counting": commit.run_name(now - timedelta(hours=30), "c"),
        "other": "by-hand",
    }
    for name in names.values():
        (tmp_path / "topic" / f"run={name}" / "date=2026-01-31").mkdir(parents=True)
    (tmp_path / "topic" / "_manifest").mkdir()
    counting = [chunk(0, start=0, end=1, run=names["counting"])]
    assert commit.remove_leftovers(f"file://{tmp_path}", "topic", counting) == 1
    left = {path.name for path in (tmp_path / "topic").iterdir()}
    assert left == {"_manifest", *(f"run={names[which]}" for which in ("new", "counting", "other"))}


def test_a_chunk_counts_once_and_only_if_it_continues(tmp_path: Path) -> None:
    from headrace.spark.source.message_source import BrokerSource

    with headrace.open(tmp_path) as bus:
        commit.make_manifest_topic(bus)
        topic_id = bus.create_topic("orders").id
        origin = BrokerSource("unused", 1)
        origin._connected = bus
        manifests = [Manifest(origin), Manifest(origin)]
        begun = datetime.now(UTC)
        first = chunk(0, start=0, end=10, topic_id=topic_id)
        for _ in range(2):  # as when the answer was lost
            commit.commit(bus, manifests[0], first, begun)
        with pytest.raises(commit.ArchiveConflict, match="another run"):
            commit.commit(bus, manifests[1], msgspec.structs.replace(first, run="other"), begun)
        with pytest.raises(commit.ArchiveConflict, match="hours"):
            commit.commit(bus, manifests[1], chunk(1, start=10, end=20, topic_id=topic_id), begun - timedelta(days=1))
        with pytest.raises(commit.ArchiveConflict, match="made again"):
            commit.commit(bus, manifests[1], chunk(0, start=0, end=20, topic_id=99), begun)
        bus.publish(MANIFEST_TOPIC, msgspec.json.encode(chunk(0, start=0, end=1, topic_id=50)), key=b"50/0")
        commit.commit(bus, manifests[0], chunk(1, start=10, end=20, topic_id=topic_id), begun)
        manifests[1].refresh()
        assert [one.number for one in manifests[1].chunks(topic_id)] == [0, 1]
