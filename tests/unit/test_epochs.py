"""The cluster's record, the manifest and claims, over a store that loses answers."""

from collections.abc import Callable

import pytest

from headrace.model.errors import Fenced, StoreUnavailable, StoreWentBack, UnsupportedFormat
from headrace.storage.replicated.epochs import (
    check_store,
    checkpoint_position,
    claim,
    create_cluster,
    new_nonce,
    read_cluster,
    read_manifest,
    release,
    set_checkpoint,
    set_format,
)
from headrace.storage.replicated.keys import Position, ShardKeys, cluster_key
from headrace.storage.replicated.manifest import FORMAT, Manifest, encode_manifest
from headrace.storage.stores.memory import MemoryStore

KEYS = ShardKeys("trading", 0)
NAME = "00000001-000000000007-0-0"


def _unavailable() -> None:
    raise StoreUnavailable("no answer")


class LosesAnswers(MemoryStore):
    """Does what is asked, but the first answers to changes are lost."""

    def __init__(self, lost: int, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.lost = lost
        self.before = before

    def put_new(self, key: str, data: bytes) -> None:
        super().put_new(key, data)
        self._lose()

    def replace(self, key: str, data: bytes, version: str) -> str:
        before = self.before
        if before is not _unavailable:
            self.before = lambda: None
        before()
        version = super().replace(key, data, version)
        self._lose()
        return version

    def _lose(self) -> None:
        if self.lost:
            self.lost -= 1
            raise StoreUnavailable("the answer is lost")


def take(store: MemoryStore, node: str = "a", nonce: str = "", expected: int | None = None) -> int:
    claimed = claim(
        store, KEYS, node=node, addresses=(f"headrace://{node}",), nonce=nonce or new_nonce(), expected=expected
    )
    return 0 if claimed is None else claimed.manifest.epoch


def test_a_cluster_is_created_once_with_its_number_of_shards() -> None:
    store = MemoryStore()
    assert read_cluster(store, "trading") is None
    assert create_cluster(store, "trading").shards == 1
    assert create_cluster(store, "trading").shards == 1
    with pytest.raises(UnsupportedFormat, match="has 1 shards, not 4"):
        create_cluster(store, "trading", 4)


def test_a_cluster_of_a_later_format_is_refused() -> None:
    store = MemoryStore()
    store.put_new(cluster_key("trading"), b'{"shards": 1, "format": %d}' % (FORMAT + 1))
    with pytest.raises(UnsupportedFormat, match="install a newer one"):
        create_cluster(store, "trading")


def test_each_claim_makes_the_next_epoch_and_keeps_the_checkpoint() -> None:
    store = MemoryStore()
    assert take(store, "a") == 1
    set_checkpoint(store, KEYS, 1, NAME, NAME)
    assert take(store, "b") == 2
    found = read_manifest(store, KEYS)
    assert found is not None
    assert found.manifest.owner == "b"
    assert checkpoint_position(found.manifest.checkpoint) == Position(1, 7)


def test_a_claim_whose_answer_is_lost_is_recognised() -> None:
    store = LosesAnswers(2)
    assert take(store, "a") == 1
    assert take(store, "b") == 2
    nonce = new_nonce()
    assert [take(store, "c", nonce), take(store, "c", nonce)] == [3, 3]


def test_who_expected_another_epoch_does_not_claim() -> None:
    store = MemoryStore()
    assert take(store, "a", expected=0) == 1
    assert take(store, "b", expected=0) == 0
    assert take(store, "b", expected=1) == 2


def test_of_two_claims_at_once_one_wins() -> None:
    won: list[int] = []
    store = LosesAnswers(0)
    take(store, "a")
    store.before = lambda: won.append(take(store, "b"))
    assert (take(store, "c", expected=1), won) == (0, [2])


def test_a_claim_goes_on_when_the_owner_only_set_a_checkpoint() -> None:
    store = LosesAnswers(0)
    take(store, "a")
    store.before = lambda: (set_checkpoint(store, KEYS, 1, NAME, NAME), None)[1]
    assert take(store, "c", expected=1) == 2
    found = read_manifest(store, KEYS)
    assert found is not None
    assert checkpoint_position(found.manifest.checkpoint) == Position(1, 7)


def test_a_shard_of_a_later_format_is_never_claimed() -> None:
    store = MemoryStore()
    take(store, "a")
    set_format(store, KEYS, 1, FORMAT + 1)
    with pytest.raises(UnsupportedFormat):
        take(store, "b")


def test_only_the_owner_of_the_epoch_changes_the_manifest() -> None:
    store = LosesAnswers(0)
    take(store, "a")
    store.lost = 1
    assert release(store, KEYS, 1, "b").successor == "b"
    take(store, "b")
    with pytest.raises(Fenced):
        release(store, KEYS, 1)
    with pytest.raises(Fenced):
        set_checkpoint(store, KEYS, 1, NAME, NAME)


def test_an_owner_is_fenced_between_its_read_and_its_change() -> None:
    store = LosesAnswers(0)
    take(store, "a")
    store.before = lambda: (take(store, "b"), None)[1]
    with pytest.raises(Fenced, match="b has claimed"):
        set_checkpoint(store, KEYS, 1, NAME, NAME)


def test_a_store_that_does_not_answer_is_given_up() -> None:
    store = LosesAnswers(0)
    take(store, "a")
    store.before = _unavailable
    with pytest.raises(StoreUnavailable):
        take(store, "b")
    with pytest.raises(StoreUnavailable):
        release(store, KEYS, 1)


def test_a_store_that_went_back_is_refused() -> None:
    store = MemoryStore()
    assert check_store(store, KEYS, Position(0, 0)) is None
    assert check_store(store, KEYS, Position(1, 0)) is None, "nothing was seen before the first claim"
    with pytest.raises(StoreWentBack, match="has no manifest"):
        check_store(store, KEYS, Position(1, 1))
    take(store, "a")
    with pytest.raises(StoreWentBack, match="is at epoch 1 now"):
        check_store(store, KEYS, Position(2, 0))
    with pytest.raises(StoreWentBack, match="lacks that object now"):
        check_store(store, KEYS, Position(1, 5))
    store.put_new(KEYS.wal(1, 4), b"")
    assert check_store(store, KEYS, Position(1, 5)) == read_manifest(store, KEYS)


def test_what_a_checkpoint_covers_may_be_gone() -> None:
    store = MemoryStore()
    manifest = Manifest(epoch=2, checkpoint="00000002-000000000003-0-0", oldest="00000001-000000000009-0-0")
    store.put_new(KEYS.manifest, encode_manifest(manifest))
    assert check_store(store, KEYS, Position(1, 9)) is not None
    with pytest.raises(StoreWentBack):
        check_store(store, KEYS, Position(1, 10))
