"""When an owner stores a checkpoint: what earlier owners have left counts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.cluster import checkpoints
from headrace.cluster.checkpoints import CheckpointSchedule, inherited_objects
from headrace.cluster.shards import OwnedShard
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.replicated.epochs import StoredManifest
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.manifest import Manifest
from headrace.storage.replicated.operations import MakeDirectory, encode_operation
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import MemoryDisk

NOW_US = 1_700_000_500_000_000
CHECKPOINT = "00000002-000000000040-1700000400000000-5f0c9a1e"
"""Of a hundred seconds ago."""


@contextmanager
def owned_shard(checkpoint: str, seals: dict[int, int]) -> Iterator[OwnedShard]:
    """A shard in epoch 4 that its owner has found with this checkpoint, and changed once."""
    keys = ShardKeys("test", 0)
    writer = WalWriter(MemoryStore(), keys, 4, bytes(16), now_us=lambda: NOW_US, clock=time.monotonic)
    manifest = Manifest(epoch=4, checkpoint=checkpoint)
    disk = ReplicatedDisk(MemoryDisk(), "/node/shards/000", writer, trash="/node/trash")
    writer.record(encode_operation(MakeDirectory("journal")))
    writer.wait()
    yield OwnedShard(4, StoredManifest(manifest, "1"), disk, writer, seals)
    writer.close()


def schedule(owned: OwnedShard, each_s: float = 1000.0) -> CheckpointSchedule:
    """A schedule that nobody has started."""
    return CheckpointSchedule(
        owned, lambda: "made", each_bytes=1 << 30, each_s=each_s, clock=time.monotonic, now_us=lambda: NOW_US
    )


def test_objects_of_earlier_epochs_behind_the_checkpoint_are_counted() -> None:
    with owned_shard(CHECKPOINT, {1: 500, 2: 45, 3: 7}) as owned:
        assert inherited_objects(owned) == 5 + 7
    with owned_shard("", {1: 500, 2: 45, 3: 7}) as owned:
        assert inherited_objects(owned) == 552


def test_many_small_objects_make_a_checkpoint_due_whoever_put_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "OBJECTS_EACH", 13)
    with owned_shard(CHECKPOINT, {2: 45, 3: 7}) as owned:
        assert schedule(owned).is_due()
    with owned_shard(CHECKPOINT, {2: 45, 3: 6}) as owned:
        assert not schedule(owned).is_due()


def test_the_age_of_an_inherited_checkpoint_counts() -> None:
    with owned_shard(CHECKPOINT, {}) as owned:
        assert schedule(owned, each_s=99).is_due()
        assert not schedule(owned, each_s=101).is_due()


def test_a_follower_that_is_blocked_makes_a_checkpoint_due_unless_there_is_one_behind_it() -> None:
    with owned_shard(CHECKPOINT, {2: 45, 3: 6}) as owned:
        waiting = schedule(owned)
        waiting.want_beyond(Position(2, 39))
        assert not waiting.is_due()
        waiting.want_beyond(Position(2, 40))
        assert waiting.is_due()
