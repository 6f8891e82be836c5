"""Sources of messages: a broker, or the files of a data directory."""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from headrace.client._sync.bus import Bus
from headrace.client._sync.connecting import connect
from headrace.model.batch import Batch
from headrace.model.errors import CorruptBatch, InvalidArgument, LogNotFound, OffsetOutOfRange, TopicNotFound
from headrace.model.middleware import may_deliver
from headrace.model.topic import parse_topic
from headrace.spark.archive.archived_source import ArchivedSource
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.planning import OffsetSpan, TopicState
from headrace.storage.offline_reader import OfflineLogReader
from headrace.storage.owner import read_owner
from headrace.storage.runtime import StorageRuntime

_FETCH_BYTES = 4 << 20
_CLIENT = "spark"
_STALE_S = 15.0
"""How long to wait for offsets that a cluster had, and a node lacks: one that another has replaced while it was paused
or cut off serves an earlier state for some seconds, until it finds out."""
_LOOK_AGAIN_S = 0.1


class MessageSource(Protocol):
    """A source of the messages of topics."""

    def names(self) -> list[str]:
        """Return the names of all topics."""

    def topic(self, name: str) -> TopicState:
        """Return the current state of a topic; raises TopicNotFound."""

    def caught_up(self, name: str, offsets: Mapping[int, int]) -> TopicState:
        """Return the state of a topic when its partitions reach to these offsets, as they did; or after a while."""

    def at_time(self, name: str, time_us: int) -> dict[int, int]:
        """Return for each partition the offset of the first message at or after a time."""

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """Yield the batches with these offsets; the first and last may hold more. Raises if some were removed."""

    def commit(self, group: str, positions: dict[tuple[str, int], int], /) -> None:
        """Commit the positions of a reader as a group, for monitoring."""

    def close(self) -> None:
        """Close the source."""


def open_source(options: SourceOptions) -> MessageSource:
    """Open the source that the options name."""
    log = FileSource(options.path) if options.path else BrokerSource(options.address, options.timeout, options.token)
    return ArchivedSource(log) if options.archive else log


class BrokerSource:
    """A broker, reached by the native protocol; connects on first use."""

    def __init__(self, address: str, timeout: float, token: str = "") -> None:
        self._address = address
        self._timeout = timeout
        self._token = token
        self._connected: Bus | None = None

    @property
    def bus(self) -> Bus:
        """The connection."""
        if self._connected is None:
            self._connected = connect(
                self._address, name=_CLIENT, timeout=self._timeout, wait=self._timeout, token=self._token or None
            )
        return self._connected

    def names(self) -> list[str]:
        """Return the names of all topics."""
        return [info.topic for info in self.bus.topics()]

    def topic(self, name: str) -> TopicState:
        """Return the current state of a topic."""
        info = self.bus.describe_topic(name)
        spans = {one.partition: OffsetSpan(one.first_offset, one.next_offset, one.bytes) for one in info.partitions}
        return TopicState(name, info.id, spans)

    def caught_up(self, name: str, offsets: Mapping[int, int]) -> TopicState:
        """Return the state of a topic; in a cluster when its partitions reach to these offsets, or after a while."""
        deadline = time.monotonic() + min(self._timeout, _STALE_S)
        while True:
            state = self.topic(name)
            is_behind = any(number in state.spans and state.spans[number].end < at for number, at in offsets.items())
            if not is_behind or not self.bus._broker.is_cluster or time.monotonic() >= deadline:
                return state
            time.sleep(_LOOK_AGAIN_S)

    def at_time(self, name: str, time_us: int) -> dict[int, int]:
        """Return for each partition the offset of the first message at or after a time."""
        return self.bus.offsets(name, time_us)

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """Yield the batches with these offsets."""
        while start < end:
            found = self._fetched(name, partition, start, end)
            if not found:
                return  # all messages up to the end have expired
            for batch in found:
                if batch.base_offset >= end:
                    return
                start = batch.next_offset
                yield batch

    def _fetched(self, name: str, partition: int, start: int, end: int) -> list[Batch]:
        """Fetch the next batches of a range that was planned; none if all messages up to its end have expired."""
        try:
            if found := self.bus.fetch(name, partition, start, bytes_max=_FETCH_BYTES):
                return found
        except OffsetOutOfRange:
            if not self.bus._broker.is_cluster:
                raise
        last = self.caught_up(name, {partition: end}).spans.get(partition, OffsetSpan(0, 0)).end
        if last < end:
            raise OffsetOutOfRange(f"{name}[{partition}] ends at offset {last}, and had {end} when this was planned")
        return self.bus.fetch(name, partition, start, bytes_max=_FETCH_BYTES)

    def commit(self, group: str, positions: dict[tuple[str, int], int], /) -> None:
        """Commit the positions of a reader as a group, for monitoring."""
        self.bus.commit(group, positions)

    def close(self) -> None:
        """Close the connection."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None


class _TopicDirectories(NamedTuple):
    """The directories of a topic's partitions."""

    id: int
    directories: dict[int, str]
    changed: set[int]
    """Partitions whose files have other contents than the broker delivers."""


class FileSource:
    """The data directory of a broker, running or not, or of an embedded log."""

    def __init__(self, path: str) -> None:
        self._path = path.removeprefix("file://").rstrip("/")
        self._runtime = StorageRuntime()
        self._readers: dict[str, OfflineLogReader] = {}

    def names(self) -> list[str]:
        """Return the names of all topics."""
        return sorted(self._topic_directories())

    def topic(self, name: str) -> TopicState:
        """Return the state of a topic from its files."""
        topic = self._find_topic(name)
        spans = {}
        for number, directory in sorted(topic.directories.items()):
            reader = self._reader(directory, anew=True)
            spans[number] = OffsetSpan(reader.first_offset, reader.next_offset, reader.size_bytes)
        return TopicState(name, topic.id, spans)

    def caught_up(self, name: str, offsets: Mapping[int, int]) -> TopicState:  # noqa: ARG002
        """Return the state of a topic: files have only one."""
        return self.topic(name)

    def at_time(self, name: str, time_us: int) -> dict[int, int]:
        """Return for each partition the offset of the first message at or after a time."""
        directories = self._find_topic(name).directories
        return {number: self._reader(directory).find_time(time_us) for number, directory in directories.items()}

    def batches(self, name: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        """Yield the batches with these offsets."""
        directory = self._find_topic(name).directories.get(partition)
        if directory is None:
            raise OffsetOutOfRange(f"there are no files of partition {partition} of {name}")
        return self._reader(directory).batches(start, until=end)

    def commit(self, group: str, _positions: dict[tuple[str, int], int], /) -> None:
        """Refuse: only a broker stores positions."""
        raise InvalidArgument(
            f"without a broker, positions of the group {group} cannot be stored: leave `group.id` out"
        )

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._runtime.close()

    def _find_topic(self, name: str) -> _TopicDirectories:
        topic = self._topic_directories().get(str(parse_topic(name)))
        if topic is None:
            raise TopicNotFound(
                f"there is no topic {name} in {self._path}; a virtual topic (view) has no files: read it "
                "through the broker"
            )
        if topic.changed:
            raise InvalidArgument(
                f"the topic {name} has middleware that may change what is delivered, so its files cannot be read "
                "directly: leave the option path out, and give the broker's address"
            )
        return topic

    def _topic_directories(self) -> dict[str, _TopicDirectories]:
        """Map topics to their partitions; of two topics of one name the newer wins, as the older is deleted."""
        if os.path.exists(f"{self._path}/meta"):
            return {os.path.basename(self._path): _TopicDirectories(0, {0: self._path}, set())}
        found: dict[str, _TopicDirectories] = {}
        for directory in self._directories():
            owner = read_owner(self._runtime, directory).owner
            if owner is None:
                continue  # it is being created or removed, or belongs to no broker
            if owner.topic not in found or found[owner.topic].id < owner.topic_id:
                found[owner.topic] = _TopicDirectories(owner.topic_id, {}, set())
            if found[owner.topic].id == owner.topic_id:
                found[owner.topic].directories[owner.partition] = directory
                if may_deliver(owner.settings.get("middleware") or ()):
                    found[owner.topic].changed.add(owner.partition)
        return found

    def _directories(self) -> list[str]:
        """Return the partition directories, topics/ID/NUMBER."""
        root = f"{self._path}/topics"
        try:
            topics = os.listdir(root)
        except OSError as error:
            raise LogNotFound(f"{self._path} is no data directory: {error}") from error
        found = []
        for topic in filter(str.isdecimal, topics):
            with suppress(OSError):  # it was deleted meanwhile
                found += [f"{root}/{topic}/{number}" for number in os.listdir(f"{root}/{topic}") if number.isdecimal()]
        return found

    def _reader(self, directory: str, *, anew: bool = False) -> OfflineLogReader:
        if anew and directory in self._readers:
            self._readers.pop(directory).close()
        if directory not in self._readers:
            self._readers[directory] = OfflineLogReader(self._runtime, directory)
        return self._readers[directory]


def readable_batches(
    source: MessageSource, name: str, partition: int, start: int, end: int, *, skip_removed: bool = True
) -> Iterator[Batch]:
    """Yield the readable batches with these offsets: skips damaged ones and, with `skip_removed`, removed ones."""
    while start < end:
        try:
            for batch in source.batches(name, partition, start, end):
                yield batch
                start = batch.next_offset
            return
        except CorruptBatch as error:
            start = max(error.next_offset, start + 1)
        except OffsetOutOfRange:
            if not skip_removed:
                raise
            first = source.topic(name).spans.get(partition, OffsetSpan(end, end)).first
            if first <= start:
                return
            start = first
        except TopicNotFound:
            return


def chosen_topics(source: MessageSource, options: SourceOptions) -> list[TopicState]:
    """Return the current state of the topics that the options name, limited to the partitions that they name."""
    if options.pattern:
        states: list[TopicState] = []
        for name in source.names():
            if re.fullmatch(options.pattern, name):
                with suppress(TopicNotFound):  # it was deleted meanwhile
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
