"""Every shared store keeps the same promises: one suite over memory, a directory, and real servers."""

import fcntl
import multiprocessing
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.store_servers import AzuriteServer, PostgresServer, RedisServer, SeaweedServer, StoreServer, running

from headrace.cluster.store_list import open_store
from headrace.model.errors import InvalidArgument, StoreUnavailable, StoreUnqualified
from headrace.storage.stores.self_test import qualify_store
from headrace.storage.stores.store import OBJECT_BYTES_MAX, KeyExists, SharedStore, StoredObject, VersionMismatch
from headrace.testing import FaultyStore

RACERS = 16
SERVERS = {"postgresql": PostgresServer, "s3": SeaweedServer, "redis": RedisServer, "az": AzuriteServer}
PLACES = ["memory", "directory", "postgresql", "s3", "redis", pytest.param("az", marks=pytest.mark.long)]


class Place(NamedTuple):
    """Where a store is, for this process and for others."""

    url: str
    environment: Mapping[str, str]
    server: StoreServer | None = None

    def open(self, **options: object) -> SharedStore:
        """A connection of its own to the store."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        joined = f"{self.url}{'&' if '?' in self.url else '?'}{query}" if query else self.url
        store = open_store(joined, environment=self.environment)
        opened.append(store)
        return store


opened: list[SharedStore] = []


@pytest.fixture(autouse=True)
def _stores_are_closed() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if request.param in SERVERS:
        with running(SERVERS[request.param]) as server:
            yield Place(server.url, server.environment, server)
    elif request.param == "directory":
        yield Place(f"directory://{tmp_path_factory.mktemp('store')}/shared", {})
    else:
        yield Place(f"memory:{secrets.token_hex(4)}", {})


@pytest.fixture
def store(place: Place) -> SharedStore:
    return place.open()


@pytest.fixture
def root() -> str:
    """A prefix that no other test uses."""
    return f"test-{secrets.token_hex(6)}"


def found(store: SharedStore, key: str) -> StoredObject:
    stored = store.get(key)
    assert stored is not None, f"{key} is gone"
    return stored


def race(change: Callable[[int], object]) -> tuple[list[int], list[Exception]]:
    """Call a function with a number in as many threads as there are racers; returns who won, and what others got."""
    start = threading.Barrier(RACERS)
    won: list[int] = []
    lost: list[Exception] = []

    def run(number: int) -> None:
        start.wait()
        try:
            change(number)
            won.append(number)
        except Exception as error:  # noqa: BLE001  # looked at by the test
            lost.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won, lost


def check_race(won: list[int], lost: list[Exception], refusal: type[Exception], data: bytes) -> None:
    """One at most was told that it won, and what it wrote is there; a busy server may leave some without an answer."""
    unknown = [error for error in lost if isinstance(error, StoreUnavailable)]
    assert len(won) == 1 or (not won and unknown), (won, lost)
    assert {type(error) for error in lost} - {StoreUnavailable} == {refusal}
    assert len(unknown) <= RACERS // 2, unknown
    assert data in ([f"by {won[0]}".encode()] if won else [f"by {number}".encode() for number in range(RACERS)])


def eventually(call: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The result of a call that may find the store unavailable for a while."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except StoreUnavailable:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def test_an_object_is_created_once(store: SharedStore, root: str) -> None:
    assert store.get(f"{root}/a") is None
    store.put_new(f"{root}/a", b"first")
    with pytest.raises(KeyExists):
        store.put_new(f"{root}/a", b"second")
    assert found(store, f"{root}/a").data == b"first"


def test_an_object_is_replaced_only_at_the_version_that_it_has(store: SharedStore, root: str) -> None:
    store.put_new(f"{root}/a", b"first")
    first = found(store, f"{root}/a").version
    second = store.replace(f"{root}/a", b"second", first)
    assert found(store, f"{root}/a").data == b"second"
    with pytest.raises(VersionMismatch):
        store.replace(f"{root}/a", b"stale", first)
    store.replace(f"{root}/a", b"third", found(store, f"{root}/a").version)
    with pytest.raises(VersionMismatch):
        store.replace(f"{root}/a", b"stale", second)
    assert found(store, f"{root}/a").data == b"third"
    with pytest.raises(VersionMismatch):
        store.replace(f"{root}/b", b"none", first)
    assert store.get(f"{root}/b") is None


def test_a_version_never_comes_back_even_for_the_same_bytes(store: SharedStore, root: str) -> None:
    key = f"{root}/a"
    versions = []
    for _ in range(3):
        store.put_new(key, b"same")
        versions.append(found(store, key).version)
        versions.append(store.replace(key, b"same", versions[-1]))
        with pytest.raises(VersionMismatch):
            store.replace(key, b"stale", versions[-2])
        store.delete([key])
        with pytest.raises(VersionMismatch):
            store.replace(key, b"gone", versions[-1])
    assert len(set(versions)) == len(versions)


@pytest.mark.parametrize("size", [0, 1, 100_000, OBJECT_BYTES_MAX])
def test_objects_of_all_sizes_come_back(store: SharedStore, root: str, size: int) -> None:
    data = secrets.token_bytes(size)
    store.put_new(f"{root}/a", data)
    stored = found(store, f"{root}/a")
    assert stored.data == data
    store.replace(f"{root}/a", data[::-1], stored.version)
    assert found(store, f"{root}/a").data == data[::-1]
    assert type(stored.data) is bytes


@pytest.mark.parametrize("count", [1, 2, 40])
def test_several_objects_are_read_at_once(store: SharedStore, root: str, count: int) -> None:
    keys = [f"{root}/{number}" for number in range(count)]
    assert store.get_many(keys) == [None] * count
    for number in range(0, count, 2):
        store.put_new(keys[number], b"%d" % number)
    assert store.get_many(keys) == [store.get(key) for key in keys]
    assert store.get_many(keys[::-1]) == store.get_many(keys)[::-1]


def test_what_not_every_store_can_keep_is_refused(store: SharedStore, root: str) -> None:
    for key in ("", "/a", "a/", "a//b", "a/../b", "..", "./a", "a b", "ä", "a\n", "a?b", "a#", "x" * 201):
        with pytest.raises(InvalidArgument, match="a key is a path"):
            store.put_new(key, b"")
    with pytest.raises(InvalidArgument, match="at most 16777216 bytes"):
        store.put_new(f"{root}/a", bytes(OBJECT_BYTES_MAX + 1))
    for key in ("A.b-c_d", "node:4222", "a=+@~,", "x" * 200):
        store.put_new(f"{root}/{key}", key.encode())
        assert found(store, f"{root}/{key}").data == key.encode()
    assert len(store.names(f"{root}/")) == 4


def test_keys_are_listed_in_order_and_in_pages(store: SharedStore, root: str) -> None:
    keys = [f"{root}/wal/{epoch:02d}/{position:03d}" for epoch in range(3) for position in range(15)]
    for key in reversed(keys):
        store.put_new(key, b"")
    assert store.names(f"{root}/") == keys
    assert store.names(f"{root}/wal/01/") == keys[15:30]
    assert store.names(f"{root}/", count_max=4) == keys[:4]
    for after in (keys[0], keys[14], keys[15], f"{root}/wal/00/0075", f"{root}/wal/00/", f"{root}/wal/009"):
        behind = [key for key in keys if key > after]
        assert store.names(f"{root}/", after) == behind
        assert store.names(f"{root}/wal/", after, 3) == behind[:3]
    assert store.names(f"{root}/", keys[-1]) == []
    pages: list[str] = []
    while page := store.names(f"{root}/wal/", pages[-1] if pages else "", 7):
        assert len(page) <= 7
        pages += page
    assert pages == keys


def test_a_prefix_is_one_of_characters_not_of_directories(store: SharedStore, root: str) -> None:
    keys = sorted(f"{root}/{name}" for name in ("a/b", "a/b0", "a/c", "a0", "b", "ab/a", "A"))
    for key in keys:
        store.put_new(key, b"")
    for prefix in ("", "a", "a/", "a/b", "a/b0", "a/b00", "ab", "b", "c", "A", "a/b/"):
        assert store.names(f"{root}/{prefix}") == [key for key in keys if key.startswith(f"{root}/{prefix}")], prefix
    assert store.names(root) == keys
    assert store.names(f"{root}/a", after=f"{root}/a/b") == [f"{root}/{name}" for name in ("a/b0", "a/c", "a0", "ab/a")]
    assert [key for key in store.names("") if key.startswith(root)] == keys


def test_deleted_objects_are_gone_and_may_be_created_again(store: SharedStore, root: str) -> None:
    keys = [f"{root}/d{number % 3}/{number:04d}" for number in range(30)]
    for key in keys:
        store.put_new(key, b"old")
    store.delete([*keys[:20], f"{root}/never", keys[0]])
    store.delete([])
    assert sorted(store.names(f"{root}/")) == sorted(keys[20:])
    assert store.get(keys[0]) is None
    store.put_new(keys[0], b"new")
    assert found(store, keys[0]).data == b"new"


def test_one_of_many_threads_creates_an_object(store: SharedStore, root: str) -> None:
    for turn in range(5):
        key = f"{root}/{turn}"
        won, lost = race(lambda number, key=key: store.put_new(key, f"by {number}".encode()))
        check_race(won, lost, KeyExists, found(store, key).data)


def test_one_of_many_threads_replaces_a_version(store: SharedStore, root: str) -> None:
    store.put_new(f"{root}/a", b"")
    for _ in range(5):
        version = found(store, f"{root}/a").version
        won, lost = race(lambda number, version=version: store.replace(f"{root}/a", f"by {number}".encode(), version))
        check_race(won, lost, VersionMismatch, found(store, f"{root}/a").data)


def test_nothing_is_lost_when_many_threads_count(place: Place, root: str) -> None:
    stores = [place.open() for _ in range(4)]
    stores[0].put_new(f"{root}/count", b"0")

    def count(number: int) -> None:
        store = stores[number % 4]
        done = 0
        while done < 5:
            stored = found(store, f"{root}/count")
            try:
                store.replace(f"{root}/count", b"%d" % (int(stored.data) + 1), stored.version)
                done += 1
            except VersionMismatch:
                continue

    won, lost = race(count)
    assert len(won) == RACERS, lost
    assert found(stores[0], f"{root}/count").data == b"%d" % (5 * RACERS)


def test_the_self_test_accepts_it_and_leaves_nothing_behind(store: SharedStore, root: str) -> None:
    qualify_store(store, root, "nonce")
    assert store.names(f"{root}/") == []


def test_the_self_test_refuses_it_if_it_ignores_conditions(store: SharedStore, root: str) -> None:
    liar = FaultyStore(store)
    liar.ignores_conditions = True
    with pytest.raises(StoreUnqualified, match="it creates an object that exists"):
        qualify_store(liar, root, "nonce")
    assert store.names(f"{root}/") == []


def test_a_closed_store_answers_no_more_and_closes_again(place: Place, root: str) -> None:
    store = place.open()
    store.put_new(f"{root}/a", b"kept")
    store.close()
    store.close()
    if place.server is not None:
        with pytest.raises(StoreUnavailable, match="closed"):
            store.get(f"{root}/a")
    assert found(place.open(), f"{root}/a").data == b"kept"


def _count_in_a_process(place: Place, root: str, created: Any) -> None:
    store = place.open()
    won = 0
    for number in range(40):
        try:
            store.put_new(f"{root}/{number:03d}", b"x" * number)
            won += 1
        except KeyExists:
            continue
    created.put(won)


def test_processes_create_each_object_once(place: Place, root: str) -> None:
    if place.url.startswith("memory:"):
        return  # which is of one process
    context = multiprocessing.get_context("spawn")
    created = context.Queue()
    shared = Place(place.url, dict(place.environment))
    processes = [context.Process(target=_count_in_a_process, args=(shared, root, created)) for _ in range(3)]
    for process in processes:
        process.start()
    counts = [created.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert sum(counts) == 40
    assert len(place.open().names(f"{root}/")) == 40


def test_it_works_again_after_its_server_was_killed(place: Place, root: str) -> None:
    if place.server is None:
        return  # there is no server that could be killed
    store = place.open(timeout=3)
    store.put_new(f"{root}/a", b"kept")
    place.server.stop(signal.SIGKILL if place.server.keeps_when_killed else signal.SIGTERM)
    for call in (lambda: store.put_new(f"{root}/b", b""), lambda: store.get(f"{root}/a"), lambda: store.names(root)):
        with pytest.raises(StoreUnavailable, match="failed"):
            call()
    place.server.start()
    assert eventually(lambda: store.get(f"{root}/a")).data == b"kept"
    eventually(lambda: store.put_new(f"{root}/c", b""))
    assert store.names(f"{root}/") == [f"{root}/a", f"{root}/c"]


def test_a_server_that_does_not_answer_is_unavailable_after_the_time_out(place: Place, root: str) -> None:
    if place.server is None:
        return
    store = place.open(timeout=1)
    store.put_new(f"{root}/a", b"first")
    version = found(store, f"{root}/a").version
    processes = backends(place)
    pause(place, processes, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable):
            store.replace(f"{root}/a", b"second", version)
    finally:
        pause(place, processes, signal.SIGCONT)
    assert time.monotonic() - started < 10
    after = eventually(lambda: found(store, f"{root}/a"))
    assert after.data in (b"first", b"second")  # nobody knows, and reading tells


def pause(place: Place, processes: list[int], number: int) -> None:
    """Stop or continue the server, or those processes of it that have our connections."""
    assert place.server is not None
    if processes:
        for process in processes:
            place.server.send_to(process, number)
    else:
        place.server.send(number)


def backends(place: Place) -> list[int]:
    """The processes of PostgreSQL that serve our connections, of which it has one each."""
    if not isinstance(place.server, PostgresServer):
        return []
    with place.server.connect() as connection:
        query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'headrace'"
        return [row[0] for row in connection.execute(query)]


class StoreModel(RuleBasedStateMachine):
    """Operations in any order give the same as with a dictionary."""

    store: SharedStore
    keys = st.sampled_from(["a/b", "a/b0", "a/c/d", "a0", "b", "b0/a"])
    data = st.binary(max_size=20)

    def __init__(self) -> None:
        super().__init__()
        self.root = f"model-{secrets.token_hex(6)}/"
        self.model: dict[str, tuple[bytes, str]] = {}
        self.stale: dict[str, str] = {}

    @rule(key=keys, data=data)
    def put_new(self, key: str, data: bytes) -> None:
        if key in self.model:
            with pytest.raises(KeyExists):
                self.store.put_new(self.root + key, data)
        else:
            self.store.put_new(self.root + key, data)
            self.model[key] = data, found(self.store, self.root + key).version

    @rule(key=keys, data=data)
    def replace(self, key: str, data: bytes) -> None:
        if key in self.model:
            self.stale[key] = self.model[key][1]
            self.model[key] = data, self.store.replace(self.root + key, data, self.model[key][1])

    @precondition(lambda self: self.stale)
    @rule(key=keys, data=data)
    def replace_stale(self, key: str, data: bytes) -> None:
        if key in self.stale:
            with pytest.raises(VersionMismatch):
                self.store.replace(self.root + key, data, self.stale[key])

    @rule(keys=st.lists(keys, max_size=3))
    def delete(self, keys: list[str]) -> None:
        self.store.delete([self.root + key for key in keys])
        for key in keys:
            if key in self.model:
                self.stale[key] = self.model.pop(key)[1]

    @rule(prefix=st.sampled_from(["", "a", "a/", "a/b", "a/c/", "b", "b0"]), after=keys, count=st.integers(1, 8))
    def names(self, prefix: str, after: str, count: int) -> None:
        expected = [self.root + key for key in sorted(self.model) if key.startswith(prefix) and key > after]
        assert self.store.names(self.root + prefix, self.root + after, count) == expected[:count]

    @rule(key=keys)
    def get(self, key: str) -> None:
        stored = self.store.get(self.root + key)
        assert (stored and stored.data) == (self.model[key][0] if key in self.model else None)

    def teardown(self) -> None:
        self.store.delete([self.root + key for key in self.model])


def test_it_is_like_a_dictionary(store: SharedStore) -> None:
    class Model(StoreModel):
        pass

    Model.store = store
    run_state_machine_as_test(Model, settings=settings(max_examples=20, stateful_step_count=20))  # type: ignore[no-untyped-call]


# What only one of them has.


def test_postgresql_replaces_connections_that_were_terminated() -> None:
    with running(PostgresServer) as server:
        place = Place(server.url, server.environment, server)
        store = place.open(table="own_objects", connections=2)
        store.put_new("a", b"")
        with server.connect() as connection:
            query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headrace'"
            assert connection.execute(query).rowcount == 1
        assert store.get("a") is not None, "a read is tried again"
        with server.connect() as connection:
            connection.execute(query)
        with pytest.raises(StoreUnavailable, match="terminat"):
            store.put_new("b", b"")
        store.put_new("c", b"")
        with server.connect() as connection:
            connection.execute("CREATE SCHEMA own")
        other = place.open(table="own.objects")
        other.put_new("a", b"another table")
        assert store.names("") == ["a", "c"]
        won, lost = race(lambda number: place.open(table="made_at_once").put_new(f"k{number}", b""))
        assert len(won) == RACERS, lost
        assert any("synchronous_standby_names" in remark for remark in store.remarks())


def test_postgresql_without_fsync_is_told() -> None:
    with running(lambda directory: PostgresServer(directory, "fsync=off", "synchronous_commit=off")) as server:
        store = Place(server.url, server.environment).open()
        assert any("fsync = off" in remark for remark in store.remarks())
        with pytest.raises(InvalidArgument, match="a table is"):
            open_store(f"{server.url}?table=x;drop", environment=server.environment)
        wrong = Place(server.url, {"PGPASSWORD": "wrong-words"}).open()
        with pytest.raises(StoreUnavailable, match="password authentication failed") as failure:
            wrong.get("a")
        assert "wrong-words" not in str(failure.value) + repr(wrong)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("appendonly no", "appendonly no"),
        ("appendfsync everysec", "appendfsync everysec"),
        ("maxmemory-policy allkeys-lru", "it deletes objects when it is full"),
    ],
)
def test_redis_that_may_lose_what_it_confirmed_is_refused(setting: str, told: str) -> None:
    with running(lambda directory: RedisServer(directory, setting)) as server:
        place = Place(server.url, server.environment, server)
        with pytest.raises(StoreUnqualified, match=told):
            place.open().get("a")
        accepted = place.open(check="false")
        accepted.put_new("a", b"")
        assert any(told in remark for remark in accepted.remarks())


def test_directory_is_whole_after_its_writer_was_killed(tmp_path: Path) -> None:
    place = Place(f"directory://{tmp_path}/store", {})
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_write_for_ever, args=(place,))
    writer.start()
    store = place.open()
    while len(store.names("w/")) < 20:
        time.sleep(0.01)
    writer.kill()
    writer.join()
    for name in store.names("w/"):
        assert len(found(store, name).data) == 50_000
    store.put_new("x", b"the lock is free")


def check_unavailable(store: SharedStore, what: str) -> None:
    """No call finds, changes or lists anything."""
    calls: list[Callable[[], object]] = [
        lambda: store.put_new("b", b"lost"),
        lambda: store.replace("a/b", b"lost", "0" * 24),
        lambda: store.delete(["a/b"]),
        lambda: store.get("a/b"),
        lambda: store.names(""),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match=f"{what}.*move or mount it to .* again"):
            call()


def test_directory_that_is_gone_is_neither_empty_nor_made_again(tmp_path: Path) -> None:
    place, directory, away = Place(f"directory://{tmp_path}/store", {}), tmp_path / "store", tmp_path / "away"
    store, reader = place.open(), place.open()
    assert reader.get("a/b") is None
    assert not directory.exists(), "a read makes nothing"
    store.put_new("a/b", b"kept")
    assert reader.names("") == ["a/b"]
    directory.rename(away)
    for each in (store, reader, place.open()):
        check_unavailable(each, "was moved, removed or unmounted")
    assert not directory.exists()
    directory.mkdir()
    for each in (store, reader, place.open()):
        check_unavailable(each, "another directory is at")
    assert not list(directory.iterdir())
    directory.rmdir()
    away.rename(directory)
    for each in (store, reader):
        assert found(each, "a/b").data == b"kept"
    store.replace("a/b", b"after", found(store, "a/b").version)
    assert reader.names("") == ["a/b"]
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get("a/b")


def test_directory_that_was_removed_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """File systems give the number of an inode away again as soon as nobody has it open."""
    directory, store = tmp_path / "store", Place(f"directory://{tmp_path}/store", {}).open()
    store.put_new("a/b", b"lost")
    shutil.rmtree(directory)
    directory.mkdir()
    check_unavailable(store, "another directory is at")
    store.close()
    del store
    opened.clear()
    Place(f"directory://{tmp_path}/store", {}).open().put_new("a", b"another store")


@pytest.mark.parametrize("replaced", [False, True])
def test_directory_that_is_moved_while_a_change_waits_for_its_lock(tmp_path: Path, replaced: bool) -> None:
    directory, away = tmp_path / "store", tmp_path / "away"
    store = Place(f"directory://{directory}", {}).open()
    store.put_new("a", b"")
    failures: list[Exception] = []

    def put() -> None:
        try:
            store.put_new("b", b"")
        except StoreUnavailable as error:
            failures.append(error)

    with (directory / "#lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=put)
        thread.start()
        time.sleep(0.2)
        directory.rename(away)
        if replaced:
            directory.mkdir()
    thread.join()
    assert len(failures) == 1
    assert sorted(path.name for path in away.iterdir()) == ["#lock", "a#"]
    assert not directory.exists() or not list(directory.iterdir())


def test_directory_whose_lock_file_was_removed_has_one_lock(tmp_path: Path) -> None:
    """Who waited for the file that is gone would otherwise write at the same time as who holds the new one."""
    directory = tmp_path / "store"
    first, second = (Place(f"directory://{directory}", {}).open() for _ in range(2))
    first.put_new("a", b"")
    with (directory / "#lock").open("rb") as old:
        fcntl.flock(old, fcntl.LOCK_EX)
        thread = threading.Thread(target=first.put_new, args=("b", b""))
        thread.start()
        time.sleep(0.2)
        (directory / "#lock").unlink()
        second.put_new("c", b"")
        with (directory / "#lock").open("rb") as new:
            fcntl.flock(new, fcntl.LOCK_EX)
            fcntl.flock(old, fcntl.LOCK_UN)
            thread.join(0.3)
            assert thread.is_alive(), "it writes with the lock of a file that is gone"
            assert second.names("") == ["a", "c"]
    thread.join()
    assert second.names("") == ["a", "b", "c"]


def _write_for_ever(place: Place) -> None:
    store = place.open()
    number = 0
    while True:
        store.put_new(f"w/{number:06d}", bytes(50_000))
        number += 1
