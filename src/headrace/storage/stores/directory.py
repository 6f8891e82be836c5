"""A shared store in a directory, for processes on one machine.

An object is a file: 4 bytes `HRD1`, 12 random bytes that are its version, and the data. The file of the key
`trading/nodes/a` is `trading/nodes/a#`, so that the key `trading/nodes` may exist, too.
"""

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, overload
from weakref import WeakValueDictionary

from headrace.model.errors import DiskFailed, DiskFull, InvalidArgument, LogNotFound, StoreUnavailable, TooManyFiles
from headrace.storage.disk import Disk, LocalDisk, OpenDirectory, open_or_make
from headrace.storage.stores.address import StoreAddress
from headrace.storage.stores.store import KeyExists, SharedStore, StoredObject, VersionMismatch, check_object

MAGIC = b"HRD1"
_VERSION_BYTES = 12
_HEADER_BYTES = len(MAGIC) + _VERSION_BYTES
_LOCK = "#lock"
_NEW = "#new"
_FILE_MARK = "#"


class DirectoryStore(SharedStore):
    """A store in a directory of a disk that all nodes have, which is to say of one machine.

    Changes take the lock of one file, so a process that is stopped in the middle of one holds up all others. Reads take
    none: files are replaced by renames. Once the directory was opened, no other one at its path is used, and none made.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._path = path.rstrip("/") or "/"
        self._root: _Root | None = _shared_root(disk, self._path)

    @property
    def location(self) -> str:
        """Where it is."""
        return f"directory://{self._path}"

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object; raises KeyExists if there is one."""
        check_object(key, data)
        with self._changing() as opened:
            if opened.exists(key):
                opened.sync_directory(key)  # its writer may have died before it did this
                raise KeyExists(key)
            opened.make_directory(key)
            opened.write(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object if it has this version; returns the new version."""
        check_object(key, data)
        with self._changing() as opened:
            found = opened.read(key)
            if found is None or found.version != version:
                raise VersionMismatch(key)
            return opened.write(key, data)

    def get(self, key: str) -> StoredObject | None:
        """Read an object; None if there is none."""
        with _explained(self.location):
            opened = self._reading()
            return None if opened is None else opened.read(key)

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """The first keys with a prefix behind `after`."""
        found: list[str] = []
        with _explained(self.location):
            opened = self._reading()
            for key in () if opened is None else opened.keys("", prefix, after):
                if len(found) == count_max:
                    break
                found.append(key)
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, and the directories that are empty then."""
        with self._changing() as opened:
            opened.delete(keys)

    def remarks(self) -> list[str]:
        """That one machine has it all."""
        return ["the store is a directory: it is lost with the machine, or the disk, that has it"]

    def close(self) -> None:
        """Refuse later requests, and close the directory if no other store of this process has it open."""
        self._root = None

    @contextmanager
    def _changing(self) -> Iterator["_Objects"]:
        """Hold the lock that all writers take, in this process and in others."""
        with _explained(self.location):
            root = self._opened_root()
            opened = root.open(make=True)
            root.check(opened)  # before a lock file is made
            with _locked(opened):
                root.check(opened)  # it may have been moved while this waited for the lock
                yield _Objects(opened)

    def _reading(self) -> "_Objects | None":
        """The directory for a read; None if there is none yet."""
        root = self._opened_root()
        opened = root.open(make=False)
        if opened is None:
            return None
        root.check(opened)
        return _Objects(opened)

    def _opened_root(self) -> "_Root":
        root = self._root
        if root is None:
            raise StoreUnavailable(f"the store {self.location} is closed")
        return root


class _Root:
    """The directory of a store, once it was opened; all stores of this process that have its path share it."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._lock = threading.Lock()
        self._opened: OpenDirectory | None = None

    @overload
    def open(self, *, make: Literal[True]) -> OpenDirectory: ...
    @overload
    def open(self, *, make: bool) -> OpenDirectory | None: ...
    def open(self, *, make: bool) -> OpenDirectory | None:
        """The directory, which is opened the first time, and may be made then; None if there is none."""
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    if make and not self._disk.is_directory(self._path):
                        self._disk.make_directory(self._path, private=True)
                    elif not make and not self._disk.exists(self._path):
                        return None
                    self._opened = self._disk.open_directory(self._path)
        return self._opened

    def check(self, opened: OpenDirectory) -> None:
        """Refuse to go on if the path leads to nothing, or to another directory than the one that was opened."""
        if opened.is_current():
            return
        if self._disk.exists(self._path):
            what = f"another directory is at {self._path} than the one that this process opened"
        else:
            what = "its directory was moved, removed or unmounted while this process runs"
        raise StoreUnavailable(
            f"the store directory://{self._path} failed: {what}; nothing is stored until the former one is back: move "
            f"or mount it to {self._path} again, and the store goes on by itself"
        )


_roots: WeakValueDictionary[tuple[int, str], _Root] = WeakValueDictionary()
_roots_lock = threading.Lock()


def _shared_root(disk: Disk, path: str) -> _Root:
    """The root at a path, the same for all stores of this process: one that is opened later must not take another."""
    place = 0 if isinstance(disk, LocalDisk) else id(disk)  # local disks all have the same directories
    with _roots_lock:
        return _roots.setdefault((place, path), _Root(disk, path))


class _Objects:
    """The objects in an open directory."""

    def __init__(self, opened: OpenDirectory) -> None:
        self._opened = opened
        self._disk = opened.disk

    def exists(self, key: str) -> bool:
        """Whether there is an object."""
        return self._disk.exists(self._file(key))

    def read(self, key: str) -> StoredObject | None:
        """Read an object; None if there is none."""
        path = self._file(key)
        try:
            file = self._disk.open(path)
        except LogNotFound:
            return None
        data = self._disk.read(file, 0, self._disk.size(file))
        if len(data) < _HEADER_BYTES or not data.startswith(MAGIC):
            whole = f"{self._opened.path}/{key}{_FILE_MARK}"
            raise StoreUnavailable(f"{whole} is no object of a store: restore it from a backup, or remove it")
        return StoredObject(data[_HEADER_BYTES:], data[len(MAGIC) : _HEADER_BYTES].hex())

    def write(self, key: str, data: bytes) -> str:
        """Write an object durably; returns its version."""
        version = secrets.token_bytes(_VERSION_BYTES)
        new = self._opened.within(_NEW)
        self._disk.remove(new, sync=False)  # left by a process that was killed
        file = self._disk.open(new, create=True)
        self._disk.write(file, 0, MAGIC + version + data)
        self._disk.sync(file)
        self._disk.rename(new, self._file(key))
        return version.hex()

    def make_directory(self, key: str) -> None:
        """Make the directory of an object."""
        self._disk.make_directory(self._directory(key))

    def sync_directory(self, key: str) -> None:
        """Return when the name of an object is on the disk."""
        self._disk.sync_directory(self._directory(key))

    def keys(self, directory: str, prefix: str, after: str) -> Iterator[str]:
        """All keys below a directory, which is empty or ends with a slash, in the order of their bytes."""
        entries = []
        for name in self._disk.names(self._opened.within(directory.rstrip("/"))):
            if name.endswith(_FILE_MARK):
                entries.append(directory + name[: -len(_FILE_MARK)])
            elif not name.startswith(_FILE_MARK):
                entries.append(f"{directory}{name}/")
        for entry in sorted(entries):
            if not entry.endswith("/"):
                if entry.startswith(prefix) and entry > after:
                    yield entry
            elif (entry.startswith(prefix) or prefix.startswith(entry)) and (entry > after or after.startswith(entry)):
                yield from self.keys(entry, prefix, after)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, and the directories that are empty then."""
        changed = {key.rpartition("/")[0] for key in keys if self.exists(key)}
        for key in keys:
            self._disk.remove(self._file(key), sync=False)
        for directory in changed:
            self._disk.sync_directory(self._opened.within(directory))
        for directory in changed:
            self._prune(directory)

    def _prune(self, directory: str) -> None:
        """Remove a directory and those above it as far as they are empty, or gone already."""
        while directory and not self._disk.names(path := self._opened.within(directory)):
            if self._disk.is_directory(path):
                self._disk.remove_directory(path)
            directory = directory.rpartition("/")[0]

    def _file(self, key: str) -> str:
        return self._opened.within(f"{key}{_FILE_MARK}")

    def _directory(self, key: str) -> str:
        return self._opened.within(key.rpartition("/")[0])


@contextmanager
def _locked(opened: OpenDirectory) -> Iterator[None]:
    """Hold the lock of a directory: of the file that has the name of the lock now, should one have been removed."""
    disk = opened.disk
    while True:
        file = open_or_make(disk, opened.within(_LOCK))  # opened anew: its lock is then this thread's own
        disk.lock(file, wait=True)
        if disk.is_current(file):
            break
        disk.unlock(file)
    try:
        yield
    finally:
        disk.unlock(file)


def open_directory(address: StoreAddress) -> DirectoryStore:
    """The store in the directory that the path names."""
    address.check_options()
    if address.host or not address.path.startswith("/"):
        raise InvalidArgument("a store in a directory is directory:///path, with three slashes and the whole path")
    if address.disk is None:
        raise InvalidArgument("a store in a directory needs a disk: call open_store with one")
    return DirectoryStore(address.disk, address.path)


open_directory.api = 1  # type: ignore[attr-defined]


@contextmanager
def _explained(location: str) -> Iterator[None]:
    """Turn the disk's errors into the one that callers of stores expect."""
    try:
        yield
    except (DiskFull, DiskFailed, TooManyFiles, LogNotFound) as error:
        raise StoreUnavailable(f"the store {location} failed: {error}") from error
