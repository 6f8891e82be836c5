"""A look at some messages of topics, to see what their values are."""

from collections.abc import Iterator
from itertools import islice

from headrace.spark.source.message_source import MessageSource, chosen_topics, surviving
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.planning import Range

_SAMPLE = 1000
"""Messages that are looked at, of all partitions together."""


def sample(source: MessageSource, options: SourceOptions) -> list[bytes | None]:
    """Values of some messages: the oldest and the newest of each partition."""
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
    for batch in surviving(source, *wanted):
        columns = batch.columns()
        for value, place in zip(columns.values, batch.places(columns), strict=True):
            if wanted.start <= batch.base_offset + place < wanted.end:
                yield value
