"""The manifest: a topic of the broker with an entry for each committed chunk of archived messages."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.model.batch import Batch
from headrace.model.errors import CorruptFile, Forbidden, TopicNotFound, UnsupportedFormat
from headrace.model.system_topics import ARCHIVE_TOPIC
from headrace.model.type_info import build_type_info
from headrace.spark.source.planning import TopicState

MANIFEST_TOPIC = ARCHIVE_TOPIC
FORMAT = 1


class ArchivedFile(msgspec.Struct, frozen=True):
    """A Parquet file with messages of one partition, in the order of their offsets."""

    path: str
    """Relative to the chunk's `url`."""
    partition: int
    start: int
    end: int
    """The file holds all messages from `start` up to but not including `end`; some offsets may have no message."""
    rows: int
    bytes: int
    """Size of the file."""
    raw_bytes: int
    """Estimated size of its messages before compression."""
    time_min_us: int
    time_max_us: int
    checksum: str
    """Checksum over offsets, keys and values."""


class Chunk(msgspec.Struct, frozen=True):
    """An entry of the manifest: the messages that one step of an archiving run has added to a topic's archive."""

    topic: str
    topic_id: int
    broker_id: str
    number: int
    """Counts the chunks of a topic from 0 on."""
    run: str
    """Unique name of the attempt that wrote it."""
    url: str
    created_us: int
    ranges: dict[int, tuple[int, int]]
    """Maps partitions to the archived offsets: first offset and end offset."""
    files: tuple[ArchivedFile, ...]
    settings: dict[str, Any] = {}
    """The topic's settings, for a restore that creates it again."""
    format: int = FORMAT
    revision: int = 0
    """How often files of the chunk have been expired."""

    @property
    def counts(self) -> bool:
        """Whether the chunk has content: after an archive is deleted, an empty last chunk reserves its number."""
        return bool(self.ranges or self.files)

    @property
    def rows(self) -> int:
        """The number of messages in the chunk."""
        return sum(file.rows for file in self.files)

    @property
    def key(self) -> bytes:
        """The key of the entry in the manifest's topic."""
        return b"%d/%d" % (self.topic_id, self.number)


build_type_info(Chunk)


def next_number(chunks: "Sequence[Chunk]") -> int:
    """Return the number of a topic's next chunk."""
    return chunks[-1].number + 1 if chunks else 0


class StoredFile(NamedTuple):
    """A file with the URL of its archive."""

    url: str
    file: ArchivedFile


class PartitionArchive:
    """The archive of one partition: the contiguous range of offsets up to the end of the last chunk.

    Messages that were removed from the log before they were archived leave gaps. Offsets before a gap are left out.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], files: Iterable[StoredFile]) -> None:
        self.end = ranges[-1][1]
        """The end of the archived offsets."""
        self.first = self.end
        for start, end in reversed(ranges):
            if end < self.first:
                break
            self.first = start
        contiguous = (one for one in files if one.file.start >= self.first)
        self.files = sorted(contiguous, key=lambda one: one.file.start)
        self._ends = [one.file.end for one in self.files]

    def covers(self, offset: int) -> bool:
        """Return whether an offset lies in the archived range."""
        return self.first <= offset < self.end

    def between(self, start: int, end: int) -> tuple[StoredFile, ...]:
        """Return the files with these offsets; the first and last may hold more."""
        found = []
        for one in self.files[bisect_right(self._ends, start) :]:
            if one.file.start >= end:
                break
            found.append(one)
        return tuple(found)

    def bytes_before(self, offset: int) -> int:
        """Return the estimated size of the archived messages before an offset."""
        return sum(one.file.raw_bytes for one in self.between(self.first, offset))


class ManifestSource(Protocol):
    """The source that the manifest is read from."""

    def topic(self, name: str) -> TopicState:
        """Return the current state of a topic; raises TopicNotFound."""

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """Yield the batches with these offsets."""


class Manifest:
    """All entries of the manifest; each `refresh` reads only new ones."""

    def __init__(self, source: ManifestSource) -> None:
        self._source = source
        self._topic_id = 0
        self.next_offset = 0
        """The offset of the next entry."""
        self._entries: dict[int, dict[int, bytes]] = {}
        """Maps topic ids to chunk numbers to encoded entries, which are decoded when they are needed."""
        self._partition_archives: dict[int, Mapping[int, PartitionArchive]] = {}
        self._chunks: dict[int, list[Chunk]] = {}

    def refresh(self) -> None:
        """Read the entries that are new since the last refresh."""
        try:
            state = self._source.topic(MANIFEST_TOPIC)
        except TopicNotFound:
            self._forget(0)
            return
        except Forbidden as error:  # not the same as no archive: messages would be missing without a word
            raise Forbidden(
                f"{error}, where archived messages are listed: an administrator can grant it "
                f"(consume:topic:{MANIFEST_TOPIC}), or read without archived messages (option archive=false)"
            ) from error
        if state.id != self._topic_id:
            self._forget(state.id)
        span = state.spans[0]
        if self.next_offset < span.end:
            for batch in self._source.batches(MANIFEST_TOPIC, 0, max(self.next_offset, span.first), span.end):
                self._take(batch)
            self.next_offset = span.end

    def topic_ids(self) -> list[int]:
        """Return the ids of all topics that have an archive."""
        return sorted(topic_id for topic_id, entries in self._entries.items() if entries)

    def chunks(self, topic_id: int) -> list[Chunk]:
        """Return all chunks of a topic, in order."""
        if topic_id not in self._chunks:
            entries = self._entries.get(topic_id, {})
            self._chunks[topic_id] = [chunk_of(entries[number]) for number in sorted(entries)]
        return self._chunks[topic_id]

    def partition_archives(self, topic_id: int) -> Mapping[int, PartitionArchive]:
        """Return the archive of each partition of a topic that has one."""
        if topic_id not in self._entries:
            return {}
        if topic_id not in self._partition_archives:
            self._partition_archives[topic_id] = partition_archives_of(self.chunks(topic_id))
        return self._partition_archives[topic_id]

    def _forget(self, topic_id: int) -> None:
        self._topic_id, self.next_offset = topic_id, 0
        for known in (self._entries, self._partition_archives, self._chunks):
            known.clear()

    def _take(self, batch: Batch) -> None:
        for message in batch.messages():
            if message.offset < self.next_offset or message.key is None:
                continue
            topic_id, number = _key(message.key)
            entries = self._entries.setdefault(topic_id, {})
            if message.value is None:
                entries.pop(number, None)
            else:
                entries[number] = message.value
            self._partition_archives.pop(topic_id, None)
            self._chunks.pop(topic_id, None)


def partition_archives_of(chunks: Sequence[Chunk]) -> dict[int, PartitionArchive]:
    """Return the archive of each partition, from the ordered chunks of a topic."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    files: dict[int, list[StoredFile]] = {}
    for chunk in chunks:
        for partition, (start, end) in chunk.ranges.items():
            ranges.setdefault(partition, []).append((start, end))
        for file in chunk.files:
            files.setdefault(file.partition, []).append(StoredFile(chunk.url, file))
    return {partition: PartitionArchive(known, files.get(partition, ())) for partition, known in ranges.items()}


def chunk_of(entry: bytes) -> Chunk:
    """Decode an entry; raises CorruptFile or UnsupportedFormat."""
    try:
        plain = msgspec.json.decode(entry)
        if isinstance(plain, dict) and plain.get("format", FORMAT) > FORMAT:
            raise UnsupportedFormat(f"the archive was written by a newer Headrace, in format {plain['format']}")
        return msgspec.convert(plain, Chunk, strict=False)
    except (msgspec.DecodeError, TypeError) as error:
        raise CorruptFile(f"an entry of the archive's manifest ({MANIFEST_TOPIC}) makes no sense: {error}") from error


def _key(key: bytes) -> tuple[int, int]:
    topic_id, _, number = key.partition(b"/")
    if not topic_id.isdigit() or not number.isdigit():
        raise CorruptFile(f"the archive's manifest ({MANIFEST_TOPIC}) has a key that makes no sense: {key!r}")
    return int(topic_id), int(number)
