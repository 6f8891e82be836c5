"""Commits archived chunks: appends manifest entries, writes their copies beside the files, removes failed attempts."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from headrace.client._sync.bus import Bus
from headrace.model.errors import CorruptFile, HeadraceError, InvalidArgument, UnexpectedOffset
from headrace.spark.archive.manifest import (
    MANIFEST_TOPIC,
    Chunk,
    Manifest,
    chunk_of,
    next_number,
    partition_archives_of,
)
from headrace.spark.archive.paths import (
    archive_folder,
    file_url,
    manifest_copy,
    names_below,
    read_whole,
    remove_directory,
    resolve_url,
    size_of,
    topic_folder,
    write_whole,
)

ATTEMPT_HOURS = 12
"""Maximum duration of an attempt, after which it is given up."""
LEFTOVER_HOURS = 24
"""Files of uncommitted attempts older than this are removed: such an attempt can no longer commit."""
_ENTRY_BYTES_MAX = 16 << 20
_STAMP = "%Y%m%dT%H%M%SZ"
_TRIES = 200


class ArchiveConflict(Exception):
    """Another run has archived the same messages first; this attempt is not committed."""


def make_manifest_topic(bus: Bus) -> None:
    """Create the manifest's topic if it does not exist; its entries never expire."""
    bus.create_topic(
        MANIFEST_TOPIC,
        exist_ok=True,
        partitions=1,
        storage="disk",
        validity="keep",
        retain_seconds=None,
        retain_bytes=None,
        compact_by_key=True,
        message_bytes_max=_ENTRY_BYTES_MAX,
        durability="synced",
    )


def commit(bus: Bus, manifest: Manifest, chunk: Chunk, begun: datetime) -> None:
    """Commit a chunk: append its manifest entry; raises ArchiveConflict if it no longer continues the archive.

    After any other error the chunk may be committed all the same, as the broker's answer may have been lost.
    """
    entry = msgspec.json.encode(chunk)
    for _ in range(_TRIES):
        manifest.refresh()
        known = manifest.chunks(chunk.topic_id)
        if any(one.run == chunk.run for one in known):
            return
        check_continues(chunk.topic, chunk.ranges, chunk.number, known)
        if bus.describe_topic(chunk.topic).id != chunk.topic_id:
            raise ArchiveConflict(f"the topic {chunk.topic} was deleted and made again meanwhile")
        if datetime.now(UTC) - begun > timedelta(hours=ATTEMPT_HOURS):
            raise ArchiveConflict(f"archiving {chunk.topic} has taken more than {ATTEMPT_HOURS} hours")
        try:
            # The expected offset serializes concurrent commits.
            bus.publish(MANIFEST_TOPIC, entry, key=chunk.key, partition=0, expected_offset=manifest.next_offset)
        except UnexpectedOffset:
            time.sleep(0.05)  # until the concurrent entry can be read
        else:
            return
    raise HeadraceError(f"the manifest changes all the time; {chunk.topic} was not archived: try again")


def check_continues(topic: str, ranges: Mapping[int, tuple[int, int]], number: int, known: Sequence[Chunk]) -> None:
    """Raise ArchiveConflict unless a chunk of these ranges continues the archive."""
    partition_archives = partition_archives_of(known)
    overlapping = [
        partition
        for partition, (start, _) in ranges.items()
        if partition in partition_archives and partition_archives[partition].end > start
    ]
    if next_number(known) != number or overlapping:
        raise ArchiveConflict(
            f"{topic}: another run was quicker and archived the same messages; this one left them to it"
        )


def write_copies(chunks: Sequence[Chunk]) -> None:
    """Write a copy of every manifest entry beside the files, so that the archive can be restored without the broker.

    Copies that a later revision has replaced are removed.
    """
    folders: dict[tuple[str, str], dict[str, Chunk]] = {}
    for chunk in chunks:
        wanted = folders.setdefault((chunk.url, topic_folder(chunk.topic, chunk.broker_id, chunk.topic_id)), {})
        if chunk.counts:
            wanted[manifest_copy(chunk.number, chunk.revision)] = chunk
    last = max((chunk.number for chunk in chunks), default=-1)
    for (url, folder), wanted in folders.items():
        directory = resolve_url(url).below(folder, "_manifest")
        present = set(names_below(directory))
        for name in sorted(wanted.keys() - present):
            write_whole(directory.below(name), msgspec.json.encode(wanted[name]))
        for name in sorted(present - wanted.keys()):
            number = name.partition(".")[0]
            if name.endswith(".json") and number.isdigit() and int(number) <= last:
                directory.filesystem.delete_file(directory.below(name).path)


def read_copies(url: str, topic: str) -> dict[str, list[Chunk]]:
    """Return the archives of topics of a name at a URL, by archive id, from the copies of the manifest."""
    base = resolve_url(url)
    found: dict[str, list[Chunk]] = {}
    for folder in names_below(base):
        if folder == archive_folder(topic):
            for name in names_below(base.below(folder)):
                copies = base.below(folder, name, "_manifest")
                entries = [read_whole(copies.below(each)) for each in names_below(copies) if each.endswith(".json")]
                if entries:
                    found[name.removeprefix("id=")] = _latest(
                        [msgspec.structs.replace(chunk_of(entry), url=url) for entry in entries]
                    )
    return found


def _latest(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the latest revision of each chunk, in order."""
    latest: dict[int, Chunk] = {}
    for chunk in sorted(chunks, key=lambda each: (each.number, each.revision)):
        latest[chunk.number] = chunk
    return list(latest.values())


def check_files(chunks: Sequence[Chunk], firsts: dict[int, int]) -> None:
    """Raise CorruptFile unless all files with messages from these offsets on exist with their full size."""
    for partition, partition_archive in partition_archives_of(chunks).items():
        for stored in partition_archive.between(firsts.get(partition, 0), partition_archive.end):
            size = size_of(resolve_url(stored.url).below(stored.file.path))
            if size != stored.file.bytes:
                wrong = "is not there" if size is None else f"has {size} bytes, not {stored.file.bytes}"
                raise CorruptFile(f"{file_url(stored.url, stored.file.path)} {wrong}: nothing was dropped from the log")


def remove_attempt(url: str, directory: str) -> None:
    """Remove the files of an uncommitted attempt."""
    remove_directory(resolve_url(url).below(directory))


def remove_leftovers(url: str, folder: str, chunks: Sequence[Chunk]) -> int:
    """Remove the files of old uncommitted attempts; returns the number of directories."""
    base = resolve_url(url).below(folder)
    counting = {chunk.run for chunk in chunks}
    removed = 0
    for name in names_below(base):
        run = name.removeprefix("run=")
        if name != run and run not in counting and _is_long_ago(run):
            remove_directory(base.below(name))
            removed += 1
    return removed


def run_name(begun: datetime, token: str) -> str:
    """Return a name for an attempt, which begins with its start time."""
    return f"{begun.strftime(_STAMP)}-{token}"


def _is_long_ago(run: str) -> bool:
    try:
        begun = datetime.strptime(run.partition("-")[0], _STAMP).replace(tzinfo=UTC)
    except ValueError:
        return False  # no directory of an attempt
    return datetime.now(UTC) - begun > timedelta(hours=LEFTOVER_HOURS)


def checked_url(url: str) -> None:
    """Raise InvalidArgument unless the URL can be listed."""
    place = resolve_url(url)
    try:
        names_below(place)
    except OSError as error:
        raise InvalidArgument(f"{url} cannot be read: {error}") from error
