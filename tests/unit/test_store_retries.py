"""Requests that a store loses cost as little as possible: what was read counts, and a failed heartbeat is repeated."""

import threading
import time
from collections.abc import Callable

import pytest

from headrace.cluster.heartbeat import BeatRound, Heartbeat
from headrace.cluster.node_record import NodeRecord, NodeRecordWriter
from headrace.model.errors import StoreUnavailable
from headrace.storage.replicated.keys import ShardKeys
from headrace.storage.replicated.steps import GetObjects
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.store import StoredObject


class _LosingStore(MemoryStore):
    """Loses requests for some keys, and listings."""

    def __init__(self, *lost: str) -> None:
        super().__init__()
        self.lost = set(lost)

    def get(self, key: str) -> StoredObject | None:
        if key in self.lost:
            raise StoreUnavailable("lost")
        return super().get(key)

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        if "names" in self.lost:
            raise StoreUnavailable("lost")
        return super().names(prefix, after, count_max)


def test_objects_before_one_that_cannot_be_read_are_found() -> None:
    store = _LosingStore("c")
    for key in "abcd":
        store.put_new(key, key.encode())
    found = GetObjects(["a", "missing", "c", "d"]).send(store)
    assert [one and one.data for one in found] == [b"a", None]
    with pytest.raises(StoreUnavailable):
        GetObjects(["c", "d"]).send(store)
    with pytest.raises(StoreUnavailable):
        GetObjects(["c"]).send(store)


def _beat(store: MemoryStore, interval_s: float, rounds: list[BeatRound]) -> Heartbeat:
    writer = NodeRecordWriter(store, "test", "n1", "process")
    return Heartbeat(
        store,
        ShardKeys("test", 0),
        writer,
        "test",
        interval_s=interval_s,
        make_record=lambda: NodeRecord(node="n1", process="process", beat=1, owns=1),
        now_us=lambda: time.monotonic_ns() // 1000,
        done=rounds.append,
        failed=lambda error: pytest.fail(str(error)),
    )


def test_a_round_counts_though_the_records_of_other_nodes_cannot_be_read() -> None:
    store, rounds = _LosingStore("names"), list[BeatRound]()
    heartbeat = _beat(store, 0.01, rounds)
    heartbeat.start()
    _wait_for(lambda: len(rounds) >= 2)
    heartbeat.stop()
    assert rounds[0].has_written
    assert rounds[0].nodes is None


class _SlowListing(MemoryStore):
    """Does not answer a listing before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        assert self.go.wait(30)
        return super().names(prefix, after, count_max)


def test_a_round_of_an_owner_counts_before_the_records_of_other_nodes_are_read() -> None:
    store, rounds = _SlowListing(), list[BeatRound]()
    heartbeat = _beat(store, 5.0, rounds)
    heartbeat.start()
    _wait_for(lambda: bool(rounds))
    assert rounds[0].has_written
    store.go.set()
    _wait_for(lambda: len(rounds) == 2)
    assert [one.node for one in rounds[1].nodes or ()] == ["n1"]
    assert rounds[1].began_us == rounds[0].began_us
    heartbeat.stop()


def test_a_failed_round_is_repeated_before_the_next_is_due() -> None:
    store, rounds = _LosingStore(ShardKeys("test", 0).manifest), list[BeatRound]()
    heartbeat = _beat(store, 5.0, rounds)
    heartbeat.start()
    _wait_for(lambda: heartbeat.failures > 0)
    store.lost.clear()
    began = time.monotonic()
    _wait_for(lambda: bool(rounds))
    assert time.monotonic() - began < 4
    heartbeat.stop()


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
