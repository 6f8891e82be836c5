"""A replicated disk over a store in memory, and what a replica makes of the objects in that store."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from headrace.model.errors import StoreUnavailable
from headrace.storage.disk import Disk
from headrace.storage.replicated.applier import Applier
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.replicated.keys import ShardKeys
from headrace.storage.replicated.operations import OPERATIONS, Operation, decode_object, encode_seal
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.store import SharedStore
from headrace.testing import MemoryDisk

KEYS = ShardKeys("test", 0)
NONCE = b"nonce of a claim"


class DoubtfulStore(MemoryStore):
    """A store whose puts now and then fail before or after they happened, by a seed; and some take a while."""

    def __init__(self, seed: int, *, doubt: float = 0.3, delay_s: float = 0.0) -> None:
        super().__init__()
        self._random = Random(seed)
        self._guard = threading.Lock()
        self._doubt = doubt
        self._delay_s = delay_s
        self.blocked: set[str] = set()
        """Keys whose puts do not happen while they are here."""
        self.puts: list[str] = []
        """Keys in the order in which they were put."""

    def put_new(self, key: str, data: bytes) -> None:
        """Put, or fail, or both."""
        with self._guard:
            before, after = self._random.random() < self._doubt, self._random.random() < self._doubt
            delay = self._random.random() * self._delay_s
        if delay:
            time.sleep(delay)
        if before or key in self.blocked:
            raise StoreUnavailable("the request was lost")
        super().put_new(key, data)
        self.puts.append(key)
        if after:
            raise StoreUnavailable("the answer was lost")

    def get(self, key: str) -> Any:
        """Read, or fail."""
        with self._guard:
            if self._random.random() < self._doubt:
                raise StoreUnavailable("the request was lost")
        return super().get(key)


def open_writer(store: SharedStore, epoch: int = 1, nonce: bytes = NONCE, **more: Any) -> WalWriter:
    """A writer of an epoch."""
    times = itertools.count(1_000)
    more = {"clock": time.monotonic, **more}
    return WalWriter(store, KEYS, epoch, nonce, now_us=lambda: next(times), **more)


def replicated(inner: Disk, root: str, store: SharedStore | None = None, epoch: int = 1, **more: Any) -> ReplicatedDisk:
    """A replicated disk, whose writer begins an epoch."""
    inner.make_directory(root)
    return ReplicatedDisk(inner, root, open_writer(store or MemoryStore(), epoch), trash=f"{root}-trash", **more)


def committed(store: SharedStore, epoch: int = 1) -> Iterator[list[Operation]]:
    """The operations of each committed object of an epoch."""
    for position in itertools.count():
        stored = MemoryStore.get(store, KEYS.wal(epoch, position)) if isinstance(store, MemoryStore) else None
        if stored is None:
            return
        header, operations = decode_object(stored.data)
        assert (header.epoch, header.position) == (epoch, position)
        if header.kind != OPERATIONS:
            return
        yield operations


def replay(store: SharedStore, epochs: int = 1) -> MemoryDisk:
    """A disk with what a replica has after all committed objects, below /copy."""
    disk = MemoryDisk()
    applier = Applier(disk, "/copy")
    for epoch in range(1, epochs + 1):
        applier.begin_epoch()
        for operations in committed(store, epoch):
            applier.apply(operations)
    return disk


def seal(store: SharedStore, epoch: int = 1, sealed_by: int = 2) -> int:
    """Seal an epoch at its first free position, as another node does; returns the position."""
    position = sum(1 for _ in committed(store, epoch))
    MemoryStore.put_new(
        store,  # type: ignore[arg-type]
        KEYS.wal(epoch, position),
        encode_seal(epoch, position, b"another's nonce!", 5_000, sealed_by),
    )
    return position


def tree(disk: Disk, root: str) -> dict[str, bytes | None]:
    """Everything below a directory: the content of each file; None for a directory."""
    found: dict[str, bytes | None] = {}
    for name in disk.names(root):
        path = f"{root}/{name}"
        if disk.is_directory(path):
            found[name] = None
            found |= {f"{name}/{inner}": content for inner, content in tree(disk, path).items()}
        else:
            file = disk.open(path)
            found[name] = disk.read(file, 0, disk.size(file))
    return found


def check_replica(disk: ReplicatedDisk, inner: Disk, root: str, store: SharedStore, epochs: int = 1) -> None:
    """Flush, and compare a replay of all objects with the local directory, byte by byte."""
    disk.writer.flush(30)
    here, there = tree(inner, root), tree(replay(store, epochs), "/copy")
    assert here.keys() == there.keys()
    assert [path for path in here if here[path] != there[path]] == []


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that a thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)
