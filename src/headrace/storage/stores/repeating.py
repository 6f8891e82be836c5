"""A shared store that repeats what may be repeated: one lost request must not end a claim, or a start, of many."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace.model.errors import StoreUnavailable
from headrace.storage.stores.store import SharedStore, StoredObject

T = TypeVar("T")

_PAUSES_S = (0.02, 0.04, 0.08, 0.16)
_LONGEST_S = 0.5
"""A request that took longer than this is not repeated: the store does not answer, or its driver has repeated it."""


class RepeatingStore(SharedStore):
    """Another store, whose reads and deletions are repeated a few times if they fail at once.

    Creations and replacements are not: only the caller can tell whether a repeated one meets its own.
    """

    def __init__(self, inner: SharedStore, *, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """`clock` measures durations in seconds, `sleep` waits for some."""
        self.inner = inner
        self._clock = clock
        self._sleep = sleep
        self.gains_from_threads, self.reads_at_once = inner.gains_from_threads, inner.reads_at_once

    @property
    def location(self) -> str:
        """Where the other one is."""
        return self.inner.location

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object; raises KeyExists if there is one."""
        self.inner.put_new(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object if it has this version; returns the new version."""
        return self.inner.replace(key, data, version)

    def get(self, key: str) -> StoredObject | None:
        """Read an object; None if there is none."""
        return self._repeat(lambda: self.inner.get(key))

    def get_many(self, keys: Sequence[str]) -> list[StoredObject | None]:
        """Read several objects."""
        return self._repeat(lambda: self.inner.get_many(keys))

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """The first keys with a prefix behind `after`."""
        return self._repeat(lambda: self.inner.names(prefix, after, count_max))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        self._repeat(lambda: self.inner.delete(keys))

    def close(self) -> None:
        """Close all connections."""
        self.inner.close()

    def remarks(self) -> list[str]:
        """What an operator should know about the other one."""
        return self._repeat(self.inner.remarks)

    def _repeat(self, call: Callable[[], T]) -> T:
        began_s = self._clock()
        for pause_s in _PAUSES_S:
            try:
                return call()
            except StoreUnavailable:
                if self._clock() - began_s > _LONGEST_S:
                    raise
                self._sleep(pause_s)
        return call()
