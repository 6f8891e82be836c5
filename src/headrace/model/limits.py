"""Every bound of Headrace, with its unit."""

MESSAGE_BYTES_MAX = 16 << 20
"""One message: value, key and headers together."""

BATCH_BYTES_MAX = 32 << 20
"""One batch as stored, and its body before compression."""

BATCH_COUNT_MAX = 65_536
"""Messages in one batch."""

TIMESTAMP_US_MAX = 1 << 62
"""Latest time, in microseconds since 1970: the year 148,108."""

SEGMENT_BYTES_MIN = 4 << 10
SEGMENT_BYTES_MAX = 2 << 30
"""Bounds of the size at which a log starts a new file."""
