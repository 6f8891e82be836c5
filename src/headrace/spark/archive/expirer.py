"""Expires and deletes archives: takes files out of the manifest first, then removes them."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from headrace.model.errors import HeadraceError, TopicNotFound, UnexpectedOffset
from headrace.spark.archive.commit import write_copies
from headrace.spark.archive.manifest import MANIFEST_TOPIC, ArchivedFile, Chunk, Manifest
from headrace.spark.archive.paths import ArchivePath, names_below, remove_directory, resolve_url, topic_folder
from headrace.spark.source.message_source import BrokerSource

_CONFLICTS_MAX = 200

OnStep = Callable[[str, int], None]
"""Called after each step with its name and the number of files removed so far."""


@dataclass
class Removal:
    """The size of the expired part of a topic's archive, and of the rest."""

    topic: str
    topic_id: int
    messages: int
    files: int
    bytes: int
    messages_left: int
    bytes_left: int


def expired_files(chunks: Sequence[Chunk], before_us: int | None, bytes_max: int | None) -> set[str]:
    """Return the paths of the files to expire: the first ones of each partition, so that no gaps arise.

    These are the files with only messages from before a time, then the oldest until the rest is small enough.
    """
    waiting: dict[int, deque[ArchivedFile]] = {}
    for file in sorted((file for chunk in chunks for file in chunk.files), key=lambda one: one.start):
        waiting.setdefault(file.partition, deque()).append(file)
    size = sum(file.bytes for files in waiting.values() for file in files)
    expired: set[str] = set()
    while heads := [files for files in waiting.values() if files]:
        oldest = min(heads, key=lambda files: files[0].time_max_us)
        too_old = before_us is not None and oldest[0].time_max_us < before_us
        if not too_old and (bytes_max is None or size <= bytes_max):
            return expired
        file = oldest.popleft()
        size -= file.bytes
        expired.add(file.path)
    return expired


def without_files(chunks: Sequence[Chunk], expired: set[str]) -> list[Chunk]:
    """Return the chunks without the expired files; chunks without any file left keep the ends of their ranges."""
    ends: dict[int, int] = {}
    for chunk in chunks:
        for file in chunk.files:
            if file.path in expired:
                ends[file.partition] = max(ends.get(file.partition, 0), file.end)
    return [
        msgspec.structs.replace(
            chunk,
            files=tuple(file for file in chunk.files if file.path not in expired),
            ranges={at: (min(max(start, ends.get(at, 0)), end), end) for at, (start, end) in chunk.ranges.items()},
        )
        for chunk in chunks
    ]


def redundant_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks without offsets whose partitions all appear in later chunks."""
    found = []
    for at, chunk in enumerate(chunks):
        later = {partition for other in chunks[at + 1 :] for partition in other.ranges}
        empty = not chunk.files and all(start == end for start, end in chunk.ranges.values())
        if empty and at + 1 < len(chunks) and chunk.ranges.keys() <= later:
            found.append(chunk)
    return found


class Expirer:
    """Expires files of the archive of one topic. Running it again completes an interrupted removal."""

    def __init__(
        self, source: BrokerSource, topic: str, archive_id: str = "", on_step: OnStep = lambda _step, _files: None
    ) -> None:
        self._bus = source.bus
        self._manifest = Manifest(source)
        self._manifest.refresh()
        self._topic = topic
        self._id = _chosen(self._manifest, topic, archive_id)
        self._on_step = on_step
        self._removed = 0

    def plan(self, before_us: int | None, bytes_max: int | None) -> set[str]:
        """Return the paths of the files to expire."""
        return expired_files(self._chunks, before_us, bytes_max)

    def plan_all(self) -> set[str]:
        """Return the paths of all files."""
        return {file.path for chunk in self._chunks for file in chunk.files}

    def removal(self, expired: set[str]) -> Removal:
        """Return the sizes of what expiring these files removes and leaves."""
        files = [file for chunk in self._chunks for file in chunk.files]
        gone = [file for file in files if file.path in expired]
        left = [file for file in files if file.path not in expired]
        return Removal(
            self._topic,
            self._id,
            sum(file.rows for file in gone),
            len(gone),
            sum(file.bytes for file in gone),
            sum(file.rows for file in left),
            sum(file.bytes for file in left),
        )

    def expire(self, expired: set[str]) -> None:
        """Take files out of the manifest, and remove them together with the files of interrupted removals."""
        self._change(lambda chunks: without_files(chunks, expired))
        self._on_step("committed", 0)
        with _removing(self._topic):
            write_copies(self._chunks)
            for chunk in self._chunks:
                if chunk.revision:
                    self._remove_files(chunk)
            self._drop(redundant_chunks(self._chunks))
            write_copies(self._chunks)

    def delete(self) -> None:
        """Take all files out of the manifest, and remove the whole archive."""
        self._change(lambda chunks: [msgspec.structs.replace(chunk, ranges={}, files=()) for chunk in chunks])
        self._on_step("committed", 0)
        with _removing(self._topic):
            for chunk in self._chunks:
                folder = _folder(chunk)
                remove_directory(folder.below("_manifest"))
                self._remove_files(chunk)
                if folder.local:
                    for directory in (folder.path, folder.parent.path):
                        with suppress(OSError):  # the directory is not empty
                            os.rmdir(directory)
            # While the topic exists, the entry of its last chunk stays, so that its number is not used again.
            self._drop(self._chunks[:-1] if self._is_there() else self._chunks)

    @property
    def _chunks(self) -> list[Chunk]:
        return self._manifest.chunks(self._id)

    def _change(self, change: Callable[[Sequence[Chunk]], list[Chunk]]) -> None:
        """Replace entries of the manifest, the oldest first, so that every intermediate state is consistent."""
        conflicts = 0
        while conflicts < _CONFLICTS_MAX:
            old = self._chunks
            different = (new for before, new in zip(old, change(old), strict=True) if new != before)
            chunk = next(different, None)
            if chunk is None:
                return
            entry = msgspec.json.encode(msgspec.structs.replace(chunk, revision=chunk.revision + 1))
            conflicts += not self._publish(chunk, entry)
        raise HeadraceError(f"the manifest changes all the time; of {self._topic} not all was expired: try again")

    def _drop(self, chunks: Sequence[Chunk]) -> None:
        """Remove entries of the manifest."""
        for chunk in list(chunks):
            while not self._publish(chunk, None):
                if chunk not in self._chunks:
                    break  # a concurrent run has removed it

    def _publish(self, chunk: Chunk, entry: bytes | None) -> bool:
        """Publish an entry and refresh the manifest; returns False if another writer was first."""
        try:
            self._bus.publish(
                MANIFEST_TOPIC, entry, key=chunk.key, partition=0, expected_offset=self._manifest.next_offset
            )
        except UnexpectedOffset:
            time.sleep(0.05)  # until the concurrent entry can be read
            return False
        finally:
            self._manifest.refresh()
        return True

    def _remove_files(self, chunk: Chunk) -> None:
        """Remove the files of a chunk's run that the chunk no longer lists."""
        directory = _folder(chunk).below(f"run={chunk.run}")
        named = {file.path.rpartition("/")[2] for file in chunk.files}
        for day in names_below(directory):
            inside = names_below(directory.below(day))
            for name in inside:
                if name not in named:
                    directory.filesystem.delete_file(directory.below(day, name).path)
                    self._removed += 1
                    self._on_step("removed", self._removed)
            if not named.intersection(inside):
                remove_directory(directory.below(day))
        if not named:
            remove_directory(directory)

    def _is_there(self) -> bool:
        try:
            return self._bus.describe_topic(self._topic).id == self._id
        except TopicNotFound:
            return False


def _folder(chunk: Chunk) -> ArchivePath:
    return resolve_url(chunk.url).below(topic_folder(chunk.topic, chunk.broker_id, chunk.topic_id))


def _chosen(manifest: Manifest, topic: str, archive_id: str) -> int:
    """Return the id of the topic whose archive is meant: the one `archive_id` names, else the newest of that name."""
    found: dict[str, int] = {}
    for topic_id in manifest.topic_ids():
        chunks = manifest.chunks(topic_id)
        if chunks and chunks[0].topic == topic:
            found[f"{chunks[0].broker_id}-{topic_id}"] = topic_id
    if not found:
        raise TopicNotFound(f"nothing is archived of a topic {topic}; headrace archive status shows what is")
    if archive_id and archive_id not in found:
        raise TopicNotFound(f"there is no archive {archive_id} of {topic}; there are {', '.join(sorted(found))}")
    return found[archive_id] if archive_id else max(found.values())


@contextmanager
def _removing(topic: str) -> Iterator[None]:
    """Turn an OSError into a HeadraceError that says how to finish the removal."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HeadraceError):
            raise
        raise HeadraceError(
            f"files of the archive of {topic} could not be removed: {error}. The manifest no longer lists them; "
            "run the command again to remove them"
        ) from error
