"""Projections: tables that follow a topic exactly once; and aggregates that are folded from their events."""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks.leased_postgres import PostgresNode, _found

import headrace
from headrace import errors

MAKE = "CREATE TABLE seen (topic text, part bigint, at bigint, value text)"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server, if there is one to be had."""
    if find_spec("psycopg") is None or _found("postgres") is None:
        yield ""
        return
    node = PostgresNode()
    node.start(str(tmp_path_factory.mktemp("postgres")), synced=False)
    yield node.address
    node.stop()


Store = headrace.SqliteStore | headrace.PostgresStore
Make = Callable[[], Store]


@pytest.fixture(params=["sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path, database: str) -> Iterator[Make]:
    """Connects to an empty database with the table `seen`."""
    if request.param == "postgres" and not database:
        pytest.skip("needs postgres and psycopg")
    connect: Make = partial(headrace.SqliteStore, tmp_path / "views.db")
    if request.param == "postgres":
        connect = partial(headrace.PostgresStore, database)
    with connect() as store:
        store.connection.execute("DROP TABLE IF EXISTS seen")
        store.connection.execute("DELETE FROM headrace_positions")
        store.connection.execute(MAKE)
    with ExitStack() as stores:
        yield lambda: stores.enter_context(connect())


@pytest.fixture
def bus() -> Iterator[headrace.Bus]:
    with headrace.open(":memory:") as bus:
        yield bus


def insert(connection: Any, message: headrace.Received) -> None:
    """Write down what was seen, without a key that would hide a second time."""
    sign = "?" if isinstance(connection, sqlite3.Connection) else "%s"
    row = (message.topic, message.partition, message.offset, str(message.value))
    connection.execute(f"INSERT INTO seen VALUES ({sign}, {sign}, {sign}, {sign})", row)


def empty(connection: Any) -> None:
    connection.execute("DELETE FROM seen")


def seen(make: Make) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in make().connection.execute("SELECT * FROM seen").fetchall())


def logged(bus: headrace.Bus, *topics: str) -> list[tuple[Any, ...]]:
    found = []
    for topic in topics:
        for partition in bus.offsets(topic):
            offset = 0
            while batches := bus.fetch(topic, partition, offset):
                offset = batches[-1].next_offset
                for batch in batches:
                    found += [(topic, partition, one.offset, str(one.value)) for one in batch.messages()]
    return sorted(found)


def test_a_projection_catches_up_and_goes_on(bus: headrace.Bus, make: Make) -> None:
    bus.create_topic("orders", partitions=3)
    bus.create_topic("refunds")
    bus.publish_many("orders", [b"%d" % at for at in range(50)], keys=[f"{at}" for at in range(50)])
    projection = headrace.Projection(bus, ["orders", "refunds"], "seen", insert, make(), messages_max=7)
    assert projection.catch_up() == 50
    assert projection.catch_up() == 0
    bus.publish("refunds", b"late")
    again = headrace.Projection(bus, ["orders", "refunds"], "seen", insert, make())
    assert again.catch_up() == 1
    assert seen(make) == logged(bus, "orders", "refunds")
    other = headrace.Projection(bus, "refunds", "other", lambda *_: None, make())
    assert other.catch_up() == 1


def test_a_projection_follows_until_it_is_stopped(bus: headrace.Bus, make: Make) -> None:
    bus.publish_many("orders", [b"1", b"2", b"3"])
    done = threading.Event()

    def handle(connection: Any, message: headrace.Received) -> None:
        insert(connection, message)
        if message.value == b"last":
            done.set()

    projection = headrace.Projection(bus, "orders", "seen", handle, make())
    thread = threading.Thread(target=projection.run)
    thread.start()
    bus.publish_many("orders", [b"4", b"5", b"last"])
    assert done.wait(30)
    projection.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert seen(make) == logged(bus, "orders")
    assert projection.applied == 6


def test_what_fails_is_not_half_there(bus: headrace.Bus, make: Make) -> None:
    bus.publish_many("orders", [b"1", b"2", b"3", b"4"])
    failing = True

    def handle(connection: Any, message: headrace.Received) -> None:
        insert(connection, message)
        if message.value == b"3" and failing:
            raise ZeroDivisionError

    projection = headrace.Projection(bus, "orders", "seen", handle, make())
    with pytest.raises(ZeroDivisionError):
        projection.catch_up()
    assert seen(make) == []
    failing = False
    assert projection.catch_up() == 4
    assert seen(make) == logged(bus, "orders")


def test_a_handler_must_not_end_the_transaction(bus: headrace.Bus, make: Make) -> None:
    bus.publish("orders", b"1")

    def handle(connection: Any, message: headrace.Received) -> None:
        insert(connection, message)
        connection.execute("COMMIT")

    with pytest.raises(errors.HandlerEndedTransaction):
        headrace.Projection(bus, "orders", "seen", handle, make()).catch_up()


def test_a_rebuilt_projection_begins_with_the_first_message(bus: headrace.Bus, make: Make) -> None:
    bus.publish_many("orders", [b"1", b"2"])
    projection = headrace.Projection(bus, "orders", "seen", insert, make())
    projection.catch_up()
    assert projection.rebuild(empty) == 2
    assert seen(make) == logged(bus, "orders")
    bus.delete_topic("orders")
    bus.publish_many("orders", [b"3", b"4", b"5"])
    with pytest.raises(errors.TopicChanged, match="rebuild the projection"):
        projection.catch_up()
    assert projection.rebuild(empty) == 3
    assert seen(make) == logged(bus, "orders")


def test_instances_of_a_projection_share_the_work(bus: headrace.Bus, make: Make) -> None:
    bus.create_topic("orders", partitions=2)
    instances = [headrace.Projection(bus, "orders", "seen", insert, make(), messages_max=3) for _ in range(3)]
    threads = [threading.Thread(target=each.run) for each in instances]
    for thread in threads:
        thread.start()
    for at in range(60):
        bus.publish("orders", b"%d" % at, key=f"{at}")
    headrace.Projection(bus, "orders", "seen", insert, make(), messages_max=3).catch_up()
    for each in instances:
        each.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert seen(make) == logged(bus, "orders")
    assert sum(each.applied for each in instances) <= 60


def test_removed_messages_are_told(bus: headrace.Bus, make: Make) -> None:
    bus.publish_many("orders", [b"1", b"2"])
    projection = headrace.Projection(bus, "orders", "seen", insert, make())
    projection.catch_up()
    bus.publish_many("orders", [b"3", b"4"])
    bus.trim_topic("orders", {0: 3}, unread=True)
    with pytest.raises(errors.OffsetOutOfRange):
        projection.catch_up()
    with pytest.raises(errors.OffsetOutOfRange):
        projection.run()
    assert projection.rebuild(empty) == 1


def test_with_asyncio(make: Make) -> None:
    async def story() -> None:
        async with await headrace.open_async(":memory:") as bus:
            await bus.publish_many("orders", [json.dumps(at).encode() for at in range(20)])
            values: list[int] = []

            def handle(connection: Any, message: headrace.Received) -> None:
                insert(connection, message)
                values.append(message.value)
                if message.value == 20:
                    projection.stop()

            projection = headrace.AsyncProjection(bus, "orders", "seen", handle, make(), deserializer="json")
            assert await projection.catch_up() == 20
            running = asyncio.create_task(projection.run())
            await bus.publish("orders", b"20")
            await asyncio.wait_for(running, 30)
            assert values == list(range(21))

    asyncio.run(story())
    assert len(seen(make)) == 21


def test_bad_arguments(bus: headrace.Bus) -> None:
    store = headrace.SqliteStore(":memory:")
    for arguments in (
        ([], "seen", insert, store),
        ([3], "seen", insert, store),
        ("orders", "", insert, store),
        ("orders", "seen", 3, store),
    ):
        with pytest.raises(errors.InvalidArgument):
            headrace.Projection(bus, *arguments)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument):
        headrace.Projection(bus, "orders", "seen", insert, store, messages_max=0)
    with pytest.raises(errors.TopicNotFound):
        headrace.Projection(bus, "nothing", "seen", insert, store).catch_up()


# Aggregates.


def balance(state: int, event: dict[str, int]) -> int:
    return state + event["paid"]


def test_aggregates_are_loaded_and_saved(bus: headrace.Bus) -> None:
    bus.create_topic("accounts", key_versions=True, partitions=4)
    accounts = headrace.Repository(bus, "accounts", balance, 0)
    ann = accounts.load("ann")
    assert ann == headrace.Aggregate("ann", 0, 0)
    ann = accounts.save(ann, [{"paid": 5}, {"paid": -2}])
    assert ann == accounts.load("ann") == headrace.Aggregate("ann", 3, 2)
    assert accounts.save(ann, []) is ann
    stale = ann
    accounts.save(ann, [{"paid": 10}])
    with pytest.raises(errors.UnexpectedVersion):
        accounts.save(stale, [{"paid": 100}])
    assert accounts.refresh(stale).state == 13


def test_an_update_is_repeated_when_somebody_was_faster(bus: headrace.Bus) -> None:
    bus.create_topic("accounts", key_versions=True)
    accounts = headrace.Repository(bus, "accounts", balance, lambda: 0)
    meddling = iter([7, 8])

    def decide(state: int) -> list[dict[str, int]]:
        for paid in meddling:
            accounts.save(accounts.load("ann"), [{"paid": paid}])
            break
        return [{"paid": 1}] if state < 100 else []

    assert accounts.update("ann", decide) == headrace.Aggregate("ann", 16, 3)
    meddling = iter([1])
    with pytest.raises(errors.UnexpectedVersion):
        accounts.update("ann", decide, attempts=1)


def test_many_writers_of_one_aggregate_lose_nothing(bus: headrace.Bus) -> None:
    bus.create_topic("accounts", key_versions=True)

    def pay() -> None:
        accounts = headrace.Repository(bus, "accounts", balance, 0)
        for _ in range(10):
            accounts.update("ann", lambda _: [{"paid": 1}], attempts=1000)

    threads = [threading.Thread(target=pay) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert headrace.Repository(bus, "accounts", balance, 0).load("ann") == headrace.Aggregate("ann", 40, 40)


def test_an_aggregate_with_missing_events_is_not_loaded(tmp_path: Path) -> None:
    with headrace.open(tmp_path / "data", maintenance_seconds=0.05, compact_seconds=0.05) as bus:
        bus.create_topic("accounts", key_versions=True, compact_by_key=True, segment_bytes=4096)
        accounts = headrace.Repository(bus, "accounts", balance, 0)
        for version in range(200):
            bus.publish("accounts", b'{"paid": 1}', key="ann", expected_version=version)
        for _ in range(600):
            first = next(bus.history("accounts", "ann")).version
            if first:
                break
            threading.Event().wait(0.05)
        with pytest.raises(errors.EventsMissing):
            accounts.load("ann")
        assert bus.publish("accounts", b"{}", key="ann", expected_version=200).count == 1


def test_an_event_that_cannot_be_read_is_named(bus: headrace.Bus) -> None:
    bus.create_topic("accounts", key_versions=True)
    bus.publish_many("accounts", [b"1", b"not json"], key="ann")
    accounts = headrace.Repository(bus, "accounts", lambda total, event: total + event, 0)
    with pytest.raises(headrace.CannotDeserialize, match=r"version 1 of the key b'ann' in accounts") as caught:
        accounts.load("ann")
    assert (caught.value.topic, caught.value.version, caught.value.message.value) == ("accounts", 1, b"not json")
