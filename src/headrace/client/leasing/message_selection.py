"""Which messages of a leased subscription are meant, and what becomes of them, in the protocol's words."""

import math
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from headrace.client.producer.pending_batch import checked_key, checked_priority
from headrace.client.producer.serializing import to_bytes
from headrace.client.times import Moment, microseconds
from headrace.model.arguments import checked_timeout, shown
from headrace.model.batch import Columns, encode
from headrace.model.errors import InvalidArgument
from headrace.model.headers import GivenHeaders, Headers, checked_headers, replaced_headers
from headrace.model.leasing import OWNER_HEADER, MessageChange, MessageId, Selection
from headrace.model.limits import LEASE_SECONDS_MAX

_SPAN_SECONDS_MAX = 1 << 36
"""More than two thousand years."""
STATUSES = ("", "waiting", "ready", "leased", "dead")


class Placed(Protocol):
    """A message, by where it is."""

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int: ...


class _Unchanged:
    """Stands for what was not given, where None means something."""

    def __repr__(self) -> str:
        return "unchanged"


UNCHANGED: Any = _Unchanged()


class EncodedChange(NamedTuple):
    """A change, and the batch that goes with it."""

    change: MessageChange
    body: bytes | bytearray | memoryview


def selection(
    status: str = "",
    due_from: Moment | None = None,
    due_to: Moment | None = None,
    key: bytes | str | None = None,
    owner: str = "",
    headers: GivenHeaders | None = None,
    messages: Iterable[Placed] = (),
) -> Selection:
    """A selection of messages; says what is wrong with it."""
    if status not in STATUSES:
        raise InvalidArgument(f"a status is 'waiting', 'ready', 'leased' or 'dead', not {shown(status)}")
    try:
        chosen = [MessageId(message.partition, message.offset) for message in messages]
    except (AttributeError, TypeError) as error:
        raise InvalidArgument("messages are several that have a partition and an offset") from error
    return Selection(
        status,
        None if due_from is None else microseconds(due_from),
        None if due_to is None else microseconds(due_to),
        checked_key(key),
        owner,
        checked_headers(headers) or {},
        chosen,
    )


def edition(
    *,
    due: Moment | None = None,
    shift: float | timedelta = 0,
    priority: int | None = None,
    value: Any = UNCHANGED,
    headers: GivenHeaders | None = UNCHANGED,
    delete: bool = False,
    owner: str = "",
) -> EncodedChange:
    """A change of messages. Value and headers go together: a value without headers removes those there were."""
    if headers is not UNCHANGED and value is UNCHANGED:
        raise InvalidArgument("give value as well: an edit replaces value and headers together")
    replace = value is not UNCHANGED or headers is not UNCHANGED
    shift_us = span_us(shift)
    if delete and (due is not None or shift_us or priority is not None or replace):
        raise InvalidArgument("a message is deleted or changed, not both")
    if due is not None and shift_us:
        raise InvalidArgument("a message is moved to a time or by some time, not both")
    if not (delete or due is not None or shift_us or priority is not None or replace):
        raise InvalidArgument("say what is to be changed")
    due_us = None if due is None else microseconds(due)
    change = MessageChange(due_us, shift_us, checked_priority(priority), replace, delete)
    if not replace:
        return EncodedChange(change, b"")
    made: Headers = checked_headers(None if headers is UNCHANGED else headers) or {}
    if owner and OWNER_HEADER not in made:
        made = replaced_headers(made, {OWNER_HEADER: owner.encode()})
    columns = Columns([to_bytes(value)], headers=[made] if made else None)
    return EncodedChange(change, encode(columns, time.time_ns() // 1000).data)


def span_us(span: float | timedelta) -> int:
    """A length of time in microseconds; a number counts seconds.

    >>> span_us(1.5), span_us(timedelta(minutes=1))
    (1500000, 60000000)
    """
    if isinstance(span, timedelta):
        return span // timedelta(microseconds=1)
    if type(span) in (int, float) and abs(span) < 1e12:
        return round(span * 1_000_000)
    raise InvalidArgument(f"a length of time is a number of seconds or a timedelta, not {shown(span)}")


def span_ms(seconds: float | timedelta | None, what: str, seconds_max: int = _SPAN_SECONDS_MAX) -> int:
    """A length of time in milliseconds, not negative; None is 0."""
    if seconds is None:
        return 0
    ms = -(-span_us(seconds) // 1000)
    if not 0 <= ms <= seconds_max * 1000:
        raise InvalidArgument(f"{what} is 0 to {seconds_max} seconds, not {shown(seconds)}")
    return ms


def lease_ms_of(lease: float | timedelta | None) -> int:
    """How long a lease lasts, in milliseconds; None is 0, which leaves it to the subscription."""
    return span_ms(lease, "lease", LEASE_SECONDS_MAX)


def wait_ms_of(wait: float | timedelta) -> int:
    """How long to wait for messages, in milliseconds; a very long time is as good as for ever.

    >>> wait_ms_of(0.0001), wait_ms_of(timedelta(minutes=1)), wait_ms_of(float("inf"))
    (1, 60000, 100000000000)
    """
    return math.ceil(checked_timeout(wait.total_seconds() if isinstance(wait, timedelta) else wait, "wait") * 1000)
