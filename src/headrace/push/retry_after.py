"""The header Retry-After: how long a receiver wants to be left alone."""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

RETRY_AFTER_US_MAX = 86_400_000_000
"""No receiver is left alone for longer: a day."""
_SECONDS = re.compile(r"0*([0-9]+)")
_DIGITS_MAX = 9
"""A number with more digits is longer than a day, and may be too long to be read."""


def retry_after_us(header: str | None, now_us: int) -> int | None:
    """How long to wait, from a number of seconds or a date of HTTP; None if the header is neither.

    >>> retry_after_us("120", 0), retry_after_us("Thu, 01 Jan 1970 00:01:00 GMT", 0), retry_after_us("soon", 0)
    (120000000, 60000000, None)
    """
    text = (header or "").strip()
    if found := _SECONDS.fullmatch(text):
        is_readable = len(found[1]) <= _DIGITS_MAX
        return min(int(found[1]) * 1_000_000, RETRY_AFTER_US_MAX) if is_readable else RETRY_AFTER_US_MAX
    try:
        moment = parsedate_to_datetime(text)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        until_us = round((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1e6)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(max(until_us - now_us, 0), RETRY_AFTER_US_MAX)
