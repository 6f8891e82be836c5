"""Protocols over a shared store as generators: they yield requests and get answers, and do no I/O themselves.

`perform` runs one against a store. The protocol simulation of the tests runs many at once, and loses, delays and
doubles their requests.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from headrace.model.errors import StoreUnavailable
from headrace.storage.stores.store import KeyExists, SharedStore, StoredObject, VersionMismatch

T = TypeVar("T")


class GetObject(NamedTuple):
    """Read an object: the answer is a StoredObject, or None."""

    key: str

    def send(self, store: SharedStore) -> StoredObject | None:
        """Make the request."""
        return store.get(self.key)


class GetObjects(NamedTuple):
    """Read several objects: the answer is a list of StoredObject or None, as `get_many` of a store returns it."""

    keys: Sequence[str]

    def send(self, store: SharedStore) -> list[StoredObject | None]:
        """Make the requests."""
        return store.get_many(self.keys)


class PutNew(NamedTuple):
    """Create an object; fails with KeyExists."""

    key: str
    data: bytes

    def send(self, store: SharedStore) -> None:
        """Make the request."""
        store.put_new(self.key, self.data)


class ReplaceObject(NamedTuple):
    """Replace an object of a version: the answer is the new version. Fails with VersionMismatch."""

    key: str
    data: bytes
    version: str

    def send(self, store: SharedStore) -> str:
        """Make the request."""
        return store.replace(self.key, self.data, self.version)


class ListNames(NamedTuple):
    """List keys: the answer is a list of them."""

    prefix: str
    after: str = ""
    count_max: int = 1000

    def send(self, store: SharedStore) -> list[str]:
        """Make the request."""
        return store.names(self.prefix, self.after, self.count_max)


class DeleteObjects(NamedTuple):
    """Delete objects."""

    keys: Sequence[str]

    def send(self, store: SharedStore) -> None:
        """Make the request."""
        store.delete(self.keys)


StoreRequest = GetObject | GetObjects | PutNew | ReplaceObject | ListNames | DeleteObjects
Steps = Generator[StoreRequest, Any, T]
"""A protocol that ends with a T. What a request raises is raised where the generator yielded it."""


def perform(store: SharedStore, steps: Steps[T]) -> T:
    """Make the requests of a protocol, one after the other; returns its result."""
    try:
        request = next(steps)
        while True:
            try:
                answer = request.send(store)
            except (KeyExists, VersionMismatch, StoreUnavailable) as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
