"""A shared store in a directory, for processes on one machine.

An object is a file: 4 bytes `HRD1`, 12 random bytes that are its version, and the data. The file of the key
`trading/nodes/a` is `trading/nodes/a#`, so that the key `trading/nodes` may exist, too.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.model.errors import DiskFailed, DiskFull, InvalidArgument, LogNotFound, StoreUnavailable, TooManyFiles
from headrace.storage.disk import Disk, open_or_make
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
    none: files are replaced by renames.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path.rstrip("/") or "/"

    @property
    def location(self) -> str:
        """Where it is."""
        return f"directory://{self._path}"

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object; raises KeyExists if there is one."""
        check_object(key, data)
        with self._changing():
            if self._disk.exists(self._file(key)):
                self._disk.sync_directory(self._directory(key))  # its writer may have died before it did this
                raise KeyExists(key)
            self._disk.make_directory(self._directory(key))
            self._write(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object if it has this version; returns the new version."""
        check_object(key, data)
        with self._changing():
            found = self._read(key)
            if found is None or found.version != version:
                raise VersionMismatch(key)
            return self._write(key, data)

    def get(self, key: str) -> StoredObject | None:
        """Read an object; None if there is none."""
        with _explained(self.location):
            return self._read(key)

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """The first keys with a prefix behind `after`."""
        found: list[str] = []
        with _explained(self.location):
            for key in self._keys("", prefix, after):
                if len(found) == count_max:
                    break
                found.append(key)
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, and the directories that are empty then."""
        with self._changing():
            changed = {self._directory(key) for key in keys if self._disk.exists(self._file(key))}
            for key in keys:
                self._disk.remove(self._file(key), sync=False)
            for directory in changed:
                self._disk.sync_directory(directory)
            for directory in changed:
                self._prune(directory)

    def remarks(self) -> list[str]:
        """That one machine has it all."""
        return ["the store is a directory: it is lost with the machine, or the disk, that has it"]

    def close(self) -> None:
        """Do nothing: no file stays open."""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock that all writers take, in this process and in others."""
        with _explained(self.location):
            if not self._disk.is_directory(self._path):
                self._disk.make_directory(self._path, private=True)
            file = open_or_make(self._disk, f"{self._path}/{_LOCK}")  # opened anew: its lock is then this thread's own
            self._disk.lock(file, wait=True)
            try:
                yield
            finally:
                self._disk.unlock(file)

    def _read(self, key: str) -> StoredObject | None:
        path = self._file(key)
        try:
            file = self._disk.open(path)
        except LogNotFound:
            return None
        data = self._disk.read(file, 0, self._disk.size(file))
        if len(data) < _HEADER_BYTES or not data.startswith(MAGIC):
            raise StoreUnavailable(f"{path} is no object of a store: restore it from a backup, or remove it")
        return StoredObject(data[_HEADER_BYTES:], data[len(MAGIC) : _HEADER_BYTES].hex())

    def _write(self, key: str, data: bytes) -> str:
        version = secrets.token_bytes(_VERSION_BYTES)
        new = f"{self._path}/{_NEW}"
        self._disk.remove(new, sync=False)  # left by a process that was killed
        file = self._disk.open(new, create=True)
        self._disk.write(file, 0, MAGIC + version + data)
        self._disk.sync(file)
        self._disk.rename(new, self._file(key))
        return version.hex()

    def _keys(self, directory: str, prefix: str, after: str) -> Iterator[str]:
        """All keys below a directory, which is empty or ends with a slash, in the order of their bytes."""
        entries = []
        for name in self._disk.names(f"{self._path}/{directory}".rstrip("/")):
            if name.endswith(_FILE_MARK):
                entries.append(directory + name[: -len(_FILE_MARK)])
            elif not name.startswith(_FILE_MARK):
                entries.append(f"{directory}{name}/")
        for entry in sorted(entries):
            if not entry.endswith("/"):
                if entry.startswith(prefix) and entry > after:
                    yield entry
            elif (entry.startswith(prefix) or prefix.startswith(entry)) and (entry > after or after.startswith(entry)):
                yield from self._keys(entry, prefix, after)

    def _prune(self, directory: str) -> None:
        """Remove a directory and those above it as far as they are empty, or gone already."""
        while len(directory) > len(self._path) and not self._disk.names(directory):
            if self._disk.is_directory(directory):
                self._disk.remove_directory(directory)
            directory = directory.rpartition("/")[0]

    def _file(self, key: str) -> str:
        return f"{self._path}/{key}{_FILE_MARK}"

    def _directory(self, key: str) -> str:
        return f"{self._path}/{key}".rpartition("/")[0]


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
