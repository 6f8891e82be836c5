"""A broker's data directory goes into a cluster and comes back, with everything that was in it."""

from pathlib import Path

import pytest
from tests.replica import tree

import headrace
from headrace.cluster.shards import ShardPlace, ShardReplica
from headrace.model.batch import Columns, encode
from headrace.model.errors import CorruptFile, InvalidArgument, StoreUnavailable, StoreWentBack
from headrace.storage.disk import PrivateDisk
from headrace.storage.replicated.epochs import claim, create_cluster, new_nonce, read_cluster, read_manifest
from headrace.storage.replicated.following import FollowerBehind
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.restore import restore_at, restore_newest
from headrace.storage.replicated.transfer import NOT_REPLICATED, import_directory
from headrace.storage.stores.memory import MemoryStore

KEYS = ShardKeys("trading", 0)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """The data of a broker: messages of two topics, a job that is leased, one that is done, and two transactions."""
    path = str(tmp_path / "data")
    with headrace.open(path) as bus:
        bus.publish_many("orders", [b"%d" % number for number in range(1000)])
        bus.publish_many("jobs", [b"first", b"second", b"third"])
        with bus.lease("jobs", max=1) as jobs:
            assert [job.value for job in jobs] == [b"first"]
        with bus.transaction("mover", sequence=1) as committed:
            committed.publish("orders", b"committed")
        open_one = bus.transaction("other", sequence=1, timeout=3600)
        open_one.join()
        open_one.stage("orders", 0, encode(Columns([b"open"]), 0))
        assert open_one.staged()
    return path


def plain_tree(path: str) -> dict[str, bytes | None]:
    """What is in a data directory, without what belongs to its process."""
    found = tree(PrivateDisk(), path)
    return {name: content for name, content in found.items() if name.split("/")[0] not in NOT_REPLICATED}


def check_broker(path: str) -> None:
    """The broker of the directory serves what was published, and only the jobs that are left."""
    with headrace.open(path) as bus:
        found = [value for batch in bus.fetch("orders", 0, 0) for value in batch.columns().values]
        assert found == [*(b"%d" % number for number in range(1000)), b"committed"]
        repeated = bus.transaction("mover", sequence=1)
        repeated.join()
        assert repeated.already_committed
        with bus.lease("jobs", max=10, wait=5) as jobs:
            assert sorted(job.value or b"" for job in jobs) == [b"second", b"third"]


def test_a_broker_goes_into_a_cluster_and_back(data: str, tmp_path: Path) -> None:
    store, told = MemoryStore(), list[tuple[int, int]]()
    made = import_directory(PrivateDisk(), data, store, "trading", 1_000, lambda *each: told.append(each))
    assert told[-1][0] == told[-1][1] == 2 * made.uploaded_bytes
    stored = read_manifest(store, KEYS)
    assert stored is not None
    assert (stored.manifest.epoch, stored.manifest.released, stored.manifest.checkpoint) == (2, True, made.name)
    assert read_cluster(store, "trading") is not None
    back = str(tmp_path / "back")
    assert restore_at(store, "trading", 0, PrivateDisk(), back).position == Position(2, 0)
    assert plain_tree(back) == plain_tree(data)
    check_broker(back)
    check_broker(data)


def test_the_first_owner_of_an_imported_cluster_begins_with_the_directory(data: str, tmp_path: Path) -> None:
    store = MemoryStore()
    import_directory(PrivateDisk(), data, store, "trading", 1_000)
    node = str(tmp_path / "node")
    follower = restore_newest(store, KEYS, PrivateDisk(), node)
    nonce = new_nonce()
    claimed = claim(store, KEYS, node="a", addresses=(), nonce=nonce, expected=2)
    assert claimed is not None
    follower.seal_older(3, bytes.fromhex(nonce), 2_000)
    assert (follower.position, follower.seals) == (Position(3, 0), {1: 0, 2: 0})
    assert plain_tree(node) == plain_tree(data)


def test_a_cluster_that_exists_is_not_imported_into(data: str) -> None:
    store = MemoryStore()
    import_directory(PrivateDisk(), data, store, "trading", 1_000)
    keys = store.names("", count_max=10_000)
    with pytest.raises(InvalidArgument, match="has a cluster trading already"):
        import_directory(PrivateDisk(), data, store, "trading", 2_000)
    assert store.names("", count_max=10_000) == keys


class StubbornStore(MemoryStore):
    """Fails from a put on, or damages what is put."""

    def __init__(self, puts: int = 1 << 30, *, damages: bool = False) -> None:
        super().__init__()
        self.puts = puts
        self.damages = damages

    def put_new(self, key: str, data: bytes) -> None:
        self.puts -= 1
        if self.puts < 0:
            raise StoreUnavailable("no answer")
        if self.damages and "/chunks/" in key:
            data = data[:-1] + bytes([data[-1] ^ 1])
        super().put_new(key, data)


def test_an_import_that_was_interrupted_is_repeated(data: str, tmp_path: Path) -> None:
    store = StubbornStore()
    import_directory(PrivateDisk(), data, store, "counted", 1_000)
    total = (1 << 30) - store.puts
    for puts in range(total - 1):
        store.puts = puts
        with pytest.raises(StoreUnavailable):
            import_directory(PrivateDisk(), data, store, "trading", 1_000)
        assert read_manifest(store, KEYS) is None
        store.puts = 1 << 30
        if puts:  # a node does not begin anew on what is there
            create_cluster(store, "trading")
            with pytest.raises(StoreWentBack, match="an import has stored that was interrupted, run that again"):
                claim(store, KEYS, node="a", addresses=(), nonce=new_nonce(), expected=0)
    import_directory(PrivateDisk(), data, store, "trading", 1_000)
    restore_at(store, "trading", 0, PrivateDisk(), str(tmp_path / "back"))
    assert plain_tree(str(tmp_path / "back")) == plain_tree(data)


def test_a_node_that_looked_before_the_import_begins_with_the_directory(data: str, tmp_path: Path) -> None:
    store, node = MemoryStore(), str(tmp_path / "node")
    create_cluster(store, "trading")
    place = ShardPlace("trading", "a", node)

    def opened() -> ShardReplica:
        made = ShardReplica(store, PrivateDisk(), place, now_us=lambda: 1, clock=lambda: 0.0)
        made.open()
        return made

    replica = opened()
    replica.restore()
    replica.note_state(clean=True)
    import_directory(PrivateDisk(), data, store, "trading", 1_000)
    with pytest.raises(FollowerBehind):
        replica.claim(new_nonce(), (), 2, lambda: None)
    restarted = opened()
    owned = restarted.claim(new_nonce(), (), 2, lambda: None)
    assert owned is not None
    owned.writer.close()
    assert plain_tree(place.root) == plain_tree(data)


def test_what_the_store_damages_is_noticed_before_the_cluster_exists(data: str) -> None:
    store = StubbornStore(damages=True)
    with pytest.raises(CorruptFile, match="is damaged"):
        import_directory(PrivateDisk(), data, store, "trading", 1_000)
    assert read_manifest(store, KEYS) is None


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no directory"):
        import_directory(PrivateDisk(), str(tmp_path / "none"), MemoryStore(), "trading", 1_000)
