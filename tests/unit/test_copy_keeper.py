"""A follower whose copy the store cannot complete: it waits, says so once, and does not spin."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from tests.unit.test_holes import KEYS, claimed, lose, replica_of, store_with_log, write_objects

from headrace.cluster.copy_keeper import CopyKeeper
from headrace.cluster.shards import ShardReplica
from headrace.storage.replicated.checkpoint import Checkpointer
from headrace.storage.stores.memory import MemoryStore

T = TypeVar("T")


async def blocking(call: Callable[[], T]) -> T:
    return call()


async def keep(replica: ShardReplica, seconds: float) -> tuple[list[str], int]:
    """Keep a copy for so long; returns the roles that were told, and how many calls touched the copy."""
    roles: list[str] = []
    calls = 0

    def counted(call: Callable[[], T]) -> Awaitable[T]:
        nonlocal calls
        calls += 1
        return blocking(call)

    task = asyncio.create_task(CopyKeeper(replica, counted, roles.append).run())
    await asyncio.sleep(seconds)
    assert not task.done(), task
    task.cancel()
    return roles, calls


def store_without_chunks() -> MemoryStore:
    """A store whose checkpoint has lost its chunks."""
    store = MemoryStore()
    owned = claimed(replica_of(store, "a"), 0)
    write_objects(owned, 5)
    tree = owned.disk.freeze()
    Checkpointer(store, KEYS, 1, owned.seals, keep_us=0).make(tree, 1, lambda: owned.writer.wait(tree.sequence))
    owned.disk.thaw()
    owned.writer.close()
    return store


def check_waits(replica: ShardReplica, caplog: pytest.LogCaptureFixture, why: str) -> None:
    roles, calls = asyncio.run(keep(replica, 2.0))
    assert roles[-1] == "blocked"
    assert why in replica.problem
    assert 4 <= calls <= 8
    assert [one.levelno for one in caplog.records if why in one.getMessage()] == [logging.ERROR]


def test_a_hole(caplog: pytest.LogCaptureFixture) -> None:
    store = store_with_log()
    replica = replica_of(store, "b")
    lose(store, 7)
    check_waits(replica, caplog, f"{KEYS.wal(1, 7)} in")


def test_a_chunk_that_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    store = store_without_chunks()
    replica = replica_of(store, "b")
    replica.drop()
    store.delete(store.names(KEYS.chunk_prefix))
    replica._disk.remove_directory("/node/shards/000")
    check_waits(replica, caplog, "a chunk of it is missing")


def test_a_damaged_object(caplog: pytest.LogCaptureFixture) -> None:
    store = store_with_log()
    replica = replica_of(store, "b")
    lose(store, 7)
    store.put_new(KEYS.wal(1, 7), b"garbage")
    check_waits(replica, caplog, f"{KEYS.wal(1, 7)} in")
