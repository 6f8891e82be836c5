"""Deadlines of many things, of which the next one is known at once."""

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Any)
_STALE_MAX = 64


class Deadlines(Generic[Key]):
    """Keys by deadline: a heap, in which a deadline that is put off stays until it comes up.

    So a sign of life costs two look-ups, and a tick at which nothing is due one, however many keys there are.

    >>> deadlines = Deadlines[str]()
    >>> deadlines.set("alice", 5)
    >>> deadlines.set("bob", 7)
    >>> deadlines.set("alice", 9)
    >>> deadlines.next_us(), deadlines.pop_due(8), deadlines.next_us()
    (7, ['bob'], 9)
    """

    __slots__ = ("_due_us", "_heap", "_queued_us")

    def __init__(self) -> None:
        self._due_us: dict[Key, int] = {}
        self._queued_us: dict[Key, int] = {}
        """The deadline that a key has in the heap: the real one, or an earlier one."""
        self._heap: list[tuple[int, Key]] = []

    def __len__(self) -> int:
        return len(self._due_us)

    @property
    def queued(self) -> int:
        """How many entries the heap has, with those that do not count any more."""
        return len(self._heap)

    def set(self, key: Key, due_us: int) -> None:
        """Give a key a deadline, in place of the one it has."""
        self._due_us[key] = due_us
        queued_us = self._queued_us.get(key)
        if queued_us is None or due_us < queued_us:
            self._queued_us[key] = due_us
            heappush(self._heap, (due_us, key))
            self._drop_stale()

    def get(self, key: Key, default_us: int) -> int:
        """The deadline of a key, or the default if it has none."""
        return self._due_us.get(key, default_us)

    def remove(self, key: Key) -> None:
        """Forget a key, if it is there."""
        if self._due_us.pop(key, None) is not None:
            del self._queued_us[key]
            self._drop_stale()

    def next_us(self) -> int | None:
        """The earliest deadline; None when there is none."""
        heap = self._heap
        while heap:
            queued_us, key = heap[0]
            if self._queued_us.get(key) != queued_us:
                heappop(heap)
                continue
            due_us = self._due_us[key]
            if due_us == queued_us:
                return due_us
            self._queued_us[key] = due_us
            heapreplace(heap, (due_us, key))
        return None

    def pop_due(self, now_us: int, count_max: int = 1 << 62) -> list[Key]:
        """Take out the keys whose deadlines are over, the earliest first, and so many at most."""
        found: list[Key] = []
        while len(found) < count_max and (due_us := self.next_us()) is not None and due_us <= now_us:
            _, key = heappop(self._heap)
            del self._due_us[key], self._queued_us[key]
            found.append(key)
        return found

    def _drop_stale(self) -> None:
        """Keep the heap in proportion to what it is about."""
        if len(self._heap) > 2 * len(self._due_us) + _STALE_MAX:
            self._queued_us = dict(self._due_us)
            self._heap = [(due_us, key) for key, due_us in self._due_us.items()]
            heapify(self._heap)
