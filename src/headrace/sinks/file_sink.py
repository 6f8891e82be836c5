"""A sink that appends messages to a file, one JSON object per line."""

import os
import threading
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.message import Message
from headrace.sinks.envelope import envelope_bytes


class FileSink:
    """`file:///path`: appends NDJSON; a line is on the disk before its message is acknowledged.

    After a crash the last message may be there twice. A line that was cut off by one stays as it is, on a line of its
    own.
    """

    api = 1

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or parts.query or parts.fragment:
            raise InvalidArgument(f"the URL of a file is file:///absolute/path, not {shown(url)}")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InvalidArgument(f"cannot append to {shown(path)}: {error.strerror}") from error
        self._lock = threading.Lock()
        size = os.fstat(self._file).st_size
        self._cut_off = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def deliver(self, messages: Sequence[Message]) -> None:
        """Append messages, and sync the file."""
        lines = b"".join(envelope_bytes(message) + b"\n" for message in messages)
        with self._lock:
            lines = b"\n" + lines if self._cut_off else lines
            self._cut_off = True  # until all of it is written
            left = memoryview(lines)
            while left:
                left = left[os.write(self._file, left) :]
            self._cut_off = False
            os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
