"""A topic's archive and its log as one: where the log begins later, the archive has what came before."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from headrace.model.batch import FLAG_COMPACTED, Batch, encode, gap
from headrace.model.errors import OffsetOutOfRange
from headrace.spark.archive.manifest import MANIFEST_TOPIC, Manifest, PartitionArchive, StoredFile
from headrace.spark.source.planning import OffsetSpan, Range, TopicState

if TYPE_CHECKING:
    from headrace.spark.source.message_source import MessageSource


class Shelved(NamedTuple):
    """What a task has to know of a topic's archive, as it was when the read was planned."""

    topic_id: int
    log_first: int
    """The log has what comes from here on."""
    files: tuple[StoredFile, ...] = ()
    """The archive's, with what comes before."""


class Continued(NamedTuple):
    """Archived messages that the log does not have any more."""

    end: int
    """Up to here the archive has them."""
    files: tuple[StoredFile, ...]


class ArchivedSource:
    """A place that has topics, each with what is archived of it."""

    def __init__(self, log: "MessageSource") -> None:
        self.log = log
        """Without the archive."""
        self.manifest = Manifest(log)
        self._states: dict[str, TopicState] = {}

    def names(self) -> list[str]:
        """The topics there are; that of the archive itself is none to be found by a pattern."""
        return [name for name in self.log.names() if name != MANIFEST_TOPIC]

    def topic(self, name: str) -> TopicState:
        """A topic as it is now, its partitions beginning where the archive does."""
        # First the log: what it does not have any more was in the manifest before that.
        state = self._states[name] = self.log.topic(name)
        self.manifest.refresh()
        shelves = self.manifest.shelves(state.id)
        spans = {number: _extended(span, shelves.get(number)) for number, span in state.spans.items()}
        return TopicState(state.name, state.id, spans)

    def at_time(self, name: str, time_us: int) -> dict[int, int]:
        """For each partition, the offset of the first message of that time or a later one."""
        found = self.log.at_time(name, time_us)
        whole = self.topic(name)
        for number, span in self._states[name].spans.items():
            if whole.spans[number].first < span.first:
                archived = self._at_time(whole.id, number, span.first, time_us)
                found[number] = found[number] if archived is None else archived
        return found

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """The batches with these offsets, from wherever they are."""
        archived = False
        while start < end:
            try:
                for batch in self.log.batches(name, partition, start, end):
                    yield _cut(batch, start) if archived else batch
                    start = batch.next_offset
                return
            except OffsetOutOfRange:
                state = self.log.topic(name)
                more = self.continued(Range(name, partition, start, end), state.id)
                if more is None:
                    raise
                from headrace.spark.archive.query_rows import batches_of

                yield from batches_of(more.files, start, more.end)
                start, archived = more.end, True

    def commit(self, group: str, positions: dict[tuple[str, int], int]) -> None:
        """Let everybody see how far a reader has come."""
        self.log.commit(group, positions)

    def close(self) -> None:
        """Let go."""
        self.log.close()

    def shelved(self, wanted: Range) -> Shelved | None:
        """What a task that reads a range has to know, as of the last look at the topic."""
        state = self._states.get(wanted.topic)
        if state is None or wanted.partition not in state.spans:
            return None
        first = state.spans[wanted.partition].first
        shelf = self.manifest.shelves(state.id).get(wanted.partition)
        if shelf is None or wanted.start >= first or not shelf.first <= first <= shelf.end:
            return Shelved(state.id, wanted.start)
        return Shelved(state.id, first, shelf.between(wanted.start, min(first, wanted.end)))

    def continued(self, wanted: Range, topic_id: int) -> Continued | None:
        """The archive's part of a range whose first messages are not in the log, by the manifest as it is now."""
        self.manifest.refresh()
        shelf = self.manifest.shelves(topic_id).get(wanted.partition)
        if shelf is None or not shelf.covers(wanted.start):
            return None
        end = min(shelf.end, wanted.end)
        return Continued(end, shelf.between(wanted.start, end))

    def _at_time(self, topic_id: int, partition: int, before: int, time_us: int) -> int | None:
        """The first archived message before an offset that has this time or a later one."""
        from headrace.spark.archive.parquet import find_time

        shelf = self.manifest.shelves(topic_id)[partition]
        for stored in shelf.between(shelf.first, before):
            if stored.file.time_max_us >= time_us:
                offset = find_time(stored, time_us)
                if offset is not None:
                    return offset if offset < before else None
        return None


def _cut(batch: Batch, start: int) -> Batch:
    """A batch without the messages before an offset, which the archive had."""
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


def _extended(span: OffsetSpan, shelf: PartitionArchive | None) -> OffsetSpan:
    if shelf is None or not shelf.first < span.first <= shelf.end:
        return span
    return OffsetSpan(shelf.first, span.end, span.bytes + shelf.bytes_before(span.first))
