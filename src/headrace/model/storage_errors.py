"""Errors of logs, files and the disk; `model/errors.py` has all others, and the names of these."""

from typing import Any

from headrace.model.headrace_error import HeadraceError


class CorruptBatch(HeadraceError):
    """Stored messages are damaged; what follows them can still be read."""

    code = "corrupt_batch"

    def __init__(self, first_offset: int, next_offset: int, path: str, position: int, reason: str) -> None:
        super().__init__(
            f"messages {first_offset} to {next_offset - 1} are damaged ({path} at byte {position}: {reason}); "
            f"continue at offset {next_offset}",
            first_offset=first_offset,
            next_offset=next_offset,
            path=path,
            position=position,
            reason=reason,
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
    """The data has the format of an earlier Headrace, which `headrace upgrade` converts, or of a newer one."""

    code = "unsupported_format"


class DataDirectoryDamaged(HeadraceError):
    """The parts of a broker's data directory do not fit together: something is missing, damaged or another's."""

    code = "data_directory_damaged"


class NotADataDirectory(HeadraceError):
    """The directory is not that of a broker by itself: it has other files, an unfinished copy, or is a node's."""

    code = "not_a_data_directory"


class OffsetOutOfRange(HeadraceError, LookupError):
    """The log has no message at that offset: it was truncated, or not written yet."""

    code = "offset_out_of_range"


class MessageGone(HeadraceError, LookupError):
    """The message is no more: it was settled, deleted, or removed by compaction."""

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


class LogOwned(HeadraceError):
    """The directory belongs to a broker, and only the broker writes there: publish to the topic instead."""

    code = "log_owned"


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


class DiskFailed(HeadraceError, OSError):
    """The operating system refused an operation on a file, such as for want of permission or by an I/O error."""

    code = "disk_failed"

    def __reduce__(self) -> tuple[Any, ...]:
        restored, args, state = super().__reduce__()
        return restored, args, {**state, "errno": self.errno}


class TooManyFiles(HeadraceError):
    """The process, or the system, may open no more files; close some, or raise the limit (ulimit -n)."""

    code = "too_many_files"
    retryable = True


class DurabilityUnavailable(HeadraceError):
    """The log cannot give that durability: one in memory is never synced, one outside a cluster never replicated."""

    code = "durability_unavailable"
