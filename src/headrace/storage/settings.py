"""The settings of a log."""

import msgspec

from headrace.model.errors import InvalidArgument
from headrace.model.limits import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a log uses its files, or its memory."""

    segment_bytes: int = 512 << 20
    """A new segment is started when the next batch would make the last one larger than this."""
    segment_age_us: int | None = None
    """A new segment is started when the last one is older than this."""
    checkpoint_bytes: int = 32 << 20
    """After so many synced bytes the index is saved, so that recovery need not scan them."""
    ahead_bytes_max: int = 8 << 20
    """How far ahead of the writer a synced log's file is filled with zeros."""
    memory_bytes: int = 256 << 20
    """How much a log in memory holds; a log in files has no use for it."""
    drop_oldest: bool = True
    """Whether a log in memory that is full drops its oldest messages; else it refuses more."""

    def __post_init__(self) -> None:
        if not SEGMENT_BYTES_MIN <= self.segment_bytes <= SEGMENT_BYTES_MAX:
            raise InvalidArgument(
                f"segment_bytes must be {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}, not {self.segment_bytes}"
            )
        if self.segment_age_us is not None and self.segment_age_us <= 0:
            raise InvalidArgument(f"segment_age_us must be positive, not {self.segment_age_us}")
        if self.checkpoint_bytes <= 0:
            raise InvalidArgument(f"checkpoint_bytes must be positive, not {self.checkpoint_bytes}")
        if self.ahead_bytes_max < 0:
            raise InvalidArgument(f"ahead_bytes_max must not be negative, not {self.ahead_bytes_max}")


DEFAULT_SETTINGS = LogSettings()
