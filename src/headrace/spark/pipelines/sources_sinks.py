"""The sources and the sink of a pipeline."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from headrace.model.errors import InvalidArgument
from headrace.model.topic import parse_topic

HEADRACE = "headrace"
PLAIN_SINKS = ("console", "noop")
"""Spark's sinks that need no options."""
_SELECTING = ("subscribe", "subscribepattern", "assign")
_SOURCE_WORDS = ("format", "schema", "batch", "watermark")
_SINK_WORDS = ("format", "partitionBy", "table")


@dataclass(frozen=True)
class PipelineSource:
    """A source: the arguments of `spark.readStream`."""

    argument: str
    """Its name as a function's argument, or as a view."""
    format: str
    options: Mapping[str, str] = field(default_factory=dict)
    schema: str = ""
    """Columns and types, for sources that require a schema."""
    batch: bool = False
    """Whether the source is read once as a table, not as a stream."""
    watermark: tuple[str, str] | None = None
    """A column, and how late its rows may be."""

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of the pipeline's broker that the source names."""
        plain = {name.lower(): value for name, value in self.options.items()}
        if self.format != HEADRACE or "address" in plain or "path" in plain:
            return ()
        return tuple(name.strip() for name in plain.get("subscribe", "").split(",") if name.strip())


@dataclass(frozen=True)
class PipelineSink:
    """The sink: the arguments of `writeStream`."""

    format: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    """Called with each batch as a DataFrame, and its number."""
    partition_by: tuple[str, ...] = ()
    table: str = ""

    @property
    def keeps_progress(self) -> bool:
        """Whether the query uses a checkpoint; sinks that only show rows start over."""
        return self.format not in (*PLAIN_SINKS, "memory")

    @property
    def topics(self) -> tuple[str, ...]:
        """The topic of the pipeline's broker that receives all rows."""
        ours = self.format == HEADRACE and "address" not in self.options
        return (self.options["topic"],) if ours and "topic" in self.options else ()

    def __str__(self) -> str:
        if self.function is not None:
            return f"{getattr(self.function, '__name__', 'a function')}()"
        topic = self.options.get("topic", "")
        return topic if self.format == HEADRACE else self.table or self.options.get("path") or self.format


def sources_of(given: Any, options: Mapping[str, Any]) -> tuple[PipelineSource, ...]:
    """Return the sources of a definition; `options` apply to those that are topics.

    >>> [source.options for source in sources_of("orders", {"maxOffsetsPerTrigger": 5})]
    [{'maxOffsetsPerTrigger': '5', 'subscribe': 'orders'}]
    """
    if isinstance(given, str):
        named = [("", given)]
    elif isinstance(given, list | tuple):
        named = [("", each) for each in given]
    elif isinstance(given, Mapping):
        named = list(given.items())
    else:
        raise InvalidArgument(
            f"source is a topic, a list of topics, or argument names to topics or options, not {given!r}"
        )
    if not named:
        raise InvalidArgument("a pipeline has at least one source")
    return tuple(source_of(argument, each, options) for argument, each in named)


def source_of(argument: str, given: Any, options: Mapping[str, Any]) -> PipelineSource:
    """Return a source from a topic's name or from options."""
    own: dict[str, Any] = {"subscribe": str(parse_topic(given))} if isinstance(given, str) else {}
    if isinstance(given, Mapping):
        own = dict(given)
    elif not own:
        raise InvalidArgument(f"a source is a topic or a dictionary of options, not {given!r}")
    _check_words(own, _SOURCE_WORDS)
    kind, schema = own.pop("format", HEADRACE), own.pop("schema", "")
    batch, watermark = own.pop("batch", False), own.pop("watermark", None)
    for name, text in (("format", kind), ("schema", schema)):
        if not isinstance(text, str):
            raise InvalidArgument(f"the {name} of a source is text, not {text!r}")
    if not isinstance(batch, bool):
        raise InvalidArgument(f"batch is True or False, not {batch!r}")
    if kind == HEADRACE:
        own = {**options, **own}
        _check_selection(own)
    return PipelineSource(argument, kind, texts(own), schema, batch, _watermark(watermark))


def sink_of(given: Any) -> PipelineSink:
    """Return the sink of a definition.

    >>> str(sink_of("alerts")), str(sink_of({"format": "parquet", "path": "/tmp/out"}))
    ('alerts', '/tmp/out')
    """
    if isinstance(given, str):
        return (
            PipelineSink(given) if given in PLAIN_SINKS else PipelineSink(HEADRACE, {"topic": str(parse_topic(given))})
        )
    if callable(given):
        return PipelineSink(function=given)
    if not isinstance(given, Mapping) or not given:
        raise InvalidArgument(
            f"sink is a topic, {', '.join(PLAIN_SINKS)}, a dictionary of options, or a function of a batch, "
            f"not {given!r}"
        )
    own = dict(given)
    _check_words(own, _SINK_WORDS)
    table, columns = own.pop("table", ""), own.pop("partitionBy", ())
    kind = own.pop("format", "" if table else HEADRACE)
    by = (columns,) if isinstance(columns, str) else tuple(columns)
    if kind == HEADRACE and "topic" in own:
        parse_topic(str(own["topic"]))
    return PipelineSink(str(kind), texts(own), None, by, str(table))


def _check_selection(options: Mapping[str, Any]) -> None:
    """Raise InvalidArgument unless the options of a Headrace source name what to read."""
    names = {name.lower() for name in options}
    if not names & {*_SELECTING, "view"}:
        near = [name for name in options if get_close_matches(name.lower(), _SELECTING, 1)]
        hint = f"; did you mean that by {near[0]!r}?" if near else ""
        raise InvalidArgument(f"a source has subscribe, subscribePattern or assign, which say what to read{hint}")


def _check_words(own: Mapping[str, Any], words: tuple[str, ...]) -> None:
    """Raise InvalidArgument for one of our option names in the wrong case."""
    for name in own:
        same = [word for word in words if word.lower() == name.lower() and word != name]
        if same:
            raise InvalidArgument(f"write {same[0]}, not {name}")


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Convert option values to Spark's text form.

    >>> texts({"failOnDataLoss": False, "assign": {"orders": [0, 1]}})
    {'failOnDataLoss': 'false', 'assign': '{"orders": [0, 1]}'}
    """
    return {name: _text(name, value) for name, value in options.items()}


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | Mapping | list):
        return json.dumps(value)
    raise InvalidArgument(f"the option {name!r} is text, a number, true or false, or such in a list, not {value!r}")


def _watermark(given: Any) -> tuple[str, str] | None:
    """Parse a watermark: a column and a time span, from a pair or from text."""
    if given is None:
        return None
    parts = given.split(None, 1) if isinstance(given, str) else list(given)
    if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        raise InvalidArgument(f"a watermark is a column and a time span, such as 'timestamp 10 minutes', not {given!r}")
    return parts[0], parts[1].strip()
