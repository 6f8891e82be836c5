"""The faulty store: its faults do what they say, repeat with a seed, and the self-test sees its lies."""

import pytest

from headrace.model.errors import StoreUnavailable, StoreUnqualified
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.self_test import qualify_store
from headrace.storage.stores.store import KeyExists, VersionMismatch
from headrace.testing import FaultyStore, StoreOperation


def test_without_faults_it_is_the_store_behind_it() -> None:
    store = FaultyStore(MemoryStore())
    qualify_store(store, "c", "nonce")
    store.put_new("a", b"1")
    assert store.names("") == ["a"]
    assert store.operations[-2:] == [
        StoreOperation("put_new", "a", "ok", "ok"),
        StoreOperation("names", "", "ok", "ok"),
    ]
    with pytest.raises(KeyExists):
        store.put_new("a", b"2")
    assert store.operations[-1] == StoreOperation("put_new", "a", "exists", "exists")


def test_a_lost_request_changes_nothing_and_a_lost_answer_hides_a_change() -> None:
    store = FaultyStore(MemoryStore())
    store.lost_requests = 1.0
    with pytest.raises(StoreUnavailable, match="request was lost"):
        store.put_new("a", b"1")
    assert store.inner.get("a") is None
    store.heal()
    store.lost_answers = 1.0
    with pytest.raises(StoreUnavailable, match="answer was lost"):
        store.put_new("a", b"1")
    assert store.operations[-1] == StoreOperation("put_new", "a", "ok", "unavailable")
    store.heal()
    with pytest.raises(KeyExists):
        store.put_new("a", b"1")


def test_a_late_change_happens_later_if_its_condition_holds_then() -> None:
    store = FaultyStore(MemoryStore())
    store.late = 1.0
    for key in ("a", "b"):
        with pytest.raises(StoreUnavailable, match="late"):
            store.put_new(key, b"late")
    store.heal()
    store.late_delivered = 0.0
    store.put_new("b", b"in time")
    assert store.get("a") is None
    assert store.deliver_late() == 2
    assert [store.inner.get(key).data for key in ("a", "b")] == [b"late", b"in time"]  # type: ignore[union-attr]
    assert StoreOperation("put_new", "b", "exists", "late") in store.operations


def test_a_doubled_change_is_refused_the_second_time() -> None:
    store = FaultyStore(MemoryStore())
    store.doubled = 1.0
    store.put_new("a", b"1")
    store.heal()
    version = store.get("a").version  # type: ignore[union-attr]
    store.deliver_late()
    assert store.get("a").version == version  # type: ignore[union-attr]
    assert [one for one in store.operations if one.told == "late"] == [StoreOperation("put_new", "a", "exists", "late")]


def test_down_full_and_slow() -> None:
    slept: list[float] = []
    store = FaultyStore(MemoryStore(), 1, sleep=slept.append)
    store.delay_s = (0.5, 1.0)
    store.put_new("a", b"1")
    assert len(slept) == 1
    assert 0.5 <= slept[0] <= 1.0
    store.full = True
    with pytest.raises(StoreUnavailable, match="space"):
        store.put_new("b", b"")
    assert store.names("") == ["a"]
    store.delete(["a"])
    store.down = True
    with pytest.raises(StoreUnavailable):
        store.get("a")
    store.heal()
    assert store.get("a") is None


def test_half_of_the_requests_fail_and_the_same_ones_with_the_same_seed() -> None:
    def run(seed: int) -> list[StoreOperation]:
        store = FaultyStore(MemoryStore(), seed)
        store.fail_half()
        for number in range(200):
            try:
                store.put_new(f"k{number}", b"")
            except StoreUnavailable:
                continue
        return store.operations

    assert run(1) == run(1) != run(2)
    told = [one.told for one in run(1) if one.told != "late"]
    assert 60 <= told.count("unavailable") <= 140


def test_a_store_that_ignores_conditions_overwrites_and_is_found_out() -> None:
    store = FaultyStore(MemoryStore())
    store.put_new("a", b"1")
    store.ignores_conditions = True
    store.put_new("a", b"2")
    store.replace("a", b"3", "no such version")
    assert store.get("a").data == b"3"  # type: ignore[union-attr]
    with pytest.raises(StoreUnqualified, match=r"creates an object that exists.*Use another store"):
        qualify_store(store, "c", "nonce")
    assert store.inner.names("c/") == []


class OneAfterAnother(FaultyStore):
    """Keeps its conditions until sixteen clients come at once."""

    calls = 0

    def put_new(self, key: str, data: bytes) -> None:
        self.ignores_conditions = key.endswith("/race")
        super().put_new(key, data)


class StaleReplacer(FaultyStore):
    """Creates once, and replaces any version."""

    def replace(self, key: str, data: bytes, version: str) -> str:
        self.ignores_conditions = True
        try:
            return super().replace(key, data, version)
        finally:
            self.ignores_conditions = False


class Forgetful(FaultyStore):
    """Confirms what it does not keep."""

    def put_new(self, key: str, data: bytes) -> None:
        del key, data


class Unsorted(FaultyStore):
    """Lists keys in any order."""

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        return super().names(prefix, after, count_max)[::-1]


class Immortal(FaultyStore):
    """Deletes nothing."""

    def delete(self, keys: object) -> None:
        del keys


@pytest.mark.parametrize(
    ("liar", "told"),
    [
        (OneAfterAnother, "of 16 clients create one object"),
        (StaleReplacer, "replaces an object that has changed"),
        (Forgetful, "directly after b'first' was put"),
        (Unsorted, "it lists"),
        (Immortal, "after that was deleted"),
    ],
)
def test_the_self_test_finds_each_lie(liar: type[FaultyStore], told: str) -> None:
    with pytest.raises(StoreUnqualified, match=told):
        qualify_store(liar(MemoryStore()), "c", "nonce")


def test_the_self_test_of_a_store_that_fails_is_no_verdict() -> None:
    store = FaultyStore(MemoryStore())
    store.down = True
    with pytest.raises(StoreUnavailable):
        qualify_store(store, "c", "nonce")


def test_it_goes_back_in_time() -> None:
    store = FaultyStore(MemoryStore())
    for key in ("changed", "deleted", "same"):
        store.put_new(key, b"old")
    before = store.snapshot()
    version = store.replace("changed", b"new", before["changed"].version)
    store.delete(["deleted"])
    store.put_new("added", b"new")
    store.restore(before)
    assert {key: stored.data for key, stored in store.snapshot().items()} == dict.fromkeys(before, b"old")
    assert store.get("same") == before["same"]
    with pytest.raises(VersionMismatch):
        store.replace("changed", b"newer", version)
