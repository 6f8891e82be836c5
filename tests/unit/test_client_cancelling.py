"""Whatever a program does when it is cancelled or interrupted, nothing stays at the broker that nobody looks after.

Each verb is cut off at each place where it waits: before what it waits for has come, and when it has just come.
"""

import asyncio
import contextlib
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest

import headrace
from headrace.client._sync import concurrency
from headrace.client._sync.bus import Bus
from headrace.server import EmbeddedServer

TOPIC, EMPTY = "t", "empty"
WAITS_MAX = 200
WITHIN_S = 20


class Stage:
    """A broker, and what it has at the moment."""

    def __init__(self) -> None:
        self.server = EmbeddedServer(":memory:", host="127.0.0.1", port=0)
        host, port = self.server._server.addresses[0]
        self.url = f"headrace://{host}:{port}"
        self.watching = headrace.connect(self.url)
        self.watching.publish_many(TOPIC, [b"%d" % number for number in range(300)])
        self.watching.create_subscription(TOPIC)
        self.watching.create_topic(EMPTY)
        self.watching.create_subscription(EMPTY)
        self.base = self.state()

    def state(self) -> dict[str, int]:
        info = self.watching.info()
        members = sum(group.members for group in self.watching.groups())
        leased = sum(self.watching.queue(topic).stats().leased for topic in (TOPIC, EMPTY))
        readers = self.server._server._broker._readers
        streams = sum(len(of_session) for of_session in list(readers._streams.values()))
        return {
            "members": members,
            "leased": leased,
            "streams": streams,
            "transactions": info.transactions_open,
            "live": self.watching.subjects.info().subscriptions,
            "connections": info.connections,
            "embedded": sum(thread.name == "headrace-server" for thread in threading.enumerate()) - 1,
        }

    def clean(self) -> bool:
        return {**self.state(), "connections": 1} == self.base

    def connected(self, count: int) -> bool:
        return self.watching.info().connections == count + 1

    def close(self) -> None:
        self.watching.close()
        self.server.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


async def until(condition: Callable[[], bool], describe: Callable[[], object]) -> None:
    """Wait for something to be so, and let the loop go on."""
    deadline = time.monotonic() + WITHIN_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, str(describe())
        await asyncio.sleep(0.005)


@types.coroutine
def cut(work: Coroutine[Any, Any, Any], at: int, late: bool) -> Generator[Any, Any, bool]:
    """Do some work, and cancel it when it waits for this time; returns whether it waited so often."""
    waits, was_cut, throw = 0, False, False
    while True:
        try:
            waited_for = work.throw(asyncio.CancelledError()) if throw else work.send(None)
        except StopIteration:
            return was_cut
        except asyncio.CancelledError:
            return True
        throw = waits == at
        waits += 1
        was_cut = was_cut or throw
        if throw and not late and waited_for is not None:
            waited_for.cancel()
        try:
            yield waited_for
        except asyncio.CancelledError:
            throw = True


# The verbs, for asyncio.


async def in_group(bus: Any) -> None:
    async with bus.subscribe(TOPIC, group="g", timeout=0.01) as subscription:
        async for _ in subscription:
            break
        await subscription.commit()


async def alone(bus: Any) -> None:
    async with bus.subscribe(TOPIC, pattern="e*", start="latest", timeout=0.01) as subscription:
        async for _ in subscription:
            break
        await subscription.seek("earliest")
        async for _ in subscription:
            break


async def handled(bus: Any) -> None:
    seen: list[Any] = []
    async with bus.subscribe(TOPIC, group="g", timeout=0.01) as subscription:
        await subscription.run(seen.append)


async def lease(bus: Any) -> None:
    queue = bus.queue(TOPIC)
    await queue.release(await queue.lease(5), 0)


async def lease_nothing(bus: Any) -> None:
    assert await bus.queue(EMPTY).lease(5, wait=0.02) == []


async def lease_in_block(bus: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with bus.lease(TOPIC, max=3):
            raise ZeroDivisionError


async def lease_spoilt(bus: Any) -> None:
    def spoil(value: bytes) -> bytes:
        if value.endswith(b"1"):
            raise ZeroDivisionError
        return value

    queue = bus.queue(TOPIC, deserializer=spoil)
    await queue.release(await queue.lease(5), 0)


async def jobs(bus: Any) -> None:
    queue, mine = bus.queue(TOPIC), []
    async with queue.jobs(prefetch=30, ack="manual") as series:
        try:
            async for job in series:
                mine.append(job)
                if len(mine) > 70:
                    break
        finally:
            if mine:
                await queue.release(mine, 0)


async def transaction(bus: Any) -> None:
    async with bus.transaction("x") as open_one:
        await open_one.publish("out", b"1")
        await open_one.publish_many("out", [b"2", b"3"])


async def producing(bus: Any) -> None:
    async with bus.producer("out", linger=0.001) as producer:
        await producer.send(b"1")
        await producer.publish(b"2", b"key")
        await producer.send_many([b"3"] * 10)
        await producer.flush()


async def asking(bus: Any) -> None:
    await bus.create_topic("made", exist_ok=True)
    await bus.offsets(TOPIC, "earliest")
    await bus.fetch(EMPTY, 0, 0, wait=0.02)


async def listening(bus: Any) -> None:
    async with bus.subjects.subscribe("news.*", timeout=0.01) as live:
        await bus.subjects.publish_many("news.a", [b"1", b"2"])
        async for _ in live:
            break
    async for _ in bus.subjects.subscribe("news.*", timeout=0.01):
        break


async def requesting(bus: Any) -> None:
    with contextlib.suppress(headrace.errors.NoResponders):
        await bus.request("nobody", b"value")
    await bus.request("nobody", b"value", callback=lambda _: None)


VERBS = [
    in_group,
    alone,
    handled,
    lease,
    lease_nothing,
    lease_in_block,
    lease_spoilt,
    jobs,
    transaction,
    producing,
    asking,
    listening,
    requesting,
]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_cancelled_leaves_nothing_behind(stage: Stage, verb: Callable[[Any], Any], late: bool) -> None:
    async def story(at: int) -> bool:
        async with await headrace.connect_async(stage.url) as bus:
            was_cut = await cut(verb(bus), at, late)
            await until(stage.clean, lambda: (at, stage.state()))
            assert await bus.info()
            await verb(bus)
            return was_cut

    for at in range(WAITS_MAX):
        if not asyncio.run(asyncio.wait_for(story(at), 60)):
            assert at
            return
    raise AssertionError(f"it waits more than {WAITS_MAX} times")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("inside", [False, True], ids=["served", "embedded"])
def test_a_connection_that_is_cancelled_is_none(stage: Stage, inside: bool, late: bool) -> None:
    async def opened() -> None:
        bus = await (headrace.open_async(":memory:") if inside else headrace.connect_async(stage.url))
        await bus.close()

    async def story(at: int) -> bool:
        was_cut = await cut(opened(), at, late)
        await until(lambda: stage.clean() and stage.connected(0), lambda: (at, stage.state()))
        return was_cut

    for at in range(WAITS_MAX):
        if not asyncio.run(asyncio.wait_for(story(at), 60)):
            assert at
            return


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_closing_a_bus_that_is_cancelled_ends_everything(stage: Stage, late: bool) -> None:
    async def story(at: int) -> bool:
        bus = await headrace.connect_async(stage.url)
        async for _ in bus.subscribe(TOPIC, group="closing"):
            break
        series = bus.queue(TOPIC).jobs(prefetch=5, lease=1)  # a delivery on its way to a closed connection stays leased
        async for _ in series:
            break
        await bus.producer("out", linger=10).send(b"1")
        was_cut = await cut(bus.close(), at, late)
        await until(lambda: stage.clean() and stage.connected(0), lambda: (at, stage.state()))
        return was_cut

    for at in range(WAITS_MAX):
        if not asyncio.run(asyncio.wait_for(story(at), 60)):
            assert at
            return


# The same for threads.


class Interrupts:
    """Raises KeyboardInterrupt where the main thread waits for the n-th time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = -1
        self.late = False
        self.came = False
        self._waits = 0
        for kind, name in ((concurrency.ResultCell, "_sleep"), (concurrency.Monitor, "wait")):
            monkeypatch.setattr(kind, name, self._interruptible(getattr(kind, name)))

    def arm(self, at: int, late: bool) -> None:
        self.at, self.late, self.came, self._waits = at, late, False, 0

    def _interruptible(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(itself: Any, *args: Any) -> Any:
            if self.at < 0 or threading.current_thread() is not threading.main_thread():
                return wait(itself, *args)
            here = self._waits == self.at
            self._waits += 1
            if here and not self.late:
                self.came = True
                raise KeyboardInterrupt
            found = wait(itself, *args)
            if here:
                self.came = True
                raise KeyboardInterrupt
            return found

        return waiting


def of_threads(verb: Callable[[Any], Awaitable[None]], bus: Bus) -> None:
    """A verb of above, done with the face for threads: nothing in it ever waits for a loop."""
    from tests.conformance.faces import awaitable

    work: Any = verb(awaitable(bus))
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for a loop")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_interrupted_leaves_nothing_behind(
    stage: Stage, verb: Callable[[Any], Any], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = Interrupts(monkeypatch)
    for at in range(WAITS_MAX):
        with headrace.connect(stage.url) as bus:
            interrupts.arm(at, late)
            with contextlib.suppress(KeyboardInterrupt):
                of_threads(verb, bus)
            came = interrupts.came
            interrupts.arm(-1, late)
            asyncio.run(until(stage.clean, lambda: (at, stage.state())))  # noqa: B023 it is called at once
            assert bus.info()
            of_threads(verb, bus)
        if not came:
            return
    raise AssertionError(f"it waits more than {WAITS_MAX} times")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_connection_that_is_interrupted_is_none(stage: Stage, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(monkeypatch)
    for at in range(WAITS_MAX):
        interrupts.arm(at, late)
        with contextlib.suppress(KeyboardInterrupt):
            headrace.connect(stage.url).close()
        came = interrupts.came
        interrupts.arm(-1, late)
        asyncio.run(until(lambda: stage.connected(0), stage.state))
        if not came:
            return
