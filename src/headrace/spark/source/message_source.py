"""Where messages come from: a broker, or the files of a data directory."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from headrace.client._sync.bus import Bus, connect
from headrace.model.batch import Batch
from headrace.model.errors import CorruptBatch, InvalidArgument, LogNotFound, OffsetOutOfRange, TopicNotFound
from headrace.model.topic import parse_topic
from headrace.spark.archive.archived_source import ArchivedSource
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.planning import OffsetSpan, TopicState
from headrace.storage.offline_reader import OfflineLogReader
from headrace.storage.owner import read_owner
from headrace.storage.runtime import StorageRuntime

_FETCH_BYTES = 4 << 20
_CLIENT = "spark"


class MessageSource(Protocol):
    """A place that has topics."""

    def names(self) -> list[str]:
        """The topics there are."""

    def topic(self, name: str) -> TopicState:
        """A topic as it is now; raises TopicNotFound."""

    def at_time(self, name: str, time_us: int) -> dict[int, int]:
        """For each partition, the offset of the first message of that time or a later one."""

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """The batches with these offsets, the first and last perhaps with more; raises when some are gone."""

    def commit(self, group: str, positions: dict[tuple[str, int], int], /) -> None:
        """Let everybody see how far a reader has come."""

    def close(self) -> None:
        """Let go."""


def open_source(options: SourceOptions) -> MessageSource:
    """The place that the options name."""
    log = FileSource(options.path) if options.path else BrokerSource(options.address, options.timeout)
    return ArchivedSource(log) if options.archive else log


class BrokerSource:
    """A broker, asked through its native protocol; connected when it is first needed."""

    def __init__(self, address: str, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._connected: Bus | None = None

    @property
    def bus(self) -> Bus:
        """The connection."""
        if self._connected is None:
            self._connected = connect(self._address, name=_CLIENT, timeout=self._timeout, wait=self._timeout)
        return self._connected

    def names(self) -> list[str]:
        """The topics there are."""
        return [info.topic for info in self.bus.topics()]

    def topic(self, name: str) -> TopicState:
        """A topic as it is now."""
        info = self.bus.describe_topic(name)
        spans = {one.partition: OffsetSpan(one.first_offset, one.next_offset, one.bytes) for one in info.partitions}
        return TopicState(name, info.id, spans)

    def at_time(self, name: str, time_us: int) -> dict[int, int]:
        """For each partition, the offset of the first message of that time or a later one."""
        return self.bus.offsets(name, time_us)

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """The batches with these offsets."""
        while start < end:
            found = self.bus.fetch(name, partition, start, bytes_max=_FETCH_BYTES)
            if not found:
                return  # nothing before the end is valid any more
            for batch in found:
                if batch.base_offset >= end:
                    return
                start = batch.next_offset
                yield batch

    def commit(self, group: str, positions: dict[tuple[str, int], int], /) -> None:
        """Let everybody see how far a reader has come."""
        self.bus.commit(group, positions)

    def close(self) -> None:
        """End the connection."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None


class _Place(NamedTuple):
    """A topic's partitions on the disk."""

    id: int
    directories: dict[int, str]


class FileSource:
    """The data directory of a broker, or of one embedded log, which need not run."""

    def __init__(self, path: str) -> None:
        self._path = path.removeprefix("file://").rstrip("/")
        self._host = StorageRuntime()
        self._readers: dict[str, OfflineLogReader] = {}

    def names(self) -> list[str]:
        """The topics there are."""
        return sorted(self._places())

    def topic(self, name: str) -> TopicState:
        """A topic as its files are now."""
        place = self._place(name)
        spans = {}
        for number, directory in sorted(place.directories.items()):
            reader = self._reader(directory, anew=True)
            spans[number] = OffsetSpan(reader.first_offset, reader.next_offset, reader.size_bytes)
        return TopicState(name, place.id, spans)

    def at_time(self, name: str, time_us: int) -> dict[int, int]:
        """For each partition, the offset of the first message of that time or a later one."""
        directories = self._place(name).directories
        return {number: self._reader(directory).find_time(time_us) for number, directory in directories.items()}

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """The batches with these offsets."""
        directory = self._place(name).directories.get(partition)
        if directory is None:
            raise OffsetOutOfRange(f"there are no files of partition {partition} of {name}")
        return self._reader(directory).batches(start, until=end)

    def commit(self, group: str, _positions: dict[tuple[str, int], int], /) -> None:
        """Refused: there is nobody to remember it."""
        raise InvalidArgument(f"without a broker nobody keeps positions of the group {group}: leave `group.id` out")

    def close(self) -> None:
        """Let go of the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._host.close()

    def _place(self, name: str) -> _Place:
        place = self._places().get(str(parse_topic(name)))
        if place is None:
            raise TopicNotFound(f"there is no topic {name} in {self._path}")
        return place

    def _places(self) -> dict[str, _Place]:
        """Topics to their partitions; of two topics of one name the newer counts: the other is deleted."""
        if os.path.exists(f"{self._path}/meta"):
            return {os.path.basename(self._path): _Place(0, {0: self._path})}
        places: dict[str, _Place] = {}
        for directory in self._directories():
            owner = read_owner(self._host, directory).owner
            if owner is None:
                continue  # it is just being made or removed, or is none of a broker's
            if owner.topic not in places or places[owner.topic].id < owner.topic_id:
                places[owner.topic] = _Place(owner.topic_id, {})
            if places[owner.topic].id == owner.topic_id:
                places[owner.topic].directories[owner.partition] = directory
        return places

    def _directories(self) -> list[str]:
        """What looks like a partition: topics/ID/NUMBER."""
        root = f"{self._path}/topics"
        try:
            topics = os.listdir(root)
        except OSError as error:
            raise LogNotFound(f"{self._path} is no data directory: {error}") from error
        found = []
        for topic in filter(str.isdecimal, topics):
            with suppress(OSError):  # deleted this moment
                found += [f"{root}/{topic}/{number}" for number in os.listdir(f"{root}/{topic}") if number.isdecimal()]
        return found

    def _reader(self, directory: str, *, anew: bool = False) -> OfflineLogReader:
        if anew and directory in self._readers:
            self._readers.pop(directory).close()
        if directory not in self._readers:
            self._readers[directory] = OfflineLogReader(self._host, directory)
        return self._readers[directory]


def surviving(
    source: MessageSource, name: str, partition: int, start: int, end: int, *, gone_too: bool = True
) -> Iterator[Batch]:
    """The batches with these offsets that are still there: what is damaged is passed over; what is gone too, or not."""
    while start < end:
        try:
            for batch in source.batches(name, partition, start, end):
                yield batch
                start = batch.next_offset
            return
        except CorruptBatch as error:
            start = max(error.next_offset, start + 1)
        except OffsetOutOfRange:
            if not gone_too:
                raise
            first = source.topic(name).spans.get(partition, OffsetSpan(end, end)).first
            if first <= start:
                return
            start = first
        except TopicNotFound:
            return


def chosen_topics(source: MessageSource, options: SourceOptions) -> list[TopicState]:
    """The topics that the options name, as they are now, only with the partitions that they name."""
    if options.pattern:
        states: list[TopicState] = []
        for name in source.names():
            if re.fullmatch(options.pattern, name):
                with suppress(TopicNotFound):  # deleted this moment
                    states.append(source.topic(name))
        return states
    if options.assigned:
        return [_assigned(source.topic(name), numbers) for name, numbers in options.assigned.items()]
    return [source.topic(name) for name in options.topics]


def _assigned(state: TopicState, numbers: Sequence[int]) -> TopicState:
    missing = [number for number in numbers if number not in state.spans]
    if missing:
        raise InvalidArgument(f"{state.name} has no partition {missing[0]}; it has {sorted(state.spans)}")
    return TopicState(state.name, state.id, {number: state.spans[number] for number in numbers})
