"""Leased subscriptions as tables: their pending, leased, scheduled and dead messages."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headrace.client._sync.connecting import connect
from headrace.model.errors import InvalidArgument
from headrace.model.headers import Headers, header_pairs, header_text
from headrace.model.leasing import OWNER_HEADER
from headrace.model.names import derived_topic
from headrace.model.subscription import DEAD_SUFFIX
from headrace.spark.source.options import DEFAULT_COLUMNS, SourceOptions
from headrace.spark.source.values import value_columns

if TYPE_CHECKING:
    from headrace.client._sync.leasing.queue import Queue
    from headrace.client.leasing.jobs import PendingMessage

STATUSES = {"pending": "", "leases": "leased", "timeline": "waiting", "dead": "dead"}
"""The message status that each view selects."""

_PAGE = 1000
_SAMPLE = 1000
_CLIENT = "spark"
_DEAD = "headrace-dead-"

_HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_TYPES: dict[str, DataType] = {
    "topic": StringType(),
    "subscription": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "key": BinaryType(),
    "value": BinaryType(),
    "headers": _HEADERS,
    "due": TimestampType(),
    "priority": IntegerType(),
    "expires": TimestampType(),
    "owner": StringType(),
    "status": StringType(),
    "ready": TimestampType(),
    "deliveries": IntegerType(),
    "version": IntegerType(),
    "holder": StringType(),
    "until": TimestampType(),
    "reason": StringType(),
    "died": TimestampType(),
    "dead_topic": StringType(),
    "dead_partition": IntegerType(),
    "dead_offset": LongType(),
}
_MESSAGE = ("topic", "subscription", "partition", "offset", "timestamp", "key", "value", "headers")
_MORE = ("due", "priority", "expires", "owner")
_COLUMNS = {
    "pending": (*_MESSAGE, *_MORE, "status", "ready", "deliveries", "version", "holder", "until", "reason"),
    "leases": (*_MESSAGE, *_MORE, "holder", "until", "deliveries", "version"),
    "timeline": (*_MESSAGE, *_MORE, "ready", "deliveries", "version", "reason"),
    "dead": (
        *(*_MESSAGE, "priority", "owner", "died", "reason", "deliveries", "holder"),
        *("dead_topic", "dead_partition", "dead_offset"),
    ),
}


def view_schema(options: SourceOptions) -> StructType | str:
    """Return the schema of a view; as DDL text if the user gave DDL for the value."""
    _check(options)
    names = [name for name in _COLUMNS[options.view] if name != "headers" or "headers" in options.columns]
    fields = [StructField(name, _TYPES[name]) for name in names]
    at = names.index("value")
    if options.value_format == "bytes":
        return StructType(fields)
    if options.value_format == "string":
        fields[at] = StructField("value", StringType())
        return StructType(fields)
    corrupt = StructField("_corrupt", StringType())
    if options.value_schema:
        words = [f"{field.name} {field.dataType.simpleString()}" for field in (*fields, corrupt)]
        words[at] = f"value struct<{options.value_schema}>"
        return ", ".join(words)
    from headrace.spark.source.json_values import inferred_type

    with _connected(options) as bus:
        pages = _pages(bus.queue(options.topics[0], options.subscription), options)
        samples = [message.value for message in islice((one for page in pages for one in page), _SAMPLE)]
    fields[at] = StructField("value", inferred_type(samples))
    return StructType([*fields, corrupt])


class ViewReader(DataSourceReader):
    """Reads a view page by page in one task; each page shows the state at its time of reading."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        _check(options)
        self._options = options
        self._schema = schema
        known = {*_COLUMNS[options.view], "_corrupt"}
        for name in schema.fieldNames():
            if name not in known:
                raise InvalidArgument(
                    f"the view {options.view} has no column {name}; it has {', '.join(_COLUMNS[options.view])}"
                )

    def partitions(self) -> list[InputPartition]:
        """Check that the subscription exists, and return one task."""
        with _connected(self._options) as bus:
            bus.queue(self._options.topics[0], self._options.subscription).stats()
        return [InputPartition(0)]

    def read(self, _partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages, a record batch per page."""
        options = self._options
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        values = value_columns(self._schema)
        with _connected(options) as bus:
            queue = bus.queue(options.topics[0], options.subscription)
            page_of = _dead_page(queue) if options.view == "dead" else _page(options.subscription)
            for messages in _pages(queue, options):
                columns = page_of(messages)
                arrays: dict[str, pa.Array] = {}
                for name in arrow.names:
                    if name not in ("value", "_corrupt"):
                        arrays[name] = _array(columns[name](), arrow.field(name).type)
                    elif name not in arrays:
                        arrays |= values(pa.array([message.value for message in messages], pa.binary()))
                yield pa.RecordBatch.from_arrays([arrays[name] for name in arrow.names], schema=arrow)


Columns = dict[str, Callable[[], Sequence[Any]]]
"""Maps column names to functions that build the columns of a page on demand."""


def _page(subscription: str) -> Callable[[list["PendingMessage"]], Columns]:
    """Return the function that builds the columns of unsettled messages."""

    def columns(messages: list["PendingMessage"]) -> Columns:
        return {
            "topic": lambda: [one.topic for one in messages],
            "subscription": lambda: [subscription] * len(messages),
            "partition": lambda: [one.partition for one in messages],
            "offset": lambda: [one.offset for one in messages],
            "timestamp": lambda: [one.timestamp for one in messages],
            "key": lambda: [one.key for one in messages],
            "headers": lambda: [_shown(one.headers) for one in messages],
            "due": lambda: [one.due for one in messages],
            "priority": lambda: [one.priority for one in messages],
            "expires": lambda: [one.expires for one in messages],
            "owner": lambda: [_header(one, OWNER_HEADER) for one in messages],
            "status": lambda: [one.status for one in messages],
            "ready": lambda: [one.ready_us or None for one in messages],
            "deliveries": lambda: [one.deliveries for one in messages],
            "version": lambda: [one.version for one in messages],
            "holder": lambda: [one.holder or None for one in messages],
            "until": lambda: [one.until_us or None for one in messages],
            "reason": lambda: [one.reason or None for one in messages],
        }

    return columns


def _dead_page(queue: "Queue") -> Callable[[list["PendingMessage"]], Columns]:
    """Return the function that builds the columns of dead messages: their origin, history and dead-letter offset."""
    where = queue.stats().settings.get("dead_letter_topic") or derived_topic(queue.topic, DEAD_SUFFIX)
    living = _page(queue.subscription)

    def columns(messages: list["PendingMessage"]) -> Columns:
        dead: Columns = {
            "topic": lambda: [_header(one, f"{_DEAD}topic") for one in messages],
            "partition": lambda: [_number(one, f"{_DEAD}partition") for one in messages],
            "offset": lambda: [_number(one, f"{_DEAD}offset") for one in messages],
            "headers": lambda: [_shown(one.headers, without=_DEAD) for one in messages],
            "died": lambda: [_number(one, f"{_DEAD}time") for one in messages],
            "reason": lambda: [_header(one, f"{_DEAD}reason") for one in messages],
            "deliveries": lambda: [_number(one, f"{_DEAD}deliveries") for one in messages],
            "holder": lambda: [_last_holder(one) for one in messages],
            "dead_topic": lambda: [where] * len(messages),
            "dead_partition": lambda: [one.partition for one in messages],
            "dead_offset": lambda: [one.offset for one in messages],
        }
        return living(messages) | dead

    return columns


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).view(kind)
    return pa.array(values, kind)


def _header(message: "PendingMessage", name: str) -> str | None:
    content = (message.headers or {}).get(name)
    return None if content is None else content.decode("utf-8", "replace") or None


def _number(message: "PendingMessage", name: str) -> int | None:
    text = header_text(message.headers or {}, name)
    return int(text) if text.isdigit() else None


def _last_holder(message: "PendingMessage") -> str | None:
    try:
        text = header_text(message.headers or {}, f"{_DEAD}history") or b"[]"
        history = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.DecodeError:
        return None
    return next((note["holder"] for note in reversed(history) if note.get("holder")), None)


def _shown(headers: Headers | None, without: str = "\0") -> list[dict[str, Any]] | None:
    if headers is None:
        return None
    return [{"key": name, "value": content} for name, content in header_pairs(headers) if not name.startswith(without)]


def _pages(queue: "Queue", options: SourceOptions) -> Iterator[list["PendingMessage"]]:
    return queue.find_pages(status=STATUSES[options.view], page=_PAGE)


def _connected(options: SourceOptions) -> Any:
    token = options.token or None
    return connect(options.address, name=_CLIENT, timeout=options.timeout, wait=options.timeout, token=token)


def _check(options: SourceOptions) -> None:
    if tuple(name for name in options.columns if name != "headers") != DEFAULT_COLUMNS:
        raise InvalidArgument("a view has columns of its own: leave the option `columns` out, and select what you want")
