"""The seam to a shared store: five operations, two of which are conditional."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument, StoreUnavailable

OBJECT_BYTES_MAX = 16 << 20
"""The size of the largest object: stores keep their conditions only for objects that are put in one request."""

KEY_CHARACTERS_MAX = 700
_KEY = re.compile(r"(?!\.{1,2}(/|$))[-\w.:=+@~,]{1,200}(/(?!\.{1,2}(/|$))[-\w.:=+@~,]{1,200})*", re.ASCII)


class KeyExists(Exception):
    """There is an object of that key already; perhaps the caller's own, from a request whose answer was lost."""


class VersionMismatch(Exception):
    """The object was changed since that version, or is gone."""


class StoredObject(NamedTuple):
    """An object as it was read."""

    data: bytes
    version: str
    """For `replace`; another one after each change, also to the same bytes."""


class SharedStore(ABC):
    """A store that all nodes of a cluster reach. Every method blocks, and any thread may call it.

    Keys are ASCII paths such as `trading/shards/000/manifest`, none of which is the directory of another: where there
    is `a/b`, nobody puts `a`, which some stores refuse, nor a sibling such as `a-b`, with `a` and one of `+,-.`, which
    some sort behind it. Each operation happens at one moment, and every later
    one, of any node, sees it. Failures are StoreUnavailable: whether a change happened is unknown then, and the caller
    finds out by reading. `put_new` and `replace` are tried once: whoever repeats one gets KeyExists or VersionMismatch
    if the first attempt arrived after all. tests/conformance runs the same suite over every store.
    """

    gains_from_threads: bool = True
    """Whether several requests at once take less time than one after the other, as each waits for a round trip."""
    reads_at_once: int = 4
    """How many objects are worth reading with one `get_many`; more where that is one request."""

    @abstractmethod
    def put_new(self, key: str, data: bytes) -> None:
        """Create an object durably; raises KeyExists if there is one."""

    @abstractmethod
    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object durably if it has this version; returns the new version, or raises VersionMismatch."""

    @abstractmethod
    def get(self, key: str) -> StoredObject | None:
        """Read an object; None if there is none."""

    def get_many(self, keys: Sequence[str]) -> list[StoredObject | None]:
        """Read several objects, each at a moment of its own.

        The list ends before the first that could not be read; if that is the first of all, it fails.
        """
        if len(keys) == 1 or not self.gains_from_threads:
            return [self.get(key) for key in keys]
        with ThreadPoolExecutor(len(keys), "headrace-read") as pool:
            reading = [pool.submit(self.get, key) for key in keys]
        found: list[StoredObject | None] = []
        for each in reading:
            if found and isinstance(each.exception(), StoreUnavailable):
                break
            found.append(each.result())
        return found

    @abstractmethod
    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """The first keys that begin with a prefix and follow `after`, in the order of their bytes.

        `after` is a key, or a directory with its slash; there need not be such a key.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there count as deleted."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections; may be called again."""

    @property
    @abstractmethod
    def location(self) -> str:
        """The address of the store, without credentials, for people to read."""

    def remarks(self) -> list[str]:
        """What an operator should know: how this store, as it is set up, may lose what it has confirmed.

        Asks the store; raises StoreUnavailable if it does not answer.
        """
        return []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.location}>"


def check_object(key: str, data: bytes) -> None:
    """Refuse a key or an object that not every store can keep.

    >>> check_object("trading/nodes/a:4222", b"")
    """
    if len(key) > KEY_CHARACTERS_MAX or not _KEY.fullmatch(key):
        raise InvalidArgument(
            f"a key is a path such as trading/nodes/a, of letters, digits and -_.:=+@~, in parts of 1 to 200 and at "
            f"most {KEY_CHARACTERS_MAX} in all, not {shown(key)}"
        )
    if len(data) > OBJECT_BYTES_MAX:
        raise InvalidArgument(f"an object has at most {OBJECT_BYTES_MAX} bytes; {key} would have {len(data)}")


def prefix_end(prefix: str) -> str:
    """The first key behind all that begin with a prefix, which is not empty.

    >>> prefix_end("a/b")
    'a/c'
    """
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
