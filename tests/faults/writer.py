"""A process that forks writers of a log, each to be killed, and says through a pipe what they may be held to.

Run as: writer.py DIRECTORY SEED CHURN. Each line on its standard input, the number of a round, starts a writer. Each
report on its standard output is a letter and a number: see Report.
"""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from random import Random

from tests.known import ENVIRONMENT, append

import headrace

FRAME = struct.Struct("<cQ")
SEGMENT_BYTES = 16 << 10


class Report(Enum):
    """What the numbers on the pipe mean."""

    STARTED = b"S"
    """A writer with this process id is about to open the log."""
    OPENED = b"O"
    """It was opened and has this next offset."""
    LOST = b"L"
    """Opening it found messages damaged from this offset on."""
    ACKNOWLEDGED = b"A"
    """All messages before this offset were flushed."""
    TRUNCATING = b"t"
    TRUNCATED = b"T"
    """All messages before this offset are being, and were, forgotten."""
    COMPACTING = b"c"
    """Messages before this offset may go by the rule."""
    ENDED = b"E"
    """The writer is gone, and has this wait status."""


def kept(offset: int) -> bool:
    """The rule by which the writers compact."""
    return offset % 3 != 0


def report(kind: Report, number: int) -> None:
    """Tell the parent; so few bytes go through a pipe whole."""
    os.write(1, FRAME.pack(kind.value, number))


def churn(log: headrace.Log, dice: Random) -> None:
    """Truncate or compact."""
    if dice.random() < 0.5:
        offset = dice.randint(log.first_offset, log.next_offset)
        report(Report.TRUNCATING, offset)
        log.truncate_before(offset)
        report(Report.TRUNCATED, offset)
    else:
        report(Report.COMPACTING, log.next_offset)
        log.compact(lambda message: kept(message.offset))


def write(path: str, seed: int, number: int, *, churning: bool) -> None:
    """Write for as long as we live."""
    dice = Random(f"{seed}/{number}")
    report(Report.STARTED, os.getpid())
    compression = dice.choice(("none", "lz4", "zstd"))
    log = headrace.Log(path, segment_bytes=SEGMENT_BYTES, compression=compression, sync_every=0.005)
    report(Report.OPENED, log.next_offset)
    for lost in log.recovery.lost:
        report(Report.LOST, lost.first_offset)
    while True:
        append(log, seed, dice.choice((1, 1, 2, 5, 20, 100)))
        if dice.random() < 0.6:
            report(Report.ACKNOWLEDGED, log.flush(sync=dice.random() < 0.6))
        if churning and dice.random() < 0.1:
            churn(log, dice)


def main(path: str, seed: int, churning: bool) -> None:
    """Fork writers, one after the other: that is quicker than to start Python for each."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            write(path, seed, int(line), churning=churning)
        report(Report.ENDED, os.waitpid(child, 0)[1])


class Writers:
    """The parent's end of the pipe."""

    def __init__(self, path: Path, seed: int, *, churning: bool) -> None:
        self._complaints = path.with_name("complaints")
        with self._complaints.open("wb") as complaints:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(path), str(seed), "churn" if churning else "calm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                env=ENVIRONMENT,
            )

    def write_and_be_killed(self, number: int, after_s: float) -> list[tuple[Report, int]]:
        """Have one write for so long, from the moment it begins to open the log; returns what it reported."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % number)
        self._process.stdin.flush()
        reports = self._reports()
        _, pid = next(reports)
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        heard = list(reports)
        assert heard.pop() == (Report.ENDED, signal.SIGKILL), self._complaints.read_text()
        return heard

    def dismiss(self) -> None:
        """End the process that forks; its writers are dead by now."""
        self._process.communicate()

    def _reports(self) -> Iterator[tuple[Report, int]]:
        assert self._process.stdout is not None
        kind = None
        while kind is not Report.ENDED:
            frame = self._process.stdout.read(FRAME.size)
            assert frame, self._complaints.read_text()
            letter, number = FRAME.unpack(frame)
            kind = Report(letter)
            yield kind, number


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "churn")
