"""A shared store in the memory of one process."""

import threading
from bisect import bisect_right, insort
from collections.abc import Sequence

from headrace.storage.stores.address import StoreAddress
from headrace.storage.stores.store import KeyExists, SharedStore, StoredObject, VersionMismatch, check_object

_named: dict[str, "MemoryStore"] = {}
_named_lock = threading.Lock()


class MemoryStore(SharedStore):
    """A store in memory, for tests and for trying things out: it lasts as long as this object."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._objects: dict[str, StoredObject] = {}
        self._keys: list[str] = []
        self._changes = 0

    @property
    def location(self) -> str:
        """Where it is."""
        return f"memory:{self._name}"

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object; raises KeyExists if there is one."""
        check_object(key, data)
        with self._lock:
            if key in self._objects:
                raise KeyExists(key)
            insort(self._keys, key)
            self._store(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object if it has this version; returns the new version."""
        check_object(key, data)
        with self._lock:
            found = self._objects.get(key)
            if found is None or found.version != version:
                raise VersionMismatch(key)
            return self._store(key, data)

    def get(self, key: str) -> StoredObject | None:
        """Read an object; None if there is none."""
        with self._lock:
            return self._objects.get(key)

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """The first keys with a prefix behind `after`."""
        with self._lock:
            found = []
            for key in self._keys[bisect_right(self._keys, max(after, "")) :]:
                if key.startswith(prefix):
                    found.append(key)
                    if len(found) == count_max:
                        break
                elif key > prefix:
                    break
            return found

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        with self._lock:
            gone = {key for key in keys if self._objects.pop(key, None) is not None}
            if gone:
                self._keys = [key for key in self._keys if key not in gone]

    def remarks(self) -> list[str]:
        """That nothing lasts."""
        return ["the store is in the memory of this process: all of it is lost when the process ends"]

    def close(self) -> None:
        """Do nothing: the objects stay."""

    def _store(self, key: str, data: bytes) -> str:
        self._changes += 1
        self._objects[key] = StoredObject(bytes(data), str(self._changes))
        return str(self._changes)


def open_memory(address: StoreAddress) -> MemoryStore:
    """The store of that name, the same for all who ask in this process."""
    address.check_options()
    with _named_lock:
        return _named.setdefault(address.path, MemoryStore(address.path))


open_memory.api = 1  # type: ignore[attr-defined]
