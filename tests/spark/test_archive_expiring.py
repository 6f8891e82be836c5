"""Archives are expired and deleted: first they do not count any more, then their files go; and what is refused."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pip install headrace[spark]")

import msgspec
import pyarrow as pa
from tests.spark.conftest import SparkBroker

import headrace
from headrace.model.errors import CorruptFile, HeadraceError, InvalidArgument, TopicNotFound
from headrace.spark.archive import archiver, bounds, commit, expirer
from headrace.spark.archive.archived_source import ArchivedSource
from headrace.spark.archive.expirer import Expirer, expired_files, redundant_chunks, without_files
from headrace.spark.archive.manifest import ArchivedFile, Chunk, Manifest, StoredFile
from headrace.spark.archive.parquet import COLUMNS, SCHEMA, rows_of, write_file
from headrace.spark.archive.paths import resolve_url, topic_folder
from headrace.spark.archive.restorer import archived_chunks
from headrace.spark.archive.status import archive_status
from headrace.spark.source.message_source import BrokerSource

DAY_US = 86_400_000_000
NOW_US = time.time_ns() // 1000
COUNT = 10


class Stage:
    """A broker in this process, with a topic whose first messages are archived: ten a file, a file a chunk."""

    def __init__(self, bus: headrace.Bus, root: Path) -> None:
        self.bus = bus
        self.root = root / "archive"
        self.url = f"file://{self.root}"
        commit.make_manifest_topic(bus)
        self.id = bus.create_topic("orders", partitions=2).id
        self.origin = BrokerSource("unused", 1)
        self.origin._connected = bus
        self.manifest = Manifest(self.origin)

    def archive(self, partition: int, start: int, days: float) -> Chunk:
        """Archive ten messages that are so many days old."""
        self.manifest.refresh()
        number = max((one.number for one in self.manifest.chunks(self.id)), default=-1) + 1
        run = commit.run_name(datetime.now(UTC), f"t-{number}-{partition}-{start}")
        path = f"{topic_folder('orders', 'b', self.id)}/run={run}/date=2026-01-01/part-0.parquet"
        time_us = NOW_US - round(days * DAY_US)
        row = dict.fromkeys(COLUMNS) | {"partition": partition, "timestamp": time_us, "value": b"x"}
        rows = [row | {"offset": at} for at in range(start, start + COUNT)]
        place = resolve_url(self.url).below(path)
        write_file(place, [pa.RecordBatch.from_pylist(rows, SCHEMA)])
        size = Path(place.path).stat().st_size
        file = ArchivedFile(path, partition, start, start + COUNT, COUNT, size, size, time_us, time_us, "")
        ranges = {partition: (start, start + COUNT)}
        chunk = Chunk("orders", self.id, "b", number, run, self.url, NOW_US, ranges, (file,))
        commit.commit(self.bus, self.manifest, chunk, datetime.now(UTC))
        self.manifest.refresh()
        commit.write_copies(self.chunks())
        return chunk

    def chunks(self) -> list[Chunk]:
        self.manifest.refresh()
        return self.manifest.chunks(self.id)

    def files(self) -> set[str]:
        return {path.relative_to(self.root).as_posix() for path in self.root.rglob("*.parquet")}

    def named(self) -> set[str]:
        return {file.path for chunk in self.chunks() for file in chunk.files}

    def copies(self) -> list[Chunk]:
        return commit.read_copies(self.url, "orders").get(f"b-{self.id}", [])


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with headrace.open(tmp_path / "data") as bus:
        yield Stage(bus, tmp_path)


def filled(stage: Stage) -> Stage:
    """Three chunks of partition 0, one of partition 1, of 40 to 10 days ago."""
    for partition, start, days in ((0, 0, 40), (0, 10, 30), (1, 0, 20), (0, 20, 10)):
        stage.archive(partition, start, days)
    return stage


# What goes.


def of(partition: int, start: int, days: float, size: int = 100) -> ArchivedFile:
    time_us = NOW_US - round(days * DAY_US)
    return ArchivedFile(f"{partition}/{start}", partition, start, start + 10, 10, size, size, time_us, time_us, "")


def entry(number: int, *files: ArchivedFile, ranges: Any = None) -> Chunk:
    spanned = ranges or {file.partition: (file.start, file.end) for file in files}
    return Chunk("orders", 7, "b", number, f"run-{number}", "file:///a", 0, spanned, files)


def test_the_oldest_files_of_each_partition_go_and_leave_no_gap() -> None:
    chunks = [entry(0, of(0, 0, 5), of(1, 0, 40)), entry(1, of(0, 10, 50), of(1, 10, 30)), entry(2, of(0, 20, 1))]
    before_us = NOW_US - 20 * DAY_US
    # What is older than 20 days in partition 0 lies behind a message that is not: it stays.
    assert expired_files(chunks, before_us, None) == {"1/0", "1/10"}
    assert expired_files(chunks, None, 400) == {"1/0"}
    assert expired_files(chunks, None, 250) == {"1/0", "1/10", "0/0"}
    assert expired_files(chunks, before_us, 250) == {"1/0", "1/10", "0/0", "0/10"}
    assert expired_files(chunks, None, 0) == {file.path for chunk in chunks for file in chunk.files}
    assert expired_files(chunks, NOW_US - 100 * DAY_US, 10_000) == set()


def test_what_is_left_still_knows_where_the_archive_ends() -> None:
    chunks = [entry(0, of(0, 0, 5), of(1, 0, 40)), entry(1, of(0, 10, 5)), entry(2, of(0, 20, 1))]
    left = without_files(chunks, {"0/0", "0/10", "1/0"})
    assert [chunk.ranges for chunk in left] == [{0: (10, 10), 1: (10, 10)}, {0: (20, 20)}, {0: (20, 30)}]
    # The first is the only one that knows how far partition 1 was archived.
    assert [chunk.number for chunk in redundant_chunks(left)] == [1]
    assert redundant_chunks(left[-1:]) == []


# Doing it.


def test_what_is_expired_is_neither_read_nor_archived_again(stage: Stage) -> None:
    filled(stage)
    expirer = Expirer(stage.origin, "orders")
    expired = expirer.plan(NOW_US - 15 * DAY_US, None)
    removal = expirer.removal(expired)
    assert (removal.messages, removal.files, removal.messages_left) == (30, 3, 10)
    expirer.expire(expired)
    assert stage.files() == stage.named()
    assert len(stage.files()) == 1
    assert stage.copies() == stage.chunks()
    partition_archives = stage.manifest.partition_archives(stage.id)
    assert {
        number: (partition_archive.first, partition_archive.end)
        for number, partition_archive in partition_archives.items()
    } == {0: (20, 30), 1: (10, 10)}
    info = stage.bus.describe_topic("orders")
    with pytest.raises(InvalidArgument, match="ends at 0"):  # it knows what was archived, though the log never had it
        bounds.open_ranges(info, partition_archives, {0: 0, 1: 0})
    stage.archive(0, 30, 5)
    assert [chunk.number for chunk in stage.chunks()] == [2, 3, 4]
    assert (
        stage.manifest.partition_archives(stage.id)[0].first,
        stage.manifest.partition_archives(stage.id)[0].end,
    ) == (20, 40)


class Stopped(Exception):
    """As if the process were killed."""


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("what", ["expire", "delete"])
def test_it_may_be_interrupted_anywhere(stage: Stage, step: int, what: str) -> None:
    filled(stage)
    steps = iter(range(100))

    def stop(_step: str, _files: int) -> None:
        if next(steps) == step:
            raise Stopped

    def do(expirer: Expirer) -> None:
        if what == "delete":
            expirer.delete()
        else:
            expirer.expire(expirer.plan(None, 0))

    with pytest.raises(Stopped):
        do(Expirer(stage.origin, "orders", on_step=stop))
    assert stage.named() == set()  # nothing counts that is perhaps removed
    do(Expirer(stage.origin, "orders"))
    assert stage.files() == set()
    assert stage.copies() == [chunk for chunk in stage.chunks() if chunk.counts]


def test_a_deleted_archive_is_as_if_it_had_never_been(stage: Stage) -> None:
    filled(stage)
    Expirer(stage.origin, "orders").delete()
    assert list(stage.root.iterdir()) == []
    assert [chunk.counts for chunk in stage.chunks()] == [False]
    assert stage.manifest.partition_archives(stage.id) == {}
    with pytest.raises(TopicNotFound):
        archived_chunks(stage.origin, "orders")
    (status,) = archive_status(stage.origin, ["orders"], 0)
    assert (status.messages, status.chunks, status.urls) == (0, 0, [])
    # Numbers are not given again: a copy that was left over could be taken for another's.
    stage.archive(0, 0, 5)
    assert [chunk.number for chunk in stage.chunks() if chunk.counts] == [4]
    assert archived_chunks(stage.origin, "orders")
    stage.bus.delete_topic("orders")
    Expirer(stage.origin, "orders").delete()
    assert stage.chunks() == []
    assert stage.manifest.topic_ids() == []
    with pytest.raises(TopicNotFound, match="headrace archive status"):
        Expirer(stage.origin, "orders")


def test_somebody_who_archives_meanwhile_is_not_in_the_way(stage: Stage) -> None:
    filled(stage)
    expirer = Expirer(stage.origin, "orders")
    expired = expirer.plan(NOW_US - 25 * DAY_US, None)
    stage.archive(1, 10, 1)
    expirer.expire(expired)
    assert stage.files() == stage.named()
    assert len(stage.files()) == 3
    assert stage.copies() == stage.chunks()


def test_files_that_cannot_be_removed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(stage)

    def refuse(_place: Any) -> None:
        raise PermissionError("not allowed")

    with monkeypatch.context() as patched:
        patched.setattr(expirer, "remove_directory", refuse)
        with pytest.raises(HeadraceError, match=r"not allowed\. The manifest no longer lists them; run the command"):
            Expirer(stage.origin, "orders").delete()
    Expirer(stage.origin, "orders").delete()
    assert stage.files() == set()


def test_a_read_that_was_planned_before_is_told(stage: Stage) -> None:
    filled(stage)
    planned = StoredFile(stage.url, stage.chunks()[0].files[0])
    reading = rows_of(StoredFile(stage.url, stage.chunks()[1].files[0]), 0, 100, COLUMNS)
    begun = next(reading)
    Expirer(stage.origin, "orders").delete()
    assert begun.num_rows == COUNT
    assert list(reading) == []  # who has a file open reads it to its end
    with pytest.raises(CorruptFile, match=r"is not there.*expired or deleted after the read was planned"):
        list(rows_of(planned, 0, 100, COLUMNS))
    assert ArchivedSource(stage.origin).topic("orders").spans[0].first == 0


# From the shell.


def test_the_commands(stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.main import main
    from headrace.spark.source import message_source

    filled(stage)
    monkeypatch.setattr(message_source, "BrokerSource", lambda *_: _Lent(stage.bus))
    assert main(["archive", "expire", "orders"]) == 2
    assert "--older-than, --keep-bytes" in capfd.readouterr().err
    assert main(["archive", "expire", "orders", "--older-than", "15d", "--dry-run"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("orders: 30 messages in 3 files, ")
    assert "would be removed; 10 messages, " in said
    assert len(stage.files()) == 4
    assert main(["archive", "expire", "orders", "--older-than", "15d", "--json"]) == 0
    told = msgspec.json.decode(capfd.readouterr().out)
    assert (told["messages"], told["files"], told["messages_left"], told["dry_run"]) == (30, 3, 10, False)
    assert len(stage.files()) == 1
    assert main(["archive", "expire", "orders", "--keep-bytes", "1MB"]) == 0
    assert "0 messages in 0 files" in capfd.readouterr().out
    assert main(["archive", "delete", "orders"]) == 2
    assert "--yes" in capfd.readouterr().err
    assert main(["archive", "delete", "orders", "--dry-run"]) == 0
    assert len(stage.files()) == 1
    assert main(["archive", "delete", "orders", "--yes"]) == 0
    assert capfd.readouterr().out.endswith(" removed; 0 messages, 0 B left\n")
    assert stage.files() == set()
    assert main(["archive", "delete", "nothing", "--yes"]) == 1


class _Lent(BrokerSource):
    """A broker's client that somebody else closes."""

    def __init__(self, bus: headrace.Bus) -> None:
        super().__init__("unused", 1)
        self._connected = bus

    def close(self) -> None:
        """Leave it open."""


# What is refused.


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("headrace.pipelines", {}, "system topic"),
        ("headrace.archive", {"compact_by_key": True}, "system topic"),
        ("acme/headrace.pipelines.progress", {}, "system topic"),
        ("prices", {"compact_by_key": True}, "headrace topic alter prices --no-compact-by-key"),
        ("quotes", {"storage": "memory"}, "in memory"),
    ],
)
def test_topics_that_are_not_archived(tmp_path: Path, name: str, settings: dict[str, Any], why: str) -> None:
    with headrace.open(tmp_path) as bus:
        info = bus.create_topic(name, exist_ok=True, **settings)
        assert why in (bounds.archive_refusal(info) or "")
        mover = archiver.Archiver(None, "headrace://unused", archiver.ArchiveRequest(str(tmp_path / "archive")))  # type: ignore[arg-type]
        mover._source._connected = bus
        assert name not in mover.topics()
        with pytest.raises(InvalidArgument, match=f"{name} cannot be archived: .*{why}"):
            mover.run(name)
        message_source = _Lent(bus)
        listed = [each.topic for each in archive_status(message_source, [], 0)]
        assert (name in listed) == (why != "system topic")


def test_a_topic_with_another_name_is_archived(own_broker: SparkBroker) -> None:
    info = own_broker.bus.create_topic("headraces")
    assert bounds.archive_refusal(info) is None
