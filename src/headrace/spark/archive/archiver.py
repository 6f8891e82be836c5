"""An archiving run: copies a topic's old messages, verifies the copy, commits it, and only then trims the log."""

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pyspark.sql import SparkSession

from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.requests import TopicInfo
from headrace.spark.archive.bounds import (
    Piece,
    archive_refusal,
    bound_us,
    checked_age,
    chunk_ranges,
    day_cuts,
    may_have_gaps,
    open_ranges,
    pieces,
)
from headrace.spark.archive.commit import (
    ArchiveConflict,
    check_continues,
    check_files,
    checked_url,
    commit,
    make_manifest_topic,
    remove_attempt,
    remove_leftovers,
    run_name,
    write_copies,
)
from headrace.spark.archive.copier import Copier
from headrace.spark.archive.manifest import Chunk, Manifest, next_number
from headrace.spark.archive.paths import archive_url, topic_folder
from headrace.spark.archive.tasks import LogReadSettings
from headrace.spark.source.message_source import BrokerSource

logger = logging.getLogger("headrace.spark")

OnStep = Callable[[str, str], None]
"""Called after each step with the name of the step and of the topic."""


@dataclass
class ArchiveResult:
    """The result of archiving a topic."""

    topic: str
    messages: int = 0
    files: int = 0
    bytes: int = 0
    archived_to: dict[int, int] = field(default_factory=dict)
    dropped: int = 0
    """Number of offsets that the run has trimmed from the log."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ArchiveRequest:
    """The settings of an archiving run."""

    url: str
    older_than_s: float = 7 * 86400.0
    keep: bool = False
    """Whether archived messages stay in the log."""
    skip_damaged: bool = False
    timeout: float = 60.0


class Archiver:
    """Archives topics of a broker, with a Spark session."""

    def __init__(
        self, spark: SparkSession, address: str, request: ArchiveRequest, on_step: OnStep = lambda _step, _topic: None
    ) -> None:
        self._spark = spark
        self._address = address
        self._request = request
        self._url = archive_url(request.url)
        self._source = BrokerSource(address, request.timeout)
        self._manifest = Manifest(self._source)
        self._on_step = on_step
        self._token = secrets.token_hex(4)
        self._broker_id = ""

    def __enter__(self) -> "Archiver":
        checked_url(self._url)
        make_manifest_topic(self._source.bus)
        self._broker_id = self._source.bus.info().broker_id
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def topics(self) -> list[str]:
        """Return the names of all topics that can be archived."""
        found = self._source.bus.topics()
        return [info.topic for info in found if archive_refusal(info) is None]

    def run(self, topic: str) -> ArchiveResult:
        """Archive a topic's old messages, then trim them from the log unless the request says `keep`."""
        bus = self._source.bus
        info = bus.describe_topic(topic)
        reason = archive_refusal(info)
        if reason is not None:
            raise InvalidArgument(f"{info.topic} cannot be archived: {reason}")
        outcome = ArchiveResult(info.topic)
        before_us = bound_us(checked_age(info, self._request.older_than_s))
        bounds = bus.offsets(topic, before_us)
        folder = topic_folder(info.topic, self._broker_id, info.id)
        while True:
            self._manifest.refresh()
            partition_archives = self._manifest.partition_archives(info.id)
            ranges = open_ranges(info, partition_archives, bounds)
            self._note_gaps(outcome, info, ranges)
            if not ranges:
                break
            try:
                self._archive(info, folder, chunk_ranges(info, ranges), before_us, outcome)
            except ArchiveConflict as error:
                outcome.notes.append(str(error))
            info = self._same(info)
        chunks = self._manifest.chunks(info.id)
        outcome.archived_to = {
            number: partition_archive.end
            for number, partition_archive in self._manifest.partition_archives(info.id).items()
        }
        write_copies([chunk for chunk in chunks if chunk.url == self._url])
        self._on_step("copied", info.topic)
        if chunks and not self._request.keep:
            outcome.dropped = self._drop(info, chunks, outcome)
        with suppress(OSError):  # the next run removes them
            remove_leftovers(self._url, folder, chunks)
        return outcome

    def _archive(
        self, info: TopicInfo, folder: str, ranges: dict[int, tuple[int, int]], before_us: int, outcome: ArchiveResult
    ) -> None:
        """Archive one chunk."""
        begun = datetime.now(UTC)
        number = next_number(self._manifest.chunks(info.id))
        run = f"{run_name(begun, self._token)}-{number}"
        log = LogReadSettings(self._address, self._request.timeout, may_have_gaps(info), self._request.skip_damaged)
        copier = Copier(self._spark, log, self._url, folder, run)
        try:
            chosen = self._pieces(info, ranges, before_us)
            self._on_step("planned", info.topic)
            written = copier.write(chosen)
            self._on_step("written", info.topic)
            files = copier.checked(chosen, written)
            self._on_step("checked", info.topic)
        except BaseException as error:
            with suppress(OSError):
                remove_attempt(self._url, copier.directory)
            if isinstance(error, HeadraceError):
                # A concurrent run may have archived these messages and trimmed the log under this run.
                self._manifest.refresh()
                check_continues(info.topic, ranges, number, self._manifest.chunks(info.id))
            raise
        chunk = Chunk(
            topic=info.topic,
            topic_id=info.id,
            broker_id=self._broker_id,
            number=number,
            run=run,
            url=self._url,
            created_us=time.time_ns() // 1000,
            ranges=ranges,
            files=tuple(files),
            settings=info.settings,
        )
        try:
            commit(self._source.bus, self._manifest, chunk, begun)
        except ArchiveConflict:
            remove_attempt(self._url, copier.directory)
            raise
        self._on_step("committed", info.topic)
        outcome.messages += chunk.rows
        outcome.files += len(files)
        outcome.bytes += sum(file.bytes for file in files)

    def _pieces(self, info: TopicInfo, ranges: dict[int, tuple[int, int]], before_us: int) -> list[Piece]:
        """Divide the ranges into pieces, one file each."""
        bus = self._source.bus
        times = []
        for partition, (start, _) in ranges.items():
            found = bus.fetch(info.topic, partition, start, bytes_max=1)
            times += [batch.time_min for batch in found[:1]]
        cuts = day_cuts(ranges, lambda at_us: bus.offsets(info.topic, at_us), min(times, default=0), before_us)
        return pieces(info, ranges, cuts)

    def _same(self, info: TopicInfo) -> TopicInfo:
        """Return the topic's current state; raises InvalidArgument if it was deleted and created again."""
        now = self._source.bus.describe_topic(info.topic)
        if now.id != info.id:
            raise InvalidArgument(f"the topic {info.topic} was deleted and made again while it was being archived")
        return now

    def _note_gaps(self, outcome: ArchiveResult, info: TopicInfo, ranges: dict[int, tuple[int, int]]) -> None:
        partition_archives = self._manifest.partition_archives(info.id)
        for number, (start, _) in ranges.items():
            if number in partition_archives and partition_archives[number].end < start:
                outcome.notes.append(
                    f"{info.topic}[{number}]: offsets {partition_archives[number].end} to {start - 1} were removed "
                    "from the log before they were archived"
                )

    def _drop(self, info: TopicInfo, chunks: list[Chunk], outcome: ArchiveResult) -> int:
        """Trim archived messages that nobody has still to read from the log; returns the number of offsets."""
        before = {each.partition: each.first_offset for each in self._same(info).partitions}
        targets = {number: end for number, end in outcome.archived_to.items() if before.get(number, end) < end}
        if not targets:
            return 0
        check_files(chunks, before)
        first = self._source.bus.trim_topic(info.topic, targets, topic_id=info.id)
        self._on_step("dropped", info.topic)
        held = [number for number, end in targets.items() if first[number] < end]
        if held:
            outcome.notes.append(
                f"{info.topic}: what groups or leased subscriptions have still to read stays in the log, too"
            )
        return sum(max(first[number] - before[number], 0) for number in first)
