"""The guard of an epoch: whoever waits for a silent store is woken."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.cluster.claims import UNCONFIRMED_US
from headrace.cluster.epoch_guard import EpochGuard
from headrace.cluster.heartbeat import BeatRound
from headrace.cluster.node_settings import monotonic_us
from headrace.cluster.ownership import Ownership
from headrace.cluster.shards import OwnedShard
from headrace.model.errors import StoreUnavailable
from headrace.storage.replicated.keys import ShardKeys
from headrace.storage.replicated.log_size import LogSize
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.memory import MemoryStore


class SilentStore(MemoryStore):
    """A store that answers nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()

    def put_new(self, key: str, data: bytes) -> None:
        self.answers.wait()
        super().put_new(key, data)


def writer_on(store: MemoryStore) -> WalWriter:
    return WalWriter(store, ShardKeys("test", 0), 1, bytes(16), now_us=lambda: 1, clock=lambda: 0.0)


def test_a_thread_that_waits_for_a_silent_store_is_woken() -> None:
    store, now_us = SilentStore(), 0
    writer = writer_on(store)
    writer.event_loop_thread = threading.get_ident()
    for _ in range(3):  # quick ones: other threads would put inline from now on
        writer.record(b"x")
        writer.wait()
    store.answers.clear()
    guard = EpochGuard(writer, now_us, lambda: now_us)
    writer.record(b"x")
    now_us = UNCONFIRMED_US
    with pytest.raises(StoreUnavailable, match="not confirmed"):
        writer.wait()
    guard.stop()
    store.answers.set()
    writer.close()


def test_a_confirmed_epoch_goes_on() -> None:
    store, now_us = SilentStore(), 0
    writer = writer_on(store)
    guard = EpochGuard(writer, 0, lambda: now_us)
    for now_us in range(0, 4 * UNCONFIRMED_US, UNCONFIRMED_US // 2):
        guard.confirm(now_us)
        threading.Event().wait(0.05)
    guard.confirm(1)  # a late one
    assert guard.confirmed_us == now_us
    assert writer.failure is None
    guard.stop()
    writer.close()


@pytest.mark.parametrize(("seen_epoch", "is_unconfirmed"), [(7, False), (6, True)])
def test_a_claim_that_took_long_is_confirmed_by_heartbeats_that_saw_its_epoch(
    seen_epoch: int, is_unconfirmed: bool
) -> None:
    now_us = monotonic_us()
    ownership = Ownership(lambda *_: None, lambda: None, lambda _: None)
    stored: Any = SimpleNamespace(manifest=SimpleNamespace(epoch=seen_epoch))
    ownership.confirm(BeatRound(now_us, now_us, True, stored, None, None))
    owned = OwnedShard(7, stored, cast(Any, SimpleNamespace()), writer_on(MemoryStore()), {}, LogSize())
    ownership.begin(owned, now_us - 2 * UNCONFIRMED_US)
    assert ownership.is_unconfirmed(UNCONFIRMED_US) is is_unconfirmed
    ownership.end(owned, "the test is over")
