"""A bounded LRU pool of open files, mappings or indexes."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Pool(Generic[K, V]):
    """Keeps up to `limit` values and evicts the least recently used; users of an evicted value may keep it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[K, V] = OrderedDict()
        # Reentrant, as the collector may free a log, which drops its files, while this thread holds the lock.
        self._lock = threading.RLock()

    def get(self, key: K) -> V | None:
        """The value of a key, which becomes the most recently used; None if there is none."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> V:
        """Add or replace the value of a key."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            self._shrink(self._limit)
        return value

    def _shrink(self, limit: int) -> None:
        while len(self._values) > limit:
            self._values.popitem(last=False)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made now if there is none."""
        value = self.get(key)
        return self.put(key, make()) if value is None else value

    def drop(self, key: K) -> None:
        """Remove the value of a key."""
        with self._lock:
            self._values.pop(key, None)

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._values.clear()

    def evict_half(self) -> bool:
        """Evict the less recently used half; returns whether there was any value."""
        with self._lock:
            count = len(self._values)
            self._shrink(count // 2)
            return count > 0

    def abandon(self) -> None:
        """In a forked child: drop all values, whatever threads of the parent were doing here."""
        self._lock = threading.RLock()
        self._values = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)
