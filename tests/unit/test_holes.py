"""Objects of a shard that somebody deleted or forged: they are noticed, named, and never served past."""

import pytest

from headrace.cluster.shards import OwnedShard, ShardPlace, ShardReplica
from headrace.model.errors import CorruptFile, StoreWentBack
from headrace.storage.replicated.checkpoint import Checkpointer
from headrace.storage.replicated.epochs import create_cluster, new_nonce, read_manifest
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.restore import restore_at
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.store import StoredObject
from headrace.testing import MemoryDisk

KEYS = ShardKeys("test", 0)


def replica_of(store: MemoryStore, node: str) -> ShardReplica:
    create_cluster(store, "test")
    made = ShardReplica(store, MemoryDisk(), ShardPlace("test", node, "/node"), now_us=lambda: 1, clock=lambda: 0.0)
    made.open()
    made.restore()
    return made


def claimed(replica: ShardReplica, expected: int) -> OwnedShard:
    owned = replica.claim(new_nonce(), (), expected, lambda: None)
    assert owned is not None
    return owned


def write_objects(owned: OwnedShard, count: int) -> None:
    """Commit so many objects, each with one byte of a file."""
    path = f"/node/shards/000/f{owned.epoch}"
    file = owned.disk.open(path, write=True, create=True)
    for number in range(count):
        owned.disk.write(file, number, b"x")
        owned.disk.sync(file)


def store_with_log(objects: int = 20, store: MemoryStore | None = None) -> MemoryStore:
    """A store whose owner has committed some objects, and died."""
    store = MemoryStore() if store is None else store
    owned = claimed(replica_of(store, "a"), 0)
    write_objects(owned, objects)
    owned.writer.close()
    return store


def lose(store: MemoryStore, *positions: int, epoch: int = 1) -> None:
    store.delete([KEYS.wal(epoch, each) for each in positions])


@pytest.mark.parametrize("lost", [range(7, 8), range(10), range(3, 15)], ids=["one", "the first", "many"])
def test_a_node_never_claims_a_log_with_a_hole(lost: range) -> None:
    store = store_with_log()
    lose(store, *lost)
    replica = replica_of(store, "b")
    with pytest.raises(CorruptFile, match=f"{KEYS.wal(1, lost[0])} in .* is missing.*backup.*restore --at"):
        replica.claim(new_nonce(), (), 1, lambda: None)
    manifest = read_manifest(store, KEYS)
    assert manifest is not None
    assert (manifest.manifest.epoch, manifest.manifest.owner) == (1, "a")
    assert store.get(KEYS.wal(1, lost[0])) is None, "the hole was sealed"
    with pytest.raises(CorruptFile):
        replica.poll(100)


def test_a_follower_notices_a_hole_at_its_first_poll_and_goes_on_when_it_is_filled() -> None:
    store = store_with_log()
    gone = store.get(KEYS.wal(1, 7))
    assert gone is not None
    lose(store, 7)
    replica = replica_of(store, "b")
    for _ in range(3):
        with pytest.raises(CorruptFile, match="is missing"):
            replica.poll(100)
        assert replica.position == (1, 7)
    store.put_new(KEYS.wal(1, 7), gone.data)
    assert replica.poll(100)
    assert claimed(replica, 1).epoch == 2


def test_a_live_follower_notices_a_hole() -> None:
    store = MemoryStore()
    owned = claimed(replica_of(store, "a"), 0)
    replica = replica_of(store, "b")
    replica.poll(100)
    at = replica.position.objects
    write_objects(owned, 10)
    lose(store, at)

    def poll_often() -> None:
        for _ in range(20):
            replica.poll(100)

    with pytest.raises(CorruptFile, match="is missing"):
        poll_often()


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_objects_that_may_have_been_in_flight_prove_nothing(behind: int) -> None:
    store = store_with_log()
    last = max(KEYS.position(key)[1] for key in store.names(KEYS.wal_prefix))
    lose(store, last - behind)
    replica = replica_of(store, "b")
    assert claimed(replica, 1).seals == {1: last - behind}


def test_what_this_node_has_seen_proves_a_hole_at_the_end() -> None:
    store = store_with_log()
    replica = replica_of(store, "b")
    replica.poll(100)
    last = replica.position.objects - 1
    lose(store, last)
    replica.restore()
    replica.poll(3)  # far from the hole
    with pytest.raises(CorruptFile, match="which this node has seen"):
        replica.claim(new_nonce(), (), 1, lambda: None)
    with pytest.raises(CorruptFile, match="which this node has seen"):
        replica.poll(100)


@pytest.mark.parametrize("what", ["the last object before the seal", "the seal"])
def test_an_epoch_without_its_end_is_a_hole(what: str) -> None:
    store = store_with_log()
    owned = claimed(replica_of(store, "b"), 1)
    lose(store, owned.seals[1] - (what != "the seal"))
    with pytest.raises(CorruptFile, match="is missing"):
        replica_of(store, "c").claim(new_nonce(), (), 2, lambda: None)


def test_a_node_beyond_the_hole_serves_and_its_checkpoint_leads_others_past_it() -> None:
    store = store_with_log()
    beyond, behind = replica_of(store, "b"), replica_of(store, "c")
    beyond.poll(100)
    lose(store, 7)
    with pytest.raises(CorruptFile):
        behind.poll(100)
    behind.drop_if_passed()
    assert behind.is_restored, "there is no checkpoint yet"
    owned = claimed(beyond, 1)
    write_objects(owned, 3)
    tree = owned.disk.freeze()
    Checkpointer(store, KEYS, 2, owned.seals, keep_us=0).make(tree, 1, lambda: owned.writer.wait(tree.sequence))
    owned.disk.thaw()
    behind.drop_if_passed()
    assert not behind.is_restored
    behind.restore()
    assert behind.poll(100) == 0
    assert behind.position == owned.writer.committed


def test_a_restore_names_the_missing_object() -> None:
    store = store_with_log()
    lose(store, 7)
    with pytest.raises(CorruptFile, match=KEYS.wal(1, 7)):
        restore_at(store, "test", 0, MemoryDisk(), "/new")
    with pytest.raises(CorruptFile, match=KEYS.wal(1, 7)):
        restore_at(store, "test", 0, MemoryDisk(), "/new2", Position(1, 12))


class SlowStore(MemoryStore):
    """A second passes with each read."""

    now_s = 0.0

    def get(self, key: str) -> StoredObject | None:
        self.now_s += 1
        return super().get(key)


def test_the_time_to_catch_up_does_not_count_as_time_without_confirmation() -> None:
    store = SlowStore()
    store_with_log(store=store)
    made = ShardReplica(store, MemoryDisk(), ShardPlace("test", "b", "/b"), now_us=lambda: 1, clock=lambda: store.now_s)
    made.open()
    made.restore()
    began_s = store.now_s
    owned = claimed(made, 1)
    assert store.now_s - began_s > 20
    assert store.now_s - owned.begun_s < 10


def test_without_its_manifest_a_shard_is_not_made_anew() -> None:
    store = store_with_log()
    follower = replica_of(store, "b")
    follower.poll(100)
    store.delete([KEYS.manifest])
    with pytest.raises(StoreWentBack, match="manifest is missing, though epoch 1 was seen"):
        follower.claim(new_nonce(), (), 1, lambda: None)
    with pytest.raises(StoreWentBack, match="manifest is missing"):
        follower.restore()
    with pytest.raises(StoreWentBack, match="manifest is missing, though there is"):
        replica_of(store, "c").claim(new_nonce(), (), 0, lambda: None)
    assert store.get(KEYS.manifest) is None


@pytest.mark.parametrize("data", [b"\xff\x00garbage", b"{}", b"", b'{"epoch": "\xff"}'])
def test_a_manifest_that_cannot_be_read_says_so(data: bytes) -> None:
    store = store_with_log()
    replica = replica_of(store, "b")
    store.delete([KEYS.manifest])
    store.put_new(KEYS.manifest, data)
    with pytest.raises(CorruptFile, match=r"manifest cannot be read.*put it back from a backup"):
        replica.claim(new_nonce(), (), 1, lambda: None)
