"""While a broker moves to another address, every verb of its clients goes on by itself, and nothing is lost or doubled.

A cluster gives its clients the same sight: one node serves, another answers where, and after a failover the same data
is served elsewhere.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.faces import awaitable
from tests.moving_broker import MovingBroker

import headrace
from headrace import errors

END = b"end"
LEASE_S = 2.0
Story = Callable[["World", Any], Awaitable[None]]


class World:
    """What the stories share: whether to go on, and how far each is."""

    def __init__(self) -> None:
        self.ended = False
        self.steps: dict[str, int] = {}
        self.begun_again = 0

    def step(self, name: str) -> bool:
        """Count a step of a story; returns whether there is to be another."""
        self.steps[name] = self.steps.get(name, 0) + 1
        return not self.ended


async def publishes(world: World, bus: Any) -> None:
    """One message after the other, each with its receipt."""
    count = 0
    while world.step("publishes"):
        receipt = await bus.publish("plain", b"%d" % count)
        assert receipt.offset == count
        count += 1
        await asyncio.sleep(0.002)
    await bus.publish("plain", END)


async def publishes_many(world: World, bus: Any) -> None:
    """Batches, of which each is stored once."""
    count = 0
    while world.step("publishes_many"):
        await bus.publish_many("batches", [b"%d" % (count + number) for number in range(10)])
        count += 10
        await asyncio.sleep(0.002)
    found: list[int] = []
    while len(found) < count:
        for batch in await bus.fetch("batches", 0, len(found)):
            found += map(int, batch.columns().values)
    assert found == list(range(count))


async def works(world: World, bus: Any) -> None:
    """Leases and acknowledges by hand."""
    queue, count, done = bus.queue("work"), 0, []
    while world.step("works"):
        await bus.publish("work", b"%d" % count)
        count += 1
        for job in await queue.lease(1, lease=LEASE_S, wait=5):
            await queue.ack(job)
            done.append(int(job.value))
    deadline = time.monotonic() + 30
    while set(done) != set(range(count)):  # the answer to a lease may be lost: then its messages come again
        assert time.monotonic() < deadline, set(range(count)) - set(done)
        for job in await queue.lease(10, lease=LEASE_S, wait=0.2):
            await queue.ack(job)
            done.append(int(job.value))
    assert len(done) == count  # acknowledged once each


async def prefetches(world: World, bus: Any) -> None:
    """Takes messages that are leased ahead."""
    seen: set[int] = set()
    async with bus.queue("stock").jobs(prefetch=8, lease=LEASE_S, timeout=30) as jobs:
        count, taken = 0, aiter(jobs)
        while world.step("prefetches"):
            await bus.publish("stock", b"%d" % count)
            count += 1
            seen.add(int((await anext(taken)).value))
        while len(seen) < count:
            seen.add(int((await anext(taken)).value))
    assert seen == set(range(count))


async def transacts(world: World, bus: Any) -> None:
    """Publishes to two topics at once; a transaction that was open when the broker ended is begun again."""
    count = 0
    while world.step("transacts"):
        try:
            async with bus.transaction("mover", sequence=count) as transaction:
                await transaction.publish("debit", b"%d" % count)
                await transaction.publish("credit", b"%d" % count)
            count += 1
        except errors.TransactionNotFound:
            world.begun_again += 1
    for topic in ("debit", "credit"):
        found: list[int] = []
        while len(found) < count:
            for batch in await bus.fetch(topic, 0, len(found)):
                found += map(int, batch.columns().values)
        assert found == list(range(count))


async def transforms(world: World, bus: Any) -> None:
    """Reads, publishes and commits the position at once, each message once; the group is joined again by itself."""
    count = 0
    async with bus.subscribe("raw", group="refiners", commit="manual", timeout=30, create=True) as raw:
        messages = aiter(raw)
        while world.step("transforms"):
            await bus.publish("raw", b"%d" % count)
            message = await anext(messages)
            assert int(message.value) == count
            while True:
                try:
                    async with bus.transaction("refiner", sequence=count) as transaction:
                        await transaction.publish("refined", message.value)
                        transaction.commit_positions(raw)
                    break
                except errors.TransactionNotFound:
                    world.begun_again += 1
            count += 1
    found: list[int] = []
    while len(found) < count:
        for batch in await bus.fetch("refined", 0, len(found)):
            found += map(int, batch.columns().values)
    assert found == list(range(count))
    assert [place.offset for place in (await bus.describe_group("refiners")).places] == [count]


async def reads(world: World, bus: Any) -> None:
    """Reads a stream from its beginning: each message once, in order."""
    async with bus.subscribe("plain", timeout=60, create=True) as messages:
        count = 0
        async for message in messages:
            world.step("reads")
            if message.value == END:
                return
            assert int(message.value) == count
            count += 1
    raise AssertionError("the end never came")


async def reads_in_a_group(world: World, bus: Any) -> None:
    """Reads as a member of a group: each message, in order; some perhaps again after a kill."""
    seen = -1
    async with bus.subscribe("plain", group="movers", timeout=60, commit_interval=0.1, create=True) as messages:
        async for message in messages:
            world.step("reads_in_a_group")
            if message.value == END:
                return
            assert int(message.value) <= seen + 1
            seen = max(seen, int(message.value))
    raise AssertionError("the end never came")


async def administers(world: World, bus: Any) -> None:
    """Asks, and changes what may be changed twice."""
    while world.step("administers"):
        await bus.create_topic("plain", exist_ok=True)
        assert (await bus.info()).version
        assert await bus.offsets("plain")
        await asyncio.sleep(0.01)


async def next_of(messages: Any) -> Any:
    """The next message; None if there is none in time."""
    async for message in messages:
        return message
    return None


async def listens(world: World, bus: Any) -> None:
    """Has a live subscription, and requests answers of a service: both come back after each move."""
    async with bus.subjects.subscribe("news.*", timeout=0.5) as news:
        while world.step("listens"):
            with contextlib.suppress(errors.ConnectionFailed):  # it may be lost: live messages are not stored
                await bus.subjects.publish("news.eu", b"%d" % world.steps["listens"])
            await next_of(news)
        moves = world.steps["listens"]
        for _ in range(20):
            await bus.subjects.publish("news.eu", b"%d" % moves)
            if await next_of(news) is not None:
                return
    raise AssertionError("the live subscription did not come back")


async def handles(world: World, bus: Any) -> None:
    """An app handles messages and answers requests all the time."""
    handled: set[int] = set()
    plain = getattr(bus, "inner", None)
    app = headrace.AsyncApp(bus) if plain is None else headrace.App(plain)
    app.on("handled", lease=LEASE_S)(lambda job: handled.add(int(job.value)))
    app.serves("echo")(lambda request: request.value)
    if plain is None:
        running: Any = asyncio.create_task(app.run(stop_on_signals=False))
    else:
        running = asyncio.create_task(asyncio.to_thread(app.run, stop_on_signals=False))
    count = 0
    while not (await bus.subjects.info()).responders:
        await asyncio.sleep(0.01)
    try:
        while world.step("handles"):
            await bus.publish("handled", b"%d" % count)
            count += 1
            with contextlib.suppress(errors.ConnectionFailed, errors.ResponderLost):
                assert (await bus.request("echo", b"%d" % count, timeout=10)).value == b"%d" % count
                world.step("answers")
            await asyncio.sleep(0.01)
        deadline = time.monotonic() + 30
        while handled != set(range(count)):
            assert time.monotonic() < deadline, set(range(count)) - handled
            await asyncio.sleep(0.01)
    finally:
        app.stop()
        await running


STORIES = (
    publishes,
    publishes_many,
    works,
    prefetches,
    transacts,
    transforms,
    reads,
    reads_in_a_group,
    administers,
    listens,
    handles,
)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[MovingBroker]:
    moving = MovingBroker(tmp_path / "data")
    yield moving
    moving.close()


@contextlib.asynccontextmanager
async def async_stories(url: str, world: World) -> AsyncIterator[None]:
    """All stories as tasks, with one bus."""
    async with await headrace.connect_async(url, timeout=30, name="moving") as bus, asyncio.TaskGroup() as tasks:
        for story in STORIES:
            tasks.create_task(_coroutine(story(world, bus)))
        yield
        world.ended = True


async def _coroutine(told: Awaitable[None]) -> None:
    await told


@contextlib.asynccontextmanager
async def sync_stories(url: str, world: World) -> AsyncIterator[None]:
    """All stories as threads, with one bus."""
    failed: list[BaseException] = []

    def tell(story: Story, bus: Any) -> None:
        try:
            asyncio.run(_coroutine(story(world, awaitable(bus))))
        except BaseException as error:  # noqa: BLE001  # raised at the end
            world.ended = True
            failed.append(error)

    with await asyncio.to_thread(headrace.connect, url, timeout=30, name="moving") as bus:
        threads = [threading.Thread(target=tell, args=(story, bus), name=story.__name__) for story in STORIES]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            world.ended = True
            for thread in threads:
                await asyncio.to_thread(thread.join, 90)
            if failed:
                raise failed[0]
        assert not [thread.name for thread in threads if thread.is_alive()]


async def all_advance(world: World, least: int = 3) -> None:
    """Wait until each story is some steps further."""
    wanted = {story.__name__: world.steps.get(story.__name__, 0) + least for story in STORIES}
    deadline = time.monotonic() + 40
    while any(world.steps.get(name, 0) < count for name, count in wanted.items()):
        assert not world.ended, "a story has failed"
        assert time.monotonic() < deadline, {name: (world.steps.get(name), wanted[name]) for name in wanted}
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kill", [False, True], ids=["planned", "killed"])
@pytest.mark.parametrize("stories", [async_stories, sync_stories], ids=["async", "sync"])
def test_every_verb_goes_on_when_the_broker_moves(broker: MovingBroker, stories: Any, kill: bool) -> None:
    async def told() -> World:
        world = World()
        async with stories(broker.url, world):
            await all_advance(world)
            for _ in range(3):
                await asyncio.to_thread(broker.move, kill=kill)
                await all_advance(world)
        return world

    world = asyncio.run(told())
    assert broker.moves == 3
    assert world.steps["answers"] > broker.moves
    assert world.begun_again <= 6  # at most two transactions are open at each move
