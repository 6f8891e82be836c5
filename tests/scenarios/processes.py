"""Processes that read and write one log together; run as: processes.py ROLE DIRECTORY [ARGUMENT ...].

They end with an error, and say why on their standard error, when they see something that should not be.
"""

import json
import os
import subprocess
import sys
import time
from random import Random

from tests.faults.writer import kept
from tests.known import ENVIRONMENT, append, content, said

import headrace
from headrace.model.errors import LogNotFound, OffsetOutOfRange
from headrace.storage.disk import LocalDisk, OpenFile
from headrace.storage.runtime import StorageRuntime

END = b"the end"
"""The key of the last message."""
PATIENCE_S = 60


def start(role: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process in one of the roles below."""
    return subprocess.Popen(
        [sys.executable, __file__, role, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )


def finish(*processes: "subprocess.Popen[str]") -> list[dict[str, int]]:
    """Wait for them, and return what they say in the end."""
    said = []
    for process in processes:
        out, complaints = process.communicate(timeout=2 * PATIENCE_S)
        assert process.returncode == 0, f"{process.args} ended with {process.returncode}\n{complaints}"
        said.append(json.loads(out.splitlines()[-1]))
    return said


def opened(path: str) -> headrace.Log:
    """The log, as soon as there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return headrace.Log(path, readonly=True)
        except LogNotFound:
            assert time.monotonic() < deadline, "nobody makes the log"
            time.sleep(0.001)


class Reader:
    """Sees to it that messages come in order, without a hole that compaction or truncation does not explain."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.expected: int | None = None
        self.messages = self.holes = self.truncations = self.openings = 0
        self.ended = False

    def see(self, message: headrace.Message) -> None:
        if self.expected is None:
            self.expected = message.offset
        assert message.offset >= self.expected, f"{message.offset} comes after {self.expected - 1}"
        missing = [offset for offset in range(self.expected, message.offset) if kept(offset)]
        assert not missing, f"{missing} are missing before {message.offset}"
        self.holes += message.offset - self.expected
        self.messages += 1
        self.expected = message.offset + 1
        if message.key == END:
            self.ended = True
        else:
            assert said(message) == content(self._seed, message.offset), f"a wrong message: {message}"

    def follow(self, log: headrace.Log, messages_max: float) -> None:
        """Tail for so many messages, or to the end."""
        start = log.first_offset if self.expected is None else self.expected
        try:
            for message in log.tail(start, timeout=PATIENCE_S):
                self.see(message)
                messages_max -= 1
                if self.ended or messages_max <= 0:
                    return
            raise AssertionError(f"nothing came after offset {start} for {PATIENCE_S} s")
        except OffsetOutOfRange:
            self._pass_truncation(log, start if self.expected is None else self.expected)

    def _pass_truncation(self, log: headrace.Log, offset: int) -> None:
        """The messages were truncated; a writer that is just being opened may not have told readers yet."""
        deadline = time.monotonic() + PATIENCE_S
        while log.first_offset <= offset:
            assert time.monotonic() < deadline, f"offset {offset} is out of range, but nothing was truncated"
            time.sleep(0.001)
        self.expected = log.first_offset
        self.truncations += 1


def read(path: str, seed: str, messages_max: str) -> None:
    """Follow the log to the end, opening it again after so many messages."""
    reader = Reader(int(seed))
    while not reader.ended:
        with opened(path) as log:
            reader.openings += 1
            if messages_max == "all":
                while not reader.ended:
                    reader.follow(log, float("inf"))
            else:
                reader.follow(log, int(messages_max))
    report(messages=reader.messages, holes=reader.holes, truncations=reader.truncations, openings=reader.openings)


def write(path: str, seed: str, messages: str, changes: str) -> None:
    """Append so many messages, rolling all the time, and do the changes asked for: truncate, compact."""
    dice = Random(int(seed))
    with headrace.Log(path, segment_bytes=8 << 10, sync_every=0.01) as log:
        while log.next_offset < int(messages):
            append(log, int(seed), dice.choice((1, 1, 3, 30)))
            if dice.random() < 0.5:
                log.flush(sync=dice.random() < 0.5)
            if "truncate" in changes and dice.random() < 0.02:
                log.truncate_before(max(log.next_offset - dice.choice((0, 10, 1000)), log.first_offset))
            if "compact" in changes and dice.random() < 0.05:
                log.compact(lambda message: kept(message.offset))
        log.append(b"", key=END)
    report(written=log.next_offset)


def consume(path: str, count: str) -> None:
    """Take messages until all of so many are taken by somebody, and say which."""
    say("ready")
    sys.stdin.readline()
    taken: list[int] = []
    dice = Random(os.getpid())
    with opened(path) as log:
        while True:
            messages = log.consume(dice.choice((1, 7, 60)), timeout=1)
            taken += [message.offset for message in messages]
            if not messages and log.next_offset >= int(count):
                break
    say(json.dumps(taken))


def hold_cursor(path: str, name: str) -> None:
    """Have a cursor open until standard input ends."""
    with opened(path) as log, log.cursor(name):
        say("ready")
        sys.stdin.read()


def hold_log(path: str) -> None:
    """Have the log open for writing until standard input ends."""
    with headrace.Log(path):
        say("ready")
        sys.stdin.read()


class Surprised(LocalDisk):
    """Between the moment a segment is mapped and the first look at it, a writer opens the log and closes it."""

    def map(self, file: OpenFile, length: int, *, write: bool = False) -> memoryview:
        mapped = super().map(file, length, write=write)
        if file.path.endswith(".seg"):
            script = "import headrace, sys; headrace.Log(sys.argv[1]).close()"
            subprocess.run([sys.executable, "-c", script, os.path.dirname(file.path)], env=ENVIRONMENT, check=True)
        return mapped


def be_surprised(path: str) -> None:
    """Look for the end of a log just when a writer cuts its last segment."""
    with headrace.Log(path, readonly=True, host=StorageRuntime(Surprised())) as log:
        report(messages=len(list(log)))


def say(text: str) -> None:
    print(text, flush=True)


def report(**numbers: int) -> None:
    say(json.dumps(numbers))


if __name__ == "__main__":
    roles = (read, write, consume, hold_cursor, hold_log, be_surprised)
    {role.__name__: role for role in roles}[sys.argv[1]](*sys.argv[2:])
