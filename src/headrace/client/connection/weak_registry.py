"""What a bus has made and closes with itself, without keeping it alive."""

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Things that may be dropped by whoever uses them; any thread may add and discard."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}

    def __len__(self) -> int:
        return len(self._references)

    def add(self, kept: T) -> None:
        """This one too, for as long as it lives."""
        references, number = self._references, id(kept)
        references[number] = weakref.ref(kept, lambda _: references.pop(number, None))

    def discard(self, kept: T) -> None:
        """This one no longer."""
        self._references.pop(id(kept), None)

    def alive(self) -> list[T]:
        """Those that there are, in the order in which they came."""
        found = [reference() for reference in list(self._references.values())]
        return [kept for kept in found if kept is not None]
