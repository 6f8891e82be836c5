"""A disk in memory, which touches no file of this machine: the broker and all logs run on it as on any other Disk."""

import errno
import itertools
import os
import posixpath
import sys
import threading
import weakref

from headrace.model.errors import DiskFailed, LogNotFound
from headrace.storage.disk import Disk, OpenFile

_BLOCK_BYTES_MIN = 4096


class _Block(bytearray):
    """The bytes of a file; a subclass, because a plain bytearray cannot be referred to weakly."""


class _File:
    """A file whatever its name. Mappings see later writes, though the file outgrows the block that they map."""

    def __init__(self) -> None:
        self.size = 0
        self._block = _Block(_BLOCK_BYTES_MIN)
        self._outgrown: list[weakref.ref[_Block]] = []
        self.shared: set[int] = set()
        self.exclusive: int | None = None

    def write(self, position: int, data: bytes | bytearray | memoryview) -> None:
        self._grow(position + len(data))
        self._store(position, data)
        self.size = max(self.size, position + len(data))

    def resize(self, length: int) -> None:
        if length < self.size:
            self._store(length, bytes(self.size - length))  # a longer file has zeros there again
        self._grow(length)
        self.size = length

    def read(self, position: int, length: int) -> bytes:
        with memoryview(self._block) as view:
            return bytes(view[position : min(position + length, self.size)])

    def view(self, length: int) -> memoryview:
        return memoryview(self._block)[:length]

    def _store(self, position: int, data: bytes | bytearray | memoryview) -> None:
        self._outgrown = [block for block in self._outgrown if block() is not None]
        for block in (self._block, *(block() for block in self._outgrown)):
            if block is not None and position < len(block):
                with memoryview(block) as view, memoryview(data) as given:
                    part = given[: len(block) - position]
                    view[position : position + len(part)] = part

    def _grow(self, length: int) -> None:
        if length > len(self._block):
            block = _Block(max(length, 2 * len(self._block)))
            block[: len(self._block)] = self._block
            self._outgrown.append(weakref.ref(self._block))
            self._block = block


class MemoryDisk(Disk):
    """Files and directories in memory. They last as long as this object: open a broker's data over it again and again.

    A store through a mapping for writing reaches the file as long as the file does not grow. Processes cannot share it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._directories: dict[str, dict[str, _File | None]] = {"/": {}}
        """For every directory its names, each with its file; None for a directory."""
        self._open: dict[int, tuple[_File, bool]] = {}
        """Open files by number, each with whether it may be written."""
        self._numbers = itertools.count(1)

    def open(self, path: str, *, write: bool = False, create: bool = False) -> OpenFile:
        """Open a file; with `create` it must not exist yet."""
        directory, name = self._split(path)
        with self._lock:
            if create:
                names = self._names(directory, path)
                if name in names:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                names[name] = _File()
            found = self._file(path)
            number = next(self._numbers)
            self._open[number] = found, write or create
        return OpenFile(self, number, path)

    def close(self, fd: int) -> None:
        """Close a file by its number; OpenFile calls this by itself."""
        with self._lock:
            file, _ = self._open.pop(fd)
            self._release(file, fd)

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of the data at a position."""
        with self._lock:
            self._writable(file).write(position, data)

    def read(self, file: OpenFile, position: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""
        with self._lock:
            return self._open[file.fd][0].read(position, length)

    def size(self, file: OpenFile) -> int:
        """The length of an open file in bytes."""
        return self._open[file.fd][0].size

    def truncate(self, file: OpenFile, length: int) -> None:
        """Set a file's length."""
        with self._lock:
            self._writable(file).resize(length)

    def sync(self, file: OpenFile) -> None:
        """Return at once: no power loss takes anything without taking all of it."""
        assert file.fd in self._open

    def map(self, file: OpenFile, length: int, *, write: bool = False) -> memoryview:
        """Map the first `length` bytes, which show later writes."""
        with self._lock:
            found = self._writable(file) if write else self._open[file.fd][0]
            if length > found.size:
                raise ValueError("the file is shorter than the mapping")
            return found.view(length) if write else found.view(length).toreadonly()

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory at the path."""
        directory, name = self._split(path)
        return self.is_directory(path) or name in self._directories.get(directory, ())

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory at the path."""
        return _normal(path) in self._directories

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none when there is no such directory."""
        with self._lock:
            return sorted(self._directories.get(_normal(path), ()))

    def make_directory(self, path: str, *, sync: bool = True, private: bool = False) -> None:  # noqa: ARG002
        """Make a directory and the ones above it; it may exist."""
        directory, name = self._split(path)
        with self._lock:
            if self.is_directory(path):
                return
            self.make_directory(directory)
            if name in self._directories[directory]:
                raise _failed(errno.ENOTDIR, path)
            self._directories[directory][name] = None
            self._directories[_normal(path)] = {}

    def sync_directory(self, path: str) -> None:
        """Return at once if there is such a directory."""
        with self._lock:
            self._names(_normal(path), path)

    def rename(self, source: str, target: str, *, sync: bool = True) -> None:  # noqa: ARG002
        """Rename a file or directory, replacing a file of the new name."""
        (old_directory, old_name), (new_directory, new_name) = self._split(source), self._split(target)
        with self._lock:
            old, new = self._names(old_directory, source), self._names(new_directory, target)
            if old_name not in old:
                raise LogNotFound(f"there is no {source}")
            if _normal(target).startswith(f"{_normal(source)}/"):
                raise _failed(errno.EINVAL, target)  # a directory cannot be moved into itself
            if self.is_directory(source) and new.get(new_name) is not None:
                raise _failed(errno.ENOTDIR, target)  # nor replace a file
            if self.is_directory(target) and (self.names(target) or not self.is_directory(source)):
                raise _failed(errno.ENOTEMPTY if self.is_directory(source) else errno.EISDIR, target)
            if self.is_directory(source):
                self._move_directory(_normal(source), _normal(target))
            new[new_name] = old.pop(old_name)

    def remove(self, path: str, *, sync: bool = True) -> None:  # noqa: ARG002
        """Remove a file, if it is there."""
        directory, name = self._split(path)
        with self._lock:
            if self.is_directory(path):
                raise _failed(errno.EISDIR, path)
            self._directories.get(directory, {}).pop(name, None)

    def remove_directory(self, path: str) -> None:
        """Remove a directory and all that is in it."""
        directory, name = self._split(path)
        with self._lock:
            self._names(_normal(path), path)
            for inner in self.names(path):
                if self.is_directory(f"{path}/{inner}"):
                    self.remove_directory(f"{path}/{inner}")
            del self._directories[_normal(path)], self._directories[directory][name]

    def lock(self, file: OpenFile, *, wait: bool = False, shared: bool = False) -> bool:
        """Take the file's lock; it goes when the file is closed. Returns whether it was free."""
        with self._changed:
            found, _ = self._open[file.fd]
            while (found.exclusive or file.fd) != file.fd or not (shared or found.shared <= {file.fd}):
                if not wait:
                    return False
                self._changed.wait()
            self._release(found, file.fd)
            if shared:
                found.shared.add(file.fd)
            else:
                found.exclusive = file.fd
            return True

    def unlock(self, file: OpenFile) -> None:
        """Release the file's lock."""
        with self._lock:
            self._release(self._open[file.fd][0], file.fd)

    def boot_id(self) -> bytes:
        """Always the same: nothing is ever lost but all of it."""
        return b"a disk in memory"

    def descriptors_max(self) -> int:
        """As many as you like."""
        return sys.maxsize

    def _release(self, file: _File, number: int) -> None:
        file.shared.discard(number)
        if file.exclusive == number:
            file.exclusive = None
        self._changed.notify_all()

    def _split(self, path: str) -> tuple[str, str]:
        return posixpath.split(_normal(path))

    def _names(self, directory: str, path: str) -> dict[str, _File | None]:
        names = self._directories.get(directory)
        if names is None:
            above, name = posixpath.split(directory)
            raise _failed(errno.ENOTDIR, path) if name in self._directories.get(above, ()) else _missing(path)
        return names

    def _file(self, path: str) -> _File:
        directory, name = self._split(path)
        file = self._directories.get(directory, {}).get(name)
        if file is None:
            raise _failed(errno.EISDIR, path) if self.is_directory(path) else _missing(path)
        return file

    def _writable(self, file: OpenFile) -> _File:
        found, writable = self._open[file.fd]
        if not writable:
            raise _failed(errno.EBADF, file.path)
        return found

    def _move_directory(self, source: str, target: str) -> None:
        moved = [path for path in self._directories if path == source or path.startswith(f"{source}/")]
        for path in moved:
            self._directories[target + path.removeprefix(source)] = self._directories.pop(path)


def _normal(path: str) -> str:
    """A path with one spelling; relative ones begin at the root."""
    return posixpath.normpath(f"/{path.lstrip('/')}")


def _missing(path: str) -> LogNotFound:
    return LogNotFound(f"there is no {path}")


def _failed(number: int, path: str) -> DiskFailed:
    error = DiskFailed(f"{path}: {os.strerror(number)}", errno=number)
    error.errno = number
    return error
