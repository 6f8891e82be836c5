"""A registry of objects that does not keep them alive."""

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Weak references to objects; any thread may add and discard."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}

    def __len__(self) -> int:
        return len(self._references)

    def add(self, kept: T) -> None:
        """Register an object for as long as it lives."""
        references, number = self._references, id(kept)
        references[number] = weakref.ref(kept, lambda _: references.pop(number, None))

    def discard(self, kept: T) -> None:
        """Remove an object."""
        self._references.pop(id(kept), None)

    def alive(self) -> list[T]:
        """Return the objects that are alive, in the order in which they were added."""
        found = [reference() for reference in list(self._references.values())]
        return [kept for kept in found if kept is not None]
