"""The seam to a disk: all files of storage, engines and broker go through the Disk that they are given.

This is the only module of these rooms that touches the operating system's files. Another home for data, such as a
replicated disk or an object store with a local cache, is another Disk.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from headrace.model.errors import DiskFailed, DiskFull, HeadraceError, LogNotFound, TooManyFiles

T = TypeVar("T")
SyncCallback = Callable[[HeadraceError | None], None]
"""Gets None when what was to be synced is, or the reason why it cannot be."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)
_ZEROS = bytes(1 << 20)


class OpenFile:
    """An open file of a disk; it closes when the last reference to it goes."""

    __slots__ = ("_disk", "fd", "path")

    def __init__(self, disk: "Disk", fd: int, path: str) -> None:
        self._disk = disk
        self.fd = fd
        """The number that its disk knows it by: a file descriptor on a local disk."""
        self.path = path

    def __del__(self) -> None:
        if hasattr(self, "path"):  # or an interrupt came before there was anything to close
            self._disk.close(self.fd)


class OpenDirectory:
    """A directory that was opened: files are opened, renamed and removed in this one, whatever is at its path by then.

    `disk` finds a file of it by the path that `within` makes of its name.
    """

    def __init__(self, disk: "Disk", path: str) -> None:
        self.disk = disk
        self.path = path

    def within(self, name: str) -> str:
        """The path, on its disk, of what has this name in the directory; of the directory itself without a name."""
        return f"{self.path}/{name}" if name else self.path

    def is_current(self) -> bool:
        """Whether it is still the directory at its path, rather than moved, removed, unmounted or replaced."""
        return self.disk.is_directory(self.path)


class Disk(ABC):
    """What storage needs of a disk: files with positions, directories with atomic renames, syncs and locks.

    LocalDisk says what each method does. A crash may lose or reorder all changes that were not synced: of a file's
    content since `sync`, of a directory's names since `sync_directory`. A write of 512 aligned bytes is never torn.
    Any thread may call any method. Errors are DiskFull, LogNotFound, TooManyFiles and DiskFailed; `open` raises
    FileExistsError if the file to be created exists. tests/conformance runs the same suite over every disk.
    """

    is_replicated: bool = False
    """Whether `sync` returns only when a shared store has the changes, so that they survive the loss of the machine."""
    close_some: Callable[[], bool] = staticmethod(lambda: False)
    """Closes files that nobody uses at the moment; returns whether there were any. Set by the StorageRuntime."""
    on_failure: Callable[[BaseException], None] = staticmethod(lambda _: None)
    """Called, on any thread, when a replicated disk or a log on it has failed. Set by the node of the cluster."""

    def kept_order_since(self, boot_id: bytes) -> bool:
        """Whether no change made since a boot was lost or reordered: at most the last ones are missing."""
        return boot_id == self.boot_id() != b""

    def report_damage(self, path: str, position: int, reason: str) -> None:  # noqa: B027
        """Called when the bytes of a file turn out to be damaged, before anything is made of that.

        A disk that has a copy elsewhere raises NotServing, and has the file repaired: the damage must not become a
        fact. It returns if the bytes are what they are everywhere.
        """

    @abstractmethod
    def open(self, path: str, *, write: bool = False, create: bool = False) -> OpenFile: ...
    @abstractmethod
    def close(self, fd: int) -> None: ...
    @abstractmethod
    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None: ...
    @abstractmethod
    def read(self, file: OpenFile, position: int, length: int) -> bytes: ...
    @abstractmethod
    def size(self, file: OpenFile) -> int: ...
    @abstractmethod
    def truncate(self, file: OpenFile, length: int) -> None: ...
    @abstractmethod
    def sync(self, file: OpenFile) -> None: ...

    def begin_sync(self, file: OpenFile, done: SyncCallback) -> bool:  # noqa: ARG002
        """Begin what `sync` does, and call back on any thread when it is done; False if one has to wait for it.

        Several may be under way. Each includes what those that began before include.
        """
        return False

    @property
    def overlaps_syncs(self) -> bool:
        """Whether syncs take so long that the next one is better begun before the last is done."""
        return False

    @abstractmethod
    def map(self, file: OpenFile, length: int, *, write: bool = False) -> memoryview: ...
    @abstractmethod
    def exists(self, path: str) -> bool: ...
    @abstractmethod
    def is_directory(self, path: str) -> bool: ...
    @abstractmethod
    def names(self, path: str) -> list[str]: ...
    @abstractmethod
    def make_directory(self, path: str, *, sync: bool = True, private: bool = False) -> None: ...
    @abstractmethod
    def sync_directory(self, path: str) -> None: ...
    @abstractmethod
    def rename(self, source: str, target: str, *, sync: bool = True) -> None: ...
    @abstractmethod
    def remove(self, path: str, *, sync: bool = True) -> None: ...
    @abstractmethod
    def remove_directory(self, path: str) -> None: ...
    @abstractmethod
    def lock(self, file: OpenFile, *, wait: bool = False, shared: bool = False) -> bool: ...
    @abstractmethod
    def unlock(self, file: OpenFile) -> None: ...

    def open_directory(self, path: str) -> OpenDirectory:
        """Open a directory, so that another one at its path is not taken for it; raises LogNotFound without one.

        This is for disks whose directories nobody else can replace: it relies on the path.
        """
        if not self.is_directory(path):
            raise LogNotFound(f"there is no {path}")
        return OpenDirectory(self, path)

    def is_current(self, file: OpenFile) -> bool:
        """Whether an open file is still the one at its path."""
        return self.exists(file.path)

    def length(self, path: str) -> int | None:
        """The length of a file in bytes; None if there is none."""
        try:
            return self.size(self.open(path))
        except LogNotFound:
            return None

    @abstractmethod
    def boot_id(self) -> bytes: ...
    @abstractmethod
    def descriptors_max(self) -> int: ...

    def zero(self, file: OpenFile, position: int, length: int) -> None:
        """Write zeros, so that later writes there change no metadata and sync quickly."""
        for at in range(position, position + length, len(_ZEROS)):
            self.write(file, at, memoryview(_ZEROS)[: position + length - at])


class LocalDisk(Disk):
    """The disk of this machine."""

    file_mode = 0o644
    """Permissions of files that it creates, as far as umask leaves them."""

    def open(self, path: str, *, write: bool = False, create: bool = False) -> OpenFile:
        """Open a file; with `create` it must not exist yet."""
        flags = (os.O_RDWR if write or create else os.O_RDONLY) | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        return OpenFile(self, self._opened(path, flags), path)

    def close(self, fd: int) -> None:
        """Close a file by its number; OpenFile calls this by itself."""
        os.close(fd)

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of the data at a position, or raise."""
        try:
            done = os.pwrite(file.fd, data, position)
            while done < len(data):
                done += os.pwrite(file.fd, memoryview(data)[done:], position + done)
        except OSError as error:
            raise _explained(error, file.path) from error

    def read(self, file: OpenFile, position: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""
        parts = []
        try:
            while length > 0:
                part = os.pread(file.fd, length, position)
                if not part:
                    break
                parts.append(part)
                position += len(part)
                length -= len(part)
        except OSError as error:
            raise _explained(error, file.path) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, file: OpenFile) -> int:
        """The length of an open file in bytes."""
        return os.fstat(file.fd).st_size

    def truncate(self, file: OpenFile, length: int) -> None:
        """Set a file's length."""
        try:
            os.ftruncate(file.fd, length)
        except OSError as error:
            raise _explained(error, file.path) from error

    def sync(self, file: OpenFile) -> None:
        """Return when the file's data is on the disk, with the metadata needed to read it."""
        try:
            _sync(file.fd)
        except OSError as error:
            raise _failed(error, file.path) from error  # even if the disk is full: what is on it is unknown

    def sync_directory(self, path: str) -> None:
        """Return when the directory's entries are on the disk."""
        fd = self._opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise _failed(error, path) from error
        finally:
            os.close(fd)

    def map(self, file: OpenFile, length: int, *, write: bool = False) -> memoryview:
        """Map the first `length` bytes, which show later writes; the mapping goes when nobody holds a view of it.

        Raises ValueError if the file is shorter.
        """
        access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        return memoryview(self._with_descriptor(lambda: mmap.mmap(file.fd, length, access=access), file.path))

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory at the path."""
        return os.path.exists(path)

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory at the path."""
        return os.path.isdir(path)

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none when there is no such directory."""
        try:
            return sorted(self._with_descriptor(lambda: os.listdir(path), path))
        except LogNotFound:
            return []

    def make_directory(self, path: str, *, sync: bool = True, private: bool = False) -> None:
        """Make a directory and the ones above it, durably if `sync`; it may exist. `private`: for no other user."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.make_directory(parent)
        try:
            os.mkdir(path, 0o700 if private else 0o777)
        except OSError as error:
            if not os.path.isdir(path):
                raise _not_made(error, path) from error
        if sync:
            self.sync_directory(parent)

    def rename(self, source: str, target: str, *, sync: bool = True) -> None:
        """Rename a file or directory, replacing a file of the new name atomically, and durably if `sync`."""
        try:
            os.replace(source, target)
        except OSError as error:
            raise _explained(error, target) from error
        if sync:
            self.sync_directory(os.path.dirname(target))

    def remove(self, path: str, *, sync: bool = True) -> None:
        """Remove a file, if it is there, durably if `sync`."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _explained(error, path) from error
        if sync:
            self.sync_directory(os.path.dirname(path))

    def remove_directory(self, path: str) -> None:
        """Remove a directory and all that is in it, durably."""
        for name in self.names(path):
            inner = os.path.join(path, name)
            if os.path.isdir(inner) and not os.path.islink(inner):
                self.remove_directory(inner)
            else:
                self.remove(inner, sync=False)
        try:
            os.rmdir(path)
        except OSError as error:
            raise _explained(error, path) from error
        self.sync_directory(os.path.dirname(os.path.abspath(path)))

    def open_directory(self, path: str) -> OpenDirectory:
        """Open a directory. It cannot be unmounted, and its inode number is not used again, until that is forgotten."""
        fd = self._opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return _LocalDirectory(self, OpenFile(self, fd, path))

    def is_current(self, file: OpenFile) -> bool:
        """Whether an open file or directory is still the one at its path."""
        found = self._status(file.path)
        return found is not None and os.path.samestat(found, os.fstat(file.fd))

    def length(self, path: str) -> int | None:
        """The length of a file in bytes, without opening it; None if there is none."""
        found = self._status(path)
        return None if found is None else found.st_size

    def boot_id(self) -> bytes:
        """Sixteen bytes that differ after unsynced writes may have been lost; none where that cannot be known."""
        try:
            file = LocalDisk.open(self, "/proc/sys/kernel/random/boot_id")
        except (LogNotFound, DiskFailed):
            return b""
        return bytes.fromhex(LocalDisk.read(self, file, 0, 64).decode().strip().replace("-", ""))

    def descriptors_max(self) -> int:
        """How many files and mappings the process may have open."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return sys.maxsize if soft == resource.RLIM_INFINITY else soft

    def lock(self, file: OpenFile, *, wait: bool = False, shared: bool = False) -> bool:
        """Take the file's lock, which others respect; it goes when the file and all mappings of it are closed.

        Returns whether it was free.
        """
        try:
            fcntl.flock(file.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError as error:  # a file system without locks
            raise _explained(error, file.path) from error
        return True

    def unlock(self, file: OpenFile) -> None:
        """Release the file's lock."""
        fcntl.flock(file.fd, fcntl.LOCK_UN)

    def _status(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _explained(error, path) from error

    def _opened(self, path: str, flags: int) -> int:
        return self._with_descriptor(lambda: os.open(path, flags, self.file_mode), path)

    def _with_descriptor(self, call: Callable[[], T], path: str) -> T:
        """Do what takes a descriptor; if the process has too many, files that nobody uses are closed first."""
        while True:
            try:
                return call()
            except OSError as error:
                if error.errno not in _EXHAUSTED or not self.close_some():
                    raise _explained(error, path) from error


class PrivateDisk(LocalDisk):
    """The local disk of a broker, whose files are for its user alone."""

    file_mode = 0o600


class _LocalDirectory(OpenDirectory):
    """An open directory of the local disk."""

    def __init__(self, outer: LocalDisk, root: OpenFile) -> None:
        super().__init__(_AnchoredDisk(outer, root), root.path)
        self._outer = outer
        self._root = root

    def within(self, name: str) -> str:
        """The path relative to the directory."""
        return name or "."

    def is_current(self) -> bool:
        """Whether the inode at its path is the one that was opened."""
        return self._outer.is_current(self._root)


class _AnchoredDisk(LocalDisk):
    """The local disk as seen from an open directory: paths are relative to it, and it may be renamed meanwhile."""

    def __init__(self, outer: LocalDisk, root: OpenFile) -> None:
        self.file_mode = outer.file_mode
        self.close_some = outer.close_some
        self._root = root

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory at the path."""
        return self._status(path) is not None

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory at the path."""
        found = self._status(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none when there is no such directory."""
        try:
            fd = self._opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except LogNotFound:
            return []
        try:
            return sorted(self._with_descriptor(lambda: os.listdir(fd), self._whole(path)))
        finally:
            os.close(fd)

    def make_directory(self, path: str, *, sync: bool = True, private: bool = False) -> None:
        """Make a directory and the ones above it, durably if `sync`; it may exist. `private`: for no other user."""
        if self.is_directory(path):
            return
        parent = _parent(path)
        self.make_directory(parent)
        try:
            os.mkdir(path, 0o700 if private else 0o777, dir_fd=self._root.fd)
        except OSError as error:
            if not self.is_directory(path):
                raise _not_made(error, self._whole(path)) from error
        if sync:
            self.sync_directory(parent)

    def rename(self, source: str, target: str, *, sync: bool = True) -> None:
        """Rename a file or directory, replacing a file of the new name atomically, and durably if `sync`."""
        try:
            os.replace(source, target, src_dir_fd=self._root.fd, dst_dir_fd=self._root.fd)
        except OSError as error:
            raise _explained(error, self._whole(target)) from error
        if sync:
            self.sync_directory(_parent(target))

    def remove(self, path: str, *, sync: bool = True) -> None:
        """Remove a file, if it is there, durably if `sync`."""
        try:
            os.unlink(path, dir_fd=self._root.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _explained(error, self._whole(path)) from error
        if sync:
            self.sync_directory(_parent(path))

    def remove_directory(self, path: str) -> None:
        """Remove a directory and all that is in it, durably."""
        for name in self.names(path):
            inner = os.path.join(path, name)
            if stat.S_ISDIR(os.stat(inner, dir_fd=self._root.fd, follow_symlinks=False).st_mode):
                self.remove_directory(inner)
            else:
                self.remove(inner, sync=False)
        try:
            os.rmdir(path, dir_fd=self._root.fd)
        except OSError as error:
            raise _explained(error, self._whole(path)) from error
        self.sync_directory(_parent(path))

    def _status(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path, dir_fd=self._root.fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _explained(error, self._whole(path)) from error

    def _opened(self, path: str, flags: int) -> int:
        root_fd = self._root.fd
        return self._with_descriptor(lambda: os.open(path, flags, self.file_mode, dir_fd=root_fd), self._whole(path))

    def _whole(self, path: str) -> str:
        """The path for people, which was right when the directory was opened."""
        return os.path.join(self._root.path, path)


def _parent(path: str) -> str:
    """The directory above a relative path."""
    return os.path.dirname(path) or "."


def after_fork(call: Callable[[], None]) -> None:
    """Call a function in every forked child, before anything else of the child's runs."""
    os.register_at_fork(after_in_child=call)


def open_or_make(disk: Disk, path: str) -> OpenFile:
    """Open a file for writing, which another process may be making at the same time."""
    while True:
        try:
            return disk.open(path, write=True)
        except LogNotFound:
            with contextlib.suppress(FileExistsError):
                return disk.open(path, create=True)


def _sync(fd: int) -> None:
    if sys.platform == "darwin":
        # fsync on macOS leaves the data in the drive's own cache.
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def _explained(error: OSError, path: str) -> Exception:
    """The operating system's error as one of ours."""
    if error.errno in _FULL:
        return DiskFull(f"no space left to write {path}; free some space and try again")
    if error.errno == errno.ENOENT:
        return LogNotFound(f"there is no {path}")
    if error.errno in _EXHAUSTED:
        return TooManyFiles(
            f"cannot open {path}: {error.strerror}; close files or connections, or raise the limit (ulimit -n)"
        )
    if error.errno == errno.EEXIST:
        return error  # open_or_make deals with it
    return _failed(error, path)


def _failed(error: OSError, path: str) -> DiskFailed:
    text = f"{path}: {error.strerror or error}"
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and (file := _file_above(path)):
        text = f"{file} is a file, not a directory; give another path, or move the file"
    failed = DiskFailed(text, errno=error.errno)
    failed.errno = error.errno
    return failed


def _not_made(error: OSError, path: str) -> Exception:
    """Why a directory cannot be made in one that is there."""
    if error.errno == errno.ENOENT:  # so says /proc, which takes none
        failed = DiskFailed(f"{path} cannot be made: its file system takes no directories; give another path")
        failed.errno = error.errno
        return failed
    return _failed(error, path) if error.errno == errno.EEXIST else _explained(error, path)


def _file_above(path: str) -> str | None:
    """The part of a path that is a file where a directory is needed."""
    while path not in ("", "/"):
        if os.path.lexists(path):
            return None if os.path.isdir(path) else path
        path = os.path.dirname(path)
    return None
