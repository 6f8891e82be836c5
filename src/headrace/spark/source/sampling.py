"""Samples message values of topics, for schema inference."""

from collections.abc import Iterator
from itertools import islice

from headrace.spark.source.message_source import MessageSource, chosen_topics, readable_batches
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.planning import Range

_SAMPLE = 1000
"""Number of sampled messages, over all partitions."""


def sample(source: MessageSource, options: SourceOptions) -> list[bytes | None]:
    """Return values of the oldest and newest messages of each partition."""
    values: list[bytes | None] = []
    topics = chosen_topics(source, options)
    each = _SAMPLE // 2 // max(sum(len(topic.spans) for topic in topics), 1) + 1
    for topic in topics:
        for number, span in topic.spans.items():
            newest = max(span.end - each, span.first)
            values += islice(_values(source, Range(topic.name, number, span.first, newest)), each)
            values += islice(_values(source, Range(topic.name, number, newest, span.end)), each)
    return values


def _values(source: MessageSource, wanted: Range) -> Iterator[bytes | None]:
    for batch in readable_batches(source, *wanted):
        columns = batch.columns()
        for value, place in zip(columns.values, batch.places(columns), strict=True):
            if wanted.start <= batch.base_offset + place < wanted.end:
                yield value
