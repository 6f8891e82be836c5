"""The options of the source, named like those of Spark's Kafka connector where they mean the same."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import Any

import msgspec

from headrace.client.connection.addresses import DEFAULT_ADDRESS
from headrace.model.errors import InvalidArgument
from headrace.spark.tls_options import TLS_NAMES, TOKEN_NAMES, address_with_tls, given_token

DEFAULT_COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value")
MORE_COLUMNS = ("headers", "due", "priority", "expires")
VIEWS = ("pending", "leases", "timeline", "dead")
EARLIEST, LATEST = -2, -1

_NAMES = (
    "address",
    *TLS_NAMES,
    *TOKEN_NAMES,
    "path",
    "timeout",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "includeHeaders",
    "columns",
    "value.format",
    "value.schema",
    "group.id",
    "archive",
    "view",
    "subscription",
)
_LOWER = {name.lower(): name for name in _NAMES}


class Edge(Enum):
    """The kind of a bound."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSETS = "offsets"
    TIMES = "times"


@dataclass(frozen=True)
class Bound:
    """Where a read begins or ends: the same for all partitions, or given per partition."""

    edge: Edge
    by_partition: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Maps topics to partitions to offsets, or to times in microseconds since 1970."""
    time_us: int | None = None
    """A time for all partitions."""


@dataclass(frozen=True)
class SourceOptions:
    """The validated options of the source."""

    address: str = DEFAULT_ADDRESS
    path: str = ""
    """Path of a data directory, to read without a broker."""
    timeout: float = 60.0
    """Request timeout in seconds, which covers a restart of the broker."""
    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    start: Bound | None = None
    """None for the default of Kafka's connector: the earliest for a batch, the latest for a stream."""
    end: Bound = Bound(Edge.LATEST)
    max_offsets: int | None = None
    min_partitions: int | None = None
    fail_on_data_loss: bool = True
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    value_format: str = "bytes"
    value_schema: str = ""
    group: str = ""
    archive: bool = True
    """Whether reads include archived messages that the log no longer has."""
    view: str = ""
    subscription: str = "default"
    token: str = field(default="", repr=False)
    """The token to authenticate with; never shown."""


def source_options(given: Mapping[str, str]) -> SourceOptions:
    """Validate a user's options; raises InvalidArgument."""
    plain = {name.lower(): value for name, value in given.items()}
    _check_names(given)
    path = plain.get("path", "")
    if path and "address" in plain:
        raise InvalidArgument("give either `address`, a broker's, or `path`, a data directory's; not both")
    address = address_with_tls(plain)
    topics, pattern, assigned = _chosen(plain)
    view = _one_of(plain, "view", ("", *VIEWS), "")
    if view and path:
        raise InvalidArgument("a view is asked of a broker: give `address`, not `path`")
    if view and (pattern or assigned or len(topics) != 1):
        raise InvalidArgument('a view is of one topic: option("subscribe", "TOPIC")')
    return SourceOptions(
        address=address,
        path=path,
        timeout=_number(plain, "timeout", float) or 60.0,
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        start=_bound(plain, "starting"),
        end=_bound(plain, "ending") or Bound(Edge.LATEST),
        max_offsets=_number(plain, "maxOffsetsPerTrigger", int),
        min_partitions=_number(plain, "minPartitions", int),
        fail_on_data_loss=_flag(plain, "failOnDataLoss", True),
        columns=_columns(plain),
        value_format=_one_of(plain, "value.format", ("bytes", "string", "json"), "bytes"),
        value_schema=plain.get("value.schema", ""),
        group=plain.get("group.id", ""),
        archive=_flag(plain, "archive", True),
        view=view,
        subscription=plain.get("subscription", "default"),
        token=given_token(plain),
    )


def _check_names(given: Mapping[str, str]) -> None:
    for name in given:
        if name.lower() in _LOWER:
            continue
        if name.lower() == "kafka.bootstrap.servers":
            raise InvalidArgument(
                'instead of kafka.bootstrap.servers give option("address", "headrace://host:port,host:port")'
            )
        near = get_close_matches(name.lower(), _LOWER, 1)
        hint = f"; is {_LOWER[near[0]]} meant?" if near else f"; there are {', '.join(_NAMES)}"
        raise InvalidArgument(f"the source has no option {name}{hint}")


def _chosen(plain: Mapping[str, str]) -> tuple[tuple[str, ...], str, Mapping[str, tuple[int, ...]]]:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if name.lower() in plain]
    if len(given) != 1:
        raise InvalidArgument("give one of the options subscribe, subscribePattern and assign: which topics to read")
    text = plain[given[0].lower()]
    if given == ["subscribe"]:
        topics = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not topics:
            raise InvalidArgument("the option subscribe names no topic")
        return topics, "", {}
    if given == ["subscribePattern"]:
        try:
            re.compile(text)
        except re.error as error:
            raise InvalidArgument(f"the option subscribePattern is no regular expression: {error}") from error
        return (), text, {}
    assigned: dict[str, list[int]] = _json(text, dict[str, list[int]], "assign", '{"orders": [0, 1]}')
    if not assigned or not all(assigned.values()):
        raise InvalidArgument('the option assign names no partition; it is like {"orders": [0, 1]}')
    return (), "", {topic: tuple(dict.fromkeys(numbers)) for topic, numbers in assigned.items()}


def _bound(plain: Mapping[str, str], side: str) -> Bound | None:
    by_offset, by_time, by_times = f"{side}Offsets", f"{side}Timestamp", f"{side}OffsetsByTimestamp"
    given = [name for name in (by_offset, by_time, by_times) if name.lower() in plain]
    if len(given) > 1:
        raise InvalidArgument(f"give only one of the options {' and '.join(given)}")
    if not given:
        return None
    text = plain[given[0].lower()].strip()
    if given == [by_time]:
        if not text.isdigit():
            raise InvalidArgument(f"the option {by_time} is in milliseconds since 1970, not {text!r}")
        return Bound(Edge.TIMES, time_us=int(text) * 1000)
    if given == [by_offset] and text.lower() in ("earliest", "latest"):
        return Bound(Edge(text.lower()))
    example = '{"orders": {"0": 23, "1": -2}}' if given == [by_offset] else '{"orders": {"0": 1735689600000}}'
    by_partition: dict[str, dict[int, int]] = _json(text, dict[str, dict[int, int]], given[0], example)
    if given == [by_times]:
        in_us = {topic: {at: ms * 1000 for at, ms in times.items()} for topic, times in by_partition.items()}
        return Bound(Edge.TIMES, in_us)
    if any(offset < EARLIEST for offsets in by_partition.values() for offset in offsets.values()):
        raise InvalidArgument(f"in {by_offset}, -2 stands for earliest and -1 for latest; other offsets are from 0 on")
    return Bound(Edge.OFFSETS, by_partition)


def _json(text: str, kind: Any, name: str, example: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the option {name} is like {example}, not {text!r}: {error}") from error


def _columns(plain: Mapping[str, str]) -> tuple[str, ...]:
    with_headers = _flag(plain, "includeHeaders", False)
    if "columns" not in plain:
        return (*DEFAULT_COLUMNS, "headers") if with_headers else DEFAULT_COLUMNS
    names = tuple(dict.fromkeys(name.strip() for name in plain["columns"].split(",") if name.strip()))
    unknown = [name for name in names if name not in (*DEFAULT_COLUMNS, *MORE_COLUMNS)]
    if unknown or not names:
        known = ", ".join((*DEFAULT_COLUMNS, *MORE_COLUMNS))
        raise InvalidArgument(f"the option columns has no {', '.join(unknown) or 'names'}; there are {known}")
    return (*names, "headers") if with_headers and "headers" not in names else names


def _one_of(plain: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = plain.get(name.lower(), default).lower()
    if value not in allowed:
        raise InvalidArgument(f"the option {name} is one of {', '.join(filter(None, allowed))}; not {value!r}")
    return value


def _flag(plain: Mapping[str, str], name: str, default: bool) -> bool:
    value = plain.get(name.lower(), str(default)).lower()
    if value not in ("true", "false"):
        raise InvalidArgument(f"the option {name} is true or false, not {value!r}")
    return value == "true"


def _number(plain: Mapping[str, str], name: str, kind: type[int] | type[float]) -> Any:
    text = plain.get(name.lower())
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = kind(0)
    if not 0 < value < 1 << 62:
        raise InvalidArgument(f"the option {name} is a number greater than 0, not {text!r}")
    return value
