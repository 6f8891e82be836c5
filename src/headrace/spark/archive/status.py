"""Archive status: per topic, the offsets that are archived, in the log, and ready to be archived."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.model.errors import TopicNotFound
from headrace.model.requests import TopicInfo
from headrace.model.topic import SYSTEM_PREFIX, parse_topic
from headrace.spark.archive.bounds import archive_refusal, bound_us, checked_age, open_ranges
from headrace.spark.archive.manifest import Manifest
from headrace.spark.source.message_source import BrokerSource


@dataclass
class PartitionStatus:
    """A partition's archive and log."""

    partition: int
    archived_from: int | None
    """The first archived offset, at which reads begin; None if nothing is archived."""
    archived_to: int | None
    log_first: int
    log_end: int
    open: int
    """Offsets that could be archived now."""


@dataclass
class TopicStatus:
    """A topic's archive."""

    topic: str
    topic_id: int
    messages: int = 0
    files: int = 0
    bytes: int = 0
    chunks: int = 0
    urls: list[str] = field(default_factory=list)
    archived_until_us: int | None = None
    """The latest timestamp of an archived message."""
    last_run_us: int | None = None
    partitions: list[PartitionStatus] = field(default_factory=list)
    deleted: bool = False
    """Whether the topic was deleted, even if another topic has its name now."""

    @property
    def open(self) -> int:
        """Offsets that could be archived now."""
        return sum(each.open for each in self.partitions)


def archive_status(source: BrokerSource, topics: Sequence[str], older_than_s: float) -> list[TopicStatus]:
    """Return the status of these topics; without names, of all topics that have or could have an archive."""
    manifest = Manifest(source)
    names = list(topics) or [info.topic for info in source.bus.topics() if not _is_system(info.topic)]
    infos = []
    for name in names:
        try:
            infos.append(source.bus.describe_topic(name))
        except TopicNotFound:
            if not topics:
                continue  # it was deleted meanwhile
            manifest.refresh()
            if not any(manifest.chunks(each)[0].topic == name for each in manifest.topic_ids()):
                raise
    manifest.refresh()
    living = {info.id: info for info in infos}
    found = [_status(source, manifest, info, older_than_s) for info in infos]
    for topic_id in manifest.topic_ids():
        chunks = manifest.chunks(topic_id)
        name = chunks[0].topic
        counts = any(chunk.counts for chunk in chunks)
        if topic_id not in living and counts and (not topics or name in topics):
            found.append(_summed(manifest, TopicStatus(name, topic_id, deleted=True)))
    return sorted(found, key=lambda each: (each.topic, each.topic_id))


def _is_system(topic: str) -> bool:
    return parse_topic(topic).topic.startswith(SYSTEM_PREFIX)


def _status(source: BrokerSource, manifest: Manifest, info: TopicInfo, older_than_s: float) -> TopicStatus:
    partition_archives = manifest.partition_archives(info.id)
    ranges = {}
    if archive_refusal(info) is None:
        bounds = source.bus.offsets(info.topic, bound_us(checked_age(info, older_than_s)))
        ranges = open_ranges(info, partition_archives, bounds)
    status = _summed(manifest, TopicStatus(info.topic, info.id))
    for each in info.partitions:
        start, end = ranges.get(each.partition, (0, 0))
        partition_archive = partition_archives.get(each.partition)
        status.partitions.append(
            PartitionStatus(
                each.partition,
                partition_archive.first if partition_archive else None,
                partition_archive.end if partition_archive else None,
                each.first_offset,
                each.next_offset,
                end - start,
            )
        )
    return status


def _summed(manifest: Manifest, status: TopicStatus) -> TopicStatus:
    chunks = manifest.chunks(status.topic_id)
    files = [file for chunk in chunks for file in chunk.files]
    status.messages = sum(file.rows for file in files)
    status.files = len(files)
    status.bytes = sum(file.bytes for file in files)
    status.chunks = sum(chunk.counts for chunk in chunks)
    status.urls = list(dict.fromkeys(chunk.url for chunk in chunks if chunk.counts))
    status.archived_until_us = max((file.time_max_us for file in files), default=None)
    status.last_run_us = max((chunk.created_us for chunk in chunks), default=None)
    return status
