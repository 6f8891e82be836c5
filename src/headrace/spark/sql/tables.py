"""Topics as tables of a session: temporary views under the topics' names."""

import logging
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions

from headrace.client.connection.addresses import DEFAULT_ADDRESS
from headrace.model.errors import InvalidArgument, TopicNotFound
from headrace.model.topic import SYSTEM_PREFIX, parse_topic
from headrace.spark.datasource import table_schema
from headrace.spark.source.json_inference import all_objects, ddl, inferred_type, quoted
from headrace.spark.source.message_source import MessageSource, open_source
from headrace.spark.source.options import SourceOptions, source_options
from headrace.spark.source.sampling import sample

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger("headrace.spark")

Tables = bool | str | Iterable[str] | Mapping[str, Mapping[str, Any]]
"""Which topics are tables: all, some by names or patterns, or by names and patterns with options of the source."""

AUTO = "auto"
"""JSON if all sampled values are JSON objects, else text."""
_WILD = frozenset("*?")


def register(
    spark: "SparkSession",
    address: str | None = None,
    *,
    path: str | None = None,
    tables: Tables = True,
    value_format: str = "string",
    stream: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Create or replace temporary views of a session for topics; returns their names.

    A view has the topic's name. In SQL, put names with characters other than letters, digits and `_` in backquotes.
    Values and keys are text unless the options say otherwise. Call it again to register new topics and new JSON
    fields.

    Parameters:
        spark: the session.
        address: the broker's address; by default that of this machine.
        path: or a data directory, to be read without a broker.
        tables: True for all topics but Headrace's own; or names, or patterns in which `*` stands for any characters
            and `?` for one; or a dict of these with options of the source for each, of which the last match wins.
        value_format: how values are decoded by default: string, json, bytes, or auto, which is json where all sampled
            values are JSON objects, and string elsewhere.
        stream: the views are streams, for `spark.sql` in streaming queries.
        options: further options of the source, for all of them.
    """
    location = _location(address, path)
    common = {**location, "value.format": value_format, **(options or {})}
    source = open_source(SourceOptions(**location))
    try:
        wanted = _wanted(sorted(source.names()), tables)
        for name, own in _without_duplicates(wanted).items():
            given = _resolved(source, {**common, **own, "subscribe": name}, asked="value.format" in own)
            _table(spark, given, stream=stream).createOrReplaceTempView(quoted(name))
        return list(wanted)
    finally:
        source.close()


def topic_names(address: str | None = None, path: str | None = None) -> list[str]:
    """Return the names of all topics, including Headrace's own."""
    source = open_source(SourceOptions(**_location(address, path)))
    try:
        return sorted(source.names())
    finally:
        source.close()


def _location(address: str | None, path: str | None) -> dict[str, Any]:
    if path and address:
        raise InvalidArgument("give either `address`, a broker's, or `path`, a data directory's; not both")
    return {"path": path} if path else {"address": address or DEFAULT_ADDRESS}


def _resolved(source: MessageSource, given: Mapping[str, Any], *, asked: bool) -> dict[str, Any]:
    """Return the options with the inferred JSON schema; text where there is none, unless JSON was requested."""
    options = {name: str(value) for name, value in given.items()}
    if options["value.format"] not in (AUTO, "json") or "value.schema" in options:
        if options["value.format"] == AUTO:
            options["value.format"] = "json"  # why else give a schema?
        return options
    text = {**options, "value.format": "string"}
    plain = source_options({**options, "value.format": "bytes"})
    if "value" not in plain.columns:
        return text
    values = sample(source, plain)
    if options["value.format"] == AUTO and not all_objects(values):
        return text
    try:
        return {**options, "value.format": "json", "value.schema": ddl(inferred_type(values))}
    except InvalidArgument as error:
        if asked and options["value.format"] != AUTO:
            raise
        logger.warning("reading values as text  topic=%s reason=%s", options["subscribe"], error)
        return text


def _table(spark: "SparkSession", options: Mapping[str, str], *, stream: bool) -> "DataFrame":
    schema = table_schema(source_options(options))
    reader: Any = (spark.readStream if stream else spark.read).format("headrace").schema(schema)
    found: DataFrame = reader.options(**options).load()
    if options["value.format"] == "bytes" or "key" not in found.columns:
        return found
    return found.withColumn("key", functions.make_valid_utf8(functions.col("key").cast("string")))


def _without_duplicates(wanted: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the topics without those whose names differ only in case, which SQL ignores."""
    folded: dict[str, str] = {}
    for name in wanted:
        known = folded.setdefault(name.lower(), name)
        if known != name:
            logger.warning("topic names differ only in case; registering one  table=%s skipped=%s", known, name)
    return {name: wanted[name] for name in folded.values()}


def _wanted(names: list[str], tables: Tables) -> dict[str, dict[str, Any]]:
    """Return the topics to register, with their own options.

    >>> _wanted(["a", "b", "headrace.x"], True)
    {'a': {}, 'b': {}}
    >>> _wanted(["a", "b"], {"*": {}, "b": {"value.format": "json"}})
    {'a': {}, 'b': {'value.format': 'json'}}
    """
    if tables is False:
        return {}
    if tables is True:
        tables = "*"
    chosen: Mapping[str, Mapping[str, Any]]
    if isinstance(tables, Mapping):
        chosen = tables
    else:
        chosen = {name: {} for name in ([tables] if isinstance(tables, str) else tables)}
    wanted: dict[str, dict[str, Any]] = {}
    for pattern, own in chosen.items():
        found = [name for name in names if _matches(name, pattern)]
        if not found and not _WILD & set(pattern):
            raise TopicNotFound(f"there is no topic {pattern}; there are {', '.join(names[:20]) or 'none'}")
        for name in found:
            wanted[name] = wanted.get(name, {}) | dict(own)
    return dict(sorted(wanted.items()))


def _matches(name: str, pattern: str) -> bool:
    if name == pattern:
        return True
    internal = parse_topic(name).topic.startswith(SYSTEM_PREFIX)
    return fnmatchcase(name, pattern.replace("[", "[[]")) and (not internal or SYSTEM_PREFIX in pattern)
