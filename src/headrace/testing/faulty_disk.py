"""A disk for tests: real files, with power losses, full disks, failing syncs and flipped bits on command."""

import errno
import os
import threading
from random import Random
from typing import NamedTuple

from headrace.storage.disk import Disk, LocalDisk, OpenDirectory, OpenFile, _explained, _failed
from headrace.testing.survival import Directory, File, Unsynced


class PowerLoss(Exception):
    """The power is off, or was off since the file was opened; not an OSError, as no caller can handle it."""


class Flip(NamedTuple):
    """A bit that was flipped."""

    path: str
    position: int
    bit: int


class FaultyDisk(LocalDisk):
    """The local disk with faults: changes to files are real; what a power loss would leave of them is kept in memory.

    Files found on the disk count as durable. To cut the power while a log's threads run, stop them first:
    `disk.crash_after(0)`, `host.close()`, `disk.power_loss()`. A rename from one directory to another is
    durable at once.
    """

    def __init__(self, seed: int = 0, *, capacity_bytes: int | None = None) -> None:
        """A disk whose faults repeat with the same seed."""
        self.capacity_bytes = capacity_bytes
        """The total size that files created, opened or listed through this disk may have."""
        self.operations = 0
        """The number of changes and syncs, which `crash_after` counts."""
        self.writes = 0
        self.bytes_written = 0
        self.syncs = 0
        """The number of syncs of files."""
        self.directory_syncs = 0
        self._random = Random(seed)
        self._lock = threading.RLock()
        self._root = Directory()
        self._open: dict[int, File] = {}
        self._boots = 1
        self._crash_at: int | None = None
        self._crashed = False
        self._sync_failures: list[int] = []
        self._read_failures: list[int] = []
        self._write_failures: list[int] = []

    # Faults.

    @property
    def crashed(self) -> bool:
        """Whether the power is off."""
        return self._crashed

    @property
    def used_bytes(self) -> int:
        """The space used by all files that were created, opened or listed through this disk."""
        with self._lock:
            return self._root.used

    def crash_after(self, operations: int) -> None:
        """Cut the power in the n-th change or sync from now on, at once for 0: it and all later ones raise."""
        with self._lock:
            self._crash_at = self.operations + operations
            self._crashed = operations == 0

    def power_loss(self, unsynced: Unsynced = Unsynced.RANDOM) -> None:
        """Leave on the disk what a power loss may leave, and switch the power on; open files become unusable."""
        with self._lock:
            self._open.clear()
            self._crash_at, self._crashed = None, False
            self._root.lose_power("", unsynced, self._random)
            if unsynced is not Unsynced.KEPT:
                self._boots += 1

    def fail_sync(self, times: int = 1, error: int = errno.EIO) -> None:
        """Make the next syncs fail; writes that they should have saved are lost, as a later sync skips them."""
        self._sync_failures += [error] * times

    def fail_reads(self, times: int = 1, error: int = errno.EIO) -> None:
        """Make the next reads fail; what is mapped can still be read."""
        self._read_failures += [error] * times

    def fail_writes(self, times: int = 1, error: int = errno.ENOSPC, *, after: int = 0) -> None:
        """Make the next writes fail, or those after so many, with nothing written; replaces earlier orders."""
        self._write_failures = [0] * after + [error] * times

    def flip_bit(self, path: str, position: int | None = None, bit: int | None = None) -> Flip:
        """Flip a bit of a file, by default a random one; returns which."""
        with self._lock:
            node = self._file(path)
            file = super().open(path, write=True)
            position = self._random.randrange(super().size(file)) if position is None else position
            bit = self._random.randrange(8) if bit is None else bit
            byte = super().read(file, position, 1)[0] ^ 1 << bit
            super().write(file, position, bytes([byte]))
            node.flip(position, bit, byte)
            return Flip(path, position, bit)

    # The disk interface.

    def open(self, path: str, *, write: bool = False, create: bool = False) -> OpenFile:
        """Open a file; with `create` it must not exist yet."""
        with self._lock:
            self._begin(changing=create)
            file = super().open(path, write=write, create=create)
            if create:
                self._add(path, File(0))
            node = self._open[file.fd] = self._file(path)
            if node.clean:
                node.durable, node.size = None, super().size(file)
            return file

    def open_directory(self, path: str) -> OpenDirectory:
        """Open a directory, which is found by its path: faults belong to paths."""
        return Disk.open_directory(self, path)

    def close(self, fd: int) -> None:
        """Close a file descriptor; OpenFile calls this by itself."""
        with self._lock:
            self._open.pop(fd, None)
            super().close(fd)

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of the data at a position, or raise, possibly after writing some of it."""
        with self._lock:
            node = self._node(file)
            try:
                self._begin(changing=True)
            except PowerLoss:
                self._put(file, node, position, bytes(data[: self._random.randint(0, len(data))]))
                raise
            code = self._write_failures.pop(0) if self._write_failures else 0
            if code:
                failure = OSError(code, os.strerror(code))
                raise _explained(failure, file.path) from failure
            fits = self._writable_bytes(node, position, len(data))
            self._put(file, node, position, bytes(data[:fits]))
            if fits < len(data):
                error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise _explained(error, file.path) from error

    def read(self, file: OpenFile, position: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""
        self._node(file)
        self._fail(self._read_failures, file.path)
        return super().read(file, position, length)

    def size(self, file: OpenFile) -> int:
        """The length of an open file in bytes."""
        self._node(file)
        return super().size(file)

    def truncate(self, file: OpenFile, length: int) -> None:
        """Set a file's length."""
        with self._lock:
            node = self._node(file)
            self._begin(changing=True)
            self._load(node, file)
            super().truncate(file, length)
            node.change(length, None)

    def sync(self, file: OpenFile) -> None:
        """Return when the file's data is on the disk, though its name may not be."""
        with self._lock:
            node = self._node(file)
            self._begin(changing=True)
            changes, content = node.changes, self._content(file) if node.mapped else None
            if self._sync_failures:
                node.lose()
            self._fail(self._sync_failures, file.path)
        super().sync(file)  # without the lock: others may write meanwhile, which is not synced then
        with self._lock:
            self._node(file)
            node.settle(changes, content)
            self.syncs += 1

    def sync_directory(self, path: str) -> None:
        """Return when the directory's entries are on the disk."""
        with self._lock:
            self._begin(changing=True)
            self._fail(self._sync_failures, path)
            super().sync_directory(path)
            self._directory(path).settle()
            self.directory_syncs += 1

    def map(self, file: OpenFile, length: int, *, write: bool = False) -> memoryview:
        """Map the first `length` bytes; the mapping goes when nobody holds a view of it."""
        with self._lock:
            node = self._node(file)
            if write:
                self._load(node, file)
                node.mapped = node.differs = True
            return super().map(file, length, write=write)

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory at the path."""
        self._begin()
        return super().exists(path)

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory at the path."""
        self._begin()
        return super().is_directory(path)

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none when there is no such directory."""
        with self._lock:
            self._begin()
            names = super().names(path)
            for name in names:
                self._look(f"{path}/{name}")
            return names

    def make_directory(self, path: str, *, sync: bool = True, private: bool = False) -> None:
        """Make a directory and the ones above it, durably if `sync`; it may exist. `private`: for no other user."""
        with self._lock:
            self._begin()
            if os.path.isdir(path):
                return
            parent = os.path.dirname(os.path.abspath(path))
            self.make_directory(parent)
            self._begin(changing=True)
            super().make_directory(path, sync=False, private=private)
            self._add(path, Directory())
            if sync:
                self.sync_directory(parent)

    def rename(self, source: str, target: str, *, sync: bool = True) -> None:
        """Rename a file or directory, replacing a file of the new name atomically, and durably if `sync`."""
        with self._lock:
            self._begin(changing=True)
            (directory, old_name), (target_directory, new_name) = self._entry(source), self._entry(target)
            node = self._look(source)
            if directory is not target_directory:
                # File systems move a name from one directory to another at one moment, which is durable here at once.
                super().rename(source, target, sync=False)
                directory.forget(old_name)
                target_directory.forget(new_name)
                target_directory.entries[new_name] = node
                return
            if os.path.isfile(target):
                self._keep(target)
            super().rename(source, target, sync=False)
            directory.change({old_name: None, new_name: node})
            if sync:
                self.sync_directory(os.path.dirname(target))

    def remove(self, path: str, *, sync: bool = True) -> None:
        """Remove a file, if it is there, durably if `sync`."""
        with self._lock:
            self._begin()
            if not os.path.lexists(path):
                return
            self._begin(changing=True)
            self._keep(path)
            super().remove(path, sync=False)
            directory, name = self._entry(path)
            directory.change({name: None})
            if sync:
                self.sync_directory(os.path.dirname(path))

    def remove_directory(self, path: str) -> None:
        """Remove a directory and all that is in it, durably."""
        with self._lock:
            for name in self.names(path):
                inner = f"{path}/{name}"
                if os.path.isdir(inner):
                    self.remove_directory(inner)
                else:
                    self.remove(inner, sync=False)
            self._begin(changing=True)
            self._look(path)
            directory, name = self._entry(path)
            directory.change({name: None})
            super().remove_directory(path)  # it is empty by now

    def boot_id(self) -> bytes:
        """Another one after each power loss that left not all that was written."""
        return self._boots.to_bytes(16, "big")

    def lock(self, file: OpenFile, *, wait: bool = False, shared: bool = False) -> bool:
        """Take the file's lock, which other processes respect; it goes when the file is closed or the power is cut."""
        self._node(file).locked = True
        return super().lock(file, wait=wait, shared=shared)

    def unlock(self, file: OpenFile) -> None:
        """Give the file's lock back; one that was taken before a power loss went with it."""
        with self._lock:
            held = not self._crashed and file.fd in self._open
        if held:
            super().unlock(file)

    # Bookkeeping.

    def _begin(self, *, changing: bool = False) -> None:
        """Count an operation; raises if the power is off."""
        with self._lock:
            if changing and not self._crashed:
                self.operations += 1
                self._crashed = self.operations == self._crash_at
            if self._crashed:
                raise PowerLoss("the power is off")

    def _fail(self, errors: list[int], path: str) -> None:
        with self._lock:
            if errors:
                error = errors.pop(0)
                raise _failed(OSError(error, os.strerror(error), path), path)

    def _node(self, file: OpenFile) -> File:
        with self._lock:
            if self._crashed or file.fd not in self._open:
                raise PowerLoss(f"the power went off while {file.path} was open")
            return self._open[file.fd]

    def _directory(self, path: str) -> Directory:
        directory = self._root
        for name in filter(None, os.path.abspath(path).split("/")):
            found = directory.entries.get(name)
            if not isinstance(found, Directory):
                found = directory.entries[name] = Directory()
            directory = found
        return directory

    def _entry(self, path: str) -> tuple[Directory, str]:
        parent, name = os.path.split(os.path.abspath(path))
        return self._directory(parent), name

    def _look(self, path: str) -> File | Directory:
        """The file or directory at a path; one that is not known yet counts as durable."""
        directory, name = self._entry(path)
        if name not in directory.entries:
            try:
                directory.entries[name] = Directory() if os.path.isdir(path) else File(os.lstat(path).st_size)
            except OSError as error:
                raise _explained(error, path) from error
        return directory.entries[name]

    def _file(self, path: str) -> File:
        node = self._look(path)
        if not isinstance(node, File):
            raise _failed(OSError(errno.EISDIR, os.strerror(errno.EISDIR), path), path)
        return node

    def _add(self, path: str, node: File | Directory) -> None:
        directory, name = self._entry(path)
        directory.entries.pop(name, None)
        directory.change({name: node})

    def _keep(self, path: str) -> None:
        """Load a file's content before its name is removed, as a power loss may restore it."""
        self._load(self._file(path), super().open(path))

    def _content(self, file: OpenFile) -> bytearray:
        return bytearray(super().read(file, 0, super().size(file)))

    def _load(self, node: File, file: OpenFile) -> None:
        if node.durable is None:
            node.durable = self._content(file)

    def _writable_bytes(self, node: File, position: int, length: int) -> int:
        """How many of the bytes the capacity allows to write there."""
        if self.capacity_bytes is None:
            return length
        size_max = node.used + max(self.capacity_bytes - self.used_bytes, 0)
        return min(max(size_max - position, 0), length)

    def _put(self, file: OpenFile, node: File, position: int, data: bytes) -> None:
        if data:
            self._load(node, file)
            super().write(file, position, data)
            node.change(position, data)
            self.bytes_written += len(data)
        self.writes += 1
