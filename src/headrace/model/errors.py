"""Every error Headrace raises: one tree, each with a stable code and a word on whether trying again can help."""

from typing import ClassVar


class HeadraceError(Exception):
    """Something went wrong in Headrace."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, text: str | None = None) -> None:
        super().__init__(text or " ".join((type(self).__doc__ or "").split()))


class InvalidArgument(HeadraceError):
    """An argument or a setting has a value that cannot be used."""

    code = "invalid_argument"


class MessageTooLarge(InvalidArgument):
    """The message is larger than a message may be."""

    code = "message_too_large"


class BatchTooLarge(InvalidArgument):
    """The batch has more messages or bytes than a batch may have."""

    code = "batch_too_large"


class InvalidBatch(HeadraceError):
    """The bytes are not a batch: a checksum, a length or a field is wrong."""

    code = "invalid_batch"


class CorruptBatch(HeadraceError):
    """Stored messages are damaged; what follows them can still be read."""

    code = "corrupt_batch"

    def __init__(self, first_offset: int, next_offset: int, path: str, position: int, reason: str) -> None:
        super().__init__(
            f"messages {first_offset} to {next_offset - 1} are damaged ({path} at byte {position}: {reason}); "
            f"continue at offset {next_offset}, or read with skip_corrupt"
        )
        self.first_offset = first_offset
        self.next_offset = next_offset
        self.path = path
        self.position = position
        self.reason = reason


class CorruptFile(HeadraceError):
    """A file's own header is damaged or is not Headrace's."""

    code = "corrupt_file"


class UnsupportedFormat(HeadraceError):
    """The data was written by a newer Headrace in a format this one does not know."""

    code = "unsupported_format"


class OffsetOutOfRange(HeadraceError, LookupError):
    """The log has no message at that offset: it was truncated, or not written yet."""

    code = "offset_out_of_range"


class MessageGone(HeadraceError, LookupError):
    """The message was removed by compaction."""

    code = "message_gone"


class LogNotFound(HeadraceError, FileNotFoundError):
    """There is no log at that place."""

    code = "log_not_found"


class LogClosed(HeadraceError):
    """The log is closed."""

    code = "log_closed"


class LogReadOnly(HeadraceError):
    """The log was opened for reading only."""

    code = "log_read_only"


class LogInUse(HeadraceError):
    """Another process, or another place in this one, is writing to the log."""

    code = "log_in_use"
    retryable = True


class CursorInUse(HeadraceError):
    """Another reader has that cursor open."""

    code = "cursor_in_use"
    retryable = True


class LogFailed(HeadraceError):
    """The disk failed to keep what was written; the log accepts no more messages until it is opened again."""

    code = "log_failed"


class DiskFull(HeadraceError):
    """The disk is full; nothing was appended, and appending works again once there is room."""

    code = "disk_full"
    retryable = True


class DurabilityUnavailable(HeadraceError):
    """The log cannot give that durability: a log in memory is never written or synced."""

    code = "durability_unavailable"


class Timeout(HeadraceError, TimeoutError):
    """It did not happen in time; it may still happen."""

    code = "timeout"
    retryable = True
