"""The registry of pipelines: reads their records from a topic, and changes them with optimistic concurrency."""

import time
from collections.abc import Callable, Iterator

import msgspec

from headrace.client._sync.bus import Bus
from headrace.client.results import Received, ReceivedBatch
from headrace.model.errors import OffsetOutOfRange, UnexpectedOffset
from headrace.spark.errors import PipelineNotFound
from headrace.spark.pipelines.progress import QueryProgress
from headrace.spark.pipelines.records import (
    PROGRESS_KEPT_S,
    PROGRESS_TOPIC,
    TOPIC,
    PipelineRecord,
    decoded,
    encoded,
)

_FETCH_BYTES = 4 << 20
_ATTEMPTS = 100
_AGAIN_S = 0.01
_LOOKED_BACK = (500, 20_000)
"""How many messages of the progress topic are read from its end, in a first and a second attempt."""

Change = Callable[[PipelineRecord | None], PipelineRecord | None]
"""Returns the new record; None for no change."""
_progress_decoder = msgspec.json.Decoder(QueryProgress)


class Registry:
    """The records of a broker's pipelines."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._offset = 0
        self._offsets: dict[str, int] = {}
        """Offsets of the records in the topic."""
        self.records: dict[str, PipelineRecord] = {}
        """Records by name, as of the last read."""
        self.removed: set[str] = set()
        """Names with a tombstone in the topic; other missing records were lost."""

    def prepare(self) -> None:
        """Create the topics, if they do not exist."""
        self._bus.create_topic(TOPIC, exist_ok=True, partitions=1, compact_by_key=True)
        self._bus.create_topic(
            PROGRESS_TOPIC, exist_ok=True, partitions=1, retain_seconds=PROGRESS_KEPT_S, durability="written"
        )

    def exists(self) -> bool:
        """Return whether the registry's topic exists, without creating it."""
        return bool(self._bus.topics(TOPIC))

    def look(self, wait: float = 0.0) -> bool:
        """Read new records, waiting for them if `wait` says so; returns whether there were any."""
        before = self._offset
        try:
            self._read(wait)
        except OffsetOutOfRange:  # the log was trimmed, the topic is another one, or the broker has lost its end
            self._read_again()
            return True
        return self._offset > before

    def check_kept(self) -> bool:
        """Return whether the topic still holds every known record; if not, read the topic again.

        A reader at the end of the log does not notice that earlier records were trimmed.
        """
        first = self._bus.offsets(TOPIC, at="earliest")[0]
        if all(offset >= first for offset in self._offsets.values()):
            return True
        self._read_again()
        return False

    def get(self, name: str) -> PipelineRecord:
        """Return a pipeline's record, as of the last read; raises PipelineNotFound."""
        if name not in self.records:
            raise PipelineNotFound(f"the broker knows no pipeline {name!r}")
        return self.records[name]

    def change(self, name: str, change: Change) -> PipelineRecord | None:
        """Change the current record, retrying on conflicts; returns the resulting record.

        `change` may be called more than once, must not modify its argument, and returns None for no change.
        """
        for _ in range(_ATTEMPTS):
            self.look()
            new = change(self.records.get(name))
            if new is None:
                return self.records.get(name)
            if self._publish(name, encoded(new)):
                return new
        raise UnexpectedOffset(f"others have changed {TOPIC} {_ATTEMPTS} times in a row; try again")

    def remove(self, name: str) -> None:
        """Remove a pipeline's record."""
        self._bus.publish(TOPIC, None, key=name)
        self.look()

    def progress(self, *names: str) -> dict[str, dict[str, QueryProgress]]:
        """Return the latest progress of the queries by pipeline and query; none if it is too old."""
        latest: dict[str, dict[str, QueryProgress]] = {name: {} for name in names}
        if not names or not self._bus.topics(PROGRESS_TOPIC):
            return latest
        first = self._bus.offsets(PROGRESS_TOPIC, at="earliest")[0]
        end = self._bus.offsets(PROGRESS_TOPIC, at="latest")[0]
        for back in _LOOKED_BACK:
            for batch in _batches(self._bus, PROGRESS_TOPIC, max(first, end - back)):
                for message in batch.messages():
                    name, _, query = (message.key or b"").decode("utf-8", "replace").partition("/")
                    if message.value and name in latest:
                        latest[name][query] = _progress_decoder.decode(message.value)
            if all(latest.values()) or end - back <= first:
                break
        return latest

    def _publish(self, name: str, value: bytes) -> bool:
        """Publish a record; returns False if another writer was first."""
        try:
            self._bus.publish(TOPIC, value, key=name, expected_offset=self._offset)
        except UnexpectedOffset:
            time.sleep(_AGAIN_S)
            return False
        self.look()
        return True

    def _read_again(self) -> None:
        self._offset = self._bus.offsets(TOPIC, at="earliest")[0]
        self.records, self._offsets, self.removed = {}, {}, set()
        self._read()

    def _read(self, wait: float = 0.0) -> None:
        for batch in _batches(self._bus, TOPIC, self._offset, wait):
            for message in batch.messages():
                self._take(message)
            self._offset = batch.next_offset

    def _take(self, message: Received) -> None:
        name = (message.key or b"").decode("utf-8", "replace")
        if message.value is None:
            self.records.pop(name, None)
            self._offsets.pop(name, None)
            self.removed.add(name)
        elif (record := decoded(message.value)) is not None:
            self.records[name] = record
            self._offsets[name] = message.offset
            self.removed.discard(name)


def _batches(bus: Bus, topic: str, offset: int, wait: float = 0.0) -> Iterator[ReceivedBatch]:
    """Yield the batches of a topic with one partition from an offset on."""
    while True:
        batches = bus.fetch(topic, 0, offset, bytes_max=_FETCH_BYTES, wait=wait)
        if not batches:
            return
        for batch in batches:
            received = ReceivedBatch(topic, 0, batch, offset)
            offset = received.next_offset
            yield received
        wait = 0.0
