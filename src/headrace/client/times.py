"""Points in time as users give them, and as the protocol says them."""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal, NamedTuple, TypeVar

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN

T = TypeVar("T")

SECONDS_MAX = 1e8
"""Three years: longer than anybody waits, and as much as every system can wait for."""
COUNT_MAX = 1 << 53

Moment = datetime | int
"""An aware datetime, or microseconds since 1970."""

When = Literal["earliest", "latest"] | datetime | int
"""The oldest message, behind the newest, or a time (an aware datetime or microseconds since 1970)."""

Start = Literal["earliest", "latest"] | datetime | int
"""The oldest message, behind the newest, the first of a time, or an offset."""


class OffsetSpec(NamedTuple):
    """A place in a partition in the protocol's words: `earliest`, `latest`, `time` or `offset`, and which."""

    kind: str
    value: int = 0


def microseconds(moment: datetime | int) -> int:
    """A time in microseconds since 1970, UTC.

    >>> from datetime import UTC
    >>> microseconds(datetime(2030, 1, 1, tzinfo=UTC))
    1893456000000000
    """
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise InvalidArgument(f"{moment} has no time zone; say which, for example datetime.now(UTC)")
        seconds = moment.replace(microsecond=0).timestamp()
        return _bounded(int(seconds) * 1_000_000 + moment.microsecond)
    if type(moment) is int:
        return _bounded(moment)
    raise InvalidArgument(f"a time is a datetime or a whole number of microseconds since 1970, not {shown(moment)}")


def optional_microseconds(moment: datetime | int | None) -> int | None:
    """The same for a time that may be missing."""
    return None if moment is None else microseconds(moment)


def _bounded(time_us: int) -> int:
    if TIMESTAMP_US_MIN <= time_us <= TIMESTAMP_US_MAX:
        return time_us
    bounds = f"{TIMESTAMP_US_MIN} to {TIMESTAMP_US_MAX} microseconds from 1970, the years 1 to 9999"
    raise InvalidArgument(f"a time is {bounds}, not {shown(time_us)}")


def checked_seconds(seconds: float, what: str, least: float = 0.0, most: float = SECONDS_MAX) -> float:
    """A number of seconds that can be counted.

    >>> checked_seconds(1.5, "timeout")
    1.5
    """
    if type(seconds) in (int, float) and least <= seconds <= most:
        return seconds
    raise InvalidArgument(f"{what} is a number of seconds from {least:g} to {most:g}, not {shown(seconds)}")


def checked_count(count: int, what: str, most: int = COUNT_MAX) -> int:
    """A whole number, 1 at least."""
    if type(count) is int and 1 <= count <= most:
        return count
    raise InvalidArgument(f"{what} is a whole number from 1 to {most}, not {shown(count)}")


def check_name(name: object, what: str) -> None:
    """Refuse what cannot be the name of anything; the broker says which names it takes."""
    if not isinstance(name, str):
        raise InvalidArgument(f"the name of {what} is a str, not {shown(name)}")


def listed(values: Iterable[T], what: str) -> list[T]:
    """What somebody gave as several, as a list."""
    try:
        return list(values)
    except TypeError as error:
        raise InvalidArgument(f"{what} are several, such as a list, not {shown(values)}") from error


def spot_in_time(at: When) -> OffsetSpec:
    """Earliest, latest, or a time; a number counts microseconds."""
    if isinstance(at, str):
        return _named(at)
    return OffsetSpec("time", microseconds(at))


def spot_at(start: Start) -> OffsetSpec:
    """Earliest, latest, a time, or an offset: a number is an offset."""
    if isinstance(start, str):
        return _named(start)
    if isinstance(start, datetime):
        return OffsetSpec("time", microseconds(start))
    if type(start) is int and 0 <= start < 1 << 63:
        return OffsetSpec("offset", start)
    raise InvalidArgument(f"begin at 'earliest', 'latest', a datetime or an offset, not {shown(start)}")


def _named(name: str) -> OffsetSpec:
    if name not in ("earliest", "latest"):
        raise InvalidArgument(f"{shown(name)} is no place in a topic; write 'earliest' or 'latest'")
    return OffsetSpec(name)
