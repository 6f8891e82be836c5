"""What is archived and where: entries of a topic of the broker's, which only a finished and checked copy gets into."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.model.batch import Batch
from headrace.model.errors import CorruptFile, TopicNotFound, UnsupportedFormat
from headrace.spark.source.planning import TopicState

MANIFEST_TOPIC = "headrace.archive"
FORMAT = 1


class ArchivedFile(msgspec.Struct, frozen=True):
    """A Parquet file with messages of one partition, in the order of their offsets."""

    path: str
    """Below the chunk's `url`."""
    partition: int
    start: int
    end: int
    """It has all messages from `start` on, before `end`; some offsets may have none."""
    rows: int
    bytes: int
    """Of the file."""
    raw_bytes: int
    """Of its messages, about."""
    time_min_us: int
    time_max_us: int
    checksum: str
    """Over offsets, keys and values."""


class Chunk(msgspec.Struct, frozen=True):
    """What one step of an archiving run has added to a topic's archive: an entry of the manifest."""

    topic: str
    topic_id: int
    broker_id: str
    number: int
    """Counts the chunks of a topic from 0 on."""
    run: str
    """Which attempt made it; no other has that name."""
    url: str
    created_us: int
    ranges: dict[int, tuple[int, int]]
    """Partitions to the offsets that are archived with it: from the first on, before the second."""
    files: tuple[ArchivedFile, ...]
    settings: dict[str, Any] = {}
    """The topic's, for whoever has to make it again."""
    format: int = FORMAT
    revision: int = 0
    """How often files of it have been expired since."""

    @property
    def counts(self) -> bool:
        """Whether it says anything: once an archive is deleted, its last chunk is left to keep the number."""
        return bool(self.ranges or self.files)

    @property
    def rows(self) -> int:
        """How many messages it has."""
        return sum(file.rows for file in self.files)

    @property
    def key(self) -> bytes:
        """Its key in the manifest's topic."""
        return b"%d/%d" % (self.topic_id, self.number)


def next_number(chunks: "Sequence[Chunk]") -> int:
    """The number of a topic's next chunk."""
    return chunks[-1].number + 1 if chunks else 0


class StoredFile(NamedTuple):
    """A file, and where its archive is."""

    url: str
    file: ArchivedFile


class PartitionArchive:
    """The archive of one partition: the stretch without gaps that ends with what was archived last.

    There are gaps where messages were removed before they were archived; what comes before one does not continue.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], files: Iterable[StoredFile]) -> None:
        self.end = ranges[-1][1]
        """All before it is archived."""
        self.first = self.end
        for start, end in reversed(ranges):
            if end < self.first:
                break
            self.first = start
        kept = (one for one in files if one.file.start >= self.first)
        self.files = sorted(kept, key=lambda one: one.file.start)
        self._ends = [one.file.end for one in self.files]

    def covers(self, offset: int) -> bool:
        """Whether a message with that offset, if there is one, is archived."""
        return self.first <= offset < self.end

    def between(self, start: int, end: int) -> tuple[StoredFile, ...]:
        """The files with these offsets, the first and last perhaps with more."""
        found = []
        for one in self.files[bisect_right(self._ends, start) :]:
            if one.file.start >= end:
                break
            found.append(one)
        return tuple(found)

    def bytes_before(self, offset: int) -> int:
        """About how large the messages are that come before."""
        return sum(one.file.raw_bytes for one in self.between(self.first, offset))


class ArchivedTopic(Protocol):
    """What the manifest is read from."""

    def topic(self, name: str) -> TopicState:
        """A topic as it is now; raises TopicNotFound."""

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """The batches with these offsets."""


class Manifest:
    """All entries there are; each `refresh` reads only what has come since."""

    def __init__(self, source: ArchivedTopic) -> None:
        self._source = source
        self._topic_id = 0
        self.next_offset = 0
        """Where the next entry will be."""
        self._entries: dict[int, dict[int, bytes]] = {}
        """Topics' ids to numbers of chunks to what the entries say; not looked into before it is needed."""
        self._shelves: dict[int, Mapping[int, PartitionArchive]] = {}
        self._chunks: dict[int, list[Chunk]] = {}

    def refresh(self) -> None:
        """See what has been archived since."""
        try:
            state = self._source.topic(MANIFEST_TOPIC)
        except TopicNotFound:
            self._forget(0)
            return
        if state.id != self._topic_id:
            self._forget(state.id)
        span = state.spans[0]
        if self.next_offset < span.end:
            for batch in self._source.batches(MANIFEST_TOPIC, 0, max(self.next_offset, span.first), span.end):
                self._take(batch)
            self.next_offset = span.end

    def topic_ids(self) -> list[int]:
        """The ids of all topics that have an archive."""
        return sorted(topic_id for topic_id, entries in self._entries.items() if entries)

    def chunks(self, topic_id: int) -> list[Chunk]:
        """All chunks of a topic, in order."""
        if topic_id not in self._chunks:
            entries = self._entries.get(topic_id, {})
            self._chunks[topic_id] = [chunk_of(entries[number]) for number in sorted(entries)]
        return self._chunks[topic_id]

    def shelves(self, topic_id: int) -> Mapping[int, PartitionArchive]:
        """The archive of each partition of a topic that has one."""
        if topic_id not in self._entries:
            return {}
        if topic_id not in self._shelves:
            self._shelves[topic_id] = shelves_of(self.chunks(topic_id))
        return self._shelves[topic_id]

    def _forget(self, topic_id: int) -> None:
        self._topic_id, self.next_offset = topic_id, 0
        for known in (self._entries, self._shelves, self._chunks):
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
            self._shelves.pop(topic_id, None)
            self._chunks.pop(topic_id, None)


def shelves_of(chunks: Sequence[Chunk]) -> dict[int, PartitionArchive]:
    """The archive of each partition, from the chunks of a topic in their order."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    files: dict[int, list[StoredFile]] = {}
    for chunk in chunks:
        for partition, (start, end) in chunk.ranges.items():
            ranges.setdefault(partition, []).append((start, end))
        for file in chunk.files:
            files.setdefault(file.partition, []).append(StoredFile(chunk.url, file))
    return {partition: PartitionArchive(known, files.get(partition, ())) for partition, known in ranges.items()}


def chunk_of(entry: bytes) -> Chunk:
    """What an entry says."""
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
