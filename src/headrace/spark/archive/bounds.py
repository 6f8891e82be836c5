"""Chooses the offsets of each partition to archive, and divides them into pieces of one day each."""

import shlex
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.model.requests import TopicInfo
from headrace.model.topic import SYSTEM_PREFIX, Storage, Validity, parse_topic, topic_settings
from headrace.spark.archive.manifest import PartitionArchive
from headrace.spark.source.planning import OffsetSpan, Range, split_ranges

CHUNK_BYTES = 4 << 30
CHUNK_OFFSETS = 50_000_000
"""Upper bounds of a chunk. A long run commits chunk by chunk, so that an interruption loses only the last one."""
UNSYNCED_AGE_S = 60.0
"""Minimum age of archived messages in topics that do not sync each message: younger ones may be lost with power."""
_DAY_US = 86_400_000_000
_EPOCH = date(1970, 1, 1)

AtTime = Callable[[int], Mapping[int, int]]
"""Returns for each partition the offset of the first message at or after a time."""


class Piece(NamedTuple):
    """Messages that are archived in one file."""

    day: str
    """The day of the directory, such as `2026-01-31`."""
    wanted: Range
    bytes: int
    """Estimated size of the messages."""


def archive_refusal(info: TopicInfo) -> str | None:
    """Return why a topic cannot be archived, or None if it can."""
    settings = topic_settings(info.settings)
    if parse_topic(info.topic).topic.startswith(SYSTEM_PREFIX):
        return "it is a system topic, whose readers need all of its log"
    if settings.view_of is not None:
        return f"it is a virtual topic (view), which stores nothing: archive its source, {settings.view_of}"
    if settings.storage is not Storage.DISK:
        return f"it is kept in memory ({settings.storage.value}): after a restart its offsets begin anew"
    if settings.compact_by_key:
        return (
            "it is compacted by key, so its log is a table, from which new readers would miss the keys that were "
            "dropped. Its size is bounded already; else "
            f"`headrace topic alter {shlex.quote(info.topic)} --no-compact-by-key` first"
        )
    return None


def checked_age(info: TopicInfo, older_than_s: float) -> float:
    """Return the minimum age of messages to archive, raised for topics that do not sync each message."""
    synced = topic_settings(info.settings).durability >= Durability.SYNCED
    return older_than_s if synced else max(older_than_s, UNSYNCED_AGE_S)


def may_have_gaps(info: TopicInfo) -> bool:
    """Return whether compaction or expiry may remove messages from the middle of the topic's log."""
    settings = topic_settings(info.settings)
    return settings.compact_by_key or settings.validity is not Validity.KEEP


def open_ranges(
    info: TopicInfo, partition_archives: Mapping[int, PartitionArchive], bounds: Mapping[int, int]
) -> dict[int, tuple[int, int]]:
    """Return for each partition the offsets that are old enough and not yet archived, as first and end."""
    ranges = {}
    for each in info.partitions:
        archived = partition_archives[each.partition].end if each.partition in partition_archives else 0
        if archived > each.next_offset:
            raise InvalidArgument(
                f"{info.topic}[{each.partition}] is archived up to offset {archived} but ends at {each.next_offset}: "
                "its log has lost messages, and others would get their offsets. Make a new topic and restore into it"
            )
        start, end = max(archived, each.first_offset), min(bounds[each.partition], each.next_offset)
        if start < end:
            ranges[each.partition] = start, end
    return ranges


def chunk_ranges(info: TopicInfo, ranges: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Return the first part of each range, small enough for one chunk."""
    chosen = {}
    spans = {each.partition: each for each in info.partitions}
    for partition, (start, end) in ranges.items():
        span = spans[partition]
        average = max(span.bytes // max(span.next_offset - span.first_offset, 1), 1)
        most = max(min(CHUNK_OFFSETS, CHUNK_BYTES // average) // len(ranges), 1)
        chosen[partition] = start, min(end, start + most)
    return chosen


def pieces(
    info: TopicInfo, ranges: Mapping[int, tuple[int, int]], cuts: Mapping[int, list[tuple[int, int]]]
) -> list[Piece]:
    """Divide the ranges where days begin, and where a file would become too large."""
    spans = {
        (info.topic, one.partition): OffsetSpan(one.first_offset, one.next_offset, one.bytes) for one in info.partitions
    }
    found = []
    for partition, (start, end) in sorted(ranges.items()):
        days, span = cuts[partition], spans[info.topic, partition]
        average = span.bytes / max(span.end - span.first, 1)
        for at, (day, first) in enumerate(days):
            last = days[at + 1][1] if at + 1 < len(days) else end
            one = Range(info.topic, partition, max(first, start), min(last, end))
            found += [
                Piece(_day_text(day), part, int(part.size * average)) for part in split_ranges([one], spans, None)
            ]
    return found


def day_cuts(
    ranges: Mapping[int, tuple[int, int]], at_time: AtTime, first_us: int, last_us: int
) -> dict[int, list[tuple[int, int]]]:
    """Return for each partition the days with messages in its range, and the offset at which each begins.

    A message belongs to the latest day of any message up to it, so that days ascend in every partition even if
    producers set timestamps out of order.
    """
    known: dict[int, dict[int, int]] = {}

    def ask(day: int) -> dict[int, int]:
        if day not in known:
            found = at_time(min(max(day * _DAY_US, TIMESTAMP_US_MIN), TIMESTAMP_US_MAX))
            known[day] = {number: min(max(found[number], start), end) for number, (start, end) in ranges.items()}
        return known[day]

    def look(low: int, high: int) -> None:
        """Find by bisection the days between two on which a partition has a first message."""
        if high - low > 1 and ask(low) != ask(high):
            middle = (low + high) // 2
            ask(middle)
            look(low, middle)
            look(middle, high)

    first, last = first_us // _DAY_US, last_us // _DAY_US + 1
    ask(first)
    look(first, last)
    cuts = {}
    for number, (start, end) in ranges.items():
        begins = sorted((day, offsets[number]) for day, offsets in known.items() if offsets[number] < end)
        begins = begins or [(first, start)]
        # Of several days at the same offset only the last has messages; the first day begins at the range's start.
        days = [one for one, after in zip(begins, [*begins[1:], (0, end)], strict=True) if one[1] < after[1]]
        cuts[number] = [(days[0][0], start), *days[1:]]
    return cuts


def _day_text(day: int) -> str:
    try:
        return (_EPOCH + timedelta(days=day)).isoformat()
    except OverflowError:  # a time before the year 1, or after 9999
        return f"day{day:+d}"


def bound_us(older_than_s: float, now: datetime | None = None) -> int:
    """Return the time before which messages are old enough to archive, in microseconds since 1970."""
    moment = (now or datetime.now(UTC)).timestamp()
    return round((moment - older_than_s) * 1e6)
