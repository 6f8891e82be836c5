"""Reads topics as a stream: plans the offsets of each trigger, which Spark stores in its checkpoint."""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from headrace.model.errors import HeadraceError, InvalidArgument, OffsetOutOfRange, TopicNotFound
from headrace.spark.source.message_source import MessageSource, chosen_topics, open_source
from headrace.spark.source.options import Bound, Edge, SourceOptions
from headrace.spark.source.planning import Range, TopicState, Window, assign_to_tasks, limit_rows, split_ranges
from headrace.spark.source.reader import RangePartition, data_loss_error, range_partitions, read_ranges, resolve_bound

logger = logging.getLogger("headrace.spark")

Offsets = dict[str, dict[str, Any]]
"""The offsets in a checkpoint: topics to {"id": the topic's id, "offsets": {"0": the next offset}}."""


class HeadraceStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow. The driver keeps one for the life of a query; executors read with copies."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        if options.end != Bound(Edge.LATEST):
            raise InvalidArgument("a stream has no end: leave endingOffsets and endingTimestamp out")
        self._options = options
        self._schema = schema
        self._opened: MessageSource | None = None
        self._target: Offsets | None = None
        """The end offsets of the query, with the trigger `availableNow`."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def _source(self) -> MessageSource:
        if self._opened is None:
            self._opened = open_source(self._options)
        return self._opened

    def initialOffset(self) -> Offsets:  # Spark's names, here and below
        """Return the start offsets of a new query."""
        topics = chosen_topics(self._source, self._options)
        offsets = resolve_bound(self._source, topics, self._options.start or Bound(Edge.LATEST))
        for topic in topics:
            for number, span in topic.spans.items():
                self._check_kept(Range(topic.name, number, offsets[topic.name, number], span.end), span.first)
        return _offsets(topics, offsets)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the row limit of a trigger."""
        return ReadAllAvailable() if self._options.max_offsets is None else ReadMaxRows(self._options.max_offsets)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Return the end offsets of the next trigger."""
        topics = [self._caught_up(start, topic) for topic in self._topics()]
        self._check_same(start, topics)
        ranges = []
        for topic in topics:
            before = self._known(start, topic)
            for number, span in topic.spans.items():
                begin = before.get(number, 0)
                end = max(self._end(topic, number, span.end), begin)
                ranges.append(Range(topic.name, number, begin, end))
        ends = {(one.topic, one.partition): one.end for one in ranges}
        if isinstance(limit, ReadMaxRows):
            ends = limit_rows(ranges, limit.max_rows)
        return _offsets(topics, ends)

    def prepareForTriggerAvailableNow(self) -> None:
        """Store the current end offsets of the topics."""
        topics = self._topics()
        self._target = _offsets(topics, resolve_bound(self._source, topics, Bound(Edge.LATEST)))

    def reportLatestOffset(self) -> Offsets:
        """Return the current end offsets of the topics."""
        topics = self._topics()
        return _offsets(topics, resolve_bound(self._source, topics, Bound(Edge.LATEST)))

    def partitions(self, start: Offsets, end: Offsets) -> list[InputPartition]:
        """Plan the tasks of a trigger."""
        ranges, spans = [], {}
        for name, ended in end.items():
            try:
                topic = self._source.topic(name)
            except TopicNotFound:
                self._lose(f"the topic {name} is gone, and with it what was to be read of it")
                continue
            if topic.id != ended["id"]:
                self._lose(f"the topic {name} was deleted and made again; what was to be read is gone")
                continue
            began = start.get(name, {})
            before = began["offsets"] if began.get("id") == topic.id else {}
            for number, span in topic.spans.items():
                if str(number) in ended["offsets"]:
                    one = Range(name, number, before.get(str(number), 0), ended["offsets"][str(number)])
                    ranges.append(self._check_kept(one, span.first))
                    spans[name, number] = span
        least = self._options.min_partitions
        parts = assign_to_tasks(split_ranges(ranges, spans, least), spans, least)
        return range_partitions(self._source, parts, Window())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task."""
        assert isinstance(partition, RangePartition)
        yield from read_ranges(self._options, self._schema, partition)

    def commit(self, end: Offsets) -> None:
        """Commit the query's position to the broker if the option `group.id` is set."""
        if not self._options.group:
            return
        positions = {
            (name, int(number)): offset for name, ended in end.items() for number, offset in ended["offsets"].items()
        }
        try:
            self._source.commit(self._options.group, positions)
        except HeadraceError as error:
            # Spark resumes from its checkpoint; the committed position is only for monitoring.
            logger.warning("position not committed  group=%s error=%s", self._options.group, error)

    def stop(self) -> None:
        """Close the source."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _topics(self) -> list[TopicState]:
        """Return the current state of the topics; deleted ones are an error, or left out."""
        if self._options.pattern:
            return chosen_topics(self._source, self._options)
        try:
            return chosen_topics(self._source, self._options)
        except TopicNotFound as error:
            self._lose(str(error))
        left = [name for name in self._options.topics or self._options.assigned if self._is_there(name)]
        states = [self._source.topic(name) for name in left]
        wanted = self._options.assigned
        return [
            TopicState(
                state.name, state.id, {n: s for n, s in state.spans.items() if not wanted or n in wanted[state.name]}
            )
            for state in states
        ]

    def _caught_up(self, start: Mapping[str, Any], topic: TopicState) -> TopicState:
        """Return the state of a topic once it has what the query has read; a node of a cluster may not know it yet."""
        began = start.get(topic.name, {})
        offsets = began["offsets"] if began.get("id") == topic.id else {}
        read = {int(number): offset for number, offset in offsets.items() if int(number) in topic.spans}
        if all(topic.spans[number].end >= offset for number, offset in read.items()):
            return topic
        now = self._source.caught_up(topic.name, read)
        return TopicState(
            topic.name, now.id, {number: now.spans.get(number, span) for number, span in topic.spans.items()}
        )

    def _is_there(self, name: str) -> bool:
        try:
            self._source.topic(name)
        except TopicNotFound:
            return False
        return True

    def _check_same(self, start: Mapping[str, Any], topics: list[TopicState]) -> None:
        """Raise or warn if topics of the checkpoint were deleted or the query reads other topics than before."""
        now = {topic.name: topic for topic in topics}
        for name in sorted(start.keys() - now.keys()):
            if self._options.pattern and re.fullmatch(self._options.pattern, name):
                self._lose(f"the topic {name}, which the query has read, was deleted, with what it had still to read")
            else:
                self._lose(
                    f"the checkpoint is of a query that reads {name}, and this one does not: what was still to be read "
                    "of it is left out. Name it again, or begin with a new checkpointLocation"
                )
        if self._options.pattern:
            return  # topics that are created later are read from their beginning
        for name, topic in now.items():
            if name not in start:
                self._lose(
                    f"the checkpoint knows nothing of the topic {name}: it is of a query that read "
                    f"{', '.join(sorted(start)) or 'no topic'}. It would be read from its first message on; begin with "
                    "a new checkpointLocation, or subscribe to the same topics"
                )
            elif self._options.assigned:
                self._check_same_partitions(topic, start[name])

    def _check_same_partitions(self, topic: TopicState, began: Mapping[str, Any]) -> None:
        read, named = {int(number) for number in began["offsets"]}, set(topic.spans)
        if began["id"] == topic.id and read != named:
            self._lose(
                f"the query has read the partitions {sorted(read)} of {topic.name}, by its checkpoint, and its option "
                f"assign names {sorted(named)}: begin with a new checkpointLocation, or name the same"
            )

    def _known(self, start: Mapping[str, Any], topic: TopicState) -> dict[int, int]:
        """Return the positions in a topic's partitions from the checkpoint; new partitions have none."""
        began = start.get(topic.name)
        if began is None:
            return {}
        if began["id"] != topic.id:
            self._lose(f"the topic {topic.name} was deleted and made again since the query has read it")
            return {}
        known = {int(number): offset for number, offset in began["offsets"].items()}
        for number, offset in known.items():
            span = topic.spans.get(number)
            if span is not None and offset > span.end:
                self._lose(f"{topic.name}[{number}] ends at offset {span.end}, but was read up to {offset} before")
        return known

    def _end(self, topic: TopicState, number: int, end: int) -> int:
        if self._target is None:
            return end
        target = self._target.get(topic.name)
        return min(end, target["offsets"].get(str(number), 0) if target and target["id"] == topic.id else 0)

    def _check_kept(self, one: Range, first: int) -> Range:
        if one.size and one.start < first:
            if self._options.fail_on_data_loss:
                raise data_loss_error(one, f"the first one that is kept is {first}")
            logger.warning(
                "offsets were removed; skipping them  topic=%s partition=%s first=%s last=%s",
                one.topic,
                one.partition,
                one.start,
                first - 1,
            )
            return one._replace(start=min(first, one.end))
        return one

    def _lose(self, why: str) -> None:
        if self._options.fail_on_data_loss:
            raise OffsetOutOfRange(
                f'{why}. With option("failOnDataLoss", "false") the query goes on with what there is'
            )
        logger.warning("%s", why)


def _offsets(topics: list[TopicState], offsets: Mapping[tuple[str, int], int]) -> Offsets:
    return {
        topic.name: {"id": topic.id, "offsets": {str(number): offsets[topic.name, number] for number in topic.spans}}
        for topic in topics
    }
