"""A process that makes a log to be damaged, with a bit of everything, and then closes it or dies.

Run as: builder.py DIRECTORY SEED SEGMENT_BYTES MESSAGE_BYTES_MAX ENDING, the last being "closed" or "killed".
"""

import os
import signal
import sys

from tests.known import append

import headrace

TRUNCATED = 7
"""Messages before this offset are truncated, in the middle of a segment."""
COMMITTED = (5, 20)
"""Where the cursor was committed, one after the other."""
CONSUMED = 15
"""Messages before this offset were consumed."""


def main(path: str, seed: int, segment_bytes: int, size_max: int, ending: str) -> None:
    """Write segments with every kind of compression, cursors, and a truncation."""
    for compression in ("none", "lz4", "zstd", "none"):
        log = headrace.Log(path, segment_bytes=segment_bytes, compression=compression)
        for count in (1, 30, 3, 1, 1, 12, 7):
            append(log, seed, count, size_max)
            log.flush()
        if compression == "lz4":
            cursor = log.cursor("reader")
            for offset in COMMITTED:
                cursor.commit(offset)
            log.truncate_before(TRUNCATED)
            log.consume(CONSUMED - TRUNCATED)
        if compression != "none" or log.first_offset == 0:
            log.close()
    append(log, seed, 9, size_max)
    log.flush()
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    log.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
