"""A store that repeats reads and deletions that fail at once, and nothing else."""

from collections.abc import Iterator

import pytest

from headrace.model.errors import StoreUnavailable
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.repeating import RepeatingStore
from headrace.storage.stores.store import SharedStore, StoredObject
from headrace.testing import FaultyStore


class FailingStore(MemoryStore):
    """A store that fails a number of times before it answers; each request takes so many seconds."""

    def __init__(self, failures: int, takes_s: float = 0.0) -> None:
        super().__init__()
        self.left = failures
        self.takes_s = takes_s
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def repeating(self) -> SharedStore:
        return RepeatingStore(self, clock=lambda: self.now_s, sleep=self.slept_s.append)

    def fail(self) -> None:
        self.now_s += self.takes_s
        if self.left:
            self.left -= 1
            raise StoreUnavailable("lost")

    def get(self, key: str) -> StoredObject | None:
        self.fail()
        return super().get(key)

    def put_new(self, key: str, data: bytes) -> None:
        self.fail()
        super().put_new(key, data)


def test_a_read_that_fails_at_once_is_repeated_with_growing_pauses() -> None:
    store = FailingStore(3)
    assert store.repeating().get("a/b") is None
    assert store.slept_s == sorted(store.slept_s)
    assert len(store.slept_s) == 3


def test_a_store_that_is_away_is_said_to_be_so_soon() -> None:
    store = FailingStore(1000)
    with pytest.raises(StoreUnavailable, match="lost"):
        store.repeating().get("a/b")
    assert sum(store.slept_s) < 0.5


def test_a_request_that_took_long_is_not_repeated() -> None:
    store = FailingStore(1, takes_s=2)
    with pytest.raises(StoreUnavailable):
        store.repeating().get("a/b")
    assert not store.slept_s


def test_a_creation_is_tried_once() -> None:
    store = FailingStore(1)
    with pytest.raises(StoreUnavailable):
        store.repeating().put_new("a/b", b"1")
    assert not store.slept_s


def _attempts(store: SharedStore) -> Iterator[bool]:
    for _ in range(300):
        try:
            store.names("a/")
            store.delete(["a/b"])
        except StoreUnavailable:
            yield False
        else:
            yield True


def test_half_of_all_requests_failing_fails_few_reads() -> None:
    inner = FaultyStore(MemoryStore(), seed=7)
    inner.fail_half()
    store = RepeatingStore(inner, clock=lambda: 0.0, sleep=lambda _: None)
    assert sum(_attempts(store)) > 250
    assert sum(_attempts(inner)) < 150
