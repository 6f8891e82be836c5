"""Validates the options and columns of the sink when a query is planned."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from headrace.client.connection.addresses import DEFAULT_ADDRESS
from headrace.model.errors import InvalidArgument
from headrace.model.topic import parse_topic
from headrace.spark.tls_options import TLS_NAMES, TOKEN_NAMES, address_with_tls, given_token

_NAMES = ("address", *TLS_NAMES, *TOKEN_NAMES, "topic", "timeout", "txnAppId", "txnVersion")
_SPARKS = ("checkpointlocation", "queryname")
"""Spark's own options, which it passes to every sink."""
_APP_CHARS_MAX = 150
_VERSION_MAX = (1 << 63) - 1

_TEXT = (BinaryType, StringType)
_NUMBER = (ByteType, ShortType, IntegerType, LongType)
_TIME = (TimestampType, TimestampNTZType)


@dataclass(frozen=True)
class SinkOptions:
    """The validated options of the sink."""

    address: str = DEFAULT_ADDRESS
    topic: str = ""
    """Topic for all rows; empty if the column `topic` names it for each."""
    timeout: float = 60.0
    """Request timeout in seconds, which covers a restart of the broker."""
    app_id: str = ""
    """The application's id for idempotent batch writes; empty if writes are not idempotent."""
    version: int = 0
    """The number of the application's batch write."""
    token: str = dataclasses.field(default="", repr=False)
    """The token to authenticate with; never shown."""


def sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Validate a user's options; raises InvalidArgument."""
    _check_names(given)
    plain = {name.lower(): value for name, value in given.items()}
    address, topic = address_with_tls(plain), plain.get("topic", "")
    if "topic" in plain:
        parse_topic(topic)
    if ("txnappid" in plain) != ("txnversion" in plain):
        raise InvalidArgument("txnAppId and txnVersion go together: who writes, and which of the writes it is")
    app_id = plain.get("txnappid", "")
    if "txnappid" in plain and not (0 < len(app_id) <= _APP_CHARS_MAX and app_id.isprintable() and "/" not in app_id):
        raise InvalidArgument(f"the option txnAppId has 1 to {_APP_CHARS_MAX} printable characters, and no slash")
    return SinkOptions(address, topic, _timeout(plain), app_id, _version(plain), given_token(plain))


def checked_columns(schema: StructType, options: SinkOptions) -> dict[str, int]:
    """Return the index of each column of the sink in a schema; raises InvalidArgument for one that does not fit."""
    indexes: dict[str, int] = {}
    for index, field in enumerate(schema.fields):
        name = field.name.lower()
        if name not in _COLUMNS:
            raise InvalidArgument(f"the sink has no column {field.name}: leave it out; there are {_known()}")
        if name in indexes:
            raise InvalidArgument(f"the column {name} is there twice")
        words, fits = _COLUMNS[name]
        if not fits(field.dataType) and not isinstance(field.dataType, NullType):
            kind = field.dataType.simpleString()
            raise InvalidArgument(f"the column {name} is {words}, not {kind}; cast it")
        indexes[name] = index
    if "value" not in indexes:
        raise InvalidArgument(f"the column value is missing; it is {_COLUMNS['value'][0]}")
    if "topic" not in indexes and not options.topic:
        raise InvalidArgument('nothing says where to write: give option("topic", ...), or a column topic')
    return indexes


def _among(*kinds: type[DataType]) -> Callable[[DataType], bool]:
    return lambda kind: isinstance(kind, kinds)


def _is_headers(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, _TEXT)
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = kind.elementType.fields
    named = [field.name.lower() for field in fields] == ["key", "value"]
    return named and isinstance(fields[0].dataType, StringType) and isinstance(fields[1].dataType, _TEXT)


_COLUMNS: dict[str, tuple[str, Callable[[DataType], bool]]] = {
    "value": ("binary or string", _among(*_TEXT)),
    "topic": ("string", _among(StringType)),
    "key": ("binary or string", _among(*_TEXT)),
    "headers": (
        "array<struct<key:string,value:binary>> or map<string,binary>, with string for binary too",
        _is_headers,
    ),
    "partition": ("int", _among(*_NUMBER)),
    "timestamp": ("timestamp", _among(*_TIME)),
    "due": ("timestamp", _among(*_TIME)),
    "priority": ("int", _among(*_NUMBER)),
    "expires": ("timestamp", _among(*_TIME)),
}


def _known() -> str:
    return ", ".join(f"{name} ({words})" for name, (words, _) in _COLUMNS.items())


def _check_names(given: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in _NAMES}
    for name in given:
        if name.lower() in known or name.lower() in _SPARKS:
            continue
        if name.lower() == "kafka.bootstrap.servers":
            raise InvalidArgument(
                'instead of kafka.bootstrap.servers give option("address", "headrace://host:port,host:port")'
            )
        if name.lower() == "path":
            raise InvalidArgument('the sink writes to a broker: give option("topic", ...), and no path')
        near = get_close_matches(name.lower(), known, 1)
        hint = f"; is {known[near[0]]} meant?" if near else f"; there are {', '.join(_NAMES)}"
        raise InvalidArgument(f"the sink has no option {name}{hint}")


def _timeout(plain: Mapping[str, str]) -> float:
    text = plain.get("timeout", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidArgument(f"the option timeout is a number of seconds greater than 0, not {text!r}")
    return seconds


def _version(plain: Mapping[str, str]) -> int:
    text = plain.get("txnversion", "0")
    if not (text.isascii() and text.isdigit() and int(text) <= _VERSION_MAX):
        raise InvalidArgument(f"the option txnVersion is a whole number from 0 on, not {text!r}")
    return int(text)
