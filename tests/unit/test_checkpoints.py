"""Checkpoints, restores and followers over a store that fails at every operation, and deletions that do no harm."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replica import tree

from headrace.cluster.checkpoints import checkpoint_maker
from headrace.cluster.shards import OwnedShard
from headrace.model.errors import CorruptFile, Fenced, InvalidArgument, StoreUnavailable
from headrace.storage.replicated import checkpoint, checkpoint_format
from headrace.storage.replicated.checkpoint import Checkpointer, fetch_chunk, load_checkpoint
from headrace.storage.replicated.checkpoint_format import parse_checkpoint_name
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.replicated.epochs import StoredManifest, checkpoint_position, claim, new_nonce, read_manifest
from headrace.storage.replicated.following import FollowerBehind, ShardFollower
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.log_size import LogSize
from headrace.storage.replicated.operations import SEAL, decode_header, encode_seal
from headrace.storage.replicated.restore import restore_at, restore_newest
from headrace.storage.replicated.retention import KEPT_IN_WINDOW, RESTORE_US, choose_kept
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.store import KeyExists, StoredObject
from headrace.testing import MemoryDisk

KEYS = ShardKeys("test", 0)
ROOT = "/node/shards/000"
CHUNK = 64
MINUTE = 60_000_000
AFTER = 1_000_000
"""Added to the number of an operation that is to fail after it happened."""
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint_format, checkpoint):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


class Crash(BaseException):
    """The process ends here."""


class FailingStore(MemoryStore):
    """Counts its operations, and fails at one of them: before it or after it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.fails_at = -1
        self.error: Callable[[], BaseException] = Crash

    def put_new(self, key: str, data: bytes) -> None:
        with_crash(self, lambda: MemoryStore.put_new(self, key, data))

    def replace(self, key: str, data: bytes, version: str) -> str:
        return with_crash(self, lambda: MemoryStore.replace(self, key, data, version))

    def get(self, key: str) -> StoredObject | None:
        return with_crash(self, lambda: MemoryStore.get(self, key))

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        return with_crash(self, lambda: MemoryStore.names(self, prefix, after, min(count_max, 7)))

    def delete(self, keys: object) -> None:
        with_crash(self, lambda: MemoryStore.delete(self, keys))  # type: ignore[arg-type]


def with_crash(store: FailingStore, call: Callable[[], T]) -> T:
    """Fail before or after the operation; a thread of the writer tries again."""
    at = store.operations
    store.operations += 1
    is_writer = threading.current_thread().name.startswith("headrace-wal-")
    error = StoreUnavailable("no answer") if is_writer else store.error()
    if at == store.fails_at:
        raise error
    found = call()
    if at == store.fails_at - AFTER:
        raise error
    return found


class Owner:
    """A node that has claimed the shard: its local disk, and the replicated disk over it."""

    def __init__(self, store: MemoryStore, local: MemoryDisk | None = None, keep_us: int = 60 * MINUTE) -> None:
        self.local = local or MemoryDisk()
        self.follower = restore_newest(store, KEYS, self.local, ROOT)
        nonce = new_nonce()
        claimed = claim(store, KEYS, node="n", addresses=(), nonce=nonce)
        assert claimed is not None
        self.epoch = claimed.manifest.epoch
        self.follower.seal_older(self.epoch, bytes.fromhex(nonce), 1)
        times = itertools.count(self.epoch * 1000 * MINUTE, MINUTE)
        self.times: list[int] = []
        self.writer = WalWriter(
            store, KEYS, self.epoch, bytes.fromhex(nonce), now_us=lambda: self._tick(times), clock=lambda: 0.0
        )
        self.disk = ReplicatedDisk(self.local, ROOT, self.writer, trash="/node/trash")
        self.checkpointer = Checkpointer(store, KEYS, self.epoch, self.follower.seals, keep_us=keep_us)

    def _tick(self, times: Iterator[int]) -> int:
        self.times.append(next(times))
        return self.times[-1]

    def change(self, random: Random) -> None:
        """Do something to a file, and have it committed in an object of its own."""
        names = [name for name in self.disk.names(ROOT) if not self.disk.is_directory(f"{ROOT}/{name}")]
        choice = random.random()
        path = f"{ROOT}/{random.choice(names or ['a'])}"
        if choice < 0.2 or not names:
            path = f"{ROOT}/{random.choice('abcdef')}"
            if not self.disk.exists(path):
                self.disk.open(path, create=True)
            self.disk.write(self.disk.open(path, write=True), 0, random.randbytes(10))
        elif choice < 0.3:
            self.disk.remove(path)
        elif choice < 0.4:
            self.disk.rename(path, f"{ROOT}/{random.choice([each for each in 'abcdef' if path[-1] != each])}")
        elif choice < 0.5:
            self.disk.make_directory(f"{ROOT}/d{random.randint(0, 2)}/e{random.randint(0, 1 << 30)}")
        elif choice < 0.55 and self.disk.exists(f"{ROOT}/d0"):
            self.disk.remove_directory(f"{ROOT}/d0")
        else:
            file = self.disk.open(path, write=True)
            size = self.disk.size(file)
            if choice < 0.6:
                self.disk.truncate(file, random.randint(0, size + 50))
            elif choice < 0.7:
                self.disk.zero(file, size, random.randint(1, 100))
            else:
                at = size if choice < 0.9 else random.randint(0, size)
                self.disk.write(file, at, random.randbytes(random.randint(1, 150)))
        self.writer.flush(10)

    def tree(self) -> dict[str, bytes | None]:
        """The state of the directory."""
        return tree(self.local, ROOT)

    def close(self) -> None:
        """End the threads."""
        self.writer.close()


def restored_tree(store: MemoryStore, local: MemoryDisk | None = None) -> dict[str, bytes | None]:
    """What a node makes of the store, and of what it has."""
    local = local or MemoryDisk()
    restore_newest(store, KEYS, local, ROOT).poll()
    return tree(local, ROOT)


def test_a_new_node_has_the_same_bytes_after_a_checkpoint_and_the_log() -> None:
    store, random = MemoryStore(), Random(1)
    owner = Owner(store)
    for round_number in range(12):
        for _ in range(10):
            owner.change(random)
        assert restored_tree(store) == owner.tree()
        owner.checkpointer.make_from(owner.disk, round_number * MINUTE)
        assert restored_tree(store) == owner.tree()
        owner.checkpointer.collect()
        assert restored_tree(store) == owner.tree()
    owner.close()


def test_the_same_over_several_owners() -> None:
    store, random = MemoryStore(), Random(2)
    before: dict[str, bytes | None] = {}
    for round_number in range(8):
        owner = Owner(store, keep_us=0)
        assert owner.tree() == before
        for step in range(12):
            owner.change(random)
            if step in (3, 9) and round_number % 3:
                owner.checkpointer.make_from(owner.disk, round_number * 100 * MINUTE + step)
                owner.checkpointer.collect()
        before = owner.tree()
        owner.close()
    assert restored_tree(store) == before


@pytest.mark.parametrize("overwritten", [False, True])
def test_chunks_that_somebody_else_deleted_are_uploaded_again(
    overwritten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint refers to chunks of the one before without reading them: it must not refer to what is gone."""
    store, random = MemoryStore(), Random(4)
    owner = Owner(store, keep_us=0)
    times = itertools.count(MINUTE, MINUTE)
    shard = OwnedShard(owner.epoch, claimed_manifest(store), owner.disk, owner.writer, owner.follower.seals, LogSize())
    store_checkpoint = checkpoint_maker(store, KEYS, shard, 0, lambda: next(times))
    big = owner.disk.open(f"{ROOT}/big", create=True)
    owner.disk.write(big, 0, random.randbytes(20 * CHUNK))
    if overwritten:
        store_checkpoint()
        owner.disk.write(big, 0, b"again")
    store_checkpoint()
    chunks = store.names(KEYS.chunk_prefix)
    store.delete(random.sample(chunks, 5) + store.names(KEYS.wal_prefix)[:-1])
    owner.disk.write(big, 20 * CHUNK, b"more")
    store_checkpoint()
    assert "checkpoint is not whole" in caplog.text
    assert restored_tree(store) == owner.tree()
    caplog.clear()
    puts = len(store.names(KEYS.chunk_prefix))
    owner.disk.write(big, 20 * CHUNK, b"less")
    store_checkpoint()
    assert not caplog.text
    assert len(store.names(KEYS.chunk_prefix)) <= puts + 1
    assert restored_tree(store) == owner.tree()
    owner.close()


def claimed_manifest(store: MemoryStore) -> StoredManifest:
    """The manifest as its owner has found it."""
    found = read_manifest(store, KEYS)
    assert found is not None
    return found


def test_only_what_changed_is_uploaded_and_only_what_differs_is_fetched() -> None:
    store = MemoryStore()
    owner = Owner(store)
    big = owner.disk.open(f"{ROOT}/big", create=True)
    owner.disk.write(big, 0, Random(3).randbytes(100 * CHUNK))
    first = owner.checkpointer.make_from(owner.disk, MINUTE)
    assert first.uploaded_bytes == 100 * CHUNK
    owner.disk.write(big, 100 * CHUNK, b"more")
    assert owner.checkpointer.make_from(owner.disk, 2 * MINUTE).uploaded_bytes == 4
    owner.disk.write(big, 0, b"again")
    assert owner.checkpointer.make_from(owner.disk, 3 * MINUTE).uploaded_bytes == CHUNK
    told: list[tuple[int, int]] = []
    local = MemoryDisk()
    restore_newest(store, KEYS, local, ROOT, lambda *each: told.append(each))
    assert told[-1] == (100 * CHUNK + 4, 100 * CHUNK + 4)
    owner.close()


def test_bit_rot_and_surplus_files_are_repaired() -> None:
    store, random = MemoryStore(), Random(4)
    owner = Owner(store)
    for _ in range(60):
        owner.change(random)
    owner.checkpointer.make_from(owner.disk, MINUTE)
    local = MemoryDisk()
    assert restored_tree(store, local) == owner.tree()
    files = [path for path, content in tree(local, ROOT).items() if content]
    for path in files:
        file = local.open(f"{ROOT}/{path}", write=True)
        local.write(file, 0, bytes([local.read(file, 0, 1)[0] ^ 1]))
    local.make_directory(f"{ROOT}/surplus/deep")
    local.open(f"{ROOT}/surplus/deep/file", create=True)
    local.remove(f"{ROOT}/{files[0]}")
    local.make_directory(f"{ROOT}/{files[0]}")
    assert restored_tree(store, local) == owner.tree()
    owner.close()


def _damage(store: MemoryStore, key: str) -> None:
    found = store.get(key)
    assert found is not None
    store.delete([key])
    store.put_new(key, found.data[:-1] + bytes([found.data[-1] ^ 1]))


@pytest.mark.parametrize("what", ["chunks", "checkpoints", "wal"])
def test_damage_in_the_store_is_reported(what: str) -> None:
    store, random = MemoryStore(), Random(5)
    owner = Owner(store)
    for _ in range(20):
        owner.change(random)
    owner.checkpointer.make_from(owner.disk, MINUTE)
    for _ in range(5):
        owner.change(random)
    key = store.names(f"{KEYS.root}/{what}/")[-1]
    _damage(store, key)
    with pytest.raises(CorruptFile, match=key):
        restored_tree(store)
    owner.close()


def test_a_chunk_that_is_missing_is_reported() -> None:
    store, random = MemoryStore(), Random(6)
    owner = Owner(store)
    for _ in range(20):
        owner.change(random)
    owner.checkpointer.make_from(owner.disk, MINUTE)
    store.delete(store.names(KEYS.chunk_prefix)[:1])
    with pytest.raises(CorruptFile, match="is not whole"):
        restored_tree(store)
    with pytest.raises(CorruptFile, match="is missing"):
        restore_at(store, "test", 0, MemoryDisk(), "/new")
    owner.close()


def test_an_object_missing_in_the_middle_is_reported() -> None:
    store, random = MemoryStore(), Random(7)
    owner = Owner(store)
    for _ in range(20):
        owner.change(random)
    store.delete([KEYS.wal(1, 5)])
    with pytest.raises(CorruptFile, match=KEYS.wal(1, 5)):
        restore_at(store, "test", 0, MemoryDisk(), "/new")
    owner.close()


# Crashes.


def scenario(store: FailingStore, local: MemoryDisk, log: list[dict[str, bytes | None]]) -> None:
    """A node claims, changes files, makes two checkpoints and deletes; `log` gets the states that were committed."""
    random = Random(8)
    owner = Owner(store, local, keep_us=0)
    try:
        for step in range(25):
            owner.change(random)
            log.append(owner.tree())
            if step % 5 == 4:
                owner.checkpointer.make_from(owner.disk, (step + 1) * 20 * MINUTE)
                owner.checkpointer.collect()
    finally:
        owner.close()


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_operation_loses_nothing(is_after: bool) -> None:
    store = FailingStore()
    scenario(store, MemoryDisk(), [])
    total = store.operations
    assert total > 50
    for at in range(total):
        store, local, log = FailingStore(), MemoryDisk(), list[dict[str, bytes | None]]([{}])
        store.fails_at = at + (AFTER if is_after else 0)
        with suppress(Crash):
            scenario(store, local, log)
        store.fails_at = -1
        fresh, repaired = restored_tree(store), restored_tree(store, local)
        assert fresh == repaired, at
        assert fresh == log[-1], at
        again = Owner(store, local)
        assert again.tree() == fresh, at
        again.checkpointer.make_from(again.disk, 1000 * MINUTE)
        again.checkpointer.collect()
        again.close()
        assert restored_tree(store) == fresh, at
        _check_whole(store)


def _check_whole(store: MemoryStore, deleted: Iterable[str] = ()) -> None:
    """Every kept checkpoint has all its chunks, and no seal is gone; a late put may bring back a deleted checkpoint."""
    stored = read_manifest(store, KEYS)
    assert stored is not None
    for key in store.names(KEYS.checkpoint_prefix):
        name = key.removeprefix(KEYS.checkpoint_prefix)
        if key not in deleted and stored.manifest.oldest <= name <= stored.manifest.checkpoint:
            found = load_checkpoint(store, KEYS, name)
            assert found is not None
            for file in found.files:
                assert all(fetch_chunk(store, KEYS, chunk) is not None for chunk in file.chunks)
    sealed = set()
    for key in store.names(KEYS.wal_prefix, count_max=10_000):
        object_ = store.get(key)
        assert object_ is not None
        if decode_header(object_.data).kind == SEAL:
            sealed.add(KEYS.position(key)[0])
    assert sealed == set(range(1, stored.manifest.epoch))


def test_a_restore_that_crashes_at_any_operation_is_repeated() -> None:
    store, random = FailingStore(), Random(9)
    owner = Owner(store)
    for _ in range(40):
        owner.change(random)
    owner.checkpointer.make_from(owner.disk, MINUTE)
    for _ in range(10):
        owner.change(random)
    expected = owner.tree()
    owner.close()
    store.operations = 0
    restored_tree(store)
    total, local = store.operations, MemoryDisk()
    for at in range(total):
        store.operations, store.fails_at = 0, at
        with suppress(Crash):  # what is there already is not fetched again, so the last ones are never asked for
            assert restored_tree(store, local) == expected
            assert at > total // 4
    store.fails_at = -1
    assert restored_tree(store, local) == expected


def test_a_follower_goes_on_after_the_store_failed() -> None:
    store, random = FailingStore(), Random(10)
    owner = Owner(store)
    local = MemoryDisk()
    follower = restore_newest(store, KEYS, local, ROOT)
    store.error = lambda: StoreUnavailable("no answer")
    for _ in range(10):
        owner.change(random)
        owner.change(random)
        store.fails_at = store.operations
        with pytest.raises(StoreUnavailable):
            follower.poll()
        store.fails_at = -1
        assert follower.poll(1) == 1
        assert follower.poll() == 1
        assert tree(local, ROOT) == owner.tree()
        assert follower.position == owner.writer.committed
    owner.close()


def test_a_follower_goes_on_across_epochs() -> None:
    store, random = MemoryStore(), Random(11)
    local = MemoryDisk()
    follower = ShardFollower(store, KEYS, restore_newest(store, KEYS, local, ROOT).target)
    for epoch in range(1, 5):
        owner = Owner(store)
        for _ in range(6):
            owner.change(random)
        follower.poll()
        assert tree(local, ROOT) == owner.tree()
        assert follower.position == owner.writer.committed == Position(epoch, owner.writer.committed.objects)
        owner.close()
    assert sorted(follower.seals) == [1, 2, 3]


# Deletions.


def test_a_follower_that_is_too_far_behind_says_so() -> None:
    store, random = MemoryStore(), Random(12)
    owner = Owner(store, keep_us=0)
    follower = restore_newest(store, KEYS, MemoryDisk(), ROOT)
    for round_number in range(3):
        for _ in range(5):
            owner.change(random)
        owner.checkpointer.make_from(owner.disk, round_number * 100 * MINUTE)
    assert owner.checkpointer.collect() > 5
    with pytest.raises(FollowerBehind):
        assert [follower.poll() for _ in range(100)] == []
    with pytest.raises(FollowerBehind):
        follower.seal_older(1, bytes(16), 0)
    owner.close()


def test_a_seal_that_comes_late_where_an_object_was_deleted_is_not_believed() -> None:
    store, random = MemoryStore(), Random(13)
    owner = Owner(store, keep_us=0)
    follower = restore_newest(store, KEYS, MemoryDisk(), ROOT)
    for _ in range(5):
        owner.change(random)
    assert follower.poll(2) == 2
    owner.close()
    owner = Owner(store, keep_us=0)
    for round_number in range(3):
        owner.change(random)
        owner.checkpointer.make_from(owner.disk, (3000 + 100 * round_number) * MINUTE)
    owner.checkpointer.collect()
    store.put_new(KEYS.wal(1, 2), encode_seal(1, 2, bytes(16), 0, 2))
    with pytest.raises(FollowerBehind):
        follower.poll()
    owner.checkpointer.collect()
    _check_whole(store)
    owner.close()


def test_an_owner_that_was_fenced_makes_no_checkpoint_and_deletes_nothing() -> None:
    store, random = MemoryStore(), Random(14)
    old = Owner(store)
    for _ in range(20):
        old.change(random)
    old.checkpointer.make_from(old.disk, MINUTE)
    new = Owner(store)
    with pytest.raises(Fenced):
        old.checkpointer.make_from(old.disk, 2 * MINUTE)
    keys = store.names("", count_max=10_000)
    with pytest.raises(Fenced):
        old.checkpointer.collect()
    assert store.names("", count_max=10_000) == keys
    assert restored_tree(store) == new.tree()
    old.close()
    new.close()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=60), st.integers(0, 120))
def test_kept_checkpoints_lead_to_every_moment_of_the_window(steps: list[tuple[int, bool]], keep: int) -> None:
    """Names come as time passes, and what is not kept is gone the next time."""
    now, names, made = 1, list[str](), list[tuple[int, str]]()
    for number, (minutes, _) in enumerate(steps):
        now += minutes * MINUTE
        name = f"{1:08d}-{number:012d}-{now:016d}-{number:016x}"
        made.append((now, name))
        names = choose_kept([*names, name], now, keep * MINUTE)
        assert names[-1] == name
        assert len(names) <= KEPT_IN_WINDOW + 3
        begin = now - max(keep * MINUTE, RESTORE_US)
        if made[0][0] <= begin:
            assert parse_checkpoint_name(names[0]).time_us <= begin
        else:
            assert names[0] == made[0][1]


class LateDeletesStore(MemoryStore):
    """Remembers every request to delete and to put, so that it can arrive once more."""

    def __init__(self) -> None:
        super().__init__()
        self.deletes: list[list[str]] = []
        self.puts: list[tuple[str, bytes]] = []

    def delete(self, keys: Sequence[str]) -> None:
        self.deletes.append(list(keys))
        super().delete(keys)

    def put_new(self, key: str, data: bytes) -> None:
        self.puts.append((key, data))
        super().put_new(key, data)

    def repeat(self, seed: int) -> None:
        """Let old requests arrive again: all deletions, and a put."""
        for keys in self.deletes:
            super().delete(keys)
        if self.puts:
            with suppress(KeyExists):
                super().put_new(*self.puts[seed % len(self.puts)])


@settings(max_examples=150)
@given(
    st.lists(
        st.sampled_from(["change", "change", "change", "checkpoint", "checkpoint", "collect", "fail over", "repeat"]),
        min_size=10,
        max_size=60,
    ),
    st.integers(0, 1000),
    st.sampled_from([0, 30 * MINUTE, 300 * MINUTE]),
)
def test_nothing_that_is_needed_is_deleted(steps: list[str], seed: int, keep_us: int) -> None:
    store, random, now = LateDeletesStore(), Random(seed), 1
    owner = Owner(store, keep_us=keep_us)
    states = {Position(1, 0): owner.tree()}
    for step in [*steps, "collect", "repeat"]:
        now += random.randint(0, 20) * MINUTE
        if step == "change":
            owner.change(random)
            states[owner.writer.committed] = owner.tree()
        elif step == "checkpoint":
            owner.checkpointer.make_from(owner.disk, now)
        elif step == "collect":
            owner.checkpointer.collect(random.choice([2, 10_000]))
        elif step == "repeat":
            store.repeat(seed)
        else:
            owner.close()
            owner = Owner(store, keep_us=keep_us)
            states[Position(owner.epoch, 0)] = owner.tree()
    stored = read_manifest(store, KEYS)
    assert stored is not None
    assert restored_tree(store) == owner.tree()
    _check_whole(store, set[str]().union(*store.deletes))
    for position, state in states.items():
        if position >= checkpoint_position(stored.manifest.oldest):
            disk = MemoryDisk()
            restore_at(store, "test", 0, disk, "/new", position)
            assert tree(disk, "/new") == state
    owner.close()


def test_content_that_comes_back_survives_a_late_request_to_delete_it() -> None:
    store = LateDeletesStore()
    owner = Owner(store, keep_us=0)
    file = owner.disk.open(f"{ROOT}/file", create=True)
    for number, content in enumerate([b"old", b"new", b"new", b"old"]):
        owner.disk.write(file, 0, content)
        owner.checkpointer.make_from(owner.disk, (number + 1) * 100 * MINUTE)
        owner.checkpointer.collect()
    assert any("/chunks/" in key for keys in store.deletes for key in keys)
    store.repeat(0)
    _check_whole(store)
    assert restored_tree(store) == {"file": b"old"}
    owner.close()


# Earlier moments.


def test_a_restore_to_every_position_has_the_state_of_that_moment() -> None:
    store, random = MemoryStore(), Random(15)
    states: dict[Position, dict[str, bytes | None]] = {Position(1, 0): {}}
    times: dict[int, Position] = {}
    for epoch in (1, 2, 3):
        owner = Owner(store, keep_us=100_000 * MINUTE)
        states[Position(epoch, 0)] = owner.tree()
        for step in range(15):
            owner.change(random)
            states[owner.writer.committed] = owner.tree()
            if owner.times:
                times[owner.times[-1]] = owner.writer.committed
            if step % 6 == 5:
                owner.checkpointer.make_from(owner.disk, owner.times[-1])
                owner.checkpointer.collect()
        owner.close()
    for position, state in states.items():
        disk = MemoryDisk()
        restore_at(store, "test", 0, disk, "/new", position)
        assert tree(disk, "/new") == state, position
    for time_us, position in times.items():
        disk = MemoryDisk()
        restored = restore_at(store, "test", 0, disk, "/new", time_us)
        assert restored.position in (position, Position(position.epoch + 1, 0))
        assert tree(disk, "/new") == states[position]
    with pytest.raises(InvalidArgument, match="the log up to that epoch ends at 3:"):
        restore_at(store, "test", 0, MemoryDisk(), "/new", Position(3, 1000))


def test_what_is_too_old_is_refused_with_the_earliest_moment() -> None:
    store, random = MemoryStore(), Random(16)
    owner = Owner(store, keep_us=0)
    for round_number in range(1, 4):
        for _ in range(5):
            owner.change(random)
        owner.checkpointer.make_from(owner.disk, round_number * 100 * MINUTE)
        owner.checkpointer.collect()
    stored = read_manifest(store, KEYS)
    assert stored is not None
    earliest = parse_checkpoint_name(stored.manifest.oldest).position
    for at in (Position(1, 0), 5):
        with pytest.raises(InvalidArgument, match=f"the earliest is {earliest}, of 1970-01-01T"):
            restore_at(store, "test", 0, MemoryDisk(), "/new", at)
    assert restore_at(store, "test", 0, MemoryDisk(), "/new", earliest).position == earliest
    owner.close()


def test_a_restore_needs_a_new_directory_and_a_cluster() -> None:
    disk = MemoryDisk()
    disk.make_directory("/new/something")
    with pytest.raises(InvalidArgument, match="is not empty"):
        restore_at(MemoryStore(), "test", 0, disk, "/new")
    with pytest.raises(InvalidArgument, match="has no cluster test"):
        restore_at(MemoryStore(), "test", 0, disk, "/other")


def test_a_long_list_of_files_is_stored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_FILES_BYTES_MAX", 100)
    store, random = MemoryStore(), Random(17)
    owner = Owner(store, keep_us=0)
    for round_number in range(3):
        for _ in range(20):
            owner.change(random)
        made = owner.checkpointer.make_from(owner.disk, round_number * 100 * MINUTE)
        assert made.checkpoint.parts
        owner.checkpointer.collect()
        assert restored_tree(store) == owner.tree()
    _check_whole(store)
    owner.close()
