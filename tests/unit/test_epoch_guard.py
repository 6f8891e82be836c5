"""The guard of an epoch: whoever waits for a silent store is woken."""

import threading

import pytest

from headrace.cluster.claims import UNCONFIRMED_US
from headrace.cluster.epoch_guard import EpochGuard
from headrace.model.errors import StoreUnavailable
from headrace.storage.replicated.keys import ShardKeys
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
