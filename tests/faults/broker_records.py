"""What producers and consumers write down for the test, in files that outlive them."""

import os
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

from crc32c import crc32c

TOPICS = {"synced": "synced", "written": "written"}
"""Topics to their durability: a killed broker may lose nothing of either."""
PARTITIONS = 3
GROUP = "workers"
_BLOCK = 64


class Plan:
    """What the so-and-so-many-th producer publishes: everything can be told from its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.topic = list(TOPICS)[number % 2]
        self.keyed = number // 2 % 2 == 0
        """Whether its messages have keys, which tell the partition; else it says which one."""
        self.asynchronous = number // 4 % 2 == 0

    def value(self, counter: int) -> bytes:
        """What its message of that number says."""
        size = 6000 if counter % 97 == 0 else counter * 7919 % 300
        return b"%d.%d." % (self.number, counter) + b"x" * size

    def key(self, counter: int) -> bytes | None:
        """The key of that message."""
        return b"%d" % counter if self.keyed else None

    def partition(self, counter: int) -> int:
        """Where that message goes."""
        if self.keyed:
            return crc32c(b"%d" % counter) % PARTITIONS
        return counter // _BLOCK % PARTITIONS

    def block(self, counter: int) -> range:
        """Messages from this one on that go to one partition, if the producer says which."""
        return range(counter, (counter // _BLOCK + 1) * _BLOCK)


def parsed(value: bytes) -> tuple[int, int]:
    """Producer and number of a message."""
    number, counter, _ = value.split(b".")
    return int(number), int(counter)


class Book:
    """Lines that are in the file when `write` returns; killing the process does not take them back."""

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *lines: tuple[object, ...]) -> None:
        """Write them down."""
        os.write(self._file, b"".join(" ".join(map(str, line)).encode() + b"\n" for line in lines))


class Pages:
    """The test's view of all books of one kind: what is new in them."""

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory = directory
        self._pattern = pattern
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[tuple[int, list[str]]]:
        """Lines that were not seen before, with the number in the name of their book."""
        for path in sorted(self._directory.glob(self._pattern)):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            number = int(path.stem.rpartition("-")[2])
            for line in whole.decode().splitlines():
                yield number, line.split()


def mark(value: bytes | None) -> int:
    """What a consumer writes down of a message's value."""
    return crc32(value or b"")
