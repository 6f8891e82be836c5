"""Messages of one key one at a time: which keys are in hand, and what is blocked by them."""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush


class Keys:
    """The keys of leased messages, and the messages that wait for one of them to be free."""

    def __init__(self) -> None:
        self._busy: dict[bytes, int] = {}
        """How many messages of each key are leased: one, unless it was not asked for from the beginning."""
        self._key_of: dict[int, bytes] = {}
        self._blocked: dict[bytes, list[tuple[int, int]]] = {}

    def divide(self, keys: Sequence[bytes | None], offsets: Sequence[int]) -> tuple[list[int], list[int]]:
        """Which of these can be leased together, and which are blocked, by others or by one another: their indices."""
        free: list[int] = []
        blocked: list[int] = []
        taken: set[bytes] = set()
        for index in range(len(offsets)):
            key = keys[index]
            if key is None:
                free.append(index)
            elif key in self._busy or key in taken:
                blocked.append(index)
            else:
                taken.add(key)
                free.append(index)
        return free, blocked

    def occupy(self, offsets: Sequence[int], keys: Sequence[bytes | None] | None) -> None:
        """These are leased."""
        for offset, key in zip(offsets, keys or (), strict=False):
            if key is not None and offset not in self._key_of:
                self._busy[key] = self._busy.get(key, 0) + 1
                self._key_of[offset] = key

    def block(self, key: bytes, order: int, offset: int) -> None:
        """This one waits for its key."""
        heappush(self._blocked.setdefault(key, []), (order, offset))

    def free(self, offsets: Iterable[int], still_blocked: Callable[[int], bool]) -> list[int]:
        """These are not leased any more; returns the next one of each of their keys."""
        following = []
        for offset in offsets:
            key = self._key_of.pop(offset, None)
            if key is None:
                continue
            self._busy[key] -= 1
            if self._busy[key]:
                continue
            del self._busy[key]
            waiting = self._blocked.get(key, [])
            while waiting:
                _, candidate = heappop(waiting)
                if still_blocked(candidate):
                    following.append(candidate)
                    break
            if not waiting:
                self._blocked.pop(key, None)
        return following

    def clear(self) -> list[int]:
        """Forget all keys; returns the messages that were blocked."""
        blocked, self._blocked = self._blocked, {}
        self._busy.clear()
        self._key_of.clear()
        return [offset for waiting in blocked.values() for _, offset in waiting]
