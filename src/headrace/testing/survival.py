"""What survives a power loss: for every file and directory its durable state, and the changes since."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from random import Random

SECTOR_BYTES = 512
"""A disk writes a sector atomically."""
_LENGTH = -1
"""Instead of a sector number: the file's length."""

Change = tuple[int, bytes | None]
"""A write, as position and data, or a truncation, as length and None."""


class Unsynced(Enum):
    """What a power loss does to all that was not synced."""

    KEPT = "kept"
    """Everything stays: only the process was killed."""
    LOST = "lost"
    """Nothing stays."""
    RANDOM = "random"
    """Some sectors of each file stay, and in each directory what was done up to some moment."""


class File:
    """A file, whatever its name: its durable content, and the changes since, in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = size
        """The end of what was written; a part that was only added by truncation uses no space."""
        self.durable: bytearray | None = None
        """None while the real file holds exactly that."""
        self.mapped = False
        """Whether a mapping may change it."""
        self.locked = False
        """Whether its lock may be held."""
        self.differs = False
        """Whether the real file may hold something that is neither durable nor among the changes since."""
        self.changes = 0
        self._resolved = 0
        """The number of changes that are durable, or lost."""
        self._unsynced: list[Change] = []

    @property
    def clean(self) -> bool:
        """Whether the real file holds what is durable."""
        return not self._unsynced and not self.differs

    def change(self, position: int, data: bytes | None) -> None:
        """Record a write or, without data, a truncation."""
        if data is None and (tail := min(-position % SECTOR_BYTES, max(self.size - position, 0))):
            # The rest of the last sector is zeros from now on, and reaches the disk with what is written there later.
            self.change(position, bytes(tail))
        self._unsynced.append((position, data))
        self.changes += 1
        self.size = position if data is None else max(self.size, position + len(data))
        self.used = min(self.used, position) if data is None else max(self.used, position + len(data))

    def settle(self, changes: int, content: bytearray | None = None) -> None:
        """Make the first changes durable, up to a number; `content`, if it is given, has them already."""
        count = max(changes - self._resolved, 0)
        if content is not None:
            self.durable = content
        elif self.durable is not None:
            for change in self._unsynced[:count]:
                _apply(self.durable, *change)
        self._drop(count)

    def lose(self) -> None:
        """Drop all changes that are not durable: the real file has them, but they will never reach the disk."""
        self._drop(len(self._unsynced))
        self.differs = True

    def flip(self, position: int, bit: int, byte: int) -> None:
        """Record a flipped bit, and the byte that results."""
        if self.durable is not None and position < len(self.durable):
            self.durable[position] ^= 1 << bit
        if self._unsynced:
            self.change(position, bytes([byte]))

    def survivors(self, real: bytes, unsynced: Unsynced, random: Random) -> bytes | bytearray:
        """The content that a power loss may leave, given the content of the real file."""
        content = bytearray(real if self.durable is None else self.durable)
        if unsynced is not Unsynced.RANDOM:
            return content if unsynced is Unsynced.LOST else real
        if self.mapped:
            self.change(0, real)
        chance = random.choice((0.0, 0.5, 1.0, random.random()))
        # Writes reach a sector in order: the cached sector contains all earlier writes.
        counts = Counter(sector for change in self._unsynced for sector, _, _ in _pieces(*change))
        left = {sector: n if random.random() < chance else random.randrange(n) for sector, n in counts.items()}
        for change in self._unsynced:
            for sector, position, data in _pieces(*change):
                left[sector] -= 1
                if left[sector] >= 0:
                    _apply(content, position, data)
        if len(content) < self.size and random.random() < 0.5:
            content += bytes(random.randint(0, self.size - len(content)))
        return content

    def _drop(self, count: int) -> None:
        del self._unsynced[:count]
        self._resolved += count


class Directory:
    """The names in a directory that were used, and how to undo changes that were not synced."""

    def __init__(self) -> None:
        self.entries: dict[str, File | Directory] = {}
        self._unsynced: list[dict[str, File | Directory | None]] = []
        """For every change the names that it affected, with their nodes before it."""

    @property
    def used(self) -> int:
        """The space that all files below use."""
        return sum(node.used for node in self.entries.values())

    def change(self, names: "dict[str, File | Directory | None]") -> None:
        """Record that names get new nodes, or are removed, atomically."""
        self._unsynced.append({name: self.entries.get(name) for name in names})
        self._set(names)

    def forget(self, name: str) -> None:
        """Remove a name durably."""
        self.entries.pop(name, None)
        for names in self._unsynced:
            names.pop(name, None)

    def settle(self) -> None:
        """Make all names durable as they are now."""
        self._unsynced.clear()

    def lose_power(self, path: str, unsynced: Unsynced, random: Random) -> None:
        """Change the real directory, and all below, to a state that a power loss may leave, which is durable then."""
        if not os.path.isdir(path or "/"):
            self.entries.clear()  # it was removed by others
            self.settle()
        before = dict(self.entries)
        count = len(self._unsynced)
        kept = 0 if unsynced is Unsynced.LOST else count
        if (
            count and unsynced is Unsynced.RANDOM
        ):  # not for directories above, or the path would change the random numbers
            kept = random.randint(0, count)
        for names in reversed(self._unsynced[kept:]):
            self._set(names)
        self.settle()
        _arrange(path, before, self.entries)
        for name, node in self.entries.items():
            if isinstance(node, Directory):
                node.lose_power(f"{path}/{name}", unsynced, random)
                continue
            if node.locked or not (node.clean or unsynced is Unsynced.KEPT):
                _rewrite(f"{path}/{name}", node, unsynced, random)
            self.entries[name] = File(node.size)

    def _set(self, names: "dict[str, File | Directory | None]") -> None:
        for name, node in names.items():
            if node is None:
                self.entries.pop(name, None)
            else:
                self.entries[name] = node


def _arrange(path: str, before: dict[str, File | Directory], after: dict[str, File | Directory]) -> None:
    """Rename the real files in a directory; files that reappear get their content later."""
    changed = [name for name in {**before, **after} if before.get(name) is not after.get(name)]
    aside = {before[name]: f"{path}/{name}.aside" for name in changed if name in before}
    for name in changed:
        if name in before:
            os.rename(f"{path}/{name}", aside[before[name]])
    for name in changed:
        node = after.get(name)
        if node in aside:
            os.rename(aside.pop(node), f"{path}/{name}")
        elif isinstance(node, Directory):
            os.mkdir(f"{path}/{name}")
        elif node is not None:
            node.differs = True
    for node, leftover in aside.items():
        shutil.rmtree(leftover) if isinstance(node, Directory) else os.unlink(leftover)


def _rewrite(path: str, node: File, unsynced: Unsynced, random: Random) -> None:
    """Replace a file by a new one with the content that survives, so that old mappings and locks have no effect."""
    real = b""
    if os.path.exists(path):
        with open(path, "rb") as old:
            real = old.read()
        os.unlink(path)
    content = node.survivors(real, unsynced, random)
    node.size = node.used = len(content)
    with open(path, "xb") as new:
        new.write(content)


def _pieces(position: int, data: bytes | None) -> Iterator[tuple[int, int, bytes | None]]:
    """A change in parts that are atomic, each with its sector."""
    if data is None:
        yield _LENGTH, position, None
        return
    start, end = position, position + len(data)
    while start < end:
        sector = start // SECTOR_BYTES
        stop = min((sector + 1) * SECTOR_BYTES, end)
        yield sector, start, data[start - position : stop - position]
        start = stop


def _apply(content: bytearray, position: int, data: bytes | None) -> None:
    if len(content) < position:
        content += bytes(position - len(content))
    if data is None:
        del content[position:]
    else:
        content[position : position + len(data)] = data
