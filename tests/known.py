"""Messages that can be told from their offset and a seed, so that any process can check any message."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import headrace
from headrace.model.message import Message

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
"""What a test's child processes need to import what the test does."""

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where syncing takes no time, for tests that do it ten thousand times."""

RUN = 64
"""Every so many offsets the dice say whether the messages have only values."""


@contextmanager
def quick_place() -> Iterator[Path]:
    """A directory in memory."""
    path = tempfile.mkdtemp(prefix="headrace-", dir=MEMORY)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path)


class Content(NamedTuple):
    """What a producer says of a message."""

    value: bytes | None
    key: bytes | None
    headers: dict[str, bytes] | None


def content(seed: int, offset: int, size_max: int = 400) -> Content:
    """What the message at an offset says: some are empty or deletions, some have keys, headers or both."""
    dice = blake2b(b"%d/%d" % (seed, offset)).digest()
    size = int.from_bytes(dice[:4], "little") % (size_max + 1)
    value = (b"%d:" % offset + dice * (size // len(dice) + 1))[:size]
    if is_plain(seed, offset):
        return Content(value, None, None)
    key = dice[5 : 5 + dice[6] % 16] if dice[7] % 3 == 0 else None
    headers = {f"h{at}": dice[at : at + 9] for at in range(1 + dice[8] % 3)} if dice[9] % 4 == 0 else None
    return Content(value if dice[4] % 32 else None, key, headers)


def is_plain(seed: int, offset: int) -> bool:
    """Whether the message at an offset has only a value."""
    return blake2b(b"%d/run/%d" % (seed, offset // RUN), digest_size=1).digest()[0] < 128


def said(message: Message) -> Content:
    """What a message that was read says."""
    return Content(message.value, message.key, dict(message.headers) if message.headers is not None else None)


def append(log: headrace.Log, seed: int, count: int = 1, size_max: int = 400) -> int:
    """Append the next messages, those with only values at once; returns the offset after them."""
    offset = log.next_offset
    end = offset + count
    while offset < end:
        stop = min(end, (offset // RUN + 1) * RUN)
        given = [content(seed, at, size_max) for at in range(offset, stop)]
        if is_plain(seed, offset):
            assert log.append_many([one.value or b"" for one in given]) == range(offset, stop)
        else:
            assert [log.append(*one) for one in given] == list(range(offset, stop))
        offset = stop
    return end


def wrong(messages: Iterable[Message], expected: Callable[[int], Content]) -> list[str]:
    """What is wrong with messages: their order, or what they say."""
    found, last = [], -1
    for message in messages:
        if message.offset <= last:
            found.append(f"{message.offset} comes after {last}")
        last = message.offset
        if said(message) != expected(message.offset):
            found.append(f"{message.offset} says {said(message)}, not {expected(message.offset)}")
    return found
