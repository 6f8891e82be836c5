"""Reads a topic's archive and log as one source: the archive supplies the offsets before the start of the log."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from headrace.model.batch import FLAG_COMPACTED, Batch, encode, gap
from headrace.model.errors import OffsetOutOfRange
from headrace.spark.archive.manifest import MANIFEST_TOPIC, Manifest, PartitionArchive, StoredFile
from headrace.spark.source.planning import OffsetSpan, Range, TopicState

if TYPE_CHECKING:
    from headrace.spark.source.message_source import MessageSource


class ArchivedRange(NamedTuple):
    """The archived part of a range that a task reads, as of the planning of the read."""

    topic_id: int
    log_first: int
    """Offsets from here on are in the log."""
    files: tuple[StoredFile, ...] = ()
    """The archived files with the offsets before `log_first`."""


class ArchivedContinuation(NamedTuple):
    """Archived messages that have been removed from the log."""

    end: int
    """The archived messages end before this offset."""
    files: tuple[StoredFile, ...]


class ArchivedSource:
    """A message source whose topics include their archived messages."""

    def __init__(self, log: "MessageSource") -> None:
        self.log = log
        """The source without the archive."""
        self.manifest = Manifest(log)
        self._states: dict[str, TopicState] = {}

    def names(self) -> list[str]:
        """Return the names of all topics but the manifest's, which no pattern may match."""
        return [name for name in self.log.names() if name != MANIFEST_TOPIC]

    def topic(self, name: str) -> TopicState:
        """Return the current state of a topic, with partitions that begin where their archives do."""
        # Read the log's state before the manifest: messages are in the manifest before the log drops them.
        return self._with_archive(self.log.topic(name))

    def caught_up(self, name: str, offsets: Mapping[int, int]) -> TopicState:
        """Return the state of a topic when its partitions reach to these offsets, as they did; or after a while."""
        return self._with_archive(self.log.caught_up(name, offsets))

    def _with_archive(self, state: TopicState) -> TopicState:
        self._states[state.name] = state
        self.manifest.refresh()
        partition_archives = self.manifest.partition_archives(state.id)
        spans = {number: _extended(span, partition_archives.get(number)) for number, span in state.spans.items()}
        return TopicState(state.name, state.id, spans)

    def at_time(self, name: str, time_us: int) -> dict[int, int]:
        """Return for each partition the offset of the first message at or after a time."""
        found = self.log.at_time(name, time_us)
        whole = self.topic(name)
        for number, span in self._states[name].spans.items():
            if whole.spans[number].first < span.first:
                archived = self._at_time(whole.id, number, span.first, time_us)
                found[number] = found[number] if archived is None else archived
        return found

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """Yield the batches with these offsets, from the log or from the archive."""
        archived = False
        while start < end:
            try:
                for batch in self.log.batches(name, partition, start, end):
                    yield _cut(batch, start) if archived else batch
                    start = batch.next_offset
                return
            except OffsetOutOfRange:
                state = self.log.topic(name)
                more = self.find_continuation(Range(name, partition, start, end), state.id)
                if more is None:
                    raise
                from headrace.spark.archive.query_rows import batches_of

                yield from batches_of(more.files, start, more.end)
                start, archived = more.end, True

    def commit(self, group: str, positions: dict[tuple[str, int], int]) -> None:
        """Commit the positions of a reader as a group, for monitoring."""
        self.log.commit(group, positions)

    def close(self) -> None:
        """Close the source."""
        self.log.close()

    def archived_range(self, wanted: Range) -> ArchivedRange | None:
        """Return the archived part of a range, as of the last call of `topic`; None if the topic is unknown."""
        state = self._states.get(wanted.topic)
        if state is None or wanted.partition not in state.spans:
            return None
        first = state.spans[wanted.partition].first
        partition_archive = self.manifest.partition_archives(state.id).get(wanted.partition)
        if (
            partition_archive is None
            or wanted.start >= first
            or not partition_archive.first <= first <= partition_archive.end
        ):
            return ArchivedRange(state.id, wanted.start)
        return ArchivedRange(state.id, first, partition_archive.between(wanted.start, min(first, wanted.end)))

    def find_continuation(self, wanted: Range, topic_id: int) -> ArchivedContinuation | None:
        """Refresh the manifest and return the archived part of a range whose first messages are not in the log."""
        self.manifest.refresh()
        partition_archive = self.manifest.partition_archives(topic_id).get(wanted.partition)
        if partition_archive is None or not partition_archive.covers(wanted.start):
            return None
        end = min(partition_archive.end, wanted.end)
        return ArchivedContinuation(end, partition_archive.between(wanted.start, end))

    def _at_time(self, topic_id: int, partition: int, before: int, time_us: int) -> int | None:
        """Return the offset of the first archived message at or after a time, if it is before the given offset."""
        from headrace.spark.archive.parquet import find_time

        partition_archive = self.manifest.partition_archives(topic_id)[partition]
        for stored in partition_archive.between(partition_archive.first, before):
            if stored.file.time_max_us >= time_us:
                offset = find_time(stored, time_us)
                if offset is not None:
                    return offset if offset < before else None
        return None


def _cut(batch: Batch, start: int) -> Batch:
    """Return a batch without the messages before an offset, which were read from the archive."""
    if batch.base_offset >= start or not batch.count:
        return batch
    columns = batch.columns()
    places = batch.places(columns)
    left = [index for index, place in enumerate(places) if batch.base_offset + place >= start]
    if left:
        cut = encode(columns.picked(left, places), batch.time_max, span=batch.span)
    else:
        cut = gap(batch.span, FLAG_COMPACTED, batch.time_max)
    cut.place(batch.base_offset, batch.append_time, batch.log_id)
    return cut


def _extended(span: OffsetSpan, partition_archive: PartitionArchive | None) -> OffsetSpan:
    if partition_archive is None or not partition_archive.first < span.first <= partition_archive.end:
        return span
    return OffsetSpan(partition_archive.first, span.end, span.bytes + partition_archive.bytes_before(span.first))
