"""Messages of one key one at a time: which keys are in hand or kept for a retry, and what is blocked by that.

What the order of a key means is written down in docs/reference/subscriptions.md, "The order of a key".
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heappop, heappush


class Keys:
    """Which messages hold their keys, and which wait for one of them to be free.

    A key is held by its messages in hand, else by the oldest of those that were tried before. When nobody holds it and
    some of its messages are blocked, one that comes before all of these is ready: it was let through.
    """

    def __init__(self) -> None:
        self._key_of: dict[int, bytes] = {}
        """Of those in hand and of those that were tried before."""
        self._busy: dict[bytes, int] = {}
        """How many messages of each key are in hand: one, unless it was not asked for from the beginning."""
        self._tried: dict[bytes, list[int]] = {}
        """Offsets, rising, of those that were tried before, are not in hand, and are due."""
        self._later: dict[int, int] = {}
        """When those are due that were tried before and are to come later."""
        self._dues: list[tuple[int, int]] = []
        """The same as a heap; entries that do not agree do not count."""
        self._blocked: dict[bytes, list[tuple[int, int]]] = {}
        """Heaps of the discipline's keys and offsets."""
        self._former: dict[int, int | None] = {}
        """Have entries among the blocked ones that do not count, and perhaps one that does, with this order."""
        self._through: dict[int, bytes] = {}

    def divide(self, keys: Sequence[bytes | None], offsets: Sequence[int]) -> tuple[list[int], list[int]]:
        """Which of these can be leased together, and which are blocked, by others or by one another: their indices."""
        free: list[int] = []
        blocked: list[int] = []
        taken: set[bytes] = set()
        for index, offset in enumerate(offsets):
            key = keys[index]
            if key is None:
                free.append(index)
            elif key in self._busy or key in taken or self._tried.get(key, (offset,))[0] != offset:
                blocked.append(index)
            else:
                taken.add(key)
                free.append(index)
        return free, blocked

    def occupy(self, offsets: Sequence[int], keys: Sequence[bytes | None] | None) -> None:
        """Record the keys of leased messages."""
        for offset, key in zip(offsets, keys or (), strict=False):
            if key is not None:
                self.release(offset)
                self._busy[key] = self._busy.get(key, 0) + 1
                self._key_of[offset] = key

    def keep(self, offset: int, key: bytes, due_us: int, now_us: int) -> None:
        """Keep the key of a message that was tried before, from its due time on."""
        self._key_of[offset] = key
        if due_us > now_us:
            self._later[offset] = due_us
            heappush(self._dues, (due_us, offset))
        else:
            insort(self._tried.setdefault(key, []), offset)

    def advance(self, now_us: int) -> None:
        """Those that were tried before and are due by now have their keys kept for them."""
        while self._dues and self._dues[0][0] <= now_us:
            due_us, offset = heappop(self._dues)
            if self._later.get(offset) == due_us:
                del self._later[offset]
                insort(self._tried.setdefault(self._key_of[offset], []), offset)

    def block(self, key: bytes, order: int, offset: int) -> None:
        """Block a message until its key is free."""
        self._through.pop(offset, None)
        if offset in self._former:
            self._former[offset] = order
        heappush(self._blocked.setdefault(key, []), (order, offset))

    def unblock(self, offset: int) -> None:
        """Unblock a message, or let it be blocked anew at another position."""
        self._former[offset] = None

    def put_back(self, offsets: Iterable[int], keys: Iterable[bytes | None]) -> None:
        """These were free and stay ready, though they may have blocked others: as if they had been let through."""
        for offset, key in zip(offsets, keys, strict=True):
            if key is not None and key in self._blocked:
                self._through[offset] = key

    def among(self, offsets: Sequence[int]) -> Sequence[int]:
        """Those of these of which anything is known here, if they are very many; else all of them."""
        tables: tuple[Collection[int], ...] = (self._key_of, self._through, self._former)
        if type(offsets) is not range or len(offsets) <= sum(map(len, tables)):
            return offsets
        return sorted({offset for table in tables for offset in table if offset in offsets})

    def release(self, offset: int) -> bytes | None:
        """This one does not hold its key any more, nor is it what was let through; returns the key it stood for."""
        key = self._key_of.pop(offset, None)
        if key is None:
            return self._through.pop(offset, None)
        if self._later.pop(offset, None) is None:
            tried = self._tried.get(key, [])
            at = bisect_left(tried, offset)
            if at < len(tried) and tried[at] == offset:
                del tried[at]
                if not tried:
                    del self._tried[key]
            else:
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]
        return key

    def forget(self, offset: int) -> None:
        """Forget a settled message."""
        self._former.pop(offset, None)

    def following(self, key: bytes, is_blocked: Callable[[int], bool]) -> int | None:
        """The next blocked message of a key, if no message of the key is leased."""
        if key in self._busy:
            return None
        tried = self._tried.get(key)
        if tried:
            if not is_blocked(tried[0]):
                return None
            self._former[tried[0]] = None
            return tried[0]
        waiting = self._blocked.get(key, [])
        found = None
        while waiting and found is None:
            order, candidate = heappop(waiting)
            if self._former.get(candidate, order) == order and is_blocked(candidate):
                found = candidate
                self._through[candidate] = key
                if candidate in self._former:
                    self._former[candidate] = None
        if not waiting:
            self._blocked.pop(key, None)
        return found

    def unblock_all(self) -> list[int]:
        """Begin anew with who waits for whom; returns the messages that were blocked, and some that were not."""
        blocked, self._blocked = self._blocked, {}
        self._former.clear()
        self._through.clear()
        return [offset for waiting in blocked.values() for _, offset in waiting]

    def clear(self) -> list[int]:
        """Forget all keys; returns the messages that were blocked, and some that were not."""
        blocked = self.unblock_all()
        self.__init__()  # type: ignore[misc]
        return blocked
