"""Restores archives: publishes archived messages again in order, each file exactly once even if it is repeated."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pyspark.sql import SparkSession

from headrace.client.times import microseconds
from headrace.model.errors import InvalidArgument, TopicNotFound
from headrace.spark.archive.commit import read_copies
from headrace.spark.archive.copier import map_numbers, translate_spark_errors
from headrace.spark.archive.manifest import Chunk, Manifest, StoredFile
from headrace.spark.archive.parquet import SQL_SCHEMA, find_time, rows_of
from headrace.spark.archive.paths import archive_url
from headrace.spark.archive.tasks import rows_job
from headrace.spark.source.message_source import BrokerSource

RestoreBound = int | datetime | None
"""An offset or a time; None for no bound."""


@dataclass(frozen=True)
class RestorePart:
    """Archived messages that are published in one transaction."""

    stored: StoredFile
    start: int
    end: int


@dataclass
class RestoreResult:
    """The result of a restore."""

    topic: str
    messages: int
    parts: int


def archived_chunks(source: BrokerSource, topic: str, url: str = "", archive_id: str = "") -> list[Chunk]:
    """Return the chunks of a topic's archive, from the broker's manifest or from its copies at a URL.

    If several topics have had the name, `archive_id` chooses one, as `BROKER-TOPIC` like the directories; by default
    it is the newest.
    """
    if url:
        found = read_copies(archive_url(url), topic)
    else:
        manifest = Manifest(source)
        manifest.refresh()
        each = [manifest.chunks(topic_id) for topic_id in manifest.topic_ids()]
        found = {
            f"{one[0].broker_id}-{one[0].topic_id}": one
            for one in each
            if one[0].topic == topic and any(chunk.files for chunk in one)
        }
    if not found:
        raise TopicNotFound(f"nothing is archived of a topic {topic}" + (f" at {url}" if url else ""))
    if archive_id:
        if archive_id not in found:
            raise TopicNotFound(f"there is no archive {archive_id} of {topic}; there are {', '.join(sorted(found))}")
        return found[archive_id]
    if url and len(found) > 1:
        raise InvalidArgument(f"there are several archives of {topic}: say which of {', '.join(sorted(found))}")
    return max(found.values(), key=lambda chunks: chunks[0].topic_id)


def chosen_parts(chunks: Sequence[Chunk], begin: RestoreBound, until: RestoreBound) -> dict[int, list[RestorePart]]:
    """Return the parts to restore of each partition, in order."""
    files: dict[int, list[StoredFile]] = {}
    for chunk in chunks:
        for file in chunk.files:
            files.setdefault(file.partition, []).append(StoredFile(chunk.url, file))
    parts: dict[int, list[RestorePart]] = {}
    for partition, stored in sorted(files.items()):
        stored.sort(key=lambda one: one.file.start)
        first = _bound_offset(stored, begin, stored[0].file.start)
        last = _bound_offset(stored, until, stored[-1].file.end)
        for one in stored:
            start, end = max(one.file.start, first), min(one.file.end, last)
            if start < end:
                parts.setdefault(partition, []).append(RestorePart(one, start, end))
    return parts


def _bound_offset(files: Sequence[StoredFile], bound: RestoreBound, default: int) -> int:
    """Return the offset of a bound in a partition."""
    if bound is None:
        return default
    if not isinstance(bound, datetime):
        return bound
    time_us = microseconds(bound)
    for one in files:
        if one.file.time_max_us >= time_us:
            found = find_time(one, time_us)
            if found is not None:
                return found
    return files[-1].file.end


def _count(part: RestorePart) -> int:
    """Return the number of messages of a part."""
    file = part.stored.file
    if (part.start, part.end) == (file.start, file.end):
        return file.rows
    return sum(rows.num_rows for rows in rows_of(part.stored, part.start, part.end, ["offset"]))


class Restorer:
    """Publishes archived messages to a topic, through the sink."""

    def __init__(self, spark: SparkSession, source: BrokerSource, address: str, target: str) -> None:
        self._spark = spark
        self._source = source
        self._address = address
        self._target = target

    def restore(self, chunks: Sequence[Chunk], parts: dict[int, list[RestorePart]]) -> RestoreResult:
        """Publish the parts that have not been restored into this topic before."""
        target_id = self._ensure_target(chunks, parts)
        # Spark looks sinks up in the thread's active session. This call makes our session the active one.
        self._spark.createDataFrame([], "nothing int")
        messages = sum(self._partition(chunks[0], target_id, some) for some in parts.values())
        return RestoreResult(self._target, messages, sum(map(len, parts.values())))

    def _partition(self, chunk: Chunk, target_id: int, parts: Sequence[RestorePart]) -> int:
        messages = 0
        for part in parts:
            identity = (chunk.broker_id, chunk.topic_id, target_id, part.stored.file.partition, part.start, part.end)
            name = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
            job = rows_job([(part.stored, part.start, part.end)])
            with translate_spark_errors():
                rows = map_numbers(self._spark, 1, job, SQL_SCHEMA).drop("offset")
                once = {"txnAppId": f"headrace-restore:{name}", "txnVersion": "0"}
                rows.write.format("headrace").options(address=self._address, topic=self._target, **once).mode(
                    "append"
                ).save()
            messages += _count(part)
        return messages

    def _ensure_target(self, chunks: Sequence[Chunk], parts: dict[int, list[RestorePart]]) -> int:
        """Return the id of the topic to restore into; creates it if it does not exist."""
        count = max(parts, default=0) + 1
        settings = chunks[-1].settings
        inherited = {name: settings[name] for name in ("message_bytes_max", "compression") if name in settings}
        try:
            info = self._source.bus.describe_topic(self._target)
        except TopicNotFound:
            wanted = max(count, int(settings.get("partitions", 1)))
            info = self._source.bus.create_topic(self._target, exist_ok=True, partitions=wanted, **inherited)
        if len(info.partitions) < count:
            raise InvalidArgument(
                f"{self._target} has {len(info.partitions)} partitions, and partition {count - 1} is to be restored: "
                f"headrace topic alter {self._target} --partitions {count}"
            )
        return info.id
