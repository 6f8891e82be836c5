"""The log file of a driver: rotation, tail and follow."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

BYTES_MAX = 10 << 20
KEPT = 3
"""Number of rotated files to keep."""
_TAIL_BYTES = 64 << 10


def rotate(path: Path, bytes_max: int = BYTES_MAX) -> bool:
    """Rotate a log that is too large; returns whether it was.

    Its writers keep it open, so it is copied and then truncated. Lines written in between are lost: at most some
    lines in ten megabytes.
    """
    try:
        if path.stat().st_size < bytes_max:
            return False
    except FileNotFoundError:
        return False
    for number in range(KEPT - 1, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        if older.exists():
            older.replace(path.with_name(f"{path.name}.{number + 1}"))
    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    os.truncate(path, 0)
    return True


def last_lines(path: Path, lines: int) -> tuple[bytes, int]:
    """Return the last lines of a log and its end position, without rotated files."""
    try:
        with path.open("rb") as file:
            end = position = file.seek(0, os.SEEK_END)
            found = b""
            while position and found.count(b"\n") <= lines:
                step = min(_TAIL_BYTES, position)
                position -= step
                file.seek(position)
                found = file.read(step) + found
    except FileNotFoundError:
        return b"", 0
    kept = found[: end - position].splitlines(keepends=True)[-lines:] if lines else []
    return b"".join(kept), end


def follow(path: Path, position: int, every_s: float = 0.2) -> Iterator[bytes]:
    """Yield what is written to a log from a position on; yields empty bytes while there is nothing new."""
    while True:
        size = path.stat().st_size if path.exists() else 0
        if size < position:  # the log was rotated
            position = 0
        if size > position:
            with path.open("rb") as file:
                file.seek(position)
                new = file.read(size - position)
            position += len(new)
            yield new
        else:
            yield b""
            time.sleep(every_s)
