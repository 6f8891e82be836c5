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
from headrace.storage.replicated.log_size import LogPart, LogSize
from headrace.storage.replicated.manifest import Manifest
from headrace.storage.replicated.operations import MakeDirectory, encode_operation
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.memory import MemoryStore
from headrace.testing import MemoryDisk

NOW_US = 1_700_000_500_000_000
CHECKPOINT = "00000002-000000000040-1700000400000000-5f0c9a1e"
"""Of a hundred seconds ago."""


@contextmanager
def owned_shard(checkpoint: str, seals: dict[int, int], *parts: LogPart) -> Iterator[OwnedShard]:
    """A shard in epoch 4 that its owner has found with this checkpoint, and changed once."""
    keys = ShardKeys("test", 0)
    writer = WalWriter(MemoryStore(), keys, 4, bytes(16), now_us=lambda: NOW_US, clock=time.monotonic)
    manifest = Manifest(epoch=4, checkpoint=checkpoint)
    disk = ReplicatedDisk(MemoryDisk(), "/node/shards/000", writer, trash="/node/trash")
    writer.record(encode_operation(MakeDirectory("journal")))
    writer.wait()
    yield OwnedShard(4, StoredManifest(manifest, "1"), disk, writer, seals, LogSize(parts))
    writer.close()


EACH_BYTES = 1 << 30


def schedule(owned: OwnedShard, each_s: float = 1000.0) -> CheckpointSchedule:
    """A schedule that nobody has started."""
    return CheckpointSchedule(
        owned, lambda: "made", each_bytes=EACH_BYTES, each_s=each_s, clock=time.monotonic, now_us=lambda: NOW_US
    )


def test_objects_of_earlier_epochs_behind_the_checkpoint_are_counted() -> None:
    with owned_shard(CHECKPOINT, {1: 500, 2: 45, 3: 7}) as owned:
        assert inherited_objects(owned) == 5 + 7
    with owned_shard("", {1: 500, 2: 45, 3: 7}) as owned:
        assert inherited_objects(owned) == 552


def test_an_owner_knows_how_old_the_checkpoint_of_another_is() -> None:
    with owned_shard(CHECKPOINT, {}) as owned:
        found = schedule(owned)
        assert found.last_us == NOW_US - 100_000_000
        age_s = found.age_s()
        assert age_s is not None
        assert 100 <= age_s < 160
    with owned_shard("", {}) as owned:
        assert (schedule(owned).last_us, schedule(owned).age_s()) == (0, None)


def test_many_small_objects_make_a_checkpoint_due_whoever_put_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "OBJECTS_EACH", 13)
    with owned_shard(CHECKPOINT, {2: 45, 3: 7}) as owned:
        assert schedule(owned).is_due()
    with owned_shard(CHECKPOINT, {2: 45, 3: 6}) as owned:
        assert not schedule(owned).is_due()


def test_bytes_of_earlier_epochs_behind_the_checkpoint_are_counted() -> None:
    before, behind = LogPart(2, 40, EACH_BYTES), LogPart(3, 6, EACH_BYTES - 1)
    with owned_shard(CHECKPOINT, {2: 45, 3: 6}, before, behind) as owned:
        assert owned.writer.statistics().bytes > 0
        assert schedule(owned).is_due()
    with owned_shard(CHECKPOINT, {2: 45, 3: 6}, before, behind._replace(bytes=EACH_BYTES // 2)) as owned:
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


def test_a_follower_that_stays_blocked_before_the_last_checkpoint_makes_another_one_due() -> None:
    """It cannot use that one, such as when chunks of it are missing."""
    now_s = 100.0
    with owned_shard(CHECKPOINT, {2: 45, 3: 6}) as owned:
        waiting = CheckpointSchedule(
            owned, lambda: CHECKPOINT, each_bytes=EACH_BYTES, each_s=1e6, clock=lambda: now_s, now_us=lambda: NOW_US
        )
        for _ in range(60):
            waiting.want_beyond(Position(2, 39))
            assert not waiting.is_due()
            now_s += 0.5
        now_s += 10
        waiting.want_beyond(Position(2, 39))
        assert not waiting.is_due(), "it was not blocked all the time"
        for _ in range(60):
            now_s += 0.5
            waiting.want_beyond(Position(2, 39))
        assert waiting.is_due()
        waiting._make()
        waiting.want_beyond(Position(2, 39))
        assert not waiting.is_due()
