"""A bounded number of open things, the least recently used given up first."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Pool(Generic[K, V]):
    """Keeps up to `limit` values. A value given up lives on until its last holder lets go of it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[K, V] = OrderedDict()
        # Reentrant, as the collector may free a log, which gives up its files, while this thread is in here.
        self._lock = threading.RLock()

    def get(self, key: K) -> V | None:
        """The value kept for a key, which counts as a use of it."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> V:
        """Keep a value, in place of an earlier one."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            self._shrink(self._limit)
        return value

    def _shrink(self, limit: int) -> None:
        while len(self._values) > limit:
            self._values.popitem(last=False)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value kept for a key, made now if there is none."""
        value = self.get(key)
        return self.put(key, make()) if value is None else value

    def drop(self, key: K) -> None:
        """Give up a key's value."""
        with self._lock:
            self._values.pop(key, None)

    def give_up_half(self) -> bool:
        """Give up the half that was not used for longer; whether there was any."""
        with self._lock:
            count = len(self._values)
            self._shrink(count // 2)
            return count > 0

    def abandon(self) -> None:
        """In a forked child: give up all values, whatever threads of the parent were doing here."""
        self._lock = threading.RLock()
        self._values = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)
