"""Reads topics as a batch: the driver plans ranges, tasks read them."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from headrace.model.batch import Batch
from headrace.model.errors import InvalidArgument, OffsetOutOfRange, TopicNotFound
from headrace.spark.archive.archived_source import ArchivedRange, ArchivedSource
from headrace.spark.archive.query_rows import ArchivedRowReader
from headrace.spark.source.arrow import Decoder
from headrace.spark.source.message_source import MessageSource, chosen_topics, open_source, readable_batches
from headrace.spark.source.options import EARLIEST, LATEST, Bound, Edge, SourceOptions
from headrace.spark.source.planning import OffsetSpan, Range, TopicState, Window, assign_to_tasks, split_ranges
from headrace.spark.source.values import value_columns

logger = logging.getLogger("headrace.spark")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Part(NamedTuple):
    """A range that a task reads."""

    wanted: Range
    archived_range: ArchivedRange | None
    """Its archived part."""


class RangePartition(InputPartition):
    """The input of one task: a range, or several small ones."""

    def __init__(self, parts: Sequence[Part], window: Window) -> None:
        self.parts = tuple(parts)
        self.window = window


def range_partitions(source: MessageSource, tasks: Iterable[Sequence[Range]], window: Window) -> list[InputPartition]:
    """Return the input partition of each task, with the archived parts of its ranges."""
    archived = source if isinstance(source, ArchivedSource) else None
    return [
        RangePartition([Part(one, archived.archived_range(one) if archived else None) for one in task], window)
        for task in tasks
    ]


def read_ranges(options: SourceOptions, schema: StructType, task: RangePartition) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task."""
    arrow = to_arrow_schema(schema, timezone="UTC")
    values, fail = value_columns(schema), options.fail_on_data_loss
    decoder = Decoder(arrow, values, task.window, fail_on_data_loss=fail)
    archived_rows = ArchivedRowReader(arrow, values, fail_on_data_loss=fail)
    source = open_source(options)
    try:
        for wanted, archived_range in task.parts:
            try:
                if isinstance(source, ArchivedSource) and archived_range is not None:
                    yield from _read_archived_range(source, wanted, archived_range, decoder, archived_rows, fail)
                else:
                    yield from decoder.record_batches(wanted, _batches(source, wanted, fail, skip_removed=True))
            except OffsetOutOfRange as error:
                raise data_loss_error(wanted, str(error)) from error
    finally:
        source.close()


def _batches(source: MessageSource, wanted: Range, fail: bool, *, skip_removed: bool) -> Iterator[Batch]:
    offsets = wanted.topic, wanted.partition, wanted.start, wanted.end
    return source.batches(*offsets) if fail else readable_batches(source, *offsets, skip_removed=skip_removed)


def _read_archived_range(
    source: ArchivedSource,
    wanted: Range,
    archived_range: ArchivedRange,
    decoder: Decoder,
    archived_rows: ArchivedRowReader,
    fail: bool,
) -> Iterator[pa.RecordBatch]:
    """Read a range from the archive, then from the log, and from the archive again if the log is trimmed meanwhile."""
    at = min(archived_range.log_first, wanted.end)
    yield from archived_rows.record_batches(wanted._replace(end=at), archived_range.files)
    while at < wanted.end:
        left = wanted._replace(start=at)
        tracked = _TrackedBatches(at, _batches(source.log, left, fail, skip_removed=False))
        yield from decoder.record_batches(left, tracked.batches())
        if tracked.gone is None:
            return
        at = tracked.position
        more = source.find_continuation(wanted._replace(start=at), archived_range.topic_id)
        if more is not None:
            yield from archived_rows.record_batches(wanted._replace(start=at, end=more.end), more.files)
            at = more.end
        elif fail:
            raise tracked.gone
        else:
            first = _first_offset(source.log, wanted)
            if first <= at:
                return
            logger.warning(
                "offsets were removed; skipping them  topic=%s partition=%s first=%s last=%s",
                wanted.topic,
                wanted.partition,
                at,
                first - 1,
            )
            at = first


def _first_offset(source: MessageSource, wanted: Range) -> int:
    """Return the first available offset of a partition; 0 if its topic was deleted."""
    try:
        return source.topic(wanted.topic).spans.get(wanted.partition, OffsetSpan(0, 0)).first
    except TopicNotFound:
        return 0


class _TrackedBatches:
    """Iterates batches, and records the position and the error when the log ends too early."""

    def __init__(self, start: int, batches: Iterator[Batch]) -> None:
        self.position = start
        self.gone: OffsetOutOfRange | None = None
        self._batches = batches

    def batches(self) -> Iterator[Batch]:
        """Yield the batches; afterwards `gone` is the error if some were removed."""
        try:
            for batch in self._batches:
                yield batch
                self.position = batch.next_offset
        except OffsetOutOfRange as error:
            self.gone = error


def data_loss_error(wanted: Range, why: str) -> OffsetOutOfRange:
    """Return the error for a range of which some messages were removed."""
    return OffsetOutOfRange(
        f"offsets {wanted.start} to {wanted.end - 1} of {wanted.topic}[{wanted.partition}] cannot all be read: {why}. "
        'With option("failOnDataLoss", "false") the read goes on with what there is'
    )


def resolve_bound(source: MessageSource, topics: Iterable[TopicState], bound: Bound) -> dict[tuple[str, int], int]:
    """Resolve a bound to an offset in each partition."""
    offsets: dict[tuple[str, int], int] = {}
    for topic in topics:
        given = bound.by_partition.get(topic.name, {})
        if bound.edge in (Edge.OFFSETS, Edge.TIMES) and bound.time_us is None:
            _check_given(topic, given, bound)
        for number, span in topic.spans.items():
            if bound.edge is Edge.EARLIEST:
                offsets[topic.name, number] = span.first
            elif bound.edge is Edge.LATEST:
                offsets[topic.name, number] = span.end
            elif bound.edge is Edge.OFFSETS:
                offsets[topic.name, number] = {EARLIEST: span.first, LATEST: span.end}.get(given[number], given[number])
        if bound.edge is Edge.TIMES:
            found = _at_times(source, topic, given, bound.time_us)
            offsets |= {(topic.name, number): min(found[number], span.end) for number, span in topic.spans.items()}
    return offsets


def _check_given(topic: TopicState, given: Any, bound: Bound) -> None:
    absent, strange = sorted(topic.spans.keys() - given.keys()), sorted(given.keys() - topic.spans.keys())
    if absent or strange:
        what = "offsets" if bound.edge is Edge.OFFSETS else "times"
        raise InvalidArgument(
            f"the {what} given for {topic.name} are for partitions {sorted(given)}; it has {sorted(topic.spans)}: "
            "give one for each"
        )


def _at_times(source: MessageSource, topic: TopicState, given: Any, for_all: int | None) -> dict[int, int]:
    if for_all is not None:
        return source.at_time(topic.name, for_all)
    times = set(given.values())
    found = {time_us: source.at_time(topic.name, time_us) for time_us in times}
    return {number: found[given[number]][number] for number in topic.spans}


class HeadraceReader(DataSourceReader):
    """Reads the messages that topics have when the read is planned."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._window = Window()

    @property
    def pushFilters(self) -> "_Push":  # Spark's name
        """Accepts filters that Spark pushes down."""
        return _Push(self._push)

    def partitions(self) -> list[InputPartition]:
        """Plan the tasks."""
        source = open_source(self._options)
        try:
            ranges, spans = self._ranges(source)
            parts = split_ranges([self._window.narrowed(one) for one in ranges], spans, self._options.min_partitions)
            # Spark replaces an empty list by a partition of its own.
            return range_partitions(
                source, assign_to_tasks(parts, spans, self._options.min_partitions) or [()], self._window
            )
        finally:
            source.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task."""
        assert isinstance(partition, RangePartition)
        if partition.parts:
            yield from read_ranges(self._options, self._schema, partition)

    def _ranges(self, source: MessageSource) -> tuple[list[Range], dict[tuple[str, int], OffsetSpan]]:
        topics = chosen_topics(source, self._options)
        spans = {(topic.name, number): span for topic in topics for number, span in topic.spans.items()}
        starts = resolve_bound(source, topics, self._options.start or Bound(Edge.EARLIEST))
        ends = resolve_bound(source, topics, self._options.end)
        if self._window.time_min_us is not None:
            for topic in topics:
                for number, offset in source.at_time(topic.name, self._window.time_min_us).items():
                    if number in topic.spans:
                        starts[topic.name, number] = max(starts[topic.name, number], offset)
        ranges = []
        for (name, number), span in spans.items():
            one = Range(name, number, starts[name, number], ends[name, number])
            ranges.append(self._checked(one, span))
        return ranges, spans

    def _checked(self, one: Range, span: OffsetSpan) -> Range:
        """Return the available part of a range; raises if that is not all of it and data loss is an error."""
        within = one._replace(start=max(one.start, span.first), end=min(one.end, span.end))
        if within != one and one.size and self._options.fail_on_data_loss:
            raise data_loss_error(one, f"there are {span.first} to {span.end - 1}")
        return within if within.size else one._replace(end=one.start)

    def _push(self, filters: list[Filter]) -> list[Filter]:
        """Apply filters; returns those that Spark has to apply as well."""
        return [one for one in filters if not push(self._window, one)]


class _Push:
    """`pushFilters`, which Spark calls if `spark.sql.python.filterPushdown.enabled` is true.

    If it is false, Spark refuses readers that override `pushFilters`. This object passes for the base class's
    method, so that the source works with and without the setting.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, push: Any) -> None:
        self._push = push

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        return list(self._push(filters))


def push(window: Window, one: Filter) -> bool:
    """Narrow a window by a filter; returns whether the window implies the filter."""
    if isinstance(one, IsNotNull):
        return one.attribute in (("topic",), ("partition",), ("offset",), ("timestamp",))
    if isinstance(one, EqualTo | In) and one.attribute == ("partition",):
        window.only_partitions([one.value] if isinstance(one, EqualTo) else one.value)
        return True
    if not isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        return False
    if one.attribute == ("offset",):
        _narrow(one, int(one.value), window.from_offset, window.to_offset)
        return True
    if one.attribute == ("timestamp",) and isinstance(one.value, datetime):
        value = one.value if one.value.tzinfo is not None else one.value.replace(tzinfo=UTC)
        _narrow(one, (value - _EPOCH) // timedelta(microseconds=1), window.from_time, window.to_time)
    return False


def _narrow(one: Filter, value: int, begin: Any, end: Any) -> None:
    if isinstance(one, EqualTo | GreaterThanOrEqual):
        begin(value)
    if isinstance(one, EqualTo | LessThanOrEqual):
        end(value)
    if isinstance(one, GreaterThan):
        begin(value + 1)
    if isinstance(one, LessThan):
        end(value - 1)
