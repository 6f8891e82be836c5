"""Writes slices of routes: encodes messages for targets, and waits until the targets are synced."""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

from crc32c import crc32c

from headrace.broker.active_partition import ActivePartition
from headrace.broker.route_slice import SourceSlice
from headrace.broker.route_table import CompiledRoute
from headrace.broker.topics import Topic
from headrace.engines.api import forwarded_by
from headrace.model.batch import Batch, Columns, Producer, encode, message_sizes
from headrace.model.codec import Codec
from headrace.model.errors import HeadraceError
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.model.topic import Compression


class UndeliveredMessages:
    """Messages that go to error topics, with the routes and the reasons."""

    def __init__(self) -> None:
        self.by_topic: dict[str, dict[int, list[tuple[str, str, str]]]] = {}
        """By error topic and index: the names of routes and targets, and the reasons."""

    def add(self, route: CompiledRoute, indexes: Sequence[int], target: str, reason: str) -> None:
        """Add messages that a route did not carry to a target, or to any of them."""
        found = self.by_topic.setdefault(route.error_topic, {})
        for index in indexes:
            found.setdefault(index, []).append((route.name, target, reason))


class UnsyncedSlice:
    """A slice that was forwarded, until its targets are synced or deleted."""

    def __init__(self, end: int, targets: dict[ActivePartition, None], on_change: Callable[[], None]) -> None:
        self.end = end
        self._targets = targets
        self._failed: list[ActivePartition] = []
        self._on_change = on_change

    @property
    def is_synced(self) -> bool:
        """Whether all targets are synced."""
        return not self._targets

    def wait(self) -> None:
        """Have the targets synced, and call back when they are, or when one could not be."""
        for active in list(self._targets):
            active.when_synced(partial(self._synced, active))
        if not self._targets:
            self._on_change()

    def sync_again(self) -> bool:
        """Have those targets synced that could not be, and forget deleted ones; whether there are such."""
        for active in [active for active in self._targets if active.gone is not None]:
            del self._targets[active]
        failed, self._failed = self._failed, []
        for active in failed:
            active.when_synced(partial(self._synced, active))
        return bool(self._failed)

    def _synced(self, active: ActivePartition, error: HeadraceError | None) -> None:
        if error is not None and active.gone is None:
            self._failed.append(active)
            self._on_change()
            return
        if active in self._targets:
            del self._targets[active]
            if not self._targets:
                self._on_change()


class SliceWriter:
    """Encodes messages of one slice; targets that get the same ones share the encoding."""

    def __init__(self, forwarder: int, found: SourceSlice, now_us: int) -> None:
        self.found = found
        self.now_us = now_us
        self._producer: Producer = forwarded_by(forwarder, found.end)
        self._encoded: dict[tuple[Codec, Sequence[int] | None], Batch] = {}
        self._hashes: list[int | None] | None = None
        self._sizes: list[int] | None = None

    def codec(self, topic: Topic) -> Codec:
        """How a topic's batches are compressed: as the source's, unless the topic says otherwise."""
        compression = topic.settings.compression
        return self.found.codec if compression is Compression.PRODUCER else compression.codec

    def encoded(self, indexes: Sequence[int], topic: Topic) -> Batch:
        """A batch of these messages, with bytes of its own."""
        codec = self.codec(topic)
        everything = len(indexes) == len(self.found.offsets)
        key = codec, None if everything else tuple(indexes)
        batch = self._encoded.get(key)
        if batch is None:
            columns = self.found.columns if everything else pick_messages(self.found.columns, indexes)
            batch = self._encoded[key] = self.encode(columns, codec)
        return batch.copied()

    def encode(self, columns: Columns, codec: Codec) -> Batch:
        """A batch with the forwarder's stamp."""
        return encode(columns, self.now_us, codec=codec, producer=self._producer, message_bytes_max=BATCH_BYTES_MAX)

    def fitting(
        self,
        parts: Sequence[tuple[CompiledRoute, Sequence[int]]],
        target: str,
        bytes_max: int,
        undelivered: UndeliveredMessages,
    ) -> Generator[tuple[CompiledRoute, Sequence[int]], Any, None]:
        """The parts without messages that are larger than a topic allows."""
        if self._sizes is None:
            self._sizes = message_sizes(self.found.columns)
        sizes = self._sizes
        for route, indexes in parts:
            for index in indexes:
                if sizes[index] > bytes_max:
                    reason = f"the message has {sizes[index]} bytes, and {target} takes {bytes_max} at most"
                    undelivered.add(route, [index], target, reason)
            yield route, [index for index in indexes if sizes[index] <= bytes_max]

    def by_partition(
        self, indexes: Sequence[int], source_number: int, partitions: int
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Divide messages among a target's partitions: by key, and those without one by the source's partition."""
        keys = self.found.columns.keys
        if partitions == 1 or keys is None:
            yield source_number % partitions, indexes
            return
        if self._hashes is None:
            self._hashes = [None if key is None else crc32c(key) for key in keys]
        hashes, divided = self._hashes, dict[int, list[int]]()
        for index in indexes:
            found = hashes[index]
            number = (source_number if found is None else found) % partitions
            divided.setdefault(number, []).append(index)
        yield from divided.items()


def pick_messages(columns: Columns, indexes: Sequence[int]) -> Columns:
    """The messages at these indexes."""
    picked = columns.picked(indexes, range(len(columns.values)))
    picked.places = None
    return picked
