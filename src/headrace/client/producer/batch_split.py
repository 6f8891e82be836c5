"""Many messages at once: checked, and divided into batches."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from headrace.client.producer.partitioning import Partitioner, partition_places
from headrace.client.producer.pending_batch import (
    OutgoingMessage,
    checked_key,
    checked_keys,
    checked_priority,
)
from headrace.client.producer.serializing import Serializer, serialized, to_bytes
from headrace.client.producer.topic_metadata import TopicMetadata, check_partition
from headrace.client.times import Moment, listed, optional_microseconds
from headrace.model.arguments import shown
from headrace.model.batch import Columns, message_sizes
from headrace.model.errors import InvalidArgument
from headrace.model.headers import GivenHeaders, checked_headers
from headrace.model.limits import BATCH_BYTES_MAX, VERSIONED_BATCH_MESSAGES_MAX
from headrace.model.message import check_message_bytes

_ONE_BATCH_BYTES_MAX = BATCH_BYTES_MAX // 2
"""Bytes of messages in one batch, so that it has room for their headers."""


class GivenMessages(NamedTuple):
    """Messages as a caller gives them: values, and for each other field nothing or as many entries."""

    values: Sequence[Any]
    keys: Sequence[bytes | str | None] | None = None
    headers: Sequence[GivenHeaders | None] | None = None
    timestamps: Sequence[Moment | None] | None = None
    dues: Sequence[Moment | None] | None = None
    priorities: Sequence[int | None] | None = None
    expires: Sequence[Moment | None] | None = None

    def checked(self, serializer: Serializer) -> "CheckedColumns":
        """The messages, checked. Timestamps may be missing: they are filled in when the batch is made."""
        self._check_lengths()
        values = self.values
        size = joined_bytes(values) if serializer is to_bytes else None
        if size is None:
            values = [serialized(serializer, value) for value in values]
        columns = Columns(values)
        if self.keys is not None:
            columns.keys = checked_keys(self.keys)
        if self.headers is not None:
            columns.headers = [checked_headers(headers) for headers in self.headers]
        if self.timestamps is not None:
            columns.timestamps = [optional_microseconds(time) for time in self.timestamps]  # type: ignore[misc]
        if self.dues is not None:
            columns.dues = [optional_microseconds(time) for time in self.dues]
        if self.priorities is not None:
            columns.priorities = [checked_priority(priority) for priority in self.priorities]
        if self.expires is not None:
            columns.expires = [optional_microseconds(time) for time in self.expires]
        plain = self.keys is None and self.headers is None
        return CheckedColumns(columns, size if plain else None)

    def messages(self, topic: str, partition: int | None) -> Iterator[OutgoingMessage]:
        """The messages, one by one."""
        self._check_lengths()
        nothing = [None] * len(self.values)
        for value, key, headers, timestamp, due, priority, expires in zip(
            self.values, *(column if column is not None else nothing for column in self._optional()), strict=True
        ):
            yield OutgoingMessage(topic, value, key, headers, timestamp, due, priority, expires, partition)

    def _optional(self) -> tuple[Sequence[Any] | None, ...]:
        return self.keys, self.headers, self.timestamps, self.dues, self.priorities, self.expires

    def _check_lengths(self) -> None:
        for name, column in zip(self._fields[1:], self[1:], strict=True):
            if column is not None and not isinstance(column, Sequence):
                raise InvalidArgument(f"{name} are one for each value, such as a list, not {shown(column)}")
            if column is not None and len(column) != len(self.values):
                raise InvalidArgument(f"there are {len(column)} {name} for {len(self.values)} values")


def given_messages(
    values: Iterable[Any], keys: Sequence[bytes | str | None] | None, key: bytes | str | None, **columns: Any
) -> GivenMessages:
    """Take messages as a caller gives them, with one key for all or one for each."""
    listed_values = values if isinstance(values, list | tuple) else listed(values, "values")
    if key is not None:
        if keys is not None:
            raise InvalidArgument("give either `key`, for all messages, or `keys`, one for each")
        keys = [checked_key(key)] * len(listed_values)
    return GivenMessages(listed_values, keys, **columns)


class CheckedColumns(NamedTuple):
    """Messages in columns, and how many bytes they have if that is known."""

    columns: Columns
    size: int | None


class BatchPortion(NamedTuple):
    """Messages for one batch, and how many bytes they have."""

    columns: Columns
    size: int


BatchPlan = list[tuple[int, BatchPortion]]
"""Batches, each with the partition that it is for."""


def plan_batches(
    topic: str,
    checked: CheckedColumns,
    partition: int | None,
    keyless: int,
    metadata: TopicMetadata,
    partitioner: Partitioner,
    batch_bytes: int,
    batch_count: int,
) -> BatchPlan:
    """Divide messages by partition and into batches: all for `partition` if it is given, else by their keys.

    Messages without a key go to the partition `keyless`.
    """
    keys = checked.columns.keys
    if partition is not None:
        check_partition(topic, partition, metadata)
    places: dict[int, list[int] | None] = {keyless if partition is None else partition: None}
    if keys is not None and partition is None:
        places = dict(partition_places(keys, metadata.partitions, partitioner, keyless))
    for number in places:
        check_partition(topic, number, metadata)
    limits = (batch_bytes, batch_count, metadata.message_bytes_max, topic)
    return [(number, portion) for number, chosen in places.items() for portion in portions(checked, chosen, *limits)]


def plan_one_batch(
    topic: str,
    checked: CheckedColumns,
    partition: int | None,
    keyless: int,
    metadata: TopicMetadata,
    partitioner: Partitioner,
) -> BatchPlan:
    """Put messages of one key into one batch, which is appended whole or not at all."""
    keys = set(checked.columns.keys or (None,))
    if len(keys) > 1 or None in keys:
        raise InvalidArgument("expected_version is about one key: all messages must have the same; give `key`")
    limits = _ONE_BATCH_BYTES_MAX, VERSIONED_BATCH_MESSAGES_MAX
    plan = plan_batches(topic, checked, partition, keyless, metadata, partitioner, *limits)
    if len(plan) > 1:
        raise InvalidArgument(
            f"with expected_version at most {VERSIONED_BATCH_MESSAGES_MAX} messages and {_ONE_BATCH_BYTES_MAX} bytes "
            "can be published together"
        )
    return plan


def portions(
    checked: CheckedColumns,
    places: Sequence[int] | None,
    batch_bytes: int,
    batch_count: int,
    message_bytes_max: int,
    topic: str,
) -> list[BatchPortion]:
    """The messages at these places (None: all of them), divided into batches of about this size at most."""
    columns, total = checked
    if not columns.values:
        return []
    count = len(columns.values)
    if places is not None:
        columns, count, total = _picked(columns, places), len(places), None
    if total is not None and count <= batch_count and total <= min(batch_bytes, message_bytes_max):
        return [BatchPortion(columns, total)]
    sizes = message_sizes(columns)
    check_message_bytes(max(sizes), message_bytes_max, topic)
    made: list[BatchPortion] = []
    start = size = 0
    for place, bytes_more in enumerate(sizes):
        if place > start and (size + bytes_more > batch_bytes or place - start >= batch_count):
            made.append(BatchPortion(_picked(columns, range(start, place)), size))
            start, size = place, 0
        size += bytes_more
    made.append(BatchPortion(_picked(columns, range(start, count)), size))
    return made


def joined_bytes(values: Sequence[Any]) -> int | None:
    """How many bytes the values have together; None when one of them is something else than bytes.

    Joining them is the quickest way to find out, by far.
    """
    try:
        return len(b"".join(values))
    except TypeError:
        return None


def _picked(columns: Columns, places: Sequence[int]) -> Columns:
    def pick(column: Sequence[Any] | None) -> list[Any] | None:
        if column is None:
            return None
        if isinstance(places, range):
            return list(column[places.start : places.stop])
        return [column[place] for place in places]

    return Columns(
        pick(columns.values) or [],
        pick(columns.keys),
        pick(columns.timestamps),
        pick(columns.headers),
        pick(columns.dues),
        pick(columns.priorities),
        pick(columns.expires),
    )
